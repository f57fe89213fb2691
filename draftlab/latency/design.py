"""Families of shapes at an equal budget, with the latency that a law predicts for them."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from draftlab.config.make import DesignConfig
from draftlab.errors import UserError
from draftlab.latency.scaling_law import read_law
from draftlab.model import families
from draftlab.model.head_ids import check_size
from draftlab.model.hf_shapes import named_shape
from draftlab.model.shape import Shape, parse_count, write_shape_file


@dataclass(frozen=True, slots=True)
class Design:
    """Shapes by name, and milliseconds of their one-token passes; empty without a law."""

    shapes: dict[str, Shape]
    latency_ms: dict[str, float]


def design(config: DesignConfig) -> Design:
    """Find one shape per depth within the budget, and write shape files if config.out is set.

    Raises:
        UserError: no depth reaches the budget, or a shape file exists and overwrite is off.
    """
    name, source = named_shape(config.source)
    if config.vocab is not None:
        check_size(config.vocab, source.vocab)
        source = source.model_copy(update={"draft_vocab": config.vocab})
    law = read_law(config.law) if config.law else None
    kind, amount = _budget(config)
    budget = families.Budget(
        amount=amount,
        kind=kind,
        multiple_of=config.multiple_of,
        width_multiple_of=config.width_multiple_of,
        tensor_parallel=config.tensor_parallel,
        latency_ms=law.ms if law and kind == "latency" else None,
    )
    family = families.family(families.unbounded(source) if config.free else source, config.layers, budget)
    shapes = {families.shape_name(shape): shape for shape in family}
    _check_new(config, shapes)
    from draftlab.pruning.trial_model import prunable_shape  # torch

    prunable_shape(config.source)
    _write(config, shapes, f"draftlab design: {kind} budget {amount:g}, from {name}")
    return Design(shapes, {name: law.ms(shape) for name, shape in shapes.items()} if law else {})


def _budget(config: DesignConfig) -> tuple[families.BudgetKind, float]:
    if config.params is not None:
        return "body" if config.body else "total", parse_count(config.params)
    if config.kv_kib is not None:
        return "kv", 1024 * config.kv_kib
    return "latency", config.latency_ms or 0


def _write(config: DesignConfig, shapes: dict[str, Shape], comment: str) -> None:
    if config.out is not None:
        for name, shape in shapes.items():
            write_shape_file(shape, _file(config.out, name), comment)


def _check_new(config: DesignConfig, shapes: Iterable[str]) -> None:
    for file in (_file(config.out, name) for name in shapes if config.out and not config.overwrite):
        if file.exists():
            raise UserError(f"{file} exists; replace it with --force")


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.yaml"
