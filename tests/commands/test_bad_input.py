"""What cannot be done gets one clear line on stderr, the right exit code, and leaves nothing behind: every command."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import save_neox
from safetensors.numpy import save_file
from typer.testing import CliRunner

from benchmarks.tiny_target import train_tokenizer
from draftlab import workspace
from draftlab.cli import app
from draftlab.model import eagle
from draftlab.model.eagle import Head
from draftlab.training.vocabulary import resize

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, family_dirs, tokenizer_dir) -> Path:
    """A workspace with a draft, and with files that are wrong in one way each."""
    space = tmp_path_factory.mktemp("space")
    target = str(family_dirs["llama"])
    (space / "text.txt").write_text(
        "\n\n".join(f"def f{i}(line):\n    return [line, {i}]\n" * 20 for i in range(40))
    )
    workspace.write(
        workspace.Workspace(target=target, source=target, data=str(space / "text.txt")), space
    )
    for name in (
        "draft",
        "no-weights",
        "no-config",
        "pickled",
        "torn",
        "odd",
        "unread",
        "other-words",
        "no-snapshot",
        "own-code",
    ):
        shutil.copytree(family_dirs["llama"], space / name)
    (space / "no-weights/model.safetensors").unlink()
    (space / "no-config/config.json").unlink()
    (space / "pickled/model.safetensors").rename(space / "pickled/pytorch_model.bin")
    (space / "torn/model.safetensors").write_bytes(b"\x00" * 100)
    config = json.loads((space / "odd/config.json").read_text())
    (space / "odd/config.json").write_text(json.dumps(config | {"num_hidden_layers": 7}))
    (space / "unread/config.json").write_text("{")
    rwkv = {"model_type": "rwkv", "vocab_size": 307, "hidden_size": 64, "num_hidden_layers": 2}
    (space / "no-snapshot/config.json").write_text(json.dumps(rwkv))
    code = {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "code.Model"}}
    (space / "own-code/config.json").write_text(json.dumps(config | code))
    narrow = save_neox(space / "narrow", tokenizer_dir, layers=4)
    shape = eagle.head_config(narrow, None, 100)
    weights = {name: torch.zeros(size) for name, size in shape.sizes().items()}
    other = Head(config=shape, weights=weights, ids=torch.arange(100), embedding=None)
    (space / "other-head").mkdir()
    eagle.write(space / "other-head", other, "native", target=narrow, k=2)
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
    (space / "opt/config.json").write_text(
        json.dumps({"model_type": "opt", "vocab_size": 5, "hidden_size": 4})
    )
    save_file(
        {"model.decoder.embed_tokens.weight": np.zeros((5, 4), np.float32)},
        space / "opt/model.safetensors",
    )
    for kind, fields in FOREIGN.items():
        (space / kind).mkdir()
        (space / kind / "config.json").write_text(
            json.dumps({"model_type": kind, "vocab_size": 5} | fields)
        )
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
LINES = (Path(__file__).parents[1] / "data/bad_input.txt").read_text().splitlines()
CASES = [line.split(" => ") for line in LINES if " => " in line]


def listing(folder: Path) -> dict[str, int]:
    return {
        str(p.relative_to(folder)): p.stat().st_mtime_ns
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


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
    result = RUNNER.invoke(app, ["prune", "--layers", "2", "--scores-cache", "/sys/scores"])
    assert "/sys/scores" in result.stderr
