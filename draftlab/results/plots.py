"""Plots for HTML pages, as SVG that is readable in light and dark mode and in print; and figures of several panels."""

import io
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from draftlab.intervals import Interval
from draftlab.trust import printable

# Colours after Okabe and Ito: COLOURS have a contrast of 3:1 or more to a light page, DARK_COLOURS to a dark page.
COLOURS = ("#0072b2", "#c04c00", "#00805d", "#b5508a", "#2b86bb", "#a36a00", "#86307a", "#74741a")
DARK_COLOURS = (
    "#56b0e8",
    "#f0883e",
    "#2cc299",
    "#e59cc6",
    "#9bd5f7",
    "#f0bb4a",
    "#d48acb",
    "#c6c65c",
)
# matplotlib's markers, and the characters that look like them
MARKERS = "os^DvPXp"
GLYPHS = "●■▲◆▼✚✖⬟"
LABEL_LENGTH = 34
GREY = "#6b6b6b"
VARIABLES = {colour: f"var(--c{i})" for i, colour in enumerate(COLOURS)} | {GREY: "var(--soft)"}
WIDTH = 4.6  # inches; text of 9 pt stays readable when a phone shrinks the plot to 300 px
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # prints a $ in a name as it is
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclass(frozen=True, slots=True)
class Mark:
    """The colour and marker of a draft in plots. glyph: The marker as a character, for legends and tables."""

    name: str
    colour: str
    marker: str
    glyph: str

    @classmethod
    def of(cls, name: str, number: int) -> "Mark":
        """Return the mark with this number. Marks 0 to 63 all differ. name: Name of the draft."""
        colour = number % len(COLOURS)
        marker = (colour + number // len(COLOURS)) % len(MARKERS)
        return cls(name, COLOURS[colour], MARKERS[marker], GLYPHS[marker])


def short(name: str) -> str:
    """Return a name that fits into a plot. The middle of a long name is left out, because names differ least there."""
    # keeps the name of a drafter, which comes before its options
    begin = 23 if " (" in name else 10
    if len(name) <= LABEL_LENGTH:
        return name
    return f"{name[:begin]}…{name[begin + 1 - LABEL_LENGTH :]}"


PHASES = {
    "draft": Mark("draft", "#c04c00", "s", "■"),
    "verify": Mark("target verifies", "#0072b2", "s", "■"),
    "host": Mark("sampling and other", GREY, "s", "■"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One plot of a figure.

    Args:
        x, y: Labels of the axes.
        series: Points (x, y) of each series, by the name of the series.
        lines: Points of the line that is drawn for each series, by name, if they are not the points in `series`.
        names: Tick labels of x = 0, 1, ..., if x is not a number.
        bottom: Value at which the y axis starts.
        title: Text above the plot.
        level: Value of y at which a dashed line is drawn, and the name of this line.
    """

    x: str
    y: str
    series: dict[str, list[tuple[float, float]]]
    lines: dict[str, list[tuple[float, float]]] | None = None
    names: list[str] | None = None
    bottom: float = 0
    title: str = ""
    level: tuple[float, str] | None = None


def draw_panels(panels: Sequence[Panel]) -> Figure:
    """Return a figure with the panels side by side."""
    with rc_context(STYLE):
        figure = Figure(figsize=(4.8 * len(panels), 3.6), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for ax, panel in zip(axes, panels, strict=True):
            ax.grid(color="black", alpha=0.12)
            joined = panel.series if panel.lines is None else panel.lines
            styles = zip(panel.series.items(), COLOURS, MARKERS, strict=False)
            for (name, points), colour, marker in styles:
                x, y = zip(*points, strict=True)
                ax.plot(x, y, color=colour, marker=marker, linestyle="", label=name)
                ax.plot(*zip(*joined[name], strict=True), color=colour)
            if panel.level is not None:
                y, name = panel.level
                ax.axhline(y, color="black", linewidth=1, linestyle="--", label=name)
            ax.set(xlabel=panel.x, ylabel=panel.y)
            ax.set_title(panel.title, fontsize="medium")
            # the legend needs room above the points, and more room if there are points at every x
            room = 1.08 if panel.names is None else 1.3
            ax.set_ylim(panel.bottom, panel.bottom + room * (ax.get_ylim()[1] - panel.bottom))
            points = list(chain.from_iterable(panel.series.values()))
            if all(float(x).is_integer() for x, _ in points):
                ax.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
            if panel.names is not None:
                turned = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"}
                ax.set_xticks(range(len(panel.names)), panel.names, **turned)
            if len(panel.series) > 1 or panel.level is not None:
                # over a white ground, because the dashed line may run behind the names
                ax.legend(framealpha=0.85, edgecolor="none")
    return figure


def save_panels(path: Path, panels: Sequence[Panel]) -> None:
    """Draw panels side by side, and write them as SVG or PNG, by the suffix of the file's name."""
    figure = draw_panels(panels)
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": path.name, "text.parse_math": False}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def plot_ranking(gains: Sequence[tuple[Mark, Interval]], baseline: str) -> Markup:
    """Plot the speed-up of each draft with its interval, from top to bottom in the order of `gains`.

    baseline: Name of the plain decoding whose speed-up is 1.
    """
    fastest, best = gains[0]
    winner = textwrap.wrap(fastest.name, LABEL_LENGTH)
    more = 0.4 * (len(winner) - 1)  # room for further lines of the winner's name, in rows

    def draw(ax: Axes) -> None:
        ax.axvline(1, color="black", linewidth=1, linestyle="--")
        ends = [1.0]
        for row, (mark, gain) in enumerate(gains):
            ax.hlines(row, *gain.drawn, color=mark.colour, linewidth=2)
            ax.plot(gain.value, row, color=mark.colour, marker=mark.marker, markersize=7)
            name = short(mark.name) if row else "\n".join(winner)
            text = f"{name}  {gain.value:.2f}x"
            ax.annotate(text, (gain.value, row), (0, 6), textcoords="offset points", ha="center")
            ends += gain.drawn
        margin = 0.25 * (max(ends) - min(ends) or 1)
        ax.annotate(baseline, (1, len(gains) - 0.4), (4, 0), textcoords="offset points", va="center")
        ax.set(xlim=(min(ends) - margin, max(ends) + margin), ylim=(len(gains), -0.9 - more))
        ax.set(yticks=[], xlabel="speed-up of whole requests, 95% interval")

    return _svg(
        draw,
        f"Speed-up of each draft at its best K: {fastest.name} has {best.value:.2f}x",
        inches=1.0 + 0.42 * (len(gains) + more),
    )


def plot_by_k(speedups: Sequence[tuple[Mark, Mapping[int, Interval]]]) -> Markup:
    """Plot the speed-up of each draft against K, with a band for its interval."""

    def draw(ax: Axes) -> None:
        ax.axhline(1, color="black", linewidth=1, linestyle="--")
        for mark, by_k in speedups:
            ks = list(by_k)
            gains = list(by_k.values())
            low, high = zip(*(g.drawn for g in gains), strict=True)
            ax.plot(ks, [g.value for g in gains], color=mark.colour, marker=mark.marker)
            ax.fill_between(ks, low, high, color=mark.colour, alpha=0.15, linewidth=0)
            if len(ks) == 1:  # with one K a band has no width
                ax.vlines(ks, low, high, color=mark.colour)
        ks = sorted(set().union(*(by_k for _, by_k in speedups)))
        ax.set(xlabel="K, drafted tokens per step", ylabel="speed-up")
        ax.set(xticks=ks, xlim=(ks[0] - 0.5, ks[-1] + 0.5))

    return _svg(draw, "Speed-up against K")


def plot_positions(shares: Sequence[tuple[Mark, Sequence[float]]]) -> Markup:
    """Plot the fraction of steps that accepted at least i drafted tokens, against i.

    shares: For each draft, its mark, and the fraction for each i.
    """

    def draw(ax: Axes) -> None:
        for mark, values in shares:
            ax.plot(range(1, len(values) + 1), values, color=mark.colour, marker=mark.marker)
        positions = range(1, max(len(values) for _, values in shares) + 1)
        ax.set(xlabel="position in the draft", xticks=positions, xlim=(0.5, positions[-1] + 0.5))
        ax.set(ylabel="share of steps", ylim=(0, 1.02))

    return _svg(draw, "Acceptance by position")


def plot_time(steps: Sequence[tuple[str, Mapping[str, float]]], unit: str) -> Markup:
    """Plot the milliseconds of a step by phase, one bar for each step.

    steps: For each step, its label, and its milliseconds by phase.
    unit: Text for milliseconds of the clock or of the CPU.
    """

    def draw(ax: Axes) -> None:
        for row, (label, ms) in enumerate(steps):
            left = 0.0
            for phase, mark in PHASES.items():
                ax.barh(row, ms[phase], left=left, height=0.4, color=mark.colour)
                left += ms[phase]
            ax.annotate(label, (0, row - 0.28), (3, 0), textcoords="offset points", va="bottom")
        widest = max(sum(ms.values()) for _, ms in steps)
        ax.set(
            xlabel=f"{unit} per step",
            xlim=(0, 1.05 * widest),
            ylim=(len(steps) - 0.7, -0.8),
            yticks=[],
        )

    return _svg(draw, "Time of one step by phase", inches=0.8 + 0.45 * len(steps))


def _svg(draw: Callable[[Axes], None], alt: str, inches: float = 3.5) -> Markup:
    """Return one plot as SVG in the page's text colour, without ids, which could clash with those of other plots.

    Args:
        draw: Function that draws the plot into its axes.
        alt: Description of the plot for screen readers.
        inches: Height of the plot.
    """
    with rc_context({**STYLE, "font.size": 9, "svg.hashsalt": alt}):
        figure = Figure(figsize=(WIDTH, inches), layout="constrained")
        ax = figure.subplots()
        ax.grid(color="black", alpha=0.12)
        ax.set_axisbelow(True)
        draw(ax)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True)
    body = printable(file.getvalue(), keep="\n")
    body = re.sub(r"(?s)^.*?<svg[^>]*>|<metadata>.*?</metadata>|<style.*?</style>", "", body)
    body = re.sub(r'<g id="[^"]*"', "<g", body).replace("xlink:href", "href")
    body = body.replace(": #000000", ": currentColor")
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, variable)
    width, height = (round(72 * inches) for inches in figure.get_size_inches())
    return Markup(f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(printable(alt))}">{body}')
