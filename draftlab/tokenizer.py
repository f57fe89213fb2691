"""Train a byte-level BPE tokenizer for source code and save it as a Hugging Face tokenizer."""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from draftlab.checkpoint import load_tokenizer, read_config
from draftlab.errors import UserError

SPECIAL_TOKENS = ["<s>", "</s>", "<pad>"]
# A word with what is glued to its front; up to three digits; punctuation with the line break and the indentation
# that follow; blank lines with the next indentation. Indentation is most of Python's white space: one token for it.
CODE_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+(?:[\r\n]+[ \t]*)?|\s*[\r\n]+[ \t]*|[ \t]+"


def train_tokenizer(texts: list[str], vocab: int, out: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json under out; every byte is covered, bos is put in front."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(CODE_PIECES), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, 0)]
    )
    bos, eos, pad = SPECIAL_TOKENS
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad, clean_up_tokenization_spaces=False
    )
    wrapped.save_pretrained(out)


def check_same_vocabulary(draft: Path, target: Path) -> None:
    """Speculation compares token ids, so every id must mean the same to both.

    Raises:
        UserError: the first id that differs, or vocabularies of different size in config.json.
    """
    ours, theirs = load_tokenizer(draft).get_vocab(), load_tokenizer(target).get_vocab()
    if ours != theirs:
        mine, its = {i: t for t, i in ours.items()}, {i: t for t, i in theirs.items()}
        first = min(i for i in mine.keys() | its.keys() if mine.get(i) != its.get(i))
        raise UserError(
            f"draft {draft.name} and target {target.name} have different tokenizers: id {first} is "
            f"{mine.get(first)!r} and {its.get(first)!r}; speculation needs the same vocabulary"
        )
    sizes = read_config(draft)["vocab_size"], read_config(target)["vocab_size"]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"draft {draft.name} has {sizes[0]} logits, target {target.name} {sizes[1]}; pad or trim the draft"
        )
