"""Short trials of a draft or head, which check that its weights are trained and that decoding with it works."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from draftlab.acceptance.token_logprobs import score_tokens
from draftlab.data import first_source, heldout_pieces, is_chat_file
from draftlab.data.prompts import file_prompts
from draftlab.engine.generate import Drafter, ModelDrafter, Step, speculative_decode
from draftlab.model import checkpoint, hub
from draftlab.model.decoder import Decoder
from draftlab.quantities import format_number
from draftlab.sampling import SamplingParams
from draftlab.servers.kinds import Finding, error, ok

UNTRAINED = 0.9  # a draft whose cross-entropy divided by log(vocabulary size) is at least this counts as untrained
USELESS = 1.05  # a head with fewer tokens per target pass counts as useless
# number of drafted tokens per step, and of tokens in each text
K = 3
TOKENS = 24
# number and length of the held-out prompts
PROMPTS = 8
PROMPT_TOKENS = 96


def trial_prompts(
    model: Path, data: str, file: Path | None, count: int = PROMPTS, length: int = PROMPT_TOKENS
) -> list[list[int]]:
    """Return prompts as token ids, from a file or from held-out text: conversations up to an answer, or pieces.

    A trial needs no particular length, so a source with little text gives fewer or shorter prompts.

    Args:
        model: Directory of the tokenizer.
        data: Data whose held-out text is used.
        count: Largest number of prompts.
        length: Largest number of tokens of each piece of held-out text.

    Raises:
        UserError: The text cannot be read, or gives no prompt.
    """
    tokenizer = checkpoint.load_tokenizer(model)
    split = None
    if file is None:
        source = first_source(hub.check_data(data))
        if not (tokenizer.chat_template and is_chat_file(source)):
            return heldout_pieces(source, tokenizer, count=count, length=length)
        file = Path(source)
        split = "heldout"
    prompts = file_prompts(file, tokenizer, count=count, or_fewer=True, chat="auto", split=split)
    return [prompt.ids for prompt in prompts.rows]


def check_perplexity(model: Decoder, prompts: Sequence[list[int]], vocab: int) -> Finding:
    """Check by its perplexity on text whether a draft is trained. prompts: Token ids of the text."""
    texts = [(np.array(ids[:1]), np.array(ids[1:])) for ids in prompts]
    scored = score_tokens(model, texts, vocab, SamplingParams(temperature=1.0))
    logprobs = np.concatenate([s.logprobs for s in scored])
    if np.isnan(logprobs).any():
        return error(
            "perplexity",
            "the draft computes NaN logits",
            "weights are damaged or values overflow; download or train the draft again",
        )
    # a trimmed LM head gives -inf for tokens that it lacks
    cross_entropy = -float(logprobs[np.isfinite(logprobs)].mean())
    text = f"{format_number(math.exp(min(cross_entropy, 50)), 4)} on held-out text; random guessing gives {vocab:,}"
    if not cross_entropy < UNTRAINED * math.log(vocab):
        return error(
            "perplexity",
            text,
            "the draft is untrained, or the weights do not fit config.json; download or train the draft again",
        )
    return ok("perplexity", text)


def check_decoding(model: Decoder, prompts: Sequence[list[int]]) -> Finding:
    """Decode with the model as both draft and target, and check that every drafted token is accepted."""
    steps = _decode(model, ModelDrafter(model), [ids[:16] for ids in prompts])
    drafted = sum(s.drafted for s in steps)
    accepted = sum(s.accepted for s in steps)
    text = f"with the draft as its own target, {accepted} of {drafted} drafted tokens are accepted"
    if accepted < drafted:
        return error(
            "decoding",
            text,
            "all must be accepted, so draftlab has a bug: report it with the output of draftlab env",
        )
    return ok("decoding", text)


def check_acceptance(target: Decoder, drafter: Drafter, prompts: Sequence[list[int]]) -> Finding:
    """Decode greedily with a head, and check by the tokens per target pass whether the head works."""
    steps: list[Step] = []
    for ids in prompts:
        steps += _decode(target, drafter, [ids])[1:]
    length = sum(len(step.tokens) for step in steps) / len(steps)
    text = f"{length:.2f} tokens per target pass at K = {K} on {len(prompts)} prompts, greedily"
    if length < USELESS:
        fix = (
            "almost no drafted token is accepted: norm_before_residual or the layer ids in config.json may not be "
            "those of the head's training"
        )
        return error("acceptance", text, fix)
    return ok("acceptance", text)


def _decode(target: Decoder, drafter: Drafter, prompts: list[list[int]]) -> list[Step]:
    return list(speculative_decode(target, drafter, prompts, K, SamplingParams(max_tokens=TOKENS)))
