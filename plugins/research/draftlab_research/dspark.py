"""The drafter dspark: a DFlash block whose tokens are drawn in order, each with a bias from the token before it.

B rows (texts of a batch), T tokens of the block, K drafted tokens, D hidden, R rank, W draft ids, V vocab. One pass
over the block gives logits, as with a DFlash head. Then a Markov head adds a bias of rank R. In a head of the kind
"vanilla", the bias is markov_w2(markov_w1[token before]). In the kind "gated", a gate that reads the block's state
multiplies the input of markov_w2. In the kind "rnn", a recurrent state determines this input. A confidence head
estimates the probability that a token is accepted.

The distribution q of a drafted token depends only on the text and on the drafted tokens before it, so the verify rules
for chains are lossless. The head's confidence in a token, which may end the draft, also depends only on tokens before
it.
"""

from pathlib import Path
from typing import Literal, cast

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3Config

from draftlab.drafters.base import RunFacts, drafter
from draftlab.engine.generate import Draft, Drafter, Sampler, TokenIds
from draftlab.errors import UserError
from draftlab.heads.dflash import decoder, layout
from draftlab.heads.dflash.decoder import DFlash
from draftlab.heads.dflash.drafter import BlockSpec, DFlashDrafter
from draftlab.heads.dflash.layout import DFlashShape
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.llama import Cache, Llama
from draftlab.reading import reading
from draftlab.sampling import SamplingParams


class DSparkShape(DFlashShape):
    """Sizes of a DSpark head.

    Attributes:
        markov_rank: Rank of the Markov head's bias.
        markov_kind: Kind of the Markov head. "vanilla" ignores the block's states, "gated" has a gate that reads them,
            and "rnn" has a recurrent state that reads them.
        confidence: Number of inputs of the confidence head, or 0 if there is none.
    """

    markov_rank: int = Field(ge=1)
    markov_kind: Literal["vanilla", "gated", "rnn"]
    confidence: int = Field(ge=0)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        rank = self.markov_rank
        hidden = self.hidden
        sizes = super().sizes() | {
            "markov_head.markov_w1.weight": (self.vocab, rank),
            "markov_head.markov_w2.weight": (self.draft_vocab, rank),
        }
        if self.markov_kind == "gated":
            sizes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
            sizes["markov_head.gate_proj.bias"] = (rank,)
        elif self.markov_kind == "rnn":
            sizes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
            sizes["markov_head.joint_proj.bias"] = (3 * rank,)
        if self.confidence:
            sizes["confidence_head.proj.weight"] = (1, self.confidence)
            sizes["confidence_head.proj.bias"] = (1,)
        return sizes


class DSpark(DFlash):
    """A DSpark head with its weights."""

    config: DSparkShape

    @torch.inference_mode()
    def text_logits(self, tokens: Tensor, cache: Cache) -> Tensor:
        block = self.block(tokens[:, 0], tokens.shape[1], cache)
        return torch.stack([block.logits(token) for token in tokens.unbind(1)], 1)

    @torch.inference_mode()
    def block(self, last: Tensor, count: int, cache: Cache) -> "Block":
        """Run the pass over a block that drafts `count` tokens, and return the Block.

        last: Last token of each text, [B].
        """
        return Block(self, self.block_states(last, count, cache), last, count)


class Block:
    """The result of a head's pass over a block. To draft its tokens in order, call logits() once for each token."""

    def __init__(self, head: DSpark, states: Tensor, last: Tensor, count: int) -> None:
        """Make a block. states: Final states of its T tokens, [B, T, D]. The last `count` states predict the draft.

        last: Last token of each text, [B].
        """
        drafting = states[:, -count:]
        self.head = head
        self.states = iter(drafting.unbind(1))
        self.base = iter(head.own_logits(drafting).unbind(1))
        # recurrent state of the kind rnn, [B, R]
        self.memory = states.new_zeros(len(states), head.config.markov_rank)
        # state [B, D] and embedding [B, R] from which the last logits were computed
        self.state = states[:, 0]
        self.embedded = self.memory
        for state in states[:, :-count].unbind(1):
            self._biased(last, state)

    def logits(self, token: Tensor) -> Tensor:
        """Return the logits [B, V] of the block's next token. Each call advances by one token.

        token: The token before it, [B].
        """
        biased = self._biased(token, next(self.states))
        bias = F.linear(biased, self.head.weights["markov_head.markov_w2.weight"])
        return self.head.spread(next(self.base) + bias)

    def confidence(self) -> Tensor:
        """Return the estimated probability, [B], that a token drawn from the last result of logits() is accepted."""
        wide = self.head.config.confidence > self.head.config.hidden
        features = torch.cat([self.state, self.embedded], -1) if wide else self.state
        return self._project("confidence_head.proj", features.float()).squeeze(-1).sigmoid()

    def _biased(self, token: Tensor, state: Tensor) -> Tensor:
        """Return the input of markov_w2, [B, R], after a token [B]. In the kind "rnn", advance the recurrent state.

        state: The block's state at this position, [B, D].
        """
        embedded = self.head.weights["markov_head.markov_w1.weight"][token]
        self.state = state
        self.embedded = embedded
        kind = self.head.config.markov_kind
        if kind == "gated":
            gate = self._project("markov_head.gate_proj", torch.cat([state, embedded], -1))
            return gate.sigmoid() * embedded
        if kind == "rnn":
            inputs = torch.cat([self.memory, embedded, state], -1)
            joint = self._project("markov_head.joint_proj", inputs)
            gate, candidate, output = joint.chunk(3, -1)
            self.memory = torch.lerp(candidate.tanh(), self.memory, gate.sigmoid())
            return output.tanh()
        return embedded

    def _project(self, name: str, x: Tensor) -> Tensor:
        """Return x W^T + b in the dtype of x, with the weight and bias of the linear layer `name`."""
        weights = self.head.weights
        return F.linear(x, weights[f"{name}.weight"].to(x), weights[f"{name}.bias"].to(x))


def check(folder: Path, target: Path) -> DSparkShape:
    """Check config.json of a DSpark head, and return the sizes of the head. No weights are read.

    Raises:
        UserError: The folder has no DSpark head, the head is for another target, or draftlab does not support it.
    """
    return _read_shape(folder, target)[0]


def load(folder: Path, target_path: Path, embed: Tensor, head: Tensor) -> DSpark:
    """Load a DSpark head. Arguments and errors are those of dflash.decoder.load."""
    config, layer = _read_shape(folder, target_path)
    return DSpark(config, *decoder.read_parts(folder, config, layer, embed, head))


def _read_shape(folder: Path, target: Path) -> tuple[DSparkShape, Qwen3Config]:
    shape, layer, content = layout.read_shape(folder, target, "dspark")
    if "sample_from_anchor" not in content:  # speculators assumes true, and vLLM false
        raise UserError(
            f"{folder}: config.json of the DSpark head lacks sample_from_anchor; set it to true or false, as in the "
            "head's training"
        )
    with reading(folder / "config.json"):
        rank = content["markov_rank"]
        confidence = 0
        if content.get("enable_confidence_head"):
            with_markov = content.get("confidence_head_with_markov")
            confidence = shape.hidden + (int(str(rank)) if with_markov else 0)
        kind = content.get("markov_head_type") or "vanilla"
        own = {"markov_rank": rank, "markov_kind": kind, "confidence": confidence}
        return DSparkShape.model_validate(shape.model_dump() | own), layer


class DSparkDrafter(DFlashDrafter):
    """Drafts a block of tokens after each text, with a DSpark head.

    least_confidence: The draft ends before the product of its tokens' confidences falls below this. With 0, all K
    tokens are drafted.
    """

    def __init__(self, target: Llama | HFDecoder, head: DSpark, least_confidence: float = 0) -> None:
        super().__init__(target, head)
        self.dspark = head
        self.least_confidence = least_confidence

    @torch.inference_mode()
    def propose(self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        token, count = self.begin(texts, count)
        block = self.dspark.block(token, self.width, self.cache)
        sampler = Sampler(sampling.unlimited(), self.vocab)
        survival = torch.ones(len(texts), device=self.head.device)
        tokens = []
        distributions = []
        confident = []
        for number in range(count):
            logits = block.logits(token)
            token, q = sampler(logits, uniform[:, number])
            tokens.append(token)
            distributions.append(q)
            if self.least_confidence:
                survival = survival * block.confidence()
                confident.append(survival >= self.least_confidence)
        counts = torch.stack(confident, 1).sum(1).tolist() if confident else [count] * len(texts)
        q = None if sampling.temperature == 0 else torch.stack(distributions, 1)
        return Draft(ids=torch.stack(tokens, 1), q=q, counts=counts)


@drafter("dspark", served_by=("vllm", "sglang"))
class DSparkSpec(BlockSpec):
    """Drafts with a DSpark head.

    heads: Directory of the head, in the layout of speculators or of DeepSeek.
    least_confidence: Least estimated probability that all tokens of a draft are accepted. A draft ends before the token
    with which the probability would be lower.
    """

    format = "DSpark"
    least_confidence: float = Field(0.0, ge=0, lt=1)

    @classmethod
    def read(cls, folder: Path, target: Path) -> DSparkShape:
        return check(folder, target)

    @classmethod
    def load(cls, folder: Path, target_path: Path, target: Llama | HFDecoder, device: torch.device) -> DSpark:
        return load(folder, target_path, target.embed.to(device), target.head.to(device))

    def check(self, run: RunFacts) -> None:
        super().check(run)
        if self.least_confidence and not self.read(Path(self.heads), run.target).confidence:
            raise UserError(
                f"--drafter {self.text}: this DSpark head does not predict confidences; leave least_confidence out"
            )

    def drafter(self, target: Llama | HFDecoder, head: DFlash) -> Drafter:
        return DSparkDrafter(target, cast(DSpark, head), self.least_confidence)

    @property
    def replays(self) -> bool:
        # least_confidence makes the number of drafted tokens random
        return not self.least_confidence
