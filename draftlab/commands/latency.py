"""The commands profile, which times forward passes, and predict, which computes speed-ups from these times."""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pydantic import field_validator

from draftlab.commands.base import Job, Outcome, check_plots, command, fill
from draftlab.config.base import (
    MAX_K,
    OUTPUT,
    Config,
    DraftedTokens,
    Numbers,
    Only,
    OutputConfig,
    numbers,
    option,
)
from draftlab.config.shared import (
    CheckpointSettings,
    EngineMode,
    WeightsDtype,
    device,
    device_map,
    dtype,
    mode,
    threads,
)
from draftlab.errors import UserError, about
from draftlab.model import families
from draftlab.output import Output
from draftlab.quantities import format_bytes
from draftlab.shell import typed

if TYPE_CHECKING:
    from draftlab.latency.predict import DraftPrediction, Prediction
    from draftlab.latency.profile import Profile
    from draftlab.latency.scaling_law import ScalingLaw
    from draftlab.latency.workload import Workload

PROFILE_HELP = (
    "Latencies: an output of draftlab profile; SHAPE@LAW, in which LAW is an output of draftlab profile --law; or "
    "SHAPE@DEVICE,MODE[,DTYPE], computed from constants of the device (add ,eagle=IDS for an EAGLE-3 head)."
)


class ProfileConfig(OutputConfig, CheckpointSettings):
    """The settings of the command `profile`: the models or shapes whose forward passes are timed."""

    models: list[str] = option(
        help="Checkpoints, or shapes, which are timed with random weights. With --law: one checkpoint or shape, which "
        "is scaled down; or several shapes.",
        argument=True,
    )
    law: bool = option(
        False,
        "Measure shapes with random weights, and fit a law of latency to their layers, width and bytes.",
    )
    k: int | None = option(
        None,
        "Largest K: passes over 1 to K + 1 tokens are timed. Default: 8; 1 with --law.",
        ge=1,
        le=MAX_K,
    )
    batch: Numbers = numbers("1", "Batch sizes, as 1,4,16.")
    context: Numbers | None = option(
        None,
        "Contexts: numbers of cached tokens before a pass. Prompts of these lengths are timed, too. Default: "
        "16,128,480; 16,256 with --law.",
        typed=str,
    )
    repeats: int | None = option(
        None,
        "Number of times that every pass is timed, after a warm-up. Default: 20; 10 with --law.",
        ge=3,
    )
    mode: EngineMode = mode()
    dtype: WeightsDtype = dtype()
    device: str = device()
    threads: int | None = threads()
    device_map: str | None = device_map()

    only = (
        Only(
            ("device_map",),
            lambda c: c.mode in ("auto", "eager"),
            "works only with --mode eager, because only transformers can spread a model over devices",
        ),
        Only(
            ("device_map",),
            lambda c: not c.law,
            "leave it out, because --law times shapes in draftlab's engine, which uses one device",
        ),
    )


class PredictConfig(Config):
    """The settings of the command `predict`: latency profiles of drafts and target, and acceptance of the drafts."""

    draft_profile: list[str] = option(help=PROFILE_HELP + " Repeat the option for several drafts.")
    target_profile: str = option(help=PROFILE_HELP)
    acceptance: list[str] = option(
        help="Acceptance: an output of replay or score; the probability that a drafted token is accepted, as 0.7; or "
        "tokens per target pass at a K, as 2.8@4. Give one value for all drafts, or repeat the option for each draft."
    )
    k: DraftedTokens = numbers("1-8", "Numbers of drafted tokens per step, as 1-8 or 2,4,8.")
    batch: Numbers = numbers(
        "1",
        "Batch sizes (numbers of concurrent requests), as 1,4,16; the table by K is for the smallest.",
    )
    context: Numbers | None = option(None, "Prompt lengths. Default: the lengths in --acceptance, or 128.", typed=str)
    max_new_tokens: int = option(
        128,
        "Number of tokens of each generated text, if --acceptance is a number.",
        ge=2,
        le=1_000_000,
    )
    extrapolate: bool = option(
        False,
        "Extrapolate beyond the numbers of tokens and the contexts that the profiles measured.",
    )
    plot: Path | None = option(
        None,
        "Picture to write, .svg or .png: the speed-up of every draft by K.",
        panel=OUTPUT,
        reads="nothing",
        acts="always",
    )

    @field_validator("plot")
    @classmethod
    def _is_a_picture(cls, plot: Path | None) -> Path | None:
        if plot is not None and plot.suffix not in (".svg", ".png"):
            raise ValueError("must end in .svg or .png")
        return plot


# predictions, and the picture of them that was written
Drawn: TypeAlias = "tuple[list[DraftPrediction], Path | None]"
Measured: TypeAlias = "tuple[list[Profile], ScalingLaw | None]"  # latency profiles, and the law that is fitted to them
ASSUMED_PROMPT = 128  # assumed length of prompts in tokens, if --acceptance is a number
TITLE_WIDTH = 44  # characters of a line above a plot


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Profiled(Outcome):
    """The outcome of profile: a latency profile for each model. law: With --law, the law fitted to the profiles."""

    profiles: "list[Profile]"
    law: "ScalingLaw | None" = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Predicted(Outcome):
    """The outcome of predict. predictions: One prediction per draft."""

    predictions: "list[DraftPrediction]"


def prepare_profile(config: ProfileConfig, weights: bool) -> Job[Measured]:
    """Resolve and check the settings of the command `profile`, and return the job.

    Raises:
        UserError: A model or shape cannot be timed, or a profile cannot be read.
    """
    from draftlab.latency.scaling_law import fit_law, law_shapes
    from draftlab.pruning.source import prunable_shape

    if config.law:
        with about("--law"):
            places = law_shapes(dict(map(prunable_shape, config.models)))
    else:
        places = dict(families.locate_shape(name, weights) for name in config.models)
        if len(places) < len(config.models):
            raise UserError(
                f"two models have the same directory name; rename one directory: {', '.join(config.models)}"
            )
    from draftlab.latency.profile import (
        grid_of,
        needed_bytes,
        profile_models,
        resolve_running,
        subjects,
    )
    from draftlab.model import checkpoint, devices

    with about("--device"):
        device = devices.resolve_device(config.device)
    models = subjects(places)
    running = fill(resolve_running, config, models=models, device=device)
    for model in models if weights else ():
        if model.path is not None and model.target is None:
            checkpoint.check(model.path)
    names = [Path(model.partition("@")[0]).name.removesuffix(".yaml") for model in config.models]
    k, contexts, repeats = (1, [16, 256], 10) if config.law else (8, [16, 128, 480], 20)
    grid = grid_of(models, config.k or k, config.batch, config.context or contexts, config.repeats or repeats)
    has_law = config.law

    def run(output: Output) -> Measured:
        profiles = profile_models(models, grid, running, output)
        return profiles, fit_law(profiles) if has_law else None

    def facts() -> dict[str, object]:
        points = len(grid.widths) * len(grid.batches) * len(grid.contexts)
        passes = points * grid.repeats * len(models)
        memory = sum(needed_bytes(models, grid, running).values())
        sizes: dict[str, object] = {model.name: model.size.describe() for model in models}
        return sizes | {"passes": passes, "memory": format_bytes(memory)}

    return Job(run, "-".join(["law" if has_law else "profile", *names]), facts)


@command(
    ProfileConfig,
    prepare=prepare_profile,
    dry_run=True,
    example="profile tiny runs/distill-3x128 --k 4",
)
def profile(measured: Measured, output: Output) -> Profiled:
    """Measure the latency of forward passes by tokens, batch size and context; --law fits a latency law over shapes."""
    from draftlab.commands.latency_tables import profile_table

    profiles, law = measured
    if law is not None:
        return _fitted(output.out, law)
    data = {"out": str(output.out), "profiles": [each.model_dump() for each in profiles]}
    show = [*map(profile_table, profiles), str(output.out)]
    slowest = max(profiles, key=lambda each: each.steady[-1].median_ms)
    words: list[object] = ["--target-profile", output.out / f"{slowest.name}.yaml"]
    for each in profiles:
        if each is not slowest:
            words += ["--draft-profile", output.out / f"{each.name}.yaml"]
    config = output.config
    assert isinstance(config, ProfileConfig)
    if config.is_set("batch"):
        words += ["--batch", ",".join(map(str, config.batch))]
    if config.is_set("k") or config.is_set("context"):  # predict has the ranges of profile's defaults
        words.append("--extrapolate")
    following = typed("draftlab", "predict", *words, "--acceptance", "0.7")
    return Profiled(
        path=output.out,
        show=show,
        data=data,
        profiles=profiles,
        next=following if len(profiles) > 1 else None,
    )


def prepare_predict(config: PredictConfig, weights: bool) -> "Job[Drawn]":
    """Resolve and check the settings of the command `predict`, and return the job.

    Raises:
        UserError: A profile or a value of --acceptance cannot be read, or there are not as many values as drafts.
    """
    from draftlab.latency.cost_model import CostModel
    from draftlab.latency.predict import predict_draft
    from draftlab.latency.roofline import parse_profile
    from draftlab.latency.scaling_law import read_law
    from draftlab.latency.workload import note_on_prompts
    from draftlab.pruning.source import prunable_shape

    with about("--acceptance"):
        measured = [_acceptance(text, config.max_new_tokens) for text in config.acceptance]
        if len(measured) not in (1, len(config.draft_profile)):
            raise UserError(
                f"{len(measured)} values for {len(config.draft_profile)} drafts; write one value for all drafts, or "
                "one value for each draft"
            )
    if config.is_set("max_new_tokens") and any(work.model for work in measured):
        raise UserError(
            "--max-new-tokens: leave it out, because the measured texts of --acceptance have their own lengths"
        )
    measured *= len(config.draft_profile) // len(measured)
    prompts: Sequence[int | None] = config.context or [None]
    works = measured
    if config.context:
        works = [work.with_prompt_tokens(n) for work in measured for n in config.context]
    grid = {
        # up to the number of tokens in the widest pass of a parallel draft
        "widths": range(1, 2 * max(config.k) + 1),
        "batches": config.batch,
        "longest": max(work.longest for work in works) + max(config.k),
    }

    def cost(option: str, spec: str) -> CostModel:
        name, _, directory = spec.rpartition("@")
        with about(option):
            if name and Path(directory).is_dir():
                called, shape = prunable_shape(name)
                profile = read_law(Path(directory)).profile(shape, called)
            else:
                profile = parse_profile(spec, **grid)
            return CostModel.of(profile, extrapolate=config.extrapolate)

    drafts = [cost("--draft-profile", spec) for spec in config.draft_profile]
    target = cost("--target-profile", config.target_profile)
    pairs = list(zip(drafts, measured, strict=True))
    notes, plot = note_on_prompts(measured), config.plot
    if plot is not None:
        check_plots()

    def run() -> "Drawn":
        predicted = [
            predict_draft(draft, target, work, config.k, batches=config.batch, prompts=prompts) for draft, work in pairs
        ]
        for each in predicted:
            each.prediction.notes.extend(notes)
        if plot is not None:
            _draw(plot, [each.prediction for each in predicted])
        return predicted, plot

    return Job(run)


@command(
    PredictConfig,
    prepare=prepare_predict,
    example="predict --draft-profile llama-3.2-1b@h100,graphs --target-profile llama-3.1-8b@h100,graphs "
    "--acceptance 0.7",
)
def predict(drawn: "Drawn") -> Predicted:
    """Predict the speed-up at every K from acceptance and latency profiles, which may be from different machines."""
    from draftlab.commands.latency_tables import best_k_table, draft_table, k_table
    from draftlab.latency.predict import verdict

    drafts, plot = drawn
    predictions = [draft.prediction for draft in drafts]
    several = len(predictions) > 1
    show: list[object] = [draft_table(predictions) if several else k_table(predictions[0])]
    show += [best_k_table(draft) for draft in drafts if len(draft.best_ks) > 1]
    show += [f"{p.name}: {verdict(p)}" if several else verdict(p) for p in predictions]
    notes = dict.fromkeys(chain.from_iterable(p.notes for p in predictions))
    show += [f"note: {text}" for text in notes]
    show += [str(plot)] if plot else []
    data: dict[str, object] = {"predictions": [draft.as_dict() for draft in drafts]}
    return Predicted(path=plot, show=show, data=data, predictions=drafts)


def _draw(plot: Path, predictions: "list[Prediction]") -> None:
    """Draw the speed-up of every draft by K. The file's directory is made.

    Raises:
        UserError: The file cannot be written.
    """
    from draftlab.results.plots import Panel, save_panels, short
    from draftlab.runs.atomic import writing

    first = predictions[0]
    ordered = sorted(predictions, key=lambda p: p.best.speedup.value, reverse=True)
    panel = Panel(
        title=textwrap.fill(f"{first.target}, batch {first.batch}", TITLE_WIDTH),
        x="K, drafted tokens per step",
        y="predicted speed-up",
        series={short(p.name): [(row.k, row.speedup.value) for row in p.rows] for p in ordered},
        level=(1, "no draft"),
    )
    with writing(plot):
        save_panels(plot, [panel])


def _acceptance(text: str, max_tokens: int) -> "Workload":
    """Parse a value of --acceptance: an output of replay or score, a probability, or tokens per pass at a K, as 2.8@4.

    max_tokens: Assumed length of generated texts, if the value is a number.

    Raises:
        UserError: The file is missing or cannot be read, or the number is impossible.
    """
    from draftlab.latency.cost_model import alpha_for
    from draftlab.latency.workload import constant_workload, workload_of_score
    from draftlab.results.score import read_score
    from draftlab.scoring.replay import read_replay, workload_of_replay

    assumed = re.fullmatch(r"([0-9.]+)(?:@([1-9]\d*))?", text)
    if assumed and not Path(text).exists():
        number, k = float(assumed[1]), assumed[2]
        alpha = number if k is None else alpha_for(number, int(k))
        if alpha > 1:
            raise UserError(
                f"{text} is above 1, so it is no probability; to give tokens per target pass, add @K, such as 2.8@4 "
                "for 2.8 tokens at K = 4"
            )
        return constant_workload(alpha, tokens=max_tokens, prompt_tokens=ASSUMED_PROMPT)
    path = Path(text)
    if path.name == "score.json" or (path / "score.json").exists():
        return workload_of_score(read_score(path))
    return workload_of_replay(read_replay(path))


def _fitted(directory: Path, law: "ScalingLaw") -> Profiled:
    from draftlab.commands.latency_tables import law_table

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
    return Profiled(path=directory, show=show, data=data, profiles=law.profiles, law=law, next=then)
