"""The command that trains a draft against its target, or on text."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftlab.commands.base import Outcome, command, plan
from draftlab.config.distill import DistillConfig
from draftlab.console import note_if_slow
from draftlab.output import Output

if TYPE_CHECKING:
    from draftlab.training.run import LengthComparison, TrainingResult


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Trained(Outcome):
    """A trained draft. acceptance: held out, before training and of the weights that are written.

    tokens: trained on. lengths: tokens per target pass for every K; empty where no target could write text.
    """

    acceptance_before: float | None
    acceptance: float | None
    tokens: int
    seconds: float
    lengths: "list[LengthComparison]"


@command(DistillConfig, dry_run=True)
def distill(config: DistillConfig, output: Output) -> Trained | Outcome:
    """Train a draft to agree with the target."""
    if not output.dry_run and config.server is not None:
        from draftlab.servers.client import Server

        Server.check(config.server, model=config.served_model, api_key_file=config.api_key_file)
    with note_if_slow("distill: loading torch and transformers"):
        from draftlab.training import distill as library
    if output.dry_run:
        return plan(output, library.plan_distill(config))
    return _trained(output, library.distill(config, output))


def _trained(output: Output, result: "TrainingResult") -> Trained:
    cost = f"{result.tokens:,} tokens in {result.seconds:.0f} s; {result.bits_per_byte:.3f} bits per byte held out"
    lines = [str(output.out), cost]
    before, after = result.before.acceptance, result.after.acceptance
    if before is not None and after is not None:
        more = f" (up to {result.after.slack:.3f} more: only the most probable tokens are known)"
        lines.append(f"held-out acceptance {before:.3f} -> {after:.3f}" + (more if result.after.slack > 0.001 else ""))
    if result.after.offsets:
        lines.append("held-out acceptance by offset: " + " ".join(f"{a:.3f}" for a in result.after.offsets))
    if result.lengths:
        chosen = {2, 4, result.lengths[-1].k} if result.after.offsets else {2, 4}
        shown = [n for n in result.lengths if n.k in chosen]
        text = [f"K = {n.k}: {n.before:.2f} -> {n.after:.2f} ({n.low:.2f} to {n.high:.2f})" for n in shown]
        lines.append("tokens per target pass: " + "; ".join(text))
    if result.lengths and all(n.gain_low <= 1 for n in result.lengths):
        lines.append("no gain beyond the noise at any K: more steps, another --lr or other text may help")
    return Trained(
        path=output.out,
        show=lines,
        data={"path": str(output.out), **result.as_dict()},
        acceptance_before=before,
        acceptance=after,
        tokens=result.tokens,
        seconds=result.seconds,
        lengths=result.lengths,
    )
