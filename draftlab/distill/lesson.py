"""What a draft learns from: a teacher, text to learn on, and how it is measured on the way."""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftlab import checkpoint, llama
from draftlab.console import progress
from draftlab.data import Batch, DynamicBatches, HeldOut, TokenBatches, open_batches, open_heldout
from draftlab.distill import evaluate
from draftlab.distill.cache import open_cache
from draftlab.distill.evaluate import Length, Written
from draftlab.distill.loop import DistillStep, Lesson
from draftlab.distill.losses import parse_loss
from draftlab.distill.origin import same_ids, vocab_of
from draftlab.distill.teacher import CachedTeacher, ServedTeacher
from draftlab.distill.text import Batches, GeneratedRows, Mixed, StudentText, generate_rows, kept
from draftlab.engine.replay import tokens_per_pass
from draftlab.errors import UserError
from draftlab.serve import Server

REPLAYED_TEXTS, REPLAYED_PROMPT, REPLAYED_LENGTH = 48, 64, 64  # what the target writes to measure tokens per pass


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
    compared: bool

    @classmethod
    def of(cls, arguments: dict[str, Any], **others: Any) -> "Reading":
        """From a command's arguments, which have the same names, and others."""
        names = {f.name for f in fields(cls)} - others.keys()
        return cls(**{name: arguments[name] for name in names}, **others)


def cached_lesson(cache: Path, draft: Path, *, rows: int, temperature: float) -> Lesson:
    """From what a cache keeps of a target.

    Raises:
        UserError: another vocabulary, an unfinished or corrupt cache, or a temperature that it does not hold.
    """
    batches, heldout = open_cache(cache, draft, rows=rows, temperature=temperature)
    return Lesson(teacher=CachedTeacher(batches.manifest.vocab), batches=batches, heldout=heldout)


def served_teacher(server: Server, draft: Path, k: int) -> ServedTeacher:
    """What a server says of text.

    Raises:
        UserError: another tokenizer, or it cannot look at text.
    """
    same_ids(server, draft)
    if not server.looks:
        raise UserError(f"{server.kind} does not score given text; build a cache, or use vLLM or SGLang")
    return ServedTeacher(server, k, vocab_of(draft))


def target_lesson(
    student: PreTrainedModel,
    draft: Path,
    target: Path | None,
    how: Reading,
    state: Path,
    served: ServedTeacher | None = None,
) -> Lesson:
    """From the target itself, loaded here or run by a server; neither where text alone is learnt."""
    tokenizer = checkpoint.load_tokenizer(draft)
    sizes = {"rows": how.rows, "seq_len": how.seq_len}
    heldout = open_heldout(how.data, tokenizer, most_rows=64, **sizes)
    data: Batches = open_batches(how.data, tokenizer, steps=how.steps, seed=how.seed, **sizes)
    if how.reweigh_every and target is not None:
        data = reweighing(data, target, tokenizer, how.device, how.reweigh_every)
    eos_id = checkpoint.special_ids(tokenizer)["eos"]
    batches = _mixed(how, data, eos_id, student, target, state)
    if target is None or not how.compared:
        return Lesson(teacher=served if how.compared else None, batches=batches, heldout=heldout)
    teacher = checkpoint.load_model(target, checkpoint.DTYPES[how.dtype], device_map=how.device_map)
    length = Replayed.of(teacher, heldout, how, eos_id, state)
    return Lesson(teacher=teacher, batches=batches, heldout=heldout, length=length)


@dataclass(frozen=True, slots=True)
class Replayed:
    """Measures a student by replay of what the target wrote; state keeps the chances of every evaluation."""

    written: Written
    state: Path

    @classmethod
    def of(
        cls, teacher: PreTrainedModel, heldout: HeldOut, how: Reading, eos_id: int | None, state: Path
    ) -> "Replayed":
        windows = np.concatenate([batch.ids for batch in heldout.batches])[:REPLAYED_TEXTS, :REPLAYED_PROMPT]
        return cls(evaluate.write(teacher, windows, REPLAYED_LENGTH, how.serve_temperature, eos_id, how.seed), state)

    def __call__(self, student: PreTrainedModel, step: int) -> float:
        """Tokens per target pass at K = 4."""
        found = evaluate.chances(student, self.written)
        kept(self._file(step), lambda: {f"{i:04d}": row for i, row in enumerate(found)})
        tokens, passes = tokens_per_pass(found, 4).sum(0)
        return float(tokens / passes)

    def compared(self, before: int, after: int) -> list[Length]:
        found = [load_file(self._file(step)) for step in (before, after)]
        return evaluate.lengths(*([chances[name] for name in sorted(chances)] for chances in found))

    def _file(self, step: int) -> Path:
        return self.state / f"chances-{step:08d}.safetensors"


def _mixed(
    how: Reading, data: Batches, eos_id: int | None, student: PreTrainedModel, target: Path | None, state: Path
) -> Batches:
    """data, what the target writes after the starts of its rows, and what the draft writes, by their shares of steps.

    The target's text is made once and kept in state.
    """
    if list(how.texts) != ["data"] and how.seq_len <= how.prompt_tokens:
        raise UserError(f"--prompt-tokens {how.prompt_tokens} leaves nothing to write in sequences of {how.seq_len}")
    sources: dict[str, Batches] = {"data": data}
    if "target" in how.texts and target is not None:
        steps = min(how.steps, math.ceil(how.steps * how.texts["target"]) + 1)
        sources["target"] = _target_text(how, data, eos_id, target, state, steps)
    if "draft" in how.texts:
        sources["draft"] = StudentText(student, data, how.prompt_tokens, how.sample_temperature, eos_id, how.seed)
    if len(how.texts) == 1:
        return sources[next(iter(how.texts))]
    return Mixed.of(sources, how.texts, how.steps)


def _target_text(
    how: Reading, data: Batches, eos_id: int | None, target: Path, state: Path, steps: int
) -> GeneratedRows:
    """Rows that begin as those of data do and go on as the target samples."""

    def make() -> dict[str, np.ndarray]:
        model = llama.load(target, torch.float32, how.device)
        prompts = np.concatenate([data.batch(step).ids[:, : how.prompt_tokens] for step in range(steps)])
        with progress("target writes", len(prompts)) as advance:
            ids = generate_rows(
                model,
                prompts,
                length=how.seq_len + 1 - how.prompt_tokens,
                temperature=how.sample_temperature,
                seed=how.seed,
                rows=64,
                advance=lambda n: advance(n, ""),
            )
        return {"ids": ids}

    ids = kept(state / "target_text.safetensors", make)["ids"]
    return GeneratedRows(ids, how.prompt_tokens, eos_id, how.rows)


def reweighing(
    batches: TokenBatches, reference: Path, tokenizer: PreTrainedTokenizerBase, device: torch.device, every: int
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
    model = checkpoint.load_model(reference, torch.bfloat16, device).eval()
    return DynamicBatches.of(batches, heldout, {name: _cross_entropy(model, b) for name, b in heldout.items()}, every)


@torch.inference_mode()
def _cross_entropy(model: PreTrainedModel, batches: list[Batch]) -> float:
    step = DistillStep(model, parse_loss("ce"), 1.0)
    sums = [
        step(torch.from_numpy(b.ids).to(model.device), torch.from_numpy(b.mask).to(model.device), None) for b in batches
    ]
    return float(sum(s[1] for s in sums) / sum(int(b.mask.sum()) for b in batches))
