"""Measure latency against depth for shapes with equal parameters: the paper's figure 3a, on this machine.

Shapes are designed as by ``draftlab design``, and have random weights. Only one model is in memory at a time.
share_of_bandwidth: Bytes per second that a pass reads, divided by those of one large matrix-vector product, which is
measured first (bandwidth_gbs). On a CPU the time is in CPU seconds of one thread, which other work lengthens less than
wall seconds.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from benchmarks import environment
from draftlab.console import note
from draftlab.engine.clocks import clock_for
from draftlab.engine.timing import bandwidth_gbs
from draftlab.errors import UserError
from draftlab.latency.cost_model import BYTES, active_params
from draftlab.latency.machine_state import device_name
from draftlab.latency.profiler import Grid, measure_passes, random_model
from draftlab.model import Mode, devices
from draftlab.model.families import Budget, family
from draftlab.model.modes import with_mode
from draftlab.model.shape import Shape, parse_count, parse_numbers
from draftlab.pruning.source import prunable_shape
from draftlab.results.plots import Panel, save_panels


def main(
    params: Annotated[str, typer.Option(help="Number of parameters of every shape.")] = "350m",
    source: Annotated[str, typer.Option(help="Shape whose proportions the shapes have.")] = "llama-7b",
    layers: Annotated[str, typer.Option(help="Numbers of layers.")] = "1,2,3,4,6,8,12,16,24,32",
    modes: Annotated[str, typer.Option(help="Modes, separated by commas: eager, native, graphs.")] = "eager",
    context: Annotated[int, typer.Option(help="Cached tokens before a pass.")] = 64,
    passes: Annotated[int, typer.Option(help="Timed passes of each shape.")] = 12,
    dtype: Annotated[str, typer.Option(help="Type of the weights.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    plot: Annotated[Path | None, typer.Option(help="Figure to write, .svg or .png.")] = None,
) -> None:
    torch.set_num_threads(1)
    try:
        place = devices.resolve_device(device)
    except UserError as error:
        raise SystemExit(f"--device {device}: {error}; --source tiny ends within a minute on a CPU") from None
    clock = time.process_time if device == "cpu" else None
    shapes = family(
        prunable_shape(source)[1],
        parse_numbers(layers),
        Budget(amount=parse_count(params), kind="total"),
    )
    ceiling = bandwidth_gbs(parse_count(params), devices.DTYPES[dtype], place)
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes.split(",")}
    for shape in shapes:
        for mode, rows in found.items():
            rows.append(_measured(shape, mode, dtype, place, context, passes, clock, ceiling))  # type: ignore[arg-type]
        note(f"{shape.describe()}: " + ", ".join(f"{mode} {rows[-1]['ms']:.3g} ms" for mode, rows in found.items()))
    if plot is not None:
        _draw(plot, found)
    about = {
        "params": params,
        "dtype": dtype,
        "device": device_name(place),
        "context": context,
        "passes": passes,
    }
    fits = {mode: _line(rows, "layers", "ms") for mode, rows in found.items()}
    of_bytes = {mode: _line(rows, "read_gb", "ms") for mode, rows in found.items()}
    for mode in found:
        layers_share, bytes_share = (fit[mode]["r_squared"] for fit in (fits, of_bytes))
        note(f"{mode}: layers explain {layers_share:.0%} of the variance of a pass, bytes read {bytes_share:.0%}")
    clocked = {"clock": "CPU seconds of one thread" if device == "cpu" else "wall, synchronised"}
    about |= {**clocked, "bandwidth_gbs": ceiling}
    result = {
        "benchmark": "depth_sweep",
        **about,
        "against_layers": fits,
        "against_bytes": of_bytes,
    }
    print(json.dumps(result | {"rows": found} | environment(1)))


def _measured(
    shape: Shape,
    mode: Mode,
    dtype: str,
    device: torch.device,
    context: int,
    passes: int,
    clock: Callable[[], float] | None,
    ceiling: float,
) -> dict[str, float]:
    model = random_model(shape, devices.DTYPES[dtype], device, context + 8)
    name = f"{shape.layers}x{shape.hidden}"
    grid = Grid(widths=[1], batches=[1], contexts=[context], prompts=[], repeats=passes)
    curves = measure_passes({name: with_mode(model, mode)}, grid, clock=clock or clock_for(device))
    one = curves[name].steady[-1]
    size = active_params(shape) * BYTES[dtype] / 1e9
    return {
        "layers": shape.layers,
        "hidden": shape.hidden,
        "ffn": shape.ffn,
        "params": shape.params(),
        "read_gb": size,
        "ms": one.median_ms,
        "low_ms": one.low_ms,
        "high_ms": one.high_ms,
        "n": one.n,
        "read_gb_per_s": 1e3 * size / one.median_ms,
        "share_of_bandwidth": 1e3 * size / one.median_ms / ceiling,
    }


def _line(rows: list[dict[str, float]], of: str, what: str) -> dict[str, float]:
    """Fit a straight line to all rows. Return its slope and intercept, and the fraction of variance explained."""
    x, y = (np.array([row[name] for row in rows]) for name in (of, what))
    slope, intercept = np.polyfit(x, y, 1)
    left = y - slope * x - intercept
    return {
        "slope": float(slope),
        "intercept": float(intercept),
        "r_squared": float(1 - left.var() / y.var()),
    }


def _draw(path: Path, found: dict[str, list[dict[str, float]]]) -> None:
    points = {mode: [(row["layers"], row["ms"]) for row in rows] for mode, rows in found.items()}
    save_panels(path, [Panel(x="layers", y="ms per pass over one token", series=points)])


if __name__ == "__main__":
    typer.run(main)
