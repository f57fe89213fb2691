"""Trees of EAGLE-3 heads: a tree of one branch equals a chain, and expected counts equal those of decoding."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.builders import assert_rounds, recording
from helpers.plain_eagle import target_and_head

from draftlab.engine.generate import decode, output_tokens, speculative_decode
from draftlab.heads.eagle3 import decoder, layout
from draftlab.heads.eagle3.decoder import EagleLlama
from draftlab.heads.eagle3.drafter import EagleDrafter, score_chains
from draftlab.heads.eagle3.layout import Head
from draftlab.model import Mode, llama
from draftlab.model.cuda_graphs import CudaGraphLlama
from draftlab.model.decoder import feed
from draftlab.model.llama import LayerStates
from draftlab.model.modes import with_mode
from draftlab.model.native_cpu import NativeLlama
from draftlab.sampling import SamplingParams
from draftlab_research.drafting.eagle_tree import EagleTreeDrafter
from draftlab_research.drafting.tree import full_tree

PROMPTS = [[0, 17, 44, 101, 9, 17, 44], [0, 5, 250, 31, 66, 3, 8, 12, 99], [0, 90, 91]]


@pytest.fixture(scope="module")
def head(family_dirs: dict[str, Path]) -> Head:
    config = layout.head_config(family_dirs["llama"], None, 120)
    generator = torch.Generator().manual_seed(0)
    weights = {name: 0.2 * torch.randn(size, generator=generator) for name, size in config.sizes().items()}
    return Head(config=config, weights=weights, ids=torch.arange(0, 240, 2), embedding=None)


@pytest.fixture(scope="module", params=["eager", "native", "graphs"])
def target(request: pytest.FixtureRequest, family_dirs: dict[str, Path]) -> llama.Llama:
    model = llama.load(family_dirs["llama"], torch.float32)
    return CudaGraphLlama(model) if request.param == "graphs" else with_mode(model, request.param)


def drafter_of(head: Head, target: llama.Llama) -> Any:
    model = EagleLlama(head, target.embed, Path("head"))
    modes: dict[type, Mode] = {NativeLlama: "native", CudaGraphLlama: "graphs"}
    return recording(EagleDrafter, target, decoder.with_mode(model, modes.get(type(target), "eager")))


@pytest.fixture(scope="module")
def near_head(tmp_path_factory) -> tuple[llama.Llama, EagleLlama]:
    return target_and_head(tmp_path_factory.mktemp("near"))


def test_a_tree_of_one_branch_is_the_chain(head, target):
    uniform, sampling = (
        torch.rand(3, 4, generator=torch.Generator().manual_seed(0)),
        SamplingParams(temperature=1.0),
    )
    texts, found = [[*prompt, 5, 6, 7] for prompt in PROMPTS], []
    tree = EagleTreeDrafter(drafter_of(head, target), (0, 1, 2, 3), "sampled")
    for drafter in (drafter_of(head, target), tree):
        cache = target.new_cache(3, 40)
        drafter.reset(3, 40)
        drafter.attach(cache)
        feed(target, cache, [text[:-1] for text in texts])
        found.append(drafter.propose(texts, 4, sampling, uniform))
    assert torch.equal(found[0].ids, found[1].ids)
    assert_rounds(found[0].q, found[1].q)


def test_a_wide_tree_accepts_and_leaves_the_text_as_it_is(head, target):
    """When a branch is accepted, the target states that the head reads next must move to the positions of the cache."""
    sampling = SamplingParams(max_tokens=24)
    told = drafter_of(head, target)
    steps = list(speculative_decode(target, EagleTreeDrafter(told, full_tree([40, 2]), "top"), PROMPTS, 120, sampling))
    written = output_tokens(steps)
    assert written == output_tokens(decode(target, PROMPTS, sampling))
    assert sum(step.accepted for step in steps) > 0
    for row, text in enumerate(prompt + more for prompt, more in zip(PROMPTS, written, strict=True)):
        cache, read = target.new_cache(1, 64), len(text) - 1
        cache.layer_states = LayerStates((1, 2, 4), torch.zeros(1, 64, 3 * 64))
        target.forward(torch.tensor([text]), cache)
        kept = told.layer_states.states[row, :read]
        assert_rounds(kept, cache.layer_states.states[0, :read])


@pytest.mark.parametrize("k", [1, 3, 5])
def test_replay_expects_what_greedy_decoding_with_trees_counts(near_head, k):
    target, head = near_head
    sampling = SamplingParams(max_tokens=40)
    texts = output_tokens(decode(target, PROMPTS, sampling))
    pairs = [(np.array(prompt), np.array(text)) for prompt, text in zip(PROMPTS, texts, strict=True)]
    scored = score_chains(target, head, pairs, 307, sampling, 5)
    widths = [3, 2, 1][: min(3, k)]
    drafter = EagleTreeDrafter(EagleDrafter(target, head), full_tree(widths), "top")
    live = list(speculative_decode(target, drafter, PROMPTS, len(full_tree(widths)), sampling))
    deepest = 0
    for row, score in enumerate(scored):
        accepted, at, ranks = [], 0, score.ranks[1:]
        while at < len(ranks):
            depth = 0
            while depth < min(len(widths), len(ranks) - at - 1) and ranks[at + depth, depth] < widths[depth]:
                depth += 1
            accepted.append(depth)
            at += depth + 1
        own = [step.accepted for step in live if step.row == row][1:]
        # near the end of a text, a smaller tree may need the same number of steps in another order
        assert (len(own), sum(own)) == (len(accepted), sum(accepted))
        deepest = max(deepest, *accepted)
    # some accepted tokens were drafted from the head's own states
    assert deepest >= min(2, k)
