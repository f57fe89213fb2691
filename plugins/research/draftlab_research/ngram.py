"""Options of the drafter ngram, an n-gram model of a corpus or of the target's own text."""

from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from draftlab.console import note
from draftlab.drafters.base import RunFacts, drafter
from draftlab.drafters.suffix import OutputsSpec
from draftlab.errors import UserError, about
from draftlab.model import hub

if TYPE_CHECKING:
    import numpy as np

    from draftlab.acceptance.token_logprobs import TokenLogprobs
    from draftlab.drafters.context import DrafterContext, DrafterRun, ReplayContext
    from draftlab_research.drafting.ngram import NgramModel


@drafter("ngram")
class NgramSpec(OutputsSpec):
    """Options of the drafter ngram.

    order: Length of the longest n-grams, in tokens.
    tokens: Number of tokens of the corpus.
    data: Source of the corpus. Default: the stored target outputs. Without them, the corpus comes from --data.
    """

    order: int = Field(4, ge=2, le=64)
    tokens: int = Field(2_000_000, ge=1)
    data: str = ""

    @model_validator(mode="after")
    def _has_one_corpus(self) -> Self:
        if self.outputs and self.data:
            raise ValueError("data and outputs both name the corpus; leave one of these options out")
        return self

    @property
    def reads_data(self) -> bool:
        return not self.data and not self.outputs

    def check_inputs(self, weights: bool) -> None:
        super().check_inputs(weights)
        if self.data:
            with about(f"--drafter {self.text}"):
                hub.check_data(self.data) if weights else hub.check_local_data(self.data)

    def check(self, run: RunFacts) -> None:
        super().check(run)
        from draftlab_research.drafting.ngram import contexts_fit

        if not contexts_fit(run.vocab, self.order):
            contexts = f"{self.order - 1} tokens of a vocabulary of {run.vocab:,} ids"
            raise UserError(
                f"--drafter {self.text}: order={self.order} is too large, because {contexts} do not fit into 64 bits; "
                "use a smaller order"
            )

    def build(self, context: "DrafterContext") -> "DrafterRun":
        from draftlab_research.drafting.ngram import NgramDrafter

        return context.run(NgramDrafter(self._model(context, self.data or context.data)))

    def acceptance(self, replay: "ReplayContext") -> "list[TokenLogprobs]":
        from draftlab_research.drafting.ngram import score_ngrams

        model = self._model(replay, self.data or replay.data)
        return score_ngrams(model, replay.texts, replay.sampling, replay.advance)

    def _model(self, context: "DrafterContext | ReplayContext", data: str) -> "NgramModel":
        from draftlab.model import checkpoint
        from draftlab_research.drafting.ngram import NgramModel

        source = self.outputs or data
        note(f"--drafter {self.text}: counting {self.order}-grams of {source}")
        corpus = self._answers() if self.outputs else context.corpus(source, self.tokens)
        if len(corpus) < self.order:
            raise UserError(
                f"--drafter {self.text}: {source} has only {len(corpus)} tokens, too few for {self.order}-grams; use "
                "more text or a smaller order"
            )
        return NgramModel(corpus, checkpoint.vocab_size(context.target_path), self.order)

    def _answers(self) -> "np.ndarray":
        """Return the stored outputs of the target as one array of at most `tokens` token ids.

        The last order - 1 tokens of its prompt stand before each output.
        """
        import numpy as np

        from draftlab.target_outputs.store import read_store

        stored = read_store(Path(self.outputs)).outputs
        texts = [np.concatenate([output.prompt[1 - self.order :], output.ids]) for output in stored]
        return np.concatenate(texts)[: self.tokens]
