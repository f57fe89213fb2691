"""Files that commands read in tests: text, rows of JSON, prompts, changed settings, a workspace."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from draftlab import workspace


def functions(count: int, repeats: int = 20) -> str:
    """Return the text of so many functions, each of them repeated, with a blank line between documents."""
    return "\n\n".join(f"def f{i}(line):\n    return [line, {i}]\n" * repeats for i in range(count))


def write_functions(file: Path, count: int = 80, repeats: int = 20) -> str:
    file.write_text(functions(count, repeats))
    return str(file)


def write_rows(file: Path, rows: Iterable[object]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_prompts(file: Path, count: int) -> Path:
    return write_rows(file, ({"prompt": f"def f{i}(x):"} for i in range(count)))


def edit(file: Path, **changes: object) -> None:
    """Change settings of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def copy_tokenizer(source: Path, out: Path) -> None:
    for file in source.glob("tokenizer*"):
        shutil.copy(file, out)


def write_workspace(target: Path, data: str = "stdlib", folder: Path = Path()) -> None:
    """Write a workspace whose target is its source, too."""
    name = str(target)
    workspace.write(workspace.Workspace(target=name, source=name, data=data), folder)
