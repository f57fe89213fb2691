"""The model card (README.md) of an exported draft. Torch is not imported."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from draftlab.console import note
from draftlab.errors import UserError
from draftlab.reading import command_words
from draftlab.results.ranking import score_warnings
from draftlab.results.score import Score
from draftlab.runs.provenance import Record, read_record
from draftlab.shell import typed
from draftlab.trust import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The facts that a model card states."""

    name: str
    target: str
    kind: str  # draft model or EAGLE-3 head
    summary: str  # size and requirements of the draft
    commands: Sequence[str]  # commands that made the draft, in order
    # acceptance on held-out text before and after distillation
    heldout: tuple[float, float] | None
    scores: Sequence[Score]
    script: tuple[str, str] | None  # name and text of the start script
    verified: str  # result of running the export in its server; "" if it was not run

    def text(self) -> str:
        """Return the text of the card. Control characters in all values are escaped."""
        environment = Environment(
            loader=PackageLoader("draftlab.exporting"),
            undefined=StrictUndefined,
            keep_trailing_newline=True,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=lambda value: printable(str(value)),
        )
        local = Path(self.target).is_dir()
        # for a local folder, the last part of its path
        base_model = Path(self.target).resolve().name if local else self.target
        plain = re.fullmatch(r"[\w./-]*[A-Za-z][\w./-]*", base_model)
        script = self.script[1] if self.script else ""
        if local:
            script = script.replace(str(Path(self.target).absolute()), base_model)
        return environment.get_template("README.md.j2").render(
            card=self,
            base_model=base_model,
            yaml_name=base_model if plain else json.dumps(base_model),
            is_local=local,
            warnings=score_warnings(self.scores) if self.scores else [],
            script_lines=script.rstrip().split("\n"),
        )


def history(draft: Path) -> tuple[list[str], tuple[float, float] | None]:
    """Return the commands that made a draft, the earliest first, and its held-out acceptance before and after distill.

    If a record is damaged or of another version of draftlab, return no commands and no acceptance.
    """
    try:
        return _commands(draft.resolve(), set()), _heldout(draft)
    except UserError as error:
        note(f"the model card does not list the commands that made {draft}: {error}")
        return [], None


def _commands(output: Path, seen: set[Path]) -> list[str]:
    """Return the commands that made an output, the earliest first. Commands that left no record are missing.

    seen: Outputs whose commands are known. Outputs are added, so a record that names itself is read once.
    """
    record = read_record(output) if output.is_dir() and output not in seen else None
    seen.add(output)
    if record is None:
        return []
    before = [line for path in record.inputs for line in _commands(Path(path).resolve(), seen)]
    return list(dict.fromkeys([*before, _typed(record)]))


def _typed(record: Record) -> str:
    """Return the command line of a record for readers of the card.

    Source, target and data from draftlab.yaml are added, because readers do not have this file. Absolute paths are
    shortened to their last part, because their folders exist only on this machine.
    """
    words = command_words(str(record.notes.get("command_line", f"draftlab {record.command}")))
    for name in ("source", "target", "data"):
        value = record.config.get(name)
        if value is not None and f"--{name}" not in words and str(value) not in words:
            words += [f"--{name}", str(value)]
    return typed(*(Path(word).name if Path(word).is_absolute() else word for word in words))


def _heldout(draft: Path) -> tuple[float, float] | None:
    record = read_record(draft)
    found = []
    for name in ("before", "after"):
        evaluation = record.notes.get(name) if record is not None else None
        acceptance = evaluation.get("acceptance") if isinstance(evaluation, Mapping) else None
        if not isinstance(acceptance, float):
            return None
        found.append(acceptance)
    before, after = found
    return before, after
