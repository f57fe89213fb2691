"""What people see while they wait: progress and notes on stderr. Results are printed by cli.py alone."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Advance = Callable[[int, str], None]
SILENT = 20.0


def processes() -> int:
    """How many processes a launcher such as accelerate started for this command."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Whether this is the process that speaks and writes."""
    return os.environ.get("RANK", "0") == "0"


def note(text: str) -> None:
    """One line on stderr, not part of the result."""
    if not is_main_process():
        return
    Console(stderr=True, soft_wrap=True).print(text, style="dim", highlight=False, markup=False)


@contextlib.contextmanager
def heartbeat(what: str, seconds: float = 8.0) -> Iterator[Callable[[], None]]:
    """Say every so many seconds that work of unknown length goes on; the yielded function counts its steps.

    It speaks where stderr is now, also while that is sent elsewhere.
    """
    console, done, count, started = Console(file=sys.stderr, soft_wrap=True), threading.Event(), 0, time.monotonic()

    def speak() -> None:
        while not done.wait(seconds):
            passes = f"{count} passes in " if count else ""
            text = f"{what}: {passes}{time.monotonic() - started:.0f} s"
            console.print(text, style="dim", highlight=False, markup=False)

    def beat() -> None:
        nonlocal count
        count += 1

    if is_main_process():
        threading.Thread(target=speak, daemon=True).start()
    try:
        yield beat
    finally:
        done.set()


@contextlib.contextmanager
def note_if_slow(text: str, seconds: float = 3.0) -> Iterator[None]:
    """Say what is being done where the block takes longer than that."""
    timer = threading.Timer(seconds, note, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Advance]:
    """A bar with time left; call the yielded function with how many are done in all and a word on how it goes.

    Where stderr is no terminal plain lines are printed: one at the start, then one for every tenth, and at least one in
    so many SILENT seconds in which something was done.
    """
    console = Console(stderr=True)
    if not console.is_terminal or not is_main_process():
        yield _plain_lines(what, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[word]}"),
    )
    with Progress(*columns, console=console) as bars:
        task = bars.add_task(what, total=total, word="")
        yield lambda done, word: bars.update(task, completed=done, word=word)


def _plain_lines(what: str, total: int) -> Advance:
    printed, said = 0, time.monotonic()
    note(f"{what} 0/{total}")

    def advance(done: int, word: str) -> None:
        nonlocal printed, said
        tenth = 10 * done // max(1, total)
        if tenth > printed or time.monotonic() - said > SILENT:
            printed, said = tenth, time.monotonic()
            note(f"{what} {done}/{total}  {word}".rstrip())

    return advance
