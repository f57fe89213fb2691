"""Load tokenizers, and check that draft and target have the same vocabulary."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from draftlab.errors import UserError
from draftlab.model.hf_files import CONFIG, check_has_tokenizer, text_config, vocab_size
from draftlab.model.hub import checkpoint_name
from draftlab.model.sentencepiece import as_sentencepiece
from draftlab.reading import reading
from draftlab.trust import trusts_remote_code

FILE = "tokenizer.json"
# attribute of a loaded tokenizer: for each model that reads its ids, the rows of the embedding and the directory
READERS = "_draftlab_readers"


def load_tokenizer(directory: Path, *readers: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint. check_embedded() compares its ids with this checkpoint and other readers.

    readers: Other checkpoints that read the ids.

    Raises:
        UserError: there is no tokenizer, or it cannot be read.
    """
    check_has_tokenizer(directory)
    with reading(f"{directory} has no usable tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trusts_remote_code())
        alone = directory / "tokenizer.model"
        fast = any((directory / name).is_file() for name in (FILE, "tekken.json"))
        if alone.is_file() and not fast:
            tokenizer = as_sentencepiece(tokenizer, alone)
    models = [model for model in (directory, *readers) if (model / CONFIG).is_file()]
    sizes = [(text_config(model).get("vocab_size"), model) for model in models]
    vars(tokenizer)[READERS] = [(size, model) for size, model in sizes if isinstance(size, int)]
    return tokenizer


def check_embedded(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Check that a text has no ids without a row in the embedding of a model that reads them, see load_tokenizer.

    A tokenizer may have such ids, if the text does not use them. where: Name of the text for errors.

    Raises:
        UserError: an id has no row.
    """
    largest = max(ids, default=-1)
    for rows, model in vars(tokenizer).get(READERS, []):
        if largest >= rows:
            token = tokenizer.convert_ids_to_tokens(largest)
            raise UserError(
                f"{where}: the token {token!r} has the id {largest}, but {model} embeds only the ids below {rows:,}; "
                "remove this token from the text, or copy the tokenizer files with which the model was trained"
            )


def special_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """Return the ids of a tokenizer's special tokens by the names bos, eos and pad. A missing token is None."""
    ids = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "pad": tokenizer.pad_token_id,
    }
    return {name: value if isinstance(value, int) else None for name, value in ids.items()}


def known_ids(*models: Path) -> int:
    """Return the number of ids that are tokens in every model. Ids from this number on are padding in some model."""
    return min(min(vocab_size(m), max(load_tokenizer(m).get_vocab().values()) + 1) for m in models)


def first_difference(draft: Mapping[str, int], target: Mapping[str, int], size: int) -> str | None:
    """Compare the tokens of draft and target for each id below `size`.

    Ids that are padding in the target are ignored, because drafted tokens with these ids are never accepted.

    draft, target: The id of each token.

    Returns: Text for a message about the first id with different tokens, or None if there is no such id.
    """
    drafts = {i: token for token, i in draft.items()}
    targets = {i: token for token, i in target.items()}
    first = next((i for i in sorted(targets) if i < size and drafts.get(i) != targets[i]), None)
    return None if first is None else f"id {first} is {drafts.get(first)!r} and {targets[first]!r}"


def different_tokenizers(draft: Path, target: Path, difference: str) -> str:
    """Return the error message for a draft and a target with different tokens.

    difference: Result of first_difference.
    """
    return (
        f"draft {checkpoint_name(draft)} and target {checkpoint_name(target)} have different tokenizers: "
        f"{difference}; use a draft with the target's vocabulary, or convert this draft with mergekit-tokensurgeon"
    )
