"""Sampling parameters of local models and servers. No torch."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

FinishReason = Literal["length", "stop"]  # length: the text has max_tokens; stop: a stop token
Filter = Literal["temperature", "top_k", "top_p", "min_p"]
FILTERS: tuple[Filter, ...] = ("temperature", "top_k", "top_p", "min_p")  # as in transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters, with vLLM's names.

    Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 have no effect. pydantic checks the bounds of values in files.

    Attributes:
        seed: Seed of prompt 0. The seed of prompt i is seed + i.
        stop_token_ids: Token ids that end a text. The id is part of the text.
        filters: The parameters that change the distribution, in their order. A parameter that is not in it has no
            effect, and one that is in it twice takes effect twice.
    """

    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_k: NonNegativeInt = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    max_tokens: NonNegativeInt = 128
    seed: int = 0
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    ignore_eos: bool = False
    filters: tuple[Filter, ...] = FILTERS

    def allows(self, tokens: int, reason: FinishReason) -> bool:
        """Return whether a text of this number of tokens can end for this reason: "length" only at max_tokens."""
        return tokens == self.max_tokens if reason == "length" else tokens <= self.max_tokens

    @property
    def unmodified(self) -> bool:
        """Return whether these parameters sample from the model's own distribution."""
        return not self.active

    @property
    def active(self) -> tuple[Filter, ...]:
        """Return the filters that change a distribution, in their order."""
        neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        return tuple(name for name in self.filters if getattr(self, name) != neutral[name])

    def unlimited(self) -> "SamplingParams":
        """Return a copy with the same distribution, but with max_tokens 0, seed 0 and no stop tokens."""
        return replace(self, max_tokens=0, seed=0, stop_token_ids=())

    def describe(self) -> str:
        """Return the parameters of the distribution as text, such as "greedy" or "temperature 0.7, top-p 0.9"."""
        if self.temperature == 0:
            return "greedy"
        shown = [name for name in self.filters if name in ("temperature", *self.active)]
        return ", ".join(f"{name.replace('_', '-')} {getattr(self, name):g}" for name in shown)
