"""Write files and directories completely or not at all: under a temporary name, which is then renamed. No torch."""

import contextlib
import errno
import glob
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile, mkdtemp, mkstemp

from filelock import FileLock, Timeout

from draftlab.console import is_main_process, note
from draftlab.errors import UserError, one_line
from draftlab.quantities import format_bytes
from draftlab.reading import read_object

STATE_RECORD = "run.json"
UNKNOWN = "unknown revision"  # fingerprint of an input whose content is not known, such as a data set on the hub
LONGEST_LINE = 1 << 22
# a temporary file or directory beside PATH is .PATH.XXXXXXXX.draftlab, with random letters
TEMPORARY = ".draftlab"
# a temporary directory has this file, and else the new output under its name, and the output that it replaces
UNFINISHED = ".unfinished"
REPLACED = ".replaced"


class FinishedElsewhere(UserError):
    """A finished output could not be put in its place. The message says where it is."""


def write_atomic(path: Path, text: str | bytes) -> None:
    """Write a file completely or not at all. Raises OSError."""
    with replacing(path) as part:
        part.write_bytes(text.encode() if isinstance(text, str) else text)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. If the block ends without an error, this file replaces `path`.

    A process that is killed leaves the temporary file. `locked` removes it.

    Raises:
        OSError: A file cannot be written.
    """
    handle, name = mkstemp(prefix=f".{path.name}.", suffix=TEMPORARY, dir=path.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        sync(part)
        part.replace(path)
        _sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def append_line(path: Path, line: str) -> None:
    """Append a line to a log. An incomplete last line, which a killed process may leave, is removed first.

    Raises:
        UserError: The log cannot be written.
    """
    with writing(path), path.open("ab+") as log:
        start = max(0, log.seek(0, os.SEEK_END) - LONGEST_LINE)
        log.seek(start)
        log.truncate(start + log.read().rfind(b"\n") + 1)
        log.write(line.encode() + b"\n")


@contextlib.contextmanager
def new_directory(out: Path, *, force: bool) -> Iterator[Path]:
    """Yield a temporary directory, which is renamed to `out` if the block succeeds, and removed otherwise.

    If `out` is a link, the directory is written where the link leads. If the block succeeds but the directory cannot
    be renamed, it stays where it is, and the error names that place.

    force: Whether to replace a finished `out`.

    Raises:
        UserError: `out` has files and force is off, or `out` cannot be written.
        FinishedElsewhere: The finished directory cannot be renamed.
    """
    check_free(out, force=force)
    place = _place(out)
    with writing(out):
        place.parent.mkdir(parents=True, exist_ok=True)
        with _temporary_directory(place) as temporary:
            work = temporary / place.name
            work.mkdir()
            yield work
            try:
                sync(work)
                _publish(work, place, force=force)
            except OSError as error:
                with contextlib.suppress(OSError):  # so that the next run does not remove it
                    (temporary / UNFINISHED).unlink()
                raise FinishedElsewhere(
                    f"cannot write {out}: {error.strerror or error}; the finished output is in {work}: move it "
                    "to its place"
                ) from error


def _publish(work: Path, place: Path, *, force: bool) -> None:
    """Rename a finished directory to its place. Raises OSError: it cannot be renamed, and what was there stays."""
    replaced = work.with_name(REPLACED)
    if force and place.exists():
        place.rename(replaced)
    try:
        work.rename(place)
    except OSError:
        if replaced.exists():
            replaced.rename(place)
        raise
    _sync(place.parent)


@contextlib.contextmanager
def _temporary_directory(path: Path) -> Iterator[Path]:
    """Yield a new directory beside `path`, which is removed after the block, except after FinishedElsewhere."""
    made = Path(mkdtemp(prefix=f".{path.name}.", suffix=TEMPORARY, dir=path.parent))
    (made / UNFINISHED).touch()
    try:
        yield made
    except FinishedElsewhere:
        raise
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    shutil.rmtree(made, ignore_errors=True)


def check_free(out: Path, *, force: bool, remedy: str = ", or --force to replace it") -> None:
    """Check that the directory `out` can be written without overwriting finished work.

    Args:
        force: Whether a finished output may be replaced.
        remedy: Text after "choose another --out" in the error about a directory with files.

    Raises:
        UserError: `out` is a file or cannot be written, or it has files and force is off.
    """
    _check_name(out)
    with writing(out):  # the name may be too long, or a link may lead to itself
        exists = out.exists()
        place = _place(out)
    if exists and not out.is_dir():
        raise UserError(f"{out} is a file, but --out names a directory; choose another --out")
    if exists and any(out.iterdir()) and not force:
        raise UserError(f"{out} exists and is not empty; choose another --out{remedy}")
    if os.path.ismount(place):
        raise UserError(f"{out} is a mount point, which cannot be replaced; write --out {out}/NAME")
    check_writable(place)


def _check_name(out: Path) -> None:
    if out.name in ("", ".."):
        raise UserError(f"--out {out} is not the name of a new directory; write --out NAME")


def check_space(out: Path, needed: int, contents: str) -> None:
    """Check that the disk of `out` has at least `needed` free bytes.

    contents: Name of the files to write, in the plural, for the message.

    Raises:
        UserError: The disk has less free space.
    """
    parent = _existing_parent(out)
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise UserError(
            f"not enough disk for {contents}: they need {format_bytes(needed)}, and the disk of {parent} has "
            f"{format_bytes(free)} free; free some space, or choose --out on another disk"
        )


def check_writable(path: Path) -> None:
    """Check that `path` can be written, by writing a temporary file in its folder. Raises UserError: it cannot be."""
    with writing(path):
        folder = _existing_parent(path)
        NamedTemporaryFile(prefix=f".{path.name}.", suffix=TEMPORARY, dir=folder).close()


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Lock `out` against other draftlab processes during the block.

    Before the block, temporary files of killed processes are removed, and an output that was finished but not yet
    in its place is put there. After the block, the state directory is removed if it has no work, and so are empty
    folders that were made for the lock.

    Raises:
        UserError: Another process is making `out`, or the lock file cannot be written.
    """
    if not is_main_process():
        yield
        return
    _check_name(out)
    file = _beside(out, "lock")
    state = state_directory(out)
    lock = FileLock(file, blocking=False)
    made = [folder for folder in file.parents if not folder.exists()]
    with writing(out):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            raise UserError(
                f"another draftlab process is writing {out}; wait until it ends, or choose another --out"
            ) from None
    try:
        _recover(out)
        _recover(state)
        for folder in (out, state):
            remove_temporary_files(folder)
        yield
    finally:
        if [file.name for file in state.glob("*")] == [STATE_RECORD]:
            remove_state(state)
        # remove the lock file before its release: a process that waits for it notices the new inode and retries
        file.unlink(missing_ok=True)
        lock.release()
        for folder in made:
            with contextlib.suppress(OSError):  # the folder is not empty: it has an output
                folder.rmdir()


def state_directory(out: Path) -> Path:
    """Return the path of the state directory of `out`: a hidden directory beside it with unfinished work."""
    return _beside(out, "state")


def claim_state(
    state: Path,
    identity: Mapping[str, object],
    *,
    date: str = "",
    force: bool = False,
    may_fall: Sequence[str] = (),
) -> str:
    """Make the state directory of a run, or check that an existing state directory belongs to this run.

    Return the date at which the run started. A state directory without work is accepted from any run.

    Args:
        identity: All values that decide the result of the run. Runs with equal values are the same run. "inputs" are
            fingerprints by name.
        date: Date of this start, in ISO format. It is stored, and does not decide whether a run is the same.
        force: Whether to remove the work of another run.
        may_fall: Names of the values that may be smaller than those of an existing run, which then keeps its identity.
            With force, they must be equal, too.

    Raises:
        UserError: The directory belongs to another run or is damaged, and force is off. Or it has files but no record,
            or it cannot be written.
    """
    record = state / STATE_RECORD
    this_run = json.loads(json.dumps(dict(identity), default=str))
    if state.is_symlink():
        raise UserError(f"{state} is a link, but draftlab keeps unfinished work there; move or remove it")
    before = None
    with contextlib.suppress(UserError):
        before = read_object(record)
    started = str(before.pop("date", date)) if before is not None else date
    if before is not None:
        fallen = [] if force else _fallen(before, this_run, may_fall)
        if not differing(before, this_run | {name: before[name] for name in fallen}):
            for name in fallen:
                note(f"{state} continues with {name} = {this_run[name]} in place of {before[name]}")
            return started
    with writing(state):
        if any(file.name != STATE_RECORD for file in state.glob("[!.]*")):
            if not _is_file(record):
                raise UserError(
                    f"{state} is in the way: it has files, but no {STATE_RECORD} of draftlab; move or remove it"
                )
            if not force:
                raise UserError(_difference(state, before, this_run))
            note(f"removed the unfinished run in {state}, because of --force")
            remove_state(state)
        state.mkdir(parents=True, exist_ok=True)
        write_atomic(record, json.dumps(this_run | {"date": date}, indent=2, sort_keys=True))
    return date


def run_identity(state: Path) -> str:
    """Return text that identifies the run of a state directory: the hash of its record, or '' without a record."""
    record = state / STATE_RECORD
    return sha256(record.read_bytes()).hexdigest() if record.is_file() else ""


def remove_state(state: Path) -> None:
    """Remove a state directory. It is renamed first, so that no run resumes from a partly removed directory."""
    if state.exists():
        with _temporary_directory(state) as temporary:
            state.rename(temporary / REPLACED)


def sync(path: Path) -> None:
    """Flush a file, or a directory with all its files, to the disk (fsync). Raises OSError."""
    for file in [*path.rglob("*"), path] if path.is_dir() else [path]:
        mode = file.lstat().st_mode
        if stat.S_ISREG(mode) and mode & 0o777 == 0o600:  # safetensors ignores the umask
            file.chmod(0o666 & ~_umask())
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            _sync(file)


def _recover(path: Path) -> None:
    """Remove the temporary directories of killed processes beside `path`.

    If a kill came between the two renames of a replacement, the new output is finished. It is put in its place.
    """
    place = _place(path)
    for left in place.parent.glob(f".{glob.escape(place.name)}.????????{TEMPORARY}"):
        if left.is_symlink() or not _is_file(left / UNFINISHED):
            continue  # it is not ours
        finished = left / place.name
        if (left / REPLACED).exists() and finished.exists() and not place.exists():
            finished.rename(place)
        shutil.rmtree(left, ignore_errors=True)


def remove_temporary_files(folder: Path) -> None:
    """Remove the temporary files that killed processes left in a folder. Nobody may write in it meanwhile."""
    for left in folder.rglob(f".*.????????{TEMPORARY}"):
        if _is_file(left):
            left.unlink()


def _is_file(path: Path) -> bool:
    """Return whether a path is a regular file, and no link."""
    return path.is_file() and not path.is_symlink()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn any OSError of the block into a UserError, which says that `path` cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def _difference(state: Path, before: dict[str, object] | None, this_run: dict[str, object]) -> str:
    if before is None:
        return f"{state} has an unfinished run, but its {STATE_RECORD} is damaged; add --force to start again"
    changed = differing(before, this_run)
    key = next((name for name in changed if name != "inputs"), "inputs")
    if key == "inputs":
        inputs = (values.get("inputs") for values in (before, this_run))
        name = differing(*(i if isinstance(i, Mapping) else {} for i in inputs))[0]
        return (
            f"{state} has an unfinished run, but {name} has changed since that run started; restore {name} to resume "
            "that run, or add --force to start again"
        )
    was, now = (one_line(repr(settings.get(key)), 100) for settings in (before, this_run))
    return (
        f"{state} has an unfinished run with {one_line(key, 60)} = {was}, but this command has {now}; use the old "
        "value to resume that run, or add --force to start again"
    )


def differing(before: Mapping[str, object], this_run: Mapping[str, object]) -> list[str]:
    """Return the names of the settings or inputs whose values differ.

    A missing value equals null. UNKNOWN equals every value. Mappings are compared in the same way.
    """
    names = sorted({*before, *this_run})
    return [name for name in names if not _same(before.get(name), this_run.get(name))]


def _same(was: object, now: object) -> bool:
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        return not differing(was, now)
    return was == now or UNKNOWN in (was, now)


def _fallen(before: Mapping[str, object], this_run: Mapping[str, object], names: Sequence[str]) -> list[str]:
    """Return the names whose values are numbers in both runs, and smaller in this run."""
    fallen = []
    for name in names:
        was = before.get(name)
        now = this_run.get(name)
        if isinstance(was, int | float) and isinstance(now, int | float) and now < was:
            fallen.append(name)
    return fallen


def _place(path: Path) -> Path:
    """Return where a path leads if it is a link, and the path itself otherwise. Raises OSError: a link without end."""
    if not path.is_symlink():
        return path
    endless = OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    try:
        place = path.resolve()
    except RuntimeError as error:  # of Python up to 3.12
        raise endless from error
    if place.is_symlink():  # from Python 3.13 on
        raise endless
    return place


def _beside(path: Path, suffix: str) -> Path:
    place = _place(path)
    return place.with_name(f".{place.name}.{suffix}")


def _existing_parent(out: Path) -> Path:
    return next(parent for parent in out.absolute().parents if parent.exists())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)  # the umask can only be read by setting it
    os.umask(mask)
    return mask
