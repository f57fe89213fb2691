"""--drafter: options are checked before anything is loaded, and drafters are built from them."""

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.built import PROMPTS, built, check_devices, check_output
from helpers.errors import raises_option
from transformers import OPTConfig, OPTForCausalLM

import draftlab
from draftlab.commands import COMMANDS
from draftlab.drafters.base import DRAFTERS, parse_drafter
from draftlab.drafters.context import DrafterContext
from draftlab.engine.generate import Drafter, ModelDrafter, decode, output_tokens, speculative_decode
from draftlab.engine.verify import match
from draftlab.errors import UserError
from draftlab.model.decoder import CPU, Decoder
from draftlab.model.hf_decoder import HFDecoder
from draftlab.results.score import read_score
from draftlab.sampling import SamplingParams
from draftlab.scoring.throughput import measure_throughput
from draftlab.training.students.base import STUDENTS

ASKED = [
    "prompt-lookup:prompt_lookup_max=2",
    "latest-lookup",
    "ngram-gpu",
    "ngram-simple:size_n=2",
    "model",
    "fallback",
]


def test_every_drafter_decodes_what_the_target_would(context, eagle_head, dflash_head, parallel_draft, stored):
    asked = [*ASKED, "fallback:draft_tokens=1,min_match=3x1x5"]
    asked += [
        f"parallel:draft={parallel_draft}",
        f"eagle:heads={eagle_head}",
        f"dflash:heads={dflash_head}",
    ]
    asked += [f"eagle:heads={eagle_head},prompt_lookup_max=3,draft_tokens=1"]
    asked += ["suffix", f"suffix:outputs={stored},max_spec_factor=2"]
    assert {parse_drafter(text).kind for text in asked} == set(DRAFTERS.builtin)
    check_output(context, {text: built(context, text) for text in asked})


def test_a_drafter_that_limits_k_leaves_larger_values_out(context, dflash_head):
    text = f"dflash:heads={dflash_head}"
    assert built(replace(context, ks=[1, 4, 9]), text).ks == [1, 4]
    with raises_option("--k 8,9", text, 4):
        built(replace(context, ks=[8, 9]), text)


def test_a_drafter_of_no_k_is_refused(context):
    """A plug-in may choose the values of K itself."""
    with raises_option("--k"):
        context.run(ModelDrafter(context.target), ks=[])


def test_a_score_predicts_only_the_values_of_k_that_a_head_drafts(family_dirs, dflash_head, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def parse(line):"}\n{"prompt": "return [int(part)"}\n')
    asked: dict[str, Any] = {"k": "1,9", "prompt_file": prompts, "max_new_tokens": 12, "dtype": "float32"}
    asked |= {"mode": "eager", "device": "cpu", "out": tmp_path / "out"}
    COMMANDS["score"](target=str(family_dirs["llama"]), drafter=[f"dflash:heads={dflash_head}"], **asked)
    (file,) = (tmp_path / "out").glob("*/score.json")
    assert set(read_score(file).speculative) == {1}


@pytest.mark.parametrize(("decorator", "registry"), [("drafter", DRAFTERS), ("student", STUDENTS)])
def test_the_registry_lists_every_kind_with_its_module(decorator, registry):
    """Names are listed without an import, so a module that the list lacks would never be found."""
    root = Path(draftlab.__file__).parent
    found = {
        name: ".".join(file.relative_to(root.parent).with_suffix("").parts)
        for file in root.rglob("*.py")
        for name in re.findall(rf'^@{decorator}\("([\w-]+)"', file.read_text(), re.MULTILINE)
    }
    assert found == dict(registry.builtin)


def test_a_rule_of_ones_choice_is_the_one_that_verifies(context):
    """With the same draws, the match rule samples other tokens than Leviathan's rule."""
    found = [
        measure_throughput(
            context.target,
            {"model": (built(context, "model").drafter, [3])},
            PROMPTS,
            sampling=SamplingParams(max_tokens=12, temperature=1.0),
            repeats=1,
            advance=lambda done: None,
            rule=rule,
        ).tokens["model", 3]
        for rule in (None, None, match)
    ]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("sufix", "did you mean 'suffix'"),
        ("suffix:max_tree_dept=3", "did you mean 'max_tree_depth'"),
        ("suffix:max_tree_depth=three", "max_tree_depth: .*'three'"),
        ("suffix:max_tree_depth=1", "max_tree_depth: .*2"),
        ("fallback:min_match=2x1", "min_match"),
        ("eagle:heads=x,draft_tokens=2", "draft_tokens: .*prompt_lookup_max"),
        ("eagle", "heads"),
    ],
)
def test_an_error_in_a_drafter_names_its_option(text, named):
    with pytest.raises(UserError, match=named):
        parse_drafter(text)


def test_chains_are_drafted_for_and_by_models_of_transformers(context, family_dirs):
    """OPT, which llama.py does not know, of the same vocabulary as target, and as draft beside lookup."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "vocab_size": 307,
        "hidden_size": 48,
        "ffn_dim": 96,
        "num_hidden_layers": 2,
    }
    opt = OPTForCausalLM(OPTConfig(**sizes, num_attention_heads=4, word_embed_proj_dim=48))
    hosted, place = HFDecoder(opt.eval()), family_dirs["llama"]

    def drafters(target: Decoder, draft: Decoder) -> dict[str, Drafter]:
        work = DrafterContext(
            target,
            place,
            lambda path: draft,
            place,
            data=context.data,
            sampling=SamplingParams(max_tokens=12),
            ks=[2],
            mode="eager",
            clock=time.process_time,
            device=CPU,
        )
        return {text: built(work, text).drafter for text in ASKED}

    for target, draft in ((hosted, context.target), (context.target, hosted)):
        sampling = SamplingParams(max_tokens=12)
        expected = output_tokens(decode(target, PROMPTS[:1], sampling))
        for drafter in drafters(target, draft).values():
            assert output_tokens(speculative_decode(target, drafter, PROMPTS[:1], 2, sampling)) == expected


def test_drafts_and_heads_keep_their_device_beside_a_target_of_transformers(
    context, family_dirs, parallel_draft, eagle_head, dflash_head
):
    """A target that accelerate spreads is read on the CPU; drafts and heads are elsewhere."""
    asked = ["model", "fallback", f"parallel:draft={parallel_draft}", f"eagle:heads={eagle_head}"]
    check_devices(context, family_dirs, [*asked, f"dflash:heads={dflash_head}"])


def test_a_drafter_says_what_it_reads():
    reads = {
        "suffix:outputs=store": "store",
        "eagle:heads=head": "head",
        "prompt-lookup": None,
        "model:draft=tiny": "tiny",
    }
    for text, wanted in reads.items():
        names = [each.name for each in parse_drafter(text).inputs()]
        assert names == ([] if wanted is None else [wanted]), text
