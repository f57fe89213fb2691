"""Replay is simulation, and simulation is what the engine does."""

import itertools

import numpy as np
import pytest
import torch
from conftest import build
from hypothesis import given, settings
from hypothesis import strategies as st

from draftlab.distill import evaluate
from draftlab.engine.generate import ModelDrafter, Sampling, speculative
from draftlab.engine.replay import expected_passes, ratio_interval, tokens_per_pass
from draftlab.llama import load

chance_lists = st.lists(st.floats(0, 1), min_size=1, max_size=6)


def by_enumeration(chances: list[float], k: int) -> float:
    """Every pattern of kept and rejected tokens with its chance, walked through pass by pass."""
    total = 0.0
    for pattern in itertools.product([True, False], repeat=len(chances)):
        weight = np.prod([c if kept else 1 - c for c, kept in zip(chances, pattern, strict=True)])
        position, passes = 0, 0
        while position < len(chances):
            run = 0
            while run < k and position + run < len(chances) and pattern[position + run]:
                run += 1
            position += run + 1
            passes += 1
        total += float(weight) * passes
    return total


def simulate_passes(chances: np.ndarray, k: int, rng: np.random.Generator) -> int:
    """What expected_passes expects, drawn once."""
    position, passes = 0, 0
    while position < len(chances):
        drafted = chances[position : position + k]
        rejected = np.flatnonzero(rng.random(len(drafted)) >= drafted)
        position += (int(rejected[0]) if len(rejected) else k) + 1
        passes += 1
    return passes


@given(chance_lists, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_the_recursion_is_the_enumeration(chances, k):
    assert expected_passes(np.array(chances), k) == pytest.approx(by_enumeration(chances, k), abs=1e-9)


def test_the_recursion_is_the_mean_of_simulations_and_not_the_independent_formula():
    rng = np.random.default_rng(0)
    chances = np.where(rng.random(400) < 0.7, 0.95, 0.1)  # easy and hard stretches
    chances = np.repeat(chances[::8], 8)
    runs = [simulate_passes(chances, 4, rng) for _ in range(2000)]
    error = np.std(runs) / len(runs) ** 0.5
    assert abs(expected_passes(chances, 4) - np.mean(runs)) < 4 * error
    a = float(chances.mean())
    independent = len(chances) * (1 - a) / (1 - a**5)
    assert abs(independent - np.mean(runs)) > 20 * error


@pytest.mark.parametrize("k", [1, 3])
def test_ends_are_one_and_k_plus_one_tokens_per_pass(k):
    n = 12
    assert expected_passes(np.zeros(n), k) == n
    assert expected_passes(np.ones(n), k) == pytest.approx(n / (k + 1))


def test_interval_holds_the_ratio_and_narrows_with_texts():
    rng = np.random.default_rng(1)
    pairs = np.stack([np.full(200, 60.0), rng.uniform(20, 30, 200)], 1)
    value, low, high = ratio_interval(pairs)
    assert low < value < high
    _, few_low, few_high = ratio_interval(pairs[:10])
    assert high - low < few_high - few_low


def test_greedy_replay_counts_the_passes_of_the_engine(family_dirs):
    """Token for token: the same texts, drafted live by the engine, take exactly as many target passes."""
    target_dir, draft_dir = family_dirs["llama"], family_dirs["llama_mha"]
    target, draft = build("llama"), build("llama_mha")
    prompts = np.random.default_rng(0).integers(3, 300, (3, 6))
    written = evaluate.write(target, prompts, 24, 0.0, None, 0)
    chances = evaluate.chances(draft, written)
    engine_target, engine_draft = load(target_dir, torch.float32), load(draft_dir, torch.float32)
    for k in (1, 2, 4):
        for row, prompt, kept in zip(written.ids, prompts, chances, strict=True):
            sampling = Sampling(max_new_tokens=24)
            steps = list(speculative(engine_target, ModelDrafter(engine_draft), prompt.tolist(), k, sampling))
            assert [t for s in steps for t in s.tokens] == row[6:].tolist()
            assert expected_passes(kept, k) == len(steps) - 1  # the prefill emits the first token


def test_sampled_replay_agrees_with_the_engine_within_noise(family_dirs):
    target, draft = build("qwen3"), build("qwen3", seed=1)
    with torch.no_grad():
        for a, b in zip(draft.parameters(), target.parameters(), strict=True):
            a.copy_(b + 0.3 * (a - b))  # near enough to be accepted now and then
    prompts = np.tile(np.random.default_rng(0).integers(3, 300, (1, 6)), (160, 1))
    written = evaluate.write(target, prompts, 16, 1.0, None, 0)
    pairs = tokens_per_pass(evaluate.chances(draft, written), 3)
    value, low, high = ratio_interval(pairs)
    engine_target = load(family_dirs["qwen3"], torch.float32)
    from draftlab.llama import Llama

    weights = {name: p.detach() for name, p in draft.named_parameters()}
    engine_draft = Llama(
        engine_target.shape, weights, torch.outer(torch.ones(1), frequencies(draft))[0], 1.0, engine_target.eps, 256
    )
    lengths = []
    for seed in range(160):
        sampling = Sampling(temperature=1.0, max_new_tokens=16, seed=seed)
        steps = list(speculative(engine_target, ModelDrafter(engine_draft), prompts[0].tolist(), 3, sampling))[1:]
        lengths.append([sum(len(s.tokens) for s in steps), len(steps)])
    live, live_low, live_high = ratio_interval(np.array(lengths, dtype=float))
    assert abs(value - live) < ((high - low) ** 2 + (live_high - live_low) ** 2) ** 0.5
    assert value > 1.2


def frequencies(model) -> torch.Tensor:
    return model.get_submodule("model.rotary_emb").inv_freq
