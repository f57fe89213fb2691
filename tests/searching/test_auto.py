"""auto from an empty folder to a verdict; what is done is not done again, and a killed run ends as one that was not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.builders import SIZES, save_neox
from helpers.small_files import copy_tokenizer, write_rows
from helpers.typed import call
from transformers import LlamaConfig, LlamaForCausalLM

from draftlab.reading import read_model
from draftlab.recipe import read_recipe
from draftlab.searching.plan import Plan
from draftlab.searching.schedule import read_search
from draftlab.searching.verdict import Verdict, judged


@pytest.fixture
def space(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = (f"def parse{i}(line):\n    value = line.split()[{i}]\n" for i in range(112))
    write_rows(Path("prompts.jsonl"), ({"prompt": line} for line in lines))
    return tmp_path


def times(folder):
    return {str(file): os.stat(file).st_mtime_ns for file in folder.rglob("*/draftlab.json")}


def test_a_target_that_cannot_be_pruned_gets_a_verdict_on_lookup(space, tokenizer_dir):
    save_neox(space / "neox", tokenizer_dir)
    typed = "auto neox --for vllm --out out --prompts prompts.jsonl --threads 1"
    call(typed)
    verdict = read_model(Verdict, space / "out", "auto.json")
    assert (verdict.use, verdict.reason) == judged(verdict.speedups)
    assert verdict.choice == ("prompt lookup" if verdict.use else "no draft")
    assert verdict.use or verdict.would_change
    assert "draft" in verdict.left_out
    page = (space / "out/index.html").read_text()
    assert verdict.reason in page
    assert (verdict.seconds, "tokens per CPU second" in page) == ("cpu", True)
    assert (space / "out/export/serve.sh").is_file() == verdict.use
    assert all(step.is_done() for step in read_recipe(space / "out/recipe.yaml"))
    before = times(space / "out")
    call(typed)
    assert times(space / "out") == before
    assert "--streams" in call(f"{typed} --streams 1,2", code=1).output


def test_ready_drafts_without_prompts_to_train_on_are_measured(space, tokenizer_dir):
    prompts = Path("prompts.jsonl")
    prompts.write_text("".join(prompts.read_text().splitlines(keepends=True)[:72]))
    save_target(space / "target", tokenizer_dir)
    save_target(space / "sibling", tokenizer_dir, layers=1)
    call("auto target --draft sibling --minutes 1 --out out --prompts prompts.jsonl --threads 1")
    verdict = read_model(Verdict, space / "out", "auto.json")
    ranked = {(choice.kind, choice.name) for choice in verdict.ranking}
    assert ranked == {("draft", "sibling"), ("prompt-lookup", "latest-lookup")}
    steps = {step.out.name for step in read_recipe(space / "out/recipe.yaml")}
    assert steps <= {"score", "final", "export"}


def save_target(folder, tokenizer_dir, layers=12):
    """Save a random target."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = SIZES | {"num_hidden_layers": layers, "max_position_embeddings": 512}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    copy_tokenizer(tokenizer_dir, folder)


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
    """It does not matter whether a draft of a random target pays; every step must run once."""
    save_target(space / "target", tokenizer_dir)
    typed = "auto target --minutes 4 --prompts prompts.jsonl --threads 1 --out out"
    state = space / "out/.search.state"

    def in_first_rung():
        return any(state.glob("rung-1/*/draftlab.json"))

    killed_when(in_first_rung, [sys.executable, "-m", "draftlab", *typed.split()], space / "log")
    plan, before = (space / "out/plan.json").read_text(), times(space / "out")
    cut = {file.parent.name for file in state.glob("rung-0/*/draftlab.json")}
    assert not (space / "out/search").exists()
    call(typed)
    assert (space / "out/plan.json").read_text() == plan
    after = times(space / "out")
    finished = {file: stamp for file, stamp in before.items() if ".search.state" not in file}
    assert finished
    assert finished.items() <= after.items()
    assert {trial.name for trial in read_search(space / "out/search").rungs[0].trials} == cut
    verdict = read_model(Verdict, space / "out", "auto.json")
    planned = read_model(Plan, space / "out", "plan.json")
    assert "draft" in planned.candidates
    tried = {*planned.candidates} - {*verdict.left_out}
    assert {choice.kind for choice in verdict.ranking} == tried
    assert verdict.training is not None
    call(typed)
    assert read_model(Verdict, space / "out", "auto.json") == verdict


@pytest.mark.slow
def test_tiny_from_an_empty_folder(tmp_path, monkeypatch):
    """Its answers repeat themselves, so that copying surely gains; all that the page names is there."""
    monkeypatch.chdir(tmp_path)
    call("auto tiny --data stdlib --minutes 4 --threads 1")
    out = tmp_path / "runs/auto-tiny"
    verdict = read_model(Verdict, out, "auto.json")
    assert verdict.use
    assert verdict.speedups[1].low > 1
    assert verdict.minutes < 1.5 * verdict.planned_minutes
    assert len(verdict.ranking) >= 3
    assert verdict.serve.startswith("draftlab score --target tiny --drafter ")
    assert all(step.is_done() for step in read_recipe(out / "recipe.yaml"))
    assert verdict.training is not None
    assert verdict.training.stopped in (out / "index.html").read_text()
