"""The drafter ngram: the Kneser-Ney model, its replay, and the errors of its options."""

from pathlib import Path

import numpy as np
import pytest
from helpers.builders import assert_rounds
from helpers.built import built, facts
from helpers.errors import raises_option
from helpers.replay_laws import check_greedy, in_mode

from draftlab.commands import COMMANDS
from draftlab.drafters.base import parse_drafter
from draftlab.errors import UserError
from draftlab.sampling import SamplingParams
from draftlab.target_outputs.store import read_store
from draftlab_research.drafting.ngram import NgramModel, score_ngrams


def test_kneser_ney_by_hand():
    """Bigrams of a b a b a c: D = n1 / (n1 + 2 n2) = 1 / (1 + 2 * 2), because ab and ba occur twice and ac once."""
    a, b, c = 0, 1, 2
    model = NgramModel(np.array([a, b, a, b, a, c]), 3, 2)
    before = np.array([1, 1, 1]) + 1e-3  # each token follows one other token: ba, ab, ac
    before = before / before.sum()
    after_a = np.array([0, 2 - 0.2, 1 - 0.2]) / 3 + 0.2 * 2 / 3 * before
    np.testing.assert_allclose(model.probabilities([b, a]), after_a)
    np.testing.assert_allclose(model.probabilities([c]), before)  # nothing follows c


def test_replay_counts_the_steps_of_live_decoding(context, stored):
    work = in_mode(context, int8=False)
    assert check_greedy(work, f"ngram:order=2,outputs={stored}")  # otherwise nothing was compared
    check_greedy(work, "ngram:order=2,tokens=500")  # a corpus that the target was not trained on


def test_sampled_tokens_have_the_probability_after_temperature():
    text, prompt = np.random.default_rng(0).integers(0, 9, 60), np.array([1, 4])
    model, sampling = NgramModel(text, 9, 2), SamplingParams(max_tokens=60, temperature=0.7)
    (scored,) = score_ngrams(model, [(prompt, text)], sampling)
    q = np.array([model.probabilities([token]) ** (1 / 0.7) for token in [4, *text[:-1]]])
    assert_rounds(scored.logprobs, np.log(q[np.arange(len(text)), text] / q.sum(1)))


def test_the_corpus_is_the_stored_answers_after_the_end_of_their_prompts(context, stored, monkeypatch):
    monkeypatch.setattr(context, "data", "nothing that could be read")
    texts = [[*each.prompt[-1:], *each.ids] for each in read_store(stored).outputs]
    model = built(context, f"ngram:order=2,outputs={stored}").drafter.model
    expected = NgramModel(np.concatenate(texts), context.vocab, 2)
    for token in texts[0]:
        np.testing.assert_array_equal(model.probabilities([token]), expected.probabilities([token]))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ngrm", "did you mean 'ngram'"),
        ("ngram:order=three", "order: .*'three'"),
        ("ngram:order=1", "order: .*2"),
        ("ngram:data=text,outputs=store", "data and outputs"),
    ],
)
def test_an_error_in_the_options_names_the_option(text, named):
    with pytest.raises(UserError, match=named):
        parse_drafter(text)


def test_contexts_that_do_not_fit_64_bits_are_refused_before_the_target_is_loaded():
    with raises_option("--drafter", "ngram:order", "9", "8", "307"):
        parse_drafter("ngram:order=9").check(facts())


def test_a_corpus_that_is_too_short_is_refused(context):
    with raises_option("2", "4-gram"):
        built(context, "ngram:tokens=2")


def test_a_missing_corpus_is_refused(stored, family_dirs, tmp_path: Path):
    asked = {"directory": stored, "target": str(family_dirs["llama"]), "out": tmp_path / "replay"}
    with raises_option("--drafter ngram"):
        COMMANDS["replay"](**asked, drafter=["ngram"])
    with raises_option("--drafter ngram:data=nope.txt"):
        parse_drafter("ngram:data=nope.txt").check_inputs(weights=True)


def test_text_of_the_command_is_read_only_without_a_corpus_of_its_own():
    for text, reads in (("ngram", True), ("ngram:data=a.txt", False), ("ngram:outputs=s", False)):
        asked = {
            "prompt_file": "prompts.jsonl",
            "drafter": [text],
            "data": "text.txt",
            "target": "tiny",
        }
        config = COMMANDS["score"].config.build(asked)
        assert config.text_source == ("text.txt" if reads else None)
    (stored,) = parse_drafter("ngram:outputs=store").inputs()
    assert stored.name == "store"
