"""Notebooks run from top to bottom, and no cell of them fails."""

import ast
import importlib
import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def test_there_are_five():
    names = [
        "acceptance_and_k",
        "depth_against_width",
        "distillation_losses",
        "first_hour",
        "parallel_drafts",
    ]
    assert [file.stem for file in NOTEBOOKS] == names


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_imports_names_that_exist(file):
    cells = [cell["source"] for cell in json.loads(file.read_text())["cells"]]
    lines = [line for cell in cells for line in cell if line.startswith("from draftlab")]
    assert lines
    for node in ast.parse("".join(f"{line.rstrip()}\n" for line in lines)).body:
        assert isinstance(node, ast.ImportFrom)
        module = importlib.import_module(str(node.module))
        assert all(hasattr(module, alias.name) for alias in node.names)


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_stored_with_what_its_cells_show(file):
    """GitHub shows what is stored."""
    cells = [c for c in json.loads(file.read_text())["cells"] if c["cell_type"] == "code"]
    assert sum(bool(cell["outputs"]) for cell in cells) >= len(cells) / 2
    assert all(out["output_type"] != "error" for cell in cells for out in cell["outputs"])
    page = (file.parents[1] / "docs/paper.md").read_text()
    assert f"(../notebooks/{file.name})" in page


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file):
    nbformat = pytest.importorskip("nbformat", reason="needs the notebooks extra")
    client = pytest.importorskip("nbclient", reason="needs the notebooks extra")
    notebook = nbformat.read(file, 4)
    client.NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
