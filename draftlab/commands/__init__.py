"""What users can do: one typed function per command. Typer and recipes call these same functions."""

from collections.abc import Callable

from draftlab.commands import cache, trace
from draftlab.commands.law import law
from draftlab.commands.make import design, import_checkpoint, init, tokenizer
from draftlab.commands.measure import compare, report, score
from draftlab.commands.medusa import medusa
from draftlab.commands.predict import predict, profile
from draftlab.commands.prune import prune
from draftlab.commands.search import search
from draftlab.commands.shared import DryRun, Outcome
from draftlab.commands.ship import check, env, export, trim
from draftlab.commands.train import distill, rollback, train

ALONE = (
    init, design, search, prune, distill, rollback, medusa, score, compare, report, profile, law, predict, check, trim,
    export, train, tokenizer, env,
)  # fmt: skip
COMMANDS: dict[str, Callable[..., Outcome]] = {f.__name__: f for f in ALONE} | {
    f"cache {f.__name__}": f for f in (cache.build, cache.verify, cache.info)
}
COMMANDS |= {
    "import": import_checkpoint,
    "trace record": trace.record,
    "trace import": trace.from_paper,
    "trace info": trace.info,
    "trace replay": trace.replay,
}

__all__ = ["COMMANDS", "DryRun", "Outcome"]
