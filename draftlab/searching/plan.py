"""The plan of auto, made before any step runs: the work that fits into the user's time on this machine.

Times are estimated from the speed of matrix products and the memory bandwidth of the machine. Each step has a minimum
of work. The time that remains is the spare time, of which each step gets a fixed fraction. While the plan runs, the
measured times of earlier steps decide how much work later steps do.
"""

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from draftlab.console import note_if_slow
from draftlab.dates import run_date
from draftlab.drafters.base import DRAFTERS, DrafterSpec
from draftlab.engine.timing import bandwidth_gbs, matmul_tflops
from draftlab.errors import UserError
from draftlab.exporting import gguf
from draftlab.exporting.artifact import DraftModel, HeadArtifact, open_artifact, refusals
from draftlab.heads.eagle3 import layout
from draftlab.model import checkpoint, devices, hub
from draftlab.model.checkpoint import Checkpoint
from draftlab.model.shape import Shape, resolve
from draftlab.model.size import ApproximateSize, read_size
from draftlab.model.tokenizer import different_tokenizers
from draftlab.pruning.source import prunable_shape
from draftlab.quantities import format_bytes, format_number
from draftlab.reading import FileModel
from draftlab.registry import SERVERS
from draftlab.searching.prompts import CHOOSE, LEAST_TRAINED, PromptSplit
from draftlab.searching.run import default_depths, default_widths, shapes_to_try
from draftlab.servers.kinds import Artifact
from draftlab.training.optimizers import training_dtype

WRITTEN = 96  # tokens of each answer on which drafts are replayed
SEQ_LEN = 256  # tokens of each training sequence
BATCH_SIZE = 8  # training sequences per step
START_SECONDS = 2.0  # seconds of a command until its models are loaded
CANDIDATE_SECONDS = 2.0  # fixed seconds for each shape in a search
# time of training over the time of its matrix products; attention, optimizer and Python take the difference
TRAINING = {"float32": 1.5, "bfloat16": 3.0}
WRITING = 3.0  # time of generation over the time of its matrix products
# a latency law takes LAW_SECONDS, and the time of LAW_PASSES passes of the target
LAW_SECONDS = 8.0
LAW_PASSES = 600
LAYER_SECONDS = 3e-5  # fixed seconds for each layer in a pass
OFFSET_COST = 2.8  # number of tokens that a parallel draft reads in training for each token of text
MAX_TOKENS = 64  # length of each scored answer in tokens
TTT_STEPS = 4  # steps of training-time test of an EAGLE-3 head
HEAD_SHARE = 1.5  # size of an EAGLE-3 head, counted in layers of the target


class Machine(FileModel, extra="ignore"):
    """The measured speed of the machine, and its free memory and disk in bytes.

    slowdown: Wall time over CPU time of the measurement. It is above 1 while other programs use the CPU.
    """

    device: str
    cores: int
    dtype: str
    tflops: float
    training_dtype: str
    training_tflops: float
    gigabytes_per_second: float
    slowdown: float = Field(ge=1)
    free_memory: int
    free_disk: int

    def describe(self) -> str:
        return (
            f"{self.device}, {self.cores} core{'s' * (self.cores > 1)}, {format_number(self.tflops)} TFLOP/s and "
            f"{format_number(self.gigabytes_per_second)} GB/s in {self.dtype}, "
            f"{format_number(self.training_tflops)} TFLOP/s for training in {self.training_dtype}; "
            f"{format_bytes(self.free_memory)} of memory and "
            f"{format_bytes(self.free_disk)} of disk free"
            + (f"; other programs now make the machine {self.slowdown:.1f} times slower" if self.slowdown > 1.5 else "")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCosts:
    """Estimates of how many seconds each kind of work takes, for a target on a machine. size: Size of the target."""

    machine: Machine
    size: Shape | ApproximateSize

    @property
    def bytes_per_weight(self) -> int:
        return devices.DTYPES[self.machine.dtype].itemsize

    @property
    def start(self) -> float:
        """Return the seconds that a command takes to start."""
        return self.machine.slowdown * START_SECONDS

    def write(self, sequences: int, tokens: int, batch: int) -> float:
        """Return the seconds in which the target generates texts in batches. tokens: Tokens of each text."""
        passes = math.ceil(sequences / batch) * tokens
        computed = WRITING * batch * self._token_flops / (1e12 * self.machine.tflops)
        return passes * (max(self._reading(self.size), computed) + self._layers(self.size))

    def pass_seconds(self, size: Shape | ApproximateSize) -> float:
        """Return the seconds of a pass over one token, for a model of this size."""
        return self._reading(size) + self._layers(size)

    def cheapest(self, kinds: Sequence[str]) -> float:
        """Return the seconds of a pass over one token, for the cheapest draft of these kinds.

        kinds: Kinds of candidates (keys of LABELS) that can be trained.
        """
        head = HEAD_SHARE / self.size.layers * self.pass_seconds(self.size)
        draft = self.pass_seconds(guessed_draft(self.size)) if {*kinds} & {*CUT} else head
        return min(draft, head) if {*kinds} & {*HEADS} else draft

    def read(self, tokens: int) -> float:
        """Return the seconds that the target needs to read this many tokens and to store its top log-probabilities."""
        return WRITING * tokens * self._token_flops / (1e12 * self.machine.training_tflops)

    def train(self, draft: Shape, steps: int) -> float:
        return self._train(3 * draft.flops_per_token(SEQ_LEN // 2), steps)

    def train_head(self, steps: int) -> float:
        """Return the seconds to train an EAGLE-3 head for this number of steps. The target's passes are included."""
        layer = HEAD_SHARE * self.size.params() / self.size.layers
        return self._train(self._token_flops + 6 * layer * TTT_STEPS, steps)

    def candidate(self, draft: Shape, first_steps: int) -> float:
        """Return the seconds to cut a draft, train it for `first_steps` steps, and replay it twice."""
        tokens = 8192 * draft.flops_per_token(0) + CHOOSE * WRITTEN * draft.flops_per_token(64)
        seconds = self.machine.slowdown * CANDIDATE_SECONDS + self.train(draft, first_steps)
        return seconds + 2 * tokens / (1e12 * self.machine.tflops)

    def law(self) -> float:
        """Return the seconds to measure a latency law on this machine."""
        return self.machine.slowdown * LAW_SECONDS + LAW_PASSES * self.write(1, 1, 1)

    def score(self, drafts: int, prompts: int, streams: Sequence[int]) -> float:
        """Return the seconds of draftlab score. streams: Numbers of concurrent requests."""
        answer = self.write(1, MAX_TOKENS, 1)
        return self.start + len(streams) * (answers(drafts, prompts) * answer)

    def prompts_in(self, seconds: float, drafts: int, answer: float) -> int:
        """Return how many prompts draftlab score can decode in this time. answer: Seconds of an answer."""
        each = answers(drafts, 1) - answers(drafts, 0)
        return int((seconds / answer - answers(drafts, 0)) / each)

    def _reading(self, size: Shape | ApproximateSize) -> float:
        read = size.weight_bytes(self.bytes_per_weight)
        return read / (1e9 * self.machine.gigabytes_per_second)

    def _layers(self, size: Shape | ApproximateSize) -> float:
        return self.machine.slowdown * LAYER_SECONDS * size.layers

    @property
    def _token_flops(self) -> float:
        return self.size.flops_per_token(SEQ_LEN // 2)

    def _train(self, flops_per_token: float, steps: int) -> float:
        flops = flops_per_token * steps * BATCH_SIZE * SEQ_LEN
        return TRAINING[self.machine.training_dtype] * flops / (1e12 * self.machine.training_tflops)


def measure_machine(size: Shape | ApproximateSize, device: torch.device, dtype: torch.dtype, folder: Path) -> Machine:
    """Measure the speed of matrix products, the memory bandwidth, and the free memory and disk of this machine.

    Args:
        size: Size of the target. The bandwidth is measured by reading as many weights, up to a limit.
        folder: Folder for the drafts, whose free disk space is measured.
    """
    trained = training_dtype("auto")
    disk = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    started = time.perf_counter()
    used = time.process_time()
    with note_if_slow("measuring matrix products and memory bandwidth of this machine"):
        # where torch is slow in the dtype, the compiled engine runs it, and is as fast in it as in float32
        timed = dtype if devices.is_fast(dtype, device) else torch.float32
        tflops = matmul_tflops(timed, device)
        bandwidth = bandwidth_gbs(size.params(), timed, device)
        training_tflops = tflops if trained == timed else matmul_tflops(trained, device)
    wall = time.perf_counter() - started
    busy = time.process_time() - used
    return Machine(
        device=str(device),
        cores=torch.get_num_threads(),
        dtype=devices.dtype_name(dtype),
        tflops=tflops,
        training_dtype=devices.dtype_name(trained),
        training_tflops=training_tflops,
        gigabytes_per_second=bandwidth,
        slowdown=max(1.0, wall / busy) if device.type == "cpu" else 1.0,
        free_memory=devices.free_bytes(device),
        free_disk=shutil.disk_usage(disk).free,
    )


def guessed_draft(size: Shape | ApproximateSize) -> Shape:
    """Return the shape that a plan assumes for the draft before the search: a sixth of the target's layers.

    size: Shape of the target.
    """
    assert isinstance(size, Shape)
    return resolve(size, layers=max(1, size.layers // 6))


LABELS = {  # kind of candidate -> label; {} stands for the shape that the search found
    "draft": "draft model {}",
    "parallel": "parallel draft {}",
    "trimmed": "draft model {} with a trimmed head",
    "eagle": "EAGLE-3 head {}",
    "prompt-lookup": "prompt lookup",
    "fallback": "prompt lookup followed by draft model {}",
    "fallback-eagle": "prompt lookup followed by the EAGLE-3 head",
}
# kind of candidate -> name of its drafter, for kinds that servers run; for prompt-lookup, see ServerKind.lookup
SERVED = {"draft": "model", "parallel": "parallel", "eagle": "eagle"}
LOOKUP = "prompt-lookup"
OWN_LOOKUP = "latest-lookup"  # more of its tokens are accepted than of those that servers' lookups draft
# kinds of candidates that are cut from the target
CUT = ("draft", "parallel", "trimmed", "fallback")
HEADS = ("eagle", "fallback-eagle")
STEPS = {  # name of a step -> its fraction of the spare time, and what it does
    "ready": (
        0.05,
        "rank your drafts by replay, and time those that may be the fastest; new drafts are trained only if they may "
        "become significantly faster",
    ),
    "texts": (0.03, "store the target's answers to some prompts, on which drafts are replayed"),
    "answers": (
        0.22,
        "store the text to train on: the target's answers, or data with the target's probabilities",
    ),
    "search": (0.24, "measure a latency law; cut, distil, replay and measure draft shapes"),
    "train": (0.22, "train the best shape in rounds, until a round gains less than 1 %"),
    "parallel": (0.06, "train a parallel draft from the best draft"),
    "trimmed": (0.04, "train the best draft with an lm_head for frequent ids only"),
    "eagle": (0.07, "train an EAGLE-3 head"),
    "score": (0.08, "rank all candidates by replay, and time those that may be the fastest"),
    "final": (0.04, "measure the fastest candidate on other prompts"),
    "export": (
        0.01,
        "export the chosen draft with a start script and a model card, and write a page",
    ),
}
# kinds of candidates that are left out, in this order, until the plan fits the time
EXPENDABLE = (("trimmed",), HEADS, ("parallel",), ("draft", "fallback"))
ANSWER_TOKENS = 128
KS = (1, 2, 3, 4, 5, 6)
OFFSETS = 5
# drafts that score is assumed to time, because they may be the fastest; the others are predicted
FINALISTS = 3
# answers of the target in whose time score times single passes, and replays a draft
PASS_ANSWERS = 6.0
REPLAY_ANSWERS = 1.0
LEAST_SEQUENCES = 128  # fewest sequences to train on
LEAST_STEPS = 20  # fewest training steps of a draft or head
LEAST_PROMPTS = 8  # fewest prompts of a score
FIRST_STEPS = (
    30,
    20,
    10,
)  # training steps of the first rung of a search, the first number that fits the time
EXPORT_MINUTES = 5.0  # most minutes of the export
MOST_PROMPTS = 24  # timing looks at its results after 8, 12 and 24 conversations
DRAFTS = 10  # largest number of checkpoints on disk: two of the search, six rounds, a variant, the export
LARGE_VOCAB = 16_384  # smallest vocabulary with which a trimmed lm_head saves time


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The user's request to auto: the target, the prompts, and how the target is served.

    Args:
        name: Name of the target as the user typed it.
        target: Directory of the target.
        server: Name of the server, or None for draftlab's own engine.
        streams: Numbers of concurrent requests at which drafts are measured.
        program: Program of the server, with which the export is verified. None if it is not installed.
        ready: The user's drafts and heads, in the order of --draft.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyDraft:
    """A draft or head that the user named by --draft. kind: Kind of candidate, a key of LABELS."""

    name: str
    kind: str
    path: Path
    artifact: Artifact

    def pass_seconds(self, costs: MachineCosts) -> float:
        """Return the estimated seconds of a pass over one token. All heads count as the cheapest head."""
        return costs.cheapest(HEADS) if self.kind == "eagle" else costs.pass_seconds(read_size(self.path))


class PlannedStep(FileModel, extra="ignore"):
    """A step of a plan.

    Args:
        what: Description of the step for the user.
        minutes: Planned minutes: least_minutes plus the step's fraction of the spare time.
        least_minutes: Minutes of the smallest amount of work that is useful.
        most_minutes: Minutes of the largest amount of work that is useful. None: there is no limit.
    """

    name: str
    what: str
    minutes: float
    least_minutes: float
    most_minutes: float | None = None


class Plan(FileModel, extra="ignore"):
    """The content of plan.json.

    Args:
        settings: Settings of the auto command that made the plan.
        inputs: Fingerprints of what the run reads, by path or name.
        date: Start of the run, which chat templates may print.
        prompts: Source of the prompts, as text for the user.
        candidates: Kinds of candidates to make, as in LABELS.
        ready: Names of the user's drafts that are compared.
        left_out: Candidates that are not tried, each with the reason.
        layers, widths, first_steps: Settings of the search.
        disk: Size of all drafts in bytes.
        needs: The memory and disk that the run needs, as text.
    """

    version: Literal[2] = 2
    settings: dict[str, Any]
    inputs: dict[str, str] = Field(default_factory=dict)
    date: str = Field(default_factory=run_date)
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
        """Return the seconds that a step may take. name: Name of the step. spent: Seconds that earlier steps took."""
        names = [step.name for step in self.steps]
        steps = self.steps[names.index(name) :]
        later = {step.name: 60 * step.least_minutes for step in steps}
        most = {s.name: 60 * s.most_minutes for s in steps if s.most_minutes is not None}
        return seconds_of_steps(later, 60 * self.minutes - spent, most)[name]

    def facts(self) -> dict[str, object]:
        """Return the plan as text for the user, by topic."""
        facts: dict[str, object] = {
            "target": self.target,
            "machine": self.machine.describe(),
            "prompts": self.prompts,
            "candidates": ", ".join(["no draft", *self.ready, *map(in_words, self.candidates)]),
            "needs": self.needs,
        }
        for count, step in enumerate(self.steps, 1):
            facts[f"{count}. {step.name}"] = f"{step.minutes:.1f} minutes: {step.what}"
        return facts


def served_by(server: str | None) -> list[str]:
    """Return the kinds of candidates that a server can run. None stands for draftlab's engine, which runs all kinds."""
    if server is None:
        return list(LABELS)
    kinds = [kind for kind, name in SERVED.items() if server in DRAFTERS.get(name, "--for").served_by]
    return [*kinds, LOOKUP] if lookup_of(server, "cpu") else kinds


def lookup_of(server: str | None, device: str) -> DrafterSpec | None:
    """Return the lookup of a server on a device, or None if it has none. A server None stands for draftlab's engine.

    device: Type of the device, such as "cuda".
    """
    name = OWN_LOOKUP if server is None else SERVERS.get(server, "--for").lookup(device)
    return DRAFTERS.get(name, "--for").of() if name else None


def lookup_by_device(server: str | None, device: str) -> list[str]:
    """Return which lookup of a server is measured, as one sentence, or [] if it does not depend on the device.

    device: Type of the device, such as "cuda".
    """
    if server is None:
        return []
    kind = SERVERS.get(server, "--for")
    name = kind.lookup(device)
    places = {"cpu": "CPUs", "cuda": "GPUs"}
    if len({kind.lookup(each) for each in places}) == 1:
        return []
    here = places.get(device, places["cpu"])
    return [f"prompt lookup is that of {server} on {here} ({name}), because --device is {device}"]


def not_tried(left_out: Mapping[str, str]) -> list[str]:
    """Return a line for each reason, with the candidates that are not tried for this reason.

    left_out: Reason for each candidate that is not tried.
    """
    labels: dict[str, list[str]] = {}
    for kind, reason in left_out.items():
        labels.setdefault(reason, []).append(in_words(kind))
    return [f"not tried: {', '.join(each)}, because {reason}" for reason, each in labels.items()]


def in_words(kind: str, shape: str = "") -> str:
    """Return the label of a kind of candidate, with the name of its shape. The user's draft is labelled by its name."""
    return " ".join(LABELS.get(kind, kind).replace("{}", shape).split())


def streams(numbers: Sequence[int]) -> str:
    """Return text such as "1, 4 concurrent requests"."""
    return f"{', '.join(map(str, numbers))} concurrent request{'s' * (list(numbers) != [1])}"


def make_plan(
    request: Request,
    machine: Machine,
    minutes: float,
    settings: dict[str, Any],
    inputs: Mapping[str, str],
) -> Plan:
    """Return a plan of work that fits into `minutes` on this machine. Candidates are left out until the plan fits.

    settings, inputs: Settings and inputs of the auto command, which are stored in the plan.

    Raises:
        UserError: The target cannot be used, memory is too small, or the time is too short for any candidate.
    """
    size = request.size
    costs = MachineCosts(machine=machine, size=request.size)
    if request.server == "llama.cpp":
        gguf.library()
    weights = size.weight_bytes(costs.bytes_per_weight)
    dtype = devices.DTYPES[machine.dtype]
    remedy = devices.less_memory(dtype, "a smaller target, or a larger device")
    devices.check_fits({"weights of the target": weights}, torch.device(machine.device), remedy)
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
        reason = f"the time is too short; --minutes {everything} would try all candidates"
        left_out |= dict.fromkeys([kind for kind in dropped if kind in candidates], reason)
        candidates = [kind for kind in candidates if kind not in dropped]
        least = _least(costs, request, candidates, len(ready))
    if sum(least.values()) > 60 * minutes:
        raise UserError(
            f"--minutes {minutes:g} is too short even for a comparison without any training; use "
            f"--minutes {math.ceil(sum(least.values()) / 60)} or more"
        )
    most = _most(costs, request, candidates, len(ready))
    seconds = seconds_of_steps(least, 60 * minutes, most)
    layers, widths, first_steps = _grid(request.target, costs, seconds["search"]) if "search" in least else ([], [], 0)
    draft = guessed_draft(size) if "draft" in candidates else None
    # the drafts, and the state of one optimizer
    disk = 0 if draft is None else DRAFTS * draft.weight_bytes() + 12 * draft.params()
    return Plan(
        settings=settings,
        inputs=dict(inputs),
        target=f"{hub.checkpoint_name(request.target)}, {size.describe()}",
        machine=machine,
        prompts=request.prompts.about,
        candidates=candidates,
        ready=[draft.name for draft in ready],
        left_out={f"--draft {name}": reason for name, reason in refused.items() if reason} | left_out,
        layers=layers,
        widths=widths,
        first_steps=first_steps,
        disk=disk,
        needs=f"about {format_bytes(weights, 2)} of memory for the target, {format_bytes(disk)} of disk for drafts",
        steps=[
            PlannedStep(
                name=name,
                what=STEPS[name][1],
                minutes=seconds[name] / 60,
                least_minutes=least[name] / 60,
                most_minutes=most[name] / 60 if name in most else None,
            )
            for name in least
        ],
    )


def seconds_of_steps(least: Mapping[str, float], total: float, most: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each step: its least seconds plus its fraction (see STEPS) of the spare time.

    A step that would get more than its most seconds gets these, and the others share the rest.

    least, most: Least and most seconds of steps, by the name of the step. total: Seconds of all steps together.
    """
    left = max(0.0, total - sum(least.values()))
    shares = sum(STEPS[name][0] for name in least)
    seconds = {name: needed + left * STEPS[name][0] / shares for name, needed in least.items()}
    full = {name: max(least[name], most[name]) for name in seconds if seconds[name] > most.get(name, math.inf)}
    if not full:
        return seconds
    others = {name: needed for name, needed in least.items() if name not in full}
    rest = seconds_of_steps(others, total - sum(full.values()), most) if others else {}
    return {name: (full | rest)[name] for name in least}


def _unsuitable(request: Request) -> dict[str, str]:
    """Return the kinds of candidates that auto does not make for this request, each with the reason.

    The target cannot have such a candidate or gains little from it, the server cannot run it, or there are too few
    prompts to train on.
    """
    target = request.target
    server = request.server
    prompts = request.prompts
    if request.ready and prompts.train is not None and prompts.train < LEAST_TRAINED:
        trained = [kind for kind in (*CUT, *HEADS) if kind in served_by(server)]
        more = LEAST_TRAINED - prompts.train
        return dict.fromkeys(
            trained,
            f"there are too few prompts to train on; add {more} prompts to the file of --prompts",
        )
    vocab = checkpoint.vocab_size(target)
    try:
        prunable_shape(str(target))
        no_cut = _refused(DraftModel(target, Checkpoint(target)), server)
    except UserError as error:
        no_cut = f"the target cannot be pruned: {error}"
    try:
        head = layout.head_config(target, None, max(1, vocab // 4), norm_before_residual=False)
        no_head = _refused(HeadArtifact(target, target, head, {}), server)
    except UserError as error:
        no_head = str(error)
    reasons = dict.fromkeys(CUT, no_cut) | dict.fromkeys(HEADS, no_head)
    if not reasons["trimmed"] and vocab < LARGE_VOCAB:
        reasons["trimmed"] = f"with a vocabulary of {vocab:,} a trimmed lm_head saves little"
    return {kind: reason for kind, reason in reasons.items() if reason and kind in served_by(server)}


def _refused(artifact: Artifact, server: str | None) -> str:
    """Return the reason why a server cannot run a draft or head, or "" if it can. The files need not exist yet."""
    if server is None:
        return ""
    findings = refusals(artifact, SERVERS.get(server, "--for"))
    return "; ".join(f"{server} {finding.text}" for finding in findings)


def ready_drafts(names: Sequence[str], target: Path, weights: bool) -> list[ReadyDraft]:
    """Return the drafts and heads that the user named by --draft.

    weights: Whether to download weight files. If False, only configuration files are downloaded.

    Raises:
        UserError: A draft is missing, its vocabulary differs from the target's, or two drafts have the same name.
    """
    drafts: dict[str, ReadyDraft] = {}
    opened = Checkpoint(target)
    for text in names:
        path = hub.locate(text, weights)
        artifact = open_artifact(path, opened, weights)
        if (other := artifact.difference()) is not None:
            raise UserError(different_tokenizers(path, target, other))
        kind = "parallel" if artifact.in_parallel else "draft"
        if artifact.head is not None:
            kind = "eagle"
        name = hub.checkpoint_name(path)
        if name in drafts:
            raise UserError(f"two drafts have the name {name}; rename one of their directories")
        drafts[name] = ReadyDraft(name=name, kind=kind, path=path, artifact=artifact)
    return list(drafts.values())


def answers(drafts: int, prompts: int) -> float:
    """Return the answers of the target in whose time draftlab score measures drafts.

    The target writes each prompt's text twice, the second time between the drafts that may be the fastest. The time of
    single passes and the replay of each draft are counted, too.
    """
    return prompts * (2 + min(drafts, FINALISTS)) + PASS_ANSWERS + REPLAY_ANSWERS * drafts


def _least(costs: MachineCosts, request: Request, candidates: Sequence[str], ready: int) -> dict[str, float]:
    """Return the seconds of the smallest useful amount of work in each step, by the name of the step.

    ready: Number of the user's drafts to compare.
    """
    sequences = 2 * LEAST_SEQUENCES
    prompts = request.prompts
    least: dict[str, float] = {}
    if "draft" in candidates or "eagle" in candidates:
        reads = prompts.data is not None
        least["answers"] = costs.read(sequences * SEQ_LEN) if reads else costs.write(sequences, ANSWER_TOKENS, 64)
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
    if ready and {"draft", "eagle"} & {*candidates}:
        exist = ready + ("prompt-lookup" in candidates)
        least["ready"] = costs.score(exist, LEAST_PROMPTS, request.streams)
    least["score"] = costs.score(len(candidates) + ready, LEAST_PROMPTS, request.streams)
    least["final"] = costs.score(1, LEAST_PROMPTS, request.streams)
    least["export"] = 0.0
    return {name: costs.start + least[name] for name in STEPS if name in least}


def _most(costs: MachineCosts, request: Request, candidates: Sequence[str], ready: int) -> dict[str, float]:
    """Return the seconds of the steps that only measure, if they use all conversations at which timing looks."""
    drafts = {
        "ready": ready + ("prompt-lookup" in candidates),
        "score": len(candidates) + ready,
        "final": 1,
    }
    seconds = {name: costs.score(n, MOST_PROMPTS, request.streams) for name, n in drafts.items()}
    return seconds | {"export": 60 * EXPORT_MINUTES}


def _grid(target: Path, costs: MachineCosts, seconds: float) -> tuple[list[int], list[int], int]:
    """Return settings of a search: the numbers of layers, the widths, and the first number of distillation steps.

    With these settings, all shapes can be cut and trained once in at most 3/4 of `seconds`. If this time is too short
    for all settings, return the settings that need the least time.
    """
    source = checkpoint.read_shape(target)
    depths = [n for n in default_depths(source) if n <= max(2, 3 * source.layers // 8)]
    wide = default_widths(source)
    thinned = sorted({depths[0], depths[len(depths) // 3], depths[2 * len(depths) // 3], depths[-1]})
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
