"""An expansion computes the source's function: by transformers alone, and by our decoder in every mode."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.builders import FAMILIES, PASS_ROUNDING, logits_by_transformers
from helpers.errors import raises_option

from benchmarks.expand import expand, larger
from draftlab.model.checkpoint import read_shape

IDS = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(1))
LARGER: dict[str, Any] = {"layers": 7, "hidden": 96, "heads": 12, "kv_heads": 6, "ffn": 104}


def expanded(source: Path, out: Path, **settings: Any) -> Path:
    return expand(source, out, read_shape(source).model_copy(update=LARGER | settings))


logits = partial(logits_by_transformers, ids=IDS)


def error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest logit."""
    return float((ours - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_sources_by_transformers_alone(family, family_dirs, tmp_path):
    kv_heads = 12 if family == "llama_mha" else 6
    out = expanded(family_dirs[family], tmp_path / "out", kv_heads=kv_heads)
    wanted = LARGER | {"kv_heads": kv_heads}
    assert read_shape(out).model_dump(include=set(wanted)) == wanted
    assert error(logits(out), logits(family_dirs[family])) < PASS_ROUNDING


@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [(12, 4), (8, 8), (24, 12)],  # of 8 on 4: more heads each, fewer, as many
)
def test_ratios_of_heads_that_hold_the_source_are_exact(heads, kv_heads, family_dirs, tmp_path):
    out = expanded(family_dirs["llama_biases"], tmp_path / "out", heads=heads, kv_heads=kv_heads)
    assert error(logits(out), logits(family_dirs["llama_biases"])) < PASS_ROUNDING


def test_parameters_solve_the_ffn(family_dirs):
    shape = larger(read_shape(family_dirs["llama"]), width=128, params="1m")
    assert shape.params() == pytest.approx(1e6, rel=0.01)
    assert (shape.heads, shape.kv_heads) == (16, 8)


@pytest.mark.parametrize("axis", ["layers", "kv_heads", "ffn"])
def test_no_axis_may_be_shorter_than_the_sources(axis, family_dirs, tmp_path):
    with raises_option(axis):
        expanded(family_dirs["llama"], tmp_path / "out", **{axis: 2})
    assert not (tmp_path / "out").exists()
