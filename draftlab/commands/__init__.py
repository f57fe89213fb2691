"""The commands. The command line, recipes and tests call these same objects."""

from draftlab.commands import outputs
from draftlab.commands.base import Command
from draftlab.commands.environment import env
from draftlab.commands.export import check, export, trim_vocab
from draftlab.commands.latency import law, law_fit, predict, profile
from draftlab.commands.make import design, import_checkpoint, init, tokenizer
from draftlab.commands.medusa import medusa
from draftlab.commands.prune import prune, prune_masks
from draftlab.commands.results import compare, report
from draftlab.commands.score import score, score_servers
from draftlab.commands.search import search
from draftlab.commands.train import distill, online_rollback, online_update, train

_ALL: list[Command] = [
    init,
    design,
    search,
    prune,
    prune_masks,
    distill,
    online_update,
    online_rollback,
    medusa,
    score,
    score_servers,
    compare,
    report,
    profile,
    law,
    law_fit,
    predict,
    check,
    trim_vocab,
    export,
    train,
    tokenizer,
    env,
    outputs.build,
    outputs.import_file,
    outputs.verify,
    outputs.info,
    outputs.replay,
    import_checkpoint,
]
COMMANDS = {each.name: each for each in _ALL}
