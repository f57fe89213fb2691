"""Acceptance as servers compute it, by their sources; docs/servers.md says where."""

from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from draftlab.config.base import Only, option
from draftlab.config.shared import SAMPLING

ServerName = Literal["vllm", "vllm-probabilistic", "vllm-block", "sglang", "llama.cpp", "transformers"]
SampleMethod = Literal["greedy", "probabilistic"]  # vLLM's draft_sample_method


class Acceptance(NamedTuple):
    """A verify rule, and the temperature at which the draft samples; None: the target's.

    A draft at temperature 0 proposes its most probable token, and the server takes that as certain: q is one-hot.
    """

    rule: Any  # one of the config's own
    draft_temperature: float | None


SERVER_RULES: dict[ServerName, Acceptance] = {
    "vllm": Acceptance("rejection", 0.0),  # draft_sample_method greedy, its default
    "vllm-probabilistic": Acceptance("rejection", None),
    "vllm-block": Acceptance("block", None),  # rejection_sample_method block (2403.10444)
    "sglang": Acceptance("match", 0.0),  # target-only sampling with thresholds of 1
    "llama.cpp": Acceptance("match", 0.0),
    "transformers": Acceptance("rejection", None),
}


class AcceptanceSettings(BaseModel):
    """Settings of acceptance, beside the config's own --rule."""

    rule: Any  # what the config allows
    draft_temperature: float | None = option(
        None, "Temperature of the draft, 0 is greedy. Default: the target's.", ge=0, panel=SAMPLING, advanced=True
    )
    server_rule: ServerName | None = option(
        None, "Accept as this server does, in place of --rule and --draft-temperature.", panel=SAMPLING
    )

    @property
    def acceptance(self) -> Acceptance:
        if self.server_rule is not None:
            return SERVER_RULES[self.server_rule]
        return Acceptance(self.rule, self.draft_temperature)


SERVER_RULE_ONLY = Only(("rule", "draft_temperature"), lambda c: c.server_rule is None, "--server-rule sets it")
