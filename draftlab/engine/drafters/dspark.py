"""Drafting with a DSpark head: one pass computes the block, then tokens are drawn in order while the head is confident.

B rows (texts of a batch), K drafted tokens, V vocab. The distribution q of a drafted token depends only on the text and
on the drafted tokens before it, so the verify rules for chains are lossless. The head's confidence in a token, which
may end the draft, also depends only on tokens before it.
"""

import torch
from torch import Tensor

from draftlab.engine.drafters.dflash import DFlashDrafter
from draftlab.engine.generate import Draft, Sampler, TokenIds
from draftlab.model.dspark import DSpark
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.llama import Llama
from draftlab.sampling import SamplingParams


class DSparkDrafter(DFlashDrafter):
    """Drafts a block of tokens after each text, with a DSpark head.

    least_confidence: The draft ends before the product of its tokens' confidences falls below this. With 0, all K
    tokens are drafted.
    """

    def __init__(self, target: Llama | HFDecoder, head: DSpark, least_confidence: float = 0) -> None:
        super().__init__(target, head)
        self.dspark, self.least_confidence = head, least_confidence

    @torch.inference_mode()
    def propose(self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        token, count = self.begin(texts, count)
        block = self.dspark.block(token, self.width, self.cache)
        sampler = Sampler(sampling.unlimited(), self.vocab)
        survival = torch.ones(len(texts), device=self.head.device)
        tokens, distributions, confident = [], [], []
        for number in range(count):
            logits = block.logits(token)
            token, q = sampler(logits, uniform[:, number])
            tokens.append(token)
            distributions.append(q)
            if self.least_confidence:
                survival = survival * block.confidence()
                confident.append(survival >= self.least_confidence)
        counts = torch.stack(confident, 1).sum(1).tolist() if confident else [count] * len(texts)
        q = None if sampling.temperature == 0 else torch.stack(distributions, 1)
        return Draft(ids=torch.stack(tokens, 1), q=q, counts=counts)
