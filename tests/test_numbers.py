"""Every number of a page comes from a key of a record, and every record names its machine and day."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pages, tables
from benchmarks.formats import tagged
from benchmarks.pages import EXPRESSION, NUMBER, RECORDS, ROOT, SOURCES, differences

SOURCE_FILES = sorted(SOURCES.glob("*.md"))

# what may carry digits without being measured
NAMES = re.compile(
    r"""(?<![\w.])(?:
      (?:Wide|NoFT|wide|noft)-\d+(?:\.\d)?[BMbm] | (?:tiny-)?\d{1,2}x\d{3}
    | (?:Llama|LLaMA|Qwen|OPT|GPT|Mistral|Mixtral|SmolLM)-?\d*(?:\.\d)?(?:-\d+[BM])?(?:-Instruct)?
    | EAGLE-3(?:\.1)? | eagle3 | WikiText-2 | GSM8K | Medusa-[12] | ZeRO-?[123] | FSDP2 | 4-grams?
    | int[48] | bf16 | fp(?:8|16|32) | b?float(?:16|32) | Q\d_(?:\d|K(?:_M)?) | B?F(?:16|32)
    | [AH]\d00s? | AVX2 | AVX-?512(?:_BF16)?
    | (?:vLLM|SGLang|transformers|speculators|lm-eval|llama-cpp-python|xllamacpp)\ \d+(?:\.\d+)+
    | arXiv\ \d{4}\.\d{5} | Python\ 3\.\d+ | Apache-2\.0 | 95\ %\ intervals? | K\ =\ 0
    | x86-64 | CXX=g\+\+-\d+
    | [\w-]+/[\w-]+\#\d+ | issue\ \d+
    )(?![\w.]*\d)""",
    re.VERBOSE,
)
COMMAND = re.compile(r"([A-Z_]+=\S+ )*(\S*/)?(draftlab|python3?|pip|make|bash|pytest|vllm|llama-server|exit)( |$)")
FILE = re.compile(r"[\w.-]*[a-zA-Z][\w.-]*(/[\w.-]+)+/?|[\w-]*[a-zA-Z][\w-]*\.(json|jsonl|md|py|yaml|svg|gguf)")
OPTION = re.compile(
    r"--[a-z][\w-]*|[a-z][\w-]*:[a-z_]+=[\w=,.-]+|[a-z_]+=[\w.]+|[\w.-]+@[\w=,.-]+|[a-z_]\w*(\.[a-z_]\w*)+"
)
WORD_OF_DIGITS = re.compile(r"[\d.,x-]*\d[\d.,x-]*")

PROSE = [
    "architecture",
    "distilling",
    "extending",
    "measuring",
    "servers",
    "troubleshooting",
    "tutorial",
]
VERSIONS_AND_SIZES = re.compile(
    r"(?:vLLM|SGLang|transformers|torch|llama-cpp-python|xllamacpp|speculators) \d+(?:\.\d+)+"
    r"|\d+(?:\.\d+)?(?:[MB]\b| [GM]i?B\b)"
)
MEASURED = re.compile(r"(?<![\w.:/-])\d[\d,]*\.\d+|\d[\d,]* ?(?:%|ms\b|tokens/s)")


def uncited(source: str) -> list[tuple[int, str]]:
    """Return line and text of the numbers of a page's source that come from no key and are part of no name."""
    found, language = [], None
    for number, line in enumerate(source.splitlines(), 1):
        fence = re.match(r"```(\w*)", line)
        if fence:
            language = (fence[1] or "shell") if language is None else None
            continue
        if language is None:
            prose = re.sub(
                r"`([^`]*)`",
                lambda code: " " if is_code(code[1]) else code[1],
                EXPRESSION.sub(" ", line),
            )
            prose = re.sub(r"\]\([^)]*\)|<!--.*?-->", " ", prose)
        elif language == "shell":
            command, _, comment = line.partition(" #")
            prose = comment if is_code(command) else line
        else:
            continue
        found += [(number, each) for each in NUMBER.findall(NAMES.sub(" ", prose))]
    return found


def measured(source: str) -> list[tuple[int, str]]:
    """Return line and text of what looks measured on a page that is not rendered: fractions, shares and rates."""
    found, fenced = [], False
    for number, line in enumerate(source.splitlines(), 1):
        fenced ^= line.startswith("```")
        prose = re.sub(r"`([^`]*)`", lambda code: " " if is_code(code[1]) else code[1], line)
        prose = VERSIONS_AND_SIZES.sub(" ", NAMES.sub(" ", re.sub(r"\]\([^)]*\)", " ", prose)))
        found += [] if fenced else [(number, each) for each in MEASURED.findall(prose)]
    return found


def is_code(text: str) -> bool:
    """Return whether digits in a piece of code belong to a command, an option, a path or a file's name."""
    if not re.search(r"\d", text):
        return True
    words = text.split()
    if not (COMMAND.match(text) or words[0].startswith("--")):
        return len(words) == 1 and bool(FILE.fullmatch(text) or OPTION.fullmatch(text))
    pairs = zip(["", *words], words, strict=False)
    return all(before.startswith("-") or before == "exit" for before, word in pairs if WORD_OF_DIGITS.fullmatch(word))


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[pages.Line]]:
    renderer = pages.Pages()
    return {source.name: list(renderer.lines(source.read_text())) for source in SOURCE_FILES}


def changes(lines: list[pages.Line], source: Path, text: str) -> list[str]:
    page = pages.page(source).relative_to(ROOT)
    return differences(lines, text.splitlines(), str(page), str(source.relative_to(ROOT)))


@pytest.mark.parametrize("source", SOURCE_FILES, ids=lambda source: source.name)
def test_pages_are_as_their_sources_and_results_make_them(source, rendered):
    """A failure names the line, the number and its key; `make docs` writes the pages anew."""
    wrong = changes(rendered[source.name], source, pages.page(source).read_text())
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("source", SOURCE_FILES, ids=lambda source: source.name)
def test_sources_have_no_number_of_their_own(source):
    assert uncited(source.read_text()) == []


@pytest.mark.parametrize("page", [f"docs/{name}.md" for name in PROSE])
def test_pages_that_are_not_rendered_state_nothing_measured(page):
    """They link to a rendered page or name the JSON file."""
    assert measured((ROOT / page).read_text()) == []


def test_tables_have_no_number_of_their_own():
    """Keys of the results may have digits; what is printed may not."""
    tree = ast.parse(Path(tables.__file__).read_text())
    keys = [node.slice for node in ast.walk(tree) if isinstance(node, ast.Subscript)]
    keys += [key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys if key is not None]
    keys += [node.format_spec for node in ast.walk(tree) if isinstance(node, ast.FormattedValue) and node.format_spec]
    exempt = {id(inner) for key in keys for inner in ast.walk(key)}
    texts: list[Any] = [
        n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in exempt
    ]
    assert [(text.lineno, bad) for text in texts for bad in uncited(text.value)] == []


def test_numbers_without_a_key_are_found_and_names_may_have_digits():
    for source in (
        "A draft is 1.37 times as fast.",
        "| a | 12 |",
        "```\nmake demo   # in 6 minutes\n```",
    ):
        assert len(uncited(source)) == 1
    for source in (
        '{{ demo.drafts["3x128"].k }} tokens',
        "EAGLE-3 in bf16",
        "`draftlab score --k 1,2`",
    ):
        assert uncited(source) == []
    assert len(measured("A draft gains 1.37 in 12 ms or 38 %.")) == 3


@pytest.mark.parametrize("expression", ["24", "1.5|fixed", '"1.72"', "demo.threads * 24"])
def test_an_expression_types_no_number(expression):
    with pytest.raises(ValueError, match=re.escape(expression)):
        list(pages.Pages().lines(f"It has {{{{ {expression} }}}} prompts."))


def test_a_key_that_is_missing_fails():
    with pytest.raises(KeyError, match="nothing"):
        list(pages.Pages().lines("{{ demo.nothing|fixed }}"))


@pytest.mark.parametrize("file", RECORDS.values(), ids=lambda file: file.name)
def test_a_result_names_its_machine_and_day(file):
    result = json.loads(file.read_text())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result.get("date", "")), f"{file.name} has no date"
    if result.get("measured", True):  # other results are computed from constants
        assert result.get("cpu"), f"{file.name} does not name its machine (cpu)"


def test_a_fraction_needs_a_format():
    with pytest.raises(ValueError, match=r"a\.b"):
        str(tagged({"b": 1.5}, "a", [])["b"])
    assert str(tagged({"b": 1399}, "a", [])["b"]) == "1,399"
