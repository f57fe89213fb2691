"""Options of the drafter medusa: heads that draft from the target's last hidden state."""

from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import model_validator

from draftlab.drafters.base import drafter
from draftlab.errors import UserError
from draftlab.heads.base import HeadSpec
from draftlab.registry import REJECTION
from draftlab_research.trees import WidthsSpec

if TYPE_CHECKING:
    from torch import Tensor

    from draftlab.drafters.context import DrafterContext, DrafterRun

MANIFEST = "medusa.json"
TRAINED_BY = "draftlab distill --student medusa"


@drafter("medusa", served_by=("vllm",))
class MedusaSpec(HeadSpec, WidthsSpec):
    """Options of Medusa heads.

    heads: Output directory of draftlab distill --student medusa. widths: Number of children of each node of a tree, by
    depth. If empty, the heads draft a chain.
    """

    format = "Medusa"
    file = MANIFEST
    remedy = f"; train heads with {TRAINED_BY}"

    @model_validator(mode="after")
    def _siblings_are_of_a_tree(self) -> Self:
        if not self.widths and "siblings" in self.model_fields_set:
            raise ValueError("siblings: works only with widths")
        return self

    @property
    def rejection_rule(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "recursive" if self.widths else REJECTION

    @classmethod
    def read(cls, folder: Path, target: Path) -> "Tensor":
        from draftlab_research.drafting.medusa import read

        return read(folder, target)

    def build(self, context: "DrafterContext") -> "DrafterRun":
        from draftlab_research.drafting.medusa import MedusaDrafter
        from draftlab_research.drafting.tree import full_tree

        target = context.own_engine(self, context.target)
        heads, parents = self.read(Path(self.heads), context.target_path), full_tree(self.widths)
        if len(self.widths) > len(heads):
            raise UserError(
                f"--drafter {self.text}: {len(heads)} heads draft at most {len(heads)} tokens on a path; give fewer "
                "widths"
            )
        ks = [len(parents)] if parents else context.ks_up_to(self, len(heads))
        drafter = MedusaDrafter(target, heads, parents or None, self.siblings)
        return context.run(drafter, ks=ks, facts=self.facts())
