"""Mask training in one of several processes, started by test_distributed.py: python distributed_worker.py KIND OUT."""

import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from conftest import build, lesson
from safetensors.torch import save_file
from test_masks import SETTINGS, smaller
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from draftlab.data import Batch
from draftlab.distill.loop import DistillStep, train
from draftlab.distill.losses import parse_loss
from draftlab.distill.teacher import LocalTeacher, shard_by_layer
from draftlab.prune.masked import masked
from draftlab.prune.masks import Masks
from draftlab.shape import Shape

HAVE = Shape(layers=5, hidden=64, heads=8, kv_heads=4, head_dim=12, ffn=88, vocab=307)


class Rows:
    def batch(self, step: int) -> Batch:
        ids = np.random.default_rng(step).integers(3, 307, (4, 17))
        mask = np.ones((4, 16), dtype=np.float32)
        mask[step % 4, : 3 * step] = 0  # processes hold unequal numbers of tokens
        return Batch(ids, mask)


def trained(out: Path) -> dict[str, Tensor]:
    """Weights and masks after a few steps of the loop."""
    model, masks, teacher = build("mistral", seed=1), Masks(HAVE, smaller(HAVE), 0), build("mistral", seed=2)
    with masked(model, masks, 1e-6):
        list(train(model, lesson(teacher, Rows(), [Rows().batch(9)]), SETTINGS, out.with_suffix(".state"), masks))
    return {name: p.detach() for name, p in [*model.named_parameters(), *masks.named_parameters()]}


def gradients(sharded: bool) -> dict[str, Tensor]:
    """Gradients of one step, with FSDP2 around every layer of student and teacher, or without."""
    model, masks = build("mistral", seed=1), Masks(HAVE, smaller(HAVE), 0)
    step = DistillStep(model, parse_loss("fkl"), 1.0, constraint=masks)
    step.begin(0.7)
    rows, processes = Rows().batch(2), 1
    tokens = float(rows.mask.sum())
    if sharded:
        dist.init_process_group("gloo")
        processes = dist.get_world_size()
        mesh = init_device_mesh("cpu", (processes,))
        for layer in model.get_submodule("model.layers").children():
            fully_shard(layer, mesh=mesh)
        fully_shard(step, mesh=mesh)
        assert all(isinstance(p, DTensor) for p in step.parameters())
        rows = rows.part(dist.get_rank(), processes)
    target = build("mistral", seed=2)
    if sharded:
        shard_by_layer(target)
    seen = LocalTeacher(target, 307, torch.device("cpu")).look(rows)
    ids, mask = torch.from_numpy(rows.ids), torch.from_numpy(rows.mask)
    torch.manual_seed(0)
    with masked(model, masks, 1e-6):
        sums = step(ids, mask, seen)
        (sums[5] * processes / tokens).backward()
    return {name: grad for name, p in step.named_parameters() if (grad := p.grad) is not None}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).contiguous().clone()


def main(kind: str, out: Path) -> None:
    torch.set_num_threads(1)
    found = trained(out) if kind == "train" else gradients(sharded="RANK" in os.environ)
    tensors = {name: whole(tensor) for name, tensor in found.items()}
    if os.environ.get("RANK", "0") == "0":
        save_file(tensors, out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
