"""Steps of a recipe and of the commands `search` and `auto`: commands with their settings.

A step whose output is finished is skipped.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from draftlab.commands import COMMANDS
from draftlab.commands.base import Command, Outcome
from draftlab.config.base import Config, OutputConfig
from draftlab.config.kinds import KindSpec
from draftlab.console import note
from draftlab.errors import UserError, did_you_mean, one_line
from draftlab.inputs import inputs_of
from draftlab.runs import provenance, workspace
from draftlab.runs.atomic import differing
from draftlab.runs.provenance import Record


@dataclass(frozen=True)
class CommandStep:
    """A command with its settings, as in an entry of a recipe.

    where: Start of an error message about a setting.
    """

    command: Command
    settings: dict[str, Any]
    where: str

    @cached_property
    def config(self) -> Config:
        return self.command.config.build(self.settings, self.where)

    @cached_property
    def resolved(self) -> Config:
        return self.config.resolved()

    @cached_property
    def out(self) -> Path | None:
        if not isinstance(self.config, OutputConfig):
            return None
        name = "" if self.config.out else self._default_name()
        return self.config.out or workspace.load().runs / name

    def _default_name(self) -> str:
        assert isinstance(self.resolved, OutputConfig)
        return self.command.planned(self.resolved, False).name

    @property
    def entry(self) -> dict[str, dict[str, Any]]:
        """Return the step as an entry of a recipe."""
        return {self.command.name: {name: _plain(value) for name, value in self.settings.items()}}

    def __str__(self) -> str:
        return f"{self.command.name} {self.out or ''}".rstrip()

    def is_done(self) -> bool:
        """Return whether the output exists and was made by this command, with the same settings and inputs.

        A setting that an older version of draftlab did not record is taken to have its default value.
        """
        return self._same_settings and self._changed_input is None

    @property
    def _record(self) -> Record | None:
        """Return the record of the finished output, or None if this command did not write it."""
        record = provenance.read_record(self.out) if self.out is not None else None
        return record if record is not None and record.command == self.command.name else None

    @property
    def _same_settings(self) -> bool:
        try:
            recorded = self._record and self.command.config.build(self._record.config)
        except UserError:
            return False
        return recorded is not None and recorded.settings() == self.resolved.settings()

    @property
    def _changed_input(self) -> str | None:
        """Return the first input whose content differs from what the finished output was made of, or None."""
        if self._record is None:
            return None
        read = self._record.inputs
        now = {}
        with contextlib.suppress(UserError):  # a text is missing
            now = inputs_of(self.resolved)
        for name in read.keys() - now.keys():
            now[name] = provenance.fingerprint(Path(name)) if Path(name).exists() else ""
        return next(iter(differing(read, now)), None)

    def run(self, label: str) -> Outcome:
        """Print the label, and run the command unless its output is finished.

        Raises:
            UserError: The output is finished, but was made of inputs that have changed. Or the command fails.
        """
        if self.is_done():
            note(f"{label}: already done")
            return Outcome(path=self.out, show=[str(self.out)], data={"path": str(self.out)})
        if self._same_settings:
            raise UserError(
                f"{label}: {self._changed_input} has changed since {self.out} was made of it; remove {self.out}, or "
                "set another out, to run this step again"
            )
        note(label)
        return self.command.run(self.resolved)


def step_of(name: str, settings: Mapping[str, Any], shared: Mapping[str, Any], where: str) -> CommandStep:
    """Return the step that runs a command with these settings.

    shared: Settings for all commands. Settings that this command does not have are ignored.

    Raises:
        UserError: A setting is wrong.
    """
    fields = COMMANDS[name].config.model_fields
    known = {key: value for key, value in shared.items() if key in fields and value is not None}
    return read_step({name: {**known, **settings}}, where)


def read_step(content: Mapping[str, dict[str, Any] | None], where: str) -> CommandStep:
    """Parse an entry of a recipe, and check its settings. where: Start of an error message.

    Raises:
        UserError: There is no such command, or a setting is wrong.
    """
    if len(content) != 1:
        raise UserError(f"{where}: a step must be one command with its settings, but is {one_line(content, 80)}")
    name, settings = next(iter(content.items()))
    if name not in COMMANDS:
        raise UserError(f"{where}: there is no command {name!r}{did_you_mean(name, COMMANDS)}")
    step = CommandStep(COMMANDS[name], settings or {}, f"{where} ({name}): ")
    step.config.settings()  # raises for bad settings
    return step


def _plain(value: object) -> object:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path | KindSpec) else value
