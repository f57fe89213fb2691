"""Medusa heads: the target drafts from its last hidden state."""

from pathlib import Path
from typing import TYPE_CHECKING

from draftlab import provenance
from draftlab.drafters import DrafterSpec, Input, RunFacts, drafter
from draftlab.errors import UserError

if TYPE_CHECKING:
    from draftlab.engine.drafters.context import DrafterContext, DrafterRun

MANIFEST = "medusa.json"
TRAINED_BY = "draftlab distill --student medusa"


@drafter("medusa", served_by=("vllm",))
class MedusaSpec(DrafterSpec):
    """Options of Medusa heads. heads: Output of draftlab distill --student medusa."""

    own_engine = True
    mode = "eager"  # other modes do not keep hidden states
    heads: str

    def inputs(self) -> list[Input]:
        return [Input(self.heads, self._check_heads)]

    def _check_heads(self, name: str, weights: bool) -> None:
        if not (Path(name) / MANIFEST).is_file():
            missing = f"{MANIFEST} is missing"
            raise UserError(
                f"--drafter {self.text}: {name} has no Medusa heads ({missing}); train heads with {TRAINED_BY}"
            )

    def check(self, run: RunFacts) -> None:
        super().check(run)
        from draftlab_research.drafting.medusa import read

        read(Path(self.heads), run.target)

    def build(self, context: "DrafterContext") -> "DrafterRun":
        from draftlab_research.drafting.medusa import MedusaDrafter, read

        heads = read(Path(self.heads), context.target_path)
        ks = [k for k in context.ks if k <= len(heads)]
        if not ks:
            most = len(heads)
            raise UserError(
                f"--drafter {self.text}: {most} heads draft at most {most} tokens; lower --k"
            )
        facts = {"heads_sha256": provenance.fingerprint(Path(self.heads))}
        return context.run(
            MedusaDrafter(context.own_engine(self, context.target), heads), ks=ks, facts=facts
        )
