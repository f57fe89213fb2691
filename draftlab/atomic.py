"""Writing: whole or not at all, synced, by one process at a time, and never over finished work. No torch."""

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from draftlab.console import is_main_process, note
from draftlab.errors import UserError, one_line
from draftlab.reading import parse_json, read_bytes

STATE_RECORD = "run.json"
NEW, OLD = "new", "old"  # in a working directory: what is being written, and the finished output that it replaces
UNLOCKABLE = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # of file systems that have no locks
LONGEST_LINE = 1 << 16


def write_atomic(path: Path, text: str | bytes) -> None:
    """Write a file whole or not at all. Raises OSError."""
    with replacing(path) as part:
        part.write_bytes(text.encode() if isinstance(text, str) else text)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file to write, which takes the place of path when the block ends well. Raises OSError."""
    with _working_directory(path) as work:
        yield work / NEW
        sync(work / NEW)
        (work / NEW).replace(path)
        _sync(path.parent)


def append_line(path: Path, line: str) -> None:
    """Append a line to a log, whole or not at all, in the place of the half that a kill may have left.

    Raises:
        UserError: it cannot be written.
    """
    data = line.encode() + b"\n"
    try:
        with path.open("ab+", buffering=0) as log:
            start = max(0, log.seek(0, os.SEEK_END) - LONGEST_LINE)
            log.seek(start)
            end = start + log.read(LONGEST_LINE).rfind(b"\n") + 1
            log.truncate(end)
            if log.write(data) != len(data):
                log.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


@contextlib.contextmanager
def new_directory(out: Path, *, force: bool) -> Iterator[Path]:
    """Yield a directory that becomes out when the block ends well, and vanishes when it does not.

    Raises:
        UserError: out exists with something in it and force is off, perhaps since another process was faster; or it
            cannot be written.
    """
    check_free(out, force=force)
    try:
        with _parents(out), _working_directory(out) as work:
            (work / NEW).mkdir()
            yield work / NEW
            sync(work / NEW)
            _put_in_place(work, out, force=force)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from error


def check_free(out: Path, *, force: bool, remedy: str = ", or --force to replace it") -> None:
    """Refuse to overwrite what is finished; said before the expensive part. remedy: beside another --out.

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
    if out.is_dir() and any(out.iterdir()) and not force:
        raise UserError(f"{out} exists and is not empty; choose another --out{remedy}")
    parent = _existing_parent(out)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"cannot write {out}: {parent} is not a writable directory")


def check_space(out: Path, needed: int, contents: str) -> None:
    """Raises UserError: the disk of out has not so many bytes left."""
    parent = _existing_parent(out)
    free = shutil.disk_usage(parent).free
    if needed > free:
        take = "take" if contents.endswith("s") else "takes"
        raise UserError(
            f"not enough disk: {contents} {take} {needed / 1e9:.3g} GB, and the disk of {parent} has "
            f"{free / 1e9:.3g} GB left; free some, or choose another --out"
        )


def check_writable(file: Path) -> None:
    """Raises UserError: nothing can be written in the place of a file, as a trial shows."""
    try:
        tempfile.TemporaryFile(dir=_existing_parent(file)).close()
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep other processes from making out, and remove what killed ones left beside it.

    The lock is a file with this process's number, so it is also a trial that something can be written there.

    Raises:
        UserError: another process is making it, or nothing can be written beside it.
    """
    if not is_main_process():
        yield
        return
    file = out.with_name(f".{out.name}.lock")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_parents(out))
            handle = _acquire(file, out)
        except OSError as error:
            raise UserError(f"cannot write {out}: {error.strerror}") from None
        stack.callback(os.close, handle)
        stack.callback(file.unlink, missing_ok=True)
        for path in (out, state_directory(out)):
            remove_left_overs(path)
        yield


def state_directory(out: Path) -> Path:
    """Return the directory in which an unfinished run keeps its work: beside out."""
    return out.with_name(f".{out.name}.state")


def claim_state(state: Path, identity: Mapping[str, object], *, force: bool = False) -> None:
    """Make the state directory of a run, or check that the one that exists is the same run's.

    identity: everything that decides the run's result. force: remove what another run left. One in which nothing was
    done yet belongs to nobody.

    Raises:
        UserError: it belongs to another run or is damaged, and force is off; or it cannot be written.
    """
    record, this_run = state / STATE_RECORD, json.loads(json.dumps(identity, default=str))
    for path in (state, record):
        remove_left_overs(path)
    before = _claim_of(record)
    if before == this_run:
        return
    try:
        if state.is_dir() and any(file.name != STATE_RECORD for file in state.iterdir()):
            problem = _difference(state, before, this_run)
            if not force:
                raise UserError(problem)
            note(f"{state}: removed an unfinished run (--force)")
            remove_state(state)
        state.mkdir(parents=True, exist_ok=True)
        write_atomic(record, json.dumps(this_run, indent=2, sort_keys=True))
    except OSError as error:
        raise UserError(f"cannot write {state}: {error.strerror}") from None


def run_identity(state: Path) -> str:
    """Return the hash of what decides the result of the run that claimed a state directory; '' if none has."""
    record = state / STATE_RECORD
    return hashlib.sha256(record.read_bytes()).hexdigest() if record.is_file() else ""


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
    """Remove a state directory at once, as others see it: a part of it must not be resumed."""
    if state.exists():
        with _working_directory(state) as work:
            state.rename(work / NEW)


def remove_left_overs(path: Path) -> None:
    """Remove the working directories of killed processes; give path back what one had moved away to replace it."""
    for work in path.parent.glob(f".{glob.escape(path.name)}.writing-*"):
        with contextlib.suppress(OSError):  # a running process has locked it
            handle = os.open(work, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if (work / OLD).exists() and not path.exists():
                    (work / OLD).rename(path)
                shutil.rmtree(work)
            finally:
                os.close(handle)


def sync(path: Path) -> None:
    """Write a file, or all of a directory, through to the disk, with the modes of the umask. Raises OSError."""
    for place in [*path.rglob("*"), path] if path.is_dir() else [path]:
        mode = place.lstat().st_mode
        if stat.S_ISREG(mode) and mode & 0o777 == 0o600:  # safetensors writes so
            place.chmod(0o666 & ~_umask())
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            _sync(place)


@contextlib.contextmanager
def _working_directory(path: Path) -> Iterator[Path]:
    """Yield a locked temporary directory beside path, which vanishes after the block."""
    remove_left_overs(path)
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}.writing-", dir=path.parent))
    handle = os.open(work, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # no locks here: then left-overs stay
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(handle)


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


def _put_in_place(work: Path, out: Path, *, force: bool) -> None:
    """Move what is new in work to out; a directory that was there goes only after the new one has its name."""
    if force and out.exists():
        out.rename(work / OLD)
    try:
        (work / NEW).rename(out)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise UserError(
            f"{out} was written by another process meanwhile, and stays; choose another --out, or --force to replace it"
        ) from None
    _sync(out.parent)


def _acquire(file: Path, out: Path) -> int:
    """Return the handle of the locked file."""
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 20, 0)
            os.close(handle)
            process = f" (process {holder.decode()})" if holder.isdigit() else ""
            raise UserError(
                f"{out} is being made by another draftlab{process}; wait for it, or choose another --out"
            ) from None
        except OSError as error:
            if error.errno not in UNLOCKABLE:
                raise
            note(f"{file.parent} has no locks: take care that no other process makes {out.name}")
        if file.exists() and os.path.samestat(os.fstat(handle), file.stat()):  # else its owner just removed it
            try:
                os.ftruncate(handle, 0)
                os.pwrite(handle, str(os.getpid()).encode(), 0)
            except OSError:
                file.unlink(missing_ok=True)
                os.close(handle)
                raise
            return handle
        os.close(handle)


def _claim_of(record: Path) -> dict[str, object] | None:
    """Return what a run claimed, None where that cannot be read."""
    try:
        claim = parse_json(read_bytes(record))
    except (OSError, ValueError, UserError):
        return None
    return claim if isinstance(claim, dict) else None


def _difference(state: Path, before: dict[str, object] | None, this_run: dict[str, object]) -> str:
    if before is None:
        return f"{state} holds an unfinished run, and its {STATE_RECORD} is missing or damaged; --force starts again"
    key = min(key for key in before.keys() | this_run.keys() if before.get(key) != this_run.get(key))
    was, now = (one_line(repr(settings.get(key)), 100) for settings in (before, this_run))
    return (
        f"{state} holds an unfinished run with {one_line(key, 60)} = {was}, and this run has {now}; "
        "repeat that command to resume it, or give --force to start again"
    )


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
