"""EAGLE-3 heads on disk (Li et al. 2025, 2503.01840): their sizes, their tensors, and the layouts that servers read.

A head is one LLaMA layer. At each position, its attention reads the embedding of a token, and the state of the position
before. If the target has read that position, the state is fc's projection of the outputs of some target layers.
Otherwise it is the head's own output. The head predicts some of the target's ids. EAGLE-3.1 adds norms before fc, a
norm of the head's output, and a sliding window.

D hidden, E hidden of the target, V vocab, W draft vocab, A layers of the target that fc reads.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor
from transformers import LlamaConfig

from draftlab.errors import UserError
from draftlab.heads.base import (
    LAYER_FIELDS,
    WEIGHTS,
    HeadSizes,
    TargetSizes,
    check_settings,
    draft_ids,
    layer_config,
    layer_sizes,
    read_tensors,
    sizes_of,
    tensor_sizes,
)
from draftlab.model import checkpoint, devices, hub
from draftlab.model.hf_files import FULL, SLIDING
from draftlab.model.llama import ROPE_KINDS
from draftlab.model.saving import save_finite, write_config
from draftlab.model.shape import Shape
from draftlab.reading import reading

Layout = Literal["native", "speculators"]
# the architecture's name in SpecForge, which vLLM and SGLang know
ARCHITECTURE = "LlamaForCausalLMEagle3"
# vLLM's name of the architecture if the layer has norms of queries and keys
QWEN3_ARCHITECTURE = "Eagle3Qwen3ForCausalLM"
VARIANTS = ("norm_before_fc", "fc_norm", "norm_output")  # fields of EAGLE-3.1
# parts that not every server supports
OPTIONAL_PARTS = ("norm_before_residual", *VARIANTS, "sliding_window", "qk_norm")
# settings of config.json with the values that draftlab supports
SUPPORTED: dict[str, tuple[object, ...]] = {
    "model_type": ("llama", "qwen3"),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "bias": (False,),
    "use_aux_norm": (False,),
}
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")
LM_HEADS = ("lm_head.weight", "embed_out.weight")
LAYER = {"native": "midlayer.", "speculators": "layers.0."}


class HeadShape(HeadSizes):
    """Sizes of an EAGLE-3 head.

    Attributes:
        kind: Name of the drafter that uses such heads.
        many_layers: Whether a head of this kind may have several layers.
        rope: rope_parameters of a transformers config.
        target_hidden: Hidden size of the target.
        norm_before_residual: Whether the residual connection starts after the state's norm instead of before it.
        norm_before_fc: Whether one RMSNorm normalises the concatenated states before fc.
        fc_norm: Whether the states of each target layer have an RMSNorm of their own before fc.
        norm_output: Whether the head's next state is its output after the final norm instead of before it.
        sliding_window: Number of latest tokens that attention reads; None for all.
        qk_norm: Whether queries and keys have RMSNorms, as in Qwen3.
    """

    kind: ClassVar[str] = "eagle"
    many_layers: ClassVar[bool] = False

    rope: dict[str, Any]
    target_hidden: int = Field(ge=1)
    norm_before_residual: bool
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    sliding_window: int | None = Field(None, ge=1)
    qk_norm: bool = False

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.draft_vocab > self.vocab:
            raise ValueError(
                f"the draft vocabulary (--vocab or draft_vocab_size) has {self.draft_vocab} ids, but must have at most "
                f"{self.vocab}, as the target's"
            )
        if self.hidden % self.heads or self.heads % self.kv_heads:
            numbers = f"{self.heads} heads, {self.kv_heads} kv_heads, hidden size {self.hidden}"
            raise ValueError(
                f"{numbers}: in a LLaMA configuration, kv_heads must divide heads, and heads must divide the hidden "
                "size"
            )
        if list(self.layer_ids) != sorted(set(self.layer_ids)):
            raise ValueError(
                f"layer_ids are {list(self.layer_ids)}, but servers read the layers in order; list each id once, in "
                "ascending order"
            )
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("a head cannot have both norm_before_fc and fc_norm; leave one of these options out")
        return self

    @property
    def optional_parts(self) -> list[str]:
        """Return the names of the options that this head uses and that some servers do not support."""
        return [name for name in OPTIONAL_PARTS if getattr(self, name)]

    @property
    def shape(self) -> Shape:
        """Return the shape of the head's layer, with the target's vocabulary.

        In this shape, q, k and v have `hidden` inputs, but in an EAGLE-3 head they have 2 x hidden inputs.
        """
        return self.shape_of(1, self.qk_norm)

    def params(self) -> int:
        """Return the number of trained parameters. The embedding is not trained."""
        return sum(math.prod(size) for size in self.sizes().values())

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the sizes of the trained tensors by name. The names are those of speculators."""
        d = self.hidden
        states = self.target_hidden * len(self.layer_ids)
        at = LAYER["speculators"]
        sizes = layer_sizes(self.shape)
        for name in "qkv":
            rows, _ = sizes[f"{at}self_attn.{name}_proj.weight"]
            sizes[f"{at}self_attn.{name}_proj.weight"] = (rows, 2 * d)
        sizes |= {
            "fc.weight": (d, states),
            f"{at}hidden_norm.weight": (d,),
            "lm_head.weight": (self.draft_vocab, d),
        }
        if self.norm_before_fc:
            sizes["input_norm.weight"] = (states,)
        if self.fc_norm:
            sizes |= {f"fc_norm.{i}.weight": (self.target_hidden,) for i in range(len(self.layer_ids))}
        return sizes

    def check_tensors(self, sizes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
        """Check the tensors of a head, see HeadSizes. A head that predicts all ids may use the target's lm_head."""
        if (self.draft_vocab, self.hidden) == (self.vocab, self.target_hidden):
            sizes = {"lm_head.weight": (self.vocab, self.hidden)} | dict(sizes)
        super().check_tensors(sizes, folder)

    def layer_json(self) -> dict[str, Any]:
        """Return the fields of the layer's LlamaConfig that this shape determines, by transformers' names."""
        fields = {name: getattr(self, field) for field, name in LAYER_FIELDS.items()}
        if self.rope.get("rope_type") == "linear":  # the factor lengthens the context
            fields["max_position_embeddings"] = round(self.context / self.rope["factor"])
        return fields | {
            "num_hidden_layers": self.shape.layers,
            "rope_parameters": dict(self.rope),
            "tie_word_embeddings": False,
        }

    @classmethod
    def own_fields(cls, content: Mapping[str, Any], layers: int) -> dict[str, Any]:
        """Return the values of the fields that a subclass adds.

        content: Content of config.json. layers: Its num_hidden_layers.
        """
        return {}

    def llama_config(self) -> LlamaConfig:
        """Return the LlamaConfig of the head's layer."""
        return LlamaConfig(**self.layer_json())


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """An EAGLE-3 head in memory.

    Args:
        weights: Trained tensors by name, in the layout of speculators.
        ids: Target id of each draft id, [W].
        embedding: The head's own embedding, [V, D]. None: the head uses the target's embedding.
    """

    config: HeadShape
    weights: Mapping[str, Tensor]
    ids: Tensor
    embedding: Tensor | None


def head_config(target: Path, layer_ids: Sequence[int] | None, draft_vocab: int, **variant: Any) -> HeadShape:
    """Return the shape of an EAGLE-3 head whose layer has the sizes, rotary frequencies and eps of the target's layers.

    Rotary scaling that depends on the length of the text is left out.

    Args:
        layer_ids: Target layers that the head reads. Default: TargetSizes.default_layer_ids.
        draft_vocab: Number of ids that the head predicts.
        variant: Optional fields of HeadShape: norm_before_residual and the fields declared after it. Default: a plain
            EAGLE-3 head.

    Raises:
        UserError: the target lacks a layer in `layer_ids`, or has a smaller vocabulary than `draft_vocab`.
    """
    sizes = TargetSizes.of(target)
    config = checkpoint.auto_config(target).get_text_config()
    heads = getattr(config, "num_attention_heads", None)  # Mamba has none
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or (sizes.hidden // heads if heads else math.gcd(sizes.hidden, 64))
    heads = int(heads or sizes.hidden // head_dim)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    # then use the target's head_dim, as speculators does
    if sizes.hidden % heads and sizes.hidden % head_dim == 0:
        heads = sizes.hidden // head_dim
        kv_heads = kv_heads if heads % kv_heads == 0 else heads
    rope: Any = getattr(config, "rope_parameters", None)  # GPT-2 has none, Gemma 3 several
    rope = rope if isinstance(rope, dict) else {}
    rope = {
        name: value
        for name, value in (rope.get(FULL) or rope).items()
        if name != "partial_rotary_factor"  # the head rotates all dimensions
    }
    # frequencies that depend on the length of the text are not computed for heads
    computed = rope.get("rope_type") in ROPE_KINDS
    with reading(f"EAGLE-3 head for {target}"):
        head = HeadShape(
            hidden=sizes.hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=getattr(config, "intermediate_size", None) or 4 * sizes.hidden,
            eps=getattr(config, "rms_norm_eps", 1e-5),
            context=checkpoint.max_model_len(target, 2048),
            rope=rope if computed else {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)},
            vocab=sizes.vocab,
            draft_vocab=draft_vocab,
            target_hidden=sizes.hidden,
            layer_ids=tuple(layer_ids or sizes.default_layer_ids()),
            **{"norm_before_residual": False} | variant,
        )
    _check_fits(head, sizes, f"EAGLE-3 head for {target}", own_embedding=False)
    return head


def read_sizes(folder: Path) -> HeadShape:
    """Return the shape of an EAGLE-3 head from its config.json alone, without its target.

    If config.json does not say so, the target has the head's hidden size, and the head reads three of its layers.

    Raises:
        UserError: the folder has no EAGLE-3 head, or draftlab does not support it.
    """
    content = checkpoint.read_config(folder)
    hub.check_head(folder, HeadShape.kind)
    with reading(folder / "config.json"):
        llama = layer_config(LlamaConfig, content)
        target = TargetSizes(name="its target", layers=7, hidden=llama.hidden_size, vocab=llama.vocab_size)
        return _from_json(HeadShape, content, target, folder)


def check(folder: Path, target: Path, weights: bool = True) -> HeadShape:
    """Check config.json and the tensor sizes of an EAGLE-3 head, and return its shape. No weights are read.

    weights: Whether the weight file is needed. If False and the file is missing, only config.json is checked.

    Raises:
        UserError: the folder has no EAGLE-3 head, the head is for another target, or draftlab does not support it.
    """
    return check_as(HeadShape, folder, target, weights)


Shaped = TypeVar("Shaped", bound=HeadShape)


def check_as(shape: type[Shaped], folder: Path, target: Path, weights: bool = True) -> Shaped:
    """Check a head of the kind that the class `shape` describes, and return its shape. See check()."""
    content = checkpoint.read_config(folder)
    sizes = TargetSizes.of(target)
    hub.check_head(folder, shape.kind)
    with reading(folder / "config.json"):
        config = _from_json(shape, content, sizes, folder)
        config.sizes()  # refuses sizes that no Shape has
    if not weights and not any(folder.glob("*.safetensors")):
        _check_fits(config, sizes, str(folder), own_embedding=True)
        return config
    tensors = tensor_sizes(folder, _plain)
    _check_fits(config, sizes, str(folder), own_embedding="embed_tokens.weight" in tensors)
    config.check_tensors(tensors, folder)
    return config


def read(folder: Path, target: Path, dtype: torch.dtype, device: torch.device = checkpoint.CPU) -> Head:
    """Read an EAGLE-3 head in the layout of SpecForge or of speculators.

    Raises:
        UserError: the errors of check and read_as.
    """
    return read_as(check(folder, target), folder, target, dtype, device)


def read_as(config: HeadShape, folder: Path, target: Path, dtype: torch.dtype, device: torch.device) -> Head:
    """Read the weights of a head that check() accepts. A head without lm_head has the target's.

    config: The result of check().

    Raises:
        UserError: a weight is not finite, or draft_ids() refuses d2t and t2d.
    """
    tensors = read_tensors(folder, _plain)
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = _target_head(target, config)
    offsets = tensors.pop("d2t", torch.zeros(config.draft_vocab, dtype=torch.long))
    ids = draft_ids(offsets, tensors.get("t2d"), config.vocab, folder)
    moved = {name: tensor.to(device, dtype) for name, tensor in tensors.items() if name != "t2d"}
    embedding = moved.pop("embed_tokens.weight", None)
    return Head(config=config, weights=moved, ids=ids.to(device), embedding=embedding)


def write(folder: Path, head: Head, layout: Layout, *, target: Path, k: int, verifier: str = "") -> None:
    """Write config.json and model.safetensors of a head. d2t and t2d are left out if the head predicts all ids.

    Args:
        target: Directory of the target.
        k: Number of drafted tokens that config.json proposes to servers, in the layout of speculators.
        verifier: Name of the target in config.json, in the layout of speculators. Default: the directory.
    """
    config = head.config
    tensors = {name.replace(LAYER["speculators"], LAYER[layout]): tensor for name, tensor in head.weights.items()}
    if config.draft_vocab < config.vocab:  # vLLM expects no d2t if the head predicts all ids
        known = torch.zeros(config.vocab, dtype=torch.bool)
        known[head.ids.cpu()] = True
        tensors |= {"d2t": head.ids.cpu() - torch.arange(config.draft_vocab), "t2d": known}
    embedding = head.embedding
    # speculators computes with zeros if the file has no embedding
    if embedding is None and layout == "speculators":
        embedding = _target_embedding(target, config).to(head.weights["fc.weight"].dtype)
    tensors |= {} if embedding is None else {"embed_tokens.weight": embedding}
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_finite(folder / WEIGHTS, whole)
    content = {
        "draft_vocab_size": config.draft_vocab,
        "target_hidden_size": config.target_hidden,
        "norm_before_residual": config.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": list(config.layer_ids),
    }
    content |= _native_json(config) if layout == "native" else _speculators_json(config, target, k, verifier)
    write_config(folder, content, devices.dtype_name(head.weights["fc.weight"].dtype))


def _target_embedding(target: Path, config: HeadShape) -> Tensor:
    """Return the target's embedding, [V, E]. Raises UserError: no tensor has the name and size of an embedding."""
    embedding = _target_matrix(target, config, EMBEDDINGS)
    if embedding is None:
        raise UserError(
            f"{target} has no embed_tokens.weight, which a head in the layout of speculators needs; use --to vllm"
        )
    return embedding


def _target_head(target: Path, config: HeadShape) -> Tensor:
    """Return the target's LM head, [V, E]: its embedding if no other is stored. Raises UserError: neither is stored."""
    for names in (LM_HEADS, EMBEDDINGS):
        if (matrix := _target_matrix(target, config, names)) is not None:
            return matrix
    raise UserError(
        f"the head has no lm_head.weight, and its target {target} has none of the size "
        f"{(config.vocab, config.hidden)}; use a head with lm_head.weight"
    )


def _target_matrix(target: Path, config: HeadShape, names: tuple[str, ...]) -> Tensor | None:
    """Return the tensor of a target that has the size [V, E] and one of the names, or None."""
    weights = checkpoint.Weights(target)
    for name in weights:
        if weights.shape(name) == (config.vocab, config.hidden) and name.endswith(names):
            return weights[name]
    return None


def _native_json(config: HeadShape) -> dict[str, object]:
    """Return the fields of config.json that are specific to SpecForge's layout, for all servers that read it."""
    variant = {name: True for name in VARIANTS if getattr(config, name)}
    return (
        variant
        | layer_config_json(config)
        | {
            "architectures": [QWEN3_ARCHITECTURE if config.qk_norm else ARCHITECTURE],
            # an id is the index of the layer whose output is read (SGLang), or the number of layers up to that output
            # (vLLM, llama.cpp)
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [i - 1 for i in config.layer_ids],
            },
        }
    )


def _speculators_json(config: HeadShape, target: Path, k: int, verifier: str) -> dict[str, object]:
    architectures = checkpoint.read_config(target).get("architectures", [])
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        **{name: getattr(config, name) for name in VARIANTS},
        "tie_word_embeddings": False,
        "transformer_layer_config": layer_config_json(config),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": k}],
            "verifier": {"name_or_path": verifier or str(target), "architectures": architectures},
        },
    }


def layer_config_json(config: HeadShape) -> dict[str, object]:
    """Return the configuration of a head's layer as fields of config.json."""
    window: dict[str, object] = {}
    if config.sliding_window is not None:
        window = {
            "sliding_window": config.sliding_window,
            "use_sliding_window": True,
            "layer_types": [SLIDING],
        }
    return (
        window
        | config.layer_json()
        | {
            "model_type": "qwen3" if config.qk_norm else "llama",
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
        }
    )


def _from_json(shape: type[Shaped], content: Mapping[str, Any], target: TargetSizes, folder: Path) -> Shaped:
    """Return the shape of a head from the content of its config.json. shape: Class of the result.

    Raises:
        UserError: the head has a setting that draftlab does not support.
    """
    layer = content.get("transformer_layer_config", content)
    if "draft_vocab_size" not in content or not isinstance(layer, dict):
        raise UserError(
            f"{folder}: config.json of the head needs draft_vocab_size; transformer_layer_config, if set, must be an "
            "object"
        )
    eagle = content.get("eagle_config") or {}
    layers = layer.get("num_hidden_layers", 1)
    layer_types = layer.get("layer_types") or [FULL]
    slides = layer_types[0] == SLIDING
    check_settings(layer, SUPPORTED, folder, shape.kind)
    if not shape.many_layers:
        check_settings(layer, {"num_hidden_layers": (1,)}, folder, shape.kind)
    if set(layer_types) not in ({SLIDING}, {FULL}) or (slides and not layer.get("sliding_window")):
        raise UserError(
            f"{folder}: draftlab supports only heads with layer_types {FULL!r} or, if sliding_window is set, "
            f"{SLIDING!r}; use another head"
        )
    llama = layer_config(LlamaConfig, content)
    # counted from 0, as in SGLang
    ids_of_outputs = eagle.get("eagle_aux_hidden_state_layer_ids") or []
    return shape(
        **shape.own_fields(content, layers),
        **sizes_of(llama),
        rope=dict(llama.rope_parameters),
        draft_vocab=content["draft_vocab_size"] or llama.vocab_size,
        target_hidden=content.get("target_hidden_size") or target.hidden,
        layer_ids=tuple(
            content.get("eagle_aux_hidden_state_layer_ids")
            or [i + 1 for i in ids_of_outputs]
            or target.default_layer_ids()
        ),
        norm_before_residual=content.get("norm_before_residual", False),
        norm_before_fc=eagle.get("norm_before_fc", content.get("norm_before_fc")) or False,
        fc_norm=content.get("fc_norm") or False,
        norm_output=content.get("norm_output") or False,
        sliding_window=layer["sliding_window"] if slides else None,
        qk_norm=layer.get("model_type") == "qwen3",
    )


def _check_fits(config: HeadShape, target: TargetSizes, name: str, *, own_embedding: bool) -> None:
    """Raise UserError if a head is for another target, or cannot use its embedding because hidden sizes differ."""
    config.check_target(name, target, config.target_hidden)
    if not own_embedding and config.hidden != target.hidden:
        raise UserError(
            f"{name} has no embed_tokens, and cannot use the embedding of {target.name}, because the hidden size is "
            f"{config.hidden} in the head, but {target.hidden} in the target; use another head"
        )


def _plain(name: str) -> str:
    """Return the name that a tensor has in the layout of speculators."""
    return name.replace(LAYER["native"], LAYER["speculators"])
