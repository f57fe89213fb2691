"""The model card (README.md) of an exported draft. No torch."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from draftlab.results.score import Score
from draftlab.results.warnings import score_warnings
from draftlab.trust import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The facts of a card."""

    name: str
    target: str
    kind: str  # draft model or EAGLE-3 head
    summary: str  # its size, and what it needs
    commands: Sequence[str]  # that made the draft, the first one first
    heldout: tuple[float, float] | None  # acceptance on held-out text, before and after distillation
    scores: list[Score]
    script: tuple[str, str] | None  # name and text
    verified: str  # result of scoring the export where it runs

    def text(self) -> str:
        tag = self.kind.lower().replace(" ", "-")
        plain = re.fullmatch(r"[\w./-]*[A-Za-z][\w./-]*", self.target)
        base_model = self.target if plain else json.dumps(self.target)
        head = ["---", f"base_model: {base_model}", f"tags: [speculative-decoding, {tag}]", "---"]
        parts = [head, [f"# {self.name}"], self._summary(), self._results(), self._usage(), self._training()]
        return "\n\n".join("\n".join(map(printable, part)) for part in parts if part) + "\n"

    def _summary(self) -> list[str]:
        article = "An" if self.kind[0] in "AE" else "A" if self.kind[-1] != "s" else ""
        return [
            f"{article} {self.kind} for speculative decoding with **{self.target}**. It proposes tokens, the target "
            "verifies them, and the output is the target's own.".lstrip(),
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
        return ["## Results", "", *(lines or ["Not measured yet: run `draftlab score` against the target."])]

    def _usage(self) -> list[str]:
        if self.script is None:
            return []
        name, text = self.script
        return ["## Usage", "", f"`{name}` in this directory:", "", "```", *text.rstrip().split("\n"), "```"]

    def _training(self) -> list[str]:
        return ["## How it was made", "", "```", *self.commands, "```"] if self.commands else []


TERMS = (
    "A speed-up is over the target alone, of a K chosen on other prompts, with its 95% bootstrap interval over prompts."
)


def _score_lines(score: Score) -> list[str]:
    k, c = score.best_k, score.conditions
    return [
        f"* {score.verdict()} {score.acceptance(k).draft_acceptance_rate:.0%} of drafted tokens were accepted.",
        f"  Measured on {c.prompts} prompts of {c.data}, {c.decoding}, on {c.device}, {score.created[:10]}. "
        f"How both sides ran: {c.precision}.",
        f"  {TERMS}",
        f"  `{score.command}`",
    ]
