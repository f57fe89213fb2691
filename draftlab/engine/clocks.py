"""Clocks for the host, for work queued on a device, and for the phases of a step."""

import time
from collections.abc import Callable
from typing import Protocol, Self

import torch


class Instant(Protocol):
    """A point in time. The difference of two instants is in seconds."""

    def __sub__(self, earlier: Self, /) -> float: ...


Clock = Callable[[], float]
# A clock for the phases of a step. The step subtracts its instants only at its end.
StepClock = Callable[[], Instant]


def clock_for(device: torch.device) -> Clock:
    """Return a clock in seconds. Reading it first waits for the work that is queued on the device."""
    if device.type != "cuda":
        return time.perf_counter

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read


class EventTime:
    """The time when a CUDA device reaches a point in its queue of work. Only a subtraction waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(torch.cuda.current_stream(device))

    def __sub__(self, earlier: "EventTime", /) -> float:
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1e3


def step_clock_for(device: torch.device) -> StepClock:
    """Return a clock that times the phases of a step. The host does not wait for the device between phases."""
    return time.perf_counter if device.type != "cuda" else lambda: EventTime(device)
