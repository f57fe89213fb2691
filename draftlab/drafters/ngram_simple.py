"""The drafter ngram-simple: llama.cpp's lookup of the text's last n tokens."""

from typing import TYPE_CHECKING

from pydantic import Field

from draftlab.drafters import DrafterSpec, drafter
from draftlab.servers.kinds import PROMPT_LOOKUP_MAX

if TYPE_CHECKING:
    from draftlab.engine.drafters.context import DrafterContext, DrafterRun


@drafter("ngram-simple", served_by=("llama.cpp",))
class NgramSimpleSpec(DrafterSpec):
    """Drafts as llama-server does with --spec-type ngram-simple.

    size_n: Number of tokens to look for, --spec-ngram-simple-size-n. K is used if it is smaller.
    """

    size_n: int = Field(PROMPT_LOOKUP_MAX, ge=1)

    def build(self, context: "DrafterContext") -> "DrafterRun":
        from draftlab.engine.drafters.ngram import NgramSimpleDrafter

        return context.run(NgramSimpleDrafter(self.size_n))
