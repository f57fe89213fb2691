"""Measure the error of predictions when profile, replay, predict and score run one after the other, as users run them.

The target is the embedded target. Its drafts are pruned, and distilled for a few steps. Acceptance comes from a replay
over the prompts that score decodes. So only latencies can differ between prediction and score, because profiles are
measured in another process and at another time.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks import environment, speedups
from draftlab.console import note
from draftlab.errors import UserError

SHAPES = ("2x192", "4x192", "12x128")
KS = "1-6"
TEXTS = (
    "--num-prompts",
    "10",
    "--prompt-tokens",
    "64",
    "--max-new-tokens",
    "96",
    "--data",
    "stdlib",
)
SCORE_TEXTS = (
    "--num-prompts",
    "10",
    "--prompt-tokens",
    "64",
    "--max-new-tokens",
    "96",
    "--data",
    "stdlib",
)

FEW = ("--batch-size", "16", "--seq-len", "128", "--training-dtype", "float32")


def main(
    mode: Annotated[str, typer.Option(help="eager or native.")] = "native",
    steps: Annotated[int, typer.Option(help="Training steps of each draft.")] = 30,
    repeats: Annotated[int, typer.Option(help="Repeats of the score.")] = 2,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "draftlab.yaml").write_text("target: tiny\nsource: tiny\ndata: stdlib\n")
        for shape in SHAPES:
            layers, width = shape.split("x")
            cut = ("prune", "--layers", layers, "--width", width, "--calibration-tokens", "4096")
            _type(work, *cut, "--out", f"cut-{shape}")
            _type(
                work,
                "distill",
                "--draft",
                f"cut-{shape}",
                "--steps",
                str(steps),
                *FEW,
                "--out",
                shape,
            )
        running = ("--mode", mode, "--threads", "1")
        _type(
            work,
            "profile",
            "tiny",
            *SHAPES,
            "--k",
            "6",
            "--context",
            "64,112,168",
            *running,
            "--out",
            "profiles",
        )
        _type(work, "outputs", "build", "--use", "replay", *TEXTS, "--out", "texts")
        drafts = [word for shape in SHAPES for word in ("--draft", shape)]
        _type(work, "replay", "texts", *drafts, "--k", "6", "--out", "replays")
        found = []
        for shape in SHAPES:
            rows = _predicted(work, shape)
            scored = _type(
                work, "score", "--exhaustive", "--draft", shape, "--k", KS, *SCORE_TEXTS, *running,
                "--repeats", str(repeats), "--out", f"score-{shape}", "--json",
            )  # fmt: skip
            found += [
                _row(shape, row, rows[row["num_speculative_tokens"]]) for row in scored["scores"]
            ]
    errors = [abs(row["error"]) for row in found]
    print(
        json.dumps(
            {
                "benchmark": "predict_as_typed", "target": "tiny", "mode": mode, "distilled_steps": steps,
                "median_error": median(errors), "largest_error": max(errors),
                "mean_signed_error": sum(row["error"] for row in found) / len(found),
                "inside_measured_interval": sum(row["inside"] for row in found) / len(found), "rows": found,
                "best_k": _best(found),
            } | environment(1)
        )
    )  # fmt: skip


def _predicted(work: Path, shape: str) -> dict[int, dict[str, Any]]:
    read = _type(
        work, "predict", "--draft-profile", f"profiles/{shape}.yaml", "--target-profile", "profiles/tiny.yaml",
        "--acceptance", f"replays/{shape}", "--k", KS, "--json",
    )  # fmt: skip
    return {row["k"]: row for row in read["predictions"][0]["rows"]}


def _row(shape: str, measured: dict[str, Any], predicted: dict[str, Any]) -> dict[str, Any]:
    value, (speedup, low, high) = predicted["speedup"]["value"], speedups(measured)["tpot_speedup"]
    return {
        "draft": shape, "k": measured["num_speculative_tokens"], "measured": speedup,
        "measured_low": low, "measured_high": high, "predicted": value, "error": value / speedup - 1,
        "inside": low <= value <= high,
        "length_measured": measured["tokens_per_target_pass"],
        "length_predicted": predicted["tokens_per_pass"]["value"],
    }  # fmt: skip


def _best(rows: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the fastest K of each draft, by prediction and by measurement."""
    return {
        shape: {
            side: max((row for row in rows if row["draft"] == shape), key=lambda row: row[side])[
                "k"
            ]
            for side in ("predicted", "measured")
        }
        for shape in SHAPES
    }


def _type(work: Path, *words: str) -> dict[str, Any]:
    """Run a command of draftlab in a folder. Return its JSON if `words` has --json, else {}."""
    note("draftlab " + " ".join(words))
    done = subprocess.run(
        [sys.executable, "-m", "draftlab", *words],
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UserError(
            f"draftlab {' '.join(words)} ended with {done.returncode}: {done.stderr.strip()[-300:]}"
        )
    return json.loads(done.stdout) if "--json" in words else {}


if __name__ == "__main__":
    typer.run(main)
