"""Which shape makes the fastest draft: what a search tries, what it keeps, and how it says so. No torch.

A search has rungs. On each of them every candidate is made (on rung 0 only cut, on the others distilled for so many
steps), replayed over the target's own text, and priced by a latency law; the best go on. The last ones are measured.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from draftlab.errors import UserError
from draftlab.files import read_model
from draftlab.intervals import Interval
from draftlab.model.families import shape_name
from draftlab.model.shape import Shape

FILE = "search.json"
DEAREST = 0.4  # of a target pass, that a draft pass may cost: at K = 1 and 3 of 4 accepted that gains a quarter
KEPT = 3  # one of so many goes on to the next rung (successive halving, with Hyperband's usual factor)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Trial(_File):
    """A candidate on one rung, at its best K: predicted."""

    name: str
    k: int
    length: float  # tokens per target pass
    tokens_per_second: float
    speedup: float
    draft_ms: float  # one pass, by the law
    seconds: float  # that it took to make and replay
    step_seconds: float  # of them, each step of distillation


class Rung(_File):
    """Candidates that have been distilled for the same number of steps."""

    steps: int
    names: list[str]
    trials: list[Trial] = []

    @property
    def left(self) -> list[str]:
        done = {trial.name for trial in self.trials}
        return [name for name in self.names if name not in done]

    def best_first(self) -> list[Trial]:
        return sorted(self.trials, key=lambda trial: -trial.tokens_per_second)


class Confirmed(_File):
    """A leader as it was measured, at its fastest K; gain: its own speed over that of plain decoding.

    changed: what it wrote is not the target's own, as in bfloat16 where a tie falls otherwise; it comes last.
    """

    name: str
    k: int
    length: float
    tokens_per_second: float
    gain: Interval
    against_fastest: Interval | None = None  # its gain over that of the first
    changed: bool = False


class Search(_File):
    """search.json: all that a search has found so far."""

    version: int = 1
    target: str
    source: str
    shapes: dict[str, Shape]  # of every candidate
    given: list[str] = []  # candidates that stay to the end, to be compared with
    spent_seconds: float = 0.0
    rungs: list[Rung] = []
    confirmed: list[Confirmed] = []  # fastest first

    @property
    def winner(self) -> Confirmed:
        return self.confirmed[0]

    def after(self, trial: Trial, spent_seconds: float) -> "Search":
        """With one more trial on the last rung."""
        last = self.rungs[-1]
        rung = last.model_copy(update={"trials": [*last.trials, trial]})
        return self.model_copy(update={"rungs": [*self.rungs[:-1], rung], "spent_seconds": spent_seconds})

    def best(self, most: int) -> list[Trial]:
        """Of the last rung, at most so many besides the given ones."""
        ranked = self.rungs[-1].best_first()
        found = [trial.name for trial in ranked if trial.name not in self.given][:most]
        return [trial for trial in ranked if trial.name in found or trial.name in self.given]

    def next_rung(self, steps: int, going: Sequence[Trial]) -> "Search":
        rung = Rung(steps=steps, names=[trial.name for trial in going])
        return self.model_copy(update={"rungs": [*self.rungs, rung]})

    def explain(self) -> list[str]:
        """The choice in words: what won, and why not the others."""
        winner, others = self.winner, self.confirmed[1:]
        predicted = {trial.name: trial for trial in self.rungs[-1].trials}
        mine = predicted[winner.name]
        lines = [
            f"{winner.name} with K = {winner.k}: {winner.tokens_per_second:.4g} tokens/s measured, "
            f"{_spread(winner.gain)} without a draft (predicted {mine.speedup:.2f}x at K = {mine.k})."
        ]
        for other in others:
            theirs = predicted[other.name]
            lines.append(
                f"{other.name}{' (given)' if other.name in self.given else ''}: "
                f"{_against(other)}. {_difference(mine, theirs)}"
            )
        if changed := [one.name for one in self.confirmed if one.changed]:
            lines.append(f"Not the target's own texts, so that no speed-up counts: {', '.join(changed)}.")
        return lines


def candidates(
    source: Shape, shapes: Sequence[Shape], latency_ms: Callable[[Shape], float], target_ms: float
) -> dict[str, Shape]:
    """The shapes whose pass costs at most DEAREST of the target's, by name.

    Raises:
        UserError: fewer than two of them.
    """
    found = {shape_name(s): s for s in shapes if latency_ms(s) <= DEAREST * target_ms and s != source}
    if len(found) < 2:
        fastest = min(latency_ms(s) for s in shapes) / target_ms
        raise UserError(
            f"{len(found)} of {len(shapes)} shapes cost at most {DEAREST:.0%} of the target's pass, the fastest "
            f"{fastest:.0%}; give smaller --layers, --widths or --params"
        )
    return found


def default_depths(source: Shape) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16 ... up to half of the source."""
    steps = {n * 2**i for i in range(8) for n in (2, 3)} | {1}
    return sorted(n for n in steps if n <= max(1, source.layers // 2))


def default_widths(source: Shape) -> list[int]:
    """Half, three quarters and the whole, in whole heads."""
    heads = {max(1, source.heads * n // 4) for n in (2, 3, 4)}
    return sorted(n * source.hidden // source.heads for n in heads)


def affordable_steps(left_seconds: float, trials: Sequence[Trial], done: int, *, fewest: int, most: int) -> int:
    """Steps that all of trials can be distilled for in the time left, by what done steps of each took before."""
    steps = sum(trial.step_seconds for trial in trials)
    besides = sum(trial.seconds - done * trial.step_seconds for trial in trials)
    return int(max(fewest, min(most, (left_seconds - besides) / steps)))


def read_search(path: Path) -> Search:
    """search.json; raises as read_model."""
    return read_model(Search, path, FILE, "; draftlab search writes one")


def write_search(found: Search, folder: Path) -> None:
    """Whole or not at all: a search that is killed goes on from here."""
    work = folder / f".{FILE}"
    work.write_text(found.model_dump_json(indent=1))
    work.replace(folder / FILE)


def _difference(mine: Trial, theirs: Trial) -> str:
    pass_ms, length = theirs.draft_ms / mine.draft_ms - 1, theirs.length - mine.length
    return (
        f"By prediction its passes take {abs(pass_ms):.0%} {'longer' if pass_ms > 0 else 'less'}, and it gets "
        f"{abs(length):.2f} tokens {'more' if length > 0 else 'fewer'} per target pass "
        f"({theirs.length:.2f} at K = {theirs.k}, against {mine.length:.2f} at K = {mine.k})."
    )


def _against(other: Confirmed) -> str:
    gain = other.against_fastest
    if gain is None:
        return _spread(other.gain)
    apart = "" if gain.high < 1 else ", cannot be told apart"
    return f"{gain.value - 1:+.1%} ({gain.low - 1:+.1%} to {gain.high - 1:+.1%}){apart}"


def _spread(gain: Interval) -> str:
    return f"{gain.value:.2f}x ({gain.low:.2f} to {gain.high:.2f})" if gain.n > 1 else f"{gain.value:.2f}x"
