"""The command predict, which computes speed-ups from latency profiles."""

import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from draftlab import shipped
from draftlab.commands.base import Outcome
from draftlab.commands.checks import check_plots
from draftlab.commands.latency_tables import best_k_table, draft_table, k_table
from draftlab.commands.settings.latency import PredictConfig
from draftlab.drafters.base import DRAFTERS
from draftlab.errors import OtherArchitecture, Quantised, UserError, about
from draftlab.heads.eagle3 import layout
from draftlab.latency.cost_model import CostModel, alpha_for
from draftlab.latency.predict import DraftPrediction, Predicting, verdict
from draftlab.latency.roofline import ModelSizes, NamedModel, parse_profile, shipped_model
from draftlab.latency.scaling_law import read_law
from draftlab.latency.workload import (
    Workload,
    constant_workload,
    note_on_prompts,
    workload_of_score,
)
from draftlab.model import checkpoint, hub
from draftlab.pruning.source import prunable_shape
from draftlab.results.score import read_score
from draftlab.scoring.replay import read_replay, workload_of_replay

ASSUMED_PROMPT = 128  # assumed length of prompts in tokens, if --acceptance is a number


def prepare(config: PredictConfig, weights: bool) -> Predicting:
    """Resolve and check the settings of the command `predict`, and return the job.

    Raises:
        UserError: A profile or a value of --acceptance cannot be read, or there are not as many values as drafts.
    """
    with about("--acceptance"):
        measured = [_acceptance(text, config.max_new_tokens) for text in config.acceptance]
        count = len(config.draft_profile) or len(measured)
        if len(measured) not in (1, count):
            raise UserError(
                f"{len(measured)} values for {count} drafts; write one value for all drafts, or one value for each "
                "draft"
            )
    if not config.draft_profile:
        for text, work in zip(config.acceptance, measured, strict=True):
            _check_without_model(text, work)
    if any(work.model for work in measured):
        config.note_if_given("max_new_tokens", reason="the measured texts of --acceptance have their own lengths")
    measured *= count // len(measured)
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
                profile = parse_profile(spec, **grid, find=_model)
            return CostModel.of(profile, extrapolate=config.extrapolate)

    drafts = [cost("--draft-profile", spec) for spec in config.draft_profile] or [None] * count
    target = cost("--target-profile", config.target_profile)
    if target.profile.drafter != "model":
        raise UserError(f"--target-profile {config.target_profile}: this is a head; name the target that it drafts for")
    pairs = list(zip(drafts, measured, strict=True))
    if config.plot is not None:
        check_plots()
    return Predicting(
        target=target,
        drafts=pairs,
        ks=config.k,
        batches=config.batch,
        prompts=prompts,
        notes=note_on_prompts(measured),
        plot=config.plot,
    )


def show(drafts: list[DraftPrediction], config: PredictConfig) -> Outcome:
    predictions = [draft.prediction for draft in drafts]
    several = len(predictions) > 1
    show: list[object] = [draft_table(predictions) if several else k_table(predictions[0])]
    show += [best_k_table(draft) for draft in drafts if len(draft.best_ks) > 1]
    show += [f"{p.name}: {verdict(p)}" if several else verdict(p) for p in predictions]
    notes = dict.fromkeys(chain.from_iterable(p.notes for p in predictions))
    show += [f"note: {text}" for text in notes]
    show += [str(config.plot)] if config.plot else []
    data: dict[str, object] = {"predictions": [draft.as_dict() for draft in drafts]}
    return Outcome(path=config.plot, show=show, data=data)


def _model(name: str) -> NamedModel:
    """Return the sizes of a model: of a shape file, or of a checkpoint or EAGLE-3 head, whose weights are not needed.

    name: Path or name of a shape file; or an embedded model, a directory, or a hub name.

    Raises:
        UserError: There is no such model, or its passes cannot be computed.
    """
    shapes = shipped.named("widths", "targets")
    if name in shapes or Path(name).is_file():
        return shipped_model(name)
    directory = hub.locate(name, weights=False, known=shapes)
    called = hub.checkpoint_name(directory)
    kind = hub.known_head(directory)
    if kind == "eagle":
        head = layout.read_sizes(directory)
        shape = head.shape.model_copy(update={"draft_vocab": head.draft_vocab})
        return NamedModel(
            name=called,
            sizes=ModelSizes(shape=shape),
            states=head.target_hidden * len(head.layer_ids),
        )
    if kind is not None:
        raise UserError(
            f"{name} is a head of kind {kind}, whose passes are only measured; run draftlab profile TARGET {name}"
        )
    try:
        shape = checkpoint.read_shape(directory)
    except Quantised:
        raise UserError(
            f"{name} is quantised; name the checkpoint that it was made from, and the dtype of the quantised weights, "
            "as in llama-3.1-8b@h100,graphs,int4"
        ) from None
    except OtherArchitecture as error:
        raise UserError(
            f"{error}; write its sizes into a shape file, such as those of configs/targets, and name this file"
        ) from None
    return NamedModel(name=called, sizes=ModelSizes(shape=shape))


def _check_without_model(text: str, work: Workload) -> None:
    """Check that an acceptance needs no --draft-profile. text: The value of --acceptance.

    Raises:
        UserError: It is not the replay of a drafter without a model.
    """
    if work.model is None or DRAFTERS.get(work.kind, "acceptance").is_priced():
        raise UserError(
            f"--draft-profile is missing, and --acceptance {text} is no replay of a drafter without a model, such as "
            "prompt-lookup; type --draft-profile MODEL@DEVICE,MODE, as in llama-3.2-1b@h100,graphs"
        )


def _acceptance(text: str, max_tokens: int) -> Workload:
    """Parse a value of --acceptance: an output of replay or score, a probability, or tokens per pass at a K, as 2.8@4.

    max_tokens: Assumed length of generated texts, if the value is a number.

    Raises:
        UserError: The file is missing or cannot be read, or the number is impossible.
    """
    assumed = re.fullmatch(r"([0-9.]+)(?:@([1-9]\d*))?", text)
    if assumed and not Path(text).exists():
        number = float(assumed[1])
        k = assumed[2]
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
