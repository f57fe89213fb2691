"""What only a GPU can tell: memory of loading, kernels of attention, text of graphs, a training step's memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import draftlab
from benchmarks.load_peak import write_random
from draftlab.data.prompts import Prompt
from draftlab.engine.generate import decode, output_tokens
from draftlab.latency.profiler import random_model
from draftlab.model import hub, llama
from draftlab.model.cuda_graphs import CudaGraphLlama
from draftlab.model.shape import Shape
from draftlab.sampling import SamplingParams
from draftlab.target_outputs.build import batch_size
from draftlab.target_outputs.targets import MEMORY, LocalTarget

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
GPU = torch.device("cuda", 0)
GQA = Shape(layers=4, hidden=1024, heads=16, kv_heads=4, head_dim=64, ffn=2816, vocab=32000)
PROMPTS = [[(7 * i + row) % 1000 + 3 for i in range(60)] for row in range(3)]


def peak_above(before: int) -> int:
    return torch.cuda.max_memory_allocated(GPU) - before


def test_loading_needs_little_more_than_the_weights(tmp_path: Path):
    write_random(GQA.model_copy(update={"layers": 16}), tmp_path / "made", torch.bfloat16)
    torch.cuda.reset_peak_memory_stats(GPU)
    before = torch.cuda.memory_allocated(GPU)
    model = llama.load(tmp_path / "made", torch.bfloat16, GPU)
    assert peak_above(before) <= 1.15 * model.shape.weight_bytes(2)


def test_a_prefill_with_shared_heads_runs_by_flash_attention():
    """Plain products would expand keys and values for every head, in fp32."""
    model = random_model(GQA, torch.bfloat16, GPU, 512)
    ids = torch.tensor([PROMPTS[0] * 4], device=GPU)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watched:
        model.forward(ids, model.new_cache(1, 256))
    ran = {event.key for event in watched.key_averages()}
    assert any("_flash_attention_forward" in name for name in ran), sorted(name for name in ran if "attention" in name)
    assert not any("_scaled_dot_product_attention_math" in name for name in ran)


def test_a_gpu_writes_many_texts_at_once_and_they_are_those_of_small_batches():
    target = LocalTarget(hub.locate("tiny"), GPU, torch.float32, batch_size=batch_size("distill", GPU))
    prompts, sampling = (
        [Prompt(ids) for ids in PROMPTS],
        SamplingParams(temperature=1, max_tokens=32),
    )
    many, one = (each.generate(prompts, range(3), sampling, 4) for each in (target, replace(target, memory=1e-6)))
    assert [output.ids.tolist() for output in many] == [output.ids.tolist() for output in one]
    assert target.batch_size > batch_size("distill", torch.device("cpu"))
    assert target.writing_memory() > MEMORY


@pytest.mark.parametrize("mode", ["eager", "graphs"])
def test_a_quick_score_times_its_winner_and_predicts_the_others(tmp_path, mode):
    scored = draftlab.score(
        draft=["tiny"],
        drafter=["latest-lookup", "suffix"],
        target="tiny",
        data="stdlib",
        num_prompts=8,
        max_new_tokens=32,
        device="cuda",
        mode=mode,
        out=tmp_path / "score",
    )
    assert scored.result.best.timed
    assert scored.result.best.identical
    for each in scored.result.scores:
        assert each.ks == [1, 2, 3, 4, 5, 6]
        assert each.prediction.error < 1


def test_graphs_choose_the_tokens_of_eager_passes_in_bfloat16():
    """Along tiny's own text, so that one near tie does not turn all that follows."""
    model = llama.load(hub.locate("tiny"), torch.bfloat16, GPU)
    graphed, same, count = CudaGraphLlama(model), 0, 0
    for prompt in PROMPTS:
        (text,) = output_tokens(decode(model, [prompt], SamplingParams(max_tokens=64)))
        cache, fed = graphed.new_cache(1, 256), prompt
        for token in text:
            logits = graphed.forward(torch.tensor([fed], device=GPU), cache, last=1)
            same, count, fed = same + (int(logits[0, -1].argmax()) == token), count + 1, [token]
    assert same >= 0.98 * count
