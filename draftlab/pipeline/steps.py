"""The steps of auto: commands with their settings, run as recipe steps in one directory, and what they recorded."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from draftlab import provenance
from draftlab.atomic import write_atomic
from draftlab.config.auto import AutoConfig
from draftlab.pipeline.plan import Plan
from draftlab.provenance import Record
from draftlab.recipe import is_done, read_step, run_step

RECIPE = "recipe.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Steps in one directory. Each is made once; their records say what was spent, also before a kill."""

    config: AutoConfig
    plan: Plan
    folder: Path
    entries: list[dict[str, dict[str, Any]]] = field(default_factory=list)  # as a recipe has them
    outputs: list[tuple[str, Path]] = field(default_factory=list)  # of each entry, with the step of the plan

    def make(self, step: str, name: str, command: str, **settings: Any) -> Path:
        """Run a command unless its output is there, and return that. step: of the plan. name: of the output."""
        entry = self._entry(name, command, settings)
        finish = datetime.now() + timedelta(minutes=max(0.0, self.plan.minutes - self.spent / 60))
        number = 1 + [each.name for each in self.plan.steps].index(step)
        label = f"[{number}/{len(self.plan.steps)}] {name}: {command}, all done at about {finish:%H:%M}"
        run_step(read_step(entry, f"auto: {name}"), label)
        self.entries.append(entry)
        self.outputs.append((step, self.folder / name))
        content = yaml.safe_dump({"steps": self.entries}, sort_keys=False)
        write_atomic(self.folder / RECIPE, f"# What draftlab auto ran, for draftlab run.\n{content}")
        return self.folder / name

    def is_done(self, name: str, command: str, **settings: Any) -> bool:
        """Return whether the output is there, made by this very command."""
        return is_done(read_step(self._entry(name, command, settings), f"auto: {name}"))

    def record(self, output: Path) -> Record:
        record = provenance.read_record(output)
        assert record is not None
        return record

    @property
    def spent(self) -> float:
        """Return the seconds of all steps so far."""
        return sum(self.seconds_by_step().values())

    def seconds_by_step(self) -> dict[str, float]:
        seconds: dict[str, float] = {}
        for step, output in self.outputs:
            seconds[step] = seconds.get(step, 0.0) + self.record(output).total_seconds
        return seconds

    def seconds_for(self, step: str) -> float:
        return self.plan.seconds_for(step, self.spent)

    def rate(self, output: Path) -> float:
        """Return the tokens per second of an output's command, from its record."""
        record = self.record(output)
        return float(str(record.notes["tokens"])) / max(record.worked_seconds, 1e-3)

    def _entry(self, name: str, command: str, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Return a step as a recipe has it."""
        complete = self._running(command) | settings | {"out": self.folder / name}
        return {command: {key: _plain(value) for key, value in complete.items()}}

    def _running(self, command: str) -> dict[str, Any]:
        """Return the settings of this run that a command has as well."""
        from draftlab.commands import COMMANDS

        fields, config = COMMANDS[command].config.model_fields, self.config
        shared: dict[str, Any] = {
            "seed": config.seed, "trust_remote_code": config.trust_remote_code or None, "server_rule": config.rule,
        }  # fmt: skip
        if command != "export":  # whose device belongs to the verification
            shared["device"] = config.device
        if command in ("search", "score", "replay"):
            shared |= {"dtype": config.dtype, "threads": config.threads}
        return {name: value for name, value in shared.items() if name in fields and value is not None}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else [_plain(v) for v in value] if isinstance(value, list) else value
