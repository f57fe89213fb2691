"""Read the files of a Hugging Face directory, and the file with the ids of a trimmed head. Torch is not imported."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, TypeAdapter, model_validator

from draftlab.errors import Quantised, UserError, one_line
from draftlab.reading import read_json, read_object, reading
from draftlab.shell import typed

CONFIG = "config.json"
GENERATION = "generation_config.json"
HEAD_IDS = "head_ids.json"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
CONTEXT_NAMES = (
    "model_max_length",  # Command R
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
)
UNLIMITED = 1 << 30
# in layer_types
FULL = "full_attention"
SLIDING = "sliding_attention"
# kinds of rotary scaling whose factor is already in the context length
WHOLE_LENGTHS = ("default", "llama3", "longrope", "su")
# Families whose forward pass is exactly that of llama.py, and whose tensors transformers never renames. Some other
# families have the same tensors, but scale or gate values in the pass. Granite's scales are in llama.MULTIPLIERS.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "granite", "olmo2")
NOT_CAUSAL = re.compile(
    r"For(MaskedLM|SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice|PreTraining)\b"
)
ENCODERS = (
    "bert",
    "roberta",
    "distilbert",
    "albert",
    "electra",
    "xlm-roberta",
    "deberta",
    "deberta-v2",
    "modernbert",
)
# Buffers in old checkpoints of LLaMA 1 and 2, which are ignored because transformers computes them.
BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|(attn|attention)\.masked_bias|position_ids)$")

Kind = Literal["gguf", "bin", "adapter", "multimodal"]
NOUNS: dict[Kind, str] = {
    "gguf": "a GGUF file",
    "bin": "a checkpoint in .bin files",
    "adapter": "a PEFT adapter",
    "multimodal": "a multimodal model",
}
# multimodal models whose text part is a causal language model of transformers, by their model_type
MULTIMODAL = (
    "internvl",
    "llama4",
    "llava",
    "llava_next",
    "mistral3",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_vl",
)
ADAPTER = "adapter_config.json"
BIN_SINGLE = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A file or directory that draftlab import can convert to a checkpoint.

    Kinds are GGUF files, .bin files, PEFT adapters, and multimodal models, whose text part is converted.
    """

    kind: Kind
    path: Path

    def advice(self) -> str:
        """Return the end of an error message that begins with "PATH is": the layout, and the command to import it."""
        out = self.path.stem if self.kind == "gguf" else f"{self.path.absolute().name}-imported"
        command = typed("draftlab", "import", self.path, "--out", out)
        return f"{NOUNS[self.kind]}; import it first: {command}"


def other_layout(path: Path) -> Layout | None:
    """Return the Layout of a path that draftlab import can convert, or None for any other path.

    For a directory with one GGUF file and no other weights, return the Layout of this file. For a .bin file, return the
    Layout of its directory.
    """
    if path.suffix == ".gguf":
        return Layout(kind="gguf", path=path)
    if path.suffix == ".bin":
        return other_layout(path.parent)
    if (path / ADAPTER).is_file():
        return Layout(kind="adapter", path=path)
    if any(path.glob("*.safetensors")):
        return Layout(kind="multimodal", path=path) if is_multimodal(path) else None
    if any((path / name).is_file() for name in (BIN_SINGLE, BIN_INDEX)):
        return Layout(kind="bin", path=path)
    files = sorted(path.glob("*.gguf"))
    return Layout(kind="gguf", path=files[0]) if len(files) == 1 else None


def refuse_other_layout(path: Path) -> None:
    """Raise UserError if a path is in a layout that draftlab import must convert first, see Layout."""
    layout = other_layout(path)
    if layout is not None:
        raise UserError(f"{path} is {layout.advice()}")


def is_multimodal(directory: Path) -> bool:
    """Return whether config.json in a directory is that of a multimodal model in MULTIMODAL."""
    file = directory / CONFIG
    return file.is_file() and read_object(file).get("model_type") in MULTIMODAL


def refuse_unconverted(directory: Path, name: str) -> None:
    """Raise UserError if a checkpoint is not only a text model: it is multimodal, or has an adapter beside its weights.

    transformers would load the base of such an adapter in place of the weights. name: Name of the checkpoint to import.
    """
    kind: Kind = "adapter" if (directory / ADAPTER).is_file() else "multimodal"
    if kind == "adapter" or is_multimodal(directory):
        raise UserError(f"{name} is {Layout(kind=kind, path=Path(name)).advice()}")


Positive = Annotated[float, Field(gt=0, le=3.4e38, strict=True)]  # finite in float32
Length = Annotated[int, Field(ge=1, le=UNLIMITED, strict=True)]


class _Settings(BaseModel):
    """Settings of config.json that are checked here, because the sizes of tensors cannot reveal wrong values."""

    max_position_embeddings: Length | None = None
    sliding_window: Length | None = None
    rms_norm_eps: Annotated[Positive, Field(lt=1)] | None = None
    rope_theta: Positive | None = None
    factor: Positive | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Positive | None = None

    @model_validator(mode="after")
    def _ascends(self) -> Self:
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            a = getattr(self, low)
            b = getattr(self, high)
            if None not in (a, b) and a >= b:
                raise ValueError(f"{low} is {a}, but must be below {high}, which is {b}")
        return self


def read_config(directory: Path) -> dict[str, object]:
    """Return the content of config.json.

    Raises:
        UserError: the file cannot be read or is no JSON object, or a setting has an impossible value.
    """
    with reading(directory / CONFIG):
        config: dict[str, object] = _number(read_object(directory / CONFIG))
    check_config(config, directory / CONFIG)
    return config


def check_config(config: Mapping[str, Any], file: Path) -> None:
    """Raise UserError if a setting of config.json, or of an object in it, such as text_config, is impossible."""
    with reading(file):
        _Settings.model_validate(config)
    for part in config.values():
        if isinstance(part, dict):
            check_config(part, file)


def _number(value: object) -> Any:
    """Return a JSON value with floats in place of transformers' notation for them, {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [_number(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"}:
        return float(value["__float__"])
    return {name: _number(item) for name, item in value.items()}


def text_config(directory: Path) -> dict[str, object]:
    """Return the content of config.json or, for a multimodal model, its text_config."""
    config = read_config(directory)
    part = config.get("text_config")
    return part if isinstance(part, dict) else config


def check_causal(directory: Path) -> None:
    """Raise UserError if config.json is that of an encoder or an encoder-decoder model."""
    config = read_config(directory)
    kind = one_line(config.get("architectures") or config.get("model_type"), 80).strip("[']")
    encoder = NOT_CAUSAL.search(kind) or config.get("model_type") in ENCODERS
    if config.get("is_encoder_decoder") or (encoder and not config.get("is_decoder")):
        raise UserError(
            f"{directory} has an encoder ({kind}), but draftlab needs a causal language model; use a checkpoint of a "
            "class ...ForCausalLM"
        )


def is_quantised(config: dict[str, object]) -> bool:
    """Return whether the weights are quantised in a format of transformers. The result is False for MLX's format."""
    return config.get("quantization_config") is not None


def quantization_method(config: Mapping[str, Any]) -> str | None:
    """Return the quantisation method, such as awq, gptq, fp8 or mlx, or None for unquantised weights."""
    for name, default in (("quantization_config", "unnamed"), ("quantization", "mlx")):
        if settings := config.get(name):
            named = isinstance(settings, Mapping)
            return one_line(settings.get("quant_method", default) if named else settings, 40)
    return None


def check_unquantised(directory: Path, config: dict[str, object]) -> None:
    """Raise UserError if the weights are quantised, because pruning and draftlab's engine need unquantised weights."""
    if (method := quantization_method(config)) is not None:
        raise quantised(directory, method)


def quantised(directory: Path, how: str) -> Quantised:
    return Quantised(
        f"{directory} is quantised ({how}), but pruning and draftlab's engine need unquantised weights; use the "
        "original checkpoint"
    )


def vocab_size(directory: Path) -> int:
    """Return the width of the logits, including padding. Raises UserError: config.json has no vocab_size."""
    size = text_config(directory).get("vocab_size")
    if not isinstance(size, int):
        raise UserError(f"{directory}/config.json has no vocab_size; add the number of rows of the embedding")
    return size


def max_model_len(directory: Path, default: int = UNLIMITED) -> int:
    """Return the context length in tokens, see context_of. default: Result if config.json has no context length."""
    return context_of(text_config(directory), default)


def context_of(config: Mapping[str, Any], default: int = UNLIMITED) -> int:
    """Return the context length in tokens that vLLM derives from a config in the layout of transformers 4 or 5.

    Scaled rotary frequencies lengthen the context by their factor, with YaRN from the original context. The lengths of
    LLaMA 3.1, LongRoPE and Gemma 3 include the factor. A sliding window is no limit. Source: vLLM 0.33,
    _get_and_verify_max_len in vllm/config/model.py.

    default: Result if the config has no context length.
    """
    lengths = [config[name] for name in CONTEXT_NAMES if isinstance(config.get(name), int)]
    if not lengths:
        return default
    length = lengths[0]
    factor = 1.0
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    by_layer_type = [part for part in rope.values() if isinstance(part, dict)]
    for part in by_layer_type or [rope]:
        kind = part.get("rope_type", part.get("type", "default"))
        if kind not in WHOLE_LENGTHS and "gemma3" not in str(config.get("model_type")):
            factor = part.get("factor") or factor
            if kind == "yarn":
                length = part.get("original_max_position_embeddings") or length
    return int(length * factor)


def has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in VOCABULARY_FILES)


def check_has_tokenizer(directory: Path) -> None:
    """Raise UserError if the directory has no tokenizer. transformers would instead create an empty tokenizer."""
    if not has_tokenizer(directory):
        raise UserError(f"{directory} has no tokenizer; add one of these files: {', '.join(VOCABULARY_FILES)}")


def read_head_ids(directory: Path, vocab: int) -> list[int] | None:
    """Return the token ids of a trimmed LM head (trimmed_head.py), ascending, or None if the head is not trimmed.

    Raises:
        UserError: head_ids.json is not an ascending list of ids below vocab.
    """
    file = directory / HEAD_IDS
    if not file.is_file():
        return None
    with reading(file):
        kind = TypeAdapter(list[Annotated[int, Field(ge=0, lt=vocab, strict=True)]])
        ids = kind.validate_python(read_json(file))
    if not ids or ids != sorted(set(ids)):
        raise UserError(f"{file} must list token ids in ascending order, each id once; prune or distil the draft again")
    return ids


def write_head_ids(directory: Path, ids: Sequence[int]) -> None:
    (directory / HEAD_IDS).write_text(json.dumps(list(ids)))


def check_head_size(size: int, vocab: int, special: int = 0) -> None:
    """Raise UserError unless special < size < vocab. size: Number of ids to keep. special: Number of special ids."""
    if not special < size < vocab:
        least = f"more than {special:,} ids (the special tokens) and " if special else ""
        raise UserError(f"--vocab {size}: use {least}fewer than {vocab:,} ids (the complete vocabulary)")


@dataclass(frozen=True, slots=True)
class Header:
    """The place, shape and dtype of a tensor.

    Args:
        file, name: File, and name of the tensor in the file.
        stored: Name of the dtype in safetensors, such as BF16.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    stored: str

    @property
    def values(self) -> int:
        return math.prod(self.shape)


def read_headers(directory: Path) -> dict[str, Header]:
    """Return the header of each tensor of a checkpoint by name.

    Bool tensors, and buffers in old checkpoints that transformers computes itself, are left out. The head of a
    checkpoint that ties head and embedding, but stores only the head, has the name of the embedding.

    Raises:
        UserError: a file is missing, truncated or not safetensors; or a tensor is missing.
    """
    tensors: dict[str, Header] = {}
    for file, listed in weight_files(directory).items():
        info = file.stat()
        headers = _headers(file, info.st_mtime_ns, info.st_size)
        missing = sorted((listed or set()) - headers.keys())
        if missing:
            raise UserError(
                f"{file} lacks the tensor {missing[0]!r}, which the index assigns to it; download the checkpoint again"
            )
        for name, header in headers.items():
            if (listed is None or name in listed) and not BUFFERS.search(name) and header.stored != "BOOL":
                tensors[name] = header
    # an EAGLE-3 head has no norm of this name; it may be said to be tied, but has other rows than the embedding
    alone = HEAD in tensors and EMBEDDING not in tensors and "model.norm.weight" in tensors
    if alone and read_config(directory).get("tie_word_embeddings"):
        tensors[EMBEDDING] = tensors.pop(HEAD)
    return tensors


def weight_files(directory: Path) -> Mapping[Path, set[str] | None]:
    """Return the weight files of a checkpoint, each with the names of the tensors to read from it.

    As in transformers, a checkpoint has either model.safetensors or an index of several files. For model.safetensors,
    None stands for all tensors.

    Raises:
        UserError: there are no weights, the index cannot be read, or a file in the index is missing.
    """
    if (directory / SINGLE).is_file():
        return {directory / SINGLE: None}
    if not (directory / INDEX).is_file():
        refuse_other_layout(directory)
        raise UserError(
            f"{directory} has no weights, because it has neither {SINGLE} nor {INDEX}; download the checkpoint again"
        )
    files: dict[Path, set[str]] = defaultdict(set)
    for tensor, name in read_index(directory / INDEX).items():
        files[directory / name].add(tensor)
    _check_listed(files, directory / INDEX)
    return files


def bin_files(directory: Path) -> list[Path]:
    """Return the .bin files of a checkpoint: pytorch_model.bin or, as in transformers, else the files in its index.

    Raises:
        UserError: the index cannot be read, or a file in the index is missing.
    """
    if (directory / BIN_SINGLE).is_file():
        return [directory / BIN_SINGLE]
    files = [directory / name for name in sorted(set(read_index(directory / BIN_INDEX).values()))]
    _check_listed(files, directory / BIN_INDEX)
    return files


def read_index(file: Path) -> dict[str, str]:
    """Read an index. Return the file's name for each name of a tensor.

    Raises:
        UserError: `file` is no index, or names a file outside its folder, of which a draft would hold copies.
    """
    with reading(f"{file}: weight_map"):
        names = TypeAdapter(dict[str, str]).validate_python(read_object(file).get("weight_map"), strict=True)
        for name in names.values():
            if Path(name).name != name:
                raise ValueError(f"{one_line(name, 80)!r} is no file of this folder")
    return names


def _check_listed(files: Iterable[Path], index: Path) -> None:
    """Raise UserError if a file that an index lists is missing."""
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(
            f"{index.parent} has no {missing[0]}, which is listed in its {index.name}; download the checkpoint again"
        )


@lru_cache(maxsize=256)
def _headers(file: Path, modified: int, size: int) -> Mapping[str, Header]:
    """Return the header of each tensor in a file. modified, size: Keys of the cache; a changed file is read again."""
    from safetensors import safe_open

    with reading(file), safe_open(file, framework="np") as handle:
        slices: dict[str, Any] = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
        return {name: Header(file, name, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
