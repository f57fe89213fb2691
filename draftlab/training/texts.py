"""Text to train on: data, and data that the target or the draft continues.

N rows, P prompt tokens, G generated tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from draftlab.config.shared import LossOn
from draftlab.console import progress
from draftlab.data import HeldOut, TokenBatches, open_batches, open_heldout
from draftlab.engine.batch_generate import Batching, Completion, generate_batch, load_generator
from draftlab.errors import UserError
from draftlab.model import checkpoint
from draftlab.model.decoder import Decoder
from draftlab.model.tokenizer import known_ids
from draftlab.sampling import SamplingParams
from draftlab.training.checkpointer import load_or_make
from draftlab.training.loop import Batches, Hardware, Loop
from draftlab.training.on_policy import GeneratedRows, MixedBatches
from draftlab.training.optimizers import training_dtype
from draftlab.training.reweighing import Reweighing

HELDOUT_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingText:
    """The text to train on, in sequences of seq_len tokens.

    Args:
        data: A source of text, or a mixture of sources.
        shares: Share of the training steps for each kind of text, by name. The kinds are "data", "target" and "draft".
            In the last two, the target or the draft continues the first tokens of each row of the data.
        loss_on: Tokens of conversations that count in the loss. None for data without conversations.
        prompt_tokens: Number of tokens of the data that a model continues.
        temperature: Temperature of generated text.
        reweighing: Settings for updates of the mixture's weights. None keeps the weights fixed.
    """

    data: str
    shares: Mapping[str, float]
    seq_len: int
    loss_on: LossOn | None = None
    prompt_tokens: int = 32
    temperature: float = 1.0
    reweighing: Reweighing | None = None

    @property
    def generated(self) -> bool:
        return bool(self.shares.keys() & {"target", "draft"})

    @property
    def served(self) -> float:
        """Return the temperature at which the draft will run: that of generated text, and otherwise 1."""
        return self.temperature if self.generated else 1.0

    def open(self, model: Path, loop: Loop, *readers: Path) -> tuple[TokenBatches, HeldOut]:
        """Return the batches to train on and the held-out windows of the data.

        model: Checkpoint whose tokenizer, chat template and stop tokens make the text: the target, if the run has one.
        readers: Other checkpoints that read the tokens.

        Raises:
            UserError: The data cannot be read, or has too little text. Or it has conversations, but `shares` asks for
                generated text.
        """
        if self.loss_on is not None and self.generated:
            raise UserError(
                f"--text {','.join(self.shares)}: neither target nor draft can continue the conversations in --data; "
                "use --text data, or --text target with --data FILE.jsonl (or .json, .parquet)"
            )
        tokenizer = checkpoint.load_tokenizer(model, *readers)
        rows = loop.batch_size
        seq_len = self.seq_len
        loss_on = self.loss_on
        ends = checkpoint.eos_token_ids(model)
        heldout = open_heldout(
            self.data,
            tokenizer,
            rows=rows,
            seq_len=seq_len,
            most_rows=HELDOUT_ROWS,
            loss_on=loss_on,
            stop_token_ids=ends,
        )
        batches = open_batches(
            self.data,
            tokenizer,
            rows=rows,
            seq_len=seq_len,
            steps=loop.steps,
            seed=loop.seed,
            loss_on=loss_on,
            stop_token_ids=ends,
        )
        return batches, heldout


@dataclass(frozen=True)
class Author:
    """The target as a writer of text. The model is loaded at first use.

    known: Number of token ids, from id 0 on, that both target and draft know. The target writes only these ids.
    """

    target: Path
    known: int
    hardware: Hardware
    loop: Loop

    @classmethod
    def of(cls, target: Path, hardware: Hardware, loop: Loop, *drafts: Path) -> "Author":
        return cls(target, known_ids(*drafts, target), hardware, loop)

    @cached_property
    def model(self) -> Decoder:
        dtype = training_dtype(self.loop.dtype)
        hardware = self.hardware
        return load_generator(self.target, dtype, hardware.resolved, hardware.device_map)

    def sampling(self, length: int, temperature: float) -> SamplingParams:
        ends = checkpoint.eos_token_ids(self.target)
        return SamplingParams(max_tokens=length, temperature=temperature, seed=self.loop.seed, stop_token_ids=ends)

    def write(self, prompts: list[list[int]], sampling: SamplingParams, purpose: str) -> list[Completion]:
        """Return the target's continuations of prompts.

        purpose: End of the label of the progress bar, "the target writes text to ...".
        """
        batching = Batching(vocab=self.known, memory=self.hardware.memory)
        with progress(f"the target writes text to {purpose}", len(prompts)) as advance:
            return generate_batch(self.model, prompts, sampling, batching, advance=lambda n: advance(n, "texts"))


def in_turns(text: TrainingText, sources: Mapping[str, Batches], loop: Loop) -> Batches:
    """Return batches from several sources. Each source provides its share of the steps."""
    if len(text.shares) == 1:
        return sources[next(iter(text.shares))]
    return MixedBatches.of(sources, text.shares, loop.steps)


def target_text(text: TrainingText, data: Batches, author: Author, state: Path) -> GeneratedRows:
    """Return rows of text in which the target continues the first tokens of data rows.

    The rows are stored in the directory `state`, and a resumed run reads them there.
    """
    loop = author.loop
    steps = min(loop.steps, math.ceil(loop.steps * text.shares["target"]) + 1)
    starts = [data.batch(step).ids[:, : text.prompt_tokens] for step in range(steps)]
    return continued(np.concatenate(starts), text, author, state, "target_text.pt", "train on")


def continued(
    prompts: np.ndarray, text: TrainingText, author: Author, state: Path, name: str, purpose: str
) -> GeneratedRows:
    """Return rows of text in which the target continues prompts, [N, P], up to the length of a training row.

    Args:
        state: Directory in which the rows are stored. A resumed run reads them there.
        name: Name of the file of the rows.
        purpose: End of the label of the progress bar, "the target writes text to ...".
    """
    rows = author.loop.batch_size
    length = text.seq_len + 1 - prompts.shape[1]

    def make() -> dict[str, torch.Tensor]:
        sampling = author.sampling(length, text.temperature)
        texts = author.write(prompts.tolist(), sampling, purpose)
        written = GeneratedRows.of(prompts, texts, length, rows)
        arrays = {"ids": written.ids, "lengths": written.lengths}
        return {n: torch.from_numpy(array) for n, array in arrays.items()}

    found = load_or_make(state, name, make)
    return GeneratedRows(found["ids"].numpy(), found["lengths"].numpy(), prompts.shape[1], rows)
