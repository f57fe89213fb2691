"""EAGLE-3 in the engine: what it reads is where it should be, in texts of any length beside each other."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.builders import assert_rounds, build, recording
from helpers.drafter_laws import PROMPTS, check_greedy_replay, replay_errors
from helpers.head_texts import random_weights
from helpers.plain_eagle import VARIANTS, PlainHead, target_and_head

from draftlab.engine.generate import decode, output_tokens, speculative_decode
from draftlab.heads.eagle3 import decoder, layout
from draftlab.heads.eagle3.decoder import EagleLlama
from draftlab.heads.eagle3.drafter import EagleDrafter, score_chains
from draftlab.heads.eagle3.layout import Head
from draftlab.model import Mode, llama
from draftlab.model.cuda_graphs import CudaGraphLlama
from draftlab.model.decoder import Tree
from draftlab.model.llama import LayerStates
from draftlab.model.modes import with_mode
from draftlab.model.native_cpu import NativeLlama
from draftlab.sampling import SamplingParams


@pytest.fixture(scope="module", params=VARIANTS)
def folder(request, family_dirs, tmp_path_factory) -> Path:
    """Return a random head of each variant; one is in speculators' layout."""
    out, target = tmp_path_factory.mktemp("head"), family_dirs["llama"]
    config = layout.head_config(target, None, 120, **VARIANTS[request.param])
    weights = random_weights(config.sizes(), 0)
    head = Head(config=config, weights=weights, ids=torch.arange(0, 240, 2), embedding=None)
    form = "speculators" if request.param == "speculators" else "native"
    layout.write(out, head, form, target=target, k=3)
    return out


@pytest.fixture(scope="module", params=["eager", "native", "graphs"])
def target(request, family_dirs) -> llama.Llama:
    model = llama.load(family_dirs["llama"], torch.float32)
    return CudaGraphLlama(model) if request.param == "graphs" else with_mode(model, request.param)


def drafter_of(folder: Path, target: llama.Llama, family_dirs: dict[str, Path]) -> Any:
    head = EagleLlama(layout.read(folder, family_dirs["llama"], target.embed.dtype), target.embed, folder)
    modes: dict[type, Mode] = {NativeLlama: "native", CudaGraphLlama: "graphs"}
    return recording(EagleDrafter, target, decoder.with_mode(head, modes.get(type(target), "eager")))


@pytest.fixture(scope="module")
def near_head(tmp_path_factory) -> tuple[llama.Llama, EagleLlama]:
    return target_and_head(tmp_path_factory.mktemp("near"))


def test_the_engine_drafts_what_a_plain_head_says_of_transformers_states(folder, target, family_dirs):
    drafter, sampling = drafter_of(folder, target, family_dirs), SamplingParams(max_tokens=10)
    found = output_tokens(speculative_decode(target, drafter, PROMPTS, 3, sampling))
    assert found == output_tokens(decode(target, PROMPTS, sampling))
    model: Any = build("llama")
    plain = PlainHead.of(folder, model.get_input_embeddings().weight.detach())
    ends = [len(p) + len(f) for p, f in zip(PROMPTS, found, strict=True)]
    for texts, draft in drafter.seen:
        for row, text in enumerate(texts):
            if len(text) == ends[row]:
                continue  # a finished row: its drafts are ignored
            with torch.no_grad():
                states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
            states = torch.cat([states[i][0] for i in (1, 2, 4)], -1)
            written = list(text)
            for step, token in enumerate(draft.ids[row].tolist()):
                logits = plain.chain(written, states, len(text) - 2, step + 1)[-1]
                assert token == plain.ids[logits.argmax()]
                written.append(token)


def test_compiled_passes_keep_the_states_of_eager_ones(family_dirs):
    """Rows of unequal lengths, a wide pass, a narrow one and a token tree."""
    eager = llama.load(family_dirs["qwen3"], torch.float32)
    ids = torch.randint(3, 300, (2, 30), generator=torch.Generator().manual_seed(0))
    tree, found = Tree.from_parents([0, 0, 1, 2]), []
    for model in (eager, NativeLlama(eager)):
        cache = model.new_cache(2, 40)
        cache.layer_states = LayerStates((0, 2, 5), torch.zeros(2, 40, 3 * 64))
        model.forward(ids[:, :20], cache)
        cache.used = [20, 12]
        model.forward(ids[:, 20:24], cache)
        model.forward(ids[:, 24:29], cache, tree=tree)
        cache.keep(0, 25, [1, 3])
        found.append(cache.layer_states.states)
    assert_rounds(found[1], found[0])
    assert found[0][0, :27].any(-1).all()


def scored(pair, pairs, sampling):
    return score_chains(*pair, pairs, 307, sampling, 5)


@pytest.mark.parametrize("k", [1, 3, 5])
def test_replay_expects_what_greedy_decoding_counts(near_head, k):
    """The texts have acceptances of every length."""
    check_greedy_replay(near_head[0], EagleDrafter(*near_head), partial(scored, near_head), k)


def test_sampled_replay_expects_what_sampling_counts(near_head):
    """Over many texts, within five standard errors; a head that never went on from its own states is another one."""
    sampling = SamplingParams(max_tokens=24, temperature=0.9)
    score = partial(scored, near_head)
    found, control = replay_errors(near_head[0], EagleDrafter(*near_head), score, sampling, 4, 160)
    assert found < 5 < control
