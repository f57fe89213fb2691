"""What a draft is trained on besides the data: what the target writes, and what the draft writes itself.

N rows, P prompt tokens, G written ones. Text is tokens: no gradient goes through how it was drawn.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedModel

from draftlab.data import Batch, parse_mixture
from draftlab.distill.checkpointer import process_state
from draftlab.engine.batch_generate import BatchSettings, Completion, generate_batch
from draftlab.errors import UserError, did_you_mean
from draftlab.model.hf_decoder import HFDecoder
from draftlab.sampling import SamplingParams

TEXTS = ("data", "target", "draft")


class Batches(Protocol):
    """The rows of each step."""

    def batch(self, step: int) -> Batch: ...


def parse_texts(spec: str) -> dict[str, float]:
    """``data``, ``target``, ``draft``, or shares of them: ``target=0.7,draft=0.3``.

    Raises:
        UserError: another name, or a share that is not a positive number.
    """
    shares = parse_mixture(spec)
    for name in shares:
        if name not in TEXTS:
            raise UserError(f"--text {name!r} is not known{did_you_mean(name, TEXTS)}; want {', '.join(TEXTS)}")
    return shares


@dataclass(frozen=True, slots=True)
class Mixed:
    """Each step from one source: its name and which of its batches, by step."""

    sources: Mapping[str, Batches]
    turns: list[tuple[str, int]]

    @classmethod
    def of(cls, sources: Mapping[str, Batches], weights: dict[str, float], steps: int) -> "Mixed":
        """In proportion to their weights: after n steps none is more than a step off."""
        taken, turns = dict.fromkeys(weights, 0), []
        for number in range(1, steps + 1):
            name = max(weights, key=lambda n: weights[n] * number - taken[n])
            turns.append((name, taken[name]))
            taken[name] += 1
        return cls(sources, turns)

    def batch(self, step: int) -> Batch:
        name, number = self.turns[step]
        return self.sources[name].batch(number)


@dataclass(frozen=True, slots=True)
class StudentText:
    """Rows that the draft writes after prompts as it is at that step (on-policy), by seed and step alone."""

    student: PreTrainedModel
    prompts: Batches
    prompt: int
    temperature: float
    ends: tuple[int, ...]
    known: int
    seed: int
    memory: float = 2.0

    def batch(self, step: int) -> Batch:
        given = self.prompts.batch(step).ids
        sampling = SamplingParams(
            max_tokens=given.shape[1] - self.prompt, temperature=self.temperature, seed=self.seed,
            stop_token_ids=self.ends,
        )  # fmt: skip
        settings = BatchSettings(vocab=self.known, batch_size=len(given), memory=self.memory)
        was_training = self.student.training
        self.student.eval()
        numbers = range(step * len(given), (step + 1) * len(given))
        prompts = given[:, : self.prompt].tolist()
        written = generate_batch(HFDecoder(self.student), prompts, sampling, settings, numbers=numbers)
        self.student.train(was_training)
        return GeneratedRows.of(given[:, : self.prompt], written, sampling.max_tokens, len(given)).batch(0)


@dataclass(frozen=True, slots=True)
class GeneratedRows:
    """Prompts with what a model wrote after them, ids [N, P + G], of which the first lengths [N] of the G count."""

    ids: np.ndarray
    lengths: np.ndarray
    prompt: int
    rows: int

    @classmethod
    def of(cls, prompts: np.ndarray, written: Sequence[Completion], length: int, rows: int) -> "GeneratedRows":
        """prompts: [N, P]. length: most tokens of a text; shorter ones are padded."""
        ids = np.zeros((len(written), prompts.shape[1] + length), dtype=np.uint32)
        ids[:, : prompts.shape[1]] = prompts
        for row, text in zip(ids, written, strict=True):
            row[prompts.shape[1] :][: len(text.ids)] = text.ids
        return cls(ids, np.array([len(text.ids) for text in written]), prompts.shape[1], rows)

    def batch(self, step: int) -> Batch:
        """Rows in turn; they were drawn at random already."""
        picked = (step * self.rows + np.arange(self.rows)) % len(self.ids)
        written = np.arange(self.ids.shape[1] - 1) - (self.prompt - 1)  # of each predicted token its place in the text
        mask = (written >= 0) & (written < self.lengths[picked, None])
        return Batch(self.ids[picked].astype(np.int64), mask.astype(np.float32))


def kept(file: Path, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Arrays read back from file, or made and kept there, by one process: a resumed run reads the same."""
    with process_state().main_process_first():
        if not file.exists():
            writing = file.with_suffix(".writing")
            save_file(make(), writing)
            writing.rename(file)
    return load_file(file)
