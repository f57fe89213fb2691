"""Setups of distillation: the teacher, the text to learn on, and the evaluation on the way."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftlab.acceptance.expected import tokens_per_pass
from draftlab.acceptance.token_logprobs import max_positions
from draftlab.config.distill import DistillConfig, EagleConfig
from draftlab.config.shared import LossOn
from draftlab.console import note, progress
from draftlab.data import (
    Batch,
    DynamicBatches,
    HeldOut,
    TokenBatches,
    loss_on_of,
    open_batches,
    open_heldout,
    parse_mixture,
)
from draftlab.engine.batch_generate import Batching, generate_batch, load_generator
from draftlab.errors import UserError
from draftlab.model import checkpoint, hub
from draftlab.model.checkpoint import Weights, max_model_len
from draftlab.model.decoder import Decoder
from draftlab.model.tokenizer import check_embeds, known_ids
from draftlab.sampling import SamplingParams
from draftlab.servers.client import Server
from draftlab.target_outputs.batches import open_stored
from draftlab.target_outputs.store import logits_of
from draftlab.target_outputs.targets import check_server_tokenizer
from draftlab.training import evaluate, sealed
from draftlab.training.evaluate import LengthComparison, TargetText
from draftlab.training.losses import parse_loss
from draftlab.training.on_policy import Batches, GeneratedRows, MixedBatches, StudentBatches, load_or_make, parse_texts
from draftlab.training.optimizers import training_dtype
from draftlab.training.parallel import Offsets
from draftlab.training.teachers import ServedTeacher, StoredTeacher
from draftlab.training.trainer import DistillStep, TrainingSetup

EVALUATED_TEXTS, EVALUATED_PROMPT, EVALUATED_LENGTH = 48, 64, 64  # texts of the target for acceptance length
HELDOUT_ROWS = 64
CPU_OPERATIONS = 7e11  # of the texts of an evaluation on a CPU, some four seconds: fewer texts where they need more


def stored_setup(
    outputs: Path, draft: Path, *, loss: str, batch_size: int, temperature: float, seed: int
) -> TrainingSetup:
    """Return a setup from stored target outputs.

    Raises:
        UserError: another vocabulary, unfinished or corrupt outputs, or a temperature that they do not hold.
    """
    check_embeds(draft)
    batches, heldout = open_stored(outputs, draft, batch_size=batch_size, temperature=temperature, seed=seed)
    teacher, parsed = StoredTeacher(batches.manifest.vocab), parse_loss(loss)
    return TrainingSetup(teacher=teacher, batches=batches, heldout=heldout, loss=parsed, temperature=temperature)


def served_teacher(server: Server, draft: Path, k: int) -> ServedTeacher:
    """Return a teacher that asks a server for its k most probable tokens.

    Raises:
        UserError: another tokenizer, or a server that cannot score given text.
    """
    check_server_tokenizer(server, draft)
    if not server.adapter.has_prompt_logprobs:
        raise UserError(f"{server.kind} does not score given text; store target outputs, or use vLLM or SGLang")
    return ServedTeacher(server, k, logits_of(draft))


def text_setup(
    config: DistillConfig,
    student: PreTrainedModel,
    draft: Path,
    target: Path | None,
    state: Path,
    served: ServedTeacher | None = None,
    offsets: Offsets | None = None,
) -> TrainingSetup:
    """Return a setup from text, with the target loaded here or run by a server; with neither if text alone is learnt.

    What the target writes is written first and stored in state, so that the target is in memory once at a time.
    """
    tokenizer, loss = checkpoint.load_tokenizer(draft), parse_loss(config.loss)
    loss_on = loss_on_of(config.data, config.loss_on)
    note(f"reading {config.data}")
    data, heldout = open_text(config, tokenizer, loss_on)
    author = None if target is None else Author(target, config, known_ids(draft, target))
    if config.reweigh_steps and author is not None:
        note(f"loading {hub.checkpoint_name(author.target)} for its loss on each source")
        data = reweighing(data, author.load_model().eval(), tokenizer, config.reweigh_steps, loss_on)
    length = None
    if author is not None and loss.needs_teacher:
        length = TargetTextEvaluator.of(author, draft, heldout, state, config.eval_temperature, offsets)
    batches = _mixed(config, data, student, draft, author, state)
    setup = TrainingSetup(
        teacher=served, batches=batches, heldout=heldout, loss=loss, temperature=config.temperature, length=length
    )
    del author  # and the target with it, before it is loaded as a teacher
    return setup if target is None or not loss.needs_teacher else _with_target(setup, config, student, target)


def open_text(
    config: DistillConfig, tokenizer: PreTrainedTokenizerBase, loss_on: LossOn | None
) -> tuple[TokenBatches, HeldOut]:
    """Return the batches to train on and the held-out windows of the data.

    Raises:
        UserError: the data cannot be read or has too little text, or it has conversations and a model is to write more.
    """
    if loss_on is not None and config.generates:
        raise UserError(
            f"--text {config.text}: the data has conversations, which --text target answers if they are one JSON-lines "
            "file; other shares of text take data without conversations"
        )
    sizes = {"rows": config.batch_size, "seq_len": config.seq_len, "loss_on": loss_on}
    heldout = open_heldout(config.data, tokenizer, most_rows=HELDOUT_ROWS, **sizes)
    return open_batches(config.data, tokenizer, steps=config.steps, seed=config.seed, **sizes), heldout


def check_text(config: DistillConfig, draft: Path) -> None:
    """Open the files of the data as training does, for a plan; built-in text and sets of the hub are left alone.

    Raises:
        UserError: see open_text.
    """
    if all(Path(name).exists() for name in parse_mixture(config.data)):
        open_text(config, checkpoint.load_tokenizer(draft), loss_on_of(config.data, config.loss_on))


def _with_target(setup: TrainingSetup, config: DistillConfig, student: PreTrainedModel, target: Path) -> TrainingSetup:
    """Load the target as teacher, and fit the held-out batches to the memory for its logits."""
    operations, device = 2 * (Weights(target).parameters + student.num_parameters()), resolved_device(config)
    dtype = training_dtype(config.training_dtype)
    note(f"loading {hub.checkpoint_name(target)} as teacher in {dtype}")
    teacher = checkpoint.load_model(target, checkpoint.DTYPES[dtype], device_map=config.device_map)
    spread = setup.heldout.subset(affordable(HELDOUT_ROWS, operations * config.seq_len, device))
    fitting = max_positions(checkpoint.vocab_size(target), config.memory) // config.seq_len
    rows = max(1, min(config.batch_size, fitting))
    return replace(setup, teacher=teacher, heldout=spread.batched(rows))


def resolved_device(config: DistillConfig | EagleConfig) -> torch.device:
    return checkpoint.resolve_device(config.device)


def affordable(most: int, operations: float, device: torch.device) -> int:
    """Return how many texts an evaluation takes: on a CPU a quarter of most, at least, where each needs much work."""
    return most if device.type != "cpu" else max(most // 4, min(most, int(CPU_OPERATIONS / operations)))


@dataclass(frozen=True)
class Author:
    """The target as a writer of text, loaded at first use. known: ids that the draft knows, too."""

    target: Path
    config: DistillConfig | EagleConfig
    known: int

    @property
    def dtype(self) -> torch.dtype:
        return checkpoint.DTYPES[training_dtype(self.config.training_dtype)]

    def load_model(self) -> PreTrainedModel:
        return checkpoint.load_model(self.target, self.dtype, resolved_device(self.config), self.config.device_map)

    @cached_property
    def model(self) -> Decoder:
        return load_generator(self.target, self.dtype, resolved_device(self.config), self.config.device_map)

    @property
    def batching(self) -> Batching:
        return Batching(vocab=self.known, memory=self.config.memory)

    def sampling(self, length: int, temperature: float) -> SamplingParams:
        ends = checkpoint.eos_token_ids(self.target)
        return SamplingParams(max_tokens=length, temperature=temperature, seed=self.config.seed, stop_token_ids=ends)


@dataclass(frozen=True, slots=True)
class TargetTextEvaluator:
    """Evaluates a student on text of the target. state: keeps the acceptance probabilities of every evaluation."""

    text: TargetText
    state: Path
    memory: float = 2.0
    offsets: Offsets | None = None

    @classmethod
    def of(
        cls,
        author: Author,
        draft: Path,
        heldout: HeldOut,
        state: Path,
        temperature: float,
        offsets: Offsets | None = None,
    ) -> "TargetTextEvaluator | None":
        """Let the target write; None where it ends every text with its first token, so that nothing is drafted."""
        context = min(max_model_len(author.target), max_model_len(draft))
        prompt = min(EVALUATED_PROMPT, context // 2)
        sampling = author.sampling(min(EVALUATED_LENGTH, context - prompt), temperature)
        operations = 2 * Weights(author.target).parameters * (prompt + sampling.max_tokens)
        count = affordable(EVALUATED_TEXTS, operations, resolved_device(author.config))
        windows = heldout.starts(count, prompt)
        windows = [ids for ids in windows if len(ids) + sampling.max_tokens <= context]
        if not windows:
            note(f"no held-out conversation fits {context} tokens: acceptance length is not measured")
            return None

        def make() -> dict[str, np.ndarray]:
            with progress("the target writes text to evaluate on", len(windows)) as advance:
                return evaluate.generate(
                    author.model, windows, sampling, author.batching, lambda n: advance(n, "texts")
                )

        arrays = load_or_make(state / "evaluation.safetensors", make)
        if arrays["lengths"].max(initial=0) < 2:
            note("the target ends every text at once: acceptance length is not measured")
            return None
        return cls(TargetText.of(arrays, temperature), state, author.config.memory, offsets)

    def __call__(self, student: PreTrainedModel, step: int) -> float:
        """Return tokens per target pass at K = 4, or fewer if a parallel draft has fewer offsets."""
        chances = evaluate.acceptance_probabilities(student, self.text, self.memory, self.offsets)
        load_or_make(self._file(step), lambda: {f"{i:04d}": row for i, row in enumerate(chances)})
        tokens, passes = tokens_per_pass(chances, min(4, self.offsets.count if self.offsets else 4)).sum(0)
        return float(tokens / passes)

    def compare(self, before: int, after: int) -> list[LengthComparison]:
        """Compare two evaluated steps at every K."""
        rows = [sealed.load(self._file(step)) for step in (before, after)]
        return evaluate.compare_lengths(*([chances[name].numpy() for name in sorted(chances)] for chances in rows))

    def _file(self, step: int) -> Path:
        return self.state / f"acceptance-{step:08d}.safetensors"


def _mixed(
    config: DistillConfig, data: Batches, student: PreTrainedModel, draft: Path, author: Author | None, state: Path
) -> Batches:
    """Mix data, text of the target and text of the draft by their shares of steps."""
    texts = parse_texts(config.text)
    sources: dict[str, Batches] = {"data": data}
    if "target" in texts and author is not None:
        sources["target"] = target_text(data, author, state, math.ceil(config.steps * texts["target"]) + 1)
    if "draft" in texts:
        ends, known = (author.target, author.known) if author else (draft, known_ids(draft))
        sources["draft"] = StudentBatches(
            student, data, config.prompt_tokens, config.sample_temperature, checkpoint.eos_token_ids(ends), known,
            config.seed, config.memory,
        )  # fmt: skip
    return sources[next(iter(texts))] if len(texts) == 1 else MixedBatches.of(sources, texts, config.steps)


def target_text(data: Batches, author: Author, state: Path, steps: int) -> GeneratedRows:
    """Return rows that begin like those of data and that the target continues; made once, and stored in state."""
    config = author.config
    starts = [data.batch(step).ids[:, : config.prompt_tokens] for step in range(min(config.steps, steps))]
    return continued(np.concatenate(starts), author, state / "target_text.safetensors", "train on")


def continued(prompts: np.ndarray, author: Author, file: Path, purpose: str) -> GeneratedRows:
    """Return prompts [N, P] with what the target writes after them, up to the length of a row; made once, in a file.

    purpose: completes "text to ..." for the bar of progress.
    """
    config = author.config
    length = config.seq_len + 1 - prompts.shape[1]

    def make() -> dict[str, np.ndarray]:
        with progress(f"the target writes text to {purpose}", len(prompts)) as advance:
            texts = generate_batch(
                author.model, prompts.tolist(), author.sampling(length, config.sample_temperature), author.batching,
                advance=lambda n: advance(n, "texts"),
            )  # fmt: skip
        rows = GeneratedRows.of(prompts, texts, length, config.batch_size)
        return {"ids": rows.ids, "lengths": rows.lengths}

    arrays = load_or_make(file, make)
    return GeneratedRows(arrays["ids"], arrays["lengths"], prompts.shape[1], config.batch_size)


def reweighing(
    batches: TokenBatches,
    reference: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    every: int,
    loss_on: LossOn | None = None,
) -> DynamicBatches:
    """Return batches whose weights follow the student's held-out loss on each source, relative to a reference model's.

    Raises:
        UserError: a source without one held-out window.
    """
    rows = min(8, batches.rows)
    heldout = {
        name: open_heldout(name, tokenizer, rows=rows, seq_len=batches.seq_len, most_rows=16, loss_on=loss_on).batches
        for name in batches.weights
    }
    losses = {name: _cross_entropy(reference, b) for name, b in heldout.items()}
    return DynamicBatches.start(batches, heldout, losses, every)


@torch.inference_mode()
def _cross_entropy(model: PreTrainedModel, batches: list[Batch]) -> float:
    step, device = DistillStep(model, parse_loss("ce"), 1.0), model.device
    sums = [step(torch.from_numpy(b.ids).to(device), torch.from_numpy(b.mask).to(device), None) for b in batches]
    return float(sum(s[0, 1] for s in sums) / sum(int(b.mask.sum()) for b in batches))
