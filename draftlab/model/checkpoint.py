"""Hugging Face directories: config <-> Shape, models, tokenizers, atomic writes."""

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from draftlab.console import note
from draftlab.errors import OtherArchitecture, UserError
from draftlab.files import check_free as check_free
from draftlab.files import new_directory as new_directory
from draftlab.model.hub import checkpoint_name
from draftlab.model.hub import locate as locate
from draftlab.model.layouts import other_layout
from draftlab.model.shape import Shape
from draftlab.model.weights import BUFFERS, Weights, check_finite

if TYPE_CHECKING:  # transformers takes seconds to import, and only two functions here need it
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
UNLIMITED = 1 << 30
CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential", "cpu", "cuda")


def read_config(directory: Path) -> dict[str, object]:
    """Return config.json. Raises UserError: it cannot be read, or is no object."""
    return _object(directory / "config.json")


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Return every id that ends a text: the tokenizer's, and what config.json and generation_config.json add.

    Chat models have several.
    """
    found = {special_ids(load_tokenizer(directory))["eos"]}
    for file in (directory / "config.json", directory / "generation_config.json"):
        if file.is_file():
            value = _object(file).get("eos_token_id")
            found |= set(value) if isinstance(value, list) else {value}  # type: ignore[arg-type]
    return tuple(sorted(i for i in found if isinstance(i, int)))


def read_shape(directory: Path) -> Shape:
    """Shape of a checkpoint, from its config and the names and sizes of its tensors; no tensor is read.

    Families are recognised by structure: biases and q/k norms are seen in the tensors' names.

    Raises:
        UserError: not LLaMA-like (says which tensor), or config and tensors disagree.
    """
    config = read_config(directory)
    check_plain(directory, config)
    weights = Weights(directory)
    shape = shape_of(config, frozenset(weights))
    _check_tensors(directory, config, shape, {name: weights.shape(name) for name in weights})
    if shape.tied and "lm_head.weight" in weights:
        _check_tied(weights)
    return shape


def check(directory: Path) -> None:
    """Refuse a checkpoint that cannot be loaded, before anything is made; no tensor is read.

    Raises:
        UserError: broken files, quantised weights, or tensors that config.json says otherwise.
    """
    config = read_config(directory)
    if "quantization_config" in config and torch.cuda.is_available():
        return  # transformers may load it there
    try:
        read_shape(directory)
    except OtherArchitecture:
        weights, model = Weights(directory), meta_model(config, torch.float32)
        built = {name: tuple(p.shape) for name, p in model.named_parameters()}
        for name in built.keys() & set(weights):
            if weights.shape(name) != built[name]:
                found, want = weights.shape(name), built[name]
                raise UserError(f"{directory}: {name} is {found}, its config.json says {want}") from None
        lacking = sorted(built.keys() - set(weights) - {"lm_head.weight"})
        if lacking and set(weights) <= built.keys():  # else transformers gives tensors other names
            raise UserError(f"{directory} has no {lacking[0]}{_more(lacking)}, which its config.json says") from None


def planned_shape(directory: Path) -> Shape:
    """Return the shape of a checkpoint, by its config alone where its weights are not here: a plan needs none.

    Raises:
        UserError: see read_shape.
    """
    config = read_config(directory)
    if any(directory.glob("*.safetensors")) or other_layout(directory):
        return read_shape(directory)
    check_plain(directory, config)
    built = {name: tuple(p.shape) for name, p in meta_model(config, torch.float32).named_parameters()}
    shape = shape_of(config, frozenset(built))
    _check_tensors(directory, config, shape, built)
    return shape


def check_plain(directory: Path, config: dict[str, object]) -> None:
    """Raises UserError: the weights are quantised, which is neither cut nor computed with here."""
    how = config.get("quantization_config")
    if how is not None:
        method = how.get("quant_method", "an unnamed method") if isinstance(how, dict) else how
        raise UserError(f"{directory} is quantised ({method}); name the checkpoint with plain weights")


def shape_of(config: dict[str, object], names: frozenset[str]) -> Shape:
    """Shape from a config's numbers and the names of the tensors that exist."""

    def number(key: str, default: int | None = None) -> int:
        value = config.get(key, default)
        value = default if value is None else value
        if not isinstance(value, int):
            raise OtherArchitecture(f"config.json of a {config.get('model_type')} model has no {key}: not LLaMA-like")
        return value

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    first = "model.layers.0."
    return Shape(
        layers=number("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", hidden // heads),
        ffn=number("intermediate_size"),
        vocab=number("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", "lm_head.weight" not in names)),
        qkv_bias=first + "self_attn.q_proj.bias" in names,
        o_bias=first + "self_attn.o_proj.bias" in names,
        mlp_bias=first + "mlp.down_proj.bias" in names,
        qk_norm=first + "self_attn.q_norm.weight" in names,
        qk_layernorm=first + "self_attn.query_layernorm.weight" in names,
    )


def config_for(shape: Shape, base: dict[str, object], kept_layers: list[int] | None = None) -> dict[str, object]:
    """base rewritten to shape: sizes, explicit head_dim, and every per-layer list sliced to the kept layers."""
    config = {k: v for k, v in base.items() if k not in ("_name_or_path", "transformers_version", "torch_dtype")}
    kept = kept_layers if kept_layers is not None else list(range(shape.layers))
    length = base.get("num_hidden_layers")
    for key, value in base.items():
        if isinstance(value, list) and len(value) == length and key != "architectures":
            config[key] = [value[i] for i in kept]
    return config | {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
    }


def llama_config(shape: Shape, *, context: int, bos: int | None, eos: int | None, pad: int | None) -> dict[str, object]:
    """A LlamaConfig for a model made from a shape alone.

    Raises:
        UserError: the shape has rows that LLaMA does not (q/k norms, q/k/v biases without an output bias).
    """
    if shape.qk_norm or shape.qk_layernorm or shape.qkv_bias != shape.o_bias:
        raise UserError("a new model is made as LLaMA, which has no q/k norms and biases q, k, v and o together")
    base: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "max_position_embeddings": context,
        "attention_bias": shape.qkv_bias,
        "mlp_bias": shape.mlp_bias,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }
    return config_for(shape, base)


def resolve_device(name: str) -> torch.device:
    """auto: the GPU where there is one.

    Raises:
        UserError: a device that this machine or this torch does not have.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return device


def dtype_name(dtype: torch.dtype) -> str:
    """As configs and options call it: float32."""
    return str(dtype).removeprefix("torch.")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto: what a device decodes fastest in with plain kernels, bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[name]


def load_model(
    directory: Path, dtype: torch.dtype, device: torch.device = CPU, device_map: str | None = None
) -> "PreTrainedModel":
    """The checkpoint as a transformers model on device, with every weight accounted for.

    device_map: accelerate's ``auto`` and the like, which spread it over devices, memory and disk instead.

    Raises:
        UserError: it cannot be built, or weights are missing or left over.
    """
    config = read_config(directory)
    if device.type == "cpu" and device_map is None:
        check_plain(directory, config)
    weights = Weights(directory)  # every file is there and whole
    plain = device_map is None and "quantization_config" not in config
    model: Any = load_any_files(directory, dtype, device_map, weights if plain else None)
    return model if device_map else model.to(device)


def load_any_files(
    directory: Path, dtype: torch.dtype, device_map: str | None = None, weights: Weights | None = None
) -> "PreTrainedModel":
    """Return the model of weights, or of whatever files transformers finds there, .bin ones too; see load_model."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        if weights is None:
            model, info = _from_files(directory, dtype, device_map)
        else:
            model, info = _from_slices(directory, weights, dtype)
    except (ValueError, RuntimeError, OSError, ImportError, KeyError) as error:
        raise UserError(f"{directory} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
    for kind in ("missing", "unexpected", "mismatched"):
        wrong = sorted(key for key in map(str, info[f"{kind}_keys"]) if not BUFFERS.search(key))
        if wrong:
            raise UserError(f"{directory} does not fit its config.json: {kind} {wrong[0]}{_more(wrong)}")
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:  # one on disk
            check_finite(parameter.detach(), name, directory)
    return model


def text_config(directory: Path) -> dict[str, object]:
    """Return config.json, or its part about text where the model also sees or hears."""
    config = read_config(directory)
    part = config.get("text_config")
    return part if isinstance(part, dict) else config


def vocab_size(directory: Path) -> int:
    """Return how many logits a checkpoint has, padding included. Raises UserError: its config.json does not say."""
    size = text_config(directory).get("vocab_size")
    if not isinstance(size, int):
        raise UserError(f"{directory}/config.json has no vocab_size")
    return size


def max_model_len(directory: Path, default: int = UNLIMITED) -> int:
    """Return the longest text in tokens that config.json allows, or default where it does not say."""
    config = text_config(directory)
    lengths = [config[name] for name in CONTEXT_NAMES if isinstance(config.get(name), int)]
    return int(str(lengths[0])) if lengths else default


def stored_dtype(directory: Path) -> torch.dtype:
    """Return that of most weights: configs name it in two ways or not at all."""
    return Weights(directory).dtype


@functools.cache
def compute_dtype(directory: Path, device: torch.device) -> torch.dtype:
    """Return what a checkpoint is computed in where that is not asked for: as it is stored, but float16 in float32 on a
    CPU, where its products take 3 times as long (a 2048 x 2048 layer of 512 tokens: 149 against 46 ms on an AMD EPYC).
    """
    stored = stored_dtype(directory)
    if stored != torch.float16 or device.type != "cpu":
        return stored
    note(f"{checkpoint_name(directory)} is stored in float16, which is slow on a CPU: computed in float32")
    return torch.float32


def new_model(config: dict[str, object], seed: int) -> "PreTrainedModel":
    """A randomly initialised fp32 model of that config."""
    torch.manual_seed(seed)
    return _from_config(config, torch.float32)


def meta_model(config: dict[str, object], dtype: torch.dtype) -> "PreTrainedModel":
    """A model of that config without weights (on the meta device); its buffers, such as rotary tables, are real.

    Raises:
        UserError: transformers cannot build it.
    """
    from accelerate import init_empty_weights

    try:
        with init_empty_weights(include_buffers=False):
            return _from_config(config, dtype).eval()
    except (ValueError, RuntimeError, KeyError) as error:
        raise UserError(f"transformers cannot build this model: {' '.join(str(error).split())[:300]}") from error


def load_tokenizer(directory: Path) -> "PreTrainedTokenizerBase":
    """Raises UserError: none is there (transformers would make an empty one up by model type), or it cannot be read."""
    from transformers import AutoTokenizer

    from draftlab.model.sentencepiece import as_sentencepiece

    if not any((directory / name).is_file() for name in VOCABULARY_FILES):
        raise UserError(f"{directory} holds no tokenizer: no {', '.join(VOCABULARY_FILES)}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        alone = directory / "tokenizer.model"
        return as_sentencepiece(tokenizer, alone) if alone.is_file() and not _has_fast(directory) else tokenizer
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise UserError(f"{directory} holds no usable tokenizer: {' '.join(str(error).split())[:200]}") from error


def _has_fast(directory: Path) -> bool:
    return (directory / "tokenizer.json").is_file() or (directory / "tekken.json").is_file()


def special_ids(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int | None]:
    """bos, eos and pad; None for what the tokenizer does not have."""
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    return {name: value if isinstance(value, int) else None for name, value in ids.items()}


def layer_of(name: str) -> int | None:
    """The layer a tensor belongs to, None for embedding, final norm and head."""
    parts = name.split(".")
    return int(parts[2]) if name.startswith("model.layers.") else None


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _check_tensors(directory: Path, config: dict[str, object], shape: Shape, sizes: dict[str, tuple[int, ...]]) -> None:
    """Raises UserError: a tensor that shape does not have, one that it lacks, or one of another size."""
    expected = shape.axes()
    held = set(sizes) - ({"lm_head.weight"} if shape.tied else set())
    odd = sorted(held - set(expected))[:1] or sorted(set(expected) - held)[:1]
    if odd:
        kind = "an unknown" if odd[0] in held else "no"
        raise OtherArchitecture(
            f"{directory} ({config.get('model_type')}) is not LLaMA-like: it has {kind} tensor {odd[0]!r}"
        )
    for name, axes in expected.items():
        if sizes[name] != shape.dims(axes):
            raise UserError(f"{directory}: {name} is {sizes[name]}, its config.json says {shape.dims(axes)}")


def _check_tied(weights: Weights) -> None:
    """A tied head that is also in the file. Raises UserError: it differs, and transformers would not tie it."""
    if not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"]):
        raise UserError(
            f"{weights.directory}: config.json ties the head to the embedding, and the two differ; "
            "put tie_word_embeddings: false there"
        )


def _object(file: Path) -> dict[str, object]:
    try:
        read = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    if not isinstance(read, dict):
        raise UserError(f"{file} is no JSON object")
    return read


def _from_slices(directory: Path, weights: Weights, dtype: torch.dtype) -> Any:
    """A model in memory and what its loading has to say, by transformers, from tensors that are read and not mapped."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.models.auto.auto_factory import _get_model_class

    config: Any = AutoConfig.from_pretrained(directory)
    kind: Any = _get_model_class(config, AutoModelForCausalLM._model_mapping)  # what from_pretrained itself asks
    model, info = kind.from_pretrained(
        None, config=config, state_dict=weights.slices(), dtype=dtype, output_loading_info=True
    )
    model.name_or_path = model.config.name_or_path = str(directory)
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model, info


def _from_files(directory: Path, dtype: torch.dtype, device_map: str | None) -> Any:
    """Raises UserError: a map that accelerate does not know."""
    from transformers import AutoModelForCausalLM

    in_file = device_map is not None and device_map.endswith(".json")
    places: Any = _object(Path(device_map or "")) if in_file else device_map
    if isinstance(places, str) and places not in DEVICE_MAPS:
        raise UserError(f"--device-map {places!r}: want {', '.join(DEVICE_MAPS)}, or a .json file of module: device")
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, device_map=places, output_loading_info=True)


def _from_config(config: dict[str, object], dtype: torch.dtype) -> "PreTrainedModel":
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {k: v for k, v in config.items() if k != "model_type"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(str(config["model_type"]), **fields), dtype=dtype)
