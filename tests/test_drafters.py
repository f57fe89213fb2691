"""Every drafter is lossless, keeps to the rows' own draws, and says what it sampled from."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import build
from torch import Tensor

from draftlab import llama
from draftlab.engine.drafters import Fallback, StagedDrafter, UnsureDrafter, less_sure_than, more_entropy_than
from draftlab.engine.generate import Draft, Drafter, ModelDrafter, Sampling, plain, speculative, written
from draftlab.engine.ngram import LookupDrafter, NgramDrafter, Ngrams
from draftlab.engine.verify import draw

VOCAB = 307
PROMPTS = [[0, 17, 44, 101, 9, 17, 44], [0, 5, 250, 31, 66, 3, 8, 12, 99], [0, 90, 91]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, llama.Llama]:
    """The target, and the target with noise, which agrees now and then."""
    root = tmp_path_factory.mktemp("drafters")
    target, noisy = build("llama", 1, num_hidden_layers=3), build("llama", 1, num_hidden_layers=3)
    torch.manual_seed(5)
    with torch.no_grad():
        for p in noisy.parameters():
            p.add_(torch.randn_like(p) * 0.02)
    for name, model in (("target", target), ("noisy", noisy)):
        model.save_pretrained(root / name)
    return {name: llama.load(Path(root / name), torch.float32) for name in ("target", "noisy")}


@pytest.fixture(scope="module")
def ngrams(models: dict[str, llama.Llama]) -> Ngrams:
    """Of what the target itself writes."""
    prompts = [[0, i, i + 1] for i in range(3, 9)]
    texts = written(plain(models["target"], prompts, Sampling(max_new_tokens=60)))
    return Ngrams(np.concatenate([np.array(text) for text in texts]), VOCAB, 3)


DRAFTERS = ["ngram", "lookup", "unsure", "entropy", "fallback", "staged", "staged model"]


def drafter(name: str, models: dict[str, llama.Llama], ngrams: Ngrams) -> Drafter:
    noisy = models["noisy"]
    return {
        "ngram": lambda: NgramDrafter(ngrams),
        "lookup": lambda: LookupDrafter(),
        "unsure": lambda: UnsureDrafter(noisy, VOCAB, less_sure_than(0.3)),
        "entropy": lambda: UnsureDrafter(noisy, VOCAB, more_entropy_than(1.0)),
        "fallback": lambda: Fallback(LookupDrafter(), ModelDrafter(noisy, VOCAB), VOCAB),
        "staged": lambda: StagedDrafter(noisy, VOCAB, NgramDrafter(ngrams), 2),
        "staged model": lambda: StagedDrafter(noisy, VOCAB, ModelDrafter(noisy, VOCAB), 3),
    }[name]()


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("k", [1, 4])
def test_greedy_decoding_with_any_drafter_is_plain_decoding(models, ngrams, name, k):
    sampling = Sampling(max_new_tokens=32)
    expected = written(plain(models["target"], PROMPTS, sampling))
    assert written(speculative(models["target"], drafter(name, models, ngrams), PROMPTS, k, sampling)) == expected


@pytest.mark.parametrize("name", DRAFTERS)
def test_what_a_row_samples_does_not_depend_on_the_others(models, ngrams, name):
    sampling = Sampling(max_new_tokens=24, temperature=0.8, seed=3)
    proposing = drafter(name, models, ngrams)
    together = written(speculative(models["target"], proposing, PROMPTS, 3, sampling))
    alone = [
        written(speculative(models["target"], proposing, [prompt], 3, sampling, numbers=[i]))[0]
        for i, prompt in enumerate(PROMPTS)
    ]
    assert together == alone


@pytest.mark.parametrize("name", ["ngram", "unsure", "entropy"])
def test_q_is_what_was_sampled(models, ngrams, name):
    """The tokens come back from q by inverse CDF with the draws that the drafter was given."""
    proposing, uniform = drafter(name, models, ngrams), torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    proposing.reset(3, 40)
    draft = proposing.propose(PROMPTS, 4, Sampling(temperature=0.9, top_k=50), uniform)
    assert draft.q is not None
    assert torch.equal(draw(draft.q, uniform[:, : draft.ids.shape[1]]), draft.ids)


def test_what_a_staged_drafter_samples_is_the_draft_model():
    """Of a bigram draft model and a one-sided inner drafter: frequencies of token pairs against the exact ones."""
    q = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3], [0.3, 0.3, 0.4]])
    staged = StagedDrafter(Bigrams(q.log()), None, Always(1), 2)
    staged.reset(1, 8)
    counts, n = torch.zeros(3, 3), 1000
    uniform = torch.rand(n, 1, 2, generator=torch.Generator().manual_seed(1))
    for u in uniform:
        draft = staged.propose([[2]], 2, Sampling(temperature=1.0), u)
        counts[tuple(draft.ids[0])] += 1
        assert draft.q is not None
        torch.testing.assert_close(draft.q[0], q[[2, int(draft.ids[0, 0])]])
    expected = n * q[2].unsqueeze(1) * q
    assert float(((counts - expected) ** 2 / expected).sum()) < 51.6  # chi-square, 8 degrees, alpha 2e-8


class Bigrams:
    """A context-free model of three ids; any cache will do."""

    device = torch.device("cpu")
    context = 100

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def new_cache(self, rows: int, capacity: int) -> llama.Cache:
        return llama.Cache(torch.zeros(1, rows, 1, capacity, 1), torch.zeros(1, rows, 1, capacity, 1))

    def forward(self, ids: Tensor, cache: llama.Cache, last: int = 0, tree: object = None) -> Tensor:
        cache.used = [used + ids.shape[1] for used in cache.used]
        return self.logits[ids][:, -last:]


class Always:
    def __init__(self, token: int) -> None:
        self.token = token

    def reset(self, rows: int, capacity: int) -> None:
        pass

    def propose(self, texts: Sequence[list[int]], count: int, sampling: Sampling, uniform: Tensor) -> Draft:
        return Draft(ids=torch.full((len(texts), count), self.token), q=None, counts=[count] * len(texts))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_is_asked_now_and_then_knows_what_was_written_meanwhile(models, temperature):
    """The model is the target, so all that it proposes stands, unless its cache holds what was never written."""
    target = models["target"]
    proposing = Fallback(Now(), ModelDrafter(target, VOCAB), VOCAB)
    steps = list(speculative(target, proposing, PROMPTS, 4, Sampling(max_new_tokens=40, temperature=temperature)))
    assert all(step.accepted == step.drafted for step in steps if step.drafted > 1)


class Now:
    """Every other time one token, always the same."""

    def reset(self, rows: int, capacity: int) -> None:
        self.asked = 0

    def propose(self, texts: Sequence[list[int]], count: int, sampling: Sampling, uniform: Tensor) -> Draft:
        self.asked += 1
        return Draft(ids=torch.full((len(texts), 1), 7), q=None, counts=[self.asked % 2] * len(texts))


def test_an_unsure_model_keeps_the_token_that_it_is_unsure_of(models):
    for unsure, counts in ((less_sure_than(1.1), [1, 1, 1]), (more_entropy_than(-1), [1, 1, 1])):
        proposing = UnsureDrafter(models["noisy"], VOCAB, unsure)
        proposing.reset(3, 40)
        assert proposing.propose(PROMPTS, 4, Sampling(), torch.zeros(3, 4)).counts == counts


def test_an_unsure_model_that_is_never_unsure_is_the_model(models):
    never, model = UnsureDrafter(models["noisy"], VOCAB, less_sure_than(0)), ModelDrafter(models["noisy"], VOCAB)
    found = []
    for proposing in (never, model):
        proposing.reset(3, 40)
        found.append(proposing.propose(PROMPTS, 4, Sampling(), torch.zeros(3, 4)))
    assert found[0].counts == found[1].counts == [4, 4, 4]
    assert torch.equal(found[0].ids, found[1].ids)


def test_lookup_copies_behind_the_longest_and_latest_match():
    def copied(text: list[int], count: int) -> list[int]:
        draft = LookupDrafter().propose([text], count, Sampling(), torch.zeros(1, count))
        return draft.ids[0, : draft.counts[0]].tolist()

    assert copied([1, 2, 3, 9, 5, 3, 8, 1, 2, 3], 3) == [9, 5, 3]  # 1 2 3, not the later 3
    assert copied([7, 3, 4, 7, 3, 5, 7, 3], 2) == [5, 7]
    assert copied([4, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]  # a loop goes on
    assert copied([1, 2, 3], 4) == []


def test_kneser_ney_by_hand():
    """Bigrams of a b a b a c: D = n1 / (n1 + 2 n2) = 1 / (1 + 2 * 2) of the kinds ab 2, ba 2, ac 1."""
    a, b, c = 0, 1, 2
    model = Ngrams(np.array([a, b, a, b, a, c]), 3, 2)
    before = np.array([1, 1, 1]) + 1e-3  # each token comes behind one other: ba, ab, ac
    before = before / before.sum()
    after_a = np.array([0, 2 - 0.2, 1 - 0.2]) / 3 + 0.2 * 2 / 3 * before
    np.testing.assert_allclose(model.probabilities([b, a]), after_a)
    np.testing.assert_allclose(model.probabilities([c]), before)  # nothing comes behind c


def test_kneser_ney_sums_to_one_and_likes_its_own_text():
    rng = np.random.default_rng(0)
    text = np.cumsum(rng.integers(0, 3, 3000)) % 50
    model = Ngrams(text, 50, 4)
    rows = np.stack([model.probabilities(text[max(0, i - 5) : i].tolist()) for i in range(300)])
    np.testing.assert_allclose(rows.sum(1), 1)
    assert (rows > 0).all()
    assert np.log(rows[np.arange(5, 300), text[5:300]]).mean() > -np.log(4)  # there are three ways on


def test_contexts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="64 bits"):
        Ngrams(np.zeros(10, dtype=np.int64), 150_000, 5)
