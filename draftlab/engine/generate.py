"""Plain and speculative generation with the same engine, and what each step cost.

One sequence. K drafted tokens per step, V vocab. Invariant of every cache: it holds the tokens emitted so far but the
last one, which is fed first in the next pass.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.engine.verify import distribution, draw, verify
from draftlab.llama import Llama

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """temperature 0 is greedy. seed makes a run repeatable; eos_id None never stops early."""

    temperature: float = 0.0
    max_new_tokens: int = 128
    seed: int = 0
    eos_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One target pass and the drafting before it. tokens: emitted, fewer than accepted + 1 only at the end."""

    drafted: int
    accepted: int
    tokens: list[int]
    draft_seconds: float
    verify_seconds: float
    host_seconds: float


class Drafter(Protocol):
    """Proposes tokens. A drafter keeps its own state; it is told the emitted tokens each time it is asked."""

    def reset(self, capacity: int) -> None:
        """Forget everything; sequences will have at most capacity tokens."""
        ...

    def propose(self, tokens: list[int], count: int, sampling: Sampling, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Up to count tokens to follow tokens, [K], and the distribution each was drawn from, [K, V].

        uniform: draws in [0, 1), [count]; the only randomness a drafter may use.
        """
        ...


class ModelDrafter:
    """A draft model with a cache of its own, rolled back to what was emitted.

    vocab: the target's, where the draft's head is padded to another size.
    """

    def __init__(self, model: Llama, vocab: int | None = None) -> None:
        self.model, self.vocab = model, vocab
        self.cache = model.new_cache(1, 1)

    def reset(self, capacity: int) -> None:
        self.cache = self.model.new_cache(1, capacity)

    def propose(self, tokens: list[int], count: int, sampling: Sampling, uniform: Tensor) -> tuple[Tensor, Tensor]:
        self.cache.used = min(self.cache.used, len(tokens) - 1)
        # after full acceptance the last drafted token was never fed: two tokens go in at once
        fed = torch.tensor([tokens[self.cache.used :]], device=self.model.device)
        if self.vocab is not None and self.vocab > self.model.shape.vocab:
            fed.clamp_(max=self.model.shape.vocab - 1)  # an id that the draft does not know
        drafted, q = [], []
        for i in range(count):
            logits = self.model.forward(fed, self.cache, last=1)[0, -1]
            if self.vocab is not None and len(logits) != self.vocab:
                logits = F.pad(logits, (0, self.vocab - len(logits)), value=-torch.inf)  # cuts where it is longer
            q.append(distribution(logits, sampling.temperature))
            drafted.append(draw(q[-1], uniform[i]))
            fed = drafted[-1].view(1, 1)
        return torch.stack(drafted), torch.stack(q)


def clock_for(device: torch.device) -> Clock:
    """Seconds, read after all work queued on device is done."""
    if device.type != "cuda":
        return time.perf_counter

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read


def plain(target: Llama, prompt: list[int], sampling: Sampling, clock: Clock = time.perf_counter) -> Iterator[Step]:
    """One token per target pass; yields the prefill's step first (its time is prefill), then the others."""
    rng = torch.Generator().manual_seed(sampling.seed)
    cache = target.new_cache(1, len(prompt) + sampling.max_new_tokens)
    fed, produced = prompt, 0
    while produced < sampling.max_new_tokens:
        began = clock()
        logits = target.forward(torch.tensor([fed], device=target.device), cache, last=1)[0, -1]
        passed = clock()
        token = int(draw(distribution(logits, sampling.temperature), torch.rand((), generator=rng)))
        fed, produced = [token], produced + 1
        yield Step(
            drafted=0,
            accepted=0,
            tokens=fed,
            draft_seconds=0.0,
            verify_seconds=passed - began,
            host_seconds=clock() - passed,
        )
        if token == sampling.eos_id:
            return


def speculative(
    target: Llama,
    drafter: Drafter,
    prompt: list[int],
    k: int,
    sampling: Sampling,
    clock: Clock = time.perf_counter,
) -> Iterator[Step]:
    """Draft k tokens, verify them in one target pass, emit what stands and one more; lossless.

    The first step is the prefill: it emits one token and drafts nothing, as in engines with a separate prefill.
    """
    rng = torch.Generator().manual_seed(sampling.seed)
    limit = len(prompt) + sampling.max_new_tokens
    cache = target.new_cache(1, limit + k)
    drafter.reset(limit + k)
    tokens = list(prompt)
    while len(tokens) < limit:
        room = limit - len(tokens) - 1  # the target adds one itself
        count = 0 if cache.used == 0 else min(k, room)
        uniform = torch.rand(2 * count + 1, generator=rng)
        began = clock()
        drafted, q = _propose(drafter, tokens, count, sampling, uniform[:count])
        proposed = clock()
        fed = torch.cat([torch.tensor(tokens[cache.used :], device=target.device), drafted])
        logits = target.forward(fed.unsqueeze(0), cache, last=len(drafted) + 1)[0]
        verified = clock()
        p = distribution(logits, sampling.temperature)
        accepted, rest = verify(p, q, drafted, uniform[count : count + len(drafted)]) if count else (0, p[0])
        emitted = [*drafted[:accepted].tolist(), int(draw(rest, uniform[-1]))]
        if sampling.eos_id in emitted:
            emitted = emitted[: emitted.index(sampling.eos_id) + 1]
        tokens += emitted
        cache.used = len(tokens) - 1
        yield Step(
            drafted=len(drafted),
            accepted=accepted,
            tokens=emitted,
            draft_seconds=proposed - began,
            verify_seconds=verified - proposed,
            host_seconds=clock() - verified,
        )
        if emitted[-1] == sampling.eos_id:
            return


def _propose(drafter: Drafter, tokens: list[int], count: int, sampling: Sampling, u: Tensor) -> tuple[Tensor, Tensor]:
    if count == 0:
        return torch.empty(0, dtype=torch.long), torch.empty(0, 0)
    return drafter.propose(tokens, count, sampling, u)
