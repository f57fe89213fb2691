"""Reading of GGUF files.

The package gguf reads the header and dequantises tensors. transformers has the config, the tokenizer, and the names and
order of rows of each architecture. This module adds the settings that transformers ignores: rotary scaling, biases,
head_dim and special ids.

F rotary frequencies: half of head_dim.
"""

import contextlib
import io
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.integrations.gguf.utils import is_gguf_arch_supported
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
from transformers.utils import logging

from draftlab.errors import UserError, one_line
from draftlab.exporting.gguf import ROPE_FACTORS, library
from draftlab.exporting.gguf_tokenizer import (
    PRE_TOKENIZERS,
    UNUSED,
    PreTokenizer,
    set_pre_tokenizer,
)
from draftlab.model.checkpoint import check_finite
from draftlab.model.hf_files import check_config
from draftlab.reading import reading

if TYPE_CHECKING:
    from gguf import ReaderTensor

    from draftlab.importing.gguf_reader import Reader

COMPLETED = ("llama", "qwen2", "qwen3")  # architectures whose settings this module completes
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# the largest tensors of a model, whose rows no architecture changes
VOCABULARY = ("token_embd.weight", "output.weight")
PIECE = 2**17  # weights that are dequantised at a time; their temporary arrays fit in a cache
SPECIAL = {
    "bos": "tokenizer.ggml.bos_token_id",
    "eos": "tokenizer.ggml.eos_token_id",
    "unk": "tokenizer.ggml.unknown_token_id",
    "pad": "tokenizer.ggml.padding_token_id",
}
# tokenizer.ggml.pre -> name of the pre-tokenizer that llama.cpp applies for it
ALIASES = {
    "mpt": "gpt-2",
    "olmo": "gpt-2",
    "jais": "gpt-2",
    "trillion": "gpt-2",
    "refact": "smollm",
    "command-r": "smollm",
    "codeshell": "smollm",
    "exaone": "smollm",
    "minerva-7b": "smollm",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "falcon-h1": "llama-bpe",
    "pixtral": "llama-bpe",
    "lfm2": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "megrez": "qwen2",
    "llama4": "gpt-4o",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFHeader:
    """The metadata of a GGUF file.

    Args:
        reader: The opened file. All steps of an import share it, because opening takes seconds.
        settings: Key-value pairs of the file.
        names: Names of the tensors.
        types: Number of weights in matrices, by GGUF type.
        weights: Number of all weights.
        largest: Number of weights of the largest tensor.
        rope_factors: Divisors of the unscaled rotary frequencies, [F], if the file has them.
        special: The bos, eos, unk and pad tokens that the file has, by these names.
    """

    file: Path
    reader: "Reader"
    settings: dict[str, Any]
    names: frozenset[str]
    types: Counter[str]
    weights: int
    largest: int
    rope_factors: np.ndarray | None
    special: dict[str, str]

    @property
    def architecture(self) -> str:
        return str(self.settings["general.architecture"])

    def setting(self, name: str) -> Any:
        """Return a setting of the file's architecture, such as "rope.scaling.type", or None if the file lacks it."""
        return self.settings.get(f"{self.architecture}.{name}")

    def dtype(self) -> torch.dtype:
        """Return the dtype in which most matrices are stored, or bfloat16 if they are quantised.

        bfloat16 changes each weight by at most 1/256 of its value. Quantisation has already changed the weight by up to
        1/254 (8 bits) or 1/16 (4 bits) of the largest weight in its block. So float32 would only double the size.
        """
        return FLOATS.get(self.types.most_common(1)[0][0], torch.bfloat16)


def describe(header: GGUFHeader) -> str:
    types = ", ".join(kind for kind, _ in header.types.most_common())
    return f"{header.architecture}, {header.weights:,} weights in {types}"


def read_header(file: Path) -> GGUFHeader:
    """Read the metadata of a GGUF file.

    Raises:
        UserError: The file is not a GGUF file, is truncated, or is only a part of a model. Or its sizes contradict its
            tensors.
    """
    from draftlab.importing.gguf_reader import TOKENS, Reader

    with reading(f"{file} is not a readable GGUF file"):
        reader = Reader(file)
        settings = {name: _plain(value) for name, value in reader.values.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        rows = int(tensors["token_embd.weight"].shape[-1])
        tokens = settings[TOKENS]
        special = {name: str(tokens[settings[key]]) for name, key in SPECIAL.items() if key in settings}
    if settings.get("split.count", 0) > 1:
        raise UserError(
            f"{file} is one of {settings['split.count']} parts of a model; run llama-gguf-split --merge on the first "
            "part, and import the result"
        )
    if rows != len(tokens):
        raise UserError(
            f"{file} has embeddings for {rows:,} ids, but a tokenizer of {len(tokens):,} ids; download the file again"
        )
    # transformers builds this number of layers before it looks at the tensors
    said = settings.get(f"{settings.get('general.architecture')}.block_count")
    blocks = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    if said != len(blocks):
        raise UserError(
            f"{file} has tensors of {len(blocks)} layers, but its block_count is {one_line(said, 40)}; download the "
            "file again"
        )
    types: Counter[str] = Counter()
    weights = 0
    for name, tensor in tensors.items():
        if len(tensor.shape) > 1:
            types[tensor.tensor_type.name] += int(tensor.n_elements)
        if not name.startswith(("rope_freqs", "rope_factors")):
            weights += int(tensor.n_elements)
    factors = tensors.get(ROPE_FACTORS)
    return GGUFHeader(
        file=file,
        reader=reader,
        settings=settings,
        names=frozenset(tensors),
        types=types,
        weights=weights,
        largest=max(int(tensor.n_elements) for tensor in tensors.values()),
        rope_factors=None if factors is None else factors.data.astype(np.float64),
        special=special,
    )


def load_config(header: GGUFHeader) -> PreTrainedConfig:
    """Return the transformers config of the model in a GGUF file.

    Raises:
        UserError: transformers or this module does not support the architecture or a setting.
    """
    with (
        reading(f"{header.file} ({header.architecture}) is not supported by transformers"),
        header.reader.given_to_transformers(),
    ):
        config: Any = AutoConfig.from_pretrained(
            header.file.parent, gguf_file=header.file.name, trust_remote_code=False
        )
    if header.architecture in COMPLETED:
        config = _completed(config, header)
    elif header.setting("rope.scaling.type") not in (None, "none") or header.rope_factors is not None:
        raise UserError(
            f"{header.file}: transformers cannot read the rotary scaling of a {header.architecture} model from a GGUF "
            "file; use the model's original checkpoint"
        )
    for name, number in special_ids(header).items():
        setattr(config, name, number)
    check_config(config.to_dict(), header.file)
    vars(config).pop("_model_name_or_path", None)
    return config


def tensor_names(header: GGUFHeader, model: PreTrainedModel) -> dict[str, str] | None:
    """Return the name in a model of each tensor of its GGUF file, or None if some are joined or split in the model.

    model: A model on the meta device with the config of the file.

    Raises:
        UserError: The model has other weights than the file.
    """
    if is_gguf_arch_supported(header.architecture) or get_model_conversion_mapping(model, add_legacy=False):
        return None
    with (
        reading(f"{header.file} ({header.architecture}) is not supported by transformers"),
        header.reader.given_to_transformers(),
    ):
        known = get_gguf_hf_weights_map(model, _processor(header, model.config))
    names = {name: known[name] for name in header.names if name in known}
    needed = {name: parameter.numel() for name, parameter in model.named_parameters()}
    if model.config.tie_word_embeddings:
        needed.pop("lm_head.weight", None)
    _check_weights(header, sum(needed.values()), needed.keys() - names.values())
    return names if len(names) == len(set(names.values())) else None


def tensors(
    header: GGUFHeader, model: PreTrainedModel, names: Mapping[str, str], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a GGUF file under their names in a model. One tensor is in memory at a time.

    model, names: See tensor_names.

    Raises:
        UserError: A tensor cannot be dequantised, has another size than in the model, or is not finite.
    """
    processor = _processor(header, model.config)
    needed = model.state_dict()
    with reading(f"{header.file} cannot be loaded"):
        for tensor in header.reader.tensors:
            if tensor.name not in names:
                continue
            name = names[tensor.name]
            if tensor.name in VOCABULARY:
                weight = _dequantised(header, tensor, dtype)
            else:
                values = _dequantised(header, tensor, torch.float32).numpy()
                values = processor.process(weights=values, name=tensor.name).weights
                weight = torch.from_numpy(values).to(dtype)
            if weight.shape != needed[name].shape:
                raise ValueError(
                    f"{tensor.name} has the size {tuple(weight.shape)}, but the model needs {tuple(needed[name].shape)}"
                )
            check_finite(weight, name, header.file)
            yield name, weight


def _dequantised(header: GGUFHeader, tensor: "ReaderTensor", dtype: torch.dtype) -> torch.Tensor:
    """Read and dequantise a tensor in pieces. The file is not mapped, so that none of its pages stay in memory."""
    gguf = library()
    weights, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]  # of a block, and in bytes
    weight = torch.empty(tuple(map(int, reversed(tensor.shape))), dtype=dtype)
    with header.file.open("rb") as stream:
        stream.seek(tensor.data_offset)
        for piece in weight.flatten().split(PIECE):
            blocks = np.fromfile(stream, np.uint8, len(piece) // weights * size)
            values = gguf.dequantize(blocks.reshape(1, -1), tensor.tensor_type)
            piece.copy_(torch.from_numpy(values).flatten())
    return weight


def _processor(header: GGUFHeader, config: PreTrainedConfig) -> TensorProcessor:
    """Return transformers' object that undoes llama.cpp's changes to the tensors of an architecture."""
    return TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=config.to_dict())


def _check_weights(header: GGUFHeader, weights: int, missing: AbstractSet[str]) -> None:
    """Raise UserError if a model has weights that its GGUF file lacks, or another number of weights."""
    if missing or weights != header.weights:
        raise UserError(
            f"{header.file} has {header.weights:,} weights, but the model in transformers has {weights:,}; missing: "
            f"{sorted(missing)[:1]}; use the model's original checkpoint"
        )


def load(header: GGUFHeader, dtype: torch.dtype) -> Any:
    """Load a GGUF file as a transformers model, and check that all weights were loaded.

    Raises:
        UserError: The reader of transformers fails or omits weights.
    """
    logging.disable_progress_bar()
    config = load_config(header)
    # where the reader of transformers writes its progress bar
    stream = sys.stderr if sys.stderr.isatty() else io.StringIO()
    with (
        reading(f"{header.file} cannot be loaded"),
        contextlib.redirect_stderr(stream),
        header.reader.given_to_transformers(),
    ):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            header.file.parent,
            gguf_file=header.file.name,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            trust_remote_code=False,
        )
    model, info = loaded
    _check_weights(header, sum(parameter.numel() for parameter in model.parameters()), info["missing_keys"])
    # transformers refuses to save the dequantised model with this entry
    vars(model).pop("hf_quantizer", None)
    vars(model.config).pop("quantization_config", None)
    return model


def special_ids(header: GGUFHeader) -> dict[str, int | list[int]]:
    """Return bos_token_id, eos_token_id and pad_token_id, without missing ids. Several eos ids are a list."""
    bos, eos, eot, eom, pad = (
        header.settings.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom", "padding")
    )
    ends = [i for i in dict.fromkeys((eos, eot, eom)) if i is not None]
    named = {
        "bos_token_id": bos,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": pad,
    }
    return {name: value for name, value in named.items() if value is not None}


def load_tokenizer(header: GGUFHeader, context: int | None) -> Any:
    """Return the tokenizer of a GGUF file, with its chat template and llama.cpp's pre-tokenizer.

    context: The tokenizer's model_max_length. None or 0: it is not set.

    Raises:
        UserError: The kind of vocabulary or pre-tokenizer is unknown, or transformers forgets the bos token.
    """
    with (
        reading(f"the tokenizer of {header.file} cannot be read"),
        header.reader.given_to_transformers(),
    ):
        original: Any = AutoTokenizer.from_pretrained(
            header.file.parent, gguf_file=header.file.name, trust_remote_code=False
        )
    spec = json.loads(original.backend_tokenizer.to_str())
    if header.settings.get("tokenizer.ggml.model") == "gpt2":
        set_pre_tokenizer(spec, _pre_tokenizer(header))
    _drop_extra_tokens(spec, header)
    # transformers copies a tokenizer_object, which takes as long as reading it again
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        file.write(json.dumps(spec))  # json.dump takes ten times as long
        file.flush()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=file.name,
            chat_template=original.chat_template,
            clean_up_tokenization_spaces=False,
            **({"model_max_length": context} if context else {}),
            **{f"{name}_token": token for name, token in header.special.items()},
        )
    check_starts(tokenizer, header)
    return tokenizer


def check_starts(tokenizer: PreTrainedTokenizerBase, header: GGUFHeader) -> None:
    """Check that a tokenizer puts the bos token before a text if its GGUF file says so.

    Raises:
        UserError: It does not: transformers before 5.23 forgets this token.
    """
    asked = header.settings.get("tokenizer.ggml.add_bos_token")
    if asked and tokenizer("a")["input_ids"][0] != tokenizer.bos_token_id:
        raise UserError(
            f"{header.file} puts {tokenizer.bos_token} before every text, but transformers {version('transformers')} "
            "reads its tokenizer without it; pip install --upgrade transformers (at least 5.23)"
        )


def _plain(value: object) -> Any:
    """Return a float with the shortest decimal of the same float32: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _completed(config: PreTrainedConfig, header: GGUFHeader) -> PreTrainedConfig:
    """Return transformers' config, completed by the settings of the file that transformers ignores."""
    biases = {name.split(".")[2] for name in header.names if name.endswith(".bias") and name.startswith("blk.0.")}
    if header.architecture == "llama" and "attn_q" in biases and "attn_output" not in biases:
        # in llama.cpp's conversion, a Qwen2 model whose heads x head_dim differs from its width is a llama like this
        config = _as(config, "qwen2")
    elif header.architecture == "llama":
        # transformers fails to load the mistral config that its reader makes for some files
        config = _as(config, "llama")
        config.attention_bias = "attn_q" in biases
        config.mlp_bias = "ffn_down" in biases
    head_dim = header.setting("attention.key_length") or header.setting("rope.dimension_count")
    config.head_dim = head_dim or config.hidden_size // config.num_attention_heads
    if header.setting("rope.dimension_count") not in (None, config.head_dim):
        raise UserError(
            f"{header.file} has partial rotary embeddings, which draftlab import does not support; use the model's "
            "original checkpoint"
        )
    config.rope_parameters = _rope(header, config)
    eps = header.setting("attention.layer_norm_rms_epsilon")
    config.rms_norm_eps = config.rms_norm_eps if eps is None else eps
    return config


def _as(config: PreTrainedConfig, kind: str) -> PreTrainedConfig:
    fields = config.to_dict()
    for name in ("model_type", "architectures"):
        fields.pop(name, None)
    return AutoConfig.for_model(kind, **fields)


def _rope(header: GGUFHeader, config: PreTrainedConfig) -> dict[str, Any]:
    theta = header.setting("rope.freq_base")
    theta = 10000.0 if theta is None else float(theta)
    if header.rope_factors is not None:
        return {"rope_theta": theta} | _llama3_scaling(header, header.rope_factors, theta)
    kind = header.setting("rope.scaling.type") or "none"
    if kind == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise UserError(
            f"{header.file} has the rotary scaling {kind!r}, but draftlab import supports only linear, yarn and Llama "
            "3's scaling; use the model's original checkpoint"
        )
    factor = float(header.setting("rope.scaling.factor") or 1.0)
    rope = {"rope_theta": theta, "rope_type": kind, "factor": factor}
    if kind == "yarn":
        original = header.setting("rope.scaling.original_context_length")
        rope["original_max_position_embeddings"] = int(original or config.max_position_embeddings)
    return rope


def _llama3_scaling(header: GGUFHeader, factors: np.ndarray, theta: float) -> dict[str, Any]:
    """Return the llama3 rotary settings that give the file's rope_factors, [F].

    rope_factors are 1 for high frequencies, and the scaling factor for low frequencies. Several settings give the same
    factors. As in all known checkpoints, low_freq_factor is set to 1 and high_freq_factor to 4.
    """
    most = float(factors.max())
    low = 1.0
    high = 4.0
    wavelengths = 2 * np.pi * theta ** (np.arange(len(factors)) / len(factors))
    between = (factors > 1.0001) & (factors < 0.9999 * most)
    original = int(header.setting("context_length") or 0)
    if between.any():
        smooth = (1 / factors[between] - 1 / most) / (1 - 1 / most)
        original = round(float((wavelengths[between] * ((high - low) * smooth + low)).mean()))
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    if not np.allclose(1 / factors, (1 - smooth) / most + smooth, rtol=1e-3, atol=0):
        raise UserError(
            f"{header.file} has values in {ROPE_FACTORS} that are not of Llama 3's scaling, the only supported scaling "
            "with such a tensor; use the model's original checkpoint"
        )
    return {
        "rope_type": "llama3",
        "factor": round(most, 4),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _pre_tokenizer(header: GGUFHeader) -> PreTokenizer:
    name = header.settings.get("tokenizer.ggml.pre", "none")
    known = ALIASES.get(name, name)
    if known not in PRE_TOKENIZERS:
        raise UserError(
            f"{header.file} has the unknown pre-tokenizer {name!r} (tokenizer.ggml.pre); use the model's original "
            f"checkpoint; known: {', '.join(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[known]


def _drop_extra_tokens(spec: dict[str, Any], header: GGUFHeader) -> None:
    """Remove tokens from `spec` that the model does not have.

    These are tokens that transformers adds beyond the file's vocabulary, and unused ids, which converters name
    [PAD123].
    """
    size = len(header.settings["tokenizer.ggml.tokens"])
    types = header.settings.get("tokenizer.ggml.token_type", [])
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["id"] < size]
    vocabulary = spec["model"]["vocab"]
    if isinstance(vocabulary, dict):
        unused = {i for i, kind in enumerate(types) if kind == UNUSED}
        spec["model"]["vocab"] = {t: i for t, i in vocabulary.items() if i not in unused or t != f"[PAD{i}]"}
