"""Training of byte-level BPE tokenizers for source code, and checks that vocabularies fit."""

from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from draftlab.errors import UserError
from draftlab.model.checkpoint import load_tokenizer, vocab_size
from draftlab.model.head_ids import HEAD_IDS
from draftlab.model.vocabularies import different_tokenizers, first_difference

SPECIAL_TOKENS = ["<s>", "</s>", "<pad>"]
# A word with one sign before it; up to three digits; punctuation with the line break and indentation after it; blank
# lines with the next indentation. Most of Python's white space is indentation, so it gets single tokens.
CODE_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+(?:[\r\n]+[ \t]*)?|\s*[\r\n]+[ \t]*|[ \t]+"


def train_tokenizer(texts: list[str], vocab: int, out: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json under out; all bytes are covered, and bos starts each text."""
    tokenizer: Any = Tokenizer(models.BPE())  # Any: its stubs declare the parts below as read-only
    split = pre_tokenizers.Split(Regex(CODE_PIECES), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, 0)]
    )
    bos, eos, pad = SPECIAL_TOKENS
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad, clean_up_tokenization_spaces=False
    )
    wrapped.save_pretrained(out)


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
