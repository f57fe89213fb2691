"""Tokenizers, and whether the vocabularies of draft and target fit. No torch.

A tokenizer with SentencePiece's file only is checked, and corrected to give SentencePiece's own ids.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tokenizers import models
from transformers import LlamaTokenizer, PreTrainedTokenizerBase, TokenizersBackend

from draftlab.errors import UserError
from draftlab.model.hf_files import HEAD_IDS, check_has_tokenizer, vocab_size
from draftlab.model.hub import checkpoint_name
from draftlab.reading import reading
from draftlab.trust import trusts_remote_code

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from transformers import PreTrainedTokenizerBase

# Texts on which tokenizers of one vocabulary differ: white space, digits, case, scripts, punctuation.
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


TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\s*")  # a token in base64, and its id
LONGEST_LINE = 4096


def as_sentencepiece(tokenizer: PreTrainedTokenizerBase, file: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer, corrected if its ids are not SentencePiece's.

    transformers 5 orders merges by id, while LLaMA's runs of spaces have the first ids and the last scores; without a
    tokenizer_config.json it also omits the leading space and bos.

    Raises:
        UserError: no correction helps.
    """
    from sentencepiece import SentencePieceProcessor  # extra: gguf

    try:
        processor = SentencePieceProcessor(model_file=str(file))
    except (RuntimeError, OSError):
        with file.open("rb") as stream:
            if TIKTOKEN.fullmatch(stream.readline(LONGEST_LINE)):
                return tokenizer  # tiktoken's file has the same name
        raise UserError(f"{file} is not a readable SentencePiece model") from None
    if _agrees(tokenizer, processor):
        return tokenizer
    defaults: dict[str, Any] = (
        {} if (file.parent / "tokenizer_config.json").is_file() else {"add_bos_token": True}
    )
    for candidate in (tokenizer, LlamaTokenizer.from_pretrained(file.parent, **defaults)):
        if isinstance(candidate, TokenizersBackend) and isinstance(
            candidate.backend_tokenizer.model, models.BPE
        ):
            # its stubs declare it read-only
            cast(Any, candidate.backend_tokenizer).model = _by_score(processor)
            if _agrees(candidate, processor):
                return candidate
    raise UserError(
        f"transformers gives other ids than SentencePiece with {file}; add the model's tokenizer.json"
    )


def _agrees(tokenizer: PreTrainedTokenizerBase, processor: "SentencePieceProcessor") -> bool:
    # transformers adds no space before a space, on purpose
    texts = [text.lstrip(" ") for text in PROBES]
    return [
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts
    ] == processor.encode(texts)


def _by_score(processor: "SentencePieceProcessor") -> models.BPE:
    """Return a BPE model with SentencePiece's merges, by score and then leftmost first."""
    ids = range(processor.get_piece_size())
    vocab = {processor.id_to_piece(i): i for i in ids}
    special = {
        i for i in ids if processor.is_control(i) or processor.is_unknown(i) or processor.is_byte(i)
    }
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


FILE = "tokenizer.json"


def load_tokenizer(directory: Path) -> "PreTrainedTokenizerBase":
    """Load a tokenizer. Raises UserError: the directory has none, or it cannot be read."""
    from transformers import AutoTokenizer

    check_has_tokenizer(directory)
    with reading(f"{directory} has no usable tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trusts_remote_code())
        alone = directory / "tokenizer.model"
        fast = any((directory / name).is_file() for name in (FILE, "tekken.json"))
        return as_sentencepiece(tokenizer, alone) if alone.is_file() and not fast else tokenizer


def special_ids(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int | None]:
    """Return the ids of bos, eos and pad; None for those that the tokenizer lacks."""
    ids = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "pad": tokenizer.pad_token_id,
    }
    return {name: value if isinstance(value, int) else None for name, value in ids.items()}


def known_ids(*models: Path) -> int:
    """Return the number of ids that are tokens in all models; logits above it are padding."""
    return min(min(vocab_size(m), max(load_tokenizer(m).get_vocab().values()) + 1) for m in models)


def check_embeds(model: Path) -> None:
    """Raises UserError: the tokenizer has ids without an embedding; added tokens are not counted."""
    ids, embeddings = load_tokenizer(model).vocab_size, vocab_size(model)
    if ids > embeddings:
        raise UserError(
            f"{model} embeds {embeddings:,} ids, but its tokenizer has {ids:,}: they do not fit"
        )


def common_vocabulary(draft: Path, target: Path) -> int:
    """Return the number of ids that both models have logits for; both tokenizers must give them the same tokens.

    Speculation compares ids. Models of one family may pad their LM heads to different sizes; the smaller size counts.

    Raises:
        UserError: an id that differs, a tokenizer with ids that its model does not embed, or a target whose head is
            trimmed.
    """
    for model in (draft, target):
        check_embeds(model)
    if (target / HEAD_IDS).is_file():
        raise UserError(
            f"{target}: its head is trimmed to some ids ({HEAD_IDS}), so it is a draft and no target"
        )
    size = min(vocab_size(model) for model in (draft, target))
    other = first_difference(
        load_tokenizer(draft).get_vocab(), load_tokenizer(target).get_vocab(), size
    )
    if other is not None:
        raise UserError(different_tokenizers(draft, target, other))
    return size


def first_difference(draft: Mapping[str, int], target: Mapping[str, int], size: int) -> str | None:
    """Return which of the target's ids below size is another token in the draft, None if none is.

    Tokens of the draft's tokenizer where the target has padding are never accepted.
    """
    drafts = {i: token for token, i in draft.items()}
    targets = {i: token for token, i in target.items()}
    first = next((i for i in sorted(targets) if i < size and drafts.get(i) != targets[i]), None)
    return None if first is None else f"id {first} is {drafts.get(first)!r} and {targets[first]!r}"


def different_tokenizers(draft: Path, target: Path, difference: str) -> str:
    """Return an error message about two models whose tokens differ. difference: See first_difference."""
    return (
        f"draft {checkpoint_name(draft)} and target {checkpoint_name(target)} have different tokenizers: {difference}; "
        "speculation needs the same vocabulary, which mergekit-tokensurgeon gives a draft"
    )
