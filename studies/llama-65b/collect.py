"""Predict the answer to the paper's question: which draft and K are fastest for LLaMA-65B on four A100 at each alpha?

Nothing is measured. Profiles are computed from configs/profiles, with the drafts on one A100 as in the paper. Every
drafted token is accepted with the same probability alpha. Prompts have 128 tokens, and answers have 200 tokens.
"""

import json
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from draftlab.latency.cost_model import CostModel
from draftlab.latency.predict import best_k, predict
from draftlab.latency.roofline import parse_profile
from draftlab.latency.workload import constant_workload
from draftlab.results.plots import COLOURS, MARKERS

DRAFTS = {  # layers, parameters
    "noft-1.3b": "NoFT-1.3B, 24 layers",
    "wide-1.3b": "Wide-1.3B, 12 layers",
    "wide-796m": "Wide-796M, 5 layers",
    "wide-543m": "Wide-543M, 3 layers",
    "wide-290m": "Wide-290M, 1 layer",
}
TARGET, ON, TARGET_ON = "llama-65b", "a100-80gb", "4xa100-80gb"
MODES = ("eager", "graphs")
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)
KS = range(1, 17)
PROMPT, NEW = 128, 200


def main(
    figure: Annotated[Path | None, typer.Option(help="Figure to write, .svg or .png.")] = None,
) -> None:
    curves = {mode: {name: _cost(f"{name}@{ON},{mode}") for name in DRAFTS} for mode in MODES}
    targets = {mode: _cost(f"{TARGET}@{TARGET_ON},{mode}") for mode in MODES}

    def rates(mode: str, name: str, alpha: float) -> dict[int, float]:
        """Return the predicted tokens per second by K. K = 0 is plain decoding."""
        work = constant_workload(alpha, tokens=NEW, prompt_tokens=PROMPT)
        found = predict(curves[mode][name], targets[mode], work, KS)
        return {0: found.plain_tokens_per_second} | {
            row.k: row.tokens_per_second for row in found.rows
        }

    def needed(mode: str, name: str, rate: float) -> float | None:
        """Return the lowest alpha at which a draft reaches `rate` tokens per second at its best K.

        Return None if the draft does not reach this rate even at alpha = 1.
        """

        def enough(alpha: float) -> bool:
            work = constant_workload(alpha, tokens=NEW, prompt_tokens=PROMPT)
            return best_k(curves[mode][name], targets[mode], work, KS)[2] >= rate

        low, high = 0.0, 1.0
        if not enough(high):
            return None
        for _ in range(12):
            middle = (low + high) / 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return high

    tables: dict[str, Any] = {}
    for mode in MODES:
        found = {name: {alpha: rates(mode, name, alpha) for alpha in ALPHAS} for name in DRAFTS}
        best = {
            alpha: max(DRAFTS, key=lambda name: max(found[name][alpha].values()))
            for alpha in ALPHAS
        }
        rival = {alpha: max(found["wide-796m"][alpha].values()) for alpha in ALPHAS}
        tables[mode] = {
            "plain_tokens_per_second": found["wide-1.3b"][0.5][0],
            "draft_ms": {
                name: float(curves[mode][name].steady_ms(1, _middle())) for name in DRAFTS
            },
            "target_ms": float(targets[mode].steady_ms(1, _middle())),
            "tokens_per_second": found,
            "fastest": best,
            "alpha_to_equal_796m": {
                name: {alpha: needed(mode, name, rival[alpha]) for alpha in ALPHAS}
                for name in DRAFTS
            },
        }
    if figure is not None:
        _draw(tables, figure)
    about = {
        "measured": False,
        "date": date.today().isoformat(),
        "prompt_tokens": PROMPT,
        "new_tokens": NEW,
    }
    print(json.dumps(about | {"modes": tables}))


def _cost(spec: str) -> CostModel:
    return CostModel.of(
        parse_profile(
            spec, widths=range(1, max(KS) + 2), batches=[1], longest=PROMPT + NEW + max(KS)
        )
    )


def _middle() -> Any:
    import numpy as np

    return np.array(PROMPT + NEW // 2)


def _draw(tables: dict[str, Any], path: Path) -> None:
    """Draw the tokens per second by K for two values of alpha, in eager mode and with CUDA graphs."""
    canvas = Figure(figsize=(9, 6), layout="constrained")
    axes = canvas.subplots(2, 2, sharex=True, sharey="row")
    for row, mode in zip(axes, MODES, strict=True):
        for ax, alpha in zip(row, (0.6, 0.8), strict=True):
            _curves(ax, tables[mode]["tokens_per_second"], alpha)
            ax.set_title(f"{mode}, alpha = {alpha:g}", fontsize=10)
    for ax in axes[-1]:
        ax.set_xlabel("K, drafted tokens per step")
    for ax in axes[:, 0]:
        ax.set_ylabel("tokens/s, predicted")
        ax.set_ylim(0, None)
    axes[0, 1].legend(fontsize=8, frameon=False, ncols=2, loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
        canvas.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _curves(ax: Axes, found: dict[str, dict[float, dict[int, float]]], alpha: float) -> None:
    for (name, label), colour, marker in zip(DRAFTS.items(), COLOURS, MARKERS, strict=False):
        rates = found[name][alpha]
        ax.plot(KS, [rates[k] for k in KS], color=colour, marker=marker, markersize=4, label=label)
    ax.axhline(next(iter(found.values()))[alpha][0], color="black", linestyle="--", linewidth=1)
    ax.set_xticks(range(2, max(KS) + 1, 2))
    ax.grid(color="black", alpha=0.12)


if __name__ == "__main__":
    typer.run(main)
