"""Measure memory and time of the fused losses against naive losses on complete logits, and against TRL and Liger.

A naive loss is the textbook formula on fp32 logits, in as few tensor operations as torch allows, with autograd. Memory
is the largest increase of the process's resident size during a forward and a backward pass, minus the gradients that
every implementation returns. On CUDA it is the increase of torch's allocated bytes. Times are medians of runs in
alternating order, in CPU seconds and wall seconds. On CUDA only wall seconds are reported (`wall_ratio`). Every loss
runs in a separate process, so that its memory is returned to the system. TRL and Liger are measured on the same
tensors, if they are installed.
"""

import ctypes
import gc
import importlib.util
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.nn import functional

from benchmarks import environment
from draftlab.console import note
from draftlab.latency.machine_state import device_name
from draftlab.training.fused_loss import Dense, TopK, fused_loss
from draftlab.training.losses import parse_loss

LOSSES = ("fkl", "rkl", "jsd(0.5)", "tvd", "nla", "lk(3)")
BETAS = {"fkl": 0.0, "rkl": 1.0, "jsd(0.5)": 0.5}  # name in draftlab -> beta in TRL and Liger
DTYPES = ("float32", "bfloat16")  # bfloat16: autocast with fp32 weights, and a teacher in bf16
PEERS = {"trl": "trl", "trl_gkd": "trl", "liger": "liger_kernel"}  # implementation -> package
Arm = Callable[[], Tensor]  # an implementation of a loss, which returns the mean loss per token


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One loss on one set of inputs. top_k: Number of tokens that the teacher lists; 0 stands for all tokens."""

    loss: str
    dtype: str
    top_k: int
    tokens: int
    vocab: int
    hidden: int
    teacher_hidden: int
    budget: int | None
    repeats: int
    threads: int


@dataclass(frozen=True, slots=True)
class Found:
    """Medians of the runs of one implementation. cpu_seconds: None on CUDA, where CPU time is meaningless."""

    cpu_seconds: float | None
    wall_seconds: float
    gib: float
    loss: float

    def over(self, other: "Found") -> dict[str, float]:
        ratios = {"memory": self.gib / other.gib, "wall": self.wall_seconds / other.wall_seconds}
        if self.cpu_seconds is None or other.cpu_seconds is None:
            return ratios
        return ratios | {"time": self.cpu_seconds / other.cpu_seconds}


def main(
    losses: Annotated[str, typer.Option(help="Losses, separated by commas.")] = ",".join(LOSSES),
    dtypes: Annotated[str, typer.Option(help="Dtypes, separated by commas.")] = ",".join(DTYPES),
    tokens: Annotated[int, typer.Option(help="Number of tokens, N.")] = 2048,
    vocab: Annotated[int, typer.Option(help="Size of the vocabulary, V.")] = 65536,
    hidden: Annotated[int, typer.Option(help="Hidden size of the draft.")] = 1024,
    teacher_hidden: Annotated[int, typer.Option(help="Hidden size of the target.")] = 2048,
    top_k: Annotated[int, typer.Option(help="Tokens per position in stored outputs. 0 leaves them out.")] = 64,
    repeats: Annotated[int, typer.Option(help="Timed runs of each implementation.")] = 3,
    budget: Annotated[
        int | None,
        typer.Option(help="Bytes for the fused loss's logits. Default: depends on the device."),
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
) -> None:
    case = Case(
        loss="",
        dtype="",
        top_k=0,
        tokens=tokens,
        vocab=vocab,
        hidden=hidden,
        teacher_hidden=teacher_hidden,
        budget=budget,
        repeats=repeats,
        threads=threads,
    )
    peers = {name: metadata.version(name) for name in ("trl", "liger_kernel") if importlib.util.find_spec(name)}
    if len(peers) < 2:
        note("not installed, so left out: " + ", ".join({"trl", "liger_kernel"} - peers.keys()))
    result: dict[str, object] = {}
    for dtype in dtypes.split(","):
        whole = [replace(case, dtype=dtype, loss=loss) for loss in losses.split(",")]
        found = _report(whole)
        if top_k:
            found["listed"] = _report([replace(c, top_k=top_k) for c in whole])
        result |= found if dtype == "float32" else {dtype: found}
    sizes = {
        "N": tokens,
        "V": vocab,
        "D": hidden,
        "teacher_D": teacher_hidden,
        "k": top_k,
        "repeats": repeats,
    }
    about = {
        "benchmark": "distill_loss",
        "sizes": sizes,
        "device": device_name(_device()),
        "peers": peers,
    }
    print(json.dumps(about | result | environment(threads)))


def _report(cases: list[Case]) -> dict[str, object]:
    """Measure the cases. Return the ratios of the fused loss to each other implementation, and all measurements."""
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    growth, arms = {}, {}
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for case, found in zip(cases, pool.imap(_measure, cases), strict=True):
            ours = found["fused"]
            growth[case.loss] = found.pop("twice").gib / ours.gib
            arms[case.loss] = {name: asdict(arm) for name, arm in found.items()}
            for name in found.keys() - {"fused"}:
                for key, value in ours.over(found[name]).items():
                    ratios.setdefault(name, {}).setdefault(key, {})[case.loss] = value
            note(f"{case.dtype} {case.loss} {case.top_k or 'all'}: fused / naive: {ours.over(found['naive'])}")
    naive = {f"{key}_ratio": values for key, values in ratios.pop("naive").items()}
    peers = {f"over_{name}": values for name, values in sorted(ratios.items())}
    return {**naive, "growth_at_twice_the_tokens": growth, **peers, "arms": arms}


def _measure(case: Case) -> dict[str, Found]:
    torch.set_num_threads(case.threads)
    inputs = _Inputs(case, case.tokens)
    arms = {"fused": inputs.fused, "naive": inputs.naive}
    if case.loss in BETAS and not case.top_k:
        arms |= {name: arm for name, arm in inputs.peers().items() if importlib.util.find_spec(PEERS[name])}
    runs: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in arms}
    for number in range(case.repeats + 1):
        for name in arms if number % 2 else reversed(arms):
            run = inputs.run(arms[name])
            runs[name] += [run] if number else []  # the first run is a warm-up
    twice = _Inputs(case, 2 * case.tokens)
    runs["twice"] = [twice.run(twice.fused) for _ in range(2)]
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in runs.items()}
    return {
        name: Found(None if inputs.device.type == "cuda" else cpu, *others) for name, (cpu, *others) in medians.items()
    }


class _Inputs:
    """A set of tensors on which all implementations of a loss run.

    Each returns the mean loss per token, with gradients for hidden states and LM head.
    """

    def __init__(self, case: Case, tokens: int) -> None:
        device = _device()
        # tensors are drawn on the device, because a copy from CPU to GPU takes minutes
        rng = torch.Generator(device).manual_seed(0)

        def draw(*size: int, spread: float = 1.0) -> Tensor:
            return torch.randn(*size, generator=rng, device=device).mul_(spread)

        self.case, self.loss, self.tokens, self.device = case, parse_loss(case.loss), tokens, device
        self.hidden = draw(tokens, case.hidden).requires_grad_()
        self.head = draw(case.vocab, case.hidden, spread=2 * case.hidden**-0.5).requires_grad_()
        kept = torch.bfloat16 if case.dtype == "bfloat16" else torch.float32
        self.teacher = Dense(
            draw(tokens, case.teacher_hidden).to(kept),
            draw(case.vocab, case.teacher_hidden, spread=2 * case.teacher_hidden**-0.5).to(kept),
        )
        self.labels = torch.randint(0, case.vocab, (tokens,), generator=rng, device=device)
        self.weights = torch.full((tokens,), 1 / tokens, device=device)
        self.listed = None
        if case.top_k:
            # k distinct ids per token from the whole vocabulary: an even stride from a random start
            start = torch.randint(0, case.vocab, (tokens, 1), generator=rng, device=device)
            ids = (start + torch.arange(case.top_k, device=device) * (case.vocab // case.top_k)) % case.vocab
            log_p = torch.log_softmax(draw(tokens, case.top_k + 1), -1)
            self.listed = TopK(ids, log_p[:, :-1], log_p[:, -1])

    def run(self, arm: Arm) -> tuple[float, float, float, float]:
        """Run an implementation forward and backward. Return CPU seconds, wall seconds, GiB of memory, and the loss."""
        before = _held(self.device)
        began = _clock(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.case.dtype == "bfloat16"):
            loss = arm()
        torch.autograd.grad(loss, [self.hidden, self.head])
        cpu, wall = (end - start for start, end in zip(began, _clock(self.device), strict=True))
        returned = self.hidden.nbytes + self.head.nbytes
        return cpu, wall, (_most(self.device) - before - returned) / 2**30, float(loss.detach())

    def fused(self) -> Tensor:
        given = self.hidden, self.head, self.labels, self.weights
        return fused_loss(*given, self.listed or self.teacher, self.loss, 1.0, self.case.budget).objective

    def naive(self) -> Tensor:
        log_q = functional.log_softmax((self.hidden @ self.head.T).float(), -1)
        if self.listed is None:
            return TEXTBOOK[self.case.loss](functional.log_softmax(self._teacher_logits(), -1), log_q).mean()
        listed = log_q.gather(1, self.listed.ids)
        rest = torch.log1p(-listed.exp().sum(-1, keepdim=True).clamp_max(1 - 1e-7))
        log_p = torch.cat([self.listed.log_p, self.listed.tail.unsqueeze(1)], 1)
        return TEXTBOOK[self.case.loss](log_p, torch.cat([listed, rest], 1)).mean()

    def peers(self) -> dict[str, Arm]:
        """Return the implementations of TRL and Liger.

        trl is the chunked loss of TRL's DistillationTrainer. trl_gkd is the loss of TRL's GKDTrainer on complete
        logits. liger is Liger's loss with default settings.
        """
        return {"trl": self._trl, "trl_gkd": self._trl_gkd, "liger": self._liger}

    def _teacher_logits(self) -> Tensor:
        with torch.no_grad():
            return self.teacher.logits(slice(None)).float()

    def _trl(self) -> Tensor:
        from trl.kernels.chunked_divergence import ChunkedDivergenceFunction  # type: ignore[import-not-found]

        heads = self.hidden, self.head, None, self.teacher.hidden, self.teacher.head, None
        return ChunkedDivergenceFunction.apply(*heads, BETAS[self.case.loss])[0].mean()

    def _trl_gkd(self) -> Tensor:
        from trl.experimental.gkd import GKDTrainer  # type: ignore[import-not-found]

        # in fp32, as accelerate passes logits on
        logits = ((self.hidden @ self.head.T).float(), self._teacher_logits())
        return GKDTrainer.generalized_jsd_loss(*logits, beta=BETAS[self.case.loss])

    def _liger(self) -> Tensor:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss  # type: ignore[import-not-found]

        loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=BETAS[self.case.loss])
        return loss(self.hidden, self.head, self.teacher.hidden, self.teacher.head, self.labels)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence KL(a || b) at each position, [N]."""
    return functional.kl_div(log_b, log_a, reduction="none", log_target=True).sum(-1)


def _jsd(log_p: Tensor, log_q: Tensor) -> Tensor:
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return 0.5 * (_kl(log_p, log_m) + _kl(log_q, log_m))


def _tvd(log_p: Tensor, log_q: Tensor) -> Tensor:
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


def _nla(log_p: Tensor, log_q: Tensor) -> Tensor:
    return -torch.minimum(log_p, log_q).exp().sum(-1).log()


def _lk(log_p: Tensor, log_q: Tensor) -> Tensor:
    distance = _tvd(log_p, log_q)
    share = (-3 * (1 - distance)).exp().detach()
    return share * _kl(log_p, log_q) + (1 - share) * distance


TEXTBOOK: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "fkl": _kl,
    "rkl": lambda log_p, log_q: _kl(log_q, log_p),
    "jsd(0.5)": _jsd,
    "tvd": _tvd,
    "nla": _nla,
    "lk(3)": _lk,
}


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _clock(device: torch.device) -> tuple[float, float]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.process_time(), time.perf_counter()


def _held(device: torch.device) -> int:
    """Return the bytes of memory in use now, and reset the counter of the peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # Linux
    return _resident("VmRSS")


def _most(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident("VmHWM")


def _resident(which: str) -> int:
    line = next(li for li in Path("/proc/self/status").read_text().splitlines() if li.startswith(which))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    typer.run(main)
