"""--force replaces an output of draftlab, and nothing else."""

import shutil
from pathlib import Path

import pytest
from helpers.errors import raises_option

from draftlab.commands import COMMANDS


@pytest.fixture
def space(tmp_path, monkeypatch, family_dirs) -> Path:
    """Return a folder with a checkpoint, and an output that was made of it."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(family_dirs["llama"], "llama")
    export("llama", "made")
    return tmp_path


def export(draft: str, out: str, **others: bool) -> None:
    COMMANDS["export"](draft=draft, target="llama", to="hf", out=Path(out), **others)


def test_an_earlier_output_is_replaced_and_named(space, capsys):
    Path("made/note.md").write_text("of the earlier output")
    export("llama", "made", force=True)
    assert not Path("made/note.md").exists()
    assert "made" in capsys.readouterr().err


def test_an_empty_folder_is_an_output_place(space):
    Path("empty").mkdir()
    export("llama", "empty", force=True)
    assert Path("empty/draftlab.json").exists()


@pytest.mark.parametrize("held", ["thesis", "parent of an input", "the input", "current folder"])
def test_what_is_no_output_or_is_in_use_stays(held, space, monkeypatch):
    out, draft = "made", "llama"
    if held == "thesis":
        out = "thesis"
        Path("thesis").mkdir()
        Path("thesis/chapter").touch()
    elif held == "parent of an input":
        draft = "made/inner"
        shutil.copytree("llama", draft)
    elif held == "the input":
        draft = "made"
    else:
        Path("made/inner").mkdir()
        Path("made/inner/llama").symlink_to(space / "llama")
        monkeypatch.chdir("made/inner")
        out = str(space / "made")
    here = sorted(space.rglob("*"))
    with raises_option("--force" if held != "thesis" else "--out"):
        export(draft, out, force=True)
    assert sorted(space.rglob("*")) == here


def test_a_link_to_an_output_is_checked_as_the_output(space):
    shutil.copytree("llama", "made/inner")
    Path("link").symlink_to("made")
    with raises_option("made/inner", "--force"):
        export("made/inner", "link", force=True)
    assert Path("made/inner").exists()
