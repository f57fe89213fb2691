"""The target drafting for itself with some of its layers left out, and which ones to leave out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from draftlab.acceptance import expected
from draftlab.acceptance.token_logprobs import look
from draftlab.engine.verify import Warp
from draftlab.model.llama import Llama

DEEPEST = 8  # drafted tokens for which a set is judged


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A set of layers: what it does at its best K by replay, in target passes of one token."""

    layers: tuple[int, ...]
    k: int
    tokens_per_pass: float
    speedup: float


def skipping(target: Llama, layers: Sequence[int]) -> Llama:
    """The target with these layers only; weights are shared, nothing is copied.

    Raises:
        ValueError: no layer, or one that the target does not have.
    """
    if not layers or not set(layers) <= set(range(target.shape.layers)):
        raise ValueError(f"layers {list(layers)} of {target.shape.layers}")
    model = Llama.__new__(Llama)  # also of a compiled target: plain
    vars(model).update(vars(target))
    model.shape = target.shape.model_copy(update={"layers": len(layers)})
    model.blocks = [target.blocks[i] for i in layers]
    return model


def search(
    target: Llama, texts: Sequence[tuple[np.ndarray, np.ndarray]], warp: Warp, cost: Callable[[int], float]
) -> Iterator[Kept]:
    """Leaves out the layer that is missed least, again and again, and yields what is left, from all but one on.

    After Draft & Verify (2309.08168) and SWIFT, with their timed runs replaced by replay of what the target wrote:
    every candidate of one size costs the same, so the one with the most tokens per pass wins.

    texts: prompts and what the target wrote behind them under warp. cost: of a pass through so many layers over one of
    the target's.
    """
    greedy = warp.temperature == 0
    own = [] if greedy else look(target, texts, target.shape.vocab, warp)
    log_p = [np.zeros(len(written)) for _, written in texts] if greedy else [one.log_q for one in own]

    def judged(layers: tuple[int, ...]) -> Kept:
        seen = look(skipping(target, layers), texts, target.shape.vocab, warp)
        chances = [expected.chances(one.log_q, p) for one, p in zip(seen, log_p, strict=True)]
        return max((_at(layers, chances, k, cost(len(layers))) for k in range(1, DEEPEST + 1)), key=lambda x: x.speedup)

    layers = tuple(range(target.shape.layers))
    while len(layers) > 1:
        best = max((judged(layers[:i] + layers[i + 1 :]) for i in range(len(layers))), key=lambda x: x.speedup)
        yield best
        layers = best.layers


def _at(layers: tuple[int, ...], chances: list[np.ndarray], k: int, cost: float) -> Kept:
    tokens, passes = expected.tokens_per_pass(chances, k).sum(0)
    per_pass = float(tokens / passes)
    return Kept(layers=layers, k=k, tokens_per_pass=per_pass, speedup=per_pass / (k * cost + 1))
