"""Checks of what options name, before torch is imported: checkpoints, shapes, text, prompts, stored outputs, servers.

Each check takes the value of an option, and whether the files of weights must be here, too; it raises UserError.
"""

from pathlib import Path

from draftlab.errors import UserError, did_you_mean
from draftlab.model import families, hub
from draftlab.model.hf_files import check_has_tokenizer, check_length, max_model_len
from draftlab.model.tokenizer import check_files
from draftlab.trust import check_address

TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")  # of a GGUF file's matrices
MANIFEST = "manifest.json"  # of stored target outputs


def checkpoint(name: str, weights: bool) -> None:
    """Refuse what is no local checkpoint of a whole model; those of the hub are looked up later.

    A name may end in @TYPE, of rounded weights.
    """
    if hub.is_eagle_head(name):
        raise UserError(f"{name} has heads on a target and is no whole model; score --drafter eagle:heads={name}")
    hub.local(name, weights)


def checkpoint_or_head(name: str, weights: bool) -> None:
    hub.local(name, weights)


def config_only(name: str, weights: bool) -> None:
    """Refuse what is no local checkpoint; only its configuration and tokenizer are read."""
    checkpoint(name, False)


def shape(name: str, weights: bool) -> None:
    """Refuse what is neither a checkpoint nor a shape."""
    families.locate_shape(name)
    if Path(name).is_dir():
        hub.local(name, weights)


def tokenizer(name: str | Path, weights: bool) -> None:
    """Refuse a directory without a tokenizer, or another checkpoint that is not there."""
    if Path(name).is_dir():
        check_has_tokenizer(Path(name))
    else:
        hub.local(name)


def text(mixture: str, weights: bool) -> None:
    hub.check_data(mixture)


def local_text(mixture: str, weights: bool) -> None:
    """Refuse text that is not there; the hub is asked later."""
    hub.check_local_data(mixture)


def prompts(file: Path, weights: bool) -> None:
    if not file.is_file():
        raise UserError(f"{file}: No such file or directory")


def program(path: Path, weights: bool) -> None:
    if not path.is_file():
        raise UserError(f"--verify-with {path}: no such program")


def file(path: Path, weights: bool) -> None:
    if not path.exists():
        raise UserError(f"{path}: No such file or directory")


def replay(path: Path, weights: bool) -> None:
    named = path / "replay.json" if path.is_dir() else path
    if not named.is_file():
        raise UserError(f"{named}: No such file or directory; draftlab replay writes one")


def store(directory: Path, weights: bool) -> None:
    check_store(directory)


def check_store(directory: Path) -> None:
    """Raises UserError: a directory without the manifest of stored outputs."""
    if not (directory / MANIFEST).exists():
        raise UserError(
            f"{directory} is not a store of target outputs (no {MANIFEST}); draftlab outputs build makes one"
        )


def server(url: str, weights: bool) -> None:
    check_address(url)


def check_vocabularies(target: str, *drafts: str) -> None:
    """Raises UserError: the tokenizers on this disk differ."""
    place = hub.local(target)
    for draft in drafts:
        if place is not None and (directory := hub.local(draft)) is not None:
            check_files(directory, place)


def check_rounded(*drafts: str) -> None:
    """Raises UserError: DRAFT@TYPE of a directory on this disk, where TYPE is none of a GGUF file's."""
    for name in drafts:
        kind = name.rpartition("@")[2]
        if kind not in (name, *TYPES) and not Path(name).exists() and hub.local(name) is not None:
            raise UserError(f"--draft {name}: no such type{did_you_mean(kind, TYPES)}")


def check_fits(seq_len: int, *models: str | None) -> None:
    """Raises UserError: sequences are longer than the context of a model, if it is on this disk."""
    for name in filter(None, models):
        check_length(hub.local(name), seq_len)


def check_context(tokens: int, flag: str, *models: str) -> None:
    """Raises UserError: the shortest text does not fit the context of a model, if it is on this disk."""
    for name in models:
        directory = hub.local(name)
        if directory is not None and tokens > (context := max_model_len(directory)):
            raise UserError(
                f"a prompt with its answer has at least {tokens:,} tokens, which does not fit the context of {name}, "
                f"{context:,}; lower {flag}"
            )
