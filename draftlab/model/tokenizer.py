"""Checks that vocabularies fit."""

from pathlib import Path

from draftlab.errors import UserError
from draftlab.model.checkpoint import load_tokenizer, vocab_size
from draftlab.model.head_ids import HEAD_IDS
from draftlab.model.vocabularies import different_tokenizers, first_difference


def known_ids(*models: Path) -> int:
    """Return the number of ids that are tokens in all models; logits above it are padding."""
    return min(min(vocab_size(m), max(load_tokenizer(m).get_vocab().values()) + 1) for m in models)


def check_embeds(model: Path) -> None:
    """Raises UserError: the tokenizer has ids without an embedding; added tokens are not counted."""
    ids, embeddings = load_tokenizer(model).vocab_size, vocab_size(model)
    if ids > embeddings:
        raise UserError(f"{model} embeds {embeddings:,} ids, but its tokenizer has {ids:,}: they do not fit")


def common_vocabulary(draft: Path, target: Path) -> int:
    """Return the number of ids that both models have logits for; both tokenizers must give them the same tokens.

    Speculation compares ids. Heads of one family may be padded to different sizes; the smaller one counts.

    Raises:
        UserError: an id that differs, a tokenizer with ids that its model does not embed, or a target whose head is
            trimmed.
    """
    for model in (draft, target):
        check_embeds(model)
    if (target / HEAD_IDS).is_file():
        raise UserError(f"{target}: its head is trimmed to some ids ({HEAD_IDS}), so it is a draft and no target")
    size = min(vocab_size(model) for model in (draft, target))
    other = first_difference(load_tokenizer(draft).get_vocab(), load_tokenizer(target).get_vocab(), size)
    if other is not None:
        raise UserError(different_tokenizers(draft, target, other))
    return size
