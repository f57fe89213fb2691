"""Limits of memory and CPU time that Linux sets for the processes of a container, of a Slurm job, or of a service."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from draftlab.reading import text_of_system


@dataclass(frozen=True, slots=True)
class Cgroups:
    """The groups of a process.

    Args:
        root: Where the cgroup file systems are mounted.
        membership: File that names the process's groups.
    """

    root: Path = Path("/sys/fs/cgroup")
    membership: Path = Path("/proc/self/cgroup")

    def free_memory(self) -> int | None:
        """Return the bytes that this process can still allocate, or None without a limit.

        Every group that contains the process counts. Cached files are free, as in Linux's MemAvailable.
        """
        version_2 = (
            ("memory.max", "memory.high"),
            "memory.current",
            ("inactive_file", "active_file"),
        )
        version_1 = (
            ("memory.limit_in_bytes",),
            "memory.usage_in_bytes",
            ("total_inactive_file", "total_active_file"),
        )
        free = list[int]()
        for controller, (limits, usage, cached) in (("", version_2), ("memory", version_1)):
            for group in self._groups(controller):
                limit = min((n for name in limits for n in _numbers(group / name)), default=None)
                used = _numbers(group / usage)
                if limit is None or not used:
                    continue
                counts = dict(line.split() for line in text_of_system(group / "memory.stat").splitlines())
                free.append(limit - used[0] + sum(int(counts.get(name, 0)) for name in cached))
        return max(0, min(free)) if free else None

    def cpus(self) -> int | None:
        """Return the number of CPUs whose time this process may use, rounded up, or None without a quota."""
        quotas = list[float]()
        for group in self._groups(""):
            match _numbers(group / "cpu.max"):
                case quota, period:
                    quotas.append(quota / period)
        for group in self._groups("cpu"):
            quota, period = (_numbers(group / f"cpu.cfs_{n}_us") for n in ("quota", "period"))
            if quota and period and quota[0] > 0:  # -1 stands for no quota
                quotas.append(quota[0] / period[0])
        return max(1, math.ceil(min(quotas))) if quotas else None

    def _groups(self, controller: str) -> Iterator[Path]:
        """Yield the directories of the process's group and of its parents.

        In a container, the root may be the process's own group, and then its named group is missing below the root.

        controller: Controller of cgroup v1, or "" for cgroup v2.
        """
        for line in text_of_system(self.membership).splitlines():
            _, controllers, name = line.split(":", 2)
            if controller not in controllers.split(","):
                continue
            parts = Path(name.lstrip("/")).parts
            if ".." in parts:  # the group is outside of what this container sees
                parts = ()
            for mount in dict.fromkeys((controllers or ".", controller or "unified")):
                for length in range(len(parts), -1, -1):
                    yield self.root.joinpath(mount, *parts[:length])


OWN = Cgroups()


def limit_threads() -> None:
    """Set OMP_NUM_THREADS, which torch reads at its import, to the CPU quota of this process if that is smaller.

    Otherwise torch would start a thread for every core, and the threads would take turns in the quota.
    """
    cpus = OWN.cpus()
    if cpus is not None and cpus < (os.cpu_count() or 1):
        os.environ.setdefault("OMP_NUM_THREADS", str(cpus))


def _numbers(file: Path) -> list[int]:
    """Return the numbers in a file. The word "max", which stands for no limit, and a missing file have none."""
    words = text_of_system(file).split()
    return [] if "max" in words else [int(word) for word in words]
