"""Time a pass by its width and by the number of texts in the batch: python -m benchmarks.passes MODEL

Verifying K drafted tokens pays if a pass over K + 1 tokens costs little more than a pass over one token. The ratios
show this cost. All passes take turns in one process. Times are CPU time of one thread. Rounds are grouped by five; a
time is the median over groups of the fastest round of each group.
"""

import json
from typing import Annotated

import torch
import typer

from benchmarks import environment
from draftlab.console import progress
from draftlab.engine.timing import Chain, Task, time_interleaved
from draftlab.latency.machine_state import steady_clock
from draftlab.model import checkpoint, hub, llama
from draftlab.model.llama import Llama
from draftlab.model.modes import with_mode

GROUP = 5  # number of rounds of which the fastest is taken
Pass = tuple[str, int, int]  # name of mode and dtype, rows, width


def main(
    model: Annotated[str, typer.Argument(help="Checkpoint or embedded model.")],
    widths: Annotated[
        str, typer.Option(help="Tokens in a pass over one text, separated by commas.")
    ] = "1,2,4,5,6,8,9,12,16",
    rows: Annotated[str, typer.Option(help="Texts in a pass over one token each, separated by commas.")] = "16,32,64",
    context: Annotated[int, typer.Option(help="Cached tokens of each text.")] = 128,
    rounds: Annotated[int, typer.Option(help="Number of times that each pass is run.")] = 25,
    float32: Annotated[bool, typer.Option(help="Also run float32, which needs the most memory.")] = True,
) -> None:
    torch.set_num_threads(1)
    directory = hub.locate(model)
    half = llama.load(directory, torch.bfloat16)
    arms = {
        "eager": half,
        "native": with_mode(half, "native"),
        "native_int8": with_mode(half, "native", int8=True),
    }
    if float32:
        arms["native_float32"] = with_mode(llama.load(directory, torch.float32), "native")
    narrow = [(1, int(width)) for width in widths.split(",")]
    batched = [(int(count), 1) for count in rows.split(",")]
    milliseconds = _measure(arms, narrow + batched, context, rounds)
    result = {
        "benchmark": "passes",
        "model": hub.checkpoint_name(directory),
        "context": context,
        "rounds": rounds,
        "milliseconds": {arm: {width: milliseconds[arm, 1, width] for _, width in narrow} for arm in arms},
        "over_width_1": {
            arm: {width: milliseconds[arm, 1, width] / milliseconds[arm, 1, 1] for _, width in narrow} for arm in arms
        },
        "int8_over_bfloat16": {
            width: milliseconds["native_int8", 1, width] / milliseconds["native", 1, width] for _, width in narrow
        },
        "tokens_per_second_of_rows": {
            arm: {count: 1e3 * count / milliseconds[arm, count, 1] for count, _ in batched} for arm in arms
        },
    }
    print(json.dumps(result | environment(1)))


def _measure(arms: dict[str, Llama], sizes: list[tuple[int, int]], context: int, rounds: int) -> dict[Pass, float]:
    tasks: list[Chain[Pass]] = []
    for name, arm in arms.items():
        for size in sizes:
            rewind, run = _pass(arm, *size, context)
            tasks.append([(None, rewind), ((name, *size), run)])
    with progress("passes", rounds) as advance:
        times = time_interleaved(
            tasks,
            repeats=rounds,
            clock=steady_clock(checkpoint.CPU),
            advance=lambda number: advance(number, ""),
        )
    return {key: _typical(each) for key, each in times.items()}


def _pass(model: Llama, rows: int, width: int, context: int) -> tuple[Task, Task]:
    cache = model.new_cache(rows, context + width)
    ids = torch.randint(3, model.shape.vocab, (rows, width), generator=torch.Generator().manual_seed(0))
    cache.keys.normal_()
    cache.values.normal_()

    def rewind() -> None:
        cache.used = [context] * rows

    return rewind, lambda: model.forward(ids, cache)


def _typical(times: list[float]) -> float:
    least = sorted(min(times[at : at + GROUP]) for at in range(0, len(times), GROUP))
    return least[len(least) // 2]


if __name__ == "__main__":
    typer.run(main)
