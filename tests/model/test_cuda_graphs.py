"""Replayed passes are the model's own: static tensors on a CPU, CUDA graphs where there is a device."""

import gc
import weakref
from typing import Any

import pytest
import torch
from helpers.plain_eagle import target_and_head
from helpers.prompts import RAGGED
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from draftlab.drafters.parallel import model_drafter
from draftlab.engine.generate import ModelDrafter, Sampler, speculative_decode
from draftlab.heads.eagle3.decoder import CudaGraphEagle
from draftlab.heads.eagle3.drafter import EagleDrafter
from draftlab.model import llama
from draftlab.model.cuda_graphs import BUCKET, CudaGraphLlama
from draftlab.sampling import SamplingParams
from draftlab.scoring import throughput
from draftlab.scoring.throughput import measure_throughput, timed_steps

CPU = torch.device("cpu")
CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")],
)
DEVICES = pytest.mark.parametrize("device", ["cpu", CUDA])


def graphs_of(model: CudaGraphLlama, length: int) -> list[Any]:
    """Return the graphs of a model whose keys have this length."""
    captured = [item for store in model._stores for item in store.graphs.items()]
    return [graph for key, graph in captured if len(key) == length]


def passes_of(model: CudaGraphLlama) -> list[Any]:
    return graphs_of(model, 5)


def chains_of(model: CudaGraphLlama) -> list[Any]:
    return graphs_of(model, 4)


@DEVICES
def test_memory_and_graphs_serve_the_next_text_and_never_two_at_once(family_dirs, device):
    graphed = CudaGraphLlama(llama.load(family_dirs["llama"], torch.float32, torch.device(device)))
    first, second = graphed.new_cache(2, 30), graphed.new_cache(2, 40)
    assert first.keys.data_ptr() != second.keys.data_ptr()
    place = first.keys.data_ptr()
    ids = torch.ones(2, 3, dtype=torch.long, device=device)
    for _ in range(2):  # a prompt, which is not replayed, and what follows
        graphed.forward(ids, first)
    del first
    again = graphed.new_cache(2, 50)
    assert (again.keys.data_ptr(), again.used, again.capacity) == (place, [0, 0], BUCKET)
    for _ in range(2):
        graphed.forward(ids, again)
    assert len(passes_of(graphed)) == 1


@DEVICES
def test_no_graph_is_captured_in_a_pass_that_counts(family_dirs, device, monkeypatch):
    """Prompts of several lengths, of which the longest needs a longer cache to speculate than to decode plainly."""
    model = llama.load(family_dirs["llama"], torch.float32, torch.device(device))
    model.context = model.rope.context = 3 * BUCKET
    target, draft = CudaGraphLlama(model), CudaGraphLlama(model)
    prompts, counts = [[5, 6, 7] * n for n in (3, 82, 10, 160, 40)], []

    def decoded(steps):
        counts.append([len(made) for m in (target, draft) for made in (passes_of(m), chains_of(m))])
        return timed_steps(steps)

    monkeypatch.setattr(throughput, "timed_steps", decoded)
    sampling = SamplingParams(max_tokens=8)
    measure_throughput(
        target,
        {"d": (model_drafter(draft, target.vocab), [4])},
        prompts,
        sampling=sampling,
        repeats=1,
        advance=lambda _: None,
    )
    assert len(counts) >= 2 * len(prompts)  # a prompt full of stalls is decoded again
    assert all(count == counts[0] for count in counts)


@DEVICES
def test_the_last_reference_frees_a_model_and_what_was_captured_of_it(family_dirs, device):
    """No collector has to run before the next draft is loaded; a longer cache takes a shorter one's memory at once."""
    gc.collect()
    gc.disable()
    try:
        target, draft = (
            CudaGraphLlama(llama.load(family_dirs["llama"], torch.float32, torch.device(device))) for _ in range(2)
        )
        drafter = ModelDrafter(draft)
        for warp in (SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, temperature=0.8)):
            list(speculative_decode(target, drafter, RAGGED[:1], 3, warp))
        assert chains_of(draft)
        assert passes_of(target)
        captured = [weakref.ref(chain.inputs[0]) for chain in chains_of(draft)]
        draft.context = 3 * BUCKET
        drafter.reset(1, BUCKET + 1)
        assert [ref() for ref in captured] == [None, None]
        models = [weakref.ref(model) for model in (target, draft)]
        del target, draft, drafter
        assert [ref() for ref in models] == [None, None]
    finally:
        gc.enable()


@DEVICES
@pytest.mark.parametrize("warp", [{}, {"temperature": 0.8, "top_k": 40, "top_p": 0.9}])
def test_a_chain_drafts_what_its_passes_draft(family_dirs, device, warp):
    """Rows of different lengths, and a head padded beyond the draft's; the second step replays what the first kept."""
    model = llama.load(family_dirs["qwen3"], torch.float32, torch.device(device))
    wider, sampling = model.shape.vocab + 5, SamplingParams(max_tokens=20, **warp)
    graphed = CudaGraphLlama(model)
    drafters = [ModelDrafter(each, wider) for each in (model, graphed)]
    uniform = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(1)).to(device)
    for drafter in drafters:
        drafter.reset(3, 40)
    for step, draws in enumerate(uniform):
        texts = [[*prompt, *[7] * step] for prompt in RAGGED[:3]]
        wanted, found = (drafter.propose(texts, 4, sampling, draws) for drafter in drafters)
        assert torch.equal(found.ids, wanted.ids)
        assert (found.q is None) == (not warp)
        if wanted.q is not None and found.q is not None:
            torch.testing.assert_close(found.q, wanted.q)
        assert drafters[1].cache.used == drafters[0].cache.used
    assert len(chains_of(graphed)) == 1


@DEVICES
@pytest.mark.parametrize("warp", [{}, {"temperature": 0.9, "top_k": 40}])
def test_a_head_drafts_from_the_states_that_graphs_of_its_target_keep(tmp_path, device, warp):
    """Texts beside each other, then others in the same memory, where states of the first ones still are."""
    target, head = target_and_head(tmp_path, torch.device(device))
    graphs = CudaGraphLlama(target), CudaGraphEagle(head)
    sampling, made = SamplingParams(max_tokens=24, **warp), []
    drafters = {target: EagleDrafter(target, head), graphs[0]: EagleDrafter(*graphs)}
    for prompts in (RAGGED[:3], RAGGED[1:4], [prompt[:4] for prompt in RAGGED[:3]]):
        found = [list(speculative_decode(model, drafters[model], prompts, 4, sampling)) for model in drafters]
        assert [(step.row, step.accepted, step.tokens) for step in found[0]] == [
            (step.row, step.accepted, step.tokens) for step in found[1]
        ]
        assert sum(step.accepted for step in found[0]) > 0
        made.append((len(graphs[0]._stores), len(graphs[1]._stores), len(chains_of(graphs[1]))))
    assert made == [(1, 1, 1)] * 3


def test_what_is_captured_never_waits_for_the_device(family_dirs, tmp_path):
    """A tensor without values cannot be waited for; one that is looked at must fail."""
    graphed = CudaGraphLlama(llama.load(family_dirs["qwen3"], torch.float32))
    vocab, uniform = graphed.shape.vocab, torch.rand(3, 4)

    class Looks(Sampler):
        def __call__(self, logits, draws):
            return (logits.argmax(-1) if logits.max() > 0 else logits.argmin(-1)), None

    warps = [SamplingParams(), SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01)]
    cache = graphed.new_cache(3, 40)
    for _ in range(2):
        graphed.forward(torch.ones(3, 4, dtype=torch.long), cache)
    for choose in [*(Sampler(warp, vocab + 5) for warp in warps), Looks(warps[0], vocab)]:
        graphed.draft(torch.randn(3, vocab), cache, uniform, choose)
    *captured, waiting = [*passes_of(graphed), *chains_of(graphed)]
    target, head = target_and_head(tmp_path)
    graphs = CudaGraphLlama(target), CudaGraphEagle(head)
    sampling = SamplingParams(max_tokens=12, temperature=0.8, top_k=40)
    list(speculative_decode(graphs[0], EagleDrafter(*graphs), RAGGED[:3], 3, sampling))
    captured += [*passes_of(graphs[0]), *passes_of(graphs[1])]
    captured += chains_of(graphs[1])
    assert len(captured) >= 6
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        for graph in captured:
            graph.replay()
        with pytest.raises(DataDependentOutputException):
            waiting.replay()
