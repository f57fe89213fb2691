"""Make lm-eval tasks from files on this disk: HellaSwag, ARC and GSM8K as they are published, or stand-ins from text.

Each command writes NAME.jsonl and NAME.yaml; then `draftlab score --tasks OUT/NAME.yaml`. docs/measuring.md
"""

import itertools
import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from lm_eval.tasks.hellaswag.utils import preprocess
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

HERE = Path(__file__).parent
CONTEXT_WORDS = (20, 80)  # least and most before the sentence to choose
SENTENCE_WORDS = (6, 40)
LENGTH_RATIO = (0.7, 1.4)  # of a wrong sentence to the right one, in characters
PASSAGE_WORDS = 40
HEADING = re.compile(r"^ ?= ([^=].*) = *$")

File = Annotated[Path, typer.Argument(exists=True, dir_okay=False)]
Out = Annotated[Path, typer.Option(help="Folder to write.")]
Items = Annotated[int, typer.Option(help="Most items.", min=1)]
Row = dict[str, Any]
app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)


@app.command()
def hellaswag(file: File, out: Out = Path("tasks")) -> None:
    """local_hellaswag, from JSON lines with ctx, endings and label; activity_label, ctx_a and ctx_b where they are."""
    write("local_hellaswag", [hellaswag_row(row) for row in read(file, "endings", "label")], out)


@app.command()
def arc(file: File, out: Out = Path("tasks")) -> None:
    """local_arc, from JSON lines of ARC: question, choices, answerKey, in the layout of AI2's files or of the hub."""
    write("local_arc", [arc_row(row) for row in read(file, "question", "answerKey")], out)


@app.command()
def gsm8k(
    file: File,
    examples: Annotated[Path, typer.Option(exists=True, help="Training file.")],
    out: Out = Path("tasks"),
) -> None:
    """local_gsm8k and local_gsm8k_answer, from JSON lines with question and answer; examples are for --num-fewshot."""
    for name, source in (("local_gsm8k", file), ("local_gsm8k_examples", examples)):
        rows = [{"question": row["question"], "answer": row["answer"]} for row in read(source, "question", "answer")]
        write(name, rows, out)
    shutil.copy(HERE / "answer_bits.py", out)
    write("local_gsm8k_answer", None, out)


@app.command()
def next_sentence(file: File, out: Out = Path("tasks"), items: Items = 1000, seed: int = 0) -> None:
    """next_sentence, from text: the sentence that follows, against three of other articles about as long."""
    write(
        "next_sentence",
        sampled(next_sentences(file.read_text(), random.Random(seed)), items, seed),
        out,
    )


@app.command()
def which_article(file: File, out: Out = Path("tasks"), items: Items = 1000, seed: int = 0) -> None:
    """which_article, from WikiText: the title of the article that a passage is from, against three other titles."""
    write(
        "which_article",
        sampled(which_articles(file.read_text(), random.Random(seed)), items, seed),
        out,
    )


def read(file: Path, *needed: str) -> list[Row]:
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    for number, row in enumerate(rows, 1):
        if missing := [name for name in needed if name not in row]:
            raise typer.BadParameter(f"{file}, line {number} has no {missing[0]}; it has {', '.join(row)}")
    return rows


def write(name: str, rows: list[Row] | None, out: Path) -> None:
    """Write the rows of a task, and its YAML with absolute paths where there is one."""
    out.mkdir(parents=True, exist_ok=True)
    if rows is not None:
        if not rows:
            raise typer.BadParameter(f"no item for {name} in this file")
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if (HERE / f"{name}.yaml").exists():
        text = (HERE / f"{name}.yaml").read_text()
        (out / f"{name}.yaml").write_text(re.sub(r"\w+\.jsonl", lambda m: str(out.absolute() / m.group()), text))
        typer.echo(f"{out / name}.yaml" + (f": {len(rows)} items" if rows else ""))


def hellaswag_row(row: Row) -> Row:
    """Return query, choices and label as lm-eval's hellaswag makes them."""
    context = row["ctx_a"] + " " + row["ctx_b"].capitalize() if "ctx_b" in row else row["ctx"]
    topic = f"{row['activity_label']}: " if "activity_label" in row else ""
    return {
        "query": preprocess(topic + context),
        "choices": list(map(preprocess, row["endings"])),
        "label": int(row["label"]),
    }


def arc_row(row: Row) -> Row:
    question, choices = row["question"], row.get("choices")
    if isinstance(question, dict):  # AI2's files: {"stem": ..., "choices": [{"text": ..., "label": ...}]}
        question, pairs = question["stem"], question["choices"]
        choices = {name: [pair[name] for pair in pairs] for name in ("text", "label")}
    return {
        "query": question,
        "choices": choices["text"],
        "label": choices["label"].index(row["answerKey"]),
    }


def sampled(rows: Iterator[Row], items: int, seed: int) -> list[Row]:
    every = list(rows)
    random.Random(seed).shuffle(every)
    return every[:items]


def next_sentences(text: str, rng: random.Random) -> Iterator[Row]:
    every = [[run for p in paragraphs for run in whole_sentences(p)] for _, paragraphs in articles(text)]
    # wrong sentences are of other groups
    groups = every if len(every) > 1 else [[run] for run in every[0]]
    pool = [(i, s) for i, runs in enumerate(groups) for run in runs for s in run if fits(s)]
    for i, runs in enumerate(groups):
        for run in runs:
            for at in range(1, len(run)):
                context = last_words(run[:at])
                low, high = (ratio * len(run[at]) for ratio in LENGTH_RATIO)
                wrong = sorted({s for other, s in pool if other != i and s != run[at] and low <= len(s) <= high})
                if context and fits(run[at]) and len(wrong) >= 3:
                    yield shuffled(context, run[at], rng.sample(wrong, 3), rng)


def fits(sentence: str) -> bool:
    return SENTENCE_WORDS[0] <= len(sentence.split()) <= SENTENCE_WORDS[1]


def which_articles(text: str, rng: random.Random) -> Iterator[Row]:
    every = [(title, paragraphs) for title, paragraphs in articles(text) if "<unk>" not in title]
    titles = list(dict.fromkeys(title for title, _ in every))
    if len(titles) < 4:
        raise typer.BadParameter(f"want WikiText, with headings of at least 4 articles; this file has {len(titles)}")
    for title, paragraphs in every:
        names = {word.lower() for word in re.findall(r"\w{4,}", title)}
        for run in (run for paragraph in paragraphs for run in whole_sentences(paragraph)):
            every_word = " ".join(run).split()
            for at in range(0, len(every_word) - PASSAGE_WORDS + 1, PASSAGE_WORDS):
                passage = " ".join(every_word[at : at + PASSAGE_WORDS])
                if not names & set(re.findall(r"\w+", passage.lower())):
                    wrong = rng.sample([other for other in titles if other != title], 3)
                    yield shuffled(f"Which article is this passage from? {passage} ...", title, wrong, rng)


def shuffled(query: str, right: str, wrong: list[str], rng: random.Random) -> Row:
    choices = [right, *wrong]
    rng.shuffle(choices)
    return {"query": query, "choices": choices, "label": choices.index(right)}


def articles(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield titles and paragraphs; text without WikiText's headings is one article."""
    title, paragraphs = "", list[str]()
    for line in text.splitlines():
        if heading := HEADING.match(line):
            if paragraphs:
                yield title, paragraphs
            title, paragraphs = detokenized(heading.group(1)), []
        elif line.strip() and not line.strip().startswith("="):
            paragraphs.append(detokenized(line.strip()))
    if paragraphs:
        yield title, paragraphs


def detokenized(text: str) -> str:
    return wikitext_detokenizer({"page": f"{text} "}).strip()


def whole_sentences(paragraph: str) -> Iterator[list[str]]:
    """Yield runs of sentences of a paragraph, without those of which WikiText hides a word."""
    split = re.split(r"(?<=[a-z0-9)\"][.!?]) (?=[A-Z\"])", paragraph)
    for hidden, run in itertools.groupby(split, key=lambda sentence: "<unk>" in sentence):
        if not hidden:
            yield list(run)


def last_words(before: list[str]) -> str:
    """Return the fewest last sentences that are a context, '' if they are too short or too long."""
    for first in range(len(before) - 1, -1, -1):
        text = " ".join(before[first:])
        if len(text.split()) >= CONTEXT_WORDS[0]:
            return text if len(text.split()) <= CONTEXT_WORDS[1] else ""
    return ""


if __name__ == "__main__":
    app()
