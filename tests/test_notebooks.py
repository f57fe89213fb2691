"""Notebooks run from top to bottom, and no cell of them fails."""

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


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file):
    nbformat = pytest.importorskip("nbformat", reason="needs the notebooks extra")
    client = pytest.importorskip("nbclient", reason="needs the notebooks extra")
    notebook = nbformat.read(file, 4)
    client.NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
