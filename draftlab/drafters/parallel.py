"""The drafter parallel: a parallel draft (PARD, 2504.18583), which drafts all tokens in one pass, from mask tokens.

B rows (texts of a batch), K drafted tokens, V vocab. As in vLLM's parallel_drafting, a pass reads the uncached tokens
of the texts and K - 1 mask tokens. Then the cache is rolled back to the texts. The distribution q of a drafted token
does not depend on the other drafted tokens, so the verify rules for chains and trees are lossless.
"""

from pathlib import Path

import numpy as np
from torch import Tensor

from draftlab.acceptance.token_logprobs import TokenLogprobs
from draftlab.console import note
from draftlab.drafters.base import RunFacts, drafter
from draftlab.drafters.context import DrafterContext, DrafterRun, ReplayContext
from draftlab.drafters.model import DraftModelSpec
from draftlab.drafters.passes import Passes
from draftlab.engine.generate import Draft, ModelDrafter, TokenIds, draw_each
from draftlab.errors import UserError
from draftlab.model import hub
from draftlab.model.decoder import Decoder, feed
from draftlab.model.llama import Llama
from draftlab.model.parallel import mask_token, pard_token, trained_offsets
from draftlab.sampling import SamplingParams


class ParallelDrafter(ModelDrafter):
    """Drafts a chain with a parallel draft, in one pass."""

    def __init__(self, model: Decoder, vocab: int | None = None) -> None:
        """Make a drafter. vocab: Same as in Sampler. Raises UserError: the model is not a parallel draft."""
        super().__init__(model, vocab)
        self.token = mask_token(model)

    def propose(self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        logits = offset_logits(self, self.token, texts, count)
        return draw_each(logits, uniform, sampling, self.vocab)


def offset_logits(drafter: ModelDrafter, token: int, texts: TokenIds, count: int) -> Tensor:
    """Return the logits of the next `count` tokens after each text, [B, count, V]. Only the texts stay in the cache.

    token: The mask token.
    """
    drafter.roll_back(texts)
    masked = [text + [token] * (count - 1) for text in texts]
    logits = feed(drafter.model, drafter.cache, masked, drafter.own_vocab, count)
    # drop the keys of mask tokens
    drafter.cache.used = [len(text) for text in texts]
    return logits


def drafts_in_parallel(model: Decoder) -> bool:
    """Return whether a draft model is a parallel draft."""
    return isinstance(model, Llama) and model.pard_token is not None


def model_drafter(model: Decoder, vocab: int | None) -> ModelDrafter:
    """Return a drafter for a draft model: a ParallelDrafter for a parallel draft, else a ModelDrafter."""
    return ParallelDrafter(model, vocab) if drafts_in_parallel(model) else ModelDrafter(model, vocab)


@drafter("parallel", served_by=("vllm",))
class ParallelSpec(DraftModelSpec):
    by_age = True

    def check(self, run: RunFacts) -> None:
        super().check(run)
        draft: Path | None = hub.locate(self.draft) if self.draft else run.draft
        if draft is not None and pard_token(draft) is None:
            raise UserError(
                f"--drafter {self.text}: {draft} is not a parallel draft; train a parallel draft with draftlab distill "
                "--student parallel"
            )

    def build(self, context: DrafterContext) -> DrafterRun:
        model = context.load_draft(self.text, self.draft)
        return context.run(ParallelDrafter(model, context.vocab), model=model, facts={"parallel": True})

    @classmethod
    def step_cost(cls, passes: Passes, k: int, accepted: int) -> np.ndarray:
        return passes.step(k, unread=accepted + 1, at_once=True)

    def acceptance(self, replay: ReplayContext) -> list[TokenLogprobs]:
        path = replay.draft_path(self.text, self.draft)
        trained = trained_offsets(path)
        if trained is not None and replay.most > trained:
            note(
                f"{path} was trained to draft {trained} tokens in one pass, but the largest --k is {replay.most}; "
                "fewer of the later tokens will be accepted"
            )
        return replay.of_model(self.text, self.draft, at_once=True)
