"""The command line as a stranger meets it: results on stdout, one clear line on stderr, the right exit code."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from helpers.commands import DISTILL, PRUNE, SCORE, drafted_fixture, made_fixture, space_fixture  # noqa: F401
from helpers.small_files import write_rows
from helpers.typed import call

from draftlab import cli, data
from draftlab.commands import COMMANDS
from draftlab.commands.settings.distill import DistillConfig
from draftlab.commands.settings.replay import ReplayConfig
from draftlab.commands.settings.score import ScoreConfig
from draftlab.errors import UserError
from draftlab.model import native_cpu
from draftlab.model.shape import parse_numbers
from draftlab.results.score import read_score
from draftlab.runs import workspace


def test_the_three_commands_work_as_typed_in_a_workspace(space):
    assert "2 x 32" in call(PRUNE).stdout
    assert "acceptance" in call(DISTILL).stdout
    scored = json.loads(call(SCORE, "--json").stdout)
    assert {row["num_speculative_tokens"] for row in scored["scores"]} == {1, 2}
    page = call("report --html page.html").stdout.split()[-1]
    assert (space / page).read_text().startswith("<!doctype html>")
    made = {p.name for p in (space / "runs").iterdir()}
    assert made == {"prune-2x32", "distill-2x32", "score-2x32"}


def test_a_plan_has_minutes_and_every_command_names_the_next(space):
    plan = json.loads(call(PRUNE, "--dry-run", "--json").stdout)
    assert 0 < plan["minutes"] < 1
    assert plan["next"].startswith("draftlab prune ")
    assert not (space / "runs").exists()
    made = json.loads(call(PRUNE, "--json").stdout)
    assert made["next"] == "draftlab distill --draft runs/prune-2x32"
    assert call(DISTILL).stderr.splitlines()[-1] == "next: draftlab score --draft runs/distill-2x32"


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
    record = json.loads((space / "runs/prune-2x32/draftlab.json").read_text())
    assert "git" not in record["versions"]


def test_an_output_with_a_torn_record_is_skipped(drafted):
    for name, torn in (("half", b'{"command": "prune"'), ("noise", b"\xff")):
        (drafted / "runs" / name).mkdir()
        (drafted / "runs" / name / "draftlab.json").write_bytes(torn)
    said = call("distill --dry-run --steps 2").stderr
    assert "runs/prune-2x32" in said
    for name in ("half", "noise"):
        assert sum(f"runs/{name}" in line for line in said.splitlines()) == 1


def test_the_newest_draft_counts_whether_it_was_cut_or_distilled(tmp_path):
    made = (("a", "distill", 1), ("b", "prune", 2), ("c", "distill", 3), ("d", "score", 4))
    for name, command, second in made:
        (tmp_path / name).mkdir()
        record = {"command": command, "created": f"2026-01-01T00:00:0{second}+00:00", "seconds": 1}
        record |= {"versions": {}, "config": {}, "inputs": {}, "peak_memory_bytes": 1}
        (tmp_path / name / "draftlab.json").write_text(json.dumps(record))
    both = ("distill", "prune")
    assert workspace.newest(tmp_path, both) == tmp_path / "c"
    (tmp_path / "c/draftlab.json").unlink()
    assert workspace.newest(tmp_path, both) == tmp_path / "b"
    assert workspace.newest(tmp_path, ("law",)) is None


def test_text_that_cannot_be_held_out_is_refused_before_calibrating(space):
    Path("short.txt").write_text("def f(x):\n    return x\n" * 20)
    assert data.documents("short.txt", "train")
    result = call(PRUNE, "--data", "short.txt", code=1)
    assert "short.txt" in result.stderr
    assert "calibrate" not in result.stderr


def test_init_writes_a_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call("init --preset tiny")
    assert workspace.load() == workspace.PRESETS["tiny"]


def test_parse_numbers():
    assert parse_numbers("1-3,8") == [1, 2, 3, 8]
    assert parse_numbers("1-10000") == list(range(1, 10_001))
    assert parse_numbers("1-6,3-8") == list(range(1, 9))
    for bad in ("", "a", "3-", "-2", "0", "2-1", "1-10000000"):
        with pytest.raises(UserError):
            parse_numbers(bad)


def test_numbers_of_files_keep_the_rules_of_the_command_line():
    named = {"target": "tiny", "data": "stdlib"}
    built = [ScoreConfig.build({"k": k, **named}).k for k in ([3, 1, 1], "1-3", 2)]
    assert built == [[1, 3], [1, 2, 3], [2]]
    for bad in ([], [0], [-1], [True], ["a"], [1, 1001]):
        with pytest.raises(UserError):
            ScoreConfig.build({"k": bad, **named})


def test_a_score_says_how_it_sampled(drafted):
    wanted = {"temperature": 0.9, "top_k": 7, "top_p": 0.8, "min_p": 0.01, "rule": "match"}
    options = [f"--{name.replace('_', '-')} {value}" for name, value in wanted.items()]
    call(f"{SCORE} {' '.join(options)}")
    stored = read_score(drafted / "runs/score-2x32/prune-2x32").conditions
    assert stored.model_dump(include={*wanted}) == wanted


def test_a_tree_is_verified_by_the_recursive_rule(drafted):
    call(f"{SCORE} --temperature 0.9 --drafter tree:widths=2 --drafter latest-lookup --k 2")
    scores = (drafted / "runs/score-tree-latest-lookup").glob("*/")
    assert {read_score(s).conditions.rule for s in scores} == {"recursive", "rejection"}


def test_passes_without_a_draft_count_as_passes(space):
    """Lookup finds nothing now and then: tokens per target pass are over all passes, acceptance over the others."""
    (row,) = json.loads(call(f"{SCORE} --drafter latest-lookup --k 2 --json").stdout)["scores"]
    found = read_score(space / "runs/score-latest-lookup/latest-lookup")
    steps = [pair for g in found.generations(2) for pair in zip(g.drafted, g.emitted, strict=True)]
    assert sum(drafted == 0 for drafted, _ in steps) > 0
    per_pass = row["tokens_per_target_pass"]
    assert per_pass == sum(emitted for _, emitted in steps) / len(steps)
    assert per_pass < 1 + row["num_accepted_draft_tokens"] / row["num_spec_steps"]
    assert row["break_even_length"] == pytest.approx(per_pass / row["tpot_speedup"])


def test_the_installed_script_runs():
    script = Path(sys.executable).parent / "draftlab"
    out = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", out.stdout)


def test_a_prompt_file_is_read_whole_and_scored_by_category(drafted):
    rows = [
        {"prompt": "def f(line):\n    return", "category": "code"},
        {"turns": ["return 1"], "category": "chat"},
    ]
    write_rows(Path("prompts.jsonl"), rows * 2)
    how = "--k 1 --max-new-tokens 4 --repeats 1 --prompt-file prompts.jsonl --json"
    (categories,) = json.loads(call(f"score {how}").stdout)["categories"].values()
    assert [(row["category"], row["prompts"]) for row in categories] == [("chat", 2), ("code", 2)]
    first, second, *again = read_score(drafted / "runs/score-2x32/prune-2x32").prompts
    assert [first.tokens, second.tokens] == [p.tokens for p in again]
    assert first.tokens != second.tokens


def test_a_recorded_command_line_can_be_typed_again():
    settings = {"directory": Path("runs/a store"), "draft": ["a", "b"], "k": "2,3", "rule": "match"}
    line = ReplayConfig.build(settings).command_line("replay")
    assert line == "draftlab replay --draft a --draft b --k 2,3 --rule match 'runs/a store'"
    trimmed = DistillConfig.build({"draft": "a", "outputs": "b", "vocab": "16k"})
    line = trimmed.command_line("distill")
    assert line == "draftlab distill --draft a --outputs b --vocab 16384"


@pytest.mark.parametrize(("command", "cure"), [("distill", "--micro-batch-tokens"), ("score", "--batch")])
def test_a_device_without_memory_is_one_line_and_other_faults_are_bugs(command, cure, capsys):
    def fail(error: Exception) -> None:
        def run() -> cli.Outcome:
            raise error

        cli._exit_with(run, False, COMMANDS[command].config)

    with pytest.raises(typer.Exit) as stopped:
        fail(torch.OutOfMemoryError("CUDA out of memory. GPU 0 has a total capacity of 79.1 GiB\n"))
    assert stopped.value.exit_code == 1
    found = capsys.readouterr()
    assert cure in found.err
    assert (found.out, found.err.count("\n")) == ("", 1)
    with pytest.raises(RuntimeError, match="shapes differ"):
        fail(RuntimeError("shapes differ"))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_types_and_no_code(command):
    text = call(f"{command} --help").stdout
    assert "Usage:" in text
    assert not re.search(r"typing|Annotated|0x[0-9a-f]{4}", text)


def test_an_interrupt_before_the_command_begins_is_no_traceback():
    code = (
        "import signal; from draftlab import cli; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "cli.app = lambda: signal.raise_signal(signal.SIGINT); cli.main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, b"interrupted\n")


def test_a_wrong_command_line_names_its_own_help():
    """A command of a plug-in has a program of its own, which draftlab does not have."""
    assert "see draftlab run --help" in call("run", code=2).stderr
    program = [sys.executable, "-m", "draftlab_research.import_paper_trace"]
    said = subprocess.run(program, capture_output=True, text=True)
    assert said.returncode == 2
    assert "draftlab import-paper-trace" not in said.stderr
