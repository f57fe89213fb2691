"""The command line as a stranger meets it: results on stdout, one clear line on stderr, the right exit code."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typed import call

from draftlab import cli, data, workspace
from draftlab.commands import COMMANDS
from draftlab.commands.distill import DistillConfig
from draftlab.commands.score import ScoreConfig
from draftlab.config.outputs import ReplayConfig
from draftlab.errors import UserError
from draftlab.model import native_cpu
from draftlab.model.shape import parse_numbers
from draftlab.results.score import read_score


@pytest.fixture(scope="module")
def made(tmp_path_factory, family_dirs) -> Path:
    """A workspace around the small llama, with a draft that was cut from it."""
    folder = tmp_path_factory.mktemp("made")
    text = folder / "text.txt"
    text.write_text(
        "\n\n".join(f"def f{i}(line):\n    return [line, {i}]\n" * 9 for i in range(80))
    )
    target = str(family_dirs["llama"])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        workspace.write(workspace.Workspace(target=target, source=target, data=str(text)))
        call(PRUNE)
    return folder


@pytest.fixture
def space(tmp_path, monkeypatch, made) -> Path:
    """The workspace alone."""
    shutil.copy(made / "draftlab.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def drafted(space, made) -> Path:
    """The workspace with its draft."""
    shutil.copytree(made / "runs", space / "runs")
    return space


def refused(command: str, *arguments: str) -> str:
    """The one line a user error gives, after notes on the draft that was taken and on the time that loading takes."""
    result = call(command, *arguments, code=1)
    assert result.stdout == ""
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    return line


PRUNE = "prune --layers 2 --width 32 --calibration-tokens 128 --seq-len 32"
DISTILL = "distill --steps 2 --batch-size 2 --seq-len 16 --training-dtype float32"
SCORE = "score --num-prompts 2 --prompt-tokens 8 --max-new-tokens 6 --repeats 1 --k 1,2"


def test_the_three_commands_work_as_typed_in_a_workspace(space):
    assert "2 x 32" in call(PRUNE).stdout
    assert "acceptance" in call(DISTILL).stdout
    scored = json.loads(call(SCORE, "--json").stdout)
    assert {row["num_speculative_tokens"] for row in scored["scores"]} == {1, 2}
    page = call("report --html page.html").stdout.split()[-1]
    assert (space / page).read_text().startswith("<!doctype html>")
    made = {p.name for p in (space / "runs").iterdir()}
    assert made == {"prune-2x32", "distill-2x32", "score-2x32"}


def test_what_is_finished_is_not_overwritten(drafted):
    assert "--force" in refused(PRUNE)
    call(PRUNE, "--force")


def test_a_plan_has_minutes_and_every_command_names_the_next(space):
    plan = json.loads(call(PRUNE, "--dry-run", "--json").stdout)
    assert 0 < plan["minutes"] < 1
    assert not (space / "runs").exists()
    made = json.loads(call(PRUNE, "--json").stdout)
    assert (plan["next"].split()[:2], made["next"]) == (
        ["draftlab", "prune"],
        "draftlab distill --draft runs/prune-2x32",
    )
    assert json.loads(call(DISTILL, "--dry-run", "--json").stdout)["minutes"] > 0
    assert call(DISTILL).stderr.splitlines()[-1] == "next: draftlab score --draft runs/distill-2x32"


def test_a_missed_bar_exits_with_3_after_the_results_are_kept(drafted):
    result = call(SCORE, "--min-speedup", "99", code=3)
    assert "--min-speedup" in result.stderr
    assert (drafted / "runs/score-2x32/prune-2x32/score.json").is_file()


@pytest.mark.parametrize("mask", [0o077])
def test_outputs_can_be_read_by_whom_the_umask_lets(space, mask):
    before = os.umask(mask)
    try:
        call(PRUNE)
    finally:
        os.umask(before)
    out = space / "runs/prune-2x32"
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o666 & ~mask}
    assert out.stat().st_mode & 0o777 == 0o777 & ~mask


def test_mode_auto_is_compiled_where_it_can_be(drafted, monkeypatch):
    score = f"{SCORE} --mode auto --force"
    call(score)
    file = drafted / "runs/score-2x32/prune-2x32/score.json"
    assert read_score(file).conditions.mode == "native"
    native_cpu.library.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert "eager" in call(score).stderr
    assert read_score(file).conditions.mode == "eager"
    assert "bfloat16" in call(f"{score} --dtype float16").stderr


def test_without_git_a_record_names_no_commit(space, monkeypatch):
    monkeypatch.setenv("PATH", "")
    call(PRUNE)
    assert (
        "git" not in json.loads((space / "runs/prune-2x32/draftlab.json").read_text())["versions"]
    )
    assert "git: " not in call("env").stdout


@pytest.mark.parametrize("torn", ['{"command": "prune"', "\xff"])
def test_an_output_with_a_torn_record_is_skipped(drafted, torn):
    (drafted / "runs/other").mkdir()
    (drafted / "runs/other/draftlab.json").write_bytes(torn.encode("latin-1"))
    result = call("distill --dry-run --steps 2")
    assert "runs/prune-2x32" in result.stderr
    assert sum("runs/other" in line for line in result.stderr.splitlines()) == 1


def test_the_newest_draft_counts_whether_it_was_cut_or_distilled(tmp_path):
    for name, command, second in (
        ("a", "distill", 1),
        ("b", "prune", 2),
        ("c", "distill", 2),
        ("d", "score", 3),
    ):
        (tmp_path / name).mkdir()
        record = {
            "command": command,
            "created": f"2026-01-01T00:00:0{second}+00:00",
            "seconds": 1,
            "versions": {},
        }
        rest = {"config": {}, "inputs": {}, "peak_memory_bytes": 1}
        (tmp_path / name / "draftlab.json").write_text(json.dumps(record | rest))
    both = ("distill", "prune")
    assert workspace.newest(tmp_path, both) == tmp_path / "c"
    (tmp_path / "c/draftlab.json").unlink()
    assert workspace.newest(tmp_path, both) == tmp_path / "b"
    assert workspace.newest(tmp_path, ("law",)) is None


def test_a_shape_without_weights_can_be_planned_with_and_not_cut(space):
    shape = "--source llama-3.2-3b --layers 8 --width 1536"
    planned = json.loads(call(f"prune {shape} --dry-run --json").stdout)
    assert planned["source"] == "28 x 3072, 24/8 heads of 128, ffn 8192, 3.21B parameters"
    refused("prune --source llama-3.2-3b --layers 8")


def test_text_that_cannot_be_held_out_is_refused_before_calibrating(space):
    Path("short.txt").write_text("def f(x):\n    return x\n" * 20)
    assert data.documents("short.txt", "train")
    result = call(PRUNE, "--data", "short.txt", code=1)
    assert "heldout" in result.stderr
    assert "calibrate" not in result.stderr


def test_init_writes_a_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call("init --preset tiny")
    assert workspace.load() == workspace.PRESETS["tiny"]


@pytest.mark.parametrize("name", [*COMMANDS, "run"])
def test_every_command_explains_itself(name):
    out = call(f"{name} --help").output
    assert "Usage:" in out
    assert "--json" in out


def test_a_draft_goes_by_its_place_or_by_its_name(space):
    call(PRUNE, "--out", "cut")
    by_place, by_name = (
        call(f"check {typed} --files-only --for transformers").output
        for typed in ("cut", "--draft cut")
    )
    assert by_place == by_name
    assert refused("export --draft none") == refused("export none")
    assert "twice" in call("check a --draft b", code=2).stderr


def test_parse_numbers():
    assert parse_numbers("1-3,8") == [1, 2, 3, 8]
    assert parse_numbers("1-10000") == list(range(1, 10_001))
    assert parse_numbers("1-6,3-8") == list(range(1, 9))
    for bad in ("", "a", "3-", "-2", "0", "2-1", "1-10001", "1-9999,20000-20002"):
        with pytest.raises(UserError):
            parse_numbers(bad)


def test_numbers_of_files_keep_the_rules_of_the_command_line():
    built = [ScoreConfig.build({"k": k}).k for k in ([3, 1, 1], "1-3", 2)]
    assert built == [[1, 3], [1, 2, 3], [2]]
    for bad in ([], [0], [-1], [True], ["a"], [1, 1001]):
        with pytest.raises(UserError):
            ScoreConfig.build({"k": bad})


def test_a_score_says_how_it_sampled(drafted):
    call(f"{SCORE} --temperature 0.9 --top-k 7 --top-p 0.8 --min-p 0.01 --rule match")
    stored = read_score(drafted / "runs/score-2x32/prune-2x32").conditions
    assert (stored.temperature, stored.top_k, stored.top_p, stored.min_p, stored.rule) == (
        0.9,
        7,
        0.8,
        0.01,
        "match",
    )


def test_a_tree_is_verified_by_the_recursive_rule(drafted):
    call(f"{SCORE} --temperature 0.9 --drafter tree:widths=2 --drafter prompt-lookup --k 2")
    rules = {
        read_score(path).conditions.rule
        for path in (drafted / "runs/score-tree-prompt-lookup").glob("*/")
    }
    assert rules == {"recursive", "rejection"}


def test_passes_without_a_draft_count_as_passes(space):
    """Lookup finds nothing now and then: tokens per target pass are over all passes, acceptance over the others."""
    scored = call(f"{SCORE} --drafter prompt-lookup --k 2 --json").stdout
    row = json.loads(scored)["scores"][0]
    found = read_score(space / "runs/score-prompt-lookup/prompt-lookup")
    steps = [pair for g in found.generations(2) for pair in zip(g.drafted, g.emitted, strict=True)]
    assert sum(drafted == 0 for drafted, _ in steps) > 0
    assert row["tokens_per_target_pass"] == sum(emitted for _, emitted in steps) / len(steps)
    assert (
        row["tokens_per_target_pass"] < 1 + row["num_accepted_draft_tokens"] / row["num_spec_steps"]
    )
    assert row["break_even_length"] == pytest.approx(
        row["tokens_per_target_pass"] / row["tpot_speedup"]
    )


def test_the_installed_script_runs():
    script = Path(sys.executable).parent / "draftlab"
    out = subprocess.run(
        [script, "--version"], capture_output=True, text=True, check=True, env=os.environ
    )
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", out.stdout)


def test_a_prompt_file_is_read_whole_and_scored_by_category(drafted):
    rows = [
        {"prompt": "def f(line):\n    return", "category": "code"},
        {"turns": ["return 1"], "category": "chat"},
    ]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
    how = "--k 1 --max-new-tokens 4 --repeats 1 --prompt-file prompts.jsonl --json"
    found = json.loads(call(f"score {how}").stdout)
    (categories,) = found["categories"].values()
    assert [(row["category"], row["prompts"]) for row in categories] == [("chat", 2), ("code", 2)]
    kept = read_score(drafted / "runs/score-2x32/prune-2x32")
    assert kept.environment is not None
    assert [p.tokens for p in kept.prompts][:2] == [p.tokens for p in kept.prompts][2:]
    assert kept.prompts[0].tokens != kept.prompts[1].tokens


def test_a_recorded_command_line_can_be_typed_again():
    settings = {"directory": Path("runs/a store"), "draft": ["a", "b"], "k": "2,3", "rule": "match"}
    line = ReplayConfig.build(settings).command_line("replay")
    assert line == "draftlab replay --rule match --draft a --draft b --k 2,3 'runs/a store'"
    trimmed = DistillConfig.build({"draft": "a", "outputs": "b", "vocab": "16k"}).command_line(
        "distill"
    )
    assert trimmed == "draftlab distill --draft a --outputs b --vocab 16384"


@pytest.mark.parametrize(
    ("command", "cure"), [("distill", "--micro-batch-tokens"), ("score", "--batch")]
)
def test_a_device_without_memory_is_one_line_that_says_what_to_lower(command, cure, capsys):
    def fail() -> cli.Outcome:
        raise torch.OutOfMemoryError("CUDA out of memory. GPU 0 has a total capacity of 79.1 GiB\n")

    with pytest.raises(typer.Exit) as stopped:
        cli._exit_with(fail, False, COMMANDS[command].config)
    assert stopped.value.exit_code == 1
    found = capsys.readouterr()
    assert cure in found.err
    assert (found.out, found.err.count("\n")) == ("", 1)


def test_any_other_runtime_error_is_a_bug_and_shows_its_traceback():
    def fail() -> cli.Outcome:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        cli._exit_with(fail, False, COMMANDS["report"].config)


def test_an_interrupt_before_the_command_begins_is_no_traceback(monkeypatch, capsys):
    # a job in the background ignores it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("draftlab.cli.app", lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    monkeypatch.undo()
    signal.signal(signal.SIGINT, before)
    assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted\n")
