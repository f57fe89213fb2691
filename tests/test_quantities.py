"""Numbers in words have no exponent, and their rounded digits fit their unit."""

import math
import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftlab.quantities import format_bytes, format_duration, format_number

UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


@pytest.mark.parametrize(
    ("value", "text"),
    [(12060, "12,060"), (0.0123, "0.0123"), (9.999, "10.0"), (230, "230"), (0, "0.00")],
)
def test_numbers_have_three_digits(value, text):
    assert format_number(value) == text


@given(st.floats(1e-9, 1e15), st.integers(1, 5))
def test_a_number_is_off_by_half_a_digit_at_most(value, digits):
    text = format_number(value, digits)
    assert "e" not in text
    error = abs(Decimal(text.replace(",", "")) - Decimal(value))
    last = Decimal(10) ** (math.floor(math.log10(value)) - digits + 1)
    # digits before the decimal point are all there, and a float is not a decimal number
    assert error <= min(last, Decimal(1)) / 2 * Decimal("1.000001")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (4096, "4.10 kB"),
        (999_600, "1.00 MB"),
        (3.1e9, "3.10 GB"),
        (1.3e12, "1,300 GB"),
    ],
)
def test_sizes_have_their_unit(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.82, "0.82 s"),
        (9.96, "10 s"),
        (99.4, "99 s"),
        (99.6, "2 min"),
        (7170, "2 h"),
        (13_200, "3 h 40 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_durations_are_said_as_people_say_them(seconds, text):
    assert format_duration(seconds) == text


@given(st.floats(0.01, 1e8))
def test_a_duration_is_off_by_little(seconds):
    parts = re.findall(r"([\d.,]+) (s|min|h|d)\b", format_duration(seconds))
    said = sum(float(number.replace(",", "")) * UNITS[unit] for number, unit in parts)
    assert said == pytest.approx(seconds, rel=0.25)
    assert "e" not in format_duration(seconds)
