"""Conversion of Hugging Face tokenizers to GGUF: tokens, merges, and llama.cpp's pre-tokenizer, which splits text."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from draftlab.errors import UserError
from draftlab.model import checkpoint
from draftlab.model.sentencepiece import PROBES

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # llama_token_type
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*")
SIGNS, SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Regular expressions that split text into pieces before bytes are merged. They are applied in order.

    ignore_merges: Whether a piece that is in the vocabulary becomes a token without merging.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False


# llama.cpp's names of pre-tokenizers; it accepts no other names, because the patterns are in its code
PRE_TOKENIZERS = {
    "llama-bpe": PreTokenizer(
        ("|".join((ENDINGS, LETTERS, r"\p{N}{1,3}", SIGNS, SPACES)),), ignore_merges=True
    ),
    "qwen2": PreTokenizer(("|".join((ENDINGS, LETTERS, r"\p{N}", SIGNS, SPACES)),)),
    "gpt-2": PreTokenizer((GPT2,)),
    "smollm": PreTokenizer((r"\p{N}", GPT2)),
    "tekken": PreTokenizer(
        ("|".join((*CASED, r"\p{N}", SIGNS_AND_SLASHES, SPACES)),), ignore_merges=True
    ),
    "gpt-4o": PreTokenizer(
        (
            "|".join(
                (
                    *(f"{words}{ENDINGS}?" for words in CASED),
                    r"\p{N}{1,3}",
                    SIGNS_AND_SLASHES,
                    SPACES,
                )
            ),
        )
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTokenizer:
    """A tokenizer in GGUF's form. match: Fraction of the probe texts to which llama.cpp gives the same ids."""

    model: str  # gpt2: byte-level BPE; llama: SentencePiece
    pre: str
    match: float
    tokens: list[str]
    types: list[int]
    scores: list[float] | None
    merges: list[str] | None
    special: dict[str, int | None]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    chat_template: str | None


def read_tokenizer(directory: Path, vocab: int) -> GGUFTokenizer:
    """Read the tokenizer of a directory, padded to `vocab` tokens.

    Raises:
        UserError: The tokenizer is neither byte-level BPE nor SentencePiece's BPE, or has more than `vocab` tokens.
    """
    wrapped: Any = checkpoint.load_tokenizer(directory)
    file = directory / "tokenizer.json"  # transformers adds tokens of its own by model type
    fast: Tokenizer = (
        Tokenizer.from_file(str(file)) if file.is_file() else wrapped.backend_tokenizer
    )
    spec = json.loads(fast.to_str())
    if spec["model"]["type"] != "BPE":
        raise UserError(
            f"{directory} has a {spec['model']['type']} tokenizer, but GGUF export supports only BPE; use --to hf"
        )
    byte_fallback = bool(spec["model"].get("byte_fallback"))
    tokens, types = _tokens(spec, vocab, directory, byte_fallback)
    merges = [" ".join(m) if isinstance(m, list) else m for m in spec["model"]["merges"]]
    pre, match = ("default", 1.0) if byte_fallback else nearest_pre_tokenizer(fast)
    bos, eos = wrapped.bos_token_id, wrapped.eos_token_id
    framed = wrapped("a")["input_ids"]
    special = checkpoint.special_ids(wrapped) | {"unk": wrapped.unk_token_id}
    return GGUFTokenizer(
        model="llama" if byte_fallback else "gpt2",
        pre=pre,
        match=match,
        tokens=tokens,
        types=types,
        scores=_scores(tokens, merges) if byte_fallback else None,
        merges=None if byte_fallback else merges,
        special={name: i for name, i in special.items() if i is None or i < vocab},
        add_bos=bos is not None and framed[0] == bos,
        add_eos=eos is not None and framed[-1] == eos,
        add_space_prefix=wrapped("a", add_special_tokens=False)["input_ids"]
        == [fast.token_to_id("▁a")],
        chat_template=wrapped.chat_template if isinstance(wrapped.chat_template, str) else None,
    )


def nearest_pre_tokenizer(fast: Tokenizer) -> tuple[str, float]:
    """Return llama.cpp's pre-tokenizer that gives most probe texts the same ids, and the fraction of those texts.

    If several pre-tokenizers are equally good, prefer a pre-tokenizer whose patterns the tokenizer has, and then the
    first.
    """
    spec = json.loads(fast.to_str())
    spelled = json.dumps(spec["pre_tokenizer"])
    expected = [fast.encode(text, add_special_tokens=False).ids for text in PROBES]
    ranks: dict[str, tuple[float, int]] = {}
    for name, pre_tokenizer in PRE_TOKENIZERS.items():
        set_pre_tokenizer(spec, pre_tokenizer)
        other = Tokenizer.from_str(json.dumps(spec))
        ids = [other.encode(text, add_special_tokens=False).ids for text in PROBES]
        match = sum(a == b for a, b in zip(ids, expected, strict=True)) / len(PROBES)
        known = [json.dumps(pattern) in spelled for pattern in pre_tokenizer.patterns]
        ranks[name] = match, all(known) * len(known)
    best = max(ranks, key=lambda name: ranks[name])
    return best, ranks[best][0]


def set_pre_tokenizer(spec: dict[str, Any], pre_tokenizer: PreTokenizer) -> None:
    """Replace the pre-tokenizer in `spec`, the parsed tokenizer.json of a byte-level tokenizer."""
    splits = [
        {"type": "Split", "pattern": {"Regex": e}, "behavior": "Isolated", "invert": False}
        for e in pre_tokenizer.patterns
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    spec["model"]["ignore_merges"] = pre_tokenizer.ignore_merges
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*splits, byte_level]}


def _tokens(
    spec: dict[str, Any], vocab: int, directory: Path, byte_fallback: bool
) -> tuple[list[str], list[int]]:
    by_id: dict[int, str] = {i: token for token, i in spec["model"]["vocab"].items()}
    kinds = dict.fromkeys(by_id, NORMAL)
    if byte_fallback:
        kinds |= {
            i: BYTE for i, token in by_id.items() if len(token) == 6 and token.startswith("<0x")
        }
        unknown = spec["model"].get("unk_token")
        kinds |= {i: UNKNOWN for i, token in by_id.items() if token == unknown}
    for added in spec["added_tokens"]:
        if added["id"] >= vocab:
            continue  # e.g. an image token, which a text model neither reads nor writes
        by_id[added["id"]] = added["content"]
        if kinds.get(added["id"]) != UNKNOWN:
            kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    if max(by_id) >= vocab:
        raise UserError(
            f"{directory}: the tokenizer has the id {max(by_id)}, but the model has only {vocab} logits"
        )
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(vocab)]
    return tokens, [kinds.get(i, UNUSED) for i in range(vocab)]


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Return a score for each token. Earlier merges score higher, because llama.cpp merges the highest score first."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    return [-float(ranks[token]) if token in ranks else -1e6 for token in tokens]
