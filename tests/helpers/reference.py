"""What thirteen commands answer on the embedded target: the redesign must not change it.

PYTHONPATH=.:tests python -m helpers.reference > tests/files/reference.json records it anew; such a commit says why.
"""

import hashlib
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from draftlab.cli import app
from draftlab.model import checkpoint, hub, saving

Facts = dict[str, Any]
SHAPE = "--layers 3 --width 128 --ffn 200"
TEXT = "--data text.jsonl --seq-len 48"
TRAINING = f"{TEXT} --steps 3 --batch-size 2 --training-dtype float32 --seed 3"
PROMPTS = "--data text.jsonl --num-prompts 3 --prompt-tokens 24"
# each line makes the directory of its name, from the directories of earlier lines
COMMANDS = {
    "cut": f"prune --source target {SHAPE} {TEXT} --method first --refit none",
    "pruned": f"prune --source target {SHAPE} {TEXT} --calibration-tokens 1024",
    "masked": (
        f"prune --method masks --source target {SHAPE} {TEXT} --steps 2 --batch-size "
        "2 --calibration-tokens 1024 --refit norms"
    ),
    "distilled": f"distill --draft pruned --target target {TRAINING} --loss fkl",
    "trained": f"distill --draft pruned {TRAINING} --loss ce",
    "head": f"distill --student eagle:ttt_steps=2 --target target {TRAINING}",
    "outputs": f"outputs build --target target --use replay --max-new-tokens 24 --dtype float32 {PROMPTS}",
    "replayed": "replay outputs --draft distilled --k 1-4 --json",
    "scored": f"score --target target --draft distilled --drafter latest-lookup --k 2-3 {PROMPTS} --max-new-tokens 24 "
    "--exhaustive --repeats 1 --dtype float32 --threads 1",
    "predicted": "predict --draft-profile wide-796m@a100-80gb,eager --target-profile llama-65b@4xa100-80gb,eager "
    "--acceptance 2.5@4 --batch 1,4 --json",
    "designed": "design --params 4m --layers 2,4,8 --source tiny --json",
    "exported": "export cut --target target --to hf --dtype bfloat16",
    "gguf": "export cut --target target --to gguf --outtype q8_0",
}


def record(folder: Path) -> dict[str, Facts]:
    """Run the commands in a folder, which is the working directory; return what each made."""
    write_target(folder / "target")
    write_text(folder / "text.jsonl")
    return {name: _facts(name, _run(name, line), folder / name) for name, line in COMMANDS.items()}


def write_target(out: Path) -> None:
    """Write the embedded target in float32, in which no logit is near another."""
    out.mkdir()
    source = hub.locate("tiny")
    weights = ((name, tensor.float()) for name, tensor in checkpoint.Weights(source).items())
    saving.write_checkpoint(out, checkpoint.read_config(source) | {"dtype": "float32"}, weights, source)


def write_text(file: Path) -> None:
    words = (
        "line",
        "name",
        "value",
        "path",
        "key",
        "item",
        "count",
        "result",
        "index",
        "state",
        "size",
    )
    with file.open("w") as rows:
        for n in range(120):
            a, b, c = (words[(n * step + step) % len(words)] for step in (1, 3, 7))
            body = (
                f"def read_{a}_{n}({b}, {c}=None):\n    if not {b}:\n        return {c}\n    for {a} in {b}.split():\n"
            )
            body += f"        if {a}.startswith('#{n}'):\n            continue\n        yield {a}.strip()\n\n\n"
            rows.write(json.dumps({"text": body * 3}) + "\n")


def _run(name: str, line: str) -> str:
    out = [] if "--json" in line else ["--out", name]
    result = CliRunner().invoke(app, [*line.split(), *out])
    assert result.exit_code == 0, (line, result.output, result.exception)
    return result.stdout


def _facts(name: str, printed: str, out: Path) -> Facts:
    if name in ("predicted", "designed", "replayed"):
        return {key: value for key, value in json.loads(printed).items() if key != "next"}
    if name in ("exported", "gguf"):
        weights = [file for file in sorted(out.iterdir()) if file.suffix in (".safetensors", ".gguf")]
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in weights}
    if name == "scored":
        return {file.parent.name: _counts(json.loads(file.read_text())) for file in sorted(out.glob("*/score.json"))}
    tensors = {key: tensor for file in sorted(out.glob("*.safetensors")) for key, tensor in load_file(file).items()}
    exact = {key for key, tensor in tensors.items() if name == "cut" or not tensor.is_floating_point()}
    return {key: _sha256(tensor) if key in exact else _sums(tensor) for key, tensor in tensors.items()}


def _counts(score: Facts) -> Facts:
    """Return how many tokens each text has, and by K how many were drafted and accepted in its steps."""
    return {
        "plain": [row["tokens"] for row in score["plain"]],
        "identical": score["equal_texts"] == 1,
        **{
            f"{kind} {k}": [row[kind] for row in rows]
            for k, rows in score["speculative"].items()
            for kind in ("drafted", "accepted")
        },
    }


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _sums(tensor: torch.Tensor) -> list[int | float]:
    """Return how many elements a tensor has, their norm, and their cosine to a wave, which tells places apart."""
    flat = tensor.double().flatten()
    wave = torch.cos(torch.arange(len(flat), dtype=torch.float64) * 0.7)
    return [
        len(flat),
        flat.norm().item(),
        (flat @ wave / (flat.norm() * wave.norm() + 1e-30)).item(),
    ]


def differences(expected: Any, value: Any, tolerance: float, place: str = "") -> Iterator[str]:
    """Yield where two facts differ: float numbers by more than the tolerance, everything else at all."""
    if isinstance(expected, dict) and isinstance(value, dict):
        if expected.keys() != value.keys():
            yield f"{place}: {sorted(expected.keys() ^ value.keys())}"
        for key in expected.keys() & value.keys():
            yield from differences(expected[key], value[key], tolerance, f"{place}/{key}")
    elif isinstance(expected, list) and isinstance(value, list) and len(expected) == len(value):
        for n, pair in enumerate(zip(expected, value, strict=True)):
            yield from differences(*pair, tolerance, f"{place}/{n}")
    elif isinstance(expected, float) and isinstance(value, float):
        if not math.isclose(expected, value, rel_tol=tolerance, abs_tol=tolerance):
            yield f"{place}: {expected} {value}"
    elif expected != value:
        yield f"{place}: {expected} {value}"


if __name__ == "__main__":
    import contextlib

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        print(json.dumps(record(Path(folder)), indent=1))
