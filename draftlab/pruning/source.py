"""The checkpoint that a draft is cut from, with its stored dtype and the dtype of its passes.

A small random model of the same class checks that model/shape.py describes the architecture.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.model import checkpoint, devices, families, precision
from draftlab.model.checkpoint import Checkpoint
from draftlab.model.shape import Shape
from draftlab.pruning.cut import Cut, Untied, keep_all
from draftlab.pruning.walk import Walk
from draftlab.quantities import format_number

HEAD_DIM = 8
TOLERANCE = 1e-3


def prunable_shape(name: str) -> tuple[str, Shape]:
    """Return the short name and the shape of a source to prune. No weights are read.

    name: Name of a known shape, or hub name or directory of a checkpoint.

    Raises:
        UserError: There is no such source, or drafts cannot be cut from it.
    """
    called, place = families.locate_shape(name)
    if isinstance(place, Shape):
        return called, place
    shape = checkpoint.read_shape(place)
    check_prunable(checkpoint.read_config(place), shape)
    return called, shape


def check_buildable(config: dict[str, object], shape: Shape) -> None:
    """Check that the model that transformers builds from a config has the tensor sizes of a shape.

    Raises:
        UserError: The size of a tensor differs. The message names the tensor.
    """
    built = {name: tuple(p.shape) for name, p in checkpoint.meta_model(config, torch.float32).named_parameters()}
    for name, axes in shape.axes().items():
        if built.get(name) != shape.dims(axes):
            raise UserError(
                f"in a {config.get('model_type')} model of transformers, {name} has the size {built.get(name)}, but in "
                f"this shape {shape.dims(axes)}; use a --width that is a multiple of head_dim, {shape.head_dim}"
            )


def check_prunable(config: dict[str, object], source: Shape) -> None:
    """Check that a model computes with its tensors as LLaMA does, so that a cut of unused dimensions is exact.

    The check builds a small random model of this kind, in which half of the hidden dimensions and heads are zero. If
    these are cut and the norms are rescaled, the logits must stay the same. The logits change, for example, if a norm
    adds 1 to its scale, as in Gemma, or if the embedding is multiplied by the width.

    Raises:
        UserError: The logits change, or transformers cannot build the small model.
    """
    group = min(4, source.heads // source.kv_heads)
    width = 2 * group * HEAD_DIM
    sizes = {
        "layers": min(2, source.layers),
        "heads": 2 * group,
        "kv_heads": 2,
        "ffn": 32,
        "vocab": 48,
    }
    wide = source.model_copy(update=sizes | {"hidden": width, "head_dim": HEAD_DIM})
    narrow = wide.model_copy(update={"hidden": width // 2, "heads": group, "kv_heads": 1})
    layers = list(range(wide.layers))
    plain = config | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model = checkpoint.new_model(checkpoint.config_for(wide, plain, layers), seed=0).eval()
    with torch.no_grad():
        weights = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for name, tensor in weights.items():
        if "o_proj" in name or "down_proj" in name:
            tensor[narrow.hidden :] = 0
        if name.endswith(("embed_tokens.weight", "o_proj.weight")):
            tensor[:, narrow.hidden :] = 0
    cut = dict(Cut(weights, narrow, keep_all(narrow)).items())
    for name, axes in narrow.axes().items():
        cut[name] = cut[name] * 2**0.5 if axes == ("hidden",) and "norm" in name else cut[name]
    small = checkpoint.new_model(checkpoint.config_for(narrow, plain, layers), seed=0).eval()
    ids = torch.arange(8).unsqueeze(0)
    with torch.no_grad():
        for built, tensors in ((model, weights), (small, cut)):
            for name, parameter in built.named_parameters():
                parameter.copy_(tensors[name])
        cut_logits = small(input_ids=ids).logits
        logits = model(input_ids=ids).logits
    if not float((cut_logits - logits).abs().max()) <= TOLERANCE * float(logits.abs().max()):
        raise UserError(
            f"{config.get('model_type')} models cannot be pruned, because they compute differently from LLaMA with the "
            "same tensors, so that a cut would not be exact; use another source"
        )


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint to cut a draft from.

    Attributes:
        shape: Shape of the checkpoint. With `untied`, it has a separate head.
        untied: Whether to give the draft a separate head, although the checkpoint's head is tied to its embedding.
    """

    checkpoint: Checkpoint
    shape: Shape
    device: torch.device
    untied: bool = False

    @property
    def directory(self) -> Path:
        return self.checkpoint.directory

    @cached_property
    def config(self) -> dict[str, object]:
        return self.checkpoint.config | ({"tie_word_embeddings": False} if self.untied else {})

    @cached_property
    def stored_dtype(self) -> torch.dtype:
        return checkpoint.stored_dtype(self.directory)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Return the dtype in which weights are cut and the draft runs.

        It is the dtype of the checkpoint, or float32 if that dtype is slow on the device.
        """
        dtype = checkpoint.compute_dtype(self.directory, self.device)
        return dtype if precision.reads_fast(dtype, self.device) else torch.float32

    @cached_property
    def planned_dtype(self) -> torch.dtype:
        """Return `dtype` as config.json predicts it. No weights are read."""
        stored = str(self.config.get("dtype") or self.config.get("torch_dtype") or "float32")
        dtype = devices.DTYPES[stored]
        return dtype if precision.reads_fast(dtype, self.device) else torch.float32

    @cached_property
    def pass_dtype(self) -> torch.dtype:
        """Return the dtype in which the source runs.

        It is `dtype`, with one exception: on a CPU that is slow in float16 but fast in bfloat16, a float16 checkpoint
        runs in bfloat16. The source runs only for calibration and refit, so this does not round the draft's weights.
        """
        slow = self.dtype != self.stored_dtype and self.device.type == "cpu"
        return torch.bfloat16 if slow and precision.reads_fast(torch.bfloat16, self.device) else self.dtype

    @cached_property
    def weights(self) -> Mapping[str, Tensor]:
        return self.with_head(checkpoint.Weights(self.directory, self.dtype))

    def with_head(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a checkpoint's weights. If `untied` is set and there is no head, add a copy of the embedding."""
        return Untied(weights, self.shape) if self.untied and "lm_head.weight" not in weights else weights

    def walk(self) -> Walk:
        return Walk(self.weights, self.config, self.pass_dtype, self.device)

    def config_for(self, shape: Shape, layers: list[int] | None = None) -> dict[str, object]:
        """Return the content of config.json for a draft of this shape.

        layers: Layers of the source to keep. None keeps the first layers.
        """
        return checkpoint.config_for(shape, self.config, layers or list(range(shape.layers)))


def check_cut(config: dict[str, object], have: Shape, shape: Shape) -> None:
    """Check that a source can be pruned, and that transformers builds the draft with the tensor sizes of its shape.

    Raises:
        UserError: Cutting the source would not be exact (see check_prunable), or the size of a tensor differs.
    """
    check_prunable(config, have)
    check_buildable(checkpoint.config_for(shape, config, list(range(shape.layers))), shape)


def kv_saving(have: Shape, shape: Shape) -> str:
    saved = 1 - shape.kv_bytes_per_token() / have.kv_bytes_per_token()
    return (
        f"KV cache {format_number(shape.kv_bytes_per_token() / 1024)} KiB per token in bf16, {saved:.1%} less than the "
        "source's"
    )
