"""The files of a Hugging Face directory, and of its head's ids, read without torch."""

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from draftlab.errors import Quantised, UserError, one_line
from draftlab.reading import read_json, read_object, reading

CONFIG, GENERATION, HEAD_IDS = "config.json", "generation_config.json", "head_ids.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
CONTEXT_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
)
UNLIMITED = 1 << 30
# Families whose forward pass is exactly that of llama.py, and whose tensors are never renamed; others share the layout
# but scale or gate something else. What the tensors do not tell stands in llama.MULTIPLIERS.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "granite", "olmo2")
NOT_CAUSAL = re.compile(
    r"For(MaskedLM|SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice|PreTraining)$"
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
# Buffers in checkpoints of the age of LLaMA 1 and 2 that no model reads: transformers computes them itself.
BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|(attn|attention)\.masked_bias|position_ids)$")
FLOATS = ("F64", "F32", "BF16", "F16")

Kind = Literal["gguf", "bin", "adapter"]
NOUNS: dict[Kind, str] = {
    "gguf": "a GGUF file",
    "bin": "a checkpoint in .bin files",
    "adapter": "a PEFT adapter",
}
BIN_FILES = ("pytorch_model.bin.index.json", "pytorch_model.bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The kind of a layout other than Hugging Face's, and the file or directory that draftlab import reads."""

    kind: Kind
    path: Path

    def advice(self) -> str:
        """Return the end of a sentence that starts with 'PATH is': the noun and the command that imports it."""
        out = self.path.stem if self.kind == "gguf" else f"{self.path.absolute().name}-imported"
        command = shlex.join(["draftlab", "import", str(self.path), "--out", out])
        return f"{NOUNS[self.kind]}; first import it with: {command}"


def other_layout(path: Path) -> Layout | None:
    """Return the layout that draftlab import would read at path, or None for any other path.

    A directory with a single GGUF file stands for that file, a .bin file for its directory.
    """
    if path.suffix == ".gguf":
        return Layout(kind="gguf", path=path)
    if path.suffix == ".bin":
        return other_layout(path.parent)
    if (path / "adapter_config.json").is_file():
        return Layout(kind="adapter", path=path)
    if any(path.glob("*.safetensors")):
        return None
    if any((path / name).is_file() for name in BIN_FILES):
        return Layout(kind="bin", path=path)
    files = sorted(path.glob("*.gguf"))
    return Layout(kind="gguf", path=files[0]) if len(files) == 1 else None


def refuse_other_layout(path: Path) -> None:
    """Raises UserError: a checkpoint that draftlab import has to convert first."""
    layout = other_layout(path)
    if layout is not None:
        raise UserError(f"{path} is {layout.advice()}")


def read_config(directory: Path) -> dict[str, object]:
    """Return config.json. Raises UserError: it cannot be read, or is not an object."""
    config = read_object(directory / CONFIG)
    return {name: _number(value) for name, value in config.items()}


def _number(value: Any) -> Any:
    """Return a value of config.json in which infinities, which JSON lacks, are numbers: transformers writes objects."""
    if isinstance(value, list):
        return [_number(item) for item in value]
    return (
        float(value["__float__"])
        if isinstance(value, dict) and value.keys() == {"__float__"}
        else value
    )


def text_config(directory: Path) -> dict[str, object]:
    """Return config.json, or the text_config of a multimodal model."""
    config = read_config(directory)
    part = config.get("text_config")
    return part if isinstance(part, dict) else config


def is_llama(directory: Path) -> bool:
    """Return whether config.json is of a llama model by name."""
    return read_config(directory).get("model_type") == "llama"


def check_rotary(directory: Path, config: Mapping[str, object]) -> None:
    """Raises UserError: config.json has a rotary setting that is no positive number."""
    parts: list[Mapping[str, object]] = [config]
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if isinstance(rope, dict):  # Gemma 3 has settings for each kind of layer
            parts += [rope, *(part for part in rope.values() if isinstance(part, dict))]
    for part in parts:
        for name in ("rope_theta", "factor"):
            value = part.get(name)
            if isinstance(value, int | float) and not 0 < value < math.inf:
                raise UserError(f"{directory / CONFIG}: {name} is {value}; want a positive number")


def check_causal(directory: Path) -> None:
    """Raises UserError: config.json is of a model that does not write text token by token, by its own words."""
    config = read_config(directory)
    kind, names = str(config.get("model_type")), config.get("architectures")
    named = (
        next((str(name) for name in names if NOT_CAUSAL.search(str(name))), "")
        if isinstance(names, list)
        else ""
    )
    encoder = (named or kind in ENCODERS) and not config.get("is_decoder")
    if config.get("is_encoder_decoder") or encoder:
        reads = "an encoder and a decoder" if config.get("is_encoder_decoder") else "an encoder"
        raise UserError(
            f"{directory} is {reads} ({named or kind}), and this needs a causal language model (...ForCausalLM)"
        )


def is_quantised(config: dict[str, object]) -> bool:
    """Return whether transformers would load quantised weights; MLX's it cannot."""
    return config.get("quantization_config") is not None


def quantization_method(config: dict[str, object]) -> str | None:
    """Return how the weights are quantised, as awq, gptq, bitsandbytes, fp8 or mlx; None if they are not."""
    # the latter is MLX's
    quantization = config.get("quantization_config") or config.get("quantization")
    default = "unnamed" if is_quantised(config) else "mlx"
    method = (
        quantization.get("quant_method", default)
        if isinstance(quantization, dict)
        else quantization
    )
    return None if method is None else one_line(method, 40)


def check_unquantised(directory: Path, config: dict[str, object]) -> None:
    """Raises UserError: the weights are quantised, which neither pruning nor the engine reads."""
    if (method := quantization_method(config)) is not None:
        raise Quantised(
            f"{directory} is quantised ({method}); name the checkpoint with unquantised weights"
        )


def vocab_size(directory: Path) -> int:
    """Return the width of the logits, padding included. Raises UserError: config.json has no vocab_size."""
    size = text_config(directory).get("vocab_size")
    if not isinstance(size, int):
        raise UserError(f"{directory}/config.json has no vocab_size")
    return size


def max_model_len(directory: Path, default: int = UNLIMITED) -> int:
    """Return the longest text in tokens that config.json allows, or default where it does not say."""
    config = text_config(directory)
    lengths = [config[name] for name in CONTEXT_NAMES if isinstance(config.get(name), int)]
    return int(str(lengths[0])) if lengths else default


def check_length(model: Path | None, seq_len: int) -> None:
    """Raises UserError: sequences are longer than a checkpoint's context."""
    if model is not None and seq_len > max_model_len(model):
        raise UserError(f"--seq-len {seq_len}: {model} reads at most {max_model_len(model)} tokens")


def eos_ids(directory: Path) -> set[int]:
    """Return the eos ids of config.json and generation_config.json. Raises UserError: one is no id."""
    ids: set[int] = set()
    for file in (directory / CONFIG, directory / GENERATION):
        value = read_object(file).get("eos_token_id") if file.is_file() else None
        several = value if isinstance(value, list) else [] if value is None else [value]
        with reading(f"{file}: eos_token_id"):
            ids.update(TypeAdapter(list[int]).validate_python(several, strict=True))
    return {i for i in ids if i >= 0}  # -1: none, in old checkpoints


def check_has_tokenizer(directory: Path) -> None:
    """Raises UserError: the directory has no tokenizer; transformers would make up an empty one."""
    if not any((directory / name).is_file() for name in VOCABULARY_FILES):
        raise UserError(f"{directory} has no tokenizer: no {', '.join(VOCABULARY_FILES)}")


def read_head_ids(directory: Path, vocab: int) -> list[int] | None:
    """Return the ids of a trimmed head (trimmed_head.py), ascending, or None if it has all.

    Raises:
        UserError: the file is not a list of ids below vocab.
    """
    file = directory / HEAD_IDS
    if not file.is_file():
        return None
    with reading(file):
        kind = TypeAdapter(list[Annotated[int, Field(ge=0, lt=vocab, strict=True)]])
        ids = kind.validate_python(read_json(file))
    if not ids or ids != sorted(set(ids)):
        raise UserError(f"{file}: want ids, each once and in ascending order")
    return ids


def write_head_ids(directory: Path, ids: Sequence[int]) -> None:
    (directory / HEAD_IDS).write_text(json.dumps(list(ids)))


def check_head_size(size: int, vocab: int, special: int = 0) -> None:
    """Raises UserError: a head of that size has no room for the special ids, or is no smaller than the whole."""
    if not special < size < vocab:
        raise UserError(
            f"--vocab {size}: want more than the {special} special ids, and fewer than all {vocab:,}"
        )


def check_trimmable(draft: Path, size: int) -> None:
    """Raises UserError: the draft's head is trimmed already, or not larger than this size."""
    vocab = vocab_size(draft)
    check_head_size(size, vocab)
    if (ids := read_head_ids(draft, vocab)) is not None:
        raise UserError(
            f"--vocab {size}: the head of {draft} is trimmed already, to {len(ids):,} ids; leave it out"
        )


@dataclass(frozen=True, slots=True)
class Header:
    """A tensor in a file. stored: its dtype as safetensors calls it."""

    file: Path
    shape: tuple[int, ...]
    stored: str

    @property
    def values(self) -> int:
        return math.prod(self.shape)


def read_headers(directory: Path) -> dict[str, Header]:
    """Return the tensors of a checkpoint by name, without the buffers that transformers ignores.

    Raises:
        UserError: a file is missing, truncated or not safetensors; a tensor is missing or there twice.
    """
    tensors: dict[str, Header] = {}
    seen: set[str] = set()
    for file, listed in weight_files(directory).items():
        info = file.stat()
        headers = _headers(file, info.st_mtime_ns, info.st_size)
        missing = sorted((listed or set()) - headers.keys())
        if missing:
            raise UserError(f"{file} has no tensor {missing[0]!r}, which the index assigns to it")
        if twice := sorted(headers.keys() & seen):
            raise UserError(
                f"{directory} has {twice[0]!r} twice, in {file.name} and in another file"
            )
        seen |= headers.keys()
        for name, header in headers.items():
            if (
                (listed is None or name in listed)
                and not BUFFERS.search(name)
                and header.stored != "BOOL"
            ):
                tensors[name] = header
    return tensors


def weight_files(directory: Path) -> dict[Path, set[str] | None]:
    """Return the files of a checkpoint's weights as transformers picks them: model.safetensors, or those of an index.

    The value is the names of the tensors that the index takes from a file, or None for all.

    Raises:
        UserError: no weights, or an index that is broken or names a missing file.
    """
    if (directory / SINGLE).is_file():
        return {directory / SINGLE: None}
    if not (directory / INDEX).is_file():
        refuse_other_layout(directory)
        raise UserError(f"{directory} has no {SINGLE} and no {INDEX}")
    files: dict[Path, set[str] | None] = {}
    for tensor, name in read_index(directory / INDEX).items():
        names = files.setdefault(directory / name, set())
        assert names is not None
        names.add(tensor)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(f"{directory}: {missing[0]}, named in {INDEX}, is missing")
    return files


def read_index(file: Path) -> dict[str, str]:
    """Return the file name of each tensor. Raises UserError: the file is not an index."""
    with reading(f"{file}: weight_map"):
        return TypeAdapter(dict[str, str]).validate_python(
            read_object(file).get("weight_map"), strict=True
        )


def check_stored(directory: Path, headers: Mapping[str, Header]) -> None:
    """Raises UserError: a tensor is not of a floating-point dtype of models."""
    odd = next((name for name, header in headers.items() if header.stored not in FLOATS), None)
    if odd is not None:
        raise Quantised(
            f"{directory} is quantised ({odd} is stored as {headers[odd].stored}); "
            "name the checkpoint with unquantised weights"
        )


@lru_cache(maxsize=256)
def _headers(file: Path, modified: int, size: int) -> Mapping[str, Header]:
    """Return the tensors of a file by name; a file that did not change is opened once."""
    from safetensors import safe_open

    with reading(file), safe_open(file, framework="np") as handle:
        slices: dict[str, Any] = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
        return {
            name: Header(file, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()
        }
