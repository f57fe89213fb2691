"""The drafter fallback: prompt lookup first, and a draft model for texts without a match that is long enough.

B rows (texts of a batch), n scored tokens of a text, K drafted tokens, V vocab.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch import Tensor
from torch.nn import functional as F

from draftlab.acceptance.token_logprobs import TokenLogprobs
from draftlab.config.base import MAX_K
from draftlab.config.kinds import split_at
from draftlab.drafters.base import DrafterSpec, drafter
from draftlab.drafters.context import DrafterContext, DrafterRun, ReplayContext
from draftlab.drafters.lookup import LatestLookupDrafter, score_copies
from draftlab.drafters.model import DraftModelSpec
from draftlab.drafters.parallel import model_drafter
from draftlab.engine.generate import Draft, Drafter, TokenIds
from draftlab.model.decoder import KVCache
from draftlab.model.devices import staged
from draftlab.model.parallel import pard_token
from draftlab.sampling import SamplingParams

FALLBACK_LOOKUP_MAX = 8  # longer matches are right more often; see GateSpec.min_match


class FallbackDrafter(Drafter):
    """Drafts with a first drafter. Texts that it has no draft for get a draft from a second drafter.

    second_tokens: Largest number of tokens that the second drafter drafts, because its tokens cost more and are
    accepted less often. None: both drafters have the same limit.
    """

    def __init__(self, first: Drafter, second: Drafter, vocab: int, second_tokens: int | None = None) -> None:
        self.first = first
        self.second = second
        self.vocab = vocab
        self.second_tokens = second_tokens

    def reset(self, rows: int, capacity: int) -> None:
        self.first.reset(rows, capacity)
        self.second.reset(rows, capacity)

    def attach(self, cache: KVCache) -> None:
        for each in (self.first, self.second):
            each.attach(cache)

    def prefill(self, texts: TokenIds) -> None:
        for each in (self.first, self.second):
            each.prefill(texts)

    def propose(self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        first = self.first.propose(texts, count, sampling, uniform)
        if all(first.counts):
            return first
        fewer = min(count, self.second_tokens or count)
        second = self.second.propose(texts, fewer, sampling, uniform[:, :fewer])
        second = second.to(first.ids.device)
        if not any(first.counts):
            return second
        counts = [a or b for a, b in zip(first.counts, second.counts, strict=True)]
        from_first = staged(first.counts, first.ids.device) > 0  # [B]
        a, b = (F.pad(d.ids, (0, max(counts) - d.ids.shape[1])) for d in (first, second))
        ids = torch.where(from_first[:, None], a, b)
        if first.q is None and second.q is None:
            return Draft(ids=ids, q=None, counts=counts)
        both = (self._q(draft, padded) for draft, padded in ((first, a), (second, b)))
        return Draft(ids=ids, q=torch.where(from_first[:, None, None], *both), counts=counts)

    def _q(self, draft: Draft, ids: Tensor) -> Tensor:
        if draft.q is None:
            return F.one_hot(ids, self.vocab).float()
        return F.pad(draft.q, (0, 0, 0, ids.shape[1] - draft.q.shape[1]))


def after_lookup(lookup: TokenLogprobs, second: TokenLogprobs, second_tokens: int | None) -> TokenLogprobs:
    """Return the result of a drafter that drafts with a lookup, and with a model where the lookup has no draft.

    Args:
        lookup: Result of score_copies, with arrays [n, K].
        second: The model's result, [n] or [n, K].
        second_tokens: Largest number of tokens that the model drafts. None: K.
    """
    assert lookup.drafted is not None
    n, k = lookup.logprobs.shape
    copied = lookup.drafted > 0  # [n]
    first = np.arange(n)[:, None] - np.arange(k)  # [n, K] token at which the step of each entry begins
    # no step begins before token 0, and the lookup's result says so
    copies = (first < 0) | copied[first.clip(0)] if n else np.zeros((0, k), dtype=bool)
    own = [array if array.ndim == 2 else array[:, None] for array in (second.logprobs, second.ranks)]
    return TokenLogprobs(
        np.where(copies, lookup.logprobs, own[0]),
        np.where(copies, lookup.ranks, own[1]),
        drafted=np.where(copied, lookup.drafted, min(k, second_tokens or k)),
        modelled=~copied,
    )


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

    def after_lookup(self, longest: int, drafter: Drafter, vocab: int) -> Drafter:
        """Return a drafter that tries prompt lookup, and then `drafter`.

        longest: Largest length of a match, in tokens. vocab: Width of the target's logits.
        """
        return FallbackDrafter(self._lookup(longest), drafter, vocab, self.draft_tokens)

    def replayed_after_lookup(
        self, replay: ReplayContext, longest: int, seconds: "Sequence[TokenLogprobs]"
    ) -> list[TokenLogprobs]:
        """Return the results of the drafter after_lookup(longest, ...) on the texts of a replay.

        seconds: Result of the other drafter for each text.
        """
        lookups = score_copies(self._lookup(longest), replay.texts, replay.vocab, replay.most)
        pairs = zip(lookups, seconds, strict=True)
        return [after_lookup(lookup, second, self.draft_tokens) for lookup, second in pairs]

    def _lookup(self, longest: int) -> LatestLookupDrafter:
        return LatestLookupDrafter(longest, self.min_match)


@drafter("fallback")
class FallbackSpec(DraftModelSpec, GateSpec):
    by_age = True
    prompt_lookup_max: int = Field(FALLBACK_LOOKUP_MAX, ge=1)

    def build(self, context: DrafterContext) -> DrafterRun:
        model = context.load_draft(self.text, self.draft)
        drafter = self.after_lookup(self.prompt_lookup_max, model_drafter(model, context.vocab), context.vocab)
        return context.run(drafter, model=model)

    def acceptance(self, replay: ReplayContext) -> list[TokenLogprobs]:
        path = replay.draft_path(self.text, self.draft)
        at_once = pard_token(path) is not None
        seconds = replay.of_model(self.text, self.draft, at_once=at_once)
        return self.replayed_after_lookup(replay, self.prompt_lookup_max, seconds)
