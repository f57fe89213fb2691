"""The command that measures how latency follows from a shape on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from draftlab import workspace
from draftlab.commands.shared import (
    DryRun,
    Force,
    Out,
    Outcome,
    PassMode,
    Threads,
    WeightsDtype,
    command_line,
    plan,
    recorded,
    shape_of,
    table_of,
)
from draftlab.errors import UserError
from draftlab.model.shape import parse_numbers

if TYPE_CHECKING:
    from rich.table import Table

    from draftlab.latency.scaling_law import ScalingLaw


def law(
    profiles: Annotated[
        Path | None, Argument(help="Folder of profiles to make a law of; measured first if left out.")
    ] = None,
    source: Annotated[
        str | None, Option(help="What drafts are cut from: a checkpoint, a shape file or its name; the workspace's.")
    ] = None,
    layers: Annotated[str | None, Option(help="Depths to measure, as 1,4,16; by the source's if left out.")] = None,
    widths: Annotated[str | None, Option(help="Widths to measure, each at every depth, likewise.")] = None,
    k: Annotated[int, Option(min=1, help="Most drafted tokens: passes take 1 to K + 1; 1 will do for drafts.")] = 1,
    batch: Annotated[str, Option(help="Rows at once, as 1,4,16.")] = "1",
    context: Annotated[str, Option(help="Cached tokens before a pass, and lengths of prompts.")] = "16,256",
    repeats: Annotated[int, Option(min=3, help="Times every pass is measured, once all is warm.")] = 10,
    mode: PassMode = "eager",
    dtype: WeightsDtype = None,
    threads: Threads = None,
    plot: Annotated[Path | None, Option(help="Figure to write, .svg or .png: measured against the law.")] = None,
    out: Out = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> Outcome:
    """Fit latency as a function of layers, width and bytes on this machine, from a few shapes with random weights."""
    arguments, began = recorded(locals())
    from draftlab.latency.scaling_law import MIN_PROFILES, default_grid, grid_shapes, read_law

    if profiles is not None:
        return _shown(profiles, read_law(profiles), plot)
    from draftlab.latency import profiler as profiling
    from draftlab.model import checkpoint

    space = workspace.load()
    name, have = shape_of(source or space.source)
    depths, across = default_grid(have)
    shapes = grid_shapes(have, parse_numbers(layers) if layers else depths, parse_numbers(widths) if widths else across)
    if len(shapes) < MIN_PROFILES:
        raise UserError(
            f"{len(shapes)} shapes do not make a law; give at least {MIN_PROFILES} by --layers and --widths"
        )
    out = out or space.runs / f"law-{name}"
    checkpoint.check_free(out, force=force)
    device = checkpoint.resolve_device(space.device)
    contexts = parse_numbers(context)
    measuring = profiling.Plan(
        subjects=dict(shapes),
        grid=profiling.Grid(
            widths=range(1, k + 2), batches=parse_numbers(batch), contexts=contexts, prompts=contexts, repeats=repeats
        ),
        mode=mode,
        dtype=checkpoint.resolve_dtype(dtype or space.dtype, device),
        device=device,
        threads=threads,
        command=command_line("law", arguments),
    )
    profiling.check(measuring)
    if dry_run:
        held = sum(s.weight_bytes(measuring.dtype.itemsize) for s in shapes.values())
        return plan(out, {n: s.describe() for n, s in shapes.items()} | {"memory": f"{held / 1e9:.3g} GB"})
    profiling.run(measuring, out=out, command="law", arguments=arguments, began=began, force=force)
    return _shown(out, read_law(out), plot)


def _shown(folder: Path, found: "ScalingLaw", plot: Path | None) -> Outcome:
    if plot is not None:
        _plot(plot, found)
    errors = {p.name: float(e) for p, e in zip(found.profiles, found.held_out, strict=True)}
    data = {
        "path": str(folder), "device": found.profiles[0].device, "mode": found.profiles[0].mode,
        "terms": found.one.terms.tolist(), "overlap": found.one.overlap, "held_out": errors,
        "crossing": {shape.layers: found.crossing(shape.layers) for shape in found.shapes()},
    }  # fmt: skip
    return Outcome(path=folder, show=[_table(found), found.verdict(), str(folder)], data=data)


def _table(found: "ScalingLaw") -> "Table":
    """Each shape as measured, as fitted, and as predicted from the others."""
    first = found.profiles[0]
    table = table_of(
        f"{first.device}, {first.dtype}, {first.mode}: ms of one pass behind {found.context} tokens",
        ("shape", "measured", "fitted", "to issue", "to work", "from the others"),
    )
    rows = zip(found.profiles, found.shapes(), found.one_ms, found.held_out, strict=True)
    for profile, shape, measured, error in rows:
        cells = [measured, found.ms(shape), *found.one.parts(shape, found.bytes_per_weight)]
        table.add_row(profile.name, *(f"{cell:.3g}" for cell in cells), f"{error:+.1%}")
    return table


def _plot(path: Path, found: "ScalingLaw") -> None:
    from draftlab.results.plots import Panel, save_figure

    points: dict[str, list[tuple[float, float]]] = {}
    lines: dict[str, list[tuple[float, float]]] = {}
    for shape, ms in zip(found.shapes(), found.one_ms, strict=True):
        name = f"{shape.hidden} wide"
        points.setdefault(name, []).append((shape.layers, float(ms)))
        lines.setdefault(name, []).append((shape.layers, found.ms(shape)))
    title = "ms per pass: measured, and the law"
    save_figure(path, [Panel(x="layers", y=title, series=points, lines=lines)])
