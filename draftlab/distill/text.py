"""What a draft is trained on besides the data: what the target writes, and what the draft writes itself.

B rows, P prompt tokens, G written ones, V vocab. Text is tokens: no gradient goes through how it was drawn.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedModel

from draftlab.data import Batch, parse_mixture
from draftlab.distill.states import crew
from draftlab.engine.verify import distribution, draw
from draftlab.errors import UserError, did_you_mean
from draftlab.llama import Llama

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
    eos_id: int | None
    seed: int

    def batch(self, step: int) -> Batch:
        given = self.prompts.batch(step).ids
        start = torch.from_numpy(given[:, : self.prompt]).to(self.student.device)
        was_training = self.student.training
        self.student.eval()
        with torch.random.fork_rng():
            torch.manual_seed(self.seed * 1_000_003 + step)
            ids = generate(self.student, start, given.shape[1] - self.prompt, self.temperature)
        self.student.train(was_training)
        return GeneratedRows(ids.cpu().numpy().astype(np.uint32), self.prompt, self.eos_id, len(ids)).batch(0)


@torch.no_grad()
def generate(model: PreTrainedModel, start: torch.Tensor, length: int, temperature: float) -> torch.Tensor:
    """start [B, P] and length tokens more, through eos, by any transformers model; greedy at temperature 0."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    run: Any = model.generate
    return run(
        start,
        attention_mask=torch.ones_like(start),
        max_new_tokens=length,
        min_new_tokens=length,
        pad_token_id=0,
        **sampling,
    )


@dataclass(frozen=True, slots=True)
class GeneratedRows:
    """Prompts with the target's continuation, ids [N, P + G]; the prompt and what follows eos do not count."""

    ids: np.ndarray
    prompt: int
    eos_id: int | None
    rows: int

    def batch(self, step: int) -> Batch:
        """Rows in turn; they were drawn at random already."""
        picked = self.ids[(step * self.rows + np.arange(self.rows)) % len(self.ids)].astype(np.int64)
        mask = np.ones((self.rows, picked.shape[1] - 1), dtype=np.float32)
        mask[:, : self.prompt - 1] = 0
        if self.eos_id is not None:
            after = np.cumsum(picked[:, self.prompt :] == self.eos_id, axis=1)  # [B, G]
            mask[:, self.prompt :] *= after[:, :-1] == 0  # the eos itself is predicted, nothing after it
        return Batch(picked, mask)


def generate_rows(
    target: Llama,
    prompts: np.ndarray,
    *,
    length: int,
    temperature: float,
    seed: int,
    rows: int,
    advance: Callable[[int], None],
) -> np.ndarray:
    """Continue prompts [N, P] by length tokens, rows at a time: ids [N, P + length], uint32. advance: rows done."""
    parts = []
    for start in range(0, len(prompts), rows):
        part = torch.from_numpy(prompts[start : start + rows].astype(np.int64)).to(target.device)
        rng = torch.Generator().manual_seed(seed * 1_000_003 + start)
        parts.append(_continue(target, part, length, temperature, rng))
        advance(min(start + rows, len(prompts)))
    return torch.cat(parts).numpy().astype(np.uint32)


def kept(file: Path, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Arrays read back from file, or made and kept there, by one process: a resumed run reads the same."""
    with crew().main_process_first():
        if not file.exists():
            writing = file.with_suffix(".writing")
            save_file(make(), writing)
            writing.rename(file)
    return load_file(file)


def _continue(target: Llama, ids: torch.Tensor, length: int, temperature: float, rng: torch.Generator) -> torch.Tensor:
    cache = target.new_cache(len(ids), ids.shape[1] + length)
    fed, out = ids, [ids]
    for _ in range(length):
        probabilities = distribution(target.forward(fed, cache, last=1)[:, -1], temperature)  # [B, V]
        fed = draw(probabilities, torch.rand(len(ids), generator=rng)).unsqueeze(1)
        out.append(fed)
    return torch.cat(out, 1).cpu()
