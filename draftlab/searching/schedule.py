"""The schedule of a search for the fastest draft: candidates, rungs of successive halving, and the verdict. No torch.

On each rung every candidate is made (on rung 0 only cut, on the others distilled for some steps), replayed over the
target's own text, and priced by a latency law; the best advance. Those of the last rung are measured.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from statistics import median

from pydantic import Field

from draftlab.atomic import write_atomic
from draftlab.errors import UserError
from draftlab.intervals import Interval
from draftlab.model.families import shape_name
from draftlab.model.shape import Shape
from draftlab.reading import FileModel, read_model

FILE = "search.json"
MAX_PASS_SHARE = 0.4  # of a target pass: at K = 1 and 3 of 4 accepted, such a draft gains a quarter
MAX_WIDE_SHARE = 1.0  # for a parallel draft's only pass of a step: with 2 tokens accepted it gains a half
REDUCTION = 3  # one candidate in three advances (Hyperband's usual factor)


class NoCheapShape(UserError):
    """A target beside which too few shapes are cheap enough to draft."""


class Trial(FileModel):
    """A candidate on one rung: predicted at its best K."""

    name: str
    k: int
    length: float  # tokens per target pass
    tokens_per_second: float
    speedup: float
    rejection: float  # mean probability that a drafted token is rejected
    draft_ms: float  # one pass, by the law; of a head, by its profile
    seconds: float  # to make and replay it
    step_seconds: float  # of each distillation step
    promise: float | None = None  # tokens per second, if the next rung lowers rejections as this one did


class Rung(FileModel):
    """Candidates that were distilled for the same number of steps."""

    steps: int
    names: list[str]
    trials: list[Trial] = Field(default_factory=list)

    @property
    def left(self) -> list[str]:
        done = {trial.name for trial in self.trials}
        return [name for name in self.names if name not in done]

    def best_first(self) -> list[Trial]:
        return sorted(self.trials, key=lambda t: -(t.tokens_per_second if t.promise is None else t.promise))


class Measured(FileModel):
    """A leader at its fastest measured K; gain: its speed over that of plain decoding.

    changed: it changed the output, as in bfloat16 where ties fall differently; such drafts come last.
    """

    name: str
    k: int
    length: float
    tokens_per_second: float
    gain: Interval
    ratio_to_fastest: Interval | None = None
    changed: bool = False


class Search(FileModel):
    """search.json: all results of a search so far."""

    version: int = 1
    target: str
    source: str
    shapes: dict[str, Shape]
    heads: dict[str, int] = Field(default_factory=dict)  # parameters of EAGLE-3 heads, which no rung trains
    named: list[str] = Field(default_factory=list)  # by the user, and all heads: they stay to the end
    spent_seconds: float = 0.0
    rungs: list[Rung] = Field(default_factory=list)
    measured: list[Measured] = Field(default_factory=list)  # fastest first

    @property
    def winner(self) -> Measured:
        return self.measured[0]

    @property
    def pays(self) -> bool:
        """Return whether the fastest draft is faster than no draft."""
        return not self.winner.changed and self.winner.gain.value > 1

    def with_trial(self, trial: Trial, spent_seconds: float) -> "Search":
        """Return the search with one more trial on the last rung."""
        last = self.rungs[-1]
        rung = last.model_copy(update={"trials": [*last.trials, trial]})
        return self.model_copy(update={"rungs": [*self.rungs[:-1], rung], "spent_seconds": spent_seconds})

    def with_promises(self, promises: Mapping[str, float]) -> "Search":
        """Return the search with the promise of every trial on the last rung: tokens per second after the next one."""
        last = self.rungs[-1]
        trials = [trial.model_copy(update={"promise": promises[trial.name]}) for trial in last.trials]
        return self.model_copy(update={"rungs": [*self.rungs[:-1], last.model_copy(update={"trials": trials})]})

    def remaining_rejections(self) -> float:
        """Return the share of rejections that the last rung left, as a median over what it trained; 1 on rung 0.

        A candidate that has learnt little is judged by what it can learn; without this the cheapest passes win while
        no draft is any good.
        """
        if len(self.rungs) < 2:
            return 1.0
        before = {trial.name: trial.rejection for trial in self.rungs[-2].trials}
        trained = [trial for trial in self.rungs[-1].trials if trial.name not in self.heads]
        return min(1.0, median(t.rejection / max(before[t.name], 1e-9) for t in trained))

    def best(self, count: int) -> list[Trial]:
        """Return the top count candidates of the last rung, plus all that the user named."""
        ranked = [trial for trial in self.rungs[-1].best_first() if trial.name in self.rungs[-1].names]
        top = [trial.name for trial in ranked if trial.name not in self.named][:count]
        return [trial for trial in ranked if trial.name in top or trial.name in self.named]

    def with_only(self, names: Collection[str]) -> "Search":
        """Return the search with only these and the named candidates left on the last rung; it keeps all trials."""
        last, stay = self.rungs[-1], {*names, *self.named}
        rung = last.model_copy(update={"names": [name for name in last.names if name in stay]})
        return self.model_copy(update={"rungs": [*self.rungs[:-1], rung]})

    def without_late(self, fewest: int) -> "Search":
        """Return the search without the candidates that have no trial on the last rung, but at least fewest of all."""
        last = self.rungs[-1]
        competing = [name for name in last.names if name not in self.named]
        ordered = sorted(competing, key=lambda name: name in last.left)
        return self.with_only(ordered[: max(fewest, sum(name not in last.left for name in competing))])

    def next_rung(self, steps: int, advancing: Sequence[Trial]) -> "Search":
        """Return the search with one more rung, on which the heads have their trials already."""
        heads = [trial for trial in advancing if trial.name in self.heads]
        rung = Rung(steps=steps, names=[trial.name for trial in advancing], trials=heads)
        return self.model_copy(update={"rungs": [*self.rungs, rung]})

    def explain(self) -> list[str]:
        """Return the verdict in words; the table of candidates says by what each is slower."""
        winner, spread = self.winner, self.winner.gain
        predicted = next(trial for trial in self.rungs[-1].trials if trial.name == winner.name)
        gain = f"{spread.value:.2f}x" + (f" ({spread.low:.2f} to {spread.high:.2f})" if spread.n > 1 else "")
        lines = [] if self.pays else ["No draft is faster: plain decoding is. The best of the candidates:"]
        lines.append(
            f"{winner.name} with K = {winner.k}: {winner.tokens_per_second:.4g} tokens/s measured in whole requests, "
            f"{gain} of plain decoding (predicted {predicted.speedup:.2f}x in TPOT at K = {predicted.k})."
        )
        if changed := [each.name for each in self.measured if each.changed]:
            lines.append(f"Changed the target's output, so their speed-up does not count: {', '.join(changed)}.")
        return lines


def candidates(
    source: Shape,
    shapes: Sequence[Shape],
    latency_ms: Callable[[Shape], float],
    target_ms: float,
    share: float = MAX_PASS_SHARE,
) -> dict[str, Shape]:
    """Return the shapes whose pass takes at most a share of the target's, by name.

    Those of middling cost come first, so that a search which runs out of time leaves out the extremes.

    Raises:
        NoCheapShape: fewer than two of them.
    """
    cheap = {shape_name(s): s for s in shapes if latency_ms(s) <= share * target_ms and s != source}
    if len(cheap) < 2:
        fastest = min(latency_ms(s) for s in shapes) / target_ms
        raise NoCheapShape(
            f"passes of {len(cheap)} of {len(shapes)} shapes take at most {share:.0%} of the target's, the "
            f"fastest {fastest:.0%}; try smaller --layers or --widths"
        )
    ordered = sorted(cheap, key=lambda name: latency_ms(cheap[name]))
    middle_first = sorted(cheap, key=lambda name: abs(ordered.index(name) - len(ordered) // 2))
    return {name: cheap[name] for name in middle_first}


def affordable_steps(left_seconds: float, trials: Sequence[Trial], done: int, *, fewest: int, most: int) -> int:
    """Return for how many steps all trials can be distilled in the time left, from the time that done steps took."""
    steps = sum(trial.step_seconds for trial in trials)
    besides = sum(trial.seconds - done * trial.step_seconds for trial in trials)
    return int(max(fewest, min(most, (left_seconds - besides) / steps)))


def read_search(path: Path) -> Search:
    """Read search.json; raises as read_model."""
    return read_model(Search, path, FILE, "; draftlab search writes one")


def write_search(search: Search, folder: Path) -> None:
    """Write search.json, from which a killed search resumes."""
    write_atomic(folder / FILE, search.model_dump_json(indent=1))
