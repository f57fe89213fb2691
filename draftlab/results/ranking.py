"""Rank drafts by their scores. Test which differences are significant, and list the doubts about scores.

A ranking has one baseline. Scores without a common baseline are in different groups, and no ratio is between groups.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftlab import intervals
from draftlab.errors import UserError
from draftlab.intervals import Interval, Timings
from draftlab.quantities import format_number
from draftlab.results.score import RATES, SAMPLING, Score, Seconds, read_score, score_files

NO_DRAFT = "no draft"
REQUESTS = ("selection", *SAMPLING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A draft in a ranking, at its best K.

    Args:
        speedup: Speed-up of whole requests.
        doubt: Reason to doubt the score, or None.
        gain: For the fastest draft, the speed-up that counts for a verdict: draft and K are chosen on other requests
            (see intervals.best_of). For other drafts, their own speed-up.
        choices: Number of drafts among which the fastest one was chosen.
        ratio_to_fastest: Speed-up of this draft divided by the speed-up of the fastest draft. None for the fastest
            draft itself. The draft is slower if the interval is below 1.
        needed: Number of conversations that would probably show that a draft is slower, if it is 10 % slower.
    """

    score: Score
    k: int
    speedup: Interval
    doubt: str | None
    gain: Interval
    choices: int = 1
    ratio_to_fastest: Interval | None = None
    needed: int | None = None

    @property
    def name(self) -> str:
        return self.score.name

    @property
    def significant(self) -> bool | None:
        """Return whether this draft is significantly slower than the fastest draft, or None if no test is possible."""
        ratio = self.ratio_to_fastest
        if ratio is None or not ratio.decides or self.score.undecided is not None:
            return None
        return ratio.below(1)

    def as_dict(self) -> dict[str, Any]:
        """Return the row of this draft in the JSON output of `draftlab report`."""
        score = self.score
        ratio = self.ratio_to_fastest
        tpot = self.score.best_k_tpot_speedup
        return {
            "draft": self.name,
            "target": score.target.name,
            "k": self.k,
            "mean_acceptance_length": score.acceptance(self.k).mean_acceptance_length,
            "tokens_per_target_pass": score.tokens_per_pass(self.k),
            "seconds": score.seconds,
            "tokens_per_second": score.output_tps(self.k),
            "plain_tokens_per_second": max(score.plain_tps.values()),
            "plain_tokens_per_second_by_weights": score.plain_tps,
            "speedup": self.speedup.model_dump(),
            "gain": self.gain.model_dump(),
            "choices": self.choices,
            "tpot_speedup": tpot and tpot.model_dump(),
            "timed": score.timed,
            "doubt": self.doubt,
            "identical": not score.output_differs,
            "equal_texts": score.equal_texts,
            "ratio_to_fastest": ratio and ratio.model_dump(),
            "needed_conversations": self.needed,
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
        raise UserError(f"there is no score.json under {', '.join(map(str, paths))}; run draftlab score first")
    scores = list(map(read_score, files))
    names = [score.name for score in scores]
    for i, file in enumerate(files):
        if names.count(names[i]) > 1:
            scores[i] = scores[i].model_copy(update={"name": f"{names[i]} in {file.parent}"})
    return scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Plain decoding at one precision: a row of a ranking.

    Args:
        score: Score in which it was timed.
        speedup: Speed-up over the baseline of the same score. 1 for the baseline itself.
    """

    weights: str
    score: Score
    speedup: float

    @property
    def name(self) -> str:
        return f"{NO_DRAFT}, {self.weights}"

    @property
    def timed(self) -> bool:
        """Return whether all prompts were timed. Otherwise a few prompts showed that this precision is slower."""
        return self.weights in self.score.plain_by_weights

    @property
    def tokens_per_second(self) -> float:
        return self.score.plain_tps[self.weights]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Drafts whose speed-ups have the same baseline, ranked.

    Args:
        name: The conditions in which this group differs from the other groups, as text. "" if there is one group.
    """

    name: str
    ranking: list[Ranked]

    @property
    def scores(self) -> list[Score]:
        """Return the scores in the order of the ranking."""
        return [ranked.score for ranked in self.ranking]

    @property
    def baseline(self) -> str:
        """Return the precision of the plain decoding over which all speed-ups of the group are."""
        return self.ranking[0].score.baseline_weights

    @property
    def seconds(self) -> Seconds:
        return self.ranking[0].score.seconds

    @property
    def plain(self) -> list[Plain]:
        """Return plain decoding at each precision that was timed, the fastest first."""
        rows: dict[str, Plain] = {}
        for score in self.scores:
            speeds = score.plain_tps
            for weights, speed in speeds.items():
                ratio = speed / speeds[self.baseline]
                rows.setdefault(weights, Plain(weights=weights, score=score, speedup=ratio))
        return sorted(rows.values(), key=lambda row: -row.speedup)

    def as_dict(self) -> dict[str, Any]:
        """Return the group in the JSON output of `draftlab report`."""
        return {
            "group": self.name,
            "baseline_weights": self.baseline,
            "seconds": self.seconds,
            "plain": [
                {
                    "weights": row.weights,
                    "tokens_per_second": row.tokens_per_second,
                    "speedup": row.speedup,
                }
                for row in self.plain
            ],
            "ranking": [ranked.as_dict() for ranked in self.ranking],
        }


def grouped(scores: Sequence[Score]) -> list[Group]:
    """Return the scores in groups with one baseline each, in the order of the scores, and rank each group.

    Raises:
        UserError: The drafts have different targets.
    """
    targets = sorted({score.target.name for score in scores})
    if len(targets) > 1:
        raise UserError(
            f"the drafts have different targets, so they cannot be compared: {', '.join(targets)}; "
            "give only scores of the same target"
        )
    parts: list[list[Score]] = []
    for score in scores:
        part = next((part for part in parts if _setting(part[0]) == _setting(score)), None)
        if part is None:
            parts.append([score])
        else:
            part.append(score)
    settings = [_setting(part[0]) for part in parts]
    differing = _differing(settings)
    if all(setting["baseline weights"] == setting["target weights"] for setting in settings):
        differing = [name for name in differing if name != "baseline weights"]
    names = [", ".join(_shown(name, setting[name]) for name in differing) for setting in settings]
    return [Group(name=name, ranking=_rank(part)) for name, part in zip(names, parts, strict=True)]


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """The scores of a run of `draftlab score`: one for each draft, drafter and batch size."""

    scores: list[Score]

    @property
    def best(self) -> Score:
        """Return the score with the highest speed-up of whole requests.

        Raises:
            UserError: Several batch sizes were measured, so the speed-ups have several baselines.
        """
        return rank(self.scores)[0].score

    @property
    def interval(self) -> Interval:
        """Return the speed-up of whole requests with its 95 % interval, if draft and K are chosen on other requests."""
        return rank(self.scores)[0].gain

    @property
    def speedup(self) -> float:
        """Return the value of `interval`."""
        return self.interval.value


def rank(scores: Sequence[Score]) -> list[Ranked]:
    """Rank drafts by the speed-up of whole requests, the fastest first. Drafts that changed the output are last.

    Raises:
        UserError: The drafts have different targets or baselines.
    """
    groups = grouped(scores)
    if len(groups) > 1:
        raise UserError(
            "the speed-ups are over different baselines, so they cannot be ranked together: "
            f"{'; '.join(group.name for group in groups)}; rank the scores of one baseline"
        )
    return groups[0].ranking


def _load(score: Score) -> dict[str, Any]:
    """Return what must be equal in two scores whose tokens per second are compared: target, machine and requests."""
    conditions = score.conditions
    machine = score.environment
    requests = {name: getattr(conditions, name) for name in REQUESTS}
    if requests["selection"] is None:
        # an earlier version did not record the prompts: only scores of the same run surely have the same
        requests["selection"] = [(g.prompt, g.request) for g in score.plain]
    return {
        "target": score.target.sha256,
        "device": conditions.device,
        "processor": machine and machine.processor,
        "served": score.served,
        "servers one after the other": conditions.in_phases,
        "seconds": score.seconds,
        "batch": conditions.batch,
        **requests,
    }


def _shown(name: str, value: object) -> str:
    """Return a fact with its name as text. Hashes are shortened."""
    if name == "selection" and not isinstance(value, str):
        return "no recorded selection of prompts, so they are compared with no other score"
    text = str(value)[:8] if name in ("target", "selection") else str(value)
    return f"{name.replace('_', ' ')} {text}"


def _setting(score: Score) -> dict[str, Any]:
    """Return what must be equal in two scores whose speed-ups are compared: the load, and how the target ran.

    Conditions of the draft alone, such as its precision and the verify rule, do not change the baseline.
    """
    conditions = score.conditions
    return {
        "target weights": conditions.target_weights,
        "baseline weights": score.baseline_weights,
        "activations": conditions.dtype,
        "mode": conditions.mode,
        "threads": conditions.threads,
        **_load(score),
    }


def _differing(facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the facts that are not the same everywhere."""
    return [name for name in facts[0] if any(each[name] != facts[0][name] for each in facts)]


def _rank(scores: Sequence[Score]) -> list[Ranked]:
    rows = sorted(
        map(alone, scores),
        # a draft that was not timed never wins
        key=lambda row: (row.score.output_differs, not row.score.timed, -row.gain.value),
    )
    ordered = [row.score for row in rows]
    fastest = rows[0].score
    # a draft that changed the output was not among the choices
    rivals = [score for score in ordered if score.timed and score.output_differs == fastest.output_differs]
    if not rivals:
        return rows
    timed = _timed_alike(rivals)
    behind = dict(zip(map(id, rivals[1:]), intervals.against_first(timed), strict=True))
    chosen = intervals.best_of(timed)
    ranking = []
    for row in rows:
        score = row.score
        if score is fastest:
            row = replace(row, gain=chosen, choices=len(rivals))
        elif id(score) in behind:
            ratio, needed = behind[id(score)]
            row = replace(row, ratio_to_fastest=ratio, needed=needed)
        elif score.timed:
            row = replace(row, ratio_to_fastest=speedup_ratio(score, fastest))
        ranking.append(row)
    return ranking


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to serve the target: a draft at its best K, or plain decoding.

    Args:
        group: Name of its group.
        k: Number of drafted tokens. None for plain decoding.
        score: Score in which it was timed.
        tokens_per_second: Speed of whole requests.
    """

    name: str
    group: str
    k: int | None
    score: Score
    tokens_per_second: Interval

    def as_dict(self) -> dict[str, Any]:
        """Return the way in the JSON output of `draftlab report`."""
        return {
            "name": self.name,
            "group": self.group,
            "k": self.k,
            "tokens_per_second": self.tokens_per_second.model_dump(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Overall:
    """The fastest way of all groups, by tokens per second of whole requests.

    Args:
        way: The way. None if the tokens per second of the groups cannot be compared, or if those of the way are in
            doubt.
        line: The result as a sentence.
    """

    way: Way | None
    line: str


def overall(groups: Sequence[Group]) -> Overall:
    """Return the fastest way of all groups. Drafts that changed the output do not count."""
    differing = _differing([_load(group.scores[0]) for group in groups])
    unknown = "Which way is the fastest of all cannot be said, because"
    if differing:
        names = ", ".join(differing).replace("_", " ")
        return Overall(way=None, line=f"{unknown} these differ between the groups: {names}.")
    way = max(_ways(groups), key=lambda way: way.tokens_per_second.value)
    if way.score.doubt is not None:
        return Overall(way=None, line=f"{unknown} of {way.name}: {way.score.doubt}.")
    at = "" if way.k is None else f" at K = {way.k}"
    rate = way.tokens_per_second
    unit = RATES[way.score.seconds]
    text = format_number(rate.value)
    if rate.decides:
        text += f" ({format_number(rate.low)} to {format_number(rate.high)})"
    return Overall(way=way, line=f"The fastest way of all: {way.name}{at}, {text} {unit}.")


def _ways(groups: Sequence[Group]) -> Iterator[Way]:
    for group in groups:
        for plain in group.plain:
            runs = plain.score.plain_by_weights.get(plain.weights)
            if runs is None:  # clearly slower, and not timed in full
                continue
            yield Way(
                name=plain.name,
                group=group.name,
                k=None,
                score=plain.score,
                tokens_per_second=plain.score.tokens_per_second(runs),
            )
        for ranked in group.ranking:
            score = ranked.score
            if score.timed and not score.output_differs:
                yield Way(
                    name=score.label,
                    group=group.name,
                    k=ranked.k,
                    score=score,
                    tokens_per_second=score.tokens_per_second(score.runs(ranked.k)),
                )


def alone(score: Score) -> Ranked:
    """Return a draft that is compared with no other draft."""
    gain = score.best_k_speedup
    return Ranked(score=score, k=score.best_k, speedup=gain, doubt=score.doubt, gain=gain)


def _timed_alike(scores: Sequence[Score]) -> list[Timings]:
    """Return the timings of the requests that all scores timed, each at all its K, by conversation.

    The scores have the same prompts, but the timing of one may have ended before that of another. If one of the scores
    does not say which requests are of one conversation, another one may.
    """
    numbers = next((known for known in map(_conversations, scores) if None not in known), None)
    timed = [{generation.prompt for generation in score.plain} for score in scores]
    common = set.intersection(*timed)
    parts = [score if own == common else score.subset(common) for score, own in zip(scores, timed, strict=True)]
    return [part.timings(part.speculative, numbers) for part in parts]


def _conversations(score: Score) -> list[int | None]:
    return [prompt.conversation for prompt in score.prompts] or [None]


def speedup_ratio(a: Score, b: Score) -> Interval:
    """Return the speed-up of score a divided by the speed-up of score b, each at its best K, with an interval.

    The scores have the same requests, and the ratio is that of each conversation with itself.
    """
    return intervals.speedup_ratio(*_timed_alike([a, b]), paired=True)


def category_rows(score: Score) -> list[dict[str, Any]]:
    """Return one row for each category of prompts. K is the best K over all prompts; speeds are of whole requests."""
    rows = []
    k = score.best_k
    for name, prompts in score.prompts_by_category.items():
        part = score.subset(prompts)
        length = per_pass = None
        if part.generations(k) or part.prediction is not None:
            length = part.acceptance(k).mean_acceptance_length
            per_pass = part.tokens_per_pass(k)
        timed = score.is_timed(k) and part.output_tps(0) > 0 and part.output_tps(k) > 0
        rows.append(
            {
                "category": name,
                "prompts": len(prompts),
                "conversations": part.conversations,
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
    ends = estimate.model_dump()
    return dict(zip(names, (ends["value"], ends["low"], ends["high"]), strict=True))


def verdict_lines(ranking: Sequence[Ranked]) -> list[str]:
    """Return sentences about a ranking: which draft to serve, and which drafts are significantly slower."""
    fastest = ranking[0]
    return [_first_line(fastest), *(_later_line(ranked, fastest) for ranked in ranking[1:])]


def _later_line(ranked: Ranked, fastest: Ranked) -> str:
    name = ranked.score.label
    best = fastest.score.label
    ratio = ranked.ratio_to_fastest
    reason = ranked.doubt or ranked.score.undecided or fastest.score.undecided
    if ranked.score.output_differs:
        return _discounted(ranked)
    if not ranked.score.timed:
        return f"{name} was not timed: {ranked.score.predicted_text()} is predicted at K = {ranked.k}."
    assert ratio is not None  # it is not the fastest draft itself
    if reason is not None:
        return f"Cannot tell whether {name} is slower than {best}: {reason}."
    if ratio.below(1):
        return f"{name} is slower: {ratio} of the speed-up of {best}."
    if ratio.low > intervals.SHOWN:
        return f"{name} is at most 10 % slower than {best}, or faster: {ratio} of its speed-up."
    text = f"Cannot tell whether {name} is slower than {best}: {ratio} of its speed-up"
    if ranked.needed is not None and ranked.needed > ratio.n:
        text += f"; about {ranked.needed:,} conversations would show a difference of 10 %"
    return f"{text}."


def missed_thresholds(ranked: Ranked, min_speedup: float | None, min_acceptance_length: float | None) -> list[str]:
    """Return a sentence for each threshold that a draft misses, or that it may miss because its score is in doubt.

    min_speedup: Threshold of the user for the low end of the speed-up's interval, or None.
    min_acceptance_length: Threshold of the user, or None.
    """
    score = ranked.score
    gain = ranked.gain
    missed = list[str]()
    name = score.name
    bar = f"--min-speedup {min_speedup}"
    if min_speedup is not None:
        reason = score.undecided or ranked.doubt
        if score.output_differs:
            missed.append(f"{name}: its output differs from the target's own, so its speed-up does not count")
        if gain.value < min_speedup:
            missed.append(f"{name}: speed-up {gain} is below {bar}, by {min_speedup - gain.value:.3f}")
        elif reason is not None:
            missed.append(f"{name}: cannot tell whether it reaches {bar}, because {reason}")
        elif gain.low < min_speedup:
            missed.append(
                f"{name}: speed-up {gain} may be below {bar}: the low end misses it by "
                f"{min_speedup - gain.low:.3f}; {_more(gain, min_speedup)}"
            )
    length = score.tokens_per_pass(score.best_k)
    if min_acceptance_length is not None and length < min_acceptance_length:
        bar = f"--min-acceptance-length {min_acceptance_length}"
        missed.append(f"{name}: acceptance length {length:.3f} is below {bar}")
    return missed


def _more(gain: Interval, bar: float) -> str:
    """Return text about the number of conversations that would show whether a speed-up is above a bar."""
    rows = intervals.rows_to_reach(gain, bar)
    if rows is None:
        return "it is too close to the bar to be decided by more conversations"
    return f"about {max(1, rows - gain.n):,} more conversations like these would decide"


def _first_line(ranked: Ranked) -> str:
    name = ranked.score.label
    gain = ranked.gain
    at = f"at K = {ranked.k}"
    among = f" (best of {ranked.choices}, chosen on other requests)" if ranked.choices > 1 else ""
    if ranked.score.output_differs:
        return _discounted(ranked)
    if ranked.score.undecided is not None:
        return f"No verdict: {name} has {gain.as_speedup()} {at}{among}, but {ranked.score.undecided}."
    if ranked.doubt is not None:
        return f"Cannot tell which is fastest: {name} has {gain.as_speedup()} {at}{among}, but {ranked.doubt}."
    if (advice := ranked.score.precision_first(gain)) is not None:
        return advice
    if gain.below(1):
        return (
            f"Serve the target without a draft: with {name}, the best draft, the target runs at {gain} of its own "
            f"speed {at}{among}."
        )
    if not gain.above(1):
        return f"No draft is shown to be faster than the target alone. The best is {name} with {gain} {at}{among}."
    return f"Serve with {name} {at}: whole requests run at {gain.as_speedup()} the speed of the target alone{among}."


def _discounted(ranked: Ranked) -> str:
    return f"{ranked.score.label} changed the output: its speed-up of {ranked.speedup.value:.2f}x does not count."


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
    return texts


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
            f"int8 weights change the target: KL divergence {format_number(rounding.kl, 2)} nats per token; "
            f"the most probable token differs at {1 - rounding.top1:.1%} of {rounding.tokens} positions"
        )
    if score.learnt_prompts:
        yield (
            f"the draft was trained on answers to {score.learnt_prompts} of the {conditions.prompts} prompts, and "
            "gains less on other prompts; name unseen prompts by --prompt-file"
        )
    n = score.conversations
    enough = f"use {intervals.ENOUGH} or more"
    if n < intervals.FEWEST:
        yield f"{n} conversation{'' if n == 1 else 's'} give no useful interval; {enough}"
    elif n < intervals.RARE:
        yield f"{n} conversations are too few to meet rare kinds of requests; {enough}"
    if None in _conversations(score):
        yield (
            "the score was written before scores named the conversations of their requests, so each request counts "
            "for itself; intervals that were printed then were narrower"
        )
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
        cut = acceptance.n_truncated_steps
        steps = acceptance.num_spec_steps
        yield (
            f"{cut} of {steps} steps at K = {k} were cut by the end of the output, which distorts tokens per "
            "target pass; raise --max-new-tokens"
        )
