"""A tokenizer that comes as SentencePiece's file alone gives the ids that SentencePiece itself gives."""

import json
from pathlib import Path

import pytest
from helpers.errors import raises_option
from helpers.sentencepiece_files import CONFIG, TEXT, train_sentencepiece
from sentencepiece import SentencePieceProcessor

from draftlab.errors import UserError
from draftlab.model import checkpoint
from draftlab.model.sentencepiece import as_sentencepiece


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("alone")
    train_sentencepiece(out)
    return out


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
