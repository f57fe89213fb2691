"""A pass has no mask where none is needed and repeats no keys; no phase of a step waits for the device."""

from typing import Any

import pytest
import torch
from helpers.builders import assert_rounds
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode

from draftlab.model import llama
from draftlab.model.decoder import NARROW

IDS = torch.randint(3, 300, (2, 200), generator=torch.Generator().manual_seed(0))


class Watched(TorchFunctionMode):
    """Records the shape of q and the mask of every attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch.Size, Any]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            mask = args[3] if len(args) > 3 else (kwargs or {}).get("attn_mask")
            self.calls.append((args[0].shape, mask))
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def model(family_dirs) -> llama.Llama:
    return llama.load(family_dirs["llama"], torch.float32)  # 8 heads on 4


@pytest.mark.parametrize(
    ("cached", "width", "folded", "kind"),
    [
        (0, 100, False, type(None)),
        (40, 1, True, type(None)),
        (40, 5, True, torch.Tensor),
        (40, NARROW + 1, False, CausalBias),
    ],
)
def test_a_pass_has_the_cheapest_mask(model, cached, width, folded, kind):
    """A folded pass has the query heads of a KV head as rows, and a mask that is added."""
    cache = model.new_cache(2, 220)
    if cached:
        model.forward(IDS[:, :cached], cache)
    with Watched() as watch:
        model.forward(IDS[:, cached : cached + width], cache)
    size, mask = watch.calls[0]
    assert size[1:3] == ((4, 2 * width) if folded else (8, width))
    assert type(mask) is kind


@pytest.mark.parametrize("width", [NARROW, NARROW + 1])
def test_each_way_gives_the_logits_of_one_pass(model, width):
    whole = model.forward(IDS[:, :150], model.new_cache(2, 150))
    cache = model.new_cache(2, 150)
    parts = [model.forward(IDS[:, at : min(at + width, 150)], cache) for at in range(0, 150, width)]
    assert_rounds(torch.cat(parts, 1), whole)
