"""Compare suffix decoding with prompt lookup on stored answers: python -m benchmarks.suffix GREEDY --earlier STORE

With greedy decoding, a draft that depends only on the text is accepted up to the first token that differs from the
target's text. So stored greedy texts give the exact tokens per target pass, on any machine and without running a model.

own_text: Suffix decoding with the prompt and the answer so far. earlier_requests: with answers to earlier prompts as
well, in the order of the store. repeated: with the answers in --earlier as well, which the same target sampled for the
same prompts, as in repeated traffic. tokens_per_pass: [value, low, high], with 95 % intervals over prompts. draft_ms:
CPU milliseconds of a draft.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks import bounds, environment
from draftlab.engine.drafters.ngram import LatestLookupDrafter, TextDrafter
from draftlab.engine.drafters.suffix import Memory, SuffixDrafter
from draftlab.intervals import ratio
from draftlab.target_outputs.outputs import TargetOutput
from draftlab.target_outputs.store import read_store

RESULT = Path(__file__).parent / "results" / "suffix.json"
VLLM = (24, 1.0, 0.1)  # vLLM's defaults of suffix decoding: depth, factor, least probability


def main(
    greedy: Annotated[Path, typer.Argument(help="Store of greedy answers (outputs build).")],
    earlier: Annotated[Path, typer.Option(help="Store of sampled answers to the same prompts.")],
    k: Annotated[list[int], typer.Option(help="Drafted tokens per step.")] = [2, 5, 8],  # noqa: B006
) -> None:
    answers = read_store(greedy).outputs
    repeated = Memory(output.ids for output in read_store(earlier).outputs)
    found = {}
    for count in k:
        memory = (Memory(output.ids for output in answers[:i]) for i in range(len(answers)))
        arms = {
            "prompt_lookup": (LatestLookupDrafter(3) for _ in answers),
            "own_text": (SuffixDrafter(None, *VLLM) for _ in answers),
            "earlier_requests": (SuffixDrafter(each, *VLLM) for each in memory),
            "repeated": (SuffixDrafter(repeated, *VLLM) for _ in answers),
        }
        for name, drafters in arms.items():
            found.setdefault(name, {})[count] = arm(answers, drafters, count)
            typer.echo(f"{name} at K = {count}: {found[name][count]}", err=True)
    result = {"benchmark": "suffix", "prompts": len(answers), "arms": found} | environment(1)
    result["answer_tokens"] = sum(len(output.ids) for output in answers)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def arm(
    answers: list[TargetOutput], drafters: Iterator[TextDrafter], count: int
) -> dict[str, object]:
    started = time.process_time()
    steps = [
        decode(output, drafter, count) for output, drafter in zip(answers, drafters, strict=True)
    ]
    seconds = time.process_time() - started
    passes = [(emitted, n) for emitted, n, _ in steps]
    drafted, accepted = sum(d for *_, d in steps), sum(e - n for e, n, _ in steps)
    return {
        "tokens_per_pass": bounds(ratio(passes)),
        "acceptance_rate": accepted / drafted if drafted else 0.0,
        "drafted_per_pass": drafted / sum(n for _, n, _ in steps),
        "draft_ms": 1e3 * seconds / sum(n for _, n, _ in steps),
    }


def decode(output: TargetOutput, drafter: TextDrafter, count: int) -> tuple[int, int, int]:
    """Draft over a stored answer. Return the number of tokens after the first, of passes, and of drafted tokens."""
    answer = np.asarray(output.ids).tolist()
    text = [*np.asarray(output.prompt).tolist(), *answer[:1]]
    written, passes, drafted = 1, 0, 0
    while written < len(answer):
        draft = drafter.draft(text, count)
        following = answer[written : written + len(draft)]
        pairs = zip(draft, following, strict=False)
        agree = next((i for i, (a, b) in enumerate(pairs) if a != b), len(following))
        emitted = answer[written : written + agree + 1]
        text, written = text + emitted, written + len(emitted)
        passes, drafted = passes + 1, drafted + len(draft)
    return written - 1, passes, drafted


if __name__ == "__main__":
    typer.run(main)
