"""Scripts that measure what draftlab claims: python -m benchmarks.NAME prints one JSON object on its last line."""

import os
import platform
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from draftlab.intervals import Interval
from draftlab.model.processor import instructions, processor_model, read_cpuinfo
from draftlab.results.score import Score
from draftlab.runs import provenance

# how the intervals of a record are made, see docs/method.md
INTERVALS = "jackknife over conversations"


def environment(threads: int) -> dict[str, object]:
    """Return the date, machine, processor and versions, to be stored with a result. threads: CPU threads used."""
    return {
        "date": date.today().isoformat(),
        "threads": threads,
        "machine": platform.platform(),
        "cpu": cpu_name(),
        "versions": provenance.versions(),
        "intervals": INTERVALS,
    }


def child_environ(**more: str) -> dict[str, str]:
    """Return the environment of a process that runs the draftlab of this source tree, whether installed or not."""
    root = str(Path(__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | more


def cpu_name() -> str:
    """Return the processor's model with those of its instruction sets that decide the speed of matrix products."""
    cpuinfo = read_cpuinfo()
    deciding = ("amx_bf16", "avx2", "avx512_bf16", "avx512f", "bf16", "sve", "sve2")
    flags = [flag for flag in deciding if flag in instructions(cpuinfo)]
    return f"{processor_model(cpuinfo)} ({', '.join(flags)})"


def drafting_row(score: Score) -> dict[str, Any]:
    """Return the figures of a scored draft for a table. Speed-ups [value, low, high] are at a K from other prompts."""
    k, shape, tpot = score.best_k, score.draft.shape, score.best_k_tpot_speedup
    return {
        "parameters": shape.params() if shape else None,
        "pass_ms": score.draft_ms,
        "target_pass_ms": score.target_ms,
        "k": k,
        "tokens_per_pass": score.tokens_per_pass(k),
        "tokens_per_second": score.output_tps(k),
        "plain_tokens_per_second": score.output_tps(0),
        "plain_tokens_per_second_by_weights": score.plain_tps,
        "speedup": bounds(score.best_k_speedup),
        "tpot_speedup": tpot and bounds(tpot),
        "identical": score.identical,
        "equal_texts": score.equal_texts,
        "requests": requests(score),
    }


def requests(score: Score) -> dict[str, Any]:
    """Return what the intervals of a score are made of: the timings of each conversation, [tokens, seconds].

    plain: Without a draft. drafted: With the draft, by K.
    """
    ks = sorted(score.speculative)
    timings = score.timings(ks)
    drafted, plain = np.asarray(timings.drafted).round(6), np.asarray(timings.plain).round(6)
    return {"plain": plain.tolist(), "drafted": dict(zip(ks, drafted.tolist(), strict=True))}


def bounds(estimate: Interval) -> list[float]:
    return [estimate.value, estimate.low, estimate.high]
