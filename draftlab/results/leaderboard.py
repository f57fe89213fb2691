"""Scores in the order of their speed-ups, as tables, pages and plots show them. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
    best_k_speedup: Interval  # of a K chosen on other prompts
    speedups: dict[int, Interval]  # by K; {} where they are not shown
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


def plain_rank(entries: Sequence[Entry]) -> int:
    """Return the number of drafts that rank above plain decoding."""
    return sum(not e.score.output_differs and e.best_k_speedup.value > 1 for e in entries)


def plain_speed(entries: Sequence[Entry], digits: Callable[[float], str]) -> str:
    """Return tokens per second without a draft; the range where the scores are of several runs."""
    speeds = [e.score.output_tps(0) for e in entries]
    return " to ".join(dict.fromkeys(map(digits, (min(speeds), max(speeds)))))


def entries_of(scores: Sequence[Score], every_k: bool) -> list[Entry]:
    """Return the entries in the order of the scores; takes the speed-ups once, because the bootstrap is slow."""
    shown = accuracy_metric(scores)
    return [
        Entry(
            score=score,
            rank=0,
            k=score.best_k,
            best_k_speedup=score.best_k_speedup,
            speedups={k: score.speedup(k) for k in sorted(score.speculative)} if every_k else {},
            accuracy=next((r for r in score.draft.tasks if (r.task, r.metric) == shown), None),
        )
        for score in scores
    ]


def accuracy_metric(scores: Sequence[Score]) -> tuple[str, str] | None:
    """Return the first task and metric of accuracy that any draft has: one for all, so that a column mixes no tasks."""
    results = [result for score in scores for result in score.draft.tasks]
    return next(((r.task, r.metric) for r in results if r.metric.partition(",")[0] in ACCURACY_METRICS), None)
