"""The output directory of a command, with the record of how it was made. No torch."""

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draftlab import dates
from draftlab.config.base import Config
from draftlab.console import note
from draftlab.errors import Interrupted, UserError
from draftlab.inputs import inputs_of, paths_of
from draftlab.runs import provenance
from draftlab.runs.atomic import (
    check_free,
    check_space,
    claim_state,
    locked,
    new_directory,
    state_directory,
)

# messages of the system for a full disk, a used-up quota, and a file that is too large
FULL = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)]


LEAST_SPACE = 1 << 24  # bytes that any output may need


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The directory that a command writes, with the command's settings.

    Attributes:
        force: Whether to replace an existing output.
        dry_run: Whether to show the plan and write nothing.
        started_at, started_cpu: time.time() and time.process_time() at the start of the command.
    """

    command: str
    config: Config
    out: Path
    force: bool = False
    dry_run: bool = False
    started_at: float = field(default_factory=time.time)
    started_cpu: float = field(default_factory=time.process_time)
    _inputs: dict[str, str] = field(default_factory=dict, init=False)

    @property
    def command_line(self) -> str:
        return self.config.command_line(self.command)

    def check_free(self) -> None:
        """Check that the output can be written, and that force replaces nothing but an earlier output.

        Raises:
            UserError: `out` is a file, cannot be written, has files and force is off, or its disk is full. Or it has
                files and no draftlab.json, or holds an input or the current folder.
        """
        check_free(self.out, force=self.force)
        check_space(self.out, LEAST_SPACE, "the output")
        if not self._replaces:
            return
        if not (self.out / provenance.RECORD_FILE).is_file():
            raise UserError(
                f"{self.out} has files, but no {provenance.RECORD_FILE}: --force replaces only outputs of draftlab; "
                "choose another --out"
            )
        held = {path.resolve(): str(path) for path in paths_of(self.config)}
        held[Path.cwd()] = "the current folder"
        out = self.out.resolve()
        for path, name in held.items():
            if path.is_relative_to(out):
                raise UserError(f"--force would remove {self.out}, which holds {name}; choose another --out")

    @property
    def _replaces(self) -> bool:
        return self.force and self.out.is_dir() and any(self.out.iterdir())

    def check_space(self, needed: int, contents: str) -> None:
        """Check that the disk of the output has at least `needed` free bytes.

        contents: Name of the files to write, in the plural, for the message.

        Raises:
            UserError: The disk has less free space.
        """
        check_space(self.out, needed, contents)

    @contextlib.contextmanager
    def locked(self, *, resumes: bool = False) -> Iterator[None]:
        """Lock the output against other processes during the block.

        If the block is interrupted or the disk is full, the error says whether a repeat continues the work.

        resumes: Whether the command keeps unfinished work in the output directory itself.

        Raises:
            UserError: Another process is writing the output, the output cannot be written, or the disk is full.
            Interrupted: The process received Ctrl-C or SIGTERM.
        """
        with locked(self.out):
            try:
                yield
            except UserError:
                raise
            except KeyboardInterrupt as stop:
                if isinstance(stop, Interrupted) and not resumes:
                    raise  # the interrupted step says what it saved
                raise Interrupted(f"interrupted; {self._after_interruption(resumes)}") from None
            except Exception as error:  # safetensors and tokenizers raise errors of their own types
                reason = next((text for text in FULL if text in str(error)), None)
                if reason is None:
                    raise
                after = self._after_interruption(resumes)
                raise UserError(
                    f"cannot write {self.out}: {reason}; free disk space or raise the limit; {after}"
                ) from error

    def _after_interruption(self, resumes: bool) -> str:
        saved = self.state if self.state.exists() else self.out
        if saved == self.state or (resumes and saved.exists()):
            return f"repeat the command to continue from {saved}"
        return "no work was saved; repeat the command to start again"

    @property
    def state(self) -> Path:
        """Return the path of the state directory, in which an unfinished run keeps its work."""
        return state_directory(self.out)

    def inputs(self, paths: Sequence[Path] = ()) -> dict[str, str]:
        """Return the fingerprints of everything that the settings name, and of further files and directories.

        Call this before the work: an input that changes or vanishes while the command runs keeps its fingerprint.

        Raises:
            UserError: An input cannot be read.
        """
        if not self._inputs:
            self._inputs.update(inputs_of(self.config))
        for path in paths:
            if str(path) not in self._inputs:
                self._inputs[str(path)] = provenance.fingerprint(path)
        return dict(self._inputs)

    def claim_state(self, paths: Sequence[Path], *, may_fall: Sequence[str] = ()) -> None:
        """Make the state directory, or check that it belongs to a run with the same settings and inputs.

        A resumed run uses the date of its start.

        Args:
            paths: Checkpoints and stored outputs that the command reads.
            may_fall: Names of the settings that may be smaller than in the unfinished run.

        Raises:
            UserError: The directory belongs to another run or is damaged, and force is off. Or it cannot be written.
        """
        settings = self.config.settings() | {"command": self.command, "inputs": self.inputs(paths)}
        date = claim_state(self.state, settings, date=dates.run_date(), force=self.force, may_fall=may_fall)
        dates.resume_date(date)

    @contextlib.contextmanager
    def directory(self) -> Iterator[Path]:
        """Yield a temporary directory, which is renamed to `out` if the block ends without an error.

        Raises:
            UserError: `out` has files and force is off, or `out` cannot be written.
        """
        replaces = self._replaces
        with new_directory(self.out, force=self.force) as work:
            yield work
        if replaces:
            note(f"replaced the earlier output in {self.out}, because of --force")

    def record(self, directory: Path, **notes: object) -> None:
        """Write draftlab.json: the command, settings, hashes of the inputs, versions, time, memory and `notes`.

        The inputs are those of `inputs`. cpu_seconds in this file are the CPU seconds of all threads of this process,
        without earlier processes of a resumed run.
        """
        cpu_seconds = round(time.process_time() - self.started_cpu, 2)
        notes |= {"command_line": self.command_line, "cpu_seconds": cpu_seconds}
        notes["date"] = dates.run_date()
        provenance.write_record(
            directory, self.command, self.config.settings(), self.inputs(), self.started_at, **notes
        )
