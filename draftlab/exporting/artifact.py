"""The drafts that draftlab can check and export: draft models, parallel drafts and heads, each with its target.

R texts, n tokens of a text, K drafted tokens.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from draftlab.acceptance.token_logprobs import TokenLogprobs, score_offsets, score_tokens
from draftlab.config.base import MAX_K
from draftlab.drafters.context import ReplayContext
from draftlab.errors import UserError
from draftlab.exporting import gguf, hf, trials
from draftlab.exporting.gguf import DEFAULT_CONTEXT
from draftlab.exporting.verify import TargetTexts
from draftlab.heads.base import HeadSizes, head_kind
from draftlab.heads.eagle3 import layout
from draftlab.heads.eagle3.layout import HeadShape
from draftlab.model import checkpoint, devices, hub, modes, parallel
from draftlab.model.checkpoint import Checkpoint
from draftlab.model.decoder import Decoder
from draftlab.model.hf_files import read_head_ids
from draftlab.model.sentencepiece import PROBES
from draftlab.model.shape import Shape
from draftlab.model.size import read_size
from draftlab.model.tokenizer import first_difference
from draftlab.quantities import format_number
from draftlab.servers.kinds import Artifact, DraftKind, Finding, ServerKind, error, ok, warning
from draftlab.shell import typed

UNMEASURED_K = "a default; draftlab score finds the fastest K"
# characters with which tokenizers mark a leading space in a token
SPACES = ("\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}", "\N{LOWER ONE EIGHTH BLOCK}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The form of an export: its server, its layout, and the type of its weights.

    Args:
        to: Value of --to: hf, gguf, speculators or the name of a server.
        server: Kind of the server. None for hf.
        outtype: Type of the matrices in a GGUF file. None: the export is a Hugging Face directory.
        dtype: Type of the weights in a Hugging Face directory. Default: the stored type.
        heterogeneous: Whether the draft keeps its own vocabulary, which differs from the target's.
    """

    to: str
    server: ServerKind | None = None
    outtype: str | None = None
    dtype: torch.dtype | None = None
    heterogeneous: bool = False

    @property
    def layout(self) -> Literal["native", "speculators"]:
        return "speculators" if self.to == "speculators" else "native"


class DraftModel:
    """A draft model that makes one pass for each drafted token.

    Attributes:
        served_by: Names of the servers that load the directory without an export. If None, the checks of each
            ServerKind find out whether its server can load the directory.
        layer_ids: Layers of the target whose hidden states a head reads; empty for a draft model.
        most: Largest number of tokens to draft per step.
        default_k: Number of tokens to draft per step if the draft has no score, and the reason for this number.
    """

    kind: DraftKind = "draft model"
    served_by: frozenset[str] | None = None
    in_parallel = False
    head: HeadShape | None = None
    layer_ids: Sequence[int] = ()
    most = MAX_K
    default_k: tuple[int, str] = (4, UNMEASURED_K)

    def __init__(self, path: Path, target: Checkpoint) -> None:
        """Open a draft model for a target, without loading its weights.

        Raises:
            UserError: A checkpoint is missing or unreadable, or its tokenizer has ids without an embedding.
        """
        self.path = path
        self.target = target.directory
        self.draft_checkpoint = Checkpoint(path)
        self.target_checkpoint = target
        self.draft_checkpoint.check()
        self.config: Mapping[str, Any] = self.draft_checkpoint.config
        self.vocab = self.draft_checkpoint.vocab_size
        self.target_vocab = self.target_checkpoint.vocab_size
        size = read_size(path)
        self.shape: Shape | None = size if isinstance(size, Shape) else None
        self.draft_checkpoint.check_embeds()
        self.target_checkpoint.check_embeds()

    @property
    def context(self) -> int:
        """Return the number of tokens that the draft can read."""
        return checkpoint.max_model_len(self.path, DEFAULT_CONTEXT)

    def difference(self) -> str | None:
        own = self.draft_checkpoint.vocabulary
        return first_difference(own, self.target_checkpoint.vocabulary, min(self.vocab, self.target_vocab))

    def spelled_alike(self) -> str:
        own = self.draft_checkpoint.vocabulary
        targets = self.target_checkpoint.vocabulary
        return f"{spelled_alike(own, targets):,} of {len(targets):,}"

    def pre_tokenizer(self) -> tuple[str, float]:
        return gguf.pre_tokenizer(self.path, self.vocab)

    def findings(self) -> Iterator[Finding]:
        """Check the files of the draft, and yield the findings."""
        other = self.difference()
        copy = f"if the draft was trained on the target's ids, copy the tokenizer files of {self.target} into the draft"
        if other is not None:
            text = f"the draft's vocabulary differs from the target's, but speculation needs the same: {other}"
            transplant = typed("mergekit-tokensurgeon", self.path, self.target, "OUT")
            yield error("tokenizer", text, f"run {transplant}; or {copy}")
        else:
            yield from self._probe_texts(copy)
            yield from self._special_tokens()
            yield from self._vocabulary()
            yield from self._chat_template()
        yield from self._context()
        yield from self._weights()

    def _probe_texts(self, copy: str) -> Iterator[Finding]:
        own = self.draft_checkpoint.tokenizer
        targets = self.target_checkpoint.tokenizer
        differing = [text for text in PROBES if own(text)["input_ids"] != targets(text)["input_ids"]]
        text = f"{len(differing)} of {len(PROBES)} probe texts get other token ids than with the target's tokenizer"
        own_file, file = (hf.tokenizer_files(model).get("tokenizer.json") for model in (self.path, self.target))
        if not differing:
            yield ok(
                "tokenizer",
                f"equal to the target's for {min(self.vocab, self.target_vocab):,} ids and {len(PROBES)} probe texts",
            )
        elif own_file is not None and own_file == file:
            text += (
                " from the same tokenizer.json, which transformers reads differently for "
                f"{self.config.get('model_type')}"
            )
            yield warning("tokenizer", text, "serve the draft with the target's tokenizer, as servers do")
        else:
            yield error("tokenizer", f"{text}: {differing[0][:30]!r}", copy)

    def _special_tokens(self) -> Iterator[Finding]:
        own = checkpoint.special_ids(self.draft_checkpoint.tokenizer)
        targets = checkpoint.special_ids(self.target_checkpoint.tokenizer)
        for name in ("bos", "eos"):
            if own[name] != targets[name]:
                text = f"{name} is id {own[name]} in the draft, but {targets[name]} in the target"
                yield error("special tokens", text, f"copy tokenizer_config.json from {self.target}")
        ends = self.draft_checkpoint.eos_ids
        target_ends = self.target_checkpoint.eos_ids
        if (beyond := max(ends, default=0)) >= self.vocab:
            text = f"end-of-text id {beyond} is not in the vocabulary, which has the ids 0 to {self.vocab - 1}"
            yield error("special tokens", text, "set eos_token_id to the id that ends a text")
        elif ends != target_ends:
            text = f"end-of-text ids are {list(ends)} in the draft, but {list(target_ends)} in the target"
            yield warning(
                "special tokens",
                text,
                f"copy eos_token_id and generation_config.json of {self.target}",
            )

    def _vocabulary(self) -> Iterator[Finding]:
        if self.vocab == self.target_vocab:
            yield ok("vocabulary", f"{self.vocab:,} logits in both")
        else:
            text = f"the draft has {self.vocab:,} logits, but the target has {self.target_vocab:,}"
            resize = typed("draftlab", "export", self.path, "--to", "hf", "--target", self.target)
            yield warning("vocabulary", text, f"{resize} resizes the draft")
        if (ids := read_head_ids(self.path, self.vocab)) is not None:
            text = (
                f"the trimmed LM head predicts {len(ids):,} ids in draftlab; draftlab export writes a complete LM "
                "head for servers"
            )
            yield ok("vocabulary", text)

    def _chat_template(self) -> Iterator[Finding]:
        own = self.draft_checkpoint.tokenizer.chat_template
        targets = self.target_checkpoint.tokenizer.chat_template
        if own != targets:
            has = "another chat template than" if own else "no chat template, unlike"
            text = (
                f"the draft has {has} the target; servers use the target's template, on which the draft may not be "
                "trained"
            )
            yield warning(
                "chat template",
                text,
                "train the draft on chats: draftlab distill --text target --prompt-file FILE.jsonl",
            )

    @property
    def context_limit(self) -> str:
        """Return what limits the draft to shorter texts than the target's, or ""."""
        own = self.context
        targets = checkpoint.max_model_len(self.target, DEFAULT_CONTEXT)
        if own >= targets:
            return ""
        return (
            f"the draft reads up to {own:,} tokens, and the target up to {targets:,}; on longer texts vLLM stops "
            "drafting, and other servers draft tokens that are rejected"
        )

    def _context(self) -> Iterator[Finding]:
        own = self.context
        targets = checkpoint.max_model_len(self.target, DEFAULT_CONTEXT)
        if self.context_limit:
            fix = f"serve at most {own:,} tokens, or distil with a longer --seq-len from a source with a longer context"
            yield warning("context", self.context_limit, fix)
        else:
            text = f"the draft reads up to {own:,} tokens, and the target up to {targets:,}"
            yield ok("context", text)

    def _weights(self) -> Iterator[Finding]:
        broken = ""
        try:
            for name, tensor in checkpoint.Weights(self.path).items():
                if name.endswith("proj.weight") and not bool(tensor.any()):
                    broken = broken or f"{name} is all zero"
        except UserError as failure:
            broken = str(failure)
        dtype = devices.dtype_name(checkpoint.stored_dtype(self.path))
        if broken:
            yield error("weights", broken, "download or train the draft again")
        elif dtype == "float32":
            fix = "draftlab export --to hf --dtype bfloat16 halves the size"
            yield warning("weights", "stored in float32, but servers compute in 16 bits", fix)
        else:
            yield ok("weights", f"finite, {dtype}")

    def trial(self, prompts: Sequence[list[int]], device: torch.device) -> list[Finding]:
        """Draft a few tokens after each prompt, and return the findings. prompts: Token ids of each prompt."""
        model = modes.load(self.path, devices.resolve_dtype("auto", device), device)
        return [
            trials.check_perplexity(model, prompts, self.vocab),
            trials.check_decoding(model, prompts[:2]),
        ]

    def refuse(self, form: Form) -> None:
        """Raise UserError if the draft cannot be written in this form."""
        if form.layout == "speculators":
            raise UserError(
                f"--to speculators is the layout of EAGLE-3 heads, but {self.path} is a draft model; use --to vllm"
            )
        if not form.heterogeneous:
            self.draft_checkpoint.common_vocabulary(self.target_checkpoint)
        elif self.difference() is None:
            raise UserError(f"--use-heterogeneous-vocab: leave it out, because {self.path} has the target's vocabulary")
        elif form.server is not None:
            _refuse(self, form.server, form.server.check_vocabulary(self))
        if form.outtype is not None:
            gguf.library()
            gguf.architecture(self.path)

    def write(self, folder: Path, form: Form, k: int, verifier: str) -> list[str]:
        """Write the draft as a Hugging Face directory, and return a list of the changes.

        k, verifier: Number of tokens to draft, and name of the target, which only the layout of speculators has.
        """
        words = self.path if form.heterogeneous else self.target
        return hf.write(self.path, folder, tokenizer_from=words, dtype=form.dtype)

    def write_gguf(self, directory: Path, file: Path, qtype: str) -> gguf.Written:
        """Convert the output of write() to a GGUF file. qtype: Type of the matrices."""
        return gguf.write(directory, file, qtype)

    def summary(self, directory: Path, form: Form) -> str:
        """Return a sentence for the model card about the draft's size. directory: The output of write()."""
        owner = "its own, which the server translates to the target's" if form.heterogeneous else "the target's"
        context = checkpoint.max_model_len(directory, DEFAULT_CONTEXT)
        return (
            f"{read_size(directory).describe()}; vocabulary of {checkpoint.vocab_size(directory):,} tokens, {owner}; "
            f"context of {context:,} tokens."
        )

    def scores(self, directory: Path, form: Form, texts: TargetTexts, device: torch.device) -> list[TokenLogprobs]:
        """Return the draft's log-probabilities of the tokens of each text, in the form of DrafterSpec.acceptance.

        directory: The output of write(), or the draft itself.
        """
        with hf.as_quantized(directory, form.outtype) as reference:
            model = modes.load(reference, torch.float32, device)
        return self._scores(model, form, texts)

    def _scores(self, model: Decoder, form: Form, texts: TargetTexts) -> list[TokenLogprobs]:
        return score_tokens(model, texts.pairs, self.target_vocab, texts.draft_sampling)


class ParallelDraft(DraftModel):
    """A draft model that drafts several tokens in one pass."""

    kind: DraftKind = "parallel draft"
    in_parallel = True

    def __init__(self, path: Path, target: Checkpoint) -> None:
        super().__init__(path, target)
        trained = parallel.trained_offsets(path)
        if trained is not None:
            reason: str = f"the number of tokens that the draft was trained to draft in one pass, {UNMEASURED_K}"
            self.default_k: tuple[int, str] = (trained, reason)

    def findings(self) -> Iterator[Finding]:
        yield from super().findings()
        try:
            token = parallel.pard_token(self.path)
            offsets = parallel.trained_offsets(self.path)
        except UserError as failure:
            yield error("pard_token", str(failure), "train again with draftlab distill --student parallel")
            return
        known = f"up to {offsets} tokens" if offsets else "several tokens"
        yield ok("pard_token", f"mask token {token}; the draft was trained for {known} in one pass")

    def _scores(self, model: Decoder, form: Form, texts: TargetTexts) -> list[TokenLogprobs]:
        token = parallel.pard_token(self.path)
        if token is None or form.server is None or not form.server.parallel:
            return super()._scores(model, form, texts)
        return score_offsets(model, texts.pairs, self.target_vocab, texts.draft_sampling, texts.k, token)


class PublishedHead:
    """A published head, which servers load without an export. draftlab can check it and score it."""

    in_parallel = True
    head: HeadShape | None = None
    shape: Shape | None = None

    def __init__(self, path: Path, target: Path, kind: str, sizes: HeadSizes, config: Mapping[str, Any]) -> None:
        """Open the head at `path` for a target. kind: Kind of the head's drafter, as --drafter names it."""
        self.path = path
        self.target = target
        self.config: Mapping[str, Any] = config
        self.spec = head_kind(kind).of(heads=str(path))
        self.served_by: frozenset[str] | None = self.spec.served_by
        self.sizes = sizes
        self.layer_ids: Sequence[int] = sizes.layer_ids
        self.vocab = self.target_vocab = sizes.vocab

    @property
    def context(self) -> int:
        return self.sizes.context

    @property
    def context_limit(self) -> str:
        """See DraftModel.context_limit."""
        context = checkpoint.max_model_len(self.target, DEFAULT_CONTEXT)
        if context <= self.context:
            return ""
        return (
            f"the head was trained for {self.context:,} tokens, but the target reads up to {context:,}; on longer "
            "texts the head drafts worse"
        )

    def difference(self) -> str | None:
        return None

    def spelled_alike(self) -> str:
        return "all"

    def pre_tokenizer(self) -> tuple[str, float]:
        return gguf.pre_tokenizer(self.target, self.vocab)

    def _norm(self) -> str:
        return f"{self.spec.format}, at most {self.sizes.most} tokens in a draft"

    def findings(self) -> Iterator[Finding]:
        layers = ", ".join(map(str, self.layer_ids))
        text = (
            f"reads the target's hidden states after {layers} layers, predicts {self.sizes.draft_vocab:,} of "
            f"{self.sizes.vocab:,} ids, {self._norm()}"
        )
        yield ok("head", text)
        if self.context_limit:
            yield warning(
                "context",
                self.context_limit,
                f"serve at most {self.context:,} tokens, or train the head on longer texts (--seq-len)",
            )

    def trial(self, prompts: Sequence[list[int]], device: torch.device) -> list[Finding]:
        target = self.spec.readable(modes.load(self.target, torch.float32, device))
        drafter = self.spec.load_drafter(self.target, target, device)
        return [trials.check_acceptance(target, drafter, prompts)]

    def scores(self, directory: Path, form: Form, texts: TargetTexts, device: torch.device) -> list[TokenLogprobs]:
        """See DraftModel.scores."""
        replay = ReplayContext(
            texts=texts.pairs,
            limits=[len(completion) for _, completion in texts.pairs],
            target_path=self.target,
            sampling=texts.draft_sampling,
            vocab=self.vocab,
            most=texts.k,
            load=lambda path: modes.load(path, torch.float32, device),
            load_target=lambda: modes.load(self.target, torch.float32, device),
            advance=lambda done: None,
        )
        with hf.as_quantized(directory, form.outtype) as head:
            scores = type(self.spec).of(heads=str(head)).acceptance(replay)
        return [score.at(texts.k) for score in scores]


class HeadArtifact(PublishedHead):
    """An EAGLE-3 head, which draftlab can also export."""

    kind: DraftKind = "EAGLE-3 head"
    in_parallel = False
    default_k: tuple[int, str] = (3, UNMEASURED_K)

    def __init__(self, path: Path, target: Path, head: HeadShape, config: Mapping[str, Any]) -> None:
        super().__init__(path, target, "eagle", head, config)
        self.served_by: frozenset[str] | None = None
        self.eagle = head
        self.head: HeadShape | None = head
        self.shape: Shape | None = head.shape
        self.most = head.most

    def _norm(self) -> str:
        parts = self.eagle.optional_parts
        return f"computed with {', '.join(parts)}" if parts else "plain EAGLE-3"

    def findings(self) -> Iterator[Finding]:
        layout.read(self.path, self.target, checkpoint.stored_dtype(self.path))
        yield from super().findings()

    def refuse(self, form: Form) -> None:
        if form.heterogeneous:
            raise UserError(
                f"--use-heterogeneous-vocab: {self.path} is a head, which always has the target's vocabulary; leave "
                "the option out"
            )
        if form.server is not None:
            if not form.server.heads:
                raise UserError(
                    f"{self.path} is an EAGLE-3 head, which {form.server.name} does not support; use --to vllm, "
                    "sglang, llama.cpp or tensorrt-llm"
                )
            _refuse(self, form.server, form.server.check(self))
        if form.outtype is not None:
            gguf.library()

    def write(self, folder: Path, form: Form, k: int, verifier: str) -> list[str]:
        dtype = form.dtype or checkpoint.stored_dtype(self.path)
        head = layout.read(self.path, self.target, dtype)
        layout.write(folder, head, form.layout, target=self.target, k=k, verifier=verifier)
        return []

    def write_gguf(self, directory: Path, file: Path, qtype: str) -> gguf.Written:
        return gguf.write_head(directory, self.target, self.eagle, file, qtype)

    def summary(self, directory: Path, form: Form) -> str:
        *first, last = map(str, self.layer_ids)
        layers = f"{', '.join(first)} and {last}" if first else last
        return (
            f"{format_number(self.eagle.params() / 1e6, 4)}M parameters; "
            f"reads the target's hidden states after {layers} layers; "
            f"predicts {self.sizes.draft_vocab:,} of the target's {self.sizes.vocab:,} ids; {self._norm()}."
        )


# A draft or head that can be checked, in draftlab and in a running server. PublishedHead has the same methods as
# DraftModel, without those that export.
Checkable: TypeAlias = DraftModel | PublishedHead
# A draft or head that can be checked, exported and verified.
Exportable: TypeAlias = DraftModel | HeadArtifact


def open_checkable(path: Path, target: Checkpoint, weights: bool = True) -> Checkable:
    """Open a draft or head with its target. weights: Whether the weight files of an EAGLE-3 head must exist.

    Raises:
        UserError: The draft or head cannot be read, or the head belongs to another target or is of an unknown kind.
    """
    kind = hub.known_head(path)
    config = checkpoint.read_config(path)
    if kind == "eagle":
        return HeadArtifact(path, target.directory, layout.check(path, target.directory, weights), config)
    if kind is not None:
        sizes = head_kind(kind).read(path, target.directory)
        assert isinstance(sizes, HeadSizes)  # as in all heads that hub.known_head knows
        return PublishedHead(path, target.directory, kind, sizes, config)
    if config.get(parallel.PARD_TOKEN) is not None:
        return ParallelDraft(path, target)
    return DraftModel(path, target)


def open_artifact(path: Path, target: Checkpoint, weights: bool = True) -> Exportable:
    """Open a draft or head that can be exported.

    Raises:
        UserError: open_checkable raises it, or the head needs no export.
    """
    artifact = open_checkable(path, target, weights)
    if isinstance(artifact, DraftModel | HeadArtifact):
        return artifact
    kind = hub.head_kind(path)
    servers = " and ".join(sorted(artifact.served_by or ()))
    raise UserError(
        f"{path} is a {kind} head, which {servers} can load without an export; measure the head with draftlab score "
        f"--drafter {kind}:heads={path}"
    )


def refusals(artifact: Artifact, server: ServerKind) -> list[Finding]:
    """Return the findings that say why a server cannot run an exported draft or head. If it can, return []."""
    return [finding for finding in server.check(artifact) if finding.level == "error"]


def _refuse(artifact: Artifact, server: ServerKind, findings: Iterable[Finding]) -> None:
    """Raise UserError if a finding is an error."""
    for finding in findings:
        if finding.level == "error":
            raise UserError(f"{artifact.path}: {server.name} {finding.text}; {finding.fix}".removesuffix("; "))


def check_files(artifact: Checkable, servers: Iterable[ServerKind]) -> Iterator[Finding]:
    """Check the files of a draft or head, and whether each server can load it. Yield the findings. No model is run."""
    yield from artifact.findings()
    for server in servers:
        works = "loads it as it is"
        if artifact.served_by is None:
            findings = list(server.check(artifact))
        elif server.name in artifact.served_by:
            findings = list(server.check_published(artifact))
        else:
            text = "does not serve heads of this kind"
            findings = [warning(server.name, text, "serve it with vLLM")]
        if artifact.head is not None and server.heads:
            findings += server.check_stored_head(artifact, artifact.head)
            works = server.heads
        yield from findings or [ok(server.name, works)]


def spelled_alike(draft: Iterable[str], target: Iterable[str]) -> int:
    """Return the number of tokens that vLLM and transformers consider equal in two vocabularies.

    Two tokens are equal if they have the same characters, apart from the mark of a leading space. Kinds of tokenizers
    represent bytes outside ASCII differently, so tokens with such bytes are not equal.
    """

    def words(tokens: Iterable[str]) -> set[str]:
        return {f" {t[1:]}" if t.startswith(SPACES) else t for t in tokens}

    return len(words(draft) & words(target))
