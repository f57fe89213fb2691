"""PEFT adapters: read their settings, compare them with a base, and merge them into its weights.

adapter_config.json comes from strangers, and PEFT imports modules and reads files that it may name. So PEFT never reads
this file: it gets the settings of MERGED only.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftlab.errors import UserError, one_line
from draftlab.model import checkpoint
from draftlab.model.hf_files import ADAPTER
from draftlab.model.trimmed_head import output_head
from draftlab.reading import read_object, reading

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
PREFIX = "base_model.model."  # of the names of tensors in an adapter
Names = list[str] | str


class Settings(BaseModel):
    """The settings of a LoRA adapter that change what it computes. The names are those of peft.LoraConfig."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    r: Annotated[int, Field(ge=1)] = 8
    lora_alpha: float = 8
    target_modules: Names | None = None
    exclude_modules: Names | None = None
    target_parameters: list[str] | None = None
    fan_in_fan_out: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    modules_to_save: list[str] | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: Names | None = None
    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] = {}
    alpha_pattern: dict[str, float] = {}
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    ensure_weight_tying: bool = False


MERGED = frozenset(Settings.model_fields)
# fields that only say where an adapter comes from, or how it was trained
IGNORED = (
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "peft_version",
    "revision",
)
# accepted values of fields that are neither in MERGED nor in IGNORED; empty values of any field are accepted
ACCEPTED: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM",),
    # other ways to begin change the base's weights, too
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
    "megatron_core": ("megatron.core",),  # has no effect without a megatron_config
    "qalora_group_size": (16,),  # has no effect without use_qalora
}


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of an adapter that differ from PEFT's defaults, as arguments of peft.LoraConfig.

    Raises:
        UserError: the adapter is no LoRA adapter, or a field has a value that cannot be merged into a base.
    """
    file = folder / ADAPTER
    content = read_object(file)
    if "peft_type" not in content:
        raise UserError(f"{file} has no peft_type; save the adapter with PEFT's save_pretrained")
    for name, value in content.items():
        if name in (*MERGED, *IGNORED) or _is_empty(value) or value in ACCEPTED.get(name, ()):
            continue
        if name == "auto_mapping" and _names_transformers(value):
            continue
        instead = f" (only {ACCEPTED[name][0]!r} is)" if name in ACCEPTED else ""
        raise UserError(
            f"{file}: {one_line(name, 60)} is {one_line(value, 60)!r}, which draftlab does not merge{instead}; merge "
            "the adapter with PEFT's merge_and_unload, and use the merged checkpoint"
        )
    with reading(file):
        given = {name: content[name] for name in MERGED & content.keys()}
        settings = Settings(**{name: value for name, value in given.items() if not _is_empty(value)})
    return settings.model_dump(exclude_defaults=True)


def base_name(folder: Path) -> str:
    """Return the name of the base in an adapter's config: a path, or a hub name with the revision, if it has one."""
    content = read_object(folder / ADAPTER)
    name = content.get("base_model_name_or_path")
    revision = content.get("revision")
    return f"{name}@{revision}" if revision and not Path(str(name)).exists() else str(name)


def check_fits(folder: Path, base: Path) -> None:
    """Check, without the base's weights, that an adapter can be merged into a base.

    Raises:
        UserError: the adapter is for another base, or it cannot be merged.
    """
    config = checkpoint.read_config(base)
    merge(checkpoint.meta_model(config, torch.float32), folder, base)


def merge(model: PreTrainedModel, folder: Path, base: Path) -> PreTrainedModel:
    """Merge an adapter into a model of transformers, and return the model.

    Where the merged embedding and LM head differ, the model is untied. If the adapter was saved with another number of
    tokens than the base has, the model is resized.

    base: Directory of the model, for errors.

    Raises:
        UserError: the adapter's tensors do not fit the model, or PEFT cannot merge them.
    """
    from peft import LoraConfig, PeftModel, set_peft_model_state_dict

    problem = f"the adapter {folder} does not fit its base {base}"
    settings = read_settings(folder)
    tensors = _read_tensors(folder)
    meta = next(model.parameters()).is_meta
    tied = model.config.get_text_config().tie_word_embeddings
    with reading(problem), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of tied embeddings, which are untied below
        _resize(model, tensors, problem)
        adapted: Any = PeftModel(model, LoraConfig(**settings), low_cpu_mem_usage=meta)
        _check_tensors(adapted, tensors, problem)
        if not meta:
            set_peft_model_state_dict(adapted, tensors)
        _separate(adapted)
        merged = adapted.merge_and_unload()
    _tie(merged, tied=tied and not meta)
    return merged


def _is_empty(value: object) -> bool:
    return value is None or value is False or value in ("", [], {})


def _names_transformers(mapping: object) -> bool:
    """Return whether auto_mapping names a class of transformers. PEFT writes it for adapters without a task_type."""
    library = mapping.get("parent_library") if isinstance(mapping, dict) else None
    return str(library).split(".")[0] == "transformers"


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of an adapter. Raises UserError: they are missing or damaged."""
    file = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if file is None:
        raise UserError(f"{folder} has {ADAPTER}, but no {WEIGHTS[0]}; download or save the adapter again")
    with reading(file):
        if file.suffix == ".safetensors":
            tensors = load_file(file)
        else:
            tensors = dict(torch.load(file, map_location="cpu", weights_only=True))
    for name, tensor in tensors.items():
        checkpoint.check_weight(tensor, name, folder)
    return tensors


def _resize(model: PreTrainedModel, tensors: Mapping[str, Tensor], problem: str) -> None:
    """Resize the vocabulary of a model to that of the embedding or LM head in an adapter, if it has one.

    Raises:
        UserError: the adapter has only one of the two, so rows of the other would be random.
    """
    ends = {"embedding": model.get_input_embeddings(), "LM head": model.get_output_embeddings()}
    names = {id(module): name for name, module in model.named_modules()}
    rows = {
        end: {
            len(tensor)
            for key, tensor in tensors.items()
            if key.startswith(f"{PREFIX}{names[id(module)]}.") and key.endswith(".weight") and ".lora_" not in key
        }
        for end, module in ends.items()
    }
    vocab = len(ends["embedding"].weight)
    new = set().union(*rows.values()) - {vocab}
    if not new:
        return
    tied = model.config.get_text_config().tie_word_embeddings
    lacking = [end for end in ends if not rows[end] and not (tied and end == "LM head")]
    if len(new) > 1 or lacking or any(vocab in each for each in rows.values()):
        sizes = ", ".join(f"{end}: {sorted(rows[end]) or 'none'}" for end in ends)
        raise UserError(
            f"{problem}: the base has {vocab} tokens, but the adapter has tensors with other numbers of rows "
            f"({sizes}); name another base with --base, or save the adapter with save_embedding_layers=True"
        )
    model.resize_token_embeddings(new.pop(), mean_resizing=False)


def _check_tensors(adapted: PreTrainedModel, tensors: Mapping[str, Tensor], problem: str) -> None:
    """Raise UserError unless an adapter's tensors have the names and sizes that a base requires."""
    from peft import get_peft_model_state_dict

    needed = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    known = needed | get_peft_model_state_dict(adapted, save_embedding_layers=True)
    for name in sorted(needed.keys() | tensors.keys()):
        size = tuple(tensors[name].shape) if name in tensors else None
        expected = tuple(known[name].shape) if name in known else None
        if size != expected:
            raise UserError(
                f"{problem}: {one_line(name, 200)} has the size {size} in the adapter, but {expected} in the base "
                "(None: no such tensor); name another base with --base"
            )


def _separate(adapted: PreTrainedModel) -> None:
    """Give the LM head weights of its own. PEFT would merge both changes into weights that are tied."""
    shared = {id(parameter) for parameter in adapted.get_input_embeddings().parameters()}
    for module in output_head(adapted).modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if name == "weight" and id(parameter) in shared:
                module.weight = nn.Parameter(parameter.detach().clone())


def _tie(model: PreTrainedModel, tied: bool) -> None:
    """Tie the LM head to the embedding if `tied` is true and their weights are equal. Otherwise untie them."""
    head = output_head(model)
    weight = model.get_input_embeddings().get_parameter("weight")
    if tied := tied and torch.equal(head.get_parameter("weight"), weight):
        head.weight = weight
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.tie_word_embeddings = tied
