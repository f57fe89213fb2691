"""The drafter fallback: prompt lookup first, and a draft model for texts without a match that is long enough."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, PositiveInt

from draftlab.config.base import MAX_K
from draftlab.drafters import DrafterSpec, drafter, split_at
from draftlab.drafters.model import DraftModelSpec

if TYPE_CHECKING:
    from draftlab.acceptance.token_logprobs import TokenLogprobs
    from draftlab.engine.drafters.context import DrafterContext, DrafterRun
    from draftlab.engine.drafters.ngram import LatestLookupDrafter
    from draftlab.engine.generate import Drafter
    from draftlab.target_outputs.replay import ReplayContext

FALLBACK_LOOKUP_MAX = 8  # longer matches are right more often; see GateSpec.min_match


class GateSpec(DrafterSpec):
    """Base class of drafters that first try prompt lookup. If no match is long enough, another drafter drafts.

    min_match: Smallest length of a match, in tokens, for three kinds of n-grams, such as 3x1x5. The first number is for
    n-grams that occurred once before. The second is for n-grams that occurred several times, always before the same
    token. The third is for n-grams that occurred several times, before different tokens. With the default, trained
    drafts of SmolLM2-135M had the most tokens per target pass.
    draft_tokens: Largest number of tokens that the other drafter drafts. Default: K.
    """

    min_match: Annotated[list[PositiveInt], split_at("x")] = Field([2, 1, 3], min_length=3, max_length=3)
    draft_tokens: int | None = Field(None, ge=1, le=MAX_K)

    def after_lookup(self, longest: int, drafter: "Drafter", vocab: int) -> "Drafter":
        """Return a drafter that tries prompt lookup, and then `drafter`.

        longest: Largest length of a match, in tokens. vocab: Width of the target's logits.
        """
        from draftlab.engine.drafters.fallback import FallbackDrafter

        return FallbackDrafter(self._lookup(longest), drafter, vocab, self.draft_tokens)

    def replayed_after_lookup(
        self, replay: "ReplayContext", longest: int, seconds: "Sequence[TokenLogprobs]"
    ) -> "list[TokenLogprobs]":
        """Return the results of the drafter after_lookup(longest, ...) on the texts of a replay.

        seconds: Result of the other drafter for each text.
        """
        from draftlab.acceptance.lookup_logprobs import after_lookup, score_copies

        lookups = score_copies(self._lookup(longest), replay.texts, replay.vocab, replay.most)
        pairs = zip(lookups, seconds, strict=True)
        return [after_lookup(lookup, second, self.draft_tokens) for lookup, second in pairs]

    def _lookup(self, longest: int) -> "LatestLookupDrafter":
        from draftlab.engine.drafters.ngram import LatestLookupDrafter

        return LatestLookupDrafter(longest, self.min_match)


@drafter("fallback")
class FallbackSpec(DraftModelSpec, GateSpec):
    by_age = True
    prompt_lookup_max: int = Field(FALLBACK_LOOKUP_MAX, ge=1)

    def build(self, context: "DrafterContext") -> "DrafterRun":
        from draftlab.engine.drafters.parallel import model_drafter

        model = context.load_draft(self.text, self.draft)
        drafter = self.after_lookup(self.prompt_lookup_max, model_drafter(model, context.vocab), context.vocab)
        return context.run(drafter, model=model)

    def acceptance(self, replay: "ReplayContext") -> "list[TokenLogprobs]":
        from draftlab.model.parallel import pard_token

        path = replay.draft_path(self.text, self.draft)
        at_once = pard_token(path) is not None
        seconds = replay.of_model(self.text, self.draft, at_once=at_once)
        return self.replayed_after_lookup(replay, self.prompt_lookup_max, seconds)
