"""The output directory of a command, with the record of what made it. No torch."""

import contextlib
import errno
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draftlab import provenance
from draftlab.atomic import check_free, check_space, claim_state, locked, new_directory, state_directory
from draftlab.config.base import Config
from draftlab.errors import Interrupted, UserError, one_line

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the quota, the largest file


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The directory that a command writes, and the settings it was called with.

    force: replace what exists. dry_run: show the plan and do nothing. started_at: time.time() of the call.
    """

    command: str
    config: Config
    out: Path
    force: bool = False
    dry_run: bool = False
    started_at: float = field(default_factory=time.time)

    @property
    def command_line(self) -> str:
        return self.config.command_line(self.command)

    def check_free(self) -> None:
        """Raises UserError: something finished is there, and force is off."""
        check_free(self.out, force=self.force)

    def check_space(self, needed: int, contents: str) -> None:
        """Raises UserError: the disk has not so many bytes left for contents; said before the expensive part."""
        check_space(self.out, needed, contents)

    @contextlib.contextmanager
    def locked(self, *, resumes: bool = False) -> Iterator[None]:
        """Keep other processes from making the same output; say after an interruption what is saved.

        resumes: the run continues in its own output.

        Raises:
            UserError: another process is making it, nothing can be written there, or the disk filled up.
            Interrupted: Ctrl-C or SIGTERM.
        """
        with locked(self.out):
            try:
                yield
            except Interrupted:
                raise
            except KeyboardInterrupt:
                raise Interrupted(f"interrupted; {self._after_interruption(resumes)}") from None
            except Exception as error:
                if not _is_full_disk(error):
                    raise
                reason, after = str(error).rpartition("] ")[2], self._after_interruption(resumes)
                raise UserError(f"cannot write {self.out}: {one_line(reason, 200)}; {after}") from error

    def _after_interruption(self, resumes: bool) -> str:
        place = self.state if self.state.exists() else self.out
        if place == self.state or (resumes and place.exists()):
            return f"the same command goes on with what is saved in {place}"
        return "nothing unfinished is kept: the same command starts again"

    @property
    def state(self) -> Path:
        """The directory in which an unfinished run keeps its work."""
        return state_directory(self.out)

    def claim_state(self, inputs: Sequence[Path], *, but: Sequence[str] = ()) -> None:
        """Make the state directory, or check that it is this run's: the same settings, but these, on the same inputs.

        Raises:
            UserError: it belongs to another run and force is off, or cannot be written.
        """
        facts = {"command": self.command, "inputs": [provenance.fingerprint(path) for path in inputs]}
        same = {name: value for name, value in self.config.settings().items() if name not in but}
        claim_state(self.state, same | facts, force=self.force)

    @contextlib.contextmanager
    def directory(self) -> Iterator[Path]:
        """Yield a temporary directory that becomes out when the block ends well."""
        with new_directory(self.out, force=self.force) as work:
            yield work

    def record(self, directory: Path, inputs: Sequence[Path], **notes: object) -> None:
        """Write draftlab.json into directory: the settings, hashes of the inputs, versions, time and memory."""
        notes |= {"command_line": self.command_line}
        provenance.write_record(directory, self.command, self.config.settings(), inputs, self.started_at, **notes)


def _is_full_disk(error: Exception) -> bool:
    from safetensors import SafetensorError  # heavy, for a command that only shows its plan

    if isinstance(error, OSError):
        return error.errno in FULL
    if isinstance(error, SafetensorError):
        return "I/O error" in str(error)
    number = re.search(r"\(os error (\d+)\)$", str(error))
    return type(error) is Exception and number is not None and int(number[1]) in FULL  # of tokenizers, in Rust
