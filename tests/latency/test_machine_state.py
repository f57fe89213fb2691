"""What is timed is warm, and a busy machine is said to be one."""

import os
from collections.abc import Iterator

import pytest

from draftlab.latency import machine_state
from draftlab.latency.machine_state import (
    WARM_UPS,
    CoreTime,
    read_environment,
    warm_up,
    with_waiting,
)
from draftlab.results.score import Environment


def calls(times: list[float]) -> tuple[bool, int]:
    """Return whether runs of these times become steady, and the number of runs."""
    left: Iterator[float] = iter(times)
    steady = warm_up(lambda: next(left))
    return steady, len(times) - len(list(left))


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([1.0] * 9, (True, 3)),  # never fewer than three
        # the first call compiles, the second still fills caches
        ([15.0, 1.3, 1.0, 1.02, 9.9], (True, 4)),
        ([1.0, 1.0, 2.0, 1.9, 1.0, 1.05], (True, 4)),
        ([1.0, 2.0] * 9, (False, 10)),
    ],
)
def test_it_is_run_until_two_times_in_a_row_are_alike(times, expected, monkeypatch):
    monkeypatch.setattr(machine_state, "WARM_UPS", WARM_UPS)  # those of users, not those of tests
    assert calls(times) == expected


def test_the_machine_is_described():
    found = read_environment()
    assert found.cores == os.cpu_count()
    assert 0 <= found.busy_cores <= found.cores + 0.5
    assert found.system
    assert found.processor


IDLE = Environment(system="s", processor="p", cores=4, busy_cores=0.0, governor=None, driver=None)


def test_waiting_is_what_the_kernel_counted_meanwhile():
    before = CoreTime(clock=10.0, ran=1.0, waited=5.0, stolen=2.0, pressed=0.0)
    after = CoreTime(clock=20.0, ran=7.0, waited=7.0, stolen=6.0, pressed=5.0)
    seen = with_waiting(IDLE, before, after)
    # 2 of 8 s, 4 of 40 core seconds
    assert (seen.waited_share, seen.stolen_share, seen.pressure) == (0.25, 0.1, 0.5)
    # the kernel's counters are not read at the same instant
    late = CoreTime(clock=20.0, ran=7.0, waited=7.0, stolen=1.0, pressed=10.1)
    seen = with_waiting(IDLE, before, late)
    assert (seen.stolen_share, seen.pressure) == (0.0, 1.0)
    unknown = CoreTime(clock=10.0, ran=None, waited=None, stolen=None, pressed=None)
    assert with_waiting(IDLE, unknown, unknown) == IDLE
