"""Prompts that SmolLM2 answers for its drafts to learn from: one JSON line each, with a category.

    python -m benchmarks.smollm2_prompts --gsm8k gsm8k_train.jsonl --wikitext wikitext2_valid.txt --out prompts.jsonl

Instructions and German sentences are of our own writing, Python docstrings are the standard library's on this disk.
GSM8K's training questions and WikiText's articles are added where their files are named. Spec-Bench's are not used.
"""

import argparse
import ast
import itertools
import json
import random
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

COUNTS = {"math": 1200, "instruction": 1700, "question": 700, "translation": 400, "summary": 700, "code": 400}
MORE = {"math": 3400, "instruction": 2600, "question": 700, "translation": 600, "summary": 1900, "code": 400}

TOPICS = """
photosynthesis|the water cycle|plate tectonics|black holes|vaccines|the immune system|supply and demand|inflation
climate change|renewable energy|solar panels|electric cars|the French Revolution|the Roman Empire|the Silk Road
the Industrial Revolution|World War I|the Cold War|democracy|human rights|the scientific method|natural selection
DNA|gravity|magnetism|electric circuits|sound waves|light and colour|chemical bonds|acids and bases|the periodic table
atoms and molecules|probability|statistics|linear equations|prime numbers|fractions|geometry|calculus|machine learning
neural networks|computer viruses|the internet|databases|operating systems|cryptography|blockchain|open source software
healthy eating|regular exercise|good sleep|stress at work|meditation|yoga|public speaking|job interviews
time management
teamwork|leadership|budgeting|saving money|investing|credit cards|taxes|starting a small business|marketing
social media|photography|painting|classical music|jazz|poetry|short stories|theatre|film making|architecture|gardening
cooking pasta|baking bread|coffee|tea ceremonies|travelling alone|camping|hiking|cycling|swimming|football|chess
learning a language|learning the guitar|reading books|writing letters|keeping a diary|raising a puppy|house cats
bees|whales|rain forests|deserts|coral reefs|volcanoes|earthquakes|hurricanes|rivers|the Moon|Mars|satellites
telescopes
space travel|robots|3D printing|drones|smart phones|remote work|online courses|schools|universities|libraries|museums
""".replace("\n", "|").strip("|").split("|")  # fmt: skip
TASKS = """
Explain {} to a ten-year-old.|Write a short paragraph about {}.|What are the main ideas behind {}?
Give me five facts about {}.
List three advantages and three disadvantages of {}.|Write an email to a colleague about {}.
Describe the history of {}.
Write a blog post introduction about {}.|How would you teach a class about {}? Outline the lesson.
Why does {} matter today?
Write a short dialogue between a teacher and a student about {}.|Summarize what is known about {} in three sentences.
Write a poem of eight lines about {}.|What are common misconceptions about {}?
Give step-by-step advice for someone new to {}.
Compare {} and {}.|How are {} and {} related?|Write three quiz questions with answers about {}.
What questions does {} leave open?
Imagine you are an expert on {}. Introduce yourself and your work.|Write a product description that mentions {}.
Argue for and against {} in a short essay.
Extract the key terms from this request and define each: tell me about {} and {}.
Rewrite this sentence in a formal style: "I really want to know more about {}."
Tell a short story in which {} plays a part.
""".replace("\n", "|").strip("|").split("|")  # fmt: skip
QUESTIONS = """
What is the capital of {country}?|Which language is spoken in {country}?|Where is {country}?
What is {country} famous for?
How many people live in {country}?|What is the currency of {country}?|Who leads the government of {country}?
When did {country} become independent?|What do people eat in {country}?|What is the largest city in {country}?
Who invented the {thing}?|When was the {thing} invented?|What is a {thing} used for?|How does a {thing} work?
What is a {thing} made of?|Where can I buy a {thing}?|Who made the first {thing}?|How much does a {thing} cost?
""".replace("\n", "|").strip("|").split("|")  # fmt: skip
COUNTRIES = """France|Germany|Spain|Italy|Portugal|Greece|Poland|Sweden|Norway|Finland|Turkey|Egypt|Kenya|Nigeria
Ghana|Morocco
South Africa|Ethiopia|India|Pakistan|China|Japan|South Korea|Vietnam|Thailand|Indonesia|Australia|New Zealand
Canada|Mexico
Brazil|Argentina|Chile|Peru|Colombia|Cuba|Russia|Ukraine|Ireland|the Netherlands""".replace("\n", "|").split("|")
THINGS = (
    """telephone|bicycle|steam engine|light bulb|printing press|microscope|telescope|compass|camera|radio|television
computer|transistor|battery|refrigerator|washing machine|sewing machine|typewriter|airplane|helicopter|rocket
submarine
piano|violin|guitar|clock|thermometer|barometer|zipper|umbrella|elevator|tractor|laser|microwave oven|parachute|pencil
""".replace("\n", "|")
    .strip("|")
    .split("|")
)
WHO = "Der Minister|Die Lehrerin|Mein Bruder|Die Firma|Der Verein|Unsere Nachbarin|Die Polizei|Der Bürgermeister"
DID = "kündigte an|sagte|erklärte|bestätigte|hofft|berichtete|schrieb|glaubt"
THAT = """dass der Bahnhof bis zum Sommer umgebaut wird|dass die Ausstellung am Montag beginnt
dass das Konzert wegen des Regens verschoben wurde|dass mehr Geld für Schulen nötig ist
dass die Straße drei Wochen lang gesperrt bleibt|dass niemand bei dem Unfall verletzt wurde
dass die Zahl der Besucher gestiegen ist|dass das neue Gesetz im Januar in Kraft tritt
dass der Vertrag im nächsten Jahr endet|dass viele Menschen in der Stadt keine Wohnung finden""".replace("\n", "|")


def instructions(rng: random.Random) -> Iterator[str]:
    while True:
        first, second = rng.sample(TOPICS, 2)
        yield rng.choice(TASKS).format(first, second)


def questions(rng: random.Random) -> Iterator[str]:
    while True:
        yield rng.choice(QUESTIONS).format(country=rng.choice(COUNTRIES), thing=rng.choice(THINGS))


def translations(rng: random.Random) -> Iterator[str]:
    while True:
        who, did, that = (rng.choice(part.split("|")) for part in (WHO, DID, THAT))
        yield f"Translate German to English: {who} {did}, {that}."


def code(rng: random.Random) -> Iterator[str]:
    """Yield docstrings of the standard library's functions."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    rng.shuffle(files)
    for file in files:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)) and 40 < len(text) < 400:
                arguments = ", ".join(a.arg for a in node.args.args)
                yield f"Write a Python function {node.name}({arguments}) that does this:\n{text}"


def math(file: Path | None, rng: random.Random) -> Iterator[str]:
    lines = [] if file is None else file.read_text().splitlines()
    rng.shuffle(lines)
    yield from (json.loads(line)["question"] for line in lines)


def summaries(files: Sequence[Path], rng: random.Random) -> Iterator[str]:
    """Yield paragraphs of WikiText with a task: a summary, or an answer from the text."""
    text = "".join(file.read_text() for file in files)
    paragraphs = [p.strip() for p in text.splitlines() if 400 < len(p) < 1600 and not p.startswith(" =")]
    rng.shuffle(paragraphs)
    tasks = (
        "Summarize: {}",
        "{}\n\nWhat is this text about?",
        "Continue this article:\n{}",
        "Summarize in one sentence:\n{}",
    )
    yield from (rng.choice(tasks).format(paragraph.replace(" @-@ ", "-")) for paragraph in paragraphs)


def prompts(
    gsm8k: Path | None, wikitext: Sequence[Path], seed: int, counts: Mapping[str, int] = COUNTS
) -> list[dict[str, str]]:
    """Return distinct prompts in a random order, at most so many of each category."""
    rng = random.Random(seed)
    sources = {
        "math": math(gsm8k, rng), "instruction": instructions(rng), "question": questions(rng),
        "translation": translations(rng), "summary": summaries(wikitext, rng), "code": code(rng),
    }  # fmt: skip
    rows = []
    for category, source in sources.items():
        distinct = dict.fromkeys(itertools.islice(source, 3 * counts[category]))
        rows += [{"prompt": text, "category": category} for text in itertools.islice(distinct, counts[category])]
    rng.shuffle(rows)
    return rows


def more_prompts(
    first: Sequence[Mapping[str, str]], gsm8k: Path | None, wikitext: Sequence[Path], seed: int
) -> list[dict[str, str]]:
    """Return prompts that are none of the first."""
    known = {row["prompt"] for row in first}
    return [row for row in prompts(gsm8k, wikitext, seed, MORE) if row["prompt"] not in known]


def write(file: Path, rows: Sequence[Mapping[str, str]]) -> int:
    """Write prompts, one JSON line each; return how many there are."""
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
