"""The kinds of servers, a module each, without torch; the client of a running one; and what plug-ins need of them."""

from draftlab.config.server_rules import Acceptance
from draftlab.servers.kinds import (
    Artifact,
    Finding,
    Launch,
    PromptLogprobs,
    ServedCompletion,
    ServerKind,
    error,
    server,
    shell_script,
    warning,
)

__all__ = [
    "Acceptance",
    "Artifact",
    "Finding",
    "Launch",
    "PromptLogprobs",
    "ServedCompletion",
    "ServerKind",
    "error",
    "server",
    "shell_script",
    "warning",
]
