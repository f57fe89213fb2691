"""Warnings: reasons to doubt a score. No torch."""

from collections.abc import Iterator, Sequence

from draftlab.results.environment import LONG_WAITS
from draftlab.results.score import UNEVEN, Score

FEW_PROMPTS = 8
LOOPING_4GRAMS = 0.5
RARE = 1e-3  # share of the passes whose stalls cannot move a result
MANY_STEPS = 0.1  # share of the steps


def score_warnings(scores: Sequence[Score]) -> list[str]:
    """Return one sentence for each reason to doubt the numbers, naming the drafts that it concerns."""
    drafts: dict[str, list[str]] = {}
    for score in scores:
        for text in (*_about_output(score), *_about_conditions(score), *_about_timing(score)):
            drafts.setdefault(text, []).append(score.name)
    every = len(scores) if len(scores) > 1 else 0
    texts = [f"{'all drafts' if len(names) == every else ', '.join(names)}: {text}" for text, names in drafts.items()]
    if not scores:
        return []
    facts = [s.conditions.model_dump(exclude={"draft_weights"}) | {"target": s.target.sha256} for s in scores]
    differing = [name.replace("_", " ") for name in facts[0] if any(fact[name] != facts[0][name] for fact in facts)]
    if differing:
        texts.append(f"drafts were measured with different {', '.join(differing)}, so their speed-ups do not compare")
    return texts


def _about_output(score: Score) -> Iterator[str]:
    if score.identical is False and score.conditions.dtype != "float32":
        dtype = score.conditions.dtype
        yield (
            f"its output differs from the target's own{_equal_texts(score)}; rounding in {dtype} may break ties "
            "differently, but a bug may cause it, too: check in float32"
        )
    elif score.identical is False:
        yield (
            f"its output differs from the target's own{_equal_texts(score)}: decoding was not lossless, and no "
            "speed-up counts"
        )
    if score.distinct_4grams < LOOPING_4GRAMS:
        share = f"{score.distinct_4grams:.0%}"
        yield f"only {share} of the output's 4-grams are distinct: repetition loops make every draft look good"


def _equal_texts(score: Score) -> str:
    return "" if score.equal_texts is None else f" ({score.equal_texts:.1%} of the texts are equal)"


def _about_conditions(score: Score) -> Iterator[str]:
    if score.conditions.prompts < FEW_PROMPTS:
        yield f"number of prompts: {score.conditions.prompts}; with fewer than {FEW_PROMPTS}, intervals mean little"
    for model in (score.target, score.draft):
        if model.via_transformers:
            yield f"transformers ran {model.name}, which is slower than the engine"
    if score.served:
        yield "servers decoded it: its times include transport, and TTFT and TPOT are not known"
    if score.cheaper_draft:
        weights = score.conditions.draft_weights
        yield (
            f"its weights are {weights}, and the target alone could be measured with {' and '.join(score.plain_tps)} "
            "weights only, so that a part of the gain may be that of the precision"
        )
    if score.conditions.in_phases:
        yield "the servers ran one after the other: what else changed on the machine in between counts as speed-up"
    if score.environment is not None and score.environment.busy:
        busy, cores = score.environment.busy_cores, score.environment.cores
        yield f"other work kept {busy:.1f} of {cores} cores busy at the start: its times are unreliable"
    waited = score.environment and score.environment.waited_share
    if waited and waited > LONG_WAITS:
        yield f"the machine was busy: decoding waited for a core in {waited:.0%} of its time"


def _about_timing(score: Score) -> Iterator[str]:
    k, prompts = score.best_k, score.conditions.prompts
    stalled, passes = score.stalls
    if stalled > RARE * passes:
        yield f"{stalled} of {passes} passes stalled, as the machine was busy; they count as the others of their kind"
    uneven, worst = score.uneven_prompts
    if uneven:
        yield (
            f"{uneven} of {prompts} prompts took over {UNEVEN:g} times as long in one run as in another of the same "
            f"work (at most {worst:.1f} times): the machine was busy; each prompt counts by its median repeat"
        )
    short = len({g.prompt for g in score.plain if g.tokens < 2})
    if short:
        yield f"{short} of {prompts} prompts were answered with one token, in which no draft can gain"
    if score.share_without_draft(k) > MANY_STEPS:
        share = f"{score.share_without_draft(k):.0%}"
        yield f"{share} of target passes at K = {k} had no draft; the acceptance rate is of the others"
    acceptance = score.acceptance(k)
    if (acceptance.n_truncated_steps or 0) > MANY_STEPS * acceptance.num_spec_steps:
        cut, steps = acceptance.n_truncated_steps, acceptance.num_spec_steps
        yield (
            f"{cut} of {steps} steps at K = {k} were cut by the end of the output, "
            "and tokens per target pass includes what was cut: generate more tokens per prompt"
        )
