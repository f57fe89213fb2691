"""The records of a search for the fastest draft, the choice of its candidates, and the steps that make them. No torch.

The search is successive halving: on each rung every candidate is made (only cut on rung 0, then distilled), replayed
over the target's text, and its speed is predicted by a latency law. The best candidates advance, and the leaders of the
last rung are measured. A step is a command with its settings, run once in one directory. auto uses the same steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal, Protocol

from draftlab import provenance
from draftlab.atomic import write_atomic
from draftlab.errors import UserError
from draftlab.intervals import Interval
from draftlab.model.families import shape_name
from draftlab.model.shape import Shape
from draftlab.provenance import Record
from draftlab.reading import FileModel, read_model

FILE = "search.json"
# largest time of a draft's pass over the target's; at K = 1 and 3 of 4 tokens accepted, it gives a speed-up of 1.25
MAX_PASS_SHARE = 0.4
# the same for a parallel draft, which makes one pass per step; with 2 tokens accepted, it gives a speed-up of 1.5
MAX_WIDE_SHARE = 1.0


class NoCheapShape(UserError):
    """Too few shapes have passes that are fast enough to draft for the target."""


class ShapeTrial(FileModel):
    """A candidate on one rung, predicted at its best K.

    Args:
        length: Tokens per target pass.
        rejection: Mean probability that a drafted token is rejected.
        draft_ms: Milliseconds of one pass by the latency law.
        promise: Predicted tokens per second if the next rung lowers rejections by the same factor as this rung.
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
    """Candidates that were distilled for the same number of steps, the most promising first."""

    steps: int
    trials: list[ShapeTrial]


class MeasuredDraft(FileModel):
    """A leader at its fastest measured K. gain: Speed-up over plain decoding.

    changed: Whether the draft changed the output, as ties in bfloat16 can. Such drafts are ranked last.
    """

    name: str
    k: int
    length: float
    tokens_per_second: float
    gain: Interval
    changed: bool = False


class Search(FileModel):
    """The contents of search.json: the rungs, and the measured leaders with the fastest first."""

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
        """Return whether the fastest draft is faster than no draft."""
        return not self.winner.changed and self.winner.gain.value > 1

    def explain(self) -> list[str]:
        """Return the lines of the verdict."""
        winner, spread = self.winner, self.winner.gain
        predicted = next(trial for trial in self.rungs[-1].trials if trial.name == winner.name)
        lines = [] if self.pays else ["No draft is faster than plain decoding. The best candidate:"]
        lines.append(
            f"{winner.name} with K = {winner.k}: {winner.tokens_per_second:.4g} tokens/s measured in whole requests, "
            f"{spread.as_speedup()} of plain decoding (predicted {predicted.speedup:.2f}x in TPOT at K = "
            f"{predicted.k})"
        )
        if changed := [each.name for each in self.measured if each.changed]:
            lines.append(
                f"These drafts changed the target's output, so their speed-up does not count: {', '.join(changed)}."
            )
        return lines


def candidates(
    source: Shape,
    shapes: Sequence[Shape],
    latency_ms: Callable[[Shape], float],
    target_ms: float,
    share: float,
) -> dict[str, Shape]:
    """Return by name the shapes whose pass takes at most `share` of the time of the target's.

    Shapes of medium cost come first, so that a search without enough time leaves out the cheapest and the most
    expensive.

    Raises:
        NoCheapShape: Fewer than two shapes are cheap enough.
    """
    cheap = {
        shape_name(shape): shape
        for shape in shapes
        if shape != source and latency_ms(shape) <= share * target_ms
    }
    if len(cheap) < 2:
        fastest = min(map(latency_ms, shapes)) / target_ms
        raise NoCheapShape(
            f"only {len(cheap)} of {len(shapes)} shapes have passes of at most {share:.0%} of the target's time "
            f"(the fastest: {fastest:.0%}); try smaller --layers or --widths"
        )
    ordered = sorted(cheap, key=lambda name: latency_ms(cheap[name]))
    middle_first = sorted(cheap, key=lambda name: abs(ordered.index(name) - len(ordered) // 2))
    return {name: cheap[name] for name in middle_first}


def remaining_rejections(before: Rung | None, rejections: dict[str, float]) -> float:
    """Return the median over candidates of their rejections on this rung, divided by those on the rung before.

    On the first rung it is 1. Rungs rank candidates by the rejections expected after more training, because otherwise
    the cheapest passes would win while all drafts are poor.
    """
    if before is None:
        return 1.0
    earlier = {trial.name: trial.rejection for trial in before.trials}
    return min(1.0, median(value / max(earlier[name], 1e-9) for name, value in rejections.items()))


def read_search(path: Path) -> Search:
    """Read search.json. Raises the errors of read_model."""
    return read_model(Search, path, FILE, "; draftlab search writes one")


def write_search(search: Search, folder: Path) -> None:
    write_atomic(folder / FILE, search.model_dump_json(indent=1))


class Runnable(Protocol):
    """A command with its settings. entry: The step as an entry of a recipe."""

    @property
    def entry(self) -> dict[str, dict[str, Any]]: ...
    def run(self, label: str) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRunner:
    """Runs steps in a directory. Decisions depend on the records of steps, so a resumed run repeats the decisions.

    Args:
        make: Returns a step for a command's name and settings. It adds the settings that all steps share.
        label: Returns the line to print before a step, for the step's name and command.
        done: Finished steps by the name of their output.
    """

    folder: Path
    make: Callable[[str, dict[str, Any]], Runnable]
    label: Callable[[str, str], str] = "{}: {}".format
    done: dict[str, Runnable] = field(default_factory=dict)

    def run(self, name: str, command: str, **settings: Any) -> Path:
        """Run a command unless its output exists, and return the output directory. name: Name of the output."""
        out = self.folder / name
        if name not in self.done:
            step = self.make(command, settings | {"out": out})
            step.run(self.label(name, command))
            self.done[name] = step
        return out

    def seconds(self, part: str = "") -> float:
        """Return the seconds of finished steps. part: Name of a step, or of a folder of steps, to count alone."""
        names = [name for name in self.done if not part or name.split("/")[0] == part]
        return sum(record_of(self.folder / name).total_seconds for name in names)


def record_of(output: Path) -> Record:
    record = provenance.read_record(output)
    assert record is not None
    return record


def number(record: Record, name: str) -> float:
    """Return a number in the notes of a training's record."""
    return float(str(record.notes[name]))
