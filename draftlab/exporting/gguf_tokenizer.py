"""Conversion of Hugging Face tokenizers to GGUF: tokens, merges, and llama.cpp's pre-tokenizer, which splits text."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from draftlab.errors import UserError
from draftlab.exporting import llama_cpp_tokenizer
from draftlab.exporting.llama_cpp_tokenizer import SPACE
from draftlab.model import checkpoint
from draftlab.model.sentencepiece import PROBES

FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")  # of an added token
END_ROLES = ("eos", "eot", "eom")  # roles of GGUF whose tokens end a text
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # llama_token_type
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*")
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
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
    "llama-bpe": PreTokenizer(("|".join((ENDINGS, LETTERS, r"\p{N}{1,3}", SIGNS, SPACES)),), ignore_merges=True),
    "qwen2": PreTokenizer(("|".join((ENDINGS, LETTERS, r"\p{N}", SIGNS, SPACES)),)),
    "gpt-2": PreTokenizer((GPT2,)),
    "smollm": PreTokenizer((r"\p{N}", GPT2)),
    "tekken": PreTokenizer(("|".join((*CASED, r"\p{N}", SIGNS_AND_SLASHES, SPACES)),), ignore_merges=True),
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
class Probes:
    """Probe texts, and their ids in transformers. The first `plain` texts have no special tokens."""

    texts: Sequence[str]
    ids: Sequence[Sequence[int]]
    plain: int

    def equal(self, encode: Callable[[str], list[int]]) -> list[bool]:
        """Return for each text whether `encode` gives the ids of transformers."""
        return [encode(text) == ids for text, ids in zip(self.texts, self.ids, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTokenizer:
    """A tokenizer in GGUF's form.

    Attributes:
        equal: For each probe text, whether llama.cpp gives it the same ids as transformers.
        special: Ids of the special tokens by role: bos, eos, eot, eom, pad, unk. A text ends at eos, eot and eom.
        unheld_ends: Further tokens that end a text, for which GGUF has no role.
        chat_templates: Chat templates by name. The server renders the one named "default".
    """

    model: str  # gpt2: byte-level BPE; llama: SentencePiece
    pre: str
    probes: Probes
    equal: list[bool]
    tokens: list[str]
    types: list[int]
    scores: list[float] | None
    merges: list[str] | None
    special: dict[str, int]
    unheld_ends: list[str]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    chat_templates: Mapping[str, str]

    @property
    def match(self) -> float:
        """Return the fraction of the probe texts to which llama.cpp gives the same ids as transformers."""
        return sum(self.equal) / len(self.equal)

    @property
    def match_special(self) -> float:
        """Return the same fraction of the probe texts that have special tokens."""
        beside = self.equal[self.probes.plain :]
        return sum(beside) / max(1, len(beside))


def read_tokenizer(directory: Path, vocab: int) -> GGUFTokenizer:
    """Read the tokenizer of a directory, padded to `vocab` tokens.

    Raises:
        UserError: The tokenizer is neither byte-level BPE nor SentencePiece's BPE, has no merges, or has more than
            `vocab` tokens.
    """
    wrapped: Any = checkpoint.load_tokenizer(directory)
    file = directory / "tokenizer.json"  # transformers adds tokens of its own by model type
    fast: Tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else wrapped.backend_tokenizer
    spec = json.loads(fast.to_str())
    if spec["model"]["type"] != "BPE":
        raise UserError(
            f"{directory} has a {spec['model']['type']} tokenizer, but draftlab writes only BPE tokenizers to GGUF "
            "files; use --to vllm, or convert the model with llama.cpp's convert_hf_to_gguf.py"
        )
    byte_fallback = bool(spec["model"].get("byte_fallback"))
    tokens, types = _tokens(spec, vocab, directory, byte_fallback)
    merges = [" ".join(m) if isinstance(m, list) else m for m in spec["model"]["merges"]]
    if not merges and not byte_fallback:
        raise UserError(
            f"{directory} has a byte-level BPE tokenizer without merges, which llama.cpp cannot load; use --to hf"
        )
    template = wrapped.chat_template or {}
    templates = {"default": template} if isinstance(template, str) else template
    special = {
        token: i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED, UNKNOWN)
    }
    texts = [*PROBES, *_beside_special(spec, special, templates)]
    expected = [wrapped(text, add_special_tokens=False)["input_ids"] for text in texts]
    probes = Probes(texts=texts, ids=expected, plain=len(PROBES))
    pre = "default"
    scores = None
    space_prefix = False
    if byte_fallback:
        scores = _scores(tokens, merges)
        space_prefix, equal = choose_space_prefix(tokens, scores, special, probes)
    else:
        pre, equal = nearest_pre_tokenizer(spec, special, probes)
    bos = wrapped.bos_token_id
    eos = wrapped.eos_token_id
    framed = wrapped("a")["input_ids"]
    roles = checkpoint.special_ids(wrapped) | {"unk": wrapped.unk_token_id}
    ends = [eos] if isinstance(eos, int) else []
    ends += [i for i in checkpoint.eos_token_ids(directory) if i not in ends]
    ends = [i for i in ends if i < vocab]
    roles |= dict(zip(END_ROLES, ends, strict=False))
    return GGUFTokenizer(
        model="llama" if byte_fallback else "gpt2",
        pre=pre,
        probes=probes,
        equal=equal,
        tokens=tokens,
        types=types,
        scores=scores,
        merges=None if byte_fallback else merges,
        special={name: i for name, i in roles.items() if i is not None and i < vocab},
        unheld_ends=[tokens[i] for i in ends[len(END_ROLES) :]],
        add_bos=bos is not None and framed[0] == bos,
        add_eos=eos is not None and framed[-1] == eos,
        add_space_prefix=space_prefix,
        chat_templates=templates,
    )


def _beside_special(spec: dict[str, Any], special: Mapping[str, int], templates: Mapping[str, str]) -> list[str]:
    """Return texts in which special tokens stand beside words, with and without white space.

    The special tokens are those that a chat template names, and one token of each combination of flags.
    """
    named = "".join(templates.values())
    chosen: dict[str, None] = {}
    flags: set[tuple[bool, ...]] = set()
    for token in spec["added_tokens"]:
        kind = tuple(token[name] for name in FLAGS)
        if token["content"] in special and (kind not in flags or token["content"] in named):
            flags.add(kind)
            chosen[token["content"]] = None
    before = "The quick brown fox"
    after = "jumps over the lazy dog."
    texts: list[str] = []
    for token in chosen:
        texts += [
            f"{token}{after}",
            f"{before}{token}{after}",
            f"{before} {token} {after}",
            f"{before}\n{token}\n{after}",
        ]
    return texts


def choose_space_prefix(
    tokens: Sequence[str], scores: Sequence[float], special: Mapping[str, int], probes: Probes
) -> tuple[bool, list[bool]]:
    """Return the add_space_prefix with which llama.cpp gives most probe texts the right ids, and those texts.

    If both are equally good, return the one that is better for texts without special tokens.
    """
    ranks: dict[bool, tuple[int, int]] = {}
    results: dict[bool, list[bool]] = {}
    for prefix in (True, False):
        inner = llama_cpp_tokenizer.SentencePiece(tokens, scores, prefix)
        equal = probes.equal(lambda text, inner=inner: llama_cpp_tokenizer.encode(text, special, inner.encode))
        results[prefix] = equal
        ranks[prefix] = (sum(equal), sum(equal[: probes.plain]))
    best = max(ranks, key=lambda prefix: ranks[prefix])
    return best, results[best]


def nearest_pre_tokenizer(spec: dict[str, Any], special: Mapping[str, int], probes: Probes) -> tuple[str, list[bool]]:
    """Return llama.cpp's pre-tokenizer that gives most probe texts the right ids, and those texts.

    If several pre-tokenizers are equally good, prefer a pre-tokenizer whose patterns the tokenizer has, and then the
    first.

    Args:
        spec: The parsed tokenizer.json of a byte-level tokenizer.
        special: Ids of the special tokens, by content.
    """
    spelled = json.dumps(spec["pre_tokenizer"])
    # llama.cpp finds the special tokens itself, and has no normalizer
    spec = spec | {"added_tokens": [], "normalizer": None, "model": dict(spec["model"])}
    ranks: dict[str, tuple[int, int]] = {}
    results: dict[str, list[bool]] = {}
    for name, pre_tokenizer in PRE_TOKENIZERS.items():
        set_pre_tokenizer(spec, pre_tokenizer)
        other = Tokenizer.from_str(json.dumps(spec))

        def encode(part: str, _: bool, other: Tokenizer = other) -> list[int]:
            return other.encode(part, add_special_tokens=False).ids

        equal = probes.equal(lambda text, encode=encode: llama_cpp_tokenizer.encode(text, special, encode))
        known = [json.dumps(pattern) in spelled for pattern in pre_tokenizer.patterns]
        results[name] = equal
        ranks[name] = (sum(equal), all(known) * len(known))
    best = max(ranks, key=lambda name: ranks[name])
    return best, results[best]


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


def _tokens(spec: dict[str, Any], vocab: int, directory: Path, byte_fallback: bool) -> tuple[list[str], list[int]]:
    by_id: dict[int, str] = {i: token for token, i in spec["model"]["vocab"].items()}
    kinds = dict.fromkeys(by_id, NORMAL)
    if byte_fallback:
        kinds |= {i: BYTE for i, token in by_id.items() if len(token) == 6 and token.startswith("<0x")}
        unknown = spec["model"].get("unk_token")
        kinds |= {i: UNKNOWN for i, token in by_id.items() if token == unknown}
    for added in spec["added_tokens"]:
        if added["id"] >= vocab:
            continue  # e.g. an image token, which a text model neither reads nor writes
        content = added["content"]
        if byte_fallback and not added["special"]:
            # llama.cpp looks for it before it replaces spaces
            content = content.replace(SPACE, " ")
        by_id[added["id"]] = content
        if kinds.get(added["id"]) != UNKNOWN:
            kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    if max(by_id) >= vocab:
        raise UserError(f"{directory}: the tokenizer has the id {max(by_id)}, but the model has only {vocab} logits")
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(vocab)]
    return tokens, [kinds.get(i, UNUSED) for i in range(vocab)]


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Return a score for each token. Earlier merges score higher, because llama.cpp merges the highest score first."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    return [-float(ranks[token]) if token in ranks else -1e6 for token in tokens]
