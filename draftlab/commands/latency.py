"""The commands that separate latency from acceptance: measure latency anywhere, and combine it with acceptance."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftlab.commands.base import Outcome, command
from draftlab.config.latency import PredictConfig, ProfileConfig
from draftlab.errors import UserError, about
from draftlab.model import families, hub
from draftlab.model.shape import Shape
from draftlab.output import Output

if TYPE_CHECKING:
    from draftlab.latency.predict_pairs import DraftPrediction
    from draftlab.latency.profile import Profile, Running, Subject
    from draftlab.latency.profiler import Grid
    from draftlab.latency.scaling_law import ScalingLaw
    from draftlab.servers.client import Server


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Profiled(Outcome):
    """Latencies of passes, a profile for each model; law: fitted to them where --law asks for it."""

    profiles: "list[Profile]"
    law: "ScalingLaw | None" = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Predicted(Outcome):
    """Predictions, one for each draft."""

    predictions: "list[DraftPrediction]"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedProfile:
    """Models to time. law: fit their latency, and draw it into plot."""

    name: str
    models: "list[Subject]"
    grid: "Grid"
    running: "Running"
    law: bool
    plot: Path | None

    def facts(self) -> Mapping[str, object]:
        from draftlab.latency.profile import needed_bytes

        grid = self.grid
        passes = len(grid.widths) * len(grid.batches) * len(grid.contexts) * grid.repeats * len(self.models)
        memory = sum(needed_bytes(self.models, grid, self.running).values())
        facts: dict[str, object] = {model.name: model.size.describe() for model in self.models}
        return facts | {"passes": passes, "memory": f"{memory / 1e9:.3g} GB"}

    def measure(self, output: Output) -> "list[Profile]":
        from draftlab.latency.profile import profile_models

        return profile_models(self.models, self.grid, self.running, output)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedServers:
    """Running servers to time: of the target, and perhaps of the target with its draft. models: their names."""

    name: str
    servers: "list[Server]"
    models: list[Path]
    prompt: list[int]
    streams: list[int]
    contexts: list[int]
    repeats: int

    def facts(self) -> Mapping[str, object]:
        return {str(model): server.describe() for model, server in zip(self.models, self.servers, strict=True)}

    def measure(self, output: Output) -> "list[Profile]":
        from draftlab.latency.served import profile_servers

        return profile_servers(
            self.servers,
            self.models,
            self.prompt,
            streams=self.streams,
            contexts=self.contexts,
            repeats=self.repeats,
            output=output,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedLaw:
    """A directory of profiles to fit a law to; nothing but plot is written."""

    name: str
    directory: Path
    fitted: "ScalingLaw"
    plot: Path | None

    def facts(self) -> Mapping[str, object]:
        return {"profiles": len(self.fitted.profiles)}


def prepare_profile(config: ProfileConfig, weights: bool) -> PreparedProfile | PreparedServers | PreparedLaw:
    """Resolve and check the settings.

    Raises:
        UserError: models, shapes, profiles or servers that cannot be timed.
    """
    if config.server:
        return _prepare_servers(config)
    if config.profiles is not None:
        from draftlab.latency.scaling_law import read_law

        name = f"law-{config.profiles.name}"
        return PreparedLaw(name=name, directory=config.profiles, fitted=read_law(config.profiles), plot=config.plot)
    places = _law_shapes(config.models) if config.law else _places(config.models, weights)
    from draftlab.latency.profile import grid_of, resolve_running, subjects
    from draftlab.model import checkpoint

    with about("--device"):
        device = checkpoint.resolve_device(config.device)
    models = subjects(places)
    running = resolve_running(
        models,
        device=device,
        dtype=checkpoint.resolve_dtype(config.dtype, device),
        mode=config.mode,
        threads=config.threads,
        device_map=config.device_map,
    )
    if weights:
        for model in models:
            if model.path is not None and model.target is None:
                checkpoint.check(model.path)
    called = "-".join(Path(model.partition("@")[0]).name.removesuffix(".yaml") for model in config.models)
    return PreparedProfile(
        name=f"{'law' if config.law else 'profile'}-{called}",
        models=models,
        grid=grid_of(
            models,
            config.k or (1 if config.law else 8),
            config.batch or [1],
            config.context or ([16, 256] if config.law else [16, 128, 480]),
            config.repeats or (10 if config.law else 20),
        ),
        running=running,
        law=config.law,
        plot=config.plot,
    )


@command(ProfileConfig, prepare=prepare_profile, dry_run=True)
def profile(prepared: PreparedProfile | PreparedServers | PreparedLaw, output: Output) -> Profiled:
    """Measure the latency of passes by tokens fed, batch size and context, and perhaps fit a law of it to shapes."""
    from draftlab.commands.latency_tables import profile_table

    if isinstance(prepared, PreparedLaw):
        return _fitted(prepared.directory, prepared.fitted, prepared.plot)
    profiles = prepared.measure(output)
    if isinstance(prepared, PreparedProfile) and prepared.law:
        from draftlab.latency.scaling_law import fit_law

        return _fitted(output.out, fit_law(profiles), prepared.plot)
    data = {"out": str(output.out), "profiles": [each.model_dump() for each in profiles]}
    show = [*map(profile_table, profiles), str(output.out)]
    return Profiled(path=output.out, show=show, data=data, profiles=profiles)


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


def _places(names: list[str], weights: bool) -> dict[str, Path | Shape]:
    places = dict(families.locate_shape(name, weights) for name in names)
    if len(places) < len(names):
        raise UserError(f"two models have the same name; rename one: {', '.join(names)}")
    return places


def _law_shapes(names: list[str]) -> dict[str, Shape]:
    from draftlab.latency.scaling_law import law_shapes
    from draftlab.pruning.trial_model import prunable_shape

    with about("--law"):
        return law_shapes(dict(map(prunable_shape, names)))


def _prepare_servers(config: ProfileConfig) -> PreparedServers:
    """Raises UserError: servers that are not vLLM's, as many models as servers are not named, or another tokenizer."""
    from draftlab.servers.client import Server

    if len(config.server) > 2 or len(config.models) != len(config.server):
        raise UserError("--server: name one server and its target, or a second server and its draft as well")
    with about("--server"):
        servers = [Server.connect(url, api_key_file=config.api_key_file) for url in config.server]
        if others := [server for server in servers if server.kind != "vllm"]:
            raise UserError(f"{others[0].http.url} is {others[0].kind}; only the passes of vLLM are known")
    from draftlab.data import heldout_prompts
    from draftlab.model import checkpoint
    from draftlab.target_outputs.targets import check_server_tokenizer

    target, contexts = hub.locate(config.models[0], weights=False), config.context or [32, 160]
    for server in servers:
        check_server_tokenizer(server, target)
    tokenizer = checkpoint.load_tokenizer(target)
    return PreparedServers(
        name=f"profile-served-{target.name}",
        servers=servers,
        models=[target, *map(Path, config.models[1:])],
        prompt=heldout_prompts("stdlib", tokenizer, count=1, length=max(contexts), seed=0)[0],
        streams=config.batch or [1, 2, 4, 8],
        contexts=contexts,
        repeats=config.repeats or 3,
    )


def _fitted(directory: Path, law: "ScalingLaw", plot: Path | None) -> Profiled:
    from draftlab.commands.latency_tables import law_table, plot_law

    if plot is not None:
        plot_law(plot, law)
    first = law.profiles[0]
    data = {
        "path": str(directory),
        "device": first.device,
        "mode": first.mode,
        "terms": law.curve.terms.tolist(),
        "overlap": law.curve.overlap,
        "held_out_errors": {p.name: e for p, e in zip(law.profiles, law.held_out_errors.tolist(), strict=True)},
        "bandwidth_bound_width": {layers: law.bandwidth_bound_width(layers) for layers in law.depths},
    }
    show = [law_table(law), law.verdict(), str(directory)]
    return Profiled(path=directory, show=show, data=data, profiles=law.profiles, law=law)
