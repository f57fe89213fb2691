"""Files that come with draftlab: commands find them by name in any folder, and the wheel has all that they read."""

import tomllib
from pathlib import Path

import pytest
from helpers.errors import raises_option

from draftlab import shipped
from draftlab.commands import COMMANDS
from draftlab.commands.prune import prepare
from draftlab.commands.settings.prune import PruneConfig
from draftlab.errors import UserError
from draftlab.inputs import inputs_of, task_files
from draftlab.recipe import read_recipe

ROOT = Path(__file__).parents[1]
BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
IN_WHEEL = {ROOT / file: place for file, place in BUILD["targets"]["wheel"]["force-include"].items()}


@pytest.mark.parametrize("kind", shipped.FOLDERS)
def test_the_wheel_has_every_file_that_has_a_name_and_what_it_reads(kind):
    """shipped.folder looks for the folder draftlab/KIND in an installed package."""
    named = shipped.named(kind)
    assert named
    for file in named.values():
        for needed in task_files(file) if kind == "tasks" else [file]:
            folder = IN_WHEEL.get(needed.parent)
            place = f"{folder}/{needed.name}" if folder else IN_WHEEL[needed]
            assert place == f"draftlab/{kind}/{needed.name}"


def test_only_names_of_shipped_files_are_listed():
    assert {*shipped.named("recipes")} == {*shipped.RECIPES}
    assert {*shipped.named("tasks")} == {*shipped.TASKS}


@pytest.mark.parametrize("name", shipped.RECIPES)
def test_a_shipped_recipe_reads_no_other_file_of_the_repository(name):
    for step in read_recipe(Path(name)):
        for key in ("shape", "tasks", "prompt_file", "data"):
            value = str(step.settings.get(key, ""))
            assert not (ROOT / value.partition("/")[0]).is_dir() or not value, (key, value)


def test_a_name_is_the_same_file_in_every_folder_and_a_path_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("quickstart").write_text("steps: []\n")
    Path("tiny-4x192").mkdir()
    assert shipped.locate("quickstart", "recipes") == ROOT / "recipes/quickstart.yaml"
    assert shipped.locate("tiny-4x192", "widths") == ROOT / "configs/widths/tiny-4x192.yaml"
    assert shipped.locate(Path("quickstart").resolve(), "recipes") == tmp_path / "quickstart"
    assert read_recipe(Path("quickstart").resolve()) == []
    with pytest.raises(UserError):
        shipped.locate("quickstart.yaml", "recipes")  # no file, and a name has no ending


@pytest.mark.parametrize("name", ["nosuch", "recipes/quickstart.yaml", "quickstrat"])
def test_an_unknown_recipe_is_told_the_shipped_ones(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="quickstart"):
        read_recipe(Path(name))


def prune(shape: object) -> dict[str, object]:
    settings = {"source": "tiny", "data": "stdlib", "shape": str(shape)}
    return dict(prepare(PruneConfig.build(settings), False).facts())


def test_prune_takes_a_shape_by_name_or_by_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    by_name = prune("tiny-4x192")
    assert by_name == prune(ROOT / "configs/widths/tiny-4x192.yaml")
    assert by_name != prune("tiny-3x256")
    with raises_option("--shape"):
        prune("tiny-4x19")


def test_shapes_and_tasks_by_name_are_inputs(tmp_path, monkeypatch):
    """A step of a recipe runs again after an update of draftlab that changed them."""
    settings = {"source": "tiny", "data": "stdlib", "shape": "tiny-4x192"}
    assert "tiny-4x192" in inputs_of(COMMANDS["prune"].config.build(settings))
    settings = {
        "draft": ["d"],
        "target": "t",
        "data": "stdlib",
        "tasks": "code_next_line,hellaswag",
    }
    inputs = inputs_of(COMMANDS["score"].config.build(settings))
    assert inputs.keys() == {"stdlib", "code_next_line"}
    changed = tmp_path / "tasks"
    changed.mkdir()
    for file in shipped.folder("tasks").glob("code_*"):
        (changed / file.name).write_text(file.read_text() + "\n")
    monkeypatch.setitem(shipped.FOLDERS, "tasks", changed)
    assert inputs_of(COMMANDS["score"].config.build(settings))["code_next_line"] != inputs["code_next_line"]
