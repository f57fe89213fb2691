"""Write checkpoints: config, safetensors shards, tokenizer files."""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import CONFIG_MAPPING

from draftlab.errors import UserError, one_line
from draftlab.model.checkpoint import is_finite, read_by_transformers
from draftlab.model.devices import dtype_name
from draftlab.model.hf_files import CONFIG, FULL, SLIDING, context_of
from draftlab.reading import read_json, read_object
from draftlab.runs.atomic import replacing
from draftlab.trust import check_own

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
# fields of rope_parameters that transformers 4 has beside rope_scaling, with their names there
ROPE_NAMES = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor"}
OLD_ROPE_NAMES = {"gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}}
# names in transformers 4 of the rotary base of layers with a sliding window
LOCAL_ROPE_NAMES = {
    "gemma3_text": "rope_local_base_freq",
    "gemma3n_text": "rope_local_base_freq",
    "olmo3": "rope_theta",
}
# models for which transformers 4 refuses a rope_scaling with other fields than type and LONGROPE
THREE_FIELDS = ("phi3", "phi4_multimodal")
LONGROPE = ("short_factor", "long_factor")
SHARD_BYTES = 1_000_000_000  # largest size of a shard, unless a caller has less memory


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise UserError if a tensor that is about to be written has NaN or infinite values."""
    if not is_finite(tensor):
        raise UserError(
            f"nothing is written, because {name} has NaN or infinite values in {dtype_name(tensor.dtype)}; train with "
            "a smaller --lr, or start from a checkpoint that is stored as bfloat16 or float32"
        )


def save_finite(file: Path, tensors: dict[str, Tensor], facts: dict[str, str] | None = None) -> None:
    """Write a safetensors file. facts: Its metadata.

    Raises:
        UserError: A tensor has NaN or infinite values.
    """
    for name, tensor in tensors.items():
        check_finite(name, tensor)
    save_file(tensors, file, metadata=facts)


def write_tensors(file: Path, tensors: dict[str, Tensor], facts: dict[str, str]) -> None:
    """Write a safetensors file with the metadata `facts` atomically. Raises UserError: the file cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as part:
            save_file(tensors, part, metadata=facts)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {file}: {one_line(error, 200)}") from error


def write_checkpoint(
    directory: Path,
    config: dict[str, object],
    weights: Iterable[tuple[str, Tensor]],
    tokenizer_from: Path | None,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write config.json, safetensors shards and a copy of the tokenizer. Return the size of the weights in bytes.

    Args:
        config: Content of config.json, see portable_config.
        weights: Names and tensors. They may come from a generator, because only one shard is in memory at a time.
        tokenizer_from: Directory whose tokenizer is copied. None: no tokenizer is written.
        shard_bytes: Largest size of a shard. Only one shard is in memory at a time. A larger tensor has its own shard.

    Raises:
        OSError: the disk is full or cannot be written.
        UserError: a weight has NaN or infinite values, or the errors of copy_tokenizer.
    """
    try:
        dtypes, size = _save_sharded(directory, weights, shard_bytes)
    except SafetensorError as error:  # a full disk
        raise OSError(str(error)) from error
    write_config(directory, config, min(dtypes))
    if tokenizer_from is not None:
        copy_tokenizer(tokenizer_from, directory)
    return size


def write_config(directory: Path, config: Mapping[str, object], dtype: str) -> None:
    """Write config.json. See portable_config."""
    text = json.dumps(portable_config(config, dtype), indent=2, sort_keys=True)
    (directory / CONFIG).write_text(text)


def portable_config(config: Mapping[str, object], dtype: str) -> dict[str, Any]:
    """Return a config with the fields of transformers 4 and 5, so that both, and all servers, read the same values.

    transformers 5 calls torch_dtype dtype, and has rope_theta and rope_scaling in rope_parameters. Both are written,
    with the values that the installed transformers reads. transformers 4.51 to 4.57 read the original context of
    LongRoPE beside rope_scaling, and 4.51 computes YaRN's factor from max_position_embeddings. Where this length was
    left at the original context, as in Qwen2.5's instructions, it becomes original context x factor. Parts such as
    text_config are treated alike. Rotary fields of a model_type that transformers does not know stay as they are.

    dtype: Name of the dtype of the weights.

    Raises:
        UserError: transformers cannot read the config.
    """
    both: dict[str, Any] = {
        name: portable_config(part, dtype) if isinstance(part, dict) and "model_type" in part else part
        for name, part in config.items()
    } | {"dtype": dtype, "torch_dtype": dtype}
    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        return both
    rope = read_by_transformers(config).to_dict().get("rope_parameters")
    if rope:
        both |= {"rope_parameters": rope}
        both.pop("rope_scaling", None)
        both |= _old_rope_fields(kind, both)
    return both


def _old_rope_fields(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary fields of transformers 4 for a config with the fields of transformers 5."""
    rope = config["rope_parameters"]
    fields: dict[str, Any] = {}
    by_layer_type = isinstance(rope.get(FULL), dict)
    if by_layer_type:
        if kind not in LOCAL_ROPE_NAMES:
            return fields  # transformers 4 has no such model
        fields[LOCAL_ROPE_NAMES[kind]] = rope[SLIDING]["rope_theta"]
        rope = rope[FULL]
    names = OLD_ROPE_NAMES.get(kind, ROPE_NAMES)
    fields |= {names[name]: rope[name] for name in names if name in rope}
    if rope["rope_type"] == "default":
        return fields
    scaling = {name: value for name, value in rope.items() if name not in ROPE_NAMES}
    if rope["rope_type"] == "longrope":
        fields["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    if rope["rope_type"] == "yarn":
        stated = config.get("max_position_embeddings", 0)
        fields["max_position_embeddings"] = max(stated, context_of(config))
    if kind in THREE_FIELDS:
        scaling = {"type": rope["rope_type"]} | {name: scaling[name] for name in LONGROPE}
    return fields | {"rope_scaling": scaling}


def tokenizer_files(directory: Path) -> list[str]:
    """Return the names of the tokenizer's files in a directory, generation_config.json and its code included.

    tokenizer_config.json names the code of a tokenizer that has its own. The code is not run.

    Raises:
        UserError: tokenizer_config.json is not a JSON object, or a file is a link that leads neither to its folder nor
            to the hub's blobs.
    """
    config = directory / "tokenizer_config.json"
    classes = read_object(config).get("auto_map", {}) if config.is_file() else {}
    own = classes.get("AutoTokenizer", []) if isinstance(classes, dict) else classes
    # as "module.Class", in older files a list of the slow and the fast class
    modules = {str(name).partition(".")[0] for name in (own if isinstance(own, list) else [own]) if name}
    code = sorted(f"{module}.py" for module in modules if module.isidentifier())
    names = [name for name in (*TOKENIZER_FILES, *code) if (directory / name).is_file()]
    for name in names:
        check_own(directory / name, directory)
    return names


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Copy the tokenizer's files and generation_config.json from one directory to another, unchanged.

    Raises:
        UserError: a .json file is not JSON, or tokenizer_files raises it.
    """
    for name in tokenizer_files(source):
        if name.endswith(".json"):
            read_json(source / name)
        shutil.copyfile(source / name, directory / name)


def _save_sharded(directory: Path, weights: Iterable[tuple[str, Tensor]], shard_bytes: int) -> tuple[set[str], int]:
    """Write model.safetensors or, above shard_bytes, shards and an index.

    Returns: The names of the tensors' dtypes, and the size of all tensors in bytes.
    """
    index: dict[str, int] = {}
    shard: dict[str, Tensor] = {}
    dtypes = set()
    total = 0
    number = 1

    def write() -> None:
        save_finite(directory / f"shard-{number}.safetensors", shard, {"format": "pt"})
        shard.clear()

    for name, tensor in weights:
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > shard_bytes:
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
