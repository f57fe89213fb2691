"""SmolLM2-135M-Instruct and its published draft for benchmarks: import, commands in a folder, scores."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import child_environ
from draftlab.console import note
from draftlab.errors import UserError
from draftlab.results.score import Score, read_score

TARGET = "models/smollm2-135m-instruct"


def import_models(folder: Path) -> None:
    """Import the target and the published draft into the folder, unless that was done before."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "draftlab.yaml").exists():
        draftlab(folder, "init", "--preset", "smollm2")


def draftlab(folder: Path, *words: str) -> None:
    """Run a command of draftlab in the folder, on one thread."""
    note(f"draftlab {' '.join(words)}")
    environ = child_environ(OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-m", "draftlab", *words], cwd=folder, env=environ, check=False)
    if done.returncode:
        raise UserError(f"draftlab {' '.join(words)} ended with {done.returncode}")


def scores(folder: Path) -> list[Score]:
    return [read_score(file) for file in sorted(folder.glob("*/score.json"))]


def fastest(scores: Sequence[Score]) -> Score:
    return max(scores, key=lambda score: score.best_k_speedup.value)


def settings(scored: Sequence[Score]) -> dict[str, Any]:
    """Return the settings that all scores of a table share. "requests" counts every turn of a conversation."""
    score, about = scored[0], scored[0].conditions
    return {
        "dtype": about.dtype,
        "target_weights": about.target_weights,
        "draft_weights": sorted({s.conditions.draft_weights for s in scored if s.conditions.draft_weights}),
        "mode": about.mode,
        "threads": about.threads,
        "batch": about.batch,
        "repeats": about.repeats,
        "temperature": about.temperature,
        "prompts": about.prompts,
        "requests": sum(len(rows) for rows in score.prompts_by_category.values()),
        "max_tokens": about.max_tokens,
    }
