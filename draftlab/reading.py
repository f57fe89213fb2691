"""Files from outside, read strictly: within limits of size, depth and values, with errors of one line. No torch."""

import contextlib
import itertools
import json
import math
import re
import reprlib
import stat
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import from_json

from draftlab.errors import UserError, one_line

# score.json and replay.json are the largest: about 20 bytes a number, and 100 in memory
MAX_JSON_BYTES, MAX_YAML_BYTES, MAX_LINE_BYTES = 128 << 20, 2 << 20, 16 << 20
MAX_JSON_VALUES, MAX_YAML_VALUES, MAX_YAML_DEPTH = 8_000_000, 100_000, 50
PERHAPS_INFINITE = re.compile(rb"[eE]\+?0*[1-9]\d\d|\d{300}")  # where no number is so long, none is beyond all floats

Kind = TypeVar("Kind", bound=BaseModel)


class FileModel(BaseModel):
    """Base of everything that is read from a file: unknown keys are errors, and nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def read_bytes(file: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """Return the content of a regular file; its size is judged before it is read.

    Raises:
        OSError: there is no such file, or it cannot be read.
        UserError: it is no file that ends, or larger than limit bytes.
    """
    check_regular(file, limit)
    with file.open("rb") as stream:
        return stream.read(limit + 1)  # a file may grow meanwhile


def check_regular(file: Path, limit: float = math.inf) -> None:
    """Raises OSError or UserError: see read_bytes."""
    state = file.stat()
    if stat.S_ISDIR(state.st_mode):
        raise UserError(f"{file} is a directory; name a file in it")
    if not stat.S_ISREG(state.st_mode):
        raise UserError(f"{file} is not a regular file; write its content to one")
    if state.st_size > limit:
        raise UserError(f"{file} has {state.st_size / 1e6:,.0f} MB, and such a file at most {limit / 1e6:,.0f} MB")


def parse_json(data: bytes | str, *, infinity: bool = False) -> Any:
    """Return the value of a JSON text. infinity: may be among its numbers, as in some config.json; NaN never.

    Raises:
        ValueError: not JSON, nested too deeply, too many values, two values of one key, a number beyond all floats.
    """
    data = data.encode() if isinstance(data, str) else data
    values = sum(map(data.count, (b",", b"[", b"{")))
    if values > MAX_JSON_VALUES:
        raise ValueError(f"{values:,} values, and at most {MAX_JSON_VALUES:,} are read")
    from_json(data)  # has a limit of depth of its own, where json overflows
    hook = _finite_float if not infinity and PERHAPS_INFINITE.search(data) else None
    return json.loads(
        data, object_pairs_hook=_unique, parse_float=hook, parse_constant=_constant if infinity else _no_constant
    )


def read_json(file: Path, *, infinity: bool = False) -> Any:
    """Return the content of a JSON file. Raises UserError: no such file, or not JSON; see parse_json."""
    try:
        return parse_json(read_bytes(file), infinity=infinity)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{file} cannot be read: not JSON: {one_line(error)}") from None


def read_object(file: Path, *, infinity: bool = False) -> dict[str, Any]:
    """Return the content of a JSON file that is an object. Raises UserError: see read_json."""
    content = read_json(file, infinity=infinity)
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a JSON object but {reprlib.repr(content)}")
    return content


def read_lines(file: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield number, first byte and content of every line that is not blank.

    Raises:
        UserError: no such file, or a line longer than 16 MiB.
    """
    start = 0
    try:
        check_regular(file)
        with file.open("rb") as stream:
            for number in itertools.count(1):
                line = stream.readline(MAX_LINE_BYTES + 1)
                if len(line) > MAX_LINE_BYTES:
                    raise UserError(f"{file}:{number}: a line of more than {MAX_LINE_BYTES >> 20} MiB")
                if not line:
                    return
                if line.strip():
                    yield number, start, line
                start += len(line)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None


def read_json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield number and value of every line that is not blank.

    Raises:
        UserError: no such file, or a line that is not JSON, with its number.
    """
    for number, _, line in read_lines(file):
        try:
            yield number, parse_json(line)
        except ValueError as error:
            raise UserError(f"{file}:{number}: not JSON ({one_line(error)})") from None


def check_json_lines(file: Path | None) -> None:
    """Check that a file can be read later. Raises UserError: see read_json_lines."""
    if file is not None:
        deque(read_json_lines(file), maxlen=0)


def read_model(kind: type[Kind], path: Path, name: str = "", hint: str = "") -> Kind:
    """Read a JSON or YAML file of one kind, from its path or from the directory in which it has this name.

    hint: what to do where there is no such file.

    Raises:
        UserError: no such file, or not one of that kind.
    """
    file = path / name if name and path.is_dir() else path
    what = kind.__name__.lower()
    try:
        is_yaml = file.suffix in (".yaml", ".yml")
        data = read_bytes(file, MAX_YAML_BYTES if is_yaml else MAX_JSON_BYTES)
        return kind.model_validate(parse_yaml(data) if is_yaml else parse_json(data))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}{hint}") from None
    except ValidationError as error:
        raise UserError(f"{file} is not a {what}: {validation_text(error)}") from None
    except ValueError as error:
        raise UserError(f"{file} is not a {what}: {one_line(error)}") from None


def validated(kind: TypeAdapter[Any], file: Path) -> Any:
    """Return the content of a JSON file of one type. Raises UserError: no such file, or one of another type."""
    try:
        return kind.validate_python(read_json(file))
    except ValidationError as error:
        raise UserError(f"{file}: {validation_text(error)}") from None


def read_yaml(path: Path, label: str) -> Any:
    """Return the content of a YAML file. label: its name in errors.

    Raises:
        UserError: no such file, or not YAML; see parse_yaml.
    """
    try:
        return parse_yaml(read_bytes(path, MAX_YAML_BYTES))
    except OSError as error:
        raise UserError(f"{label}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{label}: {one_line(error)}") from None


def parse_yaml(data: bytes) -> Any:
    """Return the value of a YAML text.

    Raises:
        ValueError: not YAML, nested too deeply, too many values with those that aliases repeat, two values of one key,
            a number that is not finite.
    """
    try:
        return yaml.load(data, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {one_line(error)}") from None
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"not YAML: {one_line(error) or type(error).__name__}") from None  # of scalars, as 2026-99-99


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader within limits; an alias counts as often as it repeats what it stands for."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self.depth = self.count = 0
        self.sizes: dict[int, int] = {}  # values of each node
        self.checked = set[int]()

    def compose_node(self, parent: Any, index: Any) -> Any:
        is_alias, before = self.check_event(yaml.AliasEvent), self.count
        self.depth += 1
        self.count += 1
        self._check()
        node = super().compose_node(parent, index)
        if is_alias:
            self.count += self.sizes.get(id(node), MAX_YAML_VALUES)  # unknown: it contains itself
            self._check()
        else:
            self.sizes[id(node)] = self.count - before
        self.depth -= 1
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if id(node) not in self.checked:  # once, for << adds the keys of others, which a mapping may replace
            self.checked.add(id(node))
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if len(set(keys)) < len(keys):
                twice = next(key for key in keys if keys.count(key) > 1)
                raise yaml.constructor.ConstructorError(None, None, f"two values of {twice!r}", node.start_mark)
        super().flatten_mapping(node)

    def construct_yaml_float(self, node: Any) -> float:
        value = super().construct_yaml_float(node)
        if not math.isfinite(value):
            raise yaml.constructor.ConstructorError(None, None, f"{node.value} is not finite", node.start_mark)
        return value

    def _check(self) -> None:
        if self.depth > MAX_YAML_DEPTH:
            raise ValueError(f"nested more than {MAX_YAML_DEPTH} levels deep")
        if self.count > MAX_YAML_VALUES:
            raise ValueError(f"more than {MAX_YAML_VALUES:,} values, those counted that aliases repeat")


_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)


@contextlib.contextmanager
def reading_tensors(file: Path) -> Iterator[None]:
    """Turn what goes wrong while a safetensors file is read into one line.

    The library checks the header: its size, overlaps, and that the tensors are the whole file.
    """
    from safetensors import SafetensorError

    try:
        check_regular(file)
        yield
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}") from None
    except (SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:  # of dtypes that numpy lacks
        raise UserError(f"{file} is not a readable safetensors file: {one_line(error)}") from None


@contextlib.contextmanager
def read_by_library(what: str) -> Iterator[None]:
    """Turn whatever a library raises about a file from outside into one line. what: begins the sentence.

    Parsers of other projects raise errors of every kind at damaged files; tokenizers panics in Rust.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise UserError(f"{what}: {_words(error)}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{what}: {_words(error)}") from error


def validation_text(error: ValidationError) -> str:
    """Return a pydantic error as one line: field, complaint, value; of the first three complaints."""
    parts = []
    for item in error.errors()[:3]:
        where = ".".join(str(part) for part in item["loc"])[:80] or "top level"
        value = "" if item["type"] == "missing" else f" (got {reprlib.repr(item['input'])})"
        complaint = "should be an object" if item["type"].startswith("model_") else item["msg"].lower()
        parts.append(f"{where}: {complaint}{value}")
    more = f"; and {error.error_count() - 3} more" if error.error_count() > 3 else ""
    return one_line("; ".join(parts)) + more


def _words(error: BaseException) -> str:
    """Return an error's message; where it has none that says something, with its type."""
    text = one_line(error)
    return text if " " in text else f"{type(error).__name__} {text}".strip()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"two values of {next(name for name in values if names.count(name) > 1)!r}")
    return values


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _constant(name: str) -> float:
    return _no_constant(name) if name == "NaN" else float(name)


def _finite_float(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _no_constant(digits[:20])
