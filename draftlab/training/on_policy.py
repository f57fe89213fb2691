"""Generated text to train on: text of the target, and text of the draft itself (on-policy).

N rows, P prompt tokens, G generated tokens. No gradient goes through sampling.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from accelerate.utils import gather_object, reduce
from torch import Tensor
from transformers import PreTrainedModel

from draftlab.data import Batch
from draftlab.engine.batch_generate import Batching, Completion, generate_batch
from draftlab.model.hf_decoder import HFDecoder
from draftlab.sampling import SamplingParams
from draftlab.training.checkpointer import process_state
from draftlab.training.loop import Batches


@dataclass(frozen=True, slots=True)
class MixedBatches:
    """Batches from several sources. Each step takes a batch from one of them.

    turns: For each step, the name of the source and the index of the batch in this source.
    """

    sources: Mapping[str, Batches]
    turns: list[tuple[str, int]]

    @classmethod
    def of(cls, sources: Mapping[str, Batches], weights: Mapping[str, float], steps: int) -> "MixedBatches":
        """Distribute the steps over the sources in proportion to their weights.

        After any number of steps, no source is more than one step away from its exact share.
        """
        counts = dict.fromkeys(weights, 0)
        turns = []
        for number in range(1, steps + 1):
            name = max(weights, key=lambda n: weights[n] * number - counts[n])
            turns.append((name, counts[name]))
            counts[name] += 1
        return cls(sources, turns)

    def batch(self, step: int) -> Batch:
        name, number = self.turns[step]
        return self.sources[name].batch(number)


@dataclass(frozen=True, slots=True)
class StudentBatches:
    """Batches of text that the student writes with its current weights, as continuations of prompts.

    The samples depend on the weights, the seed and the step.

    Attributes:
        prompts: Batches whose rows begin with the prompts.
        prompt: Number of prompt tokens.
        ends: Stop token ids.
        known: Number of token ids that may be sampled, from id 0 on.
        memory: Gigabytes for logits and KV caches.
    """

    student: PreTrainedModel
    prompts: Batches
    prompt: int
    temperature: float
    ends: tuple[int, ...]
    known: int
    seed: int
    memory: float = 2.0

    def batch(self, step: int) -> Batch:
        """Return all rows of a step. Each process generates a share of them, and gets the rows of all processes."""
        prompts = self.prompts.batch(step).ids
        state = process_state()
        rows = len(prompts)
        processes = state.num_processes
        # equal shares, so that all processes run the same passes
        last = math.ceil(rows / processes) * processes
        own = [min(row, rows - 1) for row in range(state.process_index, last, processes)]
        sampling = SamplingParams(
            max_tokens=prompts.shape[1] - self.prompt,
            temperature=self.temperature,
            seed=self.seed,
            stop_token_ids=self.ends,
        )
        batching = Batching(vocab=self.known, batch_size=rows, memory=self.memory, unfinished=_in_all_processes)
        prompts = prompts[:, : self.prompt]
        was_training = self.student.training
        self.student.eval()
        numbers = [step * rows + row for row in own]
        written = generate_batch(
            HFDecoder(self.student, one_length=True, trained=True),
            prompts[own].tolist(),
            sampling,
            batching,
            numbers=numbers,
        )
        self.student.train(was_training)
        texts: dict[int, Completion] = dict(gather_object(list(zip(own, written, strict=True))))
        return GeneratedRows.of(prompts, [texts[row] for row in range(rows)], sampling.max_tokens, rows).batch(0)


def _in_all_processes(count: int) -> int:
    """Return the sum of `count` over all processes. FSDP and ZeRO need every process in every pass."""
    local = torch.tensor(count, device=process_state().device)
    return int(cast(Tensor, reduce(local, "sum")))


@dataclass(frozen=True, slots=True)
class GeneratedRows:
    """Batches of prompts with a model's continuations.

    Attributes:
        ids: Token ids of prompts and continuations, [N, P + G].
        lengths: Number of generated tokens in each row, [N]. All later ids of the row are padding.
        prompt: Number of prompt tokens, P.
        rows: Number of rows in a batch.
    """

    ids: np.ndarray
    lengths: np.ndarray
    prompt: int
    rows: int

    @classmethod
    def of(cls, prompts: np.ndarray, texts: Sequence[Completion], length: int, rows: int) -> "GeneratedRows":
        """Join prompts, [N, P], with their continuations, which are padded to `length` tokens, G."""
        ids = np.zeros((len(texts), prompts.shape[1] + length), dtype=np.uint32)
        ids[:, : prompts.shape[1]] = prompts
        for row, text in zip(ids, texts, strict=True):
            row[prompts.shape[1] :][: len(text.ids)] = text.ids
        return cls(ids, np.array([len(text.ids) for text in texts]), prompts.shape[1], rows)

    def batch(self, step: int) -> Batch:
        """Return the rows of a step. Rows are read in order, because the prompts already are in random order."""
        picked = (step * self.rows + np.arange(self.rows)) % len(self.ids)
        # index of each predicted token in the generated text
        place = np.arange(self.ids.shape[1] - 1) - (self.prompt - 1)
        mask = (place >= 0) & (place < self.lengths[picked, None])
        return Batch(self.ids[picked].astype(np.int64), mask.astype(np.float32))
