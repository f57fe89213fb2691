"""The model card (README.md) of an exported draft. Torch is not imported."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftlab.console import note
from draftlab.errors import UserError
from draftlab.provenance import Record, read_record
from draftlab.results.ranking import score_warnings
from draftlab.results.score import Score
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
        tag = self.kind.lower().replace(" ", "-")
        plain = re.fullmatch(r"[\w./-]*[A-Za-z][\w./-]*", self.base_model)
        base_model = self.base_model if plain else json.dumps(self.base_model)
        head = ["---", f"base_model: {base_model}", f"tags: [speculative-decoding, {tag}]", "---"]
        parts = [
            head,
            [f"# {self.name}"],
            self._summary(),
            self._results(),
            self._usage(),
            self._training(),
        ]
        return "\n\n".join("\n".join(map(printable, part)) for part in parts if part) + "\n"

    @property
    def is_local(self) -> bool:
        """Return whether the target is a local folder."""
        return Path(self.target).is_dir()

    @property
    def base_model(self) -> str:
        """Return the name of the target on the hub. For a local folder, return the last part of its path."""
        return Path(self.target).resolve().name if self.is_local else self.target

    def _summary(self) -> list[str]:
        article = "An" if self.kind[0] in "AE" else "A" if self.kind[-1] != "s" else ""
        local = (
            " The target was a local folder of this name; replace it in `base_model` by the target's name on the hub."
            if self.is_local
            else ""
        )
        return [
            f"{article} {self.kind} for speculative decoding with **{self.base_model}**. It proposes tokens, the "
            f"target verifies them, and the output is the target's own.{local}".lstrip(),
            "",
            self.summary,
        ]

    def _results(self) -> list[str]:
        lines = [line for score in self.scores for line in _score_lines(score)]
        lines += [f"* {text}." for text in score_warnings(self.scores)] if self.scores else []
        if self.heldout is not None:
            before, after = self.heldout
            lines.append(
                f"* Acceptance per token on held-out text: {before:.3f} before distillation, {after:.3f} after."
            )
        if self.verified:
            lines.append(f"* Verified after export: {self.verified}.")
        return [
            "## Results",
            "",
            *(lines or ["Not measured yet: run `draftlab score` against the target."]),
        ]

    def _usage(self) -> list[str]:
        if self.script is None:
            return []
        name, text = self.script
        if self.is_local:
            text = text.replace(str(Path(self.target).absolute()), self.base_model)
        return [
            "## Usage",
            "",
            f"`{name}` in this directory:",
            "",
            "```",
            *text.rstrip().split("\n"),
            "```",
        ]

    def _training(self) -> list[str]:
        return ["## How it was made", "", "```", *self.commands, "```"] if self.commands else []


TERMS = "Speed-ups are over the target alone, at a K chosen on other prompts, with 95% intervals over prompts."


def _score_lines(score: Score) -> list[str]:
    k, c = score.best_k, score.conditions
    return [
        f"* {score.verdict()} {score.acceptance(k).draft_acceptance_rate:.0%} of drafted tokens were accepted.",
        f"  Measured on {c.prompts} prompts of {c.data}, {c.decoding}, on {c.device}, {score.created[:10]}. "
        f"How both sides ran: {c.precision}.",
        f"  {TERMS}",
        f"  `{score.command}`",
    ]


def history(draft: Path) -> tuple[list[str], tuple[float, float] | None]:
    """Return the commands that made a draft, the earliest first, and its held-out acceptance before and after distill.

    If a record is damaged or of another version of draftlab, return no commands and no acceptance.
    """
    try:
        return _commands(draft), _heldout(draft)
    except UserError as error:
        note(f"the model card does not list the commands that made {draft}: {error}")
        return [], None


def _commands(draft: Path) -> list[str]:
    """Return the commands that made a draft, the earliest first. Commands that left no record are missing."""
    record = read_record(draft) if draft.is_dir() else None
    if record is None:
        return []
    before = [line for path in record.inputs for line in _commands(Path(path))]
    return list(dict.fromkeys([*before, _typed(record)]))


def _typed(record: Record) -> str:
    """Return the command line of a record for readers of the card.

    Source, target and data from draftlab.yaml are added, because readers do not have this file. Absolute paths are
    shortened to their last part, because their folders exist only on this machine.
    """
    words = shlex.split(str(record.notes.get("command_line", f"draftlab {record.command}")))
    for name in ("source", "target", "data"):
        value = record.config.get(name)
        if value is not None and f"--{name}" not in words and str(value) not in words:
            words += [f"--{name}", str(value)]
    return shlex.join(Path(word).name if Path(word).is_absolute() else word for word in words)


def _heldout(draft: Path) -> tuple[float, float] | None:
    record = read_record(draft)
    before, after = ((record.notes.get(name) if record else None) for name in ("before", "after"))
    if (
        not isinstance(before, Mapping)
        or not isinstance(after, Mapping)
        or after["acceptance"] is None
    ):
        return None
    return float(before["acceptance"]), float(after["acceptance"])
