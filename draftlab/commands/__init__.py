"""All commands, grouped as --help lists them. The command line, recipes and tests run the same objects."""

from draftlab.commands import outputs
from draftlab.commands.auto import auto
from draftlab.commands.base import Command
from draftlab.commands.distill import distill
from draftlab.commands.export import check, export
from draftlab.commands.latency import predict, profile
from draftlab.commands.make import design, env, import_checkpoint, init
from draftlab.commands.prune import prune
from draftlab.commands.report import report
from draftlab.commands.score import score
from draftlab.commands.search import search

PANELS: dict[str, tuple[Command, ...]] = {
    "From a target to a served draft": (auto,),
    "Set up": (init, import_checkpoint, env),
    "Make a draft": (design, prune, distill, search, outputs.build, outputs.info),
    "Measure": (score, report),
    "Predict": (profile, predict, outputs.replay),
    "Ship": (check, export),
}
COMMANDS: dict[str, Command] = {command.name: command for panel in PANELS.values() for command in panel}
