"""Training a draft against its target: from a config to an output."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from draftlab.config.distill import DistillConfig
from draftlab.console import note
from draftlab.model import checkpoint, hub, parallel
from draftlab.model.hf_files import check_length, check_trimmable
from draftlab.model.size import read_size, training_cost
from draftlab.model.tokenizer import common_vocabulary
from draftlab.output import Output
from draftlab.servers.client import Server
from draftlab.target_outputs.store import finished_manifest, read_texts
from draftlab.training import distributed, trackers, vocabulary
from draftlab.training.answers import prompts_to_answer, stored_answers, with_prompts_of_data
from draftlab.training.checkpointer import select_device
from draftlab.training.lora import adapt
from draftlab.training.losses import parse_loss
from draftlab.training.on_policy import parse_texts
from draftlab.training.parallel import Offsets
from draftlab.training.run import TrainedModel, TrainingResult, claimed_state, fit_and_write
from draftlab.training.trainer import TrainingSetup
from draftlab.training.training_setup import check_text, served_teacher, stored_setup, text_setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The checkpoints of a distillation. target: None where it is not loaded."""

    draft: Path
    target: Path | None

    @classmethod
    def of(cls, config: DistillConfig, weights: bool) -> "Pair":
        """Find both and check that they fit each other and the settings. weights: whether those must be there, too.

        Raises:
            UserError: a checkpoint that cannot be had, unequal vocabularies, or settings that cannot be trained.
        """
        parse_texts(config.text)
        parse_loss(config.loss)
        trackers.check(config.report_to)
        distributed.check(optimizer=config.optimizer)
        draft = hub.locate(str(config.draft), weights)
        target = hub.locate(config.target, weights) if config.needs_target else None
        for model in (draft, target) if config.trains_on_windows else ():
            check_length(model, config.seq_len)
        if target is not None:
            common_vocabulary(draft, target)
        if config.vocab is not None:
            check_trimmable(draft, config.vocab)
        return cls(draft=draft, target=target)

    def vocab(self, config: DistillConfig) -> int | None:
        """Return the target's logits, None where it is not known. Raises UserError: unfinished outputs."""
        if config.outputs is not None:
            return finished_manifest(config.outputs).vocab
        return None if self.target is None else checkpoint.vocab_size(self.target)


def plan_distill(config: DistillConfig) -> Mapping[str, object]:
    """Return models and cost of a distillation, for people. Raises UserError: as distill() does before it trains."""
    config = with_prompts_of_data(config)
    pair = Pair.of(config, weights=False)
    if config.parallel > 1:
        Offsets.of(config, pair.draft, pair.vocab(config))
    if config.trains_on_windows:
        check_text(config, pair.draft)
    text: dict[str, object] = {}
    if config.prompt_file is not None and pair.target is not None:
        prompts = prompts_to_answer(config, pair.target)
        text = {"text": f"the target's answers to {len(prompts.rows)} prompts of {config.prompt_file}"}
    student, teacher = read_size(pair.draft), read_size(pair.target) if pair.target else None
    tokens = config.steps * config.batch_size * config.seq_len
    cost = training_cost(student, teacher, tokens=tokens, seq_len=config.seq_len)
    models = {"draft": student.describe(), "target": teacher.describe() if teacher else "none"}
    wider = (
        {"in parallel": f"{Offsets.cost(config):.2f} tokens are read for each of these"} if config.parallel > 1 else {}
    )
    return models | text | cost | wider


def distill(config: DistillConfig, output: Output) -> TrainingResult:
    """Train a draft to agree with its target, and write it.

    Raises:
        UserError: see Pair.of; or training fails.
    """
    config = with_prompts_of_data(config)
    pair = Pair.of(config, weights=True)
    if config.prompt_file is not None and pair.target is not None:
        config = config.model_copy(update={"outputs": stored_answers(config, pair.target)})
    inputs = [path for path in (pair.draft, pair.target, config.outputs) if path is not None]
    for model in (pair.draft, pair.target):
        if model is not None:
            checkpoint.check(model)
    select_device(config.device)
    offsets = Offsets.of(config, pair.draft, pair.vocab(config)) if config.parallel > 1 else None
    model = TrainedModel(
        config=checkpoint.read_config(pair.draft) | (offsets.config if offsets else {}), like=pair.draft,
        lora_rank=config.lora_rank, vocab=checkpoint.vocab_size(pair.target) if pair.target else None,
    )  # fmt: skip
    with claimed_state(output, inputs) as state:
        student = load_student(pair.draft, config)
        if offsets is not None:
            offsets.prepare(student)
        setup = _setup(config, student, pair, state, offsets)
        if config.vocab is not None:
            models = [path for path in (pair.draft, pair.target) if path is not None]
            if config.outputs is not None:
                texts = [output.ids for output in read_texts(config.outputs)]
            else:
                texts = vocabulary.trained_texts(setup.batches, config.steps)
            vocabulary.trim(student, config.vocab, texts, models)
        return fit_and_write(student, setup, config, model, output, inputs)


def _setup(
    config: DistillConfig, student: PreTrainedModel, pair: Pair, state: Path, offsets: Offsets | None
) -> TrainingSetup:
    if config.outputs is not None:
        setup = stored_setup(
            config.outputs, pair.draft, loss=config.loss, batch_size=config.batch_size,
            temperature=config.temperature, seed=config.seed,
        )  # fmt: skip
    else:
        served = None
        if config.server is not None:
            server = Server.connect(config.server, config.served_model, config.api_key_file)
            served = served_teacher(server, pair.draft, config.top_logprobs)
        setup = text_setup(config, student, pair.draft, pair.target, state, served, offsets)
    return setup if offsets is None else replace(setup, offsets=offsets)


def load_student(draft: Path, config: DistillConfig) -> PreTrainedModel:
    """Return the draft in fp32, ready to be trained as the settings want."""
    if parallel.pard_token(draft) is not None and config.parallel == 1:
        note(
            f"{hub.checkpoint_name(draft)} is a parallel draft; this trains it as an ordinary one, and its offsets fade"
        )
    student = checkpoint.load_model(draft, torch.float32)
    if config.gradient_checkpointing:
        student.gradient_checkpointing_enable()
    return adapt(student, config.lora_rank, config.seed) if config.lora_rank else student
