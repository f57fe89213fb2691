"""Short trials of a draft or head: are its weights trained, and does decoding with it work?"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from draftlab.acceptance.token_logprobs import score_tokens
from draftlab.data import heldout_prompts
from draftlab.engine.generate import Drafter, ModelDrafter, Step, speculative_decode
from draftlab.model import checkpoint, hub
from draftlab.model.decoder import Decoder
from draftlab.prompts import file_prompts
from draftlab.sampling import SamplingParams
from draftlab.servers.kinds import Finding, error, ok

UNTRAINED = 0.9  # cross-entropy over log(vocabulary) from which a draft counts as untrained
USELESS = 1.05  # tokens per target pass below which a head counts as useless
K, TOKENS = 3, 24  # drafted tokens, and tokens of each text
PROMPTS, PROMPT_TOKENS = 8, 96  # held-out text


def trial_prompts(
    model: Path, data: str, file: Path | None, count: int = PROMPTS, length: int = PROMPT_TOKENS
) -> list[list[int]]:
    """Return token ids of held-out text, or of the first turns of a prompt file. count: Largest number of prompts."""
    tokenizer = checkpoint.load_tokenizer(model)
    if file is None:
        return heldout_prompts(hub.check_data(data), tokenizer, count=count, length=length, seed=0)
    prompts = file_prompts(file, tokenizer, chat="auto")
    return [prompt.ids for prompt in prompts.spread(min(count, len(prompts.rows))).rows]


def check_perplexity(model: Decoder, prompts: Sequence[list[int]], vocab: int) -> Finding:
    """Judge the perplexity of text. prompts: Token ids."""
    texts = [(np.array(ids[:1]), np.array(ids[1:])) for ids in prompts]
    scored = score_tokens(model, texts, vocab, SamplingParams(temperature=1.0))
    logprobs = np.concatenate([s.logprobs for s in scored])
    if np.isnan(logprobs).any():
        return error(
            "perplexity",
            "the draft computes NaN logits",
            "its weights are damaged or overflow; train the draft again",
        )
    # a trimmed head gives -inf for the tokens that it lacks
    return judge_perplexity(-float(logprobs[np.isfinite(logprobs)].mean()), vocab)


def judge_perplexity(cross_entropy: float, vocab: int) -> Finding:
    text = (
        f"{math.exp(min(cross_entropy, 50)):,.4g} on held-out text; random guessing has {vocab:,}"
    )
    if not cross_entropy < UNTRAINED * math.log(vocab):
        return error(
            "perplexity",
            text,
            "the draft is untrained, or its weights do not fit its config.json; train it again",
        )
    return ok("perplexity", text)


def check_decoding(model: Decoder, prompts: Sequence[list[int]]) -> Finding:
    """Decode with the draft as both draft and target. The target must accept every drafted token."""
    steps = _decode(model, ModelDrafter(model), [ids[:16] for ids in prompts])
    drafted, accepted = sum(s.drafted for s in steps), sum(s.accepted for s in steps)
    text = f"as draft and target at once it accepts {accepted} of {drafted} tokens"
    if accepted < drafted:
        return error(
            "decoding",
            text,
            "all must be accepted, so decoding is broken: report it with the output of draftlab env",
        )
    return ok("decoding", text)


def check_acceptance(target: Decoder, drafter: Drafter, prompts: Sequence[list[int]]) -> Finding:
    """Decode with a head, and judge the tokens per target pass."""
    steps: list[Step] = []
    for ids in prompts:
        steps += _decode(target, drafter, [ids])[1:]
    length = sum(len(step.tokens) for step in steps) / len(steps)
    text = f"{length:.2f} tokens per target pass at K = {K} on {len(prompts)} prompts, greedily"
    if length < USELESS:
        fix = (
            "the head is useless: it may need another norm_before_residual or other layer ids than its "
            "config.json has"
        )
        return error("acceptance", text, fix)
    return ok("acceptance", text)


def _decode(target: Decoder, drafter: Drafter, prompts: list[list[int]]) -> list[Step]:
    return list(speculative_decode(target, drafter, prompts, K, SamplingParams(max_tokens=TOKENS)))
