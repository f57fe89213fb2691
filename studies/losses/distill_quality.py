"""Compare losses and texts for distilling: acceptance before and after distilling one draft, at equal token budgets.

Every run starts from the same pruned draft and trains on the same number of tokens. Finished runs are read from the
folder --state. So a benchmark that was killed resumes, and several processes can share the folder.
"""

import json
import shutil
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from transformers import PreTrainedModel

from benchmarks import environment
from draftlab.commands.distill import DistillConfig, prepare
from draftlab.console import note
from draftlab.data import parse_mixture
from draftlab.model import hub
from draftlab.training.drafts import open_draft
from draftlab.training.evaluate import LengthComparison, TargetTextEvaluator
from draftlab.training.texts import Author
from draftlab.training.trainer import EvalRecord, StepRecord, train

LOSSES = (
    "fkl",
    "rkl",
    "jsd(0.5)",
    "tvd",
    "nla",
    "lk(3)",
    "fkl@0.2 -> lk(3)",
    "fkl@0.5 -> tvd",
    "ce",
)
TEXTS = ("target", "draft", "data=0.5,draft=0.5", "target=0.5,draft=0.5")
ROWS, SEQ_LEN, PROMPT = 8, 256, 32
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    loss: str = "fkl"
    text: str = "data"

    @property
    def name(self) -> str:
        return f"{self.loss} on {self.text}"


def main(
    draft: Annotated[Path, typer.Argument(help="Pruned draft to start from.")],
    target: Annotated[str, typer.Option(help="Target checkpoint.")] = "tiny",
    data: Annotated[str, typer.Option(help="Data to train on.")] = "stdlib",
    steps: Annotated[
        int, typer.Option(help="Steps of 8 rows x 256 tokens; other texts get as many tokens.")
    ] = 60,
    lr: Annotated[float, typer.Option(help="Peak learning rate of Muon.")] = 4e-3,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0,1,2",
    arms: Annotated[
        str, typer.Option(help="Losses and texts, separated by semicolons. Default: all.")
    ] = "",
    state: Annotated[Path, typer.Option(help="Folder for finished runs.")] = Path(
        "runs/distill_quality"
    ),
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
) -> None:
    torch.set_num_threads(threads)
    every = [Arm(loss=loss) for loss in LOSSES] + [Arm(text=text) for text in TEXTS]
    wanted = {name.strip() for name in arms.split(";")} if arms else set()
    chosen = [
        arm
        for arm in every
        if not wanted or (arm.loss in wanted and arm.text == "data") or arm.text in wanted
    ]
    state.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, float]]] = {arm.name: [] for arm in chosen}
    for seed in map(int, seeds.split(",")):
        for arm in chosen:
            file = state / f"{draft.name}-{arm.name.replace(' ', '_')}-{seed}-{steps}-{lr:g}.json"
            if not file.exists():
                result = _measure(arm, draft, hub.locate(target), data, seed, steps, lr, state)
                file.write_text(json.dumps(result))
            found[arm.name].append(json.loads(file.read_text()))
            note(f"{arm.name}, seed {seed}: {found[arm.name][-1]}")
    print(
        json.dumps(
            {"arms": _summary(found), "draft": draft.name, "steps": steps, "lr": lr}
            | environment(threads)
        )
    )


def _measure(
    arm: Arm, draft: Path, target: Path, data: str, seed: int, steps: int, lr: float, state: Path
) -> dict[str, float]:
    texts, scratch = parse_mixture(arm.text), state / f"work-{time.time_ns()}"
    scratch.mkdir()
    counted = sum(
        share * (1 if name == "data" else (SEQ_LEN - PROMPT + 1) / SEQ_LEN)
        for name, share in texts.items()
    )
    settings = {
        "loss": arm.loss,
        "text": arm.text,
        "data": data,
        "steps": round(steps / counted),
        "lr": lr,
        "seed": seed,
    }
    settings |= {
        "batch_size": ROWS,
        "seq_len": SEQ_LEN,
        "training_dtype": "bfloat16",
        "device": "cpu",
    }
    settings |= {
        "eval_steps": 10**9,
        "save_steps": 10**9,
        "prompt_tokens": 32 if arm.text == "data" else PROMPT,
    }
    config = DistillConfig.build(settings | {"draft": str(draft), "target": str(target)})
    job = cast(Any, prepare(config, True).run).args[0]
    opened = open_draft(job, None, scratch)
    student, setup = opened.module, opened.setup
    assert isinstance(setup.teacher, PreTrainedModel)
    author = Author.of(target, job.hardware, job.loop, draft)
    sampled = TargetTextEvaluator.of(
        author, draft, setup.heldout, _folder(scratch), temperature=1.0
    )
    assert sampled is not None
    sampled(student, 0)
    began = time.process_time()
    records = list(train(student, setup, job.loop, scratch))
    seconds = time.process_time() - began
    sampled(student, config.steps)
    evals = [r for r in records if isinstance(r, EvalRecord)]
    assert setup.length is not None
    greedy = _at_four(setup.length.compare(0, config.steps))
    drawn = _at_four(sampled.compare(0, config.steps))
    shutil.rmtree(scratch)
    return {
        "tokens": sum(r.tokens for r in records if isinstance(r, StepRecord)),
        "cpu_seconds": seconds,
        "alpha_before": evals[0].acceptance or 0.0,
        "alpha": evals[-1].acceptance or 0.0,
        "greedy_before": greedy.before,
        "greedy": greedy.after.value,
        "sampled_before": drawn.before,
        "sampled": drawn.after.value,
    }


def _folder(scratch: Path) -> Path:
    (scratch / "sampled").mkdir()
    return scratch / "sampled"


def _at_four(found: list[LengthComparison]) -> LengthComparison:
    return next(n for n in found if n.k == 4)


def _summary(found: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return mean and spread over seeds of each result. "greedy" and "sampled" are tokens per target pass at K = 4."""

    def one(values: list[float]) -> dict[str, float]:
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        return {"mean": statistics.mean(values), "spread": spread, "n": len(values)}

    return {
        name: {key: one([run[key] for run in runs]) for key in runs[0]}
        for name, runs in found.items()
    }


if __name__ == "__main__":
    typer.run(main)
