"""The verify rules of servers. The module of each server defines its rules; docs/servers.md has their sources."""

from typing import Annotated, NamedTuple

from pydantic import AfterValidator

from draftlab.errors import UserError, did_you_mean
from draftlab.registry import SERVERS

# names for --server-rule
SERVER_RULES = ("vllm", "vllm-probabilistic", "vllm-block", "sglang", "llama.cpp", "transformers")


class Acceptance(NamedTuple):
    """A verify rule, and the temperature of the draft. None: the draft has the same temperature as the target.

    At temperature 0 the draft proposes its most probable token, and the server treats the draft's distribution q as
    one-hot.
    """

    rule: str
    draft_temperature: float | None


def acceptance_of(name: str) -> Acceptance:
    """Return the verify rule and draft temperature of a server, or of one of its variants, such as vllm-block.

    Raises:
        UserError: There is no such server or variant.
    """
    server, variant = (name, "") if name in SERVERS.names() else name.rpartition("-")[::2]
    where = "--server-rule"
    rules = SERVERS.get(server or name, where).rules
    if variant not in rules:
        known = [f"{server}-{each}".rstrip("-") for each in rules]
        raise UserError(f"{where}: {server} has no rule {name!r}{did_you_mean(name, known)}")
    return rules[variant]


def _known_rule(name: str | None) -> str | None:
    try:
        if name is not None:
            acceptance_of(name)
    except UserError as error:
        raise ValueError(str(error).removeprefix("--server-rule: ")) from None
    return name


ServerRule = Annotated[str | None, AfterValidator(_known_rule)]


def chosen_rule(server_rule: str | None, rule: str) -> Acceptance:
    """Return the verify rule of --server-rule or, without this option, of --rule."""
    return Acceptance(rule, None) if server_rule is None else acceptance_of(server_rule)
