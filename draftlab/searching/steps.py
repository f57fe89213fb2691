"""The steps of a search and of auto: commands with their settings, each run once in one directory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from draftlab import provenance
from draftlab.provenance import Record


class Step(Protocol):
    """A command with its settings; entry: as a recipe has it."""

    @property
    def entry(self) -> dict[str, dict[str, Any]]: ...
    def is_done(self) -> bool: ...
    def run(self, label: str) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Steps in a directory; what they recorded also tells what was spent before a kill.

    make: returns a command by its name and settings, to which it adds those of the whole run that the command has.
    label: returns what to print before a step, by its name and command. done: steps by the names of their outputs.
    """

    folder: Path
    make: Callable[[str, dict[str, Any]], Step]
    label: Callable[[str, str], str] = "{}: {}".format
    done: dict[str, Step] = field(default_factory=dict)

    def run(self, name: str, command: str, **settings: Any) -> Path:
        """Run a command unless its output is there, and return that. name: of the output."""
        out = self.folder / name
        if name not in self.done:
            step = self.make(command, settings | {"out": out})
            step.run(self.label(name, command))
            self.done[name] = step
        return out

    def is_done(self, name: str, command: str, **settings: Any) -> bool:
        """Return whether the output is there, made by this very command."""
        return self.make(command, settings | {"out": self.folder / name}).is_done()

    def seconds(self, names: Sequence[str] | None = None) -> float:
        """Return the seconds of steps that are done, by default of all."""
        return sum(record_of(self.folder / name).total_seconds for name in (self.done if names is None else names))


def record_of(output: Path) -> Record:
    record = provenance.read_record(output)
    assert record is not None
    return record


def number(record: Record, name: str) -> float:
    """Return a number that a training noted in its record."""
    return float(str(record.notes[name]))
