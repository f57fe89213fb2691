"""The benchmark of peers compares like with like: in float32 a peer writes our text, in as many target passes."""

import sys
from pathlib import Path

import pytest
from builders import build

from benchmarks.peers import OURS, Answer, Job, _ask, _ours, _result
from draftlab.model import hub


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    root = tmp_path_factory.mktemp("peers")
    build("llama", 2, num_hidden_layers=1, vocab_size=1024).save_pretrained(root / "draft")
    target = hub.locate("tiny")
    prompts = [[1, 50, 60, 70, 50, 60], [1, 80, 90, 80, 90, 80, 90], [1, 5, 6, 7, 5, 6]]
    return Job(
        target=target, draft=root / "draft", peer_draft=root / "draft", files=(root, root), prompts=prompts, eos=[0],
        k=2, new_tokens=16, dtype="float32",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain", "ngram"])
def test_transformers_writes_our_text(job: Job, way: str):
    ours, theirs = _ours(job, way), _ask("transformers", Path(sys.executable), job, way)
    assert theirs.texts == ours.texts
    assert [len(text) for text in ours.texts] == [tokens + 1 for tokens, _ in ours.steps]
    if way == "plain":
        assert theirs.steps == ours.steps
        assert ours.tokens_per_pass.value == 1


def answer(seconds: float, prefill: float, steps: list[list[int]], text: list[int]) -> Answer:
    return Answer(
        prefill_seconds=[prefill] * 2, seconds=[seconds] * 2, wall_seconds=[2 * seconds] * 2, texts=[text] * 2,
        steps=steps, version="1",
    )  # fmt: skip


def test_speeds_leave_the_prefill_out_and_acceptance_is_per_pass():
    text = list(range(11))
    ours, peer = answer(1.5, 0.5, [[10, 5]] * 2, text), answer(3, 1, [[10, 4]] * 2, text)
    result = _result({"draft": {OURS: ours, "peer": peer}})
    assert result["tokens_per_second"] == {"draft": {OURS: pytest.approx(10), "peer": pytest.approx(5)}}
    assert result["over_peer"]["draft"]["peer"]["value"] == pytest.approx(2)
    assert result["over_best_peer"] == {"draft": pytest.approx(2)}
    assert result["tokens_per_second_with_prefill"]["draft"][OURS] == pytest.approx(22 / 3)
    assert result["tokens_per_pass"]["draft"]["peer"]["value"] == pytest.approx(2.5)
    assert result["acceptance_gap"]["draft"]["peer"] == pytest.approx(0.25)
    assert result["within_our_interval"] == {"draft": {OURS: True, "peer": False}}
    assert result["same_texts"]["draft"]["peer"] == 1
