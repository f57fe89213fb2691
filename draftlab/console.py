"""Print progress and notes on stderr. cli.py prints results on stdout."""

import contextlib
import functools
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from draftlab.trust import printable

Advance = Callable[[float, str], None]
Clock = Callable[[], float]  # seconds
MAX_SILENT_SECONDS = 7.0  # on a terminal
WIDE = 110  # columns of a terminal that has room for a long bar
CLOCK = 7  # columns of a time, 0:00:00
LOG_SECONDS = 60.0  # between lines of progress where stderr is no terminal, such as in a log file
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


class Pace:
    """Decides when a line of progress is due: `first` seconds after the start, then `gap` seconds after a line."""

    def __init__(self, first: float, gap: float, clock: Clock = time.monotonic) -> None:
        self.gap = gap
        self.clock = clock
        self.due_at = clock() + first

    def is_due(self) -> bool:
        """Return whether a line is due. The caller then prints the line."""
        now = self.clock()
        if now < self.due_at:
            return False
        self.due_at = now + self.gap
        return True


@dataclass(slots=True)
class ShownStage:
    """A named part of the work. status: How far it is."""

    name: str
    started_at: float
    status: str = ""


class TimedStream:
    """A text stream that records the time of the last write, and the stages of the work that writes to it.

    Args:
        work: Name of the work, for the time before and after its stages.
        seconds: Longest time without output.
    """

    def __init__(self, stream: TextIO, work: str, seconds: float, clock: Clock = time.monotonic) -> None:
        self._stream = stream
        self._work = work
        self._seconds = seconds
        self._clock = clock
        self._started_at = self.written_at = clock()
        self._stages: list[ShownStage] = []  # the inner ones last

    def write(self, text: str) -> int:
        self.written_at = self._clock()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[ShownStage]:
        """Name what happens in the block."""
        stage = ShownStage(name, self._clock())
        self._stages.append(stage)
        try:
            yield stage
        finally:
            self._stages = [each for each in self._stages if each is not stage]

    def overdue(self) -> str | None:
        """Return a line that names the present stage, or None if something was written not long ago."""
        now = self._clock()
        if now - self.written_at <= self._seconds:
            return None
        start = f"{self._work} is still working", self._started_at
        stage = self._stages[-1] if self._stages else ShownStage(*start)
        return f"{f'{stage.name} {stage.status}'.rstrip()}, {now - stage.started_at:.0f} s"


def _seconds_between_lines(console: Console) -> float:
    return MAX_SILENT_SECONDS if console.is_terminal else LOG_SECONDS


@contextlib.contextmanager
def never_silent(work: str, seconds: float | None = None) -> Iterator[None]:
    """During the block, print a line on stderr after every `seconds` seconds without output on stderr.

    The line names the stage in which the work is. seconds: Default: MAX_SILENT_SECONDS on a terminal, otherwise
    LOG_SECONDS.
    """
    if not is_main_process():
        yield
        return
    seconds = seconds or _seconds_between_lines(Console(stderr=True))
    stream = TimedStream(sys.stderr, work, seconds)
    done = threading.Event()
    console = Console(file=cast("TextIO", stream))

    def report() -> None:
        while not done.wait(min(1.0, seconds / 10)):
            if line := stream.overdue():
                print_words(console, line, "dim")

    threading.Thread(target=report, daemon=True).start()
    try:
        with contextlib.redirect_stderr(cast("TextIO", stream)):
            yield
    finally:
        done.set()


def _stage(name: str) -> contextlib.AbstractContextManager[ShownStage | None]:
    """Name what happens in a block, for the lines of never_silent. Yield None if there are no such lines."""
    stream: object = sys.stderr
    return stream.stage(name) if isinstance(stream, TimedStream) else contextlib.nullcontext()


@contextlib.contextmanager
def heartbeat(label: str, seconds: float = 5.0) -> Iterator[Callable[[str], None]]:
    """Print a line every `seconds` seconds during work of unknown length. In a log, only the first comes so soon.

    Yield a function that sets the status text in this line. Lines go to the original stderr, even if the block
    redirects stderr.
    """
    console = Console(file=sys.stderr)
    done = threading.Event()
    started = time.monotonic()
    with _stage(label) as stage:
        shown = stage or ShownStage(label, started)
        # in a log, never_silent prints all lines of a stage but the first
        later = seconds if console.is_terminal else LOG_SECONDS if stage is None else math.inf
        pace = Pace(seconds, later)

        def report() -> None:
            while not done.wait(seconds / 10):
                if pace.is_due():
                    elapsed = time.monotonic() - started
                    print_words(console, f"{label}: {shown.status}{elapsed:.0f} s", "dim")

        def beat(text: str) -> None:
            shown.status = f"{text}, "

        if is_main_process():
            threading.Thread(target=report, daemon=True).start()
        try:
            yield beat
        finally:
            done.set()


@contextlib.contextmanager
def note_if_slow(text: str, seconds: float = 3.0) -> Iterator[None]:
    """Print a note if the block takes longer than `seconds` seconds. The text names the stage of the work."""
    timer = threading.Timer(seconds, note, [text])
    timer.daemon = True
    timer.start()
    try:
        with _stage(text):
            yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def progress(label: str, total: int) -> Iterator[Advance]:
    """Show a progress bar with the remaining time. total: Number of items.

    Yield a function that updates the bar. Its arguments are the number of finished items, which may have a fraction,
    and a status text. The bar ends with the last item, also if the block goes on. Without a terminal, print a line at
    the start in place of the bar, and after it at most one line every LOG_SECONDS.
    """
    console = Console(stderr=True)
    with contextlib.ExitStack() as shown:
        stage = shown.enter_context(_stage(label))
        if not is_main_process():
            yield lambda done, status: None
            return
        drawn = console.is_terminal
        show = _bar(shown, console, label, total) if drawn else _plain_lines(label, total, stage)

        def advance(done: float, status: str) -> None:
            show(done, status)
            if done >= total:
                shown.close()

        yield advance


def _bar(shown: contextlib.ExitStack, console: Console, label: str, total: int) -> Advance:
    """Draw a bar until `shown` is closed, and return the function that updates it."""
    bars = shown.enter_context(Progress(*_columns(label, total, console.width), console=console))
    task = bars.add_task(label, total=total, status="")
    return lambda done, status: bars.update(task, completed=done, status=status)


def _columns(label: str, total: int, width: int) -> list[ProgressColumn]:
    """Return the columns of a bar for a terminal of `width` columns.

    Counts and times are never cut. What is left is for the label, at most two thirds of it, and for the status.
    """
    bar = 24 if width >= WIDE else 8
    count = 2 * len(str(total)) + 1
    left = max(2, width - bar - count - 2 * CLOCK - 5)  # there is a blank between two columns
    named = min(len(label), max(1, 2 * left // 3))

    def cut(columns: int) -> Column:
        return Column(no_wrap=True, overflow="ellipsis", max_width=columns)

    return [
        TextColumn("{task.description}", table_column=cut(named)),
        BarColumn(bar_width=bar),
        MofNCompleteColumn(table_column=Column(min_width=count)),
        TimeElapsedColumn(table_column=Column(min_width=CLOCK)),
        TimeRemainingColumn(table_column=Column(min_width=CLOCK)),
        TextColumn("{task.fields[status]}", table_column=cut(max(1, left - named))),
    ]


def _plain_lines(label: str, total: int, stage: ShownStage | None, clock: Clock = time.monotonic) -> Advance:
    """Print the first line of a stage, and return the function that shows its progress.

    stage: The stage whose later lines never_silent prints. None: the function prints them.
    """
    pace = Pace(LOG_SECONDS, LOG_SECONDS, clock)
    first: tuple[float, float] | None = None
    note(f"{label} 0/{total}")

    def advance(done: float, status: str) -> None:
        nonlocal first
        now = clock()
        first = first or (done, now)
        left = (total - done) * (now - first[1]) / (done - first[0]) if done > first[0] else 0
        text = f"{int(done)}/{total}  {status}{_time_left(left)}".rstrip()
        if stage is not None:
            stage.status = text
        elif pace.is_due():
            note(f"{label} {text}")

    return advance


def _time_left(seconds: float) -> str:
    if seconds < 10:
        return ""
    return f"  {seconds:.0f} s left" if seconds < 100 else f"  {seconds / 60:.0f} min left"
