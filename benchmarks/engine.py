"""Time draftlab's engine, eager and native, against plain and assisted generation of transformers, in tokens/s.

All decode greedily at batch size 1 in one process, with the same weights, prompts and K, and take turns for every
prompt. Times are CPU seconds of one thread. They include the prefill, which transformers does not report separately.
For a fair comparison, transformers always drafts K tokens, without its stop at low confidence. The floor of a step is
the time of one matrix-vector product that reads the same number of weights.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.nn import functional as F
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from benchmarks import environment
from draftlab.console import progress
from draftlab.data import heldout_prompts
from draftlab.engine.generate import ModelDrafter, speculative_decode
from draftlab.engine.timing import time_interleaved
from draftlab.latency.cost_model import active_params
from draftlab.latency.machine_state import device_name, steady_clock
from draftlab.model import checkpoint, devices, hub, llama
from draftlab.model.llama import Llama
from draftlab.model.modes import with_mode
from draftlab.sampling import SamplingParams

COLUMNS = 4096  # columns of the matrix that is read for the floor
Spoken = tuple[list[int], list[int]]  # generated tokens, and number of accepted tokens in each step
Decode = Callable[[list[int]], Spoken]


@dataclass(slots=True)
class Arm:
    """One way to decode, and its results."""

    decode: Decode
    seconds: float = 0.0
    tokens: list[list[int]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


def main(
    draft: Annotated[Path, typer.Option(help="Draft checkpoint.")],
    target: Annotated[str, typer.Option(help="Target checkpoint.")] = "tiny",
    k: Annotated[int, typer.Option(help="Drafted tokens per step.")] = 4,
    prompts: Annotated[int, typer.Option(help="Number of prompts.")] = 12,
    new_tokens: Annotated[int, typer.Option(help="Tokens after each prompt.")] = 96,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda. On cuda, graphs is timed instead of native.")] = "cpu",
) -> None:
    torch.set_num_threads(threads)
    place = devices.resolve_device(device)
    directories = hub.locate(target), hub.locate(draft)
    texts = heldout_prompts("stdlib", checkpoint.load_tokenizer(directories[0]), count=prompts + 1, length=64, seed=0)
    found = {name: _measure(directories, name, texts, k, new_tokens, place) for name in ("float32", "bfloat16")}
    each = {key: {dtype: figures[key] for dtype, figures in found.items()} for key in found["float32"]}
    print(
        json.dumps(
            {"benchmark": "engine", **each, "k": k, "prompts": prompts, "new_tokens": new_tokens}
            | {"device": device_name(place)}
            | environment(threads)
        )
    )


def _measure(
    directories: tuple[Path, Path],
    dtype: str,
    texts: list[list[int]],
    k: int,
    new_tokens: int,
    device: torch.device,
) -> dict[str, object]:
    target, draft = (llama.load(path, getattr(torch, dtype), device) for path in directories)
    mode, clock = ("native" if device.type == "cpu" else "graphs"), steady_clock(device)
    fast = with_mode(target, mode)
    arms = {
        "draftlab_plain": _ours(target, None, k, new_tokens),
        "draftlab_speculative": _ours(target, draft, k, new_tokens),
        "fast_plain": _ours(fast, None, k, new_tokens),
        "fast_speculative": _ours(fast, with_mode(draft, mode), k, new_tokens),
        **_theirs(directories, getattr(torch, dtype), k, new_tokens, device),
    }
    if mode == "native":
        arms["int8_draft"] = _ours(fast, with_mode(draft, mode, int8=True), k, new_tokens)
    with progress(dtype, len(texts)) as advance:
        for number, prompt in enumerate(texts):
            for arm in list(arms.values())[:: 1 if number % 2 else -1]:
                began = clock()
                tokens, accepted = arm.decode(prompt)
                if number:  # the first prompt is a warm-up
                    arm.seconds += clock() - began
                    arm.tokens.append(tokens)
                    arm.accepted += accepted
            advance(number, "")
    per_second = {name: sum(map(len, arm.tokens)) / arm.seconds for name, arm in arms.items()}
    accepted = {name: sum(arm.accepted) / len(arm.accepted) for name, arm in arms.items() if arm.accepted}
    ours, theirs = accepted["fast_speculative"], accepted["transformers_assisted"]
    return {
        "mode": mode,  # mode of "fast_plain" and "fast_speculative"
        "tokens_per_second": per_second,
        "over_hf_assisted": per_second["fast_speculative"] / per_second["transformers_assisted"],
        "eager_over_hf_assisted": per_second["draftlab_speculative"] / per_second["transformers_assisted"],
        "plain_over_hf_generate": per_second["fast_plain"] / per_second["transformers_plain"],
        "speedup": per_second["fast_speculative"] / per_second["fast_plain"],
        "hf_speedup": per_second["transformers_assisted"] / per_second["transformers_plain"],
        "accepted_per_step": accepted,
        "acceptance_equal": abs(ours - theirs) <= 0.05 * theirs,
        "same_texts": {name: _same(arm, arms["fast_plain"]) for name, arm in arms.items()},
        "step_over_bandwidth_floor": _over_floor(fast, len(texts[0]) + new_tokens // 2),
    }


def _ours(target: Llama, draft: Llama | None, k: int, new_tokens: int) -> Arm:
    drafter, sampling = (
        ModelDrafter(draft) if draft else None,
        SamplingParams(max_tokens=new_tokens),
    )

    def decode(prompt: list[int]) -> Spoken:
        steps = list(speculative_decode(target, drafter, [prompt], k if drafter else 0, sampling))
        return [t for step in steps for t in step.tokens], [step.accepted for step in steps if step.drafted]

    return Arm(decode)


def _theirs(
    directories: tuple[Path, Path],
    dtype: torch.dtype,
    k: int,
    new_tokens: int,
    device: torch.device,
) -> dict[str, Arm]:
    target, draft = (checkpoint.load_model(path, dtype, device).eval() for path in directories)
    assert draft.generation_config is not None
    # transformers reads these settings from the assistant's config, and ignores them as arguments of generate()
    draft.generation_config.num_assistant_tokens = k
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return {
        "transformers_plain": Arm(lambda prompt: _generate(target, prompt, new_tokens)),
        "transformers_assisted": Arm(lambda prompt: _generate(target, prompt, new_tokens, assistant_model=draft)),
    }


@torch.inference_mode()
def _generate(model: Any, prompt: list[int], new_tokens: int, **options: Any) -> Spoken:
    ids = torch.tensor([prompt], device=model.device)
    matches: list[int] = []
    with _Matches(matches):
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
    return out[0, len(prompt) :].tolist(), matches


class _Matches:
    """A context in which assisted generation of transformers records the number of accepted tokens in each step."""

    def __init__(self, into: list[int]) -> None:
        self.into, self.real = into, AssistedCandidateGenerator.update_candidate_strategy

    def __enter__(self) -> None:
        into, real = self.into, self.real

        def noted(self: Any, input_ids: Any, scores: Any, num_matches: Any) -> Any:
            into.append(int(num_matches))
            return real(self, input_ids, scores, num_matches)

        AssistedCandidateGenerator.update_candidate_strategy = noted

    def __exit__(self, *_: object) -> None:
        AssistedCandidateGenerator.update_candidate_strategy = self.real


def _same(arm: Arm, other: Arm) -> float:
    """Return the fraction of texts on which two ways to decode agree in every token."""
    return sum(a == b for a, b in zip(arm.tokens, other.tokens, strict=True)) / len(other.tokens)


def _over_floor(model: Llama, context: int, rounds: int = 200) -> float:
    """Return the median time of a one-token step divided by the time to read its weights. Both take turns."""
    size = int(active_params(model.shape))
    matrix, vector = (
        model.embed.new_ones(size // COLUMNS, COLUMNS),
        model.embed.new_ones(1, COLUMNS),
    )
    cache, ids = (
        model.new_cache(1, context + 1),
        torch.ones(1, 1, dtype=torch.long, device=model.device),
    )

    def step() -> None:
        cache.used = [context]
        model.forward(ids, cache)

    tasks = [[("step", step)], [("floor", lambda: F.linear(vector, matrix))]]
    times = time_interleaved(tasks, repeats=rounds, clock=steady_clock(model.device))
    middle = {name: sorted(each)[rounds // 2] for name, each in times.items()}
    return middle["step"] / middle["floor"]


if __name__ == "__main__":
    typer.run(main)
