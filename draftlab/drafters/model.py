"""The drafter model: a draft model, with one pass per drafted token."""

from typing import TYPE_CHECKING

from draftlab.drafters import DrafterSpec, Input, drafter
from draftlab.model import hub

if TYPE_CHECKING:
    import numpy as np

    from draftlab.acceptance.token_logprobs import TokenLogprobs
    from draftlab.engine.drafters.context import DrafterContext, DrafterRun
    from draftlab.latency.steps import Passes
    from draftlab.target_outputs.replay import ReplayContext


@drafter("model", served_by=("vllm", "sglang", "llama.cpp", "transformers"))
class DraftModelSpec(DrafterSpec):
    """Drafts with a draft model. draft: Checkpoint of the draft model. Default: the draft that --draft sets."""

    draft: str = ""

    def inputs(self) -> list[Input]:
        return [Input(self.draft, hub.check_whole, is_model=True), *super().inputs()]

    def build(self, context: "DrafterContext") -> "DrafterRun":
        from draftlab.engine.generate import ModelDrafter

        model = context.load_draft(self.text, self.draft)
        return context.run(ModelDrafter(model, context.vocab), model=model)

    @classmethod
    def step_cost(cls, passes: "Passes", k: int, accepted: int) -> "np.ndarray":
        # the draft model has not read the last of its k drafted tokens
        return passes.step(k, unread=2 if accepted == passes.k else 1)

    def acceptance(self, replay: "ReplayContext") -> "list[TokenLogprobs]":
        return replay.of_model(self.text, self.draft, at_once=False)
