"""The last step of auto: the export of the choice, verified in the server where it is installed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftlab import provenance
from draftlab.atomic import write_atomic
from draftlab.drafters.model import DraftModelSpec
from draftlab.errors import UserError
from draftlab.exporting.run import target_name
from draftlab.latency.k_schedule import schedule_of
from draftlab.registry import SERVERS
from draftlab.searching.plan import Request
from draftlab.searching.steps import StepRunner, record_of
from draftlab.searching.verdict import Arm
from draftlab.servers.kinds import Launch

FASTEST = "the fastest that draftlab auto measured"


def serve(
    request: Request,
    steps: StepRunner,
    chosen: Arm,
    k_by_streams: Mapping[int, int],
    *,
    k: int,
    int8: bool,
) -> tuple[str, list[str]]:
    """Export the choice with its script; return the command to type, and notes on it.

    Args:
        k_by_streams: Best K of each number of streams, 0 for no draft.
        int8: The scores rounded weights to 8 bits.
    """
    prompts, server = steps.folder / "prompts/measure.jsonl", request.server
    scores = [str(steps.folder / name) for name in ("score", "final")]
    settings: dict[str, Any] = {
        "draft": str(chosen.draft),
        "target": request.name,
        "scores": scores,
    }
    if server is None:
        drafter = chosen.drafter
        if chosen.draft is not None:
            out = steps.run("export", "export", **settings, to="hf")
            drafter = drafter or DraftModelSpec.of(draft=str(out))
        assert drafter is not None
        rounded = f" --int8 {'target' if chosen.draft is None else 'both'}" if int8 else ""
        note = "--for vllm, sglang, llama.cpp or transformers chooses for a server, and writes what starts it"
        options = f"--drafter {drafter.text} --k {k}{rounded} --prompt-file {prompts}"
        return f"draftlab score --target {request.name} {options}", [note]
    if chosen.draft is None:
        folder = steps.folder / "export"
        launch = Launch(
            target=target_name(request.name, request.target),
            k=k,
            reason=FASTEST,
            kind="prompt lookup",
        )
        file, text = SERVERS.get(server, "--for").script(launch)
        folder.mkdir(exist_ok=True)
        write_atomic(folder / file, text)
        return _typed(folder), ["prompt lookup has no weights: there is nothing to verify"]
    settings |= {"to": server, "k": k}
    schedule = schedule_of(k_by_streams)
    changes = schedule.pays_up_to > 0 and len(schedule.ranges) > 1
    if server == "vllm" and chosen.kind != "parallel" and changes:
        file = steps.folder / "k-by-streams.json"
        row = {
            "draft_sha256": provenance.fingerprint(chosen.draft),
            "schedule": schedule.model_dump(),
        }
        write_atomic(file, json.dumps({"predictions": [row]}))
        del settings["k"]
        settings["prediction"] = file
    notes: list[str] = []
    if request.program is not None:
        verify: dict[str, Any] = {"verify_with": request.program, "prompt_file": prompts}
        if request.temperature > 0:
            verify["temperature"] = request.temperature
        try:
            out = steps.run("export", "export", **settings, **verify)
            return _typed(out), [str(record_of(out).notes["verified"])]
        except UserError as error:
            notes = [f"not verified in {server}: {error}"]
    return _typed(steps.run("export", "export", **settings)), notes


def unverified(request: Request) -> list[str]:
    """Return the line that says why nothing is verified in the server; none where it is verified."""
    if request.server is None or request.program is not None:
        return []
    if not SERVERS.get(request.server, "--for").program:
        return [f"not verified in {request.server}: draftlab starts vLLM and llama.cpp only"]
    return [
        f"{request.server} is not installed here: all is done but its verification; name it with --verify-with"
    ]


def _typed(export: Path) -> str:
    script = export / "assist.py"
    return f"python {script} 'a prompt'" if script.exists() else f"sh {export / 'serve.sh'}"
