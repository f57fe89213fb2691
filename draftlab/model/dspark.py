"""DSpark heads: a DFlash block whose tokens are drawn in order, each with a bias from the token before it.

B rows, K drafted tokens, D hidden, R rank, W draft ids, V vocab. The block's pass gives logits as a DFlash head's does.
Then a Markov head adds a bias of low rank, markov_w2(markov_w1[token before]), perhaps gated by the block's state or
with a recurrent state of its own. A confidence head estimates the chance of each token to be accepted.
"""

from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from draftlab.errors import UserError
from draftlab.model import dflash
from draftlab.model.dflash import BlockCache, DFlash, DFlashShape
from draftlab.reading import reading


class DSparkShape(DFlashShape):
    """Sizes of a head.

    Attributes:
        markov_rank: Rank of the bias.
        markov_kind: Dependence of the bias on the block's states: none, a gate, or a recurrent state.
        confidence: Number of inputs of the confidence head; 0 without one.
    """

    markov_rank: int = Field(ge=1)
    markov_kind: Literal["vanilla", "gated", "rnn"]
    confidence: int = Field(ge=0)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        rank, hidden = self.markov_rank, self.hidden
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
    """A head on its target. config is a DSparkShape."""

    config: DSparkShape

    @torch.inference_mode()
    def text_logits(self, tokens: Tensor, cache: BlockCache) -> Tensor:
        block = self.block(tokens[:, 0], tokens.shape[1], cache)
        return torch.stack([block.logits(token) for token in tokens.unbind(1)], 1)

    @torch.inference_mode()
    def block(self, last: Tensor, count: int, cache: BlockCache) -> "Block":
        """Run the pass of a block of count tokens after the last token of each text, [B]."""
        return Block(self, self.block_states(last, count, cache), last, count)


class Block:
    """A block whose pass has run, and whose tokens are drawn from first to last."""

    def __init__(self, head: DSpark, states: Tensor, last: Tensor, count: int) -> None:
        """states: [B, T, D], of which the last count predict. last: The text's last token, [B]."""
        self.head, self.states = head, iter(states[:, -count:].unbind(1))
        base = F.linear(states[:, -count:].flatten(0, 1), head.head)  # see DFlash.block_logits
        self.base = iter(base.unflatten(0, (len(states), count)).unbind(1))
        # recurrent state of the kind rnn, [B, R]
        self.memory = states.new_zeros(len(states), head.config.markov_rank)
        # state [B, D] and embedding [B, R] from which the last logits were computed
        self.state, self.embedded = states[:, 0], self.memory
        for state in states[:, :-count].unbind(1):
            self._biased(last, state)

    def logits(self, token: Tensor) -> Tensor:
        """Return the logits [B, V] of the next token, given the token [B] before it."""
        biased = self._biased(token, next(self.states))
        bias = F.linear(biased, self.head.weights["markov_head.markov_w2.weight"])
        return self.head.spread(next(self.base) + bias)

    def confidence(self) -> Tensor:
        """Return the estimated chance [B] that the token of the last logits is accepted."""
        wide = self.head.config.confidence > self.head.config.hidden
        features = torch.cat([self.state, self.embedded], -1) if wide else self.state
        return self._project("confidence_head.proj", features.float()).squeeze(-1).sigmoid()

    def _biased(self, token: Tensor, state: Tensor) -> Tensor:
        """Return the input [B, R] of markov_w2 after a token [B]. state: The block's state at this position, [B, D]."""
        embedded = self.head.weights["markov_head.markov_w1.weight"][token]
        self.state, self.embedded = state, embedded
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
        """Return x times a named matrix, plus its bias, in the dtype of x."""
        weights = self.head.weights
        return F.linear(x, weights[f"{name}.weight"].to(x), weights[f"{name}.bias"].to(x))


def check(folder: Path, target: Path) -> DSparkShape:
    """Read the configuration of a head, but no weight.

    Raises:
        UserError: The folder has no DSpark head, a head of another target, or a head that draftlab does not compute.
    """
    return _read_shape(folder, target)[0]


def load(folder: Path, target_path: Path, embed: Tensor, head: Tensor) -> DSpark:
    """Load a head. embed, head: Embedding and output layer of the target, [V, D] each. Raises UserError: see check."""
    config, layer = _read_shape(folder, target_path)
    return DSpark(config, *dflash.read_parts(folder, config, layer, embed, head))


def _read_shape(folder: Path, target: Path) -> tuple[DSparkShape, object]:
    shape, layer, content = dflash.read_shape(folder, target, "dspark")
    if "sample_from_anchor" not in content:  # speculators assumes true, and vLLM false
        raise UserError(
            f"{folder}: config.json of the DSpark head lacks sample_from_anchor; add true or false, "
            "as the head was trained"
        )
    with reading(folder / "config.json"):
        rank, confidence = content["markov_rank"], 0
        if content.get("enable_confidence_head"):
            with_markov = content.get("confidence_head_with_markov")
            confidence = shape.hidden + (int(str(rank)) if with_markov else 0)
        kind = content.get("markov_head_type") or "vanilla"
        own = {"markov_rank": rank, "markov_kind": kind, "confidence": confidence}
        return DSparkShape.model_validate(shape.model_dump() | own), layer
