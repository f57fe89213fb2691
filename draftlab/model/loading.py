"""Models built by transformers: of configs, of tensors that are read and not mapped, and of files."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from draftlab.errors import UserError, one_line
from draftlab.model.weights import Weights
from draftlab.trust import trusts_remote_code

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def auto_config(directory: Path) -> Any:
    """Return transformers' config of a checkpoint. Raises ValueError, OSError: none, or one that needs its own code."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(directory, trust_remote_code=trusts_remote_code())


def from_config(config: dict[str, object], dtype: torch.dtype) -> "PreTrainedModel":
    """Return a randomly initialised model. Raises UserError: transformers has no such architecture."""
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    model_type = str(config["model_type"])
    if model_type not in CONFIG_MAPPING:
        raise UserError(f"transformers has no model_type {one_line(model_type, 80)!r}; its own code cannot be cut")
    fields = {k: v for k, v in config.items() if k != "model_type"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields), dtype=dtype)


def from_slices(directory: Path, weights: Weights, dtype: torch.dtype) -> Any:
    """Return a model in memory, and transformers' report of keys; files are read and not mapped."""
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.models.auto.auto_factory import _get_model_class
    from transformers.utils import logging

    logging.disable_progress_bar()
    config: Any = auto_config(directory)
    model_class: Any = _get_model_class(config, AutoModelForCausalLM._model_mapping)  # as from_pretrained itself does
    model, info = model_class.from_pretrained(
        None, config=config, state_dict=weights.slices(), dtype=dtype, output_loading_info=True
    )
    model.name_or_path = model.config.name_or_path = str(directory)
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model, info


def from_files(directory: Path, dtype: torch.dtype, device_map: Any) -> Any:
    """Return a model of any files that transformers reads, and its report of keys; of pickles the weights only."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, output_loading_info=True, weights_only=True, trust_remote_code=trusts_remote_code(),
        device_map=device_map,
    )  # fmt: skip
