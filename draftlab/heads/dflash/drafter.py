"""The drafter dflash: a DFlash head reads each state of the target once, and drafts a block of tokens in one pass.

B rows (texts of a batch), T tokens, K drafted tokens, V vocab, n scored tokens of a text, A anchors. In a text of n
tokens, the target has read n - 1 tokens, and the head reads their states. The tokens drafted in one pass are a block,
which begins with the last token of the text. The distribution q of a drafted token does not depend on the other drafted
tokens, so the verify rules for chains are lossless.

In a replay, many blocks of a text are drafted in one pass. An anchor is a token of the text after which the head drafts
a block. For this block the head reads the target's states of the tokens before the anchor. In decoding, a drafted token
matters only if all drafted tokens before it equal the text. A DSpark head therefore reads the text's tokens here, not
the tokens that it would draft.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
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
from draftlab.drafters.passes import HeadPasses, Passes
from draftlab.engine.generate import Draft, Drafter, TokenIds, draw_each
from draftlab.errors import UserError
from draftlab.heads.base import HeadSpec, StatesDrafter, target_states
from draftlab.heads.dflash import decoder, layout
from draftlab.heads.dflash.decoder import DFlash
from draftlab.heads.dflash.layout import DFlashShape
from draftlab.model import Mode
from draftlab.model.decoder import Tree
from draftlab.model.devices import staged
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.llama import Cache, Llama
from draftlab.model.size import ApproximateSize
from draftlab.sampling import SamplingParams

BLOCKS_IN_A_PASS = 32  # each block has its own copy of the context's keys and values


class DFlashDrafter(StatesDrafter[DFlash]):
    """Drafts a block of tokens after each text, with a DFlash head."""

    def reset(self, rows: int, capacity: int) -> None:
        super().reset(rows, capacity)
        # Length of a block. It does not shrink near the end of a text, because a block's tokens attend to each other.
        self.width = 0

    def prefill(self, texts: TokenIds) -> None:
        """Read the target's states of the prompts into the head's cache."""
        self.read_states(texts)

    def propose(self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        last, count = self.begin(texts, count)
        logits = self.head.block_logits(last, self.width, self.cache)[:, :count]
        return draw_each(logits, uniform, sampling, self.vocab)

    def begin(self, texts: TokenIds, count: int) -> tuple[Tensor, int]:
        """Read the target's new states. Return the texts' last tokens, [B], and the number of tokens to draft.

        This number is `count`, but at most the limit of the head.
        """
        self.read_states(texts)
        count = min(count, self.head.config.most)
        self.width = max(self.width, count)
        return staged([text[-1] for text in texts], self.head.device), count

    def read_states(self, texts: TokenIds) -> None:
        """Feed the head the states that the target added since the last call. The head stores them in its cache.

        States of rejected tokens are never used, because the head does not read beyond the texts.
        """
        _, positions = self.new_positions(texts)
        self.head.read(self.states_at(positions), positions, self.cache)
        self.cache.used = self.read = [len(text) - 1 for text in texts]


@torch.inference_mode()
def score_blocks(
    target: Llama | HFDecoder,
    head: DFlash,
    texts: Sequence[Text],
    vocab: int,
    sampling: SamplingParams,
    k: int,
    advance: Callable[[int], None] = lambda done: None,
) -> list[TokenLogprobs]:
    """Return log-probability and rank of each token as drafted by a head, as arrays [n, K] for each text.

    The head drafts K tokens at once, as a block. Entry [i, a] is for token i of the n tokens of the completion, as
    drafted token a + 1 of a block. That block continues the text after token i - a - 1. If this token is before the
    prompt's last token, the probability is 0. If the tokens of a block attend to later tokens of the block, the logits
    depend on the length of the block, and the arrays are [n, K, K] for blocks of 1 to K tokens.

    Args:
        vocab: Number of ids; further logits are padding.
        k: Largest number of drafted tokens of a block, K. At most the head's block size.
        advance: Function that is called with the number of scored texts.

    Raises:
        UserError: A text is longer than the context of the head or of the target.
    """
    check_fits(target, texts)
    head.check_fits(max((len(prompt) + len(ids) for prompt, ids in texts), default=0))
    scored = []
    for text in counted(texts, advance):
        whole = whole_text(text).to(target.device)
        prompt = len(text[0])
        context = head.new_cache(1, len(whole))
        if len(whole) > prompt:
            states = target_states(target, head.layer_ids, whole[:-1])
            places = torch.arange(len(whole) - 1, device=whole.device)
            head.read(states, places.unsqueeze(0), context)
        if all(head.config.causal):
            scored.append(_score_blocks(head, whole, prompt, context, vocab, sampling, k))
            continue
        by_length = [_score_blocks(head, whole, prompt, context, vocab, sampling, length) for length in range(1, k + 1)]
        scored.append(TokenLogprobs.by_k(by_length, vocab))
    return scored


def _score_blocks(
    head: DFlash,
    whole: Tensor,
    prompt: int,
    context: Cache,
    vocab: int,
    sampling: SamplingParams,
    k: int,
) -> TokenLogprobs:
    """Score the tokens of a text as drafted in blocks of k tokens, see score_blocks.

    whole: Token ids of the text, with a prompt of `prompt` tokens. context: The head's cache of the text.
    """
    result = TokenLogprobs.unlikely(len(whole) - prompt, k, vocab)
    for anchors in torch.arange(prompt - 1, len(whole) - 1).split(BLOCKS_IN_A_PASS):
        if not len(anchors):
            continue
        # the index is clamped, because no scored token reads tokens after the end of the text
        given = (anchors.unsqueeze(1) + torch.arange(k)).clamp_max(len(whole) - 1)
        logits = head.text_logits(whole[given], _copies(context, anchors))  # [A, K, V]
        for age in range(k):
            drafted = anchors + age + 1  # index in the text of token age + 1 of each block
            drafted = drafted[drafted < len(whole)]
            if len(drafted):
                rows = logits[: len(drafted), age, :vocab].float()
                own = token_logprobs(rows, whole[drafted], sampling)
                result.put(((drafted - prompt).numpy(), age), own)
    return result


def _copies(context: Cache, anchors: Tensor) -> Cache:
    """Return a cache with a copy of the context for each anchor. Only the positions before the anchor are read."""
    rows = (-1, len(anchors), -1, -1, -1)
    keys, values = context.keys.expand(rows).clone(), context.values.expand(rows).clone()
    return Cache(keys, values, anchors.tolist())


class BlockPasses(HeadPasses[DFlash]):
    """A DFlash head as a Decoder, to time its passes. A pass reads T states of zeros, and drafts T tokens."""

    def __init__(self, head: DFlash) -> None:
        super().__init__(head, head.config.context)

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in (*self.head.weights.values(), self.head.head))

    def forward(self, ids: Tensor, cache: Cache, last: int = 0, tree: Tree | None = None) -> Tensor:
        """Run a pass with the arguments and the result of Decoder.forward.

        If the head drafts fewer than T tokens, the last token's logits are repeated.
        """
        rows, width = ids.shape
        new = torch.arange(width, device=self.device)
        positions = staged(cache.used, self.device).unsqueeze(1) + new
        read = self.head.weights["fc.weight"].shape[1]
        self.head.read(self.head.embed.new_zeros(rows, width, read), positions, cache)
        cache.used = [used + width for used in cache.used]
        count = min(width, self.head.config.most)
        logits = self.head.text_logits(ids[:, -1:].expand(-1, count), cache)
        return logits[:, new.clamp_max(count - 1)[-(last or width) :]]


class BlockSpec(HeadSpec):
    """Base class of drafters with a head that drafts a block of tokens in one pass."""

    by_age = True

    @classmethod
    def read(cls, folder: Path, target: Path) -> DFlashShape:
        raise NotImplementedError

    @classmethod
    def load(cls, folder: Path, target_path: Path, target: Llama | HFDecoder, device: torch.device) -> DFlash:
        """Load a head on a device, with the embedding and output layer of its target. Raises UserError: See read."""
        raise NotImplementedError

    def drafter(self, target: Llama | HFDecoder, head: DFlash) -> Drafter:
        raise NotImplementedError

    def load_drafter(self, target_path: Path, target: Llama | HFDecoder, device: torch.device) -> Drafter:
        return self.drafter(target, self.load(Path(self.heads), target_path, target, device))

    def build(self, context: DrafterContext) -> DrafterRun:
        target = self.readable(context.target)
        head = self.load(Path(self.heads), context.target_path, target, context.device)
        ks = context.ks_up_to(self, head.config.most)
        return context.run(self.drafter(target, head), ks=ks, facts=self.facts())

    @classmethod
    def size_of(cls, folder: Path, target: Path) -> ApproximateSize:
        return cls.read(folder, target).size

    @classmethod
    def passes_of(cls, folder: Path, target_path: Path, target: Llama | HFDecoder, mode: Mode) -> HeadPasses:
        return BlockPasses(cls.load(folder, target_path, target, target.device))

    @classmethod
    def step_cost(cls, passes: Passes, k: int, accepted: int) -> np.ndarray:
        return passes.block(k)

    def acceptance(self, replay: ReplayContext) -> list[TokenLogprobs]:
        folder = Path(self.heads)
        most = self.read(folder, replay.target_path).most
        if replay.most > most:
            raise UserError(
                f"--k {replay.most}: {self.heads} drafts at most {most} tokens in one pass; use --k {most} or less"
            )
        target = self.readable(replay.load_target())
        head = self.load(folder, replay.target_path, target, target.device)
        return score_blocks(target, head, replay.texts, replay.vocab, replay.sampling, replay.most, replay.advance)


@drafter("dflash", served_by=("vllm", "sglang"))
class DFlashSpec(BlockSpec):
    """Drafts with a DFlash head. heads: Directory of the head, in the layout of z-lab or of speculators."""

    format = "DFlash"

    @classmethod
    def read(cls, folder: Path, target: Path) -> DFlashShape:
        return layout.check(folder, target)

    @classmethod
    def load(cls, folder: Path, target_path: Path, target: Llama | HFDecoder, device: torch.device) -> DFlash:
        return decoder.load(folder, target_path, target.embed.to(device), target.head.to(device))

    def drafter(self, target: Llama | HFDecoder, head: DFlash) -> Drafter:
        return DFlashDrafter(target, head)
