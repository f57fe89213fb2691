"""Compare predicted with measured speed-ups at every K, for drafts of tiny, in one process.

The drafts are pruned from tiny, and some are distilled. Each round profiles all models, and then decodes some prompts
with each draft and K. So profiles and decoding see the same state of the machine. Latency curves are averaged over
rounds. Acceptance comes from one teacher-forced pass of each draft over the texts of plain decoding. Times are CPU
seconds, which other work lengthens less than wall seconds.
"""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
import torch
import typer

from benchmarks import environment
from draftlab import intervals
from draftlab.acceptance.expected import chances, texts_of
from draftlab.acceptance.token_logprobs import score_tokens
from draftlab.commands import DISTILL, PRUNE
from draftlab.console import note
from draftlab.data import heldout_prompts
from draftlab.drafters.parallel import model_drafter
from draftlab.latency import predict as predicting
from draftlab.latency.cost_model import CostModel, Profile, expected_tokens
from draftlab.latency.machine_state import device_name
from draftlab.latency.profiler import Grid, LatencyCurves, measure
from draftlab.latency.steps import ComputedStepCosts, expected_time, step_costs, steps
from draftlab.latency.workload import Workload
from draftlab.model import checkpoint, hub, llama
from draftlab.model.llama import Llama
from draftlab.results.decoding import Generation, decode_timings
from draftlab.results.score import Latency
from draftlab.sampling import SamplingParams
from draftlab.scoring.throughput import PLAIN, Arm, measure_throughput

TARGET = "tiny"
# layers x width -> steps of distillation; 0 leaves the draft as pruned
DRAFTS = {"12x128": 60, "3x256": 60, "6x192": 60, "2x256": 0, "4x192": 0}
KS = (1, 2, 3, 4, 6)
PROMPT = 64
Timing = TypeVar("Timing", bound=Latency)


def main(
    folder: Annotated[Path, typer.Option(help="Folder for drafts. Drafts that exist are used.")] = Path(
        "runs/prediction"
    ),
    rounds: Annotated[int, typer.Option(help="Rounds of profiling and decoding.")] = 12,
    prompts: Annotated[int, typer.Option(help="Prompts per round.")] = 1,
    new_tokens: Annotated[int, typer.Option(help="Tokens after each prompt.")] = 96,
    repeats: Annotated[int, typer.Option(help="Measurements of each pass per round.")] = 3,
) -> None:
    torch.set_num_threads(1)
    target = llama.load(hub.locate(TARGET), torch.float32)
    drafts = {name: llama.load(_draft(name, folder), torch.float32) for name in DRAFTS}
    tokenizer = checkpoint.load_tokenizer(hub.locate(TARGET))
    texts = heldout_prompts("stdlib", tokenizer, count=rounds * prompts, length=PROMPT, seed=0)
    contexts = [PROMPT, PROMPT + new_tokens + max(KS)]
    widths = sorted({1, 2, *(k + 1 for k in KS)})
    grid = Grid(widths=widths, batches=[1], contexts=contexts, prompts=[PROMPT, PROMPT + 1], repeats=repeats)
    curves: list[dict[str, LatencyCurves]] = []
    runs: dict[Arm, list[Generation]] = {}
    wrote: list[list[int]] = []
    for number in range(rounds):
        curves.append(measure({TARGET: target, **drafts}, grid, clock=time.process_time))
        measured = measure_throughput(
            target,
            {name: (model_drafter(draft, target.vocab), list(KS)) for name, draft in drafts.items()},
            texts[number * prompts : (number + 1) * prompts],
            sampling=SamplingParams(max_tokens=new_tokens),
            repeats=1,
            advance=lambda done: None,
            clock=time.process_time,
        )
        wrote += [measured.tokens[PLAIN][prompt] for prompt in range(prompts)]
        for arm, found in measured.generations.items():
            placed = [g.model_copy(update={"prompt": number * prompts + g.prompt}) for g in found]
            runs.setdefault(arm, []).extend(placed)
        note(f"round {number + 1} of {rounds}")
    costs = {n: _cost(n, m, [each[n] for each in curves]) for n, m in {TARGET: target, **drafts}.items()}
    rows = [row for name in drafts for row in _rows(name, drafts[name], costs, texts, wrote, runs)]
    print(json.dumps(_result(rows, rounds * prompts, new_tokens, rounds, repeats) | environment(1)))


def _draft(name: str, folder: Path) -> Path:
    """Return the path of a draft. Prune and distil the draft if it is missing. name: Its shape, LAYERSxWIDTH."""
    layers, width = map(int, name.split("x"))
    pruned, distilled = folder / f"pruned-{name}", folder / f"distilled-{name}"
    if not pruned.exists():
        PRUNE(source=TARGET, layers=layers, width=width, data="stdlib", out=pruned)
    if DRAFTS[name] == 0:
        return pruned
    if not distilled.exists():
        DISTILL(
            draft=str(pruned),
            target=TARGET,
            data="stdlib",
            steps=DRAFTS[name],
            rows=8,
            optimizer="muon",
            lr=4e-3,
            out=distilled,
        )
    return distilled


def _cost(name: str, model: Llama, rounds: list[LatencyCurves]) -> CostModel:
    """Return the cost model of a model. Each latency is the mean over rounds of the round's median."""
    profile = Profile(
        kind="measured",
        name=name,
        sha256=None,
        shape=model.shape,
        device=device_name(model.device),
        mode="eager",
        dtype="float32",
        threads=1,
        bandwidth_gbs=1,
        matmul_tflops={},
        command="",
        versions={},
        created="",
        forward=_mean([r.forward for r in rounds]),
        steady=_mean([r.steady for r in rounds]),
        prefill=_mean([r.prefill for r in rounds]),
        host=_mean([r.host for r in rounds]),
    )
    return CostModel.of(profile)


def _mean(rounds: Sequence[Sequence[Timing]]) -> list[Timing]:
    return [
        each[0].model_copy(update={"median_ms": statistics.mean(one.median_ms for one in each)})
        for each in zip(*rounds, strict=True)
    ]


def _rows(
    name: str,
    draft: Llama,
    costs: dict[str, CostModel],
    texts: list[list[int]],
    wrote: list[list[int]],
    runs: dict[Arm, list[Generation]],
) -> list[dict[str, object]]:
    pairs = [(np.array(p), np.array(w)) for p, w in zip(texts, wrote, strict=True)]
    looked = score_tokens(draft, pairs, draft.shape.vocab, SamplingParams())
    # the first token is left out, because the prefill gives it
    accepted = [chances(one.logprobs, np.zeros(len(one.logprobs)))[1:] for one in looked]
    prompts = np.full(len(accepted), PROMPT)
    work = Workload(texts=texts_of(accepted), prompt_tokens=prompts)
    paid = step_costs(costs[name], costs[TARGET], work, max(KS), 1)
    found = predicting.predict(costs[name], costs[TARGET], work, KS)
    kept = float(np.concatenate(accepted).mean())
    return [_row(name, row, paid, work, kept, runs) for row in found.rows]


def _row(
    name: str,
    row: predicting.KPrediction,
    paid: ComputedStepCosts,
    work: Workload,
    kept: float,
    runs: dict[Arm, list[Generation]],
) -> dict[str, object]:
    """Return the measured and the predicted speed-up of a draft at one K, and the errors of simpler predictions.

    Each simpler prediction leaves out one term of the cost model.
    """
    measured = intervals.speedup(intervals.Timings([decode_timings(runs[name, row.k])], decode_timings(runs[PLAIN])))
    counted = sum(len(g.drafted) for g in runs[name, row.k])
    less = {
        "without_turns": _without_turns(paid),
        "without_catching_up": replace(paid, step_cost=lambda passes, k, _: passes.step(k, unread=1), tables={}),
        "without_host": replace(paid, host=0 * paid.host),
        "without_growth": _at_middle(paid, work),
    }
    independent = expected_tokens(kept, row.k) / row.tokens_per_pass.value
    return {
        "draft": name,
        "steps_distilled": DRAFTS[name],
        "k": row.k,
        "acceptance_length": row.tokens_per_pass.value,
        "steps_predicted_over_counted": float(steps(work, row.k).starts.sum() / counted),
        "measured": measured.value,
        "measured_interval": [measured.low, measured.high],
        "predicted": row.speedup.value,
        "error": row.speedup.value / measured.value - 1,
        "others": {
            "closed_form": row.closed_form_speedup / measured.value - 1,
            "closed_form_independent": row.closed_form_speedup * independent / measured.value - 1,
            **{what: _speedup(prices, work, row.k) / measured.value - 1 for what, prices in less.items()},
        },
    }


def _without_turns(paid: ComputedStepCosts) -> ComputedStepCosts:
    """Return costs in which the first pass of a step is as fast as a pass after many passes of the same model."""
    passes = paid.passes
    steady = replace(passes, warmup=0 * passes.warmup, by_width={1: passes.steady})
    return replace(paid, passes=steady, tables={})


def _at_middle(paid: ComputedStepCosts, work: Workload) -> ComputedStepCosts:
    """Return costs in which every pass takes as long as a pass halfway through the texts."""
    at, passes = int(work.texts.lengths.mean() / 2), paid.passes
    flat = replace(
        passes,
        steady=np.full_like(passes.steady, passes.steady[at]),
        warmup=np.repeat(passes.warmup[:, at : at + 1], passes.warmup.shape[1], axis=1),
        by_width={width: np.full_like(ms, ms[at]) for width, ms in passes.by_width.items()},
    )
    verify = np.repeat(paid.verify[:, at : at + 1], paid.verify.shape[1], axis=1)
    return replace(paid, passes=flat, verify=verify, tables={})


def _speedup(paid: ComputedStepCosts, work: Workload, k: int) -> float:
    plain, drafted = (float(expected_time(paid, work.prompt_tokens, steps(work, n)).total.sum()) for n in (0, k))
    return plain / drafted


def _result(
    rows: list[dict[str, object]], prompts: int, new_tokens: int, rounds: int, repeats: int
) -> dict[str, object]:
    def median(errors: list[float]) -> float:
        return statistics.median(map(abs, errors))

    errors = [float(str(row["error"])) for row in rows]
    others: list[dict[str, float]] = [row["others"] for row in rows]  # type: ignore[misc]
    return {
        "benchmark": "prediction",
        "median_abs_error": median(errors),
        "mean_error": statistics.mean(errors),
        "worst_abs_error": max(map(abs, errors)),
        "median_abs_error_of_simpler_models": {name: median([each[name] for each in others]) for name in others[0]},
        "rows": rows,
        "target": TARGET,
        "prompts": prompts,
        "prompt_tokens": PROMPT,
        "new_tokens": new_tokens,
        "rounds": rounds,
        "profile_repeats_per_round": repeats,
        "clock": "CPU seconds of the process",
        "dtype": "float32",
        "device": device_name(torch.device("cpu")),
    }


if __name__ == "__main__":
    typer.run(main)
