"""Tokenizers, and whether the vocabularies of draft and target fit. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from draftlab.errors import UserError
from draftlab.model.hf_files import HEAD_IDS, check_has_tokenizer, vocab_size
from draftlab.model.hub import checkpoint_name
from draftlab.reading import reading
from draftlab.trust import trusts_remote_code

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE = "tokenizer.json"


def load_tokenizer(directory: Path) -> "PreTrainedTokenizerBase":
    """Load a tokenizer. Raises UserError: the directory has no tokenizer, or it cannot be read."""
    from transformers import AutoTokenizer

    from draftlab.model.sentencepiece import as_sentencepiece

    check_has_tokenizer(directory)
    with reading(f"{directory} has no usable tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trusts_remote_code())
        alone = directory / "tokenizer.model"
        fast = any((directory / name).is_file() for name in (FILE, "tekken.json"))
        return as_sentencepiece(tokenizer, alone) if alone.is_file() and not fast else tokenizer


def special_ids(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int | None]:
    """Return the ids of bos, eos and pad, None for each token that the tokenizer lacks."""
    ids = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "pad": tokenizer.pad_token_id,
    }
    return {name: value if isinstance(value, int) else None for name, value in ids.items()}


def known_ids(*models: Path) -> int:
    """Return the number of ids for which every model has tokens. Logits of higher ids are padding in some model."""
    return min(min(vocab_size(m), max(load_tokenizer(m).get_vocab().values()) + 1) for m in models)


def check_embeds(model: Path) -> None:
    """Raises UserError: the tokenizer has ids without an embedding. Added tokens are not counted."""
    ids, embeddings = load_tokenizer(model).vocab_size, vocab_size(model)
    if ids > embeddings:
        raise UserError(
            f"{model} embeds {embeddings:,} ids, but its tokenizer has {ids:,} ids; use the tokenizer of this model"
        )


def common_vocabulary(draft: Path, target: Path) -> int:
    """Return the number of ids for which draft and target have logits, after a check that the tokens are equal.

    Speculation compares ids. Models of one family may pad their LM heads to different sizes; the smaller size counts.

    Raises:
        UserError: an id has different tokens, a tokenizer has ids that its model does not embed, or the target's head
            is trimmed.
    """
    for model in (draft, target):
        check_embeds(model)
    if (target / HEAD_IDS).is_file():
        raise UserError(
            f"{target} has a trimmed head ({HEAD_IDS}), so it can be a draft but not a target"
        )
    size = min(vocab_size(model) for model in (draft, target))
    other = first_difference(
        load_tokenizer(draft).get_vocab(), load_tokenizer(target).get_vocab(), size
    )
    if other is not None:
        raise UserError(different_tokenizers(draft, target, other))
    return size


def first_difference(draft: Mapping[str, int], target: Mapping[str, int], size: int) -> str | None:
    """Return text on the first target id below size that has another token in the draft, or None if all are equal.

    Draft tokens with an id that is padding in the target are ignored, because they are never accepted.
    """
    drafts = {i: token for token, i in draft.items()}
    targets = {i: token for token, i in target.items()}
    first = next((i for i in sorted(targets) if i < size and drafts.get(i) != targets[i]), None)
    return None if first is None else f"id {first} is {drafts.get(first)!r} and {targets[first]!r}"


def different_tokenizers(draft: Path, target: Path, difference: str) -> str:
    """Return the error message for a draft and a target with different tokens. difference: See first_difference."""
    return (
        f"draft {checkpoint_name(draft)} and target {checkpoint_name(target)} have different tokenizers: "
        f"{difference}; use a draft with the target's vocabulary, or convert this draft with mergekit-tokensurgeon"
    )
