"""No text of a figure leaves its canvas."""

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D

from benchmarks import figures
from draftlab.intervals import Interval
from draftlab.results import plots

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs/figures"
ELSEWHERE = {
    "demo",
    "llama-65b-predicted",
}  # drawn by benchmarks.demo and by draftlab predict --plot
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("studies/*/*.md")]
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")
SVG = "{http://www.w3.org/2000/svg}"
GLYPHS = 100  # size in which matplotlib writes glyphs
CALL = re.compile(r"(translate|rotate|scale)\(([^)]*)\)")


def placed(
    text: str, size: float, anchor: str, transform: str
) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of a text, in the canvas's points."""
    box = TextPath((0, 0), text, size=size, prop=FontProperties(family="DejaVu Sans")).get_extents()
    shift = {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * box.width
    matrix = Affine2D()
    for name, values in reversed(CALL.findall(transform)):
        numbers = [float(n) for n in re.split(r"[ ,]+", values.strip())]
        if name == "translate":
            matrix.translate(*numbers)
        elif name == "scale":
            matrix.scale(*numbers)
        else:
            angle, *centre = numbers
            matrix.rotate_deg_around(*(centre or (0.0, 0.0)), angle)
    return box.translated(-shift, 0).transformed(matrix).extents


def texts(source: str) -> Iterator[tuple[str, tuple[float, float, float, float]]]:
    """Yield the texts of an SVG file of matplotlib, which are glyphs or text elements, and where they are."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    for group in ElementTree.fromstring(source, parser).iter(f"{SVG}g"):
        line = ""
        for child in group:
            if child.tag is ElementTree.Comment:
                line = (child.text or "").strip()  # the comment before glyphs is their text
            elif child.tag == f"{SVG}text" and child.text:
                style, where = child.get("style", ""), child.get("transform", "")
                size = re.search(r"font-size: ([\d.]+)px|font: ([\d.]+)px", style)
                assert size, style
                anchor = re.search(r"text-anchor: (\w+)", style)
                at = f"translate({child.get('x', 0)} {child.get('y', 0)}) scale(1 -1)"
                yield (
                    child.text,
                    placed(
                        child.text,
                        float(size[1] or size[2]),
                        anchor[1] if anchor else "start",
                        f"{where} {at}",
                    ),
                )
            elif child.tag == f"{SVG}g" and line and "scale(" in child.get("transform", ""):
                yield line, placed(line, GLYPHS, "start", child.get("transform", ""))


def outside(source: str, width: float, height: float) -> list[str]:
    found = list(texts(source))
    assert found
    return [
        text
        for text, (left, top, right, bottom) in found
        if min(left, top, bottom) < -1 or right > width + 1 or max(top, bottom) > height + 1
    ]


def check_figure(file: Path) -> None:
    """Check that every text is inside, and that letters stay readable where a page is 800 pixels wide."""
    source = file.read_text()
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', source)
    assert box
    assert outside(source, float(box[1]), float(box[2])) == []
    assert float(box[1]) <= 2 * 4.8 * 72 + 1


def test_every_figure_is_on_a_page_and_every_image_says_its_answer():
    shown = {}
    for page in PAGES:
        for words, target in IMAGE.findall(page.read_text()):
            file = (page.parent / target).resolve()
            shown[file] = page
            check_figure(file)
            assert len(words.split()) > 5 or file.stem == "demo", f"{page}: {words}"
    committed = {*FIGURES.glob("*.svg"), *ROOT.glob("studies/*/*.svg")}
    assert {*shown} == committed
    assert {file.stem for file in committed} == {*figures.FIGURES} | ELSEWHERE


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_is_drawn_from_its_record(name, tmp_path):
    panels = figures.FIGURES[name](figures.read)
    for panel in panels:
        assert ("speed-up" not in panel.y) or panel.level == figures.NO_DRAFT
    plots.save_panels(tmp_path / f"{name}.svg", panels)
    check_figure(tmp_path / f"{name}.svg")
    written = {text for text, _ in texts((FIGURES / f"{name}.svg").read_text())}
    drawn = {text for text, _ in texts((tmp_path / f"{name}.svg").read_text())}
    names = {part for panel in panels for part in (panel.x, panel.y, panel.title, *panel.series)}
    assert names & drawn == names & written


NAMES = [
    "short",
    "a-draft-with-quite-a-long-name-and-options",
    "prompt lookup followed by the draft (draft=X)",
]


@pytest.mark.parametrize("first", range(len(NAMES)))
@pytest.mark.parametrize("gains", [(1.0, 1.5, 0.5), (2.0, 2.0, 2.0), (0.5, 0.2, 3.0)])
def test_no_text_of_a_report_leaves_the_canvas_and_its_winner_is_whole(gains, first):
    names = [*NAMES[first:], *NAMES[:first]]
    marks = [plots.Mark.of(name, i) for i, name in enumerate(names)]
    rows = [
        (mark, Interval(value=gain, low=0.9 * gain, high=1.1 * gain, n=12))
        for mark, gain in zip(marks, gains, strict=True)
    ]
    steps = [
        (f"{plots.short(name)}: 3.00 tokens, 12.3 CPU ms each", dict.fromkeys(plots.PHASES, gain))
        for name, gain in zip(names, gains, strict=True)
    ]
    ranking = plots.plot_ranking(rows, "no draft, bfloat16")
    for svg in (ranking, plots.plot_time(steps, "CPU ms")):
        box = re.search(r'viewBox="0 0 (\d+) (\d+)"', svg)
        assert box
        assert outside(standing_alone(svg), float(box[1]), float(box[2])) == []
    written = "".join(text for text, _ in texts(standing_alone(ranking)))
    assert names[0].replace(" ", "") in written.replace(" ", "")  # whole, on one line or several


def standing_alone(svg: str) -> str:
    """Return the SVG of a page as a file of its own."""
    return str(svg).replace("<svg ", f'<svg xmlns="{SVG[1:-1]}" ', 1)
