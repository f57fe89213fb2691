"""Whether a draft will work for a target where it is to run: what vLLM, SGLang, llama.cpp and transformers ask of it.

What they ask was read in vLLM 0.32, SGLang's standalone worker, llama.cpp as of llama-cpp-python 0.3.36 and
transformers 5.23. The target's weights are not needed.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from draftlab.acceptance import token_logprobs
from draftlab.engine.generate import ModelDrafter, speculative_decode
from draftlab.errors import UserError, did_you_mean
from draftlab.export import gguf, gguf_tokenizer
from draftlab.model import checkpoint, decoder
from draftlab.model.checkpoint import max_model_len
from draftlab.model.sentencepiece import PROBES
from draftlab.model.shape import Shape, multiples_near
from draftlab.model.size import read_size
from draftlab.model.tokenizer import check_embeds
from draftlab.sampling import SamplingParams

Runtime = Literal["vllm", "sglang", "llama.cpp", "transformers"]
VLLM_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
FLASHINFER_HEADS = (64, 128, 256)
VOCABULARY_SLACK = 128  # logits by which llama.cpp lets the two differ
BLOCK, K_BLOCK = 32, 256  # weights of a row that share a scale in llama.cpp's plain types and in its K types
HOPELESS = 0.9  # of the logarithm of the vocabulary: a draft that knows its text is far below


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """bad: it will not work or not draft; note: it works, with something to know; fix: what to do about it."""

    about: str
    level: Literal["ok", "note", "bad"]
    text: str
    fix: str = ""

    def line(self) -> str:
        return f"{self.level:4}  {self.about}: {self.text}" + (f"; {self.fix}" if self.fix else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A model as its files describe it."""

    path: Path
    config: dict[str, Any]
    tokenizer: Any
    vocab: int
    context: int

    @classmethod
    def of(cls, path: Path) -> "Side":
        """Raises UserError: not readable, or with the tokenizer of a larger model."""
        config = checkpoint.read_config(path)
        check_embeds(path)
        return cls(
            path=path, config=config, tokenizer=checkpoint.load_tokenizer(path), vocab=checkpoint.vocab_size(path),
            context=max_model_len(path, 2048),
        )  # fmt: skip


def parse_runtimes(text: str) -> list[Runtime]:
    """'vllm,llama.cpp' -> names.

    Raises:
        UserError: one that is not known.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in ASKED:
            raise UserError(f"no runtime {name!r}{did_you_mean(name, ASKED)}")
    return [known for known in ASKED if known in names]


def files(draft: Path, target: Path, runtimes: list[Runtime]) -> list[Finding]:
    """What the files of both say; nothing is computed.

    Raises:
        UserError: one of them cannot be read at all.
    """
    checkpoint.check(draft)
    mine, its, size = Side.of(draft), Side.of(target), read_size(draft)
    shape = size if isinstance(size, Shape) else None
    found = [*_ids(mine, its), *_special(mine, its), *_padding(mine, its), *_template(mine, its)]
    found += [*_context(mine, its), *_weights(draft)]
    for runtime in runtimes:
        here = list(ASKED[runtime](mine, its, shape))
        found += here or [Finding(about=runtime, level="ok", text="takes it as it is")]
    return found


def runs(draft: Path, prompts: list[list[int]], dtype: torch.dtype, device: torch.device) -> list[Finding]:
    """What the draft does: its perplexity on text, and whether it accepts itself. prompts: token ids of text."""
    model = decoder.load(draft, dtype, device)
    vocab = checkpoint.vocab_size(draft)
    texts = [(np.array(ids[:1]), np.array(ids[1:])) for ids in prompts]
    looked = token_logprobs.score_tokens(model, texts, vocab, SamplingParams(temperature=1.0))
    entropy = -float(np.concatenate([one.logprobs for one in looked]).mean())
    return [_perplexity(entropy, vocab), _accepts_itself(model, prompts[:2])]


def _ids(mine: Side, its: Side) -> Iterator[Finding]:
    size = min(mine.vocab, its.vocab)
    ours, theirs = ({i: t for t, i in side.tokenizer.get_vocab().items()} for side in (mine, its))
    copy = f"if the draft was trained on the target's ids, copy the tokenizer files of {its.path} into it"
    first = next((i for i in range(size) if ours.get(i) != theirs.get(i)), None)
    if first is not None:
        text = f"id {first} is {ours.get(first)!r} in the draft and {theirs.get(first)!r} in the target"
        yield Finding(about="tokenizer", level="bad", text=text, fix=f"{copy}; otherwise cut another source")
        return
    parted = [text for text in PROBES if not _same(mine, its, text)]
    if parted:
        text = f"{len(parted)} of {len(PROBES)} probe texts get other ids, the first {parted[0][:30]!r}"
        yield Finding(about="tokenizer", level="bad", text=text, fix=copy)
    else:
        text = f"{size:,} ids and {len(PROBES)} probe texts are the same"
        yield Finding(about="tokenizer", level="ok", text=text)
    for side in (mine, its):
        largest = max(side.tokenizer.get_vocab().values())
        if largest >= side.vocab:
            yield Finding(
                about="tokenizer", level="note",
                text=f"of {side.path} has the id {largest}, the model {side.vocab} logits",
                fix="transformers adds tokens of its own by model_type: name tokenizer_class in tokenizer_config.json",
            )  # fmt: skip


def _same(mine: Side, its: Side, text: str) -> bool:
    ours, theirs = (side.tokenizer(text)["input_ids"] for side in (mine, its))
    return ours == theirs


def _special(mine: Side, its: Side) -> Iterator[Finding]:
    ours, theirs = (checkpoint.special_ids(side.tokenizer) for side in (mine, its))
    for name in ("bos", "eos"):
        if ours[name] != theirs[name]:
            yield Finding(
                about="special tokens", level="bad",
                text=f"{name} is {ours[name]} in the draft and {theirs[name]} in the target",
                fix=f"copy tokenizer_config.json of {its.path}",
            )  # fmt: skip
    ends, stops = (checkpoint.eos_token_ids(side.path) for side in (mine, its))
    if ends != stops:
        yield Finding(
            about="special tokens", level="note",
            text=f"texts end at {list(ends)} in the draft and at {list(stops)} in the target",
            fix=f"copy eos_token_id and generation_config.json of {its.path}",
        )  # fmt: skip


def _padding(mine: Side, its: Side) -> Iterator[Finding]:
    known = len(mine.tokenizer.get_vocab())
    if mine.vocab == its.vocab:
        text = f"{mine.vocab:,} logits in both" + (f", {mine.vocab - known:,} of them padding" * (mine.vocab > known))
        yield Finding(about="vocabulary", level="ok", text=text)
    else:
        yield Finding(
            about="vocabulary", level="note", text=f"{mine.vocab:,} logits in the draft, {its.vocab:,} in the target",
            fix=f"draftlab export --to hf --target {its.path} gives it as many",
        )  # fmt: skip


def _template(mine: Side, its: Side) -> Iterator[Finding]:
    if mine.tokenizer.chat_template != its.tokenizer.chat_template:
        has = "no chat template, the target one" if not mine.tokenizer.chat_template else "another chat template"
        yield Finding(
            about="chat template", level="note",
            text=f"the draft has {has}; a runtime uses the target's, the draft was perhaps trained on other text",
            fix="distil on chats: draftlab distill --text target, or on your traffic",
        )  # fmt: skip


def _context(mine: Side, its: Side) -> Iterator[Finding]:
    if mine.context < its.context:
        yield Finding(
            about="context", level="note",
            text=f"the draft reads {mine.context:,} tokens, the target {its.context:,}: behind these vLLM does not let "
            "it draft, and elsewhere it drafts nonsense",
            fix=f"serve at most {mine.context:,} tokens, or distil at a longer --seq-len from a source that reads more",
        )  # fmt: skip
    else:
        yield Finding(about="context", level="ok", text=f"{mine.context:,} tokens, the target's {its.context:,}")


def _weights(draft: Path) -> Iterator[Finding]:
    weights = checkpoint.Weights(draft)
    try:
        empty = [name for name, tensor in weights.items() if name.endswith("proj.weight") and not bool(tensor.any())]
        wrong = f"{empty[0]} is all zero" if empty else None
    except UserError as error:
        wrong = str(error)
    if wrong:
        yield Finding(about="weights", level="bad", text=wrong, fix="train again from the last good checkpoint")
    dtype = checkpoint.dtype_name(checkpoint.stored_dtype(draft))
    if dtype == "float32":
        fix = "draftlab export --to hf --dtype bfloat16 halves it"
        yield Finding(about="weights", level="note", text="stored in float32, runtimes use 16 bits", fix=fix)
    else:
        yield Finding(about="weights", level="ok", text=f"finite, {dtype}")


def _vllm(mine: Side, its: Side, shape: Shape | None) -> Iterator[Finding]:
    yield from _equal_vocabularies("vllm", mine, its)
    if shape is None:
        yield _unknown_heads("vllm", mine)
        return
    if shape.head_dim % 8 or shape.head_dim > max(VLLM_CPU_HEADS):
        text = f"heads of {shape.head_dim}; its attention takes multiples of 8 up to 256"
        yield Finding(about="vllm", level="bad", text=text, fix="cut a source with such heads")
    elif shape.head_dim not in VLLM_CPU_HEADS:
        text = f"heads of {shape.head_dim}; its CPU build takes {', '.join(map(str, VLLM_CPU_HEADS))}"
        yield Finding(about="vllm", level="note", text=text)
    if mine.config.get("model_type") == "qwen2" and shape.sizes["q"] != shape.hidden:
        text = (
            f"takes heads of a Qwen2 to be width / heads wide; {shape.heads} of {shape.head_dim} are not {shape.hidden}"
        )
        heads = " or ".join(map(str, multiples_near(shape.hidden, shape.head_dim)))
        yield Finding(
            about="vllm", level="bad", text=text, fix=f"prune to --width {heads} with --heads width / head_dim"
        )
    splits = [n for n in (1, 2, 4, 8) if _splits(shape, n)]
    if splits != [1, 2, 4, 8]:
        text = f"runs a draft on as many devices as the target; this one splits over {', '.join(map(str, splits))}"
        fix = "take heads and ffn that are multiples of the target's --tensor-parallel-size"
        yield Finding(about="vllm", level="note", text=text, fix=fix)


def _unknown_heads(runtime: Runtime, mine: Side) -> Finding:
    text = f"whether its attention takes heads of a {mine.config.get('model_type')} model is not known here"
    return Finding(about=runtime, level="note", text=text, fix="start it once with the draft alone")


def _splits(shape: Shape, devices: int) -> bool:
    kv = shape.kv_heads % devices == 0 or devices % shape.kv_heads == 0  # fewer are repeated
    return shape.heads % devices == 0 and kv and shape.ffn % devices == 0


def _sglang(mine: Side, its: Side, shape: Shape | None) -> Iterator[Finding]:
    yield from _equal_vocabularies("sglang", mine, its)
    if shape is None:
        yield _unknown_heads("sglang", mine)
    elif shape.head_dim not in FLASHINFER_HEADS:
        text = f"heads of {shape.head_dim}; flashinfer takes {', '.join(map(str, FLASHINFER_HEADS))}"
        yield Finding(about="sglang", level="note", text=text, fix="start it with --attention-backend triton")


def _llama_cpp(mine: Side, its: Side, _: Shape | None) -> Iterator[Finding]:
    about = "llama.cpp"
    try:
        gguf.architecture(mine.path)
        shape, vocabulary = checkpoint.read_shape(mine.path), gguf_tokenizer.read_tokenizer(mine.path, mine.vocab)
    except UserError as error:
        yield Finding(about=about, level="bad", text=str(error))
        return
    if abs(mine.vocab - its.vocab) > VOCABULARY_SLACK:
        text = f"{mine.vocab:,} logits against {its.vocab:,}; it takes a difference of {VOCABULARY_SLACK}"
        yield Finding(about=about, level="bad", text=text, fix="draftlab export gives the draft as many")
    if vocabulary.same < 1:
        text = (
            f"has no pre-tokenizer that cuts text as this one; with {vocabulary.pre!r} {vocabulary.same:.0%} of the "
            "probe texts get the same ids"
        )
        yield Finding(
            about=about, level="note", text=text, fix="the same for the target; send token ids where it matters"
        )
    rows = {"--width": shape.hidden, "heads x head_dim": shape.heads * shape.head_dim, "--ffn": shape.ffn}
    for block, types in ((BLOCK, "Q8_0 and Q4_0"), (K_BLOCK, "the K types")):
        odd = {name: size for name, size in rows.items() if size % block}
        for name, size in odd.items():
            near = " or ".join(map(str, multiples_near(size, block)))
            text = f"{name} {size} is no multiple of {block}: such matrices stay larger in {types}"
            yield Finding(about=about, level="note", text=text, fix=f"prune to {name} {near}")
        if odd:
            return


def _transformers(mine: Side, its: Side, _: Shape | None) -> Iterator[Finding]:
    if mine.vocab != its.vocab:
        text = f"{mine.vocab:,} logits against {its.vocab:,}: generate() takes the tokenizers for different ones"
        fix = f"draftlab export --to transformers --target {its.path}"
        yield Finding(about="transformers", level="bad", text=text, fix=fix)


def _equal_vocabularies(runtime: Runtime, mine: Side, its: Side) -> Iterator[Finding]:
    if mine.vocab != its.vocab:
        text = f"{mine.vocab:,} logits against {its.vocab:,}; it wants as many"
        fix = f"draftlab export --to {runtime} --target {its.path}"
        yield Finding(about=runtime, level="bad", text=text, fix=fix)


ASKED: dict[Runtime, Callable[[Side, Side, Shape | None], Iterator[Finding]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "llama.cpp": _llama_cpp,
    "transformers": _transformers,
}


def _perplexity(entropy: float, vocab: int) -> Finding:
    text = f"perplexity {math.exp(min(entropy, 50)):,.4g} on text, {vocab:,} would be guessing"
    if not entropy < HOPELESS * math.log(vocab):
        fix = "it was not trained, or its weights are not what its config.json says"
        return Finding(about="perplexity", level="bad", text=text, fix=fix)
    return Finding(about="perplexity", level="ok", text=text)


def _accepts_itself(model: decoder.Decoder, prompts: list[list[int]]) -> Finding:
    """As its own target it must accept every token that it drafts; if not, decoding with its cache is wrong."""
    steps = list(
        speculative_decode(model, ModelDrafter(model), [ids[:16] for ids in prompts], 4, SamplingParams(max_tokens=24))
    )
    drafted, accepted = sum(s.drafted for s in steps), sum(s.accepted for s in steps)
    text = f"as its own target it accepts {accepted} of {drafted} tokens"
    if accepted < drafted:
        return Finding(
            about="self-draft", level="bad", text=text, fix="report it with draftlab env: decoding is broken"
        )
    return Finding(about="self-draft", level="ok", text=text)
