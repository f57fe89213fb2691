"""Compare two verify rules on the same sampled drafts: python -m benchmarks.verify_rules FOLDER PROMPTS

FOLDER is a folder in which draftlab init --preset smollm2 has run. PROMPTS is a JSON-lines file of prompts with
categories, on which the draft was not trained, such as that of studies/more-answers/prompts.py with --seed 10011. The
target answers the prompts at temperature 1 with the published draft. At every step, the script computes the expected
tokens of the step by the rejection rule and by block verification, given the drafted tokens and both distributions, for
every K. Nothing is timed. The last line is one JSON object: by K, tokens per target pass by each rule and the ratio of
block verification to rejection, as [value, low, high] over the prompts.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from benchmarks import bounds, environment
from benchmarks.published_draft import DRAFT
from benchmarks.smollm2 import TARGET
from draftlab.console import progress
from draftlab.data.text import chat_ids
from draftlab.engine.generate import ModelDrafter, speculative_decode
from draftlab.engine.verify import Chance, Tokens, Verdict, block
from draftlab.intervals import ratio
from draftlab.model import checkpoint, llama
from draftlab.model.native_cpu import NativeLlama
from draftlab.sampling import SamplingParams

K = 6


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of the target and the draft.")],
    prompts: Annotated[Path, typer.Argument(help="JSON-lines file of prompts with categories.")],
    per_category: Annotated[int, typer.Option(help="Number of prompts of each category.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 96,
) -> None:
    torch.set_num_threads(1)
    place = folder / TARGET
    target = NativeLlama(llama.load(place, torch.bfloat16))
    draft = NativeLlama(llama.load(folder / DRAFT, torch.bfloat16), int8=True)
    texts = first_of_categories(prompts, per_category, checkpoint.load_tokenizer(place))
    stops = checkpoint.eos_token_ids(place)
    tokens, steps = [], []
    with progress("verify_rules", len(texts)) as advance:
        for seed, text in enumerate(texts):
            sampling = SamplingParams(temperature=1, max_tokens=max_new_tokens, seed=seed, stop_token_ids=stops)
            rule = ExpectedTokens()
            drafter = ModelDrafter(draft, target.vocab)
            for _ in speculative_decode(target, drafter, [text], K, sampling, rule=rule):
                pass
            tokens.append(rule.tokens)
            steps.append(rule.steps)
            advance(seed + 1, f"{rule.steps} steps")
    rejection, joint = np.array(tokens).transpose(1, 2, 0)  # [K, prompts] each
    passes = np.array(steps)
    by_k = {
        k: {
            "rejection": interval(np.stack([rejection[k - 1], passes], 1)),
            "block": interval(np.stack([joint[k - 1], passes], 1)),
            "block_over_rejection": interval(np.stack([joint[k - 1], rejection[k - 1]], 1)),
        }
        for k in range(1, K + 1)
    }
    settings = {"prompts": len(texts), "max_tokens": max_new_tokens, "steps": int(passes.sum())}
    print(json.dumps({"benchmark": "verify_rules", "by_k": by_k, "settings": settings} | environment(1)))


def first_of_categories(prompts: Path, count: int, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of the first `count` prompts of each category in a file, as turns of a chat."""
    by_category: dict[str, list[str]] = defaultdict(list)
    for line in prompts.read_text().splitlines():
        row = json.loads(line)
        by_category[row["category"]].append(row["prompt"])
    return [
        chat_ids([{"role": "user", "content": prompt}], tokenizer, prompts.name)
        for category in sorted(by_category)
        for prompt in by_category[category][:count]
    ]


def interval(pairs: np.ndarray) -> list[float]:
    """Return the ratio of sums over prompts with its interval. pairs: Numerator and denominator by prompt, [N, 2]."""
    return bounds(ratio(pairs))


class ExpectedTokens:
    """Block verification that sums the expected tokens of its steps by both rules.

    Attributes:
        tokens: Sums by rule, rejection before block, and by K, [2, K].
        steps: Number of steps. Steps with fewer than K drafted tokens, at the end of a text, are not counted.
    """

    def __init__(self) -> None:
        self.tokens = np.zeros((2, K))
        self.steps = 0

    def __call__(self, p: Tensor, tokens: Tokens, chance: Chance) -> Verdict:
        if len(tokens.ids) == K:
            q = torch.stack([tokens.drawn_from(i, p) for i in range(K)])
            self.tokens += [
                expected_by_rejection(p, q, tokens.ids),
                expected_by_block(p, q, tokens.ids),
            ]
            self.steps += 1
        return block(p, tokens, chance)


def expected_by_rejection(p: Tensor, q: Tensor, ids: Sequence[int]) -> list[float]:
    """Return the expected tokens of a step for each K up to len(ids), by the rejection rule.

    p: Probabilities of the target, [K + 1, V]. q: Probabilities of the draft, [K, V]. ids: Drafted tokens.
    """
    expected, accepted, result = 1.0, 1.0, []
    for i, token in enumerate(ids):
        accepted *= min(1.0, float(p[i, token] / q[i, token]))
        expected += accepted
        result.append(expected)
    return result


def expected_by_block(p: Tensor, q: Tensor, ids: Sequence[int]) -> list[float]:
    """Do the same by block verification (Sun et al. 2403.10444, alg. 2)."""
    chances = []  # of accepting exactly the first tokens, if no longer prefix is accepted
    result, accept = [], 1.0
    for i, token in enumerate(ids):
        if i:
            residual = float((accept * p[i] - q[i]).clamp_min(0).sum())
            chances.append(residual / (residual + 1 - accept) if residual else 0.0)
        accept = min(1.0, accept * float(p[i, token] / q[i, token]))
        expected, rejected = 1 + (i + 1) * accept, 1 - accept
        for length in range(i, 0, -1):
            expected += length * rejected * chances[length - 1]
            rejected *= 1 - chances[length - 1]
        result.append(expected)
    return result


if __name__ == "__main__":
    typer.run(main)
