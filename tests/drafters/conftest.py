"""What drafters are built for: a target with a corpus, an EAGLE-3 head, a parallel draft, and stored outputs."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.dflash_heads import NATIVE, written
from helpers.head_texts import random_weights

from draftlab.commands import COMMANDS
from draftlab.drafters.context import DrafterContext
from draftlab.heads.eagle3 import layout
from draftlab.heads.eagle3.layout import Head
from draftlab.model import modes
from draftlab.model.decoder import Decoder
from draftlab.sampling import SamplingParams


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"def part_{i}(line):\n    return [int(x) for x in line.split({i})]\n" * 12)
    return folder


@pytest.fixture(scope="module")
def context(family_dirs: dict[str, Path], corpus: Path) -> DrafterContext:
    def load(path: Path) -> Decoder:
        return modes.load(path, torch.float32, torch.device("cpu"))

    place = family_dirs["llama"]
    return DrafterContext(
        load(place),
        place,
        load,
        family_dirs["qwen3"],
        data=str(corpus),
        sampling=SamplingParams(max_tokens=12),
        ks=[2],
        mode="eager",
        clock=time.process_time,
        device=torch.device("cpu"),
    )


@pytest.fixture(scope="module")
def parallel_draft(family_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a parallel draft that was trained for four tokens."""
    folder = tmp_path_factory.mktemp("parallel") / "draft"
    shutil.copytree(family_dirs["llama"], folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pard_token": 2, "pard_offsets": 4}))
    return folder


@pytest.fixture(scope="module")
def dflash_head(family_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random DFlash head."""
    return written(tmp_path_factory.mktemp("dflash") / "head", family_dirs["llama"], NATIVE)


@pytest.fixture(scope="module")
def eagle_head(family_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random EAGLE-3 head."""
    folder = tmp_path_factory.mktemp("eagle")
    config = layout.head_config(family_dirs["llama"], None, 100)
    weights = random_weights(config.sizes(), 0, 0.1)
    head = Head(config=config, weights=weights, ids=torch.arange(100), embedding=None)
    layout.write(folder, head, "native", target=family_dirs["llama"], k=2)
    return folder


@pytest.fixture(scope="module")
def stored(family_dirs: dict[str, Path], corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of the target's texts."""
    out = tmp_path_factory.mktemp("stored") / "answers"
    sizes: dict[str, Any] = {"num_prompts": 6, "prompt_tokens": 12, "max_new_tokens": 24}
    COMMANDS["outputs build"](
        use="replay",
        target=str(family_dirs["llama"]),
        data=str(corpus),
        out=out,
        device="cpu",
        **sizes,
    )
    return out
