"""The checkpoint that a draft is cut from, as it is stored and as it is computed with."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from draftlab.config.prune import CutConfig, PruneConfig, PruneMasksConfig
from draftlab.errors import UserError
from draftlab.model import checkpoint, hub
from draftlab.model.shape import Shape
from draftlab.model.size import read_size
from draftlab.prune.cut import Untied
from draftlab.prune.trial_model import check_buildable, check_prunable
from draftlab.prune.walk import Walk
from draftlab.target_outputs.outputs import TargetOutput
from draftlab.target_outputs.store import check_tokenizer, finished_manifest, read_texts

HELDOUT_TOKENS = 4096  # on which draft and source are compared


@dataclass(frozen=True, kw_only=True)
class Source:
    """untied: the checkpoint ties its head to the embedding, and the draft and so the shape have one of its own."""

    directory: Path
    shape: Shape
    device: torch.device
    untied: bool = False
    outputs: Path | None = None

    @cached_property
    def texts(self) -> list[TargetOutput]:
        """The outputs to calibrate on. Raises UserError: not a finished store, or one of another vocabulary."""
        assert self.outputs is not None
        check_tokenizer(finished_manifest(self.outputs), self.directory)
        return read_texts(self.outputs)

    @cached_property
    def config(self) -> dict[str, object]:
        return checkpoint.read_config(self.directory) | ({"tie_word_embeddings": False} if self.untied else {})

    @cached_property
    def stored_dtype(self) -> torch.dtype:
        return checkpoint.stored_dtype(self.directory)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights that are cut, and of the draft's passes: float32 where the CPU is slow at it."""
        return checkpoint.compute_dtype(self.directory, self.device)

    @cached_property
    def pass_dtype(self) -> torch.dtype:
        """The dtype of the source's own passes: bfloat16 for float16 weights on a CPU where that is fast.

        These passes only calibrate; no weight of the draft is rounded to bfloat16.
        """
        slow = self.dtype != self.stored_dtype and self.device.type == "cpu"
        return torch.bfloat16 if slow and checkpoint.is_fast(torch.bfloat16, self.device) else self.dtype

    @cached_property
    def weights(self) -> Mapping[str, Tensor]:
        return self.with_head(checkpoint.Weights(self.directory, self.dtype))

    def with_head(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the checkpoint's weights, or others of its shape, with the head that the draft is cut from."""
        return Untied(weights, self.shape) if self.untied and "lm_head.weight" not in weights else weights

    def walk(self, *, resident: bool = False) -> Walk:
        return Walk(self.weights, self.config, self.pass_dtype, self.device, resident)

    def config_for(self, shape: Shape, layers: list[int] | None = None) -> dict[str, object]:
        """Return config.json of a draft of that shape which keeps these layers, or the first ones."""
        return checkpoint.config_for(shape, self.config, layers or list(range(shape.layers)))


def open_source(config: CutConfig) -> tuple[Source, Shape]:
    """Return the source with its weights, and the shape to cut from it.

    Raises:
        UserError: the source cannot be read or cut, does not hold the shape, or ties its head where the settings need
            an untied one.
    """
    place, have, shape = config.shapes(weights=True)
    assert isinstance(place, Path)
    device = checkpoint.resolve_device(config.device)
    source = Source(directory=place, shape=have, device=device, untied=config.untie, outputs=config.outputs)
    check_cut(source.config, have, shape)
    if config.refit_head and have.tied:
        raise UserError(
            "--refit-head: the source ties its head to the embedding, which the refit would change too; add --untie"
        )
    return source, shape


def check_cut(config: dict[str, object], have: Shape, shape: Shape) -> None:
    """Refuse a source or a shape that transformers builds otherwise than the axis table says.

    Raises:
        UserError: names the tensor or the size.
    """
    check_prunable(config, have)
    check_buildable(checkpoint.config_for(shape, config, list(range(shape.layers))), shape)


def estimate(config: CutConfig) -> dict[str, str]:
    """Return what a cut needs and gives, for --dry-run; weights are neither read nor fetched.

    Raises:
        UserError: see open_source.
    """
    place, have, shape = config.shapes()
    dtype_bytes = 2
    if isinstance(place, Path):
        source_config = checkpoint.read_config(place)
        check_cut(source_config, have, shape)
        stored = str(source_config.get("dtype") or source_config.get("torch_dtype") or "float32")
        device = checkpoint.resolve_device(config.device)
        dtype_bytes = checkpoint.computed_dtype(checkpoint.resolve_dtype(stored, device), device).itemsize
    tokens = config.calibration_tokens
    weights = 2 * dtype_bytes * (have.vocab * have.hidden + have.body_params() // have.layers)
    per_token = dtype_bytes * (3 * have.hidden + shape.hidden)  # streams at three places of a layer, and the draft's
    gram = 20 * shape.ffn**2  # float32, and float64 twice while it is solved
    if isinstance(config, PruneConfig) and config.depth == "greedy":
        weights += dtype_bytes * have.params()
    return {
        "source": have.describe(),
        "draft": shape.describe(),
        "kv": kv_saving(have, shape),
        "memory": f"about {(weights + (tokens + HELDOUT_TOKENS) * per_token + gram + 1e9) / 1e9:.1f} GB",
        "compute": f"{2 * tokens * have.flops_per_token(0) / 1e12:,.3g} TFLOP",
        "disk": f"{shape.weight_bytes() / 1e6:,.4g} MB in bf16",
        "tensor parallel": f"splits evenly over {', '.join(map(str, shape.tensor_parallel()))} devices",
    }


def training_estimate(config: PruneMasksConfig) -> dict[str, str]:
    """Return what mask training needs and what the cut gives, for --dry-run. Raises UserError: see open_source."""
    facts, (_, have, _) = estimate(config), config.shapes()
    teacher = read_size(hub.locate(config.target, weights=False)) if config.target else have
    weights = have.params() * (16 if config.train_weights == "full" else 4)  # with gradients and two Adam moments
    tokens = config.steps * config.batch_size * config.seq_len
    per_token = 3 * have.flops_per_token(config.seq_len // 2) + teacher.flops_per_token(config.seq_len // 2)
    return facts | {
        "training tokens": f"{tokens:,}",
        "memory": f"about {(weights + teacher.weight_bytes() + 1e9) / 1e9:.1f} GB and activations",
        "compute": f"{tokens * per_token / 1e12:,.3g} TFLOP",
    }


def kv_saving(have: Shape, shape: Shape) -> str:
    saved = 1 - shape.kv_bytes_per_token() / have.kv_bytes_per_token()
    return f"KV cache {shape.kv_bytes_per_token() / 1024:.3g} KiB per token in bf16 ({saved:.1%} less than the source)"
