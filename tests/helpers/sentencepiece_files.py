"""Small sentencepiece tokenizers."""

from pathlib import Path

import pytest
from sentencepiece import SentencePieceTrainer
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from draftlab.model.sentencepiece import PROBES

TEXT = [
    *PROBES,
    "def parse(line):\n    if not line:\n        return None\n    return [int(part) for part in line.split(',')]\n",
]
CONFIG = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False}


@pytest.fixture(scope="module", name="sentencepiece")
def sentencepiece_fixture(tmp_path_factory) -> Path:
    """BPE as LLaMA 1 and 2 have it: spaces are letters, bytes fall back."""
    out = tmp_path_factory.mktemp("sentencepiece")
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁etaoinsrhldcum"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "n")]
    vocab = {token: i for i, token in enumerate([*letters, *map("".join, merges)])}
    inner = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    inner.normalizer = normalizers.Sequence(spaces)
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    roles = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **roles).save_pretrained(out)
    return out


def train_sentencepiece(out: Path, vocab: int = 480, normalization: str = "identity") -> None:
    """Train a model as LLaMA's: byte fallback, white space kept, and runs of it first in ids and last in scores."""
    SentencePieceTrainer.train(
        sentence_iterator=iter("".join(TEXT * 20).split("\n")),
        model_prefix=str(out / "tokenizer"),
        vocab_size=vocab,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        num_threads=1,
        remove_extra_whitespaces=False,
        normalization_rule_name=normalization,
        minloglevel=2,
    )
    file = out / "tokenizer.model"
    proto = ModelProto.FromString(file.read_bytes())
    for piece in proto.pieces:
        if set(piece.piece) == {"▁"}:
            piece.score = -1e9
    file.write_bytes(proto.SerializeToString())
    (out / "tokenizer.vocab").unlink()
