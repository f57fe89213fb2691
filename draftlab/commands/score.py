"""Commands that measure a draft: score, score-servers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftlab.commands.base import Outcome, command, plan
from draftlab.config.score import ScoreConfig, ScoreServersConfig, ThresholdSettings
from draftlab.console import note_if_slow
from draftlab.intervals import tokens_per_second
from draftlab.output import Output

if TYPE_CHECKING:
    from draftlab.intervals import Interval
    from draftlab.results.score import Score


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Scored(Outcome):
    """Scores in the order of the drafts and drafters."""

    scores: "list[Score]"

    @property
    def best(self) -> "Score":
        """The score of the fastest draft or drafter by whole requests."""
        return max(self.scores, key=lambda score: score.best_k_speedup.value)

    @property
    def interval(self) -> "Interval":
        """The speed-up of the fastest, with its 95 % interval over requests."""
        return self.best.best_k_speedup

    @property
    def speedup(self) -> float:
        """How many times as fast a whole request is with the fastest draft or drafter as with none."""
        return self.interval.value


@command(ScoreConfig, dry_run=True)
def score(config: ScoreConfig, output: Output) -> Scored | Outcome:
    """Measure drafts against the target in one process: acceptance, speed-up over plain decoding, accuracy."""
    with note_if_slow("loading torch and transformers"):
        from draftlab.benchmark import run
    if output.dry_run:
        return plan(output, run.describe(config))
    return _outcome(run.score(config, output), output, config)


@command(ScoreServersConfig, dry_run=True)
def score_servers(config: ScoreServersConfig, output: Output) -> Outcome:
    """Measure a draft through two running servers: the target alone, and the target with its draft."""
    if not output.dry_run:
        from draftlab.servers.client import Server

        urls = (config.server, config.speculative_server)
        Server.check(*urls, model=config.served_model, api_key_file=config.api_key_file)
    with note_if_slow("loading torch and transformers"):
        from draftlab.benchmark import servers
    if output.dry_run:
        return plan(output, servers.describe(config))
    result = servers.score(config, output)
    if isinstance(result, servers.PlainAnswers):
        speed = tokens_per_second([run.request for run in result.runs])
        lines = [f"{len(result.runs)} answers, {speed:.4g} tokens per second alone", str(output.out)]
        return Outcome(path=output.out, show=lines, data={"path": str(output.out), "output_tps": speed})
    return _outcome([result], output, config)


def _outcome(scores: "list[Score]", output: Output, limits: ThresholdSettings) -> Scored:
    from draftlab.results.compare import (
        candidate_of,
        category_rows,
        category_table,
        missed_thresholds,
        prompt_rows,
        rank,
        verdict_lines,
    )
    from draftlab.results.report import json_rows
    from draftlab.results.tables import accuracy_table, score_table
    from draftlab.results.warnings import score_warnings

    candidates, missed = [candidate_of(s) for s in scores], []
    for s, candidate in zip(scores, candidates, strict=True):
        length = max(s.acceptance(k).mean_acceptance_length for k in s.speculative)
        missed += missed_thresholds(candidate, length, limits.min_speedup, limits.min_acceptance_length)
    verdicts = [f"{s.name}: {s.verdict()}" for s in scores]
    warnings = [f"warning: {text}" for text in score_warnings(scores)]
    comparable = len(scores) > 1 and len({s.conditions.batch for s in scores}) == 1
    ranking = verdict_lines(rank(candidates)) if comparable else []
    categories = [category_table(s) for s in scores if s.prompts_by_category]
    accuracies = {model.name: model.tasks for s in scores for model in (s.draft, s.target) if model.tasks}
    data: dict[str, object] = {
        "scores": json_rows(scores),
        "categories": {s.name: category_rows(s) for s in scores},
        "prompts": {s.name: prompt_rows(s) for s in scores},
    }
    show: list[object] = [score_table(scores), *categories]
    show += [accuracy_table(list(accuracies.items()))] if accuracies else []
    show += [*verdicts, *ranking, *warnings, str(output.out)]
    return Scored(path=output.out, show=show, data=data, missed=missed, scores=scores)
