"""lm-eval's generation tasks with answers that the speculative engine writes: they score what the target scores alone.

B prompts, T tokens of the longest, N new ones.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftlab.engine.decoder import Decoder
from draftlab.engine.generate import Drafter, Sampling, speculative
from draftlab.errors import UserError

if TYPE_CHECKING:  # takes seconds to import
    from lm_eval.api.model import LM

Write = Callable[[list[list[int]], int, list[str]], list[list[int]]]  # prompts, most new tokens, stops -> new tokens


def writer(
    target: Decoder, drafter: Drafter, k: int, tokenizer: PreTrainedTokenizerBase, eos_ids: tuple[int, ...]
) -> Write:
    """What the target writes greedily with k drafted tokens a step."""

    def write(prompts: list[list[int]], most: int, stops: list[str]) -> list[list[int]]:
        texts: list[list[int]] = [[] for _ in prompts]
        going = set(range(len(prompts)))
        for step in speculative(target, drafter, prompts, k, Sampling(max_new_tokens=most, eos_ids=eos_ids)):
            texts[step.row] += step.tokens
            if step.row in going and _stopped(str(tokenizer.decode(texts[step.row])), stops):
                going.remove(step.row)
            if not going:
                break
        return texts

    return write


def assisted_lm(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int, write: Write) -> "LM":
    """lm-eval's model, whose answers come from write; model only says how long a text may be.

    Raises:
        UserError: when asked to sample, which no two ways of decoding do alike.
    """
    from lm_eval.models.huggingface import HFLM

    hflm: Any = HFLM  # the decorator that registers it hides its constructor

    class Assisted(hflm):
        """Only _model_generate is another."""

        def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **how: Any) -> Tensor:
            if how.get("do_sample") or how.get("temperature"):
                raise UserError("an lm-eval task samples its answers; through the engine they must be greedy")
            mask = how["attention_mask"].bool()
            prompts = [row[kept].tolist() for row, kept in zip(context, mask, strict=True)]
            new = write(prompts, max_length - context.shape[1], stop)
            return torch.cat([context.cpu(), _padded(new, self.tokenizer.pad_token_id)], 1)  # [B, T + N]

    return Assisted(model, tokenizer=tokenizer, batch_size=batch_size)


def _stopped(text: str, stops: Sequence[str]) -> bool:
    return any(stop in text for stop in stops)


def _padded(texts: list[list[int]], pad: int) -> Tensor:
    return pad_sequence([torch.tensor(t, dtype=torch.long) for t in texts], batch_first=True, padding_value=pad)
