"""Every drafter is lossless, keeps to the rows' own draws, and says what it sampled from."""

from collections.abc import Sequence

import pytest
import torch
from helpers.drafter_laws import (
    PROMPTS,
    VOCAB,
    check_greedy,
    check_q,
    check_rows,
    dflash_drafter,
    eagle_drafter,
    save_models,
)
from torch import Tensor

from draftlab.drafters.fallback import FallbackDrafter
from draftlab.drafters.lookup import LatestLookupDrafter, PromptLookupDrafter
from draftlab.drafters.ngram import NgramGpuDrafter, NgramSimpleDrafter
from draftlab.drafters.parallel import ParallelDrafter
from draftlab.engine.generate import Draft, Drafter, ModelDrafter, speculative_decode
from draftlab.model import llama
from draftlab.sampling import SamplingParams


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, llama.Llama]:
    return save_models(tmp_path_factory.mktemp("drafters"))


DRAFTERS = [
    "model",
    "lookup",
    "prompt-lookup",
    "ngram-gpu",
    "ngram-simple",
    "fallback",
    "gated",
    "lookup-eagle",
    "parallel",
    "eagle",
    "dflash",
]


def drafter(name: str, models: dict[str, llama.Llama]) -> Drafter:
    noisy = models["noisy"]
    return {
        "model": lambda: ModelDrafter(noisy, VOCAB),
        "lookup": lambda: LatestLookupDrafter(3),
        "prompt-lookup": lambda: PromptLookupDrafter(3),
        "ngram-gpu": lambda: NgramGpuDrafter(3),
        "ngram-simple": lambda: NgramSimpleDrafter(2),
        "fallback": lambda: FallbackDrafter(LatestLookupDrafter(3), ModelDrafter(noisy, VOCAB), VOCAB),
        "gated": lambda: FallbackDrafter(LatestLookupDrafter(8, (2, 1, 3)), ModelDrafter(noisy, VOCAB), VOCAB, 2),
        "lookup-eagle": lambda: FallbackDrafter(LatestLookupDrafter(3), eagle_drafter(models["target"]), VOCAB, 2),
        "parallel": lambda: ParallelDrafter(models["parallel"], VOCAB),
        "eagle": lambda: eagle_drafter(models["target"]),
        "dflash": lambda: dflash_drafter(models["target"]),
    }[name]()


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("k", [1, 6])
def test_greedy_decoding_with_any_drafter_is_plain_decoding(models, name, k):
    check_greedy(models["target"], drafter(name, models), k)


@pytest.mark.parametrize("name", DRAFTERS)
def test_what_a_row_samples_does_not_depend_on_the_others(models, name):
    check_rows(models["target"], drafter(name, models))


@pytest.mark.parametrize("name", ["model", "eagle", "parallel", "dflash"])
def test_q_is_what_was_sampled(models, name):
    check_q(models["target"], drafter(name, models))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_is_asked_now_and_then_knows_what_was_written_meanwhile(models, temperature):
    """The model is the target, so all that it proposes stands, unless its cache holds what was never written."""
    target = models["target"]
    proposing = FallbackDrafter(Now(), ModelDrafter(target, VOCAB), VOCAB, 3)
    steps = list(
        speculative_decode(target, proposing, PROMPTS, 4, SamplingParams(max_tokens=40, temperature=temperature))
    )
    assert all(step.accepted == step.drafted for step in steps if step.drafted > 1)
    assert max(step.drafted for step in steps) == 3  # at most its own number


class Now(Drafter):
    """Every other time one token, always the same."""

    def reset(self, rows: int, capacity: int) -> None:
        self.asked = 0

    def propose(self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        self.asked += 1
        return Draft(ids=torch.full((len(texts), 1), 7), q=None, counts=[self.asked % 2] * len(texts))


def test_lookup_copies_behind_the_longest_and_latest_match():
    def copied(text: list[int], count: int) -> list[int]:
        draft = LatestLookupDrafter(3).propose([text], count, SamplingParams(), torch.zeros(1, count))
        return draft.ids[0, : draft.counts[0]].tolist()

    assert copied([1, 2, 3, 9, 5, 3, 8, 1, 2, 3], 3) == [9, 5, 3]  # 1 2 3, not the later 3
    assert copied([7, 3, 4, 7, 3, 5, 7, 3], 2) == [5, 7]
    assert copied([4, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]  # a loop goes on
    assert copied([1, 2, 3], 4) == []


def test_a_match_is_copied_from_the_length_that_its_kind_wants():
    def copied(text: list[int], *min_match: int) -> list[int]:
        lookup = LatestLookupDrafter(8, min_match)
        draft = lookup.propose([text], 1, SamplingParams(), torch.zeros(1, 1))
        return draft.ids[0, : draft.counts[0]].tolist()

    once, agree, differ = [1, 2, 5, 1, 2], [2, 5, 9, 2, 5, 8, 2], [2, 5, 9, 2, 6, 8, 2]
    assert (copied(once, 2, 9, 9), copied(once, 3, 1, 1)) == ([5], [])
    assert (copied(agree, 9, 1, 9), copied(agree, 1, 2, 1)) == ([5], [])
    assert (copied(differ, 9, 9, 1), copied(differ, 1, 1, 2)) == ([6], [])
