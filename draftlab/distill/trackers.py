"""Experiment trackers such as TensorBoard, Weights & Biases and trackio, through accelerate."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from accelerate import tracking

from draftlab.errors import UserError, did_you_mean
from draftlab.output import Output

PROJECT = "draftlab"


@dataclass(frozen=True, slots=True)
class Trackers:
    each: list[tracking.GeneralTracker]

    def log(self, record: Any) -> None:
        """Log the numbers of a step or an evaluation at its step; those of an evaluation are named heldout/..."""
        values = {n: v for n, v in asdict(record).items() if isinstance(v, float)}
        part = "heldout" if "cross_entropy" in values else "train"
        for tracker in self.each:
            tracker.log({f"{part}/{n}": v for n, v in values.items()}, step=record.step)


@contextlib.contextmanager
def tracked(names: Sequence[str], output: Output) -> Iterator[Trackers]:
    """Yield trackers of accelerate's names; their files go beside the output, in a folder of the tracker's name."""
    trackers = Trackers([_start(name, output) for name in names])
    yield trackers
    for tracker in trackers.each:
        tracker.finish()


def check(names: Sequence[str]) -> None:
    """Raises UserError: a name that accelerate does not know, or a package that is not installed."""
    known = sorted(tracking.LOGGER_TYPE_TO_CLASS)
    installed = {str(name) for name in tracking.get_available_trackers()}
    for name in names:
        if name not in known:
            raise UserError(f"--report-to {name!r} is unknown{did_you_mean(name, known)}; known: {', '.join(known)}")
        if name not in installed:
            raise UserError(f"--report-to {name}: its package is not installed; pip install {name}")


def _start(name: str, output: Output) -> tracking.GeneralTracker:
    kind, out = tracking.LOGGER_TYPE_TO_CLASS[name], output.out
    tracker = kind(out.name, out.parent / name) if kind.requires_logging_directory else kind(PROJECT)
    tracker.start()
    values = output.config.settings()
    tracker.store_init_configuration({n: v if isinstance(v, int | float | str) else str(v) for n, v in values.items()})
    return tracker
