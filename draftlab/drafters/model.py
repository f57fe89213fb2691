"""The drafter model: a draft model, with one pass per drafted token."""

import numpy as np

from draftlab.acceptance.token_logprobs import TokenLogprobs
from draftlab.drafters.base import DrafterSpec, Input, drafter
from draftlab.drafters.context import DrafterContext, DrafterRun, ReplayContext
from draftlab.drafters.passes import Passes
from draftlab.engine.generate import ModelDrafter
from draftlab.model import hub


@drafter("model", served_by=("vllm", "sglang", "llama.cpp", "transformers"))
class DraftModelSpec(DrafterSpec):
    """Drafts with a draft model. draft: Checkpoint of the draft model. Default: the draft that --draft sets."""

    draft: str = ""

    def inputs(self) -> list[Input]:
        return [Input(self.draft, hub.check_whole, is_model=True), *super().inputs()]

    def build(self, context: DrafterContext) -> DrafterRun:
        model = context.load_draft(self.text, self.draft)
        return context.run(ModelDrafter(model, context.vocab), model=model)

    @classmethod
    def step_cost(cls, passes: Passes, k: int, accepted: int) -> np.ndarray:
        # the draft model has not read the last of its k drafted tokens
        return passes.step(k, unread=2 if accepted == passes.k else 1)

    def acceptance(self, replay: ReplayContext) -> list[TokenLogprobs]:
        return replay.of_model(self.text, self.draft, at_once=False)
