"""The work of an unfinished score, kept in the state directory of the output: what was timed and what was predicted.

Each finished group of prompts is a line of a file, so an interrupted score loses at most one group. The repeated
command uses the lines again if machine and versions are the same. Otherwise it times everything anew, and says so. A
group counts only if all its ways to decode were timed, because their ratio is what a score is about.
"""

import json
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftlab.console import note
from draftlab.engine.generate import Step
from draftlab.runs.atomic import append_line, write_atomic
from draftlab.scoring.throughput import Place, Run, TimedStep


class Journal(MutableMapping[Place, list[Run]]):
    """Runs by place, written to a file as they are added. A later line replaces an earlier one of the same place."""

    def __init__(self, file: Path, machine: Mapping[str, Any]) -> None:
        """Open a journal, and drop the runs of another machine or build.

        machine: Facts that must be the same for runs to be comparable.
        """
        self.file = file
        self.machine = json.loads(json.dumps(dict(machine)))
        self._runs: dict[Place, list[Run]] = {}
        if file.exists():
            self._read()

    def _read(self) -> None:
        lines = self.file.read_text().splitlines()
        before = _parsed(lines[0]) if lines else None
        if before == self.machine:
            for line in lines[1:]:
                if (entry := _entry(line)) is None:
                    break  # an interrupted write left the line unfinished
                self._runs[entry[0]] = entry[1]
        if self._runs:
            note(f"going on from {len(self._runs)} timed groups of prompts in {self.file}")
            return
        if isinstance(before, dict) and before != self.machine:
            keys = {*before, *self.machine}
            names = [name for name in keys if before.get(name) != self.machine.get(name)]
            note(f"timing anew what the interrupted run had timed, because these changed: {', '.join(sorted(names))}")
        self.file.unlink()

    def __getitem__(self, place: Place) -> list[Run]:
        return self._runs[place]

    def __setitem__(self, place: Place, runs: list[Run]) -> None:
        self._runs[place] = runs
        if not self.file.exists():
            append_line(self.file, json.dumps(self.machine))
        (name, k), repeat, group = place
        line = {"place": [name, k, repeat, group], "runs": list(map(asdict, runs))}
        append_line(self.file, json.dumps(line))

    def __delitem__(self, place: Place) -> None:
        """Forget runs in this process. The file keeps them until they are timed again."""
        del self._runs[place]

    def __iter__(self) -> Iterator[Place]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)


class Memo:
    """A value that was computed before the timing, in a file. It counts only on the same machine and build."""

    def __init__(self, file: Path, machine: Mapping[str, Any]) -> None:
        self.file = file
        self.machine = json.loads(json.dumps(dict(machine)))

    def read(self) -> Any:
        """Return the value, or None if there is none of this machine and build."""
        content = _parsed(self.file.read_text()) if self.file.exists() else None
        if not isinstance(content, dict) or content.get("machine") != self.machine:
            return None
        return content.get("value")

    def write(self, value: object) -> None:
        """Replace the value. It must be ready for JSON."""
        write_atomic(self.file, json.dumps({"machine": self.machine, "value": value}))


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _entry(line: str) -> tuple[Place, list[Run]] | None:
    try:
        entry = json.loads(line)
        name, k, repeat, group = entry["place"]
        return ((name, k), repeat, group), list(map(_run, entry["runs"]))
    except (ValueError, KeyError, TypeError):
        return None


def _run(fields: dict[str, Any]) -> Run:
    return Run(
        prompt=fields["prompt"],
        prefill=_timed(fields["prefill"]),
        steps=list(map(_timed, fields["steps"])),
    )


def _timed(fields: dict[str, Any]) -> TimedStep:
    return TimedStep(Step(**fields["step"]), fields["rows"], fields["stall"])
