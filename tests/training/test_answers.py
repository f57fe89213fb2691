"""Answers that the target gives to prompts are stored, found again, and what is trained on."""

import json
from pathlib import Path

import numpy as np
from helpers.chats import (
    lines,
    space_fixture,  # noqa: F401
)
from helpers.typed import call

from draftlab.target_outputs import build
from draftlab.target_outputs.store import HELDOUT, read_store
from draftlab.training.run import read_log
from draftlab.training.trainer import StepRecord

PROMPTS = [{"prompt": f"return {i}"} for i in range(14)] + [{"turns": ["if not line:", "self.path"]}] * 3
TRAINING = "--draft draft --steps 3 --batch-size 4 --eval-steps 3 --training-dtype float32"
PROMPT_FILE = "--text target --prompt-file prompts.jsonl --max-new-tokens 12"
DISTILL = f"distill {PROMPT_FILE} {TRAINING}"


def test_a_draft_learns_from_the_targets_answers_which_the_next_run_finds(space, monkeypatch):
    lines(space, *PROMPTS)
    first = call(f"{DISTILL} --out first")
    (place,) = Path("runs").glob("answers-target-prompts-*")
    assert str(place) in first.stderr
    stored = read_store(place)
    texts = [*stored.outputs, *read_store(place / HELDOUT).outputs]
    assert len(texts) == 20  # requests: one for each turn
    assert stored.manifest.chat
    assert {o.finish_reason for o in texts} <= {"stop", "length"}
    rows = [stored.outputs[i] for i in range(len(stored.outputs))]
    steps = [r for r in read_log(Path("first/log.jsonl")) if isinstance(r, StepRecord)]
    assert sum(s.tokens for s in steps) <= sum(len(o.ids) for o in rows)  # answers alone count
    monkeypatch.setattr(build, "build", None)  # nothing is written again
    second = call(f"{DISTILL} --lr 0.001 --out second")
    assert str(place) in second.stderr
    call(f"distill --outputs {place} {TRAINING} --out third")
    records = [read_log(Path(name) / "log.jsonl") for name in ("first", "third")]
    for one, other in zip(*records, strict=True):
        np.testing.assert_allclose(one.loss, other.loss, rtol=0)
    assert str(place) in json.loads(Path("first/draftlab.json").read_text())["inputs"]
