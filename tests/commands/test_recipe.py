"""Recipes are checked as a whole before they run, and what is done is not done again."""

from pathlib import Path

import pytest
import yaml
from errors import raises_option

from draftlab import provenance, workspace
from draftlab.recipe import read_recipe, run

ROOT = Path(__file__).parents[2]
LLAMA = {"huggyllama/llama-7b", "huggyllama/llama-65b"}  # on the hub


def write(path: Path, *steps: object) -> Path:
    path.write_text(yaml.safe_dump({"steps": list(steps)}))
    return path


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_recipes_are_valid_and_name_files_that_exist(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    steps = read_recipe(path)
    made = {str(step.out) for step in steps}
    if path.stem.startswith("smollm2-"):  # its first line says after which recipe it runs
        before = [
            ROOT / f"recipes/{name}.yaml"
            for name in ("smollm2", "smollm2-depth", "smollm2-pruning", "smollm2-siblings")
        ]
        made |= {str(step.out) for file in before for step in read_recipe(file)}
    assert set(run(recipe=path, plan_only=True).data) == {"steps"}
    assert path.read_text().startswith("# ")
    for step in steps:
        for key in ("source", "draft", "target", "shape", "tokenizer", "model"):
            for name in _names(step.settings.get(key)):
                known = (
                    made
                    | {"tiny", "runs/tiny-target/new", workspace.PRESETS["smollm2"].target}
                    | LLAMA
                )
                assert name in known or Path(name).exists(), (step.command.name, key, name)


def _names(value: object) -> list[str]:
    return (
        []
        if value is None
        else [str(v) for v in value]
        if isinstance(value, list)
        else [str(value)]
    )


@pytest.mark.parametrize(
    ("step", "named"),
    [
        ({"purne": {}}, "prune"),
        ({"prune": {"layer": 2}}, "layers"),
        ({"prune": {"layers": 0}}, "--layers"),
        ({"outputs info": {}}, "DIRECTORY"),
        ({"prune": {}, "score": {}}, "step 1"),
    ],
)
def test_mistakes_are_found_before_anything_runs(tmp_path, step, named):
    with raises_option("step 1", named):
        read_recipe(write(tmp_path / "r.yaml", step))


def test_finished_steps_are_skipped_until_their_inputs_or_arguments_change(tmp_path, family_dirs):
    source = tmp_path / "source"
    source.mkdir()
    for file in family_dirs["llama"].iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"def f{i}(line):\n    return line\n" * 40 for i in range(60)))

    recipe = tmp_path / "r.yaml"

    def steps(**changes):
        options = {
            "source": str(source),
            "layers": 2,
            "data": str(text),
            "calibration_tokens": 64,
            "seq_len": 32,
        }
        first = options | {"out": str(tmp_path / "a")} | changes
        second = options | {"out": str(tmp_path / "b"), "layers": 3}
        return read_recipe(write(recipe, {"prune": first}, {"prune": second}))

    steps()
    run(recipe=recipe)
    made = provenance.read_record(tmp_path / "a")
    assert all(step.is_done() for step in steps())
    run(recipe=recipe)
    assert provenance.read_record(tmp_path / "a") == made
    assert not steps(layers=1)[0].is_done()
    with (source / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"\x01")
    assert not any(step.is_done() for step in steps())


def test_a_distillation_whose_options_are_left_out_is_done_when_it_is_done(tmp_path, family_dirs):
    source, text = str(family_dirs["llama"]), tmp_path / "text.txt"
    text.write_text("\n\n".join(f"def f{i}(line):\n    return line\n" * 40 for i in range(60)))
    options = {"draft": source, "data": str(text), "steps": 1, "batch_size": 1, "loss": "ce"}
    recipe = write(tmp_path / "r.yaml", {"distill": options | {"out": str(tmp_path / "a")}})
    run(recipe=recipe)
    assert read_recipe(recipe)[0].is_done()


def test_dry_run_says_what_is_to_do_and_does_nothing(tmp_path, family_dirs):
    recipe = write(
        tmp_path / "r.yaml", {"prune": {"source": "x", "layers": 1, "out": str(tmp_path / "a")}}
    )
    shown = run(recipe=recipe, plan_only=True).show
    assert shown == [f"prune {tmp_path / 'a'}: to do"]
    assert not (tmp_path / "a").exists()


def test_steps_without_names_of_outputs_and_drafts_are_found_again(
    family_dirs, tmp_path, monkeypatch, capsys
):
    """The names come from the newest draft, which the steps before them made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(
        "\n\n".join(f"def f{i}(x):\n    return [x + {i}]\n" * 8 for i in range(60))
    )
    model = str(family_dirs["llama"])
    workspace.write(
        workspace.Workspace(target=model, source=model, data=str(tmp_path / "text.txt"))
    )
    few = {"steps": 1, "batch_size": 2, "seq_len": 32}
    recipe = write(
        tmp_path / "r.yaml", {"prune": {"layers": 2, "calibration_tokens": 64}}, {"distill": few}
    )
    run(recipe=recipe)
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("draftlab.json")}
    assert len(made) == 2
    run(recipe=recipe)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("draftlab.json")} == made
    assert capsys.readouterr().err.count("already done") == 2
