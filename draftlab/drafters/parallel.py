"""A parallel draft: all tokens of a draft from one pass."""

from pathlib import Path
from typing import TYPE_CHECKING

from draftlab.drafters import RunFacts, drafter
from draftlab.drafters.model import DraftModelSpec
from draftlab.errors import UserError
from draftlab.model import hub

if TYPE_CHECKING:
    from draftlab.engine.drafters.context import DrafterContext, DrafterRun


@drafter("parallel", served_by=("vllm",))
class ParallelSpec(DraftModelSpec):
    def check(self, run: RunFacts) -> None:
        super().check(run)
        from draftlab.model.parallel import pard_token

        draft: Path | None = hub.locate(self.draft) if self.draft else run.draft
        if draft is not None and pard_token(draft) is None:
            raise UserError(
                f"--drafter {self.text}: {draft} is no parallel draft; draftlab distill --parallel trains one"
            )

    def build(self, context: "DrafterContext") -> "DrafterRun":
        from draftlab.engine.drafters.parallel import ParallelDrafter

        model = context.load_draft(self.text, self.draft)
        return context.run(ParallelDrafter(model, context.vocab), model=model, facts={"parallel": True})
