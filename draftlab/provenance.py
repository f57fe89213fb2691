"""draftlab.json, the record of the command that wrote an output, with hashes of its inputs. No torch."""

import contextlib
import hashlib
import json
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean
from time import time

from pydantic import Field

from draftlab.atomic import write_atomic
from draftlab.console import note
from draftlab.errors import UserError
from draftlab.reading import FileModel, parse_json, read_json_lines

RECORD_FILE, LOG_FILE = "draftlab.json", "log.jsonl"
CURVE_POINTS = 100


class Record(FileModel):
    """The command, settings, inputs and versions that made an output."""

    command: str
    config: dict[str, object]
    inputs: dict[str, str]  # path -> sha256 of its weights or text
    versions: dict[str, str]
    created: str
    seconds: float
    peak_memory_bytes: int
    notes: dict[str, object] = Field(default_factory=dict)

    @property
    def worked_seconds(self) -> float:
        """Return the seconds of the work itself where it says so, as trainings do, else of the command."""
        seconds = self.notes.get("seconds")
        return seconds if isinstance(seconds, float) else self.seconds

    @property
    def total_seconds(self) -> float:
        """Return the seconds of all processes, where a killed run was resumed."""
        total = self.notes.get("total_seconds")
        return max(self.seconds, self.worked_seconds, total if isinstance(total, float) else 0.0)


class CurvePoint(FileModel, extra="ignore"):
    """A point of a training curve: the mean of some steps up to this one, or an evaluation on held-out text."""

    step: int = Field(ge=0, le=10**12)  # these limits are what plots can show
    loss: float = Field(ge=-1e9, le=1e9)  # nats per token
    acceptance: float | None = Field(ge=0, le=1.01)  # on held-out text, per token; None without a target
    heldout: bool


class Stage(FileModel):
    """One of the commands that made a draft. tokens: read or written by it; None where its record does not say."""

    command: str
    output: str  # name of its directory
    seconds: float
    tokens: int | None
    curve: list[CurvePoint] = Field(default=[])  # of training


def write_record(
    directory: Path, command: str, config: dict[str, object], inputs: Sequence[Path], started_at: float, **notes: object
) -> Record:
    """Write draftlab.json. started_at: time.time() at the start of the command."""
    record = Record(
        command=command,
        config=plain(config),
        inputs={str(path): fingerprint(path) for path in inputs},
        versions=versions(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        seconds=round(time() - started_at, 2),
        peak_memory_bytes=peak_memory_bytes(),
        notes=notes,
    )
    write_atomic(directory / RECORD_FILE, record.model_dump_json(indent=2))
    return record


def read_record(directory: Path) -> Record | None:
    """Return the record of an output, or None if it has none. Raises UserError: it cannot be read."""
    file = directory / RECORD_FILE
    try:
        return Record.model_validate(parse_json(file.read_bytes()))
    except OSError:
        return None
    except ValueError:
        raise UserError(f"{file} is not a draftlab record: truncated, or of another version; remove it") from None


def lineage(directory: Path, target: Path) -> list[Stage] | None:
    """Return the commands that made an output, the first one first; None if it has no record.

    Those that made the target or only converted a checkpoint are left out, as is what was moved or rewritten since.
    """
    stages: dict[Path, Stage] = {}
    _add_stages(directory.resolve(), target.resolve(), stages, before=datetime.max.isoformat())
    return list(stages.values()) or None


def _add_stages(directory: Path, target: Path, stages: dict[Path, Stage], before: str) -> None:
    record = None
    with contextlib.suppress(UserError):  # a record of another version
        record = read_record(directory)
    if record is None or directory in (*stages, target) or record.command == "import" or record.created > before:
        return
    for path in record.inputs:
        _add_stages(Path(path).resolve(), target, stages, record.created)
    tokens = record.notes.get("tokens", record.config.get("calibration_tokens"))
    stages[directory] = Stage(
        command=record.command,
        output=directory.name,
        seconds=record.total_seconds,
        tokens=tokens if isinstance(tokens, int) else None,
        curve=_curve(directory / LOG_FILE),
    )


def _curve(log: Path) -> list[CurvePoint]:
    """Return the points of a run's log, at most CURVE_POINTS of its steps and of its evaluations; [] if it has none."""
    if not log.exists():
        return []
    try:
        lines = [line for _, line in read_json_lines(log)]
        points = [CurvePoint.model_validate(line | {"heldout": "grad_norm" not in line}) for line in lines]
    except (TypeError, ValueError, UserError):
        note(f"{log} is damaged, so that reports will lack this run's curve")
        return []
    steps, evals = ([p for p in points if p.heldout is heldout] for heldout in (False, True))
    size, every = (-(-len(kind) // CURVE_POINTS) or 1 for kind in (steps, evals))
    parts = [steps[start : start + size] for start in range(0, len(steps), size)]
    means = [
        CurvePoint(step=part[-1].step, loss=mean(p.loss for p in part), acceptance=None, heldout=False)
        for part in parts
    ]
    return means + evals[:1] + evals[:0:-every][::-1]


def plain(settings: dict[str, object]) -> dict[str, object]:
    """Return settings as JSON reads them back, so that records compare equal."""
    return json.loads(json.dumps(settings, default=str))


def fingerprint(path: Path) -> str:
    """Return the sha256 of a file, or of the files of a directory that decide results: configs, weights, manifests.

    Raises:
        UserError: no such path.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file or directory")
    digest = hashlib.sha256()
    names = ("config.json", "tokenizer.json", "score.json", "manifest.json", "head_ids.json", "adapter_config.json")
    if path.is_dir():
        suffix = ".safetensors" if any(path.glob("*.safetensors")) else ".bin"
        files = [f for f in sorted(path.iterdir()) if f.suffix == suffix or f.name in names]
    else:
        files = [path]
    for file in files:
        digest.update(file.name.encode())
        _add(digest, file)
    return digest.hexdigest()


def file_sha256(file: Path) -> str:
    digest = hashlib.sha256()
    _add(digest, file)
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", file: Path) -> None:
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)


def versions() -> dict[str, str]:
    """Return the versions of Python and the packages that decide results, and the commit of a clone."""
    names = {"python": platform.python_version()}
    for package in ("draftlab", "torch", "transformers", "accelerate", "peft", "lm_eval"):
        with contextlib.suppress(PackageNotFoundError):
            names[package] = version(package)
    commit = _commit(Path(__file__).parents[1])
    return names | ({"git": commit} if commit else {})


def _commit(folder: Path) -> str | None:
    """Return the commit of a clone; None without git and for an installed package, even inside another clone."""
    git = shutil.which("git")
    if git is None or not (folder / ".git").exists():
        return None
    done = subprocess.run([git, "-C", str(folder), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def peak_memory_bytes() -> int:
    """Return the largest resident size of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
