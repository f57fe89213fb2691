"""The plan of a command, which --dry-run shows: the facts of its job, and the time that it takes on this machine."""

from collections.abc import Mapping

import torch

from draftlab.commands.base import Outcome
from draftlab.engine.timing import bandwidth_gbs, matmul_tflops
from draftlab.model.devices import resolve_device
from draftlab.output import Output
from draftlab.quantities import format_duration

LARGE_WEIGHTS = 1 << 27  # number of weights with which a dry run measures memory bandwidth
# ratio of a model's time to the time of its matrix products, as dry runs assume
MODEL_SECONDS = 2.0


def plan(output: Output, facts: Mapping[str, object]) -> Outcome:
    """Return the outcome of a dry run: the facts, the estimated time, and the directory that would be written."""
    shown = dict(facts)
    minutes = {}
    flops = _number(shown.pop("flops", 0))
    read_bytes = _number(shown.pop("bytes", 0))
    if flops or read_bytes:
        device = resolve_device(getattr(output.config, "device", "auto"))
        seconds = 0.0
        if flops:
            seconds += MODEL_SECONDS * flops / (1e12 * matmul_tflops(torch.float32, device))
        if read_bytes:
            bandwidth = bandwidth_gbs(LARGE_WEIGHTS, torch.float32, device)
            seconds += read_bytes / (1e9 * bandwidth)
        minutes = {"minutes": seconds / 60}
        kind = device.type.upper().replace("CUDA", "GPU")
        shown["time"] = f"about {format_duration(seconds)} on this {kind}"
    lines = [f"{name}: {value}" for name, value in shown.items()]
    data = {"out": str(output.out), **shown, **minutes}
    return Outcome(path=None, show=[*lines, f"would write {output.out}"], data=data, next=output.command_line)


def _number(fact: object) -> float:
    assert isinstance(fact, int | float)
    return fact
