"""Conversion of checkpoints to GGUF files, one weight at a time, with llama.cpp's names of tensors and settings."""

import math
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.exporting.gguf_rope import EVERY_TENSOR, ROPE_FACTORS, Rope, read_rope
from draftlab.exporting.gguf_tokenizer import GGUFTokenizer, read_tokenizer
from draftlab.heads.eagle3.layout import HeadShape
from draftlab.model import checkpoint
from draftlab.model.llama import sliding_window
from draftlab.model.shape import Shape
from draftlab.quantities import format_bytes

if TYPE_CHECKING:  # the package gguf is optional
    from gguf import GGUFWriter

UNQUANTIZED = "f16"  # type of a matrix whose rows cannot be divided into blocks
DEFAULT_CONTEXT = 2048  # tokens, if config.json names no context


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of llama.cpp.

    Attributes:
        names: Architecture of the gguf package whose table gives the names of the tensors.
        neighbours: Whether rotary embeddings pair neighbouring rows of q and k. Otherwise they pair row i with row i +
            head_dim / 2.
        rope_tensors: Tensors of rotary scaling that llama.cpp reads for this architecture.
        biases: Biases that llama.cpp reads, by their names in Shape.
        square: Whether heads x head_dim must equal the width.
        own_head: Whether the file needs an LM head, also if it is tied to the embedding.
        scales: Name in GGUF of each scaling factor, by its name in config.json.
    """

    name: str
    names: str = "QWEN3"  # the table also has every name of llama and qwen2
    neighbours: bool = False
    rope_tensors: frozenset[str] = frozenset()
    biases: frozenset[str] = frozenset()
    square: bool = False
    own_head: bool = False
    scales: Mapping[str, str] = field(default_factory=dict)


# fields of config.json with which a model has these biases
BIASES = {"qkv_bias": "attention_bias", "o_bias": "attention_bias", "mlp_bias": "mlp_bias"}
EVERY_BIAS = frozenset(BIASES)
LLAMA = Architecture("llama", neighbours=True, rope_tensors=EVERY_TENSOR, biases=EVERY_BIAS)
HEAD = Architecture("eagle3", neighbours=True, rope_tensors=frozenset({ROPE_FACTORS}))
# keys: model_type of config.json
ARCHITECTURES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": Architecture("qwen2", biases=frozenset({"qkv_bias"}), square=True),
    "qwen3": Architecture("qwen3"),
    "olmo2": Architecture("olmo2", names="OLMO2", square=True, own_head=True),
    "granite": Architecture(
        "granite",
        neighbours=True,
        rope_tensors=EVERY_TENSOR,
        biases=EVERY_BIAS,
        scales={
            "embedding_multiplier": "embedding_scale",
            "attention_multiplier": "attention.scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a GGUF file. name, qtype: Name and type in the GGUF file. source: Name in the checkpoint."""

    name: str
    source: str
    dims: tuple[int, ...]
    qtype: str

    @property
    def code(self) -> Any:
        """Return the type as a GGMLQuantizationType."""
        return library().GGMLQuantizationType[self.qtype.upper()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A written GGUF file.

    Attributes:
        unquantized: Matrices in f16, because their rows cannot be divided into blocks.
        limits: Sentences about settings that llama.cpp computes only up to a length.
    """

    path: Path
    tokenizer: GGUFTokenizer
    unquantized: list[str]
    limits: list[str]

    def lines(self) -> list[str]:
        """Return lines of text about the file: unquantized matrices, limits, tokenizer, and size."""
        lines = []
        tokenizer = self.tokenizer
        if self.unquantized:
            lines.append(
                f"{len(self.unquantized)} matrices stay f16, because the row length is not a multiple of the type's "
                "block size"
            )
        lines += self.limits
        if tokenizer.match < 1:
            lines.append(
                f"llama.cpp's tokenizer ({tokenizer.pre!r}) gives draft and target the right ids for "
                f"{tokenizer.match:.0%} of the probe texts, and for {tokenizer.match_special:.0%} of those with "
                "special tokens; send token ids instead of text"
            )
        if tokenizer.unheld_ends:
            lines.append(
                f"eos_token_id: {', '.join(tokenizer.unheld_ends)} also end a text, but GGUF has only three ids for "
                "that, so llama.cpp may write on; cut its texts at these tokens"
            )
        if tokenizer.chat_templates and "default" not in tokenizer.chat_templates:
            lines.append(
                f"no chat template is the default ({', '.join(tokenizer.chat_templates)}), so llama.cpp's server "
                "renders ChatML; name one with --chat-template-file"
            )
        return [*lines, f"{self.path.name}: {format_bytes(self.path.stat().st_size)}"]


def library() -> Any:
    """Return the Python package gguf, which the optional dependency draftlab[gguf] installs."""
    import gguf

    return gguf


def architecture(directory: Path) -> Architecture:
    """Return the architecture of llama.cpp for a checkpoint.

    A Qwen2 model that needs what llama.cpp's "qwen2" lacks, such as another width of the heads or a tensor of rotary
    scaling, is written as a "llama" with biases.

    Raises:
        UserError: GGUF export does not support the architecture, or llama.cpp does not compute a part of the model:
            the activation, biases, the width of the heads or the rotary embeddings.
    """
    config = checkpoint.read_config(directory)
    shape = checkpoint.read_shape(directory)
    model_type = str(config.get("model_type"))
    if model_type not in ARCHITECTURES:
        raise UserError(
            f"{directory} is a {model_type} model, but draftlab writes GGUF files only of {', '.join(ARCHITECTURES)}; "
            "convert the model with llama.cpp's convert_hf_to_gguf.py"
        )
    if config.get("hidden_act") != "silu":
        raise UserError(
            f"{directory} has the activation {config.get('hidden_act')!r}, but llama.cpp computes silu for this "
            "architecture; use --to hf"
        )
    rope = read_rope(directory, shape.head_dim)
    kind = ARCHITECTURES[model_type]
    lacks = _lacks(kind, shape, rope)
    if lacks and model_type == "qwen2":
        kind = LLAMA
        lacks = _lacks(kind, shape, rope)
    if lacks:
        raise UserError(
            f"{directory} has {lacks}, which llama.cpp does not compute for the architecture {kind.name}; use --to hf"
        )
    return kind


def _lacks(kind: Architecture, shape: Shape, rope: Rope) -> str:
    """Return a field of config.json for which llama.cpp's architecture lacks a setting or tensor, or ""."""
    if not rope.tensors.keys() <= kind.rope_tensors:
        return rope.needs
    for bias, field_name in BIASES.items():
        if getattr(shape, bias) and bias not in kind.biases:
            return f"{field_name} true"
    if kind.square and shape.sizes["q"] != shape.hidden:
        return f"{shape.heads} heads of head_dim {shape.head_dim} at hidden_size {shape.hidden}"
    return ""


def pre_tokenizer(directory: Path, vocab: int) -> tuple[str, float]:
    """Return llama.cpp's best pre-tokenizer for a checkpoint, and the fraction of probe texts with equal ids.

    Raises:
        UserError: llama.cpp does not know the model or its tokenizer.
    """
    architecture(directory)
    tokenizer = read_tokenizer(directory, vocab)
    return tokenizer.pre, tokenizer.match


def write(directory: Path, file: Path, qtype: str) -> Written:
    """Write a checkpoint as one GGUF file. qtype: Type of the matrices.

    Raises:
        UserError: llama.cpp does not know the model, its tokenizer or its rotary scaling.
    """
    kind = architecture(directory)
    shape = checkpoint.read_shape(directory)
    config = checkpoint.read_config(directory)
    weights = checkpoint.Weights(directory)
    infos = tensor_infos(shape, qtype, kind)
    scales = {setting: float(str(config.get(key, 1.0))) for key, setting in kind.scales.items()}
    return _write(directory, file, qtype, kind, shape, directory, infos, weights, scales)


def write_head(directory: Path, target: Path, config: HeadShape, file: Path, qtype: str) -> Written:
    """Write an EAGLE-3 head of the native layout as a GGUF file for llama.cpp, with the target's tokenizer.

    The tensor d2t maps ids of the head to ids of the target. In llama.cpp it has the target's ids. In the native layout
    it has the target's ids minus the head's ids.

    Raises:
        UserError: llama.cpp does not know the target's tokenizer or the head's rotary scaling.
    """
    weights = dict(checkpoint.Weights(directory))
    weights.pop("t2d", None)
    if "d2t" in weights:
        weights["d2t"] = weights["d2t"] + torch.arange(len(weights["d2t"]))
    infos = [_head_info(source, tuple(tensor.shape), qtype) for source, tensor in weights.items()]
    settings: dict[str, object] = {
        "target_layers": list(config.layer_ids),
        "target_hidden_size": config.target_hidden,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
    }
    return _write(directory, file, qtype, HEAD, config.shape, target, infos, weights, settings)


def _write(
    directory: Path,
    file: Path,
    qtype: str,
    kind: Architecture,
    shape: Shape,
    tokenizer_from: Path,
    infos: list[TensorInfo],
    weights: Mapping[str, Tensor],
    settings: Mapping[str, object],
) -> Written:
    """Write a GGUF file. directory: Directory with config.json. settings: Settings that only this architecture has."""
    tokenizer = read_tokenizer(tokenizer_from, shape.vocab)
    gguf = library()
    rope = read_rope(directory, shape.head_dim)
    if lacks := _lacks(kind, shape, rope):
        raise UserError(f"{directory} has {lacks}, which llama.cpp does not compute for EAGLE-3 heads; use --to vllm")
    unquantized = [info.name for info in infos if len(info.dims) == 2 and info.qtype != qtype]
    # the maps are only read, never written
    weights = ChainMap(cast(Any, rope.tensors), cast(Any, weights))
    factors = [
        TensorInfo(name=name, source=name, dims=tuple(tensor.shape), qtype="f32")
        for name, tensor in rope.tensors.items()
    ]
    infos = [*factors, *infos]
    writer = gguf.GGUFWriter(file, kind.name)
    _add_settings(writer, directory, file.stem, shape, qtype)
    for key, value in (*rope.settings.items(), *settings.items()):
        add = {
            list: writer.add_array,
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        add[type(value)](f"{kind.name}.{key}", value)
    _add_tokenizer(writer, tokenizer)
    for info in infos:
        size = gguf.quant_shape_to_byte_shape(info.dims, info.code)
        writer.add_tensor_info(info.name, size, np.dtype(np.uint8), math.prod(size), raw_dtype=info.code)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for info in infos:
        tensor = weights[info.source]
        if kind.neighbours:
            tensor = interleave_halves(tensor, info, shape)
        if info.qtype == "f16" and tensor.abs().max() > torch.finfo(torch.float16).max:
            raise UserError(
                f"--outtype {qtype}: {info.source} has values outside the range of f16; use --outtype bf16 or f32"
            )
        data = tensor.numpy() if info.qtype == "i64" else gguf.quants.quantize(tensor.float().numpy(), info.code)
        writer.write_tensor_data(np.ascontiguousarray(data).view(np.uint8))
    writer.close()
    return Written(path=file, tokenizer=tokenizer, unquantized=unquantized, limits=_limits(directory, rope))


def _head_info(source: str, dims: tuple[int, ...], qtype: str) -> TensorInfo:
    """Return the TensorInfo of a tensor in an EAGLE-3 head, with its name in llama.cpp."""
    gguf = library()
    part = source.removeprefix("midlayer.")
    if part == "d2t":
        return TensorInfo(name="d2t", source=source, dims=dims, qtype="i64")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    of_llama = {
        "fc.weight": "fc.weight",
        "hidden_norm.weight": "blk.0.attn_norm_2.weight",
        "input_norm.weight": "enc.output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    known = f"model.{part}" if part == source else f"model.layers.0.{part}"
    name = of_llama.get(part) or names.get_name(known, try_suffixes=(".weight",))
    return TensorInfo(name=name, source=source, dims=dims, qtype=_type_of(dims, qtype))


def _type_of(dims: tuple[int, ...], qtype: str) -> str:
    """Return the type of a stored tensor: f32 for a vector, f16 for rows that do not fit blocks, qtype otherwise."""
    gguf = library()
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[qtype.upper()]][0]
    return "f32" if len(dims) < 2 else qtype if dims[-1] % block == 0 else UNQUANTIZED


def tensor_infos(shape: Shape, qtype: str, kind: Architecture = LLAMA) -> list[TensorInfo]:
    """Return the tensors of a GGUF file, in the order of the checkpoint. qtype: Type of the matrices."""
    gguf = library()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.names], shape.layers)
    infos = []
    for source, axes in shape.axes().items():
        dims = shape.dims(axes)
        name = names.get_name(source, try_suffixes=(".weight", ".bias"))
        infos.append(TensorInfo(name=name, source=source, dims=dims, qtype=_type_of(dims, qtype)))
    if shape.tied and kind.own_head:
        embedding = next(info for info in infos if info.name == "token_embd.weight")
        infos.append(replace(embedding, name="output.weight"))
    return infos


def interleave_halves(tensor: Tensor, info: TensorInfo, shape: Shape) -> Tensor:
    """Interleave the two halves of each head's rows in a tensor of q or k. Return other tensors unchanged."""
    query, key = (f"{part}_proj." in info.source for part in "qk")
    if not (query or key):
        return tensor
    heads = shape.heads if query else shape.kv_heads
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def fake_quantize(tensor: Tensor, qtype: str) -> Tensor:
    """Quantize a tensor to a GGUF type and back. Return it unchanged if its rows cannot be divided into blocks."""
    gguf = library()
    code = gguf.GGMLQuantizationType[qtype.upper()]
    if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[code][0]:
        return tensor
    back = gguf.quants.dequantize(gguf.quants.quantize(tensor.float().numpy(), code), code)
    return torch.from_numpy(np.ascontiguousarray(back)).to(tensor.dtype)


def _add_settings(writer: "GGUFWriter", directory: Path, name: str, shape: Shape, qtype: str) -> None:
    gguf = library()
    config = checkpoint.read_config(directory)
    writer.add_type("model")
    if not any(phi in name.lower() for phi in ("phi-3", "phi3")):
        # by this name, llama.cpp skips the white space after special tokens, and needs those of Phi-3
        writer.add_name(name)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(gguf.LlamaFileType[{"f32": "ALL_F32"}.get(qtype, f"MOSTLY_{qtype.upper()}")])
    writer.add_block_count(shape.layers)
    writer.add_context_length(_context(directory))
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_vocab_size(shape.vocab)
    writer.add_layer_norm_rms_eps(float(str(config["rms_norm_eps"])))
    writer.add_rope_dimension_count(shape.head_dim)


def _add_tokenizer(writer: "GGUFWriter", tokenizer: GGUFTokenizer) -> None:
    writer.add_tokenizer_model(tokenizer.model)
    writer.add_tokenizer_pre(tokenizer.pre)
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_types(tokenizer.types)
    if tokenizer.scores is not None:
        writer.add_token_scores(tokenizer.scores)
        writer.add_add_space_prefix(tokenizer.add_space_prefix)
    if tokenizer.merges is not None:
        writer.add_token_merges(tokenizer.merges)
    add = {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "eot": writer.add_eot_token_id,
        "eom": writer.add_eom_token_id,
        "pad": writer.add_pad_token_id,
        "unk": writer.add_unk_token_id,
    }
    for name, number in tokenizer.special.items():
        add[name](number)
    writer.add_add_bos_token(tokenizer.add_bos)
    writer.add_add_eos_token(tokenizer.add_eos)
    if tokenizer.chat_templates:
        named = [{"name": n, "template": t} for n, t in tokenizer.chat_templates.items()]
        writer.add_chat_template(named)


def _context(directory: Path) -> int:
    """Return the context in tokens, but at most the model's sliding window."""
    # the file describes full attention, which equals the model's attention only up to the window
    window = sliding_window(checkpoint.auto_config(directory))
    return checkpoint.max_model_len(directory, DEFAULT_CONTEXT) if window is None else window


def _limits(directory: Path, rope: Rope) -> list[str]:
    """Return sentences about settings that llama.cpp computes only up to a length."""
    limits: list[str] = []
    window = sliding_window(checkpoint.auto_config(directory))
    if window is not None:
        limits.append(
            f"sliding_window {window}: llama.cpp has full attention for this architecture, so the file has a context "
            f"of {window} tokens, up to which both are equal"
        )
    if rope.short is not None:
        limits.append(
            f"LongRoPE: llama.cpp chooses the rotary frequencies by the server's context; with -c {rope.short} they "
            f"are right for texts of up to {rope.short} tokens, with a larger context only for longer texts"
        )
    return limits
