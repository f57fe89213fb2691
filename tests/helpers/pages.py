"""The generated part of docs/architecture.md: `make docs` writes it anew."""

import ast
from pathlib import Path

from helpers.layers import LAYERS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
START, END = (
    "<!-- tree: made by `make docs` from the modules' first lines -->",
    "<!-- end of tree -->",
)
ORDER = [name for layer in LAYERS for name in layer if name != "__main__"]


def tree() -> str:
    """Return every room and every module beside them in one line, the lowest layer first."""
    lines = []
    for name in ORDER:
        place = ROOT / "draftlab" / name
        room = place.is_dir()
        file = place / "__init__.py" if room else place.with_suffix(".py")
        lines.append(f"{name}/".ljust(16) + purpose(file) if room else file.name.ljust(16) + purpose(file))
    return "\n".join(["```", *lines, "```"])


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
