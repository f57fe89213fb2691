"""The context of a run, from which drafters are built, and the built drafters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from draftlab.config.kinds import DrafterSpec
from draftlab.data.batches import first_tokens
from draftlab.engine.clocks import Clock
from draftlab.engine.generate import Drafter
from draftlab.errors import UserError
from draftlab.model import Mode, checkpoint, hub
from draftlab.model.decoder import Decoder
from draftlab.model.llama import Llama
from draftlab.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterRun:
    """A built drafter, its draft model if any, and the numbers of tokens to try.

    learnt: Value of --drafter with the options that the drafter learnt when it was built. facts: Fields of
    results.score.Model that describe the drafter's model.
    """

    drafter: Drafter
    model: Decoder | None
    ks: list[int]
    learnt: str | None = None
    facts: Mapping[str, object] = field(default_factory=dict)


class DrafterContext:
    """The target and the settings of a run, and objects that several drafters share."""

    def __init__(
        self,
        target: Decoder,
        target_path: Path,
        load: Callable[[Path], Decoder],
        draft: Path | None,
        *,
        data: str,
        sampling: SamplingParams,
        ks: list[int],
        mode: Mode,
        clock: Clock,
        device: torch.device,
        int8: bool = False,
    ) -> None:
        """load: Loads a checkpoint in the run's mode. draft: Default draft. device: Of heads. int8: Round heads."""
        self.target, self.target_path, self.load, self.draft = target, target_path, load, draft
        self.data, self.sampling, self.ks, self.clock = data, sampling, ks, clock
        self.mode: Mode = mode
        self.device, self.int8 = device, int8
        self.vocab = checkpoint.vocab_size(target_path)

    def run(
        self,
        drafter: Drafter,
        *,
        model: Decoder | None = None,
        ks: list[int] | None = None,
        learnt: str | None = None,
        facts: Mapping[str, object] | None = None,
    ) -> DrafterRun:
        """Return a drafter with the facts that the run needs. ks: Numbers of drafted tokens. None takes the run's."""
        return DrafterRun(
            drafter=drafter,
            model=model,
            ks=self.ks if ks is None else ks,
            learnt=learnt,
            facts=facts or {},
        )

    @property
    def target_int8(self) -> bool:
        """Return whether the verifying target has int8 weights."""
        return self.target.weights_dtype == "int8"

    def draft_path(self, text: str, name: str) -> Path:
        """Return the directory of a draft model. An empty name gives the default draft.

        text: The drafter, for the message of the error.

        Raises:
            UserError: The name is empty, and there is no default draft.
        """
        if name:
            return hub.locate(name)
        if self.draft is None:
            raise UserError(
                f"--drafter {text} needs a draft model: add draft=DIR, or give one by --draft"
            )
        return self.draft

    def load_draft(self, text: str, name: str) -> Decoder:
        """Load a draft model. Arguments and errors are those of draft_path."""
        return self.load(self.draft_path(text, name))

    def own_engine(self, spec: DrafterSpec, model: Decoder) -> Llama:
        """Return the model as a Llama of draftlab's engine. Raises UserError: transformers runs the model."""
        if not isinstance(model, Llama):
            raise spec.refused_by_transformers()
        return model

    def corpus(self, source: str, tokens: int) -> np.ndarray:
        """Return the first `tokens` tokens of a data source, [N]. A mixture gives at most twice as many."""
        return first_tokens(source, self.tokenizer, tokens)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return checkpoint.load_tokenizer(self.target_path)
