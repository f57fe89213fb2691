"""What cannot be done gets one clear line on stderr, the right exit code, and leaves nothing behind: every command."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.builders import save_neox
from helpers.published_heads import written
from helpers.small_files import edit, write_functions, write_workspace
from safetensors.numpy import save_file
from typer.testing import CliRunner

from benchmarks.tiny_target import train_tokenizer
from draftlab.cli import app
from draftlab.training.vocabulary import resize

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, family_dirs, tokenizer_dir) -> Path:
    """Return a workspace with a draft, and with files that are wrong in one way each."""
    space = tmp_path_factory.mktemp("space")
    write_workspace(family_dirs["llama"], write_functions(space / "text.txt", 40), space)
    for name in COPIES.split():
        shutil.copytree(family_dirs["llama"], space / name)
    (space / "no-weights/model.safetensors").unlink()
    (space / "no-config/config.json").unlink()
    (space / "pickled/model.safetensors").rename(space / "pickled/pytorch_model.bin")
    (space / "torn/model.safetensors").write_bytes(b"\x00" * 100)
    for name, changes in CHANGED.items():
        edit(space / name / "config.json", **changes)
    train_tokenizer(["other words entirely " * 50, "zzz yyy xxx " * 50], 307, space / "other-words")
    resize(space / "few-ids", 200)
    taken = json.loads((space / "no-mask-id/tokenizer_config.json").read_text())
    roles = {"unk_token": taken["pad_token"], "pad_token": taken["eos_token"]}
    edit(space / "no-mask-id/tokenizer_config.json", **roles)
    written(space / "other-head", save_neox(space / "narrow", tokenizer_dir, layers=4))
    for name, content in FILES.items():
        (space / name).parent.mkdir(exist_ok=True)
        (space / name).write_text(content)
    (space / "empty").mkdir()
    embedding = {"model.decoder.embed_tokens.weight": np.zeros((5, 4), np.float32)}
    save_file(embedding, space / "opt/model.safetensors")
    return space


COPIES = (
    "draft no-weights no-config pickled torn odd unread other-words no-snapshot own-code few-ids no-mask-id "
    "mask-outside head named-quantised nextn"
)
CHANGED = {
    "odd": {"num_hidden_layers": 7},
    "own-code": {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "code.Model"}},
    "mask-outside": {"pard_token": 307},
    "head": {"draft_vocab_size": 9},
    "named-quantised": {"quantization": "int4"},
    "nextn": {"architectures": ["DeepSeekNextNForCausalLM"]},
}
FILES = {
    "unread/config.json": "{",
    "no-snapshot/config.json": '{"model_type": "rwkv", "vocab_size": 307, "hidden_size": 64, "num_hidden_layers": 2}',
    "opt/config.json": '{"model_type": "opt", "vocab_size": 5, "hidden_size": 4}',
    "bert/config.json": '{"model_type": "bert", "vocab_size": 5, "architectures": ["BertForMaskedLM"]}',
    "t5/config.json": '{"model_type": "t5", "vocab_size": 5, "is_encoder_decoder": true}',
    "empty.jsonl": '\n{"prompt": " "}\n',
    "full/kept.txt": "keep me",
    "a-file": "text",
    "broken.yaml": "steps: [",
    "typo.yaml": "steps:\n  - prune: {layer: 3, out: x}\n",
    "unknown.yaml": "steps:\n  - prunes: {layers: 3}\n",
    "no-steps.yaml": "step: []\n",
    "zero.yaml": "steps:\n  - prune: {layers: 0}\n",
    "missing.yaml": "steps:\n  - outputs info: {}\n",
    "two.yaml": "steps:\n  - prune: {}\n    score: {}\n",
    "many.jsonl": '{"prompt": "def f"}\n' * 96,
    "mixed.jsonl": '{"prompt": "def f"}\n' * 90,
    "shape.yaml": "layers: 2\nhidden: 32\n",
    "yes.yaml": "layers: yes\nhidden: 64\nheads: 8\nkv_heads: 4\nhead_dim: 12\nffn: 88\nvocab: 307\n",
    "prompts.jsonl": '{"prompt": "def f"}\n{"nothing": 1}\n{"nothing": 2}\n',
    "broken.jsonl": "not json\n",
    "none.jsonl": "",
    "nulls.jsonl": '{"prompt": null, "completion": "def f"}\n' * 96,
    "score.json": '{"version": 1}',
    "replay.json": "{}",
    "profile.yaml": "kind: measured\n",
    "broken-outputs/manifest.json": "{}",
    "program": "#!/bin/sh\nexit 1\n",
}
LINES = (Path(__file__).parents[1] / "files/bad_input.txt").read_text().splitlines()
CASES = [line.split(" => ") for line in LINES if " => " in line]


def listing(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("line", "message"), CASES, ids=[line for line, _ in CASES])
def test_one_clear_line_and_nothing_left_behind(line, message, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = listing(folder)
    result = RUNNER.invoke(app, line.replace("{9 5,000 times}", "9" * 5000).split())
    assert result.exit_code == (2 if message == "USAGE" else 1), (result.output, result.exception)
    assert result.stdout == ""
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert message == "USAGE" or (len(errors) == 1 and message in errors[0]), result.stderr
    assert "Traceback" not in result.stderr
    assert listing(folder) == before


def test_a_disk_that_takes_nothing_is_said_by_init(monkeypatch):
    monkeypatch.chdir("/sys")  # which not even root can write to
    result = RUNNER.invoke(app, ["init", "--preset", "tiny"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: cannot write draftlab.yaml: ")


def test_scores_are_not_computed_for_a_cache_that_cannot_be_written(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("draftlab.pruning.run.calibrate", lambda *_: pytest.fail("calibrated"))
    result = RUNNER.invoke(app, ["prune", "--layers", "2", "--seq-len", "64", "--scores-cache", "/sys/scores"])
    assert "/sys/scores" in result.stderr
