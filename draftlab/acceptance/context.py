"""Texts to replay a drafter on, and the models that it needs for that."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from draftlab.acceptance.token_logprobs import Text
from draftlab.model import hub, modes
from draftlab.model.decoder import Decoder
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.llama import Llama
from draftlab.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayContext:
    """Texts to replay a drafter on.

    Args:
        sampling: How the drafter samples.
        vocab: Number of logits that count.
        most: Largest number of tokens drafted per step.
    """

    texts: list[Text]
    target_path: Path
    sampling: SamplingParams
    vocab: int
    most: int
    dtype: torch.dtype
    device: torch.device
    advance: Callable[[int], None]

    def load_draft(self, name: str) -> Decoder:
        return modes.load(hub.locate(name), self.dtype, self.device)

    def load_target(self) -> Llama | HFDecoder:
        target = modes.load(self.target_path, self.dtype, self.device)
        assert isinstance(target, Llama | HFDecoder)  # there is no other decoder on disk
        return target
