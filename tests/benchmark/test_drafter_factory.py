"""--drafter: options are checked before anything is loaded, and drafters are built from them."""

import itertools
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from draftlab.benchmark.drafter_factory import DrafterFactory, check_rule, check_target
from draftlab.benchmark.throughput import PLAIN, measure_throughput
from draftlab.commands import COMMANDS
from draftlab.config.drafters import DRAFTERS, parse_drafter
from draftlab.config.score import RuleName
from draftlab.engine.drafters import medusa
from draftlab.engine.drafters.parallel import ParallelTreeDrafter
from draftlab.engine.drafters.tree import TreeDrafter, node_depths
from draftlab.engine.generate import Drafter, decode, output_tokens, speculative_decode
from draftlab.engine.rejection_rules import RULES, match
from draftlab.errors import UserError
from draftlab.model import decoder, eagle
from draftlab.model.decoder import Decoder
from draftlab.model.eagle import Head
from draftlab.model.hf_decoder import HFDecoder
from draftlab.sampling import SamplingParams

PROMPTS = [[0, 17, 44, 101, 9], [0, 5, 250, 31, 66]]
ASKED = [
    "ngram:order=2,tokens=500",
    "prompt-lookup:prompt_lookup_max=2",
    "model",
    "fallback",
    "cascade:tokens=500,inner_tokens=1",
    "confidence-stop:threshold=0.5",
    "entropy-stop",
    "layer-skip",
    "layer-skip:layers=0+2",
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
    def load(path: Path) -> Decoder:
        return decoder.load(path, torch.float32, torch.device("cpu"))

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


@pytest.fixture(scope="module")
def parallel_draft(family_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A --drafter of a parallel draft that was trained for four tokens."""
    folder = tmp_path_factory.mktemp("parallel") / "draft"
    shutil.copytree(family_dirs["llama"], folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pard_token": 2, "pard_offsets": 4}))
    return f"parallel:draft={folder}"


@pytest.fixture(scope="module")
def eagle_head(family_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A --drafter with a random EAGLE-3 head."""
    folder, generator = tmp_path_factory.mktemp("eagle"), torch.Generator().manual_seed(0)
    config = eagle.head_config(family_dirs["llama"], None, 100)
    weights = {name: 0.1 * torch.randn(size, generator=generator) for name, size in config.sizes().items()}
    head = Head(config=config, weights=weights, ids=torch.arange(100), embedding=None)
    eagle.write(folder, head, "native", target=family_dirs["llama"], k=2)
    return f"eagle:heads={folder}"


def test_every_drafter_decodes_what_the_target_would(shop, heads, eagle_head, parallel_draft, monkeypatch):
    monkeypatch.setattr("draftlab.benchmark.drafter_factory.CALIBRATION", (2, 12, 10))
    monkeypatch.setattr("draftlab.benchmark.drafter_factory.PASSES", 3)
    offsets = [parallel_draft, f"{parallel_draft},nodes=3", f"{parallel_draft},widths=2x1"]
    ways = {text: shop.build(parse_drafter(text)) for text in [*ASKED, *offsets, heads, eagle_head]}
    assert {parse_drafter(text).kind for text in ways} == set(DRAFTERS)
    found = measure_throughput(
        shop.target, {}, PROMPTS, ks=[], sampling=SamplingParams(max_tokens=12), repeats=1, advance=lambda done: None,
        drafters={name: (way.drafter, way.ks) for name, way in ways.items()},
    )  # fmt: skip
    assert {name for name, _ in found.tokens} == {"", *ways}
    assert all(tokens == found.tokens[PLAIN] for tokens in found.tokens.values())


@pytest.fixture(scope="module")
def stored(family_dirs: dict[str, Path], corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the target wrote."""
    out = tmp_path_factory.mktemp("stored") / "answers"
    sizes: dict[str, Any] = {"num_prompts": 6, "prompt_tokens": 12, "max_new_tokens": 24}
    COMMANDS["outputs build"](
        use="replay", target=str(family_dirs["llama"]), data=str(corpus), out=out, device="cpu", **sizes
    )
    return out


def test_drafters_that_learn_from_what_the_target_wrote_decode_as_it_does(shop, stored, parallel_draft, monkeypatch):
    monkeypatch.setattr("draftlab.benchmark.drafter_factory.PASSES", 3)
    monkeypatch.setattr(shop, "data", "nothing that could be read")
    kinds = ("fallback:", "tree:nodes=3,", "layer-skip:", "ngram:order=2,", "cascade:order=2,inner_tokens=1,")
    kinds += (f"{parallel_draft},nodes=3,",)
    ways = {kind: shop.build(parse_drafter(f"{kind}outputs={stored}")) for kind in kinds}
    found = measure_throughput(
        shop.target, {}, PROMPTS, ks=[], sampling=SamplingParams(max_tokens=12), repeats=1, advance=lambda done: None,
        drafters={name: (way.drafter, way.ks) for name, way in ways.items()},
    )  # fmt: skip
    assert all(tokens == found.tokens[PLAIN] for tokens in found.tokens.values())
    for kind in ("fallback:", "layer-skip:"):
        assert ways[kind].learnt is not None
        again = shop.build(parse_drafter(str(ways[kind].learnt)))
        assert again.learnt is None
        drafts = []
        for drafter in (ways[kind].drafter, again.drafter):
            drafter.reset(2, 32)
            drafts.append(drafter.propose(PROMPTS, 2, SamplingParams(), torch.zeros(2, 2)))
        assert torch.equal(drafts[0].ids, drafts[1].ids)


def test_a_tree_drafts_all_its_tokens_whatever_k_is(shop):
    way = shop.build(parse_drafter("tree:widths=2x2,siblings=distinct"))
    assert way.ks == [6]
    assert isinstance(way.drafter, TreeDrafter)
    assert way.drafter.siblings == "distinct"


def test_the_best_tree_over_offsets_is_that_of_the_targets_own_texts(shop, stored, parallel_draft, monkeypatch, capsys):
    """The draft has the target's weights, so its first offset is always right, and a second child is worth nothing."""
    clock = itertools.count()
    monkeypatch.setattr(shop, "clock", lambda: float(next(clock)))  # every pass takes as long: only tokens count
    way = shop.build(parse_drafter(f"{parallel_draft},nodes=9,outputs={stored}"))
    assert isinstance(way.drafter, ParallelTreeDrafter)
    assert way.drafter.parents.count(0) == 1
    assert max(node_depths(way.drafter.parents)) <= 4  # offsets that it was trained for
    assert way.ks == [len(way.drafter.parents)]
    assert "by rank are right 1.00, 0.00, 0.00" in capsys.readouterr().err


def test_no_more_tokens_are_drafted_than_there_are_heads(shop, heads, monkeypatch):
    monkeypatch.setattr(shop, "ks", [1, 2, 3])
    assert shop.build(parse_drafter(heads)).ks == [1, 2]
    monkeypatch.setattr(shop, "ks", [3])
    with pytest.raises(UserError, match="2 tokens; lower --k"):
        shop.build(parse_drafter(heads))


def test_left_out_layers_are_left_out(shop):
    way = shop.build(parse_drafter("layer-skip:layers=0+3"))
    assert way.model is not None
    assert way.model.shape.layers == 2


def test_a_rule_of_ones_choice_is_the_one_that_verifies(shop):
    """By the match rule, with the same draws, sampling differs from Leviathan's."""
    found = [
        measure_throughput(
            shop.target, {}, PROMPTS, ks=[], sampling=SamplingParams(max_tokens=12, temperature=1.0), repeats=1,
            advance=lambda done: None, drafters={"model": (shop.build(parse_drafter("model")).drafter, [3])}, rule=rule,
        ).tokens["model", 3]
        for rule in (None, None, match)
    ]  # fmt: skip
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ngrm", "did you mean 'ngram'"),
        ("ngram:ordr=3", "did you mean 'order'"),
        ("ngram:order=three", "order: .*'three'"),
        ("ngram:order=1", "order: .*2"),
        ("confidence-stop:threshold=much", "threshold: .*'much'"),
        ("tree:siblings=some", "siblings: .*'top', 'sampled' or 'distinct'"),
        ("tree:widths=2,2", "no option '2'"),
        ("tree:widths=2y2", "widths: .*'2y2'"),
        ("tree:widths=2x1,nodes=4", "nodes"),
        ("tree:widths=2x1,outputs=store", "widths decide"),
        ("layer-skip:layers=0+1,outputs=store", "want one"),
        ("ngram:data=text,outputs=store", "want one"),
        ("fallback:min_match=2x1x3,outputs=store", "min_match: outputs teach"),
        ("fallback:draft_tokens=2,outputs=store", "draft_tokens: outputs teach"),
        ("fallback:min_match=2x1", "want 3 numbers"),
        ("cascade:inner=prompt-lookup,outputs=store", "only for inner=ngram"),
        ("layer-skip:layers=a", "layers: .*'a'"),
        ("cascade:inner=magic", "inner: .*'ngram' or 'prompt-lookup'"),
        ("cascade:inner=prompt-lookup,order=3", "order"),
        ("confidence-stop:threshold=7", "threshold: .*1"),
        ("confidence-stop:threshold=nan", "threshold"),
        ("entropy-stop:threshold=-1", "threshold: .*0"),
        ("tree:widths=0x2", "widths"),
        ("tree:widths=200x200", "widths: .*256"),
        ("tree:nodes=4000", "nodes: .*256"),
        ("parallel:widths=2x1,nodes=4", "widths decide"),
        ("parallel:outputs=store", "outputs: only with a tree; add nodes"),
        ("eagle:heads=x,siblings=top", "siblings: only with widths"),
        ("eagle:heads=x,draft_tokens=2", "draft_tokens: only with prompt_lookup_max"),
        ("eagle:heads=x,prompt_lookup_max=8,widths=2x1", "copies are chains"),
        ("layer-skip:layers=0+0", "layers"),
        ("medusa", "heads"),
        ("eagle", "heads"),
    ],
)
def test_an_error_in_a_drafter_names_its_option(text, named):
    with pytest.raises(UserError, match=f"--drafter {re.escape(text)}: .*{named}"):
        parse_drafter(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [("layer-skip:layers=0+9", "0 to 4"), ("ngram:order=9", "8 tokens of 307"), ("cascade:order=9", "8 tokens of 307")],
)
def test_what_does_not_fit_the_target_is_said_before_it_is_loaded(text, words):
    with pytest.raises(UserError, match=f"--drafter {re.escape(text)}: .*{words}"):
        check_target(parse_drafter(text), layers=5, vocab=307)


@pytest.mark.parametrize(
    "text", ["layer-skip:layers=0", "tree:widths=2", "medusa:heads=x", "eagle:heads=x", "fallback:outputs=x"]
)
def test_what_a_target_of_transformers_cannot_do_is_refused(text, shop):
    with pytest.raises(UserError, match=f"--drafter {text} does not work"):
        check_target(parse_drafter(text), layers=None, vocab=307)


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
        with pytest.raises(UserError, match="--drafter tree:widths=2 does not work"):
            work.build(parse_drafter("tree:widths=2"))
        return {text: work.build(parse_drafter(text)).drafter for text in ASKED if not parse_drafter(text).own_engine}

    for target, draft in ((hosted, shop.target), (shop.target, hosted)):
        sampling = SamplingParams(max_tokens=12)
        expected = output_tokens(decode(target, PROMPTS[:1], sampling))
        for drafter in built(target, draft).values():
            assert output_tokens(speculative_decode(target, drafter, PROMPTS[:1], 2, sampling)) == expected


def test_a_corpus_that_is_too_short_is_refused(shop):
    with pytest.raises(UserError, match=r"2 tokens of .* 4-gram"):
        shop.build(parse_drafter("ngram:tokens=2"))


@pytest.mark.parametrize(
    ("text", "rule"),
    [("tree", "block"), ("tree:siblings=distinct", "k-sequential"), ("tree:siblings=top", "k-sequential")],
)
def test_a_rule_that_would_not_be_lossless_for_a_tree_is_refused(text, rule):
    with pytest.raises(UserError, match=f"--rule {rule} .*--drafter {text}"):
        check_rule(parse_drafter(text), rule)
    for fits in ("rejection", "recursive", "match"):
        check_rule(parse_drafter(text), fits)


def test_the_command_offers_every_rule():
    assert set(get_args(RuleName)) == {"rejection", *RULES}
