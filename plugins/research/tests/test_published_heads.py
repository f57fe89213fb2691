"""P-EAGLE and DSpark heads pass the laws of draftlab's own heads: replay and live decoding, devices, sampling."""

from typing import Any

import numpy as np
import pytest
from helpers.built import check_devices
from helpers.drafter_laws import VOCAB, replay_errors, save_models
from helpers.replay_laws import check_greedy, in_mode, noisy_fixture, work_fixture  # noqa: F401
from research_heads import dspark_drafter

from draftlab.drafters.base import parse_drafter
from draftlab.heads.dflash.drafter import score_blocks
from draftlab.model.llama import Llama
from draftlab.sampling import SamplingParams


@pytest.fixture(scope="module")
def engine_target(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    return save_models(tmp_path_factory.mktemp("models"))["target"]


def test_replay_of_greedy_text_counts_the_live_steps(work, peagle_head, dspark_head):
    work = in_mode(work, int8=False)  # the fastest
    for text in (f"peagle:heads={peagle_head}", f"dspark:heads={dspark_head}"):
        assert parse_drafter(text).replays
        check_greedy(work, text)


def test_heads_keep_their_device_beside_a_target_of_transformers(context, family_dirs, dspark_head):
    check_devices(context, family_dirs, [f"dspark:heads={dspark_head},least_confidence=0.01"])


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_replay_expects_what_sampling_counts(engine_target, kind):
    """Over many texts, within five standard errors, where each token depends on the drafted tokens before it."""
    drafter = dspark_drafter(engine_target, kind)

    def score(pairs: list[tuple[np.ndarray, np.ndarray]], sampling: SamplingParams) -> Any:
        return [s.at(3) for s in score_blocks(engine_target, drafter.head, pairs, VOCAB, sampling, 3)]

    sampling = SamplingParams(max_tokens=24, temperature=1.5)
    assert replay_errors(engine_target, drafter, score, sampling, 3, 200)[0] < 5
