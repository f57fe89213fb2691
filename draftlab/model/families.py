"""Families of shapes: depth against width at an equal budget, and the shape files that have a name. No torch."""

import math
import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from draftlab.errors import UserError
from draftlab.model.hub import checkpoint_name, locate
from draftlab.model.shape import Shape, check_within, fewest_kv_heads, format_count, read_shape_file, resolve

Budget = Literal["total", "body", "kv", "latency"]

FALLBACKS = (16, 8)  # a small model's ffn in steps of 64 misses 1 %; below 8, tensor cores lose their alignment
UNBOUNDED = 8  # times as wide as the source


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What every shape of a family has in common.

    amount: all parameters ("total"), the blocks' ("body"), bytes of bf16 KV cache per token ("kv"), or milliseconds
    of one pass ("latency") by latency_ms.
    """

    amount: float
    kind: Budget
    multiple_of: int = 64  # of the ffn
    width_multiple_of: int = 1
    tensor_parallel: int = 1  # devices that heads, kv heads and ffn split over evenly
    tolerance: float = 0.01
    latency_ms: Callable[[Shape], float] | None = None

    def of(self, shape: Shape) -> float:
        """What this budget counts."""
        if self.latency_ms is not None:
            return self.latency_ms(shape)
        return measure(shape, self.kind)

    def met(self, shape: Shape) -> bool:
        even = self.fits(shape) and shape.ffn % self.tensor_parallel == 0
        return even and abs(self.of(shape) - self.amount) <= self.tolerance * self.amount

    def fits(self, shape: Shape) -> bool:
        """Whether the width and the heads are as wanted; the ffn is still to be chosen."""
        heads = math.gcd(shape.heads, shape.kv_heads)
        return shape.hidden % self.width_multiple_of == 0 and heads % self.tensor_parallel == 0

    def steps(self) -> list[int]:
        """What the ffn is a multiple of: the first that meets the budget."""
        finer = [step for step in FALLBACKS if step < self.multiple_of]
        return [math.lcm(step, self.tensor_parallel) for step in (self.multiple_of, *finer)]


def family(
    source: Shape,
    *,
    budget: float,
    kind: Budget,
    depths: list[int],
    multiple_of: int = 64,
    width_multiple_of: int = 1,
    tensor_parallel: int = 1,
    tolerance: float = 0.01,
    latency_ms: Callable[[Shape], float] | None = None,
) -> list[Shape]:
    """One shape per depth, all within source and all within tolerance of the same budget.

    Every multiple of head_dim is tried as width, with heads = width / head_dim and the ffn, a multiple of multiple_of
    or the source's own, that comes nearest to the budget; the width whose ffn / hidden is nearest to the source's
    wins, as a quotient. Where no multiple of multiple_of fits, multiples of 16 are tried, then of 8. For "kv" the
    budget decides the heads, the heads the width, and the source's ratio the ffn. Depths that cannot reach the
    budget are left out.

    Args:
        budget: what Goal.amount says.
        latency_ms: with kind "latency", of one pass; it grows with the ffn.

    Raises:
        UserError: no depth reaches the budget; says what each can reach.
    """
    if (kind == "latency") != (latency_ms is not None):
        raise ValueError(f"kind {kind} and latency_ms go together for latency only")
    goal = Goal(
        amount=budget, kind=kind, multiple_of=multiple_of, width_multiple_of=width_multiple_of,
        tensor_parallel=tensor_parallel, tolerance=tolerance, latency_ms=latency_ms,
    )  # fmt: skip
    found = [_at_depth(source, layers, goal) for layers in depths]
    shapes = [shape for shape in found if shape is not None]
    if not shapes:
        reach = "; ".join(_reach(source, layers, goal) for layers in depths)
        raise UserError(f"no depth comes within {tolerance:.3g} of {_amount(goal)}: {reach}")
    return shapes


def unbounded(source: Shape) -> Shape:
    """A shape of the same proportions, too large for its sizes to bound what is cut from it."""
    sizes = {name: UNBOUNDED * getattr(source, name) for name in ("hidden", "heads", "kv_heads", "ffn")}
    return source.model_copy(update=sizes | {"layers": 1024})


def measure(shape: Shape, kind: Budget) -> int:
    """What a budget of parameters or cache counts."""
    if kind == "kv":
        return shape.kv_bytes_per_token(2)
    return shape.params() if kind == "total" else shape.body_params()


def shape_name(shape: Shape, *, with_ffn: bool = False) -> str:
    """'3x256', or '3x256-f688': layers x hidden, as the shape files are named."""
    return f"{shape.layers}x{shape.hidden}" + (f"-f{shape.ffn}" if with_ffn else "")


def widths_folder() -> Path:
    """Where the named shapes are."""
    return shipped("widths")


def shipped(folder: str) -> Path:
    """A folder of files that come with draftlab: in the package when installed from a wheel, else in configs/ here.

    Raises:
        UserError: in neither.
    """
    package = Path(__file__).parents[1]
    places = (package / folder, package.parent / "configs" / folder)
    for place in places:
        if place.is_dir():
            return place
    raise UserError(f"draftlab's {folder} are missing: neither {places[0]} nor {places[1]} exists; reinstall draftlab")


def presets(folder: Path) -> dict[str, Shape]:
    """Every shape file of a folder, by its name without .yaml.

    Raises:
        UserError: no such folder, a file that is not a shape file, or one named 3x256 that holds other sizes.
    """
    if not folder.is_dir():
        raise UserError(f"no folder of shape files at {folder}")
    found = {path.stem: read_shape_file(path) for path in sorted(folder.glob("*.yaml"))}
    for name, shape in found.items():
        sizes = re.search(r"\d+x\d+", name)
        if sizes and sizes.group() != shape_name(shape):
            raise UserError(f"{folder / name}.yaml holds {shape_name(shape)}; rename it, or mend what it holds")
    return found


def locate_shape(name: str, weights: bool = False) -> tuple[str, Path | Shape]:
    """Return what to call a shape file, a shape that comes with draftlab or a checkpoint, and its shape or directory.

    Raises:
        UserError: there is none of that name; with weights, a checkpoint without weights.
    """
    shapes = presets(widths_folder())
    if name in shapes:
        return name, shapes[name]
    if Path(name).suffix in (".yaml", ".yml"):
        return Path(name).stem, read_shape_file(Path(name))
    directory = locate(name, weights)
    return checkpoint_name(directory), directory


def matching_preset(source: Shape, layers: int, hidden: int, folder: Path) -> tuple[str, Shape] | None:
    """Return the named shape with these sizes that can be cut from source.

    Raises:
        UserError: several can; names them.
    """

    def fits(shape: Shape) -> bool:
        try:
            check_within(shape, source)
        except UserError:
            return False
        return (shape.layers, shape.hidden) == (layers, hidden)

    found = [(name, shape) for name, shape in presets(folder).items() if fits(shape)]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise UserError(f"{layers} layers x {hidden} is {names} in {folder}; give one of these files as the shape")
    return found[0] if found else None


def requested_shape(
    source: Shape,
    *,
    layers: int | None,
    hidden: int | None,
    heads: int | None,
    kv_heads: int | None,
    ffn: int | None,
    params: int | None,
    multiple_of: int,
    file: Path | None,
) -> tuple[Shape, str | None]:
    """The shape a user asks to cut from source, and the name of the preset where it is one.

    A file says it all. Layers and hidden alone mean the preset with these sizes, if there is one whose ffn is a
    multiple of multiple_of; what else is left out follows resolve().

    Raises:
        UserError: nothing asked for, a file beside numbers, or a shape that cannot be cut from source.
    """
    details = [heads, kv_heads, ffn, params]
    numbers = [layers, hidden, *details]
    named: tuple[str, Shape] | None = None
    if file is not None:
        if any(n is not None for n in numbers):
            raise UserError(f"--shape {file} says it all; leave out the numbers beside it")
        named = file.stem, read_shape_file(file)
    elif all(n is None for n in numbers):
        raise UserError("say what to keep: --layers 12 --width 2560, --params 1.3b, or --shape FILE")
    elif layers is not None and hidden is not None and all(n is None for n in details):
        named = matching_preset(source, layers, hidden, widths_folder())
        named = named if named is None or named[1].ffn % multiple_of == 0 else None
    if named is None:
        wanted = resolve(
            source,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            ffn=ffn,
            params=params,
            multiple_of=multiple_of,
        )
        return wanted, None
    check_within(named[1], source)
    return named[1], named[0]


def _at_depth(source: Shape, layers: int, goal: Goal) -> Shape | None:
    if not 1 <= layers <= source.layers:
        return None
    for step in goal.steps():
        near = [shape for shape in _candidates(source, layers, goal, step) if goal.met(shape)]
        if near:
            return min(near, key=lambda shape: _stretch(shape, source))
    return None


def _candidates(source: Shape, layers: int, goal: Goal, step: int) -> list[Shape]:
    if goal.kind != "kv":
        return [_nearest(shape, goal, most=source.ffn, step=step) for shape in _widths(source, layers, goal)]
    kv_heads = round(goal.amount / _kv_bytes_per_head(source, layers))
    return [_kv_shape(source, layers, max(1, min(source.kv_heads, kv_heads)), step)]


def _widths(source: Shape, layers: int, goal: Goal) -> list[Shape]:
    """source at every legal width that splits as wanted; the ffn is still the source's."""
    group = source.heads // source.kv_heads
    shapes = []
    for hidden in range(source.head_dim, source.hidden + 1, source.head_dim):
        heads = min(hidden // source.head_dim, source.heads)
        sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": fewest_kv_heads(heads, group)}
        if hidden % heads == 0 and sizes["kv_heads"] <= source.kv_heads:
            shapes.append(source.model_copy(update=sizes))
    return [shape for shape in shapes if goal.fits(shape)]


def _nearest(shape: Shape, goal: Goal, *, most: int, step: int) -> Shape:
    """shape with the ffn, a multiple of step or most itself, that comes nearest to the budget."""

    def over(ffn: int) -> float:
        return goal.of(shape.model_copy(update={"ffn": ffn})) - goal.amount

    ffns = [*range(step, most, step), most]
    above = bisect_left(ffns, 0, key=over)
    return shape.model_copy(update={"ffn": min(ffns[max(0, above - 1) : above + 1], key=lambda ffn: abs(over(ffn)))})


def _kv_shape(source: Shape, layers: int, kv_heads: int, step: int) -> Shape:
    heads = kv_heads * (source.heads // source.kv_heads)
    hidden = heads * min(source.head_dim, source.hidden // heads)
    wanted = source.ffn * hidden / source.hidden
    ffn = min([*range(step, source.ffn, step), source.ffn], key=lambda ffn: abs(ffn - wanted))
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    return source.model_copy(update=sizes)


def _kv_bytes_per_head(source: Shape, layers: int) -> int:
    return source.model_copy(update={"layers": layers, "kv_heads": 1}).kv_bytes_per_token(2)


def _stretch(shape: Shape, source: Shape) -> float:
    """How far ffn / hidden is from the source's, as a factor: half and double are equally far."""
    return abs(math.log(shape.ffn / shape.hidden * source.hidden / source.ffn))


def _reach(source: Shape, layers: int, goal: Goal) -> str:
    depth = f"{layers} layer{'s' if layers != 1 else ''}"
    if not 1 <= layers <= source.layers:
        return f"{depth}: the source has 1 to {source.layers}"
    if goal.kind == "kv":
        low = _kv_bytes_per_head(source, layers)
        return f"{depth}: {low} to {low * source.kv_heads} in steps of {low}"
    widths, ends = _widths(source, layers, goal), (min(goal.steps()), source.ffn)
    if not widths:
        return f"{depth}: no width splits over {goal.tensor_parallel} devices in steps of {goal.width_multiple_of}"
    low, *_, high = sorted(goal.of(shape.model_copy(update={"ffn": ffn})) for shape in widths for ffn in ends)
    if goal.kind == "latency":
        return f"{depth}: {low:.3g} to {high:.3g} ms"
    return f"{depth}: {format_count(low)} to {format_count(high)}"


def _amount(goal: Goal) -> str:
    if goal.kind == "kv":
        return f"{goal.amount:.0f} bytes of KV cache per token"
    if goal.kind == "latency":
        return f"{goal.amount:.3g} ms for a pass"
    return f"{format_count(goal.amount)} parameters in {'all' if goal.kind == 'total' else 'the blocks'}"
