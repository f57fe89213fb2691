"""Rank drafts by their scores. Test which differences are significant, and list the doubts about scores."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftlab import intervals
from draftlab.errors import UserError
from draftlab.intervals import Interval
from draftlab.results.score import SAMPLING, Score, read_score, score_files

NO_DRAFT = "no draft"
REQUESTS = ("data", "prompts_sha256", "prompts", "prompt_tokens", "chat", *SAMPLING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A draft in a ranking, at its best K.

    Args:
        speedup: Speed-up of whole requests.
        doubt: Reason to doubt the score, or None.
        ratio_to_fastest: Speed-up of this draft divided by the speed-up of the fastest draft. None for the fastest
            draft itself.
        paired: Whether the requests of this draft and of the fastest draft were the same.
    """

    score: Score
    k: int
    speedup: Interval
    doubt: str | None
    ratio_to_fastest: Interval | None = None
    paired: bool = True

    @property
    def name(self) -> str:
        return self.score.name

    @property
    def significant(self) -> bool | None:
        """Return whether this draft is significantly slower than the fastest draft, or None if no test is possible."""
        ratio = self.ratio_to_fastest
        return None if ratio is None or ratio.n < 2 else ratio.high < 1

    def as_dict(self) -> dict[str, Any]:
        """Return the row of this draft in the JSON output of `draftlab report`."""
        score, ratio, tpot = self.score, self.ratio_to_fastest, self.score.best_k_tpot_speedup
        return {
            "draft": self.name,
            "target": score.target.name,
            "k": self.k,
            "mean_acceptance_length": score.acceptance(self.k).mean_acceptance_length,
            "tokens_per_target_pass": score.tokens_per_pass(self.k),
            "tokens_per_second": score.output_tps(self.k),
            "plain_tokens_per_second": max(score.plain_tps.values()),
            "plain_tokens_per_second_by_weights": score.plain_tps,
            "speedup": self.speedup.model_dump(),
            "tpot_speedup": tpot and tpot.model_dump(),
            "doubt": self.doubt,
            "identical": not score.output_differs,
            "equal_texts": score.equal_texts,
            "ratio_to_fastest": ratio and ratio.model_dump(),
            "same_prompts": self.paired,
            "significant": self.significant,
            "accuracy": [result.model_dump(exclude={"items"}) for result in score.draft.tasks],
            "categories": category_rows(score),
        }


def read_scores(paths: Sequence[Path]) -> list[Score]:
    """Read score.json files, and all score.json files under directories.

    If several scores have the same name, their directories are added to their names.

    Raises:
        UserError: There is no score, or a file is not a score.
    """
    files = score_files(paths)
    if not files:
        raise UserError(
            f"there is no score.json under {', '.join(map(str, paths))}; run draftlab score first"
        )
    scores = list(map(read_score, files))
    names = [score.name for score in scores]
    for i, file in enumerate(files):
        if names.count(names[i]) > 1:
            scores[i] = scores[i].model_copy(update={"name": f"{names[i]} in {file.parent}"})
    return scores


def rank(scores: Sequence[Score]) -> list[Ranked]:
    """Rank drafts by the speed-up of whole requests, the fastest first. Drafts that changed the output are last.

    Raises:
        UserError: The drafts have different targets.
    """
    targets = sorted({score.target.name for score in scores})
    if len(targets) > 1:
        raise UserError(
            f"the drafts have different targets, so they cannot be compared: {', '.join(targets)}; "
            "give only scores of the same target"
        )
    gains = [(score, score.best_k_speedup) for score in scores]
    gains.sort(key=lambda pair: (pair[0].output_differs, -pair[1].value))
    fastest, gain = gains[0]
    ranking = [Ranked(score=fastest, k=fastest.best_k, speedup=gain, doubt=fastest.doubt)]
    for score, gain in gains[1:]:
        ranking.append(
            Ranked(
                score=score,
                k=score.best_k,
                speedup=gain,
                doubt=score.doubt,
                ratio_to_fastest=speedup_ratio(score, fastest),
                paired=same_requests(score, fastest),
            )
        )
    return ranking


def same_requests(a: Score, b: Score) -> bool:
    return all(getattr(a.conditions, name) == getattr(b.conditions, name) for name in REQUESTS)


def speedup_ratio(a: Score, b: Score) -> Interval:
    """Return the speed-up of score a divided by the speed-up of score b, each at its best K, with an interval.

    The bootstrap is paired if both scores have the same requests.
    """
    return intervals.speedup_ratio(
        a.timings(a.speculative), b.timings(b.speculative), paired=same_requests(a, b)
    )


def category_rows(score: Score) -> list[dict[str, Any]]:
    """Return one row for each category of prompts. K is the best K over all prompts; speeds are of whole requests."""
    rows = []
    k = score.best_k
    for name, prompts in score.prompts_by_category.items():
        part = score.subset(prompts)
        length = per_pass = None
        if part.generations(k):
            length, per_pass = part.acceptance(k).mean_acceptance_length, part.tokens_per_pass(k)
        timed = part.output_tps(0) > 0 and part.output_tps(k) > 0
        rows.append(
            {
                "category": name,
                "prompts": len(prompts),
                "k": k,
                "mean_acceptance_length": length,
                "tokens_per_target_pass": per_pass,
                "output_tps": part.output_tps(k) if timed else None,
                **flat("speedup", part.speedup(k) if timed else None),
                "tpot_speedup": part.tpot_speedup_value(k),
            }
        )
    return rows


def flat(name: str, estimate: Interval | None) -> dict[str, float | None]:
    """Return an estimate as the entries name, name_low and name_high of a flat row."""
    names = (name, f"{name}_low", f"{name}_high")
    if estimate is None:
        return dict.fromkeys(names)
    return dict(zip(names, (estimate.value, estimate.low, estimate.high), strict=True))


def verdict_lines(ranking: Sequence[Ranked]) -> list[str]:
    """Return sentences about a ranking: which draft to serve, and which drafts are significantly slower."""
    lines = [_first_line(ranking[0])]
    fastest = ranking[0].score.label
    for ranked in ranking[1:]:
        name, ratio = ranked.score.label, ranked.ratio_to_fastest
        if ranked.score.output_differs:
            lines.append(_discounted(ranked))
        elif ranked.doubt is not None:
            lines.append(f"Cannot tell whether {name} is slower than {fastest}: {ranked.doubt}.")
        elif ranked.significant is None:
            lines.append(
                f"Cannot tell whether {name} is slower than {fastest}: the test needs several prompts per score."
            )
        elif ranked.significant:
            lines.append(f"{name} is slower: {ratio} of the speed-up of {fastest}.")
        else:
            lines.append(
                f"{name} does not differ significantly: {ratio} of the speed-up of {fastest}."
            )
    return lines


def missed_thresholds(
    score: Score, min_speedup: float | None, min_acceptance_length: float | None
) -> list[str]:
    """Return a sentence for each threshold that a draft misses, or that it may miss because its score is in doubt.

    min_speedup, min_acceptance_length: Thresholds of the user, or None.
    """
    name, doubt, missed = score.name, score.doubt, []
    if min_speedup is not None:
        speedup = score.best_k_speedup.value
        if score.output_differs:
            missed.append(
                f"{name}: its output differs from the target's own, so its speed-up does not count"
            )
        if speedup < min_speedup:
            missed.append(f"{name}: speed-up {speedup:.3f} is below --min-speedup {min_speedup}")
        elif doubt is not None:
            missed.append(
                f"{name}: cannot tell whether it reaches --min-speedup {min_speedup}, because {doubt}"
            )
    length = score.tokens_per_pass(score.best_k)
    if min_acceptance_length is not None and length < min_acceptance_length:
        bar = f"--min-acceptance-length {min_acceptance_length}"
        missed.append(f"{name}: acceptance length {length:.3f} is below {bar}")
    return missed


def _first_line(ranked: Ranked) -> str:
    name, gain, at = ranked.score.label, ranked.speedup, f"at K = {ranked.k}"
    if ranked.score.output_differs:
        return _discounted(ranked)
    if ranked.doubt is not None:
        return f"Cannot tell which is fastest: {name} has {gain.as_speedup()} {at}, but {ranked.doubt}."
    if gain.high < 1:
        return (
            f"Serve the target without a draft: with {name}, the best draft, the target runs at {gain} of its own "
            f"speed {at}."
        )
    if gain.low <= 1:
        return f"No draft is significantly faster than the target alone. The best is {name} with {gain} {at}."
    return f"Serve with {name} {at}: whole requests run at {gain.as_speedup()} the speed of the target alone."


def _discounted(ranked: Ranked) -> str:
    return f"{ranked.score.label} changed the output: its speed-up of {ranked.speedup.value:.2f}x does not count."


FEW_PROMPTS = 8
LOOPING_4GRAMS = 0.5
MANY_STEPS = 0.1  # fraction of truncated steps above which a warning is given


def score_warnings(scores: Sequence[Score]) -> list[str]:
    """Return a sentence for each reason to be careful with the scores. Each sentence names the drafts concerned."""
    drafts: dict[str, list[str]] = {}
    for score in scores:
        for text in _reasons(score):
            drafts.setdefault(text, []).append(score.label)
    texts = []
    for text, names in drafts.items():
        concerned = "all drafts" if 1 < len(scores) == len(names) else ", ".join(names)
        texts.append(f"{concerned}: {text}")
    facts = list(map(_facts, scores))
    differing = [name for name in facts[0] if any(each[name] != facts[0][name] for each in facts)]
    if differing:
        names = ", ".join(differing).replace("_", " ")
        texts.append(
            f"drafts were measured with different {names}, so their speed-ups cannot be compared"
        )
    return texts


def _facts(score: Score) -> dict[str, Any]:
    """Return the conditions that must be equal in two scores whose speed-ups are compared."""
    return score.conditions.model_dump(exclude={"draft_weights"}) | {"target": score.target.sha256}


def _reasons(score: Score) -> Iterator[str]:
    conditions = score.conditions
    if score.output_differs:
        texts = f"the output differs from the target's own ({score.equal_texts:.1%} of the texts are equal)"
        if conditions.dtype == "float32":
            yield f"{texts}: decoding was not lossless, so the speed-up does not count"
        else:
            yield (
                f"{texts}: rounding (dtype: {conditions.dtype}) may have decided ties differently, or there is a bug; "
                "measure again in float32 (--dtype float32) to find out"
            )
    if score.distinct_4grams < LOOPING_4GRAMS:
        share = f"{score.distinct_4grams:.0%}"
        yield (
            f"only {share} of the output's 4-grams are distinct: the target repeats itself, and all drafts predict "
            "repetition well"
        )
    whole = {r.task: r for r in score.target.tasks}
    for task, result in {r.task: r for r in score.draft.tasks if r.task in whole}.items():
        truncated = result.truncated, whole[task].truncated
        if any(truncated) and result.items_sha256 != whole[task].items_sha256:
            yield (
                f"{task}: {truncated[0]} of {result.requests} requests were cut to the draft's context, and "
                f"{truncated[1]} to the target's, so the two accuracies are of different prompts"
            )
    if (rounding := score.rounding) is not None:
        yield (
            f"int8 weights change the target: KL divergence {rounding.kl:.2g} nats per token; the most probable token "
            f"differs at {1 - rounding.top1:.1%} of {rounding.tokens} positions"
        )
    if score.learnt_prompts:
        yield (
            f"the draft was trained on answers to {score.learnt_prompts} of the {conditions.prompts} prompts, and "
            "gains less on other prompts; name unseen prompts by --prompt-file"
        )
    if conditions.prompts < FEW_PROMPTS:
        yield f"{conditions.prompts} prompts are too few for a good interval; use {FEW_PROMPTS} prompts or more"
    for model in (score.target, score.draft):
        if model.via_transformers:
            yield f"transformers ran {model.name}, which is slower than draftlab's engine"
    if score.served:
        yield "servers decoded the texts, so times include the network, and TTFT and TPOT are unknown"
    if conditions.in_phases:
        yield "the servers ran one after the other, so a change of the machine between the runs looks like a speed-up"
    short = len({g.prompt for g in score.plain if g.tokens < 2})
    if short:
        yield f"{short} of {conditions.prompts} answers have only one token, so a draft cannot speed them up"
    k = score.best_k
    acceptance = score.acceptance(k)
    if (acceptance.n_truncated_steps or 0) > MANY_STEPS * acceptance.num_spec_steps:
        cut, steps = acceptance.n_truncated_steps, acceptance.num_spec_steps
        yield (
            f"{cut} of {steps} steps at K = {k} were cut by the end of the output, which distorts tokens per "
            "target pass; raise --max-new-tokens"
        )
