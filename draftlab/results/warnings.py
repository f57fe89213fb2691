"""Warnings: reasons to doubt a score that its verdict does not say. No torch."""

from collections.abc import Iterator, Sequence
from typing import Any

from draftlab.results.score import Score

FEW_PROMPTS = 8
LOOPING_4GRAMS = 0.5
MANY_STEPS = 0.1  # share of the steps


def score_warnings(scores: Sequence[Score]) -> list[str]:
    """Return one sentence for each reason to doubt the numbers, with the names of the drafts that it concerns."""
    drafts: dict[str, list[str]] = {}
    for score in scores:
        for text in _reasons(score):
            drafts.setdefault(text, []).append(score.label)
    texts = []
    for text, names in drafts.items():
        concerned = "all drafts" if 1 < len(scores) == len(names) else ", ".join(names)
        texts.append(f"{concerned}: {text}")
    differing: dict[str, None] = {}
    first = _facts(scores[0]) if scores else {}
    for score in scores:
        facts = _facts(score)
        differing |= dict.fromkeys(name for name in first if facts[name] != first[name])
    if differing:
        names = ", ".join(differing).replace("_", " ")
        texts.append(
            f"drafts were measured with different {names}, so their speed-ups do not compare"
        )
    return texts


def _facts(score: Score) -> dict[str, Any]:
    """Return what must be the same for speed-ups to compare."""
    return score.conditions.model_dump(exclude={"draft_weights"}) | {"target": score.target.sha256}


def _reasons(score: Score) -> Iterator[str]:
    conditions = score.conditions
    if score.output_differs:
        texts = f"its output differs from the target's own ({score.equal_texts:.1%} of the texts are equal)"
        if conditions.dtype == "float32":
            yield f"{texts}: decoding was not lossless, and no speed-up counts"
        else:
            yield f"{texts}; rounding in {conditions.dtype} may break ties differently, or there is a bug: use float32"
    if score.distinct_4grams < LOOPING_4GRAMS:
        share = f"{score.distinct_4grams:.0%}"
        yield f"only {share} of the output's 4-grams are distinct: repetition loops make every draft look good"
    if score.learnt_prompts:
        yield (
            f"the draft learnt from answers to {score.learnt_prompts} of the {conditions.prompts} prompts, so it gains "
            "less on others: name prompts that it has not seen by --prompt-file"
        )
    if conditions.prompts < FEW_PROMPTS:
        yield f"number of prompts: {conditions.prompts}; with fewer than {FEW_PROMPTS}, intervals mean little"
    for model in (score.target, score.draft):
        if model.via_transformers:
            yield f"transformers ran {model.name}, which is slower than the engine"
    if score.served:
        yield "servers decoded it: its times include transport, and TTFT and TPOT are not known"
    if conditions.in_phases:
        yield "the servers ran one after the other, so a change of the machine in between counts as speed-up"
    short = len({g.prompt for g in score.plain if g.tokens < 2})
    if short:
        yield f"{short} of {conditions.prompts} prompts were answered with one token, in which no draft can gain"
    k = score.best_k
    acceptance = score.acceptance(k)
    if (acceptance.n_truncated_steps or 0) > MANY_STEPS * acceptance.num_spec_steps:
        cut, steps = acceptance.n_truncated_steps, acceptance.num_spec_steps
        yield (
            f"{cut} of {steps} steps at K = {k} were cut by the end of the output, "
            "and tokens per target pass includes these tokens: generate more tokens per prompt"
        )
