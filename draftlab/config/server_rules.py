"""The decoding rules of servers. The module of each server defines its rules; docs/servers.md has their sources."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from pydantic import AfterValidator

from draftlab.errors import UserError, did_you_mean
from draftlab.registry import SERVERS
from draftlab.sampling import FILTERS, Filter, SamplingParams

# names for --server-rule
SERVER_RULES = ("vllm", "vllm-greedy", "vllm-block", "sglang", "llama.cpp", "transformers")


@dataclass(frozen=True, slots=True)
class DecodingRule:
    """How a server samples from target and draft, and how it verifies drafted tokens.

    Attributes:
        verify: Name of the verify rule.
        draft: The draft's filters, in their order. (): the draft proposes its most probable token, and the server
            treats the draft's distribution q as one-hot.
        target: The target's filters, in their order.
        refused: What the server does with a sampling parameter that it cannot use with a draft, by parameter.
        temperature: Function that returns the temperature at which the server samples, from the one that it was sent.
    """

    verify: str
    draft: tuple[Filter, ...] = FILTERS
    target: tuple[Filter, ...] = FILTERS
    refused: Mapping[Filter, str] = field(default_factory=dict)
    temperature: Callable[[float], float] = float

    def target_sampling(self, sampling: SamplingParams) -> SamplingParams:
        """Return the parameters with the target's filters, and with the temperature at which the server samples.

        Raises:
            UserError: The server cannot use one of the parameters with a draft.
        """
        for name, reason in self.refused.items():
            if name in sampling.active:
                option = f"--{name.replace('_', '-')}"
                raise UserError(f"{option} {getattr(sampling, name):g}: {reason}; leave it out")
        temperature = self.temperature(sampling.temperature)
        return replace(sampling, temperature=temperature, filters=self.target)

    def draft_sampling(self, sampling: SamplingParams) -> SamplingParams:
        """Return the draft's parameters. sampling: The target's parameters."""
        if not self.draft:
            return replace(sampling, temperature=0.0)
        return replace(sampling, filters=self.draft)


def rule_of(name: str) -> DecodingRule:
    """Return the decoding rule of a server, or of one of its variants, such as vllm-block.

    Raises:
        UserError: There is no such server or variant.
    """
    server, variant = server_of(name)
    where = "--server-rule"
    rules = SERVERS.get(server or name, where).rules
    if variant not in rules:
        known = [f"{server}-{each}".rstrip("-") for each in rules]
        raise UserError(f"{where}: {server} has no rule {name!r}{did_you_mean(name, known)}")
    return rules[variant]


def server_of(name: str) -> tuple[str, str]:
    """Return the server and the variant in a name for --server-rule."""
    if name in SERVERS.names():
        return name, ""
    server, _, variant = name.rpartition("-")
    return server, variant


def _known_rule(name: str | None) -> str | None:
    try:
        if name is not None:
            rule_of(name)
    except UserError as error:
        raise ValueError(str(error).removeprefix("--server-rule: ")) from None
    return name


ServerRule = Annotated[str | None, AfterValidator(_known_rule)]


def chosen_rule(server_rule: str | None, rule: str) -> DecodingRule:
    """Return the decoding rule of --server-rule or, without this option, draftlab's own with the verify rule --rule."""
    return DecodingRule(rule) if server_rule is None else rule_of(server_rule)
