"""The check of a draft or head, with its files, on this machine, and on a running server."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from draftlab.errors import UserError, about
from draftlab.exporting.artifact import check_files, open_checkable
from draftlab.exporting.serving_check import PROMPT_TOKENS, PROMPTS, ServedDraft
from draftlab.exporting.trials import trial_prompts
from draftlab.model import hub
from draftlab.model.checkpoint import Checkpoint
from draftlab.servers.client import Server
from draftlab.servers.kinds import Finding, ServerKind, error


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedDraft:
    """What is right or wrong with a draft or head, for each server."""

    draft: Path
    findings: list[Finding]

    @property
    def errors(self) -> int:
        return sum(finding.level == "error" for finding in self.findings)

    @property
    def fits(self) -> bool:
        """Return whether the draft can be served as it is."""
        return not self.errors


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCheck:
    """A check of a draft or head.

    Attributes:
        target: Directory of the target, which may lack its weights.
        target_name: Name of the target, by which its weights are found.
        servers: Kinds of servers that should run the draft.
        data, prompt_file: Text on which the draft runs, and prompts in its place.
        device: Device on which to run the draft. None checks only its files.
        running: Server that runs the draft, whose answers are compared with the draft's answers here.
        temperature: Temperature of the requests to this server.
    """

    draft: Path
    target: Path
    target_name: str
    servers: Sequence[ServerKind]
    data: str
    prompt_file: Path | None
    device: torch.device | None
    running: Server | None
    temperature: float

    def run(self) -> CheckedDraft:
        """Check the draft.

        Raises:
            UserError: The draft cannot be opened, or the target's weights are missing.
        """
        return CheckedDraft(draft=self.draft, findings=self._findings())

    def _findings(self) -> list[Finding]:
        kind = hub.head_kind(self.draft)
        try:
            artifact = open_checkable(self.draft, Checkpoint(self.target))
            findings = list(check_files(artifact, self.servers))
        except UserError as failure:
            if kind not in hub.HEADS:
                raise
            remedy = "train one with draftlab distill --student eagle" if kind == "eagle" else ""
            return [error("head", str(failure), remedy)]
        if self.device is None:
            return findings
        # a head drafts with the target, and a server's answers are compared with the target's
        if self.running is not None or kind is not None:
            with about("--target"):
                hub.locate_model(self.target_name)
        reader = self.target if artifact.difference() is None else self.draft
        findings += artifact.trial(trial_prompts(reader, self.data, self.prompt_file), self.device)
        if self.running is not None:
            served = ServedDraft(
                artifact=artifact,
                server=self.running,
                prompts=trial_prompts(self.target, self.data, self.prompt_file, PROMPTS, PROMPT_TOKENS),
                temperature=self.temperature,
                device=self.device,
            )
            findings += served.findings()
        return findings
