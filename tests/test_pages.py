"""Generated pages of the documentation are current; `make docs` writes them."""

import json
import re

import pytest
import yaml
from helpers import configuration_page, pages, python_page
from helpers.option_names import COMMON

import draftlab
from draftlab.commands import COMMANDS
from draftlab.servers.vllm import speculative_config

FOLDERS = ("docs/*.md", "benchmarks/*.md", "studies/*.md", "studies/*/*.md", "drafts/*/*.md")
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *(str(page.relative_to(pages.ROOT)) for each in FOLDERS for page in sorted(pages.ROOT.glob(each))),
]


def test_generated_docs_are_current():
    docs = pages.ROOT / "docs"
    assert (docs / "configuration.md").read_text().strip() == configuration_page.page().strip()
    assert (docs / "python.md").read_text().strip() == python_page.page().strip()
    assert pages.PAGE.read_text() == pages.page(pages.PAGE.read_text())


def test_every_promise_of_trust_has_its_test():
    """Each row of the table of SECURITY.md names a test that exists."""
    text = (pages.ROOT / "SECURITY.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 8
    for named in [row.rpartition("`")[0].rpartition("`")[2] for row in rows]:
        file, _, function = named.partition("::")
        assert f"def {function or 'test_'}" in (pages.ROOT / file).read_text(), named


def test_the_citation_names_this_version():
    citation = yaml.safe_load((pages.ROOT / "CITATION.cff").read_text())
    assert citation["version"] == draftlab.__version__
    assert any("2402.01528" in str(each) for each in citation["references"])


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page):
    file = pages.ROOT / page
    text = file.read_text()
    for image in re.findall(r"\]\(([\w./-]+\.svg)\)", text):
        assert (file.parent / image).exists(), image
    for target, _, anchor in re.findall(r"\]\(([\w./-]*\.md)?(#([\w-]+))?\)", text):
        linked = file.parent / target if target else file
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked.read_text()), f"{target}#{anchor}"


def calls(text: str) -> set[str]:
    """Return the commands of draftlab in a page's blocks and code spans."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines += [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", prose)]
    typed = [each for line in lines for each in line.partition(" #")[0].split(" && ")]
    return {words for line in typed for words in re.findall(r"\bdraftlab (.+)", line)}


def unknown_options(call: str) -> set[str]:
    """Return the options of a call that its command does not have. Names that are no command have none."""
    words = call.split()
    names = [name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS]
    options = set(re.findall(r"(?<!\S)--[a-z][\w-]*", call))
    if not names:
        return options - COMMON
    config = COMMANDS[names[0]].config
    return options - COMMON - {config.flag(field) for field in config.model_fields}


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("studies/")])
def test_calls_on_pages_name_options_that_exist(page):
    found = calls((pages.ROOT / page).read_text())
    unknown = {call: unknown_options(call) for call in found}
    assert {call: options for call, options in unknown.items() if options} == {}


def test_an_option_that_does_not_exist_is_found():
    text = "`draftlab search --drafter eagle`\n\n```\n$ draftlab score --k 1 \\\n    --speed\n```\n"
    assert set().union(*map(unknown_options, calls(text))) == {"--drafter", "--speed"}


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ("a sibling or a cut", "draft model"),
        ("an EAGLE-3 head", "EAGLE-3 head"),
        ("prompt lookup", "prompt lookup"),
    ],
)
def test_the_lines_to_copy_are_those_that_export_writes(row, kind):
    text = (pages.ROOT / "docs/serving.md").read_text()
    (line,) = re.findall(rf"^\| {row} \| `(.*)` \|$", text, re.MULTILINE)
    name = "HEAD" if kind == "EAGLE-3 head" else "DRAFT"
    written = json.dumps(speculative_config(name, 3, kind, "probabilistic"))
    numbers = {"K": "3", "MAX": "3", "MIN": "1"}
    copied = re.sub(r"(?<=: )(K|MAX|MIN)\b", lambda name: numbers[name[1]], line)
    assert json.loads(copied) == json.loads(written)
