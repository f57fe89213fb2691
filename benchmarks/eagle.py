"""An EAGLE-3 head for tiny: trained, timed in draftlab's engine, and served by vLLM and llama.cpp, by own commands.

The gap of a server is its tokens per target pass less draftlab's, on the same texts at the same K, greedily, as
export --verify-with counts them. It should be at most half the width of draftlab's 95 % interval over texts; export
fails where it is outside of it. null: not measured.
"""

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import environment
from draftlab.commands import COMMANDS
from draftlab.provenance import read_record
from draftlab.target_outputs.replay import read_replay

DATA, TARGET, TOKENS, SEQ_LEN = "stdlib", "tiny", 64, 256


def main(
    folder: Annotated[Path, typer.Option(help="The head and its scores are written here.")] = Path("runs/eagle"),
    steps: Annotated[int, typer.Option(help="Training steps, of 8 texts.")] = 200,
    k: Annotated[int, typer.Option(help="Most drafted tokens.")] = 6,
    prompts: Annotated[int, typer.Option(help="Prompts to score on.")] = 16,
    served_k: Annotated[int, typer.Option(help="Drafted tokens in servers.")] = 3,
    vllm: Annotated[Path | None, typer.Option(help="vllm's program. Default: that of the PATH.")] = None,
    llama_server: Annotated[Path | None, typer.Option(help="llama.cpp's server. Default: that of the PATH.")] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="Share of the memory for vLLM.")] = None,
) -> None:
    head = folder / f"head-{steps}"
    if not (head / "draftlab.json").exists():
        training: dict[str, Any] = {"steps": steps, "batch_size": 8, "seq_len": SEQ_LEN, "eval_steps": steps}
        COMMANDS["eagle"](target=TARGET, data=DATA, **training, out=head)
    record = read_record(head)
    assert record is not None
    notes: Any = record.notes
    scores = {t: scored(folder / f"score-{t}", head, t, k, prompts) for t in (0.0, 1.0)}
    programs = {"vllm": vllm or on_path("vllm"), "llama.cpp": llama_server or on_path("llama-server")}
    servers = {
        to: served(folder / f"export-{to}", head, to, program, served_k, prompts, gpu_memory_utilization)
        for to, program in programs.items()
    }
    beyond = by_context(folder, head, SEQ_LEN)
    gaps = {to: row and row["gap"] for to, row in servers.items()}
    best = scores[0.0]
    result = {
        "tokens_per_pass": best["tokens_per_target_pass"],
        "speedup": best["speedup"],
        "vllm_gap": gaps["vllm"],
        "llama_cpp_gap": gaps["llama.cpp"],
        "training_tokens_per_second": notes["tokens"] / notes["seconds"],
        "acceptance_by_step": notes["after"]["offsets"],
        "coverage": notes["coverage"],
        "acceptance_by_context": beyond,
        "served": servers,
        "scores": {str(t): row for t, row in scores.items()},
    }
    print(json.dumps(result | {"steps": steps, "prompts": prompts} | environment(1)))


def on_path(program: str) -> Path | None:
    found = shutil.which(program)
    return None if found is None else Path(found)


def scored(out: Path, head: Path, temperature: float, k: int, prompts: int) -> dict[str, Any]:
    """Return the row of the best K."""
    rows: Any = COMMANDS["score"](
        target=TARGET, drafter=[f"eagle:heads={head}"], data=DATA, k=f"1-{k}", num_prompts=prompts, max_tokens=TOKENS,
        temperature=temperature, tasks="none", threads=1, out=out, force=True,
    ).data["scores"]  # fmt: skip
    return next(row for row in rows if row["best"])


def by_context(folder: Path, head: Path, trained: int) -> list[dict[str, float]]:
    """Return the acceptance of tokens 1 and 3 of a step by the length of the text before, up to four times trained."""
    store, longest = folder / "long", min(4 * trained, 1000) - 32
    if not store.exists():
        COMMANDS["outputs build"](
            use="replay", target=TARGET, data=DATA, num_prompts=16, prompt_tokens=32, max_new_tokens=longest, out=store
        )  # fmt: skip
    COMMANDS["replay"](directory=store, draft=[str(head)], target=TARGET, k="3", out=folder / "replay", force=True)
    found = read_replay(folder / "replay" / head.name)
    chances, contexts = np.concatenate(found.chances()), np.concatenate(found.contexts())
    edges = [trained // 2, trained, 2 * trained, 4 * trained]
    rows = []
    for low, high in zip([0, *edges], edges, strict=False):
        inside = (contexts >= low) & (contexts < high)
        if inside.any():
            first, third = chances[inside][:, 0].mean(), chances[inside][:, 2].mean()
            rows.append({"from": low, "to": high, "n": int(inside.sum()), "first": float(first), "third": float(third)})
    return rows


def served(out: Path, head: Path, to: str, program: Path | None, k: int, prompts: int, share: float | None) -> Any:
    """Return what a server accepted of an export, and draftlab of the same texts; None without its program."""
    if program is None:
        return None
    options: dict[str, Any] = {"gpu_memory_utilization": share} if share and to == "vllm" else {}
    options |= {"outtype": "f32"} if to == "llama.cpp" else {}
    return COMMANDS["export"](
        draft=str(head), target=TARGET, to=to, verify_with=program, k=k, data=DATA, prompts=prompts, out=out,
        force=True, **options,
    ).data["acceptance"]  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
