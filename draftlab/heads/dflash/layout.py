"""DFlash heads on disk (2602.06036): their sizes, and the layouts of z-lab and of speculators.

L layers, D hidden, V vocab, W draft vocab, A target layers whose states the head reads.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field
from torch import Tensor
from transformers import Qwen3Config

from draftlab.errors import UserError
from draftlab.heads.base import (
    WEIGHTS,
    HeadSizes,
    TargetSizes,
    check_mask_token,
    check_settings,
    layer_config,
    layer_sizes,
    sizes_of,
)
from draftlab.heads.eagle3.layout import head_config, layer_config_json
from draftlab.model import checkpoint, devices, hub
from draftlab.model.hf_files import FULL, SLIDING
from draftlab.model.saving import save_finite, write_config
from draftlab.model.size import ApproximateSize
from draftlab.reading import reading

# name of z-lab's class, which vLLM and SGLang know
ARCHITECTURE = "DFlashDraftModel"
# settings of config.json with the values that draftlab supports; (): none, so the setting must be missing
SUPPORTED: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "hidden_act": ("silu",),
    "is_neox_style": (True,),
    "add_swa_attention_sink_bias": (False,),
    "attention_sink_bias": (False,),
    "attention_value_scale": (),
    "use_aux_hidden_state": (True,),
    "conv_kernel_size": (),
    "selector_rank": (),
}


class DFlashShape(HeadSizes):
    """Sizes of a DFlash head.

    Attributes:
        windows: Sliding window of each layer in tokens, or None for attention to all positions.
        causal: For each layer, True if tokens of the block do not attend to later tokens of the block.
        sample_from_anchor: Whether the text's last token predicts the first drafted token. Otherwise only mask tokens
            predict.
    """

    layers: int = Field(ge=1)
    block_size: int = Field(ge=2)
    mask_token_id: int = Field(ge=0)
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    sample_from_anchor: bool = False

    @property
    def most(self) -> int:
        return self.block_size - (not self.sample_from_anchor)

    @property
    def size(self) -> ApproximateSize:
        """Return the size of the head. The output layer is counted even if the head uses the target's."""
        weights = sum(math.prod(size) for size in self.sizes().values())
        count = weights + self.draft_vocab * self.hidden
        return ApproximateSize(kind="DFlash head", count=count, active=count, layers=self.layers, hidden=self.hidden)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the sizes of the tensors that every DFlash head has, by name."""
        return {
            "fc.weight": (self.hidden, len(self.layer_ids) * self.hidden),
            "hidden_norm.weight": (self.hidden,),
            "norm.weight": (self.hidden,),
        } | layer_sizes(self.shape_of(self.layers, qk_norm=True))


def check(folder: Path, target: Path) -> DFlashShape:
    """Check config.json of a DFlash head, and return the sizes of the head. No weights are read.

    Raises:
        UserError: the folder has no DFlash head, the head is for another target, or draftlab does not support it.
    """
    return read_shape(folder, target, "dflash")[0]


def read_shape(folder: Path, target: Path, kind: str) -> tuple[DFlashShape, Qwen3Config, Mapping[str, object]]:
    """Return a head's sizes, transformers' configuration of its layers, and the content of its config.json.

    kind: The kind that the head must have, "dflash" or "dspark".

    Raises:
        UserError: The errors of check.
    """
    content = checkpoint.read_config(folder)
    hub.check_head(folder, kind)
    return *parse_shape(content, target, folder), content


def parse_shape(content: Mapping[str, object], target: Path, folder: Path) -> tuple[DFlashShape, "Qwen3Config"]:
    """Return a head's sizes and transformers' configuration of its layers, from the content of its config.json.

    folder: Folder of the head, for error messages.

    Raises:
        UserError: The errors of check.
    """
    with reading(folder / "config.json"):
        layer = layer_config(Qwen3Config, content)  # DFlash heads have layers of Qwen 3
        config = _from_json(content, layer, folder)
    config.check_target(str(folder), TargetSizes.of(target), config.hidden)
    check_mask_token(config.mask_token_id, config.vocab, folder)
    return config, layer


def new_json(
    target: Path, layers: int, layer_ids: Sequence[int] | None, block_size: int, mask_token_id: int
) -> dict[str, object]:
    """Return the content of config.json for a new DFlash head, in the format of z-lab's heads.

    The layers of the head have the sizes of the target's layers.

    Raises:
        UserError: The target lacks a layer in `layer_ids`.
    """
    sizes = TargetSizes.of(target)
    layer = head_config(target, layer_ids, sizes.vocab, qk_norm=True)
    return layer_config_json(layer) | {
        "architectures": [ARCHITECTURE],
        "num_hidden_layers": layers,
        "layer_types": [FULL] * layers,
        "num_target_layers": sizes.layers,
        "block_size": block_size,
        "dflash_config": {
            "mask_token_id": mask_token_id,
            "target_layer_ids": [i - 1 for i in layer.layer_ids],
        },
    }


def write(folder: Path, content: Mapping[str, object], weights: Mapping[str, Tensor]) -> None:
    """Write config.json and the weights of a head. content: Content of config.json, see saving.portable_config."""
    write_config(folder, content, devices.dtype_name(weights["fc.weight"].dtype))
    save_finite(folder / WEIGHTS, {name: weight.cpu().contiguous() for name, weight in weights.items()})


def _from_json(content: Mapping[str, Any], config: Qwen3Config, folder: Path) -> DFlashShape:
    """Return the sizes of a head from the content of its config.json. config: transformers' config of its layers.

    Raises:
        UserError: the head has a setting that draftlab does not support.
        KeyError, TypeError: config.json describes another kind of model.
    """
    own: Mapping[str, Any] = content.get("dflash_config") or {}
    layer: Mapping[str, Any] = content.get("transformer_layer_config", content)
    theirs = "transformer_layer_config" in content  # True for the layout of speculators
    check_settings({**layer, **own}, SUPPORTED, folder, "dflash")
    slides = own.get("use_swa", False)
    kinds = layer.get("layer_types") or [SLIDING if slides else FULL] * config.num_hidden_layers
    window = own.get("swa_window_size", config.sliding_window)
    if SLIDING in kinds and not window:
        raise UserError(
            f"config.json of {folder} has {SLIDING} layers, but no sliding_window; add sliding_window, in tokens"
        )
    # by default, layers with a sliding window were trained with a causal mask, and other layers without
    causal: list[bool] = [kind == SLIDING and bool(layer.get("layer_types")) for kind in kinds]
    if theirs and content.get("sliding_window_non_causal"):
        causal = [False] * len(kinds)
    override = content.get("is_causal", own.get("causal"))
    if not theirs and override is not None:
        causal = [bool(override)] * len(kinds)
    ids = (
        content["aux_hidden_state_layer_ids"]
        if theirs
        else [i + 1 for i in own.get("target_layer_ids") or content["target_layer_ids"]]
    )
    mask = content.get("mask_token_id") if theirs else own.get("mask_token_id")
    return DFlashShape(
        **sizes_of(config),
        layers=config.num_hidden_layers,
        draft_vocab=content.get("draft_vocab_size") or config.vocab_size,
        layer_ids=tuple(ids),
        block_size=content.get("block_size") or own["block_size"],
        mask_token_id=content["mask_token_id"] if mask is None else mask,
        windows=tuple(window if kind == SLIDING else None for kind in kinds),
        causal=tuple(causal),
        sample_from_anchor=bool(content.get("sample_from_anchor", own.get("sample_from_anchor", False))),
    )
