"""The options and checks of the plug-in's drafters. With greedy decoding, the text is that of the target alone."""

import itertools
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.built import PROMPTS, built, check_output, facts
from helpers.errors import raises_option
from transformers import OPTConfig, OPTForCausalLM

from draftlab.commands import COMMANDS
from draftlab.commands.settings.score import ScoreConfig
from draftlab.drafters.base import DRAFTERS, parse_drafter
from draftlab.drafters.context import DrafterContext
from draftlab.engine.generate import decode, output_tokens, speculative_decode
from draftlab.errors import UserError
from draftlab.model.hf_decoder import HFDecoder
from draftlab.registry import RULES
from draftlab.sampling import SamplingParams
from draftlab.scoring.replay import read_replay
from draftlab_research import calibration
from draftlab_research.drafting import medusa
from draftlab_research.drafting.parallel_tree import ParallelTreeDrafter
from draftlab_research.drafting.tree import TreeDrafter, node_depths

CHAINS = [
    "ngram:order=2,tokens=500",
    "cascade:tokens=500,inner_tokens=1",
    "confidence-stop:threshold=0.5",
    "entropy-stop",
]
OWN_ENGINE = [
    "layer-skip",
    "layer-skip:layers=0+2",
    "tree:nodes=3",
    "tree:widths=2x1",
    "tree:topk=2,depth=2,nodes=4",
]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(calibration, "CALIBRATION", (2, 12, 10))
    monkeypatch.setattr(calibration, "PASSES", 3)


@pytest.fixture(scope="module")
def heads(family_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a value of --drafter for two Medusa heads with random weights."""
    folder, generator = tmp_path_factory.mktemp("heads"), torch.Generator().manual_seed(0)
    weights = {name: torch.randn(64, 64, generator=generator) * 0.05 for name in "ab"}
    medusa.write(folder, weights, family_dirs["llama"])
    return f"medusa:heads={folder}"


def test_every_drafter_decodes_what_the_target_would(
    context, heads, eagle_head, peagle_head, dspark_head, parallel_draft, stored
):
    asked = [
        *CHAINS,
        *OWN_ENGINE,
        heads,
        f"adaptive:outputs={stored}",
        f"adaptive:heads={eagle_head}",
        f"peagle:heads={peagle_head}",
        f"dspark:heads={dspark_head}",
        f"dspark:heads={dspark_head},least_confidence=0.3",
    ]
    asked += [f"parallel-tree:draft={parallel_draft},{size}" for size in ("nodes=3", "widths=2x1")]
    asked += [f"eagle-tree:heads={eagle_head},{shape}" for shape in ("widths=2x1", "topk=2,depth=2,nodes=4")]
    assert {parse_drafter(text).kind for text in asked} == set(DRAFTERS.plugins)
    check_output(context, {text: built(context, text) for text in asked})


def test_drafters_that_learn_from_what_the_target_wrote_decode_as_it_does(context, stored, parallel_draft, monkeypatch):
    monkeypatch.setattr(context, "data", "nothing that could be read")
    kinds = (
        "ngram:order=2,",
        "adaptive:",
        "tree:nodes=3,",
        "layer-skip:",
        "cascade:order=2,inner_tokens=1,",
    )
    kinds += (f"parallel-tree:draft={parallel_draft},nodes=3,",)
    ways = {kind: built(context, f"{kind}outputs={stored}") for kind in kinds}
    check_output(context, ways)
    again = built(context, str(ways["layer-skip:"].learnt))
    assert again.learnt is None
    drafts = []
    for drafter in (ways["layer-skip:"].drafter, again.drafter):
        drafter.reset(2, 32)
        drafts.append(drafter.propose(PROMPTS, 2, SamplingParams(), torch.zeros(2, 2)))
    assert torch.equal(drafts[0].ids, drafts[1].ids)


def test_a_tree_drafts_all_its_tokens_whatever_k_is(context):
    way = built(context, "tree:widths=2x2,siblings=distinct")
    assert way.ks == [6]
    assert isinstance(way.drafter, TreeDrafter)
    assert way.drafter.siblings == "distinct"


def test_the_best_tree_over_offsets_is_that_of_the_targets_own_texts(
    context, stored, parallel_draft, monkeypatch, capsys
):
    """The draft has the target's weights, so its most probable first token is always right, and its second never."""
    clock = itertools.count()
    # every pass takes the same time, so only the number of accepted tokens matters
    monkeypatch.setattr(context, "clock", lambda: float(next(clock)))
    way = built(context, f"parallel-tree:draft={parallel_draft},nodes=9,outputs={stored}")
    assert isinstance(way.drafter, ParallelTreeDrafter)
    assert way.drafter.parents.count(0) == 1
    assert max(node_depths(way.drafter.parents)) <= 4  # number of offsets that the draft was trained for
    assert way.ks == [len(way.drafter.parents)]
    assert "and 3: 1.00, 0.00, 0.00" in capsys.readouterr().err


def test_no_more_tokens_are_drafted_than_there_are_heads(context, heads, monkeypatch):
    monkeypatch.setattr(context, "ks", [1, 2, 3])
    assert built(context, heads).ks == [1, 2]
    monkeypatch.setattr(context, "ks", [3])
    with pytest.raises(UserError, match=r"--k 3: .*medusa"):
        built(context, heads)


@pytest.mark.parametrize("drafts", ["draft", "heads"])
def test_what_calibrates_a_policy_is_an_input(drafts):
    spec = parse_drafter(f"adaptive:{drafts}=H,outputs=S")
    assert [each.name for each in spec.inputs()] == ["H", "S"]


def test_left_out_layers_are_left_out(context):
    way = built(context, "layer-skip:layers=0+3")
    assert way.model is not None
    assert way.model.shape.layers == 2


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("tree:siblings=some", "siblings"),
        ("tree:widths=2y2", "widths"),
        ("tree:widths=2x1,nodes=4", "nodes"),
        ("tree:widths=200x200", "widths"),
        ("layer-skip:layers=0+0", "layers"),
        ("cascade:inner=latest-lookup,order=3", "order"),
        ("confidence-stop:threshold=nan", "threshold"),
        ("parallel-tree", "nodes"),
        ("medusa", "heads"),
    ],
)
def test_an_error_in_a_drafter_names_its_option(text, option):
    with raises_option(f"--drafter {text}", option):
        parse_drafter(text)


@pytest.mark.parametrize(("text", "words"), [("layer-skip:layers=0+9", "0 to 4"), ("cascade:order=9", "order=9")])
def test_what_does_not_fit_the_target_is_said_before_it_is_loaded(text, words):
    with pytest.raises(UserError, match=f"--drafter {re.escape(text)}: .*{words}"):
        parse_drafter(text).check(facts())


@pytest.mark.parametrize(
    "text",
    [
        "layer-skip:layers=0",
        "tree:widths=2",
        "medusa:heads=x",
        "eagle-tree:heads=x,topk=2",
        "adaptive:outputs=x",
    ],
)
def test_what_a_target_of_transformers_cannot_do_is_refused(text):
    with pytest.raises(UserError, match=f"--drafter {text} works only"):
        parse_drafter(text).check(facts(layers=None))


def test_a_tree_of_heads_has_a_level_for_each_head_at_most(context, heads):
    way = built(context, f"{heads},widths=2x2")
    assert (way.ks, way.drafter.parents) == ([6], (0, 0, 1, 1, 2, 2))
    with pytest.raises(UserError, match="fewer widths"):
        built(context, f"{heads},widths=2x2x1")
    with pytest.raises(UserError, match="siblings: works only with widths"):
        parse_drafter(f"{heads},siblings=top")


def test_chains_are_drafted_for_and_by_models_of_transformers(context, family_dirs):
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "vocab_size": 307,
        "hidden_size": 48,
        "ffn_dim": 96,
        "num_hidden_layers": 2,
    }
    opt = OPTForCausalLM(OPTConfig(**sizes, num_attention_heads=4, word_embed_proj_dim=48))
    hosted, place = HFDecoder(opt.eval()), family_dirs["llama"]
    for target, draft in ((hosted, context.target), (context.target, hosted)):
        work = DrafterContext(
            target,
            place,
            lambda path, draft=draft: draft,
            place,
            data=context.data,
            sampling=SamplingParams(max_tokens=12),
            ks=[2],
            mode="eager",
            device=torch.device("cpu"),
            clock=time.process_time,
        )
        with pytest.raises(UserError, match="--drafter tree:widths=2 works only"):
            built(work, "tree:widths=2")
        sampling = SamplingParams(max_tokens=12)
        expected = output_tokens(decode(target, PROMPTS[:1], sampling))
        for text in CHAINS:
            drafter = built(work, text).drafter
            assert output_tokens(speculative_decode(target, drafter, PROMPTS[:1], 2, sampling)) == expected


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("tree", "block"),
        ("tree:siblings=distinct", "k-sequential"),
        ("tree:siblings=top", "k-sequential"),
    ],
)
def test_a_rule_that_would_not_be_lossless_for_a_tree_is_refused(text, rule):
    with pytest.raises(UserError, match=f"--rule {rule} .*--drafter {text}"):
        parse_drafter(text).check(facts(rule=rule))
    for fits in ("rejection", "recursive", "match"):
        parse_drafter(text).check(facts(rule=fits))


def test_the_rules_are_offered():
    assert {"recursive", "k-sequential"} <= set(RULES.names())
    ScoreConfig.build(
        {
            "target": "tiny",
            "draft": ["tiny"],
            "data": "stdlib",
            "rule": "recursive",
            "temperature": 1.0,
        }
    )


def test_layers_are_replayed_and_what_cannot_be_replayed_is_refused(family_dirs, stored, tmp_path):
    """With all layers, the draft equals the target, so replay accepts all tokens of greedy texts."""
    asked: dict[str, Any] = {
        "directory": stored,
        "target": str(family_dirs["llama"]),
        "dtype": "float32",
        "k": "2",
    }
    every, some = "layer-skip:layers=0+1+2+3+4", "layer-skip:layers=0+4"
    COMMANDS["replay"](**asked, drafter=[every, some], out=tmp_path / "replay")
    certain, less = (read_replay(tmp_path / "replay" / name) for name in (every, some))
    assert min(map(np.min, certain.chances())) == 1
    assert np.concatenate(less.chances()).mean() < 1
    for drafter in (
        "tree:draft=tiny,widths=2",
        "confidence-stop:draft=tiny",
        "layer-skip",
        "cascade:draft=tiny",
    ):
        assert not parse_drafter(drafter).replays
    with pytest.raises(UserError, match="--drafter layer-skip cannot be replayed"):
        COMMANDS["replay"](**asked, drafter=["layer-skip"], out=tmp_path / "refused")
