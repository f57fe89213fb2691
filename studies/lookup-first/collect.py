"""Compare the lengths of a match from which fallback copies: python -m benchmarks.lookup_first FOLDER PROMPTS

FOLDER is the folder in which recipes/smollm2-published.yaml ran. PROMPTS is a JSON-lines file with categories on which
no draft was trained, such as that of benchmarks.smollm2_prompts with --seed 10011. The target answers the prompts
greedily with prompt lookup before each draft: the untrained cut, and the drafts after one and after ten stores of
answers. Tokens and passes are counted, and nothing is timed. The last line is one JSON object: by draft and min_match,
tokens per target pass as [value, low, high] over the prompts, and drafted tokens of the draft model per target pass.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from benchmarks import environment
from benchmarks.smollm2_studies import interval
from draftlab.console import progress
from draftlab.data.text import chat_ids
from draftlab.engine.drafters.fallback import FallbackDrafter
from draftlab.engine.drafters.ngram import LatestLookupDrafter
from draftlab.engine.generate import Draft, ModelDrafter, speculative_decode
from draftlab.model import checkpoint, llama
from draftlab.model.native_cpu import NativeLlama
from draftlab.sampling import SamplingParams

DRAFTS = ("pruned/6x256", "distilled/1", "distilled/10")
LENGTHS = ("1x1x1", "2x1x2", "2x1x3")
K, DRAFT_TOKENS, LONGEST = 5, 3, 8


class CountingDrafter(ModelDrafter):
    """A ModelDrafter that counts the tokens that it drafts."""

    tokens = 0

    def propose(
        self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor
    ) -> Draft:
        self.tokens += count
        return super().propose(texts, count, sampling, uniform)


def main(
    folder: Annotated[Path, typer.Argument(help="Folder in which the recipe ran.")],
    prompts: Annotated[Path, typer.Argument(help="JSON-lines file of prompts with categories.")],
    per_category: Annotated[int, typer.Option(help="Number of prompts of each category.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 96,
) -> None:
    torch.set_num_threads(1)
    place = folder / "models/smollm2-135m-instruct"
    target = NativeLlama(llama.load(place, torch.bfloat16), int8=True)
    tokenizer = checkpoint.load_tokenizer(place)
    texts = first_of_categories(prompts, per_category, tokenizer)
    sampling = SamplingParams(
        max_tokens=max_new_tokens, stop_token_ids=checkpoint.eos_token_ids(place)
    )
    found: dict[str, dict[str, Any]] = {}
    with progress("lookup_first", len(DRAFTS) * len(LENGTHS)) as advance:
        for name in DRAFTS:
            draft = NativeLlama(llama.load(folder / "runs" / name, torch.bfloat16), int8=True)
            found[name] = {}
            for number, lengths in enumerate(LENGTHS, 1):
                found[name][lengths] = counted(target, draft, lengths, texts, sampling)
                advance(len(LENGTHS) * (len(found) - 1) + number, f"{name} {lengths}")
    settings = {"k": K, "draft_tokens": DRAFT_TOKENS, "prompts": len(texts)}
    print(
        json.dumps(
            {"benchmark": "lookup_first", "drafts": found, "settings": settings} | environment(1)
        )
    )


def first_of_categories(
    prompts: Path, count: int, tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
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


def counted(
    target: NativeLlama,
    draft: NativeLlama,
    lengths: str,
    texts: list[list[int]],
    sampling: SamplingParams,
) -> dict[str, Any]:
    model = CountingDrafter(draft, target.vocab)
    lookup = LatestLookupDrafter(LONGEST, [int(length) for length in lengths.split("x")])
    drafter = FallbackDrafter(lookup, model, target.vocab, DRAFT_TOKENS)
    pairs = []
    for text in texts:
        steps = list(speculative_decode(target, drafter, [text], K, sampling))
        pairs.append((sum(len(step.tokens) for step in steps), len(steps)))
    passes = sum(count for _, count in pairs)
    return {"tokens_per_pass": interval(np.array(pairs)), "drafted_per_pass": model.tokens / passes}


if __name__ == "__main__":
    typer.run(main)
