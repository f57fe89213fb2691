"""Reweighing: expected losses are numbers or a model's, and sources that lag them get more rows in every stage."""

import pytest
import torch
from helpers.builders import PASS_ROUNDING
from helpers.commands import PRUNE, made_fixture, refused, space_fixture  # noqa: F401
from helpers.errors import raises_option
from helpers.typed import call
from transformers import AutoModelForCausalLM

from draftlab.data import DynamicBatches, open_batches, open_heldout
from draftlab.model.checkpoint import load_tokenizer
from draftlab.training.loop import Hardware
from draftlab.training.reweighing import Reweighing, parse_reference

TRAIN = ("--batch-size", "4", "--seq-len", "16", "--steps", "4", "--reweigh-steps", "2")
DISTILL = f"distill {' '.join(TRAIN)} --training-dtype float32"


@pytest.fixture
def mixture(space):
    """Return two sources that are read as files."""
    for name, word in (("a", "def"), ("b", "class")):
        lines = "\n\n".join(f"{word} f{i}(line): return {i}\n" * 30 for i in range(400))
        (space / f"{name}.txt").write_text(lines)
    return "a.txt=0.5,b.txt=0.5"


@pytest.fixture
def updates(monkeypatch) -> list[tuple[int, DynamicBatches]]:
    """Return the updates of the weights, with the step from which they hold."""
    done: list[tuple[int, DynamicBatches]] = []
    reweigh = DynamicBatches.reweigh

    def recorded(self, step, losses):
        reweigh(self, step, losses)
        done.append((step, self))

    monkeypatch.setattr(DynamicBatches, "reweigh", recorded)
    return done


def test_numbers_need_no_target_and_the_source_that_lags_gets_more(space, mixture, updates):
    call(PRUNE)
    losses = ("--data", mixture, "--reference-losses", "a.txt=0.5,b.txt=99")
    call(DISTILL, "--loss", "ce", *losses)
    assert [step for step, _ in updates] == [2]  # none is due after the last step
    assert updates[0][1].reference == {"a.txt": 0.5, "b.txt": 99.0}
    assert updates[0][1].phases[1][1]["a.txt"] > 0.9
    assert "--target" in refused(DISTILL, "--loss", "ce", *losses, "--target", "tiny")
    # weights of a mixture cannot change in text that is written before the first step, or by the draft
    assert "--reweigh-steps" in refused(DISTILL, "--text", "data=0.5,draft=0.5", *losses)


def test_masks_read_more_of_the_source_that_lags(space, mixture, updates):
    losses = ("--data", mixture, "--reference-losses", "a.txt=99,b.txt=0.5")
    call(PRUNE, "--method", "masks", *TRAIN[:2], *TRAIN[4:], *losses)
    assert [step for step, _ in updates] == [2]  # none is due after the last step
    assert updates[0][1].phases[1][1]["b.txt"] > 0.9


def test_a_model_expects_its_own_held_out_losses(space, mixture, family_dirs):
    place = family_dirs["llama"]
    tokenizer = load_tokenizer(place)
    batches = open_batches(mixture, tokenizer, rows=4, seq_len=16, steps=4, seed=0)
    chosen = Reweighing(every=2, reference=parse_reference(str(place), True))
    found = chosen.start(batches, place, torch.float32, Hardware(device="cpu")).reference
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    for name in ("a.txt", "b.txt"):
        windows = open_heldout(name, tokenizer, rows=4, seq_len=16, most_rows=16).batches
        ids = torch.cat([torch.from_numpy(batch.ids) for batch in windows]).long()
        with torch.no_grad():
            assert found[name] == pytest.approx(float(model(ids, labels=ids).loss), rel=PASS_ROUNDING)


def test_a_single_source_has_nothing_to_reweigh(mixture, family_dirs):
    tokenizer = load_tokenizer(family_dirs["llama"])
    batches = open_batches("a.txt", tokenizer, rows=4, seq_len=16, steps=4, seed=0)
    with raises_option("--reweigh-steps"):
        Reweighing(every=2, reference={"a.txt": 1.0}).start(batches, family_dirs["llama"], torch.float32, Hardware())
    with raises_option("--reference-losses"):
        Reweighing(every=2, reference={"a.txt": 1.0}).start(
            open_batches(mixture, tokenizer, rows=4, seq_len=16, steps=4, seed=0),
            family_dirs["llama"],
            torch.float32,
            Hardware(),
        )


def test_losses_are_numbers_above_0():
    losses = parse_reference("books=2.13, hf:lab/a=b=1.9", True)
    assert losses == {"books": 2.13, "hf:lab/a=b": 1.9}
    for text in ("books=0", "books=1.9,web", "books=much"):
        with raises_option("LOSS"):
            parse_reference(text, True)
