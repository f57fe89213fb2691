"""Text that the target itself writes: what a draft will have to predict when it serves."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from draftlab.data import Batch
from draftlab.engine.verify import distribution, draw
from draftlab.llama import Llama


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


def cached_rows(path: Path, make: Callable[[], np.ndarray]) -> np.ndarray:
    """The rows kept at path, made and kept if there are none: a resumed run reads the same text."""
    if not path.exists():
        ids = make()
        writing = path.with_suffix(".writing")
        save_file({"ids": ids}, writing)
        writing.rename(path)
    return load_file(path)["ids"]


def _continue(target: Llama, ids: torch.Tensor, length: int, temperature: float, rng: torch.Generator) -> torch.Tensor:
    cache = target.new_cache(len(ids), ids.shape[1] + length)
    fed, out = ids, [ids]
    for _ in range(length):
        probabilities = distribution(target.forward(fed, cache, last=1)[:, -1], temperature)  # [B, V]
        fed = draw(probabilities, torch.rand(len(ids), generator=rng)).unsqueeze(1)
        out.append(fed)
    return torch.cat(out, 1).cpu()
