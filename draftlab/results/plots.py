"""Plots: each is one SVG to put inside a page, readable on light, dark and paper; figures are files of panels."""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter

from draftlab.errors import UserError
from draftlab.intervals import Interval
from draftlab.provenance import CurvePoint
from draftlab.results.leaderboard import COLOURS, MARKERS, NO_DRAFT, Entry, Mark

PHASES = {"draft": "#c04c00", "verify": "#0072b2", "host": "#6b6b6b"}
PHASE_NAMES = {"draft": "draft", "verify": "target verifies", "host": "sampling and other"}
PHASE_MARKS = [Mark(name, PHASES[phase], "s", "■") for phase, name in PHASE_NAMES.items()]
VARIABLES = {colour: f"var(--c{i})" for i, colour in enumerate(COLOURS)} | {PHASES["host"]: "var(--soft)"}
WIDTH = 4.6  # inches; text of 9 pt is readable where a phone shrinks that to 300 px
IN_CATEGORIES = 3  # drafts in the plot of categories
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a $ in a name is a $
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One plot of a figure. series: points by name. lines: by the same names; by default through the points.

    names: of x = 0, 1, ..., where x is no number. bottom: where y starts.
    """

    x: str
    y: str
    series: dict[str, list[tuple[float, float]]]
    lines: dict[str, list[tuple[float, float]]] | None = None
    names: list[str] | None = None
    bottom: float = 0


def save_figure(path: Path, panels: Sequence[Panel]) -> None:
    """Write panels side by side, as SVG or PNG by the file's name.

    Raises:
        UserError: another kind of file, or one that cannot be written.
    """
    if path.suffix not in (".svg", ".png"):
        raise UserError(f"{path}: figures are written as .svg or .png")
    figure = draw_panels(panels)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with rc_context({"svg.hashsalt": path.name}):
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def draw_panels(panels: Sequence[Panel]) -> Figure:
    """Draw panels side by side."""
    with rc_context(STYLE):
        figure = Figure(figsize=(4.8 * len(panels), 3.6), layout="constrained")
        for ax, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            ax.grid(color="black", alpha=0.12)
            styles = zip(COLOURS, MARKERS, strict=True)
            joined = panel.series if panel.lines is None else panel.lines
            for (name, points), (colour, (marker, _)) in zip(panel.series.items(), styles, strict=False):
                ax.plot(*zip(*points, strict=True), color=colour, marker=marker, linestyle="", label=name)
                ax.plot(*zip(*joined[name], strict=True), color=colour)
            ax.set(xlabel=panel.x, ylabel=panel.y)
            room = 1.08 if panel.names is None else 1.3  # points side by side leave none for the legend
            ax.set_ylim(panel.bottom, panel.bottom + room * (ax.get_ylim()[1] - panel.bottom))
            if all(float(x).is_integer() for points in panel.series.values() for x, _ in points):
                ax.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
            if panel.names is not None:
                ax.set_xticks(range(len(panel.names)), panel.names, rotation=60, ha="right", rotation_mode="anchor")
            if len(panel.series) > 1:
                ax.legend(frameon=False)
    return figure


def plot_ranking(entries: list[Entry]) -> Markup:
    def draw(ax: Axes) -> None:
        ax.axvline(1, color="black", linewidth=1, linestyle="--")
        for row, entry in enumerate(entries):
            gain = entry.best_k_speedup
            _interval(ax, gain, row, entry)
            ax.annotate(
                f"{entry.label}  {gain.value:.2f}", (gain.value, row), (0, 6), textcoords="offset points", ha="center"
            )
        ends = [1.0, *(x for e in entries for x in (e.best_k_speedup.low, e.best_k_speedup.high))]
        margin = 0.25 * (max(ends) - min(ends) or 1)
        ax.text(1, len(entries) - 0.4, f" {NO_DRAFT}  1.00", va="center")
        ax.set(xlim=(min(ends) - margin, max(ends) + margin), ylim=(len(entries), -0.9), yticks=[])
        ax.set(xlabel="speed-up of whole requests, 95% interval")

    return _svg(draw, "Speed-up of each draft at its best K, with its interval", inches=1.0 + 0.42 * len(entries))


def plot_categories(entries: list[Entry], rows: list[list[dict[str, Any]]]) -> Markup:
    """Plot the speed-up of the first drafts by category. rows: of each of them, as category_rows() returns them."""
    names = [row["category"] for row in rows[0]]
    shown = list(zip(entries, rows, strict=True))[:IN_CATEGORIES]

    def draw(ax: Axes) -> None:
        ax.axvline(1, color="black", linewidth=1, linestyle="--")
        for i, (entry, own) in enumerate(shown):
            for at, row in enumerate(own):
                if row["speedup"] is None:
                    continue
                ends = row["speedup_low"] or row["speedup"], row["speedup_high"] or row["speedup"]
                gain = Interval(value=row["speedup"], low=ends[0], high=ends[1], n=row["prompts"])
                _interval(ax, gain, at + 0.22 * (i - (len(shown) - 1) / 2), entry)
        ax.set(xlabel="speed-up of whole requests, 95% interval", ylim=(len(names) - 0.5, -0.5))
        ax.set_yticks(range(len(names)), names)
        ax.tick_params("y", length=0)

    return _svg(draw, "Speed-up by category of prompts", inches=0.8 + 0.36 * len(names))


def plot_prompts(points: Sequence[tuple[Mark, float, float]]) -> Markup:
    """Plot each prompt with its tokens per second: plain, and with the draft."""
    plain, drafted = [x for _, x, _ in points], [y for _, _, y in points]

    def draw(ax: Axes) -> None:
        ax.axline((1, 1), slope=1, color="black", linewidth=1, linestyle="--")
        for mark, x, y in points:
            ax.plot(x, y, color=mark.colour, marker=mark.marker, linestyle="", markersize=5)
        low = 0.95 * min(*plain, *drafted)
        _log_axes(ax, (1, 1.5, 2, 3, 5, 7))  # a few prompts gain several times as much as most
        ax.set(xlim=(low, 1.05 * max(plain)), ylim=(low, 1.05 * max(drafted)))
        ax.set(xlabel="tokens/s without a draft", ylabel="tokens/s with the draft")

    return _svg(draw, "Tokens per second of each prompt, with the draft against without")


def plot_loss(curves: Sequence[tuple[Entry, Sequence[CurvePoint]]]) -> Markup:
    def draw(ax: Axes) -> None:
        for entry, curve in curves:
            steps, evals = ([p for p in curve if p.heldout is heldout] for heldout in (False, True))
            ax.plot([p.step for p in steps], [p.loss for p in steps], color=entry.colour, linewidth=1)
            ax.plot([p.step for p in evals], [p.loss for p in evals], color=entry.colour, marker=entry.marker, ls="")
        _by_step(ax, "loss, nats per token")

    return _svg(draw, "Loss by training step")


def plot_heldout(curves: Sequence[tuple[Entry, Sequence[CurvePoint]]]) -> Markup:
    def draw(ax: Axes) -> None:
        for entry, curve in curves:
            steps, accepted = zip(*((p.step, p.acceptance) for p in curve), strict=True)
            ax.plot(steps, accepted, color=entry.colour, marker=entry.marker)
        _by_step(ax, "acceptance per token")

    return _svg(draw, "Held-out acceptance by training step")


def _by_step(ax: Axes, what: str) -> None:
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.set(xlabel="step", ylabel=what, ylim=(0, 1.05 * ax.get_ylim()[1]))


def _interval(ax: Axes, gain: Interval, row: float, entry: Entry) -> None:
    ax.hlines(row, gain.low, gain.high, color=entry.colour, linewidth=2)
    ax.plot(gain.value, row, color=entry.colour, marker=entry.marker, markersize=7)


def plot_speedup(entries: list[Entry]) -> Markup:
    def draw(ax: Axes) -> None:
        ax.axhline(1, color="black", linewidth=1, linestyle="--")
        for entry in entries:
            ks, gains = list(entry.speedups), list(entry.speedups.values())
            low, high = [g.low for g in gains], [g.high for g in gains]
            ax.plot(ks, [g.value for g in gains], color=entry.colour, marker=entry.marker)
            ax.fill_between(ks, low, high, color=entry.colour, alpha=0.15, linewidth=0)
            if len(ks) == 1:  # a band over one K has no width
                ax.vlines(ks, low, high, color=entry.colour)
        ks = sorted({k for e in entries for k in e.speedups})
        ax.set(xlabel="K, drafted tokens per step", ylabel="speed-up", xticks=ks, xlim=(ks[0] - 0.5, ks[-1] + 0.5))

    return _svg(draw, "Speed-up against K")


def plot_latency(entries: list[Entry]) -> Markup | None:
    """Plot milliseconds per token against layers; None where no latency was measured.

    The target's latency is the one measured with the fastest draft.
    """
    target = next((e.score.target for e in entries if e.score.target.latency and e.score.target.shape), None)
    drafts = [(e, e.score.draft.shape, e.score.draft.latency[0]) for e in entries if e.score.draft.latency]
    shapes = [shape.params() for _, shape, _ in drafts if shape]
    if target is None or target.shape is None or not shapes:
        return None
    points = [(target.shape.layers, target.latency[0], "black", "*", 200.0)]
    for entry, shape, latency in drafts:
        if shape:
            area = 25 + 175 * shape.params() / max(shapes)
            points.append((shape.layers, latency, entry.colour, entry.marker, area))

    def draw(ax: Axes) -> None:
        for layers, t, colour, marker, area in points:
            ax.vlines(layers, t.low_ms, t.high_ms, color=colour)
            ax.scatter(layers, t.median_ms, s=area, color=colour, marker=marker)
        _scale(ax, [layers for layers, *_ in points], [latency.median_ms for _, latency, *_ in points])
        ax.set(xlabel="layers", ylabel="ms per token")

    return _svg(draw, "Latency of one pass over one token against layers")


def plot_accuracy(entries: list[Entry]) -> Markup | None:
    """Plot tokens per target pass against accuracy; None where no draft has an accuracy."""
    scored = [(e, e.accuracy) for e in entries if e.accuracy]

    def draw(ax: Axes) -> None:
        for entry, accuracy in scored:
            error = accuracy.stderr or 0.0
            ax.errorbar(accuracy.value, entry.tokens_per_pass, xerr=error, color=entry.colour, marker=entry.marker)
        ax.margins(0.2)
        ax.set(xlabel=f"accuracy of the draft, {scored[0][1].task}", ylabel="tokens per target pass")
        ax.set_ylim(0, 1.15 * max(entry.tokens_per_pass for entry, _ in scored))

    return _svg(draw, "Tokens per target pass against accuracy of the draft") if scored else None


def plot_positions(entries: list[Entry]) -> Markup:
    def draw(ax: Axes) -> None:
        for entry in entries:
            shares = entry.score.acceptance(entry.k).per_position_acceptance
            ax.plot(range(1, len(shares) + 1), shares, color=entry.colour, marker=entry.marker)
        positions = range(1, max(e.k for e in entries) + 1)
        ax.set(xlabel="position in the draft", xticks=positions, xlim=(0.5, positions[-1] + 0.5))
        ax.set(ylabel="share of steps", ylim=(0, 1.02))

    return _svg(draw, "Acceptance by position")


def plot_time(entries: list[Entry]) -> Markup | None:
    """Plot the time of a step by phase; None where no draft has it: servers do not report it."""
    steps = step_times(entries)
    if not steps:
        return None

    def draw(ax: Axes) -> None:
        for row, step in enumerate(steps):
            left = 0.0
            for phase, colour in PHASES.items():
                ax.barh(row, step.ms[phase], left=left, height=0.4, color=colour)
                left += step.ms[phase]
            tokens = "1 token" if step.tokens == 1 else f"{step.tokens:.2f} tokens"
            ax.text(0, row - 0.28, f"{step.label}: {tokens}, {step.total_ms / step.tokens:.3g} ms each", va="bottom")
        widest = max(step.total_ms for step in steps)
        ax.set(xlabel="ms per step", xlim=(0, 1.05 * widest), ylim=(len(steps) - 0.7, -0.8), yticks=[])

    return _svg(draw, "Time of one step by phase", inches=0.8 + 0.45 * len(steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Milliseconds of a step by phase, and the tokens that it yields."""

    label: str
    ms: dict[str, float]
    tokens: float

    @property
    def total_ms(self) -> float:
        return sum(self.ms.values())


def step_times(entries: list[Entry]) -> list[StepTime]:
    """Return those of plain decoding, with the fastest draft's target, and of each draft whose phases are known."""
    known = [e for e in entries if e.score.time_shares(e.k)]
    return [
        StepTime(
            label=f"{e.label}, K = {k}" if k else NO_DRAFT,
            ms={phase: 1000 * tokens / tokens_per_second * share for phase, share in e.score.time_shares(k).items()},
            tokens=tokens,
        )
        for e, k, tokens in [*((e, 0, 1.0) for e in known[:1]), *((e, e.k, e.tokens_per_pass) for e in known)]
        if (tokens_per_second := e.score.decode_tps(k))
    ]


def _scale(ax: Axes, xs: Sequence[float], ys: Sequence[float]) -> None:
    """Scale from zero, which shows proportions, or logarithmically where a large target would squeeze the drafts."""
    ax.margins(0.2)
    if max(xs) <= 8 * min(xs) and max(ys) <= 8 * min(ys):
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))  # layers
        ax.set(xlim=(0, 1.15 * max(xs)), ylim=(0, 1.15 * max(ys)))
        return
    _log_axes(ax, (1, 2, 5))


def _log_axes(ax: Axes, ticks: Sequence[float]) -> None:
    ax.set(xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=ticks))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())


def _svg(draw: Callable[[Axes], None], alt: str, inches: float = 3.5) -> Markup:
    """Return one plot without links or ids that could clash with another's; its ink is the page's own colour."""
    with rc_context({**STYLE, "font.size": 9, "svg.hashsalt": alt}):
        figure = Figure(figsize=(WIDTH, inches), layout="constrained")
        ax = figure.subplots()
        ax.grid(color="black", alpha=0.12)
        ax.set_axisbelow(True)
        draw(ax)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True)
    body = re.sub(r"(?s)^.*?<svg[^>]*>|<metadata>.*?</metadata>|<style.*?</style>", "", file.getvalue())
    body = re.sub(r'<g id="[^"]*"', "<g", body).replace("xlink:href", "href").replace(": #000000", ": currentColor")
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, variable)
    width, height = (round(72 * inches) for inches in figure.get_size_inches())
    return Markup(f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(alt)}">{body}')
