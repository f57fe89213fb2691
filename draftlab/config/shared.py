"""Settings that several commands have, with the names of transformers, TRL and vLLM."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from draftlab import workspace
from draftlab.config.base import CHECKPOINTS, SERVER, TRAINING, from_workspace, option
from draftlab.errors import UserError

WeightsDtype = Literal["auto", "float32", "bfloat16", "float16"]
EngineMode = Literal["auto", "eager", "native", "graphs"]
SAMPLING = "Sampling"


def target(**others: Any) -> Any:
    return from_workspace("target", "Checkpoint of the target: a directory, or a hub name with @REVISION.", **others)


def source(**others: Any) -> Any:
    return from_workspace("source", "Checkpoint that drafts are cut from.", **others)


def data(help: str = "Text: SOURCE, or SOURCE=WEIGHT,SOURCE=WEIGHT.", **others: Any) -> Any:
    return from_workspace("data", help, **others)


def device() -> Any:
    return from_workspace("device", "Device to run on: auto, cpu, cuda, cuda:1.", advanced=True)


def dtype(**others: Any) -> Any:
    return from_workspace("dtype", "Data type of weights; auto: bfloat16 on CUDA, else float32.", **others)


def seed() -> Any:
    return option(0, "Seed of everything random.", advanced=True)


def threads() -> Any:
    return option(None, "CPU threads. Default: torch's choice.", ge=1, advanced=True)


def mode() -> Any:
    return option(
        "auto", "How passes run: native in C++ on CPUs, graphs as CUDA graphs; auto: the fastest that runs here."
    )


def device_map() -> Any:
    return option(None, "Spread the target over devices, memory and disk with accelerate: auto.", advanced=True)


def memory() -> Any:
    return option(2.0, "GB that logits and KV caches of the target may take.", ge=0.01, advanced=True)


def prompt_file() -> Any:
    return option(None, "JSON-lines file of prompts: prompt (or turns, text, question) and perhaps category.")


def newest_output(*commands: str) -> Path:
    """Return the newest output of these commands under the workspace's runs.

    Raises:
        UserError: there is none.
    """
    runs = workspace.load().runs
    path = workspace.newest(runs, commands)
    if path is None:
        raise UserError(f"no draft in {runs}; run draftlab {commands[0]} first, or name one")
    return path


def newest_draft() -> Path:
    """Return the newest draft under the workspace's runs. Raises UserError: there is none."""
    return newest_output("distill", "prune", "prune-masks")


class ServerSettings(BaseModel):
    """A running server in place of the target's checkpoint."""

    server: str | None = option(None, "http://HOST:PORT of a server that runs the target instead.", panel=SERVER)
    served_model: str | None = option(None, "Model of the server. Default: its first.", panel=SERVER, advanced=True)
    tokenizer: Path | None = option(
        None, "Directory of the server's tokenizer, if not that of --target.", panel=SERVER, advanced=True
    )
    api_key_file: Path | None = option(None, "File with the server's API key.", panel=SERVER, advanced=True)


class SamplingSettings(BaseModel):
    """How tokens are sampled."""

    temperature: float = option(0.0, "0 is greedy.", ge=0, panel=SAMPLING)
    top_k: int = option(
        0, "Sample from the most probable tokens only; 0: from all.", ge=0, panel=SAMPLING, advanced=True
    )
    top_p: float = option(
        1.0, "Sample from the fewest tokens with this probability together.", gt=0, le=1, panel=SAMPLING, advanced=True
    )
    min_p: float = option(
        0.0, "Leave out tokens less probable than this times the most probable one.", ge=0, le=1, panel=SAMPLING,
        advanced=True,
    )  # fmt: skip


class TrainingSettings(BaseModel):
    """One training loop's settings. Tokens per step = batch_size x seq_len, over all processes."""

    steps: int = option(500, "Optimiser steps.", ge=1, panel=TRAINING)
    batch_size: int = option(16, "Sequences per step.", ge=1, panel=TRAINING)
    seq_len: int = option(256, "Tokens per sequence.", ge=8, panel=TRAINING)
    # Muon at 4e-3 was the best rate for every draft of tiny (benchmarks/results/distill_quality.json)
    lr: float = option(4.0e-3, "Peak learning rate.", gt=0, panel=TRAINING)
    optimizer: Literal["adamw", "muon"] = option(
        "muon", "muon: Muon for the matrices of the blocks, AdamW for the rest.", panel=TRAINING, advanced=True
    )
    weight_decay: float = option(0.0, "Decoupled weight decay of matrices.", ge=0, panel=TRAINING, advanced=True)
    micro_batch_tokens: int = option(
        0, "Tokens per forward pass, to save memory; 0: all at once.", ge=0, panel=TRAINING, advanced=True
    )
    training_dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "bfloat16: autocast with fp32 weights; auto: where that is fast.", panel=TRAINING, advanced=True
    )
    torch_compile: bool = option(False, "Compile the model: slower start, faster steps.", panel=TRAINING, advanced=True)
    eval_steps: int = option(100, "Steps between held-out evaluations.", ge=1, panel=CHECKPOINTS, advanced=True)
    save_steps: int = option(100, "Steps between checkpoints to resume from.", ge=1, panel=CHECKPOINTS, advanced=True)
    save_total_limit: int = option(1, "Checkpoints kept.", ge=1, panel=CHECKPOINTS, advanced=True)
    patience: int = option(
        0, "Stop after this many evaluations without a better one; 0: never.", ge=0, panel=CHECKPOINTS, advanced=True
    )
    report_to: list[str] = option(
        factory=list, help="Tracker to log to: tensorboard, trackio, wandb; repeat for several.", panel=CHECKPOINTS,
        advanced=True,
    )  # fmt: skip
    seed: int = option(0, "Seed of everything random.", advanced=True)
