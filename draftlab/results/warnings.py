"""What a reader must know before trusting a score. No torch."""

from collections.abc import Sequence

from draftlab.results.score import STALLED, Score, median_timings

FEW_PROMPTS = 8
LOOPING_4GRAMS = 0.5
MUCH = 0.1  # of the steps


def score_warnings(scores: Sequence[Score]) -> list[str]:
    """What a reader must know before trusting the numbers, each naming its drafts."""
    whose: dict[str, list[str]] = {}
    for score in scores:
        for text in _cautions_of(score):
            whose.setdefault(text, []).append(score.name)
    every = len(scores) if len(scores) > 1 else 0
    found = [f"{'all drafts' if len(names) == every else ', '.join(names)}: {text}" for text, names in whose.items()]
    facts = [s.conditions.model_dump() | {"target": s.target.sha256} for s in scores]
    differing = [name.replace("_", " ") for name in facts[0] if any(fact[name] != facts[0][name] for fact in facts)]
    if differing:
        found.append(f"the drafts were measured with different {', '.join(differing)}: their speed-ups do not compare")
    return found


def _cautions_of(score: Score) -> list[str]:
    k, prompts = score.best_k, score.conditions.prompts
    cut, steps = score.acceptance(k).n_truncated_steps, score.acceptance(k).num_spec_steps
    found = []
    if score.identical is False and score.conditions.dtype != "float32":
        found.append(
            f"its output differs from the target's own; {score.conditions.dtype} rounds ties either way, a fault does "
            "the same: float32 tells"
        )
    elif score.identical is False:
        found.append("its output differs from the target's own, so decoding was not lossless and no speed-up counts")
    for task, metric, alone, drafted in _differing_tasks(score):
        found.append(f"the target scores {drafted:.3f} with it on {task}, {metric}, {alone:.3f} alone: not lossless")
    if score.distinct_4grams < LOOPING_4GRAMS:
        share = f"{score.distinct_4grams:.0%}"
        found.append(f"only {share} of the output's 4-grams are distinct; a repetition loop flatters every draft")
    if prompts < FEW_PROMPTS:
        found.append(f"number of prompts: {prompts}; below {FEW_PROMPTS} the interval means little")
    for model in (score.target, score.draft):
        if model.via_transformers:
            found.append(f"transformers ran {model.name}, whose architecture the engine does not know: not its speed")
    if score.conditions.lossy:
        found.append(f"LOSSY: rule {score.conditions.rule} changes what is written; no speed-up counts as the target's")
    if score.served:
        found.append("servers decoded it: times are whole requests, prefill and transport included")
    if score.environment is not None and score.environment.busy:
        busy, cores = score.environment.busy_cores, score.environment.cores
        found.append(f"other work kept {busy:.1f} of {cores} cores busy when it began: times are worth little")
    stalled, worst = score.stalls
    if stalled:
        found.append(
            f"{stalled} of {prompts} prompts took over {STALLED:g} times as long in one repeat as in another, up to "
            f"{worst:.1f} times: the machine was busy; each prompt counts by its median repeat"
        )
    short = sum(not tokens for tokens, _ in median_timings(score.plain))
    if short:
        found.append(f"{short} of {prompts} prompts were answered with one token, which tells nothing about speed")
    if score.share_without_draft(k) > MUCH:
        found.append(
            f"{score.share_without_draft(k):.0%} of target passes at K = {k} had no draft; the rate is of the others"
        )
    if cut is not None and cut > MUCH * steps:
        found.append(
            f"{cut} of {steps} steps at K = {k} were cut by the end of the output, and tokens per target pass counts "
            "what was cut; let each prompt generate more"
        )
    return found


def _differing_tasks(score: Score) -> list[tuple[str, str, float, float]]:
    """Generation tasks that the target scores otherwise with the draft: task, metric, alone, with it."""
    alone = {(r.task, r.metric): r.value for r in score.target.tasks}
    pairs = [(r.task, r.metric, alone.get((r.task, r.metric)), r.value) for r in score.speculative_tasks]
    return [(task, metric, a, b) for task, metric, a, b in pairs if a is not None and a != b]
