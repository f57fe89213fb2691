"""Resize the logits of a trained draft to the target's vocabulary, or give the draft a trimmed head.

V is the number of logits.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from draftlab.console import note
from draftlab.data import Batch
from draftlab.errors import UserError
from draftlab.model import checkpoint, saving
from draftlab.model.trimmed_head import frequent_ids, template_ids, trim_model
from draftlab.training.loop import Batches
from draftlab.training.on_policy import MixedBatches, StudentBatches
from draftlab.training.teachers import logits_of

COUNTED_TOKENS = 4_000_000  # most tokens to count for a trimmed head


def resize(directory: Path, vocab: int) -> str | None:
    """Resize a checkpoint to `vocab` logits. Return the change as text, such as "100 -> 128", or None without a change.

    Rows of embedding and head after the first `vocab` rows are dropped. Added rows are the mean of the old rows. The
    logit of an added id is then the mean of the old logits, so its probability is at most 1 / vocab (by Jensen's
    inequality).

    Raises:
        UserError: No tensor has the name of the embedding or head in transformers, or config.json has no vocab_size.
    """
    config = checkpoint.read_config(directory)
    before = checkpoint.vocab_size(directory)
    if before == vocab:
        return None
    weights = dict(checkpoint.Weights(directory))
    by_id = _rows_of_ids(config) & weights.keys()
    if not by_id or "vocab_size" not in config:
        raise UserError(
            f"{directory}: the vocabulary of a {config.get('model_type')} model cannot be resized to the target's, "
            "because draftlab does not know its embedding and LM head; use another draft"
        )
    for name in by_id:
        rows = weights[name]
        more = rows.float().mean(0).to(rows.dtype).expand(max(0, vocab - before), *rows.shape[1:])
        weights[name] = torch.cat([rows[:vocab], more])
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    saving.write_checkpoint(directory, config | {"vocab_size": vocab}, weights.items(), None)
    return f"{before} -> {vocab}"


def trim(student: PreTrainedModel, size: int, texts: Sequence[np.ndarray], models: Iterable[Path]) -> None:
    """Trim a student's head to the `size` most frequent ids of texts.

    models: Checkpoints whose special ids stay in the head.

    Raises:
        UserError: The ids cannot be chosen (see frequent_ids).
    """
    special = set[int]().union(*map(special_ids, models))
    ids, coverage = frequent_ids(texts, size, logits_of(student), special)
    trim_model(student, ids)
    tokens = sum(map(len, texts))
    note(
        f"the LM head predicts {size:,} token ids; in a test on {tokens:,} tokens, the most frequent ids of the first "
        f"half of the texts cover {coverage:.2%} of the second half"
    )


def special_ids(model: Path) -> set[int]:
    """Return the token ids that every trimmed head keeps: ids of the chat template, special tokens and stop tokens."""
    return template_ids(checkpoint.load_tokenizer(model)) | set(checkpoint.eos_token_ids(model))


def trained_texts(batches: Batches, steps: int) -> list[np.ndarray]:
    """Return the tokens that training will predict, up to about COUNTED_TOKENS.

    Text that the student will write does not exist yet. In its place, the data that the student continues is returned.
    """
    texts: list[np.ndarray] = []
    tokens = 0
    for step in range(steps):
        batch = _without_student(batches, step)
        texts += [ids[1:][mask > 0] for ids, mask in zip(batch.ids, batch.mask, strict=True)]
        tokens += int((batch.mask > 0).sum())
        if tokens >= COUNTED_TOKENS:
            break
    return texts


def _without_student(batches: Batches, step: int) -> Batch:
    if isinstance(batches, MixedBatches):
        name, step = batches.turns[step]
        batches = batches.sources[name]
    return (batches.prompts if isinstance(batches, StudentBatches) else batches).batch(step)


def _rows_of_ids(config: dict[str, object]) -> set[str]:
    """Return the parameter names of embedding and head, both with and without the base model's prefix."""
    model = checkpoint.meta_model(config, torch.float32)
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    own = {id(parameter) for module in ends if module is not None for parameter in module.parameters()}
    names = {name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in own}
    return names | {name.removeprefix(f"{model.base_model_prefix}.") for name in names}
