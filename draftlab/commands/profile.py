"""The command profile, which times forward passes."""

from pathlib import Path

from draftlab.commands.base import Outcome
from draftlab.commands.latency_tables import law_table, profile_table
from draftlab.commands.settings.latency import ProfileConfig
from draftlab.errors import UserError, about
from draftlab.latency.profile import Profiled, Profiling, grid_of, resolve_running, subjects
from draftlab.latency.scaling_law import ScalingLaw, law_shapes
from draftlab.model import devices, families
from draftlab.model.checkpoint import Checkpoint
from draftlab.pruning.source import prunable_shape
from draftlab.shell import typed


def prepare(config: ProfileConfig, weights: bool) -> Profiling:
    """Resolve and check the settings of the command `profile`, and return the job.

    Raises:
        UserError: A model or shape cannot be timed, or a profile cannot be read.
    """
    if config.law:
        with about("--law"):
            places = law_shapes(dict(map(prunable_shape, config.models)))
    else:
        places = dict(families.locate_shape(name, weights) for name in config.models)
        if len(places) < len(config.models):
            raise UserError(
                f"two models have the same directory name; rename one directory: {', '.join(config.models)}"
            )
    with about("--device"):
        device = devices.resolve_device(config.device)
    models = subjects(places)
    running = resolve_running(
        models,
        device=device,
        dtype=config.dtype,
        mode=config.mode,
        threads=config.threads,
        device_map=config.device_map,
    )
    for model in models if weights else ():
        if model.path is not None and model.target is None:
            Checkpoint(model.path).check()
    names = [Path(model.partition("@")[0]).name.removesuffix(".yaml") for model in config.models]
    grid = grid_of(
        models,
        config.k or (1 if config.law else 8),
        config.batch,
        config.context or ([16, 256] if config.law else [16, 128, 480]),
        config.repeats or (10 if config.law else 20),
    )
    return Profiling(
        name="-".join(["law" if config.law else "profile", *names]),
        models=models,
        grid=grid,
        running=running,
        fits_law=config.law,
    )


def show(profiled: Profiled, config: ProfileConfig, out: Path) -> Outcome:
    profiles = profiled.profiles
    if profiled.law is not None:
        return _fitted(out, profiled.law)
    data = {"out": str(out), "profiles": [each.model_dump() for each in profiles]}
    show = [*map(profile_table, profiles), str(out)]
    slowest = max(profiles, key=lambda each: each.steady[-1].median_ms)
    words: list[object] = ["--target-profile", out / f"{slowest.name}.yaml"]
    for each in profiles:
        if each is not slowest:
            words += ["--draft-profile", out / f"{each.name}.yaml"]
    if config.is_set("batch"):
        words += ["--batch", ",".join(map(str, config.batch))]
    if config.is_set("k") or config.is_set("context"):  # predict has the ranges of profile's defaults
        words.append("--extrapolate")
    following = typed("draftlab", "predict", *words, "--acceptance", "0.7")
    return Outcome(
        path=out,
        show=show,
        data=data,
        next=following if len(profiles) > 1 else None,
    )


def _fitted(directory: Path, law: ScalingLaw) -> Outcome:
    first = law.profiles[0]
    data = {
        "path": str(directory),
        "device": first.device,
        "mode": first.mode,
        "terms": law.curve.terms.tolist(),
        "overlap": law.curve.overlap,
        "held_out_errors": {p.name: e for p, e in zip(law.profiles, law.held_out_errors.tolist(), strict=True)},
    }
    show = [law_table(law), law.verdict(), str(directory)]
    then = typed("draftlab", "design", "--latency-ms", "2", "--law", directory)
    return Outcome(path=directory, show=show, data=data, next=then)
