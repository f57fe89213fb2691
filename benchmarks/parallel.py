"""A parallel draft against an ordinary one of the same shape, data and training compute, by draftlab's own commands.

Both come from one draft that was distilled for a while. The ordinary one is distilled further, and the other becomes a
parallel draft, in so many steps fewer as its steps read more tokens. Then draftlab score times both, the parallel
weights as an ordinary draft, prompt lookup and n-grams in one process, greedily and at temperature 1.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks import environment
from draftlab.commands import COMMANDS
from draftlab.config.distill import DistillConfig
from draftlab.console import note
from draftlab.distill.parallel import Offsets, expected_tokens
from draftlab.latency.profiler import measure_latency
from draftlab.latency.random_model import random_model
from draftlab.model import checkpoint, hub
from draftlab.model.shape import Shape
from draftlab.prune.trial_model import prunable_shape
from draftlab.target_outputs.replay import Drafting, read_replay

TEMPERATURES = (0.0, 1.0)
ACCEPTANCE = (0.5, 0.6, 0.7, 0.8, 0.9)  # to say what could be gained
OTHERS = ["prompt-lookup", "ngram:tokens=500000"]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What a target's drafts are made from. questions: a file of prompts; none: held-out text of data."""

    name: str
    target: str
    start: Path  # draft
    outputs: Path  # to distil from
    answers: Path  # to replay on
    data: str
    questions: Path | None


def main(
    folder: Annotated[Path, typer.Option(help="Models and scores are written here.")] = Path("runs/parallel"),
    k: Annotated[int, typer.Option(help="Tokens that the parallel draft learns to draft.")] = 8,
    steps: Annotated[int, typer.Option(help="Steps of the ordinary draft, beyond what both have in common.")] = 300,
    common: Annotated[int, typer.Option(help="Steps in common.")] = 300,
    shape: Annotated[Path, typer.Option(help="Of tiny's draft.")] = Path("configs/widths/tiny-3x256.yaml"),
    smollm2: Annotated[Path, typer.Option(help="Folder with target, draft, outputs, answers, prompts.jsonl.")] = Path(
        "runs/smollm2"
    ),
    vllm: Annotated[Path | None, typer.Option(help="vllm's program, to compare its counters on tiny.")] = None,
    losses: Annotated[str, typer.Option(help="Losses of the parallel draft, by comma; the first is scored.")] = "fkl",
    quick: Annotated[bool, typer.Option(help="A few steps and prompts.")] = False,
    costs_of: Annotated[
        list[str] | None, typer.Option(help="Train nothing: only time passes of these shapes beside --target.")
    ] = None,
    target: Annotated[str, typer.Option(help="With --costs-of.")] = "tiny",
) -> None:
    if costs_of:
        whole = checkpoint.planned_shape(hub.locate(target, weights=False))
        print(json.dumps({name: costs(whole, prunable_shape(name)[1], k, 30) for name in costs_of} | environment(1)))
        return
    if quick:
        steps, common, k = min(steps, 24), min(common, 24), min(k, 4)
    pairs = [tiny_pair(folder / "tiny", shape, common, 4 if quick else 16)]
    if (smollm2 / "target").is_dir():
        parts = {part: smollm2 / part for part in ("outputs", "answers")}
        target, start, questions = str(smollm2 / "target"), smollm2 / "draft", smollm2 / "prompts.jsonl"
        pairs.append(Pair(name="smollm2", target=target, start=start, data="stdlib", questions=questions, **parts))
    else:
        note(f"no SmolLM2 in {smollm2}: on tiny alone")
    measured = {pair.name: measure(pair, folder / pair.name, k, steps, losses.split(","), quick) for pair in pairs}
    gap = vllm_gap(folder / "tiny", vllm) if vllm is not None else None
    names = ("parallel_over_plain_draft", "tokens_per_pass", "as_plain_draft_loss")
    summary = {name: {pair: row[name] for pair, row in measured.items()} for name in names}
    settings = {"k": k, "steps": steps, "common": common, "losses": losses, "quick": quick}
    print(json.dumps({**summary, "vllm_gap": gap, "targets": measured, **settings, **environment(1)}))


def tiny_pair(folder: Path, shape: Path, common: int, batch: int) -> Pair:
    """Cut a draft of tiny, store what tiny says about its training text, and distil the draft from that."""
    cut = made("prune", folder / "cut", source="tiny", shape=shape, data="stdlib", calibration_tokens=16384)
    rows = {"target": "tiny", "data": "stdlib", "num_sequences": common * batch, "seq_len": 256}
    outputs = made("outputs build", folder / "outputs", **rows)
    answers = made("outputs build", folder / "answers", use="replay", target="tiny", data="stdlib", num_prompts=32)
    start = made("distill", folder / "start", draft=str(cut), outputs=outputs, steps=common, batch_size=batch)
    return Pair(
        name="tiny", target="tiny", start=start, outputs=outputs, answers=answers, data="stdlib", questions=None
    )


def measure(pair: Pair, folder: Path, k: int, steps: int, losses: list[str], quick: bool) -> dict[str, Any]:
    """Train both drafts, replay and score them."""
    batch = 4 if quick else 16
    fewer = max(1, round(steps / Offsets.cost(DistillConfig(draft=str(pair.start), parallel=k))))
    training = {"draft": str(pair.start), "outputs": pair.outputs, "batch_size": batch, "eval_steps": steps}
    plain = made("distill", folder / "plain", **training, steps=steps)
    parallel = [
        made("distill", folder / f"parallel-{loss}", **training, steps=fewer, parallel=k, loss=loss) for loss in losses
    ]
    drafts = {"plain": plain, "parallel": parallel[0]}
    replays = {
        "plain": replayed(folder, pair, plain, k, True),
        **{path.name: replayed(folder, pair, path, k, True) for path in parallel},
        "parallel as plain": replayed(folder, pair, parallel[0], k, False),
    }
    scores = {str(t): scored(folder, pair, drafts, k, t, quick) for t in TEMPERATURES}
    greedy = scores["0.0"]
    best_of = {name: max(by_k.values()) for name, by_k in replays.items()}
    target, draft = (checkpoint.planned_shape(path) for path in (hub.locate(pair.target), pair.start))
    return {
        "parallel_over_plain_draft": ratio(greedy, "parallel-" + losses[0], "plain"),
        "tokens_per_pass": {"plain": best_of["plain"], "parallel": best_of[parallel[0].name]},
        "as_plain_draft_loss": 1 - best_of["parallel as plain"] / best_of["plain"],
        "at_temperature_1": ratio(scores["1.0"], "parallel-" + losses[0], "plain"),
        "costs": costs(target, draft, k, 5 if quick else 30),
        "replayed": replays,
        "scores": scores,
        "steps": {"plain": steps, "parallel": fewer},
        "seconds": {path.name: seconds(path) for path in (plain, *parallel)},
    }


def replayed(folder: Path, pair: Pair, draft: Path, k: int, parallel: bool) -> dict[int, float]:
    """Return tokens per target pass by K."""
    out = folder / f"replay-{draft.name}{'' if parallel else '-as-plain'}"
    made("replay", out, directory=pair.answers, draft=[str(draft)], k=list(range(1, k + 1)), parallel=parallel)
    found = read_replay(out / draft.name)
    counts = {n: found.counts(Drafting(k=n)) for n in range(1, k + 1)}
    return {n: float(c.tokens.sum() / c.passes.sum()) for n, c in counts.items()}


def scored(
    folder: Path, pair: Pair, drafts: dict[str, Path], k: int, temperature: float, quick: bool
) -> list[dict[str, object]]:
    """Return the best row of each way to draft."""
    prompts: dict[str, Any] = {"prompt_file": pair.questions} if pair.questions else {"data": pair.data}
    row = COMMANDS["score"](
        draft=[str(path) for path in drafts.values()], drafter=[f"model:draft={drafts['parallel']}", *OTHERS],
        target=pair.target, k=f"1-{k}", num_prompts=2 if quick else 16, max_tokens=16 if quick else 64,
        repeats=1 if quick else 3, tasks="none", threads=1, temperature=temperature,
        out=folder / f"score-{temperature}", force=True, **prompts,
    ).data["scores"]  # fmt: skip
    assert isinstance(row, list)
    kept = ("draft", "num_speculative_tokens", "speedup", "speedup_low", "speedup_high", "tokens_per_target_pass",
            "output_tps", "plain_output_tps", "identical")  # fmt: skip
    return [{name: each[name] for name in kept} for each in row if each["best"]]


def costs(target: Shape, draft: Shape, k: int, passes: int) -> dict[str, Any]:
    """Return the time of passes by width, also with heads of fewer ids, and how much faster than an ordinary draft a
    parallel one could be: if all its offsets were accepted as often as the first, by that acceptance.
    """
    shapes = {"target": target, "draft": draft} | {
        f"draft, 1/{part} of the ids": draft.model_copy(update={"draft_vocab": draft.vocab // part}) for part in (4, 8)
    }
    dtype = torch.bfloat16 if checkpoint.fast_bfloat16(checkpoint.CPU) else torch.float32
    models = {name: random_model(shape, dtype, checkpoint.CPU, 512) for name, shape in shapes.items()}
    measured = measure_latency(models, widths=list(range(1, 2 * k + 1)), context=128, passes=passes, mode="native")
    ms = {name: {latency.width: latency.low_ms for latency in row} for name, row in measured.items()}
    most = {alpha: ceiling(ms["target"], ms["draft"], alpha, k) for alpha in ACCEPTANCE}
    return {"dtype": checkpoint.dtype_name(dtype), "pass_ms": ms, "parallel_over_plain_at_most": most}


def ceiling(target_ms: dict[int, float], draft_ms: dict[int, float], alpha: float, k: int) -> float:
    """Return the speed of drafting in one pass over that in a pass for each token, each at its best K, if every token
    is accepted with chance alpha. A parallel draft reads the tokens emitted last and a mask token for each but one.
    """
    tokens = {n: expected_tokens([alpha] * n) for n in range(1, k + 1)}
    wide_ms = {n: np.interp(tokens[n] + n - 1, list(draft_ms), list(draft_ms.values())) for n in tokens}
    plain = max(tokens[n] / (n * draft_ms[1] + target_ms[n + 1]) for n in tokens)
    return float(max(tokens[n] / (wide_ms[n] + target_ms[n + 1]) for n in tokens) / plain)


def ratio(rows: list[dict[str, Any]], one: str, other: str) -> float:
    """Return the tokens per second of one draft over those of another, each at its best K."""
    speed = {row["draft"]: row["output_tps"] for row in rows}
    return speed[one] / speed[other]


def vllm_gap(folder: Path, program: Path) -> float:
    """Return by how much vLLM's tokens per pass differ from draftlab's, relatively."""
    parallel = next(folder.glob("parallel-*"))
    out = made("export", folder / "export", draft=str(parallel), target="tiny", to="vllm", verify_with=program, k=4)
    text = str(json.loads((out / "draftlab.json").read_text())["notes"]["verified"])
    theirs, ours = (float(text.split(word)[1].split()[0]) for word in (": ", "in draftlab "))
    return theirs / ours - 1


def made(command: str, out: Path, **settings: Any) -> Path:
    """Return a command's output, which is there already if an earlier run was killed."""
    if not (out / "draftlab.json").exists():
        COMMANDS[command](**settings, out=out)
    return out


def seconds(out: Path) -> float:
    return float(json.loads((out / "draftlab.json").read_text())["notes"]["seconds"])


if __name__ == "__main__":
    typer.run(main)
