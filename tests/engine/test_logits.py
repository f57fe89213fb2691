"""Logits that are no numbers are said, and the coldest temperature is the greedy one."""

import pytest
import torch
from helpers.errors import raises_option

from draftlab.engine.generate import ModelDrafter, decode, speculative_decode
from draftlab.engine.verify import check_logits, distribution, draw
from draftlab.model.llama import load
from draftlab.sampling import SamplingParams

PROMPT = [5, 9, 11]


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-40])
def test_the_coldest_temperature_is_greedy(temperature):
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)) * 30
    p = distribution(logits, SamplingParams(max_tokens=1, temperature=temperature))
    torch.testing.assert_close(p, torch.nn.functional.one_hot(logits.argmax(-1), 50).float())
    assert draw(p, torch.rand(7)).equal(logits.argmax(-1))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(value):
    logits = torch.zeros(2, 3, 5)
    # ids that a head lacks
    check_logits(logits.index_fill(-1, torch.tensor([1]), -torch.inf), "the draft")
    logits[1, 2, 3] = value
    with raises_option("float32"):
        check_logits(logits, "the draft")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", ["target", "draft"])
def test_a_model_that_overflows_is_named(broken, temperature, family_dirs):
    models = {name: load(family_dirs["llama"], torch.float32) for name in ("target", "draft")}
    models[broken].head = torch.full_like(models[broken].head, torch.nan)
    sampling = SamplingParams(max_tokens=4, temperature=temperature)
    with raises_option("the", broken, "computes"):
        list(speculative_decode(models["target"], ModelDrafter(models["draft"]), [PROMPT], 2, sampling))
    if broken == "draft":
        assert list(decode(models["target"], [PROMPT], sampling))
