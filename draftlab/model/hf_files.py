"""JSON files of Hugging Face directories, checked before a library builds anything of their numbers. No torch."""

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from typing_extensions import Self

from draftlab.errors import UserError
from draftlab.reading import read_object, reading

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
COUNTS = re.compile(r"(num|n)_\w*(layer|head|expert)s?\w*|\w*(hidden|intermediate|embedding)_(size|dim)|head_dim")
MOST_LAYERS = 10_000
LARGEST = 1 << 24  # of the sizes in a config.json: the largest vocabularies have 2^18 ids
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
UNLIMITED = 1 << 30
# Families whose forward pass is exactly that of llama.py, and whose tensors are never renamed; others share the layout
# but scale or gate something.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
NOT_CAUSAL = re.compile(
    r"For(MaskedLM|SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice|PreTraining)$"
)
ENCODERS = ("bert", "roberta", "distilbert", "albert", "electra", "xlm-roberta", "deberta", "deberta-v2", "modernbert")


def _ids(value: Any) -> Any:
    return value if isinstance(value, list) else [] if value is None else [value]


Size = Annotated[int, Field(ge=1, le=LARGEST)]
Ids = Annotated[list[Annotated[int, Field(ge=-1, le=LARGEST)]], BeforeValidator(_ids)]  # -1: none, in old checkpoints


class Config(BaseModel):
    """The fields of config.json that decide sizes; null is as good as left out, and others are transformers' affair."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    model_type: str | None = None
    architectures: list[str] | None = None
    is_encoder_decoder: bool | None = None
    is_decoder: bool | None = None
    vocab_size: Size | None = None
    num_hidden_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)] | None = None
    hidden_size: Size | None = None
    max_position_embeddings: Annotated[int, Field(ge=1, le=1 << 40)] | None = None
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)] | None = None
    rope_theta: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    tie_word_embeddings: bool | None = None
    eos_token_id: Ids = []
    bos_token_id: Ids = []
    pad_token_id: Ids = []
    text_config: dict[str, Any] | None = None
    quantization_config: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_sizes(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if COUNTS.fullmatch(name) and isinstance(value, int) and not 0 <= value <= LARGEST:
                raise ValueError(f"{name} is {value}")
        if self.text_config is not None:
            Config.model_validate(self.text_config)
        return self


class Generation(BaseModel):
    """The fields of generation_config.json that are used."""

    model_config = ConfigDict(extra="allow", strict=True)

    eos_token_id: Ids = []


class Tokenizer(BaseModel):
    """The fields of tokenizer_config.json that its library takes without a check."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    model_max_length: Annotated[float, Field(gt=0)] | None = None
    chat_template: str | list[Any] | None = None


def read_config(directory: Path) -> dict[str, object]:
    """Return config.json.

    Raises:
        UserError: it cannot be read, is not an object, or has a size that no model has.
    """
    return _checked(Config, directory / CONFIG)


def text_config(directory: Path) -> dict[str, object]:
    """Return config.json, or the text_config of a multimodal model."""
    config = read_config(directory)
    part = config.get("text_config")
    return part if isinstance(part, dict) else config


def is_llama(directory: Path) -> bool:
    """Return whether config.json is of a llama model by name."""
    return read_config(directory).get("model_type") == "llama"


def vocab_size(directory: Path) -> int:
    """Return the width of the logits, padding included. Raises UserError: config.json has no vocab_size."""
    size = text_config(directory).get("vocab_size")
    if not isinstance(size, int):
        raise UserError(f"{directory}/config.json has no vocab_size")
    return size


def check_id(directory: Path, token: int, flag: str) -> None:
    """Raises UserError: no such token id."""
    if token >= (vocab := vocab_size(directory)):
        raise UserError(f"{flag} {token}: the vocabulary has 0 to {vocab - 1}")


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
    kinds = {CONFIG: Config, GENERATION: Generation}
    contents = [_checked(kind, directory / name) for name, kind in kinds.items() if (directory / name).is_file()]
    return {i for content in contents for i in _ids(content.get("eos_token_id")) if i >= 0}


def check_has_tokenizer(directory: Path) -> None:
    """Raises UserError: no file of it is there, where transformers would make up an empty one."""
    if not any((directory / name).is_file() for name in VOCABULARY_FILES):
        raise UserError(f"{directory} has no tokenizer: no {', '.join(VOCABULARY_FILES)}")


def check_tokenizer_files(directory: Path) -> None:
    """Raises UserError: a small file of a tokenizer is not what it should be."""
    if (directory / TOKENIZER).is_file():
        _checked(Tokenizer, directory / TOKENIZER)
    for name in ("special_tokens_map.json", "added_tokens.json"):
        if (directory / name).is_file():
            read_object(directory / name)


def check_causal(directory: Path) -> None:
    """Raises UserError: config.json is of a model that does not write text token by token, by its own words."""
    config = read_config(directory)
    kind, names = str(config.get("model_type")), config.get("architectures")
    named = next((str(name) for name in names if NOT_CAUSAL.search(str(name))), "") if isinstance(names, list) else ""
    encoder = (named or kind in ENCODERS) and not config.get("is_decoder")
    if config.get("is_encoder_decoder") or encoder:
        reads = "an encoder and a decoder" if config.get("is_encoder_decoder") else "an encoder"
        raise UserError(
            f"{directory} is {reads} ({named or kind}), and this needs a causal language model (...ForCausalLM)"
        )


def _checked(kind: type[BaseModel], file: Path) -> dict[str, object]:
    content = read_object(file)
    with reading(file):
        kind.model_validate(content)
    return content
