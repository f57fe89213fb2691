"""Tables of text for terminals of any width, for files and pipes, for Markdown, and for HTML pages."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from html import escape
from itertools import chain
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from draftlab.intervals import Interval
from draftlab.model.shape import Shape, format_count
from draftlab.quantities import format_number
from draftlab.trust import printable

if TYPE_CHECKING:
    from jinja2 import Template

Rows = list[list[str]]
EMPTY = ("", "–")
FIRST_COLUMN = 10  # least width of a first column that wraps
WIDEST = 100_000  # a width in which every table has room
BEST = "bold green"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """The text of a table.

    Args:
        heads: Heads of the columns. Line breaks in them are only for terminals.
        best: Index of the row that is marked as the best.
        wide: Heads of columns that a narrow terminal leaves out.
    """

    heads: Sequence[str]
    rows: Rows
    title: str = ""
    caption: str = ""
    best: int | None = None
    wide: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Cells):
    """A table of text, for terminals, Markdown and HTML pages."""

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
        return [plain_head(head) for head in self.heads]

    def terminal(self) -> "TerminalTable":
        cells: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(Cells)}
        cells["rows"] = [[row[0], *map(_stacked, row[1:])] for row in self.rows]
        return TerminalTable(**cells)

    def markdown(self) -> str:
        rule = ["---"] + ["---:"] * (len(self.heads) - 1)
        lines = [" | ".join(map(markdown_text, row)) for row in (self.titles, rule, *self.rows)]
        return "\n".join(f"| {line} |" for line in lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalTable(Cells):
    """A table that rich prints as a terminal has room for it, so that no column and no digit is lost.

    A file or pipe gets all columns at their full width. In a terminal the first column wraps, down to FIRST_COLUMN. If
    that is still too wide, the columns in `wide` are left out, and the caption names them. If that is too wide, every
    row becomes a list of lines with one cell each.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        every = range(len(self.heads))
        if not console.is_terminal:
            table = self._grid(every, self.caption)
            yield from console.render(table, options.update(width=table_width(table, console)))
            return
        kept = [i for i in every if self.heads[i] not in self.wide]
        absent = "; ".join(plain_head(head) for head in self.heads if head in self.wide)
        hint = f"{self.caption} Left out, because the terminal is too narrow: {absent}.".lstrip()
        for columns, caption in ((every, self.caption), (kept, hint)):
            table = self._grid(columns, caption)
            first = self._width(0)
            if table_width(table, console) - first + min(first, FIRST_COLUMN) <= options.max_width:
                yield table
                return
        yield from self._records()

    def _width(self, column: int) -> int:
        """Return the number of cells that the text of a column takes."""
        mark = 0 if self.best is None or column else cell_len("* ")
        texts = [self.heads[column], *(row[column] for row in self.rows)]
        return mark + max(cell_len(line) for text in texts for line in text.split("\n"))

    def _grid(self, columns: Sequence[int], caption: str) -> RichTable:
        table = RichTable(
            title=_text(self.title) if self.title else None,
            caption=_text(caption) if caption else None,
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
            show_edge=False,
            title_justify="left",
            caption_justify="left",
        )
        for i in columns:
            table.add_column(
                _text(self.heads[i]),
                justify="right" if i else "left",
                no_wrap=i > 0,
                # rich shrinks only the columns that wrap, as long as they are wider than this
                min_width=self._width(i) if i else min(self._width(i), FIRST_COLUMN),
                overflow="fold",
                vertical="top",
            )
        for i, cells in enumerate(self.rows):
            shown = [_text(cells[column]) for column in columns]
            if i == self.best:
                shown[0] = Text("* ") + shown[0]
            table.add_row(*shown, style=BEST if i == self.best else None)
        return table

    def _records(self) -> Iterator[RenderableType]:
        """Return a line with the first cell for each row, and under it a line for every other cell."""
        if self.title:
            yield _text(self.title)
        for i, row in enumerate(self.rows):
            mark, style = ("* ", BEST) if i == self.best else ("", "")
            yield Text(f"{mark}{plain_head(self.heads[0])}: ", style) + _text(row[0])
            for head, cell in zip(self.heads[1:], row[1:], strict=True):
                if cell:
                    line = f"{plain_head(head)}: {cell}".replace("\n", " ")
                    yield Padding(Text(printable(line), style, overflow="fold"), (0, 0, 0, 2))
        if self.caption:
            yield _text(self.caption)


def table_width(table: RichTable, console: Console) -> int:
    """Return the width of a table in cells, if there is room for every column."""
    room = console.options.update(width=WIDEST)
    return Measurement.get(console, room, table).maximum


def plain_head(head: str) -> str:
    """Return the head of a column without line breaks."""
    return re.sub(r"-\n", "", head).replace("\n", " ")


def shape_table(shapes: dict[str, Shape], latency_ms: dict[str, float]) -> TerminalTable:
    """Return a table for a terminal with one row per shape, by the name of the shape.

    latency_ms: Predicted milliseconds of a one-token pass for each shape, or {} without a latency law.
    """
    records = []
    for name, shape in shapes.items():
        whole = shape.params()
        body = shape.body_params()
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
            record["ms, pre-\ndicted"] = format_number(latency_ms[name])
        records.append(record)
    caption = (
        "heads: query heads/KV heads. embeddings: share of the parameters that are in the embedding, lm_head and last "
        "norm. The KV cache is in bf16."
    )
    if latency_ms:
        caption += " ms: time of a one-token pass, by the latency law."
    return Table.of(records, title="", caption=caption).terminal()


def optional(value: float | None, digits: str) -> str:
    return "–" if value is None else format(value, digits)


def milliseconds(estimate: Interval | None) -> str:
    return "–" if estimate is None else format_number(estimate.value)


def speedup_text(gain: Interval | None) -> str:
    return "–" if gain is None else gain.as_speedup()


def markdown_text(text: str) -> str:
    """Return text for a cell in Markdown. HTML, bars and control characters are escaped; line breaks become spaces."""
    return escape(printable(" ".join(text.split())), quote=False).replace("|", "\\|")


def page_template(name: str) -> "Template":
    """Return the page template in the file `name`. It escapes markup and control characters in all values."""
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
