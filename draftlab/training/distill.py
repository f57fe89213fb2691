"""Train a student of a target, and write it."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from draftlab.atomic import remove_state
from draftlab.config.students import StudentSpec
from draftlab.console import note
from draftlab.model import checkpoint
from draftlab.output import Output
from draftlab.provenance import LOG_FILE
from draftlab.training.checkpointer import process_state, select_device
from draftlab.training.loop import Hardware, Loop
from draftlab.training.run import TrainingResult, claimed_state, fit
from draftlab.training.trackers import tracked
from draftlab.training.trainer import TrainingSetup

if TYPE_CHECKING:
    from draftlab.servers.client import Server
    from draftlab.training.answers import PromptFile
    from draftlab.training.texts import TrainingText


class OpenStudent(Protocol):
    """A student in memory with its teacher and text."""

    @property
    def module(self) -> Any:
        """The module that is trained, a PreTrainedModel or a module like it."""
        ...

    @property
    def setup(self) -> TrainingSetup: ...

    def write(self, work: Path, state: Path) -> dict[str, object]:
        """Write the best weights of state into the directory work; return notes for its record."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """What to train, from what and how.

    draft: the checkpoint to train; None: a new student of the target's own. target: None where no target is loaded
    here. outputs: stored outputs to learn from in place of text and target. answers: prompts that the target answers
    first, and whose answers become the outputs. server: runs the target, and lists its top_logprobs most probable
    tokens. temperature: The temperature of both distributions in the loss. vocab: ids that the
    student can propose; None: all, or what the kind of student takes by default.
    """

    student: StudentSpec
    draft: Path | None
    target: Path | None
    text: "TrainingText"
    loop: Loop
    loss: str = "fkl"
    temperature: float = 1.0
    vocab: int | None = None
    outputs: Path | None = None
    answers: "PromptFile | None" = None
    server: "Server | None" = None
    top_logprobs: int = 20
    hardware: Hardware = field(default_factory=Hardware)
    gradient_checkpointing: bool = False
    report_to: Sequence[str] = ()

    @property
    def target_vocab(self) -> int | None:
        """Return the target's logits, None where they are not known. Raises UserError: unfinished outputs."""
        if self.outputs is not None:
            from draftlab.target_outputs.store import finished_manifest

            return finished_manifest(self.outputs).vocab
        return None if self.target is None else checkpoint.vocab_size(self.target)


def distill(job: Distillation, output: Output) -> TrainingResult:
    """Train a student, and write the weights of its best evaluation.

    Raises:
        UserError: checkpoints, text or outputs that cannot be used, or training fails.
        Interrupted: SIGTERM or Ctrl-C, after a checkpoint was saved.
    """
    if job.answers is not None:
        job = replace(job, outputs=job.answers.store(), answers=None)
    inputs = [path for path in (job.draft, job.target, job.outputs) if path is not None]
    select_device(job.hardware.device)
    state = claimed_state(output, inputs)
    opened = job.student.open(job, state)
    with tracked(job.report_to, output) as log:
        result = fit(
            opened.module, opened.setup, job.loop, state=state, what=output.command, log=log
        )
    if opened.setup.length is not None:
        result = replace(
            result, lengths=opened.setup.length.compare(result.before.step, result.after.step)
        )
    if result.after.step < job.loop.steps:
        best = f"after step {result.after.step}" if result.after.step else "before the first step"
        note(f"the best evaluation was {best}: those weights are written")
    if process_state().is_main_process:
        with output.directory() as work:
            result = replace(result, notes=opened.write(work, state))
            shutil.copyfile(state / LOG_FILE, work / LOG_FILE)
            output.record(work, inputs, **result.as_dict())
        remove_state(state)
    process_state().wait_for_everyone()
    return result
