"""Import on disk: the layout is looked at first, then read whole and written as a Hugging Face directory."""

import json
import pickle
import shutil
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftlab import provenance
from draftlab.console import note
from draftlab.errors import UserError
from draftlab.importing import gguf
from draftlab.model import checkpoint, hub, saving
from draftlab.model.layouts import BIN_FILES, NOUNS, Layout, other_layout

SHARD = "2GB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is read from where, and the dtype that is written.

    base: of an adapter, the directory it is merged into.
    header, config: of a GGUF file, what it says of itself, and what transformers makes of that.
    """

    layout: Layout
    dtype: torch.dtype
    weights: int
    stored: str
    base: Path | None = None
    header: gguf.Header | None = None
    config: Any = None

    def inputs(self) -> list[Path]:
        return [self.layout.path, *([self.base] if self.base else [])]

    def facts(self) -> dict[str, object]:
        size = self.weights * self.dtype.itemsize / 1e9
        mapped = (
            self.layout.path.stat().st_size / 1e9 if self.header else 0
        )  # a GGUF file is read through the page cache
        return {
            "source": f"{NOUNS[self.layout.kind]}: {self.stored}",
            "base": str(self.base) if self.base else None,
            "parameters": f"{self.weights:,}",
            "dtype": checkpoint.dtype_name(self.dtype),
            "disk": f"{size:.3g} GB",
            "memory": f"about {1.1 * size + mapped + 0.5:.2g} GB",
        }


def plan(name: str, dtype: torch.dtype | None, base: str | None) -> Plan:
    """Look at what stands at a path or hub name; no weights are read.

    Raises:
        UserError: nothing that can be imported; says what is wrong with it.
    """
    source = hub.importable(name)
    layout = other_layout(source)
    if layout is None:
        raise UserError(f"{source} {_not_importable(source)}")
    if base is not None and layout.kind != "adapter":
        raise UserError(f"{source} is {NOUNS[layout.kind]} and has no base; leave out --base")
    if layout.kind == "gguf":
        header = gguf.read_header(layout.path)
        return Plan(
            layout=layout,
            dtype=dtype or header.dtype(),
            weights=header.weights(),
            stored=gguf.describe(header),
            header=header,
            config=gguf.load_config(header),
        )
    if layout.kind == "bin":
        stored, weights = _bin_weights(layout.path)
        return Plan(layout=layout, dtype=dtype or stored, weights=weights, stored=checkpoint.dtype_name(stored))
    return _adapter_plan(layout, dtype, base)


def run(plan: Plan, out: Path, arguments: dict[str, object], began: float, *, force: bool) -> None:
    """Write a Hugging Face directory, with the record of where it comes from.

    Raises:
        UserError: something in the source does not fit something else in it.
    """
    with checkpoint.new_directory(out, force=force) as work:
        _convert(plan, work)
        provenance.write_record(work, "import", arguments, plan.inputs(), began, stored=plan.stored)


def _convert(plan: Plan, work: Path) -> None:
    note(f"reading {plan.layout.path}: {plan.stored}")
    if plan.header is not None:
        model, config = gguf.load(plan.header, plan.config, plan.dtype), None
        gguf.load_tokenizer(plan.header, model.config.max_position_embeddings).save_pretrained(work)
    else:
        origin = plan.base or plan.layout.path
        config = checkpoint.read_config(origin)
        model = (checkpoint.load_model if plan.base else checkpoint.read_model)(origin, plan.dtype)
        if plan.base is not None:
            model = _merged(model, plan)
        for folder in dict.fromkeys((origin, plan.layout.path)):  # an adapter's own tokenizer comes last
            _copy_tokenizer(folder, work)
    note(f"writing {checkpoint.dtype_name(plan.dtype)}")
    _write(model, config, work)


def _write(model: Any, config: dict[str, object] | None, work: Path) -> None:
    """Write weights as the hub has this family's, config.json and generation_config.json.

    config: the source's own, kept but for the dtype; what transformers makes of the model, if there is none.
    """
    from transformers import GenerationConfig

    given = work / "generation_config.json"
    kept = given.read_text() if given.is_file() else None
    model.generation_config = GenerationConfig.from_model_config(model.config)  # a given one may fail its validation
    model.save_pretrained(work, max_shard_size=SHARD)
    if kept is not None:
        given.write_text(kept)
    file = work / "config.json"
    fields = config or json.loads(file.read_text())
    fields = {name: value for name, value in fields.items() if name not in ("torch_dtype", "quantization_config")}
    file.write_text(json.dumps(fields | {"dtype": checkpoint.dtype_name(model.dtype)}, indent=2, sort_keys=True))


def _copy_tokenizer(folder: Path, work: Path) -> None:
    for name in saving.TOKENIZER_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, work / name)


def _bin_weights(directory: Path) -> tuple[torch.dtype, int]:
    """The dtype that the first matrix is stored in, and how many weights there are, a tied head counted once."""
    seen: dict[str, Path] = {}
    storages: dict[int, int] = {}
    dtypes: list[torch.dtype] = []
    for file in _bin_files(directory):
        tensors = _read_bin(file)
        double = sorted(seen.keys() & tensors.keys())
        if double:
            raise UserError(f"{directory}: {double[0]} is in {seen[double[0]].name} and in {file.name}")
        seen |= dict.fromkeys(tensors, file)
        dtypes += [t.dtype for t in tensors.values() if t.ndim > 1 and t.is_floating_point()]
        storages |= {t.data_ptr(): t.numel() for t in tensors.values() if t.is_floating_point()}
    if not dtypes:
        raise UserError(f"{directory} holds no weights in its .bin files")
    return dtypes[0], sum(storages.values())


def _bin_files(directory: Path) -> list[Path]:
    index = directory / BIN_FILES[0]
    if not index.is_file():
        return [directory / BIN_FILES[1]]
    files = [directory / name for name in sorted(set(hub.read_index(index).values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(f"{directory}: {missing[0]} is missing, which {index.name} names")
    return files


def _read_bin(file: Path) -> dict[str, torch.Tensor]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0][:160]
        raise UserError(f"{file} holds more than weights, and code from a pickle is not run: {reason}") from None
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise UserError(f"{file} is not a readable .bin file: {' '.join(str(error).split())[:160]}") from None
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise UserError(f"{file} is not a mapping from names to tensors")
    return found


def _adapter_plan(layout: Layout, dtype: torch.dtype | None, base: str | None) -> Plan:
    from peft import PeftConfig

    try:
        config: Any = PeftConfig.from_pretrained(str(layout.path))
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise UserError(f"{layout.path}/adapter_config.json: {' '.join(str(error).split())[:200]}") from None
    if config.is_prompt_learning:
        raise UserError(f"{layout.path} is a {config.peft_type.value} adapter: a prompt, which no weights can take up")
    name = base or config.base_model_name_or_path
    if not name:
        raise UserError(f"{layout.path} names no base model; say it with --base")
    try:
        directory = hub.locate(name)
    except UserError as error:
        hint = "" if base else "; name the base model's directory with --base"
        raise UserError(f"the base of {layout.path}: {error}{hint}") from None
    stored = checkpoint.Weights(directory)
    return Plan(
        layout=layout,
        dtype=dtype or stored.dtype,
        weights=sum(torch.Size(stored.shape(name)).numel() for name in stored),
        stored=f"{config.peft_type.value} for {name}",
        base=directory,
    )


def _merged(model: Any, plan: Plan) -> Any:
    """model with the adapter's changes added to its weights, by peft; every tensor of the adapter accounted for."""
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
    from peft.utils import load_peft_weights

    warnings.filterwarnings("ignore", module="peft")  # of a base by another name: every tensor is compared below
    where = f"the adapter {plan.layout.path} does not fit {plan.base}"
    try:
        adapted: Any = get_peft_model(model, PeftConfig.from_pretrained(str(plan.layout.path)))
        given = load_peft_weights(str(plan.layout.path), device="cpu")
        wanted = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        odd = sorted(given.keys() ^ wanted.keys())
        if odd:
            raise UserError(f"{where}: {'only the adapter' if odd[0] in given else 'only the base'} has {odd[0]}")
        set_peft_model_state_dict(adapted, given)
        return adapted.merge_and_unload()
    except (ValueError, RuntimeError, KeyError, NotImplementedError, OSError) as error:
        raise UserError(f"{where}: {' '.join(str(error).split())[:300]}") from None
    except pickle.UnpicklingError:
        raise UserError(f"{plan.layout.path} holds more than weights, and code from a pickle is not run") from None


def _not_importable(source: Path) -> str:
    if not source.exists():
        return "does not exist"
    if source.is_dir() and len(list(source.glob("*.gguf"))) > 1:
        return "holds several GGUF files; name the one to import"
    if source.is_dir() and any(source.glob("*.safetensors")):
        return "has safetensors already: commands take it as it is"
    kinds = ", ".join(NOUNS.values())
    return f"is none of what can be imported: {kinds}"
