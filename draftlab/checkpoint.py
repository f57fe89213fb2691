"""Hugging Face directories: config <-> Shape, lazy tensors, atomic writes."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftlab.errors import UserError, did_you_mean
from draftlab.shape import Shape

if TYPE_CHECKING:  # transformers takes seconds to import, and only two functions here need it
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
EMBEDDED = Path(__file__).parent / "models"
CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHARD_BYTES = 1_000_000_000  # what is held in memory while a checkpoint is written piece by piece


def locate(name: str | Path) -> Path:
    """The directory of a checkpoint: an embedded name (``tiny``), a directory, or a hub id that can be had.

    Raises:
        UserError: none of these; says what was tried.
    """
    path = Path(name)
    embedded = sorted(p.name for p in EMBEDDED.iterdir() if p.is_dir())
    if str(name) in embedded:
        return EMBEDDED / str(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"{path} is not a checkpoint: it has no config.json")
        return path
    if path.exists() or str(name).count("/") != 1 or path.is_absolute():
        raise UserError(f"no checkpoint at {name}{did_you_mean(str(name), [*embedded, *_siblings(path)])}")
    return _from_hub(str(name))


def read_config(directory: Path) -> dict[str, object]:
    try:
        return json.loads((directory / "config.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"{directory}/config.json cannot be read: {error}") from None


class Weights(Mapping[str, Tensor]):
    """The tensors of a checkpoint's safetensors files, read one at a time when asked for, and copied.

    A file is mapped only while it is read: a mapping that stays counts as memory used, page by page.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            found = sorted(p.name for p in directory.glob("*.bin"))
            hint = f" (found {found[0]}: convert it first, pickles are not read)" if found else ""
            raise UserError(f"{directory} holds no *.safetensors{hint}")
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            try:
                with safe_open(file, framework="pt") as handle:
                    shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise UserError(f"{file} is not a readable safetensors file: {error}") from None
            self._files |= dict.fromkeys(shapes, file)
            self._shapes |= shapes

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as handle:
            return handle.get_tensor(name).clone()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def read_shape(directory: Path) -> Shape:
    """Shape of a checkpoint, from its config and the names and sizes of its tensors; no tensor is read.

    Families are recognised by structure: biases and q/k norms are seen in the tensors' names.

    Raises:
        UserError: not LLaMA-like (says which tensor), or config and tensors disagree.
    """
    weights, config = Weights(directory), read_config(directory)
    shape = shape_of(config, frozenset(weights))
    expected = shape.axes()
    held = set(weights) - ({"lm_head.weight"} if shape.tied else set())
    odd = sorted(held - set(expected))[:1] or sorted(set(expected) - held)[:1]
    if odd:
        kind = "an unknown" if odd[0] in held else "no"
        raise UserError(f"{directory} ({config.get('model_type')}) is not LLaMA-like: it has {kind} tensor {odd[0]!r}")
    for name, axes in expected.items():
        if weights.shape(name) != shape.dims(axes):
            found, want = weights.shape(name), shape.dims(axes)
            raise UserError(f"{directory}: {name} is {found}, its config.json says {want}")
    return shape


def shape_of(config: dict[str, object], names: frozenset[str]) -> Shape:
    """Shape from a config's numbers and the names of the tensors that exist."""

    def number(key: str, default: int | None = None) -> int:
        value = config.get(key, default)
        value = default if value is None else value
        if not isinstance(value, int):
            raise UserError(f"config.json of a {config.get('model_type')} model has no {key}: not LLaMA-like")
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
        tied=bool(config.get("tie_word_embeddings", False)),
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


def write_checkpoint(
    directory: Path, config: dict[str, object], weights: Iterable[tuple[str, Tensor]], tokenizer_from: Path | None
) -> int:
    """config.json, safetensors shards and the tokenizer's files, copied verbatim; the weights' bytes.

    weights may be made one at a time: no more than a shard of them is held.
    """
    dtypes, size = _save_sharded(directory, weights)
    (directory / "config.json").write_text(json.dumps(config | {"dtype": min(dtypes)}, indent=2, sort_keys=True))
    if tokenizer_from is not None:
        for name in TOKENIZER_FILES:
            if (tokenizer_from / name).is_file():
                shutil.copyfile(tokenizer_from / name, directory / name)
    return size


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
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, device_map=device_map, output_loading_info=True
        )
    except (ValueError, RuntimeError, OSError) as error:
        raise UserError(f"{directory} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
    model, info = loaded
    wrong = {kind: sorted(info[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[kind]}
    if wrong:
        raise UserError(f"{directory} does not fit its config.json: {wrong}")
    return model if device_map else model.to(device)


def vocab_size(directory: Path) -> int:
    """How many logits a checkpoint has, padding included."""
    return int(str(read_config(directory)["vocab_size"]))


def stored_dtype(directory: Path) -> torch.dtype:
    """Of the weights themselves: configs name it in two ways or not at all."""
    return Weights(directory)["model.norm.weight"].dtype


def new_model(config: dict[str, object], seed: int) -> "PreTrainedModel":
    """A randomly initialised fp32 model of that config."""
    torch.manual_seed(seed)
    return _from_config(config, torch.float32)


def skeleton(config: dict[str, object], dtype: torch.dtype) -> "PreTrainedModel":
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

    if not any((directory / name).is_file() for name in VOCABULARY_FILES):
        raise UserError(f"{directory} holds no tokenizer: no {', '.join(VOCABULARY_FILES)}")
    try:
        return AutoTokenizer.from_pretrained(directory)
    except (ValueError, OSError, KeyError) as error:
        raise UserError(f"{directory} holds no usable tokenizer: {' '.join(str(error).split())[:200]}") from error


def special_ids(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int | None]:
    """bos, eos and pad; None for what the tokenizer does not have."""
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    return {name: value if isinstance(value, int) else None for name, value in ids.items()}


def model_weights(model: "PreTrainedModel", dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Named parameters as dtype on the CPU; a tied head is left out, as in any Hugging Face checkpoint."""
    return ((name, p.detach().to("cpu", dtype).contiguous()) for name, p in model.named_parameters())


@contextlib.contextmanager
def new_directory(out: Path, *, force: bool) -> Iterator[Path]:
    """A temporary sibling that becomes out when the block ends well, and vanishes when it does not.

    Raises:
        UserError: out exists with something in it and force is off, or it cannot be written.
    """
    check_free(out, force=force)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        work.chmod(0o755)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from None
    try:
        yield work
        _replace(work, out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise UserError(f"cannot write {out}: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check_free(out: Path, *, force: bool) -> None:
    """Refuse to overwrite what is finished; said before the expensive part.

    Raises:
        UserError: out is a file, or a non-empty directory and force is off.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} exists and is not a directory")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise UserError(f"{out} exists and is not empty; choose another --out, or --force to replace it")
    parent = next(p for p in out.absolute().parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"cannot write {out}: {parent} is not a writable directory")


def layer_of(name: str) -> int | None:
    """The layer a tensor belongs to, None for embedding, final norm and head."""
    parts = name.split(".")
    return int(parts[2]) if name.startswith("model.layers.") else None


def _from_config(config: dict[str, object], dtype: torch.dtype) -> "PreTrainedModel":
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {k: v for k, v in config.items() if k != "model_type"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(str(config["model_type"]), **fields), dtype=dtype)


def _siblings(path: Path) -> list[str]:
    parent = path.parent
    return [str(p) for p in parent.iterdir() if p.is_dir()] if parent.is_dir() else []


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "merges.txt"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # offline, unknown, gated, no disk: the hub client has a class for each
        reason = " ".join(str(error).split())[:160]
        raise UserError(
            f"{name} is no directory here and could not be fetched from the hub ({type(error).__name__}: {reason}); "
            "for the embedded models run: draftlab init --preset tiny"
        ) from None


def _save_sharded(directory: Path, weights: Iterable[tuple[str, Tensor]]) -> tuple[set[str], int]:
    """model.safetensors, or numbered shards of at most SHARD_BYTES and their index; dtypes and bytes written."""
    index: dict[str, int] = {}
    shard: dict[str, Tensor] = {}
    dtypes, total, number = set(), 0, 1

    def write() -> None:
        save_file(shard, directory / f"shard-{number}.safetensors", metadata={"format": "pt"})
        shard.clear()

    for name, tensor in weights:
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > SHARD_BYTES:
            write()
            number += 1
        shard[name] = tensor.contiguous()
        index[name] = number
        total += tensor.nbytes
        dtypes.add(dtype_name(tensor.dtype))
    write()
    if number == 1:
        (directory / "shard-1.safetensors").rename(directory / "model.safetensors")
        return dtypes, total
    names = [f"model-{i:05d}-of-{number:05d}.safetensors" for i in range(1, number + 1)]
    for i, name in enumerate(names, 1):
        (directory / f"shard-{i}.safetensors").rename(directory / name)
    files = {name: names[i - 1] for name, i in index.items()}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=2)
    (directory / "model.safetensors.index.json").write_text(text)
    return dtypes, total


def _replace(work: Path, out: Path) -> None:
    """Move work to out; a directory that was there goes only after the new one has its name."""
    if not out.exists():
        work.rename(out)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old.", dir=out.parent))
    out.rename(old / "was")
    work.rename(out)
    shutil.rmtree(old, ignore_errors=True)
