"""Compare predicted with measured speed-ups for LLaMA-65B on a GPU, at each draft and K of a result of large_target.

    python -m benchmarks.gpu_prediction RESULT --device-profile h200 --law runs/gpu/target --drafts runs/gpu/drafts

"constants": Predictions from a profile of configs/profiles, which is fitted to nothing of this device. "law":
Predictions from profiles of the drafts on the device, and from the latency law that gpu.sh fits to the target's first
1 to 10 layers, up to the largest K that was profiled. Each drafted token is accepted with probability --alpha in
predictions and measurements alike. Errors are those of the speed-up, predicted over measured minus one.
"""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks import environment
from benchmarks.large_target import shape_of
from draftlab.latency.cost_model import CostModel, Profile, expected_tokens, read_profile
from draftlab.latency.predict import predict
from draftlab.latency.roofline import parse_profile
from draftlab.latency.scaling_law import read_law
from draftlab.latency.workload import constant_workload

MAX_K = 16  # largest K that is predicted from constants


def main(
    result: Annotated[Path, typer.Argument(help="JSON of benchmarks.large_target.")],
    device_profile: Annotated[str, typer.Option(help="Profile of the device.")] = "h200",
    law: Annotated[Path, typer.Option(help="Latency law of the target.")] = Path("runs/gpu/target"),
    drafts: Annotated[Path, typer.Option(help="Profiles of the drafts.")] = Path("runs/gpu/drafts"),
    alpha: Annotated[float, typer.Option(help="Acceptance probability.")] = 0.8,
) -> None:
    measured = json.loads(result.read_text())
    target, mode = measured["target"], measured["mode"]
    longest = measured["prompt_tokens"] + measured["new_tokens"] + MAX_K

    def computed(name: str) -> Profile:
        spec = f"{name}@{device_profile},{mode}"
        return parse_profile(spec, widths=range(1, MAX_K + 2), batches=[1], longest=longest)

    def profiled(name: str) -> Profile:
        if name == target:
            return read_law(law).profile(shape_of(target), target)
        return read_profile(drafts / f"{name}.yaml")

    sources = {}
    for source, profile in {"constants": computed, "law": profiled}.items():
        rows = [
            row for name in measured["rows"] for row in compared(measured, name, profile, alpha)
        ]
        errors = [abs(row["error"]) for row in rows]
        plain = rows[0]["predicted_plain_ms"]
        sources[source] = {
            "plain_ms": plain, "plain_error": plain / measured["plain_ms"] - 1, "median_error": median(errors),
            "largest_error": max(errors), "rows": {f"{row['draft']}, K = {row['k']}": row for row in rows},
        }  # fmt: skip
    about = {key: measured[key] for key in ("device", "target", "layers", "mode", "dtype")}
    about |= {"alpha": alpha, "device_profile": device_profile, "measured": measured["date"]}
    print(json.dumps({"benchmark": "gpu_prediction", **about, **sources, **environment(1)}))


def compared(
    measured: dict[str, Any], name: str, profile: Callable[[str], Profile], alpha: float
) -> list[dict[str, Any]]:
    """Return the measured and predicted speed-up of a draft at each measured K that the target's profile reaches."""
    draft, target = profile(name), profile(measured["target"])
    widest = max(point.width for point in target.forward)
    rows = {row["k"]: row for row in measured["rows"][name] if row["k"] < widest}
    work = constant_workload(
        alpha, tokens=measured["new_tokens"], prompt_tokens=measured["prompt_tokens"]
    )
    found = predict(CostModel.of(draft), CostModel.of(target), work, list(rows))
    result = []
    for own, (k, row) in zip(found.rows, rows.items(), strict=True):
        speedup = expected_tokens(alpha, k) * measured["plain_ms"] / row["step_ms"]
        guess = own.tokens_per_second / found.plain_tokens_per_second
        result.append(
            {
                "draft": name, "k": k, "measured": speedup, "predicted": guess, "error": guess / speedup - 1,
                "predicted_plain_ms": 1e3 / found.plain_tokens_per_second,
            }
        )  # fmt: skip
    return result


if __name__ == "__main__":
    typer.run(main)
