"""Commands that measure: scores and reports."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from draftlab import workspace
from draftlab.commands.shared import (
    Force,
    Outcome,
    command_line,
    recorded,
)
from draftlab.errors import UserError

KS, TASK_LIMIT = "1-6", 200

if TYPE_CHECKING:
    pass


def _missed(
    name: str,
    changed: bool,
    speedup: float,
    length: float,
    min_speedup: float | None,
    min_acceptance_length: float | None,
) -> list[str]:
    """What a draft falls short of, in words. changed: what was written is not the target's own."""
    missed = []
    if min_speedup is not None and changed:
        missed.append(f"{name}: its texts are not the target's own, so that no speed-up counts")
    if min_speedup is not None and speedup < min_speedup:
        missed.append(f"{name}: speed-up {speedup:.3f} is below --min-speedup {min_speedup}")
    if min_acceptance_length is not None and length < min_acceptance_length:
        missed.append(f"{name}: acceptance length {length:.3f} is below the wanted {min_acceptance_length}")
    return missed


def _servers(plain: str | None, speculative: str | None, key: Path | None) -> "tuple[Server, Server]":
    if plain is None or speculative is None:
        raise UserError(
            "a speed-up needs two servers: the target alone as --server, the target with its draft as "
            "--speculative-server"
        )
    return connect(plain, None, key), connect(speculative, None, key)


def _called(draft: list[str] | None) -> str:
    if draft is not None and len(draft) > 1:
        raise UserError(f"a server has one draft, not {len(draft)}: {', '.join(draft)}")
    return draft[0] if draft else "draft"


def _by_name(given: list[str], weights: bool) -> dict[str, Path]:
    """Directories by their names, which end with @TYPE where it was asked for so."""
    from draftlab.export.hf import parse_quantized_name

    parts = [parse_quantized_name(name) for name in given]
    found = [(hub.locate(base, weights), kind) for base, kind in parts]
    named = {hub.checkpoint_name(path) + (f"@{kind}" if kind else ""): path for path, kind in found}
    if len(named) < len(given):
        raise UserError("two drafts have the same directory name; rename one: " + ", ".join(given))
    return named
