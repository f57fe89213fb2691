"""The command import, which converts checkpoints in other layouts to Hugging Face directories."""

from pathlib import Path

from draftlab.commands.base import Outcome
from draftlab.commands.settings.make import ImportConfig
from draftlab.importing.run import ImportSource, inspect
from draftlab.model.devices import DTYPES
from draftlab.shell import typed


def prepare(config: ImportConfig, weights: bool) -> ImportSource:
    """Resolve and check the settings of the command `import`, and return the job.

    Raises:
        UserError: The source cannot be read.
    """
    return inspect(config.source, DTYPES.get(config.dtype), config.base)


def show(source: ImportSource, config: ImportConfig, out: Path) -> Outcome:
    return Outcome(
        path=out,
        show=[str(out)],
        data={"path": str(out), **source.facts()},
        next=typed("draftlab", "init", "--target", out),
    )
