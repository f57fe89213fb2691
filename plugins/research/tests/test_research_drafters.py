"""The plug-in's drafters pass the tests of draftlab's own drafters, and the best trees are found."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from helpers.builders import assert_rounds, build
from helpers.drafter_laws import (
    PROMPTS,
    VOCAB,
    Bigrams,
    check_greedy,
    check_q,
    check_rows,
    eagle_drafter,
    save_models,
)
from research_heads import dspark_drafter, peagle_drafter
from torch import Tensor

from draftlab.drafters.fallback import FallbackDrafter
from draftlab.engine.generate import (
    Draft,
    Drafter,
    ModelDrafter,
    decode,
    output_tokens,
    speculative_decode,
)
from draftlab.engine.verify import distribution, match
from draftlab.model import llama
from draftlab.sampling import SamplingParams
from draftlab_research.drafting import tree
from draftlab_research.drafting.adaptive import PolicyDraft, PolicyLookup, Stoppable
from draftlab_research.drafting.cascade import CascadeDrafter
from draftlab_research.drafting.dynamic_tree import DynamicTreeDrafter
from draftlab_research.drafting.eagle_tree import EagleTreeDrafter
from draftlab_research.drafting.layer_skip import skip_layers
from draftlab_research.drafting.medusa import MedusaDrafter
from draftlab_research.drafting.ngram import NgramDrafter, NgramModel
from draftlab_research.drafting.parallel_tree import ParallelTreeDrafter
from draftlab_research.drafting.stops import ConfidenceStopDrafter
from draftlab_research.drafting.tree import (
    TreeDrafter,
    best_tree,
    draw_child,
    fastest_tree,
    full_tree,
    independent,
    node_depths,
    observed,
)
from draftlab_research.layer_search import search_layers
from draftlab_research.policy import EDGES, LENGTHS, Policy
from draftlab_research.stops import ConfidenceStopSpec, EntropyStopSpec

HEADS = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(2)) * 0.05


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, llama.Llama]:
    return save_models(tmp_path_factory.mktemp("drafters"))


@pytest.fixture(scope="module")
def ngrams(models: dict[str, llama.Llama]) -> NgramModel:
    """Return a model of what the target itself writes."""
    prompts = [[0, i, i + 1] for i in range(3, 9)]
    texts = output_tokens(decode(models["target"], prompts, SamplingParams(max_tokens=60)))
    return NgramModel(np.concatenate([np.array(text) for text in texts]), VOCAB, 3)


DRAFTERS = [
    "ngram",
    "unsure",
    "entropy",
    "staged",
    "staged model",
    "skip",
    "medusa",
    "offsets sampled",
    "offsets distinct",
    "eagle tree",
    "tree top",
    "tree sampled",
    "tree distinct",
    "dynamic",
    "adaptive",
    "adaptive head",
    "peagle",
    "dspark",
    "confident dspark",
]


def drafter(name: str, models: dict[str, llama.Llama], ngrams: NgramModel) -> Drafter:
    noisy = models["noisy"]
    return {
        "ngram": lambda: NgramDrafter(ngrams),
        "unsure": lambda: ConfidenceStopDrafter(noisy, VOCAB, ConfidenceStopSpec.of(threshold=0.3).stops),
        "entropy": lambda: ConfidenceStopDrafter(noisy, VOCAB, EntropyStopSpec.of(threshold=1.0).stops),
        "staged": lambda: CascadeDrafter(noisy, VOCAB, NgramDrafter(ngrams), 2),
        "staged model": lambda: CascadeDrafter(noisy, VOCAB, ModelDrafter(noisy, VOCAB), 3),
        "skip": lambda: ModelDrafter(skip_layers(models["target"], [0, 2]), VOCAB),
        "medusa": lambda: MedusaDrafter(models["target"], HEADS),
        "offsets sampled": lambda: ParallelTreeDrafter(models["parallel"], VOCAB, (0, 0, 1, 1, 2, 3), "sampled"),
        "offsets distinct": lambda: ParallelTreeDrafter(models["parallel"], VOCAB, (0, 0, 1, 1, 2, 3), "distinct"),
        "eagle tree": lambda: eagle_tree(models["target"]),
        "tree top": lambda: TreeDrafter(noisy, VOCAB, (0, 0, 1, 1, 2, 3), "top"),
        "tree sampled": lambda: TreeDrafter(noisy, VOCAB, (0, 0, 1, 1, 2, 3), "sampled"),
        "tree distinct": lambda: TreeDrafter(noisy, VOCAB, (0, 0, 1, 1, 2, 3), "distinct"),
        "adaptive": lambda: adaptive(ModelDrafter(noisy, VOCAB)),
        "peagle": lambda: peagle_drafter(models["target"]),
        "dspark": lambda: dspark_drafter(models["target"], "rnn"),
        "confident dspark": lambda: dspark_drafter(models["target"], least_confidence=0.3),
        "adaptive head": lambda: adaptive(eagle_drafter(models["target"])),
        "dynamic": lambda: DynamicTreeDrafter(TreeDrafter(noisy, VOCAB, (0,), "top"), 2, 3),
    }[name]()


def adaptive(inner: Stoppable) -> Drafter:
    """Return a drafter with a policy that copies after long matches, and ends drafts after tokens of low confidence."""
    chance = np.repeat([0.1, 0.9], [3, len(EDGES) - 2])
    policy = Policy(
        speed=0.1,
        verify_ms=np.arange(10.0, 20),
        draft_ms=1.0,
        chance=chance,
        next_chance=chance,
        draft_gain=0.1,
        copies=np.broadcast_to(np.array([0.05, 0.5, 0.9, 0.9])[:, None], (3, LENGTHS, 9)),
    )
    return FallbackDrafter(PolicyLookup(policy, 8), PolicyDraft(inner, policy), VOCAB)


def eagle_tree(target: llama.Llama) -> EagleTreeDrafter:
    return EagleTreeDrafter(eagle_drafter(target), (0, 0, 1, 1, 2, 3), "sampled")


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("k", [1, 6])
def test_greedy_decoding_with_any_drafter_is_plain_decoding(models, ngrams, name, k):
    check_greedy(models["target"], drafter(name, models, ngrams), k)


@pytest.mark.parametrize("name", DRAFTERS)
def test_what_a_row_samples_does_not_depend_on_the_others(models, ngrams, name):
    check_rows(models["target"], drafter(name, models, ngrams))


@pytest.mark.parametrize(
    "name",
    ["ngram", "unsure", "entropy", "skip", "medusa", "eagle tree", "tree sampled", "tree distinct", "peagle", "dspark"],
)
def test_q_is_what_was_sampled(models, ngrams, name):
    check_q(models["target"], drafter(name, models, ngrams))


def test_what_a_staged_drafter_samples_is_the_draft_model():
    """Compare frequencies of token pairs with the exact distribution of a bigram draft model.

    The inner drafter always proposes the same token.
    """
    q = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3], [0.3, 0.3, 0.4]])
    staged = CascadeDrafter(Bigrams(q.log()), None, Always(1), 2)
    staged.reset(1, 8)
    counts, n = torch.zeros(3, 3), 1000
    uniform = torch.rand(n, 1, 2, generator=torch.Generator().manual_seed(1))
    for u in uniform:
        draft = staged.propose([[2]], 2, SamplingParams(temperature=1.0), u)
        counts[tuple(draft.ids[0])] += 1
        assert draft.q is not None
        torch.testing.assert_close(draft.q[0], q[[2, int(draft.ids[0, 0])]])
    expected = n * q[2].unsqueeze(1) * q
    # critical value of chi-square, 8 degrees of freedom, alpha 2e-8
    assert float(((counts - expected) ** 2 / expected).sum()) < 51.6


class Always(Drafter):
    def __init__(self, token: int) -> None:
        self.token = token

    def reset(self, rows: int, capacity: int) -> None:
        pass

    def propose(self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        return Draft(ids=torch.full((len(texts), count), self.token), q=None, counts=[count] * len(texts))


def test_an_unsure_model_keeps_the_token_that_it_is_unsure_of(models):
    for unsure, counts in (
        (ConfidenceStopSpec.of(threshold=1).stops, [1, 1, 1]),
        (EntropyStopSpec.of(threshold=0).stops, [1, 1, 1]),
    ):
        proposing = ConfidenceStopDrafter(models["noisy"], VOCAB, unsure)
        proposing.reset(3, 40)
        assert proposing.propose(PROMPTS, 4, SamplingParams(), torch.zeros(3, 4)).counts == counts


def test_an_unsure_model_that_is_never_unsure_is_the_model(models):
    never, model = (
        ConfidenceStopDrafter(models["noisy"], VOCAB, ConfidenceStopSpec.of(threshold=0).stops),
        ModelDrafter(models["noisy"], VOCAB),
    )
    found = []
    for proposing in (never, model):
        proposing.reset(3, 40)
        found.append(proposing.propose(PROMPTS, 4, SamplingParams(), torch.zeros(3, 4)))
    assert found[0].counts == found[1].counts == [4, 4, 4]
    assert torch.equal(found[0].ids, found[1].ids)


def pair_statistic(target: Tensor, drafter: Drafter, rule=None, n: int = 500) -> float:
    """Return the chi-square statistic of the second and third emitted token against their exact joint distribution.

    A step drafts both tokens. n: Number of decoded texts.
    """
    p = torch.softmax(target, -1)
    counts = torch.zeros(3, 3)
    for seed in range(n):
        sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=6)
        tokens = output_tokens(speculative_decode(Bigrams(target), drafter, [[2]], 4, sampling, rule=rule))[0]
        counts[tokens[1], tokens[2]] += 1
    expected = n * torch.einsum("a,ab,bc->bc", p[2], p, p)
    return float(((counts - expected) ** 2 / expected).sum())


TARGET = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.3, 0.4, 0.3]]).log()
DRAFT = torch.tensor([[0.2, 0.5, 0.3], [0.5, 0.3, 0.2], [0.15, 0.15, 0.7]]).log()
CRITICAL = 44.6  # critical value of chi-square, 8 degrees of freedom, alpha 4.4e-7


@pytest.mark.parametrize("siblings", ["sampled", "distinct"])
def test_what_trees_emit_has_the_targets_distribution(siblings):
    assert pair_statistic(TARGET, TreeDrafter(Bigrams(DRAFT), 3, (0, 0, 1, 2), siblings)) < CRITICAL


def test_chi_square_rejects_a_tree_whose_q_is_not_what_it_sampled(monkeypatch):
    def claims(logits, elder, siblings, sampling, uniform):
        """Return the most probable token with the q of a sampled token, which is wrong."""
        ids, _ = draw_child(logits, elder, siblings, sampling, uniform)
        return ids, distribution(logits, sampling)

    monkeypatch.setattr(tree, "draw_child", claims)
    assert pair_statistic(TARGET, TreeDrafter(Bigrams(DRAFT), 3, (0, 0, 1, 2), "top")) > CRITICAL
    assert (
        pair_statistic(TARGET, TreeDrafter(Bigrams(DRAFT), 3, (0, 0, 1, 2), "top"), match) < CRITICAL
    )  # the match rule does not use q


def test_a_tree_of_one_branch_is_the_model(models):
    found = []
    for proposing in (
        TreeDrafter(models["noisy"], VOCAB, (0, 1, 2, 3), "sampled"),
        ModelDrafter(models["noisy"]),
    ):
        proposing.reset(3, 40)
        uniform = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
        found.append(proposing.propose(PROMPTS, 4, SamplingParams(temperature=1.0), uniform))
    assert torch.equal(found[0].ids, found[1].ids)
    assert_rounds(found[0].q, found[1].q)


def test_trees_are_numbered_level_by_level():
    assert full_tree([2, 1]) == (0, 0, 1, 2)
    assert full_tree([1, 3]) == (0, 1, 1, 1)
    assert node_depths((0, 0, 1, 2, 3)) == [1, 1, 2, 2, 3]
    with pytest.raises(ValueError, match="by level"):
        TreeDrafter(Bigrams(DRAFT), 3, (0, 1, 0), "top")


def test_the_best_tree_is_found_by_hand():
    share = independent([0.6, 0.2, 0.1])
    assert best_tree(share, 3, 3, 3) == ((0, 1, 2), pytest.approx(1 + 0.6 + 0.36 + 0.216))
    parents, tokens = best_tree(share, 3, 5, 2)  # shares of the paths: 0.6 0.36 0.2 0.12 0.12
    assert sorted(node_depths(parents)) == [1, 1, 2, 2, 2]
    assert tokens == pytest.approx(1 + 0.6 + 0.36 + 0.2 + 0.12 + 0.12)
    assert best_tree(independent([0.5, 0.5]), 2, 2, 1) == ((0, 0), 2.0)


def test_no_tree_of_five_tokens_keeps_more():
    """Compare the best tree with every tree of five tokens and at most three siblings."""
    ranked = [0.5, 0.3, 0.1]

    def kept(parents: tuple[int, ...]) -> float:
        worth = [1.0]
        for i, parent in enumerate(parents):
            worth.append(worth[parent] * ranked[parents[:i].count(parent)])
        return sum(worth)

    every = [()]
    for n in range(5):
        every = [(*tree, parent) for tree in every for parent in range(n + 1) if tree.count(parent) < 3]
    assert best_tree(independent(ranked), 3, 5, 5)[1] == pytest.approx(max(kept(tree) for tree in every))


def test_the_fastest_tree_is_a_chain_where_width_costs_and_wide_where_levels_cost():
    share = independent([0.7, 0.2, 0.05])
    assert fastest_tree(share, lambda depth, nodes, tokens: 1 + 0.01 * depth + 0.5 * nodes, 3, 8, 8)[0] == (0,)
    wide, _ = fastest_tree(share, lambda depth, nodes, tokens: 1 + 5.0 * depth, 3, 8, 8)
    assert max(node_depths(wide)) < 8
    long, _ = fastest_tree(share, lambda depth, nodes, tokens: 1.0, 3, 8, 8)
    assert max(node_depths(long)) > max(node_depths(wide))


def test_the_best_tree_over_offsets_keeps_most_of_the_texts_that_it_was_found_in():
    """Compare the best tree with every tree of five tokens.

    From each position of a text, a step accepts tokens as long as the path of their ranks is in the tree.
    """
    rng = np.random.default_rng(0)
    texts = [rng.choice(3, (n, 3), p=(0.5, 0.3, 0.2)) for n in (90, 2, 140)]
    for ranks in texts:
        # make ranks depend on each other: after a wrong first token, the second token of a step is rarely right
        wrong = np.flatnonzero(ranks[:-1, 0] > 0)
        ranks[wrong + 1, 1] = rng.choice(9, len(wrong), p=[0.2, *[0.1] * 8])

    def kept(parents: tuple[int, ...]) -> int:
        children = {(parent, parents[:i].count(parent)): i + 1 for i, parent in enumerate(parents)}
        total = 0
        for ranks in texts:
            for start in range(len(ranks)):
                node, age = 0, 0
                while start + age < len(ranks) and age < 3 and (node, ranks[start + age, age]) in children:
                    node, age = children[node, ranks[start + age, age]], age + 1
                total += age
        return total

    every = [()]
    for n in range(5):
        every = [(*tree, parent) for tree in every for parent in range(n + 1) if tree.count(parent) < 3]
    parents, tokens = best_tree(observed(texts, 3), 3, 5, 3)
    starts = sum(map(len, texts))
    assert kept(parents) == max(map(kept, every))
    assert tokens == pytest.approx(1 + kept(parents) / starts)


def test_skipping_no_layer_is_the_target_and_shares_its_weights(models):
    target = models["target"]
    same = skip_layers(target, range(3))
    ids = torch.tensor([PROMPTS[1]])
    assert torch.equal(same.forward(ids, same.new_cache(1, 9)), target.forward(ids, target.new_cache(1, 9)))
    assert same.blocks[0].o.data_ptr() == target.blocks[0].o.data_ptr()
    with pytest.raises(ValueError, match="of 3"):
        skip_layers(target, [0, 3])


def test_the_search_leaves_out_the_layer_that_does_nothing(tmp_path):
    model = build("llama", 1, num_hidden_layers=3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "layers.1" in name and ("o_proj" in name or "down_proj" in name):
                p.zero_()
    model.save_pretrained(tmp_path)
    target = llama.load(tmp_path, torch.float32)
    texts = [
        (np.array(p), np.array(w))
        for p, w in zip(PROMPTS, output_tokens(decode(target, PROMPTS, SamplingParams())), strict=True)
    ]
    found = list(search_layers(target, texts, SamplingParams(), lambda layers: layers / 3))
    assert found[0].layers == (0, 2)
    assert found[0].tokens_per_pass == pytest.approx(found[0].k + 1)  # all drafted tokens are accepted
    assert [len(x.layers) for x in found] == [2, 1]


class RightForFirst(Drafter):
    """A drafter that drafts right tokens for the first text, and wrong tokens for all other texts."""

    def __init__(self, follows: list[int]) -> None:
        self.follows = follows

    def reset(self, rows: int, capacity: int) -> None:
        self.start: int | None = None

    def propose(self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        self.start = len(texts[0]) if self.start is None else self.start
        read = len(texts[0]) - self.start
        right = (self.follows[read:] + [0] * count)[:count]
        rows = [right, *([(VOCAB - 1)] * count for _ in texts[1:])]
        return Draft(ids=torch.tensor(rows), q=None, counts=[count] * len(texts))


@pytest.mark.parametrize("inner_tokens", [1, 2])
def test_a_staged_row_that_is_done_is_not_fed_beyond_the_capacity(models, inner_tokens):
    """The first text has all its drafted tokens and fills the cache, while the second text still drafts."""
    texts, k = [list(range(3, 43)), [0, 90, 91]], 3
    sampling = SamplingParams(max_tokens=8)
    whole = output_tokens(decode(models["noisy"], texts, sampling))
    staged = CascadeDrafter(models["noisy"], VOCAB, RightForFirst(whole[0]), inner_tokens)
    staged.reset(2, len(texts[0]) + k)
    draft = staged.propose(texts, k, sampling, torch.rand(2, k))
    assert draft.ids.tolist() == [row[:k] for row in whole]
