"""A loaded decoder as lm-eval's language model, so that accuracy needs no second copy of the weights.

B prompts or prefixes, N continuations, T tokens of the longest one, V vocab.
"""

import copy
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
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

BATCH_SIZE = 16  # of generation, and of transformers' models
PASS_TOKENS = 4096  # of prefixes or of continuations in one pass
LOGIT_BYTES = 2e9  # of a batch: logits, and their logarithms in float32
KV_BYTES = 4e9  # of a batch that generates
SAMPLING = {"temperature", "top_k", "top_p"}  # settings of sampling tasks that the engine has
GENERATION = SAMPLING | {"do_sample", "attention_mask"}

Generate = Callable[[list[list[int]], SamplingParams, list[str]], list[list[int]]]  # also stop strings -> new tokens
Progress = Callable[[int, int], None]  # requests done, of how many
Pair = tuple[list[int], list[int]]  # tokens of a prefix and of its continuation
Group = tuple[list[int], list[int]]  # tokens of a prefix, and which pairs continue it


def engine_generate(
    target: Decoder,
    drafter: Drafter | None,
    k: int,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: tuple[int, ...],
) -> Generate:
    """Return generation by the engine, with k drafted tokens per step; HFDecoder takes one prompt at a time."""

    def generate(prompts: list[list[int]], sampling: SamplingParams, stops: list[str]) -> list[list[int]]:
        rows = _rows_at_once(target, getattr(drafter, "model", None), prompts, sampling.max_tokens + k)
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
    batch_size: int | None = None,
    advance: Progress = lambda done, total: None,
) -> "LM":
    """Return lm-eval's HFLM on the weights of model, so that results compare with published ones.

    generate: generates the answers of generation tasks instead of the model alone; greedy ones only. batch_size: most
    texts per pass; default: as many as memory allows.
    """
    kind = _engine_class(model, generate, seed, batch_size, advance)
    return _hflm_around(kind, model, directory, tokenizer, batch_size)


def code_model(
    model: Decoder,
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    window: int,
    batch_size: int | None = None,
    advance: Progress = lambda done, total: None,
) -> "LM":
    """Return language_model corrected for code: choices start at a token of the whole text, after a single bos.

    HFLM encodes a context separately, without its trailing white space, and cuts as many tokens off the whole. Where a
    token spans punctuation, line break and indentation, as in code tokenizers, the model would not see the line break.
    And where a tokenizer adds bos, bos would be predicted from bos at the start of every document.
    """

    class Code(_engine_class(model, None, 0, batch_size, advance)):
        def loglikelihood(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            groups = itertools.groupby((request.arguments for request in requests), key=lambda pair: pair[0])
            split = (_split(tokenizer, text, [pair[1] for pair in pairs], window) for text, pairs in groups)
            return self._loglikelihood_tokens([(None, prefix, choice) for prefix, rest in split for choice in rest])

    return _hflm_around(Code, model, directory, tokenizer, batch_size, max_length=window, add_bos_token=False)


def _engine_class(
    model: Decoder, generate: Generate | None, seed: int, batch_size: int | None, advance: Progress
) -> Any:
    from lm_eval.models.huggingface import HFLM

    hflm: Any = HFLM  # the decorator that registers it hides its constructor from type checkers

    class Engine(hflm):
        """HFLM with passes and generation by the decoder."""

        def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
            return forward_uncached(model, inps, last=0)

        def _loglikelihood_tokens(
            self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **options: Any
        ) -> list[tuple[float, bool]]:
            if not isinstance(model, Llama):
                return super()._loglikelihood_tokens(requests, disable_tqdm, **options)
            wholes = [(context + choice)[-(self.max_length + 1) :] for _, context, choice in requests]
            lengths = [len(choice) for _, _, choice in requests]
            pairs = [(whole[:-n], whole[-n:]) for whole, n in zip(wholes, lengths, strict=True)]
            return continuation_log_probs(model, pairs, batch_size, advance)

        def loglikelihood_rolling(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[float]:
            """Ask for all windows of all texts at once, so that batches are of windows of about one length."""
            before = self.batch_size_per_gpu
            self.batch_size_per_gpu = sys.maxsize if isinstance(model, Llama) else before
            try:
                return super().loglikelihood_rolling(requests, disable_tqdm)
            finally:
                self.batch_size_per_gpu = before

        def generate_until(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[str]:
            self.answered, self.asked = 0, len(requests)
            return super().generate_until(requests, disable_tqdm)

        def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **settings: Any) -> Tensor:
            if generate is None and isinstance(model, HFDecoder):
                return super()._model_generate(context, max_length, stop, **settings)
            sampling = _sampling(settings, max_length - context.shape[1], seed)
            if generate is not None and sampling.temperature:
                raise UserError("an lm-eval task samples its answers; with a draft they must be greedy")
            mask = settings["attention_mask"].bool()
            prompts = [row[real].tolist() for row, real in zip(context, mask, strict=True)]
            new = (generate or self.by_model)(prompts, sampling, stop)
            self.answered += len(prompts)
            advance(self.answered, self.asked)
            return torch.cat([context.cpu(), _padded(new, self.tokenizer.pad_token_id)], 1)  # [B, T + N]

    return Engine


@torch.inference_mode()
def continuation_log_probs(
    model: Llama, pairs: Sequence[Pair], batch_size: int | None = None, advance: Progress = lambda done, total: None
) -> list[tuple[float, bool]]:
    """Return the log-probability of each continuation of a prefix, and whether greedy decoding would generate it.

    A prefix runs once for all its continuations; the four choices of an item cost little more than one.
    """
    scores: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
    done = 0
    for batch in _batches(model, pairs, batch_size or len(pairs)):
        members = [i for _, group in batch for i in group]
        for i, score in zip(members, _batch_log_probs(model, pairs, batch), strict=True):
            scores[i] = score
        done += len(members)
        advance(done, len(pairs))
    return scores


def _batches(model: Llama, pairs: Sequence[Pair], batch_size: int) -> Iterator[list[Group]]:
    """Yield batches of prefixes with what continues them, the longest first."""
    most = int(max(1, min(PASS_TOKENS, LOGIT_BYTES // (2 * 4 * model.shape.vocab))))  # tokens with logits in one pass

    def widest(groups: Sequence[Group]) -> int:
        return max(len(pairs[i][1]) for _, members in groups for i in members)

    def fits(groups: Sequence[Group]) -> bool:
        rows, width = sum(len(members) for _, members in groups), widest(groups)
        longest = max(len(prefix) for prefix, _ in groups) - 1
        small = len(groups) * longest <= PASS_TOKENS and rows * width <= most and rows <= batch_size
        return small and longest + width <= model.context

    prefixes: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, (prefix, _) in enumerate(pairs):
        prefixes[tuple(prefix)].append(i)
    waiting: list[Group] = []
    groups = [(list(prefix), sorted(at, key=lambda i: -len(pairs[i][1]))) for prefix, at in prefixes.items()]
    for prefix, members in sorted(groups, key=lambda group: -len(group[0]) - widest([group])):
        rows = max(1, min(batch_size, most // widest([([], members)])))
        for at in range(0, len(members), rows):
            group = (prefix, members[at : at + rows])
            if waiting and not fits([*waiting, group]):
                yield waiting
                waiting = []
            waiting.append(group)
    if waiting:
        yield waiting


def _batch_log_probs(model: Llama, pairs: Sequence[Pair], batch: Sequence[Group]) -> list[tuple[float, bool]]:
    heads = [prefix[:-1] for prefix, _ in batch]
    texts = [(prefix, pairs[i][1]) for prefix, members in batch for i in members]
    rows = _padded([[prefix[-1], *ids[:-1]] for prefix, ids in texts]).to(model.device)  # [N, T]
    longest = max(map(len, heads))
    cache = model.new_cache(len(batch), longest + rows.shape[1])
    if longest:
        model.forward(_padded(heads).to(model.device), cache, last=1)
        cache.used = [len(head) for head in heads]
    logits = model.forward(rows, cache.expand([len(members) for _, members in batch]))  # [N, T, V]
    return [_chosen(row[: len(ids)], ids) for row, (_, ids) in zip(logits, texts, strict=True)]


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
    kind: Any,
    model: Decoder,
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int | None,
    **settings: Any,
) -> "LM":
    """Build an HFLM; it reads only the config of its model, so one without weights serves for the engine's models."""
    shell = (
        model.model
        if isinstance(model, HFDecoder)
        else checkpoint.meta_model(checkpoint.read_config(directory), torch.float32)
    )
    lm = kind(shell, tokenizer=tokenizer, **settings)
    lm._device, lm._max_length = model.device, min(lm.max_length, model.context)
    lm.by_model = engine_generate(model, None, 0, tokenizer, checkpoint.eos_token_ids(directory))
    most = BATCH_SIZE
    if not isinstance(model, Llama):
        most = batch_size_for(lm.max_length, model_vocab_size(model) or len(tokenizer))
    lm.batch_size_per_gpu = batch_size or most
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


def _chosen(logits: Tensor, ids: list[int]) -> tuple[float, bool]:
    chosen = torch.tensor(ids, device=logits.device)
    picked = logits.float().log_softmax(-1).gather(-1, chosen[:, None])  # [T, 1]
    return float(picked.sum()), bool((logits.argmax(-1) == chosen).all())


def _rows_at_once(target: Decoder, draft: Decoder | None, prompts: list[list[int]], new_tokens: int) -> int:
    """Return how many prompts the caches of both models may hold together."""
    if HFDecoder in (type(target), type(draft)):
        return 1
    models = [model for model in (target, draft) if isinstance(model, Llama)]
    per_token = sum(model.shape.kv_bytes_per_token(model.embed.itemsize) for model in models)
    return int(max(1, KV_BYTES // (per_token * (max(map(len, prompts)) + new_tokens))))


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


def _padded(texts: Sequence[Sequence[int]], pad: int = 0) -> Tensor:
    return pad_sequence([torch.tensor(t, dtype=torch.long) for t in texts], batch_first=True, padding_value=pad)
