"""Resizing a draft's head to the target's: runtimes want as many logits, and padding must not win. V vocab."""

from pathlib import Path

import torch

from draftlab.errors import UserError
from draftlab.model import checkpoint, saving


def resize(directory: Path, vocab: int) -> str | None:
    """Give the checkpoint in directory vocab logits; return the change for the record, None if there is none.

    Rows of padding are dropped. Added rows are the mean of the others: their logit is the mean logit, so by Jensen's
    inequality the probability of each is below 1 / V whatever the text, in practice far below.

    Raises:
        UserError: none of its tensors is the embedding that transformers builds.
    """
    config, before = checkpoint.read_config(directory), checkpoint.vocab_size(directory)
    if before == vocab:
        return None
    weights = dict(checkpoint.Weights(directory))
    sized = [name for name in _rows_of_ids(config) if name in weights]
    if not sized or "vocab_size" not in config:
        raise UserError(
            f"{directory}: cannot tell which tensors of a {config.get('model_type')} model have a row per token"
        )
    for name in sized:
        rows = weights[name]
        more = rows.float().mean(0).to(rows.dtype).expand(max(0, vocab - before), *rows.shape[1:])
        weights[name] = torch.cat([rows[:vocab], more])
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    saving.write_checkpoint(directory, config | {"vocab_size": vocab}, weights.items(), None)
    return f"{before} -> {vocab}"


def _rows_of_ids(config: dict[str, object]) -> set[str]:
    """Return the names of embedding and head in files, with and without the base model's prefix."""
    model = checkpoint.meta_model(config, torch.float32)
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    own = {id(parameter) for module in ends if module is not None for parameter in module.parameters()}
    names = {name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in own}
    return names | {name.removeprefix(f"{model.base_model_prefix}.") for name in names}
