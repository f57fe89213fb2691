"""Score and profile as typed: where models are placed, what is refused before anything is loaded, and which draft."""

import json
import re
import shutil

import pytest
import torch
from builders import build
from test_cli import SCORE, drafted, made, refused, space  # noqa: F401
from typed import call

from draftlab import workspace
from draftlab.model.checkpoint import read_config
from draftlab.model.hub import EMBEDDED
from draftlab.results.score import read_score, score_files

TASK = """
task: own
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}, cache_dir: cache}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]
"""
pytestmark = pytest.mark.usefixtures("space")


@pytest.fixture
def draft(drafted):  # noqa: F811
    return drafted / "runs/prune-2x32"


def test_a_target_that_is_spread_over_disk_and_memory_writes_the_same(space, draft):  # noqa: F811
    modules = ["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"]
    places = dict.fromkeys(modules, "cpu") | {f"model.layers.{i}": "disk" for i in range(1, 5)}
    (space / "map.json").write_text(json.dumps(places))
    (space / "rows.jsonl").write_text(json.dumps({"text": "def parse(line): return line"}))
    (space / "own.yaml").write_text(TASK)
    call(f"{SCORE} --tasks own.yaml --out here")
    call(f"{SCORE} --tasks own.yaml --out spread --device-map map.json")
    here, spread = (read_score(space / out / draft.name) for out in ("here", "spread"))
    models = (here.target, spread.target, spread.draft)
    assert [model.via_transformers for model in models] == [False, True, False]
    assert [g.tokens for g in spread.plain] == [g.tokens for g in here.plain]
    assert {k: spread.acceptance(k) for k in (1, 2)} == {k: here.acceptance(k) for k in (1, 2)}
    values = [[task.value for task in one.target.tasks] for one in (here, spread)]
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    result = call(f"{SCORE} --out x --device-map auto --mode native", code=1)
    assert "--device-map" in result.stderr


def test_a_model_that_does_not_fit_is_refused_before_it_is_made():
    said = refused("profile llama-65b --dtype bfloat16 --out x")
    assert "llama-65b" in said
    assert "--device-map" in said


def test_tokens_beyond_those_that_a_parallel_draft_was_trained_for_are_said_to_be_untrained(draft):
    config = read_config(draft)
    (draft / "config.json").write_text(json.dumps(config | {"pard_token": 2, "pard_offsets": 4}))
    asked = f"score --draft {draft} --num-prompts 4 --dry-run --k"
    assert "untrained" in call(f"{asked} 2,5").stderr
    assert "untrained" not in call(f"{asked} 2,4").stderr


def test_a_tokenizer_with_two_ids_exchanged_is_refused(space):  # noqa: F811
    shutil.copytree(EMBEDDED / "tiny", space / "other")
    tokenizer = json.loads((space / "other/tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (space / "other/tokenizer.json").write_text(json.dumps(tokenizer))
    said = refused("score --target tiny --data stdlib --out x --draft other")
    assert said.startswith("error: --draft")
    assert not (space / "x").exists()


def test_a_dry_run_does_not_mind_what_is_there(space, draft):  # noqa: F811
    (space / "here").mkdir()
    (space / "here" / "file").write_text("")
    assert re.search(r"\bhere\b", call(f"{SCORE} --out here --dry-run").stdout)
    assert "--force" in call(f"{SCORE} --out here", code=1).stderr


def test_a_mixture_is_scored_on_its_first_source(space, draft):  # noqa: F811
    here = workspace.load()
    workspace.write(here.model_copy(update={"data": f"{here.data}=0.7,stdlib=0.3"}))
    call(f"{SCORE} --out mixed")
    call(f"{SCORE} --data {here.data} --out first")
    mixed, first = (
        read_score(space / out / draft.name).conditions.prompts_sha256 for out in ("mixed", "first")
    )
    assert mixed == first


def test_a_draft_without_all_ids_of_the_tokenizer_is_refused(space, draft):  # noqa: F811
    build("llama", 3, vocab_size=150, num_hidden_layers=1).save_pretrained(space / "short")
    for file in draft.glob("tokenizer*"):
        shutil.copy(file, space / "short")
    assert "short" in refused(f"{SCORE} --draft short --dry-run")


def test_answers_that_end_at_once_are_refused_and_single_ones_said(space, draft):  # noqa: F811
    """A head of zeros writes id 0 always; as an end of text it is all that is written."""
    model = build("llama", 1)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.save_pretrained(space / "silent")
    for file in draft.glob("tokenizer*"):
        shutil.copy(file, space / "silent")
    config = read_config(space / "silent") | {"eos_token_id": [0, 1]}
    (space / "silent/config.json").write_text(json.dumps(config))
    result = call(f"{SCORE} --target silent --out x", code=1)
    assert re.search(r"^error: .*\b2 prompts\b", result.stderr, re.M)
    assert not (space / "x").exists()


@pytest.mark.parametrize(
    ("options", "target", "draft_weights", "other"),
    [
        ("", "float32", "float32", []),
        ("--int8 draft", "float32", "int8", ["int8"]),
        ("--int8 target", "int8", "float32", ["float32"]),
        ("--int8 both", "int8", "int8", ["float32"]),
    ],
)
def test_the_target_alone_is_timed_at_every_precision_of_the_run(
    space,  # noqa: F811
    draft,
    options,
    target,
    draft_weights,
    other,
):
    """The draft with other weights than the target's writes what the target writes with those that verify."""
    native = "--mode native --dtype float32 --drafter prompt-lookup --out x"
    call(f"{SCORE} --draft {draft} {native} {options}")
    scores = {score.draft.name: score for score in map(read_score, score_files([space / "x"]))}
    lookup = scores.pop("prompt-lookup")
    (model,) = scores.values()
    for score, weights in ((lookup, None), (model, draft_weights)):
        about = score.conditions
        assert (about.target_weights, about.draft_weights, about.dtype) == (
            target,
            weights,
            "float32",
        )
        assert list(score.other_plain) == other
        assert [g.prompt for g in score.plain] == [
            g.prompt for runs in score.other_plain.values() for g in runs
        ] or not other
        assert score.equal_texts == 1
