"""Tokens per second of draftlab's engine and of transformers' generate, plain and speculative, in one process.

Greedy, fp32, batch 1, same weights, prompts and K; arms take turns for every prompt. Times include the prefill, which
transformers does not report apart. transformers is configured as a fair peer: constant lookahead, no confidence stop.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from draftlab import checkpoint, llama, provenance
from draftlab.console import progress
from draftlab.data import prompts as read_prompts
from draftlab.engine.generate import ModelDrafter, Sampling, clock_for, plain, speculative
from draftlab.score.profile import device_name

Decode = Callable[[list[int]], list[int]]


def main(
    draft: Annotated[Path, typer.Option(help="Draft checkpoint.")],
    target: Annotated[str, typer.Option(help="Target checkpoint.")] = "tiny",
    k: Annotated[int, typer.Option(help="Drafted tokens per step.")] = 4,
    prompts: Annotated[int, typer.Option(help="Number of prompts.")] = 12,
    new_tokens: Annotated[int, typer.Option(help="Tokens after each prompt.")] = 96,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "cpu",
) -> None:
    torch.set_num_threads(threads)
    place = checkpoint.resolve_device(device)
    clock = clock_for(place)
    directories = checkpoint.locate(target), checkpoint.locate(draft)
    tokenizer = checkpoint.load_tokenizer(directories[0])
    texts = read_prompts("stdlib", tokenizer, count=prompts + 1, length=64, seed=0)
    arms = _our_arms(directories, k, new_tokens, place) | _their_arms(directories, k, new_tokens, place)
    seconds = dict.fromkeys(arms, 0.0)
    same = dict.fromkeys(arms, True)
    with progress("decode", prompts) as advance:
        for number, prompt in enumerate(texts):
            outputs: dict[str, list[int]] = {}
            for name, decode in arms.items() if number % 2 else reversed(arms.items()):
                began = clock()
                outputs[name] = decode(prompt)
                seconds[name] += (clock() - began) if number else 0.0  # the first prompt warms up
            same = {name: same[name] and outputs[name] == outputs["draftlab_plain"] for name in arms}
            advance(number, "")
    tps = {name: prompts * new_tokens / s for name, s in seconds.items()}
    print(json.dumps(_result(tps, same, k, prompts, new_tokens, threads) | {"device": device_name(place)}))


def _our_arms(directories: tuple[Path, Path], k: int, new_tokens: int, device: torch.device) -> dict[str, Decode]:
    target, draft = (llama.load(path, torch.float32, device) for path in directories)
    drafter, sampling = ModelDrafter(draft), Sampling(max_new_tokens=new_tokens)
    return {
        "draftlab_plain": lambda prompt: [t for step in plain(target, [prompt], sampling) for t in step.tokens],
        "draftlab_speculative": lambda prompt: [
            t for step in speculative(target, drafter, [prompt], k, sampling) for t in step.tokens
        ],
    }


def _their_arms(directories: tuple[Path, Path], k: int, new_tokens: int, device: torch.device) -> dict[str, Decode]:
    target, draft = (checkpoint.load_model(path, torch.float32, device).eval() for path in directories)
    assert draft.generation_config is not None
    # read from the assistant's own config; given to generate() they are ignored
    draft.generation_config.num_assistant_tokens = k
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return {
        "transformers_plain": lambda prompt: _generate(target, prompt, new_tokens),
        "transformers_assisted": lambda prompt: _generate(target, prompt, new_tokens, assistant_model=draft),
    }


@torch.inference_mode()
def _generate(model: Any, prompt: list[int], new_tokens: int, **options: Any) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    out: Any = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=None,
        max_new_tokens=new_tokens,
        eos_token_id=[],
        pad_token_id=0,
        **options,
    )
    return out[0, len(prompt) :].tolist()


def _result(
    tps: dict[str, float], same: dict[str, bool], k: int, prompts: int, new_tokens: int, threads: int
) -> dict[str, object]:
    return {
        "benchmark": "engine",
        "tokens_per_second": tps,
        "identical": same,
        "speculative_over_assisted": tps["draftlab_speculative"] / tps["transformers_assisted"],
        "plain_over_generate": tps["draftlab_plain"] / tps["transformers_plain"],
        "speedup": tps["draftlab_speculative"] / tps["draftlab_plain"],
        "assisted_speedup": tps["transformers_assisted"] / tps["transformers_plain"],
        "k": k,
        "prompts": prompts,
        "new_tokens": new_tokens,
        "threads": threads,
        "dtype": "float32",
        "versions": provenance.versions(),
    }


if __name__ == "__main__":
    typer.run(main)
