"""Write the figures of benchmarks: panels side by side, as SVG or PNG."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context

from draftlab.results.plots import Panel, draw_panels


def save_figure(path: Path, panels: Sequence[Panel]) -> None:
    """Draw panels side by side, and write them as SVG or PNG, by the ending of the file's name."""
    figure = draw_panels(panels)
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": path.name}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
