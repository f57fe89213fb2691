"""The verdict of auto: what to serve with, or no draft, with the reason and what would change it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from pydantic import Field

from draftlab.config.drafters import DrafterSpec
from draftlab.intervals import Interval
from draftlab.model import hub
from draftlab.reading import FileModel
from draftlab.results.score import Score
from draftlab.searching.plan import in_words, not_tried, streams

NO_DRAFT = "no draft"
Scores = Mapping[int, Mapping[str, Score]]  # keys: streams, name


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A way to draft.

    Args:
        draft: Checkpoint or head; None where the drafter needs no weights.
        shape: Name of a draft model's shape, or of a draft that was there.
        drafter: None for a plain draft.
    """

    kind: str
    draft: Path | None = None
    shape: str = ""
    drafter: DrafterSpec | None = None

    @property
    def name(self) -> str:
        """Return the name of its score."""
        if self.drafter is not None:
            return self.drafter.name
        assert self.draft is not None
        return hub.checkpoint_name(self.draft)

    @property
    def label(self) -> str:
        """Return the way to draft in words."""
        return in_words(self.kind, self.shape)


class Choice(FileModel):
    """An arm at its best K. speedup is of whole requests, the geometric mean over all numbers of streams.

    Args:
        name: Name of its scores.
        label: The arm in words.
        at_fewest: Speed-up at the fewest streams, as are tokens_per_pass and tokens_per_second.
        changed: It changed the target's output, so that its speed-up does not count.
    """

    kind: str
    name: str
    label: str
    k: int
    speedup: float
    at_fewest: Interval
    tokens_per_pass: float
    tokens_per_second: float
    changed: bool = False


class Round(FileModel, extra="ignore"):
    """A draft after a round: all tokens that it was trained on, and tokens per target pass."""

    tokens: float
    length: float


class TrainingRounds(FileModel):
    """Rounds of training, each as long as all rounds before. stopped says why no further round follows."""

    k: int
    rounds: list[Round]
    stopped: str = ""

    def line(self) -> str:
        """Return the rounds in words."""
        lengths = ", ".join(
            f"{each.length:.2f} after {each.tokens:,.0f} tokens" for each in self.rounds
        )
        return f"tokens per pass at K = {self.k}: {lengths}; {self.stopped}"


class Verdict(FileModel, extra="ignore"):
    """auto.json.

    Args:
        choice: Label of an arm, or "no draft".
        speedups: Speed-ups of whole requests by streams, on prompts that nothing was chosen on.
        precision: How target and draft ran, in words.
        doubt: Why nobody can tell from these scores; empty where there is no reason.
        draft: Checkpoint or head of the choice.
        drafter: The choice as score --drafter takes it; empty for a plain draft.
        serve: Command to type.
    """

    version: int = 3
    target: str
    use: bool
    choice: str = NO_DRAFT
    kind: str | None = None
    k: int | None = None
    speedups: dict[int, Interval]
    precision: str = ""
    plain_tokens_per_second: float
    reason: str
    doubt: str = ""
    would_change: list[str] = Field(default_factory=list)
    ranking: list[Choice]
    training: TrainingRounds | None
    left_out: dict[str, str]
    planned_minutes: float
    minutes: float
    draft: str = ""
    drafter: str = ""
    serve: str = ""
    page: str = ""
    notes: list[str] = Field(default_factory=list)

    def head(self) -> str:
        choice = f"use {self.choice} with K = {self.k}" if self.use else "do not use a draft here"
        if self.doubt:
            return f"Cannot tell, because {self.doubt}; measure again on a quiet machine. By these numbers, {choice}"
        return choice[0].upper() + choice[1:]

    def lines(self) -> list[str]:
        """Return the verdict for people."""
        gains = [f"{gain.as_speedup()} at {streams([n])}" for n, gain in self.speedups.items()]
        ran = f"; whole requests, {self.precision}" if self.precision else ""
        lines = [
            f"{self.head()}: {self.reason}.",
            f"measured: {'; '.join(gains)}, on other prompts{ran}",
        ]
        lines += [f"what would change it: {text}" for text in self.would_change]
        if self.training is not None:
            lines.append(f"training: {self.training.line()}")
        lines += not_tried(self.left_out) + self.notes
        return lines + [
            text for text in (self.serve and f"run it: {self.serve}", self.page) if text
        ]


def ranking(arms: Sequence[Arm], scores: Scores) -> list[Choice]:
    """Return each arm at its best K over all streams, the fastest first."""
    choices = []
    for arm in arms:
        choices.append(_at_best_k(arm, [by_name[arm.name] for by_name in scores.values()]))
    return sorted(choices, key=lambda choice: (choice.changed, -choice.speedup))


def _at_best_k(arm: Arm, scores: Sequence[Score]) -> Choice:
    gains: dict[int, float] = {}
    for k in set.intersection(*(set(score.speculative) for score in scores)):
        gains[k] = geometric_mean([score.speedup_value(k) for score in scores])
    k = max(gains, key=gains.__getitem__)
    return Choice(
        kind=arm.kind,
        name=arm.name,
        label=arm.label,
        k=k,
        speedup=gains[k],
        at_fewest=scores[0].speedup(k),
        tokens_per_pass=scores[0].tokens_per_pass(k),
        tokens_per_second=scores[0].output_tps(k),
        changed=any(score.output_differs for score in scores),
    )


def would_change(
    ranking: Sequence[Choice], scores: Scores, left_out: Mapping[str, str]
) -> list[str]:
    """Return what would make a draft pay, or pay more."""
    changes, fewest = [], min(scores)
    trained = next((choice for choice in ranking if choice.kind == "draft"), None)
    if trained is not None:
        score = scores[fewest][trained.name]
        needed, share = (
            score.break_even_length(trained.k),
            score.time_shares(trained.k).get("draft", 0.0),
        )
        if trained.tokens_per_pass < needed:
            changes.append(
                f"{trained.label} has {trained.tokens_per_pass:.2f} tokens per target pass at K = {trained.k} and "
                f"needs {needed:.2f} to break even after the first token; drafting takes {share:.0%} of that time"
            )
    if any("minutes" in reason for reason in left_out.values()):
        changes.append("more --minutes: some candidates were not tried")
    return changes or [
        "prompts whose answers repeat them, or a target whose passes cost more than a draft's by a larger factor"
    ]


def judged(speedups: Mapping[int, Interval]) -> tuple[bool, str]:
    """Return whether a choice is worth serving, and why, by its speed-up at each number of streams."""
    gains = [n for n, gain in speedups.items() if gain.low > 1]
    losses = [n for n, gain in speedups.items() if gain.value < 1]
    if not gains:
        best = max(speedups.values(), key=lambda gain: gain.value)
        return False, f"the fastest candidate gains nothing beyond the noise: {best.as_speedup()}"
    if losses and geometric_mean(gain.value for gain in speedups.values()) <= 1:
        return False, f"it gains at {streams(gains)} and loses more at {streams(losses)}"
    if losses:
        return (
            True,
            f"it gains at {streams(gains)}; at {streams(losses)} it loses: turn it off there",
        )
    return True, f"it gains at {streams(gains)}" if len(
        speedups
    ) > 1 else "its gain is beyond the noise"
