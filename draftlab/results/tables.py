"""Tables of text for terminals of 80 or more columns, for Markdown, and for HTML pages."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table as TerminalTable
from rich.text import Text

from draftlab.intervals import Interval
from draftlab.model.shape import Shape, format_count
from draftlab.trust import printable

if TYPE_CHECKING:
    from jinja2 import Template

Rows = list[list[str]]
EMPTY = ("", "–")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of text, for terminals, Markdown and HTML pages.

    Args:
        heads: Heads of the columns. Line breaks in them are only for terminals.
        best: Index of the row that is marked as the best.
        wide: Heads of columns that are left out in terminals, because there is no room for them.
    """

    heads: Sequence[str]
    rows: Rows
    title: str = ""
    caption: str = ""
    best: int | None = None
    wide: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        records: Sequence[Mapping[str, str]],
        *,
        title: str,
        caption: str = "",
        best: int | None = None,
        wide: frozenset[str] = frozenset(),
    ) -> "Table":
        """Return a table with one row for each record. Columns without content are left out.

        records: Mappings from the head of a column to a cell.
        """
        filled: set[str] = set()  # heads of columns with content
        for record in records:
            filled.update(head for head, cell in record.items() if cell not in EMPTY)
        heads = dict.fromkeys(chain.from_iterable(records))
        shown = [head for head in heads if head in filled]
        rows = []
        for record in records:
            rows.append([record.get(head) or "–" for head in shown])
        return cls(heads=shown, rows=rows, title=title, caption=caption, best=best, wide=wide)

    @property
    def titles(self) -> list[str]:
        """Return the heads of the columns without line breaks."""
        return [re.sub(r"-\n", "", head).replace("\n", " ") for head in self.heads]

    def terminal(self) -> TerminalTable:
        shown = [i for i, head in enumerate(self.heads) if head not in self.wide]
        heads = [self.heads[i] for i in shown]
        rows = []
        for row in self.rows:
            cells = [row[0], *map(_stacked, row[1:])]
            rows.append([cells[i] for i in shown])
        table = terminal_table(heads, rows, self.best, title=self.title)
        table.caption = _text(self.caption) if self.caption else None
        return table

    def markdown(self) -> str:
        rule = ["---"] + ["---:"] * (len(self.heads) - 1)
        lines = [" | ".join(map(markdown_text, row)) for row in (self.titles, rule, *self.rows)]
        return "\n".join(f"| {line} |" for line in lines)


def terminal_table(
    heads: Sequence[str], rows: Rows, best: int | None = None, title: str = ""
) -> TerminalTable:
    """Return a table for a terminal. In a narrow terminal the first column shrinks.

    best: Index of the row that is marked as the best.
    """
    table = TerminalTable(
        title=_text(title) if title else None,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    for i, head in enumerate(heads):
        justify = "right" if i else "left"
        table.add_column(head, justify=justify, no_wrap=i > 0, overflow="fold", vertical="top")
    for i, cells in enumerate(rows):
        first = f"* {cells[0]}" if i == best else cells[0]
        table.add_row(*map(_text, (first, *cells[1:])), style="bold green" if i == best else None)
    return table


def shape_table(shapes: dict[str, Shape], latency_ms: dict[str, float]) -> TerminalTable:
    """Return a table for a terminal with one row per shape, by the name of the shape.

    latency_ms: Predicted milliseconds of a one-token pass for each shape, or {} without a latency law.
    """
    records = []
    for name, shape in shapes.items():
        whole, body = shape.params(), shape.body_params()
        record = {
            "layers\nx width": name,
            "heads": f"{shape.heads}/{shape.kv_heads}",
            "ffn": str(shape.ffn),
            "para-\nmeters": format_count(whole),
            "in\nlayers": format_count(body),
            "embed-\ndings": f"{1 - body / whole:.0%}",
            "KV bytes\nper token": f"{shape.kv_bytes_per_token():,}",
            "MFLOP\nper token": f"{shape.flops_per_token(0) / 1e6:,.1f}",
        }
        if latency_ms:
            record["ms, pre-\ndicted"] = f"{latency_ms[name]:.3g}"
        records.append(record)
    caption = (
        "heads: query heads/KV heads. embeddings: share of the parameters that are in the embedding, lm_head and last "
        "norm. The KV cache is in bf16."
    )
    if latency_ms:
        caption += " ms: time of a one-token pass, by the latency law."
    return Table.of(records, title="", caption=caption).terminal()


def three_digits(value: float) -> str:
    """Return a number as text with three significant digits and without an exponent."""
    return f"{value:#.3g}".rstrip(".") if value < 999.5 else f"{value:,.0f}"


def optional(value: float | None, digits: str) -> str:
    return "–" if value is None else format(value, digits)


def milliseconds(estimate: Interval | None) -> str:
    return "–" if estimate is None else three_digits(estimate.value)


def speedup_text(gain: Interval | None) -> str:
    return "–" if gain is None else gain.as_speedup()


def markdown_text(text: str) -> str:
    """Return text for a cell in Markdown. HTML, bars and control characters are escaped; line breaks become spaces."""
    return escape(printable(" ".join(text.split())), quote=False).replace("|", "\\|")


def page_template(name: str) -> "Template":
    """Return the page template in the file `name`. It escapes markup and control characters in all values."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("draftlab.results"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: printable(value, keep="\n\t") if type(value) is str else value,
    )
    environment.trim_blocks = environment.lstrip_blocks = True
    return environment.get_template(name)


def _text(cell: str) -> Text:
    return Text(printable(cell, keep="\n"))


def _stacked(cell: str) -> str:
    stacked = re.sub(r" \(([^()]*)\)", lambda found: "\n" + found[1].replace(" to ", "-"), cell)
    return stacked.replace(" ±", "\n±")
