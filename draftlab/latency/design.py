"""Families of shapes at an equal budget, with the latency that a law predicts for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftlab.errors import UserError
from draftlab.latency.scaling_law import ScalingLaw
from draftlab.model.families import Budget, family, shape_name
from draftlab.model.shape import Shape, write_shape_file


@dataclass(frozen=True, slots=True)
class Design:
    """Shapes by name, and milliseconds of their one-token passes; empty without a law."""

    shapes: dict[str, Shape]
    latency_ms: dict[str, float]

    def write(self, folder: Path, comment: str, *, overwrite: bool) -> None:
        """Write one shape file per shape. Raises UserError: one exists, and overwrite is off."""
        files = {folder / f"{name}.yaml": shape for name, shape in self.shapes.items()}
        if not overwrite and (there := [file for file in files if file.exists()]):
            raise UserError(f"{there[0]} exists; replace it with --force")
        for file, shape in files.items():
            write_shape_file(shape, file, comment)


def design(source: Shape, layers: Sequence[int], budget: Budget, law: ScalingLaw | None) -> Design:
    """Find one shape per depth within the budget. Raises UserError: no depth reaches it."""
    shapes = {shape_name(shape): shape for shape in family(source, layers, budget)}
    return Design(shapes, {name: law.ms(shape) for name, shape in shapes.items()} if law else {})
