"""The commands that bring a finished draft to where it runs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftlab.commands.base import Outcome, command
from draftlab.config.export import CheckConfig, ExportConfig
from draftlab.model import hub
from draftlab.output import Output

if TYPE_CHECKING:
    from draftlab.exporting.compatibility import Finding


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Checked(Outcome):
    """Findings on a draft or head, by runtime."""

    findings: "list[Finding]"

    @property
    def fits(self) -> bool:
        """True if nothing has to be fixed before it is served."""
        return all(finding.level != "error" for finding in self.findings)


@command(CheckConfig)
def check(config: CheckConfig) -> Checked:
    """Check that a draft or head fits its target and works in vLLM, SGLang, llama.cpp, ...; exit code 3 if not."""
    draft = config.draft_directory()
    from draftlab.exporting import compatibility, heads

    findings = (heads.check if hub.is_eagle_head(draft) else compatibility.check_draft)(config, draft)
    errors = sum(finding.level == "error" for finding in findings)
    missed = (
        [f"{errors} finding{'s' * (errors > 1)} to fix before {hub.checkpoint_name(draft)} is served"] if errors else []
    )
    rows = [{"about": f.about, "level": f.level, "text": f.text, "fix": f.fix} for f in findings]
    data: dict[str, object] = {"findings": rows, "fits": not errors}
    lines = [finding.line() for finding in findings]
    return Checked(path=draft, show=lines, data=data, missed=missed, findings=list(findings))


@command(ExportConfig)
def export(config: ExportConfig, output: Output) -> Outcome:
    """Write a draft or head as runtimes load it, with a card and a script that serves it; verify it where it runs."""
    draft = config.draft_directory()
    from draftlab.exporting import heads, run

    exported = (heads.export if hub.is_eagle_head(draft) else run.export)(config, output)
    facts = {"path": str(output.out), **exported.notes}
    show = [*exported.lines, str(output.out), *([exported.advice] if exported.advice else [])]
    return Outcome(path=output.out, show=show, data=facts)
