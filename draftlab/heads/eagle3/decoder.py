"""EAGLE-3 and P-EAGLE heads that run like decoders: each is a Llama with its own KV cache.

B rows, T new tokens, K drafted tokens, D hidden, V vocab, A layers of the target that are read, E hidden of the target.
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from draftlab.heads.eagle3 import layout
from draftlab.heads.eagle3.layout import Head
from draftlab.model import Mode
from draftlab.model.cuda_graphs import CudaGraphLlama
from draftlab.model.decoder import (
    AttentionMetadata,
    Drafted,
    TokenChooser,
    Tree,
    draft_chain,
    pinned_backends,
)
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.llama import Cache, Llama, rms_norm, rotary
from draftlab.model.native_cpu import WIDE, NativeLlama


class EagleLlama(Llama):
    """A head as a Llama that reads a state with each token. step() runs a pass; forward() raises TypeError.

    In the first layer, q, k and v read the concatenation of the token's embedding and the state, [2 D].
    """

    # the mask token of a P-EAGLE head, and the state [D] that is read with it; None for other heads
    mask: tuple[int, Tensor] | None = None

    def __init__(self, head: Head, embedding: Tensor, directory: Path) -> None:
        """Make a Llama from a head. embedding: The target's embedding, [V, D], which is used if the head has none.

        Raises:
            UserError: draftlab's engine does not support the head's rotary scaling.
        """
        config = head.config
        weights = {f"model.{name}": weight for name, weight in head.weights.items()}
        weights["model.embed_tokens.weight"] = embedding if head.embedding is None else head.embedding
        weights["lm_head.weight"] = head.weights["lm_head.weight"]
        inv_freq, scale = rotary(config.llama_config(), config.head_dim, directory)
        super().__init__(config.shape, weights, inv_freq, scale, config.eps, config.context)
        self.fc = head.weights["fc.weight"]
        names = ["input_norm.weight"] if config.norm_before_fc else []
        names += [f"fc_norm.{i}.weight" for i in range(len(config.layer_ids))] if config.fc_norm else []
        self.fc_norms = [head.weights[name] for name in names]
        self.state_norm = self.hidden_norm = head.weights["layers.0.hidden_norm.weight"]
        self.norm_before_residual = config.norm_before_residual
        self.norm_output = config.norm_output
        self.window = config.sliding_window
        self.layer_ids = config.layer_ids
        if config.draft_vocab < config.vocab:
            self.head_ids = head.ids

    def combine(self, layer_states: Tensor) -> Tensor:
        """Return the head's input states [..., D], which fc computes from the target's states [..., A E]."""
        if self.fc_norms:
            parts = layer_states.split([len(weight) for weight in self.fc_norms], -1)
            normed = [rms_norm(part, weight, self.eps) for part, weight in zip(parts, self.fc_norms, strict=True)]
            layer_states = torch.cat(normed, -1)
        return F.linear(layer_states, self.fc)

    def forward(self, ids: Tensor, cache: Cache, last: int = 0, tree: Tree | None = None) -> Tensor:
        """Raise TypeError, because a head reads states together with tokens; use step()."""
        raise TypeError("an EAGLE-3 head needs the target's states together with the tokens; call step()")

    @torch.inference_mode()
    def step(
        self, ids: Tensor, states: Tensor, cache: Cache, last: int, tree: Tree | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run a pass over tokens, each with a state, and append them to the cache.

        Args:
            ids: Tokens, [B, T]. The position of each token is the position of its state plus 1.
            states: States from combine or from earlier steps, [B, T, D].
            last: Number of last tokens whose logits are returned.
            tree: Token tree of the T tokens. Default: each token follows the token before it.

        Returns: Logits of the last tokens, [B, last, V], and the head's new states of all tokens, [B, T, D].
        """
        drafted = self.decode_states(ids, states, cache, self._metadata(cache, ids.shape[1], tree), last)
        cache.used = [used + ids.shape[1] for used in cache.used]
        return drafted

    def draft(
        self,
        logits: Tensor,
        cache: Cache,
        uniform: Tensor,
        choose: TokenChooser,
        state: Tensor | None = None,
    ) -> Drafted:
        """Draft K tokens, one after the other, see Decoder.draft.

        state: The head's state at the last position of each text, [B, 1, D].
        """

        def following(token: Tensor) -> Tensor:
            nonlocal state
            assert state is not None  # a head drafts from states
            logits, state = self.step(token.unsqueeze(1), state, cache, last=1)
            return logits[:, -1]

        return draft_chain(logits, uniform, choose, following)

    def decode_states(
        self, ids: Tensor, states: Tensor, cache: Cache, metadata: AttentionMetadata, last: int
    ) -> tuple[Tensor, Tensor]:
        """Run a pass, and return the same logits and new states as step(). cache.used does not change.

        metadata: Mask and cache slots of the pass.
        """
        embedded = self._normed(F.embedding(ids, self.embed), self.blocks[0].input_norm)
        normed = rms_norm(states, self.state_norm, self.eps)
        residual = normed if self.norm_before_residual else states
        joined = torch.cat([embedded, normed], -1)
        with pinned_backends(self.device):
            x = self.run_layer(0, residual, joined, cache, metadata)
            for layer, block in enumerate(self.blocks[1:], 1):
                x = self.run_layer(layer, x, self._normed(x, block.input_norm), cache, metadata)
        normed = rms_norm(x if self.norm_output else x[:, -last:], self.norm, self.eps)
        logits = self.expand_logits(F.linear(normed[:, -last:], self.head))
        return logits, normed if self.norm_output else x


class NativeEagle(NativeLlama, EagleLlama):
    """A head on the CPU whose passes of at most WIDE tokens run in compiled C++, and return float32 states."""

    forward = EagleLlama.forward  # pyright: ignore[reportAssignmentType]

    @torch.inference_mode()
    def step(
        self, ids: Tensor, states: Tensor, cache: Cache, last: int, tree: Tree | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run a pass, see EagleLlama.step. Passes with few tokens run in compiled C++, see NativeLlama."""
        if ids.numel() > WIDE and not self.any_width:
            return super().step(ids, states.to(self.embed), cache, last, tree)
        states = states.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        logits = self.narrow_pass(ids, cache, last, tree, states)
        return logits, rms_norm(states, self.norm.float(), self.eps) if self.norm_output else states


class CudaGraphEagle(CudaGraphLlama, EagleLlama):
    """A head whose passes of at most cuda_graphs.WIDE tokens replay CUDA graphs, see CudaGraphLlama."""

    forward = EagleLlama.forward  # pyright: ignore[reportAssignmentType]

    @torch.inference_mode()
    def step(
        self, ids: Tensor, states: Tensor, cache: Cache, last: int, tree: Tree | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run a pass, see EagleLlama.step. Passes with few tokens replay a CUDA graph, see CudaGraphLlama."""
        if not self._has_graph(ids, cache, tree):
            return super().step(ids, states, cache, last, tree)
        logits, states_after = self._replayed(ids, cache, last, states)
        assert states_after is not None  # because step has states
        return logits, states_after

    def _pass(
        self,
        ids: Tensor,
        cache: Cache,
        metadata: AttentionMetadata,
        last: int,
        states: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        assert states is not None  # step and draft have states
        return self.decode_states(ids, states, cache, metadata, last)


def with_mode(head: EagleLlama, mode: Mode, int8: bool = False) -> EagleLlama:
    """Return the head with passes that run in a mode. int8: Whether mode native rounds weights to int8."""
    if mode == "native":
        return NativeEagle(head, int8)
    return CudaGraphEagle(head) if mode == "graphs" else head


def load(folder: Path, target_path: Path, target: Llama | HFDecoder, device: torch.device) -> EagleLlama:
    """Load an EAGLE-3 head in the dtype of its target.

    Raises:
        UserError: the errors of layout.read, or draftlab's engine does not support the head's rotary scaling.
    """
    embedding = target.embed.to(device)
    return EagleLlama(layout.read(folder, target_path, embedding.dtype, device), embedding, folder)
