"""Every number that docs/results.md states is one that a committed JSON file holds."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SCALES = (1, 1e3, 60, 1 / 60, 1e-3, 1e-6, 1e-9, 1 / 1024)  # seconds and ms, minutes, GB, MB, KiB
CODE = re.compile(r"```.*?```|`[^`]*`|!?\[[^\]]*\]\([^)]*\)|arXiv \S+|\d{4}-\d\d-\d\d|https?://\S+", re.DOTALL)
DECIMAL = re.compile(r"(?<![\w.-])(\d+\.\d+)(e-\d+)?( ?%)?")


def sections(file: Path) -> dict[str, str]:
    """Return a page's sections by heading."""
    parts = re.split(r"^#+ (.+)$", file.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def numbers(value: object) -> Iterator[float]:
    """Yield every number of a JSON value, those in texts included: a record keeps commands and shapes as texts."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        yield float(value)
    elif isinstance(value, str):
        yield from (float(n) for n in re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?", value))
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from numbers(key)
            yield from numbers(one)
    elif isinstance(value, list):
        for one in value:
            yield from numbers(one)


def sources(text: str) -> list[Path]:
    """Return the JSON files that a section names."""
    named = re.findall(r"`([\w./-]+\.json)`", text)
    return [path for name in named for path in (RESULTS / name, ROOT / name) if path.is_file()]


def stated(text: str) -> list[tuple[str, float, float, bool]]:
    """Return the decimals of a text outside code and links: as written, value, half of the last place, percent."""
    found = []
    for match in DECIMAL.finditer(CODE.sub(" ", text)):
        digits, exponent, percent = match.groups()
        power = float(f"1{exponent or 'e0'}")
        half = 0.5 * 10.0 ** -len(digits.split(".")[1]) * power
        found.append((match.group(0), float(digits) * power, half, bool(percent)))
    return found


def unsupported(text: str) -> list[str]:
    """Return the numbers of a section that none of its JSON files holds."""
    held = sorted({number for file in sources(text) for number in numbers(json.loads(file.read_text()))})
    scaled = [number * scale for number in held for scale in SCALES]
    percents = [p for number in held for p in (100 * number, 100 * (number - 1), 100 * (1 - number), number)]

    def holds(value: float, half: float, percent: bool) -> bool:
        return any(abs(abs(one) - value) <= half * 1.02 for one in (percents if percent else scaled))

    return [written for written, value, half, percent in stated(text) if not holds(value, half, percent)]


@pytest.mark.parametrize("page", ["docs/results.md"])
def test_every_number_has_its_json(page: str) -> None:
    found = {heading: bad for heading, text in sections(ROOT / page).items() if (bad := unsupported(text))}
    assert not found


def test_a_number_that_is_not_measured_is_found() -> None:
    text = sections(ROOT / "docs/results.md")["Replaying stored outputs"]
    assert unsupported(text) == []
    assert unsupported(text.replace("0.43", "0.47")) == ["0.47"]
    assert unsupported("A draft is 1.37 times as fast.") == ["1.37"]
