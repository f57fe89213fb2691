"""A run on disk: the best weights are written, checkpoints are kept, trackers log it, a killed command resumes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers.builders import PASS_ROUNDING, build, setup, training_killed_at, until
from helpers.random_rows import RandomRows
from safetensors.torch import load_file

from draftlab.commands import COMMANDS
from draftlab.commands.distill import prepare
from draftlab.commands.settings.distill import DistillConfig
from draftlab.data import Batch, TopLogprobs
from draftlab.model.hf_files import read_head_ids
from draftlab.training.checkpointer import best_weights
from draftlab.training.drafts import open_draft
from draftlab.training.evaluate import TargetTextEvaluator
from draftlab.training.loop import Loop
from draftlab.training.trainer import EvalRecord, train

SETTINGS = Loop(
    steps=12,
    optimizer="adamw",
    lr=1e-2,
    dtype="float32",
    eval_steps=2,
    save_steps=3,
    warmup_ratio=0.2,
)


class Scripted:
    """A measure that says what it was told to, by step."""

    def __init__(self, values: dict[int, float]) -> None:
        self.values = values

    def __call__(self, student, step: int) -> float:
        return self.values[step]

    def compare(self, before: int, after: int) -> list:
        return []


def student():
    return build("llama", 0, num_hidden_layers=2)


def go(
    state: Path,
    settings: Loop = SETTINGS,
    values: dict[int, float] | None = None,
    stop: int | None = None,
):
    """Records of a run, and the student's weights at every evaluation."""
    model, seen = student(), {}
    given = setup(build("llama", 9, num_hidden_layers=2), RandomRows(), [RandomRows().batch(0)])
    given = replace(given, length=Scripted(values) if values else None)
    records = []
    for record in until(stop, train(model, given, settings, state)):
        records.append(record)
        if isinstance(record, EvalRecord):
            seen[record.step] = {n: p.detach().clone() for n, p in model.named_parameters()}
    return records, seen


RISE_AND_FALL = {0: 1.0, 2: 1.3, 4: 1.7, 6: 1.6, 8: 1.5, 10: 1.65, 12: 1.4}


@pytest.mark.parametrize("stop", [None, 7])
def test_the_weights_of_the_best_evaluation_are_kept_also_over_a_kill(stop, tmp_path):
    _, seen = go(tmp_path / "whole", values=RISE_AND_FALL)
    if stop:
        go(tmp_path / "killed", values=RISE_AND_FALL, stop=stop)
        go(tmp_path / "killed", values=RISE_AND_FALL)
    found = best_weights(tmp_path / ("killed" if stop else "whole"), "student")
    assert found.keys() == seen[4].keys()
    assert all(torch.equal(found[name], weight) for name, weight in seen[4].items())
    assert not all(torch.equal(found[name], weight) for name, weight in seen[6].items())


def test_without_a_measure_acceptance_decides(tmp_path):
    records, seen = go(tmp_path)
    evals = [r for r in records if isinstance(r, EvalRecord)]
    best = max(evals, key=lambda r: r.acceptance)
    found = best_weights(tmp_path, "student")
    assert all(torch.equal(found[name], weight) for name, weight in seen[best.step].items())


def made(path: Path) -> Path:
    path.mkdir()
    return path


def test_long_rows_go_together_within_the_budget_and_lose_only_their_ends():
    ends = np.array([20, 3, 0, 11, 12, 4, 20, 1, 7])
    mask = (np.arange(20) < ends[:, None]).astype(np.float32)
    ids = np.arange(9 * 21).reshape(9, 21)  # an id says where it stood
    listed = TopLogprobs(ids[:, :-1, None], ids[:, :-1, None] / 2, ids[:, :-1] / 3)
    parts = Batch(ids, mask, listed).parts(24)
    counted = np.concatenate([part.ids[:, :-1][part.mask > 0] for part in parts])
    assert sorted(counted) == sorted(ids[:, :-1][mask > 0])
    for part in parts:
        assert part.mask.size <= 24 or len(part.ids) == 1
        top, own = part.top_logprobs, part.ids[:, :-1]
        assert np.array_equal(top.ids[..., 0], own)
        assert np.array_equal(top.log_p[..., 0], own / 2)
        assert np.array_equal(top.tail, own / 3)
    assert sum(p.mask.size for p in parts) <= 1.25 * ends.sum()  # as one batch: 180 for 78
    assert len(Batch(ids, mask).parts(0)) == 1


def test_text_of_the_target_measures_tokens_per_pass(family_dirs, tmp_path):
    text = "\n\n".join(f"def f{i}(x, y):\n    return [x + {i}, y * {i}]\n" * 8 for i in range(120))
    (tmp_path / "text.txt").write_text(text)
    target = str(family_dirs["llama"])
    config = DistillConfig(
        draft=target,
        target=target,
        data=str(tmp_path / "text.txt"),
        text="data=0.5,target=0.25,draft=0.25",
        batch_size=2,
        seq_len=96,
        steps=8,
        prompt_tokens=4,
        training_dtype="float32",
        device="cpu",
    )
    opened = open_draft(prepare(config, True), None, made(tmp_path / "state"))
    model, given = opened.module, opened.setup
    assert isinstance(given.length, TargetTextEvaluator)
    # the first token comes with the prefill
    drafted = np.array([len(ids) for ids in given.length.ids]) - 1
    # it drafts for itself: four tokens stand, and one more comes with them
    passes = -(-drafted // 5)
    assert given.length(model, 0) == pytest.approx(drafted.sum() / passes.sum())
    assert drafted.max() == 63
    assert given.length(student(), 1) < 3
    found = given.length.compare(1, 0)
    assert found[3].before < 3 < found[3].after.value
    assert {given.batches.turns[n][0] for n in range(8)} == {"data", "target", "draft"}


def read_log(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(f"def f{i}(x, y):\n    return [x + {i}, y * {i}]\n" * 8 for i in range(100)))
    return str(path)


@pytest.mark.parametrize(("source", "vocab"), [("data=0.4,target=0.3,draft=0.3", None), ("cache", 150)])
def test_a_killed_command_writes_the_bytes_of_one_that_was_not(source, vocab, text, family_dirs, tmp_path, monkeypatch):
    draft, target = family_dirs["llama"], family_dirs["llama_mha"]
    words = {"draft": str(draft), "steps": 6, "batch_size": 2, "training_dtype": "float32"}
    words |= {"eval_steps": 2, "save_steps": 2, "lr": 1e-2, "vocab": vocab}
    if source == "cache":
        sizes = {"num_sequences": 16, "seq_len": 48, "top_logprobs": 16}
        COMMANDS["outputs build"](target=str(target), data=text, out=tmp_path / "cache", **sizes)
        words |= {"outputs": tmp_path / "cache"}
    else:
        words |= {"target": str(target), "data": text, "text": source, "seq_len": 48}
        words |= {"prompt_tokens": 8} if source != "data" else {}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    COMMANDS["distill"](**words, out=whole)
    with training_killed_at(4):
        COMMANDS["distill"](**words, out=killed)
    COMMANDS["distill"](**words, out=killed)
    found, wanted = (load_file(out / "model.safetensors") for out in (killed, whole))
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())
    # the best weights may be those before the first step, so the log says that something was learnt
    logs = [[step["loss"] for step in read_log(out)] for out in (killed, whole)]
    assert logs[0] == logs[1]
    assert len(set(logs[0])) > 6
    if vocab is None:  # the written weights are those of the best evaluation; a tracker is told
        record = json.loads((whole / "draftlab.json").read_text())["notes"]["after"]
        again = words | {"draft": str(whole), "report_to": ["tensorboard"]}
        found = cast(Any, COMMANDS["distill"](**again, out=tmp_path / "on").data)
        assert found["before"]["loss"] == pytest.approx(record["loss"], rel=PASS_ROUNDING)
        (events,) = (tmp_path / "tensorboard" / "on").glob("events*")
        assert all(tag in events.read_bytes() for tag in (b"train/loss", b"heldout/acceptance"))
    ids = read_head_ids(whole, 307)
    assert ids == read_head_ids(killed, 307)
    if vocab is not None:
        assert ids is not None
        assert len(ids) == vocab
        others = [i for i in range(307) if i not in ids]
        start = load_file(draft / "model.safetensors")["lm_head.weight"]
        assert torch.equal(start[others], wanted["lm_head.weight"][others])
