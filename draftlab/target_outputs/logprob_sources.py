"""Whose distributions a cache keeps: of a target in memory, or of one that a server runs; and what is kept of them.

R rows, T tokens, n of them that count, P prompt tokens, k listed tokens, V vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from draftlab import provenance
from draftlab.acceptance.token_logprobs import logits_in_parts, max_positions
from draftlab.console import note
from draftlab.data import Batch
from draftlab.distill.fused_loss import Dense
from draftlab.distill.on_policy import GeneratedRows
from draftlab.distill.teachers import check_ids, log_tail_mass, served_logprobs
from draftlab.engine.batch_generate import BatchSettings, generate_batch, load_generator
from draftlab.errors import UserError
from draftlab.model import checkpoint, hub
from draftlab.model.decoder import Decoder
from draftlab.model.tokenizer import known_ids
from draftlab.sampling import SamplingParams
from draftlab.servers.adapters import Completion
from draftlab.servers.client import Probe, Server

TEMPERATURES = (0.6, 0.8, 1.0, 1.5, 2.0)
ROUNDING = 0.01  # nats by which a server may say the same log-probability twice
PROBE_TEXT = "def f(x):\n    return [x + 1, 'naïve, 北京', 12345]  # Ünïcödé\n"


@dataclass(frozen=True, slots=True)
class Entries:
    """What is kept of the tokens of some sequences: flat over the predicted tokens."""

    topk_id: np.ndarray  # u32 [n, k], the most probable first
    topk_logp: np.ndarray  # fp16 [n, k]
    tail_logp: np.ndarray  # fp32 [n]
    tok_logp: np.ndarray  # fp16 [n]
    lse: np.ndarray  # fp32 [n, T]: log-sum-exp at T less that at 1 over T, so that log p_T = log p / T - lse

    @classmethod
    def none(cls, k: int) -> "Entries":
        """Of no token."""
        listed, flat = np.empty((0, k)), np.empty(0)
        return cls(
            listed.astype(np.uint32), listed.astype(np.float16), flat.astype(np.float32), flat.astype(np.float16),
            np.empty((0, len(TEMPERATURES)), np.float32),
        )  # fmt: skip


Kept = tuple[Batch, Entries]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a manifest says about an origin. source: hf, or the kind of server."""

    target: str
    target_sha256: str | None  # None: a server does not say
    vocab: int
    source: str
    logprobs: str
    temperatures: tuple[float, ...]


class Origin(Protocol):
    """Whose distributions are kept. directory: a checkpoint, or a tokenizer alone."""

    @property
    def directory(self) -> Path: ...

    def facts(self) -> Facts: ...

    def see(self, batch: Batch, k: int) -> Entries:
        """Of the tokens that count."""
        ...

    def write(self, prompts: np.ndarray, how: SamplingParams, k: int) -> Kept:
        """Let it continue prompts [R, P] by how.max_tokens; shorter texts are padded."""
        ...


@dataclass(frozen=True)
class Local:
    """The target in memory, by the engine where it can run.

    dtype: None is that of its weights, as far as the device computes in it. memory: GB that logits may take.
    """

    directory: Path
    device: torch.device
    dtype: torch.dtype | None = None
    device_map: str | None = None
    memory: float = 2.0

    @cached_property
    def model(self) -> Decoder:
        return load_generator(self.directory, self.dtype, self.device, self.device_map)

    @cached_property
    def vocab(self) -> int:
        return known_ids(self.directory)

    def facts(self) -> Facts:
        return Facts(
            target=hub.checkpoint_name(self.directory), target_sha256=provenance.fingerprint(self.directory),
            vocab=self.vocab, source="hf", logprobs="raw", temperatures=TEMPERATURES,
        )  # fmt: skip

    def see(self, batch: Batch, k: int) -> Entries:
        most, width = max_positions(checkpoint.vocab_size(self.directory), self.memory), batch.mask.shape[1]
        found = [_seen(self.model, rows, self.vocab, most, k) for rows in batch.split(max(1, most // width))]
        return Entries(*(np.concatenate(column) for column in zip(*map(_columns, found), strict=True)))

    def write(self, prompts: np.ndarray, how: SamplingParams, k: int) -> Kept:
        sampling = replace(how, stop_token_ids=checkpoint.eos_token_ids(self.directory))
        settings = BatchSettings(vocab=self.vocab, memory=self.memory)
        written = generate_batch(self.model, prompts.tolist(), sampling, settings)
        batch = GeneratedRows.of(prompts, written, how.max_tokens, len(prompts)).batch(0)
        return batch, self.see(batch, k)


@dataclass(frozen=True, slots=True)
class Served:
    """A target that runs on a server. directory: a checkpoint or tokenizer with the same vocabulary."""

    server: Server
    directory: Path
    vocab: int
    probe: Probe

    @classmethod
    def of(cls, server: Server, directory: Path, temperature: float | None) -> "Served":
        """temperature: at which it is to write, None where it only looks.

        Raises:
            UserError: another tokenizer, or its log-probabilities are not the model's own at that temperature.
        """
        ids = same_ids(server, directory)
        if temperature is None and not server.adapter.has_prompt_logprobs:
            raise UserError(f"{server.kind} does not score given text; use --text target, or vLLM or SGLang")
        probe, url = server.probe(ids), server.http.url
        if probe.logprobs_mode.endswith("logits"):
            raise UserError(f"{url} gives logits instead of log-probabilities; start it with raw log-probabilities")
        if temperature not in (None, 0, 1) and probe.logprobs_mode != "raw_logprobs":
            raise UserError(
                f"{url} gives log-probabilities after temperature ({probe.logprobs_mode}); sample at temperature 1, "
                "or start it with raw ones (docs/servers.md)"
            )
        if temperature == 0 and not probe.greedy:
            raise UserError(f"{url} does not take the most probable token at temperature 0")
        return cls(server, directory, vocab_of(directory), probe)

    def facts(self) -> Facts:
        return Facts(
            target=self.server.model, target_sha256=None, vocab=self.vocab, source=self.server.kind,
            logprobs=self.probe.logprobs_mode, temperatures=(1.0,),
        )  # fmt: skip

    def see(self, batch: Batch, k: int) -> Entries:
        ids, log_p, came = served_logprobs(self.server, batch, k, self.vocab)
        try:
            return listed_entries(ids, log_p, came, batch.ids[:, 1:][batch.mask > 0])
        except ValueError as error:
            raise UserError(f"{self.server.http.url} contradicts itself: {error}") from None

    def write(self, prompts: np.ndarray, how: SamplingParams, k: int) -> Kept:
        found = self.server.generate(prompts.tolist(), how, k=k)
        try:
            kept = kept_rows(found, prompts.shape[1] + how.max_tokens - 1, k)
        except ValueError as error:
            raise UserError(f"{self.server.http.url} contradicts itself: {error}") from None
        check_ids(kept[1].topk_id, self.vocab)
        return kept


def _seen(model: Decoder, batch: Batch, vocab: int, most: int, k: int) -> Entries:
    """What is kept of a batch whose logits fit, or of one row, in parts."""
    ids, counted = torch.from_numpy(batch.ids[:, :-1]).to(model.device), batch.mask > 0
    where = counted.any(0).nonzero()[0]
    found = [Entries.none(k)]
    if len(where):
        first, end = int(where[0]), int(where[-1]) + 1  # what comes later decides nothing
        for at, logits in logits_in_parts(model, ids[:, :end], first, most):
            here = slice(at, at + logits.shape[1])
            rows = torch.from_numpy(counted[:, here]).to(logits.device)
            labels = torch.from_numpy(batch.ids[:, 1:][:, here][counted[:, here]]).to(logits.device)
            found.append(entries(Dense(logits[..., :vocab][rows], None), labels, k))
    return Entries(*(np.concatenate(column) for column in zip(*map(_columns, found), strict=True)))


def _columns(one: Entries) -> tuple[np.ndarray, ...]:
    return tuple(getattr(one, name) for name in Entries.__slots__)


def entries(teacher: Dense, labels: Tensor, k: int, rows: int = 256) -> Entries:
    """From the target's hidden states of n positions and the tokens that came, [n]."""
    logits_in_parts: list[list[np.ndarray]] = []
    for start in range(0, len(labels), rows):
        log_p = teacher.log_probs(slice(start, start + rows), 1.0)  # [c, V]
        values, ids = log_p.topk(k)
        tail = log_p.scatter(1, ids, -torch.inf).logsumexp(-1).clamp_min(-80)
        came = log_p.gather(1, labels[start : start + rows, None]).squeeze(1)
        lse = torch.stack([(log_p / t).logsumexp(-1) for t in TEMPERATURES], 1)
        columns = (ids.int(), values.half(), tail, came.half(), lse)
        logits_in_parts.append([c.cpu().numpy() for c in columns])
    joined = [np.concatenate(column) for column in zip(*logits_in_parts, strict=True)]
    return Entries(joined[0].astype(np.uint32), *joined[1:])


def listed_entries(ids: np.ndarray, log_p: np.ndarray, came: np.ndarray, labels: np.ndarray) -> Entries:
    """From what was listed: ids and log-probabilities [n, k], log-probability [n] of the tokens that came, [n].

    Raises:
        ValueError: the log-probability of a token contradicts its list.
    """
    inside = ids == labels[:, None]  # [n, k]
    listed = np.where(inside, log_p, 0).sum(1)
    settled = np.where(inside.any(1), listed, np.minimum(came, log_p[:, -1]))
    wrong = np.flatnonzero(np.abs(settled - came) > ROUNDING)
    if len(wrong):
        i = wrong[0]
        raise ValueError(
            f"token {labels[i]} at place {i} has log-probability {came[i]:.4f}, and by the list {settled[i]:.4f}"
        )
    lse = np.zeros((len(ids), 1), dtype=np.float32)
    tail = log_tail_mass(log_p)
    return Entries(ids.astype(np.uint32), log_p.astype(np.float16), tail, settled.astype(np.float16), lse)


def kept_rows(found: Sequence[Completion], seq_len: int, k: int) -> Kept:
    """Texts with their prompts as rows of seq_len + 1 tokens, cut or padded; what was written counts.

    Raises:
        ValueError: the log-probability of a token contradicts its list.
    """
    ids, mask = np.zeros((len(found), seq_len + 1), np.int64), np.zeros((len(found), seq_len), np.float32)
    top, log_p, came = [np.empty((0, k), np.int64)], [np.empty((0, k), np.float32)], [np.empty(0, np.float32)]
    for row, text in enumerate(found):
        start, whole = len(text.prompt_ids), (text.prompt_ids + text.ids)[: seq_len + 1]
        ids[row, : len(whole)] = whole
        mask[row, start - 1 : len(whole) - 1] = 1
        fits = max(0, len(whole) - start)
        top += [np.array([listed[:k] for listed in text.top_ids[:fits]], np.int64).reshape(-1, k)]
        log_p += [np.array([listed[:k] for listed in text.top_logprobs[:fits]], np.float32).reshape(-1, k)]
        came += [np.array(text.logprobs[:fits], np.float32)]
    batch = Batch(ids, mask)
    labels = ids[:, 1:][mask > 0]
    return batch, listed_entries(np.concatenate(top), np.concatenate(log_p), np.concatenate(came), labels)


def vocab_of(directory: Path) -> int:
    """Logits of a checkpoint; ids of a tokenizer where there is no checkpoint."""
    if (directory / "config.json").is_file():
        return checkpoint.vocab_size(directory)
    return len(checkpoint.load_tokenizer(directory))


def same_ids(server: Server, directory: Path) -> list[int]:
    """Ids of a probing text, that the server and the tokenizer in directory agree on.

    Raises:
        UserError: they do not.
    """
    tokenizer = checkpoint.load_tokenizer(directory)
    ours = tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"]
    theirs = server.tokenize(PROBE_TEXT)
    if theirs is None:
        note(f"{server.http.url} does not tokenize: its vocabulary is taken to be that of {directory}")
    elif theirs != ours:
        at = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        raise UserError(
            f"the server's tokenizer is not that of {directory}: token {at} of a probing text is "
            f"{theirs[at : at + 1]} there and {ours[at : at + 1]} here; name the right one with --tokenizer"
        )
    return ours
