"""Search for the layers that a target skips when it drafts for itself."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from draftlab.acceptance import expected
from draftlab.acceptance.token_logprobs import Text, score_tokens
from draftlab.console import progress
from draftlab.model.llama import Llama
from draftlab.sampling import SamplingParams
from draftlab_research.drafting.layer_skip import skip_layers

MAX_K = 8  # largest K, the number of drafted tokens, that the search considers
CANDIDATES = 4  # number of layers that a search step tries to drop; the first step tries all


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSet:
    """A set of layers to keep, with predictions for the best K, the number of drafted tokens.

    tokens_per_pass: Tokens per target pass. speedup: Speed-up over decoding without a draft.
    """

    layers: tuple[int, ...]
    k: int
    tokens_per_pass: float
    speedup: float


def search_layers(
    target: Llama, texts: Sequence[Text], sampling: SamplingParams, cost: Callable[[int], float]
) -> Iterator[LayerSet]:
    """Drop one layer per step until one layer is left, and yield the kept layers after each step.

    The first step tries to drop each layer. Later steps try only the CANDIDATES layers whose removal left the most
    tokens per target pass when they were last tried. A step drops the layer whose removal gives the highest predicted
    speed-up. The search follows Draft & Verify (2309.08168) and SWIFT, but uses expected acceptance in place of timed
    runs.

    texts: Texts that the target generated with the same sampling parameters. cost: Function from a number of layers to
    the duration of a pass through that many layers, as a fraction of a target pass.
    """
    greedy = sampling.temperature == 0
    own = [] if greedy else score_tokens(target, texts, target.shape.vocab, sampling)
    log_p = [np.zeros(len(completion)) for _, completion in texts] if greedy else [text.logprobs for text in own]

    def rate(layers: tuple[int, ...]) -> LayerSet:
        scored = score_tokens(skip_layers(target, layers), texts, target.shape.vocab, sampling)
        chances = [expected.chances(text.logprobs, p) for text, p in zip(scored, log_p, strict=True)]
        sets = []
        for k in range(1, MAX_K + 1):
            tokens, passes = expected.tokens_per_pass(chances, k).sum(0)
            length = float(tokens / passes)
            speedup = length / (k * cost(len(layers)) + 1)
            sets.append(LayerSet(layers=layers, k=k, tokens_per_pass=length, speedup=speedup))
        return max(sets, key=lambda candidate: candidate.speedup)

    layers = tuple(range(target.shape.layers))
    # tokens per target pass without each layer, from the last time that its removal was tried
    left = dict.fromkeys(layers, math.inf)
    tries = len(layers) + sum(min(CANDIDATES, size) for size in range(2, len(layers)))
    done = 0
    with progress("searching the layers to skip", tries) as advance:
        while len(layers) > 1:
            count = len(layers) if not done else CANDIDATES
            tried: dict[int, LayerSet] = {}
            for layer in sorted(layers, key=lambda each: -left[each])[:count]:
                tried[layer] = rate(tuple(each for each in layers if each != layer))
                left[layer] = tried[layer].tokens_per_pass
                done += 1
                advance(done, f"{len(layers)} layers")
            dropped = max(tried, key=lambda layer: tried[layer].speedup)
            yield tried[dropped]
            layers = tried[dropped].layers
