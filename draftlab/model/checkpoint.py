"""Hugging Face directories: configs and shapes, models, tokenizers, devices and dtypes."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from draftlab.console import note
from draftlab.errors import OtherArchitecture, Quantised, UserError
from draftlab.model import loading
from draftlab.model.head_ids import read_head_ids
from draftlab.model.headers import BUFFERS
from draftlab.model.hf_files import MODEL_TYPES as MODEL_TYPES
from draftlab.model.hf_files import UNLIMITED as UNLIMITED
from draftlab.model.hf_files import check_has_tokenizer, check_tokenizer_files, eos_ids
from draftlab.model.hf_files import max_model_len as max_model_len
from draftlab.model.hf_files import read_config as read_config
from draftlab.model.hf_files import text_config as text_config
from draftlab.model.hf_files import vocab_size as vocab_size
from draftlab.model.hf_shapes import check_size
from draftlab.model.hf_shapes import planned_shape as planned_shape
from draftlab.model.hf_shapes import read_shape as read_shape
from draftlab.model.hf_shapes import shape_of as shape_of
from draftlab.model.hub import checkpoint_name
from draftlab.model.quantization import check_quantised_runs, check_unquantised, is_quantised
from draftlab.model.shape import Shape
from draftlab.model.trimmed_head import trim_model
from draftlab.model.weights import Weights, check_finite
from draftlab.reading import read_object, reading
from draftlab.trust import trusts_remote_code

if TYPE_CHECKING:  # transformers takes seconds to import, and few functions here need it
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential", "cpu", "cuda")


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Return all eos ids of the tokenizer, config.json and generation_config.json; chat models have several."""
    own = special_ids(load_tokenizer(directory))["eos"]
    return tuple(sorted(eos_ids(directory) | (set() if own is None else {own})))


def check(directory: Path) -> None:
    """Check that a checkpoint can be loaded; no tensor is read.

    Raises:
        UserError: broken files, quantised weights, or tensors that disagree with config.json.
    """
    config = read_config(directory)
    if is_quantised(config):
        check_quantised_runs(directory, config)
        return
    try:
        read_shape(directory)
    except OtherArchitecture:
        if config.get("model_type") in MODEL_TYPES:
            raise
        weights, model = Weights(directory), meta_model(config, torch.float32)
        expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
        for name in expected.keys() & set(weights):
            check_size(directory, name, weights.shape(name), expected[name])
        missing = sorted(expected.keys() - set(weights) - {"lm_head.weight"})
        if missing and set(weights) <= expected.keys():  # else transformers renames tensors
            raise UserError(
                f"{directory} has no {missing[0]}{_more(missing)}, which its config.json requires"
            ) from None


def config_for(shape: Shape, base: dict[str, object], kept_layers: list[int] | None = None) -> dict[str, object]:
    """Return base with the sizes of shape, an explicit head_dim, and per-layer lists reduced to the kept layers."""
    config = {k: v for k, v in base.items() if k not in ("_name_or_path", "transformers_version", "torch_dtype")}
    layers = kept_layers if kept_layers is not None else list(range(shape.layers))
    for key, value in base.items():
        if isinstance(value, list) and len(value) == base.get("num_hidden_layers") and key != "architectures":
            config[key] = [value[i] for i in layers]
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
    """Return a LlamaConfig of a shape.

    Raises:
        UserError: the shape has weights that LLaMA lacks (q/k norms, q/k/v biases without an output bias).
    """
    if shape.qk_norm or shape.qk_layernorm or shape.qkv_bias != shape.o_bias:
        raise UserError("a new model is a LLaMA, which has no q/k norms, and biases for all of q, k, v, o or none")
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
    """Return the device; auto is the GPU if there is one.

    Raises:
        UserError: this machine or this torch does not have the device.
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
    """Return the name in configs and options, as float32."""
    return str(dtype).removeprefix("torch.")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype; auto is the fastest to decode in with plain kernels: bfloat16 on a GPU, float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[name]


def load_model(
    directory: Path, dtype: torch.dtype, device: torch.device = CPU, device_map: str | None = None
) -> "PreTrainedModel":
    """Load a checkpoint with transformers, all weights accounted for.

    device_map: accelerate's, as ``auto``, to spread the model over devices, memory and disk instead. Quantised weights
    cannot be moved: without a device_map they are loaded on the device, or on the current GPU.

    Raises:
        UserError: it cannot be built, or weights are missing or unused.
    """
    config = read_config(directory)
    weights, places = Weights(directory), _parse_device_map(device_map)  # checks all files
    if is_quantised(config):
        check_quantised_runs(directory, config)
        places = places or {"": device if device.type == "cuda" else torch.cuda.current_device()}
    else:
        check_unquantised(directory, config)
    model: Any = load_any_files(directory, dtype, places, None if places else weights)
    if (ids := read_head_ids(directory, vocab_size(directory))) is not None:
        trim_model(model, ids)
    return model if places else model.to(device)


def load_any_files(
    directory: Path, dtype: torch.dtype, places: Any = None, weights: Weights | None = None
) -> "PreTrainedModel":
    """Load a model from weights, or, where these are None, from files, safetensors or .bin, to accelerate's places."""
    with reading(f"{directory} cannot be loaded"):
        if weights is None:
            model, info = loading.from_files(directory, dtype, places)
        else:
            model, info = loading.from_slices(directory, weights, dtype)
    for kind in ("missing", "unexpected", "mismatched"):
        names = sorted(key for key in map(str, info[f"{kind}_keys"]) if not BUFFERS.search(key))
        if names:
            raise UserError(f"{directory} does not fit its config.json: {kind} {names[0]}{_more(names)}")
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:  # offloaded to disk
            check_finite(parameter.detach(), name, directory)
    return model


def _parse_device_map(device_map: str | None) -> Any:
    """Raises UserError: a map that accelerate does not know."""
    if device_map is not None and device_map.endswith(".json"):
        return read_object(Path(device_map))
    if device_map is not None and device_map not in DEVICE_MAPS:
        raise UserError(
            f"--device-map {device_map!r}: want {', '.join(DEVICE_MAPS)}, or a .json file of module: device"
        )
    return device_map


def stored_dtype(directory: Path) -> torch.dtype:
    """Return the dtype of most weights, or of the products of quantised ones; configs name it in two ways, or not."""
    try:
        return Weights(directory).dtype
    except Quantised:
        config = read_config(directory)
        if not is_quantised(config):
            raise
        return DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.bfloat16)


@functools.cache
def compute_dtype(directory: Path, device: torch.device) -> torch.dtype:
    """Return the dtype to compute a checkpoint in by default, and note if it is not the stored one."""
    stored = stored_dtype(directory)
    computed = computed_dtype(stored, device)
    if computed != stored:
        where = "CPUs" if stored == torch.float16 else "this CPU, which has no AVX-512"
        note(f"{checkpoint_name(directory)} is stored in {dtype_name(stored)}, slow on {where}; computed in float32")
    return computed


def computed_dtype(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype to compute weights in: as stored, or float32 where that is slow."""
    return stored if is_fast(stored, device) else torch.float32


def is_fast(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch multiplies matrices of a dtype fast.

    On a CPU float16 takes 3 times as long as float32, and without AVX-512 both take 6 to 70 times as long.
    """
    if device.type != "cpu" or dtype.itemsize > 2:
        return True
    return dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def new_model(config: dict[str, object], seed: int) -> "PreTrainedModel":
    """Return a randomly initialised fp32 model."""
    torch.manual_seed(seed)
    return loading.from_config(config, torch.float32)


def meta_model(config: dict[str, object], dtype: torch.dtype) -> "PreTrainedModel":
    """Return a model on the meta device, without weights; its buffers, such as rotary tables, are real.

    Raises:
        UserError: transformers cannot build it.
    """
    from accelerate import init_empty_weights

    with reading("transformers cannot build this model"), init_empty_weights(include_buffers=False):
        return loading.from_config(config, dtype).eval()


def load_tokenizer(directory: Path) -> "PreTrainedTokenizerBase":
    """Raises UserError: there is none, or it cannot be read."""
    from transformers import AutoTokenizer

    from draftlab.model.sentencepiece import as_sentencepiece

    check_has_tokenizer(directory)
    check_tokenizer_files(directory)
    with reading(f"{directory} has no usable tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trusts_remote_code())
        alone = directory / "tokenizer.model"
        return as_sentencepiece(tokenizer, alone) if alone.is_file() and not _has_fast(directory) else tokenizer


def _has_fast(directory: Path) -> bool:
    return (directory / "tokenizer.json").is_file() or (directory / "tekken.json").is_file()


def special_ids(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int | None]:
    """Return the ids of bos, eos and pad; None for those that the tokenizer lacks."""
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    return {name: value if isinstance(value, int) else None for name, value in ids.items()}


def layer_of(name: str) -> int | None:
    """Return the layer of a tensor, None for embedding, final norm and head."""
    parts = name.split(".")
    return int(parts[2]) if name.startswith("model.layers.") else None


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
