"""What cannot be done gets one clear line on stderr, the right exit code, and leaves nothing behind: every command."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from benchmarks.tiny_target import train_tokenizer
from draftlab import workspace
from draftlab.cli import app
from draftlab.training.vocabulary import resize

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, family_dirs) -> Path:
    """A workspace with a draft, and with files that are wrong in one way each."""
    space = tmp_path_factory.mktemp("space")
    target = str(family_dirs["llama"])
    (space / "text.txt").write_text("\n\n".join(f"def f{i}(line):\n    return [line, {i}]\n" * 20 for i in range(40)))
    workspace.write(workspace.Workspace(target=target, source=target, data=str(space / "text.txt")), space)
    for name in ("draft", "no-weights", "no-config", "pickled", "torn", "odd", "unread", "other-words"):
        shutil.copytree(family_dirs["llama"], space / name)
    (space / "no-weights/model.safetensors").unlink()
    (space / "no-config/config.json").unlink()
    (space / "pickled/model.safetensors").rename(space / "pickled/pytorch_model.bin")
    (space / "torn/model.safetensors").write_bytes(b"\x00" * 100)
    config = json.loads((space / "odd/config.json").read_text())
    (space / "odd/config.json").write_text(json.dumps(config | {"num_hidden_layers": 7}))
    (space / "unread/config.json").write_text("{")
    shutil.copytree(family_dirs["llama"], space / "few-ids")
    resize(space / "few-ids", 200)
    train_tokenizer(["other words entirely " * 50, "zzz yyy xxx " * 50], 307, space / "other-words")
    shutil.copytree(family_dirs["llama"], space / "no-mask-id")
    taken = json.loads((space / "no-mask-id/tokenizer_config.json").read_text())
    roles = {"unk_token": taken["pad_token"], "pad_token": taken["eos_token"]}
    (space / "no-mask-id/tokenizer_config.json").write_text(json.dumps(taken | roles))
    shutil.copytree(family_dirs["llama"], space / "mask-outside")
    (space / "mask-outside/config.json").write_text(json.dumps(config | {"pard_token": 307}))
    (space / "head").mkdir()
    (space / "head/config.json").write_text(json.dumps(config | {"draft_vocab_size": 9}))
    (space / "empty").mkdir()
    (space / "opt").mkdir()
    (space / "opt/config.json").write_text(json.dumps({"model_type": "opt", "vocab_size": 5, "hidden_size": 4}))
    save_file({"model.decoder.embed_tokens.weight": np.zeros((5, 4), np.float32)}, space / "opt/model.safetensors")
    for kind, fields in FOREIGN.items():
        (space / kind).mkdir()
        (space / kind / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 5} | fields))
    (space / "empty.jsonl").write_text('\n{"prompt": " "}\n')
    (space / "full").mkdir()
    (space / "full/kept.txt").write_text("keep me")
    (space / "a-file").write_text("text")
    (space / "broken.yaml").write_text("steps: [")
    (space / "typo.yaml").write_text("steps:\n  - prune: {layer: 3, out: x}\n")
    (space / "unknown.yaml").write_text("steps:\n  - prunes: {layers: 3}\n")
    (space / "no-steps.yaml").write_text("step: []\n")
    (space / "shape.yaml").write_text("layers: 2\nhidden: 32\n")
    (space / "yes.yaml").write_text(
        "layers: yes\nhidden: 64\nheads: 8\nkv_heads: 4\nhead_dim: 12\nffn: 88\nvocab: 307\n"
    )
    (space / "prompts.jsonl").write_text('{"prompt": "def f"}\n{"nothing": 1}\n')
    (space / "broken.jsonl").write_text("not json\n")
    (space / "none.jsonl").write_text("")
    (space / "score.json").write_text('{"version": 1}')
    (space / "replay.json").write_text("{}")
    (space / "profile.yaml").write_text("kind: measured\n")
    (space / "broken-outputs").mkdir()
    (space / "broken-outputs/manifest.json").write_text("{}")
    (space / "program").write_text("#!/bin/sh\nexit 1\n")
    return space


FOREIGN = {
    "bert": {"architectures": ["BertForMaskedLM"]},
    "t5": {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
}
CASES = [
    # a model that does not write text, or no model at all
    (("score", "--draft", "bert"), "bert is an encoder (BertForMaskedLM)"),
    (("init", "--target", "t5", "--force"), "t5 is an encoder and a decoder"),
    (("distill", "--draft", "draft", "--target", "bert"), "bert is an encoder"),
    # a suggestion is given for a typing error only
    (("check", "draft", "--for", "tensorrt"), "did you mean 'tensorrt-llm'"),
    (("init", "--preset", "llama-3.1-8b", "--force"), "no preset 'llama-3.1-8b'"),
    # no time, no text, no hub
    (("score", "--draft", "draft", "--prompt-file", "empty.jsonl"), "empty.jsonl:2: the prompt is empty"),
    (("distill", "--draft", "draft", "--data", "hf:nosuch/ds"), "is on the hub, which cannot be reached"),
    (
        ("distill", "--loss", "ce", "--draft", "draft", "--data", "hf:nosuch/ds", "--out", "x"),
        "is on the hub, which cannot be reached",
    ),
    # what a run would only find out later, or never
    (("distill", "--draft", "draft", "--data", "none.jsonl"), "no documents"),
    (("distill", "--draft", "draft", "--lr", "-1"), "--lr -1"),
    (("distill", "--draft", "draft", "--lr", "nan"), "--lr nan"),
    (("distill", "--loss", "ce", "--draft", "draft", "--data", "text.txt", "--out", "x", "--lr", "inf"), "--lr inf"),
    (("distill", "--draft", "draft", "--seq-len", "999"), "--seq-len 999: draft reads at most 256 tokens"),
    (("distill", "--draft", "draft", "--outputs", "c", "--target", "nowhere", "--seq-len", "9"), "--target, --seq-len"),
    # a checkpoint that is none
    (("check", "nope", "--files-only"), "no checkpoint at nope"),
    (("check", "no-weights", "--files-only"), "no-weights has no model.safetensors"),
    (("check", "draft", "--target", "nope"), "no checkpoint at nope"),
    (("export", "nope"), "no checkpoint at nope"),
    (("export", "torn"), "safetensors: "),
    (("score", "--draft", "opt"), "opt has no tokenizer"),
    (("outputs", "build", "--use", "replay", "--target", "nope"), "no checkpoint at nope"),
    (("outputs", "build", "--target", "nope", "--num-sequences", "1"), "no checkpoint at nope"),
    (("init", "--preset", "nope", "--force"), "no preset 'nope'; known: "),
    # a shape that cannot be
    # text, prompts, traces, caches, profiles that are not there or are something else
    (("outputs", "build", "--use", "replay", "--prompt-file", "nope.jsonl"), "nope.jsonl"),
    (("outputs", "build", "--use", "replay", "--prompt-file", "broken.jsonl"), "broken.jsonl"),
    (("outputs", "build", "--use", "replay", "--prompt-file", "prompts.jsonl"), "prompts.jsonl"),
    (("outputs", "build", "--use", "replay", "--prompt-file", "prompts.jsonl", "--data", "stdlib"), "--data: "),
    (("replay", "nope", "--draft", "draft"), "nope"),
    (("outputs", "build", "--from", "nope", "--target", "draft"), "nope: No such file"),
    (("outputs", "info", "nope"), "nope"),
    (("outputs", "info", "broken-outputs"), "broken-outputs"),
    (("outputs", "info", "nope", "--verify"), "nope"),
    (("report", "nope/score.json"), "No such file"),
    (("report", "score.json"), "is not a score"),
    (("report", "empty"), "run draftlab score first"),
    # what does not go together
    (("distill",), "prune"),
    (("score",), "distill"),
    (("check",), "run draftlab distill first"),
    (("export",), "run draftlab distill first"),
    (("score", "--draft", "other-words"), "different tokenizers"),
    (("score", "--draft", "few-ids"), "few-ids embeds 200 ids"),
    (("check", "few-ids"), "few-ids embeds 200 ids"),
    (("export", "few-ids"), "few-ids embeds 200 ids"),
    (("export", "other-words"), "different tokenizers"),
    (("check", "draft", "--for", "vlm"), "did you mean 'vllm'"),
    (("export", "draft", "--to", "gguf", "--outtype", "q8"), "did you mean 'q8_0'"),
    (("export", "draft", "--to", "gguf", "--outtype", "q4_k_m"), "--outtype q4_k_m"),
    (("export", "draft", "--to", "onnx"), "--to onnx"),
    (("export", "draft", "--to", "sglang", "--verify-with", "program"), "--verify-with: "),
    (("export", "draft", "--to", "vllm", "--verify-with", "no-program"), "--verify-with no-program"),
    (("score", "--draft", "draft", "--draft", "draft"), "same directory name"),
    (("score", "--draft", "draft", "--k", "none"), "not a list of numbers"),
    (("score", "--draft", "draft", "--k", "1-1000000000000"), "lists more than 10,000 numbers"),
    (("score", "--draft", "draft", "--k", "1-1001"), "at most 1,000 tokens are drafted per step"),
    (("replay", "c", "--draft", "draft", "--k", "1000000000000"), "at most 1,000 tokens are drafted per step"),
    (("score", "--draft", "draft", "--batch", "9" * 5000), "is not a list of numbers"),
    (("score", "--server", "nope", "--draft", "x"), "--draft: needs --speculative-server"),
    (("outputs", "build", "--server", "http://127.0.0.1:9", "--text", "target"), "no answer from http://127.0.0.1:9"),
    (("score", "--draft", "mask-outside", "--num-prompts", "4"), "pard_token is 307, and the vocabulary has 0 to 306"),
    (("score", "--draft", "draft", "--num-prompts", "4", "--drafter", "parallel"), "draft is no parallel draft"),
    (("score", "--draft", "draft", "--drafter", "parallel:siblings=top"), "no option 'siblings'"),
    (("export", "draft", "--to", "vllm", "--use-heterogeneous-vocab"), "has the target's vocabulary; leave it out"),
    (("export", "other-words", "--use-heterogeneous-vocab"), "is for --to vllm or transformers"),
    (("export", "other-words", "--to", "transformers", "--use-heterogeneous-vocab"), "both have 307"),
    # recipes
    (("run", "nope.yaml"), "No such file"),
    (("run", "broken.yaml"), "broken.yaml"),
    (("run", "typo.yaml"), "layer"),
    (("run", "unknown.yaml"), "did you mean 'prune'"),
    (("run", "no-steps.yaml"), "step"),
    # where nothing may be written
    (("distill", "--draft", "draft", "--out", "full"), "full exists and is not empty"),
    (("score", "--draft", "draft", "--num-prompts", "4", "--out", "full"), "full exists and is not empty"),
    (("export", "draft", "--out", "full"), "full exists and is not empty"),
    (("init", "--preset", "tiny"), "--force"),
]
PREDICT = "predict --draft-profile"
# command line, and the option that the error names
OPTIONS = [
    ("prune", "--layers"),
    ("prune --layers 9", "--layers 9"),
    ("prune --width 128", "--width 128"),
    ("prune --layers 2 --device gpu", "--device gpu"),
    ("prune --params lots", "--params lots"),
    ("prune --params 9b", "--params: "),
    ("prune --params 200k --ffn 88", "--ffn 88"),
    ("prune --shape nope.yaml", "--shape: "),
    ("prune --shape broken.yaml", "--shape: "),
    ("prune --shape shape.yaml", "--shape: "),
    ("prune --shape yes.yaml", "--shape: "),
    ("prune --shape shape.yaml --layers 2", "--layers: "),
    ("prune --layers 2 --source nope", "--source: "),
    ("prune --layers 2 --source nope --method masks", "--source: "),
    ("prune --layers 2 --source drat", "did you mean 'draft'"),
    ("prune --layers 2 --source empty", "--source: "),
    ("prune --layers 2 --source a-file", "--source: "),
    ("prune --layers 2 --source no-weights", "--source: "),
    ("prune --layers 2 --source pickled", "draftlab import pickled --out pickled-imported"),
    ("prune --layers 2 --source torn", "--source: "),
    ("prune --layers 2 --source odd", "--source: "),
    ("prune --layers 2 --source unread", "--source: "),
    ("prune --layers 2 --source opt", "--source: "),
    ("prune --layers 2 --source llama-7b", "--source: "),
    ("prune --layers 2 --data nope", "--data: "),
    ("prune --layers 2 --data stdlib=lots", "stdlib=lots"),
    ("prune --layers 2 --data none.jsonl", "none.jsonl"),
    ("prune --layers 2 --data shape.yaml", "--data: "),
    ("prune --layers 2 --data hf:nosuch/ds", "--data: "),
    ("prune --layers 2 --data hf:nosuch/ds --method masks", "--data: "),
    ("prune --layers 2 --outputs nope", "--outputs: "),
    ("prune --source tiny --layers 2 --data text.txt --outputs nope", "--data: "),
    ("prune --source tiny --vocab 1k --outputs nope", "--outputs: "),
    ("prune --source tiny --vocab many", "--vocab many"),
    ("prune --source tiny --vocab 5000", "--vocab 5000"),
    ("prune --source tiny --layers 2 --untie --refit head --method first", "--untie: "),
    ("prune --layers 2 --lr 0.1", "--lr: "),
    ("prune --layers 2 --method masks --depth even", "--depth: "),
    ("prune --layers 2 --steps 4", "--steps: "),
    ("distill --loss ce --draft nope", "--draft: "),
    ("distill --draft other-words", "--draft: "),
    ("distill --draft few-ids", "few-ids embeds 200 ids"),
    ("distill --draft torn", "torn"),
    ("distill --draft a-file", "--draft: "),
    ("distill --draft draft --target nope", "--target: "),
    ("distill --draft draft --target head", "--target: head has heads on a target"),
    ("distill --draft head", "--draft: head has heads on a target"),
    ("search --target head", "--target: head has heads on a target"),
    ("distill --draft draft --outputs nope", "--outputs: "),
    ("distill --draft draft --data nope.txt", "--data: "),
    ("distill --draft draft --text target --prompt-file nope.jsonl", "--prompt-file: "),
    ("distill --draft draft --loss fk", "--loss fk"),
    ("distill --draft draft --loss jsd(2)", "--loss: "),
    ("distill --draft draft --text nope", "--text nope"),
    ("distill --draft draft --text draft --prompt-tokens 300", "--prompt-tokens 300"),
    ("distill --draft draft --seq-len 9999", "--seq-len"),
    ("distill --draft draft --seq-len 9999 --loss ce", "--seq-len"),
    ("distill --draft draft --vocab 99999", "--vocab 99999"),
    ("distill --draft draft --report-to nope", "--report-to"),
    ("distill --draft draft --server nope", "--server: "),
    ("distill --draft draft --server http://127.0.0.1:9", "no answer from http://127.0.0.1:9"),
    ("distill --draft draft --server http://127.0.0.1:9 --api-key-file nope", "--api-key-file nope"),
    ("distill --draft draft --student eagel", "--student eagel"),
    ("distill --draft draft --student parallel:token=999", "--student"),
    ("distill --draft draft --student parallel:token=999 --dry-run", "--student"),
    ("distill --draft draft --student parallel:tokens=1", "--student parallel:tokens=1"),
    ("distill --draft mask-outside --student parallel", "pard_token is 307"),
    ("distill --draft no-mask-id --student parallel", "no id unused for the mask token"),
    ("distill --draft no-mask-id --student parallel --dry-run", "no id unused for the mask token"),
    ("distill --draft draft --student parallel --lora-rank 2", "--lora-rank: "),
    ("distill --student eagle --target nope", "--target: "),
    ("distill --student eagle --draft nope", "--draft: "),
    ("distill --student eagle --seq-len 9999", "--seq-len"),
    ("distill --student eagle --server http://127.0.0.1:9", "--server: "),
    ("auto bert", "TARGET: "),
    ("auto draft --minutes 0.001", "--minutes 0.001"),
    ("auto draft --prompts nope.jsonl", "--prompts: "),
    ("auto draft --prompts empty.jsonl", "--prompts: "),
    ("auto draft --data nope", "--data: "),
    ("auto draft --for transformers --streams 1,2", "--streams: "),
    ("auto draft --for vllm --verify-with nope", "--verify-with nope"),
    ("profile nope", "nope"),
    ("profile --law draft shape.yaml", "--law: "),
    ("profile --law draft --device-map auto", "--device-map: "),
    ("profile draft --server nope", "--server: "),
    ("profile draft --server http://127.0.0.1:9", "--server: "),
    ("profile draft --server http://127.0.0.1:9 --mode eager", "--mode: "),
    ("design", "--params"),
    ("design --params lots", "--params lots"),
    ("design --params 1m --layers three", "--layers three"),
    ("design --params 1m --layers 0-3", "0-3"),
    ("design --params 1m --source nope", "--source: "),
    ("design --params 1m --law nope", "--law: "),
    ("design --latency-ms 2", "--latency-ms: "),
    (f"{PREDICT} a --target-profile a --acceptance 0.5", "--draft-profile: "),
    (f"{PREDICT} profile.yaml --target-profile a --acceptance 0.5", "--draft-profile: "),
    (f"{PREDICT} empty --target-profile a --acceptance 0.5", "--draft-profile: "),
    (f"{PREDICT} a --target-profile a --acceptance 1.5", "--acceptance: "),
    (f"{PREDICT} a --target-profile a --acceptance 6@4", "--acceptance: "),
    (f"{PREDICT} a --target-profile a --acceptance empty", "--acceptance: "),
    (f"{PREDICT} a --target-profile a --acceptance score.json", "--acceptance: "),
    (f"{PREDICT} a --target-profile a --acceptance 0.5 --acceptance 0.6", "--acceptance: "),
    (f"{PREDICT} a --target-profile a --acceptance 0.5 --k 1000000000000", "--k 1000000000000"),
    ("prune --layers 2 --out full", "full exists and is not empty"),
    ("prune --layers 2 --out a-file", "a-file exists and is not a directory"),
    ("prune --layers 2 --out a-file/x", "a-file/x"),
]
USAGE = [
    ("prunes",),
    ("prune", "--layers", "zero"),
    ("prune", "--layers", "0"),
    ("prune", "--nope"),
    ("score", "--dtype", "int3"),
    ("distill", "--steps", "0"),
    ("score", "--temperature", "-1"),
    ("profile", "draft", "--k", "1000000000000"),
    ("export", "draft", "--to", "vllm", "--k", "1000000000000"),
    ("outputs", "info"),
    ("outputs", "recorded"),
    ("outputs", "nothing"),
]


def listing(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(("arguments", "message"), CASES, ids=[" ".join(case[0]) for case in CASES])
def test_one_clear_line_and_nothing_left_behind(arguments, message, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = listing(folder)
    result = RUNNER.invoke(app, list(arguments))
    assert result.exit_code == 1, (result.output, result.exception)
    assert result.stdout == ""
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in result.stderr
    assert listing(folder) == before


@pytest.mark.parametrize(("line", "option"), OPTIONS, ids=[line for line, _ in OPTIONS])
def test_a_mistake_is_said_by_its_option_and_leaves_nothing(line, option, folder, monkeypatch):
    test_one_clear_line_and_nothing_left_behind(line.split(), option, folder, monkeypatch)


def test_a_disk_that_takes_nothing_is_said_by_init(monkeypatch):
    monkeypatch.chdir("/sys")  # which not even root can write to
    result = RUNNER.invoke(app, ["init", "--preset", "tiny"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: cannot write draftlab.yaml: ")


def test_scores_are_not_computed_for_a_cache_that_cannot_be_written(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("draftlab.pruning.run.calibrate", lambda *_: pytest.fail("calibrated"))
    result = RUNNER.invoke(app, ["prune", "--layers", "2", "--scores-cache", "/sys/scores"])
    assert "cannot write /sys/scores: " in result.stderr


@pytest.mark.parametrize("arguments", USAGE, ids=" ".join)
def test_wrong_usage_exits_with_2(arguments, folder, monkeypatch):
    monkeypatch.chdir(folder)
    before = listing(folder)
    result = RUNNER.invoke(app, list(arguments))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert listing(folder) == before
