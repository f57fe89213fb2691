"""The commands that cut a draft out of a source."""

from typing import TYPE_CHECKING

from draftlab.commands.base import Outcome, command, plan
from draftlab.config.prune import PruneConfig, PruneMasksConfig
from draftlab.output import Output

if TYPE_CHECKING:
    from draftlab.prune.run import Pruned


@command(PruneConfig, dry_run=True)
def prune(config: PruneConfig, output: Output) -> Outcome:
    """Cut a LLaMA-like checkpoint to an exact shape, and refit what is left to follow the source."""
    from draftlab.prune import run, source

    if output.dry_run:
        return plan(output, source.estimate(config))
    return _outcome(run.prune(config, output), output)


@command(PruneMasksConfig, dry_run=True)
def prune_masks(config: PruneMasksConfig, output: Output) -> Outcome:
    """Train masks that select what to cut (Sheared LLaMA), then cut and refit as prune does."""
    from draftlab.prune import run, source

    if output.dry_run:
        return plan(output, source.training_estimate(config))
    return _outcome(run.prune_masks(config, output), output)


def _outcome(pruned: "Pruned", output: Output) -> Outcome:
    from draftlab.prune.source import kv_saving

    shape, layers = pruned.shape, pruned.keep.layers
    lines = [
        str(output.out),
        f"{shape.describe()}, {pruned.disk_bytes / 1e6:.1f} MB; layers {layers}",
        kv_saving(pruned.source, shape),
    ]
    if pruned.head is not None and pruned.head.coverage is not None:
        lines.append(
            f"its head is of {len(pruned.head.ids):,} of {shape.vocab:,} ids; those of one half of the text cover "
            f"{pruned.head.coverage:.2%} of the other half"
        )
    data = {"path": str(output.out), "shape": shape.model_dump(), "params": shape.params(), "layers": layers}
    if (agreement := pruned.agreement) is not None:
        lines.append(
            f"against the source on {agreement.tokens:,} held-out tokens: acceptance {agreement.acceptance:.3f}, "
            f"top-1 {agreement.top1:.3f}, cross-entropy {agreement.cross_entropy:.3f} "
            f"(source {agreement.source_cross_entropy:.3f})"
        )
        data["acceptance"] = agreement.acceptance
    return Outcome(path=output.out, show=lines, data=data)
