"""Replay is simulation, and simulation is what the engine does."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers.builders import assert_rounds, build, generation_of
from helpers.errors import raises_option
from hypothesis import given, settings
from hypothesis import strategies as st

from draftlab.acceptance import expected, token_logprobs
from draftlab.acceptance.expected import chain, texts_of
from draftlab.acceptance.token_logprobs import score_tokens
from draftlab.engine.batch_generate import Batching, generate_batch
from draftlab.engine.generate import ModelDrafter, decode, output_tokens, speculative_decode
from draftlab.engine.verify import distribution, verify
from draftlab.intervals import ratio_intervals
from draftlab.model import hf_decoder
from draftlab.model.llama import Llama, load
from draftlab.results.decoding import count_acceptance
from draftlab.sampling import SamplingParams
from draftlab.training.evaluate import TargetTextEvaluator

KS = (1, 2, 4, 8)
chance_lists = st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0])), min_size=1, max_size=6)


@dataclass(frozen=True)
class One:
    """A step: where it began, tokens drafted, accepted, emitted."""

    began: int
    drafted: int
    accepted: int
    emitted: int


def walk(kept: Callable[[int, int], bool], n: int, depth: Callable[[int], int], limit: int) -> Iterator[One]:
    """Speculation over n tokens, step by step. kept: of the token and its depth in the step, whether it is accepted."""
    at = 0
    while at < n:
        drafted = min(depth(at), limit - at - 1)
        accepted = 0
        while accepted < drafted and at + accepted < n and kept(at + accepted, accepted):
            accepted += 1
        emitted = min(accepted + 1, n - at)
        yield One(at, drafted, accepted, emitted)
        at += emitted


@given(chance_lists, st.integers(1, 5), st.integers(0, 4))
@settings(max_examples=80, deadline=None)
def test_counts_are_the_enumeration(chances, k, spare):
    """Every pattern of accepted and rejected tokens with its chance, walked through step by step.

    spare: tokens that the length limit would still have allowed, as after an end-of-text token.
    """
    n, limit = len(chances), len(chances) + spare
    sums = {
        "reached": np.zeros(k + 1),
        "examined": np.zeros(k),
        "drafted": 0.0,
        "passes": 0.0,
        "truncated": 0.0,
    }
    began = np.zeros(n)
    for pattern in itertools.product([True, False], repeat=n):
        weight = float(np.prod([c if kept else 1 - c for c, kept in zip(chances, pattern, strict=True)]))
        for step in walk(lambda token, _, p=pattern: p[token], n, lambda _: k, limit):
            began[step.began] += weight
            sums["passes"] += weight
            sums["drafted"] += weight * step.drafted
            sums["truncated"] += weight * (step.emitted <= step.accepted)
            for a in range(k + 1):
                sums["reached"][a] += weight * (step.drafted > 0 and step.accepted >= a)
            for a in range(k):
                sums["examined"][a] += weight * (step.accepted >= a and min(step.drafted, n - step.began) > a)
    counts = chain(texts_of([np.array(chances)], np.array([limit])), k)
    for name, value in sums.items():
        np.testing.assert_allclose(getattr(counts, name)[0], value, atol=1e-9, err_msg=name)
    np.testing.assert_allclose(counts.starts[0], began, atol=1e-9)


# sampling: exact enumeration over a small vocabulary


def table(seed: int, v: int) -> Callable[[tuple[int, ...]], np.ndarray]:
    """Return a next-token distribution for every prefix, some ids impossible."""

    def of(prefix: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([seed, *prefix])
        weights = rng.random(v) ** 2 * (rng.random(v) > 0.2)
        weights[int(rng.integers(v))] += 0.2
        return weights / weights.sum()

    return of


def passes_by_leviathan(p, q, prefix: tuple[int, ...], n: int, k: int) -> float:
    """Expected passes to write what is missing to n tokens: every draft, every accept pattern, by the engine's rule."""
    if len(prefix) == n:
        return 0.0
    count = min(k, n - len(prefix) - 1)
    total, v = 1.0, len(p(prefix))
    for drafted in itertools.product(range(v), repeat=count):
        paths = [prefix + drafted[:i] for i in range(count + 1)]
        ps = torch.tensor(np.array([p(path) for path in paths]))
        qs = torch.tensor(np.array([q(path) for path in paths[:-1]])).reshape(count, v)
        weight = float(np.prod([float(qs[i, t]) for i, t in enumerate(drafted)]))
        if weight == 0:
            continue
        chances = [min(1.0, float(ps[i, t] / qs[i, t])) for i, t in enumerate(drafted)]
        for accepted in range(count + 1):
            share = float(np.prod(chances[:accepted])) * (1 - chances[accepted] if accepted < count else 1)
            if share == 0:
                continue
            u = torch.tensor([c / 2 for c in chances[:accepted]] + [(1 + c) / 2 for c in chances[accepted:]])
            got, rest = verify(ps, qs, torch.tensor(drafted, dtype=torch.long), u.double())
            assert got == accepted
            for token, chance in enumerate(rest.tolist()):
                if chance:
                    after = passes_by_leviathan(p, q, (*prefix, *drafted[:accepted], token), n, k)
                    total += weight * share * chance * after
    return total


def passes_by_replay(p, q, n: int, k: int, chance: Callable[[float, float], float]) -> float:
    """Mean over every text the target can write of what replay expects for it."""
    total = 0.0
    for text in itertools.product(range(len(p(()))), repeat=n):
        ps = [p(text[:i])[t] for i, t in enumerate(text)]
        if np.prod(ps):
            qs = [q(text[:i])[t] for i, t in enumerate(text)]
            kept = np.array([chance(a, b) for a, b in zip(ps, qs, strict=True)])
            total += float(np.prod(ps)) * float(chain(texts_of([kept]), k).passes[0])
    return total


def rejection(p: float, q: float) -> float:
    with np.errstate(divide="ignore"):
        return float(expected.chances(np.log([q]), np.log([p]))[0])


def match(p: float, q: float) -> float:
    return q


@pytest.mark.parametrize(("seed", "k"), [(0, 1), (0, 3), (1, 2)])
def test_replay_over_all_texts_is_leviathan_speculation_enumerated(seed, k):
    p, q = table(seed, 3), table(seed + 100, 3)
    live = passes_by_leviathan(p, q, (), 4, k)
    assert passes_by_replay(p, q, 4, k, rejection) == pytest.approx(live, abs=1e-9)
    # the other rule is another number
    assert abs(passes_by_replay(p, q, 4, k, match) - live) > 0.01


def jackknife(pairs: np.ndarray) -> float:
    """Standard error of a ratio of sums."""
    sums = pairs.sum(0) - pairs
    values, n = sums[:, 0] / sums[:, 1], len(pairs)
    return float(np.sqrt((n - 1) / n * ((values - values.mean()) ** 2).sum()))


# real models


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Llama, Llama]:
    """Return a target and the same with noise, which agrees with it now and then."""
    root = tmp_path_factory.mktemp("pair")
    models = {"target": build("llama", 1), "draft": build("llama", 1)}
    torch.manual_seed(5)
    with torch.no_grad():
        for p in models["draft"].parameters():
            p.add_(torch.randn_like(p) * 0.002)
        for name, model in models.items():
            # sure of some tokens, not of others
            model.get_output_embeddings().get_parameter("weight").mul_(12)
            model.save_pretrained(root / name)
    return load(root / "target", torch.float32), load(root / "draft", torch.float32)


PROMPTS = [[0, 17, 44, 101, 9], [0, 5, 250], [0, 90, 91, 92, 93, 94, 95, 7]]


def greedy_chances(pair: tuple[Llama, Llama], texts: list[list[int]]) -> list[np.ndarray]:
    """Return the chance of every token but the first, which comes with the prefill."""
    given = [(np.array(p), np.array(t)) for p, t in zip(PROMPTS, texts, strict=True)]
    return [
        expected.chances(f.logprobs, np.zeros(len(f.logprobs)))[1:]
        for f in score_tokens(pair[1], given, 307, SamplingParams())
    ]


def test_greedy_replay_is_live_speculation_step_by_step(pair):
    target, draft = pair
    sampling = SamplingParams(max_tokens=90)
    texts = [output_tokens(decode(target, [prompt], sampling))[0] for prompt in PROMPTS]
    kept = greedy_chances(pair, texts)
    assert 0.3 < np.concatenate(kept).mean() < 0.95
    for k in KS:
        generations = []
        for number, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
            steps = list(speculative_decode(target, ModelDrafter(draft), [prompt], k, sampling))
            assert output_tokens(steps)[0] == text
            starts = np.flatnonzero(chain(texts_of(kept), k).starts[number])
            emitted = np.diff(np.append(starts, len(text) - 1))
            assert [len(s.tokens) for s in steps[1:]] == emitted.tolist()
            assert [s.accepted for s in steps[1:]] == (emitted - 1).tolist()
            generations.append(generation_of(steps, number))
        assert chain(texts_of(kept), k).acceptance() == count_acceptance(generations, k)


# the teacher-forced pass


def test_ragged_texts_together_are_each_alone_and_what_transformers_says(pair, monkeypatch):
    rng = np.random.default_rng(3)
    texts = [(rng.integers(3, 300, a), rng.integers(3, 300, b)) for a, b in ((4, 9), (17, 1), (2, 30), (6, 0), (9, 9))]
    warp = SamplingParams(temperature=9.0, top_k=150, top_p=0.95)
    hosted = hf_decoder.HFDecoder(build("llama", 1))
    hosted.model.get_output_embeddings().get_parameter("weight").data.mul_(12)
    together, other = (
        score_tokens(pair[0], texts, 307, warp),
        score_tokens(hosted, texts, 307, warp),
    )
    monkeypatch.setattr(token_logprobs, "MAX_LOGITS", 1)  # one text a pass
    alone = score_tokens(pair[0], texts, 307, warp)
    for (prompt, written), *found in zip(texts, together, other, alone, strict=True):
        assert all(len(f.logprobs) == len(f.ranks) == len(written) for f in found)
        if not len(written):
            continue
        ids = torch.from_numpy(np.concatenate([prompt, written]))[None]
        with torch.no_grad():
            logits = hosted.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        wanted = distribution(logits, warp).gather(1, torch.from_numpy(written)[:, None]).squeeze(1)
        order = logits.argsort(-1, descending=True)
        ranks = (order == torch.from_numpy(written)[:, None]).float().argmax(1)
        for f in found:
            assert_rounds(np.exp(f.logprobs), wanted)
            assert f.ranks.tolist() == ranks.tolist()


def test_a_text_longer_than_the_context_is_refused(pair):
    prompt, written = np.zeros(200, dtype=np.int64), np.zeros(58, dtype=np.int64)
    assert len(score_tokens(pair[0], [(prompt, written[:57])], 307, SamplingParams())[0].ranks) == 57
    with raises_option("258", "256"):
        score_tokens(pair[0], [(prompt, written)], 307, SamplingParams())


def test_the_distillers_chances_are_the_engines_passes(pair, tmp_path):
    target, draft = build("llama", 1), build("llama", 1)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.02)
    draft.save_pretrained(tmp_path / "draft")
    prompts = np.random.default_rng(0).integers(3, 300, (3, 6))
    sampling = SamplingParams(max_tokens=24)
    texts = generate_batch(hf_decoder.HFDecoder(target), prompts.tolist(), sampling, Batching())
    written = [text.ids.tolist() for text in texts]
    log_p = [text.logprobs.tolist() for text in texts]
    evaluator = TargetTextEvaluator(prompts.tolist(), written, log_p, tmp_path)
    chances = evaluator.acceptance_probabilities(draft)
    engine = ModelDrafter(load(tmp_path / "draft", torch.float32))
    for k in (1, 2, 4):
        for row, prompt, chance in zip(written, prompts, chances, strict=True):
            steps = list(speculative_decode(pair[0], engine, [prompt.tolist()], k, SamplingParams(max_tokens=24)))
            assert output_tokens(steps)[0] == row
            assert chain(texts_of([chance]), k).passes[0] == len(steps) - 1  # the prefill emits the first token


# intervals


def test_intervals_have_the_width_of_the_jackknife_and_columns_do_not_mix():
    rng = np.random.default_rng(2)
    over = np.stack([rng.uniform(40, 60, 80), rng.uniform(0, 60, 80), np.zeros(80)], 1)
    under = np.stack([rng.uniform(20, 30, 80), np.full(80, 30.0), np.zeros(80)], 1)
    found = ratio_intervals(over, under)
    for i in (0, 1):
        width = 2 * 1.96 * jackknife(np.stack([over[:, i], under[:, i]], 1))
        assert found[i].high - found[i].low == pytest.approx(width, rel=0.15)
        assert found[i].value == pytest.approx(over[:, i].sum() / under[:, i].sum())
    assert (found[2].value, found[2].n) == (0, 0)
