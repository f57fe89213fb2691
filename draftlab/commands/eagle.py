"""The command that trains EAGLE-3 heads."""

from draftlab.commands.base import Outcome, command, plan
from draftlab.config.distill import EagleConfig
from draftlab.console import note_if_slow
from draftlab.output import Output


@command(EagleConfig, dry_run=True)
def eagle(config: EagleConfig, output: Output) -> Outcome:
    """Train an EAGLE-3 head on the frozen target, for score --drafter eagle:heads=DIR and for servers."""
    with note_if_slow("eagle: loading torch and transformers"):
        from draftlab.training.eagle import plan_eagle, train_eagle
    if output.dry_run:
        return plan(output, plan_eagle(config))
    result = train_eagle(config, output)
    after = result.fitted.after.offsets or (result.fitted.after.acceptance,)
    lines = [f"token {k}: held-out acceptance {acceptance:.3f}" for k, acceptance in enumerate(after, 1)]
    rate = result.fitted.tokens / result.fitted.seconds
    text, path = (
        f"{result.fitted.tokens:,} tokens in {result.fitted.seconds:.0f} s, {rate:,.0f} a second",
        str(output.out),
    )
    facts = {"path": path, "coverage": result.coverage} | result.fitted.as_dict()
    return Outcome(path=output.out, show=[path, text, *lines], data=facts)
