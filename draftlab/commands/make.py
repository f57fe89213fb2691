"""Commands that make what others start from: init, import, design."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftlab.commands.base import Outcome, command, plan
from draftlab.config.make import DesignConfig, ImportConfig, InitConfig
from draftlab.errors import about
from draftlab.model import hub
from draftlab.output import Output

if TYPE_CHECKING:
    from draftlab.latency.scaling_law import ScalingLaw
    from draftlab.model.families import Budget
    from draftlab.model.shape import Shape


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Designed(Outcome):
    """Shapes of equal budget by name."""

    shapes: "dict[str, Shape]"


@command(InitConfig)
def init(config: InitConfig) -> Outcome:
    """Write draftlab.yaml here: target, source and data for the commands that follow."""
    from draftlab.importing.init import initialise

    path, space = initialise(config)
    return Outcome(path=path, show=[str(path)], data=space.model_dump(mode="json"))


@command(ImportConfig, name="import", dry_run=True)
def import_checkpoint(config: ImportConfig, output: Output) -> Outcome:
    """Convert a GGUF file, .bin files, or a PEFT adapter with its base to a Hugging Face directory."""
    layout = hub.import_source(config.source)
    from draftlab.importing import run

    source = run.inspect(config, layout)
    if output.dry_run:
        return plan(output, source.facts())
    run.convert(source, output)
    lines = [f"{source.stored}, {source.weights:,} weights", str(output.out)]
    return Outcome(path=output.out, show=lines, data={"path": str(output.out), **source.facts()})


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDesign:
    """A budget, and the depths at which shapes meet it. comment: of the files in out."""

    name: str
    source: "Shape"
    layers: list[int]
    budget: "Budget"
    law: "ScalingLaw | None"
    out: Path | None
    overwrite: bool
    comment: str

    def facts(self) -> Mapping[str, object]:
        return {"source": self.source.describe(), "layers": self.layers}


def prepare_design(config: DesignConfig, weights: bool) -> PreparedDesign:
    """Resolve and check the settings. Raises UserError: a source that cannot be cut, or no such law."""
    from draftlab.latency.scaling_law import read_law
    from draftlab.model.families import Budget, BudgetKind
    from draftlab.model.head_ids import check_size
    from draftlab.model.shape import parse_count
    from draftlab.pruning.trial_model import prunable_shape

    with about("--source"):
        name, source = prunable_shape(config.source)
    if config.vocab is not None:
        check_size(config.vocab, source.vocab)
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
        name="design",
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
