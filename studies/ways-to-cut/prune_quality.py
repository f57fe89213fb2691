"""Compare ways to prune a source to one shape: acceptance right after pruning, and after the same short distillations.

All ways give the same shape. The drafts are distilled on the same text at the same learning rate, and measured on the
same held-out tokens. Each number of distillation steps is a separate training run. Finished measurements are read from
the folder --state. So a run that was killed resumes, and several processes can share the folder. Costs are CPU
seconds, which other work on the machine hardly changes.
"""

import json
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer

from benchmarks import environment
from benchmarks.tiny_target import model_weights
from draftlab import atomic
from draftlab.commands.distill import PROVEN_LR
from draftlab.commands.prune import PruneConfig, prepare
from draftlab.console import note
from draftlab.data import open_batches, open_heldout
from draftlab.model import checkpoint, hub, saving
from draftlab.model.shape import Shape, read_shape_file
from draftlab.output import Output
from draftlab.pruning import run
from draftlab.pruning.masks.training import prune_by_masks
from draftlab.training.loop import Loop
from draftlab.training.losses import parse_loss
from draftlab.training.trainer import EvalRecord, TrainingSetup, train

ROWS, SEQ_LEN = 8, 256
Make = Callable[[int, Path], object]  # seed, directory


def main(
    shape: Annotated[Path, typer.Option(help="Shape file to prune to.")] = Path(
        "configs/widths/tiny-6x192.yaml"
    ),
    source: Annotated[str, typer.Option(help="Source, which is also the target.")] = "tiny",
    data: Annotated[str, typer.Option(help="Data to calibrate and train on.")] = "stdlib",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0,1,2",
    mask_steps: Annotated[
        int, typer.Option(help="Steps of mask training, each 8 rows x 256 tokens.")
    ] = 300,
    mask_lr: Annotated[
        float, typer.Option(help="Peak learning rate of weights trained with joint masks.")
    ] = 2e-3,
    budgets: Annotated[
        str, typer.Option(help="Steps of distillation (8 rows x 256 tokens), by comma.")
    ] = "60,240",
    arms: Annotated[
        str, typer.Option(help="Ways to prune, separated by commas. Default: all.")
    ] = "",
    state: Annotated[Path, typer.Option(help="Folder for finished measurements.")] = Path(
        "runs/prune_quality"
    ),
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
) -> None:
    torch.set_num_threads(threads)
    directory, wanted = hub.locate(source), read_shape_file(shape)
    makers = _arms(directory, shape, data, mask_steps, mask_lr)
    chosen, steps = arms.split(",") if arms else list(makers), [int(n) for n in budgets.split(",")]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    for seed in map(int, seeds.split(",")):
        for name in chosen:
            rate = f"-{mask_lr:g}" if "joint" in name else ""
            work = state / f"{shape.stem}-{name.replace(' ', '_')}-{seed}-{mask_steps}{rate}"
            found[name].append(_measured(makers[name], directory, data, seed, steps, work))
            note(f"{name}, seed {seed}: {found[name][-1]}")
    masks = {"mask_steps": mask_steps, "mask_lr": mask_lr}
    print(
        json.dumps(
            _report(found, wanted, checkpoint.read_shape(directory)) | masks | environment(threads)
        )
    )


def _arms(source: Path, shape: Path, data: str, mask_steps: int, mask_lr: float) -> dict[str, Make]:
    masks = {"method": "masks", "steps": mask_steps, "batch_size": ROWS, "seq_len": SEQ_LEN}

    def cut(*, refit: str = "none", rotate: bool = False, **settings: Any) -> Make:
        def make(seed: int, out: Path) -> None:
            common = {
                "source": str(source),
                "shape": shape,
                "data": data,
                "device": "cpu",
                "refit": refit,
                "out": out,
            }
            seeded = {} if settings.get("method") == "first" and refit == "none" else {"seed": seed}
            config = PruneConfig.build(common | seeded | settings)
            output = Output(command="prune", config=config, out=out, force=True)
            values = cast(Any, prepare(config, True).run).keywords
            parts = {name: values[name] for name in ("source", "shape", "text", "refit")}
            pruning = run.Prune(output=output, **parts)
            if values["training"] is not None:
                prune_by_masks(pruning, values["training"])
            else:
                pruning.by_scores(values["method"], rotate=rotate)

        return make

    return {
        "random init": lambda seed, out: _random(source, read_shape_file(shape), seed, out),
        "random parts": cut(method="random"),
        "first": cut(method="first"),
        "activation": cut(),
        "activation + norms": cut(refit="norms"),
        "activation + refit": cut(refit="layers"),
        "activation + pca + refit": cut(refit="layers", rotate=True),
        "masks frozen": cut(**masks),
        "masks frozen + refit": cut(**masks, refit="layers"),
        "masks joint": cut(**masks, lr=mask_lr),
    }


def _random(source: Path, shape: Shape, seed: int, out: Path) -> None:
    config = checkpoint.config_for(shape, checkpoint.read_config(source), list(range(shape.layers)))
    with atomic.new_directory(out, force=True) as work:
        weights = model_weights(checkpoint.new_model(config, seed), checkpoint.stored_dtype(source))
        saving.write_checkpoint(work, config, weights, source)


def _measured(
    make: Make, target: Path, data: str, seed: int, budgets: list[int], work: Path
) -> dict[str, float]:
    """Return the CPU seconds to make a draft, and its held-out acceptance by the number of tokens distilled on.

    Values that were measured before are read from the folder `work`.
    """
    file, draft = work / "found.json", work / "draft"
    found: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
    if "seconds" not in found:
        began = time.process_time()
        make(seed, draft)
        found["seconds"] = time.process_time() - began
        file.write_text(json.dumps(found))
    for steps in budgets:
        if _tokens(steps) not in found:
            found |= _distilled(draft, target, data, seed, steps, work / "distilling")
            file.write_text(json.dumps(found))
    return {key: found[key] for key in ("seconds", _tokens(0), *map(_tokens, budgets))}


def _tokens(steps: int) -> str:
    return str(steps * ROWS * SEQ_LEN)


def _distilled(
    draft: Path, target: Path, data: str, seed: int, steps: int, state: Path
) -> dict[str, float]:
    tokenizer = checkpoint.load_tokenizer(target)
    batches = open_batches(
        data, tokenizer, rows=ROWS, seq_len=SEQ_LEN, steps=steps, seed=seed + 100
    )
    heldout = open_heldout(data, tokenizer, rows=16, seq_len=SEQ_LEN, most_rows=64)
    settings = Loop(
        steps=steps, lr=PROVEN_LR["muon"], dtype="bfloat16", eval_steps=steps, save_steps=10**9
    )
    student = checkpoint.load_model(draft, torch.float32)
    teacher = checkpoint.load_model(target, torch.bfloat16)
    setup = TrainingSetup(teacher=teacher, batches=batches, heldout=heldout, loss=parse_loss("fkl"))
    shutil.rmtree(state, ignore_errors=True)
    evals = [r for r in train(student, setup, settings, state) if isinstance(r, EvalRecord)]
    return {_tokens(r.step): r.acceptance or 0.0 for r in evals}


def _report(
    found: dict[str, list[dict[str, float]]], shape: Shape, source: Shape
) -> dict[str, object]:
    def summary(values: list[float]) -> dict[str, float]:
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        return {"mean": statistics.mean(values), "spread": spread, "n": len(values)}

    budgets = [key for key in next(iter(found.values()))[0] if key != "seconds"]
    alpha = {
        name: {b: summary([run[b] for run in runs]) for b in budgets}
        for name, runs in found.items()
    }
    seconds = {name: summary([run["seconds"] for run in runs]) for name, runs in found.items()}
    result: dict[str, object] = {"alpha": alpha, "seconds": seconds, "shape": shape.describe()}
    result["ratio"] = 1 - shape.params() / source.params()
    default, joint = "activation + pca + refit", "masks joint"
    if default in found and joint in found:
        last = budgets[-1]
        result["default_minus_joint_masks"] = (
            alpha[default][last]["mean"] - alpha[joint][last]["mean"]
        )
        result["cost_ratio"] = seconds[default]["mean"] / seconds[joint]["mean"]
    return result


if __name__ == "__main__":
    typer.run(main)
