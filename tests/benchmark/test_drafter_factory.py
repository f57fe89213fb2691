"""--drafter: what is asked for is checked before anything is loaded, and built as asked."""

import inspect
import time
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from draftlab.benchmark.drafter_factory import KINDS, OWN_ENGINE, DrafterFactory, check_rule, check_target, parse
from draftlab.benchmark.run import DEFAULT_RULE
from draftlab.benchmark.throughput import PLAIN, measure_throughput
from draftlab.commands.measure import score
from draftlab.engine.drafters import medusa
from draftlab.engine.drafters.tree import TreeDrafter
from draftlab.engine.generate import Drafter, decode, output_tokens, speculative_decode
from draftlab.engine.rejection_rules import RULES, match
from draftlab.errors import UserError
from draftlab.model import llama
from draftlab.model.decoder import Decoder
from draftlab.model.hf_decoder import HFDecoder
from draftlab.sampling import SamplingParams

PROMPTS = [[0, 17, 44, 101, 9], [0, 5, 250, 31, 66]]
ASKED = [
    "ngram:order=2,tokens=500",
    "lookup:longest=2",
    "model",
    "fallback",
    "staged:tokens=500,count=1",
    "unsure:below=0.5",
    "entropy",
    "skip",
    "skip:layers=0+2",
    "tree:nodes=3",
    "tree:widths=2x1",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"def part_{i}(line):\n    return [int(x) for x in line.split({i})]\n" * 12)
    return folder


@pytest.fixture(scope="module")
def shop(family_dirs: dict[str, Path], corpus: Path) -> DrafterFactory:
    def load(path: Path) -> llama.Llama:
        return llama.load(path, torch.float32)

    place = family_dirs["llama"]
    return DrafterFactory(
        load(place), place, load, family_dirs["qwen3"], data=str(corpus), sampling=SamplingParams(max_tokens=12),
        ks=[2], mode="eager", clock=time.process_time,
    )  # fmt: skip


@pytest.fixture(scope="module")
def heads(family_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A --drafter with two heads."""
    folder, generator = tmp_path_factory.mktemp("heads"), torch.Generator().manual_seed(0)
    weights = {name: torch.randn(64, 64, generator=generator) * 0.05 for name in "ab"}
    medusa.write(folder, weights, family_dirs["llama"])
    return f"medusa:heads={folder}"


def test_every_drafter_decodes_what_the_target_would(shop, heads, monkeypatch):
    monkeypatch.setattr("draftlab.benchmark.drafter_factory.CALIBRATION", (2, 12, 10))
    monkeypatch.setattr("draftlab.benchmark.drafter_factory.PASSES", 3)
    ways = {text: shop.build(parse(text)) for text in [*ASKED, heads]}
    assert {parse(text).kind for text in ways} == set(KINDS)
    found = measure_throughput(
        shop.target, {}, PROMPTS, ks=[], sampling=SamplingParams(max_tokens=12), repeats=1, advance=lambda done: None,
        drafters={name: (way.drafter, way.ks) for name, way in ways.items()},
    )  # fmt: skip
    assert {name for name, _ in found.tokens} == {"", *ways}
    assert all(tokens == found.tokens[PLAIN] for tokens in found.tokens.values())


def test_a_tree_drafts_all_its_tokens_whatever_k_is(shop):
    way = shop.build(parse("tree:widths=2x2,siblings=distinct"))
    assert way.ks == [6]
    assert isinstance(way.drafter, TreeDrafter)
    assert way.drafter.siblings == "distinct"


def test_no_more_tokens_are_drafted_than_there_are_heads(shop, heads, monkeypatch):
    monkeypatch.setattr(shop, "ks", [1, 2, 3])
    assert shop.build(parse(heads)).ks == [1, 2]
    monkeypatch.setattr(shop, "ks", [3])
    with pytest.raises(UserError, match="2 heads draft at most 2 tokens"):
        shop.build(parse(heads))


def test_left_out_layers_are_left_out(shop):
    way = shop.build(parse("skip:layers=0+3"))
    assert way.model is not None
    assert way.model.shape.layers == 2


def test_a_rule_of_ones_choice_is_the_one_that_verifies(shop):
    """By the match rule, with the same draws, sampling differs from Leviathan's."""
    found = [
        measure_throughput(
            shop.target, {}, PROMPTS, ks=[], sampling=SamplingParams(max_tokens=12, temperature=1.0), repeats=1,
            advance=lambda done: None, drafters={"model": (shop.build(parse("model")).drafter, [3])}, rule=rule,
        ).tokens["model", 3]
        for rule in (None, None, match)
    ]  # fmt: skip
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ngrm", "did you mean 'ngram'"),
        ("ngram:ordr=3", "did you mean 'order'"),
        ("ngram:order=three", "want a whole number"),
        ("ngram:order=1", "at least 2"),
        ("unsure:below=much", "want a number"),
        ("tree:siblings=some", "want top, sampled, distinct"),
        ("tree:widths=2,2", "no option '2'"),
        ("tree:widths=2y2", "numbers as 2x1"),
        ("skip:layers=a", "numbers as 2\\+1"),
        ("staged:by=magic", "want ngram or lookup"),
        ("unsure:below=7", "below is 7.0; want 0 to 1"),
        ("unsure:below=nan", "want 0 to 1"),
        ("entropy:above=-1", "want at least 0"),
        ("tree:widths=0x2", "widths from 1 on"),
        ("tree:widths=200x200", "at most 256 tokens"),
        ("tree:nodes=4000", "want 1 to 256"),
        ("skip:layers=0+0", "each once, in order"),
    ],
)
def test_what_cannot_be_meant_is_said_in_one_line(text, words):
    with pytest.raises(UserError, match=words):
        parse(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("skip:layers=0+9", "layers are 0\\+9; the target has 0 to 4"),
        ("ngram:order=9", "contexts of 8 tokens of 307 do not fit 64 bits"),
        ("staged:order=9", "take a smaller order"),
    ],
)
def test_what_does_not_fit_the_target_is_said_before_it_is_loaded(text, words):
    with pytest.raises(UserError, match=words):
        check_target(parse(text), layers=5, vocab=307)


@pytest.mark.parametrize("text", ["skip:layers=0", "tree:widths=2", "medusa:heads=x"])
def test_what_a_target_of_transformers_cannot_do_is_refused(text, shop):
    with pytest.raises(UserError, match="needs a target that the engine itself runs"):
        check_target(parse(text), layers=None, vocab=307)


def test_chains_are_drafted_for_and_by_models_of_transformers(shop, family_dirs):
    """OPT, which llama.py does not know, of the same vocabulary as target, and as draft beside lookup."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"vocab_size": 307, "hidden_size": 48, "ffn_dim": 96, "num_hidden_layers": 2}
    opt = OPTForCausalLM(OPTConfig(**sizes, num_attention_heads=4, word_embed_proj_dim=48))
    hosted, place = HFDecoder(opt.eval()), family_dirs["llama"]

    def built(target: Decoder, draft: Decoder) -> dict[str, Drafter]:
        work = DrafterFactory(
            target, place, lambda path: draft, place, data=shop.data, sampling=SamplingParams(max_tokens=12), ks=[2],
            mode="eager", clock=time.process_time,
        )  # fmt: skip
        with pytest.raises(UserError, match="transformers runs this one"):
            work.build(parse("tree:widths=2"))
        return {text: work.build(parse(text)).drafter for text in ASKED if parse(text).kind not in OWN_ENGINE}

    for target, draft in ((hosted, shop.target), (shop.target, hosted)):
        sampling = SamplingParams(max_tokens=12)
        expected = output_tokens(decode(target, PROMPTS[:1], sampling))
        for drafter in built(target, draft).values():
            assert output_tokens(speculative_decode(target, drafter, PROMPTS[:1], 2, sampling)) == expected


def test_a_corpus_that_is_too_short_is_refused(shop):
    with pytest.raises(UserError, match=r"2 tokens of .* hold no 4-gram; take more"):
        shop.build(parse("ngram:tokens=2"))


@pytest.mark.parametrize(
    ("text", "rule"),
    [("tree", "block"), ("tree:siblings=distinct", "k-sequential"), ("tree:siblings=top", "k-sequential")],
)
def test_a_rule_that_would_not_be_lossless_for_a_tree_is_refused(text, rule):
    with pytest.raises(UserError, match=f"--rule {rule} judges"):
        check_rule(parse(text), rule)
    for fits in ("rejection", "recursive", "match"):
        check_rule(parse(text), fits)


def test_the_command_offers_every_rule():
    offered = set(get_args(get_args(inspect.signature(score).parameters["rule"].annotation)[0]))
    assert offered == {DEFAULT_RULE, *RULES}
