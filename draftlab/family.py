"""Families of shapes: depth against width at an equal budget, and the shape files that have a name. No torch."""

import math
from pathlib import Path
from typing import Literal

from draftlab.errors import UserError
from draftlab.shape import Shape, check_within, count_text, fewest_kv_heads, read_shape_file, resolve

Budget = Literal["total", "body", "kv"]

FALLBACKS = (16, 8)  # a small model's ffn in steps of 64 misses 1 %; below 8, tensor cores lose their alignment


def family(
    source: Shape,
    *,
    budget: int,
    kind: Budget,
    depths: list[int],
    multiple_of: int = 64,
    tolerance: float = 0.01,
) -> list[Shape]:
    """One shape per depth, all within source and all within tolerance of the same budget.

    Every multiple of head_dim is tried as width, with heads = width / head_dim and the ffn, a multiple of multiple_of
    or the source's own, that comes nearest to the budget; the width whose ffn / hidden is nearest to the source's
    wins, as a quotient. Where no multiple of multiple_of fits, multiples of 16 are tried, then of 8. For "kv" the
    budget decides the heads, the heads the width, and the source's ratio the ffn. Depths that cannot reach the
    budget are left out.

    Args:
        budget: all parameters ("total"), the blocks' ("body"), or bytes of bf16 KV cache per token ("kv").

    Raises:
        UserError: no depth reaches the budget; says what each can reach.
    """
    found = [_at_depth(source, layers, budget, kind, multiple_of, tolerance) for layers in depths]
    shapes = [shape for shape in found if shape is not None]
    if not shapes:
        reach = "; ".join(_reach(source, layers, kind) for layers in depths)
        raise UserError(f"no depth comes within {tolerance:.3g} of {_amount(budget, kind)}: {reach}")
    return shapes


def measure(shape: Shape, kind: Budget) -> int:
    """What a budget of this kind counts."""
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
    package = Path(__file__).parent
    places = (package / folder, package.parent / "configs" / folder)
    for place in places:
        if place.is_dir():
            return place
    raise UserError(f"draftlab's {folder} are missing: neither {places[0]} nor {places[1]} exists; reinstall draftlab")


def presets(folder: Path) -> dict[str, Shape]:
    """Every shape file of a folder, by its name without .yaml.

    Raises:
        UserError: no such folder, or a file that is not a shape file.
    """
    if not folder.is_dir():
        raise UserError(f"no folder of shape files at {folder}")
    return {path.stem: read_shape_file(path) for path in sorted(folder.glob("*.yaml"))}


def matching_preset(layers: int, hidden: int, vocab: int, head_dim: int, folder: Path) -> tuple[str, Shape] | None:
    """The named shape with these sizes. Whether it can be cut from a source is for check_within.

    Raises:
        UserError: several have them; names them.
    """
    wanted = (layers, hidden, vocab, head_dim)
    found = [(n, s) for n, s in presets(folder).items() if (s.layers, s.hidden, s.vocab, s.head_dim) == wanted]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise UserError(f"{layers} layers x {hidden} is {names} in {folder}; give one of these files as the shape")
    return found[0] if found else None


def wanted_shape(
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
        named = matching_preset(layers, hidden, source.vocab, source.head_dim, widths_folder())
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


def _at_depth(
    source: Shape, layers: int, budget: int, kind: Budget, multiple_of: int, tolerance: float
) -> Shape | None:
    if not 1 <= layers <= source.layers:
        return None
    for step in (multiple_of, *(step for step in FALLBACKS if step < multiple_of)):
        shapes = _candidates(source, layers, budget, kind, step)
        near = [shape for shape in shapes if abs(measure(shape, kind) - budget) <= tolerance * budget]
        if near:
            return min(near, key=lambda shape: _stretch(shape, source))
    return None


def _candidates(source: Shape, layers: int, budget: int, kind: Budget, step: int) -> list[Shape]:
    if kind != "kv":
        return [_ffn_by_budget(shape, source, budget, kind, step) for shape in _widths(source, layers)]
    kv_heads = round(budget / _kv_bytes_per_head(source, layers))
    return [_kv_shape(source, layers, max(1, min(source.kv_heads, kv_heads)), step)]


def _widths(source: Shape, layers: int) -> list[Shape]:
    """source at every legal width; the ffn is still the source's."""
    group = source.heads // source.kv_heads
    shapes = []
    for hidden in range(source.head_dim, source.hidden + 1, source.head_dim):
        heads = min(hidden // source.head_dim, source.heads)
        sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": fewest_kv_heads(heads, group)}
        if hidden % heads == 0 and sizes["kv_heads"] <= source.kv_heads:
            shapes.append(source.model_copy(update=sizes))
    return shapes


def _ffn_by_budget(shape: Shape, source: Shape, budget: int, kind: Budget, step: int) -> Shape:
    base, next_ = (measure(shape.model_copy(update={"ffn": ffn}), kind) for ffn in (0, 1))
    ffn = _nearest_ffn((budget - base) / (next_ - base), most=source.ffn, step=step)
    return shape.model_copy(update={"ffn": ffn})


def _kv_shape(source: Shape, layers: int, kv_heads: int, step: int) -> Shape:
    heads = kv_heads * (source.heads // source.kv_heads)
    hidden = heads * min(source.head_dim, source.hidden // heads)
    ffn = _nearest_ffn(source.ffn * hidden / source.hidden, most=source.ffn, step=step)
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    return source.model_copy(update=sizes)


def _kv_bytes_per_head(source: Shape, layers: int) -> int:
    return source.model_copy(update={"layers": layers, "kv_heads": 1}).kv_bytes_per_token(2)


def _nearest_ffn(wanted: float, *, most: int, step: int) -> int:
    """Of the multiples of step, and most itself, the nearest to wanted."""
    below = max(step, int(wanted // step) * step)
    return min((min(most, ffn) for ffn in (below, below + step)), key=lambda ffn: abs(ffn - wanted))


def _stretch(shape: Shape, source: Shape) -> float:
    """How far ffn / hidden is from the source's, as a factor: half and double are equally far."""
    return abs(math.log(shape.ffn / shape.hidden * source.hidden / source.ffn))


def _reach(source: Shape, layers: int, kind: Budget) -> str:
    depth = f"{layers} layer{'s' if layers != 1 else ''}"
    if not 1 <= layers <= source.layers:
        return f"{depth}: the source has 1 to {source.layers}"
    if kind == "kv":
        low = _kv_bytes_per_head(source, layers)
        return f"{depth}: {low} to {low * source.kv_heads} in steps of {low}"
    widths, ends = _widths(source, layers), (min(FALLBACKS), source.ffn)
    low, *_, high = sorted(measure(shape.model_copy(update={"ffn": ffn}), kind) for shape in widths for ffn in ends)
    return f"{depth}: {count_text(low)} to {count_text(high)}"


def _amount(value: int, kind: Budget) -> str:
    if kind == "kv":
        return f"{value} bytes of KV cache per token"
    return f"{count_text(value)} parameters in {'all' if kind == 'total' else 'the blocks'}"
