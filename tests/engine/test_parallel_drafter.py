"""Drafts of one pass: logits of ordinary passes, a cache of the text alone, and as many tokens as replay expects."""

from pathlib import Path

import numpy as np
import pytest
import torch
from builders import build, recording, rounding
from errors import raises_option

from draftlab.acceptance import expected
from draftlab.acceptance.token_logprobs import score_offsets
from draftlab.engine.drafters.parallel import ParallelDrafter, model_drafter, offset_logits
from draftlab.engine.generate import ModelDrafter, decode, output_tokens, speculative_decode
from draftlab.model import llama
from draftlab.model.cuda_graphs import CudaGraphLlama
from draftlab.model.hf_files import write_head_ids
from draftlab.model.modes import load, with_mode
from draftlab.sampling import SamplingParams

MASK, VOCAB = 2, 307
GREEDY = SamplingParams(max_tokens=40)
PROMPTS = [[0, 17, 44, 101, 9, 17, 44], [0, 5, 250, 31, 66, 3, 8, 12, 99], [0, 90, 91]]


@pytest.fixture(scope="module", params=["whole", "trimmed"])
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, llama.Llama]:
    """The target, and its copy with noise as a parallel draft: its first offset agrees often, the others at times.

    trimmed: the draft's head has four ids in five.
    """
    root = tmp_path_factory.mktemp("parallel")
    target, noisy = build("llama", 1, num_hidden_layers=3), build("llama", 1, num_hidden_layers=3)
    noisy.config.pard_token = MASK
    torch.manual_seed(5)
    with torch.no_grad():
        for p in noisy.parameters():
            p.add_(torch.randn_like(p) * 0.01)
    for name, model in (("target", target), ("draft", noisy)):
        model.save_pretrained(root / name)
    if request.param == "trimmed":
        write_head_ids(root / "draft", [i for i in range(VOCAB) if i % 5])
    cpu = torch.device("cpu")
    return {name: load(Path(root / name), torch.float32, cpu) for name in ("target", "draft")}  # type: ignore[misc]


def steps_of(models, drafter, k: int, prompts=PROMPTS, sampling=GREEDY):
    return list(speculative_decode(models["target"], drafter, prompts, k, sampling))


@pytest.mark.parametrize("mode", ["eager", "native", "graphs"])
def test_an_offset_has_the_logits_of_an_ordinary_pass_also_after_a_rejection(models, mode):
    draft = (
        CudaGraphLlama(models["draft"]) if mode == "graphs" else with_mode(models["draft"], mode)
    )
    drafter = ParallelDrafter(draft, VOCAB)
    drafter.reset(2, 64)
    bound = rounding(torch.float32, 64 * 5, 60)
    for texts in ([PROMPTS[0], PROMPTS[2]], [[*PROMPTS[0], 50], [*PROMPTS[2], 51, 52, 53]]):
        logits = offset_logits(drafter, MASK, texts, 4)
        for row, text in enumerate(texts):
            for j in range(4):
                ids = torch.tensor([[*text, *[MASK] * j]])
                plain = models["draft"].forward(
                    ids, models["draft"].new_cache(1, ids.shape[1]), last=1
                )[0, 0]
                # -inf where it is trimmed
                torch.testing.assert_close(logits[row, j], plain, atol=bound, rtol=0)
    assert drafter.cache.used == [8, 6]


def test_the_keys_of_mask_tokens_would_change_the_drafts(models):
    """A control: a cache that is not rolled back drafts otherwise."""
    drafter = ParallelDrafter(models["draft"], VOCAB)
    drafter.reset(1, 64)
    offset_logits(drafter, MASK, [PROMPTS[0]], 4)
    text = [*PROMPTS[0], 50, 51, 52, 53]
    drafter.cache.used = [len(PROMPTS[0]) + 3]  # three mask tokens as if they were the text
    drafter.cached = [text]
    wrong = offset_logits(drafter, MASK, [text], 4)
    fresh = ParallelDrafter(models["draft"], VOCAB)
    fresh.reset(1, 64)
    assert not torch.allclose(offset_logits(fresh, MASK, [text], 4), wrong, atol=0.1, rtol=0)


@pytest.mark.parametrize("k", [2, 5])
def test_text_is_the_targets_and_drafted_tokens_are_of_the_drafts_head(models, k):
    drafter = recording(ParallelDrafter, models["draft"], VOCAB)
    assert output_tokens(steps_of(models, drafter, k)) == output_tokens(
        decode(models["target"], PROMPTS, GREEDY)
    )
    drafted = torch.cat([draft.ids.flatten() for _, draft in drafter.seen])
    head = models["draft"].head_ids
    assert head is None or torch.isin(drafted, head).all()


@pytest.mark.parametrize("k", [1, 3, 5])
def test_replay_expects_what_greedy_decoding_counts(models, k):
    texts = output_tokens(decode(models["target"], PROMPTS, GREEDY))
    pairs = [
        (np.array(prompt), np.array(text)) for prompt, text in zip(PROMPTS, texts, strict=True)
    ]
    scored = score_offsets(models["draft"], pairs, VOCAB, GREEDY, 5, MASK)
    chances = [np.exp(each.logprobs)[1:] for each in scored]
    counts = expected.chain(expected.texts_of(chances), k)
    live = steps_of(models, ParallelDrafter(models["draft"], VOCAB), k)
    for row in range(len(PROMPTS)):
        own = [step for step in live if step.row == row][1:]
        assert len(own) == counts.passes[row]
        assert sum(step.accepted for step in own) == counts.accepted[row]
    assert counts.reached[:, min(2, k)].sum() > 0  # later offsets are accepted, too


@pytest.mark.parametrize("mode", ["eager", "native"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_together_write_what_they_write_alone(models, mode, temperature):
    sampling = SamplingParams(max_tokens=24, temperature=temperature, seed=1)
    running = {name: with_mode(model, mode) for name, model in models.items()}
    together = output_tokens(
        steps_of(running, model_drafter(running["draft"], VOCAB), 4, sampling=sampling)
    )
    for i, prompt in enumerate(PROMPTS):
        drafter = model_drafter(running["draft"], VOCAB)
        alone = speculative_decode(running["target"], drafter, [prompt], 4, sampling, numbers=[i])
        assert output_tokens(alone)[0] == together[i]


def test_sampled_replay_expects_what_sampling_counts(models):
    """Over many seeds, within five standard errors."""
    sampling, rows, k = SamplingParams(max_tokens=24, temperature=0.9), 64, 4
    prompts = [PROMPTS[0]] * rows
    drafter = ParallelDrafter(models["draft"], VOCAB)
    steps = list(speculative_decode(models["target"], drafter, prompts, k, sampling))
    texts = output_tokens(steps)
    pairs = [(np.array(PROMPTS[0]), np.array(text)) for text in texts]
    from draftlab.acceptance.token_logprobs import score_tokens

    log_p = [each.logprobs for each in score_tokens(models["target"], pairs, VOCAB, sampling)]
    log_q = [
        each.logprobs for each in score_offsets(models["draft"], pairs, VOCAB, sampling, k, MASK)
    ]
    chances = [expected.chances(q, p[:, None])[1:] for q, p in zip(log_q, log_p, strict=True)]
    counts = expected.chain(expected.texts_of(chances), k)
    live = np.array([sum(step.row == row for step in steps) - 1 for row in range(rows)])
    differences = live - counts.passes
    assert abs(differences.mean()) < 5 * differences.std(ddof=1) / rows**0.5


def test_a_parallel_draft_drafts_in_parallel_and_an_ordinary_one_does_not(models):
    assert isinstance(model_drafter(models["draft"], VOCAB), ParallelDrafter)
    assert type(model_drafter(models["target"], VOCAB)) is ModelDrafter
    with raises_option("pard_token", "config.json"):
        ParallelDrafter(models["target"], VOCAB)
