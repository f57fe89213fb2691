"""Texts of the target, and durations of passes. From these, drafters choose a tree, layers or a policy."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from draftlab.acceptance.token_logprobs import Text
from draftlab.drafters.context import DrafterContext
from draftlab.engine.generate import decode, output_tokens
from draftlab.latency.profiler import Grid, measure_passes
from draftlab.model.llama import Llama
from draftlab.target_outputs.store import heldout_part, read_store

STORED_TEXTS = 32  # largest number of texts that are read from a store of target outputs
# number of prompts from the train split, tokens per prompt, and largest number of tokens that the target adds
CALIBRATION = (6, 64, 96)
PASSES = 15  # number of timed passes of each model at each width


def calibration_texts(context: DrafterContext, outputs: str) -> list[Text]:
    """Return prompts with the target's completions.

    outputs: Directory of stored target outputs, of which at most STORED_TEXTS texts of two or more tokens are read, at
    equal intervals. If the store has a held-out part, the texts come from this part, because drafts are not trained on
    it. If empty, the target completes prompts from the run's data with the run's sampling parameters.
    """
    if outputs:
        store = read_store(heldout_part(Path(outputs)) or Path(outputs))
        texts = [(o.prompt.astype(np.int64), o.ids) for o in store.outputs if len(o.ids) > 1]
        return texts[:: max(1, len(texts) // STORED_TEXTS)][:STORED_TEXTS]
    count, length, max_tokens = CALIBRATION
    stream = context.corpus(context.data, 64 * count * length).astype(np.int64)
    prompts = [stream[at : at + length].tolist() for at in range(0, 64 * count * length, 64 * length)][:count]
    sampling = replace(context.sampling, max_tokens=max_tokens, seed=1)
    completions = output_tokens(decode(context.target, prompts, sampling))
    return [(np.array(p), np.array(c)) for p, c in zip(prompts, completions, strict=True)]


def pass_ms(context: DrafterContext, models: dict[str, Llama], widths: Sequence[int]) -> dict[str, list[float]]:
    """Return the median milliseconds of a pass of each model at each width (tokens fed), after 96 cached tokens."""
    grid = Grid(widths=widths, batches=[1], contexts=[96], prompts=[], repeats=PASSES, after=())
    curves = measure_passes(models, grid, clock=context.clock)
    return {name: [point.median_ms for point in curve.forward] for name, curve in curves.items()}
