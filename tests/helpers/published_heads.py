"""Files of heads as they are published."""

from pathlib import Path
from typing import Any

import pytest
import torch

from draftlab.heads.eagle3 import layout
from draftlab.heads.eagle3.layout import Head

K = 3


@pytest.fixture(scope="module", name="target")
def target_fixture(family_dirs: dict[str, Path]) -> Path:
    return family_dirs["llama"]


def random_head(target: Path, **sizes: Any) -> Head:
    layers, vocab, normed = (sizes.get(n) for n in ("layer_ids", "draft_vocab", "normed"))
    config = layout.head_config(target, layers, vocab or 40, norm_before_residual=bool(normed))
    generator = torch.Generator().manual_seed(0)
    weights = {name: 0.2 * torch.randn(size, generator=generator) for name, size in config.sizes().items()}
    ids = torch.randperm(config.vocab, generator=generator)[: config.draft_vocab].sort().values
    return Head(config=config, weights=weights, ids=ids, embedding=None)


def written(folder: Path, target: Path, form: Any = "native", **sizes: Any) -> Path:
    folder.mkdir()
    layout.write(folder, random_head(target, **sizes), form, target=target, k=K)
    return folder


@pytest.fixture(name="folder")
def folder_fixture(target: Path, tmp_path: Path) -> Path:
    return written(tmp_path / "head", target)
