"""The record of the command that wrote an output, with hashes of its inputs: draftlab.json. No torch."""

import contextlib
import functools
import hashlib
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean
from time import time

from pydantic import Field

from draftlab.console import note
from draftlab.errors import UserError
from draftlab.reading import FileModel, read_json_lines, read_model
from draftlab.runs.atomic import write_atomic

RECORD_FILE = "draftlab.json"
LOG_FILE = "log.jsonl"
# a directory with one of these files is a checkpoint, or the tokenizer of a checkpoint
CHECKPOINT = ("config.json", "tokenizer_config.json")
# the files of a checkpoint that decide results, besides its weights
DECIDING = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt", "*.py")
CURVE_POINTS = 100


class Record(FileModel):
    """The command, settings, inputs and package versions that made an output, and its time and memory.

    Attributes:
        config: Settings of the command.
        inputs: Fingerprints (sha256) of everything that the command read, by path or by name of a built-in source.
        notes: Further facts that the command recorded.
    """

    command: str
    config: dict[str, object]
    inputs: dict[str, str]
    versions: dict[str, str]
    created: str
    seconds: float
    peak_memory_bytes: int
    notes: dict[str, object] = Field(default_factory=dict)

    @property
    def worked_seconds(self) -> float:
        """Return the seconds of training, summed over all processes of a resumed run.

        For a command that does not train, return the seconds of the command.
        """
        seconds = self.notes.get("seconds")
        return seconds if isinstance(seconds, float) else self.seconds

    @property
    def total_seconds(self) -> float:
        """Return the seconds of the whole run. The time of processes before a resume counts, too."""
        total = self.notes.get("total_seconds")
        return max(self.seconds, self.worked_seconds, total if isinstance(total, float) else 0.0)


class CurvePoint(FileModel, extra="ignore"):
    """A point of a training curve: the mean over some steps that end at `step`, or an evaluation on held-out text.

    Attributes:
        loss: Loss in nats per token.
        acceptance: Mean probability that a drafted token is accepted, or None if there was no target.
        heldout: Whether the point is an evaluation on held-out text.
    """

    step: int = Field(ge=0, le=10**12)
    loss: float = Field(ge=-1e9, le=1e9)
    acceptance: float | None = Field(ge=0, le=1.01)
    heldout: bool


class Stage(FileModel):
    """A command that made a draft, or an output from which the draft was made.

    Attributes:
        output: Name of the directory that the command wrote.
        tokens: Number of tokens that the command read or wrote. None if unknown.
        curve: Training curve of the command.
    """

    command: str
    output: str
    seconds: float
    tokens: int | None
    curve: list[CurvePoint] = Field(default=[])


def write_record(
    directory: Path,
    command: str,
    config: dict[str, object],
    inputs: Mapping[str, str],
    started_at: float,
    **notes: object,
) -> Record:
    """Write draftlab.json into a directory, and return its content.

    Args:
        inputs: Fingerprints of everything that the command read, by path or name.
        started_at: time.time() at the start of the command.
        notes: Further facts to record.
    """
    record = Record(
        command=command,
        config=config,
        inputs=dict(inputs),
        versions=versions(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(time() - started_at, 2),
        peak_memory_bytes=peak_memory_bytes(),
        notes=notes,
    )
    write_atomic(directory / RECORD_FILE, record.model_dump_json(indent=2))
    return record


def read_record(directory: Path) -> Record | None:
    """Return the record in an output directory, or None if there is no record. Raises UserError: it cannot be read."""
    file = directory / RECORD_FILE
    return read_model(Record, file) if file.exists() else None


# commands that turn a checkpoint into a draft
MAKES_DRAFTS = ("prune", "distill")


def lineage(directory: Path, target: Path, *, own: bool = False) -> dict[Path, Stage]:
    """Return the commands that made an output and its inputs, the earliest first, by output directory.

    Commands that made the target or only converted a checkpoint are left out. So are inputs that were later
    moved or written again. If the output has no record, the result is {}.

    own: Whether to leave out the commands that made other models: the source from which a draft was cut, the target
        from which it learnt, and a checkpoint that was no draft before it was distilled.
    """
    stages: dict[Path, Stage] = {}
    latest = datetime.max.isoformat()
    _add_stages(directory.resolve(), target.resolve(), stages, before=latest, own=own)
    return stages


def _add_stages(directory: Path, target: Path, stages: dict[Path, Stage], before: str, *, own: bool) -> None:
    record = None
    with contextlib.suppress(UserError):  # another version of draftlab wrote the record
        record = read_record(directory)
    if record is None or directory in (*stages, target) or record.command == "import" or record.created > before:
        return
    for path in map(Path, record.inputs):
        if not own or not _is_checkpoint(path) or _is_earlier_draft(path, record):
            _add_stages(path.resolve(), target, stages, record.created, own=own)
    tokens = record.notes.get("tokens", record.config.get("calibration_tokens"))
    stages[directory] = Stage(
        command=record.command,
        output=directory.name,
        seconds=record.total_seconds,
        tokens=tokens if isinstance(tokens, int) else None,
        curve=_curve(directory / LOG_FILE),
    )


def _is_earlier_draft(checkpoint: Path, record: Record) -> bool:
    """Return whether a checkpoint is the draft of which a command trained a copy, and not its source or target."""
    draft = record.config.get("draft")
    if not isinstance(draft, str) or Path(draft).resolve() != checkpoint.resolve():
        return False
    with contextlib.suppress(UserError):  # another version of draftlab wrote the record
        made = read_record(checkpoint)
        return made is not None and made.command in MAKES_DRAFTS
    return False


def _is_checkpoint(path: Path) -> bool:
    return any((path / name).is_file() for name in CHECKPOINT)


def _curve(log: Path) -> list[CurvePoint]:
    """Return the points of a training log: all evaluations, and at most CURVE_POINTS means over training steps.

    Steps whose loss is not finite are left out. The result is [] if the log is missing or damaged.
    """
    if not log.exists():
        return []
    try:
        lines = [line for _, line in read_json_lines(log)]
        points = [
            CurvePoint.model_validate(line | {"heldout": "grad_norm" not in line})
            for line in lines
            if line["loss"] is not None
        ]
    except (KeyError, TypeError, ValueError, UserError):
        note(f"{log} is damaged, so reports will not show the training curve of this run")
        return []
    steps = [point for point in points if not point.heldout]
    size = -(-len(steps) // CURVE_POINTS) or 1
    curve = [point for point in points if point.heldout]
    for start in range(0, len(steps), size):
        part = steps[start : start + size]
        loss = mean(point.loss for point in part)
        curve.append(part[-1].model_copy(update={"loss": loss, "acceptance": None}))
    return curve


def fingerprint(path: Path) -> str:
    """Return the sha256 of what a path holds: a file, a checkpoint, or any other directory.

    In a checkpoint, the files that decide results count: weights, configurations, tokenizer, chat template and code. In
    another directory, all files count except the record and hidden files. Each file is read once per process.

    Raises:
        UserError: There is no such path, or a file of it cannot be read.
    """
    if not path.exists():
        raise UserError(f"{path}: there is no such file or directory")
    if path.is_file():
        return joint_sha256([path], path.parent)
    if not _is_checkpoint(path):
        return joint_sha256(path.rglob("*"), path)
    weights = "*.safetensors" if any(path.glob("*.safetensors")) else "*.bin"
    patterns = (weights, *DECIDING)
    return joint_sha256((file for pattern in patterns for file in path.glob(pattern)), path)


def joint_sha256(files: Iterable[Path], folder: Path) -> str:
    """Return the sha256 of the names in a folder and the contents of files.

    Records, hidden files and what is no regular file, such as a dangling link or a pipe, are left out.

    Raises:
        UserError: A file cannot be read.
    """
    names = {file.relative_to(folder).as_posix(): file for file in files if file.is_file()}
    digest = hashlib.sha256()
    for name, file in sorted(names.items()):
        if file.name != RECORD_FILE and not name.startswith(".") and "/." not in name:
            try:
                state = file.stat()
                sha256 = _sha256_of(file, state.st_ino, state.st_size, state.st_mtime_ns)
            except OSError as error:
                raise UserError(f"{file} cannot be read: {error.strerror}") from error
            digest.update(f"{name}\0{sha256}\n".encode())
    return digest.hexdigest()


@functools.cache
def _sha256_of(file: Path, _inode: int, _size: int, _mtime_ns: int) -> str:
    """Return the sha256 of a file. It is computed again if the file's inode, size or time have changed."""
    return file_sha256(file.resolve())


def file_sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide results. For a clone, add its git commit."""
    names = {"python": platform.python_version()}
    for package in ("draftlab", "torch", "transformers", "accelerate", "peft", "lm_eval"):
        with contextlib.suppress(PackageNotFoundError):
            names[package] = version(package)
    commit = commit_of(Path(__file__).parents[2])
    return names | ({"git": commit} if commit else {})


def commit_of(folder: Path) -> str | None:
    """Return the git commit of a clone. For the folder of an installed package, or without git, return None."""
    git = shutil.which("git")
    if git is None or not (folder / ".git").exists():
        return None
    done = subprocess.run(
        [git, "-C", str(folder), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        encoding="utf-8",
    )
    return done.stdout.strip() if done.returncode == 0 else None


def peak_memory_bytes() -> int:
    """Return the peak resident memory (RSS) of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
