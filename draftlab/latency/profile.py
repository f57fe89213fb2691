"""Profile models, or the shapes of a latency law, as a config says, and write one profile per model."""

import os
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

import torch

from draftlab import provenance
from draftlab.config.latency import GridConfig, LawConfig, ProfileConfig
from draftlab.console import heartbeat, note, progress
from draftlab.engine.timing import bandwidth_gbs, matmul_tflops
from draftlab.errors import UserError
from draftlab.latency.cost_model import Profile, active_params, write_profile
from draftlab.latency.head_passes import HeadPasses
from draftlab.latency.machine_state import device_name, steady_clock
from draftlab.latency.profiler import Grid, measure, weight_bytes
from draftlab.latency.random_model import random_model
from draftlab.latency.scaling_law import ScalingLaw, fit_law, law_shapes
from draftlab.model import Mode, checkpoint, eagle, eagle_llama, hub, llama, memory, parallel
from draftlab.model.decoder import Decoder, check_mode, load, resolve_mode
from draftlab.model.families import locate_shape
from draftlab.model.llama import Llama
from draftlab.model.shape import Shape
from draftlab.model.size import ApproximateSize, read_size
from draftlab.output import Output
from draftlab.pruning.trial_model import prunable_shape

Models = Mapping[str, Path | Shape]  # checkpoints, and shapes that get random weights


def profile_models(config: ProfileConfig, output: Output) -> list[Profile]:
    """Measure all models in one process, and write NAME.yaml of each.

    Raises:
        UserError: a mode, shape or context that cannot be run, or too little memory.
    """
    models = _models(config, weights=True)
    for place in models.values():
        if isinstance(place, Path) and not _is_head(place):
            checkpoint.check(place)
    return _profile(config, models, output, config.device_map)


def measure_law(config: LawConfig, output: Output) -> ScalingLaw:
    """Profile the shapes of a law with random weights, and write NAME.yaml of each.

    Raises:
        UserError: too few shapes, or as profile_models.
    """
    return fit_law(_profile(config, law_shapes(prunable_shape(config.source)[1], config.layers, config.widths), output))


def estimate(config: ProfileConfig) -> Mapping[str, object]:
    """Return what a profile would take, without reading weights."""
    models = _models(config, weights=False)
    check(config, models, config.device_map)
    facts = {name: _size(p, models).describe() for name, p in models.items()}
    passes = (config.k + 1) * len(config.batch) * len(config.context) * config.repeats * len(models)
    needed = sum(needed_bytes(config, models, config.device_map).values())
    return facts | {"passes": passes, "memory": f"{needed / 1e9:.3g} GB"}


def law_estimate(config: LawConfig) -> Mapping[str, object]:
    """Return what a law would take."""
    shapes = law_shapes(prunable_shape(config.source)[1], config.layers, config.widths)
    check(config, shapes)
    needed = sum(needed_bytes(config, shapes).values())
    return {name: shape.describe() for name, shape in shapes.items()} | {"memory": f"{needed / 1e9:.3g} GB"}


def check(config: GridConfig, models: Models, device_map: str | None = None) -> Mode:
    """Return the mode in which passes run.

    Raises:
        UserError: a mode that does not run, or a model that the engine does not support in that mode.
    """
    device, dtype = _device_and_dtype(config)
    paths = [place for place in models.values() if isinstance(place, Path)]
    heads = list(filter(_is_head, paths))
    paths = [path for path in paths if path not in heads]
    for head in heads:
        if device_map:
            raise UserError(f"{head} is an EAGLE-3 head, which runs beside the engine's own models: no --device-map")
        llama.check_supported(_target_of(head, models))
    mode = "eager" if device_map else resolve_mode(config.mode, device, dtype, paths)
    check_mode(mode, device, dtype)
    for path in paths if mode != "eager" else ():
        llama.check_supported(path)
    for name, place in models.items():
        if isinstance(place, Shape) and place.qk_layernorm:
            raise UserError(f"{name} has qk_layernorm, norms of q and k after the rotation: the engine lacks these")
    return mode


def needed_bytes(config: GridConfig, models: Models, device_map: str | None = None) -> dict[str, float]:
    """Return the bytes of weights, and of the caches of all batches, without what accelerate spreads."""
    width = _device_and_dtype(config)[1].itemsize
    tokens = (sum(config.batch) + 1) * _grid(config, models).capacity
    sizes = {
        name: _size(place, models) for name, place in models.items() if isinstance(place, Shape) or device_map is None
    }
    needs: dict[str, float] = {f"weights of {name}": size.weight_bytes(width) for name, size in sizes.items()}
    return needs | {"caches": sum(tokens * size.kv_bytes_per_token(width) for size in sizes.values())}


def _models(config: ProfileConfig, weights: bool) -> Models:
    models = dict(locate_shape(name, weights) for name in config.models)
    if len(models) < len(config.models):
        raise UserError(f"two models have the same name; rename one: {', '.join(config.models)}")
    return models


def _size(place: Path | Shape, models: Models) -> Shape | ApproximateSize:
    if isinstance(place, Shape):
        return place
    if hub.is_eagle_head(place):
        return eagle.check(place, _target_of(place, models)).shape
    return read_size(place)


def _target_of(head: Path, models: Models) -> Path:
    """Return the model among those to profile that a head is for.

    Raises:
        UserError: there is none.
    """
    others = [place for place in models.values() if isinstance(place, Path) and not hub.is_eagle_head(place)]
    reason = "its target is not named"
    for other in others:
        try:
            eagle.check(head, other)
        except UserError as error:
            reason = str(error)
        else:
            return other
    raise UserError(f"an EAGLE-3 head is profiled beside its target, and {head} is not: {reason}")


def _device_and_dtype(config: GridConfig) -> tuple[torch.device, torch.dtype]:
    device = checkpoint.resolve_device(config.device)
    return device, checkpoint.resolve_dtype(config.dtype, device)


def _grid(config: GridConfig, models: Models) -> Grid:
    """Return what to time. A parallel draft reads K tokens and K masks in one pass, the others at most K + 1 tokens."""
    paths = [place for place in models.values() if isinstance(place, Path)]
    wide = any(parallel.pard_token(path) is not None for path in paths)
    return Grid(
        widths=[*range(1, config.k + 2), *([2 * config.k] if wide and config.k > 1 else [])],
        batches=config.batch,
        contexts=config.context,
        prompts=config.context,
        repeats=config.repeats,
    )


def _profile(config: GridConfig, models: Models, output: Output, device_map: str | None = None) -> list[Profile]:
    device, dtype = _device_and_dtype(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    mode, grid = check(config, models, device_map), _grid(config, models)
    decoders = _load(config, models, device_map, mode)
    load_average, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load_average > cores:
        note(f"the machine is busy (load {load_average:.1f} on {cores} cores): latencies will be higher and vary more")
    with heartbeat("passes"), progress("rounds", grid.repeats) as advance:
        curves = measure(
            decoders, grid, mode=mode, clock=steady_clock(device), advance=lambda rounds: advance(rounds, "")
        )
    dtypes = sorted({dtype, torch.float32, torch.bfloat16}, key=str)
    tflops = {checkpoint.dtype_name(each): matmul_tflops(each, device) for each in dtypes}

    def as_profile(name: str, place: Path | Shape) -> Profile:
        model, curve = decoders[name], curves[name]
        shape = model.shape if isinstance(model, Llama) else None
        weights = int(active_params(shape)) if shape else weight_bytes(model) // dtype.itemsize
        is_head = isinstance(model, HeadPasses)
        return Profile(
            kind="measured", name=name, sha256=None if isinstance(place, Shape) else provenance.fingerprint(place),
            shape=shape, eagle=is_head, device=device_name(device), dtype=checkpoint.dtype_name(dtype), mode=mode,
            threads=torch.get_num_threads() if device.type == "cpu" else None, forward=curve.forward,
            steady=curve.steady, prefill=curve.prefill, host=curve.host,
            bandwidth_gbs=bandwidth_gbs(weights, dtype, device), matmul_tflops=tflops, command=output.command_line,
            versions=provenance.versions(), created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )  # fmt: skip

    profiles = [as_profile(name, place) for name, place in models.items()]
    with output.directory() as work:
        for profile in profiles:
            write_profile(profile, work / f"{profile.name}.yaml")
        output.record(work, [place for place in models.values() if isinstance(place, Path)])
    return profiles


def _load(config: GridConfig, models: Models, device_map: str | None, mode: Mode) -> dict[str, Decoder]:
    device, dtype = _device_and_dtype(config)
    needed = needed_bytes(config, models, device_map)
    memory.check_fits(needed, device, "--dtype bfloat16, --device-map auto, or fewer --batch")
    note(f"loading {', '.join(models)}")
    grid = _grid(config, models)
    context = max(grid.capacity, (grid.repeats + 3) * max(grid.widths))
    decoders: dict[str, Decoder] = {}
    for name, place in sorted(models.items(), key=lambda item: _is_head(item[1])):  # heads after their targets
        if isinstance(place, Shape):
            decoders[name] = random_model(place, dtype, device, context)
        elif _is_head(place):
            path = _target_of(place, models)
            target = next(decoders[name] for name, other in models.items() if other == path)
            assert isinstance(target, Llama)  # by check
            head = eagle_llama.load(place, path, target)
            decoders[name] = HeadPasses(eagle_llama.with_mode(head, mode))
        else:
            decoders[name] = load(place, dtype, device, device_map)
    return {name: decoders[name] for name in models}


def _is_head(place: Path | Shape) -> bool:
    return isinstance(place, Path) and hub.is_eagle_head(place)
