"""What drafters are built from (DrafterContext) and replayed on (ReplayContext), and a built drafter (DrafterRun)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from draftlab.acceptance.token_logprobs import Text, TokenLogprobs, score_offsets, score_tokens
from draftlab.console import note
from draftlab.data.batches import first_tokens
from draftlab.drafters.base import DrafterSpec
from draftlab.engine.clocks import Clock
from draftlab.engine.generate import Drafter
from draftlab.errors import UserError
from draftlab.model import Mode, checkpoint, hub
from draftlab.model.decoder import Decoder
from draftlab.model.llama import Llama
from draftlab.model.parallel import mask_token
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

    Raises:
        UserError: `ks` is empty, because the drafter drafts fewer tokens than every K.
    """

    drafter: Drafter
    model: Decoder | None
    ks: list[int]
    learnt: str | None
    facts: Mapping[str, object]

    def __post_init__(self) -> None:
        if not self.ks:
            raise UserError("every value of --k is above the number of tokens that the drafter drafts; lower --k")


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

    def ks_up_to(self, spec: DrafterSpec, most: int) -> list[int]:
        """Return the values of K up to `most`, for a drafter that drafts no more tokens in a step.

        A note says that larger values are left out.

        Raises:
            UserError: All values are larger.
        """
        ks = [k for k in self.ks if k <= most]
        if not ks:
            raise UserError(
                f"--k {','.join(map(str, self.ks))}: the drafter {spec.text} drafts at most {most} tokens; use --k "
                f"{most} or less"
            )
        if len(ks) < len(self.ks):
            note(f"{spec.text} drafts at most {most} tokens, so larger values of --k are left out")
        return ks

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayContext:
    """Texts on which to replay a drafter, and the settings of the replay.

    Args:
        texts: Prompt and completion of each text. The target wrote the completions.
        limits: Length at which decoding of each completion must stop. Some drafters draft other tokens near this limit.
        sampling: How the drafter samples.
        vocab: Number of ids; further logits are padding.
        most: Largest number of tokens drafted per step.
        load: Function that returns the draft model of a directory.
        load_target: Function that returns the target's model.
        advance: Function to call with the number of texts that are done.
        draft: Default draft, for drafters without draft=.
        data: Sources of text, for drafters that learn from it. "": such a drafter names its own text.
        known: Results of draft models, by their directories, at_once and `most`. Drafters with the same model share
            them.
    """

    texts: Sequence[Text]
    limits: Sequence[int]
    target_path: Path
    sampling: SamplingParams
    vocab: int
    most: int
    load: Callable[[Path], Decoder]
    load_target: Callable[[], Decoder]
    advance: Callable[[int], None]
    draft: Path | None = None
    data: str = ""
    known: dict[tuple[Path, bool, int], list[TokenLogprobs]] = field(default_factory=dict)

    def of_model(self, text: str, name: str, *, at_once: bool) -> list[TokenLogprobs]:
        """Return the result of a draft model, whose passes over the texts run once.

        text, name: See draft_path. at_once: Whether a pass drafts all tokens of a step.
        """
        path = self.draft_path(text, name)
        key = (path, at_once, self.most)
        if key not in self.known:
            self.known[key] = self._scored(self.load(path), at_once)
        return self.known[key]

    def corpus(self, source: str, tokens: int) -> np.ndarray:
        return first_tokens(source, checkpoint.load_tokenizer(self.target_path), tokens)

    def draft_path(self, text: str, name: str) -> Path:
        """Return the directory of a draft model. Arguments and errors: See draft_path below."""
        return draft_path(text, name, self.draft)

    def load_draft(self, text: str, name: str) -> Decoder:
        """Load a draft model. Arguments and errors: See draft_path."""
        return self.load(self.draft_path(text, name))

    def _scored(self, model: Decoder, at_once: bool) -> list[TokenLogprobs]:
        if not at_once:
            return score_tokens(model, self.texts, self.vocab, self.sampling, self.advance)
        token = mask_token(model)
        return score_offsets(model, self.texts, self.vocab, self.sampling, self.most, token, self.advance)


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
