"""The state of a machine that timings depend on: its load, warm-up, clocks, and the names of processor and GPU."""

import os
import platform
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from draftlab.console import note
from draftlab.engine.clocks import Clock, StepClock, clock_for, step_clock_for
from draftlab.model.processor import processor_name, read_cpuinfo
from draftlab.reading import text_of_system
from draftlab.results.score import Environment

WARM_UPS = (3, 10)  # fewest and most runs of a warm-up
SIMILAR = 0.1  # a warm-up ends when two consecutive times differ by at most this fraction
WATCH_SECONDS = 0.5


def read_environment() -> Environment:
    """Return the machine's processor, load and driver. The call takes WATCH_SECONDS, to observe the load."""
    cores = os.cpu_count() or 1
    return Environment(
        system=platform.platform(),
        processor=device_name(torch.device("cpu")),
        cores=cores,
        busy_cores=round(psutil.cpu_percent(interval=WATCH_SECONDS) / 100 * cores, 2),
        governor=text_of_system("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip() or None,
        driver=text_of_system("/proc/driver/nvidia/version").partition("\n")[0].strip() or None,
    )


def warn_if_busy(environment: Environment, more: str = "") -> None:
    """Print a note if other programs keep the machine busy. more: Text that follows the consequence for times."""
    if environment.busy:
        busy = f"{environment.busy_cores:.1f} of {environment.cores} cores"
        note(f"other programs keep {busy} busy, so times are unreliable{more}")


@dataclass(frozen=True, slots=True)
class CoreTime:
    """A reading of Linux's counters of seconds. A counter that the system lacks is None.

    Args:
        clock: Seconds of the wall clock.
        ran: Seconds in which this thread ran on a core.
        waited: Seconds in which this thread waited for a core.
        stolen: Seconds of core time that the hypervisor gave to other virtual machines.
        pressed: Seconds in which at least one thread of the machine waited for a core (pressure stall information).
    """

    clock: float
    ran: float | None
    waited: float | None
    stolen: float | None
    pressed: float | None


def read_core_time() -> CoreTime:
    own = text_of_system(f"/proc/self/task/{threading.get_native_id()}/schedstat").split()
    pressed = re.search(r"some .*total=(\d+)", text_of_system("/proc/pressure/cpu"))
    return CoreTime(
        clock=time.perf_counter(),
        ran=int(own[0]) / 1e9 if own else None,
        waited=int(own[1]) / 1e9 if own else None,
        stolen=getattr(psutil.cpu_times(), "steal", None),  # only Linux has this field
        pressed=int(pressed[1]) / 1e6 if pressed else None,
    )


def with_waiting(environment: Environment, before: CoreTime, after: CoreTime) -> Environment:
    """Return the environment with waited_share, stolen_share and pressure, measured between two readings."""

    def share(first: float | None, last: float | None, of: float) -> float | None:
        if first is None or last is None or not of:
            return None
        return round(min(1.0, max(0.0, (last - first) / of)), 4)

    seconds = max(after.clock - before.clock, 1e-9)
    ran = (after.ran or 0.0) - (before.ran or 0.0)
    waited = (after.waited or 0.0) - (before.waited or 0.0)
    shares = {
        "waited_share": share(before.waited, after.waited, ran + waited),
        "stolen_share": share(before.stolen, after.stolen, seconds * environment.cores),
        "pressure": share(before.pressed, after.pressed, seconds),
    }
    return environment.model_copy(update=shares)


def warm_up(run: Callable[[], float]) -> bool:
    """Call `run` 3 to 10 times, until two consecutive calls take similar times. Return whether the last two calls did.

    run: Function to warm up, which returns the seconds it took.
    """
    least, most = WARM_UPS
    times = [run() for _ in range(least)]
    while abs(times[-1] - times[-2]) > SIMILAR * min(times[-2:]):
        if len(times) == most:
            return False
        times.append(run())
    return True


def steady_clock(device: torch.device) -> Clock:
    """Return the device's clock or, if torch runs on one CPU thread, a clock of CPU seconds.

    Other programs affect CPU seconds less than the wall clock.
    """
    return time.process_time if _one_cpu_thread(device) else clock_for(device)


def steady_step_clock(device: torch.device) -> StepClock:
    """Return a clock for the phases of a step, which does not wait for the device.

    If torch runs on one CPU thread, the clock counts CPU seconds, as in steady_clock.
    """
    return time.process_time if _one_cpu_thread(device) else step_clock_for(device)


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or the name of the processor with its fastest instructions.

    The name includes the instructions, because virtual machines may hide the processor's model.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor_name(read_cpuinfo())


def _one_cpu_thread(device: torch.device) -> bool:
    return device.type == "cpu" and torch.get_num_threads() == 1
