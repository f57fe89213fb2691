"""Time a target of LLaMA-65B's shape with the paper's five drafts in draftlab's engine. All weights are random.

Drafts with random weights never agree with the target. So a special verify rule accepts each drafted token with
probability alpha, which is the paper's model of acceptance. All passes, choices and rollbacks are those of sampled
decoding. If the target does not fit the device, it has only as many layers as fit ("layers"). A 65B target fits one
H200 in bfloat16. "beside_paper": the throughput of Wide-796M divided by that of earlier drafts on 4 x A100 in the paper
(2402.01528, third version), and divided by that of NoFT-1.3B here, at each alpha. "share_of_bandwidth": bytes per
second of plain decoding, divided by those of one large matrix-vector product.
"""

import json
from collections.abc import Iterator
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks import environment
from draftlab.console import note
from draftlab.engine.generate import Drafter, ModelDrafter, decode, speculative_decode
from draftlab.engine.timing import bandwidth_gbs
from draftlab.engine.verify import Rule, Tokens, Uniforms, Verdict
from draftlab.latency.cost_model import pass_bytes
from draftlab.latency.machine_state import device_name, steady_clock, steady_step_clock
from draftlab.latency.profiler import random_model
from draftlab.model import Mode, checkpoint, devices
from draftlab.model.cuda_graphs import BUCKET
from draftlab.model.families import locate_shape
from draftlab.model.llama import Llama
from draftlab.model.modes import with_mode
from draftlab.model.shape import Shape, parse_numbers
from draftlab.sampling import SamplingParams

DRAFTS = "noft-1.3b,wide-1.3b,wide-796m,wide-543m,wide-290m"
PAPER = {"wide_796m_over_earlier_drafts": 2.11, "on": "4 x A100-80GB"}
ROOM = 8e9  # bytes to leave free beside the target, for the largest draft, caches and graphs


def main(
    target: Annotated[str, typer.Option(help="Shape of the target.")] = "llama-65b",
    drafts: Annotated[str, typer.Option(help="Shapes of drafts, separated by commas.")] = DRAFTS,
    k: Annotated[str, typer.Option(help="Drafted tokens per step, such as 1,2,4.")] = "1,2,4,6,8",
    alphas: Annotated[
        str, typer.Option(help="Acceptance probabilities, separated by commas.")
    ] = "0.5,0.6,0.7,0.8,0.9",
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
    bench = Bench(place, mode, dtype, prompt, new_tokens, max(ks))  # type: ignore[arg-type]
    whole = shape_of(target)
    shape = as_fits(whole, devices.free_bytes(place) - room, bench.dtype.itemsize)
    note(
        f"{target}: {shape.layers} of {whole.layers} layers, {shape.weight_bytes(bench.dtype.itemsize) / 1e9:.1f} GB"
    )
    ceiling = bandwidth_gbs(shape.params(), bench.dtype, place)
    model, chances = bench.load(shape), [float(alpha) for alpha in alphas.split(",")]
    plain, rows = [bench.plain(model)], {}
    for name in drafts.split(","):
        draft = bench.load(shape_of(name))
        rows[name] = [*bench.rows(model, ModelDrafter(draft), ks, chances)]
        del draft
        plain.append(bench.plain(model))  # plain decoding is timed again with each draft
        fastest = best(rows[name], max(chances))
        note(
            f"{name}: {fastest['tokens_per_second']:.1f} tokens/s at alpha {max(chances):g}, {plain[-1]:.1f} without "
            "a draft"
        )
    alone = median(plain)
    leaders = {
        alpha: {name: best(found, alpha) for name, found in rows.items()} for alpha in chances
    }
    gains = {
        a: {n: row["tokens_per_second"] / alone for n, row in each.items()}
        for a, each in leaders.items()
    }
    result = {
        "benchmark": "large_target", "target": target, "layers": shape.layers, "of_layers": whole.layers,
        "dtype": dtype, "mode": mode, "device": device_name(place), "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens, "plain_tokens_per_second": alone, "plain_runs": plain, "bandwidth_gbs": ceiling,
        "share_of_bandwidth": pass_bytes(shape, dtype) * alone / 1e9 / ceiling, "speedup": gains,
        "beside_paper": {
            "paper": PAPER,
            "wide_796m_over_noft_1.3b": {a: over(each, "wide-796m", "noft-1.3b") for a, each in gains.items()},
        },
        "best_k": {alpha: {name: row["k"] for name, row in each.items()} for alpha, each in leaders.items()},
        "fastest": {a: max(each, key=lambda n: each[n]["tokens_per_second"]) for a, each in leaders.items()},
        "rows": rows,
    }  # fmt: skip
    print(json.dumps(result | environment(torch.get_num_threads())))


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
    ):
        """k: Largest number of tokens drafted per step."""
        self.device, self.dtype, self.prompt = device, checkpoint.DTYPES[dtype], prompt
        self.mode: Mode = mode
        self.sampling = SamplingParams(max_tokens=new_tokens, temperature=1.0)
        self.context = -(-(len(prompt) + new_tokens + k) // BUCKET) * BUCKET
        self.clock, self.step_clock = steady_clock(device), steady_step_clock(device)

    def load(self, shape: Shape) -> Llama:
        return with_mode(random_model(shape, self.dtype, self.device, self.context), self.mode)

    def plain(self, target: Llama) -> float:
        """Return the tokens per second of plain decoding, without the prefill."""
        # the first run only captures graphs
        self._timed(decode(target, [self.prompt], self.sampling, self.step_clock))
        return self._timed(decode(target, [self.prompt], self.sampling, self.step_clock))[0]

    def rows(
        self, target: Llama, drafter: Drafter, ks: list[int], alphas: list[float]
    ) -> Iterator[dict[str, float]]:
        for k in ks:
            # this run captures graphs of every width
            self._timed(self._steps(target, drafter, k, max(alphas)))
            for alpha in alphas:
                per_second, per_pass = self._timed(self._steps(target, drafter, k, alpha))
                yield {
                    "k": k,
                    "alpha": alpha,
                    "tokens_per_second": per_second,
                    "tokens_per_pass": per_pass,
                }

    def _steps(self, target: Llama, drafter: Drafter, k: int, alpha: float) -> Iterator[Any]:
        return speculative_decode(
            target, drafter, [self.prompt], k, self.sampling, self.step_clock, rule=by_coin(alpha),
            draft_temperature=0.0,
        )  # fmt: skip

    def _timed(self, steps: Iterator[Any]) -> tuple[float, float]:
        next(steps)  # the prefill
        start = self.clock()
        made = [len(step.tokens) for step in steps]
        return sum(made) / (self.clock() - start), sum(made) / len(made)


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
    return shape.model_copy(
        update={"layers": max(1, min(shape.layers, int((free - beside) / layer)))}
    )


def best(rows: list[dict[str, float]], alpha: float) -> dict[str, float]:
    return max(
        (row for row in rows if row["alpha"] == alpha), key=lambda row: row["tokens_per_second"]
    )


def over(speedup: dict[str, float], one: str, other: str) -> float | None:
    """Return the ratio of two drafts' speed-ups, or None if a draft was not measured."""
    return speedup[one] / speedup[other] if {one, other} <= speedup.keys() else None


if __name__ == "__main__":
    typer.run(main)
