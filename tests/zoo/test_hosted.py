"""A model that transformers runs is read on, taken back and read again, whatever it caches and however it counts."""

import pytest
import torch
from helpers.builders import assert_rounds
from helpers.errors import raises_option

from draftlab.model import checkpoint
from draftlab.model.decoder import feed
from draftlab.model.hf_decoder import HFDecoder

from .build import build, small
from .facts import zoo

HOSTED = ("gemma-3-1b-it", "gpt-oss-20b", "opt-125m", "bloom-560m", "gpt2", "phi-3-mini-4k")


@pytest.fixture(scope="module")
def hosted(tmp_path_factory):
    def load(name: str) -> HFDecoder:
        facts, folder = zoo()[name], tmp_path_factory.mktemp("hosted") / name
        if "bin" in facts.files:
            facts = facts.model_copy(update={"files": ["single"]})
        return HFDecoder(checkpoint.load_model(build(facts, folder), torch.float32).eval())

    return load


@pytest.mark.parametrize("name", HOSTED)
def test_after_tokens_are_taken_back_the_logits_are_those_of_a_fresh_read(name, hosted):
    model = hosted(name)
    ids = torch.randint(5, 290, (1, 60), generator=torch.Generator().manual_seed(0))
    other = ids[0, 50:].flip(0).tolist()
    text = [*ids[0, :50].tolist(), *other]  # longer than any window of these
    cache = model.new_cache(1, 80)
    feed(model, cache, [ids[0].tolist()])
    cache.used = [50]
    logits = feed(model, cache, [text], last=10)
    wanted = model.forward_uncached(torch.tensor([text]), last=10)
    assert_rounds(logits, wanted)
    assert not torch.allclose(wanted, model.forward_uncached(ids, last=10))


@pytest.mark.parametrize("name", ["gpt2", "opt-125m", "falcon-7b"])
def test_a_text_longer_than_the_model_reads_is_refused(name, hosted):
    model = hosted(name)
    assert model.context == small(zoo()[name]).context
    with raises_option("256"):
        model.new_cache(1, 257)
