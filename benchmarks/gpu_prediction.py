"""Compare predicted with measured speed-ups for LLaMA-65B on a GPU, at each draft and K of a result of large_target.

    python -m benchmarks.gpu_prediction RESULT --device-profile h200 --law runs/gpu/target --drafts runs/gpu/drafts

"constants": Predictions from a profile of configs/profiles. "law": Predictions from profiles of the drafts on the
device, and from the latency law that gpu.sh fits to the target's first 1 to 10 layers, up to the largest K that was
profiled. "eager": Passes of the drafts in eager mode, with milliseconds per pass and per layer that fit them. Each
drafted token is accepted with probability --alpha in predictions and measurements alike. Errors are those of the
speed-up, predicted over measured minus one.
"""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
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
    eager: Annotated[Path, typer.Option(help="Profiles of the drafts in eager mode.")] = Path("runs/gpu/drafts-eager"),
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
        found = [compared(measured, name, profile, alpha) for name in measured["rows"]]
        plain, rows = found[0][0], [row for _, each in found for row in each]
        errors = [abs(row["error"]) for row in rows]
        sources[source] = {
            "plain_ms": plain,
            "plain_error": plain / measured["plain_ms"] - 1,
            "median_error": median(errors),
            "largest_error": max(errors),
            "rows": {f"{row['draft']}, K = {row['k']}": row for row in rows},
        }
    about = {key: measured[key] for key in ("device", "target", "layers", "mode", "dtype")}
    about |= {"alpha": alpha, "device_profile": device_profile, "measured": measured["date"]}
    sources["eager"] = launches([read_profile(eager / f"{name}.yaml") for name in measured["rows"]])
    print(json.dumps({"benchmark": "gpu_prediction", **about, **sources, **environment(1)}))


def launches(profiles: list[Profile]) -> dict[str, Any]:
    """Return the milliseconds of one-token passes in eager mode, and a straight line over the numbers of layers."""
    passes = {p.name: next(row.median_ms for row in p.steady if row.after == 1) for p in profiles}
    layers = [p.shape.layers for p in profiles if p.shape is not None]
    layer_ms, pass_ms = np.polyfit(layers, list(passes.values()), 1)
    return {"passes_ms": passes, "pass_ms": float(pass_ms), "layer_ms": float(layer_ms)}


def compared(
    measured: dict[str, Any], name: str, profile: Callable[[str], Profile], alpha: float
) -> tuple[float, list[dict[str, Any]]]:
    """Return the predicted milliseconds of a plain pass, and the speed-up of a draft, measured and predicted.

    The speed-ups are at each measured K that the target's profile reaches.
    """
    draft, target = profile(name), profile(measured["target"])
    widest = max(point.width for point in target.forward)
    rows = {row["k"]: row for row in measured["rows"][name] if row["k"] < widest}
    work = constant_workload(alpha, tokens=measured["new_tokens"], prompt_tokens=measured["prompt_tokens"])
    found = predict(CostModel.of(draft), CostModel.of(target), work, list(rows))
    result = []
    for own, (k, row) in zip(found.rows, rows.items(), strict=True):
        speedup = expected_tokens(alpha, k) * measured["plain_ms"] / row["step_ms"]
        guess = own.tokens_per_second / found.plain_tokens_per_second
        result.append({"draft": name, "k": k, "measured": speedup, "predicted": guess, "error": guess / speedup - 1})
    return 1e3 / found.plain_tokens_per_second, result


if __name__ == "__main__":
    typer.run(main)
