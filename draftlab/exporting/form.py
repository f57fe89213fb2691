"""The form that an export is written in: the server that it is for, its layout and the type of its weights."""

from dataclasses import dataclass
from typing import Literal

import torch

from draftlab.servers.kinds import ServerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """to: hf, gguf, speculators or the name of a server. server: None for hf. outtype: type of a GGUF file's matrices,
    None for a Hugging Face directory. dtype: of a directory's weights, None as stored. heterogeneous: the draft keeps
    its own vocabulary.
    """

    to: str
    server: ServerKind | None = None
    outtype: str | None = None
    dtype: torch.dtype | None = None
    heterogeneous: bool = False

    @property
    def layout(self) -> Literal["native", "speculators"]:
        return "speculators" if self.to == "speculators" else "native"

    @property
    def has_script(self) -> bool:
        return self.to not in ("hf", "gguf")
