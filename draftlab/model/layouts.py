"""Layouts of checkpoints other than Hugging Face directories with safetensors. No torch."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["gguf", "bin", "adapter"]
NOUNS: dict[Kind, str] = {"gguf": "a GGUF file", "bin": "a checkpoint in .bin files", "adapter": "a PEFT adapter"}
BIN_FILES = ("pytorch_model.bin.index.json", "pytorch_model.bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The kind of a layout, and the file or directory that draftlab import reads."""

    kind: Kind
    path: Path

    def advice(self) -> str:
        """Return the end of a sentence that starts with 'PATH is': the noun and the command that imports it."""
        out = self.path.stem if self.kind == "gguf" else f"{self.path.absolute().name}-imported"
        command = shlex.join(["draftlab", "import", str(self.path), "--out", out])
        return f"{NOUNS[self.kind]}; first import it with: {command}"


def other_layout(path: Path) -> Layout | None:
    """Return the layout that draftlab import would read at path, or None if it is not one of those.

    A directory with a single GGUF file stands for that file, a .bin file for its directory.
    """
    if path.suffix == ".gguf":
        return Layout(kind="gguf", path=path)
    if path.suffix == ".bin":
        return other_layout(path.parent)
    if (path / "adapter_config.json").is_file():
        return Layout(kind="adapter", path=path)
    if any(path.glob("*.safetensors")):
        return None
    if any((path / name).is_file() for name in BIN_FILES):
        return Layout(kind="bin", path=path)
    files = sorted(path.glob("*.gguf"))
    return Layout(kind="gguf", path=files[0]) if len(files) == 1 else None
