"""auto from an empty folder to a verdict; what is done is not done again, and a killed run ends as one that was not."""

import html
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import SIZES, save_neox
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from draftlab.cli import app
from draftlab.reading import read_model
from draftlab.recipe import read_recipe
from draftlab.searching.plan import Plan, not_tried
from draftlab.searching.schedule import read_search
from draftlab.searching.verdict import Verdict, judged


@pytest.fixture
def space(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [f"def parse{i}(line):\n    value = line.split()[{i}]\n" for i in range(112)]
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    return tmp_path


def ran(*words):
    result = CliRunner().invoke(
        app, ["auto", *map(str, words), "--prompts", "prompts.jsonl", "--threads", "1"]
    )
    assert result.exit_code == 0, result.output
    return result.output


def times(folder):
    return {
        str(file): os.stat(file).st_mtime_ns
        for file in folder.rglob("draftlab.json")
        if file.parent != folder
    }


def test_a_target_that_cannot_be_pruned_gets_a_verdict_on_lookup(space, tokenizer_dir):
    save_neox(space / "neox", tokenizer_dir)
    words = ["neox", "--for", "vllm", "--out", "out"]
    ran(*words)
    verdict = read_model(Verdict, space / "out", "auto.json")
    assert (verdict.use, verdict.reason) == judged(verdict.speedups)
    assert verdict.choice == ("prompt lookup" if verdict.use else "no draft")
    assert verdict.use or verdict.would_change
    assert "draft" in verdict.left_out
    assert (space / "out/report/report.html").is_file()
    page = (space / "out/index.html").read_text()
    assert verdict.reason in page
    assert all(
        html.escape(line).replace("&#x27;", "&#39;") in page for line in not_tried(verdict.left_out)
    )
    assert (space / "out/export/serve.sh").is_file() == verdict.use
    assert all(step.is_done() for step in read_recipe(space / "out/recipe.yaml"))
    before = times(space / "out")
    ran(*words)
    assert times(space / "out") == before
    same = ["auto", *words, "--prompts", "prompts.jsonl", "--threads", "1"]
    assert json.loads(CliRunner().invoke(app, [*same, "--json"]).stdout)["choice"] == verdict.choice
    other = CliRunner().invoke(app, [*same, "--streams", "1,2"])
    assert other.exit_code == 1
    assert "--streams" in other.output


def test_ready_drafts_are_measured_and_nothing_is_trained(space, tokenizer_dir):
    save_target(space / "target", tokenizer_dir)
    save_target(space / "sibling", tokenizer_dir, layers=1)
    ran("target", "--draft", "sibling", "--minutes", "1", "--out", "out")
    verdict = read_model(Verdict, space / "out", "auto.json")
    assert {(choice.kind, choice.name) for choice in verdict.ranking} == {
        ("draft", "sibling"),
        ("prompt-lookup",) * 2,
    }
    assert {step.out.name for step in read_recipe(space / "out/recipe.yaml")} <= {
        "score",
        "final",
        "export",
    }


def test_no_draft_is_advised_where_nothing_gains(space, tokenizer_dir):
    """At a high temperature a random model writes noise, of which nothing repeats: copies are wrong and cost time."""
    save_neox(space / "neox", tokenizer_dir)
    ran("neox", "--for", "vllm", "--temperature", "2", "--out", "out")
    verdict = read_model(Verdict, space / "out", "auto.json")
    assert (verdict.use, verdict.choice, verdict.kind, verdict.k) == (False, "no draft", None, None)
    assert (verdict.serve, verdict.draft) == ("", "")
    assert verdict.speedups[1].low <= 1
    assert verdict.ranking[0].tokens_per_pass < 1.2
    assert verdict.would_change
    assert verdict.head() in (space / "out/index.html").read_text()
    assert not (space / "out/export").exists()


def save_target(folder, tokenizer_dir, layers=12):
    """Save a random target."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = SIZES | {"num_hidden_layers": layers, "max_position_embeddings": 512}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    for file in tokenizer_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())


def killed_when(ready, command, log):
    """Run a command in a process of its own, until ready() is true; then kill it as a power cut would."""
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        while not ready():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_a_run_killed_in_its_search_goes_on_with_what_was_there(space, tokenizer_dir):
    """Whether a draft of a random target pays does not matter; that every step is made once does."""
    save_target(space / "target", tokenizer_dir)
    words = [
        "auto",
        "target",
        "--minutes",
        "4",
        "--prompts",
        "prompts.jsonl",
        "--threads",
        "1",
        "--out",
        "out",
    ]
    state = space / "out/.search.state"

    def in_first_rung():
        return any(state.glob("rung-1/*/draftlab.json"))

    killed_when(in_first_rung, [sys.executable, "-m", "draftlab", *words], space / "log")
    plan, before = (space / "out/plan.json").read_text(), times(space / "out")
    cut = {file.parent.name for file in state.glob("rung-0/*/draftlab.json")}
    assert not (space / "out/search").exists()
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert (space / "out/plan.json").read_text() == plan
    after = times(space / "out")
    finished = {file: stamp for file, stamp in before.items() if ".search.state" not in file}
    assert finished
    assert finished.items() <= after.items()
    assert {trial.name for trial in read_search(space / "out/search").rungs[0].trials} == cut
    verdict = read_model(Verdict, space / "out", "auto.json")
    planned = read_model(Plan, space / "out", "plan.json")
    assert "draft" in planned.candidates
    assert {choice.kind for choice in verdict.ranking} == {*planned.candidates} - {
        *verdict.left_out
    }
    assert verdict.training is not None
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 0
    assert read_model(Verdict, space / "out", "auto.json") == verdict


@pytest.mark.slow
def test_tiny_from_an_empty_folder(tmp_path, monkeypatch):
    """Its answers repeat themselves, so that copying surely gains; all that the page names is there."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["auto", "tiny", "--minutes", "4", "--threads", "1"])
    assert result.exit_code == 0, result.output
    out = tmp_path / "runs/auto-tiny"
    verdict = read_model(Verdict, out, "auto.json")
    assert verdict.use
    assert verdict.speedups[1].low > 1
    assert verdict.minutes < 1.5 * verdict.planned_minutes
    assert len(verdict.ranking) >= 3
    assert verdict.serve.startswith("draftlab score --target tiny --drafter ")
    assert all(step.is_done() for step in read_recipe(out / "recipe.yaml"))
    assert (out / "report/report.html").is_file()
    assert verdict.training is not None
    assert verdict.training.stopped in (out / "index.html").read_text()
