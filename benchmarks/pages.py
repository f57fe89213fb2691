"""Write README.md and pages of docs/, with numbers from benchmarks/results and studies: python -m benchmarks.pages

The source of a page, in docs/pages, is Markdown with Jinja2 expressions. {{ demo.drafts["3x128"].speedup|interval }}
stands for the value of a key of demo.json in a format; the name of a record is enough, wherever it lies.
{{ tables.demo() }} on a separate line stands for a table that benchmarks/tables.py makes.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, UndefinedError, nodes

from benchmarks import tables
from benchmarks.formats import FILTERS, Printed, tagged

ROOT = Path(__file__).parents[1]
RECORDS = {  # by name: of instruments, and of studies
    file.stem: file for file in sorted([*ROOT.glob("benchmarks/results/*.json"), *ROOT.glob("studies/*/*.json")])
}
SOURCES = ROOT / "docs" / "pages"
EXPRESSION = re.compile(r"\{\{([^{}]+)\}\}")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a page. source: Number of the line in the source. printed: Numbers in the line, with their keys."""

    text: str
    source: int
    printed: list[tuple[str, str]]


class Missing(StrictUndefined):
    """A key that no result has. Its creation raises an error, so that no format receives it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fail_with_undefined_error()


class Pages:
    """Renders the sources of pages with the records."""

    def __init__(self) -> None:
        self.printed: Printed = []
        self.data: dict[str, Any] = {}
        for name, file in RECORDS.items():
            content = json.loads(file.read_text())
            self.data[name] = tagged(content, name, self.printed, narrow="intervals" not in content)
        self.environment = Environment(undefined=Missing)
        self.environment.filters = dict(FILTERS)
        self.environment.globals = dict(self.data) | {"tables": tables.Tables(self.data)}

    def lines(self, source: str) -> Iterator[Line]:
        for number, line in enumerate(source.splitlines(), 1):
            for text in self._expanded(line):
                yield Line(text=text, source=number, printed=list(self.printed))
                self.printed.clear()

    def _expanded(self, line: str) -> Iterator[str]:
        whole = EXPRESSION.fullmatch(line.strip())
        value = self._value(whole.group(1)) if whole else None
        if isinstance(value, Iterator):
            yield from value
        else:
            self.printed.clear()
            yield EXPRESSION.sub(lambda match: str(self._value(match.group(1))), line)

    def _value(self, expression: str) -> Any:
        self._refuse_literals(expression)
        compiled = self.environment.compile_expression(expression.strip(), undefined_to_none=False)
        try:
            return compiled()
        except UndefinedError as error:
            raise KeyError(f"{{{{{expression}}}}}: {error.message}") from error

    def _refuse_literals(self, expression: str) -> None:
        """Check that a constant in an expression is only used as a key or as an argument of a format or function.

        Raises:
            ValueError: The expression has another number or text.
        """
        tree = self.environment.parse(f"{{{{ {expression} }}}}")
        places = [id(item.arg) for item in tree.find_all(nodes.Getitem)]
        places += [id(argument) for node in tree.find_all((nodes.Filter, nodes.Call)) for argument in node.args]
        typed = [constant for constant in tree.find_all(nodes.Const) if id(constant) not in places]
        if typed:
            raise ValueError(f"{{{{{expression}}}}} contains {typed[0].value!r}: name a key of a record instead")

    def text(self, source: Path) -> str:
        return "".join(f"{line.text}\n" for line in self.lines(source.read_text()))


def page(source: Path) -> Path:
    """Return the path of the page that is written from a source."""
    return ROOT / source.name if source.name == "README.md" else ROOT / "docs" / source.name


def differences(lines: list[Line], committed: list[str], page: str, source: str) -> list[str]:
    """Compare a committed page with its source. Return a line of text for each difference.

    The text says what the line should be or, if only numbers differ, which numbers, with their keys.

    lines: Lines that the source gives.
    """
    found = []
    matcher = SequenceMatcher(None, [line.text for line in lines], committed, autojunk=False)
    for kind, first, last, start, end in matcher.get_opcodes():
        if kind == "equal":
            continue
        for offset, line in enumerate(lines[first:last]):
            place = min(start + offset, max(start, end - 1))
            written = committed[place] if start + offset < end else ""
            found.append(f"{page}:{place + 1}: {_wrong(line, written)} ({source}:{line.source})")
        extra = range(start + last - first, end)
        found += [f"{page}:{place + 1}: {committed[place]!r} is not in {source}" for place in extra]
    return found


def _wrong(line: Line, written: str) -> str:
    """Return text that names the wrong numbers of a line and their keys, or the expected line if other text differs."""
    wanted, got = NUMBER.findall(line.text), NUMBER.findall(written)
    if len(wanted) != len(got) or wanted == got:
        return f"should be {line.text!r}"
    wrong = []
    for right, other in zip(wanted, got, strict=True):
        if right != other:
            keys = sorted({key for text, key in line.printed if text == right})
            wrong.append(f"{other} should be {right}" + (f", {' or '.join(keys)}" if keys else ""))
    return "; ".join(wrong)


def main() -> None:
    pages = Pages()
    for source in sorted(SOURCES.glob("*.md")):
        page(source).write_text(pages.text(source))


if __name__ == "__main__":
    main()
