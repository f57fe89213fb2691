"""Fingerprints of what the settings of a command name: text, prompts, tasks, stored outputs. Torch is not loaded."""

import functools
import hashlib
import os.path
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from draftlab import shipped
from draftlab.config.base import Config, extra
from draftlab.errors import UserError
from draftlab.model import hub
from draftlab.reading import parse_yaml
from draftlab.runs.atomic import UNKNOWN
from draftlab.runs.provenance import fingerprint, joint_sha256


def inputs_of(config: Config) -> dict[str, str]:
    """Return the fingerprints of everything that a command's settings name and the command reads, by path or name.

    Checkpoints that are named by a text are left out: the command finds them. So are settings that a mode refuses.

    Raises:
        UserError: A source of text is missing, or a task file is not YAML.
    """
    inputs: dict[str, str] = {}
    for name in type(config).model_fields.keys() - config.unused():
        # not getattr: a test traces which settings a command reads
        value = config.__dict__[name]
        reads = extra(type(config).model_fields[name])["reads"]
        if value in (None, "") or reads == "nothing":
            continue
        if reads == "text":
            inputs |= text_inputs(value)
            continue
        files: list[Path] = []
        for item in _items(value):
            if reads == "tasks":
                for task in str(item).split(","):
                    if task in (tasks := shipped.named("tasks")):
                        path = tasks[task]
                        inputs[task] = joint_sha256(task_files(path), path.parent)
                    else:
                        files += task_files(Path(task))
            elif reads == "shape":
                inputs[str(item)] = fingerprint(shipped.locate(item, "widths"))
            elif reads == "path" or isinstance(item, Path):
                files.append(Path(item))
        inputs |= {str(file): fingerprint(file) for file in files if file.exists()}
    return dict(sorted(inputs.items()))


def paths_of(config: Config) -> Iterator[Path]:
    """Yield every file and directory that a command's settings name and that exists, except the place of its output."""
    for name in type(config).model_fields.keys() - {"out"}:
        reads = extra(type(config).model_fields[name])["reads"]
        for item in _items(config.__dict__[name]):
            if reads == "text" and item:
                names = _sources(item)
            else:
                names = str(item).split(",") if isinstance(item, str | Path) else []
            yield from (Path(name) for name in names if os.path.exists(name))


def text_inputs(mixture: str) -> dict[str, str]:
    """Return the fingerprint of each source of a data mixture, by the source's name without #COLUMN."""
    return {name: _text(name) for name in _sources(mixture)}


def _sources(mixture: str) -> list[str]:
    """Return the names of the sources of a data mixture without #COLUMN, each once."""
    return list(dict.fromkeys(hub.split_column(source)[0] for source in hub.source_names(mixture)))


def _items(value: object) -> Iterable[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _text(source: str) -> str:
    if source in hub.BUILT_IN_TEXT:
        packages = source == "packages"
        folder = sysconfig.get_paths()["purelib" if packages else "stdlib"]
        return _listing(Path(folder), frozenset() if packages else hub.NOT_STDLIB)
    if source.startswith("hf:"):
        return _hub_revision(source.removeprefix("hf:"))
    path = Path(source)
    if not path.is_dir():
        return fingerprint(path)
    texts = (file for file in path.rglob("*") if hub.has_suffix(file, hub.TEXT_SUFFIXES))
    return joint_sha256(texts, path)


@functools.cache
def _listing(folder: Path, without: frozenset[str]) -> str:
    """Return the sha256 of Python's version, and of the names and sizes of a folder's Python files.

    The contents of installed packages would take seconds to read. A recipe asks for each of its steps.

    without: Names of folders in it that are not read.
    """
    digest = hashlib.sha256(platform.python_version().encode())
    for at, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - without)
        for file in (Path(at) / name for name in sorted(files) if name.endswith(".py")):
            listed = f"{file.relative_to(folder).as_posix()}\0{file.stat().st_size}\n"
            digest.update(listed.encode())
    return digest.hexdigest()


def _hub_revision(name: str) -> str:
    """Return the commit of a data set on the hub, or UNKNOWN if the hub does not tell it."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    if hub.offline_reason():
        return UNKNOWN
    try:
        return HfApi().dataset_info(name, timeout=hub.TIMEOUT_SECONDS).sha or UNKNOWN
    except (HfHubHTTPError, OSError):
        return UNKNOWN


class _Loader(yaml.SafeLoader):
    """YAML of lm-eval's tasks, in which !function MODULE.NAME names a Python function."""


def _function_file(loader: _Loader, node: yaml.ScalarNode) -> str:
    return loader.construct_scalar(node).rpartition(".")[0].replace(".", "/") + ".py"


_Loader.add_constructor("!function", _function_file)


def task_files(path: Path) -> Iterator[Path]:
    """Yield a task's YAML file, and the files that it names: included YAML, data and Python functions.

    A folder of tasks yields the files of all its tasks. The name of a task that lm-eval has yields nothing.

    Raises:
        UserError: A file is not YAML.
    """
    seen: set[Path] = set()
    waiting = sorted(path.rglob("*.y*ml")) if path.is_dir() else [path]
    while waiting:
        file = waiting.pop()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        yield file
        if file.suffix in (".yaml", ".yml"):
            waiting += _named_files(file)


def _named_files(file: Path) -> list[Path]:
    try:
        content = parse_yaml(file.read_text("utf-8"), _Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    # lm-eval finds included files next to the file, and data from the folder of the command
    paths = (folder / text for text in _texts(content) for folder in (file.parent, Path()))
    return [path for path in paths if os.path.isfile(path)]  # False for a text that is no name


def _texts(content: object) -> Iterable[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict | list):
        for item in content.values() if isinstance(content, dict) else content:
            yield from _texts(item)
