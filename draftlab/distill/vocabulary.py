"""A draft's head at the target's size: runtimes want as many logits, and padding must never win. V vocab."""

from pathlib import Path

import torch

from draftlab.errors import UserError
from draftlab.model import checkpoint, saving


def resize(directory: Path, vocab: int) -> str | None:
    """Give the checkpoint in directory vocab logits; what changed, for the record, or None.

    Rows of padding are dropped. Added ones are the mean of the others: then their logit is the mean logit, and by
    Jensen's inequality the probability of each is below 1 / V whatever the text, in practice far below.

    Raises:
        UserError: none of its tensors is the embedding that transformers builds.
    """
    config, have = checkpoint.read_config(directory), checkpoint.vocab_size(directory)
    if have == vocab:
        return None
    weights = dict(checkpoint.Weights(directory))
    sized = [name for name in _rows_of_ids(config) if name in weights]
    if not sized or "vocab_size" not in config:
        raise UserError(f"{directory}: of a {config.get('model_type')} model it is not known which rows belong to ids")
    for name in sized:
        rows = weights[name]
        more = rows.float().mean(0).to(rows.dtype).expand(max(0, vocab - have), *rows.shape[1:])
        weights[name] = torch.cat([rows[:vocab], more])
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    saving.write_checkpoint(directory, config | {"vocab_size": vocab}, weights.items(), None)
    return f"{have} -> {vocab}"


def _rows_of_ids(config: dict[str, object]) -> set[str]:
    """Return the names that embedding and head can have in the files, which may leave out the base model's."""
    model = checkpoint.meta_model(config, torch.float32)
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    mine = {id(parameter) for module in ends if module is not None for parameter in module.parameters()}
    names = {name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in mine}
    return names | {name.removeprefix(f"{model.base_model_prefix}.") for name in names}
