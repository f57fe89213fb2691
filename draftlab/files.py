"""Files: written whole or not at all, and never over finished work. No torch."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from draftlab.console import is_main_process, note
from draftlab.errors import UserError

STATE_RECORD = "run.json"


def write_atomic(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)


@contextlib.contextmanager
def new_directory(out: Path, *, force: bool) -> Iterator[Path]:
    """Give a temporary sibling that becomes out when the block ends well, and vanishes when it does not.

    Raises:
        UserError: out exists with something in it and force is off, or it cannot be written.
    """
    check_free(out, force=force)
    new = missing_folders(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        work.chmod(0o777 & ~_umask())
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from None
    try:
        yield work
        for file in work.rglob("*"):
            if file.is_file() and file.stat().st_mode & 0o777 == 0o600:  # safetensors writes so
                file.chmod(0o666 & ~_umask())
        _replace(work, out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
        forget(new)


def missing_folders(path: Path) -> list[Path]:
    """Return the folders above path that are not there, the lowest first."""
    return [folder for folder in path.parents if not folder.exists()]


def forget(folders: list[Path]) -> None:
    """Remove those of the folders in which nothing is."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def state_directory(out: Path) -> Path:
    """Return the directory in which an unfinished run keeps its work: beside out."""
    return out.with_name(f".{out.name}.state")


def claim_state(state: Path, identity: Mapping[str, object], *, force: bool = False) -> None:
    """Make the state directory of a run, or check that the one that exists is the same run's.

    identity: everything that decides the run's result. force: remove what another run left.

    Raises:
        UserError: it belongs to another run and force is off, or cannot be written.
    """
    record, this_run = state / STATE_RECORD, json.loads(json.dumps(identity, default=str))
    if record.exists():
        before = json.loads(record.read_text())
        differing = sorted(key for key in before.keys() | this_run.keys() if before.get(key) != this_run.get(key))
        if not differing:
            return
        key = differing[0]
        if not force:
            raise UserError(
                f"{state} holds an unfinished run with {key} = {before.get(key)!r}, and this run has "
                f"{this_run.get(key)!r}; repeat that command to resume it, or remove the directory to start again"
            )
        note(f"{state}: removed an unfinished run with another {key} (--force)")
        shutil.rmtree(state)
    try:
        state.mkdir(parents=True, exist_ok=True)
        write_atomic(record, json.dumps(this_run, indent=2))
    except OSError as error:
        raise UserError(f"cannot write {state}: {error.strerror}") from None


@contextlib.contextmanager
def removed_if_unused(state: Path) -> Iterator[Path]:
    """Remove a state directory after the block, if nothing but its claim is in it."""
    new = missing_folders(state)
    try:
        yield state
    finally:
        if is_main_process() and [file.name for file in state.glob("*")] == [STATE_RECORD]:
            shutil.rmtree(state)
            forget(new)


def _umask() -> int:
    mask = os.umask(0)  # there is no way to read it alone
    os.umask(mask)
    return mask


def check_free(out: Path, *, force: bool) -> None:
    """Refuse to overwrite what is finished; said before the expensive part.

    Raises:
        UserError: out is a file, or a non-empty directory and force is off.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} exists and is not a directory")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise UserError(f"{out} exists and is not empty; choose another --out, or --force to replace it")
    parent = next(p for p in out.absolute().parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"cannot write {out}: {parent} is not a writable directory")


def _replace(work: Path, out: Path) -> None:
    """Move work to out; a directory that was there goes only after the new one has its name."""
    if not out.exists():
        work.rename(out)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old.", dir=out.parent))
    out.rename(old / "was")
    work.rename(out)
    shutil.rmtree(old, ignore_errors=True)
