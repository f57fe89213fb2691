"""The command auto, which goes from a target to a served draft."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftlab.commands.base import Job, Outcome, check_plots, check_program, command, fill
from draftlab.config import shared
from draftlab.config.base import Numbers, Only, OutputConfig, numbers, option
from draftlab.config.server_rules import SERVER_RULES, ServerRule
from draftlab.console import note
from draftlab.dates import resume_date
from draftlab.errors import UserError, about
from draftlab.inputs import inputs_of, text_inputs
from draftlab.model import hub
from draftlab.output import Output
from draftlab.registry import SERVERS
from draftlab.runs import workspace
from draftlab.runs.atomic import differing
from draftlab.runs.provenance import fingerprint

if TYPE_CHECKING:
    from draftlab.commands.steps import CommandStep
    from draftlab.searching.plan import Plan, Request
    from draftlab.searching.verdict import Verdict

SERVED = [name for name in SERVER_RULES if name in SERVERS.names()]


class AutoConfig(OutputConfig, shared.CheckpointSettings):
    """The settings of the command `auto`: the target, how it is served, and the time to spend."""

    target: str = option(
        help="Checkpoint of the target: a directory or a hub name, optionally with @REVISION.",
        argument=True,
    )
    minutes: float = option(60.0, "Time to spend, approximately.", gt=0)
    draft: list[str] = option(
        [],
        "Draft that exists already: a smaller model, a pruned draft, or an EAGLE-3 head; repeat the option for "
        "several drafts. New drafts are then trained only if they may become faster than these drafts.",
    )
    server: ServerRule = option(
        None,
        (
            f"Server that will run the draft: {', '.join(SERVED)}. Only drafts that this server can run are "
            "tried. Default: draftlab's own engine."
        ),
        flag="--for",
    )
    prompt_file: Path | None = option(
        None,
        "JSON-lines file of your users' prompts; for training drafts, at least 96 prompts. Default: draftlab's own "
        "prompts for a chat model; for other models, prompts cut from --data.",
        flag="--prompts",
    )
    data: str | None = option(
        None,
        "Text from which prompts are cut, for a target without a chat template. Default: data in draftlab.yaml.",
    )
    streams: Numbers = numbers(
        "1",
        "Numbers of concurrent requests, as 1,4,16. auto chooses the draft with the highest mean speed-up.",
    )
    temperature: float = option(0.0, "Sampling temperature of your users' requests; 0 is greedy.", ge=0)
    verify_with: Path | None = option(
        None,
        "Path of the program vllm or llama-server, in which the exported draft is verified. Default: the program on "
        "the PATH, if there is one.",
        reads="nothing",
        acts="always",
    )
    dtype: shared.WeightsDtype = shared.dtype(advanced=True)
    device: str = shared.device()
    threads: int | None = shared.threads()

    only = (
        Only(
            ("data",),
            lambda c: c.prompt_file is None,
            "leave it out, because --prompts has the prompts",
        ),
        Only(
            ("verify_with",),
            lambda c: c.server and c.server_kind.program,
            "works only with --for vllm or --for llama.cpp, whose servers draftlab can start",
        ),
        Only(
            ("streams",),
            lambda c: not c.server or not c.server_kind.one_stream,
            "leave it out, because this server decodes one prompt at a time",
        ),
        Only(
            ("out",),
            lambda c: "," not in str(c.out),
            "the name must not have a comma, because a comma separates the options of drafters",
        ),
    )

    @property
    def text_source(self) -> str | None:
        return self.data

    @property
    def sampled_rule(self) -> str | None:
        """Return the decoding rule, as in --server-rule, of the server that the exported script starts.

        Return None for greedy decoding and for draftlab's own engine.
        """
        return self.server if self.temperature > 0 else None

    @property
    def server_kind(self) -> Any:
        """Return the registered class of the server that --for names."""
        return SERVERS.get(str(self.server), "--for")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Found(Outcome):
    """The outcome of auto. verdict: How to serve the target, and why."""

    verdict: "Verdict"


def prepare_auto(config: AutoConfig, weights: bool) -> "Job[Verdict]":
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
    from draftlab.commands.steps import step_of
    from draftlab.model import checkpoint, devices
    from draftlab.model.modes import resolve, set_threads
    from draftlab.model.size import read_size
    from draftlab.runs.atomic import check_space
    from draftlab.searching.plan import Request, make_plan, measure_machine, ready_drafts
    from draftlab.searching.prompts import find_prompts

    with about("TARGET"):
        checkpoint.check(target)
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
    request = fill(
        Request,
        config,
        name=config.target,
        target=target,
        size=read_size(target),
        prompts=prompts,
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

    def make(name: str, settings: dict[str, Any]) -> "CommandStep":
        shared = running | engine if name in ("search", "score", "replay") else dict(running)
        if name == "export":  # export only verifies on its --device
            del shared["device"]
        return step_of(name, settings, shared, "auto")

    return Job(partial(_run, request, plan, make), name, partial(_facts, request, plan))


def _facts(request: "Request", plan: "Plan") -> dict[str, object]:
    from draftlab.model import devices
    from draftlab.searching.plan import LOOKUP, lookup_by_device, not_tried
    from draftlab.searching.verdict import unverified

    facts = plan.facts() | {"minutes": round(plan.minutes)}
    device = devices.resolve_device(plan.machine.device).type
    lookup = lookup_by_device(request.server, device) if LOOKUP in plan.candidates else []
    if notes := [*not_tried(plan.left_out), *lookup, *unverified(request)]:
        facts["notes"] = "; ".join(notes)
    return facts


def _run(request: "Request", plan: "Plan", make: "Callable[..., CommandStep]", output: Output) -> "Verdict":
    """Run every step of the plan, write the report and the verdict, and return the verdict."""
    from draftlab.runs.atomic import write_atomic
    from draftlab.searching.auto import PLAN, VERDICT, AutoRun
    from draftlab.searching.schedule import StepRunner

    folder = output.out
    output.inputs([hub.locate(request.name)])
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / PLAN).exists():
        write_atomic(folder / PLAN, plan.model_dump_json(indent=1))
    for topic, value in _facts(request, plan).items():
        note(f"{topic}: {value}")

    def label(name: str, command_name: str) -> str:
        finish = datetime.now() + timedelta(minutes=max(0.0, plan.minutes - steps.seconds() / 60))
        return f"{name}: {command_name}, the whole run ends at about {finish:%H:%M}"

    steps = StepRunner(folder=folder, make=make, label=label)
    run = AutoRun(request=request, plan=plan, steps=steps)
    verdict = run.verdict()
    run.write_report(verdict, output.command_line)
    write_atomic(folder / VERDICT, verdict.model_dump_json(indent=1))
    output.record(folder, minutes=verdict.minutes)
    return verdict


@command(
    AutoConfig,
    prepare=prepare_auto,
    dry_run=True,
    resumes=True,
    example="auto meta-llama/Llama-3.1-8B-Instruct --for vllm --prompts users.jsonl --minutes 240",
)
def auto(verdict: "Verdict", output: Output) -> Found:
    """Find the draft with which this machine serves a target fastest, or say that no draft helps; killed runs
    resume."""
    data = {"path": str(output.out), **verdict.model_dump(mode="json")}
    return Found(path=output.out, show=[*verdict.lines(), str(output.out)], data=data, verdict=verdict)


def _unfinished(folder: Path, settings: dict[str, Any], inputs: dict[str, str]) -> "Plan | None":
    """Return the plan of an unfinished run in a folder, or None if there is no plan.

    Raises:
        UserError: The unfinished run has other settings or inputs.
    """
    from draftlab.reading import read_model
    from draftlab.searching.auto import PLAN
    from draftlab.searching.plan import Plan

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
