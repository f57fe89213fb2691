"""Text breaks between words on a terminal, but never where it is copied from; no stage is silent for long."""

import io
import itertools
import re
import sys
import time

import pytest
from rich.console import Console
from rich.progress import Progress

from draftlab import console
from draftlab.console import (
    LOG_SECONDS,
    Pace,
    TimedStream,
    never_silent,
    note_if_slow,
    print_words,
    progress,
)

WORDS = "a draft that is narrow and deep needs more passes than one that is wide"


def printed(text: str, *, terminal: bool) -> list[str]:
    stream = io.StringIO()
    print_words(Console(file=stream, width=20, force_terminal=terminal, color_system=None), text)
    return stream.getvalue().splitlines()


def test_a_terminal_breaks_between_words():
    lines = printed(WORDS, terminal=True)
    assert len(lines) > 1
    assert " ".join(line.strip() for line in lines) == WORDS


@pytest.mark.parametrize("text", ["draftlab distill --draft x --steps 20", "written to runs/distill-3x256/score.json"])
def test_what_is_copied_stays_whole(text):
    assert printed(text, terminal=True) == [text]


def test_a_file_has_one_line_per_line():
    assert printed(WORDS, terminal=False) == [WORDS]


def test_a_line_follows_silence_and_only_silence(capsys):
    with never_silent("score", seconds=0.2):
        for _ in range(10):
            print("said", file=sys.stderr)
            time.sleep(0.02)
    assert capsys.readouterr().err.split() == ["said"] * 10
    with never_silent("score", seconds=0.2):
        time.sleep(0.7)
    assert len(capsys.readouterr().err.splitlines()) >= 2


class FakeClock:
    """A clock that stands still until somebody sets it."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("step", [0.1, 7, 61, 400])
def test_a_log_gets_at_most_a_line_a_minute_that_names_the_stage(capsys, step):
    """However fast the items are done. The stream is looked at every second, as never_silent does."""
    clock = FakeClock()
    stream = TimedStream(io.StringIO(), "score", LOG_SECONDS, clock)
    printed: list[tuple[float, str]] = []
    with stream.stage("decoding") as stage:
        advance = console._plain_lines("decoding", 500, stage, clock)
        due = clock.now + step
        for done in range(1, 501):
            while clock.now < due:
                clock.now = min(due, clock.now + 1)
                if line := stream.overdue():
                    printed.append((clock.now, line))
                    stream.write(line)
            advance(done, "answers")
            due += step
    assert capsys.readouterr().err == "decoding 0/500\n"
    gaps = [b - a for a, b in itertools.pairwise([100.0, *(at for at, _ in printed)])]
    assert all(LOG_SECONDS < gap < LOG_SECONDS + 2 for gap in gaps)
    assert len(printed) >= 500 * step // (LOG_SECONDS + 2)
    assert all(line.startswith("decoding") for _, line in printed)
    assert step > LOG_SECONDS or all("/500  answers" in line for _, line in printed)


def test_the_inner_stage_is_named_and_the_outer_one_after_it():
    clock = FakeClock()
    stream = TimedStream(io.StringIO(), "score", 60, clock)

    def named() -> str:
        clock.now += 61
        return str(stream.overdue()).split(",")[0]

    with stream.stage("outer"):
        with stream.stage("inner"):
            assert named() == "inner"
        assert named() == "outer"
    assert "score" in named()


def test_a_pace_is_at_most_one_line_per_gap():
    clock = FakeClock()
    pace = Pace(5, 60, clock)
    printed_at = []
    for second in range(300):
        clock.now = 100.0 + second
        if pace.is_due():
            printed_at.append(second)
    assert printed_at == [5, 65, 125, 185, 245]


@pytest.mark.parametrize("step", [0.1, 7, 61, 400])
def test_progress_in_a_log_is_a_line_at_the_start_and_then_one_a_minute(capsys, step):
    """However fast the items are done."""
    clock, items = FakeClock(), 500
    advance = console._plain_lines("decoding", items, None, clock)
    times = [clock.now]
    for done in range(1, items + 1):
        clock.now += step
        before = capsys.readouterr().err if done == 1 else ""
        assert before.count("\n") == (done == 1)
        advance(done, "answers")
        if capsys.readouterr().err:
            times.append(clock.now)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert min(gaps, default=60) >= 60
    assert len(gaps) >= items * step // (60 + step)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_finished_bar_is_closed_before_the_block_ends(monkeypatch):
    """Later output of the block does not belong to the bar's stage, and nothing is drawn."""
    terminal, clock = Terminal(), FakeClock()
    stream = TimedStream(terminal, "score", 7, clock)
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("decoding", 2) as advance:
        advance(1, "")
        clock.now += 8
        assert str(stream.overdue()).startswith("decoding")
        advance(2, "")
        drawn = terminal.getvalue()
        with note_if_slow("measuring what rounding costs the target"):
            clock.now += 8
            assert str(stream.overdue()).startswith("measuring what rounding costs the target")
        time.sleep(0.3)  # several times the interval at which rich draws a bar
        assert terminal.getvalue() == drawn


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_counts_and_times_of_a_bar_are_whole_on_any_terminal(width):
    label, status = "timing plain decoding, latest-lookup, fallback", "85 tokens/s, loss 2.811, acceptance 0.272"
    now, drawn = 0.0, io.StringIO()
    shown = Console(file=drawn, width=width, force_terminal=True)
    columns = console._columns(label, 1500, width)
    bars = Progress(*columns, console=shown, get_time=lambda: now)
    task = bars.add_task(label, total=1500, status=status)
    now = 10.0
    bars.update(task, completed=500)
    now = 20.0
    bars.update(task, completed=1000)
    shown.print(bars.get_renderable())
    (line,) = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn.getvalue()).splitlines()
    assert len(line) <= width
    assert "1000/1500" in line
    assert re.findall(r"\d+:\d\d:\d\d", line) == ["0:00:20", "0:00:10"]
    assert label[:5] in line
    assert (status in line) == (width == 160)
