"""The defaults of commands in draftlab.yaml, and the outputs of earlier commands. No torch."""

from pathlib import Path
from typing import Literal

import yaml

from draftlab.console import note
from draftlab.errors import UserError, did_you_mean
from draftlab.reading import FileModel, read_model
from draftlab.runs import provenance
from draftlab.runs.atomic import write_atomic, writing

FILE = Path("draftlab.yaml")


class Workspace(FileModel):
    """The defaults of commands: checkpoints, data, folder of outputs, device and dtype.

    Attributes:
        target, source, data: Checkpoint of the target, checkpoint from which drafts are cut, and text. They have no
            default: a name that is empty must be typed.
        draft: Draft that commands use until the user makes a draft.
        runs: Folder of the outputs.
        device: auto is cuda if there is a GPU.
        dtype: auto is bfloat16 on cuda; on a CPU see model.precision.
    """

    target: str = ""
    source: str = ""
    data: str = ""
    draft: str | None = None
    runs: Path = Path("runs")
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"


PRESETS: dict[str, Workspace] = {
    "tiny": Workspace(target="tiny", source="tiny", data="stdlib"),
    "smollm2": Workspace(target="models/smollm2-135m-instruct", source="models/smollm2-135m-instruct", data="stdlib"),
    "llama-65b": Workspace(  # the models of Decoding Speculative Decoding (arXiv 2402.01528)
        target="huggyllama/llama-65b", source="huggyllama/llama-7b", data="hf:DKYoon/SlimPajama-6B"
    ),
    "llama-2-70b": Workspace(
        target="meta-llama/Llama-2-70b-hf",
        source="meta-llama/Llama-2-7b-hf",
        data="hf:DKYoon/SlimPajama-6B",
    ),
    "llama-3.1-70b": Workspace(
        target="meta-llama/Llama-3.1-70B",
        source="meta-llama/Llama-3.1-8B",
        data="hf:DKYoon/SlimPajama-6B",
        draft="meta-llama/Llama-3.2-1B",
    ),
    "qwen3-30b-a3b": Workspace(
        target="Qwen/Qwen3-30B-A3B",
        source="Qwen/Qwen3-0.6B",
        data="hf:DKYoon/SlimPajama-6B",
        draft="Qwen/Qwen3-0.6B",
    ),
}


def preset(name: str) -> Workspace:
    """Return the preset with this name. Raises UserError: there is no such preset."""
    if name in PRESETS:
        return PRESETS[name]
    raise UserError(
        f"there is no preset {name!r}{did_you_mean(name, PRESETS)}; for another checkpoint, use draftlab init --target "
        "DIRECTORY or --target ORGANISATION/NAME"
    )


def load(folder: Path = Path()) -> Workspace:
    """Return the workspace of a folder, from its draftlab.yaml. Without this file, it names no target, source or data.

    Raises:
        UserError: The file has unknown keys or wrong values.
    """
    file = folder / FILE
    return read_model(Workspace, file) if file.exists() else Workspace()


def newest(runs: Path, commands: tuple[str, ...]) -> Path | None:
    """Return the newest output directory of these commands directly under `runs`, or None if there is no output.

    If several outputs have the same time, return the output of the command that comes first in `commands`.
    """
    ages: dict[Path, tuple[str, int]] = {}
    for file in runs.glob("[!.]*/draftlab.json"):
        try:
            record = provenance.read_record(file.parent)
        except UserError as error:
            note(f"{file.parent} is skipped in the search for the newest output: {error}")
            continue
        if record is not None and record.command in commands:
            ages[file.parent] = record.created, -commands.index(record.command)
    return max(ages, key=lambda path: ages[path], default=None)


def write(workspace: Workspace, folder: Path = Path(), comment: str | None = None) -> Path:
    """Write draftlab.yaml into a folder, and return its path. Raises UserError: the file cannot be written.

    comment: Comment for the top of the file.
    """
    file = folder / FILE
    fields = workspace.model_dump(mode="json", exclude_none=True)
    lines = ["defaults of draftlab's commands", *([comment] if comment else [])]
    head = "".join(f"# {line}\n" for line in lines)
    with writing(file):
        write_atomic(file, head + yaml.safe_dump(fields, sort_keys=False))
    return file
