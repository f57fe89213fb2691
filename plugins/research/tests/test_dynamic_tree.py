"""EAGLE-2's dynamic tree has the draft's most probable paths for each text, and decoding with it is lossless."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.builders import assert_rounds, build
from helpers.enumeration import error, table
from helpers.errors import raises_option
from helpers.plain_eagle import target_and_head
from torch import Tensor

from draftlab.drafters.base import parse_drafter
from draftlab.engine.generate import decode, feed, output_tokens, speculative_decode
from draftlab.engine.verify import Tokens, match
from draftlab.heads.eagle3.decoder import NativeEagle
from draftlab.heads.eagle3.drafter import EagleDrafter
from draftlab.model import llama
from draftlab.model.decoder import Decoder, Tree
from draftlab.model.modes import with_mode
from draftlab.sampling import SamplingParams
from draftlab_research.drafting.dynamic_tree import DynamicTreeDrafter
from draftlab_research.drafting.eagle_tree import EagleTreeDrafter
from draftlab_research.drafting.tree import TreeDrafter
from draftlab_research.rules import recursive

PROMPTS = [[0, 17, 44, 101, 9, 17, 44], [0, 5, 250, 31, 66, 3, 8, 12, 99], [0, 90, 91]]
TOPK, DEPTH, NODES = 3, 3, 7


def plain_tree(log_q: Callable[[list[int]], Tensor], topk: int, depth: int, nodes: int) -> set[tuple[int, ...]]:
    """Return the paths of EAGLE-2's tree, computed as the paper describes.

    log_q: Function from a path to the draft's log-probabilities of the next token, [V].
    """
    values: dict[tuple[int, ...], float] = {}
    level: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        fresh = {}
        for path in level:
            found = log_q(list(path))
            for token in found.topk(topk).indices.tolist():
                fresh[(*path, token)] = values.get(path, 0.0) + float(found[token])
        values |= fresh
        level = sorted(fresh, key=lambda path: -fresh[path])[:topk]
    return set(sorted(values, key=lambda path: -values[path])[:nodes])


def paths(draft, row: int) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(draft.ids[row].tolist(), draft.parents_of(row), strict=True):
        found.append((*found[parent], token))
    return set(found[1:])


@pytest.fixture(scope="module", params=["eager", "native"])
def models(request: pytest.FixtureRequest, tmp_path_factory) -> dict[str, Any]:
    """Return a target, an EAGLE-3 head for this target, and a draft that sometimes agrees with the target."""
    root = tmp_path_factory.mktemp("dynamic")
    target, head = target_and_head(root / "target")
    torch.manual_seed(5)
    noisy = build("llama", 3)
    noisy.save_pretrained(root / "draft")
    draft = llama.load(root / "draft", torch.float32)
    draft.embed, draft.head = target.embed, target.head
    native = request.param == "native"
    return {
        "target": with_mode(target, request.param),
        "draft": with_mode(draft, request.param),
        "plain": draft,
        "head": NativeEagle(head) if native else head,
    }


def drafter_of(models: dict[str, Any], kind: str, topk: int = TOPK) -> DynamicTreeDrafter:
    if kind == "draft":
        reader = TreeDrafter(models["draft"], None, (0,), "top")
    else:
        reader = EagleTreeDrafter(EagleDrafter(models["target"], models["head"]), (0,), "top")
    return DynamicTreeDrafter(reader, topk, DEPTH)


def proposed(drafter, target, texts: list[list[int]], count: int):
    cache = target.new_cache(len(texts), 64)
    drafter.reset(len(texts), 64)
    if hasattr(drafter, "attach"):
        drafter.attach(cache)
    feed(target, cache, [text[:-1] for text in texts])
    return drafter.propose(texts, count, SamplingParams(), torch.rand(len(texts), count))


def test_a_draft_models_tree_is_the_papers_of_every_row(models):
    draft = proposed(drafter_of(models, "draft"), models["target"], PROMPTS, NODES)
    # otherwise all rows could have the same tree
    assert len({tuple(draft.parents_of(row)) for row in range(3)}) > 1
    for row, text in enumerate(PROMPTS):

        def log_q(path: list[int], text: list[int] = text) -> Tensor:
            return models["plain"].forward_uncached(torch.tensor([[*text, *path]]), 1)[0, -1].log_softmax(-1)

        assert paths(draft, row) == plain_tree(log_q, TOPK, DEPTH, NODES)


def test_a_smaller_tree_is_the_beginning_of_a_larger_one(models):
    """Otherwise the samples of a row near its length limit would depend on how many tokens the other rows can draft."""
    large = proposed(drafter_of(models, "draft"), models["target"], PROMPTS, NODES)
    for count in range(1, NODES):
        small = proposed(drafter_of(models, "draft"), models["target"], PROMPTS, count)
        assert torch.equal(small.ids, large.ids[:, :count])
        for row in range(3):
            assert small.parents_of(row) == large.parents_of(row)[:count]


def test_a_heads_tree_is_the_papers_of_every_row(models):
    """The reference drafts chains with the head. Other tests compare these chains with a plain implementation."""
    texts = [prompt[:7] for prompt in (PROMPTS[0], PROMPTS[1])]
    draft = proposed(drafter_of(models, "head"), models["target"], texts, NODES)
    target, head = models["target"], models["head"]
    for row, text in enumerate(texts):

        def log_q(path: list[int], text: list[int] = text) -> Tensor:
            drafter, cache = EagleDrafter(target, head), target.new_cache(1, 64)
            drafter.reset(1, 64)
            drafter.attach(cache)
            feed(target, cache, [text[:-1]])
            logits, state = drafter.last_logits([text])
            for token in path:
                logits, state = head.step(torch.tensor([[token]]), state, drafter.cache, last=1)
                logits = logits[:, -1]
            return logits[0].float().log_softmax(-1)

        assert paths(draft, row) == plain_tree(log_q, TOPK, DEPTH, NODES)


@pytest.mark.parametrize("kind", ["draft", "head"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_with_trees_of_their_own_write_what_the_target_writes_alone(models, kind, temperature):
    sampling = SamplingParams(max_tokens=24, temperature=temperature, seed=1)
    steps = list(speculative_decode(models["target"], drafter_of(models, kind), PROMPTS, NODES, sampling))
    together = output_tokens(steps)
    if temperature == 0:
        assert together == output_tokens(decode(models["target"], PROMPTS, sampling))
        assert kind == "draft" or sum(step.accepted > 1 for step in steps) > 0
    for i, prompt in enumerate(PROMPTS):
        drafter = drafter_of(models, kind)
        alone = speculative_decode(models["target"], drafter, [prompt], NODES, sampling, numbers=[i])
        assert output_tokens(alone)[0] == together[i]


def test_one_child_each_is_the_greedy_chain(models):
    draft = proposed(drafter_of(models, "head", topk=1), models["target"], PROMPTS, DEPTH)
    chain = proposed(EagleDrafter(models["target"], models["head"]), models["target"], PROMPTS, DEPTH)
    assert torch.equal(draft.ids, chain.ids)
    assert [list(draft.parents_of(row)) for row in range(3)] == [[0, 1, 2]] * 3


def test_a_pass_over_another_tree_in_each_row_is_that_of_the_rows_alone(models):
    target, trees = models["target"], [(0, 0, 1, 2), (0, 1, 2, 2), (0, 0, 0, 3)]
    ids = torch.randint(3, 300, (3, 5), generator=torch.Generator().manual_seed(0))
    cache = target.new_cache(3, 40)
    feed(target, cache, PROMPTS)
    together = target.forward(ids, cache, tree=Tree.from_parents(trees))
    for row, tree in enumerate(trees):
        cache = target.new_cache(1, 40)
        feed(target, cache, [PROMPTS[row]])
        alone = target.forward(ids[row : row + 1], cache, tree=Tree.from_parents(tree))
        assert_rounds(together[row], alone[0])
        other = target.new_cache(1, 40)
        feed(target, other, [PROMPTS[row]])
        wrong = target.forward(ids[row : row + 1], other, tree=Tree.from_parents(trees[row - 1]))
        assert (wrong - alone).abs().max() > 1e-2


@dataclass
class Markov(Decoder):
    """A decoder whose next token depends only on the last token.

    matrix: Probability of each next token after each token.
    """

    matrix: Tensor  # [V, V]
    context = 100
    device = torch.device("cpu")

    def new_cache(self, rows: int, capacity: int) -> Any:
        return llama.Cache(torch.zeros(1, rows, 1, capacity, 1), torch.zeros(1, rows, 1, capacity, 1))

    def forward(self, ids: Tensor, cache: Any, last: int = 0, tree: Tree | None = None) -> Tensor:
        cache.used = [used + ids.shape[1] for used in cache.used]
        return self.matrix[ids[:, -last:]].log()


@pytest.mark.parametrize(("topk", "nodes"), [(1, 2), (2, 4), (3, 5)])
def test_every_outcome_enumerated_is_the_targets_distribution(topk, nodes):
    rng = torch.Generator().manual_seed(0)
    p = table([torch.softmax(2 * torch.randn(4, generator=rng, dtype=torch.float64), 0) for _ in range(5)])
    q = torch.softmax(2 * torch.randn(4, 4, generator=rng, dtype=torch.float64), 1)

    def drafting(chance: object) -> Tokens:
        drafter = DynamicTreeDrafter(TreeDrafter(Markov(q), None, (0,), "top"), topk, 2)
        drafter.reset(1, 20)
        draft = drafter.propose([[1, 2]], nodes, SamplingParams(temperature=1.0), torch.zeros(1, nodes))
        assert draft.q is None
        return Tokens(ids=draft.ids[0].tolist(), parents=draft.parents_of(0))

    for rule in (recursive, match):
        assert error(p, drafting, rule) < 1e-12

    def biased(p_rows: Tensor, tokens: Tokens, chance: Any) -> Any:
        """Return p itself instead of the residual after a rejection: a wrong rule that the test must detect."""
        path, rest = recursive(p_rows, tokens, chance)
        return path, p_rows[0] if not path else rest

    assert error(p, drafting, biased) > 1e-3


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("eagle-tree:heads=x,topk=2,depth=2,nodes=7", "nodes"),
        ("eagle-tree:heads=x,widths=2,depth=3", "depth"),
        ("eagle-tree:heads=x", "widths"),
        ("tree:topk=4,siblings=top", "siblings"),
    ],
)
def test_options_of_one_tree_exclude_those_of_another(text, option):
    with raises_option(option):
        parse_drafter(text)
