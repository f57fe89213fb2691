"""The drafter adaptive: a step uses prompt lookup, a draft model or EAGLE-3 head, or no draft, whichever pays most."""

from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from draftlab.console import note
from draftlab.drafters.base import Input, RunFacts, drafter
from draftlab.drafters.fallback import FALLBACK_LOOKUP_MAX
from draftlab.drafters.model import DraftModelSpec
from draftlab.drafters.suffix import OutputsSpec
from draftlab.errors import UserError
from draftlab.heads.eagle3.drafter import EagleSpec

if TYPE_CHECKING:
    from draftlab.drafters.context import DrafterContext, DrafterRun
    from draftlab_research.drafting.adaptive import Stoppable


@drafter("adaptive")
class AdaptiveSpec(DraftModelSpec, OutputsSpec):
    """Options of the drafter adaptive.

    heads: Checkpoint of an EAGLE-3 head, which replaces the draft model. outputs: Directory of stored target outputs,
    whose prompts calibrate the policy. If empty, prompts from the run's data do. prompt_lookup_max: Longest n-gram that
    prompt lookup matches, in tokens.
    """

    own_engine = True
    heads: str = ""
    prompt_lookup_max: int = Field(FALLBACK_LOOKUP_MAX, ge=1)

    @model_validator(mode="after")
    def _has_one_drafter(self) -> Self:
        if self.draft and self.heads:
            raise ValueError("give draft or heads, not both")
        return self

    @property
    def reads_data(self) -> bool:
        return not self.outputs

    def inputs(self) -> list[Input]:
        if not self.heads:
            return super().inputs()
        return [*self._head().inputs(), *OutputsSpec.inputs(self)]

    def _head(self) -> EagleSpec:
        return EagleSpec.model_validate({"text": self.text, "heads": self.heads})

    def check(self, run: RunFacts) -> None:
        super().check(run)
        if self.heads:
            self._head().check(run)

    def build(self, context: "DrafterContext") -> "DrafterRun":
        from draftlab.drafters.fallback import FallbackDrafter
        from draftlab.engine.generate import ModelDrafter
        from draftlab_research.calibration import calibration_texts, pass_ms
        from draftlab_research.drafting.adaptive import PolicyDraft, PolicyLookup, recorded
        from draftlab_research.policy import learn

        target, most = context.own_engine(self, context.target), max(context.ks)
        if target.replays_passes:
            raise UserError(
                f"--drafter {self.text} may end a draft after any token, which CUDA graphs do not allow; use "
                "--mode eager"
            )
        model = None if self.heads else context.load_draft(self.text, self.draft)
        inner: Stoppable = self._head().head_drafter(context) if model is None else ModelDrafter(model, context.vocab)
        prompts = [prompt.tolist() for prompt, _ in calibration_texts(context, self.outputs)]
        note(f"{self.text}: decoding {len(prompts)} prompts to learn when to copy and when to draft")
        steps, draft_ms = recorded(context, inner, prompts, most, self.prompt_lookup_max)
        verify_ms = pass_ms(context, {"target": target}, range(1, most + 2))["target"]
        policy = learn(steps, verify_ms, draft_ms)
        note(f"{self.text}: {policy.describe(steps)}")
        lookup = PolicyLookup(policy, self.prompt_lookup_max)
        drafter = FallbackDrafter(lookup, PolicyDraft(inner, policy), context.vocab)
        facts = self._head().facts() if self.heads else {}
        return context.run(drafter, model=model, ks=[most], facts=facts)
