"""README.md of an exported draft: what it is, how it was made, what was measured. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from draftlab.results.score import Score
from draftlab.results.warnings import score_warnings


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a card says. commands: that made the draft, the first one first."""

    name: str
    target: str
    size: str  # in words
    vocab: int
    context: int
    commands: Sequence[str]
    held_out: tuple[float, float] | None  # acceptance on held-out text, before and after distilling
    scores: list[Score]
    changed: Sequence[str]
    serving: tuple[str, str] | None  # the script's name and text
    verified: str  # what scoring it again where it runs gave

    def text(self) -> str:
        head = ["---", f"base_model: {self.target}", "tags: [speculative-decoding, draft-model]", "---"]
        parts = [head, [f"# {self.name}"], self._what(), self._measured(), self._serving(), self._made()]
        return "\n\n".join("\n".join(part) for part in parts if part) + "\n"

    def _what(self) -> list[str]:
        changed = f" In this copy: {', '.join(self.changed)}." if self.changed else ""
        return [
            f"A draft model for speculative decoding with **{self.target}**: it proposes tokens, the target checks "
            "them, and the target's output stays what it is.",
            "",
            f"{self.size}; {self.vocab:,} ids, those of the target; {self.context:,} tokens of context.{changed}",
        ]

    def _measured(self) -> list[str]:
        lines = ["## Measured", ""]
        for score in self.scores:
            k, c = score.best_k, score.conditions
            speed, took = score.best_k_speedup, score.acceptance(k)
            lines += [
                f"* {score.tokens_per_pass(k):.2f} tokens per target pass, {took.draft_acceptance_rate:.0%} of what "
                f"is drafted accepted, {speed.value:.2f}x the speed of no draft ({speed.low:.2f} to {speed.high:.2f}) "
                f"at K = {k}: {c.prompts} prompts of {c.data}, {c.decoding}, {c.dtype}, {c.mode}, {c.device}, "
                f"{score.created[:10]}.",
                f"  `{score.command}`",
            ]
        lines += [f"* {text}." for text in score_warnings(self.scores)] if self.scores else []
        if self.held_out is not None:
            before, after = self.held_out
            lines.append(
                f"* Acceptance on held-out text, token by token: {before:.3f} before distilling, {after:.3f} after."
            )
        if self.verified:
            lines.append(f"* After export, in {self.verified}.")
        if len(lines) == 2:
            lines.append("Nothing yet: `draftlab score` measures acceptance and speed against the target.")
        return lines

    def _serving(self) -> list[str]:
        if self.serving is None:
            return []
        name, text = self.serving
        return ["## Serve", "", f"`{name}`, beside this file:", "", "```", text.rstrip(), "```"]

    def _made(self) -> list[str]:
        if not self.commands:
            return []
        return ["## How it was made", "", "```", *self.commands, "```"]
