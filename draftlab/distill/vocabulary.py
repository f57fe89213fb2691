"""A draft's head at the target's size: runtimes want as many logits, and padding must never win. V vocab."""

from pathlib import Path

import torch

from draftlab import checkpoint

NAMES = ("model.embed_tokens.weight", "lm_head.weight")


def resize(directory: Path, vocab: int) -> str | None:
    """Give the checkpoint in directory vocab logits; what changed, for the record, or None.

    Rows of padding are dropped. Added ones are the mean of the others: then their logit is the mean logit, and by
    Jensen's inequality the probability of each is below 1 / V whatever the text, in practice far below.
    """
    config, have = checkpoint.read_config(directory), checkpoint.vocab_size(directory)
    if have == vocab:
        return None
    weights = dict(checkpoint.Weights(directory))
    for name in NAMES:
        if name in weights:
            rows = weights[name]
            more = rows.float().mean(0).to(rows.dtype).expand(max(0, vocab - have), -1)
            weights[name] = torch.cat([rows[:vocab], more])
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    checkpoint.write_checkpoint(directory, config | {"vocab_size": vocab}, weights.items(), None)
    return f"{have} -> {vocab}"
