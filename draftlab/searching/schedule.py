"""The records of a search for the fastest draft, the choice of its candidates, and the steps that make them. No torch.

The search is successive halving, in rounds that are called rungs. On rung 0 every candidate is cut, and on each later
rung it is distilled for more steps. Each candidate is replayed on the target's text, and a latency law predicts its
speed. The best candidates advance to the next rung, and the best of the last rung are measured.

A step is a command with its settings, which runs once and writes one directory. auto runs its steps in the same way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from draftlab.console import note
from draftlab.errors import UserError
from draftlab.intervals import Interval
from draftlab.model.families import shape_name
from draftlab.model.shape import Shape
from draftlab.quantities import format_number
from draftlab.reading import FileModel, read_model
from draftlab.results.score import RATES, Seconds
from draftlab.runs import provenance
from draftlab.runs.atomic import write_atomic
from draftlab.runs.provenance import Record

FILE = "search.json"
# a candidate's pass takes at most this fraction of the time of the target's pass; with K = 1 and 3 of 4 tokens
# accepted, the speed-up is then 1.25
MAX_PASS_SHARE = 0.4
# the fraction for a parallel draft, which makes one pass per step; with 2 tokens accepted, the speed-up is then 1.5
MAX_WIDE_SHARE = 1.0
# fewest and most texts on which candidates are replayed, and prompts on which the best candidates are measured
REPLAYED_TEXTS = (12, 48)
MEASURED_PROMPTS = (4, 16)


class NoCheapShape(UserError):
    """The error for a search that has too few shapes, or too few shapes whose passes are fast enough."""


class ShapeTrial(FileModel):
    """A candidate on one rung, with its predicted speed at its best K.

    Args:
        k: Best number of drafted tokens per step.
        length: Tokens per target pass.
        rejection: Mean probability that a drafted token is rejected.
        draft_ms: Milliseconds of one pass of the draft, by the latency law.
        promise: Predicted tokens per second after the next rung, if rejections fall by the same factor as on this rung.
    """

    name: str
    k: int
    length: float
    tokens_per_second: float
    speedup: float
    rejection: float
    draft_ms: float
    promise: float


class Rung(FileModel):
    """A rung of a search: candidates that were distilled for the same number of steps, the most promising first."""

    steps: int
    trials: list[ShapeTrial]


class MeasuredDraft(FileModel):
    """A draft that the search measured, at its fastest K.

    Args:
        length: Tokens per target pass.
        seconds: Which seconds were counted.
        gain: Speed-up of whole requests over plain decoding.
        changed: Whether the output differs from plain decoding, which ties in bfloat16 may cause. Such drafts are
            ranked last.
    """

    name: str
    k: int
    length: float
    tokens_per_second: float
    seconds: Seconds
    gain: Interval
    changed: bool = False


class Search(FileModel):
    """The content of search.json: the rungs, and the drafts that were measured, the fastest first."""

    version: Literal[2] = 2
    target: str
    source: str
    shapes: dict[str, Shape]
    spent_seconds: float
    rungs: list[Rung]
    measured: list[MeasuredDraft]

    @property
    def winner(self) -> MeasuredDraft:
        return self.measured[0]

    @property
    def pays(self) -> bool:
        """Return whether the fastest draft is faster than plain decoding."""
        return not self.winner.changed and self.winner.gain.value > 1

    def explain(self) -> list[str]:
        """Return the result of the search as lines of text."""
        winner = self.winner
        spread = self.winner.gain
        predicted = next(trial for trial in self.rungs[-1].trials if trial.name == winner.name)
        lines = [] if self.pays else ["No draft is faster than plain decoding. The best candidate:"]
        lines.append(
            f"{winner.name} with K = {winner.k}: {format_number(winner.tokens_per_second, 4)} {RATES[winner.seconds]} "
            f"measured in whole requests, {spread.as_speedup()} of plain decoding (predicted "
            f"{predicted.speedup:.2f}x in TPOT at K = {predicted.k})"
        )
        if changed := [each.name for each in self.measured if each.changed]:
            lines.append(
                f"These drafts changed the target's output, so their speed-up does not count: {', '.join(changed)}."
            )
        return lines


def smaller_shapes(source: Shape, shapes: Sequence[Shape]) -> dict[str, Shape]:
    """Return the shapes other than the source's, by name."""
    return {shape_name(shape): shape for shape in shapes if shape != source}


def candidates(
    source: Shape,
    shapes: Sequence[Shape],
    latency_ms: Callable[[Shape], float],
    target_ms: float,
    share: float,
) -> dict[str, Shape]:
    """Return the shapes that are cheap enough to draft, by name.

    A shape is cheap enough if its pass takes at most the fraction `share` of the time of the target's pass. Shapes of
    medium cost come first, so that a search without enough time leaves out the cheapest and the most expensive shapes.

    Args:
        source: Shape of the source, which is never a candidate.
        shapes: Shapes to consider.
        latency_ms: Function that returns the milliseconds of a pass of a shape.
        target_ms: Milliseconds of a pass of the target.

    Raises:
        NoCheapShape: Fewer than two shapes are cheap enough.
    """
    cheap = {
        name: shape for name, shape in smaller_shapes(source, shapes).items() if latency_ms(shape) <= share * target_ms
    }
    if len(cheap) < 2:
        fastest = min(map(latency_ms, shapes)) / target_ms
        raise NoCheapShape(
            f"only {len(cheap)} of {len(shapes)} shapes need at most {share:.0%} of the target's time for a pass "
            f"(the fastest: {fastest:.0%})"
        )
    ordered = sorted(cheap, key=lambda name: latency_ms(cheap[name]))
    middle_first = sorted(cheap, key=lambda name: abs(ordered.index(name) - len(ordered) // 2))
    return {name: cheap[name] for name in middle_first}


def remaining_rejections(before: Rung | None, rejections: dict[str, float]) -> float:
    """Return the factor by which rejections changed from the previous rung to this rung: the median over candidates.

    The factor is at most 1, and it is 1 on the first rung. It predicts the rejections after more training, and so
    the speed by which candidates are ranked. If they were ranked by their present speed, the cheapest drafts would win
    while all drafts are still poor.

    Args:
        before: The previous rung. None on the first rung.
        rejections: Mean probability that a drafted token is rejected on this rung, by the name of the candidate.
    """
    if before is None:
        return 1.0
    earlier = {trial.name: trial.rejection for trial in before.trials}
    return min(1.0, median(value / max(earlier[name], 1e-9) for name, value in rejections.items()))


def count_in_time(seconds: float, each: float, limits: tuple[int, int], what: str) -> int:
    """Return how many texts or prompts fit into some time, within limits. If they are not the most, print a note.

    Args:
        seconds: The time.
        each: Seconds of each text or prompt.
        limits: Fewest and most texts or prompts.
        what: Start of the note, such as "drafts are replayed on".
    """
    fewest, most = limits
    count = max(fewest, min(most, int(seconds / each)))
    if count < most:
        note(f"{what} {count} prompts, not on {most}, to save time")
    return count


def read_search(path: Path) -> Search:
    """Read search.json from a file or directory. Raises UserError: the file is missing, or not of this version."""
    return read_model(Search, path, FILE, "; draftlab search writes this file")


def write_search(search: Search, folder: Path) -> None:
    write_atomic(folder / FILE, search.model_dump_json(indent=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRunner:
    """Runs steps whose outputs are in one folder.

    search and auto decide by the records in these outputs. A resumed run thus decides in the same way as the killed
    run.

    Args:
        folder: Folder of the outputs.
        make: Function that returns a step (commands/steps.py), from the name of a command and its settings. It adds
            the settings that all steps share.
        label: Function that returns the line to print before a step, from the names of the output and the command.
        done: Finished steps, by the name of their output.
    """

    folder: Path
    make: Callable[[str, dict[str, Any]], Any]
    label: Callable[[str, str], str] = "{}: {}".format
    done: dict[str, Any] = field(default_factory=dict)

    def run(self, name: str, command: str, **settings: Any) -> Path:
        """Run a command, unless the step is finished already. Return its output directory.

        name: Name of the output directory.
        """
        out = self.folder / name
        if name not in self.done:
            step = self.make(command, settings | {"out": out})
            step.run(self.label(name, command))
            self.done[name] = step
        return out

    def seconds(self, part: str = "") -> float:
        """Return the seconds that all finished steps took.

        part: Name of a step, or of a folder of steps, to which the sum is limited.
        """
        names = [name for name in self.done if not part or name.split("/")[0] == part]
        return sum(record_of(self.folder / name).total_seconds for name in names)


def record_of(output: Path) -> Record:
    record = provenance.read_record(output)
    assert record is not None
    return record


def number(record: Record, name: str) -> float:
    """Return the number with this name from the notes of a record."""
    return float(str(record.notes[name]))
