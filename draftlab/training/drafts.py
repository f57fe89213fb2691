"""Train ordinary and parallel draft models. The teacher is the target, in memory or on a server, or stored outputs."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from draftlab.acceptance.token_logprobs import max_positions
from draftlab.console import note
from draftlab.data import parse_mixture
from draftlab.errors import UserError
from draftlab.model import checkpoint, devices, hub, parallel, saving
from draftlab.model.checkpoint import Weights
from draftlab.model.hf_files import write_head_ids
from draftlab.model.size import read_size, training_cost
from draftlab.model.tokenizer import known_ids
from draftlab.model.trimmed_head import trimmed_head_of
from draftlab.servers.client import Server
from draftlab.target_outputs.batches import open_stored, stored_temperature
from draftlab.target_outputs.store import logits_of, read_texts
from draftlab.target_outputs.targets import check_server_template, check_server_tokenizer
from draftlab.training import checkpointer, vocabulary
from draftlab.training.evaluate import TargetTextEvaluator, affordable
from draftlab.training.loop import Batches
from draftlab.training.losses import parse_loss
from draftlab.training.objectives import Offsets
from draftlab.training.on_policy import StudentBatches
from draftlab.training.optimizers import training_dtype
from draftlab.training.run import Distillation, OpenStudent
from draftlab.training.teachers import ServedTeacher, StoredTeacher
from draftlab.training.texts import HELDOUT_ROWS, Author, in_turns, target_text
from draftlab.training.trainer import TrainingSetup, rounded_to


def facts(job: Distillation, offsets: Offsets | None) -> Mapping[str, object]:
    """Return facts on the models and the cost of a distillation, for a dry run.

    Text on this machine is opened, so that a dry run reports the same errors as training.

    Raises:
        UserError: The text cannot be read.
    """
    assert job.draft is not None  # because of starts_from_draft
    reads_data = job.outputs is None and job.answers is None
    if reads_data and all(map(hub.is_on_disk, parse_mixture(job.text.data))):
        job.text.open(job.target or job.draft, job.loop, job.draft)
    student = read_size(job.draft)
    teacher = read_size(job.target) if job.target else None
    seq_len = job.text.seq_len
    tokens = job.loop.steps * job.loop.batch_size * seq_len
    described: dict[str, object] = {
        "draft": student.describe(),
        "target": teacher.describe() if teacher else "none",
    }
    if job.answers is not None:
        described["text"] = job.answers.describe()
    described |= training_cost(student, teacher, tokens=tokens, seq_len=seq_len)
    if offsets is not None:
        described["in parallel"] = (
            f"the draft reads {offsets.cost:.2f} tokens for each training token, because it also reads mask tokens"
        )
    return described


def open_draft(job: Distillation, offsets: Offsets | None, state: Path) -> OpenStudent:
    """Load the draft in fp32, and return it with its teacher and text.

    offsets: The distances in tokens at which a parallel draft learns to predict. None for an ordinary draft.

    Raises:
        UserError: The stored outputs, the server or the text cannot be used.
    """
    draft = job.draft
    assert draft is not None  # because of starts_from_draft
    student = _load(job, draft, offsets)
    if job.outputs is not None:
        loop = job.loop
        setup = stored_setup(job.outputs, draft, job.loss, job.temperature, rows=loop.batch_size, seed=loop.seed)
    else:
        setup = _text_setup(job, student, draft, state, offsets)
    dtype = checkpoint.stored_dtype(draft)
    setup = replace(setup, offsets=offsets, rounded=rounded_to(dtype))
    if job.vocab is not None:
        if job.outputs is not None:
            texts = [output.ids for output in read_texts(job.outputs)]
        else:
            texts = vocabulary.trained_texts(setup.batches, job.loop.steps)
        models = [path for path in (draft, job.target) if path is not None]
        vocabulary.trim(student, job.vocab, texts, models)

    def write(work: Path, state: Path) -> dict[str, object]:
        """Write the draft of the best evaluation, in the dtype in which --draft is stored."""
        config = checkpoint.read_config(draft)
        if offsets is not None:
            config |= offsets.config
        trained = checkpointer.best_weights(state, "student")
        stored = ((name, weight.to(dtype)) for name, weight in trained.items())
        saving.write_checkpoint(work, config, stored, draft)
        notes: dict[str, object] = {}
        if job.target is not None:
            notes["vocab"] = vocabulary.resize(work, checkpoint.vocab_size(job.target))
        if (head := trimmed_head_of(student)) is not None:
            write_head_ids(work, head.ids.tolist())
            notes["draft_vocab"] = len(head.ids)
        return notes

    return OpenStudent(module=student, setup=setup, write=write)


def _load(job: Distillation, draft: Path, offsets: Offsets | None) -> PreTrainedModel:
    if parallel.pard_token(draft) is not None and offsets is None:
        note(
            f"{hub.checkpoint_name(draft)} is a parallel draft, but this run trains an ordinary draft, which forgets "
            "how to draft several tokens in one pass; to train a parallel draft, add --student parallel"
        )
    student = checkpoint.load_model(draft, torch.float32)
    if job.gradient_checkpointing:
        student.gradient_checkpointing_enable()
    if offsets is not None:
        note(f"the mask token has the id {offsets.token}")
        offsets.prepare(student)
    return student


def stored_setup(outputs: Path, draft: Path, loss: str, temperature: float, *, rows: int, seed: int) -> TrainingSetup:
    """Return a training setup whose teacher is stored target outputs.

    Args:
        outputs: Directory of the stored outputs.
        draft: Checkpoint of the draft.
        temperature: Temperature of both distributions in the loss.
        rows: Number of sequences per batch.

    Raises:
        UserError: The vocabularies differ, or the outputs are unfinished, corrupt, or unusable at this temperature.
    """
    checkpoint.Checkpoint(draft).check_embeds()
    served = stored_temperature(outputs)
    batches, heldout = open_stored(
        outputs, draft, batch_size=rows, temperature=temperature, served=served or 1.0, seed=seed
    )
    return TrainingSetup(
        teacher=StoredTeacher(batches.manifest.vocab),
        batches=batches,
        heldout=heldout,
        loss=parse_loss(loss),
        temperature=temperature,
        served=served,
    )


def served_teacher(server: Server, draft: Path, k: int) -> ServedTeacher:
    """Return a teacher that asks a server for the k most probable tokens at each position of a text.

    Raises:
        UserError: The tokenizers differ, or the server returns no log-probabilities of prompt tokens.
    """
    check_server_tokenizer(server, draft)
    if not server.adapter.has_prompt_logprobs:
        raise UserError(
            f"a {server.kind} server returns no log-probabilities of prompt tokens; use a vLLM or SGLang server, or "
            "run draftlab outputs build and add --outputs DIR"
        )
    return ServedTeacher(server, k, logits_of(draft))


def _text_setup(
    job: Distillation, student: PreTrainedModel, draft: Path, state: Path, offsets: Offsets | None
) -> TrainingSetup:
    """Return the training setup for text. The teacher is the target in memory, the target on a server, or none.

    If the student trains on text of the target, the target first writes this text, which is stored in the directory
    `state`. The target is loaded as teacher afterwards, so it is never in memory twice.
    """
    loss = parse_loss(job.loss)
    renderer = job.target or draft  # conversations have the target's chat template
    served = None
    if job.server is not None:
        served = served_teacher(job.server, draft, job.top_logprobs)
        if job.text.loss_on is not None:
            check_server_template(job.server, renderer)
    note(f"reading {job.text.data}")
    data, heldout = job.text.open(renderer, job.loop, draft)
    author = None if job.target is None else Author.of(job.target, job.hardware, job.loop, draft)
    if job.text.reweighing is not None:
        dtype = training_dtype(job.loop.dtype)
        data = job.text.reweighing.start(data, renderer, dtype, job.hardware, job.text.loss_on)
    setup = TrainingSetup(
        teacher=served,
        batches=_mixed(job, data, student, draft, author, state),
        heldout=heldout,
        loss=loss,
        temperature=job.temperature,
        served=job.text.served,
    )
    if author is None or not loss.needs_teacher:
        return setup
    target = author.target
    length = TargetTextEvaluator.of(author, draft, heldout, state, offsets)
    del author  # free the target as writer before it is loaded as teacher
    return _with_target(job, replace(setup, length=length), student, target)


def _mixed(
    job: Distillation,
    data: Batches,
    student: PreTrainedModel,
    draft: Path,
    author: Author | None,
    state: Path,
) -> Batches:
    """Return training batches. Each step reads either data, or text of the target, or text of the draft."""
    text = job.text
    sources = {"data": data}
    if author is not None and "target" in text.shares:
        sources["target"] = target_text(text, data, author, state)
    if "draft" in text.shares:
        sources["draft"] = StudentBatches(
            student,
            data,
            text.prompt_tokens,
            text.temperature,
            checkpoint.eos_token_ids(draft if author is None else author.target),
            known_ids(draft) if author is None else author.known,
            job.loop.seed,
            job.hardware.memory,
        )
    return in_turns(text, sources, job.loop)


def _with_target(job: Distillation, setup: TrainingSetup, student: PreTrainedModel, target: Path) -> TrainingSetup:
    """Load the target. Return the setup with the target as teacher, and with held-out text that fits the device.

    The held-out batches are so small that the logits of a batch fit in memory. On a CPU, costly models get fewer
    held-out windows.
    """
    dtype = training_dtype(job.loop.dtype)
    seq_len = job.text.seq_len
    operations = 2 * (Weights(target).parameters + student.num_parameters()) * seq_len
    note(f"loading {hub.checkpoint_name(target)} as teacher in {devices.dtype_name(dtype)}")
    teacher = checkpoint.load_model(target, dtype, device_map=job.hardware.device_map)
    rows = affordable(HELDOUT_ROWS, operations, job.hardware.resolved)
    fitting = max_positions(checkpoint.vocab_size(target), job.hardware.memory) // seq_len
    heldout = setup.heldout.subset(rows).batched(max(1, min(job.loop.batch_size, fitting)))
    return replace(setup, teacher=teacher, heldout=heldout)
