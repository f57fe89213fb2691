"""Every command that draftlab proposes can be typed in a shell, whatever the names of folders and files are."""

import shlex
import shutil
from pathlib import Path

import pytest
from helpers.commands import proposed, read_by_shell
from helpers.small_files import write_functions, write_workspace
from helpers.typed import call

import draftlab
from draftlab.commands.settings.replay import ReplayConfig
from draftlab.shell import typed

PRUNE = "prune --layers 2 --width 32 --calibration-tokens 128 --seq-len 32"
SCORE = "score --mode eager --num-prompts 2 --prompt-tokens 8 --max-new-tokens 6 --repeats 1 --k 1"
NAMES = ["a b", "größe", 'it\'s "so"', "$(touch x)`y`;&", "-dash", "~", "#1*?", "v@2"]


def option(words: list[str], flag: str) -> Path:
    return Path(words[words.index(flag) + 1])


@pytest.mark.parametrize("name", NAMES)
def test_a_chain_of_proposed_commands_reads_what_was_written(name, tmp_path, monkeypatch, family_dirs):
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_workspace(family_dirs["llama"], write_functions(folder / "text.txt", repeats=9), folder)
    out = Path(name)
    words = proposed(call(PRUNE, "--out", out))
    assert option(words, "--draft") == out
    call("", *words[1:], "--dry-run")
    words = proposed(call("check --files-only --for transformers", typed_path(out)))
    assert Path(words[2]) == out
    call("", *for_small_heads(words), "--dry-run")
    scores = Path(f"{name} scores")
    words = proposed(call(SCORE, "--draft", out, "--out", scores))
    assert {out, scores} & set(map(Path, words))
    call("", *for_small_heads(words), *(["--dry-run"] if words[1] == "export" else []))
    served = Path(f"{name} served")
    shown = call("export --to transformers", typed_path(out), "--out", served).stdout
    (line,) = (line for line in shown.splitlines() if line.startswith("serve with: "))
    words = read_by_shell(line.removeprefix("serve with: "))
    assert Path(words[1]).is_file()
    assert not words[1].startswith("-")


@pytest.mark.parametrize("name", ["a b", "v@2", "-dash"])
def test_replay_proposes_to_profile_what_it_read(name, tmp_path, monkeypatch, family_dirs):
    monkeypatch.chdir(tmp_path)
    write_workspace(family_dirs["llama"], write_functions(tmp_path / "text.txt", repeats=9), tmp_path)
    call(PRUNE, "--out", name)
    call("outputs build --use replay --num-prompts 2 --prompt-tokens 8 --max-new-tokens 6 --out store")
    words = proposed(call("replay store --draft", name))
    assert {Path(word).name for word in words[2:]} == {family_dirs["llama"].name, name}
    call("", *words[1:], "--k", 1, "--context", 8, "--repeats", 3, "--mode", "eager")
    shutil.copytree(name, tmp_path / "other" / family_dirs["llama"].name)
    alike = call("replay store --out again --draft", tmp_path / "other" / family_dirs["llama"].name)
    assert "next: " not in alike.stderr  # profile names models by their directories


def for_small_heads(words: list[str]) -> list[str]:
    """Return the arguments of a command, with another format in place of vLLM's, whose heads are larger."""
    return ["hf" if word == "vllm" else word for word in words[1:]]


def typed_path(path: Path) -> str:
    """Return the path as an argument that is no option."""
    return f"./{path}"


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_command_reads_the_same_directory(name):
    line = ReplayConfig.build({"directory": Path(name), "draft": [name]}).command_line("replay")
    words = shlex.split(line)
    assert not words[-1].startswith("-")
    assert (Path(words[-1]), option(words, "--draft")) == (Path(name), Path(name))


def test_a_word_that_is_no_path_keeps_its_dash():
    assert typed("draftlab", "prune", "--out", Path("-x")) == "draftlab prune --out ./-x"


def test_proposed_commands_name_what_was_given_where_there_is_no_workspace(tmp_path, monkeypatch, family_dirs):
    """Without draftlab.yaml the default target is a model that is not here."""
    monkeypatch.chdir(tmp_path)
    target, data = family_dirs["llama"], tmp_path / "text.txt"
    write_functions(data, repeats=40)
    given = ["--target", target, "--data", data]
    words = proposed(call(PRUNE, "--source", target, "--data", data, "--out", "cut"))
    assert (option(words, "--target"), option(words, "--data")) == (target, data)
    training = "--steps 1 --batch-size 1 --seq-len 32 --training-dtype float32 --save-steps 1"
    words = proposed(call("", *words[1:], *training.split(), "--out", "distilled"))
    assert option(words, "--target") == target
    call("", *words[1:], "--dry-run")
    words = proposed(call("check --files-only --for transformers distilled", *given[:2]))
    assert words[-1] == "transformers"
    call("", *words[1:], "--dry-run")
    words = proposed(call("design --params 20k --layers 1,2 --source", target))
    call("", *words[1:], "--data", data, "--seq-len", "32", "--dry-run")


def test_the_papers_workspace_proposes_the_papers_draft(tmp_path, monkeypatch):
    """The page of the paper has the same command, without the --dry-run that a source on the hub gets."""
    monkeypatch.chdir(tmp_path)
    words = proposed(call("init --preset llama-65b"))
    assert words[-1] == "--dry-run"
    page = (Path(draftlab.__file__).parents[1] / "docs/paper.md").read_text()
    after = page.split("draftlab init --preset llama-65b\n")[1]
    assert shlex.split(after.splitlines()[0], comments=True) == words[:-1]


def test_a_report_in_another_folder_proposes_no_draft_that_is_not_there(tmp_path, monkeypatch, family_dirs):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write_workspace(family_dirs["llama"], write_functions(Path("text.txt"), repeats=9), Path())
    call(f"{PRUNE} --out cut")
    call(f"{SCORE} --draft cut --out scores")
    monkeypatch.chdir(tmp_path / "there")
    shown = call("report ../here/scores --html report.html").stderr
    assert "next: draftlab export" not in shown


def test_profiles_of_a_target_and_a_draft_propose_their_prediction(tmp_path, monkeypatch, family_dirs):
    monkeypatch.chdir(tmp_path)
    models = [family_dirs["llama"], family_dirs["qwen3"]]
    few = "--k 2 --batch 2,4 --context 16,200 --repeats 3 --mode eager --out profiles"
    words = proposed(call(f"profile {few}", *models))
    call("", *words[1:])
