"""The command score, which measures drafts."""

from dataclasses import replace
from pathlib import Path

from draftlab import shipped
from draftlab.commands.base import Outcome
from draftlab.commands.models import refuse_own_head
from draftlab.commands.settings.score import ScoreConfig
from draftlab.config import shared
from draftlab.config.server_rules import chosen_rule
from draftlab.console import note, note_if_slow
from draftlab.data.prompts import load_prompts
from draftlab.drafters.base import check_served
from draftlab.errors import UserError, about, did_you_mean
from draftlab.exporting.hf import parse_quantized_name
from draftlab.intervals import tokens_per_second
from draftlab.model import devices, hub
from draftlab.model.checkpoint import Checkpoint
from draftlab.model.modes import engine_runs, resolve
from draftlab.quantities import format_number
from draftlab.reading import read_model
from draftlab.results.ranking import (
    ScoreResult,
    alone,
    category_rows,
    grouped,
    missed_thresholds,
    score_warnings,
    verdict_lines,
)
from draftlab.results.report import (
    accuracy_table,
    category_table,
    export_command,
    json_rows,
    overall_lines,
    ranking_table,
)
from draftlab.sampling import SamplingParams
from draftlab.scoring.comparison import Comparison, Effort, Engine, Requests
from draftlab.scoring.lm_eval import Tasks, check_chat_template, load_tasks
from draftlab.scoring.run import LocalScoring
from draftlab.scoring.servers import PLAIN, PLAIN_FILE, SPECULATIVE, PlainAnswers, ServedComparison
from draftlab.servers.client import Server
from draftlab.shell import typed


def prepare(config: ScoreConfig, weights: bool) -> LocalScoring | ServedComparison:
    """Resolve and check the settings of the command `score`, and return the job.

    weights: Whether to download weight files. If False, only configurations and tokenizers are downloaded.

    Raises:
        UserError: A model, server, prompt file, task or data set is missing or does not fit the settings.
    """
    if config.include_path is not None and not config.include_path.is_dir():
        raise UserError(f"--include-path {config.include_path}: there is no such directory")
    tasks = None
    if config.tasks is not None and weights:
        tasks = load_tasks(
            [str(shipped.named("tasks").get(name, name)) for name in config.tasks.split(",")],
            limit=config.task_limit,
            batch_size=config.task_batch_size,
            num_fewshot=config.num_fewshot,
            apply_chat_template=config.apply_chat_template,
            include_path=config.include_path,
            seed=config.seed,
        )
    if config.served:
        return _served(config, tasks, weights)
    return LocalScoring(comparison=_local(config, tasks, weights))


def show(result: ScoreResult | PlainAnswers, config: ScoreConfig, out: Path) -> Outcome:
    if isinstance(result, ScoreResult):
        return _shown(result, config, out)
    speed = tokens_per_second([run.request for run in result.runs])
    # the same server, after a restart with the draft
    changes = {"server": str(out), "speculative_server": config.server, "out": None}
    return Outcome(
        path=out,
        show=[
            f"{len(result.runs)} answers of the target alone, {format_number(speed, 4)} tokens per second",
            str(out),
        ],
        data={"path": str(out), "output_tps": speed},
        next=config.model_copy(update=changes).command_line("score"),
    )


def _local(config: ScoreConfig, tasks: Tasks | None, weights: bool) -> Comparison:
    """Check the models, and return the comparison of drafts, which this process runs."""
    rule = chosen_rule(config.server_rule, config.rule)
    sampling = rule.target_sampling(_sampling(config))
    with about("--target"):
        target = Checkpoint(hub.locate_model(config.target, weights))
    with about("--draft"):
        drafts = _drafts_by_name(config.draft, weights)
    specs = config.drafter
    for spec in specs:
        check_served(spec, config.server_rule)
        spec.check_inputs(weights)
    default = next(iter(drafts.values()), None)
    if default is None and any("" in spec.drafts for spec in specs):
        default = hub.locate_model(str(shared.newest_draft()), weights)
        note(f"draft model for drafters without draft=: {default}")
    named = [path for spec in specs for path in spec.paths(default, weights=weights, models_only=True)]
    models = [Checkpoint(path) for path in dict.fromkeys([*drafts.values(), *named])]
    with about("--draft"):
        for model in models:
            model.common_vocabulary(target)
    if weights:
        for model in (target, *models):
            model.check()
    with about("--device"):
        device = devices.resolve_device(config.device)
    own = [model.directory for model in models if engine_runs(model.directory)]
    hosted = config.device_map is not None or not engine_runs(target.directory)
    used = own or not hosted or any(spec.inputs() for spec in specs)
    if not used and config.mode not in ("auto", "eager"):
        raise UserError(f"--mode {config.mode}: leave it out, because transformers runs all models of this run")
    mode, choice = resolve(
        config.mode if used else "eager",
        config.dtype,
        device,
        target.directory,
        own,
        hosted=hosted,
        threads=config.threads,
        int8=config.int8 is not None,
    )
    comparison = Comparison(
        target=target.directory,
        drafts=drafts,
        drafters=specs,
        default_draft=default,
        requests=_requests(config, target, replace(sampling, stop_token_ids=target.eos_ids)),
        engine=Engine(
            device=device,
            dtype=choice.dtype,
            dtype_reason=choice.reason,
            task_dtype=devices.resolve_dtype(config.dtype, device),
            mode=mode,
            device_map=config.device_map,
            threads=config.threads,
            target_int8=config.int8 in ("target", "both"),
            draft_int8=config.int8 in ("draft", "both"),
        ),
        ks=config.k,
        batches=config.batch,
        rule=rule,
        data=config.data,
        tasks=tasks,
        effort=Effort(
            exhaustive=config.exhaustive,
            every=config.min_speedup is not None,
            precision=config.precision,
            minutes=config.minutes,
        ),
    )
    comparison.check()
    return comparison


def _served(config: ScoreConfig, tasks: Tasks | None, weights: bool) -> ServedComparison:
    """Connect to the servers, and return the comparison of their speeds."""
    assert config.server is not None
    is_stored = config.speculative_server is not None and "://" not in config.server
    servers: dict[str, Server] = {}
    for name, flag, url in (
        (PLAIN, "--server", None if is_stored else config.server),
        (SPECULATIVE, "--speculative-server", config.speculative_server),
    ):
        if url is not None:
            with about(flag):
                servers[name] = Server.connect(
                    url, config.api_key_file, model=config.served_model_name, dry_run=not weights
                )
    with about("--target"):
        target = Checkpoint(hub.locate_tokenizer(config.target))
    with about("--server"):
        stored = read_model(PlainAnswers, Path(config.server), PLAIN_FILE) if is_stored else None
    if len(config.draft) > 1:
        raise UserError(
            f"--draft: there are {len(config.draft)} drafts, but the server runs one; name only the draft that it runs"
        )
    requests = _requests(config, target, _sampling(config))
    if config.apply_chat_template:
        check_chat_template(target.directory)
    if tasks is not None and PLAIN in servers:
        tasks.check_server(servers[PLAIN])
    return ServedComparison(
        servers=servers,
        stored=stored,
        draft=config.draft[0] if config.draft else "draft",
        tokenizer=target.directory,
        requests=requests,
        tasks=tasks,
    )


def _sampling(config: ScoreConfig) -> SamplingParams:
    return SamplingParams(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        max_tokens=config.max_new_tokens,
        seed=config.seed,
    )


def _requests(config: ScoreConfig, target: Checkpoint, sampling: SamplingParams) -> Requests:
    """Read the prompts, and return them with the sampling parameters. target: May have only a tokenizer."""
    option = "--data" if config.prompt_file is None else "--prompt-file"
    with about(option), note_if_slow(f"reading prompts of {config.prompt_file or config.data}"):
        prompts = load_prompts(
            config.prompt_file,
            config.data,
            target.tokenizer,
            count=config.num_prompts,
            tokens=config.prompt_tokens,
            seed=config.seed,
            chat=config.chat,
            system_prompt=config.system_prompt,
        )
    usual = 3 if config.exhaustive or config.served else 1
    return Requests(prompts=prompts, sampling=sampling, repeats=config.repeats or usual)


def _drafts_by_name(names: list[str], weights: bool) -> dict[str, Path]:
    """Return the directory of each draft, by the draft's name. The name of a rounded draft ends in @TYPE.

    Raises:
        UserError: A draft is missing, or two drafts have the same name.
    """
    drafts: dict[str, Path] = {}
    for name in names:
        base, kind = parse_quantized_name(name)
        before, _, unknown = name.rpartition("@")
        if kind is None and before and Path(before).exists():
            raise UserError(
                f"--draft {name}: {unknown!r} after the @ is not a GGUF type{did_you_mean(unknown, hub.ROUNDED)}"
            )
        refuse_own_head(base, "--draft")
        path = hub.locate_model(base, weights)
        drafts[hub.checkpoint_name(path) + (f"@{kind}" if kind else "")] = path
    if len(drafts) < len(names):
        raise UserError("two drafts have the same directory name; rename one directory: " + ", ".join(names))
    return drafts


def _shown(measured: ScoreResult, config: ScoreConfig, out: Path) -> Outcome:
    scores = measured.scores
    missed: list[str] = []
    for each in scores:
        missed += missed_thresholds(alone(each), config.min_speedup, None)
    groups = grouped(scores)
    tables = [*map(ranking_table, groups), *map(category_table, scores), accuracy_table(scores)]
    show: list[object] = [table.terminal() for table in tables if table]
    show += [f"{s.label}: {s.verdict()}" for s in scores]
    for group in groups:
        show += verdict_lines(group.ranking) if len(group.ranking) > 1 else []
    show += overall_lines(groups)
    show += [*(f"warning: {text}" for text in score_warnings(scores)), str(out)]
    categories = {s.name: category_rows(s) for s in scores}
    return Outcome(
        path=out,
        show=show,
        data={"scores": json_rows(scores), "categories": categories},
        missed=missed,
        next=export_command(groups) or typed("draftlab", "report", out, "--html", "report.html"),
    )
