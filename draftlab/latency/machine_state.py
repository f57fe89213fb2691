"""Is the machine fit to be timed on: what it is, whether other work keeps it busy, whether what is timed is warm."""

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from draftlab.console import note
from draftlab.engine.generate import Clock, clock_for
from draftlab.results.score import Environment

WARM_UPS = (3, 10)  # least and most before anything counts
ALIKE = 0.1  # two times in a row that differ by less are steady


def read_environment() -> Environment:
    """The machine as it is now; takes half a second, in which it watches what others do."""
    info = _text("/proc/cpuinfo").splitlines()
    names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    return Environment(
        system=platform.platform(),
        processor=names[0] if names else platform.processor() or platform.machine(),
        cores=os.cpu_count() or 1,
        busy_cores=round(_busy_cores(), 2),
        governor=_text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip() or None,
        driver=_text("/proc/driver/nvidia/version").partition("\n")[0].strip() or None,
    )


def warn_if_busy(found: Environment) -> None:
    if found.busy:
        note(
            f"other work keeps {found.busy_cores:.1f} of {found.cores} cores busy: times here are worth little, "
            "though ratios of interleaved arms suffer less"
        )


def warm_up(run: Callable[[], float]) -> bool:
    """Run until two times in a row are alike, and whether they came to be. run: seconds that it took."""
    least, most = WARM_UPS
    times = [run() for _ in range(least)]
    while abs(times[-1] - times[-2]) > ALIKE * min(times[-2:]):
        if len(times) == most:
            return False
        times.append(run())
    return True


def steady_clock(device: torch.device) -> Clock:
    """Of one CPU thread its CPU seconds, which other work on the machine lengthens less; else the wall's."""
    return time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else clock_for(device)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), device.type)


def _busy_cores(seconds: float = 0.5) -> float:
    """Cores in use while this process sleeps; the load average where the system does not count."""
    began = _busy_ticks()
    if began is None:
        return os.getloadavg()[0]
    time.sleep(seconds)
    return ((_busy_ticks() or began) - began) / os.sysconf("SC_CLK_TCK") / seconds


def _busy_ticks() -> int | None:
    """Of /proc/stat: user, nice, system, irq, softirq, steal."""
    words = _text("/proc/stat").partition("\n")[0].split()[1:]
    ticks = [int(word) for word in words]
    return sum(ticks[:3]) + sum(ticks[5:8]) if ticks else None


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
