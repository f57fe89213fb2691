"""Compute the cost of making a draft for targets of 1B, 8B and 70B parameters: python -m benchmarks.costs

No model is run. Operations are counted as `--dry-run` counts them. Hours are those of one H100. Training and
calibration are assumed to reach 40 % of its bf16 peak. The target writes 32 texts at a time, and is assumed to read its
weights at the bandwidth that a decoder reaches.
"""

import json
from dataclasses import dataclass
from datetime import date

from draftlab import shipped
from draftlab.latency.roofline import Device
from draftlab.model.families import presets
from draftlab.model.shape import Shape, resolve
from draftlab.reading import read_model

CALIBRATION_TOKENS, TRAINING_TOKENS, STORED_TOKENS, SEQ_LEN, ROWS = (
    32_768,
    50_000_000,
    10_000_000,
    1024,
    32,
)
TRAINED_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class Pair:
    target: str
    source: str
    layers: int
    hidden: int


PAIRS = [
    Pair("llama-3.2-1b", "llama-3.2-1b", 3, 1024),
    Pair("llama-3.1-8b", "llama-3.2-1b", 4, 2048),
    Pair("llama-3.1-70b", "llama-3.1-8b", 4, 2048),
]


def costs(
    pair: Pair, shapes: dict[str, Shape], peak_tflops: float, bandwidth_gbs: float
) -> dict[str, object]:
    """Return the operations, memory, disk and hours that it takes to make a draft on one device of this speed."""
    target, source = shapes[pair.target], shapes[pair.source]
    draft = resolve(source, layers=pair.layers, hidden=pair.hidden)
    calibration = 2 * CALIBRATION_TOKENS * source.flops_per_token(SEQ_LEN // 2)
    training = TRAINING_TOKENS * (
        3 * draft.flops_per_token(SEQ_LEN // 2) + target.flops_per_token(SEQ_LEN // 2)
    )
    writing_seconds = TRAINING_TOKENS / ROWS * target.weight_bytes() / (bandwidth_gbs * 1e9)
    return {
        "draft": draft.describe(),
        "draft_parameters_millions": draft.params() / 1e6,
        "draft_gb": draft.weight_bytes() / 1e9,
        "prune_tflop": calibration / 1e12,
        "prune_minutes": calibration / (TRAINED_SHARE * peak_tflops * 1e12) / 60,
        "distill_tflop": training / 1e12,
        "distill_hours": training / (TRAINED_SHARE * peak_tflops * 1e12) / 3600,
        "write_text_hours": writing_seconds / 3600,
        "distill_gb": (16 * draft.params() + target.weight_bytes()) / 1e9,
        "distill_from_outputs_gb": 16 * draft.params() / 1e9,
        "outputs_gb": STORED_TOKENS * (6 * 64 + 34) / 1e9,
    }


def main() -> None:
    shapes, device = (
        presets(shipped.folder("widths")),
        read_model(Device, shipped.folder("profiles") / "h100.yaml"),
    )
    tflops, bandwidth = device.tflops["bfloat16"], device.bandwidth_gbs
    result = {pair.target: costs(pair, shapes, tflops, bandwidth) for pair in PAIRS}
    assumed = {
        "device": device.name, "tflops": tflops, "bandwidth_gbs": bandwidth, "training_share": TRAINED_SHARE,
        "training_tokens": TRAINING_TOKENS, "stored_tokens": STORED_TOKENS,
    }  # fmt: skip
    about = {"benchmark": "costs", "measured": False, "date": date.today().isoformat()}
    print(json.dumps(about | {"assumed": assumed, "targets": result}, indent=1))


if __name__ == "__main__":
    main()
