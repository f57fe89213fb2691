"""The command auto, which goes from a target to a served draft."""

import shutil
from pathlib import Path
from typing import Any

from draftlab.commands.base import Outcome
from draftlab.commands.checks import check_plots, check_program
from draftlab.commands.settings.auto import AutoConfig
from draftlab.commands.steps import CommandStep, step_of
from draftlab.dates import resume_date
from draftlab.errors import UserError, about
from draftlab.inputs import inputs_of, text_inputs
from draftlab.model import devices, hub
from draftlab.model.checkpoint import Checkpoint
from draftlab.model.modes import resolve, set_threads
from draftlab.model.size import read_size
from draftlab.reading import read_model
from draftlab.runs import workspace
from draftlab.runs.atomic import check_space, differing
from draftlab.runs.provenance import fingerprint
from draftlab.searching.auto import PLAN, Auto
from draftlab.searching.plan import Plan, Request, make_plan, measure_machine, ready_drafts
from draftlab.searching.prompts import find_prompts
from draftlab.searching.verdict import Verdict


def prepare(config: AutoConfig, weights: bool) -> Auto:
    """Resolve and check the settings of the command `auto`, measure this machine, make the plan, and return the job.

    If the directory has an unfinished run, use the plan of this run.

    Raises:
        UserError: The target, prompts or program cannot be used; the directory has a run with other settings; or time,
            memory or disk are not enough.
    """
    with about("TARGET"):
        target = hub.locate(config.target, weights=False)
    check_program(config.verify_with)
    check_plots()
    with about("TARGET"):
        Checkpoint(target).check()
    with about("--device"):
        device = devices.resolve_device(config.device)
    with about("--prompts" if config.prompt_file else "--data"):
        prompts = find_prompts(
            config.prompt_file,
            config.data,
            workspace.load().data or None,
            target,
            config.streams,
            trains=not config.draft,
        )
    program = config.verify_with
    if program is None and config.server is not None:
        installed = shutil.which(config.server_kind.program)
        program = Path(installed) if installed else None
    with about("--draft"):
        ready = ready_drafts(config.draft, target, weights)
    request = Request(
        name=config.target,
        target=target,
        size=read_size(target),
        server=config.server,
        prompts=prompts,
        streams=config.streams,
        temperature=config.temperature,
        program=program,
        ready=ready,
    )
    name = f"auto-{hub.checkpoint_name(Path(config.target.partition('@')[0]))}"
    folder = config.out or workspace.load().runs / name
    settings = {key: value for key, value in config.settings().items() if key != "out"}
    inputs = dict[str, str]()
    if weights:  # a dry run does not wait for the hashes of all weights
        inputs |= inputs_of(config) | (text_inputs(prompts.data) if prompts.data else {})
        inputs |= {str(path): fingerprint(path) for path in (target, *(d.path for d in ready))}
    plan = _unfinished(folder, settings, inputs)
    if plan is not None:
        resume_date(plan.date)
    else:
        mode, choice = resolve("auto", config.dtype, device, target, [target], threads=config.threads)
        set_threads(mode, config.threads)
        machine = measure_machine(request.size, device, choice.dtype, folder)
        plan = make_plan(request, machine, config.minutes, settings, inputs)
        check_space(folder, plan.disk, "its drafts")
    running = {
        "device": config.device,
        "trust_remote_code": config.trust_remote_code or None,
        "server_rule": config.sampled_rule,
    }
    engine = {"dtype": plan.machine.dtype, "threads": config.threads}

    def make(name: str, settings: dict[str, Any]) -> CommandStep:
        shared = running | engine if name in ("search", "score", "replay") else dict(running)
        if name == "export":  # export only verifies on its --device
            del shared["device"]
        return step_of(name, settings, shared, "auto")

    return Auto(name=name, request=request, plan=plan, make=make)


def show(verdict: Verdict, config: AutoConfig, out: Path) -> Outcome:
    data = {"path": str(out), **verdict.model_dump(mode="json")}
    return Outcome(path=out, show=[*verdict.lines(), str(out)], data=data)


def _unfinished(folder: Path, settings: dict[str, Any], inputs: dict[str, str]) -> Plan | None:
    """Return the plan of an unfinished run in a folder, or None if there is no plan.

    Raises:
        UserError: The unfinished run has other settings or inputs.
    """
    if not (folder / PLAN).exists():
        return None
    before = read_model(Plan, folder, PLAN)
    changed = [name for name, value in settings.items() if before.settings.get(name) != value]
    if changed:
        flags = ", ".join(map(AutoConfig.flag, changed))
        raise UserError(
            f"{folder} has an unfinished auto run with other values of {flags}; use the earlier "
            "values, choose another --out, or remove this directory"
        )
    if inputs and (moved := differing(before.inputs, inputs)):
        raise UserError(
            f"{folder} has an unfinished auto run, but {moved[0]} has changed since that run started; restore "
            f"{moved[0]}, choose another --out, or remove this directory"
        )
    return before
