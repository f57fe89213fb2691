"""Measure the acceptance of exported drafts and heads in servers, by export --verify-with, one after the other.

gap: The server's tokens per target pass minus draftlab's, on the same texts. half_width: Half the width of draftlab's
95 % interval over texts. export fails if the server's value is outside of this interval. An export that exists with the
same settings is not made again.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import environment
from draftlab.commands import COMMANDS
from draftlab.model.hub import head_kind
from draftlab.provenance import read_record


def main(
    drafts: Annotated[list[Path], typer.Argument(help="Drafts and heads to export.")],
    target: Annotated[str, typer.Option(help="Target of the drafts.")],
    prompt_file: Annotated[Path, typer.Option(help="File of prompts to verify with.")],
    k: Annotated[int, typer.Option(help="Drafted tokens per step.")] = 3,
    temperatures: Annotated[str, typer.Option(help="Temperatures, separated by commas.")] = "0",
    folder: Annotated[Path, typer.Option(help="Folder for exports.")] = Path("runs/served"),
    vllm: Annotated[Path | None, typer.Option(help="Path of vllm.")] = None,
    llama_server: Annotated[Path | None, typer.Option(help="Path of llama-server.")] = None,
) -> None:
    asked: dict[str, Any] = {"target": target, "prompt_file": prompt_file, "k": k}
    rows = []
    for temperature in map(float, temperatures.split(",")):
        for draft in drafts:
            outtype = {"outtype": "f32"} if head_kind(draft) == "eagle" else {}
            for to, program, more in (("vllm", vllm, {}), ("llama.cpp", llama_server, outtype)):
                if program is not None:
                    out = folder / f"{draft.name}-{to}-{temperature:g}"
                    options = {
                        "to": to,
                        "verify_with": program,
                        "temperature": temperature,
                        **asked,
                        **more,
                    }
                    rows.append(
                        {
                            "draft": draft.name,
                            "to": to,
                            "temperature": temperature,
                            **served(draft, out, options),
                        }
                    )
    print(
        json.dumps(
            {"benchmark": "served", "target": Path(target).name, "served": rows} | environment(1)
        )
    )


def served(draft: Path, out: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Export a draft unless that is done. Return its acceptance in the server, and in draftlab on the same texts."""
    record = read_record(out)
    if record is None or any(
        str(record.config[name]) != str(options[name]) for name in record.config.keys() & options
    ):
        COMMANDS["export"](draft=str(draft), out=out, force=True, **options)
        record = read_record(out)
    assert record is not None
    notes: Any = record.notes
    acceptance = notes["acceptance"]
    half_width = (acceptance["high"] - acceptance["low"]) / 2
    return {
        **acceptance,
        "half_width": half_width,
        "prompts": notes["prompts"]["sha256"],
        "created": record.created,
    }


if __name__ == "__main__":
    typer.run(main)
