"""Time speculative decoding with targets of 1.3B and 3B parameters: expansions of SmolLM2-135M, with SmolLM2's drafts.

An expansion writes the same text as its source (expand.py). So SmolLM2's drafts have the same acceptance with a target
that is 10 or 22 times as large as SmolLM2. The expansions are profiled, and the drafts are replayed over SmolLM2's
answers. `predict` combines both, and `score` then times the same prompts.

Wide and deep drafts are compared in two ways. The first way takes drafts with equal parameters in their blocks and
equal training. The second way expands one draft to a wide and to a deep draft with equal parameters. Both write the
same text, so that only their latency differs. Drafts come from the folder of benchmarks.smollm2. If the folder is
missing, that benchmark is run with --quick. A draft of 24 layers is also cut, because a draft of nearly SmolLM2's size
is cheap for a 3B target. --quick uses the embedded target and untrained drafts, and takes a few minutes. A run that was
killed resumes in its folder. Runs with other settings have other folders.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks import environment
from benchmarks.expand import expand, larger
from draftlab.commands import COMMANDS
from draftlab.console import note
from draftlab.errors import UserError
from draftlab.importing import run
from draftlab.model import checkpoint, hub, llama
from draftlab.model.shape import parse_numbers
from draftlab.results.ranking import speedup_ratio
from draftlab.results.score import read_score
from draftlab.target_outputs.store import read_store

ROOT = Path(__file__).parents[1]
COST = "about 25 minutes on one quiet core, 7 GB of memory, 9 GB of disk for a while; --quick takes a few minutes"
LONGEST = 300  # largest number of characters in a prompt, because a prefill with 3B parameters takes seconds
SIZES: dict[
    str, dict[str, Any]
    # at four times the source's width, all scaling factors are powers of two, which bf16 represents exactly
] = {
    "1.3b": {"layers": 30, "width": 2304, "params": "1.3b"},
    "3b": {"layers": 36, "width": 2304, "params": "3b"},
}
QUICK: dict[str, dict[str, Any]] = {
    "1.3b": {"layers": 16, "width": 1024, "ffn": 1024},
    "3b": {"layers": 20, "width": 1024, "ffn": 2048},
}


@dataclass(frozen=True, kw_only=True)
class Study:
    """A target with its drafts.

    trained: A wide and a deep draft of equal training. to_expand: Draft to expand to a wide and to a deep draft.
    deeper: Number of layers of the deep expansion. prompts: Options of draftlab that name the prompts.
    """

    target: Path
    drafts: list[Path]
    trained: tuple[Path, Path] | None
    to_expand: Path
    deeper: int
    prompts: dict[str, Any]


def main(
    folder: Annotated[Path, typer.Option(help="Folder for models and scores.")] = Path(
        "runs/at-size"
    ),
    study: Annotated[Path, typer.Option(help="Folder that benchmarks.smollm2 wrote.")] = Path(
        "runs/smollm2-study"
    ),
    prompts: Annotated[int, typer.Option(help="Prompts to decode.")] = 8,
    new_tokens: Annotated[int, typer.Option(help="Tokens after each prompt.")] = 48,
    k: Annotated[str, typer.Option(help="Drafted tokens per step, such as 4,7.")] = "4,7",
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    quick: Annotated[
        bool, typer.Option(help="Use the embedded target and untrained drafts.")
    ] = False,
) -> None:
    torch.set_num_threads(threads)
    folder /= f"{'quick' if quick else 'full'}-{prompts}-{new_tokens}-{k}-{threads}"
    folder.mkdir(parents=True, exist_ok=True)
    if not quick:
        note(f"{folder}: {COST}")
    try:
        models = of_tiny(folder, min(prompts, 2)) if quick else of_smollm2(folder, study, prompts)
    except UserError as error:
        print(json.dumps({"benchmark": "at_size", "skipped": str(error)}))
        return
    running = {
        "k": parse_numbers(k),
        "max_new_tokens": min(new_tokens, 16) if quick else new_tokens,
        "threads": threads,
    }
    print(json.dumps(result(folder, models, running, quick) | environment(threads)))


def of_tiny(folder: Path, prompts: int) -> Study:
    cut = {"source": "tiny", "data": "stdlib", "calibration_tokens": 512}
    wide = made("prune", folder / "4x192", layers=4, width=192, **cut)
    deep = made("prune", folder / "12x128", layers=12, width=128, **cut)
    prompt = {"data": "stdlib", "num_prompts": prompts, "prompt_tokens": 32}
    return Study(
        target=hub.locate("tiny"),
        drafts=[],
        trained=(wide, deep),
        to_expand=wide,
        deeper=8,
        prompts=prompt,
    )


def of_smollm2(folder: Path, study: Path, prompts: int) -> Study:
    """Prepare the study on SmolLM2. Raises UserError: the package with SmolLM2 is missing."""
    runs = study / "runs"
    if not (runs / "distilled").is_dir():
        run.smollm2_file()
        note(f"{runs} has no drafts: making some, with little training")
        command = [sys.executable, "-m", "benchmarks.smollm2", "--quick", "--folder", str(study)]
        subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)
    target = study / "models" / "smollm2-135m-instruct"
    large = made(
        "prune", folder / "24", source=str(target), outputs=runs / "answers", layers=24, vocab="16k",
        calibration_tokens=16384,
    )  # fmt: skip
    depths = [
        path for name in ("5x576", "12x256", "8x384") if (path := runs / "depth" / name).is_dir()
    ]
    distilled = sorted(path for path in (runs / "distilled").iterdir() if path.is_dir())
    trained = (depths[0], depths[1]) if len(depths) > 1 and depths[0].name == "5x576" else None
    questions = shortest_prompts(study / "questions.jsonl", folder / "questions.jsonl", prompts)
    return Study(
        target=target, drafts=[*distilled, large], trained=trained, to_expand=trained[0] if trained else distilled[0],
        deeper=10 if trained else 20, prompts={"prompt_file": questions, "num_prompts": prompts},
    )  # fmt: skip


def shortest_prompts(source: Path, out: Path, count: int) -> Path:
    """Write a file with the first `count` short prompts of single turns. Their categories alternate."""
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    short = [row for row in rows if len(row["prompt"]) <= LONGEST]
    by_category = [
        [row for row in short if row["category"] == name]
        for name in sorted({r["category"] for r in short})
    ]
    mixed = [row for each in zip_longest(*by_category) for row in each if row is not None][:count]
    out.write_text(
        "".join(json.dumps({n: row[n] for n in ("prompt", "category")}) + "\n" for row in mixed)
    )
    return out


def result(folder: Path, study: Study, running: dict[str, Any], quick: bool) -> dict[str, Any]:
    """Run the study: at both sizes expand the target, profile, replay, score and predict. Then delete the expansion."""
    answers = made(
        "outputs build", folder / "answers", use="replay", target=str(study.target),
        max_new_tokens=running["max_new_tokens"], **study.prompts,
    )  # fmt: skip
    same_text = expanded_drafts(folder, study)
    small_drafts = [*same_text, *(study.trained or ()), *study.drafts[:1]]
    drafts = {"1.3b": small_drafts, "3b": study.drafts or small_drafts}
    sizes, exact = QUICK if quick else SIZES, {}
    rows: list[dict[str, Any]] = []
    for size, shape in sizes.items():
        dtype = torch.float32 if size == "1.3b" else torch.bfloat16
        if not (folder / f"equal-{size}.json").exists():
            target = expansion(study.target, folder / size, **shape)
            measured(folder, size, drafts[size], answers, study.prompts, running)
            equal = equality(study.target, target, answers, dtype)
            (folder / f"equal-{size}.json").write_text(json.dumps(equal))
            shutil.rmtree(target)
        exact[size] = json.loads((folder / f"equal-{size}.json").read_text())
        rows += compared(folder, size, running["k"])
    best = max(
        (row for row in rows if row["size"] == "3b" and row["best"]), key=lambda row: row["speedup"]
    )
    errors = [abs(row["error"]) for row in rows if row["error"] is not None]
    return {
        "benchmark": "at_size",
        "best_speedup_3b": best["speedup"],
        "best_3b": best,
        "prediction_median_error": median(errors),
        "prediction_largest_error": max(errors),
        "wide_over_deep": ratio(folder / "score-1.3b", *(study.trained or same_text)),
        "wide_over_deep_trained_alike": study.trained is not None,
        "wide_over_deep_of_one_text": ratio(folder / "score-1.3b", *same_text),
        "expansion_max_logit_error": exact["1.3b"]["logit_error"],
        "expansions": exact,
        "rows": rows,
        "quick": quick,
    }


def expanded_drafts(folder: Path, study: Study) -> tuple[Path, Path]:
    """Return two expansions of one draft with equal parameters: one with more neurons, and one with more layers."""
    deep = expansion(study.to_expand, folder / "deep-one-text", layers=study.deeper)
    params = str(checkpoint.read_shape(deep).params())
    return expansion(study.to_expand, folder / "wide-one-text", params=params), deep


@torch.inference_mode()
def equality(source: Path, expanded: Path, answers: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Compare the logits of an expansion with those of its source on stored answers.

    Return the largest error of a logit, relative to the largest logit, and the fraction of equal greedy tokens.
    """
    texts = [
        [*map(int, output.prompt), *map(int, output.ids)] for output in read_store(answers).outputs
    ]
    logits = [list(forward(path, texts, dtype)) for path in (source, expanded)]
    pairs = list(zip(*logits, strict=True))
    same = np.concatenate([(a.argmax(-1) == b.argmax(-1)).numpy() for a, b in pairs])
    return {
        "dtype": checkpoint.dtype_name(dtype),
        "logit_error": max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs),
        "same_greedy_tokens": float(same.mean()),
        "tokens": len(same),
        "shape": checkpoint.read_shape(expanded).describe(),
    }


def forward(
    path: Path, texts: Sequence[Sequence[int]], dtype: torch.dtype
) -> Iterator[torch.Tensor]:
    model = llama.load(path, dtype)
    for text in texts:
        yield model.forward_uncached(torch.tensor([text]), len(text))[0].float()


def measured(
    folder: Path,
    size: str,
    drafts: list[Path],
    answers: Path,
    prompts: dict[str, Any],
    running: dict[str, Any],
) -> None:
    """Profile an expansion and its drafts, replay the drafts, and score them on the expansion."""
    target, ks = folder / size, running["k"]
    most = max(ks)
    lengths = [len(output.prompt) for output in read_store(answers).outputs]
    context = f"{max(1, min(lengths) - 8)},{max(lengths) + running['max_new_tokens'] + most + 8}"
    made(
        "profile", folder / f"profiles-{size}", models=[str(path) for path in (target, *drafts)], k=most,
        context=context, repeats=5, dtype="bfloat16", threads=running["threads"],
    )  # fmt: skip
    made(
        "replay",
        folder / f"replays-{size}",
        directory=answers,
        draft=[str(path) for path in drafts],
        k=ks,
    )
    drafters = [f"fallback:draft={drafts[0]}"] if "prompt_file" in prompts and size == "3b" else []
    made(
        "score", folder / f"score-{size}", target=str(target), draft=[str(path) for path in drafts], drafter=drafters,
        **prompts, **running, exhaustive=True, repeats=1, dtype="bfloat16",
    )  # fmt: skip


def compared(folder: Path, size: str, ks: list[int]) -> list[dict[str, Any]]:
    """Return the measured speed-ups of an expansion's drafts, each with the predicted speed-up. All are of TPOT."""
    rows = []
    for file in sorted((folder / f"score-{size}").glob("*/score.json")):
        score = read_score(file)
        expected = predicted(
            folder / f"profiles-{size}", folder / f"replays-{size}", size, score.name, ks
        )
        for k in sorted(score.speculative):
            gain = score.best_k_tpot_speedup if k == score.best_k else score.tpot_speedup(k)
            measured = score.tpot_speedup_value(k)
            assert gain is not None  # only scores of servers lack a TPOT
            assert measured is not None
            rows.append(
                {
                    "size": size, "draft": score.name, "k": k, "best": k == score.best_k, "speedup": gain.value,
                    "interval": [gain.low, gain.high], "speedup_at_k": measured,
                    "tokens_per_pass": score.tokens_per_pass(k), "pass_ms": score.draft_ms,
                    "target_pass_ms": score.target_ms, "identical": not score.output_differs,
                    "predicted": expected.get(k), "doubt": score.doubt,
                    "error": expected[k] / measured - 1 if k in expected else None,
                }
            )  # fmt: skip
    return rows


def predicted(
    profiles: Path, replays: Path, size: str, draft: str, ks: list[int]
) -> dict[int, float]:
    """Return the predicted speed-up by K, or {} if the drafter has no draft model."""
    if not (profiles / f"{draft}.yaml").is_file():
        return {}
    found: Any = COMMANDS["predict"](
        draft_profile=[str(profiles / f"{draft}.yaml")], target_profile=str(profiles / f"{size}.yaml"),
        acceptance=[str(replays / draft)], k=ks,
    ).data["predictions"]  # fmt: skip
    return {row["k"]: row["speedup"]["value"] for row in found[0]["rows"]}


def ratio(scored: Path, wide: Path, deep: Path) -> list[float]:
    """Return the speed-up of the wide draft divided by that of the deep draft, with its 95 % interval."""
    found = speedup_ratio(*(read_score(scored / path.name / "score.json") for path in (wide, deep)))
    return [found.value, found.low, found.high]


def expansion(source: Path, out: Path, **sizes: Any) -> Path:
    """Return the path of an expansion. Make the expansion unless an earlier run has made it."""
    return (
        out if out.exists() else expand(source, out, larger(checkpoint.read_shape(source), **sizes))
    )


def made(command: str, out: Path, **settings: Any) -> Path:
    """Return the output of a command. Run the command unless an earlier run has made the output."""
    if not (out / "draftlab.json").exists():
        COMMANDS[command](**settings, out=out)
    return out


if __name__ == "__main__":
    typer.run(main)
