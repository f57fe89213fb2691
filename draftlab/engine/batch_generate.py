"""Batched generation of text without drafts, for evaluation, training and stored outputs.

B prompts of a batch, P tokens of a prompt, n generated tokens, V vocab. Each prompt has its own random numbers, so its
samples do not depend on the other prompts of the batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftlab.console import note, progress
from draftlab.data import turns
from draftlab.data.prompts import Prompt, Prompts
from draftlab.engine.verify import check_logits, distribution, draw, most_probable
from draftlab.errors import UserError
from draftlab.model import checkpoint, devices, hub
from draftlab.model.decoder import Decoder, KVCache
from draftlab.model.hf_decoder import HFCache
from draftlab.model.llama import Cache, Llama
from draftlab.model.modes import in_native_mode, load, with_mode
from draftlab.model.recurrent_decoder import RecurrentCache
from draftlab.model.tokenizer import known_ids
from draftlab.runs import provenance
from draftlab.sampling import FinishReason, SamplingParams

GIGABYTE = 1_000_000_000
# The batch shrinks to its unfinished texts when at most this fraction of its texts is unfinished. On a CPU the time of
# a pass grows with each text, and a copy of the cache takes less time than a text.
MOST_RUNNING = 0.75
CPU_MOST_RUNNING = 0.99
# peak memory of a sampling step: logits, probabilities and cumulative sums in fp64
BYTES_PER_LOGIT = 32
# most tokens of a pass over whole texts, padding included; on a CPU larger passes are not faster, and delay progress
PASS_TOKENS = 2048
# Receives, after each step of a batch, the numbers of its prompts, their logits [B, V] and the sampled tokens [B]. A
# finished prompt may stay in the batch for some steps.
OnStep = Callable[[list[int], Tensor, Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How prompts are batched.

    Args:
        vocab: Number of ids that may be sampled. Larger ids are padding of the logits. None: all ids.
        batch_size: Largest number of prompts per batch.
        memory: Memory for logits and KV cache in GB. If batch_size prompts need more, batches are smaller.
        unfinished: Function that receives the number of unfinished texts in this process and returns the number in all
            processes. Generation goes on until it returns 0. Default: there is only this process.
    """

    vocab: int | None = None
    batch_size: int = 64
    memory: float = 2.0
    unfinished: Callable[[int], int] = int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The tokens generated after one prompt.

    logprobs: Log-probability with which each token was sampled; 0 for greedy tokens.
    """

    ids: np.ndarray  # [n]
    logprobs: np.ndarray  # [n]
    finish_reason: FinishReason

    @classmethod
    def truncated(cls, ids: np.ndarray, logprobs: np.ndarray, stop_token_ids: tuple[int, ...]) -> "Completion":
        """Return a Completion of `ids` up to and including the first stop token, or of all ids without one."""
        stops = np.flatnonzero(np.isin(ids, stop_token_ids))
        n = int(stops[0]) + 1 if len(stops) else len(ids)
        return cls(ids=ids[:n], logprobs=logprobs[:n], finish_reason="stop" if len(stops) else "length")


def load_generator(
    directory: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    device_map: str | None = None,
    *,
    int8: bool = False,
) -> Decoder:
    """Load a checkpoint for generation without drafts, in mode native on a CPU and in mode eager elsewhere.

    Args:
        dtype: Dtype of the passes. Default: checkpoint.compute_dtype.
        device_map: Same as in checkpoint.load_model.
        int8: Whether to round weights to int8, in mode native only.
    """
    dtype = dtype or checkpoint.compute_dtype(directory, device)
    rounded = ", weights rounded to int8" if int8 else ""
    note(f"loading {hub.checkpoint_name(directory)} in {devices.dtype_name(dtype)}{rounded}")
    model = load(directory, dtype, device, device_map).without_rollback()
    if int8:
        assert isinstance(model, Llama)  # callers check the mode
        return with_mode(model, "native", int8=True)
    return in_native_mode(model, dtype)


def generate_batch(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    batching: Batching = Batching(),
    *,
    numbers: Sequence[int] | None = None,
    advance: Callable[[float], None] = lambda done: None,
    on_step: OnStep | None = None,
) -> list[Completion]:
    """Generate one completion per prompt.

    Args:
        numbers: A number for each prompt. This number and the seed of `sampling` determine the prompt's samples.
            Default: the index of the prompt.
        advance: Callback that receives the number of finished prompts after each token of a batch. The prompts of the
            batch count in part, as if all completions had the largest length.
        on_step: Callback that receives the logits of each step.

    Raises:
        UserError: A prompt and its completion do not fit the model's context, or logits are not finite.
    """
    numbers = range(len(prompts)) if numbers is None else numbers
    check_context(max(map(len, prompts), default=0), sampling.max_tokens, model.context)
    completions: dict[int, Completion] = {}
    for group in _groups(model, prompts, sampling.max_tokens, batching):
        finished = len(completions)
        share = len(group) / sampling.max_tokens
        batch = _generate(
            model,
            [prompts[i] for i in group],
            [numbers[i] for i in group],
            sampling,
            batching,
            on_step,
            on_token=lambda length, finished=finished, share=share: advance(finished + share * length),
        )
        completions |= zip(group, batch, strict=True)
        advance(len(completions))
    return [completions[i] for i in range(len(prompts))]


def answer_turns(prompts: Prompts, target: Path, model: Decoder, sampling: SamplingParams) -> Prompts:
    """Return a prompt for every turn of a conversation, with the model's answers to the earlier turns, see turns.py.

    target: Directory of the model.
    """
    if prompts.requests == len(prompts.rows):
        return prompts
    vocab = known_ids(target)

    def answer(asked: list[Prompt], numbers: list[int]) -> list[list[int]]:
        with progress("the target answers earlier turns of the prompts", len(asked)) as advance:
            written = generate_batch(
                model,
                [p.ids for p in asked],
                sampling,
                Batching(vocab=vocab),
                numbers=numbers,
                advance=lambda done: advance(done, "turns"),
            )
        return [completion.ids.tolist() for completion in written]

    return turns.answered(
        prompts,
        checkpoint.load_tokenizer(target),
        target=provenance.fingerprint(target),
        sampling=sampling,
        answer=answer,
    )


def check_context(prompt_tokens: int, max_tokens: int, context: int) -> None:
    """Raise UserError if a prompt of `prompt_tokens` tokens and max_tokens new tokens exceed the context."""
    if prompt_tokens + max_tokens > context:
        raise UserError(
            f"a prompt of {prompt_tokens} tokens and {max_tokens} new tokens exceed the target's context of {context} "
            "tokens; use shorter prompts or a smaller --max-new-tokens"
        )


def _groups(
    model: Decoder, prompts: Sequence[Sequence[int]], max_tokens: int, batching: Batching
) -> Iterator[list[int]]:
    """Yield the indices of the prompts of each batch, longest prompts first.

    If the model cannot compute texts of different lengths at once, all prompts of a batch have the same length.
    """
    group: list[int] = []
    for i in sorted(range(len(prompts)), key=lambda i: -len(prompts[i])):
        if group:
            longest = len(prompts[group[0]])
            same_length = len(prompts[i]) == longest or model.takes_rows
            if not same_length or len(group) >= batch_size_for(model, longest + max_tokens, batching):
                yield group
                group = []
        group.append(i)
    if group:
        yield group


def batch_size_for(model: Decoder, length: int, batching: Batching) -> int:
    """Return the number of texts of `length` tokens in a batch: as many as fit into batching.memory.

    It is at least 1 and at most batching.batch_size.
    """
    text_bytes = BYTES_PER_LOGIT * (model.vocab or 0) + length * model.kv_bytes
    return max(1, min(batching.batch_size, int(batching.memory * GIGABYTE / text_bytes)))


@torch.inference_mode()
def _generate(
    model: Decoder,
    prompts: list[Sequence[int]],
    numbers: list[int],
    sampling: SamplingParams,
    batching: Batching,
    on_step: OnStep | None,
    on_token: Callable[[int], None],
) -> list[Completion]:
    """Return the completions of a batch. on_token: Callback that receives the number of tokens of each text so far."""
    device = model.device
    cache = model.new_cache(len(prompts), max(map(len, prompts)) + sampling.max_tokens)
    fed = _prefill(model, cache, prompts)
    uniform = torch.stack([_uniform(sampling, number) for number in numbers]).to(device)  # [B, T]
    stops = torch.tensor(sampling.stop_token_ids, device=device, dtype=torch.long)
    rows = torch.arange(len(prompts), device=device)  # prompt of each row of the cache
    running = torch.ones_like(rows, dtype=torch.bool)
    written = torch.zeros_like(uniform, dtype=torch.long)
    chosen = torch.zeros_like(uniform)  # log-probabilities
    t = 0
    for t in range(sampling.max_tokens):
        logits = model.forward(fed, cache, last=1)[:, -1, : batching.vocab]  # [B, V]
        check_logits(logits, "the target")
        ids, logprobs = _sample(logits.float(), sampling, uniform[rows, t])
        written[rows, t] = ids
        chosen[rows, t] = logprobs
        if on_step:
            on_step([numbers[row] for row in rows.tolist()], logits, ids)
        on_token(t + 1)
        fed = ids.unsqueeze(1)
        if sampling.stop_token_ids:
            running &= ~torch.isin(ids, stops)
            left = int(running.sum())
            if not batching.unfinished(left):
                break
            # a process without unfinished rows still takes part in passes, for the texts of other processes
            shrinks = isinstance(cache, Cache | HFCache | RecurrentCache)
            most = CPU_MOST_RUNNING if device.type == "cpu" else MOST_RUNNING
            if shrinks and 0 < left <= most * len(rows):
                cache = cache.rows(running)
                rows = rows[running]
                fed = fed[running]
                running = running[running]
    columns = zip(written[:, : t + 1].cpu().numpy(), chosen[:, : t + 1].cpu().numpy(), strict=True)
    return [Completion.truncated(*row, stop_token_ids=sampling.stop_token_ids) for row in columns]


def _prefill(model: Decoder, cache: KVCache, prompts: list[Sequence[int]]) -> Tensor:
    """Return the ids that the first step of generation feeds.

    If all prompts have the same length, the ids are the prompts, [B, P]. Otherwise this function feeds each prompt
    without its last token, and the ids are the last tokens, [B, 1].
    """
    shortest = min(map(len, prompts))
    longest = max(map(len, prompts))
    if shortest == longest:
        return torch.tensor([list(p) for p in prompts], device=model.device)  # [B, P]
    read = [p[:-1] for p in prompts]
    if isinstance(cache, Cache):
        for rows in _prefill_parts(read):
            part = model.new_cache(len(rows), max(1, *(len(read[row]) for row in rows)))
            model.forward(_padded([read[row] for row in rows], model.device), part, last=1)
            cache.copy_from(part, rows)
    else:
        model.forward(_padded(read, model.device), cache, last=1)
    cache.used = [len(p) for p in read]
    return torch.tensor([p[-1:] for p in prompts], device=model.device)  # [B, 1]


def _prefill_parts(texts: list[Sequence[int]]) -> Iterator[range]:
    """Yield the rows of each prefill pass. texts: Sorted, the longest first, so that a pass has little padding."""
    first = 0
    while first < len(texts):
        rows = max(1, PASS_TOKENS // max(1, len(texts[first])))
        yield range(first, min(first + rows, len(texts)))
        first += rows


def _padded(texts: list[Sequence[int]], device: torch.device) -> Tensor:
    """Return the texts as rows of equal length. Later tokens overwrite the padding, which is never read."""
    longest = max(1, *map(len, texts))
    return torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=device)


def _sample(logits: Tensor, sampling: SamplingParams, u: Tensor) -> tuple[Tensor, Tensor]:
    """Sample the next token of each text from logits [B, V]. Return tokens and log-probabilities, [B] each.

    u: Draws in [0, 1), [B].
    """
    if sampling.temperature == 0:
        ids = most_probable(logits)
        return ids, torch.zeros_like(ids, dtype=torch.float32)
    p = distribution(logits, sampling)
    ids = draw(p, u)
    return ids, p.gather(1, ids.unsqueeze(1)).squeeze(1).log()


def _uniform(sampling: SamplingParams, number: int) -> Tensor:
    rng = torch.Generator().manual_seed(sampling.seed * 1_000_003 + number)
    return torch.rand(sampling.max_tokens, generator=rng)
