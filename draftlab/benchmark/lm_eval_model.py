"""A loaded decoder as lm-eval's language model, so that accuracy needs no second copy of the weights.

B prompts, T tokens of the longest one, N choices or new tokens, V vocab.
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

BATCH_SIZE = 16
LOGIT_BYTES = 2e9  # of a batch: logits, and their logarithms in float32
SAMPLING = {"temperature", "top_k", "top_p"}  # settings of sampling tasks that the engine has
GENERATION = SAMPLING | {"do_sample", "attention_mask"}

Generate = Callable[[list[list[int]], SamplingParams, list[str]], list[list[int]]]  # also stop strings -> new tokens


def engine_generate(
    target: Decoder,
    drafter: Drafter | None,
    k: int,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: tuple[int, ...],
) -> Generate:
    """Return generation by the engine, with k drafted tokens per step; HFDecoder takes one prompt at a time."""

    def generate(prompts: list[list[int]], sampling: SamplingParams, stops: list[str]) -> list[list[int]]:
        rows = 1 if HFDecoder in (type(target), type(getattr(drafter, "model", None))) else len(prompts)
        batches = (prompts[at : at + rows] for at in range(0, len(prompts), rows))
        sampling = replace(sampling, stop_token_ids=stop_token_ids)
        return [text for batch in batches for text in generate_batch(batch, sampling, stops)]

    def generate_batch(prompts: list[list[int]], sampling: SamplingParams, stops: list[str]) -> list[list[int]]:
        texts: list[list[int]] = [[] for _ in prompts]
        active = set(range(len(prompts)))
        for step in speculative_decode(target, drafter, prompts, k if drafter else 0, sampling):
            texts[step.row] += step.tokens
            if step.row in active and any(stop in str(tokenizer.decode(texts[step.row])) for stop in stops):
                active.remove(step.row)
            if not active:
                break
        return texts

    return generate


def language_model(
    model: Decoder,
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    generate: Generate | None = None,
    seed: int = 0,
    beat: Callable[[], None] = lambda: None,
) -> "LM":
    """Return lm-eval's HFLM on the weights of model, so that results compare with published ones.

    generate: generates the answers of generation tasks instead of the model alone; greedy ones only. beat: called at
    every pass over a batch.
    """
    hflm = _hflm()

    class Engine(hflm):
        """HFLM with passes and generation by the decoder."""

        def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
            beat()
            return forward_uncached(model, inps, last=0)

        def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **settings: Any) -> Tensor:
            beat()
            if generate is None and isinstance(model, HFDecoder):
                return super()._model_generate(context, max_length, stop, **settings)
            sampling = _sampling(settings, max_length - context.shape[1], seed)
            if generate is not None and sampling.temperature:
                raise UserError("an lm-eval task samples its answers; with a draft they must be greedy")
            mask = settings["attention_mask"].bool()
            prompts = [row[real].tolist() for row, real in zip(context, mask, strict=True)]
            new = (generate or by_model)(prompts, sampling, stop)
            return torch.cat([context.cpu(), _padded(new, self.tokenizer.pad_token_id)], 1)  # [B, T + N]

    by_model = engine_generate(model, None, 0, tokenizer, checkpoint.eos_token_ids(directory))
    return _hflm_around(Engine, model, directory, tokenizer)


def code_model(
    model: Decoder,
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    window: int,
    beat: Callable[[], None] = lambda: None,
) -> "LM":
    """Return language_model corrected for code: choices start at a token of the whole text, after a single bos.

    HFLM encodes a context separately, without its trailing white space, and cuts as many tokens off the whole. Where a
    token spans punctuation, line break and indentation, as in code tokenizers, the model would not see the line break.
    And where a tokenizer adds bos, bos would be predicted from bos at the start of every document.
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

    return _hflm_around(Code, model, directory, tokenizer, max_length=window, add_bos_token=False)


@torch.inference_mode()
def continuation_log_probs(
    model: Decoder, prefix: list[int], continuations: list[list[int]]
) -> list[tuple[float, bool]]:
    """Return the log-probability of each continuation of prefix, and whether greedy decoding would generate it.

    The prefix, of two tokens or more, runs once for all; the four choices of an item cost little more than one.
    """
    ids = [torch.tensor(c, device=model.device) for c in continuations]
    head = torch.tensor(prefix, device=model.device)
    cache = model.new_cache(1, len(prefix) + max(map(len, ids)) - 1)
    model.forward(head[None, :-1], cache, last=1)
    rows = pad_sequence([torch.cat([head[-1:], i[:-1]]) for i in ids], batch_first=True)  # [N, T]
    log_probs = model.forward(rows, cache.expand(len(ids))).float().log_softmax(-1)  # [N, T, V]
    return [_chosen(row[: len(i)], i) for row, i in zip(log_probs, ids, strict=True)]


def with_whole_head(model: Decoder, directory: Path) -> Decoder:
    """Return a model with its whole output head if it was trimmed; it shares all other weights."""
    if not isinstance(model, Llama) or model.head_ids is None:
        return model
    whole = copy.copy(model)
    weights = checkpoint.Weights(directory, model.embed.dtype, model.device)
    whole.head = model.embed if model.shape.tied else weights["lm_head.weight"]
    whole.head_ids = None
    return whole


def batch_size_for(window: int, vocab: int) -> int:
    """Return how many texts' logits and their logarithms fit LOGIT_BYTES."""
    return int(max(1, min(BATCH_SIZE, LOGIT_BYTES // (2 * 4 * window * vocab))))


def _hflm_around(
    kind: Any, model: Decoder, directory: Path, tokenizer: PreTrainedTokenizerBase, **settings: Any
) -> "LM":
    """Build an HFLM; it reads only the config of its model, so one without weights serves for the engine's models."""
    shell = (
        model.model
        if isinstance(model, HFDecoder)
        else checkpoint.meta_model(checkpoint.read_config(directory), torch.float32)
    )
    lm = kind(shell, tokenizer=tokenizer, **settings)
    lm._device, lm._max_length = model.device, min(lm.max_length, model.context)
    lm.batch_size_per_gpu = batch_size_for(lm.max_length, model_vocab_size(model) or len(tokenizer))
    return lm


def _sampling(settings: dict[str, Any], max_tokens: int, seed: int) -> SamplingParams:
    """Raises UserError: a generation setting that the engine does not have."""
    if unknown := sorted(set(settings) - GENERATION):
        known = ", ".join(sorted(SAMPLING))
        raise UserError(f"an lm-eval task sets {unknown[0]} for its answers; the engine supports {known}")
    if not settings.get("do_sample") and not settings.get("temperature"):
        return SamplingParams(max_tokens=max_tokens)
    cuts = {
        "top_k": int(settings.get("top_k", 50)),
        "top_p": float(settings.get("top_p", 1.0)),
    }  # transformers' own default
    return SamplingParams(
        temperature=float(settings.get("temperature") or 1.0), **cuts, max_tokens=max_tokens, seed=seed
    )


def _chosen(log_probs: Tensor, ids: Tensor) -> tuple[float, bool]:
    picked = log_probs.gather(-1, ids[:, None])  # [T, 1]
    return float(picked.sum()), bool((log_probs.argmax(-1) == ids).all())


def _split(
    tokenizer: PreTrainedTokenizerBase, text: str, choices: list[str], window: int
) -> tuple[list[int], list[list[int]]]:
    """Return the tokens of text that are the same before every choice, within the window, and those of each choice."""
    context, *wholes = tokenizer([text, *(text + choice for choice in choices)], verbose=False)["input_ids"]
    same = itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(context, *wholes, strict=False))
    shared = sum(1 for _ in same)
    longest = max(len(whole) for whole in wholes) - shared
    if longest >= window:
        raise UserError(f"a window of {window} tokens is too short for {NEXT_LINE}: a line here has {longest}")
    first = max(0, shared + longest - window - 1)  # the last token of all is only predicted
    return context[first:shared], [whole[shared:] for whole in wholes]


def _hflm() -> Any:
    """Return HFLM untyped: the decorator that registers it hides its constructor from type checkers."""
    from lm_eval.models.huggingface import HFLM

    return HFLM


def _padded(texts: Sequence[Sequence[int]], pad: int) -> Tensor:
    return pad_sequence([torch.tensor(t, dtype=torch.long) for t in texts], batch_first=True, padding_value=pad)
