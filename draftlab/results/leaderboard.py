"""Scores in the order of their speed-ups, as tables, pages and plots show them. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from draftlab.errors import UserError
from draftlab.intervals import Interval
from draftlab.results.score import Score, TaskResult

# After Okabe and Ito (2008), each at 3:1 or more against the page; the second is for a dark one.
COLOURS = ("#0072b2", "#c04c00", "#00805d", "#b5508a", "#2b86bb", "#a36a00", "#86307a", "#74741a")
DARK_COLOURS = ("#56b0e8", "#f0883e", "#2cc299", "#e59cc6", "#9bd5f7", "#f0bb4a", "#d48acb", "#c6c65c")
NO_DRAFT = "no draft"
MARKERS = (("o", "●"), ("s", "■"), ("^", "▲"), ("D", "◆"), ("v", "▼"), ("P", "✚"), ("X", "✖"), ("p", "⬟"))
LABEL_LENGTH = 28
ACCURACY_METRICS = ("acc", "exact_match")  # lm-eval's, without the name of a filter


@dataclass(frozen=True, slots=True)
class Mark:
    """Colour and marker of what has this name in plots. glyph: the marker as a character, for the key beside them."""

    name: str
    colour: str
    marker: str
    glyph: str

    @classmethod
    def of(cls, name: str, number: int) -> "Mark":
        """Return the mark of that number; the first 64 differ."""
        at = number % len(COLOURS)
        return cls(name, COLOURS[at], *MARKERS[(at + number // len(COLOURS)) % len(MARKERS)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A draft at its rank, and how every table and plot marks it."""

    score: Score
    rank: int  # 0 is the fastest
    k: int
    best_k_speedup: Interval  # of whole requests, at a K chosen on other prompts
    best_k_tpot_speedup: Interval | None  # of the tokens after the first; None where servers decoded
    speedups: dict[int, Interval]  # by K; {} where they are not shown
    tpot_speedups: dict[int, Interval | None]
    accuracy: TaskResult | None

    @property
    def tokens_per_pass(self) -> float:
        return self.score.tokens_per_pass(self.k)

    @property
    def label(self) -> str:
        """The kind of drafter and the end of the name, where names of one family differ."""
        name = self.score.name
        kind = "".join(name.partition(":")[:2]) if ":" in name else ""
        return name if len(name) <= LABEL_LENGTH else f"{kind}…{name[1 + len(kind) - LABEL_LENGTH :]}"

    @property
    def mark(self) -> Mark:
        return Mark.of(self.score.name, self.rank)

    @property
    def colour(self) -> str:
        return self.mark.colour

    @property
    def marker(self) -> str:
        return self.mark.marker


def leaderboard(scores: Sequence[Score], every_k: bool = False) -> list[Entry]:
    """Return the fastest first; drafts that changed the output come after all others.

    Raises:
        UserError: there are no scores.
    """
    if not scores:
        raise UserError("no scores to report; make one with draftlab score")
    entries = entries_of(scores, every_k)
    ordered = sorted(entries, key=lambda e: (not e.score.output_differs, e.best_k_speedup.value), reverse=True)
    return [replace(entry, rank=rank) for rank, entry in enumerate(ordered)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """The target alone, with the weights of one precision. Several runs have several speeds."""

    name: str
    rank: int  # drafts above it
    tokens_per_second: list[float]
    speedups: list[float]  # over the fastest precision

    def speed(self, digits: Callable[[float], str]) -> str:
        return _range(self.tokens_per_second, digits)

    @property
    def speedup(self) -> str:
        return f"{_range(self.speedups, '{:.2f}'.format)}x"


def plain_rows(entries: Sequence[Entry]) -> list[Plain]:
    """Return the target alone at every precision that was measured, the fastest first."""
    speeds: dict[str, list[float]] = {}
    speedups: dict[str, list[float]] = {}
    for score in (entry.score for entry in entries):
        for weights, speed in score.plain_tps.items():
            speeds.setdefault(weights, []).append(speed)
            speedups.setdefault(weights, []).append(speed / score.output_tps(0))
    rows = [
        Plain(
            name=NO_DRAFT if len(speeds) == 1 else f"{NO_DRAFT}, {weights}",
            rank=plain_rank(entries, max(speedups[weights])),
            tokens_per_second=speeds[weights],
            speedups=speedups[weights],
        )
        for weights in speeds
    ]
    return sorted(rows, key=lambda row: -max(row.speedups))


def plain_rank(entries: Sequence[Entry], speedup: float = 1.0) -> int:
    """Return the number of drafts that rank above plain decoding of this speed-up."""
    return sum(not e.score.output_differs and e.best_k_speedup.value > speedup for e in entries)


Row = TypeVar("Row")


def with_plain(of_drafts: Sequence[Row], plain: Sequence[Plain], row: Callable[[Plain], Row]) -> list[Row]:
    """Return the rows of drafts with those of plain decoding at their places."""
    rows = list(of_drafts)
    for each in reversed(plain):
        rows.insert(each.rank, row(each))
    return rows


def precision(scores: Sequence[Score]) -> str:
    """Return the precision of both sides and how passes ran, of all scores."""
    by_setting: dict[str, list[str]] = {}
    for score in scores:
        by_setting.setdefault(score.conditions.precision, []).append(score.name)
    if len(by_setting) == 1:
        return next(iter(by_setting))
    return "; ".join(f"{', '.join(names)}: {setting}" for setting, names in by_setting.items())


def _range(values: Sequence[float], digits: Callable[[float], str]) -> str:
    return " to ".join(dict.fromkeys(map(digits, (min(values), max(values)))))


def entries_of(scores: Sequence[Score], every_k: bool) -> list[Entry]:
    """Return the entries in the order of the scores; takes the speed-ups once, because the bootstrap is slow."""
    shown = accuracy_metric(scores)
    return [
        Entry(
            score=score,
            rank=0,
            k=score.best_k,
            best_k_speedup=score.best_k_speedup,
            best_k_tpot_speedup=score.best_k_tpot_speedup,
            speedups={k: score.speedup(k) for k in sorted(score.speculative)} if every_k else {},
            tpot_speedups={k: score.tpot_speedup(k) for k in sorted(score.speculative)} if every_k else {},
            accuracy=next((r for r in score.draft.tasks if (r.task, r.metric) == shown), None),
        )
        for score in scores
    ]


def accuracy_metric(scores: Sequence[Score]) -> tuple[str, str] | None:
    """Return the first task and metric of accuracy that any draft has: one for all, so that a column mixes no tasks."""
    results = [result for score in scores for result in score.draft.tasks]
    return next(((r.task, r.metric) for r in results if r.metric.partition(",")[0] in ACCURACY_METRICS), None)
