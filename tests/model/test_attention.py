"""Attention has no mask where none is needed and repeats no keys; no phase of a step waits for the device."""

from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode

from draftlab.engine import generate
from draftlab.engine.clocks import step_clock_for
from draftlab.engine.generate import ModelDrafter, speculative_decode
from draftlab.model import llama
from draftlab.model.decoder import NARROW, Tree
from draftlab.sampling import SamplingParams

IDS = torch.randint(3, 300, (2, 200), generator=torch.Generator().manual_seed(0))


class Watched(TorchFunctionMode):
    """Records the shape of q and the arguments of every attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch.Size, dict[str, Any]]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            mask = args[3] if len(args) > 3 else (kwargs or {}).get("attn_mask")
            self.calls.append((args[0].shape, {**(kwargs or {}), "attn_mask": mask}))
        return func(*args, **(kwargs or {}))


def watched(model: llama.Llama, cached: int, width: int, tree: Tree | None = None):
    cache = model.new_cache(2, 220)
    if cached:
        model.forward(IDS[:, :cached], cache)
    with Watched() as watch:
        model.forward(IDS[:, cached : cached + width], cache, tree=tree)
    return watch.calls[0]


@pytest.fixture(scope="module")
def model(family_dirs) -> llama.Llama:
    return llama.load(family_dirs["llama"], torch.float32)  # 8 heads on 4


def test_a_prompt_is_causal_without_a_mask(model):
    size, how = watched(model, 0, 100)
    assert size[1] == 8
    assert how["attn_mask"] is None
    assert how["is_causal"]


def test_one_token_has_no_mask_and_repeats_no_keys(model):
    size, how = watched(model, 40, 1)
    assert size[1:3] == (4, 2)  # two heads of a kv head are rows
    assert how["attn_mask"] is None
    assert not how.get("enable_gqa")


@pytest.mark.parametrize("tree", [None, Tree.from_parents((0, 0, 1, 2))])
def test_a_verified_draft_is_folded_with_a_mask_that_is_added(model, tree):
    size, how = watched(model, 40, 5, tree)
    assert size[1:3] == (4, 2 * 5)
    assert how["attn_mask"].dtype == torch.float32
    assert how["attn_mask"].shape[1:] == (1, 2 * 5, 45)
    assert not how.get("enable_gqa")


def test_what_follows_a_prompt_in_one_wide_pass_is_causal_from_the_right(model):
    size, how = watched(model, 40, NARROW + 1)
    assert size[1] == 8
    assert isinstance(how["attn_mask"], CausalBias)


class FakeEvent:
    counts: ClassVar[Counter[str]] = Counter()

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        self.counts["recorded"] += 1

    def synchronize(self) -> None:
        self.counts["waited"] += 1

    def elapsed_time(self, later: "FakeEvent") -> float:
        return 0.0 if later is self else 2.0


def test_phases_are_timed_by_events_that_are_waited_for_when_the_step_is_over(model, monkeypatch):
    FakeEvent.counts.clear()
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    waits: list[int] = []
    verify = generate.verify_batch

    def watched_verify(*arguments: Any) -> Any:
        waits.append(FakeEvent.counts["waited"])
        return verify(*arguments)

    monkeypatch.setattr(generate, "verify_batch", watched_verify)
    clock = step_clock_for(torch.device("cuda"))
    steps = list(
        speculative_decode(
            model,
            ModelDrafter(model),
            [IDS[0, :9].tolist()],
            3,
            SamplingParams(max_tokens=9),
            clock,
        )
    )
    assert all(
        (s.draft_seconds, s.verify_seconds, s.host_seconds) == (0.002, 0.002, 0.002)
        for s in steps[1:]
    )
    assert steps[0].draft_seconds == 0.004  # the draft reads the prompt
    assert FakeEvent.counts["recorded"] == 4 * len(steps) + 1
    # none between the start of a step and its verification
    assert waits == [4 * step for step in range(len(steps))]


@pytest.mark.parametrize("width", [1, 5, NARROW, NARROW + 1, 100])
def test_each_way_gives_the_logits_of_one_pass(model, width):
    whole = model.forward(IDS[:, :150], model.new_cache(2, 150))
    cache = model.new_cache(2, 150)
    parts = [model.forward(IDS[:, at : min(at + width, 150)], cache) for at in range(0, 150, width)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)
