"""Drafters as options: NAME or NAME:KEY=VALUE,... (docs/drafters.md)."""

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

from draftlab.errors import UserError, did_you_mean

MAX_TREE_TOKENS = 256
PROMPT_LOOKUP_MAX = 3  # longest n-gram to match (Saxena 2023, prompt lookup decoding)
FALLBACK_LOOKUP_MAX = 8  # longer matches are right more often, and a gate tells them apart
MATCH_KINDS = 3  # see FallbackSpec.min_match
Siblings = Literal["top", "sampled", "distinct"]


def _split(separator: str) -> BeforeValidator:
    return BeforeValidator(lambda value: value.split(separator) if isinstance(value, str) else value)


class DrafterSpec(BaseModel):
    """One drafter as the user named it. text: as typed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: ClassVar[str]
    own_engine: ClassVar[bool] = False  # not for models that transformers runs

    text: str

    @property
    def reads_data(self) -> bool:
        """Return whether it is built from the run's text, --data."""
        return False

    @property
    def name(self) -> str:
        """Return the text as a file name."""
        return self.text.replace("/", "_")


class DraftModelSpec(DrafterSpec):
    """A drafter with a draft model. draft: its checkpoint; empty: the run's first draft."""

    kind = "model"
    draft: str = ""


class PromptLookupSpec(DrafterSpec):
    kind = "prompt-lookup"
    prompt_lookup_max: int = Field(PROMPT_LOOKUP_MAX, ge=1)


class NgramSpec(DrafterSpec):
    """tokens: of the corpus. data: its source; empty: the run's. outputs: of the target, to count instead."""

    kind = "ngram"
    order: int = Field(4, ge=2)
    tokens: int = Field(2_000_000, ge=1)
    data: str = ""
    outputs: str = ""

    @model_validator(mode="after")
    def _has_one_corpus(self) -> Self:
        if self.outputs and self.data:
            raise ValueError("data, outputs: want one of them")
        return self

    @property
    def reads_data(self) -> bool:
        return not self.data and not self.outputs


class GateSpec(DrafterSpec):
    """Prompt lookup before another drafter, which drafts where no match is long enough.

    min_match: tokens of a match, where its n-gram occurred once before, several times followed by the same token, or by
    different ones. draft_tokens: most that the other one drafts; None: as many as are copied.
    """

    min_match: Annotated[list[int], _split("x")] = [1, 1, 1]
    draft_tokens: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _has_a_length_for_each_kind(self) -> Self:
        if len(self.min_match) != MATCH_KINDS or min(self.min_match) < 1:
            raise ValueError(f"min_match: want {MATCH_KINDS} numbers from 1 on, as 3x1x5")
        return self


class FallbackSpec(DraftModelSpec, PromptLookupSpec, GateSpec):
    """Prompt lookup, then the draft model. outputs: of the target, to learn the gate from."""

    kind = "fallback"
    prompt_lookup_max: int = Field(FALLBACK_LOOKUP_MAX, ge=1)
    outputs: str = ""

    @model_validator(mode="after")
    def _has_one_gate(self) -> Self:
        if self.outputs and (unused := sorted(self.model_fields_set & {"min_match", "draft_tokens"})):
            raise ValueError(f"{', '.join(unused)}: outputs teach them")
        return self


class CascadeSpec(DraftModelSpec, NgramSpec):
    """A draft model that verifies what a cheaper drafter drafts for it, inner_tokens at once."""

    kind = "cascade"
    inner: Literal["ngram", "prompt-lookup"] = "ngram"
    inner_tokens: int = Field(2, ge=1)

    @model_validator(mode="after")
    def _corpus_is_used(self) -> Self:
        idle = self.model_fields_set & {"order", "tokens", "data", "outputs"}
        if self.inner != "ngram" and idle:
            raise ValueError(f"{', '.join(sorted(idle))}: only for inner=ngram")
        return self

    @property
    def reads_data(self) -> bool:
        return self.inner == "ngram" and super().reads_data


class ConfidenceStopSpec(DraftModelSpec):
    kind = "confidence-stop"
    threshold: float = Field(0.4, ge=0, le=1)


class EntropyStopSpec(DraftModelSpec):
    """threshold: in nats."""

    kind = "entropy-stop"
    threshold: float = Field(1.5, ge=0)


class LayerSkipSpec(DrafterSpec):
    """layers: those to keep; none: the fastest set by replay. outputs: of the target, to replay."""

    kind = "layer-skip"
    own_engine = True
    layers: Annotated[list[int], _split("+")] = []
    outputs: str = ""

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if self.layers != sorted(set(self.layers)):
            raise ValueError("layers: want each once, in order")
        if self.layers and self.outputs:
            raise ValueError("layers, outputs: want one of them")
        return self

    @property
    def reads_data(self) -> bool:
        return not self.layers and not self.outputs


class MedusaSpec(DrafterSpec):
    """heads: the output of draftlab medusa."""

    kind = "medusa"
    own_engine = True
    heads: str


class WidthsSpec(DrafterSpec):
    """A drafter that can draft a tree. widths: children of each node by depth."""

    widths: Annotated[list[int], _split("x")] = []
    siblings: Siblings = "sampled"

    @model_validator(mode="after")
    def _is_a_tree(self) -> Self:
        tokens = sum(math.prod(self.widths[: i + 1]) for i in range(len(self.widths)))
        if min(self.widths, default=1) < 1 or tokens > MAX_TREE_TOKENS:
            raise ValueError(f"widths: want numbers from 1 on that make at most {MAX_TREE_TOKENS} tokens")
        return self

    @property
    def drafts_tree(self) -> bool:
        return bool(self.widths)

    @property
    def drawn(self) -> Siblings:
        """Return how siblings are drawn when sampling."""
        return self.siblings


class SearchedTreeSpec(WidthsSpec, DraftModelSpec):
    """nodes: without widths, the fastest tree of at most that many. outputs: of the target, to find it by."""

    nodes: int | None = Field(None, ge=1, le=MAX_TREE_TOKENS)
    outputs: str = ""

    @model_validator(mode="after")
    def _has_one_size(self) -> Self:
        if self.widths and self.model_fields_set & {"nodes", "outputs"}:
            raise ValueError("nodes, outputs: widths decide the tree")
        return self

    @property
    def reads_data(self) -> bool:
        return self.drafts_tree and not self.widths and not self.outputs


class DynamicTreeSpec(WidthsSpec):
    """A drafter that can draft EAGLE-2's dynamic tree: the nodes tokens of highest probability.

    topk: tokens that are read on each level, and children of each; None: no such tree. depth: its levels.
    """

    topk: int | None = Field(None, ge=1, le=64)
    depth: int = Field(5, ge=1, le=16)
    nodes: int | None = Field(8, ge=1, le=MAX_TREE_TOKENS)

    @model_validator(mode="after")
    def _is_one_tree(self) -> Self:
        if self.topk is None:
            if "depth" in self.model_fields_set:
                raise ValueError("depth: only with topk")
            return self
        if idle := self.model_fields_set & {"widths", "siblings", "outputs"}:
            raise ValueError(f"{', '.join(sorted(idle))}: not with topk, whose tree is drawn anew for every text")
        most = self.topk + (self.depth - 1) * self.topk**2
        if self.nodes is None or self.nodes > most:
            raise ValueError(f"nodes: topk {self.topk} and depth {self.depth} make at most {most} tokens")
        return self

    @property
    def drafts_tree(self) -> bool:
        return super().drafts_tree or self.topk is not None

    @property
    def drawn(self) -> Siblings:
        return super().drawn if self.topk is None else "top"


class TreeSpec(DynamicTreeSpec, SearchedTreeSpec):
    kind = "tree"
    own_engine = True

    @property
    def drafts_tree(self) -> bool:
        return True

    @property
    def reads_data(self) -> bool:
        return self.topk is None and super().reads_data


class ParallelSpec(SearchedTreeSpec):
    """A parallel draft: all tokens in one pass, a chain where neither widths nor nodes are given."""

    kind = "parallel"

    @property
    def drafts_tree(self) -> bool:
        return bool(self.widths or self.nodes)

    @model_validator(mode="after")
    def _options_of_trees_are_used(self) -> Self:
        if not self.drafts_tree and (idle := self.model_fields_set & {"siblings", "outputs"}):
            raise ValueError(f"{', '.join(sorted(idle))}: only with a tree; add nodes, or widths")
        return self


class EagleSpec(DynamicTreeSpec, GateSpec):
    """heads: the output of draftlab eagle, or a head in the layout of SpecForge, SafeAILab or speculators.

    Neither widths nor topk: a chain. prompt_lookup_max: prompt lookup comes first.
    """

    kind = "eagle"
    own_engine = True
    heads: str
    prompt_lookup_max: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _siblings_are_used(self) -> Self:
        if "siblings" in self.model_fields_set and not self.widths:
            raise ValueError("siblings: only with widths")
        if "nodes" in self.model_fields_set and self.topk is None:
            raise ValueError("nodes: only with topk")
        if self.prompt_lookup_max is None and (idle := sorted(self.model_fields_set & {"min_match", "draft_tokens"})):
            raise ValueError(f"{', '.join(idle)}: only with prompt_lookup_max")
        if self.prompt_lookup_max is not None and self.drafts_tree:
            raise ValueError("prompt_lookup_max: copies are chains; leave out widths and topk")
        return self


_SPECS: list[type[DrafterSpec]] = [
    NgramSpec, PromptLookupSpec, DraftModelSpec, FallbackSpec, CascadeSpec, ConfidenceStopSpec, EntropyStopSpec,
    LayerSkipSpec, MedusaSpec, TreeSpec, ParallelSpec, EagleSpec,
]  # fmt: skip
ReadsOutputs = NgramSpec | FallbackSpec | SearchedTreeSpec | LayerSkipSpec
DRAFTERS = {spec.kind: spec for spec in _SPECS}


def parse_drafter(text: str) -> DrafterSpec:
    """Parse NAME or NAME:KEY=VALUE,...

    Raises:
        UserError: no such drafter or option, or a value out of range.
    """
    kind, _, rest = text.partition(":")
    if kind not in DRAFTERS:
        raise UserError(f"--drafter {text}: no drafter {kind!r}{did_you_mean(kind, DRAFTERS)}")
    spec = DRAFTERS[kind]
    options: dict[str, Any] = {
        name: value for name, _, value in (part.partition("=") for part in rest.split(",") if part)
    }
    names = [name for name in spec.model_fields if name != "text"]
    if unknown := [name for name in options if name not in names]:
        raise UserError(f"--drafter {text}: {kind} has no option {unknown[0]!r}{did_you_mean(unknown[0], names)}")
    try:
        return spec(text=text, **options)
    except ValidationError as error:
        raise UserError(f"--drafter {text}: {'; '.join(_complaint(dict(item)) for item in error.errors())}") from None


def _complaint(item: dict[str, Any]) -> str:
    """Say what is wrong with one option, as "order: ... (got 1)"."""
    message = str(item["msg"]).removeprefix("Value error, ").lower()
    if not item["loc"]:
        return message
    value = "" if item["type"] == "missing" else f" (got {item['input']!r})"
    return f"{item['loc'][0]}: {message}{value}"
