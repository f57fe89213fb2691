"""Writing: whole or not at all, synced, by one process at a time, and never over finished work. No torch."""

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile

from filelock import FileLock, Timeout

from draftlab.console import is_main_process, note
from draftlab.errors import UserError, one_line
from draftlab.reading import read_object

STATE_RECORD = "run.json"
LONGEST_LINE = 1 << 16


def write_atomic(path: Path, text: str | bytes) -> None:
    """Write a file whole or not at all. Raises OSError."""
    with replacing(path) as part:
        part.write_bytes(text.encode() if isinstance(text, str) else text)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file to write, which takes the place of path when the block ends well. Raises OSError.

    Its name is the same each time, so that the next writer replaces what a killed process left.
    """
    part = _new(path)
    try:
        yield part
        sync(part)
        part.replace(path)
        _sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def append_line(path: Path, line: str) -> None:
    """Append a line to a log, in the place of the half line that a kill or a full disk may have left.

    Raises:
        UserError: it cannot be written.
    """
    try:
        with path.open("ab+") as log:
            start = max(0, log.seek(0, os.SEEK_END) - LONGEST_LINE)
            log.seek(start)
            log.truncate(start + log.read().rfind(b"\n") + 1)
            log.write(line.encode() + b"\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


@contextlib.contextmanager
def new_directory(out: Path, *, force: bool) -> Iterator[Path]:
    """Yield a directory that becomes out when the block ends well, and vanishes when it does not.

    Raises:
        UserError: out exists with something in it and force is off, or it cannot be written.
    """
    check_free(out, force=force)
    try:
        with _parents(out), _left_overs_removed(out):
            _new(out).mkdir()
            yield _new(out)
            sync(_new(out))
            if force and out.exists():
                out.rename(_old(out))
            _new(out).rename(out)
            _sync(out.parent)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from error


def check_free(out: Path, *, force: bool, remedy: str = ", or --force to replace it") -> None:
    """Refuse to overwrite finished work; called before the expensive part. remedy: what helps besides another --out.

    Raises:
        UserError: out is a file, or a non-empty directory and force is off; or it cannot be written.
    """
    if out.name in ("", ".."):
        raise UserError(f"--out {out}: name a directory to make")
    try:
        exists = out.exists()
    except OSError as error:  # a name that is too long
        raise UserError(f"cannot write {out}: {error.strerror}") from None
    if exists and not out.is_dir():
        raise UserError(f"{out} exists and is not a directory")
    if exists and any(out.iterdir()) and not force:
        raise UserError(f"{out} exists and is not empty; choose another --out{remedy}")
    parent = _existing_parent(out)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"cannot write {out}: {parent} is not a writable directory")


def check_space(out: Path, needed: int, contents: str) -> None:
    """Raises UserError: the disk of out has fewer than `needed` bytes left for the contents."""
    parent = _existing_parent(out)
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise UserError(
            f"not enough disk for {contents}: {needed / 1e9:.3g} GB are needed, and the disk of {parent} has "
            f"{free / 1e9:.3g} GB left; free some, or choose another --out"
        )


def check_writable(file: Path) -> None:
    """Raises UserError: nothing can be written in the place of a file, as a trial shows."""
    try:
        TemporaryFile(dir=_existing_parent(file)).close()
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep other processes from making out, and remove what killed ones left beside it.

    Raises:
        UserError: another process is making it, or nothing can be written beside it.
    """
    if not is_main_process():
        yield
        return
    file = _beside(out, "lock")
    lock = FileLock(file, blocking=False)
    with _parents(out):
        try:
            lock.acquire()
        except Timeout:
            raise UserError(f"{out} is being made by another draftlab; wait for it, or choose another --out") from None
        except OSError as error:
            raise UserError(f"cannot write {out}: {error.strerror}") from None
        try:
            with _left_overs_removed(out), _left_overs_removed(state_directory(out)):
                yield
        finally:
            file.unlink(missing_ok=True)  # while it is locked: whoever opened it finds another inode, and tries again
            lock.release()


def state_directory(out: Path) -> Path:
    """Return the directory in which an unfinished run keeps its work, next to out."""
    return _beside(out, "state")


def claim_state(state: Path, identity: Mapping[str, object], *, force: bool = False) -> None:
    """Make the state directory of a run, or check that the one that exists is the same run's.

    identity: everything that decides the run's result. force: remove what another run left. A state directory without
    work can be claimed by any run.

    Raises:
        UserError: it belongs to another run or is damaged, and force is off; or it cannot be written.
    """
    record, this_run = state / STATE_RECORD, json.loads(json.dumps(identity, default=str))
    _recover(state)
    before = None
    with contextlib.suppress(UserError):
        before = read_object(record)
    if before == this_run:
        return
    try:
        if any(file.name != STATE_RECORD for file in state.glob("[!.]*")):
            if not force:
                raise UserError(_difference(state, before, this_run))
            note(f"{state}: removed an unfinished run (--force)")
            remove_state(state)
        state.mkdir(parents=True, exist_ok=True)
        write_atomic(record, json.dumps(this_run, indent=2, sort_keys=True))
    except OSError as error:
        raise UserError(f"cannot write {state}: {error.strerror}") from None


def run_identity(state: Path) -> str:
    """Return the hash of what decides the result of the run that claimed a state directory; '' if none has."""
    record = state / STATE_RECORD
    return sha256(record.read_bytes()).hexdigest() if record.is_file() else ""


@contextlib.contextmanager
def removed_if_unused(state: Path) -> Iterator[Path]:
    """Remove a state directory after the block, if nothing but its claim is in it."""
    with _parents(state):
        try:
            yield state
        finally:
            if is_main_process() and [file.name for file in state.glob("*")] == [STATE_RECORD]:
                remove_state(state)


def remove_state(state: Path) -> None:
    """Remove a state directory at once, as other processes see it: a part of it must not be resumed."""
    if state.exists():
        with _left_overs_removed(state):
            state.rename(_new(state))


def sync(path: Path) -> None:
    """Write a file, or all of a directory, through to the disk, with the modes of the umask. Raises OSError."""
    for file in [*path.rglob("*"), path] if path.is_dir() else [path]:
        mode = file.lstat().st_mode
        if stat.S_ISREG(mode) and mode & 0o777 == 0o600:  # safetensors writes so
            file.chmod(0o666 & ~_umask())
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            _sync(file)


@contextlib.contextmanager
def _left_overs_removed(path: Path) -> Iterator[None]:
    """Remove unfinished work next to path, before and after the block; give path back what was to be replaced."""
    try:
        _recover(path)
        yield
    finally:
        _recover(path)


def _recover(path: Path) -> None:
    if _old(path).exists() and not path.exists():
        _old(path).rename(path)
    for work in (_new(path), _old(path)):
        if work.exists():
            shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _parents(path: Path) -> Iterator[None]:
    """Make the folders above path, and remove those in which nothing is after the block. Raises OSError."""
    new = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for folder in new:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _difference(state: Path, before: dict[str, object] | None, this_run: dict[str, object]) -> str:
    if before is None:
        return f"{state} has an unfinished run, and its {STATE_RECORD} is missing or damaged; --force starts again"
    key = min(key for key in before.keys() | this_run.keys() if before.get(key) != this_run.get(key))
    was, now = (one_line(repr(settings.get(key)), 100) for settings in (before, this_run))
    return (
        f"{state} has an unfinished run with {one_line(key, 60)} = {was}, and this run has {now}; "
        "repeat that command to resume it, or give --force to start again"
    )


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{suffix}")


def _new(path: Path) -> Path:
    return _beside(path, "new")


def _old(path: Path) -> Path:
    return _beside(path, "old")


def _existing_parent(out: Path) -> Path:
    return next(parent for parent in out.absolute().parents if parent.exists())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)  # there is no way to read it alone
    os.umask(mask)
    return mask
