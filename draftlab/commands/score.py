"""Commands that measure a draft: score, score-servers."""

from typing import TYPE_CHECKING

from draftlab.commands.base import Outcome, command, plan
from draftlab.config.score import BarSettings, ScoreConfig, ScoreServersConfig
from draftlab.console import note_if_slow
from draftlab.output import Output

if TYPE_CHECKING:
    from draftlab.results.score import Score


@command(ScoreConfig, dry_run=True)
def score(config: ScoreConfig, output: Output) -> Outcome:
    """Measure drafts against the target in one process: acceptance, speed-up over plain decoding, accuracy."""
    with note_if_slow("loading torch and transformers"):
        from draftlab.benchmark import run
    if output.dry_run:
        return plan(output, run.describe(config))
    return _outcome(run.score(config, output), output, config)


@command(ScoreServersConfig, dry_run=True)
def score_servers(config: ScoreServersConfig, output: Output) -> Outcome:
    """Measure a draft through two running servers: the target alone, and the target with its draft."""
    with note_if_slow("loading torch and transformers"):
        from draftlab.benchmark import servers
    if output.dry_run:
        return plan(output, servers.describe(config))
    return _outcome([servers.score(config, output)], output, config)


def missed_bars(name: str, output_differs: bool, speedup: float, length: float, bars: BarSettings) -> list[str]:
    """Return which bars a draft misses. output_differs: its texts are not the target's own."""
    missed = []
    if bars.min_speedup is not None and output_differs:
        missed.append(f"{name}: its output differs from the target's own, so its speed-up does not count")
    if bars.min_speedup is not None and speedup < bars.min_speedup:
        missed.append(f"{name}: speed-up {speedup:.3f} is below --min-speedup {bars.min_speedup}")
    if bars.min_acceptance_length is not None and length < bars.min_acceptance_length:
        missed.append(
            f"{name}: acceptance length {length:.3f} is below --min-acceptance-length {bars.min_acceptance_length}"
        )
    return missed


def _outcome(scores: "list[Score]", output: Output, bars: BarSettings) -> Outcome:
    from draftlab.results.compare import candidate_of, category_rows, category_table, prompt_rows, rank, verdict_lines
    from draftlab.results.report import json_rows
    from draftlab.results.tables import score_table
    from draftlab.results.warnings import score_warnings

    missed = []
    for s in scores:
        length = max(s.acceptance(k).mean_acceptance_length for k in s.speculative)
        missed += missed_bars(s.name, s.output_differs, s.best_k_speedup.value, length, bars)
    verdicts = [f"{s.name}: {s.verdict()}" for s in scores]
    warnings = [f"warning: {text}" for text in score_warnings(scores)]
    comparable = len(scores) > 1 and len({s.conditions.batch for s in scores}) == 1
    ranking = verdict_lines(rank([candidate_of(s) for s in scores])) if comparable else []
    categories = [category_table(s) for s in scores if s.prompts_by_category]
    data: dict[str, object] = {
        "scores": json_rows(scores),
        "categories": {s.name: category_rows(s) for s in scores},
        "prompts": {s.name: prompt_rows(s) for s in scores},
    }
    show = [score_table(scores), *categories, *verdicts, *ranking, *warnings, str(output.out)]
    return Outcome(path=output.out, show=show, data=data, missed=missed)
