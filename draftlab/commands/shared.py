"""What all commands share: their options' types, what they return, and how arguments are recorded."""

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from draftlab import workspace
from draftlab.console import note
from draftlab.errors import UserError

if TYPE_CHECKING:
    from draftlab.serve import Server

Force = Annotated[bool, Option("--force", help="Replace an output that exists.")]
DryRun = Annotated[bool, Option("--dry-run", help="Show what would be done, and do nothing.")]
Seed = Annotated[int, Option(help="Seed of everything random.")]
Out = Annotated[Path | None, Option(help="Directory to write; a name under the workspace's runs if left out.")]
Data = Annotated[str | None, Option(help="Text: SOURCE, or SOURCE=WEIGHT,SOURCE=WEIGHT; the workspace's if left out.")]
TargetName = Annotated[str | None, Option(help="Checkpoint of the target; the workspace's if left out.")]
ServerUrl = Annotated[
    str | None, Option("--server", help="http://HOST:PORT of a server that runs the target (docs/servers.md), instead.")
]
ServedModel = Annotated[str | None, Option(help="Which model of the server; its first if left out.")]
PromptFile = Annotated[
    Path | None, Option(help="JSON-lines file of prompts: prompt (or turns, text, question) and perhaps category.")
]
TokenizerDir = Annotated[
    Path | None, Option("--tokenizer", help="Directory with the server's tokenizer, if not that of --target.")
]
ApiKeyFile = Annotated[Path | None, Option(help="File that holds the server's API key.")]
Steps = Annotated[int, Option(min=1, help="Optimiser steps.")]
Rows = Annotated[int, Option(min=1, help="Sequences per step.")]
MicroTokens = Annotated[int, Option(min=0, help="Tokens per forward pass, to save memory; 0: all at once.")]
Lr = Annotated[float, Option(help="Peak learning rate.")]
WeightDecay = Annotated[float, Option(min=0, help="Decoupled weight decay of matrices.")]
EvalEvery = Annotated[int, Option(min=1, help="Steps between held-out evaluations.")]
SaveEvery = Annotated[int, Option(min=1, help="Steps between checkpoints to resume from.")]
KeepLast = Annotated[int, Option(min=1, help="Checkpoints kept to resume from, the newest ones.")]
Patience = Annotated[int, Option(min=0, help="End after so many evaluations without a better one; 0: never.")]
Track = Annotated[
    list[str] | None, Option(help="Tell tensorboard, trackio, wandb or others how it goes; again for each.")
]
ReweighEvery = Annotated[
    int, Option(min=0, help="Steps between changes of a mixture's weights toward what lags behind; 0: fixed weights.")
]
Dtype = Annotated[Literal["float32", "bfloat16"], Option(help="bfloat16: autocast with fp32 weights.")]
Optimizer = Annotated[Literal["adamw", "muon"], Option(help="muon: Muon on the blocks' matrices, AdamW on the rest.")]
Compile = Annotated[bool, Option("--compile", help="torch.compile: a minute to start, then faster.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a command made: the path, what a person reads (strings and rich tables), what a program reads."""

    path: Path | None
    show: Sequence[object]
    data: dict[str, object]
    missed: list[str] = field(default_factory=list)  # bars the user set that were not reached


def recorded(given: dict[str, object]) -> tuple[dict[str, object], float]:
    """A command's arguments as recorded, and now; what does not change the result is left out."""
    return {name: value for name, value in given.items() if name not in ("force", "dry_run")}, time.time()


def command_line(command: str, arguments: Mapping[str, object], bare: str = "") -> str:
    """What to type for these arguments; flags that are off and options that were left out do not appear.

    bare: the argument that has no flag.
    """
    words, last = ["draftlab", *command.split()], []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        for item in value if isinstance(value, list) else [value]:
            if name == bare:
                last += [] if item is None else [str(item)]
            else:
                words += [] if item is None or item is False else [flag] if item is True else [flag, str(item)]
    return shlex.join(words + last)


def connect(url: str, model: str | None, api_key_file: Path | None) -> "Server":
    from draftlab.serve import Server

    try:
        key = api_key_file.read_text().strip() if api_key_file else None
    except OSError as error:
        raise UserError(f"{api_key_file}: {error.strerror}") from None
    return Server.connect(url, model, key)


def plan(out: Path, facts: Mapping[str, object]) -> Outcome:
    lines = [f"{name}: {value}" for name, value in facts.items()]
    return Outcome(path=None, show=[*lines, f"would write {out}"], data={"out": str(out), **facts})


def newest(space: workspace.Workspace, commands: tuple[str, ...], hint: str) -> Path:
    found = workspace.newest(space.runs, commands)
    if found is None:
        raise UserError(f"no draft given and none in {space.runs}; run draftlab {hint} first, or name one with --draft")
    note(f"draft: {found}")
    return found
