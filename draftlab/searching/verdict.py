"""The verdict of auto: what to serve with, or no draft, with the reason and what would change it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from pydantic import Field

from draftlab.config.drafters import DrafterSpec
from draftlab.intervals import Interval
from draftlab.reading import FileModel
from draftlab.results.score import Score
from draftlab.searching.plan import Kind, not_tried, streams

NO_DRAFT = "no draft"
COMPARED, UNSEEN = "on the prompts that compared candidates", "on prompts that nothing was chosen on"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A way to draft. draft: its checkpoint or head. shape: of a draft model. drafter: None for a plain draft."""

    kind: Kind
    draft: Path | None = None
    shape: str = ""
    drafter: DrafterSpec | None = None

    @property
    def name(self) -> str:
        """Return what a score calls it."""
        if self.drafter is not None:
            return self.drafter.name
        assert self.draft is not None
        return self.draft.name

    @property
    def label(self) -> str:
        """Return it in words."""
        return {
            "draft": f"draft model {self.shape}",
            "parallel": f"parallel draft {self.shape}",
            "trimmed": f"draft model {self.shape} with a trimmed head",
            "eagle": "EAGLE-3 head",
            "prompt-lookup": "prompt lookup",
            "fallback": f"prompt lookup, then draft model {self.shape}",
            "fallback-eagle": "prompt lookup, then the EAGLE-3 head",
            "ngram": "n-grams of what drafts learn from",
        }[self.kind]


class Choice(FileModel):
    """A candidate at one K, over all streams. speedup: of whole requests, the geometric mean over streams.

    name: of its scores. label: in words. at_fewest, tokens_per_pass, tokens_per_second: at the fewest streams.
    """

    kind: Kind
    name: str
    label: str
    k: int
    speedup: float
    at_fewest: Interval
    tokens_per_pass: float
    tokens_per_second: float
    changed: bool = False  # it changed the target's output, so that its speed-up does not count


class Round(FileModel):
    """A draft after all its rounds of training so far: tokens trained on, tokens per target pass, and seconds."""

    tokens: float
    length: float
    seconds: float


class Training(FileModel):
    """The rounds of training of the winner, each as long as all before. stopped: why no further round follows."""

    k: int
    rounds: list[Round]
    stopped: str = ""

    def line(self) -> str:
        """Return it in words."""
        lengths = ", ".join(f"{each.length:.2f} after {each.tokens:,.0f} tokens" for each in self.rounds)
        return f"tokens per pass at K = {self.k}: {lengths}; {self.stopped}"


class Verdict(FileModel):
    """auto.json.

    speedups: of whole requests by streams, on prompts that nothing was chosen on if a draft seemed to gain at all.
    doubt: why nobody can tell from these scores; empty: there is no reason.
    """

    version: int = 3
    target: str
    use: bool
    choice: str  # label of a candidate, or "no draft"
    kind: Kind | None = None
    k: int | None = None
    speedups: dict[int, Interval]
    measured_on: str  # in words
    precision: str = ""  # of target and draft, and how passes ran, in words; empty: speedups of tokens after the first
    plain_tokens_per_second: float
    reason: str
    doubt: str = ""
    would_change: list[str] = Field(default_factory=list)
    ranking: list[Choice]
    training: Training | None
    left_out: dict[Kind, str]
    planned_minutes: float
    minutes: float
    draft: str = ""  # checkpoint or heads of the choice
    drafter: str = ""  # as score --drafter takes it; empty: a plain draft
    serve: str = ""  # what to type
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
        of = f"; whole requests, {self.precision}" if self.precision else ""
        lines = [f"{self.head()}: {self.reason}.", f"measured: {'; '.join(gains)}, {self.measured_on}{of}"]
        lines += [f"what would change it: {text}" for text in self.would_change]
        if self.training is not None:
            lines.append(f"training: {self.training.line()}")
        lines += not_tried(self.left_out) + self.notes
        return lines + [text for text in (self.serve and f"run it: {self.serve}", self.page) if text]


def ranking(candidates: Sequence[Candidate], scores: Mapping[int, Mapping[str, Score]]) -> list[Choice]:
    """Return each candidate at its best K over all streams, the fastest first. scores: by streams and name."""
    choices = [_at_best_k(each, [scores[n][each.name] for n in scores]) for each in candidates]
    return sorted(choices, key=lambda choice: (choice.changed, -choice.speedup))


def _at_best_k(candidate: Candidate, scores: Sequence[Score]) -> Choice:
    ks = set.intersection(*(set(score.speculative) for score in scores))
    gains = {k: geometric_mean(s.speedup_value(k) for s in scores) for k in ks}
    k = max(gains, key=lambda k: gains[k])
    return Choice(
        kind=candidate.kind, name=candidate.name, label=candidate.label, k=k, speedup=gains[k],
        at_fewest=scores[0].speedup(k),
        tokens_per_pass=scores[0].tokens_per_pass(k), tokens_per_second=scores[0].output_tps(k),
        changed=any(score.output_differs for score in scores),
    )  # fmt: skip


def finalists(ranking: Sequence[Choice]) -> list[Choice]:
    """Return what to measure on other prompts: the fastest, if it seems to gain, then what gained beyond the noise.

    The later ones are for the case that the fastest was so by chance; two, so that none is by trying often.
    """
    first, *others = ranking
    if first.speedup <= 1 or first.changed:
        return []
    return [first, *(each for each in others if each.at_fewest.low > 1 and not each.changed)][:2]


def speedups(scores: Mapping[int, Mapping[str, Score]], choice: Choice) -> dict[int, Interval]:
    """Return the speed-up of a choice by streams. scores: by streams and name."""
    return {n: by_name[choice.name].speedup(choice.k) for n, by_name in scores.items()}


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
        return True, f"it gains at {streams(gains)}; at {streams(losses)} it loses: turn it off there"
    return True, f"it gains at {streams(gains)}" if len(speedups) > 1 else "its gain is beyond the noise"
