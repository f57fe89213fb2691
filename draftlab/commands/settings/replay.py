"""The settings of replay."""

from pathlib import Path
from typing import Literal

from draftlab.config import shared
from draftlab.config.base import DraftedTokens, Only, OutputConfig, numbers, option
from draftlab.config.server_rules import SERVER_RULES, DecodingRule, ServerRule, chosen_rule
from draftlab.drafters.base import Drafter
from draftlab.model import hub
from draftlab.registry import REJECTION


class ReplayConfig(OutputConfig, shared.CheckpointSettings):
    """The settings of replay."""

    directory: Path = option(help="Directory of target outputs.", argument=True)
    draft: list[str] = option(
        factory=list,
        help="Draft or EAGLE-3 head to replay; repeat the option for several drafts. Default: the newest draft.",
    )
    drafter: list[Drafter] = option(
        typed=list[str],
        factory=list,
        help="Drafter other than a draft model, as NAME or NAME:KEY=VALUE,...; repeat the option for several drafters.",
    )
    target: str | None = option(
        None,
        "Checkpoint of the target that wrote the outputs, for heads and other drafters without a draft model.",
        shown_default="as recorded with the outputs; if it is not there, from draftlab.yaml",
    )
    k: DraftedTokens = numbers("1-8", "Numbers of drafted tokens per step, as 1-8 or 2,4,8.")
    rule: Literal["rejection", "match"] = option(
        REJECTION,
        "rejection: accept a drafted token with probability min(1, p/q); match: accept it if it equals the "
        "target's own sample.",
    )
    server_rule: ServerRule = option(
        None,
        f"Verify as this server does, in place of --rule: {', '.join(SERVER_RULES)}.",
        panel=shared.SAMPLING,
    )
    dtype: shared.WeightsDtype = shared.dtype(advanced=True)
    device: str = shared.device()
    device_map: shared.DeviceMap = shared.device_map()

    only = (
        Only(
            ("rule",),
            lambda c: c.server_rule is None,
            "leave it out, because --server-rule sets it",
        ),
        Only(
            ("server_rule",),
            lambda c: c.decoding.verify != "block",
            "replay lacks the verify rule block; use draftlab score with this --server-rule and --temperature 1",
        ),
        Only(
            ("target", "device_map"),
            # a draft that an earlier step of a recipe will make may be a head
            lambda c: c.reads_target or not all(Path(name).exists() for name in c.draft),
            "none of these drafters reads the target's hidden states",
            refused=False,
        ),
    )

    @property
    def decoding(self) -> DecodingRule:
        return chosen_rule(self.server_rule, self.rule)

    @property
    def reads_target(self) -> bool:
        """Return whether the command may need the target, because a drafter may read the target's hidden states.

        This is true for a head in --draft, and for each --drafter without a draft model, because the value of
        --drafter does not show whether that drafter reads hidden states.
        """
        return any(map(hub.head_kind, self.draft)) or not all(spec.drafts for spec in self.drafter)

    def resolved(self) -> "ReplayConfig":
        if self.draft or self.drafter:
            return self
        return self.model_copy(update={"draft": [str(shared.newest_draft())]})
