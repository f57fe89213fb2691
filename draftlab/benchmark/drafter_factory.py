"""Builds the drafters that --drafter names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from draftlab import data
from draftlab.acceptance.expected import chances
from draftlab.acceptance.offset_logprobs import score_offsets
from draftlab.acceptance.token_logprobs import Text, score_tokens
from draftlab.benchmark.layer_search import search_layers
from draftlab.benchmark.lookup_gate import learn_gate, replay_matches
from draftlab.config.drafters import (
    DRAFTERS,
    PROMPT_LOOKUP_MAX,
    CascadeSpec,
    ConfidenceStopSpec,
    DrafterSpec,
    DraftModelSpec,
    DynamicTreeSpec,
    EagleSpec,
    EntropyStopSpec,
    FallbackSpec,
    GateSpec,
    LayerSkipSpec,
    MedusaSpec,
    NgramSpec,
    ParallelSpec,
    PromptLookupSpec,
    SearchedTreeSpec,
    TreeSpec,
    WidthsSpec,
)
from draftlab.config.score import RuleName
from draftlab.console import note
from draftlab.engine.clocks import Clock
from draftlab.engine.drafters import medusa
from draftlab.engine.drafters.cascade import (
    CascadeDrafter,
    ConfidenceStopDrafter,
    FallbackDrafter,
    confidence_below,
    entropy_above,
)
from draftlab.engine.drafters.dynamic_tree import DynamicTreeDrafter
from draftlab.engine.drafters.eagle import EagleDrafter, EagleTreeDrafter
from draftlab.engine.drafters.layer_skip import skip_layers
from draftlab.engine.drafters.medusa import MedusaDrafter
from draftlab.engine.drafters.ngram import NgramDrafter, NgramModel, PromptLookupDrafter, contexts_fit
from draftlab.engine.drafters.parallel import ParallelDrafter, ParallelTreeDrafter, mask_token, model_drafter
from draftlab.engine.drafters.tree import PathShare, TreeDrafter, fastest_tree, full_tree, independent, observed
from draftlab.engine.generate import Drafter, ModelDrafter, decode, output_tokens
from draftlab.errors import UserError
from draftlab.latency.profiler import measure_latency
from draftlab.model import Mode, checkpoint, eagle_llama, hub
from draftlab.model.decoder import Decoder, with_mode
from draftlab.model.llama import Llama
from draftlab.model.parallel import trained_offsets
from draftlab.sampling import SamplingParams
from draftlab.target_outputs.outputs import TargetOutput
from draftlab.target_outputs.store import HELDOUT, read_manifest, read_store

STORED_TEXTS = 32  # of a store, to learn from
CALIBRATION = (6, 64, 96)  # texts of the training split, tokens of each prompt, tokens that the target adds
RANKS = 8  # of a draft's tokens that a tree may take
MAX_DEPTH = 8
PASSES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterRun:
    """A drafter, its draft model if it has one, and the numbers of tokens to try."""

    drafter: Drafter
    model: Decoder | None
    ks: list[int]
    learnt: str | None = None  # the drafter with what it learnt when it was built, as --drafter takes it


def check_target(spec: DrafterSpec, layers: int | None, vocab: int) -> None:
    """Check that a drafter fits the target. layers: of the target, or None if transformers runs it.

    Raises:
        UserError: it does not.
    """
    gated = isinstance(spec, FallbackSpec) and spec.outputs
    if layers is None and (spec.own_engine or gated or (isinstance(spec, WidthsSpec) and spec.drafts_tree)):
        others = ", ".join(kind for kind, each in DRAFTERS.items() if not each.own_engine)
        raise UserError(f"--drafter {spec.text} does not work with a target that transformers runs; use {others}")
    if layers is not None and isinstance(spec, LayerSkipSpec) and max(spec.layers, default=0) >= layers:
        raise UserError(f"--drafter {spec.text}: the target has the layers 0 to {layers - 1}")
    if isinstance(spec, NgramSpec) and not contexts_fit(vocab, spec.order):
        contexts = f"contexts of {spec.order - 1} tokens of {vocab}"
        raise UserError(f"--drafter {spec.text}: {contexts} do not fit 64 bits; use a smaller order")


def check_rule(spec: DrafterSpec, rule: RuleName) -> None:
    """Raises UserError: the rule is not lossless for what this drafter drafts."""
    if not isinstance(spec, WidthsSpec) or not spec.drafts_tree:
        return
    if rule == "block":
        raise UserError(
            f"--rule block verifies chains, and --drafter {spec.text} drafts a tree; use recursive or match"
        )
    if rule == "k-sequential" and spec.drawn != "sampled":
        raise UserError(
            f"--rule k-sequential needs independently sampled siblings, and those of --drafter {spec.text} are "
            f"{spec.drawn}; add siblings=sampled, or use recursive"
        )


class DrafterFactory:
    """Builds drafters for one target; shared parts are built once."""

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
        int8: bool = False,
    ) -> None:
        """draft: of drafters that name none. load: loads a checkpoint in the run's mode. int8: round heads."""
        self.target, self.target_path, self.load, self.draft = target, target_path, load, draft
        self.data, self.sampling, self.ks, self.clock = data, sampling, ks, clock
        self.mode: Mode = mode
        self.int8 = int8
        self.vocab = checkpoint.vocab_size(target_path)

    def build(self, spec: DrafterSpec) -> DrafterRun:
        """Raises UserError: something that the drafter needs is missing, or does not fit the target."""
        if isinstance(spec, MedusaSpec):
            return self._medusa(spec)
        if isinstance(spec, EagleSpec):
            drafter = self._eagle(spec)
            return DrafterRun(drafter=drafter, model=None, ks=self._ks(spec, drafter))
        if isinstance(spec, LayerSkipSpec):
            layers = spec.layers or self._fastest_layers(spec)
            model = with_mode(skip_layers(_own_engine(spec, self.target), layers), self.mode)
            learnt = None if spec.layers else f"layer-skip:layers={'+'.join(map(str, layers))}"
            return DrafterRun(drafter=ModelDrafter(model, self.vocab), model=model, ks=self.ks, learnt=learnt)
        if not isinstance(spec, DraftModelSpec):
            return DrafterRun(drafter=self._without_model(spec), model=None, ks=self.ks)
        model = self.load(self._draft_path(spec))
        if isinstance(spec, FallbackSpec) and spec.outputs:
            return self._gated(spec, model)
        drafter = self._with_model(spec, model)
        return DrafterRun(drafter=drafter, model=model, ks=self._ks(spec, drafter))

    def _ks(self, spec: DrafterSpec, drafter: Drafter) -> list[int]:
        """Return the numbers of tokens to try: of a tree its own."""
        if isinstance(spec, DynamicTreeSpec) and spec.topk and spec.nodes:
            return [spec.nodes]
        return [len(drafter.parents)] if isinstance(drafter, TreeDrafter) else self.ks

    def _medusa(self, spec: MedusaSpec) -> DrafterRun:
        heads = medusa.read(Path(spec.heads), self.target_path)
        ks = [k for k in self.ks if k <= len(heads)]
        if not ks:
            raise UserError(f"--drafter {spec.text}: {len(heads)} heads draft at most {len(heads)} tokens; lower --k")
        return DrafterRun(drafter=MedusaDrafter(_own_engine(spec, self.target), heads), model=None, ks=ks)

    def _eagle(self, spec: EagleSpec) -> Drafter:
        target = _own_engine(spec, self.target)
        model = eagle_llama.load(Path(spec.heads), self.target_path, target)
        drafter = EagleDrafter(target, eagle_llama.with_mode(model, self.mode, self.int8))
        if spec.topk:
            return DynamicTreeDrafter(EagleTreeDrafter(drafter, (0,), "top"), spec.topk, spec.depth)
        if spec.prompt_lookup_max is not None:
            return self._behind_lookup(spec, spec.prompt_lookup_max, drafter)
        return EagleTreeDrafter(drafter, full_tree(spec.widths), spec.siblings) if spec.widths else drafter

    def _behind_lookup(self, spec: GateSpec, longest: int, drafter: Drafter) -> Drafter:
        return FallbackDrafter(PromptLookupDrafter(longest, spec.min_match), drafter, self.vocab, spec.draft_tokens)

    def _with_model(self, spec: DraftModelSpec, model: Decoder) -> Drafter:
        match spec:
            case FallbackSpec():
                return self._behind_lookup(spec, spec.prompt_lookup_max, model_drafter(model, self.vocab))
            case CascadeSpec():
                return CascadeDrafter(model, self.vocab, self._without_model(spec), spec.inner_tokens)
            case ConfidenceStopSpec():
                return ConfidenceStopDrafter(model, self.vocab, confidence_below(spec.threshold))
            case EntropyStopSpec():
                return ConfidenceStopDrafter(model, self.vocab, entropy_above(spec.threshold))
            case TreeSpec(topk=int(topk)):
                reader = TreeDrafter(_own_engine(spec, model), self.vocab, (0,), "top")
                return DynamicTreeDrafter(reader, topk, spec.depth)
            case TreeSpec():
                return TreeDrafter(model, self.vocab, self._parents(spec, _own_engine(spec, model)), spec.siblings)
            case ParallelSpec() if spec.drafts_tree:
                parents = self._parents(spec, _own_engine(spec, model))
                return ParallelTreeDrafter(model, self.vocab, parents, spec.siblings)
            case ParallelSpec():
                return ParallelDrafter(model, self.vocab)
            case _:
                return ModelDrafter(model, self.vocab)

    def _gated(self, spec: FallbackSpec, model: Decoder) -> DrafterRun:
        """Build fallback with the gate that outputs of the target teach."""
        draft, target, longest = _own_engine(spec, model), _own_engine(spec, self.target), spec.prompt_lookup_max
        written = _spread(spec.outputs)
        texts = [(o.prompt, o.ids) for o in written]
        note(f"{spec.text}: replaying {len(texts)} texts of the target")
        if draft.pard_token is None:
            scored = score_tokens(draft, texts, self.vocab, self.sampling)
        else:
            scored = score_offsets(draft, texts, self.vocab, self.sampling, max(self.ks), draft.pard_token)
        sampling = read_manifest(Path(spec.outputs)).sampling
        alike = sampling is not None and 0 < sampling.temperature == self.sampling.temperature
        log_p = [o.logprobs if alike and o.logprobs is not None else np.zeros(len(o.ids)) for o in written]
        accepted = [chances(score.logprobs.T, own).T for score, own in zip(scored, log_p, strict=True)]
        positions = replay_matches(texts, accepted, longest, max(self.ks))
        parallel_widths = {} if draft.pard_token is None else {k: 3 * k // 2 for k in self.ks}
        widths = sorted({1, *(k + 1 for k in self.ks), *parallel_widths.values()})
        ms = self._pass_ms({"draft": draft, "target": target}, widths)
        pass_ms, verify_ms = (dict(zip(widths, ms[name], strict=True)) for name in ("draft", "target"))
        draft_ms = {k: pass_ms[parallel_widths[k]] if parallel_widths else k * pass_ms[1] for k in self.ks}
        gate = learn_gate(positions, self.ks, longest, draft_ms.__getitem__, verify_ms.__getitem__)
        spelled, plain_ms = "x".join(map(str, gate.min_match)), ms["target"][0]
        options = f"min_match={spelled},draft_tokens={gate.draft_tokens}"
        note(
            f"{spec.text}: {options}; predicted at K = {gate.k}: {gate.speed * plain_ms:.2f} times plain decoding; the "
            f"draft model alone {gate.model_speed * plain_ms:.2f}, with every match copied "
            f"{gate.ungated_speed * plain_ms:.2f}"
        )
        named = f"draft={spec.draft}," if spec.draft else ""
        learnt = f"fallback:{named}prompt_lookup_max={longest},{options}"
        known = {"min_match": list(gate.min_match), "draft_tokens": gate.draft_tokens}
        drafter = self._with_model(spec.model_copy(update=known), model)
        return DrafterRun(drafter=drafter, model=model, ks=self.ks, learnt=learnt)

    def _without_model(self, spec: DrafterSpec) -> Drafter:
        if not isinstance(spec, NgramSpec) or (isinstance(spec, CascadeSpec) and spec.inner == "prompt-lookup"):
            return PromptLookupDrafter(
                spec.prompt_lookup_max if isinstance(spec, PromptLookupSpec) else PROMPT_LOOKUP_MAX
            )
        source = spec.outputs or spec.data or self.data
        note(f"{spec.text}: counting {spec.order}-grams of {source}")
        corpus = _answers(spec) if spec.outputs else self._corpus(source, spec.tokens)
        if len(corpus) < spec.order:
            raise UserError(
                f"--drafter {spec.text}: {len(corpus)} tokens of {source} hold no {spec.order}-gram; use more tokens"
            )
        return NgramDrafter(NgramModel(corpus, self.vocab, spec.order))

    def _draft_path(self, spec: DraftModelSpec) -> Path:
        if not spec.draft and self.draft is None:
            raise UserError(f"--drafter {spec.text} needs a draft: add draft=DIR, or give one with --draft")
        return hub.locate(spec.draft) if spec.draft else self.draft or Path()

    def _corpus(self, source: str, tokens: int) -> np.ndarray:
        batches = data.open_batches(source, self.tokenizer, rows=1, seq_len=tokens, steps=1, seed=0)
        return np.concatenate([stream[:tokens] for stream in batches.streams.values()])[: 2 * tokens]

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return checkpoint.load_tokenizer(self.target_path)

    def _texts(self, outputs: str) -> list[Text]:
        """Return prompts with completions of the target: stored ones, or those of prompts of the run's text."""
        return [(o.prompt.astype(np.int64), o.ids) for o in _spread(outputs)] if outputs else self.written_texts

    @cached_property
    def written_texts(self) -> list[Text]:
        """Prompts of the training split, with completions of the target under the run's sampling."""
        count, length, max_tokens = CALIBRATION
        stream = self._corpus(self.data, 64 * count * length).astype(np.int64)
        prompts = [stream[at : at + length].tolist() for at in range(0, 64 * count * length, 64 * length)][:count]
        sampling = replace(self.sampling, max_tokens=max_tokens, seed=1)
        completions = output_tokens(decode(self.target, prompts, sampling))
        return [(np.array(p), np.array(c)) for p, c in zip(prompts, completions, strict=True)]

    def _fastest_layers(self, spec: LayerSkipSpec) -> list[int]:
        target = _own_engine(spec, self.target)
        layers = target.shape.layers
        ms = self._pass_ms({"all": target, "one": with_mode(skip_layers(target, [0]), self.mode)}, [1])
        all_ms, one_ms = ms["all"][0], ms["one"][0]
        layer_ms = (all_ms - one_ms) / (layers - 1)
        sets = search_layers(
            target, self._texts(spec.outputs), self.sampling, lambda n: (one_ms + (n - 1) * layer_ms) / all_ms
        )
        best = max(sets, key=lambda candidate: candidate.speedup)
        note(
            f"{spec.text}: keeps {len(best.layers)} of {layers} layers, layers={'+'.join(map(str, best.layers))}; "
            f"predicted {best.tokens_per_pass:.2f} tokens per pass at K = {best.k}, speed-up {best.speedup:.2f}"
        )
        return list(best.layers)

    def _parents(self, spec: SearchedTreeSpec, model: Llama) -> tuple[int, ...]:
        """Return the tree of the widths, or the one that is predicted to be the fastest."""
        target = _own_engine(spec, self.target)
        if spec.widths:
            return full_tree(spec.widths)
        nodes, parallel = spec.nodes or 0, isinstance(spec, ParallelSpec)
        depth = min(nodes, MAX_DEPTH, trained_offsets(self._draft_path(spec)) or MAX_DEPTH) if parallel else MAX_DEPTH
        share = self._path_shares(spec, model, depth if parallel else None)
        widths = sorted({1, 2, 4, 8, nodes + 1, 2 * depth if parallel else 1})
        ms = self._pass_ms({"draft": model, "target": target}, widths)

        def step_ms(levels: int, tokens: int, accepted: float) -> float:
            """A parallel draft reads what was accepted and a mask token for each level but one."""
            drafts, read = (1, accepted + levels - 1) if parallel else (levels, 1)
            return drafts * np.interp(read, widths, ms["draft"]) + np.interp(tokens + 1, widths, ms["target"])

        parents, speed = fastest_tree(share, step_ms, RANKS, nodes, depth)
        gain, shares = speed * ms["target"][0], ", ".join(f"{share((rank,)):.2f}" for rank in range(3))
        note(
            f"{spec.text}: {len(parents)} tokens with parents {', '.join(map(str, parents))} (0: the text); predicted "
            f"{gain:.2f} times plain decoding; the draft's first tokens by rank are right {shares}"
        )
        return parents

    def _path_shares(self, spec: SearchedTreeSpec, model: Llama, offsets: int | None) -> PathShare:
        """Return how often tokens of the draft are the target's. offsets: of a parallel draft."""
        texts = self._texts(spec.outputs)
        if offsets is not None:
            scored = score_offsets(model, texts, self.vocab, self.sampling, offsets, mask_token(model))
            return observed([text.ranks for text in scored], offsets)
        ranks = np.concatenate([text.ranks for text in score_tokens(model, texts, self.vocab, self.sampling)])
        return independent([float(((ranks == rank).sum() + 1) / (len(ranks) + RANKS)) for rank in range(RANKS)])

    def _pass_ms(self, models: dict[str, Llama], widths: Sequence[int]) -> dict[str, list[float]]:
        curves = measure_latency(models, widths=list(widths), context=96, passes=PASSES, clock=self.clock)
        return {name: [latency.median_ms for latency in curve] for name, curve in curves.items()}


def _spread(outputs: str) -> list[TargetOutput]:
    """Return STORED_TEXTS of a store of target outputs, of its held-out part if it has one: drafts did not learn it."""
    store, heldout = Path(outputs), Path(outputs) / HELDOUT
    written = [o for o in read_store(heldout if heldout.exists() else store).outputs if len(o.ids) > 1]
    return written[:: max(1, len(written) // STORED_TEXTS)][:STORED_TEXTS]


def _answers(spec: NgramSpec) -> np.ndarray:
    """Return what the target wrote, each text after the last tokens of its prompt, as one stream of spec.tokens."""
    texts = [np.concatenate([o.prompt[1 - spec.order :], o.ids]) for o in read_store(Path(spec.outputs)).outputs]
    return np.concatenate(texts)[: spec.tokens]


def _own_engine(spec: DrafterSpec, model: Decoder) -> Llama:
    """Raises UserError: transformers runs the model."""
    if not isinstance(model, Llama):
        raise UserError(f"--drafter {spec.text} does not work with models that transformers runs")
    return model
