"""Measure the latency profiles of models, or of shapes with random weights, and write one file per model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch

from draftlab.console import note, progress
from draftlab.drafters.base import DRAFTERS
from draftlab.engine.timing import bandwidth_gbs, matmul_tflops
from draftlab.errors import UserError
from draftlab.latency.cost_model import Profile, active_params, write_profile
from draftlab.latency.machine_state import device_name, read_environment, steady_clock, warn_if_busy
from draftlab.latency.profiler import Grid, LatencyCurves, measure, random_model
from draftlab.latency.scaling_law import ScalingLaw, fit_law
from draftlab.model import Mode, devices, hub, llama, parallel
from draftlab.model.decoder import Decoder
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.llama import Llama
from draftlab.model.modes import check_mode, load, resolve, set_threads, with_mode
from draftlab.model.shape import Shape
from draftlab.model.size import ApproximateSize, read_size
from draftlab.output import Output
from draftlab.quantities import format_bytes
from draftlab.runs import provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model to time.

    Args:
        place: A checkpoint, or a shape for a model with random weights.
        target: Name and path of the target whose hidden states a head reads; None if the model is not a head.
        kind: Kind of the drafter, as --drafter names it.
    """

    name: str
    place: Path | Shape
    size: Shape | ApproximateSize
    target: tuple[str, Path] | None = None
    kind: str = "model"

    @property
    def path(self) -> Path | None:
        return self.place if isinstance(self.place, Path) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Settings of the passes. device_map: If set, transformers runs the models, spread over devices by accelerate."""

    device: torch.device
    dtype: torch.dtype
    mode: Mode
    threads: int | None = None
    device_map: str | None = None


def subjects(models: Mapping[str, Path | Shape]) -> list[Subject]:
    """Return the models to time, with their sizes. models: Checkpoints and shapes by name.

    Raises:
        UserError: The target of a head is not among the models, the engine does not run a shape, or a checkpoint
            cannot be read.
    """
    whole = {name: p for name, p in models.items() if isinstance(p, Path) and not hub.head_kind(p)}
    return [_subject(name, place, whole) for name, place in models.items()]


def _subject(name: str, place: Path | Shape, whole: Mapping[str, Path]) -> Subject:
    if isinstance(place, Shape):
        check_shape(name, place)
        return Subject(name=name, place=place, size=place)
    if name in whole:
        return Subject(name=name, place=place, size=read_size(place))
    reason = "its target is not named"
    kind = str(hub.known_head(place))
    head = DRAFTERS.get(kind, name)
    for target, path in whole.items():
        try:
            return Subject(
                name=name,
                place=place,
                size=head.size_of(place, path),
                target=(target, path),
                kind=kind,
            )
        except UserError as error:
            reason = str(error)
    raise UserError(
        f"{place} is a head, which is profiled together with its target; give the target's checkpoint as well "
        f"({reason})"
    )


def check_shape(name: str, shape: Shape) -> None:
    """Check that the engine can time a shape that has no weights.

    Raises:
        UserError: The engine does not run the shape. The message begins with the name.
    """
    if shape.qk_layernorm:
        raise UserError(
            f"{name} has qk_layernorm (norms of q and k after the rotation), which draftlab's engine does not support"
        )


def resolve_running(
    models: Sequence[Subject],
    *,
    device: torch.device,
    dtype: str,
    mode: Mode | Literal["auto"],
    threads: int | None = None,
    device_map: str | None = None,
) -> Running:
    """Return settings with which the passes of all models run. "auto" is replaced by a mode, and by a dtype.

    The dtype "auto" follows the first checkpoint.

    Raises:
        UserError: The mode does not run on this device or with this dtype, or the engine does not run a model in the
            mode.
    """
    whole = [model.path for model in models if model.path is not None and model.target is None]
    resolved, choice = resolve(
        "eager" if device_map else mode,
        dtype,
        device,
        next(iter(whole), None),
        whole,
        threads=threads,
    )
    check_mode(resolved, device, choice.dtype)
    for path in whole if resolved != "eager" else ():
        llama.check_supported(path)
    return Running(device=device, dtype=choice.dtype, mode=resolved, threads=threads, device_map=device_map)


def grid_of(models: Sequence[Subject], k: int, batches: list[int], contexts: list[int], repeats: int) -> Grid:
    """Return the grid of passes to time.

    A parallel draft reads up to 2 K tokens in a pass. Any other model reads up to K + 1 tokens.
    """
    wide = any(model.path is not None and parallel.pard_token(model.path) is not None for model in models)
    return Grid(
        widths=[*range(1, k + 2), *([2 * k] if wide and k > 1 else [])],
        batches=batches,
        contexts=contexts,
        prompts=contexts,
        repeats=repeats,
    )


def needed_bytes(models: Sequence[Subject], grid: Grid, running: Running) -> dict[str, float]:
    """Return the bytes of each model's weights, and of the KV caches for all batch sizes together.

    With a device_map, only shapes and heads are counted, because accelerate spreads the other models over devices.
    """
    width = running.dtype.itemsize
    counted = [
        model
        for model in models
        if isinstance(model.place, Shape) or model.target is not None or running.device_map is None
    ]
    needs: dict[str, float] = {f"weights of {model.name}": model.size.weight_bytes(width) for model in counted}
    tokens = (sum(grid.batches) + 1) * grid.capacity
    return needs | {"caches": sum(tokens * model.size.kv_bytes_per_token(width) for model in counted)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """A latency profile for each model. law: The law fitted to the profiles, or None."""

    profiles: list[Profile]
    law: ScalingLaw | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiling:
    """The timing of models.

    Attributes:
        name: Default name of the output directory.
        fits_law: Whether to fit a latency law to the profiles.
    """

    name: str
    models: Sequence[Subject]
    grid: Grid
    running: Running
    fits_law: bool

    def facts(self) -> Mapping[str, object]:
        """Return the facts that a dry run shows."""
        grid = self.grid
        points = len(grid.widths) * len(grid.batches) * len(grid.contexts)
        memory = sum(needed_bytes(self.models, grid, self.running).values())
        sizes: dict[str, object] = {model.name: model.size.describe() for model in self.models}
        return sizes | {"passes": points * grid.repeats * len(self.models), "memory": format_bytes(memory)}

    def run(self, output: Output) -> Profiled:
        """Measure all models in one process, and write NAME.yaml for each model.

        Raises:
            UserError: A model has a shorter context than the grid needs, or there is too little memory.
        """
        running = self.running
        set_threads(running.mode, running.threads)
        remedy = devices.less_memory(running.dtype, "--device-map auto, or fewer or smaller values of --batch")
        devices.check_fits(needed_bytes(self.models, self.grid, running), running.device, remedy)
        output.inputs([model.path for model in self.models if model.path is not None])
        decoders = _load(self.models, self.grid, running)
        warn_if_busy(read_environment())
        clock = steady_clock(running.device)
        with progress("timing passes, round", self.grid.repeats) as advance:
            curves = measure(
                {name: _in_mode(model, running.mode) for name, model in decoders.items()},
                self.grid,
                clock=clock,
                advance=lambda rounds: advance(rounds, ""),
            )
        dtypes = sorted({running.dtype, torch.float32, torch.bfloat16}, key=str)
        tflops = {devices.dtype_name(dtype): matmul_tflops(dtype, running.device) for dtype in dtypes}
        profiles = [
            _profile(model, decoders[model.name], curves[model.name], running, tflops, output.command_line)
            for model in self.models
        ]
        with output.directory() as work:
            for profile in profiles:
                write_profile(profile, work / f"{profile.name}.yaml")
            output.record(work)
        return Profiled(profiles=profiles, law=fit_law(profiles) if self.fits_law else None)


def _in_mode(model: Decoder, mode: Mode) -> Decoder:
    return with_mode(model, mode) if isinstance(model, Llama) else model


def _load(models: Sequence[Subject], grid: Grid, running: Running) -> dict[str, Decoder]:
    note(f"loading {', '.join(model.name for model in models)}")
    context = max(grid.capacity, (grid.repeats + 3) * max(grid.widths))
    decoders: dict[str, Decoder] = {}
    # heads are loaded after their targets
    for model in sorted(models, key=lambda model: model.target is not None):
        if isinstance(model.place, Shape):
            decoders[model.name] = random_model(model.place, running.dtype, running.device, context)
        elif model.target is None:
            decoders[model.name] = load(model.place, running.dtype, running.device, running.device_map)
        else:
            name, path = model.target
            target = decoders[name]
            assert isinstance(target, Llama | HFDecoder)  # a loaded checkpoint is one of these
            head = DRAFTERS.get(model.kind, model.name)
            decoders[model.name] = head.passes_of(model.place, path, target, running.mode)
    return {model.name: decoders[model.name] for model in models}


def _profile(
    subject: Subject,
    model: Decoder,
    curves: LatencyCurves,
    running: Running,
    tflops: dict[str, float],
    command: str,
) -> Profile:
    device = running.device
    dtype = running.dtype
    shape = model.shape if isinstance(model, Llama) else None
    weights = int(active_params(shape)) if shape else model.weight_bytes // dtype.itemsize
    return Profile(
        kind="measured",
        name=subject.name,
        sha256=None if subject.path is None else provenance.fingerprint(subject.path),
        shape=shape,
        drafter=subject.kind,
        device=device_name(device),
        dtype=devices.dtype_name(dtype),
        mode=running.mode,
        threads=torch.get_num_threads() if device.type == "cpu" else None,
        forward=curves.forward,
        steady=curves.steady,
        prefill=curves.prefill,
        host=curves.host,
        bandwidth_gbs=bandwidth_gbs(weights, dtype, device),
        matmul_tflops=tflops,
        command=command,
        versions=provenance.versions(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
