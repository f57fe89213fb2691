"""Acceptance of one shape cut in many ways: right after pruning, and after the same short distillation.

Every arm gives the same shape, is distilled on the same text at the same rate, and is measured on the same held-out
tokens. Arms that are done are read back from --state, so a killed run goes on.
"""

import json
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks import environment
from draftlab import checkpoint
from draftlab.console import note
from draftlab.data import open_batches, open_heldout
from draftlab.distill.loop import EvalRecord, Settings, train
from draftlab.prune.learn import Learning
from draftlab.prune.refit import Fit
from draftlab.prune.run import Plan, prune
from draftlab.shape import Shape, read_shape_file

NOTHING = Fit(norms=False, outputs=False)
CPU = torch.device("cpu")
Make = Callable[[int, Path], None]  # seed, directory


def main(
    shape: Annotated[Path, typer.Option(help="Shape file to cut to.")] = Path("configs/widths/tiny-6x192.yaml"),
    source: Annotated[str, typer.Option(help="Source and target.")] = "tiny",
    data: Annotated[str, typer.Option(help="Text.")] = "stdlib",
    seeds: Annotated[int, typer.Option(help="Seeds.")] = 3,
    mask_steps: Annotated[int, typer.Option(help="Steps of mask training, 8 rows of 256 tokens.")] = 300,
    steps: Annotated[int, typer.Option(help="Steps of distillation, 8 rows of 256 tokens.")] = 120,
    arms: Annotated[str, typer.Option(help="Arms, by comma; all if left out.")] = "",
    state: Annotated[Path, typer.Option(help="Folder for what is done.")] = Path("runs/prune_quality"),
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
) -> None:
    torch.set_num_threads(threads)
    directory, wanted = checkpoint.locate(source), read_shape_file(shape)
    makers = _arms(directory, wanted, data, mask_steps)
    chosen = arms.split(",") if arms else list(makers)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    for seed in range(seeds):
        for name in chosen:
            file = state / f"{shape.stem}-{name.replace(' ', '_')}-{seed}-{mask_steps}-{steps}.json"
            if not file.exists():
                result = _measure(makers[name], directory, data, seed, steps, state / "draft")
                file.write_text(json.dumps(result))
            found[name].append(json.loads(file.read_text()))
            note(f"{name}, seed {seed}: {found[name][-1]}")
    print(json.dumps(_report(found, wanted, checkpoint.read_shape(directory)) | environment(threads)))


def _arms(source: Path, shape: Shape, data: str, mask_steps: int) -> dict[str, Make]:
    settings = Settings(
        loss="fkl", steps=mask_steps, lr=1e-4, weight_decay=0.0, warmup_share=0.1, eval_every=10**9, save_every=10**9
    )
    learning = Learning(settings=settings, weights="frozen", rows=8, seq_len=256, target=None)
    base = Plan(
        source=source, shape=shape, method="activation", depth="influence", basis="coordinates", fit=NOTHING,
        data=data, tokens=32768, seq_len=512, seed=0, device=CPU, scores_cache=None,
    )  # fmt: skip

    def cut(**changes: object) -> Make:
        def make(seed: int, out: Path) -> None:
            plan = replace(base, seed=seed, **changes)
            if plan.method == "masks" and plan.learning is not None:
                seeded = replace(plan.learning, settings=replace(settings, seed=seed))
                plan = replace(plan, learning=seeded)
            prune(plan, out=out, arguments={}, began=time.time(), force=True)

        return make

    joint = replace(learning, weights="full")
    return {
        "random init": lambda seed, out: _random(source, shape, seed, out),
        "random parts": cut(method="random"),
        "first": cut(method="first"),
        "magnitude": cut(method="magnitude"),
        "activation": cut(),
        "activation + norms": cut(fit=Fit(outputs=False)),
        "activation + refit": cut(fit=Fit()),
        "activation + pca + refit": cut(basis="pca", fit=Fit()),
        "masks frozen": cut(method="masks", learning=learning),
        "masks frozen + refit": cut(method="masks", learning=learning, fit=Fit()),
        "masks joint": cut(method="masks", learning=joint),
    }


def _random(source: Path, shape: Shape, seed: int, out: Path) -> None:
    config = checkpoint.config_for(shape, checkpoint.read_config(source), list(range(shape.layers)))
    with checkpoint.new_directory(out, force=True) as work:
        weights = checkpoint.model_weights(checkpoint.new_model(config, seed), checkpoint.stored_dtype(source))
        checkpoint.write_checkpoint(work, config, weights, source)


def _measure(make: Make, target: Path, data: str, seed: int, steps: int, out: Path) -> dict[str, float]:
    """Seconds to make the draft, and held-out acceptance by tokens of distillation."""
    shutil.rmtree(out.with_name(f".{out.name}.state"), ignore_errors=True)
    began = time.perf_counter()
    make(seed, out)
    seconds = time.perf_counter() - began
    tokenizer = checkpoint.load_tokenizer(target)
    batches = open_batches(data, tokenizer, rows=8, seq_len=256, steps=steps, seed=seed + 100)
    heldout = open_heldout(data, tokenizer, rows=16, seq_len=256, most_rows=64)
    settings = Settings(
        loss="fkl", steps=steps, lr=4e-3, optimizer="muon", weight_decay=0.0, eval_every=steps, save_every=10**9
    )
    student = checkpoint.load_model(out, torch.float32)
    teacher = checkpoint.load_model(target, torch.bfloat16)
    state = out.with_name("distilling")
    shutil.rmtree(state, ignore_errors=True)
    evals = [r for r in train(student, teacher, batches, heldout.batches, settings, state) if isinstance(r, EvalRecord)]
    return {"seconds": seconds} | {str(r.step * 8 * 256): r.acceptance or 0.0 for r in evals}


def _report(found: dict[str, list[dict[str, float]]], shape: Shape, source: Shape) -> dict[str, object]:
    def summary(values: list[float]) -> dict[str, float]:
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        return {"mean": statistics.mean(values), "spread": spread, "n": len(values)}

    budgets = [key for key in next(iter(found.values()))[0] if key != "seconds"]
    alpha = {name: {b: summary([run[b] for run in runs]) for b in budgets} for name, runs in found.items()}
    seconds = {name: summary([run["seconds"] for run in runs]) for name, runs in found.items()}
    result: dict[str, object] = {"alpha": alpha, "seconds": seconds, "shape": shape.describe()}
    result["ratio"] = 1 - shape.params() / source.params()
    default, joint = "activation + pca + refit", "masks joint"
    if default in found and joint in found:
        last = budgets[-1]
        result["default_minus_joint_masks"] = alpha[default][last]["mean"] - alpha[joint][last]["mean"]
        result["cost_ratio"] = seconds[default]["mean"] / seconds[joint]["mean"]
    return result


if __name__ == "__main__":
    typer.run(main)
