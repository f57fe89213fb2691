"""Who else is told how a run goes: TensorBoard, Weights & Biases, trackio and others, through accelerate."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from accelerate import tracking

from draftlab.errors import UserError, did_you_mean
from draftlab.provenance import plain

PROJECT = "draftlab"


@dataclass(frozen=True, slots=True)
class Trackers:
    each: list[tracking.GeneralTracker]

    def log(self, record: object) -> None:
        """A step's or an evaluation's numbers at its step; those of an evaluation are named heldout/..."""
        values = {n: v for n, v in asdict(record).items() if isinstance(v, float)}  # type: ignore[call-overload]
        evaluation = "cross_entropy" in values
        named = {f"heldout/{n}" if evaluation else f"train/{n}": v for n, v in values.items()}
        for tracker in self.each:
            tracker.log(named, step=record.step)  # type: ignore[attr-defined]


@contextlib.contextmanager
def tracked(names: tuple[str, ...], out: Path, arguments: dict[str, object]) -> Iterator[Trackers]:
    """Trackers by accelerate's names; files go beside out, in a folder of the tracker's name."""
    trackers = Trackers([_started(name, out, arguments) for name in names])
    yield trackers
    for tracker in trackers.each:
        tracker.finish()


def check(names: tuple[str, ...]) -> None:
    """Raises UserError: a name that accelerate does not know, or a package that is not installed."""
    known = sorted(tracking.LOGGER_TYPE_TO_CLASS)
    installed = {str(name) for name in tracking.get_available_trackers()}
    for name in names:
        if name not in known:
            raise UserError(f"--track {name!r} is not known{did_you_mean(name, known)}; want one of {', '.join(known)}")
        if name not in installed:
            raise UserError(f"--track {name}: its package is not installed; pip install {name}")


def _started(name: str, out: Path, arguments: dict[str, object]) -> tracking.GeneralTracker:
    kind = tracking.LOGGER_TYPE_TO_CLASS[name]
    tracker = kind(out.name, out.parent / name) if kind.requires_logging_directory else kind(PROJECT)
    tracker.start()
    values = plain(arguments)
    tracker.store_init_configuration({n: v if isinstance(v, int | float | str) else str(v) for n, v in values.items()})
    return tracker
