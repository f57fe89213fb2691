"""The command search, which looks for the fastest draft of a target."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftlab.commands.base import Job, Outcome, command, fill
from draftlab.config import shared
from draftlab.config.base import (
    DraftedTokens,
    Numbers,
    Only,
    OutputConfig,
    advanced_option,
    numbers,
    option,
)
from draftlab.errors import UserError, about
from draftlab.model import hub
from draftlab.output import Output
from draftlab.quantities import format_duration, format_number
from draftlab.shell import typed

if TYPE_CHECKING:
    from draftlab.intervals import Interval
    from draftlab.results.tables import TerminalTable
    from draftlab.searching.schedule import Search

# panels of --help
CANDIDATES = "Candidates"
TEXT = "Text of users"


class SearchConfig(OutputConfig, shared.CheckpointSettings):
    """The settings of the command `search`: the candidates, the time to spend, and the text to train and measure on."""

    minutes: float = option(15.0, "Time to spend, approximately.", gt=0)
    layers: Numbers | None = option(
        None,
        "Numbers of layers to try, as 1,2,4. Default: from 1 to half of the source's layers.",
        typed=str,
        panel=CANDIDATES,
    )
    widths: Numbers | None = option(
        None,
        "Hidden sizes to try. Default: half, three quarters and all of the source's hidden size.",
        typed=str,
        panel=CANDIDATES,
    )
    vocab: shared.Vocab = shared.draft_vocab("--outputs or --data", panel=CANDIDATES)
    k: DraftedTokens = numbers("1-6", "Numbers of drafted tokens per step to try, as 1-6 or 2,4,8.")
    parallel: bool = option(
        False,
        "Search for parallel drafts, which draft several tokens in one pass: as many as the largest --k.",
    )
    target: str = shared.target()
    source: str = shared.source()
    data: str = shared.data()
    outputs: Path | None = option(
        None,
        "Stored target outputs on which drafts are calibrated, trimmed and distilled, instead of --data.",
        panel=TEXT,
    )
    prompt_file: Path | None = option(
        None,
        "JSON-lines file of prompts on which drafts are replayed and measured, instead of --data.",
        panel=TEXT,
    )
    first_steps: int = advanced_option(
        30,
        "Number of distillation steps of every candidate in the first round. Later rounds have fewer candidates and "
        "more steps.",
        ge=1,
    )
    dtype: shared.WeightsDtype = shared.dtype(advanced=True)
    device: str = shared.device()
    threads: int | None = shared.threads()

    only = (
        Only(
            ("data",),
            lambda c: not (c.outputs and c.prompt_file),
            "leave it out, because --outputs and --prompt-file replace it",
        ),
        Only(
            ("parallel",),
            lambda c: max(c.k) > 1,
            "a parallel draft drafts several tokens in one pass; use a --k above 1",
        ),
    )

    @property
    def text_source(self) -> str | None:
        return None if self.outputs is not None and self.prompt_file is not None else self.data


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Searched(Outcome):
    """The outcome of search. draft: Checkpoint of the fastest candidate."""

    search: "Search"
    draft: Path

    @property
    def interval(self) -> "Interval":
        """Return the measured speed-up of the fastest candidate, with its 95 % interval over prompts."""
        return self.search.winner.gain

    @property
    def speedup(self) -> float:
        return self.interval.value


def prepare_search(config: SearchConfig, weights: bool) -> "Job[Search]":
    """Resolve and check the settings of the command `search`, and return the job.

    Raises:
        UserError: A checkpoint, the shapes or the text cannot be used.
    """
    from draftlab.commands.steps import step_of
    from draftlab.data.prompts import file_prompts
    from draftlab.latency.profile import check_shape
    from draftlab.model import checkpoint, devices
    from draftlab.model.hf_files import check_trimmable
    from draftlab.model.modes import resolve
    from draftlab.model.size import read_size
    from draftlab.model.tokenizer import common_vocabulary
    from draftlab.pruning.source import prunable_shape
    from draftlab.searching import run as library
    from draftlab.searching.schedule import NoCheapShape, StepRunner, smaller_shapes
    from draftlab.target_outputs.store import finished_manifest

    with about("--target"):
        target = hub.locate_model(config.target, weights)
    with about("--source"):
        source = hub.locate_model(config.source, weights)
        _, shape = prunable_shape(config.source)
        check_shape(config.source, shape)
        common_vocabulary(source, target)
    if config.vocab is not None:
        check_trimmable(source, config.vocab)
        shape = shape.model_copy(update={"draft_vocab": config.vocab})
    tried = library.shapes_to_try(shape, config.layers, config.widths)
    smaller = smaller_shapes(shape, tried)
    if len(smaller) < 2:
        raise NoCheapShape(
            "--layers, --widths: a search compares at least two shapes smaller than the source, but these numbers "
            f"give {len(smaller)}; add smaller numbers"
        )
    text: dict[str, Any] = {"data": config.data}
    prompts = text | {"prompt_tokens": library.PROMPT_TOKENS}
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
            tokenizer = checkpoint.load_tokenizer(target)
            requests = len(file_prompts(config.prompt_file, tokenizer, chat="auto").rows)
        prompts = {"prompt_file": config.prompt_file}
    device = devices.resolve_device(config.device)
    mode, choice = resolve("auto", config.dtype, device, target, [target, source], threads=config.threads)
    wanted = fill(
        library.Wanted,
        config,
        target=target,
        source=source,
        source_shape=shape,
        ks=config.k,
        offsets=max(config.k) if config.parallel else 1,
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
    facts = {
        "target": read_size(target).describe(),
        "source": shape.describe(),
        "try": ", ".join(f"{each.layers} x {each.hidden}" for each in tried),
        "minutes": config.minutes,
    }

    def run(output: Output) -> "Search":
        runner = StepRunner(folder=output.state, make=partial(step_of, shared=running, where="search"))
        try:
            return library.search(wanted, runner, output)
        except NoCheapShape as error:
            raise NoCheapShape(f"--layers, --widths: {error}; try smaller numbers") from None

    return Job(run, f"search-{hub.checkpoint_name(Path(config.source.partition('@')[0]))}", lambda: facts)


@command(SearchConfig, prepare=prepare_search, dry_run=True, example="search --minutes 60 --layers 1,2,4")
def search(result: "Search", output: Output) -> Searched:
    """Find the draft shape and K with which the target is fastest on this machine; a killed search resumes."""
    draft = output.out / "draft"
    return Searched(
        path=output.out,
        show=[_rung_table(result), *result.explain(), str(draft)],
        data={"path": str(output.out), **result.model_dump(mode="json")},
        search=result,
        draft=draft,
        next=typed("draftlab", "export", draft, *output.config.repeated("target"), "--to", "vllm")
        if result.pays
        else None,
    )


def _rung_table(search: "Search") -> "TerminalTable":
    """Return a table with one row per candidate, with its results on the last rung that it reached."""
    from draftlab.model.shape import format_count
    from draftlab.results.ranking import NO_DRAFT
    from draftlab.results.score import RATES
    from draftlab.results.tables import TerminalTable

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
