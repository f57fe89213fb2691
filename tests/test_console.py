"""Text breaks between words on a terminal, but never where it is copied from; no stage is silent for long."""

import io
import sys
import time

import pytest
from rich.console import Console

from draftlab.console import never_silent, print_words

WORDS = "a draft that is narrow and deep needs more passes than one that is wide"


def printed(text: str, *, terminal: bool) -> list[str]:
    stream = io.StringIO()
    print_words(Console(file=stream, width=20, force_terminal=terminal, color_system=None), text)
    return stream.getvalue().splitlines()


def test_a_terminal_breaks_between_words():
    lines = printed(WORDS, terminal=True)
    assert len(lines) > 1
    assert " ".join(line.strip() for line in lines) == WORDS


@pytest.mark.parametrize(
    "text", ["draftlab distill --draft x --steps 20", "written to runs/distill-3x256/score.json"]
)
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
