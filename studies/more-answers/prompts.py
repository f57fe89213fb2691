"""Write prompts whose answers by SmolLM2 train its drafts: one JSON line for each prompt, with a category.

    python -m benchmarks.smollm2_prompts --gsm8k gsm8k_train.jsonl --wikitext wikitext2_valid.txt --out prompts.jsonl

The instructions and German sentences were written for this script. Python docstrings come from the installed standard
library. Training questions of GSM8K and articles of WikiText are added if their files are named. Prompts of Spec-Bench
are not used.
"""

import argparse
import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from draftlab.data.instructions import code, instructions, questions

COUNTS = {
    "math": 1200,
    "instruction": 1700,
    "question": 700,
    "translation": 400,
    "summary": 700,
    "code": 400,
}
MORE = {
    "math": 3400,
    "instruction": 2600,
    "question": 700,
    "translation": 600,
    "summary": 1900,
    "code": 400,
}


WHO = "Der Minister|Die Lehrerin|Mein Bruder|Die Firma|Der Verein|Unsere Nachbarin|Die Polizei|Der Bürgermeister"
DID = "kündigte an|sagte|erklärte|bestätigte|hofft|berichtete|schrieb|glaubt"
THAT = """dass der Bahnhof bis zum Sommer umgebaut wird|dass die Ausstellung am Montag beginnt
dass das Konzert wegen des Regens verschoben wurde|dass mehr Geld für Schulen nötig ist
dass die Straße drei Wochen lang gesperrt bleibt|dass niemand bei dem Unfall verletzt wurde
dass die Zahl der Besucher gestiegen ist|dass das neue Gesetz im Januar in Kraft tritt
dass der Vertrag im nächsten Jahr endet|dass viele Menschen in der Stadt keine Wohnung finden""".replace(
    "\n", "|"
)


def translations(rng: random.Random) -> Iterator[str]:
    while True:
        who, did, that = (rng.choice(part.split("|")) for part in (WHO, DID, THAT))
        yield f"Translate German to English: {who} {did}, {that}."


def math(file: Path | None, rng: random.Random) -> Iterator[str]:
    lines = [] if file is None else file.read_text().splitlines()
    rng.shuffle(lines)
    yield from (json.loads(line)["question"] for line in lines)


def summaries(files: Sequence[Path], rng: random.Random) -> Iterator[str]:
    """Yield prompts, each a paragraph of WikiText with a task: to summarize, to name its topic, or to continue it."""
    text = "".join(file.read_text() for file in files)
    paragraphs = [
        p.strip() for p in text.splitlines() if 400 < len(p) < 1600 and not p.startswith(" =")
    ]
    rng.shuffle(paragraphs)
    tasks = (
        "Summarize: {}",
        "{}\n\nWhat is this text about?",
        "Continue this article:\n{}",
        "Summarize in one sentence:\n{}",
    )
    yield from (
        rng.choice(tasks).format(paragraph.replace(" @-@ ", "-")) for paragraph in paragraphs
    )


def prompts(
    gsm8k: Path | None, wikitext: Sequence[Path], seed: int, counts: Mapping[str, int] = COUNTS
) -> list[dict[str, str]]:
    """Return distinct prompts in a random order. counts: Largest number of prompts by category."""
    rng = random.Random(seed)
    sources = {
        "math": math(gsm8k, rng), "instruction": instructions(rng), "question": questions(rng),
        "translation": translations(rng), "summary": summaries(wikitext, rng), "code": code(rng),
    }  # fmt: skip
    rows = []
    for category, source in sources.items():
        distinct = dict.fromkeys(itertools.islice(source, 3 * counts[category]))
        rows += [
            {"prompt": text, "category": category}
            for text in itertools.islice(distinct, counts[category])
        ]
    rng.shuffle(rows)
    return rows


def more_prompts(
    first: Sequence[Mapping[str, str]], gsm8k: Path | None, wikitext: Sequence[Path], seed: int
) -> list[dict[str, str]]:
    """Return further prompts. None of them is in `first`."""
    known = {row["prompt"] for row in first}
    return [row for row in prompts(gsm8k, wikitext, seed, MORE) if row["prompt"] not in known]


def write(file: Path, rows: Sequence[Mapping[str, str]]) -> int:
    """Write a JSON line for each prompt, and return the number of prompts."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gsm8k", type=Path)
    parser.add_argument("--wikitext", type=Path, nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    print(f"{args.out}: {write(args.out, prompts(args.gsm8k, args.wikitext, args.seed))} prompts")


if __name__ == "__main__":
    main()
