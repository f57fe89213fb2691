"""Print progress and notes on stderr. cli.py prints results on stdout."""

import contextlib
import functools
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from draftlab.trust import printable

Advance = Callable[[int, str], None]
MAX_SILENT_SECONDS = 7.0
# text that a user copies: a command or a path
COPIED = re.compile(r"draftlab [a-z]|\w{2,}/\w{2,}|\.sh\b")


# variables that torchrun and accelerate launch set in every process that they start
LAUNCHER = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
ALONE = (0, 1)  # rank, and number of processes


def processes() -> int:
    """Return the number of processes that a launcher such as accelerate started."""
    return (_place() or ALONE)[1]


def is_main_process() -> bool:
    """Return whether this is rank 0, the process that prints and writes."""
    return (_place() or ALONE)[0] == 0


def launched() -> bool:
    """Return whether a launcher started this process.

    A shell in a pod or a job may have some variables of a launcher. A launched process has all of them.
    """
    return _place() is not None


def _place() -> tuple[int, int] | None:
    """Return the rank of this process and the number of processes, or None if no launcher started this process."""
    values = [os.environ.get(name, "") for name in LAUNCHER]
    if not all(values) or not all(value.isdecimal() for value in values[:3]):
        return None
    world, rank = map(int, values[:2])
    return (rank, world) if rank < world else None


def note(text: str) -> None:
    """Print a line on stderr, from the main process only."""
    if is_main_process():
        print_words(Console(stderr=True), text, "dim")


@functools.cache
def note_once(text: str) -> None:
    """Print a note that several readings of the same source would repeat. Each text is printed once per process."""
    note(text)


def print_words(console: Console, text: str, style: str | None = None) -> None:
    """Print a line. A terminal wraps it between words, but a line with a path or a command stays whole for copying."""
    whole = not console.is_terminal or COPIED.search(text) is not None
    console.print(printable(text), style=style, highlight=False, markup=False, soft_wrap=whole)


class TimedStream:
    """A text stream that records the time of the last write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.written_at = stream, time.monotonic()

    def write(self, text: str) -> int:
        self.written_at = time.monotonic()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def never_silent(label: str, seconds: float = MAX_SILENT_SECONDS) -> Iterator[None]:
    """During the block, print a line on stderr after every `seconds` seconds without output on stderr."""
    if not is_main_process():
        yield
        return
    stream, done, started = TimedStream(sys.stderr), threading.Event(), time.monotonic()
    console = Console(file=cast("TextIO", stream))

    def report() -> None:
        while not done.wait(seconds / 10):
            if time.monotonic() - stream.written_at > seconds:
                elapsed = time.monotonic() - started
                print_words(console, f"{label} is still working, {elapsed:.0f} s", "dim")

    threading.Thread(target=report, daemon=True).start()
    try:
        with contextlib.redirect_stderr(cast("TextIO", stream)):
            yield
    finally:
        done.set()


@contextlib.contextmanager
def heartbeat(label: str, seconds: float = 5.0) -> Iterator[Callable[[str], None]]:
    """Print a line every `seconds` seconds during work of unknown length.

    Yield a function that sets the status text in this line. Lines go to the original stderr, even if the block
    redirects stderr.
    """
    console, done, status, started = (
        Console(file=sys.stderr),
        threading.Event(),
        "",
        time.monotonic(),
    )

    def report() -> None:
        while not done.wait(seconds):
            elapsed = time.monotonic() - started
            print_words(console, f"{label}: {status}{elapsed:.0f} s", "dim")

    def beat(text: str) -> None:
        nonlocal status
        status = f"{text}, "

    if is_main_process():
        threading.Thread(target=report, daemon=True).start()
    try:
        yield beat
    finally:
        done.set()


@contextlib.contextmanager
def note_if_slow(text: str, seconds: float = 3.0) -> Iterator[None]:
    """Print a note if the block takes longer than `seconds` seconds."""
    timer = threading.Timer(seconds, note, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def progress(label: str, total: int) -> Iterator[Advance]:
    """Show a progress bar with the remaining time. total: Number of items.

    Yield a function that updates the bar. Its arguments are the number of finished items and a status text. Without a
    terminal, print lines in place of the bar: at the start, at every 10 %, and after MAX_SILENT_SECONDS without a line.
    """
    console = Console(stderr=True)
    if not console.is_terminal or not is_main_process():
        yield _plain_lines(label, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
    )
    with Progress(*columns, console=console) as bars:
        task = bars.add_task(label, total=total, status="")
        yield lambda done, status: bars.update(task, completed=done, status=status)


def _plain_lines(label: str, total: int) -> Advance:
    tenths, printed_at = 0, time.monotonic()
    first: tuple[int, float] | None = None
    note(f"{label} 0/{total}")

    def advance(done: int, status: str) -> None:
        nonlocal tenths, printed_at, first
        tenth, now = 10 * done // max(1, total), time.monotonic()
        first = first or (done, now)
        if tenth > tenths or now - printed_at > MAX_SILENT_SECONDS:
            tenths, printed_at = tenth, now
            left = (total - done) * (now - first[1]) / (done - first[0]) if done > first[0] else 0
            note(f"{label} {done}/{total}  {status}{_time_left(left)}".rstrip())

    return advance


def _time_left(seconds: float) -> str:
    if seconds < 10:
        return ""
    return f"  {seconds:.0f} s left" if seconds < 100 else f"  {seconds / 60:.0f} min left"
