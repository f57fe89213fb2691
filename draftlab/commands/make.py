"""Commands that make what others start from: init, import, design."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftlab.commands.base import Outcome, command, plan
from draftlab.config.make import DesignConfig, ImportConfig, InitConfig
from draftlab.model import hub
from draftlab.output import Output

if TYPE_CHECKING:
    from draftlab.latency.design import Design
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


@command(DesignConfig)
def design(config: DesignConfig) -> Designed:
    """Find shapes of equal budget, from deep and narrow to shallow and wide."""
    from draftlab.latency.design import design as find_shapes
    from draftlab.results.tables import shape_table

    family = find_shapes(config)
    if config.plot is not None:
        _plot(config, family)
    rows = {
        name: shape.model_dump() | {"params": shape.params(), "latency_ms": family.latency_ms.get(name)}
        for name, shape in family.shapes.items()
    }
    table = shape_table(family.shapes, family.latency_ms)
    return Designed(path=config.out, show=[table], data={"shapes": rows}, shapes=family.shapes)


def _plot(config: DesignConfig, design: "Design") -> None:
    from draftlab.results.plots import Panel, save_figure

    shapes = design.shapes.values()
    sizes = {
        "width": [(float(s.layers), float(s.hidden)) for s in shapes],
        "ffn": [(float(s.layers), float(s.ffn)) for s in shapes],
    }
    panels = [Panel(x="layers", y="width and ffn", series=sizes)]
    if design.latency_ms:
        points = [(float(shape.layers), design.latency_ms[name]) for name, shape in design.shapes.items()]
        panels.append(Panel(x="layers", y="ms per pass, predicted", series={"one token": points}))
    assert config.plot is not None
    save_figure(config.plot, panels)
