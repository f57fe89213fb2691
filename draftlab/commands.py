"""What users can do: one typed function per command. Typer and recipes call these same functions."""

import time
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from draftlab.errors import UserError

Force = Annotated[bool, Option("--force", help="Replace an output that exists.")]
DryRun = Annotated[bool, Option("--dry-run", help="Show what would be done, and do nothing.")]
Seed = Annotated[int, Option(help="Seed of everything random.")]


def tokenizer(
    data: Annotated[str, Option(help="Text to learn from: SOURCE, or SOURCE=WEIGHT,SOURCE=WEIGHT by size.")],
    out: Annotated[Path, Option(help="Directory to write.")],
    vocab: Annotated[int, Option(min=260, help="Token ids, special tokens included.")] = 4096,
    megabytes: Annotated[float, Option(help="Text read in all.")] = 24.0,
    force: Force = False,
) -> Path:
    """Train a byte-level BPE tokenizer for source code."""
    from draftlab import checkpoint
    from draftlab.data import documents, parse_mixture, take_bytes
    from draftlab.tokenizer import train_tokenizer

    arguments, began = dict(locals()), time.time()
    checkpoint.check_free(out, force=force)
    weights = parse_mixture(data)
    texts = [
        d.text for name, w in weights.items() for d in take_bytes(documents(name, "train"), int(megabytes * 1e6 * w))
    ]
    with checkpoint.new_directory(out, force=force) as work:
        train_tokenizer(texts, vocab, work)
        checkpoint.write_record(work, "tokenizer", arguments, [], began)
    return out


def train(
    data: Annotated[str, Option(help="Text to train on: SOURCE, or SOURCE=WEIGHT,SOURCE=WEIGHT.")],
    out: Annotated[Path, Option(help="Directory to write.")],
    model: Annotated[str | None, Option(help="Checkpoint to continue from.")] = None,
    shape: Annotated[Path | None, Option(help="Or a shape file: start from random weights.")] = None,
    tokenizer: Annotated[str | None, Option(help="Checkpoint or directory with the tokenizer of a new model.")] = None,
    steps: Annotated[int, Option(min=1, help="Optimiser steps.")] = 1000,
    rows: Annotated[int, Option(min=1, help="Sequences per step.")] = 16,
    seq_len: Annotated[int, Option(min=8, help="Tokens per sequence.")] = 512,
    context: Annotated[int, Option(help="Longest context of a new model.")] = 2048,
    lr: Annotated[float, Option(help="Peak learning rate.")] = 1.0e-3,
    optimizer: Annotated[Literal["adamw", "muon"], Option(help="Muon: blocks' matrices; AdamW: the rest.")] = "adamw",
    weight_decay: Annotated[float, Option(help="Decoupled weight decay of matrices.")] = 0.1,
    dtype: Annotated[Literal["float32", "bfloat16"], Option(help="bfloat16: autocast, fp32 weights.")] = "bfloat16",
    compile: Annotated[bool, Option("--compile", help="torch.compile: a minute more, then faster.")] = False,
    eval_every: Annotated[int, Option(min=1, help="Steps between held-out evaluations.")] = 200,
    save_every: Annotated[int, Option(min=1, help="Steps between checkpoints to resume from.")] = 200,
    seed: Seed = 0,
    force: Force = False,
    dry_run: DryRun = False,
) -> Path:
    """Train with cross-entropy on text: a new model, or continued pretraining after pruning."""
    import torch

    from draftlab import checkpoint
    from draftlab.data import open_batches, open_heldout, parse_mixture
    from draftlab.distill.loop import Settings
    from draftlab.distill.run import DTYPES, fit, write_trained
    from draftlab.shape import read_shape_file

    arguments, began = dict(locals()), time.time()
    checkpoint.check_free(out, force=force)
    if model is not None:
        source = checkpoint.locate(model)
        tok, config = checkpoint.load_tokenizer(source), checkpoint.read_config(source)
        student = checkpoint.load_model(source, torch.float32)
    elif shape is not None and tokenizer is not None:
        source = Path(tokenizer) if Path(tokenizer).is_dir() else checkpoint.locate(tokenizer)
        tok = checkpoint.load_tokenizer(source)
        ids = {"bos": tok.bos_token_id, "eos": tok.eos_token_id, "pad": tok.pad_token_id}
        config = checkpoint.llama_config(read_shape_file(shape), context=context, **ids)
        student = checkpoint.new_model(config, seed)
    else:
        raise UserError("say what to train: --model CHECKPOINT, or --shape FILE with --tokenizer DIR for a new model")
    settings = Settings(
        loss="ce", steps=steps, lr=lr, optimizer=optimizer, weight_decay=weight_decay, dtype=dtype, compile=compile,
        eval_every=eval_every, save_every=save_every, seed=seed,
    )
    batches = open_batches(data, tok, rows=rows, seq_len=seq_len, steps=steps, seed=seed)
    heldout = open_heldout(next(iter(parse_mixture(data))), tok, rows=rows, seq_len=seq_len, most_rows=512)
    state = out.with_name(out.name + ".state")
    fitted = fit(student, None, batches, heldout, settings, state=state, what="train")
    with checkpoint.new_directory(out, force=force) as work:
        write_trained(student, work, like=source, dtype=DTYPES["bfloat16"], config=config, state=state)
        checkpoint.write_record(work, "train", arguments, [source], began, bits_per_byte=fitted.bits_per_byte,
            tokens=fitted.tokens, seconds=fitted.seconds)
    return out
