"""What all commands share: their options' types, what they return, and how arguments are recorded."""

import contextlib
import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from draftlab import workspace
from draftlab.commands.base import Outcome
from draftlab.console import note
from draftlab.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from draftlab.latency.scaling_law import ScalingLaw
    from draftlab.model.shape import Shape
    from draftlab.servers.client import Server

OUTPUT, SERVED, TRAINING, KEEPING = "Output", "Server", "Training", "Evaluation and checkpoints"  # panels of --help

Force = Annotated[bool, Option("--force", help="Replace an output that exists.", rich_help_panel=OUTPUT)]
DryRun = Annotated[bool, Option("--dry-run", help="Show what would be done, and do nothing.", rich_help_panel=OUTPUT)]
Seed = Annotated[int, Option(help="Seed of everything random.")]
Out = Annotated[
    Path | None,
    Option(help="Directory to write; a name under the workspace's runs if left out.", rich_help_panel=OUTPUT),
]
LawDir = Annotated[
    Path | None, Option(help="Folder of profiles that draftlab law measured; the newest one if left out.")
]
Data = Annotated[str | None, Option(help="Text: SOURCE, or SOURCE=WEIGHT,SOURCE=WEIGHT; the workspace's if left out.")]
TargetName = Annotated[str | None, Option(help="Checkpoint of the target; the workspace's if left out.")]
ServerUrl = Annotated[
    str | None,
    Option(
        "--server",
        help="http://HOST:PORT of a server that runs the target (docs/servers.md), instead.",
        rich_help_panel=SERVED,
    ),
]
ServedModel = Annotated[
    str | None, Option(help="Which model of the server; its first if left out.", rich_help_panel=SERVED)
]
PromptFile = Annotated[
    Path | None, Option(help="JSON-lines file of prompts: prompt (or turns, text, question) and perhaps category.")
]
TokenizerDir = Annotated[
    Path | None,
    Option(
        "--tokenizer", help="Directory with the server's tokenizer, if not that of --target.", rich_help_panel=SERVED
    ),
]
ApiKeyFile = Annotated[Path | None, Option(help="File that holds the server's API key.", rich_help_panel=SERVED)]
Steps = Annotated[int, Option(min=1, help="Optimiser steps.", rich_help_panel=TRAINING)]
Rows = Annotated[int, Option(min=1, help="Sequences per step.", rich_help_panel=TRAINING)]
MicroTokens = Annotated[
    int, Option(min=0, help="Tokens per forward pass, to save memory; 0: all at once.", rich_help_panel=TRAINING)
]
Lr = Annotated[float, Option(help="Peak learning rate.", rich_help_panel=TRAINING)]
WeightDecay = Annotated[float, Option(min=0, help="Decoupled weight decay of matrices.", rich_help_panel=TRAINING)]
EvalEvery = Annotated[int, Option(min=1, help="Steps between held-out evaluations.", rich_help_panel=KEEPING)]
SaveEvery = Annotated[int, Option(min=1, help="Steps between checkpoints to resume from.", rich_help_panel=KEEPING)]
KeepLast = Annotated[
    int, Option(min=1, help="Checkpoints kept to resume from, the newest ones.", rich_help_panel=KEEPING)
]
Patience = Annotated[
    int, Option(min=0, help="End after so many evaluations without a better one; 0: never.", rich_help_panel=KEEPING)
]
Track = Annotated[
    list[str] | None,
    Option(help="Tell tensorboard, trackio, wandb or others how it goes; again for each.", rich_help_panel=KEEPING),
]
ReweighEvery = Annotated[
    int,
    Option(
        min=0,
        help="Steps between changes of a mixture's weights toward what lags behind; 0: fixed weights.",
        rich_help_panel=TRAINING,
    ),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"],
    Option(help="bfloat16: autocast with fp32 weights; auto: where that is fast.", rich_help_panel=TRAINING),
]
Optimizer = Annotated[
    Literal["adamw", "muon"],
    Option(help="muon: Muon on the blocks' matrices, AdamW on the rest.", rich_help_panel=TRAINING),
]
TopK = Annotated[int, Option(min=0, help="Sample from so many most probable tokens; 0: from all.")]
TopP = Annotated[float, Option(min=1e-3, max=1, help="Sample from the fewest tokens that have this together.")]
WeightsDtype = Annotated[Literal["float32", "bfloat16", "float16"] | None, Option(help="Of the weights.")]
DeviceMap = Annotated[str | None, Option(help="Spread the target over devices, memory and disk by accelerate: auto.")]
Memory = Annotated[
    float, Option(min=0.01, help="GB that logits and KV caches may take where the target writes or is read.")
]
Threads = Annotated[int | None, Option(min=1, help="CPU threads; torch's choice if left out.")]
PassMode = Annotated[Literal["eager", "native", "graphs"], Option(help="In C++, for CPUs, or captured as CUDA graphs.")]
Compile = Annotated[
    bool, Option("--compile", help="torch.compile: a minute to start, then faster.", rich_help_panel=TRAINING)
]


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
    from draftlab.servers.client import Server

    return Server.connect(url, model, api_key_file)


def subject(name: str, weights: bool = False) -> "tuple[str, Path | Shape]":
    from draftlab.model.families import locate_shape

    return locate_shape(name, weights)


def shape_of(name: str) -> "tuple[str, Shape]":
    from draftlab.prune.trial_model import prunable_shape

    return prunable_shape(name)


def find_law(folder: Path | None, *, needed: bool) -> "ScalingLaw | None":
    """The law in folder, or the newest one of this workspace; None where there is none and none is needed.

    Raises:
        UserError: none, and one is needed.
    """
    found = folder or workspace.newest(workspace.load().runs, ("law",))
    if found is None and needed:
        raise UserError("no latency law here; measure one (draftlab law), or name its folder by --law")
    if found is None:
        return None
    from draftlab.latency.scaling_law import read_law

    return read_law(found)


def plan(out: Path, facts: Mapping[str, object]) -> Outcome:
    lines = [f"{name}: {value}" for name, value in facts.items()]
    return Outcome(path=None, show=[*lines, f"would write {out}"], data={"out": str(out), **facts})


def table_of(title: str, heads: Sequence[str]) -> "Table":
    """An empty table: numbers to the right; a column named draft gives way on a narrow terminal."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
        pad_edge=False, show_edge=False,
    )  # fmt: skip
    for head in heads:
        table.add_column(head, justify="left" if head == "draft" else "right", no_wrap=head != "draft")
    return table


def rounded_drafts(drafts: Mapping[str, Path], stack: contextlib.ExitStack) -> dict[str, Path]:
    """Of names as NAME@q8_0 a copy with rounded weights, which goes when stack closes."""
    from draftlab.export.hf import parse_quantized_name, write_fake_quantized

    found = dict(drafts)
    for name, path in drafts.items():
        _, kind = parse_quantized_name(name)
        if kind is not None:
            found[name] = Path(stack.enter_context(tempfile.TemporaryDirectory())) / name
            found[name].mkdir()
            note(f"{name}: weights rounded to {kind}; its speed here is not llama.cpp's")
            write_fake_quantized(path, found[name], kind)
    return found


def newest_draft(space: workspace.Workspace) -> Path:
    """Raises UserError: none was made here."""
    return newest(space, ("distill", "prune"), "distill")


def newest(space: workspace.Workspace, commands: tuple[str, ...], hint: str) -> Path:
    found = workspace.newest(space.runs, commands)
    if found is None:
        raise UserError(f"no draft given and none in {space.runs}; run draftlab {hint} first, or name one with --draft")
    note(f"draft: {found}")
    return found
