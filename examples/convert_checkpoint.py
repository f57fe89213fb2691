"""Make a checkpoint in another layout a Hugging Face directory: python examples/convert_checkpoint.py SOURCE OUT [BASE]

SOURCE is a GGUF file, a directory with pytorch_model.bin, or a PEFT adapter, which is merged into BASE. Everything that
draftlab does takes the directory OUT then, as transformers, vLLM and SGLang do.
"""

import sys
from pathlib import Path

import torch

from draftlab.commands import COMMANDS
from draftlab.model import checkpoint


def convert(source: str, out: Path, base: str | None = None) -> int:
    """Write the directory, load it once, and return the number of its parameters."""
    COMMANDS["import"](source=source, out=out, base=base)
    model = checkpoint.load_model(out, torch.float32)
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    print(f"{convert(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]):,} parameters")
