"""The command check, which checks that a finished draft fits its target and its servers."""

from dataclasses import asdict

from draftlab.commands.base import Outcome
from draftlab.commands.models import located, located_target
from draftlab.commands.settings.export import CheckConfig
from draftlab.errors import about
from draftlab.exporting.check import CheckedDraft, DraftCheck
from draftlab.model import devices, hub
from draftlab.registry import SERVERS
from draftlab.runs import workspace
from draftlab.servers.client import Server
from draftlab.shell import typed


def prepare(config: CheckConfig, weights: bool) -> DraftCheck:
    """Resolve and check the settings of the command `check`, and return the job.

    Raises:
        UserError: The draft, target, text, device or server is missing.
    """
    draft = located(config.draft, "draftlab check")
    target = located_target(config.target, weights=False)
    device = None if config.files_only else devices.resolve_device(workspace.load().device)
    servers = SERVERS.loadable()
    if config.servers is not None:
        servers = [SERVERS.get(name, "--for") for name in _names(config.servers)]
    running = None
    if config.server is not None:
        with about("--server"):
            running = Server.connect(config.server, config.api_key_file, model=config.served_model_name, workers=1)
    return DraftCheck(
        draft=draft,
        target=target,
        target_name=config.target,
        servers=servers,
        data=config.data,
        prompt_file=config.prompt_file,
        device=device,
        running=running,
        temperature=config.temperature,
    )


def show(checked: CheckedDraft, config: CheckConfig) -> Outcome:
    draft = checked.draft
    errors = checked.errors
    to = _names(config.servers)[0] if config.servers is not None else "vllm"
    exported = hub.head_kind(draft) in (None, "eagle")  # servers load other heads as they are
    missed = (
        f"{hub.checkpoint_name(draft)} cannot be served yet; fix the {errors} error{'s' * (errors > 1)} in the list"
    )
    return Outcome(
        path=draft,
        show=[finding.line() for finding in checked.findings],
        data={"findings": list(map(asdict, checked.findings)), "fits": checked.fits},
        missed=[missed] if errors else [],
        next=None
        if errors or not exported
        else typed("draftlab", "export", draft, *config.repeated("target"), "--to", to),
    )


def _names(servers: str) -> list[str]:
    return [name.strip() for name in servers.split(",")]
