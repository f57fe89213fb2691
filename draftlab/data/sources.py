"""Documents of text sources, split by hash into training and held-out text.

A source is ``stdlib`` (the Python standard library on this disk, without its tests), ``stdlib-tests``, ``packages``
(all Python packages in draftlab's environment), ``hf:NAME`` (a data set of the Hugging Face hub), or the path of a
``.txt``, ``.md``, ``.py``, ``.jsonl``, ``.json`` or ``.parquet`` file. The path of a folder is also a source: all such
files in it except ``.json`` files. data/text.py describes the formats of rows. A mixture is written
``stdlib=0.5,packages=0.5``. In ``SET#COLUMN``, SET is a data set or a file of rows, and the values of COLUMN are its
domains. ``SET#COLUMN`` is the mixture of all domains, weighted by their shares of the text, and
``SET#COLUMN:DOMAIN`` is a single domain.
"""

import functools
import hashlib
import math
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from draftlab.data.text import (
    Message,
    Parse,
    TextRow,
    Tool,
    checked_rows,
    row_of,
    rows_of,
    without_padding,
)
from draftlab.errors import UserError
from draftlab.model import hub
from draftlab.model.hub import ROW_FILES
from draftlab.reading import reading

Split = Literal["train", "heldout"]
HELDOUT_SHARE = 0.08  # expected share of held-out documents, which a hash of their names selects
# largest number of rows streamed from a hub data set, enough to calibrate or distil
HUB_ROWS = 50_000
TEST_FOLDERS = {"test", "tests", "idle_test"}
NOT_STDLIB = {
    "site-packages",
    "dist-packages",
    "encodings",
    "pydoc_data",
}  # encodings and pydoc_data are generated tables


@dataclass(frozen=True, slots=True)
class Document:
    """A text with a name that is the same on all machines.

    text: For a conversation, the joined contents of its messages. domain: Value of COLUMN, if the source is
    SET#COLUMN, and otherwise the category of the row. tools: Tools that the assistant may call. unread: Names of the
    fields of the row that are not read.
    """

    name: str
    text: str
    messages: tuple[Message, ...] = ()
    domain: str = ""
    tools: tuple[Tool, ...] = ()
    unread: frozenset[str] = frozenset()


def is_heldout(name: str) -> bool:
    """Return whether a document with this name is in the held-out split, which training never sees."""
    return unit_hash(name) < HELDOUT_SHARE


def line_name(path: Path, number: int) -> str:
    """Return the name of the document in a row of a file. number: Number of the row, from 1 on."""
    return f"{path.name}:{number}"


def parse_mixture(spec: str) -> dict[str, float]:
    """Parse ``a=0.7,b=0.3``, or the name of a single source. Return the weight of each source. The sum is 1.

    Raises:
        UserError: A weight is not a positive number, or a source has no name.
    """
    weights: dict[str, float] = {}
    for part in spec.split(","):
        name, _, weight = part.strip().partition("=")
        try:
            weights[name] = float(weight or 1)
        except ValueError:
            weights[name] = math.nan
        if not name or not 0 < weights[name] < math.inf:
            raise UserError(
                f"data {spec!r}: write SOURCE or SOURCE=WEIGHT with a finite weight above 0, not {part!r}"
            )
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def split_domains(weights: dict[str, float]) -> dict[str, float]:
    """Replace each SET#COLUMN of a mixture by its domains, SET#COLUMN:DOMAIN. Return the new weights.

    The weight of SET#COLUMN is divided among its domains in proportion to their bytes of training text.

    Raises:
        UserError: SET#COLUMN cannot be read, or has no training text.
    """
    split: dict[str, float] = {}
    for source, weight in weights.items():
        _, column, domain = hub.split_column(source)
        if column is None or domain:
            split[source] = weight
            continue
        sizes = Counter[str]()
        for doc in documents(source, "train"):
            sizes[doc.domain] += len(doc.text.encode())
        total = sizes.total()
        split |= {f"{source}:{name}": weight * size / total for name, size in sizes.items()}
    return split


def domain_of(source: str) -> str:
    """Return DOMAIN for a source SET#COLUMN:DOMAIN, and the name of any other source."""
    return hub.split_column(source)[2] or source


def documents(source: str, split: Split | None = None) -> list[Document]:
    """Return the documents of a source, ordered by a hash of their names. split: None returns both splits.

    Raises:
        UserError: The source is unknown or unreadable, or the split is empty.
    """
    found = list(_read(source))
    selected = [d for d in found if split is None or in_split(d.name, split)]
    if not found:
        raise UserError(f"data {source!r} is empty; use --data with a source that has text")
    if not selected:
        raise UserError(
            f"data {source!r}: the {split} split has none of its {len(found)} documents, because a hash of each name "
            f"decides, and about {HELDOUT_SHARE:.0%} are held out; add documents"
        )
    return sorted(selected, key=lambda d: unit_hash("order:" + d.name))


def without_heldout_lines(candidates: list[Document], heldout: list[Document]) -> list[Document]:
    """Return the candidates that share at most a fifth of their long lines with the held-out documents.

    A long line has at least 24 characters. Packages contain copies of standard-library modules: setuptools, for
    example, has a copy of distutils. Training on such copies would make held-out losses too low.
    """
    heldout_lines: set[str] = set().union(*(_long_lines(d.text) for d in heldout))
    kept: list[Document] = []
    for document in candidates:
        lines = _long_lines(document.text)
        if len(lines & heldout_lines) <= 0.2 * len(lines):
            kept.append(document)
    return kept


def in_split(name: str, split: Split) -> bool:
    return is_heldout(name) == (split == "heldout")


def is_chat_file(source: str) -> bool:
    """Return whether a source is a single file of conversations."""
    return Path(source).suffix in ROW_FILES and Path(source).is_file() and has_conversations(source)


def first_source(spec: str) -> str:
    return next(iter(parse_mixture(spec)))


def has_conversations(source: str) -> bool:
    """Return whether the first row of a source is a conversation."""
    first = None if source in PYTHON_SOURCES else next(iter(_read(source)), None)
    return first is not None and bool(first.messages)


def _read(source: str) -> Iterator[Document]:
    name, column, domain = hub.split_column(source)
    if column is not None:
        if name.startswith("hf:"):
            every = _hub_domains(name, column)
        else:
            every = _row_file(Path(name), partial(_row_with_domain, column))
        return (doc for doc in every if domain in ("", doc.domain))
    if source in PYTHON_SOURCES:
        return PYTHON_SOURCES[source]()
    if source.startswith("hf:"):
        return _hub_dataset(source)
    hub.check_local_text(source)
    path = Path(source)
    if not path.is_dir():
        return _file(path)
    suffixes = set(hub.TEXT_SUFFIXES) - {".json"}  # .json files in folders are rarely text
    files = (file for file in sorted(path.rglob("*")) if file.suffix in suffixes)
    return chain.from_iterable(map(_file, files))


def _stdlib(*, tests: bool) -> Iterator[Document]:
    files = _python_files(Path(sysconfig.get_paths()["stdlib"]), "stdlib")
    return (document for document in files if _is_test(document.name) == tests)


def _packages() -> Iterator[Document]:
    return _python_files(Path(sysconfig.get_paths()["purelib"]), "packages")


def _is_test(name: str) -> bool:
    return bool(TEST_FOLDERS & set(Path(name).parts))


def _python_files(root: Path, label: str) -> Iterator[Document]:
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        if label == "stdlib" and NOT_STDLIB & set(relative.parts):
            continue
        # shorter files are empty modules, longer files are generated tables
        if 200 <= file.stat().st_size <= 400_000:
            text = file.read_text("utf-8", errors="replace")
            yield Document(f"{label}/{relative.as_posix()}", text)


def _file(path: Path) -> Iterator[Document]:
    return _row_file(path) if path.suffix in ROW_FILES else _text_file(path)


def _text_file(path: Path) -> Iterator[Document]:
    """Yield documents of about 4,000 characters, cut at blank lines, or at any line if the file has no blank line.

    A paragraph or line is never cut, so a document may be longer.
    """
    text = path.read_text("utf-8", errors="replace")
    paragraphs, separator = re.split(r"\n[ \t]*\n", text), "\n\n"
    if len(paragraphs) == 1:
        paragraphs, separator = text.split("\n"), "\n"
    part: list[str] = []
    index = 0
    for paragraph in paragraphs:
        part.append(paragraph)
        if sum(map(len, part)) > 4000:
            yield Document(f"{path.name}:{index}", separator.join(part))
            part, index = [], index + 1
    if "".join(part).strip():
        yield Document(f"{path.name}:{index}", separator.join(part))


@functools.lru_cache(maxsize=1)
def _hub_domains(name: str, column: str) -> list[Document]:
    """Return the documents of a hub data set with their domains. Without the cache, each domain would read it all."""
    return list(_hub_dataset(name, partial(_row_with_domain, column)))


def _row_with_domain(column: str, value: Any, where: str) -> TextRow:
    """Return the text of a row, with its domain as the category.

    column: Column of the domain. Dots separate nested keys, as in metadata.topic. where: Name of the row for errors.
    """
    row, domain = row_of(value, where), value
    for key in column.split("."):
        domain = domain.get(key) if isinstance(domain, dict) else None
    if domain is None:
        raise UserError(
            f"{where}: the row has no column {column!r}; its columns are {', '.join(map(str, value))}"
        )
    return replace(row, category=str(domain))


def _row_file(path: Path, parse: Parse = row_of) -> Iterator[Document]:
    return (_document(line_name(path, number), row) for number, row in rows_of(path, parse))


def _hub_dataset(source: str, parse: Parse = row_of) -> Iterator[Document]:
    from datasets import load_dataset

    hub.check_data(source)  # without a connection, the hub client retries for half a minute
    name = source.removeprefix("hf:")
    with reading(f"data set {name!r} could not be loaded"):
        values = load_dataset(name, split="train", streaming=True)
    taken = map(without_padding, values.take(HUB_ROWS))
    rows = checked_rows(name, enumerate(taken), parse)
    return (_document(f"{name}:{number}", row) for number, row in rows)


def _document(name: str, row: TextRow) -> Document:
    return Document(name, row.text, row.messages, row.category, row.tools, row.unread)


def unit_hash(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") / 2**56


def _long_lines(text: str) -> set[str]:
    return {line for line in map(str.strip, text.splitlines()) if len(line) >= 24}


PYTHON_SOURCES = {
    "stdlib": partial(_stdlib, tests=False),
    "stdlib-tests": partial(_stdlib, tests=True),
    "packages": _packages,
}
