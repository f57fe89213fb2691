"""Shapes of expansions (expand.py). No torch, so that a wrong size is said at once."""

from pathlib import Path

from draftlab.config.make import ExpandConfig
from draftlab.errors import UserError
from draftlab.model import families, hub
from draftlab.model.hf_files import MODEL_TYPES, read_config
from draftlab.model.hf_shapes import planned_shape
from draftlab.model.shape import Shape, check, fewest_kv_heads, parse_count, round_up, solve_ffn

SIZES = {"layers": "layers", "hidden": "width", "heads": "heads", "kv_heads": "kv-heads", "ffn": "ffn"}


def expansion(config: ExpandConfig, *, weights: bool = False) -> tuple[Path, Shape, Shape]:
    """Return the source's directory and shape, and the shape of its expansion.

    Raises:
        UserError: the source's norms do not scale plainly, or the shape does not contain it.
    """
    directory = hub.locate(config.source, weights=weights)
    if (kind := read_config(directory).get("model_type")) not in MODEL_TYPES:
        raise UserError(
            f"{config.source} is a {kind} model; expand takes {', '.join(MODEL_TYPES)}, whose norms scale plainly "
            "(those of others may add one to their weights)"
        )
    have = planned_shape(directory)
    shape = _requested(config, have)
    check_contains(shape, have)
    check(shape, llama=kind == "llama")
    return directory, have, shape


def kv_copies(have: Shape, shape: Shape) -> int:
    """Return how often each kv head is there, so that each serves no more of the source's heads than it can."""
    return -(-(have.heads // have.kv_heads) // (shape.heads // shape.kv_heads))


def check_contains(shape: Shape, have: Shape) -> None:
    """Check that a source can be expanded to a shape.

    Raises:
        UserError: an axis is shorter than the source's; head_dim, vocab or an option differs; the kv heads are too few.
    """
    for field, option in SIZES.items():
        size, least = getattr(shape, field), getattr(have, field)
        if size < least:
            raise UserError(f"--{option} {size} is less than the source has; at least --{option} {least}")
    for field in ("head_dim", "vocab", "tied", "qkv_bias", "o_bias", "mlp_bias", "qk_norm", "qk_layernorm"):
        size, own = getattr(shape, field), getattr(have, field)
        if size != own and not (field == "tied" and own):  # a tied head can be written out
            raise UserError(f"{field} {size} differs from the source's {own}, and expansion does not change it")
    fewest = have.kv_heads * kv_copies(have, shape)
    if shape.heads % shape.kv_heads == 0 and shape.kv_heads < fewest:
        raise UserError(
            f"{shape.heads} heads on {shape.kv_heads} kv-heads cannot repeat the source's {have.heads} on "
            f"{have.kv_heads}: each of those would be needed {kv_copies(have, shape)} times; at least "
            f"--kv-heads {fewest}, or as many heads per kv-head as the source has"
        )


def _requested(config: ExpandConfig, have: Shape) -> Shape:
    """Return the shape of --shape, or the source's with other sizes and, where not said, its proportions."""
    if config.shape is not None:
        _, place = families.locate_shape(config.shape)
        shape = place if isinstance(place, Shape) else planned_shape(place)
        return shape.model_copy(update={"draft_vocab": have.draft_vocab})
    width = config.width or have.hidden
    natural = max(have.heads, have.heads * width // have.hidden)
    heads = config.heads or next(n for n in range(natural, max(natural, width) + 1) if width % n == 0 or n >= width)
    sizes = {
        "layers": config.layers or have.layers,
        "hidden": width,
        "heads": heads,
        "kv_heads": config.kv_heads or fewest_kv_heads(heads, have.heads // have.kv_heads),
        "ffn": config.ffn or max(have.ffn, round_up(-(-have.ffn * width // have.hidden), config.multiple_of)),
    }
    shape = have.model_copy(update=sizes)
    if config.params is None:
        return shape
    total = parse_count(config.params)
    most = round_up(total // width + 1, config.multiple_of)
    return solve_ffn(shape, total, most=most, multiple_of=config.multiple_of)
