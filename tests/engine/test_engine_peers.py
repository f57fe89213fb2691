"""The benchmark of peers compares like with like: in float32 a peer writes our text, in as many target passes."""

import sys
from pathlib import Path

import pytest
from helpers.builders import build

from benchmarks.peers import OURS, Answer, Arm, Job, _ours, _theirs, result
from draftlab.model import hub

TEXT = list(range(11))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    root = tmp_path_factory.mktemp("peers")
    build("llama", 2, num_hidden_layers=1, vocab_size=1024).save_pretrained(root / "draft")
    prompts = [[1, 50, 60, 70, 50, 60], [1, 80, 90, 80, 90, 80, 90], [1, 5, 6, 7, 5, 6]]
    return Job(
        target=hub.locate("tiny"),
        draft=root / "draft",
        peer_draft=root / "draft",
        files={},
        prompts=prompts,
        eos=[0],
        new_tokens=16,
        dtype="float32",
        context=64,
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain", "ngram"])
def test_transformers_writes_our_text(job: Job, way: str):
    k = 0 if way == "plain" else 2
    ours = _ours(job, Arm(engine=OURS, precision="float32", way=way, k=k))
    theirs = _theirs(Path(sys.executable), job, Arm(engine="transformers", precision="float32", way=way, k=k))
    assert theirs.texts == ours.texts
    assert [len(text) for text in ours.texts] == [tokens + 1 for tokens, _ in ours.steps]
    if way == "plain":
        assert theirs.steps == ours.steps


def answer(seconds: list[float], prefill: float = 0.5, steps: tuple[int, int] = (10, 5)) -> Answer:
    n = len(seconds)
    return Answer(
        prefill_seconds=[prefill] * n,
        seconds=seconds,
        wall_seconds=[2 * each for each in seconds],
        texts=[TEXT] * n,
        steps=[list(steps)] * n,
        version="1",
    )


def arm(engine: str, way: str, k: int, precision: str = "bfloat16") -> Arm:
    return Arm(engine=engine, precision=precision, way=way, k=k)


def test_a_row_has_requests_with_their_prefill_and_decoding_without():
    answers = {arm(OURS, "plain", 0): answer([2.5] * 4), arm(OURS, "draft", 2): answer([1.5] * 4)}
    row = next(row for row in result(answers)["engines"] if row["way"] == "draft")
    assert row["request_tps"]["value"] == pytest.approx(11 / 1.5)
    assert row["decode_tps"]["value"] == pytest.approx(10 / 1.0)
    assert row["over_own_plain"]["value"] == pytest.approx(2.5 / 1.5)
    assert row["tokens_per_pass"]["value"] == 2
    assert row["same_texts"] == 1
    assert (row["k"], row["target_dtype"], row["draft_dtype"]) == (2, "bfloat16", "bfloat16")


def test_the_lead_is_over_the_fastest_peer_at_equal_bits():
    answers = {
        arm(OURS, "plain", 0): answer([2.0] * 4),
        arm("vllm", "plain", 0): answer([4.0] * 4),
        arm("llama.cpp", "plain", 0): answer([3.0] * 4),
        arm(OURS, "plain", 0, "int8"): answer([1.0] * 4),
        arm("llama.cpp", "plain", 0, "Q8_0"): answer([1.1] * 4),
    }
    leads = {lead["bits"]: lead for lead in result(answers)["over_best_peer"]}
    assert leads[16]["peer"] == leads[8]["peer"] == "llama.cpp"
    assert leads[16]["over"]["value"] == pytest.approx(1.5)
    assert leads[8]["over"]["value"] == pytest.approx(1.1)
