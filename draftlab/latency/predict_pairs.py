"""Predict the speed-up of one target with several drafts, from profiles and sources of acceptance, as a config says."""

from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from draftlab.config.latency import PredictConfig
from draftlab.errors import UserError
from draftlab.latency.cost_model import CostModel, alpha_for
from draftlab.latency.k_schedule import Schedule, schedule
from draftlab.latency.predict import Prediction, predict
from draftlab.latency.roofline import parse_profile
from draftlab.latency.scaling_law import read_law
from draftlab.latency.steps import plain_ms, step_costs, steps, total_ms
from draftlab.latency.workload import Workload, constant_workload, workload_of_replay, workload_of_score

ASSUMED_PROMPT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class BestK:
    """The best K at one batch size and prompt length, 0 for no draft. prompt_tokens: None: those of the texts."""

    batch: int
    prompt_tokens: int | None
    k: int
    speedup: float
    tokens_per_second: float
    speedups: dict[int, float]  # by K


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Acceptance, the name and hash of the draft model that it is of, and the rule that it is by; None: assumed.

    rule: None where it is assumed, or greedy.
    """

    work: Workload
    model: tuple[str, str | None] | None = None
    rule: str | None = None

    def note_for(self, server: str | None) -> list[str]:
        """Return in words that a server accepts by another rule; empty: it does not."""
        if server is None or self.rule in (None, "rejection", "block"):
            return []
        return [f"this acceptance is by --rule {self.rule}, which is not {server}'s: --server-rule {server} sets it"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPrediction:
    """One draft: every K at the smallest batch and first context, and the best K at all of them."""

    prediction: Prediction
    best_ks: list[BestK]
    schedule: Schedule | None  # as a server takes it
    model: tuple[str, str | None]  # name and hash of the draft model

    def as_dict(self) -> dict[str, Any]:
        rows = [
            asdict(row)
            | {"tokens_per_pass": row.tokens_per_pass.model_dump(), "speedup": row.speedup.model_dump()}
            | {"break_even_length": row.break_even_length}
            for row in self.prediction.rows
        ]
        grid = [asdict(best) for best in self.best_ks]
        schedule = self.schedule and self.schedule.model_dump()
        return asdict(self.prediction) | {
            "rows": rows, "best_k": self.prediction.best.k, "best_ks": grid, "schedule": schedule,
            "draft_model": self.model[0], "draft_sha256": self.model[1],
        }  # fmt: skip


def predict_drafts(config: PredictConfig) -> list[DraftPrediction]:
    """Predict every draft.

    Raises:
        UserError: what cannot be read, or lies outside the profiles.
    """
    sources = _sources(config)
    sources *= len(config.draft_profile) // len(sources)
    works, prompts = [source.work for source in sources], config.context or [None]
    longest = max(_at(work, prompt).longest for work in works for prompt in prompts) + max(config.k)
    target, *drafts = (_cost(spec, config, longest) for spec in (config.target_profile, *config.draft_profile))
    pairs = list(zip(drafts, sources, strict=True))
    models = [source.model or (draft.profile.name, draft.profile.sha256) for draft, source in pairs]
    return [
        _predict(draft, target, source, config, model) for (draft, source), model in zip(pairs, models, strict=True)
    ]


def _predict(
    draft: CostModel, target: CostModel, source: Source, config: PredictConfig, model: tuple[str, str | None]
) -> DraftPrediction:
    prompts = config.context or [None]
    work, grid = _drafted_by(draft, source.work, config), []
    works = {prompt: _at(work, prompt) for prompt in prompts}
    prediction = predict(draft, target, works[prompts[0]], config.k, config.batch[0], config.server)
    prediction.notes.extend(source.note_for(config.server))
    by_steps = {k: steps(work, k) for k in config.k}
    for batch, prompt in product(config.batch, prompts):
        costs = step_costs(draft, target, works[prompt], max(config.k), batch, config.server)
        plain, by_k = float(plain_ms(costs, works[prompt]).sum()), total_ms(costs, works[prompt], by_steps)
        k = min((0, *by_k), key=lambda k: by_k.get(k, plain))
        ms = by_k.get(k, plain)
        grid.append(
            BestK(
                batch=batch, prompt_tokens=prompt, k=k, speedup=plain / ms,
                tokens_per_second=1e3 * batch * float(work.texts.lengths.sum()) / ms,
                speedups={k: plain / ms for k, ms in by_k.items()},
            )
        )  # fmt: skip
    most, server, by_batch = max(config.batch), config.server, None
    if server is not None and most > 1:
        if work.parallel:
            prediction.notes.append("vLLM fixes the K of a parallel draft when it starts: no schedule by batch size")
        else:
            by_batch = schedule(draft, target, list(works.values()), config.k, most, server)
    return DraftPrediction(prediction=prediction, best_ks=grid, schedule=by_batch, model=model)


def _drafted_by(draft: CostModel, work: Workload, config: PredictConfig) -> Workload:
    """Return acceptance as the draft has it. Raises UserError: it was found for another kind of draft."""
    if draft.profile.eagle and not (config.replay or config.score):  # assumed, the same for any draft
        return work.drafted_by_head(max(config.k))
    if draft.profile.eagle != work.eagle:
        one, other = ("no EAGLE-3 head", "one") if work.eagle else ("an EAGLE-3 head", "none")
        raise UserError(f"{draft.profile.name} is {one}, and its acceptance that of {other}")
    return work


def _at(work: Workload, prompt_tokens: int | None) -> Workload:
    return work if prompt_tokens is None else work.with_prompt_tokens(prompt_tokens)


def _cost(spec: str, config: PredictConfig, longest: int) -> CostModel:
    name, _, directory = spec.rpartition("@")
    if name and Path(directory).is_dir():
        from draftlab.pruning.trial_model import prunable_shape  # torch

        called, shape = prunable_shape(name)
        profile = read_law(Path(directory)).profile(shape, called)
    else:
        widths = range(1, max(config.k) + (2 if config.server is None else 3))
        profile = parse_profile(spec, widths=widths, batches=config.batch, longest=longest)
    return CostModel.of(profile, extrapolate=config.extrapolate)


def _sources(config: PredictConfig) -> list[Source]:
    """Return acceptance from the one source that the config names."""
    if config.replay:
        from draftlab.target_outputs.replay import read_replay

        replays = map(read_replay, config.replay)
        return [
            Source(
                work=workload_of_replay(each), model=(each.draft, each.draft_sha256),
                rule=each.rule if each.sampling.temperature > 0 else None,
            )
            for each in replays
        ]  # fmt: skip
    if config.score:
        from draftlab.results.score import read_score

        scores = map(read_score, config.score)
        return [
            Source(
                work=workload_of_score(each), model=(each.draft.name, each.draft.sha256),
                rule=each.conditions.rule if each.conditions.temperature > 0 else None,
            )
            for each in scores
        ]  # fmt: skip
    alpha = config.alpha
    if config.acceptance_length is not None:
        length, _, k = config.acceptance_length.partition("@")
        try:
            alpha = alpha_for(float(length), int(k))
        except ValueError:
            text = config.acceptance_length
            raise UserError(f"--acceptance-length {text!r}: write the length and its K, as 2.8@4") from None
    assert alpha is not None  # the config names one source
    return [Source(work=constant_workload(alpha, tokens=config.max_tokens, prompt_tokens=ASSUMED_PROMPT))]
