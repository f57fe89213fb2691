"""Tokens as the bytes that they stand for, however tokenizers spell them, and the tokens that given bytes split into.

Byte-level BPE spells " é" as ĠÃ©, SentencePiece as ▁é or as ▁ and two byte tokens. Added tokens are not respelled.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import TokenizersBackend

from draftlab.errors import UserError
from draftlab.model import checkpoint

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # of SentencePiece
NOT_TEXT = re.compile("([\udc80-\udcff])")  # as Python's surrogateescape writes bytes that are not UTF-8
UNCHANGED = {*range(33, 127), *range(161, 173), *range(174, 256)}  # bytes that byte-level BPE spells as they are
SPELLED = {
    **{chr(b): b for b in UNCHANGED},
    **{chr(256 + n): b for n, b in enumerate(sorted({*range(256)} - UNCHANGED))},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens of a tokenizer below a number of ids.

    text: bytes of the ids that text is made of. spelling: of every id. added: ids of added tokens by their content, and
    special those that are no text. canonical: the id of given bytes that text is made of, where several stand for them.
    """

    text: dict[int, bytes]
    spelling: dict[int, str]
    added: dict[str, int]
    special: dict[int, str]
    canonical: dict[bytes, int]
    encoder: Tokenizer

    def split(self, text: bytes) -> list[int]:
        """Return the ids that bytes within a text split into, [] where the tokenizer has none for them.

        What is not UTF-8 is split into single bytes.
        """
        ids: list[int] = []
        for number, part in enumerate(NOT_TEXT.split(text.decode("utf-8", "surrogateescape"))):
            if number % 2:
                ids.append(self.canonical.get(part.encode("utf-8", "surrogateescape"), -1))
            elif part:
                ids += self.encoder.encode(part, add_special_tokens=False).ids
        return ids if b"".join(self.text.get(i, b"") for i in ids) == text else []


def read_vocabulary(directory: Path, size: int) -> Vocabulary:
    """Return the tokens of a checkpoint with ids below size.

    Raises:
        UserError: neither byte-level BPE nor SentencePiece, as one of the tokenizers library.
    """
    wrapped = checkpoint.load_tokenizer(directory)
    if not isinstance(wrapped, TokenizersBackend):
        raise UserError(
            f"{directory}: its tokenizer ({type(wrapped).__name__}) runs in Python; it needs tokenizer.json"
        )
    spec: dict[str, Any] = json.loads(wrapped.backend_tokenizer.to_str())
    byte_level = _is_byte_level(spec, directory)
    added = {token.content: i for i, token in wrapped.added_tokens_decoder.items() if i < size}
    special = {i: t.content for i, t in wrapped.added_tokens_decoder.items() if t.special and i < size}
    spelling = {i: token for token, i in wrapped.get_vocab().items() if i < size}
    fallback = bool(spec["model"].get("byte_fallback"))
    text: dict[int, bytes] = {}
    for i, token in sorted(spelling.items()):
        decoded = token.encode() if token in added else _decoded(token, byte_level, fallback)
        if i not in special and decoded:
            text[i] = decoded
    ranked = sorted(text, key=lambda i: (fallback and BYTE_TOKEN.fullmatch(spelling[i]) is not None, i), reverse=True)
    return Vocabulary(
        text=text, spelling=spelling, added=added, special=special, canonical={text[i]: i for i in ranked},
        encoder=_within_text(spec, byte_level),
    )  # fmt: skip


def _is_byte_level(spec: dict[str, Any], directory: Path) -> bool:
    """Return whether tokens are spelled as byte-level BPE spells them, and not as SentencePiece does."""
    kinds = {str(part["type"]) for part in _parts(spec, "decoder")}
    if "ByteLevel" in kinds:
        return True
    if kinds & {"Metaspace", "ByteFallback"} or SPACE in json.dumps(spec["decoder"], ensure_ascii=False):
        return False
    raise UserError(
        f"{directory}: its tokenizer ({spec['model']['type']}, decoded by {', '.join(sorted(kinds))}) is neither "
        "byte-level BPE nor SentencePiece, so the bytes of its tokens are not known"
    )


def _parts(spec: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the parts of a normalizer, pre_tokenizer or decoder: of a sequence, each of them."""
    part = spec[name] or {"type": "Sequence"}
    return list(next((part[key] for key in ("normalizers", "pretokenizers", "decoders") if key in part), [part]))


def _decoded(token: str, byte_level: bool, fallback: bool) -> bytes:
    """Return the bytes of a token of the model, none for one that its decoder cannot write."""
    if byte_level:
        return bytes(SPELLED[c] for c in token) if all(c in SPELLED for c in token) else b""
    byte = BYTE_TOKEN.fullmatch(token) if fallback else None
    return bytes.fromhex(byte.group(1)) if byte else token.replace(SPACE, " ").encode()


def _within_text(spec: dict[str, Any], byte_level: bool) -> Tokenizer:
    """Return a tokenizer that splits what stands within a text: it adds no space before it and changes no character."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    parts = [
        part | {"prepend_scheme": "never"} if part["type"] == "Metaspace" else part | {"add_prefix_space": False}
        for part in _parts(spec, "pre_tokenizer")
    ]
    spec = spec | {
        "normalizer": None if byte_level else replace,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts} if spec["pre_tokenizer"] else None,
        "truncation": None,
        "padding": None,
    }
    encoder = Tokenizer.from_str(json.dumps(spec))
    encoder.encode_special_tokens = True
    return encoder
