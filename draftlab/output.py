"""The output directory of a command, with the record of what made it. No torch."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draftlab import provenance
from draftlab.config.base import Config
from draftlab.files import check_free, claim_state, new_directory, state_directory


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
