"""A tokenizer that comes as SentencePiece's file alone gives the ids that SentencePiece itself gives."""

import json
from pathlib import Path

import pytest
from errors import raises_option
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from draftlab.errors import UserError
from draftlab.model import checkpoint
from draftlab.model.sentencepiece import PROBES, as_sentencepiece

TEXT = [
    *PROBES,
    "def parse(line):\n    if not line:\n        return None\n    return [int(part) for part in line.split(',')]\n",
]


def train_sentencepiece(out: Path, vocab: int = 480, normalization: str = "identity") -> None:
    """A model as LLaMA's: byte fallback, white space kept, and runs of it with the first ids and the last scores."""
    SentencePieceTrainer.train(
        sentence_iterator=iter("".join(TEXT * 20).split("\n")), model_prefix=str(out / "tokenizer"), vocab_size=vocab,
        model_type="bpe", byte_fallback=True, split_digits=True, allow_whitespace_only_pieces=True, num_threads=1,
        remove_extra_whitespaces=False, normalization_rule_name=normalization, minloglevel=2,
    )  # fmt: skip
    file = out / "tokenizer.model"
    proto = ModelProto.FromString(file.read_bytes())
    for piece in proto.pieces:
        if set(piece.piece) == {"▁"}:
            piece.score = -1e9
    file.write_bytes(proto.SerializeToString())
    (out / "tokenizer.vocab").unlink()


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("alone")
    train_sentencepiece(out)
    return out


CONFIG = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False}


@pytest.mark.parametrize("config", [CONFIG, None])
def test_ids_are_those_of_sentencepiece(alone, tmp_path, config):
    (tmp_path / "tokenizer.model").write_bytes((alone / "tokenizer.model").read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, truth = (
        checkpoint.load_tokenizer(tmp_path),
        SentencePieceProcessor(model_file=str(alone / "tokenizer.model")),
    )
    for text in [*TEXT, *("x" + " " * n + "y" for n in range(40))]:
        ids = tokenizer(text.lstrip(" "))["input_ids"]
        assert ids == [truth.bos_id(), *truth.encode(text.lstrip(" "))]
    assert tokenizer.decode(truth.encode("x   y\n z")) == "x   y\n z"
    assert checkpoint.eos_token_ids(tmp_path) == (truth.eos_id(),)


def test_a_damaged_model_is_not_taken_for_tiktokens(alone, tmp_path):
    """Twice the same content is a message for protobuf, which transformers reads, and none for SentencePiece."""
    whole, file = (alone / "tokenizer.model").read_bytes(), tmp_path / "tokenizer.model"
    file.write_bytes(2 * whole)
    with pytest.raises(UserError):
        checkpoint.load_tokenizer(tmp_path)
    tokenizer = checkpoint.load_tokenizer(alone)
    file.write_bytes(b"IQ== 0\nIg== 1\n")
    assert as_sentencepiece(tokenizer, file) is tokenizer


def test_a_model_that_transformers_reads_otherwise_is_refused(tmp_path):
    train_sentencepiece(tmp_path, vocab=430, normalization="nmt_nfkc_cf")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    with raises_option("tokenizer.json"):
        checkpoint.load_tokenizer(tmp_path)
