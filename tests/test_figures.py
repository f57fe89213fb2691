"""No text of a figure leaves its canvas."""

import re
from pathlib import Path

import pytest
from helpers.drawings import SVG, check_figure, outside, texts

from benchmarks import figures
from draftlab.intervals import Interval
from draftlab.results import plots

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs/figures"
# drawn by benchmarks.demo, draftlab predict --plot, and benchmarks.readme_table --figure
ELSEWHERE = {"demo", "llama-65b-predicted", "smollm2-published"}
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("studies/*/*.md")]
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")


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
