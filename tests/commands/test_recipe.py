"""Recipes are checked as a whole before they run, and what is done is not done again."""

import shutil
from pathlib import Path

import pytest
import yaml
from helpers.small_files import write_functions, write_workspace

from draftlab import shipped
from draftlab.recipe import RUN, read_recipe
from draftlab.runs import provenance

ROOT = Path(__file__).parents[2]
KNOWN = {  # on the hub, shipped, or made before the recipe
    *shipped.named("widths"),
    "huggyllama/llama-7b",
    "huggyllama/llama-65b",
    "tiny",
    "runs/tiny-target/new",
}


def write(path: Path, *steps: object) -> Path:
    path.write_text(yaml.safe_dump({"steps": list(steps)}))
    return path


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_recipes_are_valid_and_name_files_that_exist(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    steps = read_recipe(path)
    made = {str(step.out) for step in steps}
    assert set(RUN(recipe=path, plan_only=True).data) == {"steps"}
    assert path.read_text().startswith("# ")
    for step in steps:
        for key in ("source", "draft", "target", "shape", "tokenizer", "model"):
            value = step.settings.get(key) or []
            for name in map(str, value if isinstance(value, list) else [value]):
                assert name in made | KNOWN or Path(name).exists(), (step.command.name, key, name)


def test_a_head_that_an_earlier_step_will_make_is_replayed_with_its_target(tmp_path):
    head, outputs = str(tmp_path / "head"), str(tmp_path / "outputs")
    distill = {"student": "eagle", "target": "tiny", "data": "stdlib", "out": head}
    replay = {"directory": outputs, "draft": [head], "target": "tiny", "out": str(tmp_path / "out")}
    recipe = write(tmp_path / "r.yaml", {"distill": distill}, {"replay": replay})
    shown = RUN(recipe=recipe, plan_only=True).show
    assert shown == [f"distill {head}: to do", f"replay {tmp_path / 'out'}: to do"]


def test_finished_steps_are_skipped_until_their_inputs_or_arguments_change(tmp_path, family_dirs):
    source = shutil.copytree(family_dirs["llama"], tmp_path / "source")
    options = {"source": str(source), "data": write_functions(tmp_path / "text.txt", 60, 40)}
    options |= {"layers": 2, "calibration_tokens": 64, "seq_len": 32}
    recipe = tmp_path / "r.yaml"

    def steps(**changes):
        first = options | {"out": str(tmp_path / "a")} | changes
        second = options | {"out": str(tmp_path / "b"), "layers": 3}
        return read_recipe(write(recipe, {"prune": first}, {"prune": second}))

    steps()
    shown = RUN(recipe=recipe, plan_only=True).show
    assert shown == [f"prune {tmp_path / name}: to do" for name in "ab"]
    assert not (tmp_path / "a").exists()
    RUN(recipe=recipe)
    made = provenance.read_record(tmp_path / "a")
    assert all(step.is_done() for step in steps())
    RUN(recipe=recipe)
    assert provenance.read_record(tmp_path / "a") == made
    assert not steps(layers=1)[0].is_done()
    with (source / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"\x01")
    assert not any(step.is_done() for step in steps())


def test_steps_without_names_of_outputs_and_drafts_are_found_again(family_dirs, tmp_path, monkeypatch, capsys):
    """The names come from the newest draft, which the steps before them made."""
    monkeypatch.chdir(tmp_path)
    write_workspace(family_dirs["llama"], write_functions(tmp_path / "text.txt", 60, 8))
    few = {"steps": 1, "batch_size": 2, "seq_len": 32}
    prune = {"prune": {"layers": 2, "calibration_tokens": 64, "seq_len": 64}}
    recipe = write(tmp_path / "r.yaml", prune, {"distill": few})

    def made():
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("draftlab.json")}

    RUN(recipe=recipe)
    before = made()
    assert len(before) == 2
    RUN(recipe=recipe)
    assert made() == before
    assert capsys.readouterr().err.count("already done") == 2
