"""The command that trains Medusa heads."""

from draftlab.commands.base import Outcome, command, plan
from draftlab.config.distill import MedusaConfig
from draftlab.output import Output


@command(MedusaConfig, dry_run=True)
def medusa(config: MedusaConfig, output: Output) -> Outcome:
    """Train Medusa heads on the frozen target, for score --drafter medusa:heads=DIR."""
    from draftlab.distill.medusa_heads import plan_medusa, train_medusa

    if output.dry_run:
        return plan(output, plan_medusa(config))
    result = train_medusa(config, output)
    lines = [
        f"head {k}: held-out acceptance {head['acceptance']:.3f}, same token {head['agreement']:.3f}"
        for k, head in enumerate(result.heads, 1)
    ]
    text, path = f"{result.fitted.tokens:,} predictions in {result.fitted.seconds:.0f} s", str(output.out)
    facts = {"path": path, "heads": result.heads} | result.fitted.as_dict()
    return Outcome(path=output.out, show=[path, text, *lines], data=facts)
