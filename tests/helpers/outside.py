"""Packages outside of draftlab, as installed ones look, and the kinds of docs/extending.md."""

import os
import re
import subprocess
import sys
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "extending.md"


def example(kind: str) -> str:
    """Return the guide's code that registers a kind by this name."""
    return block_of("python", f'("{kind}")')


def block_of(language: str, words: str) -> str:
    """Return the guide's block in a language that has the words."""
    blocks = re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (found,) = (block for block in blocks if words in block)
    return found


def install(site: Path, package: str, modules: dict[str, str], *groups: str) -> None:
    """Write what an installed package has: the modules by name, and their entry points in each group."""
    site.mkdir(exist_ok=True)
    points = [f"{module.replace('_', '-')} = {module}" for module in modules]
    for module, text in modules.items():
        (site / f"{module}.py").write_text(text)
    info = site / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(line for group in groups for line in (f"[{group}]", *points, "")))


def draftlab(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line beside the folder of packages."""
    return python(site, "draftlab", *arguments)


def python(site: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module beside the folder of packages."""
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", ""), *sys.path])
    environ = os.environ | {"PYTHONPATH": path, "COLUMNS": "400"}
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=site.parent,
        env=environ,
        capture_output=True,
        text=True,
    )
