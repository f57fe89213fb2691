"""The steps of a search and of auto: commands with their settings, each run once in one directory."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from draftlab import provenance
from draftlab.provenance import Record


class Runnable(Protocol):
    """A command with its settings. entry is the command as a recipe has it."""

    @property
    def entry(self) -> dict[str, dict[str, Any]]: ...
    def run(self, label: str) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRunner:
    """Steps in a directory. Decisions that follow from their records are the same again after a kill.

    Args:
        make: Returns a command by its name and settings, to which it adds the settings of the whole run.
        label: Returns the line to print before a step, by the step's name and command.
        done: Finished steps by the names of their outputs.
    """

    folder: Path
    make: Callable[[str, dict[str, Any]], Runnable]
    label: Callable[[str, str], str] = "{}: {}".format
    done: dict[str, Runnable] = field(default_factory=dict)

    def run(self, name: str, command: str, **settings: Any) -> Path:
        """Run a command unless its output is there, and return the output, which has this name."""
        out = self.folder / name
        if name not in self.done:
            step = self.make(command, settings | {"out": out})
            step.run(self.label(name, command))
            self.done[name] = step
        return out

    def seconds(self, part: str = "") -> float:
        """Return the seconds of finished steps, or of those whose name begins with this part of a path."""
        names = [name for name in self.done if not part or name.split("/")[0] == part]
        return sum(record_of(self.folder / name).total_seconds for name in names)


def record_of(output: Path) -> Record:
    record = provenance.read_record(output)
    assert record is not None
    return record


def number(record: Record, name: str) -> float:
    """Return a number that a training noted in its record."""
    return float(str(record.notes[name]))
