"""The drafter ngram-simple: llama.cpp's lookup of the text's last n tokens."""

from typing import TYPE_CHECKING

from pydantic import Field

from draftlab.drafters import DrafterSpec, drafter
from draftlab.servers.kinds import PROMPT_LOOKUP_MAX

if TYPE_CHECKING:
    from draftlab.acceptance.token_logprobs import TokenLogprobs
    from draftlab.engine.drafters.context import DrafterContext, DrafterRun
    from draftlab.target_outputs.replay import ReplayContext


@drafter("ngram-simple", served_by=("llama.cpp",))
class NgramSimpleSpec(DrafterSpec):
    """Drafts as llama-server does with --spec-type ngram-simple.

    size_n: Number of tokens to look for, --spec-ngram-simple-size-n. K is used if it is smaller.
    """

    by_age = True
    size_n: int = Field(PROMPT_LOOKUP_MAX, ge=1)

    def build(self, context: "DrafterContext") -> "DrafterRun":
        from draftlab.engine.drafters.ngram import NgramSimpleDrafter

        return context.run(NgramSimpleDrafter(self.size_n))

    def acceptance(self, replay: "ReplayContext") -> "list[TokenLogprobs]":
        from draftlab.engine.drafters.ngram import NgramSimpleDrafter

        return replay.copies_by_k(NgramSimpleDrafter(self.size_n))
