"""Candidates side by side: who is fastest, who cannot be told apart from it, on which kinds of prompts. No torch."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from rich.table import Table
from rich.text import Text

from draftlab import intervals
from draftlab.errors import UserError
from draftlab.files import validation_text
from draftlab.intervals import Interval, Timings, bootstrap
from draftlab.results.report import terminal_table
from draftlab.results.score import Score, TaskResult, read_score

HEADS = ("draft", "K", "tokens per\ntarget pass", "tok/s", "speed-up\n95%", "against\nthe fastest", "acc")
SURE = 0.05  # a p-value below it is a difference


class _Read(BaseModel):
    """The part of a prediction that is compared; `predict --json` writes more."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class _Row(_Read):
    k: int
    tokens_per_pass: Interval
    speedup: Interval
    tokens_per_second: float


class _Prediction(_Read):
    name: str
    target: str
    rows: list[_Row]


class _Predictions(_Read):
    predictions: list[_Prediction]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A draft at its best K, measured or predicted (score None)."""

    name: str
    target: str
    k: int
    tokens_per_pass: float
    tokens_per_second: float
    speedup: Interval
    score: Score | None

    @property
    def output_differs(self) -> bool:
        return self.score is not None and self.score.output_differs


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTest:
    """One task, two drafts, the same items. p: McNemar's exact test, of items that are right or wrong; else None."""

    task: str
    metric: str
    difference: Interval  # first less second, mean over items
    won: int  # items where the first is better
    lost: int
    p: float | None

    @property
    def significant(self) -> bool:
        return self.p < SURE if self.p is not None else not self.difference.low <= 0 <= self.difference.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A candidate among others. behind: its speed-up over the fastest's; None: the fastest, or nothing to draw from."""

    candidate: Candidate
    ratio_to_fastest: Interval | None
    paired: bool  # on the same prompts
    tasks: list[PairedTest]

    @property
    def significant(self) -> bool | None:
        return None if self.ratio_to_fastest is None or self.ratio_to_fastest.n < 2 else self.ratio_to_fastest.high < 1


def read_candidates(paths: Sequence[Path]) -> list[Candidate]:
    """From scores, folders of scores, and what `predict --json` printed.

    Raises:
        UserError: none there, or neither a score nor predictions.
    """
    files = [f for p in paths for f in (sorted(p.rglob("score.json")) if p.is_dir() else [p])]
    found = [(candidate, file) for file in files for candidate in _read_file(file)]
    if not found:
        raise UserError(f"no score.json under {', '.join(map(str, paths))}; run draftlab score first")
    names = [candidate.name for candidate, _ in found]
    return [c if names.count(c.name) == 1 else replace(c, name=f"{c.name} in {file.parent}") for c, file in found]


def candidate_of(score: Score) -> Candidate:
    """A score at its best K."""
    k = score.best_k
    return Candidate(
        name=score.name,
        target=score.target.name,
        k=k,
        tokens_per_pass=score.tokens_per_pass(k),
        tokens_per_second=score.output_tps(k),
        speedup=score.best_k_speedup,
        score=score,
    )


def rank(candidates: Sequence[Candidate]) -> list[Ranked]:
    """Fastest first, but one that changed the output behind all that did not.

    Raises:
        UserError: they are drafts of different targets.
    """
    targets = sorted({c.target for c in candidates})
    if len(targets) > 1:
        raise UserError(f"these are drafts of different targets, which do not compare: {', '.join(targets)}")
    fastest, *others = sorted(candidates, key=lambda c: (c.output_differs, -c.speedup.value))
    return [
        Ranked(candidate=fastest, ratio_to_fastest=None, paired=True, tasks=[]),
        *(_place(c, fastest) for c in others),
    ]


def same_prompts(a: Score, b: Score) -> bool:
    facts = (
        "data", "prompts_sha256", "prompts", "prompt_tokens", "max_tokens", "temperature", "top_k", "top_p",
        "min_p", "seed",
    )  # fmt: skip
    return all(getattr(a.conditions, name) == getattr(b.conditions, name) for name in facts)


def speedup_ratio(a: Score, b: Score) -> Interval:
    """Speed-up of a over that of b, each at a K chosen on other prompts; drawn together where their prompts agree."""
    return intervals.speedup_ratio(_arm(a), _arm(b), paired=same_prompts(a, b))


def paired_tests(a: Sequence[TaskResult], b: Sequence[TaskResult]) -> list[PairedTest]:
    """Of every metric that both have of the same items."""
    other = {(r.task, r.metric): r for r in b}
    pairs = [(r, other[r.task, r.metric]) for r in a if (r.task, r.metric) in other]
    return [_paired(x, y) for x, y in pairs if x.items and len(x.items) == len(y.items)]


def mcnemar(won: int, lost: int) -> float:
    """Two-sided exact p-value: items on which two differ go either way with the same chance (McNemar 1947)."""
    n = won + lost
    tail = sum(math.comb(n, i) for i in range(min(won, lost) + 1)) / 2**n
    return min(1.0, 2 * tail)


def category_rows(score: Score) -> list[dict[str, Any]]:
    """The best K by kind of prompt; None where the answers are of one token, which tells nothing about speed."""
    rows = []
    for name, prompts in score.prompts_by_category.items():
        facts = _part(score, prompts)
        gain = score.subset(prompts).speedup(score.best_k) if facts["speedup"] is not None else None
        interval = {"speedup_low": gain and gain.low, "speedup_high": gain and gain.high}
        rows.append({"category": name, "prompts": len(prompts)} | facts | interval)
    return rows


def category_table(score: Score) -> Table:
    """The best K by kind of prompt, the fastest first."""
    found = sorted(category_rows(score), key=lambda row: -(row["speedup"] or 0))
    rows = [[row["category"], str(row["prompts"]), *_category_cells(row)] for row in found]
    heads = ("prompts", "n", "tokens per\ntarget pass", "tok/s", "speed-up (95%)")
    table = terminal_table(heads, rows, best=-1, flexible=0)
    table.caption = Text(f"{score.name} at K = {score.best_k}, by kind of prompt.")
    return table


def prompt_rows(score: Score) -> list[dict[str, Any]]:
    """The best K by prompt."""
    kinds = [p.category for p in score.prompts] or [""] * score.conditions.prompts
    return [{"prompt": i, "category": kind} | _part(score, [i]) for i, kind in enumerate(kinds)]


def verdict_lines(places: Sequence[Ranked]) -> list[str]:
    """What the ranking says, one line each."""
    first = places[0].candidate
    kind = "measured" if first.score else "predicted"
    gain, at = first.speedup, f"at K = {first.k} ({kind})"
    said = [f"{first.name} is fastest: {gain.value:.2f}x {at}."]
    if gain.high < 1:
        said = [f"No draft is fastest: even {first.name}, the best of them, has {_ratio(gain)} of its speed {at}."]
    elif gain.low <= 1:
        said = [f"No draft here is clearly faster than none: {first.name} comes nearest, {_ratio(gain)} {at}."]
    if first.output_differs:
        said = [_no_gain(first)]
    for place in places[1:]:
        name, ratio = place.candidate.name, place.ratio_to_fastest
        if place.candidate.output_differs:
            said.append(_no_gain(place.candidate))
        elif ratio is None or ratio.n < 2:
            said.append(f"{name}: no interval between a prediction, or one prompt, and another.")
        elif place.significant:
            said.append(f"{name} is slower: {_ratio(ratio)} of it.")
        else:
            said.append(f"{name} cannot be told apart from it: {_ratio(ratio)} of its speed-up.")
        said += [f"  {_task_words(test, name, first.name)}" for test in place.tasks]
    return said


def comparison(places: Sequence[Ranked]) -> Table:
    """One row per candidate, the fastest first and marked."""
    none = ["no draft", "–", "1.00", f"{undrafted(places[0].candidate):.4g}", "1.00x", "", "–"]
    at = sum(not place.candidate.output_differs and place.candidate.speedup.value > 1 for place in places)
    rows = [_row(place) for place in places]
    table = terminal_table(HEADS, [*rows[:at], none, *rows[at:]], best=0, flexible=0)
    table.caption = Text(
        "* fastest, each at its best K, with the speed-up of a K chosen on other prompts. ~ cannot be told apart from "
        "the fastest draft. Against it: speed-up over its speed-up, drawn over prompts, of both together where they "
        "are the same. Intervals: 95%. acc: the first task that has one."
    )
    return table


def undrafted(c: Candidate) -> float:
    """Tokens per second without a draft, in the run that measured c."""
    return c.score.output_tps(0) if c.score else c.tokens_per_second / c.speedup.value


def as_dict(place: Ranked) -> dict[str, Any]:
    c = place.candidate
    tasks = [asdict(t) | {"difference": t.difference.model_dump(), "significant": t.significant} for t in place.tasks]
    return {
        "draft": c.name, "target": c.target, "measured": c.score is not None, "k": c.k,
        "mean_acceptance_length": c.score.acceptance(c.k).mean_acceptance_length if c.score else c.tokens_per_pass,
        "tokens_per_target_pass": c.tokens_per_pass, "tokens_per_second": c.tokens_per_second,
        "plain_tokens_per_second": undrafted(c),
        "speedup": c.speedup.model_dump(), "identical": not c.output_differs,
        "against_fastest": place.ratio_to_fastest and place.ratio_to_fastest.model_dump(), "same_prompts": place.paired,
        "significant": place.significant,
        "tasks": tasks, "categories": category_rows(c.score) if c.score else [],
    }  # fmt: skip


def _no_gain(c: Candidate) -> str:
    return f"{c.name} changed the output: its speed-up of {c.speedup.value:.2f}x does not count."


def _read_file(file: Path) -> list[Candidate]:
    try:
        content: Any = json.loads(file.read_text())
    except (OSError, ValueError):
        content = None
    if isinstance(content, dict) and "predictions" in content:
        return _predicted(file, content)
    return [candidate_of(read_score(file))]


def _predicted(file: Path, content: Any) -> list[Candidate]:
    try:
        read = _Predictions.model_validate(content).predictions
    except ValidationError as error:
        raise UserError(f"{file} is not what predict --json prints: {validation_text(error)[:200]}") from None
    found = []
    for prediction in read:
        row = max(prediction.rows, key=lambda row: row.speedup.value)
        found.append(
            Candidate(
                name=prediction.name, target=prediction.target.partition(" on ")[0], k=row.k,
                tokens_per_pass=row.tokens_per_pass.value,
                tokens_per_second=row.tokens_per_second, speedup=row.speedup, score=None,
            )
        )  # fmt: skip
    return found


def _place(candidate: Candidate, fastest: Candidate) -> Ranked:
    ours, theirs = candidate.score, fastest.score
    if ours is None or theirs is None:
        return Ranked(candidate=candidate, ratio_to_fastest=None, paired=False, tasks=[])
    tests = paired_tests(ours.draft.tasks, theirs.draft.tasks)
    return Ranked(
        candidate=candidate,
        ratio_to_fastest=speedup_ratio(ours, theirs),
        paired=same_prompts(ours, theirs),
        tasks=tests,
    )


def _row(place: Ranked) -> list[str]:
    c = place.candidate
    gain = f"{c.speedup.value:.2f}x" + (f"\n{c.speedup.low:.2f}-{c.speedup.high:.2f}" if c.speedup.n > 1 else "")
    accuracy = [r.value for r in c.score.draft.tasks if r.metric == "acc"] if c.score else []
    mark = "~ " if place.significant is False else ""
    return [
        mark + c.name + ("" if c.score else " (predicted)"),
        str(c.k), f"{c.tokens_per_pass:.2f}", f"{c.tokens_per_second:.4g}", gain,
        "" if place.ratio_to_fastest is None else _ratio(place.ratio_to_fastest).replace(" (", "\n("),
        f"{accuracy[0]:.3f}" if accuracy else "–",
    ]  # fmt: skip


def _ratio(value: Interval) -> str:
    return f"{value.value:.2f} ({value.low:.2f} to {value.high:.2f})" if value.n > 1 else f"{value.value:.2f}"


def _arm(score: Score) -> Timings:
    return score.timings(score.speculative)


def _paired(a: TaskResult, b: TaskResult) -> PairedTest:
    differences = [x - y for x, y in zip(a.items, b.items, strict=True)]
    sign = 1 if a.higher_is_better else -1
    won, lost = (sum(sign * side * d > 0 for d in differences) for side in (1, -1))
    binary = set(a.items) | set(b.items) <= {0.0, 1.0}
    return PairedTest(
        task=a.task,
        metric=a.metric,
        difference=bootstrap(differences, lambda drawn: sum(drawn) / len(drawn)),
        won=won,
        lost=lost,
        p=mcnemar(won, lost) if binary else None,
    )


def _part(score: Score, prompts: list[int]) -> dict[str, Any]:
    """What the best K does for some prompts."""
    k, part = score.best_k, score.subset(prompts)
    timed, steps = part.output_tps(0) > 0 and part.output_tps(k) > 0, bool(part.generations(k))
    return {
        "k": k,
        "mean_acceptance_length": part.acceptance(k).mean_acceptance_length if steps else None,
        "tokens_per_target_pass": part.tokens_per_pass(k) if steps else None,
        "output_tps": part.output_tps(k) if timed else None,
        "speedup": part.speedup_value(k) if timed else None,
    }


def _category_cells(row: dict[str, Any]) -> list[str]:
    length = "–" if row["tokens_per_target_pass"] is None else f"{row['tokens_per_target_pass']:.2f}"
    if row["speedup"] is None:
        return [length, "–", "–"]
    spread = f" ({row['speedup_low']:.2f} to {row['speedup_high']:.2f})" if row["prompts"] > 1 else ""
    return [length, f"{row['output_tps']:.4g}", f"{row['speedup']:.2f}x{spread}"]


def _task_words(test: PairedTest, name: str, other: str) -> str:
    differ = f"{test.difference.value:+.3f} ({test.difference.low:+.3f} to {test.difference.high:+.3f})"
    how = f"McNemar p = {test.p:.2g}" if test.p is not None else "paired bootstrap"
    verdict = "differs" if test.significant else "cannot be told apart"
    return (
        f"{test.task}, {test.metric}: {name} {verdict} from {other}: {differ}, better on {test.won} and worse on "
        f"{test.lost} of {test.difference.n} items, {how}"
    )
