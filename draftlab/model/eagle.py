"""EAGLE-3 heads on disk (Li et al. 2025, 2503.01840): their sizes, their tensors, and the layouts that servers read.

A head is one LLaMA layer whose attention reads the embedding of a token and a state. The first state is fc's projection
of the outputs of some target layers; each later state is the head's own output. The head predicts some of the target's
ids. EAGLE-3.1 adds norms before fc and of the state that is fed back, and a sliding window. D hidden, E hidden of the
target, V vocab, W draft vocab, A layers of the target that fc reads.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field, model_validator
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from typing_extensions import Self

from draftlab.errors import UserError, one_line
from draftlab.model import checkpoint
from draftlab.model.checkpoint import check_finite, check_weight
from draftlab.model.shape import Shape
from draftlab.reading import FileModel, reading

if TYPE_CHECKING:
    from transformers import LlamaConfig

Layout = Literal["native", "speculators"]
WEIGHTS = "model.safetensors"
# SpecForge's name; vLLM and SGLang have it in their registries
ARCHITECTURE = "LlamaForCausalLMEagle3"
# vLLM's name of a layer with norms of queries and keys
QWEN3_ARCHITECTURE = "Eagle3Qwen3ForCausalLM"
VARIANTS = ("norm_before_fc", "fc_norm", "norm_output")  # fields of EAGLE-3.1
SLIDING = "sliding_attention"
OPTIONAL_PARTS = (
    "norm_before_residual",
    *VARIANTS,
    "sliding_window",
    "qk_norm",
)  # not computed by every server
LAYER = {"native": "midlayer.", "speculators": "layers.0."}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSizes:
    """The sizes of a target that a head depends on."""

    name: str
    layers: int
    hidden: int
    vocab: int

    @classmethod
    def of(cls, directory: Path) -> "TargetSizes":
        """Read config.json of any decoder. Raises UserError: transformers does not know the model."""
        checkpoint.read_config(directory)
        with reading(f"{directory}/config.json cannot be used"):
            config: Any = checkpoint.auto_config(directory).get_text_config()
        return cls(
            name=directory.name,
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            vocab=config.vocab_size,
        )

    def default_layer_ids(self) -> tuple[int, ...]:
        """Return layers 2, n / 2 and n - 3 of n layers, as servers do; with fewer than seven layers 1, n / 2 and n - 1.

        Raises:
            UserError: the target has fewer than four layers.
        """
        if self.layers < 4:
            raise UserError(
                f"{self.name} has {self.layers} layers; an EAGLE-3 head reads three of four or more"
            )
        return (
            (2, self.layers // 2, self.layers - 3)
            if self.layers > 6
            else (1, self.layers // 2, self.layers - 1)
        )


class HeadShape(FileModel):
    """Sizes of a head.

    Args:
        layer_ids: Id i is the target's residual stream after i layers, before the final norm.
        rope: rope_parameters of transformers.
        norm_before_fc: One RMSNorm over the joined states that fc reads.
        fc_norm: One RMSNorm for the states of each layer that fc reads.
        norm_output: The normed output, which lm_head reads, is also the next state.
        sliding_window: Number of latest tokens that attention reads.
        qk_norm: RMSNorms of queries and keys, as in Qwen3.
    """

    hidden: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    ffn: int = Field(ge=1)
    eps: float
    context: int
    rope: dict[str, Any]
    vocab: int = Field(ge=1)
    draft_vocab: int = Field(ge=1)
    target_hidden: int = Field(ge=1)
    layer_ids: tuple[int, ...] = Field(min_length=1)
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
                f"a draft vocabulary of {self.draft_vocab} ids is larger than the target's, {self.vocab}"
            )
        if self.hidden % self.heads or self.heads % self.kv_heads:
            numbers = f"{self.heads} heads on {self.kv_heads}, hidden size {self.hidden}"
            raise ValueError(
                f"{numbers}: want a multiple of each in the next, as LLaMA's configurations do"
            )
        if list(self.layer_ids) != sorted(set(self.layer_ids)):
            raise ValueError(
                f"layer ids {list(self.layer_ids)}: want each once, in order, as servers read them"
            )
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other; choose one")
        return self

    @property
    def optional_parts(self) -> list[str]:
        """Return the names of the head's fields that not every server computes."""
        return [name for name in OPTIONAL_PARTS if getattr(self, name)]

    @property
    def shape(self) -> Shape:
        """Return the layer's shape with the target's vocabulary. q, k and v of the head have twice as many inputs."""
        return Shape(
            layers=1,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            ffn=self.ffn,
            vocab=self.vocab,
            qk_norm=self.qk_norm,
        )

    def params(self) -> int:
        """Return the number of trained parameters."""
        return sum(math.prod(size) for size in self.sizes().values())

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the sizes of the trained tensors by name, in the layout of speculators."""
        d, q, kv, at = (
            self.hidden,
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
            LAYER["speculators"],
        )
        norms: dict[str, tuple[int, ...]] = {}
        if self.norm_before_fc:
            norms["input_norm.weight"] = (self.target_hidden * len(self.layer_ids),)
        if self.fc_norm:
            norms |= {
                f"fc_norm.{i}.weight": (self.target_hidden,) for i in range(len(self.layer_ids))
            }
        if self.qk_norm:
            norms |= {f"{at}self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
        return norms | {
            "fc.weight": (d, self.target_hidden * len(self.layer_ids)),
            f"{at}input_layernorm.weight": (d,),
            f"{at}hidden_norm.weight": (d,),
            f"{at}self_attn.q_proj.weight": (q, 2 * d),
            f"{at}self_attn.k_proj.weight": (kv, 2 * d),
            f"{at}self_attn.v_proj.weight": (kv, 2 * d),
            f"{at}self_attn.o_proj.weight": (d, q),
            f"{at}post_attention_layernorm.weight": (d,),
            f"{at}mlp.gate_proj.weight": (self.ffn, d),
            f"{at}mlp.up_proj.weight": (self.ffn, d),
            f"{at}mlp.down_proj.weight": (d, self.ffn),
            "norm.weight": (d,),
            "lm_head.weight": (self.draft_vocab, d),
        }

    def llama_config(self) -> "LlamaConfig":
        """Return the layer's configuration as transformers has it."""
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=1,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.eps,
            vocab_size=self.vocab,
            max_position_embeddings=self.context,
            rope_parameters=dict(self.rope),
            tie_word_embeddings=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A head in memory. ids: Target id of each draft id, [W]. embedding: [V, D]; None stands for the target's."""

    config: HeadShape
    weights: Mapping[str, Tensor]
    ids: Tensor
    embedding: Tensor | None


def head_config(
    target: Path, layer_ids: Sequence[int] | None, draft_vocab: int, **variant: Any
) -> HeadShape:
    """Return the sizes of a head whose layer has the sizes, rotary frequencies and eps of the target's layers.

    variant: Values of norm_before_residual and later fields of HeadShape. Default: a plain EAGLE-3 head.

    Raises:
        UserError: the target lacks a layer in `layer_ids`, or has a smaller vocabulary than `draft_vocab`.
    """
    sizes, config = TargetSizes.of(target), checkpoint.auto_config(target).get_text_config()
    heads = int(config.num_attention_heads)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or sizes.hidden // heads
    if (
        sizes.hidden % heads and sizes.hidden % head_dim == 0
    ):  # heads of the width, as speculators chooses them
        heads = sizes.hidden // head_dim
        kv_heads = kv_heads if heads % kv_heads == 0 else heads
    rope: Any = getattr(config, "rope_parameters", None)  # GPT-2 has none, Gemma 3 several
    one_rope = isinstance(rope, dict) and "rope_type" in rope
    with reading(f"EAGLE-3 head for {target}"):
        head = HeadShape(
            hidden=sizes.hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=getattr(config, "intermediate_size", None) or 4 * sizes.hidden,
            eps=getattr(config, "rms_norm_eps", 1e-5),
            context=checkpoint.max_model_len(target, 2048),
            rope=dict(rope) if one_rope else {"rope_type": "default", "rope_theta": 10000.0},
            vocab=sizes.vocab,
            draft_vocab=draft_vocab,
            target_hidden=sizes.hidden,
            layer_ids=tuple(layer_ids or sizes.default_layer_ids()),
            **{"norm_before_residual": False} | variant,
        )
    _check_fits(head, sizes, f"EAGLE-3 head for {target}", own_embedding=False)
    return head


def check(folder: Path, target: Path) -> HeadShape:
    """Read the configuration of a head and the sizes of its tensors, but no weight.

    Raises:
        UserError: the folder has no EAGLE-3 head, a head of another target, or a head that draftlab does not compute.
    """
    content, sizes = checkpoint.read_config(folder), TargetSizes.of(target)
    with reading(folder / "config.json"):
        config = _from_json(content, sizes, folder)
    tensors = _tensor_sizes(folder)
    _check_fits(config, sizes, str(folder), own_embedding="embed_tokens.weight" in tensors)
    _check_tensors(config, tensors, folder)
    return config


def read(
    folder: Path, target: Path, dtype: torch.dtype, device: torch.device = checkpoint.CPU
) -> Head:
    """Read a head in any layout. Raises UserError: see check; or a value is not finite, or is no valid id."""
    config = check(folder, target)
    tensors = read_tensors(folder, _plain)
    offsets = tensors.pop("d2t", torch.zeros(config.draft_vocab, dtype=torch.long))
    ids = draft_ids(offsets, tensors.get("t2d"), config.vocab, folder)
    moved = {name: tensor.to(device, dtype) for name, tensor in tensors.items() if name != "t2d"}
    embedding = moved.pop("embed_tokens.weight", None)
    return Head(config=config, weights=moved, ids=ids.to(device), embedding=embedding)


def read_tensors(folder: Path, rename: Callable[[str], str]) -> dict[str, Tensor]:
    """Return the tensors of a head, renamed by `rename`. Raises UserError: no weights, or a value is not finite."""
    _check_has_weights(folder)
    with reading(folder / WEIGHTS):
        tensors = {rename(name): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    for name, tensor in tensors.items():
        (check_finite if name in ("d2t", "t2d") else check_weight)(tensor, name, folder)
    return tensors


def draft_ids(offsets: Tensor, known: Tensor | None, vocab: int, folder: Path) -> Tensor:
    """Return the target id of each draft id, [W].

    Args:
        offsets: The head's d2t: target id minus draft id, [W].
        known: The head's t2d, if it has one: nonzero for the target ids that it predicts, [V].

    Raises:
        UserError: two draft ids have the same target id, an id is out of range, or t2d and d2t contradict each other.
    """
    if offsets.is_floating_point():
        raise UserError(f"{folder}: d2t is stored as {offsets.dtype}; want whole numbers")
    ids = torch.arange(len(offsets)) + offsets.long()
    if len(ids.unique()) < len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise UserError(
            f"{folder}: d2t maps two draft ids to the same id, or one outside 0 to {vocab - 1}"
        )
    if known is not None and not torch.equal(known.bool().nonzero().squeeze(1), ids.sort().values):
        raise UserError(f"{folder}: t2d and d2t name different ids of the target")
    return ids


def write(
    folder: Path, head: Head, layout: Layout, *, target: Path, k: int, verifier: str = ""
) -> None:
    """Write config.json and model.safetensors, with d2t and t2d unless the head predicts all ids.

    target: Directory of the target. verifier: Name of the target in the configuration. Default: the directory.
    k: Number of tokens that the head proposes.
    """
    config = head.config
    tensors = {
        name.replace(LAYER["speculators"], LAYER[layout]): tensor
        for name, tensor in head.weights.items()
    }
    if config.draft_vocab < config.vocab:  # vLLM has no d2t for a head that predicts all
        known = torch.zeros(config.vocab, dtype=torch.bool)
        known[head.ids.cpu()] = True
        tensors |= {"d2t": head.ids.cpu() - torch.arange(config.draft_vocab), "t2d": known}
    embedding = head.embedding
    if (
        embedding is None and layout == "speculators"
    ):  # speculators computes with zeros if it finds no embedding
        embedding = _target_embedding(target, config).to(head.weights["fc.weight"].dtype)
    tensors |= {} if embedding is None else {"embed_tokens.weight": embedding}
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        folder / WEIGHTS,
    )
    dtype = checkpoint.dtype_name(head.weights["fc.weight"].dtype)
    content = (
        _native_json(config)
        if layout == "native"
        else _speculators_json(config, target, k, verifier)
    )
    (folder / "config.json").write_text(
        json.dumps(content | {"dtype": dtype, "torch_dtype": dtype}, indent=2)
    )


def _target_embedding(target: Path, config: HeadShape) -> Tensor:
    """Return the target's embedding, [V, E]. Raises UserError: no tensor of this size has the name of an embedding."""
    weights = checkpoint.Weights(target)
    for name in weights:
        if name.endswith(("embed_tokens.weight", "wte.weight")) and weights[name].shape == (
            config.vocab,
            config.hidden,
        ):
            return weights[name]
    raise UserError(
        f"{target} has no embed_tokens.weight, which speculators' layout of a head needs"
    )


def _native_json(config: HeadShape) -> dict[str, object]:
    """Return the configuration as SpecForge writes it, with every field that a server reads."""
    variant = {name: True for name in VARIANTS if getattr(config, name)}
    return (
        variant
        | _llama_json(config)
        | {
            "architectures": [QWEN3_ARCHITECTURE if config.qk_norm else ARCHITECTURE],
            "draft_vocab_size": config.draft_vocab,
            "target_hidden_size": config.target_hidden,
            "norm_before_residual": config.norm_before_residual,
            "eagle_aux_hidden_state_layer_ids": list(config.layer_ids),
            # SGLang counts the layer whose output is read, vLLM and llama.cpp the layers before it
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
        "draft_vocab_size": config.draft_vocab,
        "target_hidden_size": config.target_hidden,
        "norm_before_residual": config.norm_before_residual,
        **{name: getattr(config, name) for name in VARIANTS},
        "eagle_aux_hidden_state_layer_ids": list(config.layer_ids),
        "tie_word_embeddings": False,
        "transformer_layer_config": _llama_json(config),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": k}],
            "verifier": {"name_or_path": verifier or str(target), "architectures": architectures},
        },
    }


def _llama_json(config: HeadShape) -> dict[str, object]:
    # older readers want it
    theta = {"rope_theta": config.rope["rope_theta"]} if "rope_theta" in config.rope else {}
    window: dict[str, object] = {}
    if config.sliding_window is not None:
        window = {
            "sliding_window": config.sliding_window,
            "use_sliding_window": True,
            "layer_types": [SLIDING],
        }
    return (
        theta
        | window
        | {
            "model_type": "qwen3" if config.qk_norm else "llama",
            "hidden_size": config.hidden,
            "intermediate_size": config.ffn,
            "num_hidden_layers": 1,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": config.eps,
            "max_position_embeddings": config.context,
            "rope_parameters": config.rope,
            "vocab_size": config.vocab,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        }
    )


def _from_json(content: Mapping[str, Any], target: TargetSizes, folder: Path) -> HeadShape:
    """Return the sizes in config.json. Raises UserError: another kind of model, or a setting that is not computed."""
    from transformers import LlamaConfig

    kind = content.get("speculators_model_type", "eagle3")
    layer = content.get("transformer_layer_config", content)
    if kind != "eagle3" or "draft_vocab_size" not in content or not isinstance(layer, dict):
        raise UserError(
            f"{folder} is no EAGLE-3 head: its config.json is of another model, or has no draft_vocab_size"
        )
    eagle = content.get("eagle_config") or {}
    odd = [
        f"{name} {layer[name]!r}"
        for name, only in _ONLY.items()
        if layer.get(name, only[0]) not in (*only, None)
    ]
    layer_types = layer.get("layer_types") or ["full_attention"]
    odd += (
        [f"layer_types {layer_types!r}"]
        if layer_types not in ([SLIDING], ["full_attention"])
        else []
    )
    slides = layer_types == [SLIDING]
    odd += (
        ["sliding_attention and no sliding_window"]
        if slides and not layer.get("sliding_window")
        else []
    )
    if odd:
        raise UserError(
            f"{folder} is an EAGLE-3 head with {one_line(odd[0], 80)}, which draftlab does not compute"
        )
    fields = {
        name: value
        for name, value in layer.items()
        if name not in ("dtype", "torch_dtype", "model_type")
    }
    llama: Any = LlamaConfig(**fields)
    return HeadShape(
        hidden=llama.hidden_size,
        heads=llama.num_attention_heads,
        kv_heads=llama.num_key_value_heads,
        head_dim=llama.head_dim,
        ffn=llama.intermediate_size,
        eps=llama.rms_norm_eps,
        context=llama.max_position_embeddings,
        rope=dict(llama.rope_parameters),
        vocab=llama.vocab_size,
        draft_vocab=content["draft_vocab_size"] or llama.vocab_size,
        target_hidden=content.get("target_hidden_size") or target.hidden,
        layer_ids=_layer_ids(content, eagle) or target.default_layer_ids(),
        norm_before_residual=content.get("norm_before_residual", False),
        norm_before_fc=eagle.get("norm_before_fc", content.get("norm_before_fc")) or False,
        fc_norm=content.get("fc_norm") or False,
        norm_output=content.get("norm_output") or False,
        sliding_window=layer["sliding_window"] if slides else None,
        qk_norm=layer.get("model_type") == "qwen3",
    )


_ONLY: dict[str, tuple[object, ...]] = {
    "model_type": ("llama", "qwen3"),
    "num_hidden_layers": (1,),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "bias": (False,),
    "use_aux_norm": (False,),
}


def _layer_ids(content: Mapping[str, Any], eagle: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the layer ids as vLLM counts them. Ids in eagle_config alone are one lower, as SGLang counts them."""
    ids = content.get("eagle_aux_hidden_state_layer_ids")
    if ids:
        return tuple(ids)
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    return tuple(i + 1 for i in ids) if ids else None


def _check_fits(config: HeadShape, target: TargetSizes, name: str, *, own_embedding: bool) -> None:
    """Raises UserError: the head belongs to another target."""
    check_target(
        name, target, hidden=config.target_hidden, vocab=config.vocab, layer_ids=config.layer_ids
    )
    if not own_embedding and config.hidden != target.hidden:
        raise UserError(
            f"{name} has hidden size {config.hidden} and no embed_tokens, and "
            f"those of {target.name} have {target.hidden}"
        )


def check_target(
    name: str, target: TargetSizes, *, hidden: int, vocab: int, layer_ids: Sequence[int]
) -> None:
    """Raises UserError: a head with these sizes belongs to another target."""
    for what, own, expected in (
        ("hidden size", hidden, target.hidden),
        ("vocabulary", vocab, target.vocab),
    ):
        if own != expected:
            raise UserError(
                f"{name} is a head for another target: {what} {own}, and {target.name} has {expected}"
            )
    if not 0 <= min(layer_ids) <= max(layer_ids) <= target.layers:
        read = ", ".join(map(str, layer_ids))
        raise UserError(f"{name} reads the layers {read}, and {target.name} has {target.layers}")


def _check_tensors(config: HeadShape, tensors: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """Raises UserError: a tensor is missing, unknown, or of another size."""
    expected = config.sizes()
    optional = {
        "d2t": (config.draft_vocab,),
        "t2d": (config.vocab,),
        "embed_tokens.weight": (config.vocab, config.hidden),
    }
    if config.draft_vocab < config.vocab:
        expected["d2t"] = optional.pop("d2t")
    check_tensors(tensors, expected, optional, folder, "an EAGLE-3 head of one layer")


def check_tensors(
    sizes: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
    folder: Path,
    kind: str,
) -> None:
    """Raises UserError: a tensor is missing, unknown, or of another size. kind: Kind of head, for the message."""
    wanted = {**expected, **optional}
    for name in sorted(expected.keys() - sizes.keys()):
        needed = f", which its {expected[name][0]} draft ids need" if name == "d2t" else ""
        raise UserError(f"{folder} has no {name}{needed}")
    for name in sorted(sizes.keys() - wanted.keys()):
        raise UserError(f"{folder} has {name}, which is not part of {kind}")
    for name, size in sizes.items():
        if size != wanted[name]:
            raise UserError(f"{folder}: {name} is {size}, but {wanted[name]} by its config.json")


def _tensor_sizes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the sizes of a head's tensors by name. Raises UserError: the folder has no weights."""
    _check_has_weights(folder)
    with reading(folder / WEIGHTS), safe_open(folder / WEIGHTS, framework="pt") as file:
        return {_plain(name): tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _check_has_weights(folder: Path) -> None:
    """Raises UserError: the folder has no file of weights."""
    if not (folder / WEIGHTS).exists():
        pickled = (
            " (only what torch.save wrote, which is not read)" if any(folder.glob("*.bin")) else ""
        )
        raise UserError(f"{folder} has no {WEIGHTS}{pickled}")


def _plain(name: str) -> str:
    """Return a tensor's name in the layout of speculators."""
    return name.replace(LAYER["native"], LAYER["speculators"])
