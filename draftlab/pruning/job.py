"""The job of the command prune: a source, the shape to cut from it, the method, and the text."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from draftlab.model.shape import Shape
from draftlab.output import Output
from draftlab.pruning.masks.training import MaskTraining, prune_by_masks
from draftlab.pruning.refit import Refit
from draftlab.pruning.run import HELDOUT_TOKENS, Depth, Method, Prune, PrunedDraft, Text
from draftlab.pruning.source import Source, kv_saving
from draftlab.quantities import format_bytes

PLANNED_BYTES = 2  # bytes of a weight of a source that is only a shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """The pruning of a source to a shape, by scores or by trained masks.

    Attributes:
        name: Default name of the output directory.
        source: The checkpoint to cut. None if only its shape is known, as in some dry runs.
        have, shape: Shapes of the source and of the draft.
        masks: Settings of mask training, for the method masks.
        preset: Name of the shape that stands for a source that cannot be downloaded, or None.
    """

    name: str
    source: Source | None
    have: Shape
    shape: Shape
    text: Text
    refit: Refit
    method: Method | Literal["masks"]
    depth: Depth
    scores_cache: Path | None = None
    masks: MaskTraining | None = None
    preset: str | None = None

    def run(self, output: Output) -> PrunedDraft:
        """Cut the source, and write the draft.

        Raises:
            UserError: See Prune.check and prune_by_masks.
        """
        cut = self.cut(output)
        if self.method == "masks":
            assert self.masks is not None
            return prune_by_masks(cut, self.masks)
        return cut.by_scores(self.method, self.depth, scores_cache=self.scores_cache)

    def cut(self, output: Output) -> Prune:
        assert self.source is not None  # only a dry run has no source
        return Prune(source=self.source, shape=self.shape, output=output, text=self.text, refit=self.refit)

    def facts(self) -> Mapping[str, object]:
        """Return the facts that a dry run shows. No weights are read or downloaded."""
        have = self.have
        shape = self.shape
        source = have.describe()
        if self.preset is not None:
            source += f" (computed from the shape {self.preset} in draftlab; nothing was downloaded)"
        dtype_bytes = PLANNED_BYTES if self.source is None else self.source.planned_dtype.itemsize
        weights = 2 * dtype_bytes * (have.vocab * have.hidden + have.body_params() // have.layers)
        # three copies of the source's residual stream, and one of the draft's
        per_token = dtype_bytes * (3 * have.hidden + shape.hidden)
        gram = 20 * shape.ffn**2  # bytes: once in float32, and twice in float64 while it is solved
        memory = weights + (self.text.tokens + HELDOUT_TOKENS) * per_token + gram + 1e9
        facts: dict[str, object] = {
            "source": source,
            "draft": shape.describe(),
            "kv": kv_saving(have, shape),
            "memory": f"about {memory / 1e9:.1f} GB",
            "flops": 2 * self.text.tokens * have.flops_per_token(0),
            "disk": f"{format_bytes(shape.weight_bytes())} in bf16",
            "tensor parallel": f"splits evenly over {', '.join(map(str, shape.tensor_parallel()))} devices",
        }
        if self.masks is not None:
            tokens = self.masks.steps * self.masks.batch_size * self.text.seq_len
            # bytes per fp32 weight: 4, or 16 with its gradient and two Adam moments
            memory = have.params() * (16 if self.masks.lr else 4) + have.weight_bytes() + 1e9
            facts["training tokens"] = f"{tokens:,}"
            facts["memory"] = f"about {memory / 1e9:.1f} GB and activations"
            facts["flops"] = tokens * 4 * have.flops_per_token(self.text.seq_len // 2)
        return facts
