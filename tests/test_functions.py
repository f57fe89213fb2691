"""Commands are functions of the library: the same names, the same checks, typed results."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import draftlab
from draftlab.commands import COMMANDS
from draftlab.config.base import extra

PAGE = Path(__file__).parents[1] / "docs" / "python.md"


@pytest.mark.slow
def test_the_script_of_the_page_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (script,) = re.findall(r"```python\n(import draftlab\n.*?)```", PAGE.read_text(), re.DOTALL)
    names = {}
    exec(script, names)
    score = names["score"]
    assert score.path == Path("runs/score")
    assert score.interval.low <= score.speedup <= score.interval.high
    assert score.data["scores"]
    assert "speed-up" in str(score)


def test_importing_the_package_is_cheap():
    code = "import sys, draftlab; print(sorted({'torch', 'pydantic', 'rich', 'typer'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["prune", "distill", "score", "outputs_build"])
def test_a_signature_names_every_option(name):
    parameters = inspect.signature(getattr(draftlab, name)).parameters
    options = COMMANDS[name.replace("_", " ")].config.model_fields
    assert set(options) <= set(parameters)
    assert set(parameters) - set(options) <= {"force", "dry_run"}
    for option, field in options.items():
        if (
            field.default_factory is None
            and not field.is_required()
            and extra(field)["typed"] is None
        ):
            assert parameters[option].default == field.default


@pytest.mark.parametrize(
    "call",
    [
        lambda: draftlab.prune(source="tiny", layer=3),
        lambda: draftlab.prune(source="tiny", layers=0),
        lambda: draftlab.score(target="nope", draft=["tiny"]),
        lambda: draftlab.predict(),
    ],
    ids=["unknown", "out of range", "missing checkpoint", "required"],
)
def test_a_mistake_raises_user_error(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(draftlab.UserError):
        call()


def test_paths_and_single_values_are_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = draftlab.score(
        target="tiny",
        draft=Path(draftlab.__file__).parent / "embedded" / "tiny",
        data="stdlib",
        dry_run=True,
    )
    assert plan.path is None
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_is_read_from_its_name():
    tiny = draftlab.Checkpoint.open("tiny")
    assert sum(tensor.numel() for tensor in tiny.tensors().values()) == tiny.shape.params()
    assert len(tiny.tokenizer) <= tiny.vocab_size == tiny.shape.vocab
    assert set(tiny.eos_ids) < set(range(tiny.vocab_size))
    assert tiny.max_model_len == tiny.config["max_position_embeddings"]
    assert tiny.head_ids is None
    with pytest.raises(draftlab.UserError):
        draftlab.Checkpoint.open("no-such-model")
