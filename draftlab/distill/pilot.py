"""Which loss suits this pair and this text: a short run with each of several, from the same start."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from draftlab.console import progress
from draftlab.distill import checkpointer
from draftlab.distill.trainer import EvalRecord, Settings, TrainingSetup, train
from draftlab.distill.training_setup import Replayed

LOSSES = ("fkl", "jsd(0.5)", "nla", "lk(3)")


def pilot(
    student: PreTrainedModel, setup: TrainingSetup, settings: Settings, steps: int, state: Path
) -> dict[str, float]:
    """Merit of each loss after so many steps, the highest first; student is left as it was.

    What is tried is kept in state, so that a killed pilot goes on with the next loss.
    """
    file = state / "pilot.json"
    found: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
    start = {name: p.detach().clone() for name, p in student.named_parameters() if p.requires_grad}
    brief = replace(settings, steps=steps, eval_every=steps, save_every=steps, patience=0)
    with progress("pilot", len(LOSSES)) as advance:
        for number, loss in enumerate(LOSSES):
            advance(number, loss)
            if loss not in found:
                folder = state / f"pilot-{number}"
                found[loss] = _merit(student, setup, replace(brief, loss=loss), folder)
                with torch.no_grad():
                    for name, parameter in student.named_parameters():
                        if name in start:
                            parameter.copy_(start[name])
                if checkpointer.process_state().is_main_process:
                    file.write_text(json.dumps(found))
                    shutil.rmtree(folder)
                checkpointer.process_state().wait_for_everyone()
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _merit(student: PreTrainedModel, setup: TrainingSetup, settings: Settings, state: Path) -> float:
    length = setup.length
    if isinstance(length, Replayed):
        length = replace(length, state=state)
    records = train(student, replace(setup, length=length), settings, state)
    return [record.merit for record in records if isinstance(record, EvalRecord)][-1]
