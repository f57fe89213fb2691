"""Medusa heads (Cai et al. 2024, 2401.10774): the target drafts from its own last hidden state.

B rows, K drafted tokens, N heads, D hidden, V vocab. Head k gives softmax(W_lm (SiLU(W_k h) + h)), the distribution k
tokens behind the one that the target itself predicts from h. W_lm is the target's own, shared: a head is W_k alone.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from draftlab import provenance
from draftlab.engine.generate import Draft
from draftlab.engine.verify import distribution, draw
from draftlab.errors import UserError
from draftlab.files import validation_text
from draftlab.model.llama import Cache, Llama
from draftlab.sampling import SamplingParams

MANIFEST, WEIGHTS = "medusa.json", "heads.safetensors"


class Manifest(BaseModel):
    """Whose heads these are. target: its fingerprint."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    heads: int = Field(ge=1)
    hidden: int = Field(ge=1)
    target: str


class MedusaDrafter:
    """Drafts as many tokens as there are heads, in one product, each without knowing of the others before it.

    So their distributions are what they were drawn from whatever the earlier tokens are, and the chain rule holds.
    """

    def __init__(self, target: Llama, heads: Tensor) -> None:
        """heads: W of each, [N, D, D].

        Raises:
            UserError: a target whose passes keep no hidden states.
        """
        if type(target) is not Llama:
            raise UserError("Medusa heads read the target's hidden states, which mode eager alone keeps; take it")
        self.target, self.heads = target, heads.to(target.embed)
        self.reset(1, 1)

    def reset(self, rows: int, capacity: int) -> None:
        self.states = self.target.embed.new_zeros(rows, capacity, self.target.shape.hidden)

    def attach(self, cache: Cache) -> None:
        cache.hidden_states = self.states

    def propose(self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        at = [len(text) - 2 for text in texts]  # the last token was never fed: the one before it predicted it
        hidden = ahead(self.states[torch.arange(len(at)), at], self.heads[:count])  # [B, K, D]
        logits = self.target.expand_logits(F.linear(hidden, self.target.head))
        counts = [logits.shape[1]] * len(texts)
        if sampling.temperature == 0:
            return Draft(ids=logits.argmax(-1), q=None, counts=counts)
        q = distribution(logits, sampling)
        return Draft(ids=draw(q, uniform[:, : q.shape[1]]), q=q, counts=counts)


def ahead(hidden: Tensor, heads: Tensor) -> Tensor:
    """What enters the target's head for each of heads [N, D, D], from hidden states [..., D]: [..., N, D]."""
    product = F.linear(hidden, heads.flatten(0, 1)).unflatten(-1, heads.shape[:2])
    return F.silu(product) + hidden.unsqueeze(-2)


def write(folder: Path, heads: Mapping[str, Tensor], target: Path) -> None:
    """heads: W of each, [D, D], in their order."""
    save_file({f"{number:02d}": w.contiguous() for number, w in enumerate(heads.values(), 1)}, folder / WEIGHTS)
    hidden = next(iter(heads.values())).shape[0]
    manifest = Manifest(heads=len(heads), hidden=hidden, target=provenance.fingerprint(target))
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2))


def read(folder: Path, target: Path) -> Tensor:
    """W of each head, [N, D, D].

    Raises:
        UserError: no heads, broken ones, or another target's.
    """
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
        weights = load_file(folder / WEIGHTS)
    except OSError as error:
        missing = Path(error.filename or folder / WEIGHTS).name
        raise UserError(f"{folder} holds no Medusa heads ({missing}); draftlab medusa trains some") from None
    except ValidationError as error:
        raise UserError(f"{folder / MANIFEST}: {validation_text(error)}") from None
    except SafetensorError as error:
        raise UserError(f"{folder / WEIGHTS} is broken: {error}") from None
    if manifest.target != provenance.fingerprint(target):
        raise UserError(f"{folder} holds heads of another target than {target}; heads fit the one they are trained on")
    wanted = [(manifest.hidden, manifest.hidden)] * manifest.heads
    if [tuple(w.shape) for w in weights.values()] != wanted:
        raise UserError(f"{folder / WEIGHTS} is not the {manifest.heads} heads that {MANIFEST} says")
    return torch.stack([weights[name] for name in sorted(weights)])
