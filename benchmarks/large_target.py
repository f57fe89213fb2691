"""Time a target of LLaMA-65B's shape with the paper's five drafts in draftlab's engine. All weights are random.

Drafts with random weights never agree with the target. So a special verify rule accepts each drafted token with a fixed
probability, --coin, which is the paper's model of acceptance. All passes, choices and rollbacks are those of sampled
decoding. A step takes the same time whatever is accepted, so its median time gives the throughput at every acceptance
probability alpha: (1 - alpha^(K + 1)) / (1 - alpha) tokens per step. "live_tokens_per_second" is what the runs with
the coin gave. Passes of plain decoding are timed before the drafts and after each draft. Intervals are the quartiles
of steps and of passes, low over high and high over low for a speed-up.
If the target does not fit the device, it has only as many layers as fit ("layers"). A 65B target fits one H200 in
bfloat16. "beside_paper": the throughput of Wide-796M divided by that of earlier drafts on 4 x A100 in the paper
(2402.01528, third version), and divided by that of NoFT-1.3B here, at each alpha. "share_of_bandwidth": bytes per
second of plain decoding, divided by those of one large matrix-vector product.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks import environment
from draftlab.console import note
from draftlab.engine.generate import Drafter, ModelDrafter, Step, decode, speculative_decode
from draftlab.engine.timing import bandwidth_gbs
from draftlab.engine.verify import Rule, Tokens, Uniforms, Verdict
from draftlab.latency.cost_model import expected_tokens, pass_bytes
from draftlab.latency.machine_state import device_name, steady_clock, steady_step_clock
from draftlab.latency.profiler import random_model
from draftlab.model import Mode, devices
from draftlab.model.cuda_graphs import BUCKET
from draftlab.model.families import locate_shape
from draftlab.model.llama import Llama
from draftlab.model.modes import with_mode
from draftlab.model.shape import Shape, parse_numbers
from draftlab.sampling import SamplingParams

DRAFTS = "noft-1.3b,wide-1.3b,wide-796m,wide-543m,wide-290m"
PAPER = {"wide_796m_over_earlier_drafts": 2.11, "on": "4 x A100-80GB"}
ROOM = 8e9  # bytes to leave free beside the target, for the largest draft, caches and graphs
RUNS = 2  # timed runs of each K and of plain decoding, after a warm-up
Quartiles = tuple[float, float, float]


def main(
    target: Annotated[str, typer.Option(help="Shape of the target.")] = "llama-65b",
    drafts: Annotated[str, typer.Option(help="Shapes of drafts, separated by commas.")] = DRAFTS,
    k: Annotated[str, typer.Option(help="Drafted tokens per step, such as 1,2,4.")] = "1,2,4,6,8",
    alphas: Annotated[str, typer.Option(help="Acceptance probabilities, separated by commas.")] = "0.5,0.6,0.7,0.8,0.9",
    coin: Annotated[float, typer.Option(help="Acceptance probability of the timed runs.")] = 0.8,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 128,
    new_tokens: Annotated[int, typer.Option(help="Tokens after the prompt.")] = 64,
    mode: Annotated[str, typer.Option(help="eager, native or graphs.")] = "graphs",
    dtype: Annotated[str, typer.Option(help="Type of the weights.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda",
    room: Annotated[float, typer.Option(help="Bytes to leave free beside the target.")] = ROOM,
) -> None:
    place, ks = torch.device(device), parse_numbers(k)
    torch.manual_seed(0)
    prompt = [(7 * i) % 1000 + 3 for i in range(prompt_tokens)]
    bench = Bench(place, mode, dtype, prompt, new_tokens, max(ks), coin)  # type: ignore[arg-type]
    whole = shape_of(target)
    shape = as_fits(whole, devices.free_bytes(place) - room, bench.dtype.itemsize)
    note(f"{target}: {shape.layers} of {whole.layers} layers, {shape.weight_bytes(bench.dtype.itemsize) / 1e9:.1f} GB")
    ceiling = bandwidth_gbs(shape.params(), bench.dtype, place)
    model = bench.load(shape)
    passes, steps = bench.plain(model), {}
    for name in drafts.split(","):
        draft = bench.load(shape_of(name))
        steps[name] = [bench.steps(model, ModelDrafter(draft), count) for count in ks]
        del draft
        passes += bench.plain(model)  # plain decoding is timed again with each draft
        note(f"{name}: {', '.join(f'K={row.k} {median(row.ms):.1f} ms' for row in steps[name])}")
    alone = quartiles(passes)
    speedup = {
        alpha: {name: best(rows, float(alpha), alone) for name, rows in steps.items()} for alpha in alphas.split(",")
    }
    gains = {a: {n: row["speedup"] for n, row in each.items()} for a, each in speedup.items()}
    result = {
        "benchmark": "large_target",
        "target": target,
        "layers": shape.layers,
        "of_layers": whole.layers,
        "dtype": dtype,
        "mode": mode,
        "device": device_name(place),
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "coin": coin,
        "plain_ms": alone[1],
        "plain_low_ms": alone[0],
        "plain_high_ms": alone[2],
        "plain_passes": len(passes),
        "bandwidth_gbs": ceiling,
        "share_of_bandwidth": pass_bytes(shape, dtype) / 1e6 / alone[1] / ceiling,
        "speedup": speedup,
        "beside_paper": {
            "paper": PAPER,
            "wide_796m_over_noft_1.3b": {a: over(each, "wide-796m", "noft-1.3b") for a, each in gains.items()},
        },
        "fastest": {a: max(each, key=lambda n: each[n]) for a, each in gains.items()},
        "rows": {name: [row.facts() for row in rows] for name, rows in steps.items()},
    }
    print(json.dumps(result | environment(torch.get_num_threads())))


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Timed steps that draft k tokens. ms: Milliseconds of each step, with all that the host does."""

    k: int
    ms: list[float]
    steps: list[Step]

    def facts(self) -> dict[str, float]:
        low, middle, high = quartiles(self.ms)
        tokens = sum(len(step.tokens) for step in self.steps)
        return {
            "k": self.k,
            "step_ms": middle,
            "low_ms": low,
            "high_ms": high,
            "steps": len(self.ms),
            "draft_ms": 1e3 * median(step.draft_seconds for step in self.steps),
            "verify_ms": 1e3 * median(step.verify_seconds for step in self.steps),
            "live_tokens_per_pass": tokens / len(self.steps),
            "live_tokens_per_second": 1e3 * tokens / sum(self.ms),
        }


class Bench:
    """Times the decoding of one prompt with and without a draft."""

    def __init__(
        self,
        device: torch.device,
        mode: Mode,
        dtype: str,
        prompt: list[int],
        new_tokens: int,
        k: int,
        coin: float,
    ):
        """k: Largest number of tokens drafted per step."""
        self.device, self.dtype, self.prompt, self.coin = (
            device,
            devices.DTYPES[dtype],
            prompt,
            coin,
        )
        self.mode: Mode = mode
        self.sampling = SamplingParams(max_tokens=new_tokens, temperature=1.0)
        self.context = -(-(len(prompt) + new_tokens + k) // BUCKET) * BUCKET
        self.clock, self.step_clock = steady_clock(device), steady_step_clock(device)

    def load(self, shape: Shape) -> Llama:
        return with_mode(random_model(shape, self.dtype, self.device, self.context), self.mode)

    def plain(self, target: Llama) -> list[float]:
        """Return the milliseconds of each pass of plain decoding, without the prefill."""
        return self._timed(lambda: decode(target, [self.prompt], self.sampling, self.step_clock))[0]

    def steps(self, target: Llama, drafter: Drafter, k: int) -> StepTimes:
        run = self._timed(
            lambda: speculative_decode(
                target,
                drafter,
                [self.prompt],
                k,
                self.sampling,
                self.step_clock,
                rule=by_coin(self.coin),
                draft_sampling=replace(self.sampling, temperature=0.0),
            )
        )
        return StepTimes(k, *run)

    def _timed(self, run: Callable[[], Iterator[Step]]) -> tuple[list[float], list[Step]]:
        """Return the milliseconds of each step of RUNS runs after a warm-up, and the steps.

        Prefills are left out, and so is the last step of a run, which may draft fewer tokens.
        """
        times: list[float] = []
        taken: list[Step] = []
        for number in range(1 + RUNS):
            steps, found = run(), []
            next(steps)  # the prefill
            before = self.clock()
            for step in steps:
                now = self.clock()
                found.append((1e3 * (now - before), step))
                before = now
            if number:  # the first run captures graphs
                times += [each for each, _ in found[:-1]]
                taken += [step for _, step in found[:-1]]
        return times, taken


def by_coin(alpha: float) -> Rule:
    """Return a verify rule that accepts each drafted token with probability alpha, up to the first rejection."""

    def rule(p: Tensor, tokens: Tokens, chance: Any) -> Verdict:
        assert isinstance(chance, Uniforms)
        # all draws in one transfer from the device
        draws = torch.stack([*chance.draws])[: len(tokens.ids)].tolist() if tokens.ids else []
        accepted = next((i for i, draw in enumerate(draws) if draw >= alpha), len(draws))
        return list(range(accepted)), p[accepted]

    return rule


def shape_of(name: str) -> Shape:
    shape = locate_shape(name)[1]
    assert isinstance(shape, Shape)  # the names are those of files in configs/widths
    return shape


def as_fits(shape: Shape, free: float, itemsize: int) -> Shape:
    """Return the shape with as many of its layers as fit into the free bytes, but at least one."""
    layer = shape.body_params() / shape.layers * itemsize
    beside = (shape.params() - shape.body_params()) * itemsize
    return shape.model_copy(update={"layers": max(1, min(shape.layers, int((free - beside) / layer)))})


def quartiles(times: list[float]) -> Quartiles:
    low, middle, high = quantiles(times, n=4)
    return low, middle, high


def best(rows: list[StepTimes], alpha: float, alone: Quartiles) -> dict[str, float]:
    """Return the speed-up over plain decoding at the K that is fastest at this acceptance."""
    fastest = max(rows, key=lambda row: expected_tokens(alpha, row.k) / median(row.ms))
    gain, (low, middle, high) = expected_tokens(alpha, fastest.k), quartiles(fastest.ms)
    return {
        "speedup": gain * alone[1] / middle,
        "low": gain * alone[0] / high,
        "high": gain * alone[2] / low,
        "k": fastest.k,
    }


def over(speedup: dict[str, float], one: str, other: str) -> float | None:
    """Return the ratio of two drafts' speed-ups, or None if a draft was not measured."""
    return speedup[one] / speedup[other] if {one, other} <= speedup.keys() else None


if __name__ == "__main__":
    typer.run(main)
