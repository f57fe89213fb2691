"""The command auto, above recipes: its steps are theirs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftlab.commands.base import Outcome, command
from draftlab.config.auto import AutoConfig
from draftlab.console import note_if_slow
from draftlab.errors import UserError
from draftlab.model import hub
from draftlab.output import Output

if TYPE_CHECKING:
    from draftlab.pipeline.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Found(Outcome):
    """What to serve a target with, and why."""

    verdict: "Verdict"


@command(AutoConfig, dry_run=True, resumes=True)
def auto(config: AutoConfig, output: Output) -> Found | Outcome:
    """Make the draft that serves a target fastest here, or say that none does; a killed run goes on."""
    hub.locate(config.target, weights=False)  # before torch is imported
    if config.prompt_file is not None and not config.prompt_file.is_file():
        raise UserError(f"--prompts {config.prompt_file}: no such file")
    with note_if_slow("auto: loading torch and transformers"):
        from draftlab.pipeline import run
    if output.dry_run:
        return _planned(config, output)
    result = run.auto(config, output)
    data = {"path": str(output.out), **result.model_dump(mode="json")}
    return Found(path=output.out, show=[*result.lines(), str(output.out)], data=data, verdict=result)


def _planned(config: AutoConfig, output: Output) -> Outcome:
    """Return the plan, and what --acceptance-length would cost by pilots that are there."""
    from draftlab.pipeline import run, serving

    plan, cost = run.plan(config, output.out), run.expected_cost(config, output.out)
    lines: list[object] = [*plan.lines(), *serving.unverified(config)]
    if config.acceptance_length is not None:
        unknown = f"the cost of {config.acceptance_length:g} tokens per pass: known after the first rounds of training"
        lines.append(unknown if cost is None else f"cost: {cost.line()}")
    lines.append(f"about {plan.minutes:.0f} minutes in all; would write {output.out}")
    data: dict[str, object] = {"out": str(output.out), **plan.model_dump(mode="json"), "minutes": plan.minutes}
    data["forecast"] = cost.model_dump() if cost else None
    return Outcome(path=None, show=lines, data=data)
