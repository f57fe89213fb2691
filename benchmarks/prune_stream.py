"""Prune a 7B source on a small machine: peak memory and minutes of `draftlab prune --layers 12 --width 2560`.

The source has LLaMA-7B's shape and random weights. Like the checkpoint on the hub, it is stored in float16, with a
rotary buffer in each layer. The script also measures two ratios on small models: a step of mask training to a plain
training step, and pruning in float16 to pruning in bfloat16.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor

from benchmarks import child_environ, environment
from benchmarks.tiny_target import llama_config
from draftlab.console import note
from draftlab.data import Batch, HeldOut
from draftlab.engine.clocks import clock_for
from draftlab.model import checkpoint, devices, hub, saving
from draftlab.model.shape import Shape
from draftlab.pruning.masks.hard_concrete import Masks
from draftlab.pruning.masks.masked_model import masked
from draftlab.runs import atomic
from draftlab.training.loop import Loop
from draftlab.training.losses import parse_loss
from draftlab.training.trainer import StepRecord, TrainingSetup, train

DRAFTLAB = [sys.executable, "-m", "draftlab"]
LLAMA_7B = Shape(layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008, vocab=32000)


def main(
    folder: Annotated[Path, typer.Option(help="Folder for 13.5 GB of source, deleted at the end.")],
    tokens: Annotated[int, typer.Option(help="Calibration tokens.")] = 8192,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    seven_b: Annotated[bool, typer.Option(help="Prune the 7B source.")] = True,
    mask_steps: Annotated[int, typer.Option(help="Pairs of steps with and without masks to time.")] = 12,
) -> None:
    torch.set_num_threads(threads)
    result: dict[str, object] = _mask_cost(mask_steps) if mask_steps else {}
    if not torch.cuda.is_available():  # CPU seconds are meaningless with a GPU
        result |= _float16_cost(threads)
    if seven_b:
        source = folder / "llama-7b-shape"
        _write_source(source)
        result |= _prune(folder, source, tokens, threads)
        shutil.rmtree(source)
    print(json.dumps(result | environment(threads)))


def _write_source(out: Path) -> None:
    if out.exists():
        return
    rng = torch.Generator().manual_seed(0)

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, axes in LLAMA_7B.axes().items():
            size = LLAMA_7B.dims(axes)
            spread = 0.02 if "embed" in name else size[-1] ** -0.5
            tensor = torch.ones(size) if len(size) == 1 else torch.randn(size, generator=rng) * spread
            yield name, tensor.half()
        for layer in range(LLAMA_7B.layers):
            yield (
                f"model.layers.{layer}.self_attn.rotary_emb.inv_freq",
                1e4 ** -(torch.arange(0, 128, 2) / 128),
            )

    config = llama_config(LLAMA_7B, context=4096, bos=0, eos=1, pad=2)
    with atomic.new_directory(out, force=False) as work:
        saving.write_checkpoint(work, config, weights(), hub.locate("tiny"))


def _prune(folder: Path, source: Path, tokens: int, threads: int) -> dict[str, object]:
    """Run draftlab prune in a separate workspace, as a user would run it. Return its memory, minutes and results."""
    work = folder / "workspace"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    began = time.perf_counter()
    words = [
        "prune",
        "--source",
        str(source),
        "--layers",
        "12",
        "--width",
        "2560",
        "--data",
        "stdlib",
    ]
    words += ["--calibration-tokens", str(tokens), "--out", "draft"]
    _draftlab(words, work, threads)
    seconds = time.perf_counter() - began
    record = json.loads((work / "draft" / "draftlab.json").read_text())
    shape = checkpoint.read_shape(work / "draft")
    model = checkpoint.load_model(work / "draft", torch.bfloat16)
    return {
        "parameters": shape.params(),
        "loaded_parameters": sum(p.numel() for p in model.parameters()),
        "peak_rss_gb": record["peak_memory_bytes"] / 1e9,
        "minutes": seconds / 60,
        "source_dtype": "float16",
        "source_gb": 2 * LLAMA_7B.params() / 1e9,
        "calibration_tokens": tokens,
        "agreement": record["notes"]["agreement"],
    }


def _draftlab(words: list[str], where: Path, threads: int) -> None:
    """Run a command with the draftlab of this source tree, whether installed or not. Its stdout goes to stderr."""
    environ = child_environ(OMP_NUM_THREADS=str(threads))
    subprocess.run([*DRAFTLAB, *words], cwd=where, check=True, env=environ, stdout=sys.stderr)


class _Rows:
    def batch(self, step: int) -> Batch:
        ids = np.random.default_rng(step).integers(3, 4000, (8, 257))
        return Batch(ids, np.ones((8, 256), dtype=np.float32))


def _float16_cost(threads: int) -> dict[str, object]:
    """Prune the embedded target in float16 and in bfloat16. Return the CPU seconds of both, and their ratio."""
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for dtype in ("bfloat16", "float16"):
            source = Path(folder) / dtype
            weights = checkpoint.Weights(hub.locate("tiny"))
            cast = ((name, weights[name].to(devices.DTYPES[dtype])) for name in weights)
            source.mkdir()
            saving.write_checkpoint(source, checkpoint.read_config(weights.directory), cast, weights.directory)
            words = [
                "prune",
                "--source",
                str(source),
                "--layers",
                "4",
                "--width",
                "192",
                "--data",
                "stdlib",
            ]
            words += ["--calibration-tokens", "16384", "--out", "draft"]
            before = os.times()
            _draftlab([*words, "--force"], Path(folder), threads)
            after = os.times()
            seconds[dtype] = after.children_user + after.children_system - before.children_user - before.children_system
    return {
        "prune_cpu_seconds": seconds,
        "float16_over_bfloat16": seconds["float16"] / seconds["bfloat16"],
    }


def _mask_cost(pairs: int) -> dict[str, object]:
    """Time training steps of the embedded target with and without masks in turn, and return the median of the ratio.

    The loss is cross-entropy, and all weights are trained.
    """
    source = hub.locate("tiny")
    have = checkpoint.read_shape(source)
    shape = have.model_copy(update={"layers": 6, "hidden": 192, "heads": 3, "kv_heads": 3, "ffn": 512})
    settings = Loop(
        steps=pairs + 3,
        optimizer="adamw",
        lr=1e-4,
        weight_decay=0.1,
        dtype="bfloat16",
        eval_steps=10**9,
        save_steps=10**9,
    )
    runs: dict[str, Iterator[object]] = {}
    seconds: dict[str, list[float]] = {"plain": [], "masked": []}
    state = Path(tempfile.mkdtemp())
    setup = TrainingSetup(
        teacher=None,
        batches=_Rows(),
        heldout=HeldOut([_Rows().batch(0)], 1.0),
        loss=parse_loss("ce"),
    )
    masks, clock = Masks(have, shape, 0), time.process_time
    if torch.cuda.is_available():  # CPU seconds are meaningless with a GPU
        clock = clock_for(torch.device("cuda"))
    models = {name: checkpoint.load_model(source, torch.float32) for name in seconds}
    with masked(models["masked"], masks, 1e-6):
        for name, model in models.items():
            constraint = masks if name == "masked" else None
            runs[name] = train(model, setup, settings, state / name, constraint)
        for number in range(pairs + 3):
            for name in seconds if number % 2 else reversed(seconds):
                began = clock()
                next(r for r in runs[name] if isinstance(r, StepRecord))
                seconds[name] += [clock() - began] if number >= 3 else []
    ratios = [m / p for m, p in zip(seconds["masked"], seconds["plain"], strict=True)]
    note(f"steps: {seconds}")
    return {
        "mask_step_over_plain_step": statistics.median(ratios),
        "mask_step_ratios": sorted(round(r, 3) for r in ratios),
        "mask_step_model": have.describe(),
    }


if __name__ == "__main__":
    typer.run(main)
