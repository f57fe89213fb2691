"""Texts and edges of pictures, which no text may cross."""

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D

SVG = "{http://www.w3.org/2000/svg}"
GLYPHS = 100  # size in which matplotlib writes glyphs
CALL = re.compile(r"(translate|rotate|scale)\(([^)]*)\)")


def placed(text: str, size: float, anchor: str, transform: str) -> tuple[float, float, float, float]:
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
