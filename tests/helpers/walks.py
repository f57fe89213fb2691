"""Logits of a walk through a small model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftlab.model import checkpoint
from draftlab.model.shape import Shape
from draftlab.pruning.walk import Walk

CPU = torch.device("cpu")
IDS = torch.randint(3, 300, (4, 33), generator=torch.Generator().manual_seed(1))


def run_all(walk: Walk, rows: list[Tensor]) -> list[Tensor]:
    streams = walk.embed(rows)
    for index in range(len(walk.layers)):
        with walk.layer(index) as (_, run):
            streams = [run(stream) for stream in streams]
    with walk.head() as (_, run):
        return [run(stream) for stream in streams]


def opened(source: Path) -> tuple[Shape, checkpoint.Weights, dict[str, Any]]:
    return (
        checkpoint.read_shape(source),
        checkpoint.Weights(source),
        checkpoint.read_config(source),
    )


def walk(weights: Mapping[str, Tensor], config: dict[str, Any]) -> Walk:
    return Walk(weights, config, torch.float32, CPU)


def walk_logits(weights: Mapping[str, Tensor], config: dict[str, Any]) -> Tensor:
    return run_all(walk(weights, config), [IDS[:1]])[0]


def random_rotation() -> Tensor:
    return torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))[0]
