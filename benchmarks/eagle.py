"""An EAGLE-3 head for tiny: trained, timed in draftlab's engine, and served by vLLM, by draftlab's own commands.

The gap of a server is its tokens per target pass less draftlab's, on the same prompts at the same K, greedily. It
should be at most half the width of draftlab's 95 % interval over prompts. null: not measured.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import environment
from draftlab.commands import COMMANDS
from draftlab.export.verify import vllm_server
from draftlab.intervals import ratio_interval
from draftlab.model import checkpoint, hub
from draftlab.prompts import load_prompts
from draftlab.provenance import read_record
from draftlab.results.score import read_score
from draftlab.sampling import SamplingParams
from draftlab.servers.client import spec_decode_counters

DATA, TARGET, TOKENS = "stdlib", "tiny", 64


def main(
    folder: Annotated[Path, typer.Option(help="The head and its scores are written here.")] = Path("runs/eagle"),
    steps: Annotated[int, typer.Option(help="Training steps, of 8 texts of 256 tokens.")] = 400,
    k: Annotated[int, typer.Option(help="Most drafted tokens.")] = 6,
    prompts: Annotated[int, typer.Option(help="Prompts to score on.")] = 16,
    served_k: Annotated[int, typer.Option(help="Drafted tokens in servers.")] = 3,
    vllm: Annotated[Path | None, typer.Option(help="vllm's program, to compare its counters.")] = None,
) -> None:
    head = folder / f"head-{steps}"
    if not (head / "draftlab.json").exists():
        training: dict[str, Any] = {"steps": steps, "batch_size": 8, "seq_len": 256, "eval_steps": steps}
        COMMANDS["eagle"](target=TARGET, data=DATA, **training, out=head)
    record = read_record(head)
    assert record is not None
    notes: Any = record.notes
    scores = {t: scored(folder / f"score-{t}", head, t, k, prompts) for t in (0.0, 1.0)}
    gap = None if vllm is None else vllm_gap(folder, head, vllm, served_k, prompts)
    best = scores[0.0]
    result = {
        "tokens_per_pass": best["tokens_per_target_pass"],
        "speedup": best["speedup"],
        "vllm_gap": gap["gap"] if gap else None,
        "llama_cpp_gap": None,
        "training_tokens_per_second": notes["tokens"] / notes["seconds"],
        "acceptance_by_step": notes["after"]["offsets"],
        "coverage": notes["coverage"],
        "served": gap,
        "scores": {str(t): row for t, row in scores.items()},
    }
    print(json.dumps(result | {"steps": steps, "prompts": prompts} | environment(1)))


def scored(out: Path, head: Path, temperature: float, k: int, prompts: int) -> dict[str, Any]:
    """Return the row of the best K."""
    rows: Any = COMMANDS["score"](
        target=TARGET, drafter=[f"eagle:heads={head}"], data=DATA, k=f"1-{k}", num_prompts=prompts, max_tokens=TOKENS,
        temperature=temperature, tasks="none", threads=1, out=out, force=True,
    ).data["scores"]  # fmt: skip
    return next(row for row in rows if row["best"])


def vllm_gap(folder: Path, head: Path, program: Path, k: int, prompts: int) -> dict[str, Any]:
    """Return vLLM's tokens per target pass, draftlab's with its interval, and the gap."""
    out = folder / "served"
    COMMANDS["score"](
        target=TARGET, drafter=[f"eagle:heads={head}"], data=DATA, k=str(k), num_prompts=prompts, max_tokens=TOKENS,
        tasks="none", threads=1, repeats=1, out=out, force=True,
    )  # fmt: skip
    score = read_score(next(out.rglob("score.json")))
    whole = [[a + 1 for a, d in zip(g.accepted, g.drafted, strict=True) if d == k] for g in score.generations(k)]
    ours = ratio_interval(np.array([[sum(steps), len(steps)] for steps in whole], dtype=float))
    target = hub.locate(TARGET)
    tokenizer = checkpoint.load_tokenizer(target)
    texts = load_prompts(None, DATA, tokenizer, count=prompts, tokens=None, seed=0, chat="auto", system_prompt=None)
    speculative = {"method": "eagle3", "model": str(head.absolute()), "num_speculative_tokens": k}
    with vllm_server(program, target, speculative) as server:
        before = server.metrics()
        list(server.generate([list(p.ids) for p in texts.rows], SamplingParams(max_tokens=TOKENS, temperature=0.0)))
        counters = spec_decode_counters(before, server.metrics())
    assert counters is not None
    theirs = counters.acceptance.mean_acceptance_length
    return {
        "k": k, "vllm": theirs, "draftlab": ours.value, "low": ours.low, "high": ours.high, "gap": theirs - ours.value,
        "version": server.version,
    }  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
