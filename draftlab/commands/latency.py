"""The commands that separate latency from acceptance: measure latency anywhere, and combine it with acceptance."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from draftlab.commands.base import Outcome, command
from draftlab.config.latency import PredictConfig, ProfileConfig
from draftlab.errors import UserError, about
from draftlab.model import families, hub
from draftlab.model.shape import Shape
from draftlab.output import Output

if TYPE_CHECKING:
    from draftlab.latency.cost_model import CostModel
    from draftlab.latency.predict import DraftAcceptance, DraftPrediction
    from draftlab.latency.profile import Profile, Running, Subject
    from draftlab.latency.profiler import Grid
    from draftlab.latency.scaling_law import ScalingLaw
    from draftlab.servers.client import Server

ASSUMED_PROMPT = 128  # tokens of a prompt where acceptance is a number


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPredict:
    """Profiles with the acceptance of each draft. prompts: None stands for the prompts of the texts."""

    drafts: "list[CostModel]"
    target: "CostModel"
    acceptances: "list[DraftAcceptance]"
    ks: list[int]
    batches: list[int]
    prompts: Sequence[int | None]
    server: Literal["vllm"] | None
    plot: Path | None


def prepare_predict(config: PredictConfig, weights: bool) -> PreparedPredict:
    """Resolve and check the settings. Raises UserError: profiles or acceptance that cannot be read."""
    from draftlab.latency.cost_model import CostModel
    from draftlab.latency.roofline import parse_profile
    from draftlab.latency.scaling_law import read_law
    from draftlab.pruning.trial_model import prunable_shape

    with about("--acceptance"):
        acceptances = [_acceptance(text, config.max_tokens) for text in config.acceptance]
        if len(acceptances) not in (1, len(config.draft_profile)):
            raise UserError(f"{len(acceptances)} for {len(config.draft_profile)} drafts; give one, or one per draft")
    if config.is_set("max_tokens") and any(acceptance.model for acceptance in acceptances):
        raise UserError("--max-tokens: the texts of a replay or score have their own lengths")
    acceptances *= len(config.draft_profile) // len(acceptances)
    prompts: Sequence[int | None] = config.context or [None]
    works = [acceptance.work for acceptance in acceptances]
    ends = [work.longest if n is None else work.with_prompt_tokens(n).longest for work in works for n in prompts]
    grid = {
        "widths": range(1, 2 * max(config.k) + 2),  # a parallel draft's widest pass, as vLLM runs it
        "batches": config.batch,
        "longest": max(ends) + max(config.k),
    }

    def cost(option: str, spec: str) -> CostModel:
        name, _, directory = spec.rpartition("@")
        with about(option):
            if not name or not Path(directory).is_dir():
                return CostModel.of(parse_profile(spec, **grid), extrapolate=config.extrapolate)
            called, shape = prunable_shape(name)
            return CostModel.of(read_law(Path(directory)).profile(shape, called), extrapolate=config.extrapolate)

    return PreparedPredict(
        drafts=[cost("--draft-profile", spec) for spec in config.draft_profile],
        target=cost("--target-profile", config.target_profile),
        acceptances=acceptances,
        ks=config.k,
        batches=config.batch,
        prompts=prompts,
        server=config.server,
        plot=config.plot,
    )


@command(PredictConfig, prepare=prepare_predict)
def predict(prepared: PreparedPredict) -> Predicted:
    """Predict the speed-up for every K, from acceptance and profiles that may come from other machines."""
    from draftlab.commands.latency_tables import best_k_table, draft_table, k_table, plot_best_k
    from draftlab.latency.predict import predict_draft, verdict

    drafts = [
        predict_draft(
            draft,
            prepared.target,
            acceptance,
            prepared.ks,
            batches=prepared.batches,
            prompts=prepared.prompts,
            server=prepared.server,
        )
        for draft, acceptance in zip(prepared.drafts, prepared.acceptances, strict=True)
    ]
    predictions = [draft.prediction for draft in drafts]
    several = len(predictions) > 1
    show: list[object] = [draft_table(predictions) if several else k_table(predictions[0])]
    show += [best_k_table(draft) for draft in drafts if len(draft.best_ks) > 1]
    show += [f"{p.name}: {verdict(p)}" if several else verdict(p) for p in predictions]
    show += [draft.schedule.verdict() for draft in drafts if draft.schedule is not None]
    if prepared.plot is not None:
        plot_best_k(prepared.plot, drafts[0])
    show += [f"note: {text}" for text in dict.fromkeys(text for p in predictions for text in p.notes)]
    data: dict[str, object] = {"predictions": [draft.as_dict() for draft in drafts]}
    return Predicted(path=None, show=show, data=data, predictions=drafts)


def _acceptance(text: str, max_tokens: int) -> "DraftAcceptance":
    """Return the acceptance of a replay or a score, or one that is assumed: 0.7, or 2.8@4.

    Raises:
        UserError: there is no such file, it cannot be read, or an acceptance length that cannot be.
    """
    from draftlab.latency.cost_model import alpha_for
    from draftlab.latency.predict import DraftAcceptance
    from draftlab.latency.workload import constant_workload, workload_of_replay, workload_of_score
    from draftlab.results.score import read_score
    from draftlab.target_outputs.replay import read_replay

    assumed = re.fullmatch(r"([0-9.]+)(?:@([1-9]\d*))?", text)
    if assumed and not Path(text).exists():
        number, k = float(assumed[1]), assumed[2]
        alpha = number if k is None else alpha_for(number, int(k))
        if alpha > 1:
            raise UserError(f"{text} is no probability; write tokens per pass with their K, as 2.8@4")
        return DraftAcceptance(work=constant_workload(alpha, tokens=max_tokens, prompt_tokens=ASSUMED_PROMPT))
    path = Path(text)
    if path.name == "score.json" or (path / "score.json").exists():
        score = read_score(path)
        rule = score.conditions.rule if score.conditions.temperature > 0 else None
        return DraftAcceptance(work=workload_of_score(score), model=(score.draft.name, score.draft.sha256), rule=rule)
    replay = read_replay(path)
    rule = replay.rule if replay.sampling.temperature > 0 else None
    return DraftAcceptance(work=workload_of_replay(replay), model=(replay.draft, replay.draft_sha256), rule=rule)


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
    }
    show = [law_table(law), law.verdict(), str(directory)]
    return Profiled(path=directory, show=show, data=data, profiles=law.profiles, law=law)
