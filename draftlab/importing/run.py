"""Conversion of GGUF files, .bin files and PEFT adapters to Hugging Face directories."""

import json
import pickle
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftlab.config.make import ImportConfig
from draftlab.console import note
from draftlab.errors import UserError
from draftlab.importing import gguf
from draftlab.model import checkpoint, hub, saving
from draftlab.model.layouts import BIN_FILES, NOUNS, Layout
from draftlab.model.weights import check_finite
from draftlab.output import Output
from draftlab.reading import read_object, reading

SHARD = "2GB"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSource:
    """A checkpoint in another layout, and the dtype to write it in.

    base: the directory that an adapter is merged into. header, config: a GGUF file's header and its transformers
    config.
    """

    layout: Layout
    dtype: torch.dtype
    weights: int
    stored: str
    base: Path | None = None
    header: gguf.Header | None = None
    config: Any = None

    def facts(self) -> dict[str, object]:
        size = self.weights * self.dtype.itemsize / 1e9
        mapped = self.layout.path.stat().st_size / 1e9 if self.header else 0  # GGUF is read through the page cache
        return {
            "source": f"{NOUNS[self.layout.kind]}: {self.stored}",
            "base": str(self.base) if self.base else None,
            "parameters": f"{self.weights:,}",
            "dtype": checkpoint.dtype_name(self.dtype),
            "disk": f"{size:.3g} GB",
            "memory": f"about {1.1 * size + mapped + 0.5:.2g} GB",
        }


def inspect(config: ImportConfig, layout: Layout) -> ImportSource:
    """Read what is said about the weights of what was named, see hub.import_source; no weights are read.

    Raises:
        UserError: it cannot be imported, and why.
    """
    note(f"inspecting {config.source}")
    dtype = None if config.dtype == "auto" else checkpoint.DTYPES[config.dtype]
    if config.base is not None and layout.kind != "adapter":
        raise UserError(f"--base {config.base}: {layout.path} is {NOUNS[layout.kind]}, which has no base")
    if layout.kind == "gguf":
        header = gguf.read_header(layout.path)
        return ImportSource(
            layout=layout, dtype=dtype or header.dtype(), weights=header.weights(), stored=gguf.describe(header),
            header=header, config=gguf.load_config(header),
        )  # fmt: skip
    if layout.kind == "bin":
        stored, weights = _bin_weights(layout.path)
        return ImportSource(layout=layout, dtype=dtype or stored, weights=weights, stored=checkpoint.dtype_name(stored))
    return _adapter_source(layout, dtype, config.base)


def convert(source: ImportSource, output: Output) -> None:
    """Write a Hugging Face directory. Raises UserError: parts of the source do not fit each other."""
    with output.directory() as work:
        note(f"reading {source.layout.path}: {source.stored}")
        directory = source.base or source.layout.path
        config = None if source.header is not None else checkpoint.read_config(directory)
        model = load(source)
        if source.header is not None:
            gguf.load_tokenizer(source.header, model.config.max_position_embeddings).save_pretrained(work)
        else:
            for folder in dict.fromkeys((directory, source.layout.path)):  # an adapter's own tokenizer comes last
                saving.copy_tokenizer(folder, work)
        note(f"writing {checkpoint.dtype_name(source.dtype)}")
        _write(model, config, work)
        inputs = [source.layout.path, *([source.base] if source.base else [])]
        output.record(work, inputs, stored=source.stored)


def load(source: ImportSource) -> Any:
    """Return the model. Raises UserError: parts of the source do not fit each other, or weights are no numbers."""
    if source.header is not None:
        model = gguf.load(source.header, source.config, source.dtype)
    elif source.base is not None:
        model = _merged(checkpoint.load_model(source.base, source.dtype), source)
    else:
        model = checkpoint.load_any_files(source.layout.path, source.dtype)
    for name, weight in model.state_dict().items():
        check_finite(weight, name, source.layout.path)
    return model


def _write(model: Any, config: dict[str, object] | None, work: Path) -> None:
    """Write the weights with transformers' names, config.json and generation_config.json.

    config: the source's own, written with the new dtype; None: the model's.
    """
    from transformers import GenerationConfig

    generation_file = work / "generation_config.json"
    generation = generation_file.read_text() if generation_file.is_file() else None
    model.generation_config = GenerationConfig.from_model_config(model.config)  # the copied one may fail its validation
    model.save_pretrained(work, max_shard_size=SHARD)
    if generation is not None:
        generation_file.write_text(generation)
    file = work / "config.json"
    fields = config or json.loads(file.read_text())
    fields = {name: value for name, value in fields.items() if name not in ("torch_dtype", "quantization_config")}
    file.write_text(json.dumps(fields | {"dtype": checkpoint.dtype_name(model.dtype)}, indent=2, sort_keys=True))


def _bin_weights(directory: Path) -> tuple[torch.dtype, int]:
    """Return the dtype of the first matrix and the number of weights, a tied head counted once."""
    files: dict[str, Path] = {}
    storages: dict[int, int] = {}
    dtypes: list[torch.dtype] = []
    for file in _bin_files(directory):
        tensors = _read_bin(file)
        duplicates = sorted(files.keys() & tensors.keys())
        if duplicates:
            raise UserError(f"{directory}: {duplicates[0]} is in {files[duplicates[0]].name} and in {file.name}")
        files |= dict.fromkeys(tensors, file)
        dtypes += [t.dtype for t in tensors.values() if t.ndim > 1 and t.is_floating_point()]
        storages |= {t.data_ptr(): t.numel() for t in tensors.values() if t.is_floating_point()}
    if not dtypes:
        raise UserError(f"{directory}: its .bin files have no weights")
    return dtypes[0], sum(storages.values())


def _bin_files(directory: Path) -> list[Path]:
    index = directory / BIN_FILES[0]
    if not index.is_file():
        return [directory / BIN_FILES[1]]
    files = [directory / name for name in sorted(set(hub.read_index(index).values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(f"{directory}: {missing[0]}, which {index.name} names, is missing")
    return files


def _read_bin(file: Path) -> dict[str, torch.Tensor]:
    try:
        with reading(f"{file} is not a readable .bin file"):
            tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except UserError as error:
        if not isinstance(error.__cause__, pickle.UnpicklingError):
            raise
        raise UserError(f"{file} is damaged or has more than weights; code in pickles is not run") from None
    if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise UserError(f"{file} is not a mapping from names to tensors")
    return tensors


def _adapter_source(layout: Layout, dtype: torch.dtype | None, base: str | None) -> ImportSource:
    from peft import PeftConfig

    read_object(layout.path / "adapter_config.json")
    with reading(f"{layout.path}/adapter_config.json"):
        config: Any = PeftConfig.from_pretrained(str(layout.path))
    if config.is_prompt_learning:
        raise UserError(f"{layout.path} is a {config.peft_type.value} adapter, a prompt, and cannot be merged")
    name = base or config.base_model_name_or_path
    if not name:
        raise UserError(f"{layout.path} names no base model; name it with --base")
    try:
        directory = hub.locate(name)
    except UserError as error:
        hint = "" if base else "; name the base model's directory with --base"
        raise UserError(f"the base of {layout.path}: {error}{hint}") from None
    stored = checkpoint.Weights(directory)
    return ImportSource(
        layout=layout,
        dtype=dtype or stored.dtype,
        weights=stored.parameters,
        stored=f"{config.peft_type.value} for {name}",
        base=directory,
    )


def _merged(model: Any, source: ImportSource) -> Any:
    """Return the model with the adapter merged into its weights; every tensor of the adapter is accounted for."""
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
    from peft.utils import load_peft_weights

    warnings.filterwarnings("ignore", module="peft")  # about a base of another name: all tensors are compared below
    problem = f"the adapter {source.layout.path} does not fit {source.base}"
    try:
        with reading(problem):
            adapted: Any = get_peft_model(model, PeftConfig.from_pretrained(str(source.layout.path)))
            stored = load_peft_weights(str(source.layout.path), device="cpu")
            expected = get_peft_model_state_dict(adapted, save_embedding_layers=False)
            if odd := sorted(stored.keys() ^ expected.keys()):
                only = "only the adapter" if odd[0] in stored else "only the base"
                raise UserError(f"{problem}: {only} has {odd[0]}")
            set_peft_model_state_dict(adapted, stored)
            return adapted.merge_and_unload()
    except UserError as error:
        if not isinstance(error.__cause__, pickle.UnpicklingError):
            raise
        raise UserError(
            f"{source.layout.path} is damaged or has more than weights; code in pickles is not run"
        ) from None
