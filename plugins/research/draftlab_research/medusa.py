"""Options of the drafter medusa: heads that draft from the target's last hidden state."""

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import model_validator
from typing_extensions import Self

from draftlab import provenance
from draftlab.drafters import DrafterSpec, Input, RunFacts, drafter
from draftlab.errors import UserError
from draftlab.registry import REJECTION
from draftlab_research.trees import WidthsSpec

if TYPE_CHECKING:
    from draftlab.engine.drafters.context import DrafterContext, DrafterRun

MANIFEST = "medusa.json"
TRAINED_BY = "draftlab distill --student medusa"


@drafter("medusa", served_by=("vllm",))
class MedusaSpec(WidthsSpec):
    """Options of Medusa heads.

    heads: Output directory of draftlab distill --student medusa. widths: Number of children of each node of a tree, by
    depth. If empty, the heads draft a chain.
    """

    heads: str

    @model_validator(mode="after")
    def _siblings_are_of_a_tree(self) -> Self:
        if not self.widths and "siblings" in self.model_fields_set:
            raise ValueError("siblings: works only with widths")
        return self

    @property
    def rejection_rule(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "recursive" if self.widths else REJECTION

    def inputs(self) -> list[Input]:
        return [Input(self.heads, self._check_heads)]

    def _check_heads(self, name: str, weights: bool) -> None:
        if not (Path(name) / MANIFEST).is_file():
            missing = f"{MANIFEST} is missing"
            raise UserError(
                f"--drafter {self.text}: {name} has no Medusa heads ({missing}); train heads with {TRAINED_BY}"
            )

    def check(self, run: RunFacts) -> None:
        super().check(run) if self.widths else DrafterSpec.check(self, run)
        from draftlab_research.drafting.medusa import read

        read(Path(self.heads), run.target)

    def build(self, context: "DrafterContext") -> "DrafterRun":
        from draftlab_research.drafting.medusa import MedusaDrafter, read
        from draftlab_research.drafting.tree import full_tree

        target = context.own_engine(self, context.target)
        heads = read(Path(self.heads), context.target_path)
        most = len(heads)
        if len(self.widths) > most:
            raise UserError(
                f"--drafter {self.text}: {most} heads draft at most {most} levels, but widths has "
                f"{len(self.widths)}; give fewer widths"
            )
        ks = [k for k in context.ks if k <= most]
        if not ks and not self.widths:
            raise UserError(
                f"--drafter {self.text}: {most} heads draft at most {most} tokens; lower --k"
            )
        facts = {"heads_sha256": provenance.fingerprint(Path(self.heads))}
        if not self.widths:
            return context.run(MedusaDrafter(target, heads), ks=ks, facts=facts)
        parents = full_tree(self.widths)
        drafter = MedusaDrafter(target, heads, parents, self.siblings)
        return context.run(drafter, ks=[len(parents)], facts=facts)
