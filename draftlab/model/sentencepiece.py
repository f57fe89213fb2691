"""Check and correct tokenizers that transformers makes from a tokenizer.model file alone, without a tokenizer.json."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tokenizers import models
from transformers import LlamaTokenizer, PreTrainedTokenizerBase, TokenizersBackend

from draftlab.errors import UserError
from draftlab.reading import reading

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

# Texts on which tokenizers with the same vocabulary may differ: white space, digits, case, scripts, punctuation.
PROBES = (
    "def f(x):\n    return [x + 1, 'naïve, 北京', 12345]  # Ünïcödé\n",
    "The quick brown fox jumps over the lazy dog.",
    " leading, trailing ",
    "two  spaces,   three,\ttab\n\n\nthree lines\r\nand a carriage return",
    "\n",
    "if a:\n\tif b:\n\t\treturn c\n\n\nclass D:\n    pass\n",
    "        eight spaces\n            twelve\n",
    "1 12 123 1234 12345.678 1,000,000 0x1F 1e-10",
    "I'm, you're, he's, we'll, they'd, DON'T, it\u2019s",
    "camelCase snake_case SCREAMING_CASE kebab-case PascalCase iPhone2",
    "a+b-c*d/e%f==g!=h<=i>=j&&k||l->m::n...o",
    "https://example.org/path?query=1&other=two#fragment",
    "Grüße aus Köln, Ça va, señor, naïve café",
    "Привет, мир! Γειά σου Κόσμε",
    "你好，世界。こんにちは 안녕하세요",
    "مرحبا بالعالم שלום עולם",
    "नमस्ते दुनिया สวัสดีชาวโลก",
    "😀👩‍👩‍👧‍👦🇫🇷 emoji ✓ ½ ²",
    "e\u0301 combining, \u00a0 no-break, \u200b zero width, \u3000 wide",
    '<p>HTML &amp; entities</p> {"json": [true, null]} | table | - [ ] list',
)


# a line of a tiktoken file: a token in base64, and its id
TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\s*")
LONGEST_LINE = 4096


def as_sentencepiece(tokenizer: PreTrainedTokenizerBase, file: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer, or a corrected tokenizer if it encodes text to other ids than SentencePiece does.

    SentencePiece orders BPE merges by score, but transformers 5 orders them by id. In LLaMA's tokenizer, runs of spaces
    have the first ids but the lowest scores. Without a tokenizer_config.json, transformers also omits the leading space
    and bos. The tokenizer of a tiktoken file is returned unchanged.

    file: Path of tokenizer.model.

    Raises:
        UserError: `file` is no SentencePiece model, or the corrected tokenizer still gives other ids.
    """
    from sentencepiece import SentencePieceProcessor  # a package of the extra gguf

    with file.open("rb") as stream:
        if TIKTOKEN.fullmatch(stream.readline(LONGEST_LINE)):
            return tokenizer  # a tiktoken file may also be called tokenizer.model
    with reading(f"{file} is not a SentencePiece model"):
        processor = SentencePieceProcessor(model_file=str(file))
    if _agrees(tokenizer, processor):
        return tokenizer
    defaults: dict[str, Any] = {} if (file.parent / "tokenizer_config.json").is_file() else {"add_bos_token": True}
    for candidate in (tokenizer, LlamaTokenizer.from_pretrained(file.parent, **defaults)):
        if isinstance(candidate, TokenizersBackend) and isinstance(candidate.backend_tokenizer.model, models.BPE):
            # the stubs declare this attribute read-only
            cast(Any, candidate.backend_tokenizer).model = _by_score(processor)
            if _agrees(candidate, processor):
                return candidate
    raise UserError(
        f"transformers and SentencePiece read {file} differently, and encode text to different token ids; add the "
        "model's tokenizer.json"
    )


def _agrees(tokenizer: PreTrainedTokenizerBase, processor: "SentencePieceProcessor") -> bool:
    # transformers adds no space before a space, on purpose
    texts = [text.lstrip(" ") for text in PROBES]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts] == processor.encode(texts)


def _by_score(processor: "SentencePieceProcessor") -> models.BPE:
    """Return a BPE model of a SentencePiece model. Merges with high scores come first, then long left parts."""
    ids = range(processor.get_piece_size())
    vocab = {processor.id_to_piece(i): i for i in ids}
    special = {i for i in ids if processor.is_control(i) or processor.is_unknown(i) or processor.is_byte(i)}
    scores = {piece: processor.get_score(i) for piece, i in vocab.items() if i not in special}
    merges = [
        (piece[:at], piece[at:])
        for piece in scores
        for at in range(1, len(piece))
        if piece[:at] in scores and piece[at:] in scores
    ]
    merges.sort(key=lambda pair: (-scores["".join(pair)], -len(pair[0]), -len(pair[1])))
    return models.BPE(
        vocab=vocab,
        merges=merges,
        unk_token=processor.id_to_piece(processor.unk_id()),
        fuse_unk=True,
        byte_fallback=True,
    )
