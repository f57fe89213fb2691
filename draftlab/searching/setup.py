"""Checks and choices of a search before anything is made: text, heads, and the mode that it runs in."""

from pathlib import Path
from typing import Any

from draftlab.config.search import SearchConfig
from draftlab.errors import UserError
from draftlab.model import checkpoint, eagle, hub, llama
from draftlab.model.decoder import check_mode, resolve_mode
from draftlab.target_outputs.store import read_manifest


def check_text(config: SearchConfig) -> None:
    """Raises UserError: text that is not there, or stored outputs that nothing can be distilled from."""
    if config.outputs is None or config.prompt_file is None:
        hub.check_data(config.data)
    if config.outputs is not None and read_manifest(config.outputs).top_logprobs == 0:
        raise UserError(f"--outputs {config.outputs}: it stores no probabilities; build it with --use distill")


def check_heads(config: SearchConfig, target: Path) -> dict[str, int]:
    """Return the parameters of each EAGLE-3 head.

    Raises:
        UserError: two of one name, or a head that the target or the engine does not run.
    """
    if config.drafter:
        llama.check_supported(target)
    names = [hub.checkpoint_name(path) for path in (target, *config.heads.values())]
    if len(set(names)) < 1 + len(config.drafter):
        raise UserError(f"--drafter: two directories have the same name, rename one: {', '.join(names)}")
    return {name: eagle.check(head, target).params() for name, head in config.heads.items()}


def engine_settings(config: SearchConfig, models: list[Path]) -> dict[str, Any]:
    """Return how the engine runs in every step."""
    device = checkpoint.resolve_device(config.device)
    dtype = checkpoint.resolve_dtype(config.dtype, device)
    mode = resolve_mode(config.mode, device, dtype, models)
    check_mode(mode, device, dtype)
    name = checkpoint.dtype_name(dtype)
    return {"device": config.device, "dtype": name, "mode": mode, "threads": config.threads}
