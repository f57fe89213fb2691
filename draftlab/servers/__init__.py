"""Kinds of servers (a module for each), the client of a running server, and names that plug-ins import.

Torch is not imported.
"""

from draftlab.config.server_rules import DecodingRule
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
    "Artifact",
    "DecodingRule",
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
