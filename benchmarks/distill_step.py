"""Time a distillation step: draftlab against TRL's GKDTrainer, and stored outputs against a target in memory.

The drafts are cut from the embedded target by `draftlab prune`. Both sides of a comparison have the same weights, rows,
loss, dtype, clipping and AdamW. They run in alternating order, one step at a time, each with its own loop and data
loader. TRL runs GKD on given text (lmbda 0) without gradient checkpointing, because TRL's DistillationTrainer trains
only on text of the student. Times are in CPU seconds, which other work changes less than wall seconds.
"""

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from transformers import PreTrainedModel, TrainerCallback

from benchmarks import environment
from draftlab.console import note
from draftlab.data import HeldOut, TokenBatches, open_batches
from draftlab.model import checkpoint, hub
from draftlab.training.drafts import stored_setup
from draftlab.training.loop import Loop
from draftlab.training.losses import parse_loss
from draftlab.training.trainer import MAX_GRAD_NORM, StepRecord, TrainingSetup, train

TARGET, BATCHES, WARM_UP, ENDLESS = "tiny", 64, 3, 10**6
# (layers, width) of a good draft, and of a draft with an eighth of the target's operations
WIDE, SMALL = ((3, 256), (2, 192))
BETAS = {"fkl": 0.0, "rkl": 1.0, "jsd(0.5)": 0.5}  # name in draftlab -> beta in TRL
Dtype = Literal["float32", "bfloat16"]
Step = Callable[[], object]  # one optimiser step


def main(
    folder: Annotated[Path, typer.Option(help="Folder for drafts and stored outputs.")] = Path("runs/distill_step"),
    loss: Annotated[str, typer.Option(help=f"One of {', '.join(BETAS)}.")] = "fkl",
    dtype: Annotated[Dtype, typer.Option(help="bfloat16 trains with autocast and a target in bf16.")] = "bfloat16",
    rows: Annotated[int, typer.Option(help="Rows per step.")] = 16,
    seq_len: Annotated[int, typer.Option(help="Tokens per row.")] = 256,
    steps: Annotated[int, typer.Option(help="Timed steps of each side.")] = 20,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
) -> None:
    torch.set_num_threads(threads)
    folder.mkdir(parents=True, exist_ok=True)
    wide, small = _draft(folder, *WIDE), _draft(folder, *SMALL)
    settings = Loop(
        steps=ENDLESS,
        optimizer="adamw",
        lr=1e-4,
        weight_decay=0.1,
        dtype=dtype,
        eval_steps=ENDLESS,
        save_steps=ENDLESS,
    )
    text = open_batches("stdlib", checkpoint.load_tokenizer(wide), rows=rows, seq_len=seq_len, steps=BATCHES, seed=0)
    setup = TrainingSetup(
        teacher=_target(settings),
        batches=text,
        heldout=HeldOut([text.batch(0)], 1.0),
        loss=parse_loss(loss),
    )
    stored = _cache(folder, BATCHES * rows, seq_len)
    cached = stored_setup(stored, small, loss, 1.0, rows=rows, seed=0)
    seconds = _taking_turns({"cached": _ours(small, cached, settings), "local": _ours(small, setup, settings)}, steps)
    report: dict[str, object] = {"cached_over_local": _ratio(seconds, "cached", "local")}
    if importlib.util.find_spec("trl"):
        arms = {
            "draftlab": _ours(wide, setup, settings),
            "trl": _theirs(wide, text, settings, loss),
        }
        seconds |= _taking_turns(arms, steps)
        report |= {
            "step_time_over_trl": _ratio(seconds, "draftlab", "trl"),
            "trl": metadata.version("trl"),
        }
    else:
        note("trl is not installed, so draftlab is not compared with its trainer")
    report["cpu_seconds"] = {arm: [round(s, 4) for s in sorted(taken)] for arm, taken in seconds.items()}
    report["tokens_per_second"] = {arm: rows * seq_len / statistics.median(taken) for arm, taken in seconds.items()}
    report["target_operations_over_draft"] = {path.name: _operations_over(path, seq_len) for path in (wide, small)}
    report["setting"] = {
        "loss": loss,
        "dtype": dtype,
        "rows": rows,
        "seq_len": seq_len,
        "steps": steps,
    }
    print(json.dumps({"benchmark": "distill_step"} | report | environment(threads)))


def _draft(folder: Path, layers: int, width: int) -> Path:
    out = folder / f"{layers}x{width}"
    if not out.exists():
        _draftlab(
            "prune",
            "--source",
            TARGET,
            "--layers",
            layers,
            "--width",
            width,
            "--data",
            "stdlib",
            "--out",
            out,
        )
    return out


def _cache(folder: Path, sequences: int, seq_len: int) -> Path:
    out = folder / f"cache-{sequences}x{seq_len}"
    if not out.exists():
        size = "--num-sequences", sequences, "--seq-len", seq_len
        _draftlab("outputs", "build", "--target", TARGET, "--data", "stdlib", *size, "--out", out)
    return out


def _draftlab(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "draftlab", *map(str, words)], check=True, stdout=sys.stderr)


def _operations_over(draft: Path, seq_len: int) -> float:
    target, small = (checkpoint.read_shape(path) for path in (hub.locate(TARGET), draft))
    return target.flops_per_token(seq_len // 2) / small.flops_per_token(seq_len // 2)


def _ratio(seconds: dict[str, list[float]], of: str, to: str) -> float:
    """Return the median seconds of one side divided by those of the other."""
    return statistics.median(seconds[of]) / statistics.median(seconds[to])


def _taking_turns(arms: dict[str, Step], steps: int) -> dict[str, list[float]]:
    """Run steps of all sides in alternating order. Return the CPU seconds of each side's steps after the warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(WARM_UP + steps):
        for name in arms if number % 2 else reversed(arms):
            began = time.process_time()
            arms[name]()
            seconds[name] += [time.process_time() - began] if number >= WARM_UP else []
    return seconds


def _target(settings: Loop) -> PreTrainedModel:
    return checkpoint.load_model(hub.locate(TARGET), getattr(torch, settings.dtype))


def _ours(draft: Path, setup: TrainingSetup, settings: Loop) -> Step:
    records = train(checkpoint.load_model(draft, torch.float32), setup, settings, Path(tempfile.mkdtemp()))
    return lambda: next(record for record in records if isinstance(record, StepRecord))


def _theirs(draft: Path, text: TokenBatches, settings: Loop, loss: str) -> Step:
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig, GKDTrainer  # type: ignore[import-not-found]

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([row["input_ids"] for row in rows])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}

    arguments = GKDConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=settings.steps,
        per_device_train_batch_size=text.rows,
        learning_rate=settings.lr,
        weight_decay=settings.weight_decay,
        max_grad_norm=MAX_GRAD_NORM,
        bf16=settings.dtype == "bfloat16",
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        lmbda=0.0,
        beta=BETAS[loss],
        temperature=1.0,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    turns = _Turns()
    trainer = GKDTrainer(
        model=checkpoint.load_model(draft, torch.float32),
        teacher_model=_target(settings),
        args=arguments,
        data_collator=collate,
        train_dataset=Dataset.from_dict({"input_ids": [row for i in range(BATCHES) for row in text.batch(i).ids]}),
        processing_class=checkpoint.load_tokenizer(draft),
        callbacks=[turns],
    )
    turns.start(trainer.train)
    return turns.step


class _Turns(TrainerCallback):
    """A callback that pauses a trainer, which runs in a separate thread, before each of its steps."""

    def __init__(self) -> None:
        self.go, self.held = threading.Semaphore(0), threading.Semaphore(0)
        self.failure: Exception | None = None

    def start(self, loop: Callable[[], object]) -> None:
        def run() -> None:
            try:
                loop()
            except Exception as error:
                self.failure = error
                self.held.release()

        threading.Thread(target=run, daemon=True).start()
        self._wait()

    def step(self) -> None:
        self.go.release()
        self._wait()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.held.release()
        self.go.acquire()

    def _wait(self) -> None:
        self.held.acquire()
        if self.failure is not None:
            raise self.failure


if __name__ == "__main__":
    typer.run(main)
