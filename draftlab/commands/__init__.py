"""What users can do: one typed function per command. Typer and recipes call these same functions."""

from collections.abc import Callable

from draftlab.commands import cache
from draftlab.commands.make import design, init, tokenizer
from draftlab.commands.measure import report, score
from draftlab.commands.prune import prune
from draftlab.commands.shared import DryRun, Outcome
from draftlab.commands.train import distill, train

COMMANDS: dict[str, Callable[..., Outcome]] = {
    f.__name__: f for f in (init, design, prune, distill, score, report, train, tokenizer)
} | {f"cache {f.__name__}": f for f in (cache.build, cache.verify, cache.info)}

__all__ = ["COMMANDS", "DryRun", "Outcome"]
