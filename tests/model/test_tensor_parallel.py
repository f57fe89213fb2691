"""Models that transformers splits over processes write what one process writes; one of them leads."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from draftlab.benchmark.setup import set_up
from draftlab.cli import app
from draftlab.config.distill import DistillConfig, EagleConfig
from draftlab.config.score import ScoreConfig
from draftlab.errors import UserError
from draftlab.latency.cost_model import read_profile
from draftlab.model import tensor_parallel
from draftlab.model.head_ids import write_head_ids

PROMPTS = '{"prompt": "def parse(line):"}\n{"prompt": "return [int(part)"}\n'
SCRIPT = """
import sys
from pathlib import Path
import torch
from draftlab.console import is_main_process
from draftlab.engine.generate import ModelDrafter, output_tokens, speculative_decode
from draftlab.model import llama, tensor_parallel
from draftlab.model.decoder import load
from draftlab.model.llama import Tree
from draftlab.sampling import SamplingParams

def lead(*directories):
{}
    print("equal")

if is_main_process():
    with tensor_parallel.leading():
        lead(*map(Path, sys.argv[1:]))
else:
    tensor_parallel.follow()
"""
LOGITS = """
    directory, = directories
    whole = llama.load(directory, torch.float32)
    split = load(directory, torch.float32, torch.device("cpu"), "tensor-parallel")
    ids = torch.arange(3, 43).view(2, 20)
    expected = whole.forward(ids, whole.new_cache(2, 20))
    cache, other = split.new_cache(2, 20), split.new_cache(1, 20)
    parts = [split.forward(ids[:, :9], cache)]
    split.forward(ids[:1, :3], other)
    split.forward(ids[:, :4], cache)  # rejected
    cache.used = [9, 9]
    del other
    parts.append(split.forward(ids[:, 9:], cache))
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-4)
    tree = Tree.from_parents((0, 0, 1))
    one = whole.forward(ids[:1, :4], whole.new_cache(1, 4), 4, tree)
    torch.testing.assert_close(split.forward_uncached(ids[:1, :4], 4, tree), one, rtol=1e-4, atol=1e-4)
"""
DRAFTS = """
    whole, drafts = (llama.load(directory, torch.float32) for directory in directories)
    split, split_drafts = (load(d, torch.float32, torch.device("cpu"), "tensor-parallel") for d in directories)

    def written(target, draft):
        prompts = [[*range(at, at + 5)] for at in range(3, 60, 8)]
        drafter, sampling = ModelDrafter(draft, 307), SamplingParams(max_tokens=20)
        steps = [[*speculative_decode(target, drafter, [ids], 3, sampling)] for ids in prompts]
        return [output_tokens(row) for row in steps], [[step.accepted for step in row] for row in steps]

    expected = written(whole, drafts)
    assert written(split, drafts) == expected
    assert written(split, split_drafts) == expected
    assert any(0 < accepted < 3 for row in expected[1] for accepted in row)
"""


def run(folder: Path, count: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with words, by torchrun on CPUs where there are several processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", str(count), "--master_port", port]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *(torchrun if count > 1 else []), *words]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=900)


def draftlab(folder: Path, count: int, *words: str) -> dict[str, Any]:
    """Return what a command prints as JSON."""
    folder.mkdir(exist_ok=True)
    (folder / "prompts.jsonl").write_text(PROMPTS)
    done = run(folder, count, "-m", "draftlab", *words, "--device", "cpu", "--dtype", "float32", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def score(target: Path, folder: Path, count: int, *more: str) -> dict[str, Any]:
    options = ["--prompt-file", "prompts.jsonl", "--k", "2", "--max-tokens", "12", "--repeats", "1", "--out", "out"]
    shutil.copytree(target, folder / "draft")  # the target itself
    return draftlab(folder, count, "score", "--target", str(target), "--draft", "draft", *options, *more)


def stored(folder: Path, count: int, words: list[str]) -> list[dict[str, torch.Tensor]]:
    """Return the tensors that one process stores, and those that several store."""
    draftlab(folder / "alone", 1, *words)
    draftlab(folder / "split", count, *words, "--device-map", "tensor-parallel")
    return [load_file(next((folder / at / "store").glob("*.safetensors"))) for at in ("alone", "split")]


def lead(folder: Path, count: int, body: str, *models: Path) -> None:
    """Run the body of a function of directories in the process that leads."""
    (folder / "script.py").write_text(SCRIPT.format(body))
    done = run(folder, count, "script.py", *map(str, models))
    assert "equal" in done.stdout, done.stderr[-3000:]
    assert done.returncode == 0


def draft_of(target: Path, out: Path) -> Path:
    """Save a copy whose weights differ a little: it drafts some tokens right."""
    shutil.copytree(target, out)
    torch.manual_seed(1)
    weights = load_file(target / "model.safetensors")
    save_file(
        {k: v + 0.04 * torch.randn_like(v) for k, v in weights.items()}, out / "model.safetensors", {"format": "pt"}
    )
    return out


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(("family", "ids"), [("llama", None), ("llama3_tied", None), ("llama3_tied", range(9, 99, 2))])
def test_logits_of_a_split_model_are_a_whole_ones(family, ids, count, family_dirs, tmp_path):
    shutil.copytree(family_dirs[family], model := tmp_path / "model")  # 4 kv heads
    if ids:
        write_head_ids(model, ids)
    lead(tmp_path, count, LOGITS, model)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_a_draft_on_one_process_and_on_all_drafts_what_it_drafts_beside_a_whole_target(count, family_dirs, tmp_path):
    lead(tmp_path, count, DRAFTS, family_dirs["llama"], draft_of(family_dirs["llama"], tmp_path / "draft"))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_a_split_target_writes_the_text_of_a_whole_one(count, family_dirs, tmp_path):
    """Also with a drafter that is chosen by times, which every process would measure differently."""
    alone, split = tmp_path / "alone", tmp_path / "split"
    expected = score(family_dirs["llama"], alone, 1, "--device-map", "cpu", "--drafter", "fallback")
    found = score(family_dirs["llama"], split, count, "--device-map", "tensor-parallel", "--drafter", "fallback")
    (one, _), (other, fallback) = expected["scores"], found["scores"]
    assert other["identical"]
    assert fallback["identical"]
    assert other["draft_acceptance_rate"] == one["draft_acceptance_rate"] == 1
    texts = [json.loads((at / "out" / "draft" / "score.json").read_text()) for at in (alone, split)]
    assert [g["tokens"] for g in texts[0]["plain"]] == [g["tokens"] for g in texts[1]["plain"]]
    assert sorted(path.name for path in split.iterdir()) == ["draft", "out", "prompts.jsonl"]  # one process writes


@pytest.mark.slow
def test_a_score_has_its_drafts_on_all_processes(family_dirs, tmp_path):
    split = {"device_map": "tensor-parallel", "draft_device_map": "tensor-parallel"}
    words = [word for name, value in split.items() for word in (f"--{name.replace('_', '-')}", value)]
    (one,) = score(family_dirs["llama"], tmp_path / "alone", 1, "--device-map", "cpu")["scores"]
    (other,) = score(family_dirs["llama"], tmp_path / "split", 2, *words)["scores"]
    assert other["identical"]
    assert other["draft_acceptance_rate"] == one["draft_acceptance_rate"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_a_split_target_stores_the_outputs_of_a_whole_one(count, family_dirs, tmp_path):
    words = ["outputs", "build", "--use", "replay", "--target", str(family_dirs["llama"]), "--out", "store"]
    words += ["--prompt-file", "prompts.jsonl", "--max-new-tokens", "9"]
    whole, split = stored(tmp_path, count, words)
    exact = [name for name, values in whole.items() if not values.is_floating_point()]
    assert exact
    assert all(torch.equal(whole[name], split[name]) for name in exact)


@pytest.mark.slow
def test_a_split_target_stores_what_to_distil_from(family_dirs, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"def f{i}(line):\n    return [line, {i}]\n" * 60 for i in range(40)))
    words = ["outputs", "build", "--use", "distill", "--target", str(family_dirs["llama"]), "--out", "store"]
    words += ["--data", str(text), "--num-sequences", "8", "--seq-len", "32", "--top-logprobs", "4"]
    whole, split = stored(tmp_path, 2, words)
    for name, values in whole.items():
        if values.is_floating_point():
            torch.testing.assert_close(split[name].float(), values.float(), rtol=1e-3, atol=1e-3)
        else:
            assert torch.equal(split[name], values), name


@pytest.mark.slow
def test_the_passes_of_a_split_model_are_timed(family_dirs, tmp_path):
    words = ["profile", str(family_dirs["llama"]), "--mode", "eager", "--device-map", "tensor-parallel", "--out", "out"]
    found = draftlab(tmp_path, 2, *words, "--k", "1", "--context", "8", "--repeats", "3")
    assert found
    (profile,) = (tmp_path / "out").glob("*.yaml")
    assert read_profile(profile).forward[0].median_ms > 0


@pytest.mark.slow
def test_an_error_of_the_leader_ends_all_processes_with_one_line(family_dirs, tmp_path):
    words = ["-m", "draftlab", "score", "--target", str(family_dirs["llama"]), "--draft", "none", "--device", "cpu"]
    done = run(tmp_path, 2, *words, "--device-map", "tensor-parallel")
    assert done.returncode == 1
    assert len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) == 1


def refused(*words: str, **environ: str) -> str:
    result = CliRunner(env=environ).invoke(app, list(words))
    assert result.exit_code == 1, result.output
    return result.stderr


def test_one_process_splits_nothing(family_dirs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = str(family_dirs["llama"])
    text = refused("profile", model, "--device-map", "tensor-parallel", "--mode", "eager", "--device", "cpu")
    assert "start it with torchrun" in text


DRAFTS_TOO = {"target": "tiny", "draft_device_map": "tensor-parallel"}


def test_drafts_are_split_only_beside_a_split_target():
    with pytest.raises(UserError, match="--draft-device-map: needs --device-map tensor-parallel"):
        ScoreConfig.build(DRAFTS_TOO | {"device_map": "auto"})


def test_a_drafter_without_a_model_is_not_split():
    drafters = {"device_map": "tensor-parallel", "drafter": ["prompt-lookup", "ngram"]}
    with pytest.raises(UserError, match="--draft-device-map: no drafter here has a draft model"):
        ScoreConfig.build(DRAFTS_TOO | drafters)
    ScoreConfig.build(DRAFTS_TOO | drafters | {"drafter": ["fallback"]})
    ScoreConfig.build(DRAFTS_TOO | drafters | {"drafter": []})  # the newest draft


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 1}, "2 processes cannot share the 1 key-value heads of .*draft"),
        ({"pard_token": 300}, "--draft-device-map: .*draft is a parallel draft, which runs in one process"),
    ],
)
def test_drafts_that_processes_cannot_share_are_refused_before_they_are_loaded(
    changes, words, family_dirs, tmp_path, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    shutil.copytree(family_dirs["llama"], draft := tmp_path / "draft")
    file = draft / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    maps = {"device_map": "tensor-parallel", "draft_device_map": "tensor-parallel", "device": "cpu"}
    files = {"target": str(family_dirs["llama"]), "draft": [str(draft)], "prompt_file": tmp_path / "prompts.jsonl"}
    with pytest.raises(UserError, match=words):
        set_up(ScoreConfig.build(maps | files), weights=False)


def test_several_processes_without_a_split_are_refused():
    assert "or in several with --device-map tensor-parallel" in refused("score", WORLD_SIZE="2", RANK="0")


@pytest.mark.parametrize("config", [DistillConfig, EagleConfig])
def test_training_splits_no_target(config):
    with pytest.raises(UserError, match="training shards its target by FSDP2"):
        config.build({"target": "tiny", "device_map": "tensor-parallel"})


def test_heads_that_do_not_divide_among_processes_are_refused(family_dirs, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match=r"3 processes cannot share the 4 key-value heads of .*; want 2, 4$"):
        tensor_parallel.check(family_dirs["llama"])
