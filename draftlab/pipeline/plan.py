"""The plan of auto: what fits the time on this machine, as data, before anything runs.

Times are estimates from the machine's matrix products and memory bandwidth. While a plan runs, each step gets its share
of the time that is left, and its size from what the steps before it measured.
"""

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field

from draftlab.commands.distill import prepare as prepare_distill
from draftlab.commands.outputs import prepare_build
from draftlab.config.auto import AutoConfig, Runtime
from draftlab.config.distill import DistillConfig
from draftlab.config.drafters import DRAFTERS
from draftlab.config.outputs import OutputsBuildConfig
from draftlab.errors import UserError
from draftlab.exporting import gguf
from draftlab.exporting.compatibility import unservable
from draftlab.exporting.head_checks import EXPORTED, check_exported
from draftlab.model import checkpoint, eagle, hub, memory
from draftlab.model.shape import Shape, resolve
from draftlab.model.size import ApproximateSize, read_size, training_cost
from draftlab.pipeline.costs import (
    BATCH_SIZE,
    LAW_PASSES,
    LAW_SECONDS,
    OFFSET_COST,
    SEQ_LEN,
    WRITTEN,
    Costs,
    Machine,
    guessed_draft,
)
from draftlab.pipeline.prompts import CHOOSE, PromptFiles, plan_prompts, sizes, write_prompts
from draftlab.pruning.trial_model import prunable_shape
from draftlab.reading import FileModel
from draftlab.searching.shapes import default_depths, default_widths

Kind = Literal["draft", "parallel", "trimmed", "eagle", "prompt-lookup", "fallback", "fallback-eagle", "ngram"]
DRAFTER: dict[Kind, str] = {  # kinds of drafters that servers run
    "draft": "model", "parallel": "parallel", "eagle": "eagle", "prompt-lookup": "prompt-lookup",
}  # fmt: skip
OF_SHAPES: tuple[Kind, ...] = ("draft", "parallel", "trimmed", "fallback")  # cut from the target
OF_HEADS: tuple[Kind, ...] = ("eagle", "fallback-eagle")
SHARES = {  # of the time, by step; what is left out leaves its share to the others
    "texts": 0.03, "answers": 0.22, "search": 0.24, "train": 0.22, "parallel": 0.06, "trimmed": 0.04, "eagle": 0.07,
    "score": 0.08, "final": 0.04, "export": 0.01,
}  # fmt: skip
COMMANDS = {
    "texts": "outputs build", "answers": "outputs build", "search": "search", "train": "distill, replay",
    "parallel": "distill", "trimmed": "distill", "eagle": "eagle", "score": "score", "final": "score",
    "export": "export",
}  # fmt: skip
EXPENDABLE: tuple[tuple[Kind, ...], ...] = (  # in turn
    ("trimmed",), ("eagle", "fallback-eagle"), ("parallel",), ("draft", "fallback"), ("ngram",)
)  # fmt: skip
ANSWER_TOKENS = 128
KS, OFFSETS = (2, 3, 5), 5
LEAST_SEQUENCES, LEAST_STEPS, LEAST_PROMPTS, FIRST_STEPS = 128, 20, 8, (30, 20, 10)
ROUNDS = 6  # of training, at most as they are seen
LARGE_VOCAB = 16_384  # from which a trimmed head pays


class PlannedStep(FileModel):
    """One step. minutes: the least that it needs, and its share of the rest. needs: as its command's --dry-run says."""

    name: str
    command: str
    what: str
    minutes: float
    least_minutes: float
    needs: dict[str, str] = Field(default_factory=dict)

    def line(self) -> str:
        needs = "; ".join(f"{name}: {value}" for name, value in self.needs.items())
        return f"{self.name}, {self.minutes:.1f} minutes: {self.what}{f' ({needs})' if needs else ''}"


class Plan(FileModel):
    """plan.json. settings: of the config that it is for. left_out: candidates that are not tried, and why.

    disk: bytes of its drafts, while the last of them is trained.
    """

    version: Literal[1] = 1
    settings: dict[str, Any]
    target: str
    machine: Machine
    prompts: str
    candidates: list[Kind]
    left_out: dict[Kind, str]
    layers: list[int]  # to search
    widths: list[int]
    first_steps: int
    disk: int = 0
    steps: list[PlannedStep]

    @property
    def minutes(self) -> float:
        return sum(step.minutes for step in self.steps)

    def seconds_for(self, name: str, spent: float) -> float:
        """Return the seconds that a step may take after spent ones."""
        names = [step.name for step in self.steps]
        later = {step.name: 60 * step.least_minutes for step in self.steps[names.index(name) :]}
        return seconds_of_steps(later, 60 * self.minutes - spent)[name]

    def lines(self) -> list[str]:
        """Return the plan for people."""
        out = [f"target: {self.target}", f"machine: {self.machine.describe()}", f"prompts: {self.prompts}"]
        out += [f"candidates: no draft, {', '.join(self.candidates)}"]
        out += not_tried(self.left_out)
        return out + [f"{number}. {step.line()}" for number, step in enumerate(self.steps, 1)]


def served_by(server: Runtime | None) -> tuple[Kind, ...]:
    """Return the candidates that a server runs; None: all, in draftlab's engine."""
    kinds: tuple[Kind, ...] = get_args(Kind)
    if server is None:
        return kinds
    return tuple(k for k in kinds if k in DRAFTER and server in DRAFTERS.get(DRAFTER[k], "--for").served_by)


def not_tried(left_out: Mapping[Kind, str]) -> list[str]:
    """Return a line for each reason for which candidates were left out."""
    kinds: dict[str, list[str]] = {}
    for kind, reason in left_out.items():
        kinds.setdefault(reason, []).append(kind)
    return [f"not tried: {', '.join(each)}: {reason}" for reason, each in kinds.items()]


def streams(numbers: Sequence[int]) -> str:
    """Return numbers of streams in words."""
    return f"{', '.join(map(str, numbers))} stream{'s' * (list(numbers) != [1])}"


def make_plan(config: AutoConfig, machine: Machine) -> Plan:
    """Return what fits the time on a machine.

    Raises:
        UserError: a target or prompts that cannot be used, no gguf package for llama.cpp, too little memory, or too few
            minutes for anything.
    """
    target = hub.locate(config.target, weights=False)
    if config.server == "llama.cpp":
        gguf.library()
    size, (about, rows) = read_size(target), plan_prompts(config, target)
    width = checkpoint.DTYPES[machine.dtype].itemsize
    device = checkpoint.resolve_device(config.device)
    memory.check_fits(
        {"weights of the target": size.weight_bytes(width)}, device, "--dtype bfloat16, or a larger device"
    )
    if isinstance(size, ApproximateSize) and config.streams != [1]:
        raise UserError(f"--streams: transformers runs {size.kind} models here, which decodes one prompt at a time")
    costs = Costs(machine=machine, size=size, bytes_per_weight=width)
    left_out = _unsuitable(config, target, size)
    candidates: list[Kind] = [kind for kind in served_by(config.server) if kind not in left_out]
    least = _least(costs, config, candidates, reads=not rows)
    for dropped in EXPENDABLE:
        minutes = math.ceil(sum(least.values()) / 60)
        if minutes <= config.minutes:
            break
        left_out |= {kind: f"with it the least is {minutes} minutes" for kind in dropped if kind in candidates}
        candidates = [kind for kind in candidates if kind not in dropped]
        least = _least(costs, config, candidates, reads=not rows)
    if sum(least.values()) > 60 * config.minutes:
        raise UserError(
            f"--minutes {config.minutes:g} is too few for anything here: no draft and prompt lookup take "
            f"{math.ceil(sum(least.values()) / 60)} or more"
        )
    seconds = seconds_of_steps(least, 60 * config.minutes)
    grid: tuple[list[int], list[int], int] = ([], [], 0)
    if "search" in least:
        grid = _grid(target, costs, seconds["search"])
    steps = [
        PlannedStep(
            name=name, command=COMMANDS[name], what=_what(name, config), minutes=seconds[name] / 60,
            least_minutes=least[name] / 60, needs=_needs(name, config, size, grid, rows),
        )
        for name in least
    ]  # fmt: skip
    return Plan(
        settings=config.settings(), target=f"{hub.checkpoint_name(target)}, {size.describe()}", machine=machine,
        prompts=about, candidates=candidates, left_out=left_out, layers=grid[0], widths=grid[1], first_steps=grid[2],
        disk=_disk(size, candidates), steps=steps,
    )  # fmt: skip


def _disk(size: Shape | ApproximateSize, candidates: Sequence[Kind]) -> int:
    """Return the bytes of all drafts, and of the state of one training; a search keeps two finalists."""
    if "draft" not in candidates:
        return 0
    draft = guessed_draft(size)
    drafts = 2 + ROUNDS + len({"parallel", "trimmed"} & {*candidates}) + 1  # the export
    return drafts * draft.weight_bytes() + 12 * draft.params()


def seconds_of_steps(least: Mapping[str, float], total: float) -> dict[str, float]:
    """Return the seconds of each step: the least that it needs, and its share of the rest."""
    rest, shares = max(0.0, total - sum(least.values())), sum(SHARES[name] for name in least)
    return {name: needed + rest * SHARES[name] / shares for name, needed in least.items()}


def _unsuitable(config: AutoConfig, target: Path, size: Shape | ApproximateSize) -> dict[Kind, str]:
    """Return the candidates that this target cannot have, with the reason."""
    served, reasons = served_by(config.server), dict[Kind, str]()
    try:
        prunable_shape(str(target))
        reasons |= dict.fromkeys(OF_SHAPES, unservable(target, config.server) if config.server else "")
    except UserError as error:
        reasons |= dict.fromkeys(OF_SHAPES, f"it cannot be pruned: {error}")
    reasons |= dict.fromkeys(OF_HEADS, _no_head(config, target, size))
    if not reasons["trimmed"] and checkpoint.vocab_size(target) < LARGE_VOCAB:
        reasons["trimmed"] = f"a vocabulary of {checkpoint.vocab_size(target):,} costs a draft little"
    return {kind: reason for kind, reason in reasons.items() if reason and kind in served}


def _no_head(config: AutoConfig, target: Path, size: Shape | ApproximateSize) -> str:
    """Return why the target cannot have an EAGLE-3 head; empty: it can."""
    try:
        head = eagle.head_config(target, None, checkpoint.vocab_size(target) // 4, norm_before_residual=False)
    except UserError as error:
        return str(error)
    if isinstance(size, ApproximateSize):
        return f"draftlab's engine does not decode {size.kind} models, and measures heads there only"
    findings = check_exported(head, target, config.server) if config.server in EXPORTED else ()
    return "; ".join(finding.text for finding in findings if finding.level == "error")


def _runs(name: str, candidates: Sequence[Kind]) -> bool:
    """Return whether a step belongs to a plan with these candidates."""
    if name in ("texts", "search", "train"):
        return "draft" in candidates
    if name == "answers":
        return bool({"draft", "eagle", "ngram"} & {*candidates})
    return name in ("score", "final", "export") or name in candidates


def arms(candidates: Sequence[Kind]) -> int:
    """Return the ways to decode that a score compares."""
    return 1 + len(candidates) * len(KS)


def _least(costs: Costs, config: AutoConfig, candidates: Sequence[Kind], *, reads: bool) -> dict[str, float]:
    """Return the fewest seconds in which each step is worth it, by its name. reads: drafts learn from config.text."""
    sequences = 2 * LEAST_SEQUENCES
    least = {
        "answers": costs.read(sequences * SEQ_LEN) if reads else costs.write(sequences, ANSWER_TOKENS, 64),
        "score": costs.score(arms(candidates), LEAST_PROMPTS, config.streams),
        "final": costs.score(2, sizes(config.streams)[1], config.streams, repeats=2), "export": 0.0,
    }  # fmt: skip
    if "eagle" in candidates:
        least["eagle"] = costs.train_head(LEAST_STEPS)
    if "draft" in candidates:
        shape = guessed_draft(costs.size)
        law = costs.machine.slowdown * LAW_SECONDS + LAW_PASSES * costs.write(1, 1, 1)
        least |= {
            "texts": costs.write(CHOOSE, WRITTEN, 16), "train": costs.train(shape, 2 * LEAST_STEPS),
            "search": law + 3 * costs.candidate(shape, FIRST_STEPS[-1]),
            "parallel": OFFSET_COST * costs.train(shape, LEAST_STEPS), "trimmed": costs.train(shape, LEAST_STEPS),
        }  # fmt: skip
    return {name: costs.start + least[name] for name in SHARES if _runs(name, candidates)}


def _grid(target: Path, costs: Costs, seconds: float) -> tuple[list[int], list[int], int]:
    """Return depths, widths and first steps of as many shapes as three quarters of a search's time allow."""
    source = checkpoint.planned_shape(target)
    depths = [n for n in default_depths(source) if n <= max(2, 3 * source.layers // 8)]
    wide = default_widths(source)
    thinned = sorted({depths[0], depths[len(depths) // 3], depths[2 * len(depths) // 3], depths[-1]})
    left = 0.75 * (seconds - costs.machine.slowdown * LAW_SECONDS - LAW_PASSES * costs.write(1, 1, 1))
    for layers, widths in ((depths, wide), (depths, wide[1:]), (depths, wide[-1:]), (thinned, wide[-1:])):
        shapes = [resolve(source, layers=n, hidden=width) for n in layers for width in widths]
        for steps in FIRST_STEPS:
            if sum(costs.candidate(shape, steps) for shape in shapes) <= left:
                return layers, widths, steps
    return thinned, wide[-1:], FIRST_STEPS[-1]


def _what(name: str, config: AutoConfig) -> str:
    """Return a step in words."""
    choose, measure = sizes(config.streams)
    server = config.server or "draftlab's engine"
    return {
        "texts": f"the target's answers to {choose} prompts, to replay drafts on",
        "answers": "what drafts learn from: the target's answers, or text with its probabilities",
        "search": "a latency law of this machine; shapes are cut, distilled, replayed and measured",
        "train": "the winner in rounds, until more training no longer pays",
        "parallel": f"a parallel draft of {OFFSETS} tokens, from the winner",
        "trimmed": "the winner with a head for frequent ids",
        "eagle": "an EAGLE-3 head",
        "score": f"all candidates side by side, for {server} at {streams(config.streams)}",
        "final": f"the choice on {measure} other prompts",
        "export": f"the choice for {server}, its script and card, and a page",
    }[name]


def _needs(
    name: str, config: AutoConfig, size: Shape | ApproximateSize, grid: tuple[list[int], list[int], int],
    rows: list[dict[str, Any]],
) -> dict[str, str]:  # fmt: skip
    """Return what the step's own command says that it needs; where its inputs are not there yet, by its formula."""
    if name == "answers":
        with tempfile.TemporaryDirectory() as folder:
            files = write_prompts(config, hub.locate(config.target, weights=False), Path(folder)) if rows else None
            settings = answers_settings(config, files, LEAST_SEQUENCES)
            facts = prepare_build(OutputsBuildConfig.build(settings), False).facts()
            return {"disk": f"{facts['disk']} for {LEAST_SEQUENCES} answers, the least"}
    if name == "eagle":
        asked = DistillConfig.build(
            {"student": "eagle", "target": config.target, "data": "stdlib", "steps": LEAST_STEPS}
        )
        facts = prepare_distill(asked, False).facts()
        return {key: str(facts[key]) for key in ("memory", "disk")}
    if name in ("train", "parallel", "trimmed"):
        cost = training_cost(guessed_draft(size), None, tokens=LEAST_STEPS * BATCH_SIZE * SEQ_LEN, seq_len=SEQ_LEN)
        return {key: cost[key] for key in ("memory", "disk")}
    if name == "export":
        return {"disk": f"{guessed_draft(size).weight_bytes() / 1e6:,.4g} MB for a draft"} if grid[0] else {}
    if name == "search":
        return {"shapes": f"{len(grid[0]) * len(grid[1])}: layers {grid[0]}, widths {grid[1]}"}
    return (
        {"memory": f"about {size.weight_bytes(4) / 1e9:.2g} GB for the target"}
        if name in ("score", "final", "texts")
        else {}
    )


def answers_settings(config: AutoConfig, files: PromptFiles | None, count: int) -> dict[str, Any]:
    """Return the settings of outputs build for what drafts learn from.

    files None: config.text, which the target reads ten times as fast as it writes: training wants much of it.
    """
    common = {"target": config.target, "seed": config.seed}
    if files is None or files.train is None:
        return common | {"data": config.text, "num_sequences": count, "seq_len": SEQ_LEN}
    common["temperature"] = max(0.5, config.temperature)
    return common | {"prompt_file": files.train, "num_prompts": count, "max_new_tokens": ANSWER_TOKENS}
