"""The three commands as the paper's reader types them, over the hub's own client; no model or text has a default."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.builders import SIZES
from helpers.commands import proposed
from helpers.hub_server import Hub, point_at, running_hub
from helpers.sentencepiece_files import CONFIG, train_sentencepiece
from helpers.small_files import write_functions, write_rows
from helpers.typed import call
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from draftlab.commands import COMMANDS
from draftlab.model import checkpoint

VOCAB = 480


def stand_in(out: Path, layers: int, seed: int) -> Path:
    """Return a random LLaMA laid out as huggyllama's: float16 in two shards, pickles, a slow tokenizer."""
    torch.manual_seed(seed)
    out.mkdir(parents=True)
    sizes = SIZES | {
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes)).half()
    tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
    tensors |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(layers)}
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    parts = {file: sorted(tensors)[i::2] for i, file in enumerate(names)}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, out / file, metadata={"format": "pt"})
    index = {
        "metadata": {},
        "weight_map": {name: file for file, part in parts.items() for name in part},
    }
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    config = model.config.to_dict() | {
        "torch_dtype": "float16",
        "architectures": ["LlamaForCausalLM"],
    }
    (out / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "dtype"}, default=str))
    (out / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": 2}')
    (out / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    (out / "pytorch_model-00001-of-00001.bin").write_bytes(b"pickled")
    return out


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Hub:
    root = tmp_path_factory.mktemp("hub")
    repos = {"7b": stand_in(root / "7b", 4, seed=0), "65b": stand_in(root / "65b", 6, seed=1)}
    for place in repos.values():
        train_sentencepiece(place, VOCAB)
    text = root / "text"
    text.mkdir()
    rows = ({"text": f"def f{i}(line):\n    return [line, {i}]\n" * 30} for i in range(300))
    write_rows(text / "train.jsonl", rows)
    models = {f"models/huggyllama/llama-{name}": {"main": place} for name, place in repos.items()}
    with running_hub(models | {"datasets/DKYoon/SlimPajama-6B": {"main": text}}) as running:
        yield running


def typed(words: str, hub: Hub, folder: Path) -> list[str]:
    """Type it; the weights that were fetched meanwhile."""
    before = len(hub.fetched)
    environment = os.environ | hub.environment(folder / "cache") | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *words.split()]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    return [name for name in hub.fetched[before:] if "safetensors" in name and "index" not in name]


SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


UNNAMED = [
    ("design --params 1m", "--source"),
    ("prune --layers 2", "--source"),
    ("prune --layers 2 --source tiny", "--data"),
    ("distill", "--target"),
    ("distill --draft tiny --target tiny", "--data"),
    ("distill --server http://localhost:9 --draft tiny", "--data"),
    ("search --layers 1", "--target"),
    ("search --layers 1 --target tiny", "--source"),
    ("outputs build", "--target"),
    ("outputs build --target tiny", "--data"),
    ("outputs build --from log.jsonl", "--target"),
    ("outputs info store --verify", "--target"),
    ("score --drafter prompt-lookup", "--target"),
    ("score --draft tiny --target tiny", "--data"),
    ("score --server http://localhost:9 --data stdlib", "--target"),
    ("check tiny", "--target"),
    ("check tiny --target tiny", "--data"),
    ("export tiny", "--target"),
]


@pytest.mark.parametrize(("words", "option"), UNNAMED)
def test_outside_a_workspace_a_command_asks_for_what_it_reads(words, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (line,) = call(words, code=2).stderr.splitlines()
    assert line.startswith(f"error: {option} ")
    assert "draftlab init --preset tiny" in line
    assert not list(tmp_path.iterdir())


def test_every_command_that_reads_the_workspaces_models_or_text_is_here():
    read = {
        (name, option)
        for name, each in COMMANDS.items()
        for option in each.config.model_fields.keys() & {"target", "source", "data"}
        if each.config.model_fields[option].default_factory is not None
    }
    tried = {
        (name, option.removeprefix("--")) for words, option in UNNAMED for name in COMMANDS if words.startswith(name)
    }
    # export reads text only with a server's program
    assert read == tried | {("search", "data"), ("export", "data")}


def test_text_that_is_not_read_is_neither_asked_for_nor_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(Path("asked.jsonl"), [{"prompt": "def f(x):"}] * 3)
    quick = "--k 1 --max-new-tokens 4 --mode eager --exhaustive --repeats 1"
    call(f"score --target tiny --drafter prompt-lookup --prompt-file asked.jsonl --out s {quick}")
    record = json.loads(Path("s/draftlab.json").read_text())
    assert record["config"]["target"] == "tiny"
    assert "data" not in record["config"]
    assert call("score --config s --out again").exit_code == 0


def test_what_is_proposed_outside_a_workspace_can_be_typed_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_functions(Path("text.txt"), 100)
    few = "--calibration-tokens 128 --seq-len 32 --out cut"
    words = proposed(call(f"prune --source tiny --layers 1 --data text.txt {few}"))
    assert words[1] == "distill"
    call("", *words[1:], "--dry-run")
    quick = ["--steps", 1, "--batch-size", 2, "--seq-len", 32, "--eval-steps", 1]
    words = proposed(call("", *words[1:], *quick))
    assert words[1] == "score"
    call("", *words[1:], "--dry-run")
    words = proposed(call("design --source tiny --params 2m --layers 1"))
    call("", *words[1:], "--data", "text.txt", "--dry-run")


def test_a_draft_that_costs_more_than_it_gains_is_not_proposed_for_export(tmp_path, monkeypatch):
    """A target that drafts for itself is slower than without a draft."""
    monkeypatch.chdir(tmp_path)
    quick = "--k 1 --num-prompts 3 --max-new-tokens 8 --mode eager --exhaustive --repeats 1"
    words = proposed(call(f"score --target tiny --draft tiny --data stdlib --out s {quick}"))
    assert words[1] == "report"
    call("", *words[1:])


@pytest.mark.slow
def test_the_papers_three_commands_work_as_typed_in_its_workspace(hub, tmp_path):
    """No option but sizes: models and text by the names that the preset wrote."""
    assert typed("draftlab init --preset llama-65b", hub, tmp_path) == []
    prune = "draftlab prune --layers 2 --width 32 --calibration-tokens 512 --seq-len 64"
    distill = "draftlab distill --steps 2 --batch-size 2 --seq-len 32 --eval-steps 2"
    score = "draftlab score --num-prompts 4 --prompt-tokens 16 --max-new-tokens 8 --repeats 2 --k 2"
    assert typed(prune + " --dry-run", hub, tmp_path) == []
    assert sorted(typed(prune, hub, tmp_path)) == [f"huggyllama/llama-7b/{file}" for file in SHARDS]
    assert typed(distill + " --dry-run", hub, tmp_path) == []
    assert sorted(typed(distill, hub, tmp_path)) == [f"huggyllama/llama-65b/{file}" for file in SHARDS]
    assert typed(score, hub, tmp_path) == []
    assert not [name for name in hub.fetched if name.endswith(".bin")]
    config = json.loads(next(tmp_path.glob("runs/prune-*/config.json")).read_text())
    assert (config["num_hidden_layers"], config["hidden_size"]) == (2, 32)
    assert config["dtype"] == "float16"
    scores = json.loads(next(tmp_path.glob("runs/score-*/*/score.json")).read_text())
    assert scores["target"]["name"] == "llama-65b"


def test_the_papers_source_is_pruned_as_it_lies_on_the_hub(hub, tmp_path, monkeypatch):
    """The quick part of the above, in this process: index, rotary buffers, float16 and a slow tokenizer."""
    point_at(hub.url, tmp_path / "cache", monkeypatch)
    monkeypatch.chdir(tmp_path)
    call("init --preset llama-65b")
    write_functions(Path("text.txt"), 40)
    few = "--calibration-tokens 128 --seq-len 32 --data text.txt"
    assert "llama-7b" in call(f"prune --layers 2 --width 32 {few} --out draft").output
    draft = checkpoint.Weights(Path("draft"))
    assert draft.dtype == torch.float16
    assert not [name for name in draft if "rotary" in name]
    assert (Path("draft") / "tokenizer.model").is_file()
