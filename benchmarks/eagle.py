"""Train an EAGLE-3 head for tiny, time it in draftlab's engine, and serve it with vLLM and llama.cpp.

A server's gap is the server's tokens per target pass minus draftlab's, on the same greedy texts at the same K, as
export --verify-with counts them. The gap should be at most half the width of draftlab's 95 % interval over texts,
because export fails if the server's value is outside of the interval. null stands for values that were not measured.
"""

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import environment, speedups
from benchmarks.smollm2 import TARGET as TARGET_MODEL
from draftlab.commands import COMMANDS
from draftlab.console import note
from draftlab.provenance import read_record
from draftlab.target_outputs.replay import Replay, read_replay

DATA, TARGET, TOKENS, SEQ_LEN = "stdlib", "tiny", 64, 256


def main(
    folder: Annotated[Path, typer.Option(help="Folder for the head and its scores.")] = Path(
        "runs/eagle"
    ),
    steps: Annotated[int, typer.Option(help="Training steps, each with 8 texts.")] = 200,
    k: Annotated[int, typer.Option(help="Largest number of drafted tokens per step.")] = 6,
    prompts: Annotated[int, typer.Option(help="Prompts to score on.")] = 16,
    served_k: Annotated[int, typer.Option(help="Drafted tokens per step on servers.")] = 3,
    vllm: Annotated[
        Path | None, typer.Option(help="Path of vllm. Default: vllm on the PATH.")
    ] = None,
    llama_server: Annotated[
        Path | None, typer.Option(help="Path of llama-server. Default: that on the PATH.")
    ] = None,
    smollm2: Annotated[
        Path, typer.Option(help="Folder in which recipes/smollm2.yaml has run.")
    ] = Path("runs/smollm2-study"),
) -> None:
    head = folder / f"head-{steps}"
    if not (head / "draftlab.json").exists():
        training: dict[str, Any] = {
            "steps": steps,
            "batch_size": 8,
            "seq_len": SEQ_LEN,
            "eval_steps": steps,
        }
        COMMANDS["distill"](student="eagle", target=TARGET, data=DATA, **training, out=head)
    record = read_record(head)
    assert record is not None
    notes: Any = record.notes
    scores = {t: scored(folder / f"score-{t}", head, t, k, prompts) for t in (0.0, 1.0)}
    programs = {
        "vllm": vllm or on_path("vllm"),
        "llama.cpp": llama_server or on_path("llama-server"),
    }
    servers = {
        to: served(folder / f"export-{to}", head, to, program, served_k)
        for to, program in programs.items()
    }
    written: dict[str, Any] = {
        "target": TARGET,
        "data": DATA,
        "num_prompts": 16,
        "prompt_tokens": 32,
    }
    beyond = by_context(folder, [head], SEQ_LEN, written)[head.name]
    gaps = {to: row and row["gap"] for to, row in servers.items()}
    best = scores[0.0]
    result = {
        "tokens_per_pass": best["tokens_per_target_pass"],
        **speedups(best),
        "vllm_gap": gaps["vllm"],
        "llama_cpp_gap": gaps["llama.cpp"],
        "training_tokens_per_second": notes["tokens"] / notes["seconds"],
        "acceptance_by_step": notes["after"]["offsets"],
        "coverage": notes["coverage"],
        "acceptance_by_context": beyond,
        "smollm2_by_context": of_study(smollm2, folder / "smollm2"),
        "served": servers,
        "scores": {str(t): row for t, row in scores.items()},
    }
    print(json.dumps(result | {"steps": steps, "prompts": prompts} | environment(1)))


def on_path(program: str) -> Path | None:
    found = shutil.which(program)
    return None if found is None else Path(found)


def scored(out: Path, head: Path, temperature: float, k: int, prompts: int) -> dict[str, Any]:
    """Score a head, and return the result at the best K."""
    rows: Any = COMMANDS["score"](
        target=TARGET, drafter=[f"eagle:heads={head}"], data=DATA, k=f"1-{k}", num_prompts=prompts,
        max_new_tokens=TOKENS, temperature=temperature, threads=1, exhaustive=True, out=out, force=True,
    ).data["scores"]  # fmt: skip
    return next(row for row in rows if row["best"])


def of_study(study: Path, folder: Path) -> dict[str, list[dict[str, float]]] | None:
    """Return the acceptance of SmolLM2's head, plain draft and parallel draft by length of the context.

    Return None if the study in the folder is not finished.
    """
    runs = study / "runs"
    drafts = [runs / "eagle", runs / "distilled" / "plain", runs / "distilled" / "parallel"]
    if not all((draft / "draftlab.json").exists() for draft in drafts):
        note(
            f"recipes/smollm2.yaml has not run in {study}: acceptance by context is measured for tiny alone"
        )
        return None
    written = {
        "target": str(study / TARGET_MODEL),
        "prompt_file": study / "questions.jsonl",
        "num_prompts": 22,
    }
    return by_context(folder, drafts, SEQ_LEN, written)


def by_context(
    folder: Path, drafts: list[Path], trained: int, written: dict[str, Any]
) -> dict[str, list[dict[str, float]]]:
    """Return, for each draft, the acceptance of its tokens 1 and 3 by length of the context.

    Contexts are up to four times as long as a row in training.

    Args:
        trained: Number of tokens in a training row.
        written: Options for the texts that the target writes greedily.
    """
    store, longest = folder / "long", min(4 * trained, 1000) - 32
    if not store.exists():
        COMMANDS["outputs build"](**written, use="replay", max_new_tokens=longest, out=store)
    replay: dict[str, Any] = {
        "draft": [str(draft) for draft in drafts],
        "target": written["target"],
        "k": "3",
    }
    COMMANDS["replay"](directory=store, **replay, out=folder / "replay", force=True)
    return {
        draft.name: rows_by_context(read_replay(folder / "replay" / draft.name), trained)
        for draft in drafts
    }


def rows_by_context(found: Replay, trained: int) -> list[dict[str, float]]:
    """Return the acceptance in a replay for each range of contexts.

    "first" and "third" are equal for a plain draft, because its acceptance does not depend on the position in a draft.
    """
    contexts = np.concatenate(
        [text.prompt_tokens + np.arange(1, len(text.chances)) for text in found.texts]
    )
    chances = np.concatenate(found.chances()).reshape(len(contexts), -1)[:, :3]
    edges = [trained // 2, trained, 2 * trained, 4 * trained]
    rows = []
    for low, high in zip([0, *edges], edges, strict=False):
        inside = (contexts >= low) & (contexts < high)
        if inside.any():
            first, third = chances[inside][:, 0].mean(), chances[inside][:, -1].mean()
            rows.append(
                {
                    "from": low,
                    "to": high,
                    "n": int(inside.sum()),
                    "first": float(first),
                    "third": float(third),
                }
            )
    return rows


def served(out: Path, head: Path, to: str, program: Path | None, k: int) -> Any:
    """Export a head, and return its acceptance in the server and in draftlab. None without the server's program."""
    if program is None:
        return None
    options: dict[str, Any] = {"outtype": "f32"} if to == "llama.cpp" else {}
    return COMMANDS["export"](
        draft=str(head), target=TARGET, to=to, verify_with=program, k=k, data=DATA, out=out,
        force=True, **options,
    ).data["acceptance"]  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
