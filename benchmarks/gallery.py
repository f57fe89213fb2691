"""The gallery of what draftlab auto chose: python -m benchmarks.gallery RUN... adds finished runs, writes its page."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import cpu_name
from draftlab.provenance import Record
from draftlab.reading import read_model
from draftlab.searching.plan import Plan
from draftlab.searching.verdict import Verdict

GALLERY = Path("docs/gallery")
FILES = (
    "index.html",
    "auto.json",
    "plan.json",
    "draftlab.json",
    "recipe.yaml",
    "report/report.html",
)
HEAD = """# Gallery

What `draftlab auto` chose, for each target, machine and server that it was really run for: the draft or none, its page
and its command. A speed-up is of plain decoding in draftlab's engine by the server's rule, with its 95 % interval, on
prompts that nothing was chosen on where a draft seemed to gain at all. `python -m benchmarks.gallery RUN...` adds
finished runs and writes this page.

| target | machine | server | choice | speed-up | minutes, of planned | |
|---|---|---|---|---|---:|---|
"""


def main(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Finished outputs of draftlab auto.")
    ] = None,
    machine: Annotated[str, typer.Option(help="Where the runs were. Default: this machine.")] = "",
    out: Annotated[Path, typer.Option(help="The gallery.")] = GALLERY,
) -> None:
    for run in runs or []:
        add(run, machine or cpu_name(), out)
    (out / "README.md").write_text(page(out))


def add(run: Path, machine: str, gallery: Path) -> None:
    """Copy the page of a run and its records, under its name; files of its machine by their names alone."""
    if not (run / "auto.json").is_file():
        sys.exit(f"{run}: not a finished output of draftlab auto")
    record = read_model(Record, run, "draftlab.json")
    local = [
        path
        for path in map(str, (*record.config.values(), *record.inputs))
        if Path(path).is_absolute()
    ]
    for name in FILES:
        text = (run / name).read_text()
        for path in local:
            text = text.replace(path, Path(path).name)
        (gallery / run.name / name).parent.mkdir(parents=True, exist_ok=True)
        (gallery / run.name / name).write_text(text)
    (gallery / run.name / "machine.txt").write_text(f"{machine}\n")


def page(gallery: Path) -> str:
    """Return the page of all runs that are there, by name; runs on a busy machine come last."""
    folders = sorted(path.parent for path in gallery.glob("*/auto.json"))
    folders.sort(key=lambda folder: bool(read_model(Verdict, folder, "auto.json").doubt))
    return HEAD + "".join(map(row, folders)) + "\n" + "\n\n".join(map(entry, folders)) + "\n"


def row(folder: Path) -> str:
    verdict, plan = read_model(Verdict, folder, "auto.json"), read_model(Plan, folder, "plan.json")
    gains = "; ".join(
        gain.as_speedup() if len(verdict.speedups) == 1 else f"{gain.as_speedup()} at {n}"
        for n, gain in verdict.speedups.items()
    )
    cells = [
        plan.target, (folder / "machine.txt").read_text().strip(), plan.settings["server"] or "draftlab",
        verdict.head(), gains, f"{verdict.minutes:.0f} of {verdict.planned_minutes:.0f}",
        f"[page]({folder.name}/index.html)",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |\n"


def entry(folder: Path) -> str:
    """Return the command of a run, and its verdict without the last lines, which name places of its machine."""
    verdict, record = (
        read_model(Verdict, folder, "auto.json"),
        read_model(Record, folder, "draftlab.json"),
    )
    local = (verdict.page, f"run it: {verdict.serve}")
    said = [line for line in verdict.lines() if line not in local]
    return "\n".join(
        [
            f"**{folder.name}**: `{record.notes['command_line']}`",
            "",
            *(f"- {line}" for line in said),
        ]
    )


if __name__ == "__main__":
    typer.run(main)
