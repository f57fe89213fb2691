"""Training in one of several processes, started by test_distributed.py: python distributed_worker.py OUT KIND ..."""

import os
import sys
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import gather_object
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from draftlab.data import Batch
from draftlab.model.shape import Shape
from draftlab.pruning.masks.hard_concrete import Masks
from draftlab.pruning.masks.masked_model import masked
from draftlab.training.checkpointer import best_weights, process_state
from draftlab.training.loop import Loop
from draftlab.training.losses import parse_loss
from draftlab.training.objectives import DistillStep
from draftlab.training.on_policy import StudentBatches
from draftlab.training.teachers import LocalTeacher, shard_by_layer
from draftlab.training.trainer import EvalRecord, StepRecord, train
from draftlab.trust import remote_code
from helpers.builders import build, setup
from helpers.masks import SETTINGS, smaller
from helpers.training_steps import go, student

HAVE = Shape(layers=5, hidden=64, heads=8, kv_heads=4, head_dim=12, ffn=88, vocab=307)


class Rows:
    def batch(self, step: int) -> Batch:
        ids = np.random.default_rng(step).integers(3, 307, (4, 17))
        mask = np.ones((4, 16), dtype=np.float32)
        mask[step % 4, : 3 * step] = 0  # processes hold unequal numbers of tokens
        return Batch(ids, mask)


def trained(out: Path) -> dict[str, Tensor]:
    """Weights and masks after a few steps of the loop."""
    model, masks, teacher = (
        build("mistral", seed=1),
        Masks(HAVE, smaller(HAVE), 0),
        build("mistral", seed=2),
    )
    with masked(model, masks, 1e-6):
        list(
            train(
                model,
                setup(teacher, Rows(), [Rows().batch(9)]),
                SETTINGS,
                out.with_suffix(".state"),
                masks,
            )
        )
    return {name: p.detach() for name, p in [*model.named_parameters(), *masks.named_parameters()]}


def distilled(out: Path) -> dict[str, Tensor]:
    """Return the best weights of a run in parts of batches; one of several processes stops on its way and goes on."""
    settings = Loop(
        steps=4,
        optimizer="adamw",
        lr=1e-3,
        dtype="float32",
        eval_steps=4,
        save_steps=2,
        micro_batch_tokens=16,
        warmup_ratio=0.5,
        weight_decay=0.1,
    )
    learnt, state = (
        setup(build("llama", seed=2), Rows(), [Rows().batch(9)]),
        out.with_suffix(".state"),
    )
    for stop in (3, 5) if process_state().num_processes > 1 else (5,):
        with remote_code(True):  # DeepSpeed's checkpoints have pickles
            steps = takewhile(
                lambda r, stop=stop: r.step < stop,
                train(build("llama", seed=1), learnt, settings, state),
            )
            metrics = [record.selection_metric for record in steps if isinstance(record, EvalRecord)]
        if stop == 3 and "ACCELERATE_USE_DEEPSPEED" in os.environ:
            assert list(state.glob("step-00000002/**/zero_pp_rank_1_*optim_states.pt"))
    assert metrics.index(max(metrics)) == len(metrics) - 1
    process_state().wait_for_everyone()
    return best_weights(state, "student")


def skipping(out: Path) -> dict[str, Tensor]:
    """Weights after a run in which one row of two steps has an infinite gradient, and which steps were skipped."""
    seen = go(student(), out.with_suffix(".skipping"), 2, 5)
    skipped = [record.skipped for record, _ in seen if isinstance(record, StepRecord)]
    named = {str(number): weight for number, weight in enumerate(seen[-1][1])}
    return named | {"skipped": torch.tensor(skipped).int()}


def gradients(sharded: bool) -> dict[str, Tensor]:
    """Gradients of one step, with FSDP2 around every layer of student and teacher, or without."""
    model, masks = build("mistral", seed=1), Masks(HAVE, smaller(HAVE), 0)
    step = DistillStep(model, parse_loss("fkl"), 1.0, constraint=masks)
    step.progress = 0.7
    rows, processes = Rows().batch(2), 1
    tokens = float(rows.mask.sum())
    if sharded:
        processes = process_state().num_processes
        shard(model, step)
        rows = rows.shard(process_state().process_index, processes)
    target = build("mistral", seed=2)
    if sharded:
        shard_by_layer(target)
    outputs = LocalTeacher(target, 307, torch.device("cpu")).distributions(rows)
    ids, mask = torch.from_numpy(rows.ids), torch.from_numpy(rows.mask)
    torch.manual_seed(0)
    with masked(model, masks, 1e-6):
        sums = step(ids, mask, outputs)
        (sums[0, 5] * processes / tokens).backward()
    return {name: grad for name, p in step.named_parameters() if (grad := p.grad) is not None}


class Starts(Rows):
    """Three rows to go on with, which two processes cannot share evenly."""

    def batch(self, step: int) -> Batch:
        return super().batch(step).rows(slice(3))


def written(sharded: bool) -> dict[str, Tensor]:
    """Texts of a draft before each of three steps on them, and the most rows that a pass of it had here.

    sharded: with FSDP2 around every layer, otherwise DDP around it all.
    """
    model = build("llama", seed=1)
    step = DistillStep(model, parse_loss("ce"), 1.0)
    if sharded:
        shard(model, step)
        register_fsdp_forward_method(step, "around")
    together = DistributedDataParallel(step) if process_state().num_processes > 1 and not sharded else step
    passed, here = list[int](), process_state()
    model.register_forward_pre_hook(lambda *all: passed.append(len(all[2]["input_ids"])), with_kwargs=True)
    own = StudentBatches(model, Starts(), 4, 1.0, tuple(range(100)), 307, 0)
    optimizer, texts = torch.optim.SGD(model.parameters(), lr=0.1), list[Batch]()
    for number in range(3):
        batch = step.around(lambda number=number: own.batch(number))
        part = batch.shard(here.process_index, here.num_processes)
        sums = together(torch.from_numpy(part.ids), torch.from_numpy(part.mask), None)
        (sums[0, 5] * here.num_processes / float(batch.mask.sum())).backward()
        optimizer.step()
        optimizer.zero_grad()
        texts.append(batch)
    assert all(found == texts[0].ids.tolist() for found in gather_object([texts[0].ids.tolist()]))
    masks = torch.from_numpy(np.stack([text.mask for text in texts]))
    assert len(set(masks.sum(-1).flatten().tolist())) > 2  # they end at different tokens
    ids = torch.from_numpy(np.stack([text.ids for text in texts]))
    return {"ids": ids, "masks": masks, "rows": torch.tensor(max(passed))}


def shard(model: PreTrainedModel, step: DistillStep) -> None:
    """Shard as accelerate does, which takes FSDP2 for accelerators only."""
    mesh = init_device_mesh("cpu", (process_state().num_processes,))
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(step, mesh=mesh)
    assert all(isinstance(p, DTensor) for p in step.parameters())


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).contiguous().clone()


def main(out: Path, *chosen: str) -> None:
    sharded = "RANK" in os.environ
    kinds = {"train": trained, "distil": distilled, "step": lambda _: gradients(sharded)}
    kinds["skip"] = skipping
    kinds |= {
        "write": lambda _: written(sharded=False),
        "write-sharded": lambda _: written(sharded),
    }
    for kind in chosen:
        tensors = {name: whole(tensor) for name, tensor in kinds[kind](out).items()}
        if os.environ.get("RANK", "0") == "0":
            save_file(tensors, out.with_suffix(f".{kind}"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
    process_state().wait_for_everyone()
    os._exit(0)  # gloo's threads that still hold tensors of FSDP2 can abort Python's own end
