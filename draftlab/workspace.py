"""draftlab.yaml: what commands take when the command line does not say; and where earlier outputs are."""

from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from draftlab import provenance
from draftlab.console import note
from draftlab.errors import UserError, did_you_mean
from draftlab.files import validation_text

FILE = Path("draftlab.yaml")


class Workspace(BaseModel):
    """Names or directories of checkpoints, a data mixture, and where and how to run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    source: str
    data: str
    runs: Path = Path("runs")
    device: str = "auto"  # cuda where there is one
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # bfloat16 on cuda, else float32


# hub names; the paper's are the default where there is no workspace file
PRESETS: dict[str, Workspace] = {
    "tiny": Workspace(target="tiny", source="tiny", data="stdlib"),
    "smollm2": Workspace(target="models/smollm2-135m-instruct", source="models/smollm2-135m-instruct", data="stdlib"),
    "llama-65b": Workspace(
        target="huggyllama/llama-65b",
        source="huggyllama/llama-7b",
        data="hf:DKYoon/SlimPajama-6B",
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
    ),
}
DEFAULT = PRESETS["llama-65b"]


def preset(name: str) -> Workspace:
    """A preset.

    Raises:
        UserError: no such preset; says what else to type.
    """
    if name in PRESETS:
        return PRESETS[name]
    if Path(name).is_dir():
        raise UserError(f"{name} is no preset but a directory: draftlab init --target {name}")
    raise UserError(
        f"no preset {name!r}{did_you_mean(name, PRESETS)}; for any other checkpoint: draftlab init --target DIRECTORY, "
        "or --target ORGANISATION/NAME from the hub"
    )


def load(folder: Path = Path()) -> Workspace:
    """The workspace file of folder, or the paper's defaults where there is none.

    Raises:
        UserError: the file has unknown keys or wrong values.
    """
    file = folder / FILE
    if not file.exists():
        return DEFAULT
    try:
        return Workspace.model_validate(yaml.safe_load(file.read_text()))
    except (yaml.YAMLError, OSError) as error:
        raise UserError(f"{file} cannot be read: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        raise UserError(f"{file}: {validation_text(error)}") from None


def newest(runs: Path, commands: tuple[str, ...]) -> Path | None:
    """Return the newest output of these commands directly under runs; of one second, the first command's."""
    records = {path.parent: record for path in runs.glob("*/draftlab.json") if (record := _record(path.parent))}
    made = {
        path: (record.created, -commands.index(record.command))
        for path, record in records.items()
        if record.command in commands
    }
    return max(made, key=lambda path: made[path], default=None)


def _record(output: Path) -> provenance.Record | None:
    try:
        return provenance.read_record(output)
    except UserError as error:
        note(f"{output} is skipped: {error}")
        return None


def write(workspace: Workspace, folder: Path = Path(), comment: str | None = None) -> Path:
    file = folder / FILE
    fields = workspace.model_dump(mode="json")
    lines = ["what draftlab commands use when the command line does not say", *([comment] if comment else [])]
    file.write_text("".join(f"# {line}\n" for line in lines) + yaml.safe_dump(fields, sort_keys=False))
    return file
