"""The drafter eagle (EAGLE-3, Li et al. 2025, 2503.01840): chains from the target's states, then from the head's own.

B rows (texts of a batch), T new tokens, K drafted tokens, D hidden, V vocab, n scored tokens of a text. In a text of n
tokens, the target has read n - 1 tokens, and the head has n - 1 positions. At position i it reads the target's state of
token i, and token i + 1.

In a replay, all chains of a text advance together: each pass of the head drafts the next token of every chain. The
chain that begins at position i drafts tokens i + 2, i + 3, ... It attends to the target's states up to i and to its own
states.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from draftlab.acceptance.token_logprobs import (
    Text,
    TokenLogprobs,
    check_fits,
    counted,
    token_logprobs,
    whole_text,
)
from draftlab.drafters.base import drafter
from draftlab.drafters.context import DrafterContext, DrafterRun, ReplayContext
from draftlab.drafters.fallback import GateSpec
from draftlab.drafters.passes import HeadPasses, Passes
from draftlab.engine.generate import Draft, Drafter, Sampler, TokenIds
from draftlab.heads.base import HeadSpec, StatesDrafter, target_states
from draftlab.heads.eagle3 import decoder, layout
from draftlab.heads.eagle3.decoder import EagleLlama
from draftlab.heads.eagle3.layout import HeadShape
from draftlab.model import Mode
from draftlab.model.decoder import AttentionMetadata, Tree
from draftlab.model.devices import staged
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.llama import Cache, LayerStates, Llama
from draftlab.model.shape import Shape
from draftlab.sampling import SamplingParams


class EagleDrafter(StatesDrafter[EagleLlama]):
    """Drafts a chain with one pass of the head per token.

    The first pass also reads the target's states at all positions since the last draft.
    """

    def __init__(self, target: Llama | HFDecoder, head: EagleLlama) -> None:
        super().__init__(target, head)
        self.sampler: Callable[[SamplingParams, int | None], Sampler] = Sampler

    def prefill(self, texts: TokenIds) -> None:
        """Read the target's states at all positions of the prompts. The first draft reads the last position again."""
        self.last_logits(texts)

    def propose(self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        logits, state = self.last_logits(texts)
        sampler = self.sampler(sampling.unlimited(), self.vocab)
        return Draft.chain(*self.head.draft(logits, self.cache, uniform, sampler, state))

    def last_logits(self, texts: TokenIds) -> tuple[Tensor, Tensor]:
        """Run the head over the target's new states. Return its logits and state at each text's last position.

        All texts feed the same number of positions, see StatesDrafter.new_positions.

        Returns: The logits, [B, V], and the state, [B, 1, D].
        """
        starts, places = self.new_positions(texts)
        read = self.head.combine(self.states_at(places))
        logits, states, at = self.run(texts, starts, read)
        row = torch.arange(len(texts), device=self.head.device)
        return logits[row, at - at.min()], states[row, at].unsqueeze(1)

    def run(self, texts: TokenIds, starts: list[int], states: Tensor, filler: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Run the head over T positions of each text from its start on. The cache then ends with the texts.

        Args:
            states: States that the head reads, [B, T, D].
            filler: Token that the head reads at positions after the end of a text.

        Returns: The logits from position at.min() on, the head's states at all T positions, [B, T, D], and the index
            `at` of each text's last position among the T positions, [B].
        """
        width = states.shape[1]
        rows = [
            (text[start + 1 : start + 1 + width] + [filler] * width)[:width]
            for text, start in zip(texts, starts, strict=True)
        ]
        ids = staged(rows, self.head.device)
        ends = [len(text) - 1 for text in texts]
        at = [end - start - 1 for end, start in zip(ends, starts, strict=True)]
        self.cache.used = starts
        logits, states = self.head.step(ids, states, self.cache, last=width - min(at))
        self.cache.used = list(ends)
        self.read = list(ends)
        return logits, states, staged(at, self.head.device)


@torch.inference_mode()
def score_chains(
    target: Llama | HFDecoder,
    head: EagleLlama,
    texts: Sequence[Text],
    vocab: int,
    sampling: SamplingParams,
    k: int,
    advance: Callable[[int], None] = lambda done: None,
) -> list[TokenLogprobs]:
    """Return log-probability and rank of each token in the chains that a head drafts, as arrays [n, K] for each text.

    Entry [i, a] is for token i of the n tokens of the completion, as drafted token a + 1 of a chain of K tokens. That
    chain continues the text after token i - a - 1. If this token is before the prompt's last token, the probability is
    0.

    Args:
        vocab: Number of ids; further logits are padding.
        k: Number of tokens of a chain, K.
        advance: Function that is called with the number of scored texts.

    Raises:
        UserError: A text is longer than the context of the head or of the target.
    """
    for model in (target, head):
        check_fits(model, texts)
    scored = []
    for text in counted(texts, advance):
        whole = whole_text(text).to(target.device)
        prompt = len(text[0])
        result = TokenLogprobs.unlikely(len(whole) - prompt, k, vocab)
        scored.append(result)
        # number of positions, and the first position at which a chain begins
        places = len(whole) - 2
        first = max(0, prompt - 2)
        if places <= first:
            continue
        states = head.combine(target_states(target, head.layer_ids, whole[:places]))
        # the cache may be longer than the head's context
        size = (head.shape.layers, 1, head.shape.kv_heads, places * k, head.shape.head_dim)
        cache = Cache(head.embed.new_zeros(size), head.embed.new_zeros(size))
        for age, metadata in enumerate(_passes(head, places, min(k, places - first))):
            # roll moves the first tokens to the end; only chains that run past the end of the text read them
            following = whole.roll(-1 - age)[:places]
            if age and head.mask is not None:  # a P-EAGLE head does not read what it drafts
                following = torch.full_like(following, head.mask[0])
                states = head.mask[1].expand_as(states)
            logits, states = head.decode_states(following[None], states, cache, metadata, places - first)
            drafted = whole[first + 2 + age :]
            own = token_logprobs(logits[0, : len(drafted), :vocab].float(), drafted, sampling)
            result.put((slice(first + 2 + age - prompt, None), age), own)
    return scored


def _passes(head: EagleLlama, places: int, k: int) -> list[AttentionMetadata]:
    """Return the attention metadata of k passes, each of which drafts the next token of all chains.

    places: Number of positions at which chains begin.
    """
    own = torch.eye(places, dtype=torch.bool, device=head.device)
    head.rope.reach(min(places + k, head.context))
    passes = []
    causal = torch.ones_like(own).tril()
    for age in range(k):
        read = causal if head.window is None else causal.triu(age - head.window + 1)
        mask = torch.cat([read, *[own] * age], 1)
        at = (torch.arange(places, device=head.device) + age).clamp_max(head.context - 1)
        new = slice(age * places, (age + 1) * places)
        end = (age + 1) * places
        passes.append(
            AttentionMetadata(head.rope.cos[at], head.rope.sin[at], mask, (slice(None), slice(None), new), end)
        )
    return passes


class EaglePasses(HeadPasses[EagleLlama]):
    """An EAGLE-3 head as a Decoder, to time its passes. The states that it reads are zeros.

    own: Whether the head reads its own states, as in all passes of a step except the first. In the first pass it reads
    the target's states. This pass also stores these states and runs fc.
    """

    def __init__(self, head: EagleLlama, own: bool = False) -> None:
        super().__init__(head, head.context)
        self.own = own

    @property
    def weight_bytes(self) -> int:
        """Return the size in bytes of the weights that a pass reads."""
        blocks = [w for b in self.head.blocks for w in (b.qkv, b.o, b.gate_up, b.down)]
        return sum(weight.nbytes for weight in (self.head.fc, *blocks, self.head.head))

    def of_own_states(self) -> "EaglePasses":
        return EaglePasses(self.head, own=True)

    def new_cache(self, rows: int, capacity: int) -> Cache:
        cache = self.head.new_cache(rows, capacity)
        width = self.head.fc.shape[1]
        cache.layer_states = LayerStates(self.head.layer_ids, self.head.embed.new_zeros(rows, capacity, width))
        return cache

    def forward(self, ids: Tensor, cache: Cache, last: int = 0, tree: Tree | None = None) -> Tensor:
        """Run a pass over T tokens with states of zeros. Arguments and result: See Decoder.forward."""
        rows, width = ids.shape
        if self.own:
            read = self.head.embed.new_zeros(rows, width, self.head.shape.hidden)
        else:
            read = self.head.combine(self._kept(cache, width))
        # these are states of the target's layers, which the head's pass must not overwrite
        layers = cache.layer_states
        cache.layer_states = None
        logits, _ = self.head.step(ids, read, cache, last or width, tree)
        cache.layer_states = layers
        return logits

    def _kept(self, cache: Cache, width: int) -> Tensor:
        layers = cache.layer_states
        new = slice(0, width)
        assert layers is not None  # new_cache set them
        for at, layer in enumerate(layers.ids):
            size = layers.states.shape[-1] // len(layers.ids)
            layers.store(
                layer,
                layers.states[:, -width:, at * size : (at + 1) * size].clone(),
                (slice(None), new, new),
            )
        return layers.states[:, new]


class EagleHeadSpec(HeadSpec):
    """Drafts with an EAGLE-3 head.

    heads: Directory of a head from draftlab distill, or of a head in the layout of SpecForge, SafeAILab or speculators.
    """

    format = "EAGLE-3"
    remedy = "; train a head with draftlab distill --student eagle"

    @classmethod
    def read(cls, folder: Path, target: Path) -> HeadShape:
        return layout.check(folder, target)

    @classmethod
    def load(cls, folder: Path, target_path: Path, target: Llama | HFDecoder, device: torch.device) -> EagleLlama:
        """Load a head on a device, for a target that is loaded already. Raises UserError: see read."""
        return decoder.load(folder, target_path, target, device)

    @classmethod
    def size_of(cls, folder: Path, target: Path) -> Shape:
        return cls.read(folder, target).shape

    @classmethod
    def passes_of(cls, folder: Path, target_path: Path, target: Llama | HFDecoder, mode: Mode) -> HeadPasses:
        head = cls.load(folder, target_path, target, target.device)
        return EaglePasses(decoder.with_mode(head, mode))

    @classmethod
    def drafter(cls, target: Llama | HFDecoder, head: EagleLlama) -> EagleDrafter:
        return EagleDrafter(target, head)

    def load_drafter(self, target_path: Path, target: Llama | HFDecoder, device: torch.device) -> Drafter:
        return self.drafter(target, self.load(Path(self.heads), target_path, target, device))

    def head_drafter(self, context: DrafterContext) -> EagleDrafter:
        """Load the head, and return the drafter that uses it."""
        target = self.readable(context.target)
        model = self.load(Path(self.heads), context.target_path, target, context.device)
        return self.drafter(target, decoder.with_mode(model, context.mode, context.int8))

    def chains(self, replay: ReplayContext) -> list[TokenLogprobs]:
        """Return the head's log-probabilities of the tokens of each text in a replay, in the form of acceptance()."""
        target = self.readable(replay.load_target())
        head = self.load(Path(self.heads), replay.target_path, target, target.device)
        return score_chains(target, head, replay.texts, replay.vocab, replay.sampling, replay.most, replay.advance)


@drafter("eagle", served_by=("vllm", "sglang", "llama.cpp"))
class EagleSpec(EagleHeadSpec, GateSpec):
    """Drafts with an EAGLE-3 head, alone or after prompt lookup.

    prompt_lookup_max: Longest n-gram of prompt lookup. If set, prompt lookup drafts first, and the head drafts only for
    texts without a match. By default, the head drafts alone.
    """

    by_age = True
    cache_lag = 1  # the head reads the state of the prompt's last token together with the first token after the prompt
    prompt_lookup_max: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _gate_is_used(self) -> Self:
        if self.prompt_lookup_max is None and (idle := sorted(self.model_fields_set & {"min_match", "draft_tokens"})):
            raise ValueError(f"{', '.join(idle)}: needs prompt_lookup_max=N")
        return self

    def build(self, context: DrafterContext) -> DrafterRun:
        drafter = self.head_drafter(context)
        if self.prompt_lookup_max is None:
            return context.run(drafter, facts=self.facts() | {"eagle": True})
        return context.run(self.after_lookup(self.prompt_lookup_max, drafter, context.vocab), facts=self.facts())

    @classmethod
    def step_cost(cls, passes: Passes, k: int, accepted: int) -> np.ndarray:
        return passes.step(k, unread=accepted + 1)

    def acceptance(self, replay: ReplayContext) -> list[TokenLogprobs]:
        chains = self.chains(replay)
        if self.prompt_lookup_max is None:
            return chains
        return self.replayed_after_lookup(replay, self.prompt_lookup_max, chains)
