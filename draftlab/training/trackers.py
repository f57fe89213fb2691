"""Experiment trackers such as TensorBoard, Weights & Biases and trackio, through accelerate."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from accelerate import tracking

from draftlab.errors import UserError, did_you_mean
from draftlab.output import Output


@contextlib.contextmanager
def tracked(names: Sequence[str], output: Output) -> Iterator[Callable[[Any], None]]:
    """Yield a function that logs the numbers of a step or of an evaluation to accelerate's trackers of these names.

    Those of an evaluation are named heldout/... Files go next to the output, in a folder of the tracker's name.
    """
    trackers = [_start(name, output) for name in names]

    def log(record: Any) -> None:
        values = {n: v for n, v in asdict(record).items() if isinstance(v, float)}
        part = "heldout" if "cross_entropy" in values else "train"
        for tracker in trackers:
            tracker.log({f"{part}/{n}": v for n, v in values.items()}, step=record.step)

    yield log
    for tracker in trackers:
        tracker.finish()


def check(names: Sequence[str]) -> None:
    """Raises UserError: accelerate does not know a tracker, or its package is not installed."""
    known = [str(name) for name in tracking.LOGGER_TYPE_TO_CLASS]
    installed = [str(name) for name in tracking.get_available_trackers()]
    for name in names:
        if name not in known:
            raise UserError(f"--report-to {name}: unknown tracker{did_you_mean(name, known)}")
        if name not in installed:
            raise UserError(f"--report-to {name}: its package is not installed; pip install {name}")


def _start(name: str, output: Output) -> tracking.GeneralTracker:
    kind, out, values = tracking.LOGGER_TYPE_TO_CLASS[name], output.out, output.config.settings()
    tracker = (
        kind(out.name, out.parent / name) if kind.requires_logging_directory else kind("draftlab")
    )
    tracker.start()
    tracker.store_init_configuration(
        {n: v if isinstance(v, int | float | str) else str(v) for n, v in values.items()}
    )
    return tracker
