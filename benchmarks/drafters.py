"""Find the fastest drafter for code, prose, maths and summaries. `draftlab score` times all drafters in one process."""

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import environment, speedups
from draftlab.commands.score import score

DRAFTERS = [
    "latest-lookup", "fallback", "cascade:inner=latest-lookup,inner_tokens=3", "confidence-stop",
    "layer-skip:layers=0+3+6+7+10", "tree:widths=2x1x1",
]  # fmt: skip
# length to which prompts of summaries are cut; the shortest prompt has 286 tokens
SUMMARY_TOKENS = 280
SPEC_BENCH = ("summarization", "math_reasoning")


def main(
    draft: Annotated[Path, typer.Argument(help="A draft of tiny.")],
    texts: Annotated[
        Path,
        typer.Argument(
            help="Folder with wikitext2_test.txt, gsm8k_train.jsonl, specbench_open.jsonl."
        ),
    ],
    folder: Annotated[Path, typer.Option(help="Folder for scores.")] = Path("runs/drafters"),
    prompts: Annotated[
        int, typer.Option(help="Prompts of each kind of text. WikiText-2 has at most 8.")
    ] = 8,
    new_tokens: Annotated[int, typer.Option(help="Tokens after each prompt.")] = 64,
    k: Annotated[str, typer.Option(help="Drafted tokens per step, such as 2,5.")] = "2,5",
    temperature: Annotated[float, typer.Option(help="Temperature. 0 decodes greedily.")] = 0.0,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    questions = {
        kind: _category(texts / "specbench_open.jsonl", kind, folder) for kind in SPEC_BENCH
    }
    prose = str(_articles(texts / "wikitext2_test.txt", folder / "prose-text"))
    asked: dict[str, tuple[str, Path | None]] = {
        "code": ("stdlib", None),
        "prose": (prose, None),
        "maths": (str(texts / "gsm8k_train.jsonl"), questions["math_reasoning"]),
        "summaries": (prose, questions["summarization"]),
    }
    found = {}
    for name, (data, file) in asked.items():
        outcome = score(
            draft=[str(draft)], drafter=["ngram:tokens=1000000", *DRAFTERS], target="tiny", data=data,
            prompt_file=file, prompt_tokens=SUMMARY_TOKENS if name == "summaries" else None, num_prompts=prompts,
            max_new_tokens=new_tokens, k=k, exhaustive=True, repeats=1, temperature=temperature, threads=1,
            mode="native", dtype="float32", out=folder / name, force=True,
        )  # fmt: skip
        rows = outcome.data["scores"]
        assert isinstance(rows, list)
        found[name] = [_short(row) for row in rows if row["best"]]
        print(json.dumps({name: found[name]}), flush=True)
    asked_for = {"prompts": prompts, "new_tokens": new_tokens, "k": k, "temperature": temperature}
    print(json.dumps({"texts": found, **asked_for, **environment(1)}))


def _category(file: Path, category: str, folder: Path) -> Path:
    rows = [
        line for line in file.read_text().splitlines() if json.loads(line)["category"] == category
    ]
    out = folder / f"{category}.jsonl"
    out.write_text("\n".join(rows) + "\n")
    return out


def _articles(file: Path, folder: Path) -> Path:
    """Write a file for each article of WikiText. An article begins with a line such as ' = Title = '."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = re.split(r"(?m)^(?= = [^=].* = $)", file.read_text())
    for i, part in enumerate(parts):
        (folder / f"{i}.txt").write_text(part)
    return folder


def _short(row: dict[str, object]) -> dict[str, object]:
    kept = (
        "draft", "num_speculative_tokens", "tokens_per_target_pass", "mean_acceptance_length", "draft_acceptance_rate",
        "output_tps", "plain_output_tps", "identical", "equal_texts", "distinct_4grams",
    )  # fmt: skip
    return {name: row[name] for name in kept} | speedups(row)


if __name__ == "__main__":
    typer.run(main)
