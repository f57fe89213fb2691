"""The commands that separate latency from acceptance: measure latency anywhere, and combine it with acceptance."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftlab.commands.base import Outcome, command, plan
from draftlab.config.latency import LawConfig, LawFitConfig, PredictConfig, ProfileConfig, ProfileServersConfig
from draftlab.console import note_if_slow
from draftlab.output import Output

if TYPE_CHECKING:
    from draftlab.latency.predict_pairs import DraftPrediction
    from draftlab.latency.profile import Profile
    from draftlab.latency.scaling_law import ScalingLaw


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Profiled(Outcome):
    """Latencies of passes, a profile for each model."""

    profiles: "list[Profile]"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Predicted(Outcome):
    """Predictions, one for each draft."""

    predictions: "list[DraftPrediction]"


@command(ProfileConfig, dry_run=True)
def profile(config: ProfileConfig, output: Output) -> Profiled | Outcome:
    """Measure the latency of passes by tokens fed, batch size and context; models named together take turns."""
    from draftlab.commands.latency_tables import profile_table
    from draftlab.latency.profile import estimate, profile_models

    if output.dry_run:
        return plan(output, estimate(config))
    profiles = profile_models(config, output)
    data = {"out": str(output.out), "profiles": [p.model_dump() for p in profiles]}
    show = [*map(profile_table, profiles), str(output.out)]
    return Profiled(path=output.out, show=show, data=data, profiles=list(profiles))


@command(ProfileServersConfig)
def profile_servers(config: ProfileServersConfig, output: Output) -> Profiled:
    """Measure the passes of a target and its draft in running vLLM servers, by streams at once."""
    from draftlab.servers.client import Server

    Server.check(config.server, config.speculative_server, model=config.served_model, api_key_file=config.api_key_file)
    with note_if_slow("loading torch and transformers"):
        from draftlab.latency.served import profile_servers as measure
    from draftlab.commands.latency_tables import profile_table

    profiles = measure(config, output)
    data = {"out": str(output.out), "profiles": [p.model_dump() for p in profiles]}
    show = [*map(profile_table, profiles), str(output.out)]
    return Profiled(path=output.out, show=show, data=data, profiles=list(profiles))


@command(LawConfig, dry_run=True)
def law(config: LawConfig, output: Output) -> Outcome:
    """Measure a few shapes with random weights, and fit latency as a function of layers, width and bytes."""
    from draftlab.latency.scaling_law import law_shapes
    from draftlab.model.hf_shapes import named_shape

    law_shapes(named_shape(config.source)[1], config.layers, config.widths)  # before torch is imported
    from draftlab.latency.profile import law_estimate, measure_law

    if output.dry_run:
        return plan(output, law_estimate(config))
    return _law_outcome(output.out, measure_law(config, output), config.plot)


@command(LawFitConfig)
def law_fit(config: LawFitConfig) -> Outcome:
    """Fit a latency law to profiles that exist already, and show it."""
    from draftlab.latency.scaling_law import read_law

    return _law_outcome(config.profiles, read_law(config.profiles), config.plot)


@command(PredictConfig)
def predict(config: PredictConfig) -> Predicted:
    """Predict the speed-up for every K, from acceptance and profiles that may come from other machines."""
    from draftlab.latency.roofline import is_measured

    for spec in (*config.draft_profile, config.target_profile):
        is_measured(spec)
    from draftlab.latency.predict_pairs import predict_drafts

    drafts = predict_drafts(config)
    from draftlab.commands.latency_tables import best_k_table, draft_table, k_table, plot_best_k
    from draftlab.latency.predict import verdict

    predictions = [draft.prediction for draft in drafts]
    several = len(predictions) > 1
    show: list[object] = [draft_table(predictions) if several else k_table(predictions[0])]
    show += [best_k_table(draft) for draft in drafts if len(draft.best_ks) > 1]
    show += [f"{p.name}: {verdict(p)}" if several else verdict(p) for p in predictions]
    show += [draft.schedule.verdict() for draft in drafts if draft.schedule is not None]
    if config.plot is not None:
        plot_best_k(config.plot, drafts[0])
    show += [f"note: {text}" for text in dict.fromkeys(text for p in predictions for text in p.notes)]
    data: dict[str, object] = {"predictions": [draft.as_dict() for draft in drafts]}
    return Predicted(path=None, show=show, data=data, predictions=drafts)


def _law_outcome(directory: Path, fitted: "ScalingLaw", plot: Path | None) -> Outcome:
    from draftlab.commands.latency_tables import law_table, plot_law

    if plot is not None:
        plot_law(plot, fitted)
    errors = {p.name: float(e) for p, e in zip(fitted.profiles, fitted.held_out_errors, strict=True)}
    data = {
        "path": str(directory), "device": fitted.profiles[0].device, "mode": fitted.profiles[0].mode,
        "terms": fitted.curve.terms.tolist(), "overlap": fitted.curve.overlap, "held_out_errors": errors,
        "bandwidth_bound_width": {layers: fitted.bandwidth_bound_width(layers) for layers in fitted.depths},
    }  # fmt: skip
    return Outcome(path=directory, show=[law_table(fitted), fitted.verdict(), str(directory)], data=data)
