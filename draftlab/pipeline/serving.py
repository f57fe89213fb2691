"""The last steps of auto: the page, and the export of the choice, verified in the server where it is installed."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftlab import provenance
from draftlab.atomic import write_atomic
from draftlab.config.auto import VERIFIED, AutoConfig
from draftlab.errors import UserError
from draftlab.exporting import scripts
from draftlab.exporting.run import target_name
from draftlab.latency.k_schedule import schedule_of
from draftlab.model import hub
from draftlab.pipeline.steps import Steps
from draftlab.pipeline.verdict import Candidate

FASTEST = "the fastest that draftlab auto measured"


def serve(
    steps: Steps,
    chosen: Candidate,
    k: int,
    *,
    scores: Sequence[Path],
    prompts: Path,
    int8: bool,
    k_by_streams: Mapping[int, int],
) -> tuple[str, list[str]]:
    """Export the choice, with its script; return what to type, and what is to be known about it.

    scores: directories of its scores, for the card. prompts: to verify with, where the server is installed. int8: the
    scores rounded weights. k_by_streams: the best K of each number of streams, 0 for no draft.
    """
    config = steps.config
    settings = {"draft": str(chosen.draft), "target": config.target, "scores": [str(path) for path in scores]}
    if config.server is None:
        drafter = chosen.drafter
        if chosen.draft is not None:
            out = steps.make("export", "export", "export", **settings, to="hf")
            drafter = drafter or f"model:draft={out}"
        rounded = f" --int8 {'target' if chosen.draft is None else 'both'}" if int8 else ""
        options = f"--drafter {drafter} --k {k}{rounded}"
        command = f"draftlab score --target {config.target} {options} --prompt-file {prompts}"
        return command, [
            "--for vllm, sglang, llama.cpp or transformers chooses for a server, and writes what starts it"
        ]
    if chosen.draft is None:
        return _script(steps, k), ["prompt lookup has no weights: there is nothing to verify"]
    settings |= {"to": config.server} | _k_settings(steps, chosen, k, k_by_streams)
    program = program_of(config)
    if program is None:
        return _typed(steps.make("export", "export", "export", **settings)), []
    out, said = _verified(steps, program, prompts, settings)
    return _typed(out), [said]


def unverified(config: AutoConfig) -> list[str]:
    """Return why nothing is verified in the server, in a line; none where it is."""
    if config.server is None or program_of(config) is not None:
        return []
    if config.server not in VERIFIED:
        return [f"not verified in {config.server}: draftlab starts {' and '.join(VERIFIED)} only"]
    return [f"{config.server} is not installed here: all is done but its verification; name it with --verify-with"]


def program_of(config: AutoConfig) -> Path | None:
    """Return the server's program; None where it is not installed."""
    if config.verify_with is not None:
        return config.verify_with
    path = shutil.which(VERIFIED.get(str(config.server), ""))
    return None if path is None else Path(path)


def _k_settings(steps: Steps, chosen: Candidate, k: int, k_by_streams: Mapping[int, int]) -> dict[str, Any]:
    """Return the export's settings of K: by the number of streams where vLLM can change it and that pays."""
    schedule = schedule_of(k_by_streams)
    alike = schedule.pays_up_to == 0 or len(schedule.ranges) == 1
    if steps.config.server != "vllm" or chosen.kind == "parallel" or chosen.draft is None or alike:
        return {"k": k, "k_reason": FASTEST}
    row = {"draft_sha256": provenance.fingerprint(chosen.draft), "schedule": schedule.model_dump()}
    file = steps.folder / "k-by-streams.json"
    write_atomic(file, json.dumps({"predictions": [row]}))
    return {"prediction": file}


def _verified(steps: Steps, program: Path, prompts: Path, settings: dict[str, Any]) -> tuple[Path, str]:
    """Export and verify; where the server refuses or accepts other tokens, export only, and say so."""
    config = steps.config
    verify = {"verify_with": program, "prompt_file": prompts, "device": config.device}
    if config.temperature > 0:
        verify["temperature"] = config.temperature
    if steps.is_done("export", "export", **settings):
        return steps.make("export", "export", "export", **settings), "not verified; remove the export to try again"
    try:
        out = steps.make("export", "export", "export", **settings, **verify)
    except UserError as error:
        return steps.make("export", "export", "export", **settings), f"not verified in {config.server}: {error}"
    return out, str(steps.record(out).notes["verified"])


def _script(steps: Steps, k: int) -> str:
    """Write the script of prompt lookup, which has no weights to export."""
    folder, config = steps.folder / "export", steps.config
    file, text = scripts.script(
        str(config.server), target=target_name(config.target, hub.locate(config.target)), k=k,
        k_reason=FASTEST, kind="prompt lookup",
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    write_atomic(folder / file, text)
    return _typed(folder)


def _typed(export: Path) -> str:
    script = export / "assist.py"
    return f"python {script} 'a prompt'" if script.exists() else f"sh {export / 'serve.sh'}"
