"""Small tokenizers of the kinds that checkpoints have, each trained once."""

import json
from pathlib import Path
from typing import Literal

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

Words = Literal["bytes", "sentencepiece", "tokenizer.model", "merges.txt"]
TEXT = [
    "def parse(line):\n    if not line:\n        return None\n    return [int(part) for part in line.split(',')]\n",
    "The target reads what the draft wrote, and keeps the words that it would have written itself.\n",
]
BYTES_SPECIAL = ["<s>", "</s>", "<pad>", "<end>", "<stop>"]
PIECES_SPECIAL = ["<unk>", "<s>", "</s>"]
ADDED = ["<pad>", "<end>", "<stop>"]  # at the end of SentencePiece's ids
CHAT = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}<end>{% endfor %}"


def special(words: Words) -> dict[str, int]:
    """Return ids of bos, pad, and of the three ends of a text, in the order in which a checkpoint names them."""
    if words in ("bytes", "merges.txt"):
        return {"bos": 0, "pad": 2, "end0": 1, "end1": 3, "end2": 4}
    last = len(tokenizer("sentencepiece").get_vocab())
    return {"bos": 1, "pad": last - 3, "end0": 2, "end1": last - 2, "end2": last - 1}


def size(words: Words) -> int:
    kind = "bytes" if words in ("bytes", "merges.txt") else "sentencepiece"
    return len(tokenizer(kind).get_vocab())


def write(words: Words, out: Path, *, chat: bool) -> None:
    """Put the tokenizer's files into out, as a checkpoint of that kind has them."""
    byte_level = words in ("bytes", "merges.txt")
    made = tokenizer("bytes" if byte_level else "sentencepiece")
    settings: dict[str, object] = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
    }
    if chat:
        settings["chat_template"] = CHAT
    if words in ("bytes", "sentencepiece"):
        made.save(str(out / "tokenizer.json"))
        settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    elif words == "merges.txt":
        made.model.save(str(out))
        settings |= {"tokenizer_class": "GPT2Tokenizer", "unk_token": "</s>", "add_bos_token": True}
        settings["added_tokens_decoder"] = _decoder(BYTES_SPECIAL, 0)
    else:
        (out / "tokenizer.model").write_bytes(_sentencepiece(made))
        settings |= {
            "tokenizer_class": "LlamaTokenizer",
            "unk_token": "<unk>",
            "add_bos_token": True,
            "legacy": False,
        }
        settings["added_tokens_decoder"] = _decoder(PIECES_SPECIAL, 0) | _decoder(ADDED, size(words) - len(ADDED))
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


_MADE: dict[str, Tokenizer] = {}


def tokenizer(kind: Literal["bytes", "sentencepiece"]) -> Tokenizer:
    if kind not in _MADE:
        _MADE[kind] = _bytes() if kind == "bytes" else _pieces()
    return _MADE[kind]


def _bytes() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=BYTES_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXT, trainer)
    return _framed(made, ("<s>", 0))


def _pieces() -> Tokenizer:
    """Return a tokenizer as LLaMA's tokenizer.json: spaces are ▁, what no piece has is spelled in bytes."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=120, show_progress=False)
    trained.train_from_iterator([t.replace("\n", " ") for t in TEXT], trainer)
    spec = json.loads(trained.to_str())["model"]
    pieces = sorted(spec["vocab"], key=spec["vocab"].get)
    every = [*PIECES_SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in spec["merges"]]
    model = models.BPE(
        {piece: i for i, piece in enumerate(every)},
        merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens(PIECES_SPECIAL)
    made.add_special_tokens(ADDED)
    return _framed(made, ("<s>", 1))


def _framed(made: Tokenizer, bos: tuple[str, int]) -> Tokenizer:
    made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[bos])
    return made


def _sentencepiece(made: Tokenizer) -> bytes:
    """Return the same pieces as SentencePiece's own file, in which the first merges have the largest scores."""
    from transformers.convert_slow_tokenizer import import_protobuf

    spec = json.loads(made.to_str())["model"]
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(spec["merges"]):
        ranks.setdefault("".join(merge), rank)
    model = import_protobuf().ModelProto()
    for piece in sorted(spec["vocab"], key=spec["vocab"].get):
        kind = {"<unk>": 2, "<s>": 3, "</s>": 3}.get(piece, 6 if piece.startswith("<0x") else 1)
        score = -float(ranks.get(piece, len(ranks))) if kind == 1 else 0.0
        model.pieces.add(piece=piece, score=score, type=kind)
    model.trainer_spec.model_type = 2  # BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.unk_id, model.trainer_spec.bos_id, model.trainer_spec.eos_id = 0, 1, 2
    model.normalizer_spec.add_dummy_prefix = True
    model.normalizer_spec.remove_extra_whitespaces = False
    return model.SerializeToString()


def _decoder(tokens: list[str], first: int) -> dict[str, dict[str, object]]:
    flags = {
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }
    return {str(first + i): {"content": token, **flags} for i, token in enumerate(tokens)}
