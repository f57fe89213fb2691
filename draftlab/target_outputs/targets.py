"""Targets in memory or on a server, which score or write the text of a store. A target can also verify its store.

R rows, T tokens, n scored tokens, k listed tokens, V vocab.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftlab.acceptance.token_logprobs import logits_in_parts, max_positions
from draftlab.console import note, progress
from draftlab.data import Batch
from draftlab.data.prompts import Prompt
from draftlab.data.text import chat_ids
from draftlab.engine.batch_generate import (
    GIGABYTE,
    PASS_TOKENS,
    Batching,
    check_context,
    generate_batch,
    load_generator,
)
from draftlab.errors import UserError
from draftlab.model import checkpoint, devices, hub
from draftlab.model.decoder import Decoder
from draftlab.model.tokenizer import known_ids
from draftlab.reading import reading
from draftlab.runs import provenance
from draftlab.sampling import SamplingParams
from draftlab.servers.client import Probe, Server
from draftlab.servers.kinds import RowError, ServedCompletion, ServerCompletion
from draftlab.target_outputs.outputs import (
    LEAST_LOGPROB,
    TEMPERATURES,
    StoredLogprobs,
    TargetOutput,
    padded,
)
from draftlab.target_outputs.store import (
    Logprobs,
    TargetInfo,
    check_tokenizer,
    logits_of,
    read_store,
)

PROBE_TEXT = "def f(x):\n    return [x + 1, 'naïve, 北京', 12345]  # Ünïcödé\n"
# Distance between the seeds of two calls of generate(). Within a call, each prompt's seed is 1 higher than the last.
SEEDS = 256
# positions per log-softmax; on a CPU, few positions fit into its cache
CPU_ROWS = 16
GPU_ROWS = 256
INT8 = "int8"  # dtype of a store whose target had weights rounded to int8
MEMORY = 2.0  # default memory in GB for logits and KV cache together
LOGPROBS: dict[str, Logprobs] = {"raw_logprobs": "raw", "processed_logprobs": "sampled"}


@dataclass(frozen=True)
class LocalTarget:
    """A target in memory. draftlab's engine runs the architectures that it supports, and transformers all others.

    Args:
        dtype: Default: the stored dtype, or float32 on a device that is slow in the stored dtype.
        memory: Limit in GB for logits and KV cache together. Default: 2. To write text, a GPU takes half of the memory
            that is free beside the weights.
        int8: Whether to round the weights to int8, in mode native only.
    """

    directory: Path
    device: torch.device
    dtype: torch.dtype | None = None
    device_map: str | None = None
    memory: float | None = None
    batch_size: int = 64
    int8: bool = False

    @cached_property
    def model(self) -> Decoder:
        return load_generator(self.directory, self.dtype, self.device, self.device_map, int8=self.int8)

    @cached_property
    def vocab(self) -> int:
        return known_ids(self.directory)

    def info(self) -> TargetInfo:
        dtype = self.dtype or checkpoint.compute_dtype(self.directory, self.device)
        return TargetInfo(
            source="draftlab",
            target=hub.checkpoint_name(self.directory),
            vocab=self.vocab,
            target_sha256=provenance.fingerprint(self.directory),
            dtype=INT8 if self.int8 else devices.dtype_name(dtype),
            batch_size=self.batch_size,
            logprobs="sampled",
            temperatures=TEMPERATURES,
        )

    def check_length(self, prompt: int, tokens: int) -> None:
        """Check that a prompt of `prompt` tokens and `tokens` new tokens fit the context. Raises UserError if not."""
        check_context(prompt, tokens, checkpoint.max_model_len(self.directory))

    def score(self, batch: Batch, k: int) -> StoredLogprobs:
        """Return the k most probable tokens at each position in the batch's mask."""
        most = max_positions(checkpoint.vocab_size(self.directory), self.memory or MEMORY)
        tokens = min(most, PASS_TOKENS) if self.device.type == "cpu" else most
        scores: dict[int, StoredLogprobs] = {}
        with progress("the target scores text", len(batch.ids)) as advance:
            for rows, part in batch.numbered_parts(tokens):
                parts = self._score(part, most, k).parts(part.mask.sum(1))
                scores |= dict(zip(rows, parts, strict=True))
                advance(len(scores), "sequences")
        return StoredLogprobs.joined([scores[row] for row in range(len(batch.ids))])

    def generate(
        self,
        prompts: Sequence[Prompt],
        numbers: Sequence[int],
        sampling: SamplingParams,
        k: int | None,
    ) -> list[TargetOutput]:
        """Continue the prompts. The outputs list the k most probable tokens at each position; k = 0 gives no lists.

        With k = None, log-probabilities are not needed either, and may be 0.

        Samples depend on the seed and on the numbers of the prompts.
        """
        model = self.model
        texts = [p.ids for p in prompts]
        memory = self.writing_memory()
        batching = Batching(vocab=self.vocab, batch_size=self.batch_size, memory=memory)
        tops: dict[int, list[StoredLogprobs]] = {number: [] for number in numbers}

        def keep_top(batch: list[int], logits: Tensor, ids: Tensor) -> None:
            parts = top_logprobs(logits, ids, k or 0).parts([1] * len(ids))
            for number, top in zip(batch, parts, strict=True):
                tops[number].append(top)

        with progress("the target writes text", len(texts)) as advance:
            written = generate_batch(
                model,
                texts,
                sampling,
                batching,
                numbers=numbers,
                advance=lambda done: advance(done, "texts"),
                on_step=keep_top if k else None,
            )
        return [
            TargetOutput(
                number=number,
                category=prompt.category,
                prompt=np.array(prompt.ids),
                ids=w.ids,
                finish_reason=w.finish_reason,
                logprobs=w.logprobs,
                top=StoredLogprobs.joined(tops[number][: len(w.ids)]) if k else None,
            )
            for prompt, number, w in zip(prompts, numbers, written, strict=True)
        ]

    def writing_memory(self) -> float:
        """Return the memory in GB for the texts that are written at once.

        On a GPU it is half of the free memory, because a step of a large batch takes little longer there.
        """
        if self.memory is not None:
            return self.memory
        if self.device.type != "cuda" or self.device_map is not None:
            return MEMORY
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return (torch.cuda.mem_get_info(self.device)[0] + cached) / 2 / GIGABYTE

    def _score(self, batch: Batch, most: int, k: int) -> StoredLogprobs:
        """Score a batch. Its logits must fit into memory, except that a single row that is too long is scored in parts.

        most: Largest number of positions per part.
        """
        ids = torch.from_numpy(batch.ids[:, :-1]).to(self.model.device)
        counted = batch.mask > 0
        first = int(counted.any(0).argmax())  # first position in the mask
        scores: list[StoredLogprobs] = []
        # only a single row comes in several parts
        for at, logits in logits_in_parts(self.model, ids, first, most):
            mask = counted[:, at : at + logits.shape[1]]
            labels = batch.ids[:, 1 + at :][:, : logits.shape[1]][mask]
            chosen = logits[..., : self.vocab][torch.from_numpy(mask).to(logits.device)]
            scores.append(top_logprobs(chosen, torch.from_numpy(labels), k))
        return StoredLogprobs.joined(scores)


@dataclass(frozen=True, slots=True)
class ServedTarget:
    """A target on a server. directory: Checkpoint or tokenizer with the vocabulary of the server's model."""

    server: Server
    directory: Path
    vocab: int
    probe: Probe

    @classmethod
    def connected(cls, server: Server, directory: Path, sampling: SamplingParams | None, k: int) -> "ServedTarget":
        """Check that a server can sample with these parameters and list k tokens, and return it as a target.

        sampling: None for a target that only scores text.

        Raises:
            UserError: The server's tokenizer differs, or the server cannot score or sample as needed, or returns other
                log-probabilities than needed.
        """
        ids = check_server_tokenizer(server, directory).ids
        url = server.http.url
        if sampling is None and not server.adapter.has_prompt_logprobs:
            raise UserError(
                f"{server.kind} returns no log-probabilities of given text; use --text target, or a vLLM or "
                "SGLang server"
            )
        probe = server.probe(ids)
        if probe.drafts and (k or sampling is None or sampling.temperature != 0):
            raise UserError(
                f"{url} drafts, and {server.kind} returns no log-probabilities of drafted tokens; start the server "
                "without a draft"
            )
        if sampling is not None and sampling.temperature == 0 and not probe.greedy:
            raise UserError(
                f"{url} does not choose the most probable token at temperature 0; check the server's sampling settings"
            )
        if k and probe.logprobs_mode.endswith("logits"):
            raise UserError(
                f"{url} returns logits instead of log-probabilities; start vLLM with --logprobs-mode raw_logprobs"
            )
        processed = sampling is not None and sampling.temperature != 0 and not sampling.unmodified
        if k and processed and probe.logprobs_mode != "raw_logprobs":
            raise UserError(
                f"{url} returns log-probabilities after temperature ({probe.logprobs_mode}); start the server with raw "
                "log-probabilities (docs/servers.md), or use --temperature 1 without --top-k, --top-p and --min-p"
            )
        return cls(server, directory, logits_of(directory), probe)

    def describe(self) -> dict[str, str]:
        return {
            "kind": self.server.kind,
            "version": self.server.version,
            "model": self.server.model,
        }

    def info(self) -> TargetInfo:
        return TargetInfo(
            source=f"{self.server.kind} {self.server.version}".strip(),
            target=self.server.model,
            target_sha256=None,
            vocab=self.vocab,
            dtype="as served",
            batch_size=1,  # the server decides how many requests it decodes together
            logprobs=LOGPROBS.get(self.probe.logprobs_mode, "none"),
            temperatures=(1.0,),
        )

    def check_length(self, prompt: int, tokens: int) -> None:
        """Do nothing, because the server itself refuses prompts that are too long."""

    def score(self, batch: Batch, k: int) -> StoredLogprobs:
        lists = score_on_server(self.server, batch, k, self.vocab)
        with self._consistent():
            return StoredLogprobs.of_lists(*lists, batch.ids[:, 1:][batch.mask > 0])

    def generate(
        self,
        prompts: Sequence[Prompt],
        numbers: Sequence[int],
        sampling: SamplingParams,
        k: int | None,
    ) -> list[TargetOutput | RowError]:
        """See LocalTarget.generate. An output is an error if the server cannot answer its prompt.

        Raises:
            UserError: The server fails, or returns impossible values.
        """
        seed = (sampling.seed * 1_000_003 + numbers[0] * SEEDS) % 2**31
        greedy = sampling.temperature == 0
        # the log-probability of a greedy token is not needed without lists
        with progress("the server writes text", len(prompts)) as advance:
            rows = self.server.generate_rows(
                [p.ids for p in prompts],
                replace(sampling, seed=seed, stop_token_ids=()),
                k=None if greedy and not k else k,
                advance=lambda done: advance(done, "answers"),
            )
        outputs: list[TargetOutput | RowError] = []
        for row, prompt, number in zip(rows, prompts, numbers, strict=True):
            if isinstance(row, RowError):
                outputs.append(row)
                continue
            self._check(row, f"prompt {number}")
            with self._consistent():
                (output,) = outputs_of([row], [number], k or 0, greedy=greedy)
            outputs.append(replace(output, category=prompt.category))
        return outputs

    def _check(self, row: ServerCompletion, asked: str) -> None:
        """Check that ids and log-probabilities are possible. Raises UserError if not. asked: Name of the prompt."""
        check_ids(row.ids, self.vocab, asked)
        if isinstance(row, ServedCompletion):
            for ids in row.top_ids:
                check_ids(ids, self.vocab, asked)
            if not self.probe.logprobs_mode.endswith("logits"):
                self.server.check_logprobs(row)

    def _consistent(self) -> AbstractContextManager[None]:
        return reading(f"{self.server.http.url} returned values that contradict each other")


Target = LocalTarget | ServedTarget


def top_logprobs(logits: Tensor, tokens: Tensor, k: int) -> StoredLogprobs:
    """Return the k most probable tokens at n positions, and the log-probabilities of the tokens that follow there.

    Args:
        logits: [n, V].
        tokens: Ids of the tokens that follow, [n].
    """
    pieces: list[StoredLogprobs] = []
    rows = CPU_ROWS if logits.device.type == "cpu" else GPU_ROWS
    for start in range(0, max(1, len(logits)), rows):  # without positions, a piece of 0 rows
        log_p = torch.log_softmax(logits[start : start + rows].float(), -1).clamp_min(LEAST_LOGPROB)
        values, ids = log_p.topk(k)
        rest = log_p.scatter(1, ids, -torch.inf).logsumexp(-1).clamp_min(-80)
        own = log_p.gather(1, tokens[start : start + rows, None].to(log_p.device)).squeeze(1)
        normalizers = torch.stack([(log_p / t).logsumexp(-1) for t in TEMPERATURES], 1)
        columns = (ids, values, rest, own, normalizers)
        pieces.append(StoredLogprobs(*(column.cpu().numpy() for column in columns)))
    return StoredLogprobs.joined(pieces)


def score_on_server(server: Server, batch: Batch, k: int, vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a server's log-probabilities at the n positions in the mask of a batch.

    Returns: ids [n, k] and log-probabilities [n, k] of the most probable tokens, and log-probabilities [n] of the
    tokens in the batch.

    Raises:
        UserError: The server fails, or lists a token beyond vocab.
    """
    counted = batch.mask > 0
    # tokens after the last position in the mask have no effect
    ends = [int(row.nonzero()[0].max(initial=-1)) + 1 for row in counted]
    asked = [number for number, end in enumerate(ends) if end]
    scored = server.prompt_logprobs([batch.ids[number, : ends[number] + 1].tolist() for number in asked], k)
    empty = np.empty((0, k), np.float32)
    rows = [(empty.astype(np.int64), empty, np.empty(0, np.float32))]
    for number, row in zip(asked, scored, strict=True):
        mask = counted[number, : ends[number]]
        top_ids = np.array(row.top_ids, np.int64)[mask]
        check_ids(top_ids, vocab, f"sequence {number} of a batch")
        top_logprobs = np.array(row.top_logprobs, np.float32)[mask]
        rows.append((top_ids, top_logprobs, np.array(row.logprobs, np.float32)[mask]))
    ids, logprobs, own = map(np.concatenate, zip(*rows, strict=True))
    return ids, logprobs, own


def outputs_of(
    written: Sequence[ServerCompletion], numbers: Sequence[int], k: int, *, greedy: bool = False
) -> list[TargetOutput]:
    """Convert completions of a server or of its log to outputs with the first k tokens of each list.

    Completions may lack log-probabilities only if k is 0; these are then 0.

    Args:
        greedy: Whether the target decoded greedily, so that each written token gets log-probability 0.

    Raises:
        ValueError: The log-probability of a token contradicts the list at its position.
    """
    outputs: list[TargetOutput] = []
    for completion, number in zip(written, numbers, strict=True):
        ids = np.array(completion.ids, np.int64)
        top = None
        own = np.zeros(len(ids), np.float32)
        if isinstance(completion, ServedCompletion):
            own = np.array(completion.logprobs, np.float32)
        if k:
            assert isinstance(completion, ServedCompletion)
            top_ids = np.array([row[:k] for row in completion.top_ids], np.int64).reshape(-1, k)
            listed = np.array([row[:k] for row in completion.top_logprobs], np.float32)
            top = StoredLogprobs.of_lists(top_ids, listed.reshape(-1, k), own, ids)
        outputs.append(
            TargetOutput(
                number=number,
                prompt=np.array(completion.prompt_ids),
                ids=ids,
                finish_reason="stop" if completion.finish_reason == "stop" else "length",
                logprobs=np.zeros_like(own) if greedy else own,
                top=top,
            )
        )
    return outputs


def check_ids(ids: np.ndarray | Sequence[int], vocab: int, asked: str) -> None:
    """Check that all token ids from a server are below vocab.

    asked: Name of the text that the server received, for the error.

    Raises:
        UserError: An id is not below vocab.
    """
    largest = int(np.max(ids, initial=0))
    if largest >= vocab:
        raise UserError(
            f"the server returned the token id {largest} for {asked}, but --target has only {vocab} ids; name the "
            "server's model by --target"
        )


@dataclass(frozen=True, slots=True)
class ProbeIds:
    """Token ids of a short text. split_alike: Whether the server splits the text into the same tokens."""

    ids: list[int]
    split_alike: bool


def check_server_tokenizer(server: Server, directory: Path) -> ProbeIds:
    """Check that a server and the tokenizer in `directory` have the same vocabulary, by a short text.

    llama.cpp splits the text of some models otherwise than their tokenizer. Its ids then have the same spelling here,
    and only requests of text are affected, which draftlab does not send. A server that cannot tokenize is not checked.

    Raises:
        UserError: The server's ids spell another text here.
    """
    tokenizer = checkpoint.load_tokenizer(directory)
    ids = tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"]
    served = server.tokenize(PROBE_TEXT)
    if served is None:
        note(f"{server.http.url} cannot tokenize text, so its vocabulary is assumed to be that of {directory}")
    if served is None or served == ids:
        return ProbeIds(ids, True)
    if max(served, default=0) >= len(tokenizer) or tokenizer.decode(served) != tokenizer.decode(ids):
        raise UserError(
            f"the server's tokenizer is not that of {directory}: they encode a test text differently; name the "
            "server's model by --target"
        )
    note(
        f"{server.http.url} splits text into other tokens of the same vocabulary than {directory}; draftlab sends "
        "token ids, so only users who send text are affected"
    )
    return ProbeIds(ids, False)


def check_server_template(server: Server, directory: Path) -> None:
    """Check that a server and the tokenizer in `directory` render a chat to the same tokens, by a chat of one message.

    A server that answers no chats is not checked.

    Raises:
        UserError: The tokens differ.
    """
    tokenizer = checkpoint.load_tokenizer(directory)
    ids = chat_ids([{"role": "user", "content": PROBE_TEXT}], tokenizer, str(directory))
    try:
        served, count = server.chat_prompt(PROBE_TEXT)
    except UserError as error:
        note(f"conversations have the chat template of {directory}, not compared: {error}")
        return
    if served not in (None, ids) or count != len(ids):
        raise UserError(
            f"{server.http.url} renders a chat of one message as {count} tokens, and the chat template of {directory} "
            f"as {len(ids)} other tokens; give {directory} the target's chat template, or store the target's outputs "
            "with draftlab outputs build --server URL --target TARGET, and distil with --outputs"
        )


# number of sequences that are scored again, and their batch size
SEQUENCES = 64
BATCH = 8
# Largest mean difference between stored and recomputed log-probabilities, in nats. For the embedded target, bf16 in
# vLLM and in transformers differ by 0.026. Weights with an error of 3 % differ by 0.10.
TOLERANCE = 0.06
# lower log-probabilities are not compared, because they are mostly rounding errors of the target
ROUNDED_BELOW = -8.0
SAME_TOP = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreVerification:
    """Differences between stored and recomputed log-probabilities, in nats.

    same_top: Fraction of positions with the same most probable token.
    """

    shards: int
    sequences: int
    mean: float
    worst: float
    same_top: float

    @property
    def good(self) -> bool:
        return self.mean < TOLERANCE and self.same_top > SAME_TOP

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "good": self.good}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCheck:
    """The check of stored outputs against the target. target: None: the target is not asked."""

    directory: Path
    target: Target | None

    def run(self) -> StoreVerification | None:
        """Compare the stored outputs with the target. Raises UserError: see verify."""
        return None if self.target is None else verify(self.directory, self.target)


def verify(directory: Path, target: Target, seed: int = 0) -> StoreVerification:
    """Read every shard, let the target score up to SEQUENCES sequences again, and compare the log-probabilities.

    Raises:
        UserError: A shard is corrupt or misaligned, the tokenizer differs, or the store has no top log-probabilities.
    """
    store = read_store(directory)
    manifest = store.manifest
    check_tokenizer(directory, target.directory)
    if not manifest.top_logprobs:
        raise UserError(
            f"the checksums of {directory} are right, but these outputs have no top log-probabilities to compare "
            "with the target's; build outputs with --top-logprobs 64"
        )
    order = np.random.default_rng(seed).permutation(len(store.outputs))[:SEQUENCES]
    differences = list[np.ndarray]()
    same = list[np.ndarray]()
    for start in range(0, len(order), BATCH):
        outputs = [store.outputs[i] for i in order[start : start + BATCH]]
        stored = StoredLogprobs.joined([o.top for o in outputs if o.top is not None])
        new = target.score(padded(outputs), manifest.top_logprobs)
        probable = stored.logprobs > ROUNDED_BELOW
        differences.append(np.abs(_same_tokens(stored, new, manifest.vocab) - stored.logprobs)[probable])
        same.append(new.ids[:, 0] == stored.ids[:, 0])
    apart = np.concatenate(differences)
    equal = np.concatenate(same)
    return StoreVerification(
        shards=len(manifest.shards),
        sequences=len(order),
        mean=float(apart.mean()),
        worst=float(apart.max()),
        same_top=float(equal.mean()),
    )


def _same_tokens(stored: StoredLogprobs, new: StoredLogprobs, vocab: int) -> np.ndarray:
    """Return the new log-probabilities of the stored ids, [n, k], for a comparison with the stored ones.

    If a stored id is missing in the new list of its position, its new log-probability is unknown, but it is at most the
    lowest value in the list. The id then gets its stored log-probability, or this lowest value if that is smaller.
    """
    values = np.empty_like(stored.logprobs)
    new_logprobs = new.logprobs.astype(np.float16).astype(np.float32)
    for row, (ids, logprobs) in enumerate(zip(new.ids, new_logprobs, strict=True)):
        listed = np.full(vocab, np.nan, np.float32)
        listed[ids] = logprobs
        now = listed[stored.ids[row]]
        values[row] = np.where(np.isnan(now), np.minimum(stored.logprobs[row], logprobs[-1]), now)
    return values
