"""The commands before a first draft: init, import, design."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from draftlab import workspace
from draftlab.commands.base import Job, Outcome, command, fill
from draftlab.config.make import DesignConfig, ImportConfig, InitConfig
from draftlab.console import note
from draftlab.errors import UserError, about
from draftlab.model import hub
from draftlab.output import Output
from draftlab.workspace import Workspace

if TYPE_CHECKING:
    from draftlab.importing.run import ImportSource
    from draftlab.latency.design import Design
    from draftlab.model.shape import Shape


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Designed(Outcome):
    """Shapes of equal budget by name."""

    shapes: "dict[str, Shape]"


def prepare_import(config: ImportConfig, weights: bool) -> "Job[ImportSource]":
    """Resolve and check the settings. Raises UserError: nothing to import, or it cannot be read."""
    from draftlab.importing.run import convert, inspect
    from draftlab.model.checkpoint import DTYPES

    source = inspect(config.source, DTYPES.get(config.dtype), config.base)

    def run(output: Output) -> "ImportSource":
        convert(source, output)
        return source

    return Job(run, source.name, source.facts)


@command(ImportConfig, name="import", prepare=prepare_import, dry_run=True)
def import_checkpoint(source: "ImportSource", output: Output) -> Outcome:
    """Convert a GGUF file, .bin files, or a PEFT adapter with its base to a Hugging Face directory."""
    data = {"path": str(output.out), **source.facts()}
    return Outcome(path=output.out, show=[str(output.out)], data=data, next=f"draftlab init --target {output.out}")


def prepare_init(config: InitConfig, weights: bool) -> Job[tuple[Path, Workspace]]:
    """Resolve and check the settings.

    Raises:
        UserError: draftlab.yaml exists and overwrite is off, or the target cannot be located.
    """
    from draftlab.importing.init import smollm2_file

    space, gguf = workspace.preset(config.preset) if config.preset else None, None
    if workspace.FILE.exists() and not config.overwrite:
        raise UserError(f"{workspace.FILE} exists; edit it, or replace it with --force")
    if config.gguf is not None and not config.gguf.is_file():
        raise UserError(f"--gguf {config.gguf}: no such file")
    if config.data is not None:
        with about("--data"):
            hub.check_local_data(config.data)
    if config.target is not None:
        source = config.source or config.target
        for name in (config.target, source):
            hub.locate(name, weights=False)
        space = Workspace(target=config.target, source=source, data="stdlib")
    elif config.gguf or config.preset == "smollm2":
        gguf = config.gguf or smollm2_file()
        target = space.target if space else f"models/{gguf.stem.lower()}"
        space = Workspace(target=target, source=target, data="stdlib")
    assert space is not None  # the settings name one of them
    space = space.model_copy(update={"data": config.data or space.data})
    return Job(partial(_written, space, gguf, fetch=config.preset is None, force=config.overwrite))


def _written(space: Workspace, gguf: Path | None, *, fetch: bool, force: bool) -> tuple[Path, Workspace]:
    """Import the GGUF file of the target, and write draftlab.yaml.

    Args:
        fetch: Whether the target may be looked up on the hub.
        force: Whether to replace an earlier import.
    """
    from draftlab.importing.init import CODE_FOR_CHAT, is_chat_model, is_imported

    warning = None
    if gguf is not None:
        out = Path(space.target)
        if is_imported(gguf, out):
            note(f"{out} was imported from {gguf} already")
        else:
            import_checkpoint(source=str(gguf), out=out, force=force)
    if space.data == "stdlib" and is_chat_model(space.target, fetch=fetch):
        warning = f"{space.target} {CODE_FOR_CHAT}"
        note(warning)
    return workspace.write(space, comment=warning), space


@command(InitConfig, prepare=prepare_init)
def init(written: tuple[Path, Workspace]) -> Outcome:
    """Write draftlab.yaml here: target, source and data for the commands that follow."""
    path, space = written
    then = "draftlab prune --layers 2 --dry-run"
    return Outcome(path=path, show=[str(path)], data=space.model_dump(mode="json"), next=then)


def prepare_design(config: DesignConfig, weights: bool) -> "Job[tuple[Design, Path | None]]":
    """Resolve and check the settings. Raises UserError: a source that cannot be cut, or no such law."""
    from draftlab.latency import design as designing
    from draftlab.latency.scaling_law import read_law
    from draftlab.model.families import Budget, BudgetKind
    from draftlab.model.hf_files import check_head_size
    from draftlab.model.shape import parse_count
    from draftlab.pruning.trial_model import prunable_shape

    with about("--source"):
        name, source = prunable_shape(config.source)
    if config.vocab is not None:
        check_head_size(config.vocab, source.vocab)
        source = source.model_copy(update={"draft_vocab": config.vocab})
    law = None
    if config.law is not None:
        with about("--law"):
            law = read_law(config.law)
    kind: BudgetKind = "latency"
    amount = config.latency_ms or 0.0
    if config.params is not None:
        kind, amount = "total", float(parse_count(config.params))
    elif config.kv_kib is not None:
        kind, amount = "kv", 1024 * config.kv_kib
    latency_ms = law.ms if law is not None and kind == "latency" else None
    budget = fill(Budget, config, amount=amount, kind=kind, latency_ms=latency_ms)
    layers, out, overwrite = config.layers, config.out, config.overwrite

    def run() -> "tuple[Design, Path | None]":
        found = designing.design(source, layers, budget, law)
        if out is not None:
            found.write(out, f"draftlab design: {kind} budget {amount:g}, from {name}", overwrite=overwrite)
        return found, out

    return Job(run)


@command(DesignConfig, prepare=prepare_design)
def design(designed: "tuple[Design, Path | None]") -> Designed:
    """Find shapes of equal budget, from deep and narrow to shallow and wide."""
    from draftlab.results.tables import shape_table

    found, out = designed
    rows = {
        name: shape.model_dump() | {"params": shape.params(), "latency_ms": found.latency_ms.get(name)}
        for name, shape in found.shapes.items()
    }
    file = out / f"{next(iter(found.shapes))}.yaml" if out is not None else "SHAPE"
    return Designed(
        path=out,
        show=[shape_table(found.shapes, found.latency_ms)],
        data={"shapes": rows},
        shapes=found.shapes,
        next=f"draftlab prune --shape {file}",
    )
