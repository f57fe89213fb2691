"""A decoder that is in memory already as lm-eval's language model, so that accuracy needs no second copy of it.

B prompts, T tokens of the longest, N choices or new tokens, V vocab.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from draftlab.benchmark.code_tasks import NEXT_LINE
from draftlab.engine.generate import Drafter, speculative_decode
from draftlab.errors import UserError
from draftlab.model import checkpoint
from draftlab.model.decoder import Decoder, forward_uncached, model_vocab_size
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.llama import Llama
from draftlab.sampling import SamplingParams

if TYPE_CHECKING:  # takes seconds to import
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM

ROWS = 16  # of a batch
LOGIT_BYTES = 2e9  # of a batch: logits, and their logarithms in float32
SAMPLED = {"temperature", "top_k", "top_p"}  # what sampling tasks may say
GENERATION = SAMPLED | {"do_sample", "attention_mask"}

Write = Callable[[list[list[int]], SamplingParams, list[str]], list[list[int]]]  # prompts, how, stops -> new tokens


def writer(
    target: Decoder,
    drafter: Drafter | None,
    k: int,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: tuple[int, ...],
) -> Write:
    """What the target writes with k drafted tokens a step; what transformers runs, one prompt at a time."""

    def write(prompts: list[list[int]], sampling: SamplingParams, stops: list[str]) -> list[list[int]]:
        rows = 1 if HFDecoder in (type(target), type(getattr(drafter, "model", None))) else len(prompts)
        batches = (prompts[at : at + rows] for at in range(0, len(prompts), rows))
        sampling = replace(sampling, stop_token_ids=stop_token_ids)
        return [text for batch in batches for text in several(batch, sampling, stops)]

    def several(prompts: list[list[int]], sampling: SamplingParams, stops: list[str]) -> list[list[int]]:
        texts: list[list[int]] = [[] for _ in prompts]
        going = set(range(len(prompts)))
        for step in speculative_decode(target, drafter, prompts, k if drafter else 0, sampling):
            texts[step.row] += step.tokens
            if step.row in going and any(stop in str(tokenizer.decode(texts[step.row])) for stop in stops):
                going.remove(step.row)
            if not going:
                break
        return texts

    return write


def language_model(
    model: Decoder,
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    write: Write | None = None,
    seed: int = 0,
    beat: Callable[[], None] = lambda: None,
) -> "LM":
    """lm-eval's HFLM, so that numbers compare with published ones, on the weights of model.

    write: what writes the answers of generation tasks, instead of the model alone; greedy ones only. beat: called at
    every pass over a batch.
    """
    hflm = _hflm()

    class Engine(hflm):
        """The passes and the writing are the decoder's; all else is HFLM's."""

        def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
            beat()
            return forward_uncached(model, inps, last=0)

        def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **how: Any) -> Tensor:
            beat()
            if write is None and isinstance(model, HFDecoder):
                return super()._model_generate(context, max_length, stop, **how)
            sampling = _sampling(how, max_length - context.shape[1], seed)
            if write is not None and sampling.temperature:
                raise UserError("an lm-eval task samples its answers; through the engine they must be greedy")
            mask = how["attention_mask"].bool()
            prompts = [row[kept].tolist() for row, kept in zip(context, mask, strict=True)]
            new = (write or alone)(prompts, sampling, stop)
            return torch.cat([context.cpu(), _padded(new, self.tokenizer.pad_token_id)], 1)  # [B, T + N]

    alone = writer(model, None, 0, tokenizer, checkpoint.eos_token_ids(directory))
    return _around(Engine, model, directory, tokenizer)


def code_model(
    model: Decoder,
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    window: int,
    beat: Callable[[], None] = lambda: None,
) -> "LM":
    """The same, set right for code: choices begin at a token of the whole text, and bos stands once in front.

    HFLM encodes a context alone, without its closing white space, and counts its tokens off the whole. Where a token
    holds punctuation, line break and indentation at once, as in code tokenizers, the model would not see the line
    break. And where a tokenizer puts bos in front, bos would be predicted from bos at the start of every document.
    """
    hflm = _hflm()

    class Code(hflm):
        def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
            beat()
            return forward_uncached(model, inps, last=0)

        def loglikelihood(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            groups = itertools.groupby((request.arguments for request in requests), key=lambda pair: pair[0])
            split = (_split(tokenizer, text, [pair[1] for pair in pairs], window) for text, pairs in groups)
            return [score for prefix, rest in split for score in scored(prefix, rest)]

    def scored(prefix: list[int], continuations: list[list[int]]) -> list[tuple[float, bool]]:
        beat()
        return continuation_log_probs(model, prefix, continuations)

    return _around(Code, model, directory, tokenizer, max_length=window, add_bos_token=False)


@torch.inference_mode()
def continuation_log_probs(
    model: Decoder, prefix: list[int], continuations: list[list[int]]
) -> list[tuple[float, bool]]:
    """Log-probability of each continuation of prefix, and whether greedy decoding would give it.

    The prefix, of two tokens or more, is run once for all; the four choices of an item cost little more than one.
    """
    ids = [torch.tensor(c, device=model.device) for c in continuations]
    head = torch.tensor(prefix, device=model.device)
    cache = model.new_cache(1, len(prefix) + max(map(len, ids)) - 1)
    model.forward(head[None, :-1], cache, last=1)
    rows = pad_sequence([torch.cat([head[-1:], i[:-1]]) for i in ids], batch_first=True)  # [N, T]
    log_probs = model.forward(rows, cache.expand(len(ids))).float().log_softmax(-1)  # [N, T, V]
    return [_chosen(row[: len(i)], i) for row, i in zip(log_probs, ids, strict=True)]


def whole_head(model: Decoder, directory: Path) -> Decoder:
    """A model whose head was trimmed with all of it again, sharing all other weights; any other model as it is."""
    if not isinstance(model, Llama) or model.head_ids is None:
        return model
    whole = copy.copy(model)
    weights = checkpoint.Weights(directory, model.embed.dtype, model.device)
    whole.head = model.embed if model.shape.tied else weights["lm_head.weight"]
    whole.head_ids = None
    return whole


def rows_within(window: int, vocab: int) -> int:
    """Texts of a batch whose logits and their logarithms take at most LOGIT_BYTES."""
    return int(max(1, min(ROWS, LOGIT_BYTES // (2 * 4 * window * vocab))))


def _around(kind: Any, model: Decoder, directory: Path, tokenizer: PreTrainedTokenizerBase, **how: Any) -> "LM":
    """HFLM asks its model for its config alone: of a model that the engine runs, one without weights will do."""
    shown = (
        model.model
        if isinstance(model, HFDecoder)
        else checkpoint.meta_model(checkpoint.read_config(directory), torch.float32)
    )
    lm = kind(shown, tokenizer=tokenizer, **how)
    lm._device, lm._max_length = model.device, min(lm.max_length, model.context)
    lm.batch_size_per_gpu = rows_within(lm.max_length, model_vocab_size(model) or len(tokenizer))
    return lm


def _sampling(how: dict[str, Any], new_tokens: int, seed: int) -> SamplingParams:
    """Raises UserError: a way of generating that the engine does not have."""
    if odd := sorted(set(how) - GENERATION):
        raise UserError(f"an lm-eval task sets {odd[0]} for its answers; the engine knows {', '.join(sorted(SAMPLED))}")
    if not how.get("do_sample") and not how.get("temperature"):
        return SamplingParams(max_tokens=new_tokens)
    cuts = {"top_k": int(how.get("top_k", 50)), "top_p": float(how.get("top_p", 1.0))}  # transformers' own default
    return SamplingParams(temperature=float(how.get("temperature") or 1.0), **cuts, max_tokens=new_tokens, seed=seed)


def _chosen(log_probs: Tensor, ids: Tensor) -> tuple[float, bool]:
    picked = log_probs.gather(-1, ids[:, None])  # [T, 1]
    return float(picked.sum()), bool((log_probs.argmax(-1) == ids).all())


def _split(
    tokenizer: PreTrainedTokenizerBase, text: str, choices: list[str], window: int
) -> tuple[list[int], list[list[int]]]:
    """The tokens of text that it has before every choice, as many as the window lets, and what follows by choice."""
    alone, *wholes = tokenizer([text, *(text + choice for choice in choices)], verbose=False)["input_ids"]
    same = itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(alone, *wholes, strict=False))
    shared = sum(1 for _ in same)
    longest = max(len(whole) for whole in wholes) - shared
    if longest >= window:
        raise UserError(f"a window of {window} tokens is too short for {NEXT_LINE}: a line here has {longest}")
    first = max(0, shared + longest - window - 1)  # the last token of all is only predicted
    return alone[first:shared], [whole[shared:] for whole in wholes]


def _hflm() -> Any:
    """HFLM; the decorator that registers it hides its constructor from type checkers."""
    from lm_eval.models.huggingface import HFLM

    return HFLM


def _padded(texts: Sequence[Sequence[int]], pad: int) -> Tensor:
    return pad_sequence([torch.tensor(t, dtype=torch.long) for t in texts], batch_first=True, padding_value=pad)
