"""Checks that a draft works for a target in vLLM, SGLang, llama.cpp and transformers.

Their requirements were read in vLLM 0.32, SGLang's standalone worker, llama.cpp as of llama-cpp-python 0.3.36 and
transformers 5.23. The target's weights are not needed.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from draftlab.acceptance.token_logprobs import score_tokens
from draftlab.config.export import CheckConfig
from draftlab.data import heldout_prompts
from draftlab.engine.generate import ModelDrafter, speculative_decode
from draftlab.errors import UserError
from draftlab.exporting import gguf, gguf_tokenizer
from draftlab.model import checkpoint, decoder, hub, parallel
from draftlab.model.hf_files import read_head_ids
from draftlab.model.sentencepiece import PROBES
from draftlab.model.shape import Shape, multiples_near
from draftlab.model.size import read_size
from draftlab.model.tokenizer import check_embeds, first_difference
from draftlab.prompts import file_prompts
from draftlab.sampling import SamplingParams

VLLM_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
FLASHINFER_HEADS = (64, 128, 256)
LLAMA_CPP_VOCAB_SLACK = 128  # largest difference of vocabulary sizes
BLOCK, K_BLOCK = 32, 256  # weights of a row that share a scale in llama.cpp's plain types and in its K types
UNTRAINED = 0.9  # of the logarithm of the vocabulary: the cross-entropy of a trained draft is far below
PARALLEL_RUNTIMES = ("vllm", "tensorrt-llm")  # have parallel_drafting, PARD
PROMPTS, PROMPT_TOKENS = 8, 96  # of held-out text
TRANSLATES = {  # as TLI and universal assisted decoding do (Timor et al. 2025, 2502.05202)
    "vllm": "use_heterogeneous_vocab drafts shared tokens only, greedily, and reads others as unknown or end of text",
    "transformers": "assistant_tokenizer re-encodes the text at every step; when sampling it drafts shared tokens only",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """error: the draft will not work. warning: it works, with something to know. fix: what to do."""

    level: Literal["ok", "warning", "error"]
    about: str
    text: str
    fix: str = ""

    def line(self) -> str:
        return f"{self.level:7}  {self.about}: {self.text}" + (f"; {self.fix}" if self.fix else "")


def ok(about: str, text: str) -> Finding:
    return Finding("ok", about, text)


def warning(about: str, text: str, fix: str) -> Finding:
    return Finding("warning", about, text, fix)


def error(about: str, text: str, fix: str = "") -> Finding:
    return Finding("error", about, text, fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model as its files describe it."""

    path: Path
    config: dict[str, Any]
    tokenizer: Any
    tokens: dict[str, int]
    vocab: int
    context: int

    @classmethod
    def read(cls, path: Path) -> "ModelFiles":
        """Raises UserError: not readable, or with the tokenizer of a larger model."""
        config = checkpoint.read_config(path)
        check_embeds(path)
        tokenizer: Any = checkpoint.load_tokenizer(path)
        return cls(
            path=path, config=config, tokenizer=tokenizer, tokens=tokenizer.get_vocab(),
            vocab=checkpoint.vocab_size(path), context=checkpoint.max_model_len(path, gguf.DEFAULT_CONTEXT),
        )  # fmt: skip

    def difference(self, target: "ModelFiles") -> str | None:
        """Return a token that is another one in the target, None where the vocabulary is the target's."""
        return first_difference(self.tokens, target.tokens, min(self.vocab, target.vocab))


def check_draft(config: CheckConfig, draft: Path) -> list[Finding]:
    """Return all findings. Raises UserError: a model cannot be read."""
    target = hub.locate(config.target, weights=False)
    findings = check_files(draft, target, parse_runtimes(config.runtimes))
    if not config.files_only:
        device = checkpoint.resolve_device(config.device)
        same = ModelFiles.read(draft).difference(ModelFiles.read(target)) is None
        prompts = trial_prompts(config, target if same else draft)
        model = decoder.load(draft, checkpoint.resolve_dtype("auto", device), device)
        findings += [check_perplexity(model, prompts, checkpoint.vocab_size(draft)), check_decoding(model, prompts[:2])]
    return findings


def trial_prompts(config: CheckConfig, model: Path) -> list[list[int]]:
    """Return held-out text, or prompts of a file as a model gets them: the first turn of each."""
    tokenizer = checkpoint.load_tokenizer(model)
    if config.prompt_file is None:
        return heldout_prompts(hub.check_data(config.data), tokenizer, count=PROMPTS, length=PROMPT_TOKENS, seed=0)
    prompts = file_prompts(config.prompt_file, tokenizer, chat=config.chat, system_prompt=config.system_prompt)
    return [prompt.ids for prompt in prompts.spread(min(PROMPTS, len(prompts.rows))).rows]


def parse_runtimes(text: str) -> list[str]:
    """Split 'vllm,llama.cpp', in the order of the checks."""
    names = [name.strip() for name in text.split(",")]
    return [name for name in RUNTIME_CHECKS if name in names]


def check_files(draft_path: Path, target_path: Path, runtimes: list[str]) -> list[Finding]:
    """Compare the files of draft and target; nothing is computed.

    Raises:
        UserError: one of them cannot be read.
    """
    checkpoint.check(draft_path)
    draft, target, size = ModelFiles.read(draft_path), ModelFiles.read(target_path), read_size(draft_path)
    same = draft.difference(target) is None
    checks = MODEL_CHECKS if same else [check for check in MODEL_CHECKS if check not in SAME_VOCABULARY_CHECKS]
    findings = [finding for check in checks for finding in check(draft, target)]
    for runtime in runtimes:
        shape = size if isinstance(size, Shape) else None
        own = list(RUNTIME_CHECKS[runtime](draft, target, shape))
        findings += own or [ok(runtime, "loads it as it is")]
    return findings


def unservable(target: Path, runtime: str) -> str:
    """Return why a runtime cannot run drafts that are cut from a target, by its files; empty: it can."""
    files, size = ModelFiles.read(target), read_size(target)
    findings = RUNTIME_CHECKS[runtime](files, files, size if isinstance(size, Shape) else None)
    return "; ".join(finding.text for finding in findings if finding.level == "error")


def check_perplexity(model: decoder.Decoder, prompts: list[list[int]], vocab: int) -> Finding:
    """prompts: token ids of text."""
    texts = [(np.array(ids[:1]), np.array(ids[1:])) for ids in prompts]
    scored = score_tokens(model, texts, vocab, SamplingParams(temperature=1.0))
    logprobs = np.concatenate([s.logprobs for s in scored])
    if np.isnan(logprobs).any():
        return error("perplexity", "the draft computes logits that are NaN", "its weights are damaged, or overflow")
    return judge_perplexity(-float(logprobs[np.isfinite(logprobs)].mean()), vocab)  # a trimmed head lacks some tokens


def judge_perplexity(cross_entropy: float, vocab: int) -> Finding:
    text = f"{math.exp(min(cross_entropy, 50)):,.4g} on text; a uniform distribution has {vocab:,}"
    if not cross_entropy < UNTRAINED * math.log(vocab):
        return error("perplexity", text, "the draft was not trained, or its weights do not fit its config.json")
    return ok("perplexity", text)


def check_decoding(model: decoder.Decoder, prompts: list[list[int]]) -> Finding:
    """Decode with the draft as its own target, which must accept every drafted token."""
    prompts, sampling = [ids[:16] for ids in prompts], SamplingParams(max_tokens=24)
    steps = list(speculative_decode(model, ModelDrafter(model), prompts, 4, sampling))
    drafted, accepted = sum(s.drafted for s in steps), sum(s.accepted for s in steps)
    text = f"as its own target it accepts {accepted} of {drafted} tokens"
    if accepted < drafted:
        return error("decoding", text, "decoding is broken: report it with the output of draftlab env")
    return ok("decoding", text)


def _tokenizers(draft: ModelFiles, target: ModelFiles) -> Iterator[Finding]:
    about = "tokenizer"
    copy = f"copy the tokenizer files of {target.path} into the draft if it was trained on the target's ids"
    if (other := draft.difference(target)) is not None:
        text = f"another vocabulary than the target's, which speculation needs: {other}"
        yield error(about, text, f"mergekit-tokensurgeon {draft.path} {target.path} OUT; or {copy}")
        return
    differing = [t for t in PROBES if draft.tokenizer(t)["input_ids"] != target.tokenizer(t)["input_ids"]]
    text = f"{len(differing)} of {len(PROBES)} probe texts get other ids"
    if differing and _same_file(draft.path, target.path):
        text += f" from the same tokenizer.json: transformers reads it otherwise for {draft.config.get('model_type')}"
        yield warning(about, text, "serve the draft with the target's tokenizer, as servers do")
    elif differing:
        yield error(about, f"{text}: {differing[0][:30]!r}", copy)
    else:
        yield ok(about, f"{min(draft.vocab, target.vocab):,} ids and {len(PROBES)} probe texts are the same")
    for model in (draft, target):
        largest = max(model.tokens.values())
        if largest >= model.vocab:
            text = f"the tokenizer of {model.path} has the id {largest}, but the model has {model.vocab} logits"
            fix = "transformers adds tokens by model_type: set tokenizer_class in tokenizer_config.json"
            yield warning(about, text, fix)


def _same_file(*models: Path) -> bool:
    files = [model / "tokenizer.json" for model in models]
    return all(file.is_file() for file in files) and len({file.read_bytes() for file in files}) == 1


def _special_tokens(draft: ModelFiles, target: ModelFiles) -> Iterator[Finding]:
    about, (ids, target_ids) = "special tokens", (checkpoint.special_ids(m.tokenizer) for m in (draft, target))
    for name in ("bos", "eos"):
        if ids[name] != target_ids[name]:
            text = f"{name} is {ids[name]} in the draft and {target_ids[name]} in the target"
            yield error(about, text, f"copy tokenizer_config.json of {target.path}")
    ends, target_ends = (checkpoint.eos_token_ids(m.path) for m in (draft, target))
    if ends != target_ends:
        text = f"texts end at {list(ends)} in the draft and at {list(target_ends)} in the target"
        yield warning(about, text, f"copy eos_token_id and generation_config.json of {target.path}")


def _vocabularies(draft: ModelFiles, target: ModelFiles) -> Iterator[Finding]:
    padding = draft.vocab - len(draft.tokens)
    if draft.vocab == target.vocab:
        yield ok("vocabulary", f"{draft.vocab:,} logits in both" + f", {padding:,} of them padding" * (padding > 0))
    else:
        text = f"{draft.vocab:,} logits in the draft, {target.vocab:,} in the target"
        yield warning("vocabulary", text, f"draftlab export --to hf --target {target.path} resizes it")
    if (ids := read_head_ids(draft.path, draft.vocab)) is not None:
        text = f"its head has {len(ids):,} of them, in draftlab; draftlab export writes a whole one for runtimes"
        yield ok("vocabulary", text)


def _chat_templates(draft: ModelFiles, target: ModelFiles) -> Iterator[Finding]:
    if draft.tokenizer.chat_template != target.tokenizer.chat_template:
        has = "another chat template than" if draft.tokenizer.chat_template else "no chat template, unlike"
        text = f"the draft has {has} the target; runtimes use the target's, which the draft may not have seen"
        yield warning("chat template", text, "distil on chats: draftlab distill --text target, or on your traffic")


def _contexts(draft: ModelFiles, target: ModelFiles) -> Iterator[Finding]:
    if draft.context >= target.context:
        yield ok("context", f"{draft.context:,} tokens, the target's {target.context:,}")
        return
    yield warning(
        "context",
        f"{draft.context:,} tokens, the target's {target.context:,}: on longer texts vLLM stops drafting, and other "
        "runtimes draft nonsense",
        f"serve at most {draft.context:,} tokens, or distil at a longer --seq-len from a source with more context",
    )


def _weights(draft: ModelFiles, _: ModelFiles) -> Iterator[Finding]:
    try:
        weights = checkpoint.Weights(draft.path).items()
        broken = next((f"{n} is all zero" for n, t in weights if n.endswith("proj.weight") and not bool(t.any())), None)
    except UserError as failure:
        broken = str(failure)
    if broken:
        yield error("weights", broken, "train again from the last good checkpoint")
    dtype = checkpoint.dtype_name(checkpoint.stored_dtype(draft.path))
    if dtype == "float32":
        fix = "draftlab export --to hf --dtype bfloat16 halves it"
        yield warning("weights", "stored in float32, while runtimes compute in 16 bits", fix)
    else:
        yield ok("weights", f"finite, {dtype}")


def _mask_token(draft: ModelFiles, _: ModelFiles) -> Iterator[Finding]:
    try:
        token = parallel.pard_token(draft.path)
    except UserError as failure:
        yield error("pard_token", str(failure), "train again with draftlab distill --student parallel")
        return
    if token is not None:
        offsets = parallel.trained_offsets(draft.path)
        known = f"up to {offsets} tokens" if offsets else "several tokens"
        yield ok("pard_token", f"{token}: it drafts {known} in one pass")


def _one_pass_each(runtime: str, draft: ModelFiles) -> Iterator[Finding]:
    if draft.config.get(parallel.PARD_TOKEN) is not None:
        text = "cannot draft in parallel: with this draft it makes one pass for each token"
        yield warning(runtime, text, f"serve it with {' or '.join(PARALLEL_RUNTIMES)}, or distil an ordinary draft")


def _tensorrt_llm(draft: ModelFiles, target: ModelFiles, _: Shape | None) -> Iterator[Finding]:
    yield from check_vocabulary("tensorrt-llm", draft, target)


def _vllm(draft: ModelFiles, target: ModelFiles, shape: Shape | None) -> Iterator[Finding]:
    yield from check_vocabulary("vllm", draft, target)
    if shape is None:
        yield _unknown_heads("vllm", draft)
        return
    if shape.head_dim % 8 or shape.head_dim > max(VLLM_CPU_HEADS):
        text = f"head_dim {shape.head_dim}; its attention supports multiples of 8 up to 256"
        yield error("vllm", text, "prune a source with another head_dim")
    elif shape.head_dim not in VLLM_CPU_HEADS:
        text = f"head_dim {shape.head_dim}; its CPU build supports {', '.join(map(str, VLLM_CPU_HEADS))}"
        yield warning("vllm", text, "run it on a GPU")
    if draft.config.get("model_type") == "qwen2" and shape.sizes["q"] != shape.hidden:
        widths = " or ".join(map(str, multiples_near(shape.hidden, shape.head_dim)))
        text = f"wants width = heads x head_dim in a Qwen2; {shape.heads} x {shape.head_dim} is not {shape.hidden}"
        yield error("vllm", text, f"prune to --width {widths} with --heads width / head_dim")
    splits = [n for n in (1, 2, 4, 8) if _splits(shape, n)]
    if splits != [1, 2, 4, 8]:
        text = f"runs a draft on as many devices as the target; this one splits over {', '.join(map(str, splits))}"
        yield warning("vllm", text, "prune to heads and ffn that are multiples of the target's --tensor-parallel-size")


def _unknown_heads(runtime: str, draft: ModelFiles) -> Finding:
    text = f"draftlab does not know whether its attention supports the heads of {draft.config.get('model_type')} models"
    return warning(runtime, text, "start it once with the draft alone")


def _splits(shape: Shape, devices: int) -> bool:
    kv = shape.kv_heads % devices == 0 or devices % shape.kv_heads == 0  # vLLM repeats kv heads if there are fewer
    return shape.heads % devices == 0 and kv and shape.ffn % devices == 0


def _sglang(draft: ModelFiles, target: ModelFiles, shape: Shape | None) -> Iterator[Finding]:
    yield from check_vocabulary("sglang", draft, target)
    yield from _one_pass_each("sglang", draft)
    if shape is None:
        yield _unknown_heads("sglang", draft)
    elif shape.head_dim not in FLASHINFER_HEADS:
        text = f"head_dim {shape.head_dim}; flashinfer supports {', '.join(map(str, FLASHINFER_HEADS))}"
        yield warning("sglang", text, "start it with --attention-backend triton")


def _llama_cpp(draft: ModelFiles, target: ModelFiles, _: Shape | None) -> Iterator[Finding]:
    about = "llama.cpp"
    yield from _one_pass_each(about, draft)
    try:
        gguf.architecture(draft.path)
        shape, tokenizer = checkpoint.read_shape(draft.path), gguf_tokenizer.read_tokenizer(draft.path, draft.vocab)
    except UserError as failure:
        yield error(about, str(failure))
        return
    if draft.difference(target) is not None:
        yield from check_vocabulary(about, draft, target)
    elif abs(draft.vocab - target.vocab) > LLAMA_CPP_VOCAB_SLACK:
        text = f"{draft.vocab:,} logits against {target.vocab:,}; it allows a difference of {LLAMA_CPP_VOCAB_SLACK}"
        yield error(about, text, "draftlab export resizes the draft's")
    if tokenizer.match < 1:
        text = (
            f"has no pre-tokenizer that splits text as this tokenizer does; {tokenizer.pre!r} gives the same ids for "
            f"{tokenizer.match:.0%} of the probe texts"
        )
        yield warning(about, text, "the target has the same problem; send token ids where it matters")
    rows = {"--width": shape.hidden, "heads x head_dim": shape.heads * shape.head_dim, "--ffn": shape.ffn}
    for block, types in ((BLOCK, "Q8_0 and Q4_0"), (K_BLOCK, "the K types")):
        odd = {name: size for name, size in rows.items() if size % block}
        for name, size in odd.items():
            text = f"{name} {size} is no multiple of {block}: these matrices stay f16 in {types}"
            yield warning(about, text, f"prune to {name} {' or '.join(map(str, multiples_near(size, block)))}")
        if odd:
            return


def _transformers(draft: ModelFiles, target: ModelFiles, _: Shape | None) -> Iterator[Finding]:
    yield from check_vocabulary("transformers", draft, target)
    yield from _one_pass_each("transformers", draft)


def check_vocabulary(runtime: str, draft: ModelFiles, target: ModelFiles) -> Iterator[Finding]:
    """Say whether a runtime takes the draft's vocabulary beside the target's."""
    same_size = draft.vocab == target.vocab
    if draft.difference(target) is None:
        if not same_size:
            text = f"{draft.vocab:,} logits against {target.vocab:,}; it wants the same number"
            yield error(runtime, text, f"draftlab export --to {runtime} --target {target.path}")
        return
    transplant, own = f"mergekit-tokensurgeon {draft.path} {target.path} OUT", "--use-heterogeneous-vocab"
    if runtime not in TRANSLATES:
        yield error(runtime, "wants the target's vocabulary", transplant)
    elif runtime == "transformers" and same_size:
        text = f"wants two tokenizers only where the numbers of logits differ; both have {draft.vocab:,}"
        yield error(runtime, text, transplant)
    else:
        alike = f"{spelled_alike(draft.tokens, target.tokens):,} of {len(target.tokens):,} tokens are spelled alike"
        text = f"takes it as it is and translates between the vocabularies: {TRANSLATES[runtime]}; {alike}"
        yield warning(runtime, text, f"draftlab export {draft.path} --to {runtime} {own}, or {transplant}")


def spelled_alike(draft: Iterable[str], target: Iterable[str]) -> int:
    """Return the number of tokens that vLLM and transformers take for the same: but for the sign of a space at their
    start they are the same characters, so that a tokenizer of another kind spells other bytes otherwise.
    """
    signs = ("\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}", "\N{LOWER ONE EIGHTH BLOCK}")
    words, others = ({f" {t[1:]}" if t.startswith(signs) else t for t in tokens} for tokens in (draft, target))
    return len(words & others)


MODEL_CHECKS = (_tokenizers, _special_tokens, _vocabularies, _chat_templates, _contexts, _weights, _mask_token)
SAME_VOCABULARY_CHECKS = (_special_tokens, _vocabularies, _chat_templates)
RUNTIME_CHECKS: dict[str, Callable[[ModelFiles, ModelFiles, Shape | None], Iterator[Finding]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "llama.cpp": _llama_cpp,
    "tensorrt-llm": _tensorrt_llm,
    "transformers": _transformers,
}
