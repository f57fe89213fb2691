"""The plan of auto: the work that fits the time on this machine, as data, before anything runs.

Times are estimates from the machine's matrix products and memory bandwidth. While a plan runs, each step gets its share
of the time that is left, and its size follows from the measurements of the steps before it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from draftlab.config.drafters import DRAFTERS
from draftlab.errors import UserError
from draftlab.exporting import gguf
from draftlab.exporting.artifact import DraftModel, HeadArtifact, open_artifact, refusals
from draftlab.model import checkpoint, eagle, hub, memory
from draftlab.model.shape import Shape
from draftlab.model.size import ApproximateSize
from draftlab.model.tokenizer import different_tokenizers
from draftlab.pruning.trial_model import prunable_shape
from draftlab.reading import FileModel
from draftlab.registry import SERVERS
from draftlab.searching.costs import OFFSET_COST, SEQ_LEN, WRITTEN, Costs, Machine, guessed_draft
from draftlab.searching.prompts import PromptSplit
from draftlab.searching.run import default_depths, default_widths, shapes_to_try
from draftlab.servers.kinds import Artifact

LABELS = {  # kinds of candidates in words, with the searched shape
    "draft": "draft model {}",
    "parallel": "parallel draft {}",
    "trimmed": "draft model {} with a trimmed head",
    "eagle": "EAGLE-3 head {}",
    "prompt-lookup": "prompt lookup",
    "fallback": "prompt lookup followed by draft model {}",
    "fallback-eagle": "prompt lookup followed by the EAGLE-3 head",
}
SERVED = {
    "draft": "model",
    "parallel": "parallel",
    "eagle": "eagle",
    "prompt-lookup": "prompt-lookup",
}  # drafters
CUT = ("draft", "parallel", "trimmed", "fallback")  # candidates that are cut from the target
HEADS = ("eagle", "fallback-eagle")
STEPS = {  # share of the time, commands, and purpose
    "texts": (
        0.03,
        "outputs build",
        "the target's answers to the prompts to choose by, to replay drafts on",
    ),
    "answers": (
        0.22,
        "outputs build",
        "what drafts learn from: the target's answers, or text with its probabilities",
    ),
    "search": (
        0.24,
        "search",
        "a latency law of this machine; shapes are cut, distilled, replayed and measured",
    ),
    "train": (0.22, "distill, replay", "the winner in rounds, until a round gains less than 1 %"),
    "parallel": (0.06, "distill", "a parallel draft, from the winner"),
    "trimmed": (0.04, "distill", "the winner with a head for frequent ids"),
    "eagle": (0.07, "distill", "an EAGLE-3 head"),
    "score": (0.08, "score", "all candidates side by side"),
    "final": (0.04, "score", "the choice on other prompts"),
    "export": (0.01, "export, report", "the choice, its script and card, and a page"),
}
EXPENDABLE = (
    ("trimmed",),
    HEADS,
    ("parallel",),
    ("draft", "fallback"),
)  # left out in turn where time is short
ANSWER_TOKENS = 128
KS, OFFSETS = (2, 3, 5), 5
LEAST_SEQUENCES, LEAST_STEPS, LEAST_PROMPTS, FIRST_STEPS = 128, 20, 8, (30, 20, 10)
DRAFTS = 10  # checkpoints that lie on the disk at most: two of the search, six rounds, a variant, the export
LARGE_VOCAB = 16_384  # a trimmed head pays from this size on


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The target and how it is served.

    Args:
        name: Target, as the user typed it.
        server: None stands for draftlab's own engine.
        program: Program of the server, to verify with; None where it is not installed.
        ready: Drafts and heads that exist, in the order in which they were named.
        trains: Whether drafts are trained.
    """

    name: str
    target: Path
    size: Shape | ApproximateSize
    server: str | None
    prompts: PromptSplit
    streams: list[int]
    temperature: float
    program: Path | None
    ready: "Sequence[ReadyDraft]" = ()
    trains: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyDraft:
    """A draft or head that exists. kind: its kind as a candidate."""

    name: str
    kind: str
    path: Path
    artifact: Artifact


class PlannedStep(FileModel):
    """A step with the least minutes that it needs, and the minutes with its share of the time that is left over."""

    name: str
    command: str
    what: str
    minutes: float
    least_minutes: float

    def line(self) -> str:
        return f"{self.minutes:.1f} minutes: {self.what}"


class Plan(FileModel, extra="ignore"):
    """plan.json.

    Args:
        settings: Settings of the auto that planned it.
        ready: Names of the drafts that exist.
        left_out: Candidates that are not tried, with the reason.
        layers, widths, first_steps: Settings of the search.
        disk: Bytes of all drafts.
        needs: Memory and disk in words.
    """

    version: Literal[2] = 2
    settings: dict[str, Any]
    target: str
    machine: Machine
    prompts: str
    candidates: list[str]
    ready: list[str] = Field(default_factory=list)
    left_out: dict[str, str]
    layers: list[int]
    widths: list[int]
    first_steps: int
    disk: int = 0
    needs: str = ""
    steps: list[PlannedStep]

    @property
    def minutes(self) -> float:
        return sum(step.minutes for step in self.steps)

    def seconds_for(self, name: str, spent: float) -> float:
        """Return the seconds that a step may take after the spent seconds."""
        names = [step.name for step in self.steps]
        later = {step.name: 60 * step.least_minutes for step in self.steps[names.index(name) :]}
        return seconds_of_steps(later, 60 * self.minutes - spent)[name]

    def facts(self) -> dict[str, object]:
        """Return the plan for people, by topic."""
        facts: dict[str, object] = {
            "target": self.target,
            "machine": self.machine.describe(),
            "prompts": self.prompts,
        }
        facts |= {
            "candidates": ", ".join(["no draft", *self.ready, *map(in_words, self.candidates)]),
            "needs": self.needs,
        }
        return facts | {
            f"{count}. {step.name}": step.line() for count, step in enumerate(self.steps, 1)
        }


def served_by(server: str | None) -> list[str]:
    """Return the kinds of candidates that a server runs. Draftlab's own engine, None, runs all."""
    if server is None:
        return list(LABELS)
    return [
        kind for kind, name in SERVED.items() if server in DRAFTERS.get(name, "--for").served_by
    ]


def not_tried(left_out: Mapping[str, str]) -> list[str]:
    """Return a line for each reason for which candidates were left out."""
    labels: dict[str, list[str]] = {}
    for kind, reason in left_out.items():
        labels.setdefault(reason, []).append(in_words(kind))
    return [f"not tried: {', '.join(each)}: {reason}" for reason, each in labels.items()]


def in_words(kind: str, shape: str = "") -> str:
    """Return a kind of candidates in words; a draft that the user named keeps its name."""
    return " ".join(LABELS.get(kind, kind).replace("{}", shape).split())


def streams(numbers: Sequence[int]) -> str:
    """Return numbers of streams in words."""
    return f"{', '.join(map(str, numbers))} concurrent request{'s' * (list(numbers) != [1])}"


def make_plan(request: Request, machine: Machine, minutes: float, settings: dict[str, Any]) -> Plan:
    """Return the work that fits the time on a machine.

    Raises:
        UserError: The target cannot be used, memory is too small, or the minutes are too few for anything.
    """
    size, costs = request.size, Costs(machine=machine, size=request.size)
    if request.server == "llama.cpp":
        gguf.library()
    weights = size.weight_bytes(costs.bytes_per_weight)
    remedy = "--dtype bfloat16, or a larger device"
    memory.check_fits({"weights of the target": weights}, torch.device(machine.device), remedy)
    refused = {draft.name: _refused(draft.artifact, request.server) for draft in request.ready}
    ready = [draft for draft in request.ready if not refused[draft.name]]
    left_out = _unsuitable(request)
    candidates = [kind for kind in served_by(request.server) if kind not in left_out]
    least = _least(costs, request, candidates, len(ready))
    everything = math.ceil(sum(least.values()) / 60)
    for dropped in EXPENDABLE:
        fewest = math.ceil(sum(least.values()) / 60)
        if fewest <= minutes:
            break
        reason = f"too little time; --minutes {everything} tries everything"
        left_out |= dict.fromkeys([kind for kind in dropped if kind in candidates], reason)
        candidates = [kind for kind in candidates if kind not in dropped]
        least = _least(costs, request, candidates, len(ready))
    if sum(least.values()) > 60 * minutes:
        raise UserError(
            f"--minutes {minutes:g} is too few for anything here: no draft and prompt lookup take "
            f"{math.ceil(sum(least.values()) / 60)} or more"
        )
    seconds = seconds_of_steps(least, 60 * minutes)
    layers, widths, first_steps = (
        _grid(request.target, costs, seconds["search"]) if "search" in least else ([], [], 0)
    )
    draft = guessed_draft(size) if "draft" in candidates else None
    # and an optimizer's state
    disk = 0 if draft is None else DRAFTS * draft.weight_bytes() + 12 * draft.params()
    return Plan(
        settings=settings,
        target=f"{hub.checkpoint_name(request.target)}, {size.describe()}",
        machine=machine,
        prompts=request.prompts.about,
        candidates=candidates,
        ready=[draft.name for draft in ready],
        left_out={f"--draft {name}": reason for name, reason in refused.items() if reason}
        | left_out,
        layers=layers,
        widths=widths,
        first_steps=first_steps,
        disk=disk,
        needs=f"about {weights / 1e9:.2g} GB of memory for the target, {disk / 1e6:,.4g} MB of disk for drafts",
        steps=[
            PlannedStep(
                name=name,
                command=STEPS[name][1],
                what=STEPS[name][2],
                minutes=seconds[name] / 60,
                least_minutes=least[name] / 60,
            )
            for name in least
        ],
    )


def seconds_of_steps(least: Mapping[str, float], total: float) -> dict[str, float]:
    """Return the seconds of each step: the least that it needs, and its share of the time that is left over."""
    left, shares = max(0.0, total - sum(least.values())), sum(STEPS[name][0] for name in least)
    return {name: needed + left * STEPS[name][0] / shares for name, needed in least.items()}


def _unsuitable(request: Request) -> dict[str, str]:
    """Return the candidates that this target cannot have, or that are not wanted, with the reason."""
    target, server = request.target, request.server
    if not request.trains:
        trained = [kind for kind in (*CUT, *HEADS) if kind in served_by(server)]
        return dict.fromkeys(
            trained, "nothing is trained where --draft names drafts; --train adds it"
        )
    reasons = dict.fromkeys(CUT, "") | dict.fromkeys(HEADS, "")
    try:
        prunable_shape(str(target))
        reasons |= dict.fromkeys(CUT, _refused(DraftModel(target, target), server))
    except UserError as error:
        reasons |= dict.fromkeys(CUT, f"it cannot be pruned: {error}")
    try:
        ids = max(1, checkpoint.vocab_size(target) // 4)
        head = eagle.head_config(target, None, ids, norm_before_residual=False)
        reasons |= dict.fromkeys(HEADS, _refused(HeadArtifact(target, target, head, {}), server))
    except UserError as error:
        reasons |= dict.fromkeys(HEADS, str(error))
    vocab = checkpoint.vocab_size(target)
    if not reasons["trimmed"] and vocab < LARGE_VOCAB:
        reasons["trimmed"] = f"a vocabulary of {vocab:,} costs a draft little"
    return {
        kind: reason for kind, reason in reasons.items() if reason and kind in served_by(server)
    }


def _refused(artifact: Artifact, server: str | None) -> str:
    """Return why a server cannot run an artifact that is to be made; empty where it can."""
    if server is None:
        return ""
    return "; ".join(finding.text for finding in refusals(artifact, SERVERS.get(server, "--for")))


def ready_drafts(names: Sequence[str], target: Path, weights: bool) -> list[ReadyDraft]:
    """Return drafts and heads by their names. Without weights, of the hub only their configurations are fetched.

    Raises:
        UserError: There is no such draft, it has another vocabulary than the target, or two have the same name.
    """
    drafts: dict[str, ReadyDraft] = {}
    for text in names:
        path = hub.locate(text, weights)
        artifact = open_artifact(path, target)
        if (other := artifact.difference()) is not None:
            raise UserError(different_tokenizers(path, target, other))
        kind = (
            "eagle"
            if artifact.head is not None
            else "parallel"
            if artifact.in_parallel
            else "draft"
        )
        name = hub.checkpoint_name(path)
        if name in drafts:
            raise UserError(f"two drafts are called {name}; rename one")
        drafts[name] = ReadyDraft(name=name, kind=kind, path=path, artifact=artifact)
    return list(drafts.values())


def arms(candidates: int) -> int:
    """Return the number of ways to decode that a score of this many candidates compares."""
    return 1 + candidates * len(KS)


def _least(
    costs: Costs, request: Request, candidates: Sequence[str], ready: int
) -> dict[str, float]:
    """Return the fewest seconds in which each step is worth it, by its name."""
    sequences, prompts = 2 * LEAST_SEQUENCES, request.prompts
    least: dict[str, float] = {}
    if "draft" in candidates or "eagle" in candidates:
        reads = prompts.data is not None
        least["answers"] = (
            costs.read(sequences * SEQ_LEN) if reads else costs.write(sequences, ANSWER_TOKENS, 64)
        )
    if "draft" in candidates:
        shape = guessed_draft(costs.size)
        least["texts"] = costs.write(prompts.choose, WRITTEN, 16)
        least["search"] = costs.law() + 3 * costs.candidate(shape, FIRST_STEPS[-1])
        least["train"] = costs.train(shape, 2 * LEAST_STEPS)
        for kind, times in (("parallel", OFFSET_COST), ("trimmed", 1.0)):
            if kind in candidates:
                least[kind] = times * costs.train(shape, LEAST_STEPS)
    if "eagle" in candidates:
        least["eagle"] = costs.train_head(LEAST_STEPS)
    least["score"] = costs.score(arms(len(candidates) + ready), LEAST_PROMPTS, request.streams)
    least["final"] = costs.score(2, prompts.measure, request.streams, repeats=2)
    least["export"] = 0.0
    return {name: costs.start + least[name] for name in STEPS if name in least}


def _grid(target: Path, costs: Costs, seconds: float) -> tuple[list[int], list[int], int]:
    """Return depths, widths and first steps for the shapes that three quarters of a search's time allow."""
    source = checkpoint.planned_shape(target)
    depths = [n for n in default_depths(source) if n <= max(2, 3 * source.layers // 8)]
    wide = default_widths(source)
    thinned = sorted(
        {depths[0], depths[len(depths) // 3], depths[2 * len(depths) // 3], depths[-1]}
    )
    left = 0.75 * (seconds - costs.law())
    for layers, widths in (
        (depths, wide),
        (depths, wide[1:]),
        (depths, wide[-1:]),
        (thinned, wide[-1:]),
    ):
        shapes = shapes_to_try(source, layers, widths)
        for steps in FIRST_STEPS:
            if sum(costs.candidate(shape, steps) for shape in shapes) <= left:
                return layers, widths, steps
    return thinned, wide[-1:], FIRST_STEPS[-1]
