"""Time three ways to measure a draft's acceptance for K = 1 to 8 on stored texts of the target.

All ways have the same draft, engine (llama.py, greedy, fp32, one thread) and texts. They take turns on each part of
the texts. "replay" makes one teacher-forced pass over a text, and computes the acceptance of every K from it.
"sequential" drafts at each step of each K, with a cache that is rolled back. "paper" also drafts at each step, but
feeds the complete prefix each time. Times are CPU seconds of the process. The first part is a warm-up.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from benchmarks import environment
from draftlab.acceptance.expected import chain, chances, texts_of
from draftlab.acceptance.token_logprobs import score_tokens
from draftlab.console import progress
from draftlab.data import heldout_prompts
from draftlab.engine.batch_generate import Batching, generate_batch
from draftlab.engine.generate import ModelDrafter
from draftlab.model import checkpoint, hub, llama
from draftlab.model.llama import Llama
from draftlab.sampling import SamplingParams

KS = range(1, 9)
Texts = list[tuple[list[int], list[int]]]  # prompt and the target's answer, as token ids
# K -> for each text, the number of accepted tokens in each step
Accepted = dict[int, list[list[int]]]


def main(
    draft: Annotated[Path, typer.Option(help="Draft checkpoint.")],
    target: Annotated[str, typer.Option(help="Target checkpoint.")] = "tiny",
    prompts: Annotated[int, typer.Option(help="Number of prompts.")] = 40,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens after each prompt.")] = 128,
    part: Annotated[int, typer.Option(help="Prompts in one turn.")] = 8,
) -> None:
    torch.set_num_threads(1)
    place = hub.locate(target)
    texts = _written(place, prompts + part, prompt_tokens, new_tokens)
    model = llama.load(draft, torch.float32)
    arms: dict[str, Callable[[Texts], Accepted]] = {
        "replay": lambda given: _replay(model, given),
        "sequential": lambda given: _sequential(model, given, keep_cache=True),
        "paper": lambda given: _sequential(model, given, keep_cache=False),
    }
    seconds = dict.fromkeys(arms, 0.0)
    same = dict.fromkeys(arms, True)
    counted: Accepted = {k: [] for k in KS}
    with progress("measure", prompts) as advance:
        for turn, at in enumerate(range(0, len(texts), part)):
            found: dict[str, Accepted] = {}
            for name, arm in arms.items() if turn % 2 else reversed(arms.items()):
                began = time.process_time()
                found[name] = arm(texts[at : at + part])
                seconds[name] += (time.process_time() - began) if turn else 0.0
            same = {name: same[name] and found[name] == found["replay"] for name in arms}
            counted = {k: counted[k] + found["sequential"][k] for k in KS}
            advance(at, "texts")
    steps = {k: [a for text in counted[k] for a in text] for k in KS}
    result = {
        "benchmark": "replay",
        "speedup_over_sequential": seconds["sequential"] / seconds["replay"],
        "speedup_over_paper": seconds["paper"] / seconds["replay"],
        "identical": all(same.values()),
        "cpu_seconds": seconds,
        "acceptance_length": {k: 1 + sum(a) / len(a) for k, a in steps.items()},
        "steps": sum(map(len, steps.values())),
        "ks": list(KS),
        "prompts": prompts,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "draft": str(checkpoint.read_shape(draft).describe()),
        "dtype": "float32",
        **environment(1),
    }
    print(json.dumps(result))


def _written(target: Path, count: int, prompt_tokens: int, new_tokens: int) -> Texts:
    tokenizer = checkpoint.load_tokenizer(target)
    given = heldout_prompts("stdlib", tokenizer, count=count, length=prompt_tokens, seed=0)
    found = generate_batch(
        llama.load(target, torch.float32),
        given,
        SamplingParams(max_tokens=new_tokens),
        Batching(batch_size=16),
    )
    return [(prompt, one.ids.tolist()) for prompt, one in zip(given, found, strict=True)]


def _replay(model: Llama, texts: Texts) -> Accepted:
    pairs = [(np.array(prompt), np.array(text)) for prompt, text in texts]
    found = score_tokens(model, pairs, model.shape.vocab, SamplingParams())
    kept = texts_of([chances(one.logprobs, np.zeros(len(one.logprobs)))[1:] for one in found])
    accepted: Accepted = {}
    for k in KS:
        counts = chain(kept, k)
        counts.acceptance()
        accepted[k] = [
            (np.diff(np.append(np.flatnonzero(row), n)) - 1).tolist()
            for row, n in zip(counts.starts, kept.lengths, strict=True)
        ]
    return accepted


def _sequential(model: Llama, texts: Texts, keep_cache: bool) -> Accepted:
    return {k: [_drafted_again(model, prompt, text, k, keep_cache) for prompt, text in texts] for k in KS}


def _drafted_again(model: Llama, prompt: list[int], text: list[int], k: int, keep_cache: bool) -> list[int]:
    drafter, at, found = ModelDrafter(model), 1, []
    drafter.reset(1, len(prompt) + len(text) + k)
    while at < len(text):
        # as in the engine, one token less than is left, because the target adds one token
        count = min(k, len(text) - at - 1)
        if not keep_cache:
            drafter.cache.used = [0]
        accepted = 0
        if count:
            drafted = (
                drafter.propose([[*prompt, *text[:at]]], count, SamplingParams(), torch.zeros(1, count)).ids[0].tolist()
            )
            while accepted < count and drafted[accepted] == text[at + accepted]:
                accepted += 1
        found.append(accepted)
        at += accepted + 1
    return found


if __name__ == "__main__":
    typer.run(main)
