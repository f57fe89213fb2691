"""Make prompts for chat models from templates and docstrings, in place of prompts that users wrote.

python -m draftlab.data.instructions COUNT prints prompts as JSON lines, each a conversation without an answer.
"""

import ast
import itertools
import json
import random
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def _phrases(text: str) -> list[str]:
    """Return the phrases in a text, which line breaks and bars separate."""
    return re.split(r"[\n|]", text.strip())


TOPICS = _phrases("""
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
""")
TASKS = _phrases("""
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
""")
QUESTIONS = _phrases("""
What is the capital of {country}?|Which language is spoken in {country}?|Where is {country}?
What is {country} famous for?
How many people live in {country}?|What is the currency of {country}?|Who leads the government of {country}?
When did {country} become independent?|What do people eat in {country}?|What is the largest city in {country}?
Who invented the {thing}?|When was the {thing} invented?|What is a {thing} used for?|How does a {thing} work?
What is a {thing} made of?|Where can I buy a {thing}?|Who made the first {thing}?|How much does a {thing} cost?
""")
COUNTRIES = _phrases("""
France|Germany|Spain|Italy|Portugal|Greece|Poland|Sweden|Norway|Finland|Turkey|Egypt|Kenya|Nigeria
Ghana|Morocco
South Africa|Ethiopia|India|Pakistan|China|Japan|South Korea|Vietnam|Thailand|Indonesia|Australia|New Zealand
Canada|Mexico
Brazil|Argentina|Chile|Peru|Colombia|Cuba|Russia|Ukraine|Ireland|the Netherlands
""")
THINGS = _phrases("""
telephone|bicycle|steam engine|light bulb|printing press|microscope|telescope|compass|camera|radio|television
computer|transistor|battery|refrigerator|washing machine|sewing machine|typewriter|airplane|helicopter|rocket
submarine
piano|violin|guitar|clock|thermometer|barometer|zipper|umbrella|elevator|tractor|laser|microwave oven|parachute|pencil
""")


def instructions(rng: random.Random) -> Iterator[str]:
    while True:
        first, second = rng.sample(TOPICS, 2)
        yield rng.choice(TASKS).format(first, second)


def questions(rng: random.Random) -> Iterator[str]:
    while True:
        yield rng.choice(QUESTIONS).format(country=rng.choice(COUNTRIES), thing=rng.choice(THINGS))


def code(rng: random.Random) -> Iterator[str]:
    """Yield prompts that ask for a function of the Python standard library, described by its docstring."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    rng.shuffle(files)
    for file in files:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if not isinstance(node, ast.FunctionDef):
                continue
            text = ast.get_docstring(node) or ""
            if 40 < len(text) < 400:
                arguments = ", ".join(a.arg for a in node.args.args)
                yield f"Write a Python function {node.name}({arguments}) that does this:\n{text}"


def mixed(seed: int, count: int) -> list[dict[str, str]]:
    """Return at most `count` different prompts with their categories, in random order.

    Each category gives a third of the prompts, but fewer if it has too few different prompts.
    """
    rng = random.Random(seed)
    sources = {"instruction": instructions(rng), "question": questions(rng), "code": code(rng)}
    share = -(-count // len(sources))
    rows: list[dict[str, str]] = []
    for category, source in sources.items():
        distinct = dict.fromkeys(itertools.islice(source, 4 * share))
        for text in itertools.islice(distinct, share):
            rows.append({"prompt": text, "category": category})
    rng.shuffle(rows)
    return rows[:count]


if __name__ == "__main__":
    for row in mixed(0, int(sys.argv[1])):
        messages = [{"role": "user", "content": row["prompt"]}]
        print(json.dumps({"messages": messages, "category": row["category"]}))
