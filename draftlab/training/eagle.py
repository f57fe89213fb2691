"""Training an EAGLE-3 head as a student of the one loop: the target is frozen, and its states are made on the fly."""

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from draftlab.atomic import remove_state
from draftlab.config.distill import EagleConfig
from draftlab.console import note, progress
from draftlab.data import HeldOut, loss_on_of, open_batches, open_heldout, parse_mixture
from draftlab.engine.timing import matmul_tflops
from draftlab.errors import UserError
from draftlab.model import checkpoint, eagle, hub
from draftlab.model.eagle import Head, HeadConfig
from draftlab.model.hf_files import check_length
from draftlab.model.shape import format_count
from draftlab.model.size import read_size
from draftlab.model.tokenizer import known_ids
from draftlab.model.trimmed_head import frequent_ids, template_ids
from draftlab.output import Output
from draftlab.provenance import LOG_FILE
from draftlab.training import trackers
from draftlab.training.checkpointer import best_weights, process_state, select_device
from draftlab.training.distributed import check as check_distributed
from draftlab.training.eagle_data import ChainBatches, open_texts, within_chains
from draftlab.training.eagle_head import EagleHead, EagleObjective
from draftlab.training.eagle_start import sample, start_again, start_linear
from draftlab.training.eagle_teacher import EagleTeacher
from draftlab.training.losses import parse_loss
from draftlab.training.on_policy import Batches, MixedBatches, load_or_make
from draftlab.training.optimizers import training_dtype
from draftlab.training.run import TrainingResult, claimed_state, fit
from draftlab.training.trackers import tracked
from draftlab.training.trainer import TrainingSetup
from draftlab.training.training_setup import Author, continued, target_text

HELDOUT_ROWS = 64
FITTED_TOKENS = 16_384  # of the text, from which a head starts
LARGEST_DEFAULT = 32_000  # draft ids, as SafeAILab and speculators have
BYTES = 16  # of a trained weight: fp32 with its gradient and two moments


@dataclass(frozen=True, slots=True)
class EagleResult:
    """fitted: its offsets are the held-out acceptances of each step of training-time test. coverage: share of tokens
    that are draft ids.
    """

    fitted: TrainingResult
    coverage: float


def plan_eagle(config: EagleConfig) -> Mapping[str, object]:
    """Return the head and what its training costs here, for people. No weights are read."""
    parse_loss(config.loss)
    device, dtype = checkpoint.resolve_device(config.device), checkpoint.DTYPES[training_dtype(config.training_dtype)]
    target = hub.locate(config.target, weights=False)
    head, size = checked_head(config, target), read_size(target)
    weights = head.params()
    tokens = config.steps * config.batch_size * config.seq_len
    per_token = size.flops_per_token(config.seq_len // 2) + 6 * weights * config.ttt_steps
    states = config.batch_size * config.seq_len * head.target_hidden * (len(head.layer_ids) + size.layers)
    memory = size.weight_bytes(dtype.itemsize) + BYTES * weights + states * dtype.itemsize
    seconds = tokens * per_token / (matmul_tflops(dtype, device) * 1e12)
    return {
        "head": f"layers {', '.join(map(str, head.layer_ids))} of {size.describe()}; {head.draft_vocab:,} draft ids, "
        f"{format_count(weights)} parameters",
        "tokens": f"{tokens:,}",
        "compute": f"{tokens * per_token / 1e12:,.3g} TFLOP",
        "time": f"{seconds / 60:,.3g} minutes at the speed of large products on this machine; some twice that in all",
        "memory": f"about {memory / 1e9:.2g} GB and activations",
        "disk": f"{2 * weights / 1e6:,.4g} MB, and {12 * weights / 1e6:,.4g} MB while it runs; no states are stored",
    }


def checked_head(config: EagleConfig, target: Path) -> HeadConfig:
    """Return the head to train, after its settings are checked. Raises UserError: they do not fit the target."""
    trackers.check(config.report_to)
    check_distributed(optimizer=config.optimizer)
    check_length(target, config.seq_len)
    if config.generates and loss_on_of(config.data, config.loss_on) is not None:
        raise UserError(f"--text {config.text}: the data has conversations; let the target answer with outputs build")
    if config.seq_len <= config.ttt_steps + 1:
        raise UserError(f"--ttt-steps {config.ttt_steps}: sequences of {config.seq_len} tokens are too short for them")
    if config.heads is not None:
        return eagle.check(config.heads, target)
    vocab = checkpoint.vocab_size(target)
    size = config.vocab or min(LARGEST_DEFAULT, max(1, vocab // 4))
    return eagle.head_config(target, config.layer_ids, size, config.norm_before_residual)


def train_eagle(config: EagleConfig, output: Output) -> EagleResult:
    """Train a head on the frozen target, and write it.

    Raises:
        UserError: a target or settings that cannot be used; or training fails.
    """
    loss, target = parse_loss(config.loss), hub.locate(config.target)
    head = checked_head(config, target)
    checkpoint.check(target)
    inputs = [target, *(path for path in (config.outputs, config.heads) if path)]
    device = select_device(config.device)
    begun = None if config.heads is None else eagle.read(config.heads, target, torch.float32)
    with claimed_state(output, inputs) as state:
        batches, heldout = _texts(config, target, state)
        ids, coverage = _draft_ids(head, begun, batches, config.steps, target, state)
        note(f"{len(ids):,} draft ids are {coverage:.2%} of tokens")
        dtype = checkpoint.DTYPES[training_dtype(config.training_dtype)]
        model = checkpoint.load_model(target, dtype, device, config.device_map)
        teacher = EagleTeacher(model, head.layer_ids, torch.from_numpy(ids), config.temperature, device)
        student = start_head(head, begun, teacher, batches, config, state)
        objective = EagleObjective(student, teacher.ids, loss, config.temperature, config.ttt_steps)
        setup = TrainingSetup(
            teacher=cast(Any, teacher), batches=ChainBatches(batches, config.ttt_steps), heldout=heldout,
            loss=loss, temperature=config.temperature, objective=objective,
        )  # fmt: skip
        with tracked(config.report_to, output) as log:
            fitted = fit(cast(Any, student), setup, config, state=state, what="eagle", log=log)
        student.load_state_dict(best_weights(state, "student"))
        result = EagleResult(fitted, coverage)
        if process_state().is_main_process:
            _write(output, target, inputs, student, begun, teacher, result, config.ttt_steps)
    return result


def _texts(config: EagleConfig, target: Path, state: Path) -> tuple[Batches, HeldOut]:
    """Return text to train on and held-out text: stored, data, or what the target continues data with."""
    rows, seq_len, chain = config.batch_size, config.seq_len, config.ttt_steps
    if config.outputs is not None:
        stored, heldout = open_texts(
            config.outputs, target, rows=rows, seq_len=seq_len, seed=config.seed, most_heldout=HELDOUT_ROWS
        )
        return stored, _within_chains(heldout, chain)
    tokenizer, shares = checkpoint.load_tokenizer(target), parse_mixture(config.text)
    sizes: dict[str, Any] = {"rows": rows, "seq_len": seq_len, "loss_on": loss_on_of(config.data, config.loss_on)}
    data = open_batches(config.data, tokenizer, steps=config.steps, seed=config.seed, **sizes)
    heldout = open_heldout(config.data, tokenizer, most_rows=HELDOUT_ROWS, **sizes)
    if not config.generates:
        return data, _within_chains(heldout, chain)
    author = Author(target, config, known_ids(target))
    written = target_text(data, author, state, math.ceil(config.steps * shares["target"]) + 1)
    prompts = heldout.ids[:, : config.prompt_tokens]
    judged = continued(prompts, author, state / "heldout_text.safetensors", "evaluate on")
    count = -(-len(prompts) // rows)
    heldout = HeldOut([judged.batch(i) for i in range(count)], heldout.bytes_per_token)
    mixed = MixedBatches.of({"data": data, "target": written}, shares, config.steps) if len(shares) > 1 else written
    return mixed, _within_chains(heldout, chain)


def _within_chains(heldout: HeldOut, steps: int) -> HeldOut:
    return HeldOut([within_chains(batch, steps) for batch in heldout.batches], heldout.bytes_per_token)


def _draft_ids(
    head: HeadConfig, begun: Head | None, batches: Batches, steps: int, target: Path, state: Path
) -> tuple[np.ndarray, float]:
    """Return the most frequent ids that are trained on, and the share of tokens that they cover; found once.

    A head that was begun keeps its ids.

    Raises:
        UserError: too few ids for the special tokens.
    """

    def find() -> dict[str, np.ndarray]:
        if head.draft_vocab == head.vocab:
            return {"ids": np.arange(head.vocab), "coverage": np.ones(1)}
        texts = [batch.ids[:, 1:][batch.mask > 0] for batch in map(batches.batch, range(steps))]
        if begun is not None:
            ids = begun.ids.numpy()
            return {"ids": ids, "coverage": np.isin(np.concatenate(texts), ids).mean(keepdims=True)}
        stays = template_ids(checkpoint.load_tokenizer(target)) | set(checkpoint.eos_token_ids(target))
        ids, coverage = frequent_ids(texts, head.draft_vocab, head.vocab, stays)
        return {"ids": np.array(ids), "coverage": np.array([coverage])}

    tensors = load_or_make(state / "draft_ids.safetensors", find)
    return tensors["ids"], float(tensors["coverage"][0])


def start_head(
    head: HeadConfig, begun: Head | None, teacher: EagleTeacher, batches: Batches, config: EagleConfig, state: Path
) -> EagleHead:
    """Return a head to train: the one that was begun, or one from least squares on a little of the text; found once."""
    torch.manual_seed(config.seed)
    student = EagleHead(head, teacher.embedding) if begun is None else EagleHead.of(begun, teacher.embedding)
    student.to(teacher.device)

    def find() -> dict[str, np.ndarray]:
        count = min(config.steps, math.ceil(FITTED_TOKENS / (config.batch_size * config.seq_len)))
        with progress("least squares for the head's start" if begun is None else "sizes of states", count) as advance:
            sampled = sample(teacher, (batches.batch(step) for step in range(count)), advance)
        if begun is not None:
            start_again(student, sampled)
        else:
            start_linear(student, sampled)
            with torch.no_grad():
                student.lm_head.weight.copy_(teacher.weight[teacher.ids])
        return {
            name: weight.cpu().numpy() for name, weight in [*student.state_dict().items(), ("scale", student.scale)]
        }

    start = {n: torch.from_numpy(weight) for n, weight in load_or_make(state / "start.safetensors", find).items()}
    student.scale.copy_(start.pop("scale"))
    student.load_state_dict(start)
    return student


def _write(
    output: Output,
    target: Path,
    inputs: list[Path],
    student: EagleHead,
    begun: Head | None,
    teacher: EagleTeacher,
    result: EagleResult,
    k: int,
) -> None:
    dtype = checkpoint.stored_dtype(target)
    weights: dict[str, Tensor] = {name: weight.to(dtype) for name, weight in student.weights().items()}
    head = Head(config=student.config, weights=weights, ids=teacher.ids, embedding=begun and begun.embedding)
    with output.directory() as work:
        eagle.write(work, head, "native", target=target, k=k)
        shutil.copyfile(output.state / LOG_FILE, work / LOG_FILE)
        output.record(work, inputs, coverage=result.coverage, **result.fitted.as_dict())
    remove_state(output.state)
