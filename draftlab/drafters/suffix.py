"""The drafter suffix: drafts the tokens that followed the same suffix earlier in the text or in earlier answers."""

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from draftlab.config.outputs import check_store
from draftlab.drafters import DrafterSpec, Input, RunFacts, drafter

if TYPE_CHECKING:
    from draftlab.acceptance.token_logprobs import TokenLogprobs
    from draftlab.engine.drafters.context import DrafterContext, DrafterRun
    from draftlab.engine.drafters.suffix import SuffixDrafter
    from draftlab.target_outputs.replay import ReplayContext


class OutputsSpec(DrafterSpec):
    """Base class of drafters that can learn from text of the target.

    outputs: Directory of stored target outputs. Default: the drafter does not learn from the target.
    """

    outputs: str = ""

    def inputs(self) -> list[Input]:
        stored = [Input(self.outputs, lambda name, weights: check_store(Path(name)))] if self.outputs else []
        return [*super().inputs(), *stored]

    def check(self, run: RunFacts) -> None:
        super().check(run)
        if self.outputs:
            from draftlab.target_outputs.store import check_tokenizer

            check_tokenizer(Path(self.outputs), run.target)


@drafter("suffix", served_by=("vllm",))
class SuffixSpec(OutputsSpec):
    """Drafts with suffix decoding.

    outputs: Directory of stored outputs of the target, from which the drafter also copies. Default: it copies only from
    the text itself.

    The other options are vLLM's suffix_decoding_ options without this prefix, and have vLLM's defaults.
    """

    by_age = True
    max_tree_depth: int = Field(24, ge=2)
    max_spec_factor: float = Field(1.0, gt=0)
    min_token_prob: float = Field(0.1, ge=0, le=1)

    def speculative_config(self, k: int) -> dict[str, object]:
        """Return the value of vLLM's --speculative-config.

        vLLM copies from its own earlier answers instead of stored outputs, and needs the package arctic-inference.
        """
        names = ("max_tree_depth", "max_spec_factor", "min_token_prob")
        options = {f"suffix_decoding_{name}": getattr(self, name) for name in names}
        return {"method": "suffix", "num_speculative_tokens": k, **options}

    def build(self, context: "DrafterContext") -> "DrafterRun":
        return context.run(self._drafter())

    def acceptance(self, replay: "ReplayContext") -> "list[TokenLogprobs]":
        return replay.copies_by_k(self._drafter())

    def _drafter(self) -> "SuffixDrafter":
        from draftlab.engine.drafters.suffix import Memory, SuffixDrafter

        memory = None
        if self.outputs:
            from draftlab.target_outputs.store import read_store

            memory = Memory(output.ids for output in read_store(Path(self.outputs)).outputs)
        options = (self.max_tree_depth, self.max_spec_factor, self.min_token_prob)
        return SuffixDrafter(memory, *options)
