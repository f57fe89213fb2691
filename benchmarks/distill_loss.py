"""Memory and time of the fused losses against naive autograd on whole logits, same numbers, one process.

Memory is what a forward and backward pass add at most to the resident size before it (CUDA: to torch's allocated
bytes), less the gradients that both must return. Times are medians of runs that take turns.
"""

import ctypes
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from benchmarks import environment
from draftlab.distill.fused import BUDGET, Dense, TopK, fused_loss
from draftlab.distill.losses import log_probs, parse_loss

LOSSES = ("fkl", "rkl", "jsd(0.5)", "tvd", "nla", "lk(3)")
Run = Callable[[], None]


def main(
    tokens: Annotated[int, typer.Option(help="Tokens, N.")] = 2048,
    vocab: Annotated[int, typer.Option(help="Vocabulary, V.")] = 65536,
    hidden: Annotated[int, typer.Option(help="Draft's hidden size.")] = 512,
    teacher_hidden: Annotated[int, typer.Option(help="Target's hidden size.")] = 1024,
    top_k: Annotated[int, typer.Option(help="Listed tokens of the cached teacher.")] = 64,
    repeats: Annotated[int, typer.Option(help="Timed runs of each.")] = 3,
    budget: Annotated[int, typer.Option(help="Bytes of the fused loss's buffers.")] = BUDGET,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
) -> None:
    torch.set_num_threads(threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = {"N": tokens, "V": vocab, "D": hidden, "teacher_D": teacher_hidden}
    result: dict[str, dict[str, float]] = {"memory_ratio": {}, "time_ratio": {}, "fused_gib": {}, "naive_gib": {}}
    listed: dict[str, float] = {}
    for name in LOSSES:
        make = _Case(name, tokens, vocab, hidden, teacher_hidden, top_k, budget, device)
        returned = 4 * hidden * (tokens + vocab)  # gradients that all of them must hand back
        peaks = {k: _peak(run, device) - returned for k, run in make.runs.items()}
        listed[name] = peaks["listed"] / peaks["naive"]
        seconds = _times({"fused": make.fused, "naive": make.naive}, repeats, device)
        result["memory_ratio"][name] = peaks["fused"] / peaks["naive"]
        result["time_ratio"][name] = statistics.median(
            f / n for f, n in zip(seconds["fused"], seconds["naive"], strict=True)
        )
        result["fused_gib"][name], result["naive_gib"][name] = (peaks[k] / 2**30 for k in ("fused", "naive"))
    twice = _Case("fkl", 2 * tokens, vocab, hidden, teacher_hidden, top_k, budget, device)
    twice_peak = _peak(twice.fused, device) - 4 * hidden * (2 * tokens + vocab)
    growth = twice_peak / (result["fused_gib"]["fkl"] * 2**30)
    report = {
        "benchmark": "distill_loss",
        **result,
        "listed_memory_ratio": listed,
        "growth_at_twice_the_tokens": growth,
    }
    print(json.dumps(report | {"sizes": sizes, "device": str(device)} | environment(threads)))


class _Case:
    """One loss on one set of inputs; every run makes the gradients of hidden states and head."""

    def __init__(
        self, name: str, n: int, v: int, d: int, teacher_d: int, k: int, budget: int, device: torch.device
    ) -> None:
        rng = torch.Generator().manual_seed(0)

        def draw(*size: int) -> Tensor:
            return (torch.randn(*size, generator=rng) * size[-1] ** -0.5 * 2).to(device)

        self.loss, self.budget = parse_loss(name), budget
        self.hidden, self.head = draw(n, d).requires_grad_(), draw(v, d).requires_grad_()
        self.teacher = Dense(draw(n, teacher_d) * teacher_d**0.5, draw(v, teacher_d))
        self.labels, self.weights = torch.randint(0, v, (n,), generator=rng).to(device), torch.ones(n, device=device)
        ids = torch.stack([torch.randperm(v, generator=rng)[:k] for _ in range(n)]).to(device)
        log_p = torch.log_softmax(torch.randn(n, k + 1, generator=rng), -1).to(device)
        self.top_k = TopK(ids, log_p[:, :-1], log_p[:, -1])

    @property
    def runs(self) -> dict[str, Run]:
        return {"fused": self.fused, "listed": self.listed, "naive": self.naive}

    def fused(self) -> None:
        self._fused(self.teacher)

    def listed(self) -> None:
        self._fused(self.top_k)

    def naive(self) -> None:
        assert self.teacher.head is not None
        with torch.no_grad():
            log_p = log_probs(self.teacher.hidden @ self.teacher.head.T, 1.0)
        log_q = log_probs(self.hidden @ self.head.T, 1.0)
        torch.autograd.grad(self.loss.value(log_p, log_q).sum(), [self.hidden, self.head])

    def _fused(self, teacher: Dense | TopK) -> None:
        sums = fused_loss(self.hidden, self.head, self.labels, self.weights, teacher, self.loss, 1.0, self.budget)
        torch.autograd.grad(sums.objective, [self.hidden, self.head])


def _peak(run: Run, device: torch.device) -> float:
    """Bytes that run adds at most to what is held before it."""
    if device.type == "cuda":
        run()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    run()  # once, so that what libraries keep is there
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew (Linux)
    before = _resident("VmRSS")
    run()
    return _resident("VmHWM") - before


def _resident(which: str) -> int:
    line = next(li for li in Path("/proc/self/status").read_text().splitlines() if li.startswith(which))
    return int(line.split()[1]) * 1024


def _times(runs: dict[str, Run], repeats: int, device: torch.device) -> dict[str, list[float]]:
    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(repeats + 1):
        for name, run in runs.items():
            began = clock()
            run()
            seconds[name] += [clock() - began] if number else []
    return seconds


if __name__ == "__main__":
    typer.run(main)
