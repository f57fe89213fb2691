"""Convert the text part of a multimodal model to a checkpoint of its own.

For text alone, the three positions of Qwen-VL's rotary embedding (mrope) are equal, so it is the ordinary one.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from draftlab.errors import UserError
from draftlab.model import checkpoint, saving
from draftlab.reading import reading

# model_type of a text part that has no causal language model of its own in transformers, and an equal model that has
EQUAL = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
# names of the text part's tensors, as transformers 4 and 5 write them
TEXT = re.compile(
    r"(?:language_model\.(?:model|(?=lm_head))|model(?:\.language_model)?|(?=lm_head))\.?"
    r"((?:layers|embed_tokens|norm|lm_head)\..+)"
)
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
MROPE = ("mrope_section", "mrope_interleaved")


def read_config(directory: Path) -> dict[str, Any]:
    """Return the config.json of the text part.

    Raises:
        UserError: transformers cannot read config.json, or the text part is no causal language model of transformers.
    """
    whole = checkpoint.read_config(directory)
    with reading(f"{directory}/config.json cannot be used"):
        read: Any = checkpoint.auto_config(directory)
        config = read.get_text_config().to_dict()
    kind = EQUAL.get(config["model_type"], config["model_type"])
    if kind not in CLASSES:
        raise UserError(
            f"{directory}: the text part has the model_type {kind!r}, which is no causal language model of the "
            "installed transformers; use a text model with the same tokenizer"
        )
    if kind != config["model_type"]:
        rope = {name: x for name, x in config["rope_parameters"].items() if name not in MROPE}
        rope["rope_type"] = "default" if rope["rope_type"] == "mrope" else rope["rope_type"]
        rope.pop("type", None)
        config["rope_parameters"] = rope
    tokens = {name: whole[name] for name in TOKENS if whole.get(name) is not None}
    stored = set(_names(checkpoint.Weights(directory)))
    return (
        config
        | tokens
        | {
            "model_type": kind,
            "architectures": [CLASSES[kind]],
            "tie_word_embeddings": read.tie_word_embeddings or "lm_head.weight" not in stored,
        }
    )


def check(directory: Path) -> None:
    """Check, without reading weights, that the tensors of the text part are those that its config needs.

    Raises:
        UserError: the weights are quantised, or read_config raises it, or a tensor is missing, unknown or of another
            size.
    """
    checkpoint.check_unquantised(directory, checkpoint.read_config(directory))
    weights = checkpoint.Weights(directory)
    config = read_config(directory)
    model = checkpoint.meta_model(config, torch.float32)
    needed = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    stored = {new: weights.shape(old) for new, old in _names(weights).items()}
    if config["tie_word_embeddings"]:  # then either may have the head
        needed.pop("lm_head.weight", None)
        stored.pop("lm_head.weight", None)
    for name in sorted(needed.keys() | stored.keys()):
        if needed.get(name) != stored.get(name):
            raise UserError(
                f"{directory}: the tensor {name} of the text part has the size {stored.get(name)}, but config.json "
                f"requires {needed.get(name)} (None: no such tensor); download the checkpoint again"
            )


def write(directory: Path, out: Path, dtype: torch.dtype) -> None:
    """Write the text part and the tokenizer. Raises UserError: a weight is not finite, or read_config raises it."""
    weights = checkpoint.Weights(directory, dtype)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for new, old in _names(weights).items():
            yield new, weights[old]

    saving.write_checkpoint(out, read_config(directory), tensors(), directory)


def _names(weights: checkpoint.Weights) -> dict[str, str]:
    """Return the names of the text part's tensors in a multimodal checkpoint, by their names in a text model."""
    names = {}
    for old in weights:
        if match := TEXT.fullmatch(old):
            tail = match[1]
            names[tail if tail.startswith("lm_head.") else f"model.{tail}"] = old
    return names
