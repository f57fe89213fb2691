"""Fixtures: saved checkpoints of every family, a small tokenizer, the embedded target in fp32."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.builders import FAMILIES, OTHER_BLOCKS, SIZES, TOKENIZER_TEXT, build
from hypothesis import HealthCheck, settings

from benchmarks.tiny_target import train_tokenizer
from draftlab.latency import machine_state
from draftlab.model import checkpoint, hub, saving

# one: tests run beside each other
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
# no test depends on time: a busy machine draws examples slowly
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def brief_warm_ups() -> Iterator[None]:
    """Two warm-up runs of each way to decode: beside other tests, times are never steady, and up to ten runs follow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_state, "WARM_UPS", (2, 2))
        yield


@pytest.fixture(scope="session")
def fp32(tmp_path_factory) -> Path:
    """Return the embedded target in fp32, so that both sides compute in it."""
    out, target = tmp_path_factory.mktemp("tiny") / "tiny", hub.locate("tiny")
    out.mkdir()
    weights = ((name, tensor.float()) for name, tensor in checkpoint.Weights(target).items())
    saving.write_checkpoint(out, checkpoint.read_config(target) | {"dtype": "float32"}, weights, target)
    return out


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TOKENIZER_TEXT, SIZES["vocab_size"], out)
    return out


@pytest.fixture(scope="session")
def family_dirs(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> dict[str, Path]:
    """Return a saved checkpoint of each family, as transformers writes it, with the small tokenizer."""
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES | OTHER_BLOCKS:
        build(family).save_pretrained(root / family)
        for file in tokenizer_dir.iterdir():
            (root / family / file.name).write_bytes(file.read_bytes())
    return {family: root / family for family in FAMILIES | OTHER_BLOCKS}
