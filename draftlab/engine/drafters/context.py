"""The arguments from which drafters are built (DrafterContext), and the result (DrafterRun)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    """A drafter that is ready to draft.

    Args:
        model: The drafter's draft model; None for a drafter without a draft model.
        ks: Values of K, the number of drafted tokens, to measure.
        learnt: Value of --drafter with the options that the drafter chose itself when it was built. None: it chose
            none.
        facts: Values for fields of results.score.Model that describe the drafter.
    """

    drafter: Drafter
    model: Decoder | None
    ks: list[int]
    learnt: str | None
    facts: Mapping[str, object]


@dataclass
class DrafterContext:
    """The target and the settings from which a command builds its drafters.

    Args:
        load: Function that loads a draft model from a directory, in mode `mode`.
        draft: Default draft, for drafters without draft=.
        data: Sources of text, as in --data.
        ks: Values of K, the number of drafted tokens, to measure.
        device: Device on which heads run.
        int8: Whether to round the weights of heads to int8.
    """

    target: Decoder
    target_path: Path
    load: Callable[[Path], Decoder]
    draft: Path | None
    data: str
    sampling: SamplingParams
    ks: list[int]
    mode: Mode
    clock: Clock
    device: torch.device
    int8: bool = False

    @cached_property
    def vocab(self) -> int:
        return checkpoint.vocab_size(self.target_path)

    def run(
        self,
        drafter: Drafter,
        *,
        model: Decoder | None = None,
        ks: list[int] | None = None,
        learnt: str | None = None,
        facts: Mapping[str, object] | None = None,
    ) -> DrafterRun:
        """Return a drafter as a DrafterRun. The arguments are its fields. ks: Default: this context's values of K."""
        return DrafterRun(
            drafter=drafter,
            model=model,
            ks=self.ks if ks is None else ks,
            learnt=learnt,
            facts=facts or {},
        )

    def draft_path(self, text: str, name: str) -> Path:
        """Return the directory of a draft model. Arguments and errors: See draft_path below."""
        return draft_path(text, name, self.draft)

    def load_draft(self, text: str, name: str) -> Decoder:
        """Load a draft model in this context's mode. Arguments and errors: See draft_path."""
        return self.load(self.draft_path(text, name))

    def own_engine(self, spec: DrafterSpec, model: Decoder) -> Llama:
        """Return `model`, after a check that draftlab's own engine runs it.

        Raises:
            UserError: transformers runs the model, which the drafter `spec` does not support.
        """
        if not isinstance(model, Llama):
            raise spec.refused_by_transformers()
        return model

    def corpus(self, source: str, tokens: int) -> np.ndarray:
        """Return the first `tokens` tokens of a data source, [N]. For a mixture, N is at most twice `tokens`."""
        return first_tokens(source, self.tokenizer, tokens)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return checkpoint.load_tokenizer(self.target_path)


def draft_path(text: str, name: str, default: Path | None) -> Path:
    """Return the directory of a draft model.

    Args:
        text: Value of --drafter, for the error message.
        name: Name of a checkpoint. "" stands for the default draft.

    Raises:
        UserError: There is no such checkpoint, or the name is empty and there is no default draft.
    """
    if name:
        return hub.locate(name)
    if default is None:
        raise UserError(f"--drafter {text} needs a draft model; add draft=DIR to the drafter, or add --draft DIR")
    return default
