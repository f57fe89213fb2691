"""The embedded target is what its card says."""

import json

import numpy as np
import pytest
import torch

from draftlab import provenance
from draftlab.data import Batch, open_heldout
from draftlab.model import checkpoint, hub
from draftlab.model.families import shipped
from draftlab.model.shape import read_shape_file

TINY = hub.EMBEDDED / "tiny"


def test_it_has_its_shape_file_and_fits_the_package():
    assert checkpoint.read_shape(TINY) == read_shape_file(shipped("widths") / "tiny-16x256.yaml")
    assert sum(f.stat().st_size for f in TINY.iterdir()) <= 32e6
    assert checkpoint.stored_dtype(TINY) == torch.bfloat16


def test_the_card_gives_the_numbers_of_the_record():
    record = provenance.read_record(TINY)
    assert record is not None
    assert record.command == "train"
    card = (TINY / "README.md").read_text()
    assert f"{record.notes['bits_per_byte']:.3f} bits per byte" in card
    assert f"{record.notes['tokens']:,} tokens" in card


def test_it_predicts_unseen_standard_library_code():
    """At most 1.4 bits per byte; the card's number is over all held-out files, this is a part of them."""
    heldout = open_heldout(
        "stdlib", checkpoint.load_tokenizer(TINY), rows=4, seq_len=512, most_rows=16
    )
    model = checkpoint.load_model(TINY, torch.float32).eval()

    def cross_entropy(batch: Batch) -> float:
        ids = torch.from_numpy(batch.ids)
        with torch.inference_mode():
            logits = model(ids[:, :-1]).logits
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))

    assert heldout.bits_per_byte(float(np.mean([cross_entropy(b) for b in heldout.batches]))) <= 1.4


def test_its_tokenizer_gives_back_every_byte():
    tokenizer = checkpoint.load_tokenizer(TINY)
    text = "def f(x):\n\n    return x  # çé → 漢字 \t\x00\r\n" + "".join(map(chr, range(32, 127)))
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text
    assert len(tokenizer) == json.loads((TINY / "config.json").read_text())["vocab_size"]


@pytest.mark.parametrize("name", ["tiny-3x256", "tiny-6x192", "tiny-12x128"])
def test_every_draft_shape_of_the_family_can_be_cut_from_it(name):
    from draftlab.model.shape import check, check_within

    shape = read_shape_file(shipped("widths") / f"{name}.yaml")
    check(shape)
    check_within(shape, checkpoint.read_shape(TINY))
