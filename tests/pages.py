"""The generated part of docs/architecture.md: `make docs` writes it anew."""

import ast
from pathlib import Path

from test_layers import LAYERS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
START, END = "<!-- tree: made by `make docs` from the modules' first lines -->", "<!-- end of tree -->"
ORDER = [name for layer in LAYERS for name in layer if name != "__main__"]


def tree() -> str:
    """Return every module in one line, lowest layer first."""
    lines = ["```", "draftlab/"]
    for name in ORDER:
        place = ROOT / "draftlab" / name
        lines += directory(place, 1) if place.is_dir() else [line(place.with_suffix(".py"), 1)]
    return "\n".join([*lines, "```"])


def directory(folder: Path, depth: int) -> list[str]:
    lines = [entry(f"{folder.name}/", purpose(folder / "__init__.py"), depth)]
    for path in sorted(folder.iterdir()):
        if path.is_dir() and (path / "__init__.py").exists():
            lines += directory(path, depth + 1)
        elif path.suffix == ".py" and path.name != "__init__.py":
            lines.append(line(path, depth + 1))
    return lines


def line(file: Path, depth: int) -> str:
    return entry(file.name, purpose(file), depth)


def entry(name: str, text: str, depth: int) -> str:
    return f"{'    ' * depth}{name}".ljust(38) + text


def purpose(file: Path) -> str:
    """Return the first line of a module's docstring, without "No torch."."""
    doc = ast.get_docstring(ast.parse(file.read_text())) or ""
    return doc.splitlines()[0].removesuffix(" No torch.") if doc else ""


def page(text: str) -> str:
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{tree()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
