"""The command search, which looks for the fastest draft of a target."""

from pathlib import Path
from typing import Any

from draftlab.commands.base import Outcome
from draftlab.commands.settings.search import SearchConfig
from draftlab.commands.steps import CommandStep, step_of
from draftlab.data.prompts import file_prompts
from draftlab.errors import UserError, about
from draftlab.latency.profile import check_shape
from draftlab.model import devices, hub
from draftlab.model.checkpoint import Checkpoint
from draftlab.model.modes import resolve
from draftlab.model.shape import format_count
from draftlab.pruning.source import prunable_shape
from draftlab.quantities import format_duration, format_number
from draftlab.results.ranking import NO_DRAFT
from draftlab.results.score import RATES
from draftlab.results.tables import TerminalTable
from draftlab.searching.run import PROMPT_TOKENS, Searching, Wanted, shapes_to_try
from draftlab.searching.schedule import NoCheapShape, Search, smaller_shapes
from draftlab.shell import typed
from draftlab.target_outputs.store import finished_manifest


def prepare(config: SearchConfig, weights: bool) -> Searching:
    """Resolve and check the settings of the command `search`, and return the job.

    Raises:
        UserError: A checkpoint, the shapes or the text cannot be used.
    """
    with about("--target"):
        target = Checkpoint(hub.locate_model(config.target, weights))
    with about("--source"):
        source = Checkpoint(hub.locate_model(config.source, weights))
        _, shape = prunable_shape(config.source)
        check_shape(config.source, shape)
        source.common_vocabulary(target)
    if config.vocab is not None:
        source.check_trimmable(config.vocab)
        shape = shape.model_copy(update={"draft_vocab": config.vocab})
    tried = shapes_to_try(shape, config.layers, config.widths)
    smaller = smaller_shapes(shape, tried)
    if len(smaller) < 2:
        raise NoCheapShape(
            "--layers, --widths: a search compares at least two shapes smaller than the source, but these numbers "
            f"give {len(smaller)}; add smaller numbers"
        )
    text: dict[str, Any] = {"data": config.data}
    prompts = text | {"prompt_tokens": PROMPT_TOKENS}
    if config.outputs is not None:
        with about("--outputs"):
            if finished_manifest(config.outputs).top_logprobs == 0:
                raise UserError(
                    f"{config.outputs} has no probabilities to distil from; build it with draftlab outputs build "
                    "--use distill"
                )
        text = {"outputs": config.outputs}
    requests = None
    if config.prompt_file is not None:
        with about("--prompt-file"):
            requests = len(file_prompts(config.prompt_file, target.tokenizer, chat="auto").rows)
        prompts = {"prompt_file": config.prompt_file}
    device = devices.resolve_device(config.device)
    mode, choice = resolve(
        "auto", config.dtype, device, target.directory, [target.directory, source.directory], threads=config.threads
    )
    wanted = Wanted(
        target=target.directory,
        source=source.directory,
        source_shape=shape,
        minutes=config.minutes,
        ks=config.k,
        offsets=max(config.k) if config.parallel else 1,
        first_steps=config.first_steps,
        tried=tried,
        text=text,
        prompts=prompts,
        requests=requests,
    )
    running = {
        "device": config.device,
        "dtype": devices.dtype_name(choice.dtype),
        "mode": mode,
        "threads": config.threads,
        "trust_remote_code": config.trust_remote_code or None,
    }

    def make(command: str, settings: dict[str, Any]) -> CommandStep:
        return step_of(command, settings, running, "search")

    name = f"search-{hub.checkpoint_name(Path(config.source.partition('@')[0]))}"
    return Searching(name=name, wanted=wanted, make=make)


def show(result: Search, config: SearchConfig, out: Path) -> Outcome:
    draft = out / "draft"
    return Outcome(
        path=out,
        show=[_rung_table(result), *result.explain(), str(draft)],
        data={"path": str(out), **result.model_dump(mode="json")},
        next=typed("draftlab", "export", draft, *config.repeated("target"), "--to", "vllm") if result.pays else None,
    )


def _rung_table(search: Search) -> TerminalTable:
    """Return a table with one row per candidate, with its results on the last rung that it reached."""
    gains = {each.name: each.gain.as_speedup() for each in search.measured}
    rows: dict[str, list[str]] = {}
    for rung in reversed(search.rungs):
        for trial in rung.trials:
            cells = [
                trial.name,
                format_count(search.shapes[trial.name].used_params()),
                format_number(trial.draft_ms),
                str(rung.steps),
                str(trial.k),
                f"{trial.length:.2f}",
                f"{trial.speedup:.2f}x",
                gains.get(trial.name, ""),
            ]
            rows.setdefault(trial.name, cells)
    heads = [
        "shape",
        "para-\nmeters",
        "ms per\npass",
        "steps",
        "K",
        "tokens\nper pass",
        "predicted\nTPOT",
        "measured\nrequests",
    ]
    plain = search.winner.tokens_per_second / search.winner.gain.value
    speed = f"1.00x, {format_number(plain, 4)} {RATES[search.winner.seconds]}"
    last = [NO_DRAFT, "", "", "", "", "1.00", "1.00x", speed]
    best = list(rows).index(search.winner.name) if search.pays else len(rows)
    title = f"{Path(search.target).name}: candidates cut from {Path(search.source).name}; the fastest is marked"
    caption = (
        f"{format_duration(search.spent_seconds)}. Predicted: speed-up of decoding without prefill, at the best K, "
        "from a replay and the latency law, after the number of training steps in the table. Measured: speed-up of "
        "whole requests, with a 95% interval over prompts."
    )
    every = [*rows.values(), last]
    return TerminalTable(heads=heads, rows=every, best=best, title=title, caption=caption)
