"""The commands. The command line, recipes and tests call these same objects."""

from collections.abc import Callable

from draftlab.commands import outputs
from draftlab.commands.base import Command, Outcome
from draftlab.commands.environment import env
from draftlab.commands.export import check, export, trim_vocab
from draftlab.commands.latency import law, law_fit, predict, profile
from draftlab.commands.legacy import legacy
from draftlab.commands.make import design, import_checkpoint, init, tokenizer
from draftlab.commands.medusa import medusa
from draftlab.commands.prune import prune, prune_masks
from draftlab.commands.results import compare, report
from draftlab.commands.score import score, score_servers
from draftlab.commands.search import search
from draftlab.commands.train import distill, online_rollback, online_update, train

_BY_NAME: dict[str, Command | Callable[..., Outcome]] = {
    "init": init,
    "design": design,
    "search": search,
    "prune": prune,
    "prune-masks": prune_masks,
    "distill": distill,
    "online update": online_update,
    "online rollback": online_rollback,
    "medusa": medusa,
    "score": score,
    "score-servers": score_servers,
    "compare": compare,
    "report": report,
    "profile": profile,
    "law": law,
    "law-fit": law_fit,
    "predict": predict,
    "check": check,
    "trim-vocab": trim_vocab,
    "export": export,
    "train": train,
    "tokenizer": tokenizer,
    "env": env,
    "outputs build": outputs.build,
    "outputs import": outputs.import_file,
    "outputs verify": outputs.verify,
    "outputs info": outputs.info,
    "replay": outputs.replay,
    "import": import_checkpoint,
}
COMMANDS = {name: each if isinstance(each, Command) else legacy(name, each) for name, each in _BY_NAME.items()}
