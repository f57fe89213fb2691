"""Commands are functions of the library: the same names, the same checks, typed results."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import draftlab

PAGE = Path(__file__).parents[1] / "docs" / "python.md"


@pytest.mark.slow
def test_the_script_of_the_page_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (script,) = re.findall(r"```python\n(import draftlab\n.*?)```", PAGE.read_text(), re.DOTALL)
    names = {}
    exec(script, names)
    score = names["score"]
    assert score.path == Path("runs/score")
    result = score.result
    assert result.interval.low <= result.speedup <= result.interval.high
    assert score.data["scores"]
    assert "speed-up" in str(score)


def test_importing_the_package_is_cheap():
    code = "import sys, draftlab; print(sorted({'torch', 'pydantic', 'rich', 'typer'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("settings", [{"layer": 3}, {"layers": 0}, {"source": "nope"}])
def test_a_mistake_raises_user_error(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(draftlab.UserError):
        draftlab.prune(**{"source": "tiny"} | settings)


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
