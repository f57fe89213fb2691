"""Score and profile as typed: where models are placed, what is refused before anything is loaded, and which draft."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from helpers.builders import PASS_ROUNDING, build
from helpers.commands import DISTILL, SCORE, drafted_fixture, made_fixture, refused, space_fixture  # noqa: F401
from helpers.small_files import copy_tokenizer, edit, write_rows
from helpers.typed import call
from transformers import AutoModelForCausalLM

from benchmarks.tiny_target import llama_config
from draftlab.latency.cost_model import read_profile
from draftlab.model import checkpoint, modes
from draftlab.model.families import presets
from draftlab.model.hub import EMBEDDED
from draftlab.results.score import read_score, score_files
from draftlab.runs import workspace
from draftlab.scoring.replay import read_replay
from draftlab.scoring.run import compare

REPOSITORY = Path(__file__).parents[2]
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
def draft(drafted):
    return drafted / "runs/prune-2x32"


@pytest.fixture
def task(space):
    """Return the option of a task whose data are on this disk."""
    write_rows(space / "rows.jsonl", [{"text": "def parse(line): return line"}])
    (space / "own.yaml").write_text(TASK)
    return "--tasks own.yaml"


def test_a_target_that_is_spread_over_disk_and_memory_writes_the_same(space, draft, task):
    modules = ["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"]
    places = dict.fromkeys(modules, "cpu") | {f"model.layers.{i}": "disk" for i in range(1, 5)}
    (space / "map.json").write_text(json.dumps(places))
    call(f"{SCORE} {task} --out here")
    call(f"{SCORE} {task} --out spread --device-map map.json")
    here, spread = (read_score(space / out / draft.name) for out in ("here", "spread"))
    models = (here.target, spread.target, spread.draft)
    assert [model.via_transformers for model in models] == [False, True, False]
    assert [g.tokens for g in spread.plain] == [g.tokens for g in here.plain]
    assert {k: spread.acceptance(k) for k in (1, 2)} == {k: here.acceptance(k) for k in (1, 2)}
    values = [[task.value for task in one.target.tasks] for one in (here, spread)]
    assert values[0] == pytest.approx(values[1], rel=PASS_ROUNDING)


def test_a_target_that_is_on_disk_leaves_mode_and_batch_to_drafts_and_heads(space, draft):
    """Even the embedding, which heads share, is on disk."""
    (space / "map.json").write_text(json.dumps({"": "disk"}))
    call(f"{DISTILL} --student eagle:ttt_steps=1 --out head")
    drafters = f"--draft {draft} --drafter eagle:heads=head --drafter latest-lookup"
    asked = f"{SCORE} {drafters} --mode native --batch 2 --dtype float32"
    call(f"{asked} --out here")
    call(f"{asked} --int8 draft --device-map map.json --out spread")
    for name in (draft.name, "eagle:heads=head", "latest-lookup"):
        here, spread = (read_score(next(Path(out).glob(f"{name}*"))) for out in ("here", "spread"))
        assert (spread.conditions.mode, spread.equal_texts) == ("native", 1.0)
        assert [g.tokens for g in spread.plain] == [g.tokens for g in here.plain]
        assert not spread.other_plain
    assert "--int8" in refused(f"{asked} --int8 both --device-map map.json")
    lookup = "--drafter latest-lookup --device-map map.json --mode native"
    assert "--mode native" in refused(f"{SCORE} {lookup}")
    spread, build = ("--device-map", "map.json"), "outputs build --use replay --prompt-tokens 16"
    call(f"{build} --num-prompts 2 --max-new-tokens 12 --dtype float32 --out answers")
    call("replay answers --draft head --k 2 --dtype float32 --out replay-here")
    call("replay answers --draft head --k 2 --dtype float32 --out replay-spread", *spread)
    one, two = (read_replay(Path(out) / "head") for out in ("replay-here", "replay-spread"))
    for ours, theirs in zip(one.chances(), two.chances(), strict=True):
        assert ours == pytest.approx(theirs, abs=10 * PASS_ROUNDING)
    idle = call(f"replay answers --draft {draft}", *spread)
    assert "--device-map" in idle.stderr
    target = yaml.safe_load(Path("draftlab.yaml").read_text())["target"]
    call(f"profile {target} head --k 1 --repeats 3 --context 16 --out passes", *spread)
    assert read_profile(Path("passes/head.yaml")).drafter == "eagle"


def test_what_int8_costs_the_target_is_that_of_its_rounded_matrices(space, draft, family_dirs, task):
    """The matrices are rounded by hand, in transformers' model; the embedding and the norms are not."""
    rounded = AutoModelForCausalLM.from_pretrained(family_dirs["llama"], dtype=torch.float32)
    rounded.config.tie_word_embeddings = False
    with torch.no_grad():
        for name, weights in rounded.named_parameters():
            if weights.ndim == 2 and "embed" not in name:
                step = weights.abs().amax(1, keepdim=True) / 127
                weights.copy_((weights / step).round() * step)
    shutil.copytree(family_dirs["llama"], space / "rounded")
    rounded.save_pretrained(space / "rounded")
    asked = f"{SCORE} --draft {draft} --mode native {task}"
    call(f"{asked} --int8 target --out int8")
    call(f"{asked} --target {space}/rounded --out byhand")
    found, by_hand = (read_score(score_files([space / out])[0]) for out in ("int8", "byhand"))
    values = [score.target.tasks[0].value for score in (found, by_hand)]
    assert values[0] == pytest.approx(values[1], rel=PASS_ROUNDING)
    assert 0 < found.rounding.kl < 0.1
    written = sum(generation.tokens for generation in found.plain)
    assert found.rounding.tokens == sum(prompt.tokens for prompt in found.prompts) + written
    assert by_hand.rounding is None

    texts = [[0, 17, 44, 101, 9], [0, 5, 250]]
    whole = AutoModelForCausalLM.from_pretrained(family_dirs["llama"], dtype=torch.float32)
    p, q = (
        torch.cat([model(torch.tensor([ids])).logits[0] for ids in texts]).log_softmax(-1) for model in (whole, rounded)
    )
    llama = modes.load(family_dirs["llama"], torch.float32, checkpoint.CPU)
    compared = compare(llama, modes.with_mode(llama, "native", int8=True), texts)
    assert compared.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=0.02, abs=1e-6)
    assert compared.top1 == float((p.argmax(-1) == q.argmax(-1)).float().mean())


def test_llama_65b_and_the_drafts_of_its_recipe_fit_four_devices_of_80_gb(space):
    """65,285,660,672 weights and 2.5 MB of cache per token in float16; the arithmetic is that of the dry run."""
    recipe = yaml.safe_load((REPOSITORY / "recipes/llama-65b.yaml").read_text())
    step = next(step["score"] for step in recipe["steps"] if "score" in step)
    (space / "hellaswag.jsonl").write_text('{"prompt": "A man is"}\n' * 100)
    step["draft"] = [Path(name).name for name in step["draft"]]
    step["target"], weights = "llama-65b", {}
    for name in (step["target"], *step["draft"]):
        shape = presets(REPOSITORY / "configs/widths")[name]
        weights[name] = 2 * shape.params() / 1e9
        shutil.copytree(EMBEDDED / "tiny", space / name)
        (space / name / "model.safetensors").unlink()
        config = llama_config(shape, context=2048, bos=0, eos=1, pad=2)
        (space / name / "config.json").write_text(json.dumps(config))
    (space / "score.yaml").write_text(yaml.safe_dump(step))
    said = call("score", "--config", "score.yaml", "--dry-run").stdout
    total, first = re.search(r"memory: (\d+) GB: .* 4, 8 devices takes [\d.]+, ([\d.]+), ", said).groups()
    caches = 0.0026 * (3 + 200 + 8)
    assert float(total) == pytest.approx(sum(weights.values()) + caches, rel=0.01)
    drafts = sum(weights.values()) - weights["llama-65b"]
    assert float(first) == pytest.approx(weights["llama-65b"] / 4 + drafts, rel=0.01)
    assert float(first) < 80


def test_a_model_that_does_not_fit_is_refused_before_it_is_made():
    said = refused("profile llama-65b --dtype bfloat16 --out x")
    assert said.index("llama-65b") < said.index("--device-map")


def test_tokens_beyond_those_that_a_parallel_draft_was_trained_for_are_said_to_be_untrained(draft):
    edit(draft / "config.json", pard_token=2, pard_offsets=4)
    asked = f"score --draft {draft} --num-prompts 4 --dry-run --k"
    assert "was trained to draft 4 tokens" in call(f"{asked} 2,5").stderr
    assert "trained to draft" not in call(f"{asked} 2,4").stderr


def test_a_tokenizer_with_two_ids_exchanged_is_refused(space):
    shutil.copytree(EMBEDDED / "tiny", space / "other")
    file = space / "other/tokenizer.json"
    model = json.loads(file.read_text())["model"]
    first, second = list(model["vocab"])[-2:]
    model["vocab"] |= {first: model["vocab"][second], second: model["vocab"][first]}
    edit(file, model=model)
    said = refused("score --target tiny --data stdlib --out x --draft other")
    assert said.startswith("error: --draft")
    assert not (space / "x").exists()


def test_a_mixture_is_scored_on_its_first_source(space, draft):
    here = workspace.load()
    workspace.write(here.model_copy(update={"data": f"{here.data}=0.7,stdlib=0.3"}))
    call(f"{SCORE} --out mixed")
    call(f"{SCORE} --data {here.data} --out first")
    mixed, first = (read_score(space / out / draft.name).conditions.selection for out in ("mixed", "first"))
    assert mixed == first


def test_answers_that_end_at_once_are_refused_and_single_ones_said(space, draft):
    """A head of zeros writes id 0 always; as an end of text it is all that is written."""
    model = build("llama", 1)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.save_pretrained(space / "silent")
    copy_tokenizer(draft, space / "silent")
    edit(space / "silent/config.json", eos_token_id=[0, 1])
    result = call(f"{SCORE} --target silent --out x", code=1)
    assert re.search(r"^error: .*\b2 prompts\b", result.stderr, re.M)
    assert not (space / "x").exists()


@pytest.mark.parametrize(
    ("int8", "target", "draft_weights", "other"),
    [
        ("draft", "float32", "int8", ["int8"]),
        ("target", "int8", "float32", ["float32"]),
        ("both", "int8", "int8", ["float32"]),
    ],
)
def test_the_target_alone_is_timed_at_every_precision_of_the_run(space, draft, int8, target, draft_weights, other):
    """The draft with other weights than the target's writes what the target writes with those that verify."""
    native = f"--mode native --dtype float32 --drafter latest-lookup --int8 {int8} --out x"
    call(f"{SCORE} --exhaustive --draft {draft} {native}")
    for score in map(read_score, score_files([space / "x"])):
        weights = None if score.draft.name == "latest-lookup" else draft_weights
        about = score.conditions
        assert (about.target_weights, about.draft_weights) == (target, weights)
        assert about.dtype == "float32"
        assert list(score.other_plain) == other
        again = [g.prompt for runs in score.other_plain.values() for g in runs]
        assert [g.prompt for g in score.plain] == again
        assert score.equal_texts == 1
