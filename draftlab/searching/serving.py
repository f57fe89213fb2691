"""The last step of auto: the export of the choice, verified in the server where it is installed."""

import json
from collections.abc import Mapping, Sequence
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
from draftlab.searching.steps import Steps, record_of
from draftlab.searching.verdict import Candidate
from draftlab.servers.kinds import Launch

FASTEST = "the fastest that draftlab auto measured"


def serve(
    request: Request,
    steps: Steps,
    chosen: Candidate,
    k_by_streams: Mapping[int, int],
    *,
    k: int,
    scores: Sequence[Path],
    int8: bool,
) -> tuple[str, list[str]]:
    """Export the choice, with its script; return what to type, and what is to be known about it.

    scores: directories of its scores, for the card. int8: the scores rounded weights. k_by_streams: the best K of each
    number of streams, 0 for no draft.
    """
    prompts = steps.folder / "prompts/measure.jsonl"
    settings: dict[str, Any] = {"draft": str(chosen.draft), "target": request.name, "scores": list(map(str, scores))}
    if request.server is None:
        drafter = chosen.drafter
        if chosen.draft is not None:
            out = steps.run("export", "export", **settings, to="hf")
            drafter = drafter or DraftModelSpec.of(draft=str(out))
        assert drafter is not None
        rounded = f" --int8 {'target' if chosen.draft is None else 'both'}" if int8 else ""
        options = f"--drafter {drafter.text} --k {k}{rounded} --prompt-file {prompts}"
        note = "--for vllm, sglang, llama.cpp or transformers chooses for a server, and writes what starts it"
        return f"draftlab score --target {request.name} {options}", [note]
    if chosen.draft is None:
        return _script(request, steps, k), ["prompt lookup has no weights: there is nothing to verify"]
    settings |= {"to": request.server} | _k_settings(request, steps, chosen, k, k_by_streams)
    if request.program is None:
        return _typed(steps.run("export", "export", **settings)), []
    return _verified(request, steps, request.program, prompts, settings)


def unverified(request: Request) -> list[str]:
    """Return why nothing is verified in the server, in a line; none where it is."""
    if request.server is None or request.program is not None:
        return []
    if not SERVERS.get(request.server, "--for").program:
        return [f"not verified in {request.server}: draftlab starts vLLM and llama.cpp only"]
    return [f"{request.server} is not installed here: all is done but its verification; name it with --verify-with"]


def _k_settings(
    request: Request, steps: Steps, chosen: Candidate, k: int, k_by_streams: Mapping[int, int]
) -> dict[str, Any]:
    """Return the export's settings of K: by the number of streams where vLLM can change it and that pays."""
    schedule = schedule_of(k_by_streams)
    alike = schedule.pays_up_to == 0 or len(schedule.ranges) == 1
    if request.server != "vllm" or chosen.kind == "parallel" or chosen.draft is None or alike:
        return {"k": k}
    row = {"draft_sha256": provenance.fingerprint(chosen.draft), "schedule": schedule.model_dump()}
    file = steps.folder / "k-by-streams.json"
    write_atomic(file, json.dumps({"predictions": [row]}))
    return {"prediction": file}


def _verified(
    request: Request, steps: Steps, program: Path, prompts: Path, settings: dict[str, Any]
) -> tuple[str, list[str]]:
    """Export and verify; where the server refuses or accepts other tokens, export only, and say so."""
    verify: dict[str, Any] = {"verify_with": program, "prompt_file": prompts}
    if request.temperature > 0:
        verify["temperature"] = request.temperature
    said = "not verified; remove the export to try again"
    if not steps.is_done("export", "export", **settings):
        try:
            out = steps.run("export", "export", **settings, **verify)
            return _typed(out), [str(record_of(out).notes["verified"])]
        except UserError as error:
            said = f"not verified in {request.server}: {error}"
    return _typed(steps.run("export", "export", **settings)), [said]


def _script(request: Request, steps: Steps, k: int) -> str:
    """Write the script of prompt lookup, which has no weights to export."""
    folder, target = steps.folder / "export", target_name(request.name, request.target)
    launch = Launch(target=target, k=k, reason=FASTEST, kind="prompt lookup")
    file, text = SERVERS.get(str(request.server), "--for").script(launch)
    folder.mkdir(exist_ok=True)
    write_atomic(folder / file, text)
    return _typed(folder)


def _typed(export: Path) -> str:
    script = export / "assist.py"
    return f"python {script} 'a prompt'" if script.exists() else f"sh {export / 'serve.sh'}"
