"""Drafts of one pass: logits of ordinary passes, a cache of the text alone, and as many tokens as replay expects."""

from functools import partial

import pytest
import torch
from helpers.builders import rounding
from helpers.drafter_laws import PROMPTS, check_greedy_replay, replay_errors, save_models
from helpers.errors import raises_option

from draftlab.acceptance.token_logprobs import score_offsets
from draftlab.drafters.parallel import ParallelDrafter, model_drafter, offset_logits
from draftlab.engine.generate import ModelDrafter
from draftlab.model import llama
from draftlab.model.cuda_graphs import CudaGraphLlama
from draftlab.model.modes import with_mode
from draftlab.sampling import SamplingParams

MASK, VOCAB = 2, 307


@pytest.fixture(scope="module", params=["whole", "trimmed"])
def models(request, tmp_path_factory) -> dict[str, llama.Llama]:
    """trimmed: the draft's head has four ids in five."""
    ids = [i for i in range(VOCAB) if i % 5] if request.param == "trimmed" else []
    return save_models(tmp_path_factory.mktemp("parallel"), noise=0.01, head_ids=ids)


@pytest.mark.parametrize("mode", ["eager", "native", "graphs"])
def test_an_offset_has_the_logits_of_an_ordinary_pass_also_after_a_rejection(models, mode):
    draft = CudaGraphLlama(models["parallel"]) if mode == "graphs" else with_mode(models["parallel"], mode)
    drafter = ParallelDrafter(draft, VOCAB)
    drafter.reset(2, 64)
    bound = rounding(torch.float32, 64 * 5, 60)
    for texts in ([PROMPTS[0], PROMPTS[2]], [[*PROMPTS[0], 50], [*PROMPTS[2], 51, 52, 53]]):
        logits = offset_logits(drafter, MASK, texts, 4)
        for row, text in enumerate(texts):
            for j in range(4):
                ids = torch.tensor([[*text, *[MASK] * j]])
                plain = models["parallel"].forward(ids, models["parallel"].new_cache(1, ids.shape[1]), last=1)[0, 0]
                # -inf where it is trimmed
                torch.testing.assert_close(logits[row, j], plain, atol=bound, rtol=0)
    assert drafter.cache.used == [8, 6]


def scored(models, pairs, sampling):
    return score_offsets(models["parallel"], pairs, VOCAB, sampling, 5, MASK)


@pytest.mark.parametrize("k", [1, 3, 5])
def test_replay_expects_what_greedy_decoding_counts(models, k):
    drafter = ParallelDrafter(models["parallel"], VOCAB)
    check_greedy_replay(models["target"], drafter, partial(scored, models), k)


def test_sampled_replay_expects_what_sampling_counts(models):
    drafter, sampling = (
        ParallelDrafter(models["parallel"], VOCAB),
        SamplingParams(max_tokens=24, temperature=0.9),
    )
    assert replay_errors(models["target"], drafter, partial(scored, models), sampling, 4, 64)[0] < 5


def test_a_parallel_draft_drafts_in_parallel_and_an_ordinary_one_does_not(models):
    assert isinstance(model_drafter(models["parallel"], VOCAB), ParallelDrafter)
    assert type(model_drafter(models["target"], VOCAB)) is ModelDrafter
    with raises_option("pard_token", "config.json"):
        ParallelDrafter(models["target"], VOCAB)
