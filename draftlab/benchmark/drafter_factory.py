"""Drafters by name: what ``--drafter NAME:KEY=VALUE,...`` means, and the drafter that it asks for."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from draftlab import data
from draftlab.acceptance.token_logprobs import score_tokens
from draftlab.benchmark.layer_search import LayerSet, search_layers
from draftlab.console import note
from draftlab.engine.drafters import medusa
from draftlab.engine.drafters.cascade import (
    CascadeDrafter,
    ConfidenceStopDrafter,
    Fallback,
    less_sure_than,
    more_entropy_than,
)
from draftlab.engine.drafters.layer_skip import skip_layers
from draftlab.engine.drafters.medusa import MedusaDrafter
from draftlab.engine.drafters.ngram import LONGEST_MATCH, LookupDrafter, NgramDrafter, Ngrams, fits
from draftlab.engine.drafters.tree import Siblings, TreeDrafter, fastest, full
from draftlab.engine.generate import Clock, Drafter, ModelDrafter, decode, output_tokens
from draftlab.errors import UserError, did_you_mean
from draftlab.latency.profiler import measure_latency
from draftlab.model import Mode, checkpoint, hub
from draftlab.model.decoder import Decoder, with_mode
from draftlab.model.llama import Llama
from draftlab.sampling import SamplingParams

CORPUS = {"order": 4, "tokens": 2_000_000, "data": ""}  # of an n-gram model; data: the workspace's
KINDS: dict[str, dict[str, int | float | str]] = {
    "ngram": CORPUS,
    "lookup": {"longest": LONGEST_MATCH},
    "model": {"draft": ""},
    "fallback": {"draft": "", "longest": LONGEST_MATCH},
    "staged": {"draft": "", "by": "ngram", "count": 2, **CORPUS},
    "unsure": {"draft": "", "below": 0.4},
    "entropy": {"draft": "", "above": 1.5},
    "skip": {"layers": ""},
    "medusa": {"heads": ""},
    "tree": {"draft": "", "widths": "", "nodes": 8, "siblings": "sampled"},
}
MOST_NODES = 256  # of a tree
RANGES: dict[str, tuple[int, float]] = {
    "order": (2, math.inf), "tokens": (1, math.inf), "longest": (1, math.inf), "count": (1, math.inf),
    "nodes": (1, MOST_NODES), "below": (0, 1), "above": (0, math.inf),
}  # fmt: skip
WITHOUT_DRAFT = frozenset({"ngram", "lookup", "skip", "medusa"})
OWN_ENGINE = frozenset({"skip", "medusa", "tree"})  # need what transformers' models do not do here
SIBLINGS: tuple[Siblings, ...] = ("top", "sampled", "distinct")
CALIBRATION = (6, 64, 96)  # texts of the training split, tokens of each prompt, tokens that the target writes behind it
RANKS = 8  # of a draft's tokens that a tree may take
LEVELS = 8
PASSES = 15


@dataclass(frozen=True, slots=True)
class Spec:
    """A drafter as asked for, its options complete. text: as typed."""

    text: str
    kind: str
    options: dict[str, int | float | str]

    @property
    def needs_draft(self) -> bool:
        return self.kind not in WITHOUT_DRAFT

    def number(self, name: str) -> int:
        return int(self.options[name])

    def words(self, name: str) -> str:
        return str(self.options[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterRun:
    """A drafter, the model that it asks for tokens (None: it has none), and the numbers of tokens to try."""

    drafter: Drafter
    model: Decoder | None
    ks: list[int]


def parse(text: str) -> Spec:
    """``NAME`` or ``NAME:KEY=VALUE,...``.

    Raises:
        UserError: no such drafter or option, or a value that is not of its kind.
    """
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise UserError(f"--drafter {text}: no drafter {kind!r}{did_you_mean(kind, KINDS)}")
    options = dict(KINDS[kind])
    for part in filter(None, rest.split(",")):
        name, _, value = part.partition("=")
        if name not in options:
            raise UserError(f"--drafter {text}: {kind} has no option {name!r}{did_you_mean(name, options)}")
        try:
            options[name] = type(options[name])(value)
        except ValueError:
            wanted = {int: "a whole number", float: "a number"}[type(options[name])]
            raise UserError(f"--drafter {text}: {name} is {value!r}; want {wanted}") from None
    spec = Spec(text, kind, options)
    _check(spec)
    return spec


def _check(spec: Spec) -> None:
    """Raises UserError: a value that is out of range."""
    for name, (low, high) in RANGES.items():
        if name in spec.options and not low <= float(spec.options[name]) <= high:
            bounds = f"at least {low}" if high == math.inf else f"{low} to {high}"
            raise UserError(f"--drafter {spec.text}: {name} is {spec.options[name]}; want {bounds}")
    if spec.kind == "tree" and spec.words("siblings") not in SIBLINGS:
        raise UserError(f"--drafter {spec.text}: siblings are {spec.words('siblings')!r}; want {', '.join(SIBLINGS)}")
    if spec.kind == "staged" and spec.words("by") not in ("ngram", "lookup"):
        raise UserError(f"--drafter {spec.text}: by is {spec.words('by')!r}; want ngram or lookup")
    if spec.kind == "medusa" and not spec.words("heads"):
        raise UserError(f"--drafter {spec.text}: add heads=DIR, what draftlab medusa wrote")
    layers, widths = _numbers(spec, "layers", "+"), _numbers(spec, "widths", "x")
    if layers != sorted(set(layers)):
        raise UserError(f"--drafter {spec.text}: layers are {spec.words('layers')}; want each once, in order")
    if min(widths, default=1) < 1 or sum(math.prod(widths[: i + 1]) for i in range(len(widths))) > MOST_NODES:
        raise UserError(f"--drafter {spec.text}: want widths from 1 on that make at most {MOST_NODES} tokens")


def check_target(spec: Spec, layers: int | None, vocab: int) -> None:
    """layers: of the target; None: transformers would run it.

    Raises:
        UserError: what is asked for does not fit such a target.
    """
    if layers is None and spec.kind in OWN_ENGINE:
        others = ", ".join(kind for kind in KINDS if kind not in OWN_ENGINE)
        raise UserError(
            f"--drafter {spec.text} needs a target that the engine itself runs, not transformers; take {others}"
        )
    if layers is not None and max(_numbers(spec, "layers", "+"), default=0) >= layers:
        raise UserError(f"--drafter {spec.text}: layers are {spec.words('layers')}; the target has 0 to {layers - 1}")
    if "order" in spec.options and not fits(vocab, spec.number("order")):
        context = f"{spec.number('order') - 1} tokens of {vocab}"
        raise UserError(f"--drafter {spec.text}: contexts of {context} do not fit 64 bits; take a smaller order")


def check_rule(spec: Spec, rule: str) -> None:
    """Raises UserError: a rule that would not be lossless for what this drafter drafts."""
    if spec.kind != "tree":
        return
    if rule == "block":
        raise UserError(f"--rule block judges chains, and --drafter {spec.text} drafts a tree; take recursive or match")
    if rule == "k-sequential" and spec.words("siblings") != "sampled":
        raise UserError(
            f"--rule k-sequential judges tokens that were drawn independently, and those of --drafter {spec.text} are "
            f"{spec.words('siblings')}; add siblings=sampled, or take recursive"
        )


class DrafterFactory:
    """Builds drafters for one target; what several of them need is made once."""

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
    ) -> None:
        """draft: of drafters that name none. load: a checkpoint as the run computes it."""
        self.target, self.target_path, self.load, self.draft = target, target_path, load, draft
        self.data, self.sampling, self.ks, self.clock = data, sampling, ks, clock
        self.mode: Mode = mode
        self.vocab = checkpoint.vocab_size(target_path)

    def build(self, spec: Spec) -> DrafterRun:
        """Raises UserError: what it needs cannot be had, or does not fit the target."""
        if spec.kind in ("ngram", "lookup"):
            return DrafterRun(drafter=self._modelless(spec, spec.kind), model=None, ks=self.ks)
        if spec.kind == "skip":
            model = self._skipping(spec)
            return DrafterRun(drafter=ModelDrafter(model, self.vocab), model=model, ks=self.ks)
        if spec.kind == "medusa":
            return self._medusa(spec)
        model = self.load(self._draft_of(spec))
        drafter = self._of_model(spec, model)
        ks = [len(drafter.parents)] if isinstance(drafter, TreeDrafter) else self.ks
        return DrafterRun(drafter=drafter, model=model, ks=ks)

    def _medusa(self, spec: Spec) -> DrafterRun:
        heads = medusa.read(Path(spec.words("heads")), self.target_path)
        ks = [k for k in self.ks if k <= len(heads)]
        if not ks:
            raise UserError(
                f"--drafter {spec.text}: {len(heads)} heads draft at most {len(heads)} tokens; take such a --k"
            )
        return DrafterRun(drafter=MedusaDrafter(_own(spec, self.target), heads), model=None, ks=ks)

    def _of_model(self, spec: Spec, model: Decoder) -> Drafter:
        if spec.kind == "fallback":
            return Fallback(LookupDrafter(spec.number("longest")), ModelDrafter(model, self.vocab), self.vocab)
        if spec.kind == "staged":
            inner = self._modelless(spec, spec.words("by"))
            return CascadeDrafter(model, self.vocab, inner, spec.number("count"))
        if spec.kind == "unsure":
            return ConfidenceStopDrafter(model, self.vocab, less_sure_than(float(spec.options["below"])))
        if spec.kind == "entropy":
            return ConfidenceStopDrafter(model, self.vocab, more_entropy_than(float(spec.options["above"])))
        if spec.kind == "tree":
            siblings = SIBLINGS[SIBLINGS.index(spec.words("siblings"))]
            return TreeDrafter(model, self.vocab, self._parents(spec, _own(spec, model)), siblings)
        return ModelDrafter(model, self.vocab)

    def _draft_of(self, spec: Spec) -> Path:
        named = spec.words("draft")
        if not named and self.draft is None:
            raise UserError(f"--drafter {spec.text} needs a draft: add draft=DIR, or give one with --draft")
        return hub.locate(named) if named else self.draft or Path()

    def _modelless(self, spec: Spec, kind: str) -> Drafter:
        if kind == "lookup":
            return LookupDrafter(int(spec.options.get("longest", LONGEST_MATCH)))
        order, tokens, source = spec.number("order"), spec.number("tokens"), spec.words("data") or self.data
        note(f"{spec.text}: counting {order}-grams of {source}")
        corpus = self._corpus(source, tokens)
        if len(corpus) < order:
            raise UserError(
                f"--drafter {spec.text}: {len(corpus)} tokens of {source} hold no {order}-gram; take more tokens"
            )
        return NgramDrafter(Ngrams(corpus, self.vocab, order))

    def _corpus(self, source: str, tokens: int) -> np.ndarray:
        batches = data.open_batches(source, self.tokenizer, rows=1, seq_len=tokens, steps=1, seed=0)
        return np.concatenate([stream[:tokens] for stream in batches.streams.values()])[: 2 * tokens]

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return checkpoint.load_tokenizer(self.target_path)

    @cached_property
    def texts(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Prompts of the training split, and what the target writes behind them as it will be asked to."""
        count, length, new = CALIBRATION
        stream = self._corpus(self.data, 64 * count * length).astype(np.int64)
        prompts = [stream[at : at + length].tolist() for at in range(0, 64 * count * length, 64 * length)][:count]
        sampling = replace(self.sampling, max_tokens=new, seed=1)
        wrote = output_tokens(decode(self.target, prompts, sampling))
        return [(np.array(p), np.array(w)) for p, w in zip(prompts, wrote, strict=True)]

    def _skipping(self, spec: Spec) -> Llama:
        target, named = _own(spec, self.target), _numbers(spec, "layers", "+")
        if named:
            return with_mode(skip_layers(target, named), self.mode)
        layers = target.shape.layers
        few = {"all": target, "one": with_mode(skip_layers(target, [0]), self.mode)}
        ms = self._ms(few, [1])
        each = (ms["all"][0] - ms["one"][0]) / (layers - 1)
        found: LayerSet = max(
            search_layers(target, self.texts, self.sampling, lambda n: (ms["one"][0] + (n - 1) * each) / ms["all"][0]),
            key=lambda kept: kept.speedup,
        )
        note(
            f"{spec.text}: keeps {len(found.layers)} of {layers} layers, layers={'+'.join(map(str, found.layers))}; "
            f"by replay {found.tokens_per_pass:.2f} tokens per pass at K = {found.k}, speed-up {found.speedup:.2f}"
        )
        return with_mode(skip_layers(target, found.layers), self.mode)

    def _parents(self, spec: Spec, model: Llama) -> tuple[int, ...]:
        target, widths = _own(spec, self.target), _numbers(spec, "widths", "x")
        if widths:
            return full(widths)
        nodes = spec.number("nodes")
        ranks = np.concatenate([one.ranks for one in score_tokens(model, self.texts, self.vocab, self.sampling)])
        ranked = [float(((ranks == rank).sum() + 1) / (len(ranks) + RANKS)) for rank in range(RANKS)]
        wide = sorted({1, 2, 4, 8, nodes + 1})
        ms = self._ms({"draft": model, "target": target}, wide)
        parents, speed = fastest(
            ranked, ms["draft"][0], lambda width: float(np.interp(width, wide, ms["target"])), nodes, LEVELS
        )
        shape, gain = ", ".join(map(str, parents)), speed * ms["target"][0]
        right = ", ".join(f"{share:.2f}" for share in ranked[:3])
        note(
            f"{spec.text}: {len(parents)} tokens, behind number {shape} (0: the text); predicted {gain:.2f} times "
            f"plain decoding; the draft's first tokens by rank are right {right}"
        )
        return parents

    def _ms(self, models: dict[str, Llama], widths: Sequence[int]) -> dict[str, list[float]]:
        found = measure_latency(models, widths=list(widths), context=96, passes=PASSES, clock=self.clock)
        return {name: [latency.median_ms for latency in curve] for name, curve in found.items()}


def _own(spec: Spec, model: Decoder) -> Llama:
    """Raises UserError: transformers runs it."""
    if not isinstance(model, Llama):
        raise UserError(
            f"--drafter {spec.text} needs models that the engine itself runs, and transformers runs this one"
        )
    return model


def _numbers(spec: Spec, name: str, between: str) -> list[int]:
    text = str(spec.options.get(name, ""))
    try:
        return [int(part) for part in text.split(between)] if text else []
    except ValueError:
        raise UserError(f"--drafter {spec.text}: {name} is {text!r}; want numbers as 2{between}1") from None
