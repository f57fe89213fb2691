"""The scorer's arms decode the same tokens, and its counters add up."""

import itertools

import pytest
import torch
from helpers.builders import build

from draftlab.drafters.parallel import model_drafter
from draftlab.engine.generate import decode, output_tokens
from draftlab.model import llama
from draftlab.results.decoding import count_acceptance
from draftlab.sampling import SamplingParams
from draftlab.scoring.throughput import OTHER_PLAIN, PLAIN, measure_throughput
from draftlab.target_outputs.store import distinct_4grams

SAMPLING = SamplingParams(max_tokens=17)
PROMPTS = [[0, 17, 44, 101, 9], [0, 5, 250, 31, 66], [0, 90, 91, 92, 93]]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("score")
    for name, seed, layers in (("target", 1, 3), ("draft", 2, 1)):
        build("llama", seed, num_hidden_layers=layers).save_pretrained(root / name)
    return {name: llama.load(root / name, torch.float32) for name in ("target", "draft")}


@pytest.fixture(scope="module")
def measured(models):
    return timed(models, {"same": ("target", [1, 4]), "other": ("draft", [1, 4])})


def timed(models, drafters, repeats=2, **settings):
    """Time the target with drafters. drafters: The model and the K of each."""
    target = models["target"]
    made = {n: (model_drafter(models[m], target.vocab), ks) for n, (m, ks) in drafters.items()}
    settings |= {"sampling": SAMPLING, "repeats": repeats, "advance": lambda done: None}
    return measure_throughput(target, made, PROMPTS, **settings)


def test_batches_emit_the_same_tokens_and_share_their_time(models, measured):
    """The clock counts its readings, four a pass: all rows together take three ticks a pass."""
    ticks = itertools.count()
    other = {"other": ("draft", [4])}
    found = timed(models, other, repeats=1, batch=3, clock=lambda: next(ticks))
    assert found.tokens["other", 4] == found.tokens[PLAIN] == measured.tokens[PLAIN]
    assert sum(g.decode_seconds for g in found.generations[PLAIN]) == pytest.approx(3 * 16)
    assert [g.prompt for g in found.generations["other", 4]] == [0, 1, 2]


def test_a_target_with_other_weights_is_decoded_alone_and_verifies_nothing(models, measured):
    draft = models["draft"]
    found = timed(models, {"other": ("draft", [4])}, other_target=draft)
    assert set(found.generations) == {PLAIN, OTHER_PLAIN, ("other", 4)}
    assert sorted(g.prompt for g in found.generations[OTHER_PLAIN]) == [0, 0, 1, 1, 2, 2]
    assert found.tokens[OTHER_PLAIN] == dict(enumerate(output_tokens(decode(draft, PROMPTS, SAMPLING))))
    plain = measured.tokens[PLAIN]
    assert found.tokens["other", 4] == found.tokens[PLAIN] == plain != found.tokens[OTHER_PLAIN]


def test_every_arm_decodes_every_prompt_to_the_targets_tokens_and_counters_reconcile(measured):
    arms = {PLAIN, *itertools.product(("same", "other"), (1, 4))}
    assert set(measured.generations) == arms
    assert all(tokens == measured.tokens[PLAIN] for tokens in measured.tokens.values())
    for runs in measured.generations.values():
        assert sorted(g.prompt for g in runs) == [0, 0, 1, 1, 2, 2]
        for g in runs:
            assert g.tokens == 17 == 1 + sum(g.emitted)
            assert len(g.drafted) == len(g.accepted) == len(g.emitted)
            assert min(g.prefill_seconds, g.verify_seconds, g.host_seconds) > 0


def test_a_draft_that_is_the_target_accepts_everything(measured):
    found = count_acceptance(measured.generations["same", 4], 4)
    assert found.draft_acceptance_rate == 1
    # 16 tokens after the first: 5 5 5 1
    assert [len(g.drafted) for g in measured.generations["same", 4]] == [4] * 6


def test_distinct_4grams_sees_a_loop():
    assert distinct_4grams([list(range(20))]) == 1
    assert distinct_4grams([[1, 2] * 10]) == pytest.approx(2 / 17)
