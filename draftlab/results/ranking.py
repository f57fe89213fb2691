"""Rank drafts by their scores or predictions, and test which differences are significant. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from draftlab import intervals
from draftlab.errors import UserError
from draftlab.intervals import Interval, bootstrap, interval
from draftlab.reading import read_json, validation_text
from draftlab.results.score import Score, TaskResult, read_score, score_files

NO_DRAFT = "no draft"
ACCURACY_METRICS = ("acc", "exact_match")  # lm-eval's, without the name of a filter
SIGNIFICANCE_LEVEL = 0.05
SAME_PROMPTS = (
    "data",
    "prompts_sha256",
    "prompts",
    "prompt_tokens",
    "chat",
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
)


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
    speedup: Interval  # of whole requests; predicted: of the tokens after the first
    tpot_speedup: Interval | None  # of the tokens after the first; None where servers decoded
    score: Score | None
    tasks: list[TaskResult]

    @property
    def output_differs(self) -> bool:
        return self.score is not None and self.score.output_differs

    @property
    def doubt(self) -> str | None:
        """The reason why its speed-up is not known; None: there is none, or it was predicted."""
        return None if self.score is None else self.score.doubt

    @property
    def plain_tps(self) -> dict[str, float]:
        """Tokens per second without a draft in the same run by the target's weights, '' where they were predicted."""
        return self.score.plain_tps if self.score else {"": self.tokens_per_second / self.speedup.value}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTest:
    """Two drafts on the same items of one task. p: of McNemar's exact test, where items are right or wrong."""

    task: str
    metric: str
    difference: Interval  # first minus second, mean over items
    won: int  # items on which the first is better
    lost: int
    p: float | None

    @property
    def significant(self) -> bool:
        if self.p is not None:
            return self.p < SIGNIFICANCE_LEVEL
        return not self.difference.low <= 0 <= self.difference.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A candidate in a ranking.

    ratio_to_fastest: its speed-up over the fastest draft's; None for the fastest itself, and next to predictions.
    paired: both were measured on the same prompts.
    """

    candidate: Candidate
    ratio_to_fastest: Interval | None
    paired: bool
    tasks: list[PairedTest]

    @property
    def significant(self) -> bool | None:
        """True if it is slower than the fastest; None where that cannot be tested."""
        ratio = self.ratio_to_fastest
        return None if ratio is None or ratio.n < 2 else ratio.high < 1

    def as_dict(self) -> dict[str, Any]:
        """Return the ranked draft as JSON has it."""
        c, score = self.candidate, self.candidate.score
        tests = [
            asdict(t) | {"difference": t.difference.model_dump(), "significant": t.significant} for t in self.tasks
        ]
        return {
            "draft": c.name,
            "target": c.target,
            "measured": score is not None,
            "k": c.k,
            "mean_acceptance_length": score.acceptance(c.k).mean_acceptance_length if score else c.tokens_per_pass,
            "tokens_per_target_pass": c.tokens_per_pass,
            "tokens_per_second": c.tokens_per_second,
            "plain_tokens_per_second": max(c.plain_tps.values()),
            "plain_tokens_per_second_by_weights": c.plain_tps,
            "speedup": c.speedup.model_dump(),
            "speedup_of": "whole requests" if score else "tokens after the first",
            "tpot_speedup": c.tpot_speedup and c.tpot_speedup.model_dump(),
            "doubt": c.doubt,
            "identical": not c.output_differs,
            "equal_texts": score and score.equal_texts,
            "ratio_to_fastest": self.ratio_to_fastest and self.ratio_to_fastest.model_dump(),
            "same_prompts": self.paired,
            "significant": self.significant,
            "accuracy": [r.model_dump(exclude={"items"}) for r in c.tasks],
            "tasks": tests,
            "categories": category_rows(score) if score else [],
        }


def read_candidates(paths: Sequence[Path]) -> list[Candidate]:
    """Read scores, directories of scores, and what `predict --json` printed.

    Raises:
        UserError: there is none, or a file is neither.
    """
    read = [(candidate, file) for file in score_files(paths) for candidate in _read_file(file)]
    if not read:
        raise UserError(f"no score.json under {', '.join(map(str, paths))}; run draftlab score first")
    names = [candidate.name for candidate, _ in read]
    return [c if names.count(c.name) == 1 else replace(c, name=f"{c.name} in {file.parent}") for c, file in read]


def candidate_of(score: Score) -> Candidate:
    """Return a score at its best K."""
    k = score.best_k
    return Candidate(
        name=score.name,
        target=score.target.name,
        k=k,
        tokens_per_pass=score.tokens_per_pass(k),
        tokens_per_second=score.output_tps(k),
        speedup=score.best_k_speedup,
        tpot_speedup=score.best_k_tpot_speedup,
        score=score,
        tasks=score.draft.tasks,
    )


def rank(candidates: Sequence[Candidate]) -> list[Ranked]:
    """Return the fastest first; drafts that changed the output come after all others.

    Raises:
        UserError: they are drafts of different targets.
    """
    targets = sorted({c.target for c in candidates})
    if len(targets) > 1:
        raise UserError(f"drafts of different targets do not compare: {', '.join(targets)}")
    fastest, *others = sorted(candidates, key=lambda c: (c.output_differs, -c.speedup.value))
    first = Ranked(candidate=fastest, ratio_to_fastest=None, paired=True, tasks=[])
    return [first, *(_ranked(c, fastest) for c in others)]


def same_prompts(a: Score, b: Score) -> bool:
    return all(getattr(a.conditions, name) == getattr(b.conditions, name) for name in SAME_PROMPTS)


def speedup_ratio(a: Score, b: Score) -> Interval:
    """Return the speed-up of a over that of b, each at its best K; paired where their prompts are the same."""
    return intervals.speedup_ratio(a.timings(a.speculative), b.timings(b.speculative), paired=same_prompts(a, b))


def paired_tests(a: Sequence[TaskResult], b: Sequence[TaskResult]) -> list[PairedTest]:
    """Test every metric that both have of the same items."""
    results = {(r.task, r.metric): r for r in b}
    pairs = [(r, results[r.task, r.metric]) for r in a if (r.task, r.metric) in results]
    same = [(x, y) for x, y in pairs if len(x.items) == len(y.items) and x.items_sha256 == y.items_sha256]
    return [_paired_test(x, y) for x, y in same if x.items]


def category_rows(score: Score) -> list[dict[str, Any]]:
    """Return the best K by category of prompts; speeds of whole requests."""
    rows = []
    for name, prompts in score.prompts_by_category.items():
        facts = _subset_row(score, prompts)
        gain = score.subset(prompts).speedup(score.best_k) if facts["speedup"] is not None else None
        ends = {"speedup_low": gain and gain.low, "speedup_high": gain and gain.high}
        rows.append({"category": name, "prompts": len(prompts)} | facts | ends)
    return rows


def prompt_rows(score: Score) -> list[dict[str, Any]]:
    """Return the best K by prompt."""
    categories = [p.category for p in score.prompts] or [""] * score.conditions.prompts
    return [{"prompt": i, "category": name} | _subset_row(score, [i]) for i, name in enumerate(categories)]


def verdict_lines(ranking: Sequence[Ranked]) -> list[str]:
    """Return what the ranking says, one line each."""
    lines = [_first_line(ranking[0].candidate)]
    fastest = ranking[0].candidate.name
    for ranked in ranking[1:]:
        name, ratio = ranked.candidate.name, ranked.ratio_to_fastest
        if ranked.candidate.output_differs:
            lines.append(_discounted(ranked.candidate))
        elif ranked.candidate.doubt is not None:
            lines.append(f"{name} cannot be told from {fastest}, because {ranked.candidate.doubt}.")
        elif ratio is None or ratio.n < 2:
            lines.append(f"{name} cannot be tested against {fastest}: that takes scores over several prompts.")
        elif ranked.significant:
            lines.append(f"{name} is slower: {ratio} of the speed-up of {fastest}.")
        else:
            lines.append(f"{name} does not differ significantly: {ratio} of the speed-up of {fastest}.")
        lines += [f"  {_test_line(test, name, fastest)}" for test in ranked.tasks]
    return lines


def missed_thresholds(
    candidate: Candidate, acceptance_length: float, min_speedup: float | None, min_acceptance_length: float | None
) -> list[str]:
    """Return one sentence for each of the user's thresholds that a candidate does not reach, or cannot be judged by."""
    name, speedup, doubt, missed = candidate.name, candidate.speedup.value, candidate.doubt, []
    if min_speedup is not None and candidate.output_differs:
        missed.append(f"{name}: its output is not the target's own, so that no speed-up counts")
    if min_speedup is not None and speedup < min_speedup:
        missed.append(f"{name}: speed-up {speedup:.3f} is below --min-speedup {min_speedup}")
    elif min_speedup is not None and doubt is not None:
        missed.append(f"{name}: cannot tell whether it reaches --min-speedup {min_speedup}, because {doubt}")
    if min_acceptance_length is not None and acceptance_length < min_acceptance_length:
        bar = f"--min-acceptance-length {min_acceptance_length}"
        missed.append(f"{name}: acceptance length {acceptance_length:.3f} is below {bar}")
    return missed


def _first_line(c: Candidate) -> str:
    at = f"at K = {c.k} ({'measured, whole requests' if c.score else 'predicted, tokens after the first'})"
    if c.output_differs:
        return _discounted(c)
    if c.doubt is not None:
        return f"Cannot tell which is fastest: {c.name} has {c.speedup.as_speedup()} {at}, but {c.doubt}."
    if c.speedup.high < 1:
        return f"Plain decoding is fastest: the best draft, {c.name}, reaches {c.speedup} of its speed {at}."
    if c.speedup.low <= 1:
        return f"No draft is significantly faster than plain decoding; the best is {c.name} with {c.speedup} {at}."
    return f"{c.name} is fastest: {c.speedup.value:.2f}x {at}."


def _discounted(c: Candidate) -> str:
    return f"{c.name} changed the output: its speed-up of {c.speedup.value:.2f}x does not count."


def _read_file(file: Path) -> Iterator[Candidate]:
    content: Any = read_json(file)
    if not isinstance(content, dict) or "predictions" not in content:
        yield candidate_of(read_score(file))
        return
    try:
        predictions = _Predictions.model_validate(content).predictions
    except ValidationError as error:
        raise UserError(f"{file} is not what predict --json prints: {validation_text(error)}") from None
    for prediction in predictions:
        row = max(prediction.rows, key=lambda row: row.speedup.value)
        yield Candidate(
            name=prediction.name,
            target=prediction.target.partition(" on ")[0],
            k=row.k,
            tokens_per_pass=row.tokens_per_pass.value,
            tokens_per_second=row.tokens_per_second,
            speedup=row.speedup,
            tpot_speedup=row.speedup,
            score=None,
            tasks=[],
        )


def _ranked(candidate: Candidate, fastest: Candidate) -> Ranked:
    a, b, tests = candidate.score, fastest.score, paired_tests(candidate.tasks, fastest.tasks)
    if a is None or b is None:
        return Ranked(candidate=candidate, ratio_to_fastest=None, paired=False, tasks=tests)
    return Ranked(candidate=candidate, ratio_to_fastest=speedup_ratio(a, b), paired=same_prompts(a, b), tasks=tests)


def _paired_test(a: TaskResult, b: TaskResult) -> PairedTest:
    import numpy as np
    from scipy.stats import binomtest

    differences = np.subtract(a.items, b.items)
    signed = differences if a.higher_is_better else -differences
    won, lost = int((signed > 0).sum()), int((signed < 0).sum())
    binary = set(a.items) | set(b.items) <= {0.0, 1.0}
    n = len(differences)
    return PairedTest(
        task=a.task,
        metric=a.metric,
        difference=interval(bootstrap(lambda counts: counts @ differences / n, n), n),
        won=won,
        lost=lost,
        p=float(binomtest(won, won + lost).pvalue if won + lost else 1.0) if binary else None,  # McNemar 1947, exact
    )


def _subset_row(score: Score, prompts: list[int]) -> dict[str, Any]:
    """Return the best K of a score over some of its prompts."""
    k, part = score.best_k, score.subset(prompts)
    timed, counted = part.output_tps(0) > 0 and part.output_tps(k) > 0, bool(part.generations(k))
    return {
        "k": k,
        "mean_acceptance_length": part.acceptance(k).mean_acceptance_length if counted else None,
        "tokens_per_target_pass": part.tokens_per_pass(k) if counted else None,
        "output_tps": part.output_tps(k) if timed else None,
        "speedup": part.speedup_value(k) if timed else None,
        "tpot_speedup": part.tpot_speedup_value(k),
    }


def _test_line(test: PairedTest, name: str, other: str) -> str:
    difference = f"{test.difference.value:+.3f} ({test.difference.low:+.3f} to {test.difference.high:+.3f})"
    method = f"McNemar p = {test.p:.2g}" if test.p is not None else "paired bootstrap"
    verdict = "differs significantly" if test.significant else "does not differ significantly"
    return (
        f"{test.task}, {test.metric}: {name} {verdict} from {other}: {difference}, better on {test.won} and worse on "
        f"{test.lost} of {test.difference.n} items, {method}"
    )
