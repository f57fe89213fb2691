"""Predict the speed-up of one target with several drafts, from profiles and sources of acceptance, as a config says."""

from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from draftlab.config.latency import PredictConfig
from draftlab.errors import UserError
from draftlab.latency.cost_model import CostModel, alpha_for
from draftlab.latency.predict import Prediction, best_k, predict
from draftlab.latency.roofline import parse_profile
from draftlab.latency.scaling_law import read_law
from draftlab.latency.workload import Workload, constant_workload, workload_of_replay, workload_of_score
from draftlab.prune.trial_model import prunable_shape

ASSUMED_PROMPT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class BestK:
    """The best K at one batch size and prompt length. prompt_tokens: None: those of the texts."""

    batch: int
    prompt_tokens: int | None
    k: int
    speedup: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPrediction:
    """One draft: every K at the smallest batch and first context, and the best K at all of them."""

    prediction: Prediction
    best_ks: list[BestK]

    def as_dict(self) -> dict[str, Any]:
        rows = [
            asdict(row)
            | {"tokens_per_pass": row.tokens_per_pass.model_dump(), "speedup": row.speedup.model_dump()}
            | {"break_even_length": row.break_even_length}
            for row in self.prediction.rows
        ]
        grid = [asdict(best) for best in self.best_ks]
        return asdict(self.prediction) | {"rows": rows, "best_k": self.prediction.best.k, "best_ks": grid}


def predict_drafts(config: PredictConfig) -> list[DraftPrediction]:
    """Predict every draft.

    Raises:
        UserError: what cannot be read, or lies outside the profiles.
    """
    works = _workloads(config)
    works *= len(config.draft_profile) // len(works)
    prompts = config.context or [None]
    longest = max(_at(work, prompt).longest for work in works for prompt in prompts) + max(config.k)
    target, *drafts = (_cost(spec, config, longest) for spec in (config.target_profile, *config.draft_profile))
    return [_predict(draft, target, work, config) for draft, work in zip(drafts, works, strict=True)]


def _predict(draft: CostModel, target: CostModel, work: Workload, config: PredictConfig) -> DraftPrediction:
    prompts = config.context or [None]
    grid = []
    for batch, prompt in product(config.batch, prompts):
        k, speedup, rate = best_k(draft, target, _at(work, prompt), config.k, batch)
        grid.append(BestK(batch=batch, prompt_tokens=prompt, k=k, speedup=speedup, tokens_per_second=rate))
    prediction = predict(draft, target, _at(work, prompts[0]), config.k, config.batch[0])
    return DraftPrediction(prediction=prediction, best_ks=grid)


def _at(work: Workload, prompt_tokens: int | None) -> Workload:
    return work if prompt_tokens is None else work.with_prompt_tokens(prompt_tokens)


def _cost(spec: str, config: PredictConfig, longest: int) -> CostModel:
    name, _, directory = spec.rpartition("@")
    if name and Path(directory).is_dir():
        called, shape = prunable_shape(name)
        profile = read_law(Path(directory)).profile(shape, called)
    else:
        widths = range(1, max(config.k) + 2)
        profile = parse_profile(spec, widths=widths, batches=config.batch, longest=longest)
    return CostModel.of(profile, extrapolate=config.extrapolate)


def _workloads(config: PredictConfig) -> list[Workload]:
    """Return acceptance from the one source that the config names."""
    if config.replay:
        from draftlab.target_outputs.replay import read_replay

        return [workload_of_replay(read_replay(path)) for path in config.replay]
    if config.score:
        from draftlab.results.score import read_score

        return [workload_of_score(read_score(path)) for path in config.score]
    alpha = config.alpha
    if config.acceptance_length is not None:
        length, _, k = config.acceptance_length.partition("@")
        try:
            alpha = alpha_for(float(length), int(k))
        except ValueError:
            text = config.acceptance_length
            raise UserError(f"--acceptance-length {text!r}: write the length and its K, as 2.8@4") from None
    assert alpha is not None  # the config names one source
    return [constant_workload(alpha, tokens=config.max_tokens, prompt_tokens=ASSUMED_PROMPT)]
