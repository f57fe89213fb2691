"""GGUF, as llama.cpp reads it: its names of tensors and settings. Weights are converted and written one at a time."""

import math
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.export.gguf_tokenizer import GGUFTokenizer, read_tokenizer
from draftlab.model import checkpoint
from draftlab.model.checkpoint import max_model_len
from draftlab.model.shape import Shape

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")  # of matrices; vectors are always f32
K_TYPES = ("q2_k", "q3_k_m", "q4_k_s", "q4_k_m", "q5_k_m", "q6_k")  # only llama.cpp's own quantiser makes these
WIDE = "f16"  # of a matrix whose rows do not divide into blocks
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a GGUF file: its name there and in the checkpoint, its size, its type."""

    name: str
    source: str
    dims: tuple[int, ...]
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A GGUF file. wide: matrices that stayed f16, because their rows do not divide into blocks."""

    path: Path
    kind: str
    words: GGUFTokenizer
    wide: list[str]


def library() -> Any:
    """The gguf package.

    Raises:
        UserError: it is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise UserError("GGUF needs the gguf package: pip install gguf") from None
    return gguf


def architecture(directory: Path) -> str:
    """llama.cpp's name of it.

    A Qwen2 whose heads do not add up to its width, as cutting makes them, has no place under "qwen2" there; it is a
    "llama" with biases.

    Raises:
        UserError: it has none, or computes something else under that name.
    """
    config, shape = checkpoint.read_config(directory), checkpoint.read_shape(directory)
    kind = str(config.get("model_type"))
    if kind not in ARCHITECTURES:
        raise UserError(f"{directory} is a {kind} model; GGUF is written for {', '.join(ARCHITECTURES)}")
    if config.get("hidden_act") != "silu":
        raise UserError(f"{directory}: activation {config.get('hidden_act')!r}; llama.cpp computes silu there")
    return "llama" if kind == "qwen2" and shape.sizes["q"] != shape.hidden else ARCHITECTURES[kind]


def write(directory: Path, file: Path, kind: str) -> Written:
    """The checkpoint as one GGUF file with matrices of that type.

    Raises:
        UserError: llama.cpp does not know the model, its tokenizer or its rotary scheme.
    """
    gguf, name, shape = library(), architecture(directory), checkpoint.read_shape(directory)
    words, rope = read_tokenizer(directory, shape.vocab), _rope(directory)
    weights: Mapping[str, Tensor] = checkpoint.Weights(directory)
    planned = entries(shape, kind)
    if rope["rope_type"] == "llama3":
        factors = _rope_factors(directory, shape)
        weights = ChainMap({ROPE_FACTORS: factors}, weights)  # type: ignore[arg-type]  # only read
        planned.insert(0, Entry(name=ROPE_FACTORS, source=ROPE_FACTORS, dims=tuple(factors.shape), kind="f32"))
    codes = {entry.name: gguf.GGMLQuantizationType[entry.kind.upper()] for entry in planned}
    writer = gguf.GGUFWriter(file, name)
    _add_settings(writer, directory, shape, rope, kind)
    _add_words(writer, words)
    for entry in planned:
        size = gguf.quant_shape_to_byte_shape(entry.dims, codes[entry.name])
        writer.add_tensor_info(entry.name, size, np.dtype(np.uint8), math.prod(size), raw_dtype=codes[entry.name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry in planned:
        tensor = arranged(weights[entry.source], entry, name, shape).float().numpy()
        data = gguf.quants.quantize(tensor, codes[entry.name])
        writer.write_tensor_data(np.ascontiguousarray(data).view(np.uint8))
    writer.close()
    wide = [e.name for e in planned if len(e.dims) == 2 and e.kind != kind]
    return Written(path=file, kind=kind, words=words, wide=wide)


def entries(shape: Shape, kind: str) -> list[Entry]:
    """What a file with matrices of that type holds, in the order of the checkpoint."""
    gguf = library()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, shape.layers)  # has every name that the others have
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]][0]
    found = []
    for source, axes in shape.axes().items():
        dims = shape.dims(axes)
        of_matrix = kind if dims[-1] % block == 0 else WIDE
        name = names.get_name(source, try_suffixes=(".weight", ".bias"))
        found.append(Entry(name=name, source=source, dims=dims, kind=of_matrix if len(dims) == 2 else "f32"))
    return found


def arranged(tensor: Tensor, entry: Entry, architecture: str, shape: Shape) -> Tensor:
    """The tensor as the file has it.

    Under the architecture "llama" neighbours turn together: of each head the two halves are interleaved.
    """
    part = entry.source.split(".")[-2]
    if architecture != "llama" or part not in ("q_proj", "k_proj"):
        return tensor
    heads = shape.heads if part == "q_proj" else shape.kv_heads
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def rounded(tensor: Tensor, kind: str) -> Tensor:
    """The tensor as that type keeps it: there and back; itself where its rows do not divide into blocks."""
    gguf = library()
    code = gguf.GGMLQuantizationType[kind.upper()]
    if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[code][0]:
        return tensor
    back = gguf.quants.dequantize(gguf.quants.quantize(tensor.float().numpy(), code), code)
    return torch.from_numpy(np.ascontiguousarray(back)).to(tensor.dtype)


def _add_settings(writer: Any, directory: Path, shape: Shape, rope: dict[str, Any], kind: str) -> None:
    gguf, config = library(), checkpoint.read_config(directory)
    writer.add_type("model")
    writer.add_name(directory.name)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(gguf.LlamaFileType[{"f32": "ALL_F32"}.get(kind, f"MOSTLY_{kind.upper()}")])
    writer.add_block_count(shape.layers)
    writer.add_context_length(_context(directory, config))
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_vocab_size(shape.vocab)
    writer.add_layer_norm_rms_eps(float(str(config["rms_norm_eps"])))
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(float(rope["factor"]))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(int(rope["original_max_position_embeddings"]))


def _add_words(writer: Any, words: GGUFTokenizer) -> None:
    writer.add_tokenizer_model(words.model)
    writer.add_tokenizer_pre(words.pre)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.types)
    if words.scores is not None:
        writer.add_token_scores(words.scores)
        writer.add_add_space_prefix(words.add_space_prefix)
    if words.merges is not None:
        writer.add_token_merges(words.merges)
    add = {"bos": writer.add_bos_token_id, "eos": writer.add_eos_token_id, "pad": writer.add_pad_token_id}
    for name, number in words.special.items():
        if number is not None:
            (add | {"unk": writer.add_unk_token_id})[name](number)
    writer.add_add_bos_token(words.add_bos)
    writer.add_add_eos_token(words.add_eos)
    if words.chat_template is not None:
        writer.add_chat_template(words.chat_template)


def _context(directory: Path, config: dict[str, object]) -> int:
    """Longest text in tokens; of a model with a sliding window, the window: up to there attention is full."""
    context, window = max_model_len(directory, 2048), config.get("sliding_window")
    return min(context, window) if isinstance(window, int) and config.get("use_sliding_window", True) else context


def _rope(directory: Path) -> dict[str, Any]:
    from transformers import AutoConfig

    rope = {"rope_type": "default", **AutoConfig.from_pretrained(directory).rope_parameters}
    if rope["rope_type"] not in ("default", "linear", "llama3", "yarn"):
        raise UserError(
            f"{directory}: rotary scaling {rope['rope_type']!r}; GGUF is written for linear, llama3 and yarn"
        )
    return rope


def _rope_factors(directory: Path, shape: Shape) -> Tensor:
    """What llama.cpp divides the plain frequencies by, [C / 2]: Llama 3's scaling is not among its settings."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config: Any = AutoConfig.from_pretrained(directory)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, checkpoint.CPU)
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    return float(config.rope_parameters["rope_theta"]) ** -exponents / scaled
