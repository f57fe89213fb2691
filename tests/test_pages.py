"""Generated pages of the documentation are current; `make docs` writes them."""

import subprocess
import sys

import configuration_page
import pages


def test_generated_docs_are_current():
    typer = [
        sys.executable,
        "-m",
        "typer",
        "draftlab.cli",
        "utils",
        "docs",
        "--name",
        "draftlab",
        "--title",
        "Commands",
    ]
    commands = subprocess.run(typer, capture_output=True, text=True, check=True).stdout
    docs = pages.ROOT / "docs"
    assert (docs / "commands.md").read_text().strip() == commands.strip()
    assert (docs / "configuration.md").read_text().strip() == configuration_page.page().strip()
    assert pages.PAGE.read_text() == pages.page(pages.PAGE.read_text())
