"""Compare a parallel draft and an EAGLE-3 head with an ordinary draft, at equal training compute.

Both drafts start from the same distilled draft. The ordinary draft is distilled further. The parallel draft is trained
on the same number of tokens. It gets fewer steps, because each of its steps reads more tokens. The head is trained for
as long as the ordinary draft in total. Then `draftlab score` times all in one process, greedily and at temperature 1:
both drafts, the head, the parallel draft's weights used as an ordinary draft, prompt lookup and n-grams. All of this is
done for the target tiny. For SmolLM2, the scores of a finished recipes/smollm2.yaml are read, and its two drafts are
only replayed.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks import environment, speedups
from benchmarks.smollm2 import MODELS, TARGET, category, scores
from draftlab.commands import COMMANDS
from draftlab.console import note
from draftlab.engine.clocks import clock_for
from draftlab.latency.profiler import Grid, measure_passes, random_model
from draftlab.model import checkpoint, hub
from draftlab.model.modes import with_mode
from draftlab.model.parallel import trained_offsets
from draftlab.model.shape import Shape
from draftlab.provenance import read_record
from draftlab.pruning.source import prunable_shape
from draftlab.results.report import json_rows
from draftlab.results.score import Score
from draftlab.target_outputs.replay import read_replay
from draftlab.training.objectives import Offsets, expected_tokens
from draftlab.training.run import read_log
from draftlab.training.trainer import EvalRecord

TEMPERATURES = (0.0, 1.0)
# acceptance rates at which the largest possible gain is computed
ACCEPTANCE = (0.5, 0.6, 0.7, 0.8, 0.9)
OTHERS = ["latest-lookup", "ngram:tokens=500000"]

Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the study on tiny.

    Args:
        common: Training steps of the draft from which both drafts start.
        steps: Further steps of the ordinary draft. The further steps of the parallel draft read as many tokens.
        head_steps: Training steps of the EAGLE-3 head.
    """

    k: int
    steps: int
    common: int
    head_steps: int
    cod_share: float
    cod_floor: float
    losses: list[str]
    quick: bool

    @property
    def batch(self) -> int:
        return 4 if self.quick else 16

    @property
    def parallel(self) -> dict[str, Any]:
        offsets = Offsets(count=self.k, token=0, share=self.cod_share, floor=self.cod_floor, seed=0)
        student = f"parallel:tokens={self.k},share={self.cod_share},floor={self.cod_floor}"
        return {"student": student, "steps": max(1, round(self.steps / offsets.cost))}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The draft from which tiny's two drafts are trained, and their texts."""

    start: Path  # draft from which both drafts are trained
    outputs: Path  # store to distil from
    answers: Path  # store to replay on


def main(
    folder: Annotated[Path, typer.Option(help="Folder for models and scores.")] = Path(
        "runs/parallel"
    ),
    k: Annotated[int, typer.Option(help="Tokens that the parallel draft learns to draft.")] = 4,
    cod_share: Annotated[
        float, typer.Option(help="Value of share in --student parallel. PARD has 0.7.")
    ] = 0.3,
    cod_floor: Annotated[float, typer.Option(help="Value of floor in --student parallel.")] = 0.0,
    steps: Annotated[int, typer.Option(help="Further training steps of the ordinary draft.")] = 300,
    common: Annotated[
        int, typer.Option(help="Training steps of the draft from which both start.")
    ] = 300,
    head_steps: Annotated[int, typer.Option(help="Training steps of the EAGLE-3 head.")] = 270,
    shape: Annotated[Path, typer.Option(help="Shape file of tiny's draft.")] = Path(
        "configs/widths/tiny-3x256.yaml"
    ),
    smollm2: Annotated[
        Path, typer.Option(help="Folder in which recipes/smollm2.yaml has run.")
    ] = Path("runs/smollm2-study"),
    vllm: Annotated[
        Path | None, typer.Option(help="Path of vllm, to compare its acceptance on tiny.")
    ] = None,
    losses: Annotated[
        str, typer.Option(help="Losses of parallel drafts, by comma; the first is scored.")
    ] = "fkl",
    quick: Annotated[bool, typer.Option(help="Use few steps and prompts.")] = False,
    costs_of: Annotated[
        list[str] | None,
        typer.Option(help="Train nothing: only time passes of these shapes and of --target."),
    ] = None,
    target: Annotated[str, typer.Option(help="Target to time with --costs-of.")] = "tiny",
) -> None:
    if costs_of:
        whole = checkpoint.read_shape(hub.locate(target, weights=False))
        print(
            json.dumps(
                {name: costs(whole, prunable_shape(name)[1], k, 30) for name in costs_of}
                | environment(1)
            )
        )
        return
    if quick:
        steps, common, head_steps = min(steps, 24), min(common, 24), min(head_steps, 24)
    settings = Settings(
        k=k, steps=steps, common=common, head_steps=head_steps, cod_share=cod_share, cod_floor=cod_floor,
        losses=losses.split(","), quick=quick,
    )  # fmt: skip
    measured = {
        "tiny": measure(tiny_pair(folder / "tiny", shape, settings), folder / "tiny", settings)
    }
    if (smollm2 / "runs" / "score-sampled" / "draftlab.json").exists():
        measured["smollm2"] = studied(smollm2, folder / "smollm2")
    else:
        note(f"recipes/smollm2.yaml has not run in {smollm2}, so the study is on tiny alone")
    gap = (
        vllm_gap(folder / "tiny", f"parallel-{settings.losses[0]}", vllm)
        if vllm is not None
        else None
    )
    names = ("parallel_over_plain_draft", "tokens_per_pass", "as_plain_draft_loss")
    summary = {name: {pair: row[name] for pair, row in measured.items()} for name in names}
    print(
        json.dumps(
            {**summary, "vllm_gap": gap, "targets": measured, **asdict(settings), **environment(1)}
        )
    )


def tiny_pair(folder: Path, shape: Path, settings: Settings) -> Pair:
    """Prune a draft from tiny, store tiny's outputs on the training text, and distil the draft from these outputs."""
    common, batch = settings.common, settings.batch
    cut = made(
        "prune", folder / "cut", source="tiny", shape=shape, data="stdlib", calibration_tokens=16384
    )
    rows = {"target": "tiny", "data": "stdlib", "num_sequences": common * batch, "seq_len": 256}
    outputs = made("outputs build", folder / "outputs", **rows)
    answers = made(
        "outputs build",
        folder / "answers",
        use="replay",
        target="tiny",
        data="stdlib",
        num_prompts=32,
    )
    start = made(
        "distill", folder / "start", draft=str(cut), outputs=outputs, steps=common, batch_size=batch
    )
    return Pair(start=start, outputs=outputs, answers=answers)


def measure(pair: Pair, folder: Path, settings: Settings) -> dict[str, Any]:
    """Train both drafts and the head, replay the drafts, and score all three. Return the results."""
    batch, steps, k, quick = settings.batch, settings.steps, settings.k, settings.quick
    training = {"draft": str(pair.start), "outputs": pair.outputs, "batch_size": batch}
    plain = made("distill", folder / "plain", **training, steps=steps, eval_steps=steps)
    parallel = [
        made(
            "distill",
            folder / f"parallel-{loss}",
            **training,
            **settings.parallel,
            loss=loss,
            eval_steps=steps,
        )
        for loss in settings.losses
    ]
    of_head = {
        "student": "eagle",
        "target": "tiny",
        "data": "stdlib",
        "seq_len": 256,
        "batch_size": batch,
        "steps": settings.head_steps,
    }
    head = made("distill", folder / "eagle", **of_head, eval_steps=settings.head_steps)
    replays = {
        "plain": replayed(folder, pair.answers, plain, 2 * k, True),
        **{path.name: replayed(folder, pair.answers, path, k, True) for path in parallel},
        "parallel as plain": replayed(folder, pair.answers, parallel[0], 2 * k, False),
    }
    drafters = [f"model:draft={parallel[0]}", f"eagle:heads={head}", *OTHERS]
    rows = {
        str(t): scored(folder, [plain, parallel[0]], drafters, 2 * k, t, quick)
        for t in TEMPERATURES
    }
    target, draft = (checkpoint.read_shape(path) for path in (hub.locate("tiny"), pair.start))
    return compared(rows, replays, parallel[0].name) | {
        "shape": draft.describe(),
        "costs": costs(target, draft, k, 5 if quick else 30),
        "training_steps": {
            "plain": steps,
            "parallel": settings.parallel["steps"],
            "eagle": settings.head_steps,
        },
        "seconds": {path.name: seconds(path) for path in (pair.start, plain, *parallel, head)},
        "heldout": {path.name: heldout(path) for path in (plain, *parallel, head)},
    }


def studied(study: Path, folder: Path) -> dict[str, Any]:
    """Return the results for SmolLM2: scores of a finished recipes/smollm2.yaml, and replays of its two drafts.

    study: Folder in which the recipe has run.
    """
    runs = study / "runs"
    plain, parallel = (runs / "distilled" / name for name in ("plain", "parallel"))
    questions = {"prompt_file": study / "questions.jsonl", "num_prompts": 44, "max_new_tokens": 96}
    answers = made(
        "outputs build", runs / "greedy", use="replay", target=str(study / TARGET), **questions
    )
    k = trained_offsets(parallel)
    assert k is not None
    replays = {
        "plain": replayed(folder, answers, plain, k, True),
        "parallel": replayed(folder, answers, parallel, k, True),
        "parallel as plain": replayed(folder, answers, parallel, k, False),
    }
    found = {"0.0": scores(runs / "score"), "1.0": scores(runs / "score-sampled")}
    records = {path.name: read_record(path) for path in (plain, parallel)}
    return compared(
        {t: best_rows(json_rows(each)) for t, each in found.items()}, replays, "parallel"
    ) | {
        "shape": checkpoint.read_shape(plain).describe(),
        "by_category": {
            t: {each.name: by_category(each) for each in of if each.name in MODELS}
            for t, of in found.items()
        },
        "training_steps": {
            name: record.config["steps"] for name, record in records.items() if record is not None
        },
        "seconds": {path.name: seconds(path) for path in (plain, parallel)},
        "heldout": {path.name: heldout(path) for path in (plain, parallel)},
    }


def by_category(score: Score) -> dict[str, Any]:
    return {
        name: category(score.subset(rows), len(rows))
        for name, rows in score.prompts_by_category.items()
    }


def compared(
    rows: dict[str, Rows], replays: dict[str, dict[int, float]], parallel: str
) -> dict[str, Any]:
    """Compare a parallel draft with the plain draft, each at its best K.

    "as_plain_draft_loss" is the fraction of tokens per pass that is lost if the parallel draft's weights are used as a
    plain draft, at the plain draft's best K.

    Args:
        rows: Scores by temperature.
        replays: Tokens per target pass by draft and K.
        parallel: Name of the parallel draft.
    """
    best = {
        t: {row["draft"].removesuffix("@int8"): row for row in each} for t, each in rows.items()
    }
    over = {t: row[parallel]["output_tps"] / row["plain"]["output_tps"] for t, row in best.items()}
    k = best["0.0"]["plain"]["num_speculative_tokens"]
    return {
        "parallel_over_plain_draft": over["0.0"],
        "tokens_per_pass": {
            name: best["0.0"][of]["tokens_per_target_pass"]
            for name, of in (("plain", "plain"), ("parallel", parallel))
        },
        "as_plain_draft_loss": 1 - replays["parallel as plain"][k] / replays["plain"][k],
        "at_temperature_1": over["1.0"],
        "replayed": replays,
        "scores": rows,
    }


def replayed(folder: Path, answers: Path, draft: Path, k: int, parallel: bool) -> dict[int, float]:
    """Replay a draft, as a parallel or as a plain draft, and return its tokens per target pass by K."""
    out = folder / f"replay-{draft.name}{'' if parallel else '-as-plain'}"
    drafts = {"draft": [str(draft)]} if parallel else {"drafter": [f"model:draft={draft}"]}
    made("replay", out, directory=answers, k=list(range(1, k + 1)), **drafts)
    (file,) = out.glob("*/replay.json")
    found = read_replay(file)
    counts = {n: found.counts(n) for n in range(1, k + 1)}
    return {n: float(c.tokens.sum() / c.passes.sum()) for n, c in counts.items()}


def scored(
    folder: Path, drafts: list[Path], drafters: list[str], k: int, temperature: float, quick: bool
) -> Rows:
    """Score drafts and drafters for tiny, and return the results of each at its best K."""
    row = COMMANDS["score"](
        draft=[str(path) for path in drafts], drafter=drafters, target="tiny", data="stdlib", k=f"1-{k}",
        num_prompts=2 if quick else 16, max_new_tokens=16 if quick else 64, repeats=1 if quick else 3,
        threads=1, temperature=temperature, dtype=checkpoint.dtype_name(dtype()), force=True,
        exhaustive=True, out=folder / f"score-{temperature}",
    ).data["scores"]  # fmt: skip
    assert isinstance(row, list)
    return best_rows(row)


def best_rows(rows: Rows) -> Rows:
    """Return the results of each drafter at its best K, without the fields that are not compared."""
    kept = ("draft", "num_speculative_tokens", "tokens_per_target_pass", "break_even_length", "output_tps",
            "plain_output_tps", "doubt", "identical", "equal_texts")  # fmt: skip
    return [{name: each[name] for name in kept} | speedups(each) for each in rows if each["best"]]


def costs(target: Shape, draft: Shape, k: int, passes: int) -> dict[str, Any]:
    """Time passes of target and draft by width, and compute how much faster than a plain draft a parallel draft may be.

    The draft is also timed with a trimmed LM head. The gain is by acceptance rate. It would be reached if every token
    of the parallel draft were accepted as often as its first token.
    """
    shapes = {"target": target, "draft": draft} | {
        f"draft, 1/{part} of the ids": draft.model_copy(update={"draft_vocab": draft.vocab // part})
        for part in (4, 8)
    }
    models = {
        name: with_mode(random_model(shape, dtype(), checkpoint.CPU, 512), "native")
        for name, shape in shapes.items()
    }
    grid = Grid(
        widths=range(1, 2 * k + 1),
        batches=[1],
        contexts=[128],
        prompts=[],
        repeats=passes,
        after=(),
    )
    measured = measure_passes(models, grid, clock=clock_for(checkpoint.CPU))
    ms = {
        name: {point.width: point.low_ms for point in curves.forward}
        for name, curves in measured.items()
    }
    most = {alpha: ceiling(ms["target"], ms["draft"], alpha, k) for alpha in ACCEPTANCE}
    return {
        "dtype": checkpoint.dtype_name(dtype()),
        "pass_ms": ms,
        "parallel_over_plain_at_most": most,
    }


def dtype() -> torch.dtype:
    """Return the dtype in which models are timed: bfloat16 if the CPU is fast in bfloat16, else float32."""
    return torch.bfloat16 if checkpoint.is_fast(torch.bfloat16, checkpoint.CPU) else torch.float32


def ceiling(target_ms: dict[int, float], draft_ms: dict[int, float], alpha: float, k: int) -> float:
    """Return the speed of parallel drafting divided by that of plain drafting, each at its best K up to k.

    Every drafted token is accepted with probability alpha. The pass in which a parallel draft drafts n tokens reads the
    tokens of the last step and n - 1 mask tokens.
    """
    tokens = {n: expected_tokens([alpha] * n) for n in range(1, k + 1)}
    wide_ms = {
        n: np.interp(tokens[n] + n - 1, list(draft_ms), list(draft_ms.values())) for n in tokens
    }
    plain = max(tokens[n] / (n * draft_ms[1] + target_ms[n + 1]) for n in tokens)
    return float(max(tokens[n] / (wide_ms[n] + target_ms[n + 1]) for n in tokens) / plain)


def vllm_gap(folder: Path, parallel: str, program: Path) -> float:
    """Export a draft to vLLM. Return the relative difference between vLLM's and draftlab's tokens per target pass."""
    served = {
        "draft": str(folder / parallel),
        "target": "tiny",
        "data": "stdlib",
        "to": "vllm",
        "verify_with": program,
        "k": 4,
    }
    out = made("export", folder / "export", **served)
    text = str(json.loads((out / "draftlab.json").read_text())["notes"]["verified"])
    theirs, ours = (float(text.split(word)[1].split()[0]) for word in (": ", "draftlab expects "))
    return theirs / ours - 1


def made(command: str, out: Path, **settings: Any) -> Path:
    """Return the output of a command. Run the command unless an earlier run has made the output."""
    if not (out / "draftlab.json").exists():
        COMMANDS[command](**settings, out=out)
    return out


def heldout(draft: Path) -> list[dict[str, Any]]:
    """Return the held-out evaluations of a training run: step, acceptance, and acceptance by position in the draft."""
    records = [each for each in read_log(draft / "log.jsonl") if isinstance(each, EvalRecord)]
    return [
        {"step": each.step, "acceptance": each.acceptance, "offsets": each.offsets}
        for each in records
    ]


def seconds(out: Path) -> float:
    return float(json.loads((out / "draftlab.json").read_text())["notes"]["seconds"])


if __name__ == "__main__":
    typer.run(main)
