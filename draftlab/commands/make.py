"""Commands that make what others start from: init, import, design."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftlab import workspace
from draftlab.commands.base import Outcome, command
from draftlab.config.make import DesignConfig, ImportConfig, InitConfig
from draftlab.console import note
from draftlab.errors import UserError, about
from draftlab.model import hub
from draftlab.output import Output
from draftlab.workspace import Workspace

if TYPE_CHECKING:
    from draftlab.importing.run import ImportSource
    from draftlab.latency.scaling_law import ScalingLaw
    from draftlab.model.families import Budget
    from draftlab.model.shape import Shape


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Designed(Outcome):
    """Shapes of equal budget by name."""

    shapes: "dict[str, Shape]"


def prepare_import(config: ImportConfig, weights: bool) -> "ImportSource":
    """Resolve and check the settings. Raises UserError: nothing to import, or it cannot be read."""
    from draftlab.importing.run import inspect
    from draftlab.model.checkpoint import DTYPES

    return inspect(config.source, DTYPES.get(config.dtype), config.base)


@command(ImportConfig, name="import", prepare=prepare_import, dry_run=True)
def import_checkpoint(source: "ImportSource", output: Output) -> Outcome:
    """Convert a GGUF file, .bin files, or a PEFT adapter with its base to a Hugging Face directory."""
    from draftlab.importing.run import convert

    convert(source, output)
    return Outcome(path=output.out, show=[str(output.out)], data={"path": str(output.out), **source.facts()})


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedInit:
    """The defaults to write.

    gguf: the file of the target, to be imported first. fetch: the target may be looked up on the hub. force: replace
    what exists.
    """

    space: Workspace
    gguf: Path | None
    fetch: bool
    force: bool


def prepare_init(config: InitConfig, weights: bool) -> PreparedInit:
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
    return PreparedInit(space=space, gguf=gguf, fetch=config.preset is None, force=config.overwrite)


@command(InitConfig, prepare=prepare_init)
def init(prepared: PreparedInit) -> Outcome:
    """Write draftlab.yaml here: target, source and data for the commands that follow."""
    from draftlab.importing.init import CODE_FOR_CHAT, is_chat_model, is_imported

    space, warning = prepared.space, None
    if prepared.gguf is not None:
        out = Path(space.target)
        if is_imported(prepared.gguf, out):
            note(f"{out} was imported from {prepared.gguf} already")
        else:
            import_checkpoint(source=str(prepared.gguf), out=out, force=prepared.force)
    if space.data == "stdlib" and is_chat_model(space.target, fetch=prepared.fetch):
        warning = f"{space.target} {CODE_FOR_CHAT}"
        note(warning)
    path = workspace.write(space, comment=warning)
    return Outcome(path=path, show=[str(path)], data=space.model_dump(mode="json"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDesign:
    """A budget, and the depths at which shapes meet it. comment: of the files in out."""

    source: "Shape"
    layers: list[int]
    budget: "Budget"
    law: "ScalingLaw | None"
    out: Path | None
    overwrite: bool
    comment: str


def prepare_design(config: DesignConfig, weights: bool) -> PreparedDesign:
    """Resolve and check the settings. Raises UserError: a source that cannot be cut, or no such law."""
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
    budget = Budget(
        amount=amount,
        kind=kind,
        multiple_of=config.multiple_of,
        tensor_parallel=config.tensor_parallel,
        latency_ms=law.ms if law is not None and kind == "latency" else None,
    )
    return PreparedDesign(
        source=source,
        layers=config.layers,
        budget=budget,
        law=law,
        out=config.out,
        overwrite=config.overwrite,
        comment=f"draftlab design: {budget.kind} budget {budget.amount:g}, from {name}",
    )


@command(DesignConfig, prepare=prepare_design)
def design(prepared: PreparedDesign) -> Designed:
    """Find shapes of equal budget, from deep and narrow to shallow and wide."""
    from draftlab.latency import design as designing
    from draftlab.results.tables import shape_table

    found = designing.design(prepared.source, prepared.layers, prepared.budget, prepared.law)
    if prepared.out is not None:
        found.write(prepared.out, prepared.comment, overwrite=prepared.overwrite)
    rows = {
        name: shape.model_dump() | {"params": shape.params(), "latency_ms": found.latency_ms.get(name)}
        for name, shape in found.shapes.items()
    }
    table = shape_table(found.shapes, found.latency_ms)
    return Designed(path=prepared.out, show=[table], data={"shapes": rows}, shapes=found.shapes)
