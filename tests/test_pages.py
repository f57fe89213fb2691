"""Generated pages of the documentation are current; `make docs` writes them."""

import re

import configuration_page
import pages
import pytest
import python_page
import yaml

import draftlab


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


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        *(
            str(page.relative_to(pages.ROOT))
            for folder in (
                "docs/*.md",
                "benchmarks/*.md",
                "studies/*.md",
                "studies/*/*.md",
                "drafts/*/*.md",
            )
            for page in sorted(pages.ROOT.glob(folder))
        ),
    ],
)
def test_links_between_pages_lead_somewhere(page):
    file = pages.ROOT / page
    text = file.read_text()
    for image in re.findall(r"\]\(([\w./-]+\.svg)\)", text):
        assert (file.parent / image).exists(), image
    for target, _, anchor in re.findall(r"\]\(([\w./-]*\.md)?(#([\w-]+))?\)", text):
        linked = file.parent / target if target else file
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked.read_text()), f"{target}#{anchor}"
