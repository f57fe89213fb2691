"""Medusa heads (Cai et al. 2024, 2401.10774), which draft from the target's last hidden state.

B rows (texts of a batch), K drafted tokens, N heads, D hidden, V vocab. From its last hidden state h, the target
predicts the next token. Head k predicts the token k positions after that token: softmax(W_lm (SiLU(W_k h) + h)). W_lm
is the target's LM head, so a head adds only W_k.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import Field
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from draftlab.engine.generate import Draft, Drafter, TokenIds, draw_each
from draftlab.errors import UserError
from draftlab.model.checkpoint import check_weight
from draftlab.model.llama import Cache, Llama, rms_norm
from draftlab.model.saving import save_finite
from draftlab.reading import FileModel, read_model, reading
from draftlab.runs import provenance
from draftlab.sampling import SamplingParams
from draftlab_research.drafting.tree import Siblings, draft_levels, node_depths
from draftlab_research.medusa import MANIFEST, TRAINED_BY

WEIGHTS = "heads.safetensors"


class Manifest(FileModel):
    """The content of medusa.json.

    heads: Number of heads. hidden: D. target: Fingerprint of the target.
    """

    heads: int = Field(ge=1, le=1000)
    hidden: int = Field(ge=1, le=1 << 24)
    target: str


class MedusaDrafter(Drafter):
    """A drafter that drafts a chain or a tree with Medusa heads, without a pass of a draft model.

    Head k gives the logits of the k-th token of a chain, or of all tokens on level k of a tree. These logits do not
    depend on drafted tokens. The verify rules for chains and trees apply with the heads' distributions as q.
    """

    def __init__(
        self,
        target: Llama,
        heads: Tensor,
        parents: tuple[int, ...] | None = None,
        siblings: Siblings = "sampled",
    ) -> None:
        """Create the drafter.

        heads: Weights W_k of the heads, [N, D, D]. parents, siblings: See TreeDrafter. Without parents, the drafter
        drafts a chain.
        """
        self.target, self.heads = target, heads.to(target.embed)
        self.parents = parents
        self.siblings: Siblings = siblings

    def attach(self, cache: Cache) -> None:
        self.states = self.target.new_layer_states(cache, (self.target.shape.layers,))
        cache.layer_states = self.states

    def propose(self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        # the target has not read the last token yet, so its last state belongs to the second-to-last token
        at = [len(text) - 2 for text in texts]
        read = self.states.states[torch.arange(len(at)), at].to(self.heads)
        # the input of the target's LM head, [B, D]
        state = rms_norm(read, self.target.norm, self.target.eps)
        parents = None if self.parents is None else self.parents[:count]
        used = count if parents is None else max(node_depths(parents))
        hidden = apply_heads(state, self.heads[:used])  # [B, levels, D]
        logits = self.target.expand_logits(F.linear(hidden, self.target.head))
        if parents is not None:
            return draft_levels(logits, parents, self.siblings, sampling, uniform)
        return draw_each(logits, uniform, sampling, None)


def apply_heads(hidden: Tensor, heads: Tensor) -> Tensor:
    """Return the inputs of the target's LM head for each Medusa head, [..., N, D].

    hidden: The target's last hidden states, [..., D]. heads: Weights W_k of the heads, [N, D, D].
    """
    product = F.linear(hidden, heads.flatten(0, 1)).unflatten(-1, heads.shape[:2])
    return F.silu(product) + hidden.unsqueeze(-2)


def write(folder: Path, heads: Mapping[str, Tensor], target: Path) -> None:
    """Write the weights of heads, and their manifest, to a folder. heads: Weights in the order of k, [D, D] each."""
    numbered = {f"{number:02d}": w.contiguous() for number, w in enumerate(heads.values(), 1)}
    save_finite(folder / WEIGHTS, numbered)
    hidden = next(iter(heads.values())).shape[0]
    manifest = Manifest(heads=len(heads), hidden=hidden, target=provenance.fingerprint(target))
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2))


def read(folder: Path, target: Path) -> Tensor:
    """Return the weights of all heads in a folder, [N, D, D].

    Raises:
        UserError: The folder has no heads, a file is damaged, or the heads were trained for another target.
    """
    manifest = read_model(Manifest, folder / MANIFEST, hint=f"; train heads with {TRAINED_BY}")
    if manifest.target != provenance.fingerprint(target):
        raise UserError(
            f"{folder} has heads for another target than {target}; use the target for which the heads were trained"
        )
    with reading(folder / WEIGHTS):
        weights = load_file(folder / WEIGHTS)
        heads = torch.stack([weights[f"{n:02d}"] for n in range(1, manifest.heads + 1)])
    check_weight(heads, WEIGHTS, folder)
    return heads
