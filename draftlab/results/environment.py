"""The machine that a score was measured on, and what in it makes its times doubtful. No torch."""

from draftlab.reading import FileModel

BUSY = 0.5  # share of the cores that other work uses
LONG_WAITS = 0.1  # share of the time, for a core or without one
UNDER_PRESSURE = 0.5  # share of the time; below it are the short threads of every system


class Environment(FileModel):
    """The machine, just before measuring."""

    system: str
    processor: str
    cores: int
    busy_cores: float  # used by other work
    governor: str | None  # CPU frequency governor
    driver: str | None  # NVIDIA driver
    # while it was timed, where Linux says it:
    # share of the time in which the decoding thread wanted a core, without one
    waited_share: float | None = None
    # share of the cores' time, given to other machines by the hypervisor
    stolen_share: float | None = None
    # share of the time in which some thread of the machine waited for a core
    pressure: float | None = None

    @property
    def busy(self) -> bool:
        return self.busy_cores > BUSY * self.cores

    def counts_cpu_seconds(self, device: str, threads: int | None) -> bool:
        """Return whether times are CPU seconds, in which waits do not count: those of one CPU thread."""
        return device == self.processor and threads == 1

    def doubt(self, device: str, threads: int | None) -> str | None:
        """The reason to doubt times of that number of threads on a device; None: there is none.

        Other work and other machines slow what runs, too: they share its caches and its memory. Waits for a core are
        in wall-clock time only, but a core that was shared cost CPU seconds as well, and more of them where a step is
        wide: benchmarks.noise measured 1.29x to 1.70x where 1.79x is true. Pressure counts the waits of all threads.
        """
        if self.busy:
            return f"other work kept {self.busy_cores:.1f} of {self.cores} cores busy"
        if (self.stolen_share or 0) > LONG_WAITS:
            return (
                f"the hypervisor gave {self.stolen_share:.0%} of the cores' time to other machines"
            )
        if (self.waited_share or 0) > LONG_WAITS:
            return f"decoding waited for a core in {self.waited_share:.0%} of its time"
        if self.counts_cpu_seconds(device, threads):
            return None
        if device == self.processor and (self.pressure or 0) > UNDER_PRESSURE:
            return f"threads waited for a core in {self.pressure:.0%} of the time"
        return None
