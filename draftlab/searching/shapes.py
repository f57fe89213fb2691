"""Shapes that a search tries. No torch, so that a wrong size is said at once."""

from pathlib import Path

from draftlab.config.search import SearchConfig
from draftlab.model import hub
from draftlab.model.checkpoint import planned_shape
from draftlab.model.families import Budget, family
from draftlab.model.hf_files import check_trimmable
from draftlab.model.shape import Shape, parse_count, resolve


def shapes_to_try(config: SearchConfig) -> list[Shape]:
    """Return every depth at every width, or at the width and ffn that meet a budget.

    Raises:
        UserError: a size that the source has not, a budget that no depth meets, see also check_trimmable.
    """
    source = with_head(config, hub.locate(config.source, weights=False))
    depths = config.layers or default_depths(source)
    if config.params is not None:
        return family(source, depths, Budget(amount=parse_count(config.params), kind="total"))
    widths = config.widths or default_widths(source)
    return [resolve(source, layers=n, hidden=width) for n in depths for width in widths]


def with_head(config: SearchConfig, source: Path) -> Shape:
    """Return the source's shape with the head that all candidates have.

    Raises:
        UserError: see check_trimmable.
    """
    shape = planned_shape(source)
    if config.vocab is None:
        return shape
    check_trimmable(source, config.vocab)
    return shape.model_copy(update={"draft_vocab": config.vocab})


def default_depths(source: Shape) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, 16 ... up to half of the source."""
    steps = {n * 2**i for i in range(8) for n in (2, 3)} | {1}
    return sorted(n for n in steps if n <= max(1, source.layers // 2))


def default_widths(source: Shape) -> list[int]:
    """Return half, three quarters and all of the source's width, in whole heads."""
    heads = {max(1, source.heads * n // 4) for n in (2, 3, 4)}
    return sorted(n * source.hidden // source.heads for n in heads)
