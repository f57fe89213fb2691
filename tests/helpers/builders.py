"""Small random checkpoints of every family: each axis has a length of its own, so a transposed axis fails."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draftlab.data import Batch, HeldOut
from draftlab.engine.generate import Draft, Drafter, Step
from draftlab.results.decoding import Generation
from draftlab.sampling import SamplingParams
from draftlab.training import run
from draftlab.training.loop import Batches, Loop
from draftlab.training.losses import parse_loss
from draftlab.training.trainer import StepRecord, TeacherModel, TrainingSetup, train

Record = TypeVar("Record")
SIZES = {
    "vocab_size": 307,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama_mha": lambda: LlamaForCausalLM(LlamaConfig(**SIZES | {"num_key_value_heads": 8})),
    "llama3_tied": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE)
    ),
    "llama_biases": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)),
    "qwen2_tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False)),
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
    "tie_word_embeddings": True,
}
OTHER_BLOCKS = {  # the engine computes them; a refit does not, or not in every way
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"})),
    "granite": lambda: GraniteForCausalLM(
        GraniteConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"}, **GRANITE)
    ),
}
TOKENIZER_TEXT = [
    "def parse(line):\n    if not line:\n        return None\n    return [int(part) for part in line.split(',')]\n",
    "class Reader:\n    def __init__(self, path):\n        self.path = path\n\n    def read(self):\n        return 1\n",
]
# terms behind a logit of the largest model here: in each layer four products over hidden_size, a product over
# intermediate_size, and the attention's sum over the context
PASS_TERMS = SIZES["num_hidden_layers"] * (
    4 * SIZES["hidden_size"] + SIZES["intermediate_size"] + SIZES["max_position_embeddings"]
)


def build(family: str, seed: int = 0, noise: float = 0.0, **changes: int) -> PreTrainedModel:
    """Return a random model in which norms and biases matter too, at logits wide enough to have clear winners.

    noise: Standard deviations of each weight that are added, so that the model of a seed agrees now and then.
    """
    torch.manual_seed(seed)
    before = dict(SIZES)
    SIZES.update(changes)
    try:
        model = (FAMILIES | OTHER_BLOCKS)[family]()
    finally:
        SIZES.update(before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.08))
        for parameter in model.parameters() if noise else ():
            parameter.add_(torch.randn_like(parameter) * noise * parameter.std())
    return model.eval()


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a random model of a config, in which norms and biases matter too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.08))
    return model


def save_neox(out: Path, tokenizer: Path, layers: int = 1, hidden: int = 32) -> Path:
    """Save a random model that has other tensors than LLaMA's, with a tokenizer of so many ids."""
    sizes: dict[str, Any] = {
        "vocab_size": SIZES["vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": 64,
    }
    config = GPTNeoXConfig(**sizes, num_hidden_layers=layers, num_attention_heads=4, max_position_embeddings=512)
    torch.manual_seed(0)
    GPTNeoXForCausalLM(config).save_pretrained(out)
    for file in tokenizer.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    return out


def logits_by_transformers(directory: Path, ids: Tensor) -> Tensor:
    """Return a checkpoint's logits in float32, of which transformers misses and needs no tensor."""
    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.inference_mode():
        return model(ids).logits


def rounding(dtype: torch.dtype, terms: int, magnitude: float, factor: float = 4.0) -> float:
    """Return how far rounding can move a value: one random error of eps times magnitude for each term.

    factor: how far beyond that the largest of many values may lie; any order of summing stays below it.
    """
    return factor * torch.finfo(dtype).eps * math.sqrt(terms) * magnitude


PASS_ROUNDING = rounding(torch.float32, PASS_TERMS, 1.0)  # of a value of 1 in float32


def assert_rounds(
    found: Any,
    wanted: Any,
    terms: int = PASS_TERMS,
    *,
    magnitude: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Assert that two arrays of one shape differ by no more than rounding in `dtype` can explain.

    terms: Number of terms summed for a value. magnitude: Largest magnitude of the terms. None takes the largest
    finite magnitude in `wanted`.
    """
    found, wanted = (torch.as_tensor(value).detach().double() for value in (found, wanted))
    if magnitude is None:
        finite = wanted[wanted.isfinite()]
        magnitude = float(finite.abs().max()) if len(finite) else 0.0
    torch.testing.assert_close(found, wanted, atol=rounding(dtype, terms, magnitude), rtol=0)


def setup(teacher: TeacherModel, batches: Batches, heldout: list[Batch], loss: str = "fkl") -> TrainingSetup:
    return TrainingSetup(teacher=teacher, batches=batches, heldout=HeldOut(heldout, 1.0), loss=parse_loss(loss))


def until(stop: int | None, records: Iterable[Record]) -> Iterator[Record]:
    """Yield the records of a training that is killed at a step, before anything of it is saved; None: at no step."""
    for record in records:
        yield record
        if isinstance(record, StepRecord) and record.step == stop:
            break


@contextmanager
def training_killed_at(step: int) -> Iterator[None]:
    """Kill the training of the command in the block at a step, whose checkpoint is not written yet."""

    def killed(*given: Any) -> Iterator[Any]:
        yield from until(step, train(*given))
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "train", killed)
        with pytest.raises(KeyboardInterrupt):
            yield


def generation_of(steps: Iterable[Step], prompt: int = 0) -> Generation:
    """Return the steps of one row as a score counts them, each phase after the prefill in a second."""
    prefill, *decoded = steps
    return Generation(
        prompt=prompt,
        tokens=len(prefill.tokens) + sum(len(s.tokens) for s in decoded),
        drafted=[s.drafted for s in decoded],
        accepted=[s.accepted for s in decoded],
        emitted=[len(s.tokens) for s in decoded],
        prefill_seconds=1,
        draft_seconds=0,
        verify_seconds=1,
        host_seconds=0,
    )


def recording(drafter: type[Drafter], *arguments: Any) -> Any:
    """Return a drafter that keeps in seen the texts that it was given, with what it drafted."""

    class Recording(drafter):
        def reset(self, rows: int, capacity: int) -> None:
            super().reset(rows, capacity)
            self.seen: list[tuple[list[list[int]], Draft]] = []

        def propose(self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
            draft = super().propose(texts, count, sampling, uniform)
            self.seen.append(([list(text) for text in texts], draft))
            return draft

    return Recording(*arguments)


def altered(loop: Loop, **values: Any) -> Loop:
    return replace(loop, **values)
