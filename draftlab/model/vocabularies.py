"""Vocabularies of draft and target, compared id by id. No torch."""

from collections.abc import Mapping
from pathlib import Path

from draftlab.errors import UserError
from draftlab.model.hub import checkpoint_name
from draftlab.provenance import file_sha256
from draftlab.reading import reading

FILE = "tokenizer.json"


def check_files(draft: Path, target: Path) -> None:
    """Raises UserError: an id is one token in the draft's tokenizer.json, and another one in the target's.

    Ids that only one of them has, and other files of tokenizers, are left to transformers' own tokenizers.
    """
    files = [draft / FILE, target / FILE]
    if not all(file.is_file() for file in files) or len(set(map(file_sha256, files))) == 1:
        return
    vocabularies = [_vocabulary(file) for file in files]
    shared = set.intersection(*(set(vocab.values()) for vocab in vocabularies))
    first, second = ({token: i for token, i in vocab.items() if i in shared} for vocab in vocabularies)
    if (other := first_difference(first, second, max(shared, default=-1) + 1)) is not None:
        raise UserError(different_tokenizers(draft, target, other))


def first_difference(draft: Mapping[str, int], target: Mapping[str, int], size: int) -> str | None:
    """Return which of the target's ids below size is another token in the draft, None if none is.

    What the draft's tokenizer adds where the target has padding is never accepted.
    """
    drafts, targets = ({i: token for token, i in vocab.items()} for vocab in (draft, target))
    first = next((i for i in sorted(targets) if i < size and drafts.get(i) != targets[i]), None)
    return None if first is None else f"id {first} is {drafts.get(first)!r} and {targets[first]!r}"


def different_tokenizers(draft: Path, target: Path, difference: str) -> str:
    """Return what to say of two models whose tokens differ. difference: see first_difference."""
    return (
        f"draft {checkpoint_name(draft)} and target {checkpoint_name(target)} have different tokenizers: {difference}; "
        "speculation needs the same vocabulary, which mergekit-tokensurgeon gives a draft"
    )


def _vocabulary(file: Path) -> dict[str, int]:
    from tokenizers import Tokenizer

    with reading(f"{file} is no usable tokenizer"):
        return Tokenizer.from_file(str(file)).get_vocab()
