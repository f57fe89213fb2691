"""Families of shapes that cost the same, from deep and narrow to shallow and wide; shape files and presets.

Torch is not imported.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from draftlab import shipped
from draftlab.console import note
from draftlab.errors import UserError
from draftlab.model.hub import checkpoint_name, locate
from draftlab.model.shape import (
    Shape,
    check_within,
    fewest_kv_heads,
    format_count,
    nearest_ffn,
    read_shape_file,
    resolve,
)
from draftlab.quantities import format_number

BudgetKind = Literal["total", "kv", "latency"]
TOLERANCE = 0.01  # largest relative difference between a shape's cost and the budget

# steps of the ffn if multiple_of is too coarse for a small model; tensor cores need multiples of 8
FALLBACKS = (16, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The cost that every shape of a family must have, and the numbers that must divide its sizes.

    Args:
        amount: The cost. By `kind`: number of parameters ("total"), bytes of bf16 KV cache per token ("kv"), or
            milliseconds of a one-token pass ("latency").
        multiple_of: The ffn is a multiple of this number, or equal to the source's ffn. If no such ffn meets the
            budget, the smaller numbers in FALLBACKS are tried.
        tensor_parallel: Number of devices. It must divide heads, KV heads and ffn.
        latency_ms: Function that predicts the milliseconds of a one-token pass of a shape. The kind "latency" needs it.
            The result must grow with the ffn.
    """

    amount: float
    kind: BudgetKind
    multiple_of: int = 64
    tensor_parallel: int = 1
    latency_ms: Callable[[Shape], float] | None = None

    def cost(self, shape: Shape) -> float:
        if self.latency_ms is not None:
            return self.latency_ms(shape)
        return shape.kv_bytes_per_token() if self.kind == "kv" else shape.params()

    def met(self, shape: Shape) -> bool:
        even = self.fits(shape) and shape.ffn % self.tensor_parallel == 0
        return even and abs(self.cost(shape) - self.amount) <= TOLERANCE * self.amount

    def fits(self, shape: Shape) -> bool:
        """Return whether the number of devices divides a shape's heads and KV heads. The ffn is not checked."""
        return math.gcd(shape.heads, shape.kv_heads) % self.tensor_parallel == 0

    def steps(self) -> list[int]:
        """Return the numbers to try, in this order, as divisors of the ffn.

        The first is multiple_of. Smaller numbers follow, for budgets that no multiple of multiple_of meets. Each number
        is replaced by its least common multiple with tensor_parallel.
        """
        finer = [step for step in FALLBACKS if step < self.multiple_of]
        return [math.lcm(step, self.tensor_parallel) for step in (self.multiple_of, *finer)]


def family(source: Shape, depths: Sequence[int], budget: Budget) -> list[Shape]:
    """Return one shape per depth (number of layers), no larger than the source and within TOLERANCE of the budget.

    For the kinds "total" and "latency", the candidate widths are the multiples of the source's head_dim. At each
    width, the ffn is the one that brings the cost nearest to the budget. It is the source's ffn or a smaller multiple
    of multiple_of. If no width meets the budget, multiples of 16 are tried for the ffn, then multiples of 8. If several
    widths meet the budget, the width whose ratio ffn / width is nearest to the source's is taken.

    For the kind "kv", the budget determines the number of KV heads, and this number determines the heads and the width.
    The ffn is the one whose ratio ffn / width is nearest to the source's.

    For every kind, depths that cannot meet the budget are left out, and a note lists them.

    Raises:
        UserError: no depth meets the budget. The message lists the costs that are possible at each depth.
    """
    candidates = [_at_depth(source, layers, budget) for layers in depths]
    shapes = [shape for shape in candidates if shape is not None]
    if not shapes:
        reach = "; ".join(_reach(source, layers, budget) for layers in depths)
        raise UserError(
            f"no number of layers in --layers meets the budget of {_text(budget)} to within {TOLERANCE:.0%}; "
            f"possible amounts: {reach}"
        )
    left_out = [layers for layers, shape in zip(depths, candidates, strict=True) if shape is None]
    if left_out:
        note(
            f"numbers of layers left out, because they cannot meet the budget of {_text(budget)}: "
            f"{', '.join(map(str, left_out))}"
        )
    return shapes


def shape_name(shape: Shape) -> str:
    """Return the name of a shape for its file: LAYERSxHIDDEN, such as 3x256."""
    return f"{shape.layers}x{shape.hidden}"


def presets(folder: Path) -> dict[str, Shape]:
    """Return all shapes in a folder of shape files by name: the file's name without .yaml."""
    return {path.stem: read_shape_file(path) for path in sorted(folder.glob("*.yaml"))}


def locate_shape(name: str, weights: bool = False) -> tuple[str, Path | Shape]:
    """Find a preset, a shape file or a checkpoint. Return its name without folders, and its Shape or directory.

    The second result is a Shape for a preset or a shape file, and the directory for a checkpoint. weights: Whether a
    checkpoint needs its weight files.

    Raises:
        UserError: there is nothing with this name, or weight files are needed and missing.
    """
    shapes = presets(shipped.folder("widths"))
    if name in shapes:
        return name, shapes[name]
    if Path(name).suffix in (".yaml", ".yml"):
        return Path(name).stem, read_shape_file(Path(name))
    directory = locate(name, weights, known=shapes)
    return checkpoint_name(directory), directory


def matching_preset(source: Shape, layers: int, hidden: int, folder: Path) -> tuple[str, Shape] | None:
    """Return name and shape of the preset in `folder` that has these sizes and can be cut from the source, or None.

    Raises:
        UserError: several such presets have these sizes.
    """
    matches = []
    for name, shape in presets(folder).items():
        if (shape.layers, shape.hidden) == (layers, hidden):
            with suppress(UserError):
                check_within(shape, source)
                matches.append((name, shape))
    if len(matches) > 1:
        names = " and ".join(name for name, _ in matches)
        raise UserError(f"several files in {folder} have {layers} layers x {hidden}: {names}; choose with --shape NAME")
    return matches[0] if matches else None


def requested_shape(
    source: Shape,
    *,
    layers: int | None,
    hidden: int | None,
    ffn: int | None,
    params: int | None,
    multiple_of: int,
    file: Path | None,
) -> tuple[Shape, str | None]:
    """Return the shape that the user requests, and the name of its shape file or preset.

    The name is None if the shape comes from neither.

    If only layers and hidden are set, the result is the preset with these sizes, if there is one and its ffn is a
    multiple of multiple_of. Otherwise resolve() chooses the sizes that are not set.

    Args:
        file: Shape file with all sizes. If it is set, layers, hidden, ffn, params and multiple_of are ignored.

    Raises:
        UserError: no size is requested, or the shape cannot be cut from the source.
    """
    numbers = [layers, hidden, ffn, params]
    named: tuple[str, Shape] | None = None
    if file is not None:
        named = file.stem, read_shape_file(file)
    elif all(n is None for n in numbers):
        raise UserError(
            "the draft's size is missing; add, for example, --layers 12 --width 2560, --params 1.3b or --shape NAME"
        )
    elif layers is not None and hidden is not None and ffn is None and params is None:
        named = matching_preset(source, layers, hidden, shipped.folder("widths"))
        named = named if named is None or named[1].ffn % multiple_of == 0 else None
    if named is None:
        return resolve(source, layers=layers, hidden=hidden, ffn=ffn, params=params, multiple_of=multiple_of), None
    check_within(named[1], source)
    return named[1], named[0]


def _at_depth(source: Shape, layers: int, budget: Budget) -> Shape | None:
    if not 1 <= layers <= source.layers:
        return None
    for step in budget.steps():
        near = [shape for shape in _candidates(source, layers, budget, step) if budget.met(shape)]
        if near:
            return min(near, key=lambda shape: _stretch(shape, source))
    return None


def _candidates(source: Shape, layers: int, budget: Budget, step: int) -> list[Shape]:
    if budget.kind != "kv":
        return [
            nearest_ffn(shape, budget.cost, budget.amount, most=source.ffn, step=step)
            for shape in _widths(source, layers, budget)
        ]
    kv_heads = round(budget.amount / _kv_bytes_per_head(source, layers))
    return [_kv_shape(source, layers, max(1, min(source.kv_heads, kv_heads)), step)]


def _widths(source: Shape, layers: int, budget: Budget) -> list[Shape]:
    """Return a shape for each candidate width of family(), with `layers` layers and the source's ffn.

    A shape is left out if it has more KV heads than the source, if heads does not divide its width, or if the number of
    devices does not divide its heads and KV heads.
    """
    group = source.heads // source.kv_heads
    shapes = []
    for hidden in range(source.head_dim, source.hidden + 1, source.head_dim):
        heads = min(hidden // source.head_dim, source.heads)
        sizes = {
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "kv_heads": fewest_kv_heads(heads, group),
        }
        if hidden % heads == 0 and sizes["kv_heads"] <= source.kv_heads:
            shapes.append(source.model_copy(update=sizes))
    return [shape for shape in shapes if budget.fits(shape)]


def _kv_shape(source: Shape, layers: int, kv_heads: int, step: int) -> Shape:
    heads = kv_heads * (source.heads // source.kv_heads)
    hidden = heads * min(source.head_dim, source.hidden // heads)
    proportional = source.ffn * hidden / source.hidden
    ffn = min([*range(step, source.ffn, step), source.ffn], key=lambda ffn: abs(ffn - proportional))
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    return source.model_copy(update=sizes)


def _kv_bytes_per_head(source: Shape, layers: int) -> int:
    return source.model_copy(update={"layers": layers, "kv_heads": 1}).kv_bytes_per_token()


def _stretch(shape: Shape, source: Shape) -> float:
    """Return how far a shape's ratio ffn / hidden is from the source's. Half and double the ratio are equally far."""
    return abs(math.log(shape.ffn / shape.hidden * source.hidden / source.ffn))


def _reach(source: Shape, layers: int, budget: Budget) -> str:
    depth = f"{layers} layer{'s' if layers != 1 else ''}"
    if not 1 <= layers <= source.layers:
        return f"{depth}: none, because the source has only {source.layers}"
    if budget.kind == "kv":
        low = _kv_bytes_per_head(source, layers)
        return f"{depth}: multiples of {_text(budget, low)} up to {_text(budget, low * source.kv_heads)}"
    widths = _widths(source, layers, budget)
    ends = (min(budget.steps()), source.ffn)
    if not widths:
        return f"{depth}: no width can be split over {budget.tensor_parallel} devices"
    low, *_, high = sorted(budget.cost(shape.model_copy(update={"ffn": ffn})) for shape in widths for ffn in ends)
    return f"{depth}: {_text(budget, low)} to {_text(budget, high)}"


def _text(budget: Budget, amount: float | None = None) -> str:
    """Return an amount as text with its unit. Default: the amount of the budget."""
    amount = budget.amount if amount is None else amount
    if budget.kind == "kv":
        return f"{amount / 1024:g} KiB of KV cache per token"
    if budget.kind == "latency":
        return f"{format_number(amount)} ms for a pass"
    return f"{format_count(amount)} parameters in all"
