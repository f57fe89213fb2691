"""Commands in forked processes with a fault: a crash or a full disk at a file change, a torn write, a kill, a rival.

A fork of a process that has imported torch starts in milliseconds. File changes are counted by an audit hook: opening
to write, making, renaming and removing, of paths in the working directory.
"""

import hashlib
import json
import os
import resource
import select
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["none", "crash", "torn", "full", "kill", "term"]
CHANGES = (
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.chmod",
    "os.truncate",
    "os.symlink",
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CRASHED = 86
# of a record, a score or a log: what differs between two equal runs
TIMES = {"out", "command_line", "seconds", "created", "peak_memory_bytes"}
VOLATILE = TIMES | {"notes", "versions", "inputs", "before", "after"}


@dataclass(frozen=True, slots=True)
class Fault:
    """kind: none; at the n-th file change crash (exit), torn (writes beyond limit bytes kill) or full (they fail);
    after n milliseconds kill (SIGKILL) or term (SIGTERM)."""

    kind: Kind = "none"
    n: int = 0
    limit: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """code: exit code, negative for a signal. changes: file changes that were counted. error: stderr."""

    code: int
    changes: int
    error: str

    @property
    def message(self) -> str:
        return next((line for line in reversed(self.error.splitlines()) if line.strip()), "")


class Running:
    """A command in a forked process."""

    def __init__(self, arguments: list[str], folder: Path, fault: Fault = Fault()) -> None:
        self.fault, self.started_at = fault, time.monotonic()
        (self.reader, writer), (self.counter, counted) = os.pipe(), os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.process = os.fork()
        if self.process == 0:
            os.close(self.reader)
            os.close(self.counter)
            _child(arguments, folder, fault, writer, counted)
        os.close(writer)
        os.close(counted)

    def wait(self, seconds: float = 3600.0) -> Ended:
        """Read stderr to its end, with the kill on its time. Raises TimeoutError: it hangs (and is killed)."""
        text, due = b"", self.started_at + self.fault.n / 1000
        while True:
            deliver = self.fault.kind in ("kill", "term")
            left = (due if deliver else self.started_at + seconds) - time.monotonic()
            if select.select([self.reader], [], [], max(0, left))[0]:
                if not (part := os.read(self.reader, 1 << 16)):
                    break
                text += part
            elif deliver:
                os.kill(self.process, signal.SIGKILL if self.fault.kind == "kill" else signal.SIGTERM)
                self.fault = Fault()
            else:
                os.kill(self.process, signal.SIGKILL)
                os.waitpid(self.process, 0)
                raise TimeoutError(text.decode(errors="replace")[-300:])
        changes = os.read(self.counter, 20)
        os.close(self.reader)
        os.close(self.counter)
        code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        return Ended(code, int(changes or b"0"), text.decode(errors="replace"))


def run(arguments: list[str], folder: Path, fault: Fault = Fault(), seconds: float = 3600.0) -> Ended:
    return Running(arguments, folder, fault).wait(seconds)


def digest(out: Path) -> dict[str, str]:
    """Return the sha256 of every file of an output, of JSON without what differs between two equal runs."""
    files = sorted(file for file in out.rglob("*") if file.is_file())
    return {str(file.relative_to(out)): hashlib.sha256(_lasting(file)).hexdigest() for file in files}


def names(out: Path) -> dict[str, str]:
    """Return the names of every file of an output, of JSON with the names of its values."""
    files = sorted(file for file in out.rglob("*") if file.is_file())
    return {
        str(f.relative_to(out)): " ".join(_keys(json.loads(f.read_text()))) if f.suffix == ".json" else ""
        for f in files
    }


def left_overs(folder: Path) -> list[str]:
    """Return the hidden and temporary entries beside outputs: all that a run may make there and must remove."""
    entries = [path for pattern in (".*", "tmp*") for path in folder.rglob(pattern)]
    return sorted(str(path.relative_to(folder)) for path in entries if "/." not in str(path.parent))


def _lasting(file: Path) -> bytes:
    if file.suffix not in (".json", ".jsonl"):
        return file.read_bytes()
    lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    return json.dumps([_without(json.loads(line)) for line in lines], sort_keys=True).encode()


def _without(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without(part) for name, part in value.items() if name not in VOLATILE}
    return [_without(part) for part in value] if isinstance(value, list) else value


def _keys(value: object) -> list[str]:
    if isinstance(value, dict):  # the names of inputs have the candidate that won, which times decide
        inside = [name for key, part in value.items() if key != "inputs" for name in _keys(part)]
        return sorted({*value, *inside})
    return sorted({name for part in value for name in _keys(part)}) if isinstance(value, list) else []


def _child(arguments: list[str], folder: Path, fault: Fault, writer: int, counted: int) -> None:
    """Become the command; never returns."""
    code = 70
    try:
        os.chdir(folder)
        os.dup2(writer, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        sys.argv = ["draftlab", *arguments]
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
        changes = _Changes(folder, fault)
        sys.addaudithook(changes)
        from draftlab import cli

        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        finally:
            changes.armed = False
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        os.write(counted, str(changes.count).encode())
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


class _Changes:
    """An audit hook that counts file changes in a folder, and fails at the n-th."""

    def __init__(self, folder: Path, fault: Fault) -> None:
        self.folder, self.fault, self.count, self.armed = str(folder), fault, 0, True

    def __call__(self, event: str, values: tuple[Any, ...]) -> None:
        if not self.armed or not (event in CHANGES or (event == "open" and _writes(values))):
            return
        path = os.fsdecode(values[0]) if isinstance(values[0], str | bytes | os.PathLike) else ""
        if not os.path.abspath(path).startswith(self.folder):
            return
        self.count += 1
        if self.count != self.fault.n or self.fault.kind not in ("crash", "torn", "full"):
            return
        if self.fault.kind == "crash":
            os._exit(CRASHED)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if self.fault.kind == "torn" else signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.fault.limit, resource.RLIM_INFINITY))


def _writes(values: tuple[Any, ...]) -> bool:
    flags = values[2] if len(values) > 2 else 0
    return isinstance(flags, int) and bool(flags & WRITING) and not isinstance(values[0], int)
