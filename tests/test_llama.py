"""The fast decoder computes what transformers computes."""

import pytest
import torch
from conftest import FAMILIES
from transformers import AutoModelForCausalLM

from draftlab import llama
from draftlab.errors import UserError

IDS = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=FAMILIES)
def pair(request, family_dirs):
    directory = family_dirs[request.param]
    return llama.load(directory, torch.float32), AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@torch.inference_mode()
def test_prefill_logits_equal_transformers(pair):
    ours, theirs = pair
    torch.testing.assert_close(ours.forward(IDS, ours.new_cache(2, 64)), theirs(IDS).logits, atol=2e-5, rtol=1e-4)


@torch.inference_mode()
def test_steps_of_any_width_equal_one_prefill(pair):
    ours, theirs = pair
    cache = ours.new_cache(2, 64)
    widths = [7, 1, 1, 5, 1, 3, 22]
    parts = [ours.forward(part, cache) for part in IDS.split(widths, dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), theirs(IDS).logits, atol=2e-5, rtol=1e-4)


@torch.inference_mode()
def test_rollback_equals_fresh_prefill(family_dirs):
    model = llama.load(family_dirs["qwen3"], torch.float32)
    used, fresh = model.new_cache(2, 64), model.new_cache(2, 64)
    model.forward(IDS[:, :20], used)
    model.forward(IDS[:, 25:38], used)  # a rejected draft
    used.used = 20
    after = model.forward(IDS[:, 20:30], used)
    model.forward(IDS[:, :20], fresh)
    torch.testing.assert_close(after, model.forward(IDS[:, 20:30], fresh), atol=0, rtol=0)
    assert torch.equal(used.keys[:, :, :, :30], fresh.keys[:, :, :, :30])


@torch.inference_mode()
def test_last_gives_the_last_logits(family_dirs):
    model = llama.load(family_dirs["llama"], torch.float32)
    whole = model.forward(IDS, model.new_cache(2, 64))
    torch.testing.assert_close(model.forward(IDS, model.new_cache(2, 64), last=3), whole[:, -3:])


def test_a_cache_longer_than_the_context_is_refused(family_dirs):
    with pytest.raises(UserError, match="context of 256"):
        llama.load(family_dirs["llama"], torch.float32).new_cache(1, 257)


def test_a_full_cache_is_an_error(family_dirs):
    model = llama.load(family_dirs["llama"], torch.float32)
    with pytest.raises(ValueError, match="40 tokens do not fit a cache of 39"):
        model.forward(IDS, model.new_cache(2, 39))
