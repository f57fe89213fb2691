"""What a draft learns from: a teacher, text to learn on, and how it is measured on the way."""

import math
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftlab.acceptance.expected import tokens_per_pass
from draftlab.acceptance.token_logprobs import max_positions
from draftlab.console import note, progress
from draftlab.data import Batch, DynamicBatches, HeldOut, TokenBatches, open_batches, open_heldout
from draftlab.distill import evaluate
from draftlab.distill.evaluate import Length, Written
from draftlab.distill.losses import parse_loss
from draftlab.distill.on_policy import Batches, GeneratedRows, Mixed, StudentText, kept
from draftlab.distill.teachers import CachedTeacher, ServedTeacher
from draftlab.distill.trainer import DistillStep, TrainingSetup
from draftlab.engine.batch_generate import BatchSettings, generate_batch, load_generator
from draftlab.errors import UserError
from draftlab.model import checkpoint, hub
from draftlab.model.checkpoint import max_model_len
from draftlab.model.decoder import Decoder
from draftlab.model.tokenizer import check_embeds, known_ids
from draftlab.model.weights import Weights
from draftlab.sampling import SamplingParams
from draftlab.servers.client import Server
from draftlab.target_outputs.cache import open_cache
from draftlab.target_outputs.logprob_sources import same_ids, vocab_of

REPLAYED_TEXTS, REPLAYED_PROMPT, REPLAYED_LENGTH = 48, 64, 64  # what the target writes to measure tokens per pass
HELDOUT_ROWS = 64
CPU_OPERATIONS = 7e11  # of the texts of an evaluation on a CPU, some four seconds: fewer texts where they need more


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Which text a draft is distilled on, and how it is made.

    texts: shares of data itself, of what the target and of what the draft writes after its starts. compared: whether a
    loss compares with the target.
    """

    data: str
    texts: dict[str, float]
    rows: int
    seq_len: int
    steps: int
    prompt_tokens: int
    sample_temperature: float
    serve_temperature: float
    reweigh_every: int
    seed: int
    dtype: str
    device: torch.device
    device_map: str | None
    memory: float
    compared: bool

    @classmethod
    def of(cls, arguments: dict[str, Any], **others: Any) -> "Reading":
        """From a command's arguments, which have the same names, and others."""
        names = {f.name for f in fields(cls)} - others.keys()
        return cls(**{name: arguments[name] for name in names}, **others)


def cached_lesson(cache: Path, draft: Path, *, rows: int, temperature: float) -> TrainingSetup:
    """From what a cache keeps of a target.

    Raises:
        UserError: another vocabulary, an unfinished or corrupt cache, or a temperature that it does not hold.
    """
    check_embeds(draft)
    batches, heldout = open_cache(cache, draft, rows=rows, temperature=temperature)
    return TrainingSetup(teacher=CachedTeacher(batches.manifest.vocab), batches=batches, heldout=heldout)


def served_teacher(server: Server, draft: Path, k: int) -> ServedTeacher:
    """What a server says of text.

    Raises:
        UserError: another tokenizer, or it cannot look at text.
    """
    same_ids(server, draft)
    if not server.adapter.has_prompt_logprobs:
        raise UserError(f"{server.kind} does not score given text; build a cache, or use vLLM or SGLang")
    return ServedTeacher(server, k, vocab_of(draft))


def target_lesson(
    student: PreTrainedModel,
    draft: Path,
    target: Path | None,
    how: Reading,
    state: Path,
    served: ServedTeacher | None = None,
) -> TrainingSetup:
    """From the target itself, loaded here or run by a server; neither where text alone is learnt.

    What the target writes is written first and kept in state, so that it is in memory once at a time.
    """
    tokenizer = checkpoint.load_tokenizer(draft)
    local = target is not None and how.compared
    sizes = {"rows": how.rows, "seq_len": how.seq_len}
    note(f"reading {how.data}")
    heldout = open_heldout(how.data, tokenizer, most_rows=HELDOUT_ROWS, **sizes)
    data: Batches = open_batches(how.data, tokenizer, steps=how.steps, seed=how.seed, **sizes)
    if how.reweigh_every and target is not None:
        note(f"loading {hub.checkpoint_name(target)} for its loss on each source")
        reference = checkpoint.load_model(target, checkpoint.DTYPES[how.dtype], how.device, how.device_map).eval()
        data = reweighing(data, reference, tokenizer, how.reweigh_every)
        del reference
    known = known_ids(*(model for model in (draft, target) if model))
    author = None if target is None else Author(target, how, known)
    length = Replayed.of(author, draft, heldout, how, state) if local and author else None
    batches = _mixed(how, data, checkpoint.eos_token_ids(target or draft), known, student, author, state)
    del author  # and the target with it, before it is loaded as a teacher
    if target is None or not how.compared:
        return TrainingSetup(teacher=served if how.compared else None, batches=batches, heldout=heldout)
    operations = 2 * (Weights(target).parameters + student.num_parameters())
    note(f"loading {hub.checkpoint_name(target)} as teacher in {how.dtype}")
    teacher = checkpoint.load_model(target, checkpoint.DTYPES[how.dtype], device_map=how.device_map)
    spread = heldout.subset(affordable(HELDOUT_ROWS, operations * how.seq_len, how.device))
    rows = max(1, min(how.rows, max_positions(checkpoint.vocab_size(target), how.memory) // how.seq_len))
    return TrainingSetup(teacher=teacher, batches=batches, heldout=spread.batched(rows), length=length)


def affordable(most: int, operations: float, device: torch.device) -> int:
    """Return how many texts an evaluation takes: on a CPU a quarter of most, at least, where each needs much work."""
    return most if device.type != "cpu" else max(most // 4, min(most, int(CPU_OPERATIONS / operations)))


@dataclass(frozen=True)
class Author:
    """The target as what writes text, loaded when it first does. known: ids that the draft knows, too."""

    target: Path
    how: Reading
    known: int

    @cached_property
    def model(self) -> Decoder:
        how = self.how
        return load_generator(self.target, checkpoint.DTYPES[how.dtype], how.device, how.device_map)

    def sampling(self, length: int, temperature: float) -> SamplingParams:
        ends = checkpoint.eos_token_ids(self.target)
        return SamplingParams(max_tokens=length, temperature=temperature, seed=self.how.seed, stop_token_ids=ends)

    @property
    def settings(self) -> BatchSettings:
        return BatchSettings(vocab=self.known, memory=self.how.memory)


@dataclass(frozen=True, slots=True)
class Replayed:
    """Measures a student by replay of what the target wrote; state keeps the chances of every evaluation."""

    written: Written
    state: Path
    memory: float = 2.0

    @classmethod
    def of(cls, author: Author, draft: Path, heldout: HeldOut, how: Reading, state: Path) -> "Replayed | None":
        """None where every text of the target ends with its first token: there is nothing to draft."""
        context = min(max_model_len(author.target), max_model_len(draft))
        prompt = min(REPLAYED_PROMPT, context // 2)
        sampling = author.sampling(min(REPLAYED_LENGTH, context - prompt), how.serve_temperature)
        operations = 2 * Weights(author.target).parameters * (prompt + sampling.max_tokens)
        windows = heldout.ids[: affordable(REPLAYED_TEXTS, operations, how.device), :prompt]

        def make() -> dict[str, np.ndarray]:
            with progress("the target writes to be drafted for", len(windows)) as advance:
                found = evaluate.write(author.model, windows, sampling, author.settings, lambda n: advance(n, "texts"))
            return {"ids": found.ids, "lengths": found.lengths, "log_p": found.log_p}

        text = kept(state / "evaluation.safetensors", make)
        if text["lengths"].max(initial=0) < 2:
            note("the target ends every text at once: tokens per target pass are not measured")
            return None
        written = Written(text["ids"], windows.shape[1], text["lengths"], text["log_p"], how.serve_temperature)
        return cls(written, state, how.memory)

    def __call__(self, student: PreTrainedModel, step: int) -> float:
        """Tokens per target pass at K = 4."""
        found = evaluate.chances(student, self.written, self.memory)
        kept(self._file(step), lambda: {f"{i:04d}": row for i, row in enumerate(found)})
        tokens, passes = tokens_per_pass(found, 4).sum(0)
        return float(tokens / passes)

    def compared(self, before: int, after: int) -> list[Length]:
        found = [load_file(self._file(step)) for step in (before, after)]
        return evaluate.lengths(*([chances[name] for name in sorted(chances)] for chances in found))

    def _file(self, step: int) -> Path:
        return self.state / f"chances-{step:08d}.safetensors"


def _mixed(
    how: Reading,
    data: Batches,
    ends: tuple[int, ...],
    known: int,
    student: PreTrainedModel,
    author: Author | None,
    state: Path,
) -> Batches:
    """data, what the target writes after the starts of its rows, and what the draft writes, by their shares of steps.

    The target's text is made once and kept in state.
    """
    if list(how.texts) != ["data"] and how.seq_len <= how.prompt_tokens:
        raise UserError(f"--prompt-tokens {how.prompt_tokens} leaves nothing to write in sequences of {how.seq_len}")
    sources: dict[str, Batches] = {"data": data}
    if "target" in how.texts and author is not None:
        steps = min(how.steps, math.ceil(how.steps * how.texts["target"]) + 1)
        sources["target"] = _target_text(data, author, state, steps)
    if "draft" in how.texts:
        sources["draft"] = StudentText(
            student, data, how.prompt_tokens, how.sample_temperature, ends, known, how.seed, how.memory
        )
    if len(how.texts) == 1:
        return sources[next(iter(how.texts))]
    return Mixed.of(sources, how.texts, how.steps)


def _target_text(data: Batches, author: Author, state: Path, steps: int) -> GeneratedRows:
    """Rows that begin as those of data do and go on as the target samples."""
    how = author.how
    length = how.seq_len + 1 - how.prompt_tokens

    def make() -> dict[str, np.ndarray]:
        prompts = np.concatenate([data.batch(step).ids[:, : how.prompt_tokens] for step in range(steps)])
        with progress("the target writes to be learnt from", len(prompts)) as advance:
            written = generate_batch(
                author.model, prompts.tolist(), author.sampling(length, how.sample_temperature), author.settings,
                advance=lambda n: advance(n, "texts"),
            )  # fmt: skip
        rows = GeneratedRows.of(prompts, written, length, how.rows)
        return {"ids": rows.ids, "lengths": rows.lengths}

    text = kept(state / "target_text.safetensors", make)
    return GeneratedRows(text["ids"], text["lengths"], how.prompt_tokens, how.rows)


def reweighing(
    batches: TokenBatches, reference: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, every: int
) -> DynamicBatches:
    """batches with weights that follow the student's held-out loss on each source, against a reference model's.

    Raises:
        UserError: a source without one held-out window.
    """
    most, rows = 16, min(8, batches.rows)
    heldout = {
        name: open_heldout(name, tokenizer, rows=rows, seq_len=batches.seq_len, most_rows=most).batches
        for name in batches.weights
    }
    losses = {name: _cross_entropy(reference, b) for name, b in heldout.items()}
    return DynamicBatches.start(batches, heldout, losses, every)


@torch.inference_mode()
def _cross_entropy(model: PreTrainedModel, batches: list[Batch]) -> float:
    step = DistillStep(model, parse_loss("ce"), 1.0)
    sums = [
        step(torch.from_numpy(b.ids).to(model.device), torch.from_numpy(b.mask).to(model.device), None) for b in batches
    ]
    return float(sum(s[1] for s in sums) / sum(int(b.mask.sum()) for b in batches))
