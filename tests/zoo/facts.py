"""models.yaml as typed facts, and what is expected of each checkpoint."""

from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict

File = Literal["single", "sharded", "bin", "consolidated", "original", "inv_freq", "tied_head", "masks", "bare"]
YES = "yes"


class Sizes(BaseModel):
    """Sizes of the real checkpoint. head: dimensions of a head; tokens: ids of its tokenizer, vocab: its logits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: int
    hidden: int
    heads: int
    kv: int
    head: int
    ffn: int
    vocab: int
    tokens: int
    context: int


class Facts(BaseModel):
    """One checkpoint. prune, own, gguf, rows, search: yes, or words that the refusal must have.

    rows: batches of prompts.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    hub: str
    family: str
    type: str
    arch: str = ""
    sizes: Sizes
    config: dict[str, Any] = {}
    omit: list[str] = []
    bos: int = 1
    eos: int | list[int] = 2
    stops: list[int] = []
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    files: list[File]
    words: Literal["bytes", "sentencepiece", "tokenizer.model", "merges.txt"] = "bytes"
    chat: bool = False
    note: str = ""
    source: Literal["litgpt", "copy", "transformers", "known"]
    why: str = ""
    prune: str = YES
    own: str = ""
    gguf: str = ""
    rows: str = YES
    search: str = YES

    @property
    def architecture(self) -> str:
        return self.arch or "".join(part.title() for part in self.type.split("_")) + "ForCausalLM"

    @property
    def tied(self) -> bool:
        return bool(self.config.get("tie_word_embeddings", self.type in TIED))

    @property
    def runs(self) -> str:
        """yes: the engine itself runs it; else words of the refusal where only the engine will do."""
        return self.own or self.prune

    @property
    def writes_gguf(self) -> str:
        return self.gguf or self.prune


TIED = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "opt",
    "gpt2",
    "falcon",
    "bloom",
    "starcoder2",
)  # by their configs' defaults


@cache
def zoo() -> dict[str, Facts]:
    text = (Path(__file__).parent / "models.yaml").read_text()
    return {name: Facts(**fields) for name, fields in yaml.safe_load(text).items()}
