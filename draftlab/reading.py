"""Read files from outside draftlab. The error of any parser becomes one line that names the file. No torch."""

import contextlib
import gzip
import json
import reprlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from draftlab.errors import UserError, one_line, plain_words

Kind = TypeVar("Kind", bound=BaseModel)
MOST_ITEMS = 1_000_000  # of a YAML file, whose aliases can repeat a list a billion times
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


class FileModel(BaseModel):
    """Base class of pydantic models of files. Unknown keys and infinite numbers are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def text_of_system(path: Path | str) -> str:
    """Return the text of a file of the system, such as /proc/cpuinfo, or "" where it is missing or closed to us."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@contextlib.contextmanager
def reading(what: object) -> Iterator[None]:
    """Turn any error of the block, except MemoryError, into a UserError of one line.

    This is for parsers of other projects, which raise errors of many types for damaged files.

    what: Start of the message, such as the path of the file.

    Raises:
        UserError: The block raised an error.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except ValidationError as error:
        raise UserError(f"{what}: {validation_text(error)}") from None
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        text = one_line(getattr(error, "strerror", None) or error)
        if type(error).__name__ == "SafetensorError":
            text = f"damaged or incomplete ({text})"
        if " " not in text:  # the text of a KeyError is only the key
            text = f"{type(error).__name__} {text}".strip()
        raise UserError(f"{what}: {text}") from error


def parse_json(data: bytes | str) -> Any:
    """Return the value of a JSON text. Infinity is accepted, because some config.json files have it, but NaN is not.

    Raises:
        ValueError: The text is not JSON.
    """
    return json.loads(data, parse_constant=_constant)


def read_json(file: Path) -> Any:
    """Return the content of a JSON file. Raises UserError: the file is missing or not JSON."""
    with reading(f"{file} cannot be read"):
        return parse_json(file.read_bytes())


def read_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UserError: the file is missing, or its content is not an object."""
    content = read_json(file)
    if not isinstance(content, dict):
        raise UserError(f"{file} must be a JSON object, but is {reprlib.repr(content)}")
    return content


def open_bytes(file: Path) -> BinaryIO:
    """Open a file to read its bytes. A file whose name ends in .gz is decompressed."""
    return cast("BinaryIO", gzip.open(file)) if file.suffix.lower() == ".gz" else file.open("rb")


def check_downloaded(file: Path) -> None:
    """Raise UserError if a file is a pointer that Git LFS has not replaced by the data, or no regular file."""
    if file.exists() and not file.is_file():  # opening a pipe would wait for its writer
        raise UserError(f"{file} is no regular file, but it is read several times; name a file")
    with reading(file), file.open("rb") as stream:
        if stream.read(len(LFS_POINTER)) == LFS_POINTER:
            raise UserError(f"{file} is a pointer of Git LFS in place of the data; run git lfs pull in its folder")


def read_lines(file: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield the number (from 1), byte offset and content of every line that is not blank. See open_bytes.

    Raises:
        UserError: The file cannot be read.
    """
    start = 0
    with reading(file), open_bytes(file) as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield number, start, line
            start += len(line)


def read_json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number (from 1) and the JSON value of every line that is not blank.

    Raises:
        UserError: The file cannot be read, or a line is not JSON. The message has the number of the line.
    """
    for number, _, line in read_lines(file):
        with reading(f"{file}:{number}: not JSON"):
            value = parse_json(line)
        yield number, value


def read_model(kind: type[Kind], path: Path, name: str = "", hint: str = "") -> Kind:
    """Read a JSON or YAML file into a model.

    Args:
        path: The file, or the directory that has the file.
        name: Name of the file in the directory.
        hint: End of the error message if the file is missing.

    Raises:
        UserError: The file is missing, or its content does not fit the model.
    """
    file = path / name if name and path.is_dir() else path
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}{hint}") from None
    with reading(f"{file} is not a {kind.__name__.lower()}"):
        return kind.model_validate(parse_yaml(data) if file.suffix in (".yaml", ".yml") else parse_json(data))


def read_yaml(path: Path, label: str) -> Any:
    """Return the content of a YAML file. label: Start of an error message. Raises UserError: it cannot be read."""
    with reading(label):
        return parse_yaml(path.read_bytes())


def parse_yaml(text: bytes | str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """Return the value of a YAML text.

    Raises:
        ValueError: It has more than MOST_ITEMS items, each counted wherever an alias repeats it.
        yaml.YAMLError: It is not YAML.
    """
    value = yaml.load(text, loader)
    waiting = [value]
    count = 0
    while waiting:
        item = waiting.pop()
        parts = list(item.values()) if isinstance(item, dict) else item
        if isinstance(parts, list):
            count += len(parts)
            if count > MOST_ITEMS:
                raise ValueError(f"it has more than {MOST_ITEMS:,} items")
            waiting += parts
    return value


def command_words(line: str) -> list[str]:
    """Return the words of a command line that another run recorded. Raises UserError: a quote is open."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UserError(f"{one_line(line, 80)} is not a command line: {error}") from None


def validation_text(error: ValidationError) -> str:
    """Return the first three complaints of a pydantic error as one line, each with its field and value."""
    parts = []
    for item in error.errors()[:3]:
        complaint = "must be an object" if item["type"].startswith("model_") else plain_words(item["msg"])
        if item["loc"]:
            complaint = f"{'.'.join(map(str, item['loc']))[:80]}: {complaint}"
        if item["loc"] and item["type"] != "missing":
            complaint += f" (got {reprlib.repr(item['input'])})"
        parts.append(complaint)
    more = f"; and {error.error_count() - 3} more" if error.error_count() > 3 else ""
    return one_line("; ".join(parts)) + more


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("NaN is not a number")
    return float(name)
