"""One prune on disk: calibrate, choose, cut, write."""

from pathlib import Path

import torch

from draftlab import checkpoint, provenance
from draftlab.console import progress
from draftlab.data import open_batches
from draftlab.prune.cut import Keep, choose, cut, keep_all
from draftlab.prune.importance import Importance, calibrate
from draftlab.shape import Shape

ROWS = 4  # sequences per calibration forward

KEEP_FILE = "keep.json"


def prune(
    source: Path,
    shape: Shape,
    *,
    out: Path,
    data: str,
    tokens: int,
    seq_len: int,
    seed: int,
    device: torch.device,
    arguments: dict[str, object],
    began: float,
    force: bool,
) -> tuple[Keep, int]:
    """Write the draft of that shape to out; what was kept, and its size on disk in bytes.

    Weights keep the source's dtype: with the source's own shape they are the source's bits.
    """
    have = checkpoint.read_shape(source)
    if shape == have:
        keep = keep_all(have)
    else:
        keep = choose(measure(source, have, data, tokens, seq_len, seed, device), have, shape)
    config = checkpoint.config_for(shape, checkpoint.read_config(source), keep.layers)
    with checkpoint.new_directory(out, force=force) as work:
        with progress("cut", len(shape.axes())) as advance:
            weights = cut(checkpoint.Weights(source), shape, keep, lambda done: advance(done, ""))
        checkpoint.write_checkpoint(work, config, weights, source)
        (work / KEEP_FILE).write_text(keep.model_dump_json())
        provenance.write_record(work, "prune", arguments, [source], began, params=shape.params())
    return keep, sum(tensor.nbytes for tensor in weights.values())


def measure(
    source: Path, shape: Shape, data: str, tokens: int, seq_len: int, seed: int, device: torch.device
) -> Importance:
    """Importance from tokens tokens of the train split of data, in the source's own dtype."""
    rows = -(-tokens // seq_len)
    text = open_batches(data, checkpoint.load_tokenizer(source), rows=rows, seq_len=seq_len, steps=1, seed=seed)
    batches = [part.ids[:, :-1] for part in text.batch(0).split(ROWS)]
    model = checkpoint.load_model(source, checkpoint.stored_dtype(source), device)
    with progress("calibrate", len(batches)) as advance:
        return calibrate(model, shape, batches, lambda done: advance(done, f"{done * ROWS * seq_len:,} tokens"))
