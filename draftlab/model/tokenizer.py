"""Train a byte-level BPE tokenizer for source code and save it as a Hugging Face tokenizer."""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from draftlab.errors import UserError
from draftlab.model.checkpoint import load_tokenizer, vocab_size
from draftlab.model.hub import checkpoint_name

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


def known_ids(*models: Path) -> int:
    """Return how many ids, from 0 on, stand for a token in all of them: further logits are padding."""
    return min(min(vocab_size(m), max(load_tokenizer(m).get_vocab().values()) + 1) for m in models)


def check_embeds(model: Path) -> None:
    """Raises UserError: its tokenizer makes ids of text that it has no embedding for; added tokens do not count."""
    words, have = load_tokenizer(model).vocab_size, vocab_size(model)
    if words > have:
        raise UserError(f"{model} knows {have:,} ids, and its tokenizer makes {words:,}: they are of different models")


def common_vocabulary(draft: Path, target: Path) -> int:
    """How many ids, from 0 on, both models have logits for and both tokenizers give the same meaning.

    Speculation compares ids. Heads of one family are padded to different sizes: the smaller size counts.

    Raises:
        UserError: the first id below it that differs, or a model that does not know what its tokenizer makes of text.
    """
    for model in (draft, target):
        check_embeds(model)
    size = min(vocab_size(model) for model in (draft, target))
    mine, its = ({i: t for t, i in load_tokenizer(model).get_vocab().items()} for model in (draft, target))
    first = next((i for i in range(size) if mine.get(i) != its.get(i)), None)
    if first is not None:
        raise UserError(
            f"draft {checkpoint_name(draft)} and target {checkpoint_name(target)} have different tokenizers: "
            f"id {first} is {mine.get(first)!r} and {its.get(first)!r}; speculation needs the same vocabulary"
        )
    return size
