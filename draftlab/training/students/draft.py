"""An ordinary draft: a language model with the target's vocabulary that drafts one token per pass."""

from collections.abc import Mapping
from pathlib import Path

from draftlab.model import hub
from draftlab.training import drafts
from draftlab.training.objectives import Offsets
from draftlab.training.run import Distillation, OpenStudent
from draftlab.training.students.base import StudentSpec, student


class DraftSpec(StudentSpec):
    """A student that starts from a draft's checkpoint."""

    starts_from_draft = True

    def name(self, draft: Path, target: Path) -> str:
        return f"distill-{hub.checkpoint_name(draft).removeprefix('prune-')}"

    def offsets(self, job: Distillation) -> Offsets | None:
        """Return the offsets that a parallel draft learns to predict, or None for an ordinary draft."""
        return None

    def facts(self, job: Distillation) -> Mapping[str, object]:
        return drafts.facts(job, self.offsets(job))

    def open(self, job: Distillation, state: Path) -> OpenStudent:
        return drafts.open_draft(job, self.offsets(job), state)


@student("draft")
class OrdinarySpec(DraftSpec):
    """A draft that makes one pass for each drafted token."""
