"""Design, prune, distil and score draft models for speculative decoding.

Each function of this package runs the command with the same name. The command's options are keyword arguments, for
example draftlab.prune(source="tiny", layers=3). A function returns the command's outcome, with the library's result as
its attribute `result`, and raises draftlab.UserError for anything that the caller can fix.
draftlab.Checkpoint.open(NAME) reads a checkpoint: shape, tensors, tokenizer.
"""

from typing import Any

from draftlab.errors import UserError, check_platform

__version__ = "0.1.0"

_COMMANDS = (
    "auto",
    "check",
    "design",
    "distill",
    "export",
    "init",
    "outputs_build",
    "predict",
    "profile",
    "prune",
    "replay",
    "report",
    "score",
    "search",
)
__all__ = ["Checkpoint", "UserError", "__version__", *_COMMANDS]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a command's function on its first use, so that `import draftlab` stays cheap."""
    if name == "Checkpoint" or name in _COMMANDS:
        check_platform()
    if name == "Checkpoint":
        from draftlab.model.checkpoint import Checkpoint

        return globals().setdefault(name, Checkpoint)
    if name not in _COMMANDS:
        raise AttributeError(f"module 'draftlab' has no attribute {name!r}")
    from draftlab.functions import library_function

    return globals().setdefault(name, library_function(name))


def __dir__() -> list[str]:
    return sorted(__all__)
