"""The drafter parallel: a parallel draft, which drafts all tokens in one pass."""

from pathlib import Path
from typing import TYPE_CHECKING

from draftlab.console import note
from draftlab.drafters import RunFacts, drafter
from draftlab.drafters.model import DraftModelSpec
from draftlab.errors import UserError
from draftlab.model import hub

if TYPE_CHECKING:
    import numpy as np

    from draftlab.acceptance.token_logprobs import TokenLogprobs
    from draftlab.engine.drafters.context import DrafterContext, DrafterRun
    from draftlab.latency.steps import Passes
    from draftlab.target_outputs.replay import ReplayContext


@drafter("parallel", served_by=("vllm",))
class ParallelSpec(DraftModelSpec):
    by_age = True

    def check(self, run: RunFacts) -> None:
        super().check(run)
        from draftlab.model.parallel import pard_token

        draft: Path | None = hub.locate(self.draft) if self.draft else run.draft
        if draft is not None and pard_token(draft) is None:
            raise UserError(
                f"--drafter {self.text}: {draft} is not a parallel draft; train a parallel draft with draftlab distill "
                "--student parallel"
            )

    def build(self, context: "DrafterContext") -> "DrafterRun":
        from draftlab.engine.drafters.parallel import ParallelDrafter

        model = context.load_draft(self.text, self.draft)
        return context.run(ParallelDrafter(model, context.vocab), model=model, facts={"parallel": True})

    @classmethod
    def step_cost(cls, passes: "Passes", k: int, accepted: int) -> "np.ndarray":
        return passes.step(k, unread=accepted + 1, at_once=True)

    def acceptance(self, replay: "ReplayContext") -> "list[TokenLogprobs]":
        from draftlab.model.parallel import trained_offsets

        path = replay.draft_path(self.text, self.draft)
        trained = trained_offsets(path)
        if trained is not None and replay.most > trained:
            note(
                f"{path} was trained to draft {trained} tokens in one pass, but the largest --k is {replay.most}; "
                "fewer of the later tokens will be accepted"
            )
        return replay.of_model(self.text, self.draft, at_once=True)
