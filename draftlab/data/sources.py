"""Documents of text sources, split by a hash of their content into training and held-out text.

A source is ``stdlib`` (the Python standard library on this disk, without its tests), ``stdlib-tests``, ``packages``
(all Python packages in draftlab's environment), ``hf:NAME`` (a data set of the Hugging Face hub), or the path of a file
of text or rows (hub.TEXT_SUFFIXES). The path of a folder is also a source (see data_files). data/text.py describes the
formats of rows. A mixture is written ``stdlib=0.5,packages=0.5``. In ``SET#COLUMN``, SET is a data set or a file of
rows, and the values of COLUMN are its domains. ``SET#COLUMN`` is the mixture of all domains, weighted by their shares
of the text, and ``SET#COLUMN:DOMAIN`` is a single domain.
"""

import contextlib
import functools
import hashlib
import math
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, compress, islice
from pathlib import Path
from typing import Any, Literal

from draftlab.console import note_once
from draftlab.data.bad_rows import BadRows
from draftlab.data.text import (
    Message,
    Parse,
    TextRow,
    Tool,
    checked_rows,
    json_rows,
    row_of,
    rows_of,
    without_padding,
)
from draftlab.errors import UserError
from draftlab.model import hub
from draftlab.model.hub import ROW_FILES
from draftlab.reading import check_downloaded, open_bytes, parse_json, read_lines, reading
from draftlab.trust import check_own

Split = Literal["train", "heldout"]
HELDOUT_SHARE = 0.08  # expected share of held-out documents, which a hash of their keys selects
MANY_REPEATED = 0.01  # share of rows that repeat another row's key, from which on a note says so
FORM_ROWS = 100  # number of rows at the start of a source that decide whether it has conversations
# largest number of rows streamed from a hub data set, enough to calibrate or distil
HUB_ROWS = 50_000
TEST_FOLDERS = {"test", "tests", "idle_test"}


@dataclass(frozen=True, slots=True)
class Document:
    """A text of a source.

    Attributes:
        name: FILE:NUMBER for a row or a part of a file. The path of a Python module is the same on all machines.
        text: For a conversation, the joined contents of its messages.
        domain: Value of COLUMN, if the source is SET#COLUMN, and otherwise the category of the row.
        tools: Tools that the assistant may call.
        unread: Names of the fields of the row that are not read.
        key: What decides in which split the document is (see split_key).
        rows: Account of the bad rows of the document's file or source.
    """

    name: str
    text: str
    messages: tuple[Message, ...] = ()
    domain: str = ""
    tools: tuple[Tool, ...] = ()
    unread: frozenset[str] = frozenset()
    key: str = ""
    rows: BadRows = field(default_factory=lambda: BadRows("text"), compare=False, repr=False)


def split_key(text: str, messages: Sequence[Message] = ()) -> str:
    """Return the content that decides in which split a row is: the first message of the user, or else the text.

    Copies of a row and several answers to a prompt have the same key, in every file, format and order.
    """
    return next((str(said.get("content", "")) for said in messages if said["role"] == "user"), text)


def heldout_keys(keys: Iterable[str]) -> set[str]:
    """Return the keys of a source's held-out split, which training never sees: those with a hash below HELDOUT_SHARE.

    In a small source, the key with the smallest hash is held out in any case, and the key with the largest hash is not.
    """
    distinct = sorted(set(keys), key=unit_hash)
    count = sum(unit_hash(key) < HELDOUT_SHARE for key in distinct)
    return set(distinct[: min(max(1, count), len(distinct) - 1)])


def in_split(keys: Sequence[str], split: Split) -> list[bool]:
    """Return for each row of a source whether it is in the split. keys: Key of each row (see split_key)."""
    apart = heldout_keys(keys)
    return [(key in apart) == (split == "heldout") for key in keys]


def grouped_holdout(keys: Sequence[str], order: Sequence[int] | None, count: int) -> list[int]:
    """Return at most `count` indices to hold out. Rows with the same key stay together.

    If every group has more rows than `count`, the smallest group is held out, unless it has more than half of the rows.
    Then the result is empty.

    Args:
        keys: Key of each row (see split_key).
        order: All indices, in the order in which they are considered. None: a hash of the keys decides.
    """
    if order is None:
        order = sorted(range(len(keys)), key=lambda index: unit_hash(keys[index]))
    groups: dict[str, list[int]] = {}
    for index in order:
        groups.setdefault(keys[index], []).append(index)
    chosen: list[int] = []
    for group in groups.values():
        if len(chosen) + len(group) <= count and 2 * len(group) <= len(keys):
            chosen += group
    smallest = min(groups.values(), key=len, default=[])
    if not chosen and 2 * len(smallest) <= len(keys):
        return smallest
    return chosen


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
            raise UserError(f"data {spec!r}: write SOURCE or SOURCE=WEIGHT with a finite weight above 0, not {part!r}")
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
    """Return the documents of a source, in an order that depends only on their content (see _order).

    split: None returns both splits.

    Raises:
        UserError: The source is unknown or unreadable, too many of its rows are bad, or the split is empty.
    """
    every = _of_one_form(list(_read(source)))
    if not every:
        raise UserError(f"data {source!r} is empty; use --data with a source that has text")
    keys = [document.key for document in every]
    if source not in PYTHON_SOURCES:
        note_repeated(f"data {source!r}", keys)
    selected = every if split is None else list(compress(every, in_split(keys, split)))
    if not selected:
        raise UserError(
            f"data {source!r}: no text can be held out, because its {len(every)} documents have the same text or the "
            "same first message of the user; add other documents"
        )
    return sorted(selected, key=partial(_order, named=source in PYTHON_SOURCES))


def note_repeated(label: str, keys: Sequence[str]) -> None:
    """Print a note if many rows repeat the prompt or the text of another row. keys: Key of each row."""
    repeated = len(keys) - len(set(keys))
    if repeated >= MANY_REPEATED * len(keys) > 0:
        note_once(
            f"{label}: {repeated:,} of {len(keys):,} rows ({repeated / len(keys):.0%}) repeat the first message or the "
            "text of another row; such rows are in the same split"
        )


def settle(docs: Sequence[Document], used: Sized) -> None:
    """Name the documents that were left out because they are bad. used: What could be used of the documents.

    Raises:
        UserError: Too many rows of a file are bad, or nothing can be used.
    """
    accounts = dict.fromkeys(document.rows for document in docs)
    for account in accounts:
        if not used:
            account.refuse()
        account.settle()


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


def is_chat_file(source: str) -> bool:
    """Return whether a source is a single file of conversations."""
    is_rows = hub.has_suffix(source, ROW_FILES) and Path(source).is_file()
    return is_rows and has_conversations(source)


def first_source(spec: str) -> str:
    return next(iter(parse_mixture(spec)))


def has_conversations(source: str) -> bool:
    """Return whether a source has conversations: most of its first FORM_ROWS rows are conversations."""
    return source not in PYTHON_SOURCES and _are_conversations(_read(source))


def _are_conversations(docs: Iterable[Document]) -> bool:
    are = [bool(document.messages) for document in islice(docs, FORM_ROWS)]
    return 2 * sum(are) > len(are)


def _of_one_form(docs: list[Document]) -> list[Document]:
    """Return the documents that are conversations if most of the first documents are, or else the other documents.

    Raises:
        UserError: Too many documents of a file have the other form.
    """
    conversations = _are_conversations(docs)
    other = "a plain text" if conversations else "a conversation"
    kept: list[Document] = []
    for document in docs:
        if bool(document.messages) == conversations:
            kept.append(document)
            continue
        document.rows.leave_out(
            document.name,
            f"the row is {other}, but the first rows of the source are not; put conversations and plain text into "
            "separate sources",
        )
    settle(docs, kept)
    return kept


def _order(document: Document, named: bool) -> float:
    """Return the place of a document among others. named: Whether its name decides, as for Python modules."""
    return unit_hash("order:" + (document.name if named else document.text))


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
    return _folder(path) if path.is_dir() else _file(path)


# a word in the path of a file that names its split, as the hub and the package datasets name splits
TRAIN_SPLIT = re.compile(r"(?<![a-z])train(ing)?(?![a-z])")
OTHER_SPLIT = re.compile(r"(?<![a-z])(test(ing)?|val(id|idation)?|dev|eval(uation)?)(?![a-z])")
ARRAY_OF_OBJECTS = re.compile(rb"\s*\[\s*\{")
SPLIT_SUFFIXES = (*ROW_FILES, ".txt")  # a Python module called test_x.py is no split of a data set
CARDS = {"readme", "license", "licence", "dataset_card", "dataset-card"}  # they describe a data set


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The files of a folder that can be text: those to read, and those that are left out.

    other_splits: Files of the test and validation splits. no_text: Cards, and JSON files without rows.
    """

    read: list[Path]
    other_splits: list[Path]
    no_text: list[Path]


def data_files(folder: Path) -> DataFiles:
    """Return the files of a data set folder, as people clone it from the hub or make it.

    Hidden files are not looked at. If the name of any file has the word train, files of test and validation splits are
    left out. Otherwise the folder has a single split, and all files are read.

    Raises:
        UserError: A file is a link out of the folder, or _may_have_rows raises it.
    """
    found = DataFiles([], [], [])
    names = {
        file: file.relative_to(folder).as_posix()
        for file in sorted(folder.rglob("*"))
        if hub.has_suffix(file, hub.TEXT_SUFFIXES) and file.is_file()
    }
    names = {file: name.lower() for file, name in names.items() if not re.search(r"(^|/)\.", name)}
    for file in names:
        check_own(file, folder)
    may_be_split = {file for file in names if hub.has_suffix(file, SPLIT_SUFFIXES)}
    has_train = any(TRAIN_SPLIT.search(names[file]) for file in may_be_split)
    for file, name in names.items():
        is_other = OTHER_SPLIT.search(name) and not TRAIN_SPLIT.search(name)
        if file.name.lower().partition(".")[0] in CARDS or not _may_have_rows(file):
            found.no_text.append(file)
        elif has_train and file in may_be_split and is_other:
            found.other_splits.append(file)
        else:
            found.read.append(file)
    return found


def _may_have_rows(file: Path) -> bool:
    """Return False for a JSON file without rows, such as the configuration of a data set or of a program.

    Raises:
        UserError: The file is an array of objects that is damaged, or a pointer of Git LFS.
    """
    if not hub.has_suffix(file, hub.JSON_FILES):
        return True
    check_downloaded(file)
    try:
        rows = json_rows(file)
    except UserError:
        with open_bytes(file) as stream:
            if ARRAY_OF_OBJECTS.match(stream.read(1000)):
                raise
        return False
    if rows is None:  # JSON lines, or an object with comments
        rows = [line for _, _, line in islice(read_lines(file), FORM_ROWS)]
    for row in rows[:FORM_ROWS]:
        with contextlib.suppress(UserError, ValueError):
            row_of(parse_json(row) if isinstance(row, bytes) else row, str(file))
            return True
    return False


def _folder(folder: Path) -> Iterator[Document]:
    """Yield the documents of a folder's files, and say afterwards what was read."""
    files = data_files(folder)
    count = 0
    if not files.read:
        found = sorted({path.suffix for path in folder.rglob("*") if path.is_file()})
        raise UserError(
            f"data {str(folder)!r}: the folder has no text, only files of type {', '.join(found) or 'none'}; "
            f"draftlab reads {', '.join(hub.TEXT_SUFFIXES)}, but no cards such as README.md"
        )
    for document in chain.from_iterable(map(_file, files.read)):
        yield document
        count += 1

    def listed(paths: list[Path]) -> str:
        names = [path.relative_to(folder).as_posix() for path in paths[:3]]
        return ", ".join([*names, f"{len(paths) - 3} more"] if len(paths) > 3 else names)

    parts = [f"data {str(folder)!r}: {count:,} rows or texts of {listed(files.read)}"]
    if files.other_splits:
        parts.append(f"left out as test or validation split: {listed(files.other_splits)}")
    if files.no_text:
        parts.append(f"left out, because they are no text: {listed(files.no_text)}")
    note_once("; ".join(parts))


def _stdlib(*, tests: bool) -> Iterator[Document]:
    files = _python_files(Path(sysconfig.get_paths()["stdlib"]), "stdlib")
    return (document for document in files if _is_test(document.name) == tests)


def _packages() -> Iterator[Document]:
    return _python_files(Path(sysconfig.get_paths()["purelib"]), "packages")


def _is_test(name: str) -> bool:
    return bool(TEST_FOLDERS & set(Path(name).parts))


def _python_files(root: Path, label: str) -> Iterator[Document]:
    """Yield Python modules. Their names decide the split, because the embedded models learnt from a split by names.

    Copies of a module have the key of the first copy.
    """
    rows = BadRows(label)
    keys = dict[str, str]()
    left_out = hub.NOT_STDLIB if label == "stdlib" else frozenset[str]()
    files = list[Path]()
    for folder, folders, names in os.walk(root):
        # not entered, because installed packages may have many more files than the library
        folders[:] = [name for name in folders if name not in left_out]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    for file in sorted(files):
        relative = file.relative_to(root)
        # shorter files are empty modules, longer files are generated tables
        if 200 <= file.stat().st_size <= 400_000:
            text = file.read_text("utf-8", errors="replace")
            name = f"{label}/{relative.as_posix()}"
            rows.total += 1
            yield Document(name, text, key=keys.setdefault(text, name), rows=rows)


def _file(path: Path) -> Iterator[Document]:
    return _row_file(path) if hub.has_suffix(path, ROW_FILES) else _text_file(path)


def _text_file(path: Path) -> Iterator[Document]:
    """Yield documents of about 4,000 characters, cut at blank lines, or at any line if the file has no blank line.

    A paragraph or line is never cut, so a document may be longer.
    """
    check_downloaded(path)
    text = path.read_text("utf-8", errors="replace")
    paragraphs = re.split(r"\n[ \t]*\n", text)
    separator = "\n\n"
    if len(paragraphs) == 1:
        paragraphs = text.split("\n")
        separator = "\n"
    part = list[str]()
    length = 0
    rows = BadRows(str(path))

    def document() -> Document:
        rows.total += 1
        joined = separator.join(part)
        return Document(f"{path.name}:{rows.total - 1}", joined, key=split_key(joined), rows=rows)

    for paragraph in paragraphs:
        part.append(paragraph)
        length += len(paragraph)
        if length > 4000:
            yield document()
            part = []
            length = 0
    if "".join(part).strip():
        yield document()


@functools.lru_cache(maxsize=1)
def _hub_domains(name: str, column: str) -> list[Document]:
    """Return the documents of a hub data set with their domains. Without the cache, each domain would read it all."""
    return list(_hub_dataset(name, partial(_row_with_domain, column)))


def _row_with_domain(column: str, value: dict[str, Any], where: str) -> TextRow:
    """Return the text of a row, with its domain as the category.

    column: Column of the domain. Dots separate nested keys, as in metadata.topic. where: Name of the row for errors.
    """
    row = row_of(value, where)
    domain = value
    for key in column.split("."):
        domain = domain.get(key) if isinstance(domain, dict) else None
    if domain is None:
        raise UserError(f"{where}: the row has no column {column!r}; its columns are {', '.join(map(str, value))}")
    return replace(row, category=str(domain), unread=row.unread - {column.partition(".")[0]})


def _row_file(path: Path, parse: Parse = row_of) -> Iterator[Document]:
    bad = BadRows(str(path))
    return (_document(f"{path.name}:{number}", row, bad) for number, row in rows_of(path, parse, bad))


def _hub_dataset(source: str, parse: Parse = row_of) -> Iterator[Document]:
    from datasets import load_dataset

    hub.check_data(source)  # without a connection, the hub client retries for half a minute
    name = source.removeprefix("hf:")
    with reading(f"data set {name!r} could not be loaded"):
        values = load_dataset(name, split="train", streaming=True)
    bad = BadRows(name)
    rows = checked_rows(enumerate(map(without_padding, values.take(HUB_ROWS))), parse, bad)
    return (_document(f"{name}:{number}", row, bad) for number, row in rows)


def _document(name: str, row: TextRow, rows: BadRows) -> Document:
    key = split_key(row.text, row.messages)
    return Document(name, row.text, row.messages, row.category, row.tools, row.unread, key=key, rows=rows)


def unit_hash(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") / 2**56


def _long_lines(text: str) -> set[str]:
    return {line for line in map(str.strip, text.splitlines()) if len(line) >= 24}


PYTHON_SOURCES = {
    "stdlib": partial(_stdlib, tests=False),
    "stdlib-tests": partial(_stdlib, tests=True),
    "packages": _packages,
}
