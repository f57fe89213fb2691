"""Checkpoints in Hugging Face directories: shapes, tensors and models; devices and dtypes.

Functions read their files on every call. Only the headers of tensor files and the results of compute_dtype are cached.
"""

import copy
import functools
import inspect
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from pydantic import TypeAdapter
from safetensors import safe_open
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    cache_utils,
)
from transformers.models.auto.auto_factory import _get_model_class
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import logging

from draftlab.console import note
from draftlab.errors import OtherArchitecture, Quantised, UserError, one_line
from draftlab.model import hub
from draftlab.model.devices import DTYPES, dtype_name, is_fast
from draftlab.model.hf_files import (
    BUFFERS,
    CONFIG,
    GENERATION,
    HEAD_IDS,
    MODEL_TYPES,
    Header,
    check_head_size,
    check_unquantised,
    is_quantised,
    max_model_len,
    other_layout,
    quantised,
    quantization_method,
    read_config,
    read_head_ids,
    read_headers,
    refuse_unconverted,
    vocab_size,
)
from draftlab.model.shape import Axis, Shape, block_options
from draftlab.model.tokenizer import different_tokenizers, first_difference, load_tokenizer, special_ids
from draftlab.model.trimmed_head import trim_model
from draftlab.reading import read_object, reading
from draftlab.trust import trusts_remote_code

CPU = torch.device("cpu")
STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
PIECE_BYTES = 1 << 25
# names of a tensor's axes in config.json
FIELDS: dict[Axis, str] = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
}
HEADS: dict[Axis, str] = {"q": "num_attention_heads", "kv": "num_key_value_heads"}
# fields of config.json that are not true of a cut model
STALE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
ROPE_FIELDS = ("rope_parameters", "rope_scaling")  # names in transformers 5 and 4


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in a directory. Each of its parts is read once, on first access."""

    directory: Path

    @classmethod
    def open(cls, name: str | Path, *, weights: bool = True) -> "Checkpoint":
        """Open a checkpoint by name: an embedded model, a directory, or a model on the Hugging Face hub.

        weights: Whether the weight files are needed. If False, no weights of a hub model are downloaded.

        Raises:
            UserError: the errors of hub.locate.
        """
        return cls(hub.locate(name, weights))

    @functools.cached_property
    def config(self) -> dict[str, object]:
        return read_config(self.directory)

    @functools.cached_property
    def shape(self) -> Shape:
        """Return the shape, from the config and the names and sizes of its tensors.

        Biases and q/k norms are detected by the names and sizes of tensors. Values are not read, with one exception:
        if config.json ties the LM head to the embedding but both are stored, both are read and must be equal. Before
        the weights are downloaded, the shape comes from config.json alone.

        Raises:
            UserError: the checkpoint is quantised or not LLaMA-like, or its config and tensors disagree.
        """
        directory = self.directory
        config = self.config
        check_unquantised(directory, config)
        if not any(directory.glob("*.safetensors")) and not other_layout(directory):
            parameters = meta_model(config, torch.float32).named_parameters()
            return _fitting_shape(directory, config, {name: tuple(p.shape) for name, p in parameters})
        headers = read_headers(directory)
        shape = _fitting_shape(directory, config, {name: header.shape for name, header in headers.items()})
        _check_floats(directory, headers)
        if shape.tied and "lm_head.weight" in headers:
            weights = Weights(directory)
            # transformers would untie a head that differs
            if not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"]):
                raise contradiction(
                    directory,
                    "tie_word_embeddings",
                    True,
                    False,
                    "lm_head.weight is no copy of the embedding",
                )
        ids = read_head_ids(directory, shape.vocab)
        return shape if ids is None else shape.model_copy(update={"draft_vocab": len(ids)})

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.directory)

    @functools.cached_property
    def vocabulary(self) -> Mapping[str, int]:
        """Return the id of each token. Raises UserError: see check_embeds."""
        self.check_embeds()
        return self.tokenizer.get_vocab()

    @property
    def chat_template(self) -> str | None:
        template = self.tokenizer.chat_template
        return template if isinstance(template, str) else None

    @functools.cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Return all eos ids of the tokenizer, config.json and generation_config.json; chat models have several.

        Raises:
            UserError: an eos_token_id is no integer.
        """
        ids = [special_ids(self.tokenizer)["eos"]]
        for file in (self.directory / CONFIG, self.directory / GENERATION):
            value = read_object(file).get("eos_token_id") if file.is_file() else None
            with reading(f"{file}: eos_token_id"):
                several = value if isinstance(value, list) else [value]
                ids += TypeAdapter(list[int | None]).validate_python(several, strict=True)
        # old checkpoints have -1 for no id
        return tuple(sorted({i for i in ids if i is not None and i >= 0}))

    @property
    def vocab_size(self) -> int:
        """Return the width of the logits, padding included."""
        return vocab_size(self.directory)

    @property
    def max_model_len(self) -> int:
        """Return the length in tokens of the longest text that the model reads."""
        return max_model_len(self.directory)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype in which most weights are stored, see stored_dtype."""
        return stored_dtype(self.directory)

    @functools.cached_property
    def head_ids(self) -> list[int] | None:
        """Return the token ids for which a trimmed LM head has logits, or None if the head is not trimmed."""
        return read_head_ids(self.directory, self.vocab_size)

    def check(self) -> None:
        """Check that the checkpoint can be loaded. Weights need not be downloaded.

        Of downloaded weights only the headers are read, with the exception in shape. Tensors of other architectures
        than LLaMA are compared with config.json on loading.

        Raises:
            UserError: files are broken, transformers or this machine cannot run the model, the model's cache cannot be
                rolled back, or tensors of a LLaMA-like model disagree with config.json.
        """
        directory = self.directory
        config = self.config
        refuse_unconverted(directory, str(directory))
        _check_code(directory, config)
        if is_quantised(config):
            check_quantised_runs(directory, config)
            return
        try:
            _ = self.shape
            _check_lists(directory, config)
        except OtherArchitecture:
            if config.get("model_type") in MODEL_TYPES:
                raise
            _check_cache(directory, meta_model(config, torch.float32))

    def check_length(self, seq_len: int) -> None:
        """Raise UserError if seq_len exceeds the context of the model."""
        if seq_len > self.max_model_len:
            raise UserError(
                f"--seq-len {seq_len}: {self.directory} reads at most {self.max_model_len} tokens; use a smaller "
                "--seq-len"
            )

    def check_trimmable(self, size: int) -> None:
        """Raise UserError if the LM head is trimmed already, or has no more than `size` ids."""
        check_head_size(size, self.vocab_size)
        if self.head_ids is not None:
            raise UserError(
                f"--vocab {size}: the head of {self.directory} is already trimmed to {len(self.head_ids):,} ids; leave "
                "--vocab out"
            )

    def check_embeds(self) -> None:
        """Raise UserError if the tokenizer has ids without an embedding. Added tokens are not counted."""
        ids = self.tokenizer.vocab_size
        if ids > self.vocab_size:
            raise UserError(
                f"{self.directory} has embeddings for {self.vocab_size:,} ids, but the tokenizer there has {ids:,} "
                "ids; copy the tokenizer files with which the model was trained"
            )

    def common_vocabulary(self, target: "Checkpoint") -> int:
        """Check that each id is the same token here and in the target. Return the number of ids that both have.

        Speculative decoding compares ids. Models of a family may pad their LM heads to different sizes; the smaller
        size is returned.

        Raises:
            UserError: an id stands for different tokens, a tokenizer has ids that its model does not embed, or the
                target's LM head is trimmed.
        """
        own = self.vocabulary
        targets = target.vocabulary
        if (target.directory / HEAD_IDS).is_file():
            raise UserError(
                f"{target.directory} has a trimmed LM head ({HEAD_IDS}), so it can be a draft but not a target; use "
                "--target with a complete model"
            )
        size = min(self.vocab_size, target.vocab_size)
        other = first_difference(own, targets, size)
        if other is not None:
            raise UserError(different_tokenizers(self.directory, target.directory, other))
        return size

    def tensors(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> "Weights":
        return Weights(self.directory, dtype, device)


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Return all eos ids of a checkpoint, see Checkpoint.eos_ids. Raises UserError: see there."""
    return Checkpoint(directory).eos_ids


def read_shape(directory: Path) -> Shape:
    """Return the shape of a checkpoint, see Checkpoint.shape. Raises UserError: see there."""
    return Checkpoint(directory).shape


def _check_floats(directory: Path, headers: Mapping[str, Header]) -> None:
    """Raise UserError if a tensor is not stored as floating-point numbers of at least 16 bits."""
    for name, header in headers.items():
        if header.stored not in STORED:
            raise quantised(directory, f"{name} is stored as {header.stored}")


def _check_code(directory: Path, config: Mapping[str, object]) -> None:
    """Raise UserError if transformers has no such causal language model and --trust-remote-code is not set."""
    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING and not trusts_remote_code():
        own = "add --trust-remote-code to run the Python code in the checkpoint"
        remedy = own if "auto_map" in config else "run pip install --upgrade transformers"
        raise UserError(
            f"{directory}: the installed transformers lacks the model_type {one_line(kind, 80)!r}; {remedy}"
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not trusts_remote_code():
        raise UserError(
            f"{directory}: transformers has no causal language model of the model_type {one_line(kind, 80)!r}; use a "
            "text model with the same tokenizer"
        )


def _check_cache(directory: Path, model: PreTrainedModel) -> None:
    """Check that a model's cache can drop rejected draft tokens.

    Raises:
        UserError: the model has no KV cache, and no recurrent states that draftlab can save and restore.
    """
    recurrent = getattr(cache_utils, "LinearAttentionCacheLayerMixin", ())
    copied = any(isinstance(layer, recurrent) for layer in DynamicCache(config=model.config).layers)
    arguments = inspect.signature(model.forward).parameters
    if "past_key_values" not in arguments and not (copied and "cache_params" in arguments):
        raise UserError(
            f"{directory}: {type(model).__name__} has neither a KV cache nor recurrent states that draftlab can save "
            "and restore, so rejected draft tokens cannot be dropped; use another model"
        )


def shape_of(config: dict[str, object], tensors: Mapping[str, tuple[int, ...]]) -> Shape:
    """Return the shape of a model from the content of its config.json and the size of each tensor by name.

    Raises:
        OtherArchitecture: config.json lacks a size that every LLaMA-like model has.
    """

    def number(key: str, default: int | None = None) -> int:
        value = config.get(key, default)
        value = default if value is None else value
        if not isinstance(value, int):
            raise OtherArchitecture(
                f"config.json of a {config.get('model_type')} model has no {key}, so the model is not LLaMA-like"
            )
        return value

    hidden = number("hidden_size")
    heads = number("num_attention_heads")
    with reading(f"config.json of a {config.get('model_type')} model"):
        shape = Shape(
            layers=number("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=number("num_key_value_heads", heads),
            head_dim=number("head_dim", hidden // max(1, heads)),
            ffn=number("intermediate_size"),
            vocab=number("vocab_size"),
            tied=bool(config.get("tie_word_embeddings", "lm_head.weight" not in tensors)),
        )
    return shape.model_copy(update=dict.fromkeys(block_options(tensors, shape.sizes), True))


def _fitting_shape(directory: Path, config: dict[str, object], sizes: dict[str, tuple[int, ...]]) -> Shape:
    """Check the tensors of a checkpoint, and return its shape. sizes: Size of each tensor, by name.

    Raises:
        UserError: a tensor is unknown, missing or of another size, or the tensors contradict config.json on biases.
    """
    shape = shape_of(config, sizes)
    expected = shape.axes()
    names = set(sizes) - ({"lm_head.weight"} if shape.tied else set())
    odd = sorted(names - set(expected))[:1] or sorted(set(expected) - names)[:1]
    if odd:
        _check_depth(directory, shape, names)
        if set(expected) - names == {"lm_head.weight"}:
            raise contradiction(directory, "tie_word_embeddings", False, True, "there is no lm_head.weight")
        kind = "an unknown" if odd[0] in names else "no"
        raise OtherArchitecture(
            f"{directory} ({config.get('model_type')}) is not LLaMA-like, because it has {kind} tensor {odd[0]!r}"
        )
    for name, axes in expected.items():
        if sizes[name] != shape.dims(axes):
            raise _wrong_size(directory, shape, sizes, name)
    for key, has in (("attention_bias", shape.qkv_bias), ("mlp_bias", shape.mlp_bias)):
        # a Qwen2 has biases whatever attention_bias is
        if config.get(key) is (not has) and (not has or config["model_type"] == "llama"):
            raise contradiction(directory, key, not has, has, f"there are {'' if has else 'no '}biases")
    # only these lists are shown to transformers here, because its import takes seconds
    if any(
        isinstance(value, list) and len(value) != shape.layers
        for name, value in config.items()
        if name != "architectures" and not name.endswith("_token_id")
    ):
        _check_lists(directory, config)
    return shape


def _check_lists(directory: Path, config: Mapping[str, object]) -> None:
    """Raise UserError if transformers refuses a list with a value per layer."""
    with reading(directory / CONFIG):
        per_layer_lists(config)


def contradiction(directory: Path, field: str, has: object, needed: object, because: str) -> UserError:
    """Return the error that a field of config.json contradicts the weights. because: Fact about the weights."""
    return UserError(
        f"{directory}: config.json has {field} {json.dumps(has)}, but the weights need {json.dumps(needed)}, because "
        f"{because}; set {field} to {json.dumps(needed)}, or download the checkpoint again"
    )


def _check_depth(directory: Path, shape: Shape, names: AbstractSet[str]) -> None:
    """Raise UserError if tensors of more or fewer layers are all that config.json and the weights differ in."""
    stored = len({layer_of(name) for name in names} - {None})
    if stored and set(shape.model_copy(update={"layers": stored}).axes()) == names:
        raise contradiction(directory, "num_hidden_layers", shape.layers, stored, f"there are {stored} layers")


def _wrong_size(directory: Path, shape: Shape, sizes: Mapping[str, tuple[int, ...]], name: str) -> UserError:
    """Return the error that a tensor has another size than config.json gives.

    If all tensors have the same other size on an axis, config.json is wrong, and the error names the field and both
    values. sizes: Size of each tensor by name.
    """
    expected = shape.dims(shape.axes()[name])
    size = sizes[name]
    said = f"{name} has the size {size}"
    stored: dict[Axis, set[int]] = defaultdict(set)
    for other, axes in shape.axes().items():
        for axis, length in zip(axes, sizes[other], strict=False):
            stored[axis].add(length)
    by_axis: dict[Axis, int] = {"q": shape.heads, "kv": shape.kv_heads}
    needed_dim = max(stored["q"]) // shape.heads
    for axis, has in zip(shape.axes()[name], expected, strict=True):
        if len(stored[axis]) > 1 or has in stored[axis]:
            continue
        (needed,) = stored[axis]
        if axis in FIELDS:
            return contradiction(directory, FIELDS[axis], has, needed, said)
        if all(stored[other] == {heads * needed_dim} for other, heads in by_axis.items()):
            return contradiction(directory, "head_dim", shape.head_dim, needed_dim, said)
        if needed % shape.head_dim == 0:
            heads = needed // shape.head_dim
            return contradiction(directory, HEADS[axis], by_axis[axis], heads, said)
    return UserError(
        f"{directory}: the tensor {said}, but config.json requires {expected}; download or export the checkpoint again"
    )


def config_for(shape: Shape, base: dict[str, object], kept_layers: Sequence[int] | None = None) -> dict[str, object]:
    """Return the config `base` with the sizes of a shape, as transformers would have it for the layers that are kept.

    Lists with a value per layer, lists that transformers derives from other fields included, are reduced to these
    layers. max_window_layers counts the kept layers among the first layers. The factors of LongRoPE follow head_dim.

    kept_layers: Ascending indices of the layers of `base` that the new model keeps. Default: the first layers, as many
    as the shape has.
    """
    layers = list(range(shape.layers) if kept_layers is None else kept_layers)
    config = {key: value for key, value in base.items() if key not in STALE}
    for name, values in per_layer_lists(base).items():
        config[name] = [values[i] for i in layers]
    full_below = base.get("max_window_layers")  # layers from this index on have a sliding window
    if isinstance(full_below, int):
        config["max_window_layers"] = sum(i < full_below for i in layers)
    for name in ROPE_FIELDS:
        rope = base.get(name)
        head_dim = base.get("head_dim") or _head_dim(base)
        if isinstance(rope, dict) and isinstance(head_dim, int):
            config[name] = {
                key: _resized(value, len(value) * shape.head_dim // head_dim)
                if isinstance(value, list) and "factor" in key
                else value
                for key, value in rope.items()
            }
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


def per_layer_lists(config: Mapping[str, object]) -> dict[str, list[Any]]:
    """Return the lists of a config that have a value per layer, by name, as transformers reads them.

    A list has a value per layer if it is as long as the model is deep, and one of these holds: transformers' default
    for the field grows with the number of layers; transformers refuses the list for another number of layers; or
    transformers does not know the field. The ids of tokens, for example, are in a list that may have this length by
    chance.

    Raises:
        UserError: transformers cannot read the config, or a list with a value per layer has another length.
    """
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int) or config.get("model_type") is None:
        return {}
    plain = {name: value for name, value in config.items() if not isinstance(value, list)}
    deeper = plain | {"num_hidden_layers": layers + 1}
    default = read_by_transformers(deeper).to_dict()
    known = default.keys() | _generation_fields()
    derived = {name for name, value in default.items() if isinstance(value, list) and len(value) > layers}
    for name in derived:
        value = config.get(name)
        if isinstance(value, list) and len(value) != layers:
            raise UserError(
                f"config.json has num_hidden_layers {layers}, but {name} has {len(value)} values; "
                f"{name} needs a value per layer"
            )
    lists = read_by_transformers(config).to_dict() | {
        name: value for name, value in config.items() if isinstance(value, list)
    }
    return {
        name: value
        for name, value in lists.items()
        if isinstance(value, list)
        and len(value) == layers
        and (name in derived or name not in known or _is_refused(deeper | {name: value}))
    }


def read_by_transformers(config: Mapping[str, object]) -> Any:
    """Return a config of a model_type that transformers knows as an object of transformers.

    Raises:
        UserError: transformers cannot read the config.
    """
    fields = copy.deepcopy(dict(config))  # transformers writes into the objects that it is given
    with reading("transformers cannot build this model"):
        return AutoConfig.for_model(str(fields.pop("model_type")), **fields)


def _is_refused(config: Mapping[str, object]) -> bool:
    try:
        read_by_transformers(config)
    except UserError:
        return True
    return False


@functools.cache
def _generation_fields() -> frozenset[str]:
    """Return the settings of generation, which old checkpoints have in config.json."""
    return frozenset(GenerationConfig().to_dict())


def _head_dim(config: Mapping[str, object]) -> int | None:
    hidden = config.get("hidden_size")
    heads = config.get("num_attention_heads")
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) else None


def _resized(values: list[Any], size: int) -> list[Any]:
    return list(itertools.islice(itertools.cycle(values), size))


def load_model(
    directory: Path, dtype: torch.dtype, device: torch.device = CPU, device_map: str | None = None
) -> PreTrainedModel:
    """Load a checkpoint with transformers, and check that no weight is missing or unused.

    device_map: A device_map of accelerate, such as "auto", or the name of a .json file with a device_map. It spreads
    the model over devices, memory and disk, and `device` is ignored. Without a device_map, a quantised model is loaded
    on `device`, or on the current GPU if `device` is a CPU.

    Raises:
        UserError: transformers cannot build the model, a weight is missing or unused, or a value is not finite.
    """
    config = read_config(directory)
    weights = Weights(directory)  # checks all files
    places = device_map
    if device_map is not None and device_map.endswith(".json"):
        places = read_object(Path(device_map))
    if is_quantised(config):
        check_quantised_runs(directory, config)
        places = places or {"": device if device.type == "cuda" else torch.cuda.current_device()}
    else:
        check_unquantised(directory, config)
        _check_floats(directory, read_headers(directory))
    model: Any = load_any_files(directory, dtype, places, None if places else weights)
    if (ids := read_head_ids(directory, vocab_size(directory))) is not None:
        trim_model(model, ids)
    return model if places else model.to(device)


def load_any_files(
    directory: Path, dtype: torch.dtype, places: Mapping[str, Any] | str | None = None, weights: "Weights | None" = None
) -> PreTrainedModel:
    """Load a model from `weights` or, if `weights` is None, from the directory's safetensors or .bin files.

    places: device_map of accelerate. It is ignored if `weights` is not None.

    Raises:
        UserError: the errors of load_model.
    """
    logging.disable_progress_bar()
    with reading(f"{directory} cannot be loaded"):
        loaded: Any = (
            from_slices(directory, weights, dtype)
            if weights is not None
            else AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=dtype,
                output_loading_info=True,
                weights_only=True,
                trust_remote_code=trusts_remote_code(),
                device_map=places,
            )
        )
    model, info = loaded
    for kind in ("missing", "unexpected", "mismatched"):
        names = sorted(key for key in map(str, info[f"{kind}_keys"]) if not BUFFERS.search(key))
        if names:
            raise UserError(
                f"the weights of {directory} do not fit the config.json beside them: {kind} tensor {names[0]}; "
                "download the checkpoint again"
            )
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:  # meta parameters are offloaded to disk
            check_finite(parameter.detach(), name, directory)
    return model


def stored_dtype(directory: Path) -> torch.dtype:
    """Return the dtype in which most weights are stored.

    For quantised weights return the dtype in config.json, or bfloat16 if config.json has none.
    """
    config = read_config(directory)
    if is_quantised(config):
        return DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.bfloat16)
    return Weights(directory).dtype


@functools.cache
def compute_dtype(directory: Path, device: torch.device) -> torch.dtype:
    """Return the default dtype in which a checkpoint is computed: the stored dtype if is_fast() is true, else float32.

    If the result is not the stored dtype, a note says why.
    """
    stored = stored_dtype(directory)
    if is_fast(stored, device):
        return stored
    where = "CPUs" if stored == torch.float16 else "CPUs without AVX-512"
    name = hub.checkpoint_name(directory)
    note(
        f"{name} is stored in {dtype_name(stored)}, in which large products are slow on {where}, so it runs in float32"
    )
    return torch.float32


def new_model(config: dict[str, object], seed: int) -> PreTrainedModel:
    """Return a randomly initialised fp32 model."""
    torch.manual_seed(seed)
    return from_config(config, torch.float32)


def meta_model(config: dict[str, object], dtype: torch.dtype) -> PreTrainedModel:
    """Return a model whose parameters are on the meta device and take no memory. Its buffers (rotary tables) are real.

    Raises:
        UserError: transformers cannot build the model.
    """
    with init_empty_weights(include_buffers=False):
        return from_config(config, dtype).eval()


def layer_of(name: str) -> int | None:
    """Return the index of the layer of the tensor `name`, or None for the embedding, the last norm and the head."""
    parts = name.split(".")
    return int(parts[2]) if name.startswith("model.layers.") else None


def auto_config(directory: Path) -> Any:
    """Return a checkpoint's config as an object of transformers.

    Raises:
        ValueError, OSError: there is no config, or it needs the checkpoint's own code and --trust-remote-code is off.
    """
    return AutoConfig.from_pretrained(directory, trust_remote_code=trusts_remote_code())


def from_config(config: dict[str, object], dtype: torch.dtype) -> PreTrainedModel:
    """Return a randomly initialised model. Raises UserError: transformers cannot build a model from the config."""
    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise UserError(
            f"transformers lacks the model_type {one_line(model_type, 80)!r}, and draftlab cannot cut models that run "
            "code from their checkpoint; use another --source"
        )
    fields = {k: v for k, v in config.items() if k != "model_type"}
    with reading("transformers cannot build this model"):
        built = AutoConfig.for_model(model_type, **fields)
        return AutoModelForCausalLM.from_config(built, dtype=dtype)


def from_slices(directory: Path, weights: "Weights", dtype: torch.dtype) -> Any:
    """Load a model from safetensors slices; return the model and the loading info of from_pretrained.

    Files are read into memory, not mapped.
    """
    config: Any = auto_config(directory)
    # AutoModelForCausalLM.from_pretrained chooses the class in this way
    model_class: Any = _get_model_class(config, AutoModelForCausalLM._model_mapping)
    model, info = model_class.from_pretrained(
        None, config=config, state_dict=weights.slices(), dtype=dtype, output_loading_info=True
    )
    model.name_or_path = model.config.name_or_path = str(directory)
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model, info


class Weights(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name. A tensor is read, and converted to a dtype and device, when it is accessed.

    To save memory, files are not memory-mapped, and large tensors are read and converted in pieces.

    Raises:
        UserError: a file is missing, truncated or not safetensors; a tensor is missing; on access, a
            value is not finite.
    """

    def __init__(self, directory: Path, dtype: torch.dtype | None = None, device: torch.device | None = None) -> None:
        """Read the headers of the files. By default, tensors have the dtype in which they are stored, on the CPU."""
        self.directory = directory
        self._dtype = dtype
        self._device = device
        self._headers = read_headers(directory)
        self._open_file = functools.cache(functools.partial(safe_open, framework="pt", backend="pread"))

    def __getitem__(self, name: str) -> Tensor:
        rows = self._slice(name)
        stored = STORED.get(self._headers[name].stored)
        if stored is None or not self.shape(name):
            return rows[...].to(self._device)
        tensor = torch.empty(self.shape(name), dtype=self._dtype or stored, device=self._device)
        step = max(1, PIECE_BYTES * len(tensor) // max(1, stored.itemsize * tensor.numel()))
        for at in range(0, len(tensor), step):
            piece = rows[at : min(at + step, len(tensor))]
            check_finite(piece, name, self.directory)
            tensor[at : at + step] = piece
        return tensor

    def slices(self) -> dict[str, Any]:
        """Return a state dict of safetensors slices. transformers reads each slice when it needs the tensor."""
        return {name: self._slice(name) for name in self}

    def _slice(self, name: str) -> Any:
        header = self._headers[name]
        return self._open_file(header.file).get_slice(header.name)

    @property
    def parameters(self) -> int:
        """Return the number of values in all tensors."""
        return sum(header.values for header in self._headers.values())

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype in which most values are stored.

        Raises:
            Quantised: most values are stored in a dtype that is not in STORED.
        """
        values: Counter[str] = Counter()
        for header in self._headers.values():
            values[header.stored] += header.values
        most = values.most_common(1)[0][0]
        if most not in STORED:
            raise quantised(self.directory, f"to {most}")
        return STORED[most]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._headers[name].shape

    def __iter__(self) -> Iterator[str]:
        return iter(self._headers)

    def __len__(self) -> int:
        return len(self._headers)


def check_weight(tensor: Tensor, name: str, directory: Path) -> None:
    """Raise UserError if a tensor has no floating-point dtype, or has NaN or infinite values."""
    if tensor.dtype not in STORED.values():
        raise UserError(
            f"{directory}: {name} is stored as {dtype_name(tensor.dtype)}, but weights need float16, bfloat16, float32 "
            "or float64; use another checkpoint"
        )
    check_finite(tensor, name, directory)


def check_finite(tensor: Tensor, name: str, directory: Path) -> None:
    """Raise UserError if a tensor of a floating-point dtype has NaN or infinite values."""
    if not is_finite(tensor):
        raise UserError(f"{directory}: {name} has NaN or infinite values; download or train the checkpoint again")


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has no NaN or infinite value. Tensors of other dtypes than those of weights are finite.

    aminmax returns NaN if a value is NaN. It needs no memory, and a thirtieth of the time of isfinite.
    """
    if tensor.dtype not in STORED.values() or not tensor.numel():
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def check_quantised_runs(directory: Path, config: dict[str, object]) -> None:
    """Raise UserError if this machine has no GPU, or transformers lacks a library that the quantised weights need."""
    if not torch.cuda.is_available():
        raise Quantised(
            f"{directory} is quantised ({quantization_method(config)}) and needs a GPU, but this machine has no GPU; "
            "run the model on a server (docs/servers.md), or use the original checkpoint"
        )
    with reading(f"{directory} is quantised ({quantization_method(config)}) and cannot be loaded"):
        quantizer: Any = AutoHfQuantizer.from_config(cast(Any, config["quantization_config"]), pre_quantized=True)
        quantizer.validate_environment(device_map={"": "cuda"})
