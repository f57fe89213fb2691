"""The command score, which measures drafts."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from draftlab import shipped
from draftlab.commands.base import Job, Outcome, command, fill
from draftlab.config import shared
from draftlab.config.base import (
    SERVER,
    DraftedTokens,
    Numbers,
    Only,
    OutputConfig,
    advanced_option,
    numbers,
    option,
)
from draftlab.config.server_rules import ServerRule, chosen_rule
from draftlab.console import note, note_if_slow
from draftlab.drafters.base import DRAFTERS, Drafter, check_served
from draftlab.errors import UserError, about, did_you_mean
from draftlab.intervals import tokens_per_second
from draftlab.model import hub
from draftlab.output import Output
from draftlab.quantities import format_number
from draftlab.registry import REJECTION, RULES
from draftlab.sampling import SamplingParams
from draftlab.shell import typed

if TYPE_CHECKING:
    from draftlab.intervals import Interval
    from draftlab.results.ranking import Ranked
    from draftlab.results.score import Score
    from draftlab.scoring.comparison import Comparison, Requests
    from draftlab.scoring.lm_eval import Tasks
    from draftlab.scoring.servers import PlainAnswers, ServedComparison

TASKS = "Tasks"  # panel of --help
ENGINE = (
    "k",
    "batch",
    "drafter",
    "rule",
    "server_rule",
    "mode",
    "dtype",
    "device",
    "device_map",
    "int8",
    "threads",
    "exhaustive",
    "minutes",
    "precision",
)


class ScoreConfig(OutputConfig, shared.CheckpointSettings, shared.SamplingSettings):
    """The settings of the command `score`: the drafts, the target, the prompts, and the sampling."""

    draft: list[str] = option(
        factory=list,
        help="Draft model; repeat the option for several drafts. DRAFT@q8_0 rounds the weights of DRAFT to the GGUF "
        "type q8_0. Default: the newest draft.",
    )
    drafter: list[Drafter] = option(
        factory=list,
        typed=list[str],
        help=(
            "Other drafter, NAME or NAME:KEY=VALUE,... (docs/drafters.md); repeat the option for "
            f"several. Names: {DRAFTERS.listed()}."
        ),
    )
    target: str = shared.target()
    k: DraftedTokens = numbers("1-6", "Numbers of drafted tokens per step to try, as 1-6 or 2,4,8.")
    batch: Numbers = numbers("1", "Batch sizes: 4 decodes four prompts at once; 1,4 measures both batch sizes.")
    data: str = shared.data("Text source, whose held-out text gives the prompts.")
    prompt_file: Path | None = shared.prompt_file()
    chat: shared.ChatMode = shared.chat(advanced=True)
    system_prompt: str | None = shared.system_prompt()
    num_prompts: int | None = option(
        None,
        "Number of prompts, evenly spaced in a file. Default: all prompts of a file, or 16 from a data source.",
        ge=1,
    )
    prompt_tokens: int | None = advanced_option(
        None,
        "Cut prompts to this number of tokens. Default: prompts of a file are not cut; prompts from a data source "
        "have 64 tokens.",
        ge=1,
    )
    max_new_tokens: int = option(128, "Largest number of tokens generated after each prompt.", ge=2)
    minutes: float | None = option(
        None,
        "Minutes after which timing ends. Default: it ends when the order of the drafts is decided, or when the "
        "interval is narrow enough (--precision).",
        gt=0,
    )
    precision: float = advanced_option(
        0.05,
        "Timing ends when half the interval of the fastest draft's speed-up is below this fraction of it.",
        gt=0,
    )
    exhaustive: bool = option(
        False,
        "Time every draft at every K, several times. By default, replays of the target's own texts and the time of "
        "single passes predict what is slow, and only drafts that may be the fastest are timed.",
    )
    repeats: int | None = option(
        None,
        "Number of times that each request is timed in each way. Default: 1; with --exhaustive or on servers 3.",
        ge=1,
    )
    seed: int = shared.seed()
    rule: str = advanced_option(
        REJECTION,
        f"Rule that verifies sampled drafts: {RULES.listed(REJECTION)}.",
        panel=shared.SAMPLING,
    )
    server_rule: ServerRule = option(
        None,
        "Verify drafted tokens as this server does, in place of --rule.",
        panel=shared.SAMPLING,
    )
    mode: shared.EngineMode = shared.mode()
    dtype: shared.WeightsDtype = shared.dtype()
    device: str = shared.device()
    device_map: shared.DeviceMap = shared.device_map()
    int8: Literal["draft", "target", "both"] | None = option(
        None,
        "Round the weights of this model to 8 bits, with --mode native. Plain decoding is then timed twice: with "
        "rounded and with full weights.",
    )
    threads: int | None = shared.threads()
    server: str | None = option(
        None,
        "Server that runs the target alone, http://HOST:PORT, or a directory of its stored answers. Without "
        "--speculative-server, the answers are stored for a later comparison.",
        panel=SERVER,
        reads="path",
        acts="always",
    )
    speculative_server: str | None = option(
        None,
        "Server that runs the target with the draft, http://HOST:PORT.",
        panel=SERVER,
        acts="always",
    )
    api_key_file: Path | None = shared.api_key_file()
    served_model_name: str | None = shared.served_model_name()
    tasks: str | None = option(
        None,
        "Measure accuracy on these tasks: names of tasks of lm-eval or draftlab, or YAML files, separated by commas.",
        panel=TASKS,
        reads="tasks",
        acts="path",
    )
    task_limit: int = option(
        200, "Number of items of each task to evaluate, from the first item on.", ge=1, panel=TASKS
    )
    task_batch_size: int = option(1, "Batch size of the tasks.", ge=1, panel=TASKS)
    num_fewshot: int | None = advanced_option(
        None,
        "Number of few-shot examples. Default: the number that the task defines.",
        ge=0,
        panel=TASKS,
    )
    apply_chat_template: bool = advanced_option(
        False,
        "Apply the tokenizer's chat template to the tasks; few-shot examples become turns.",
        panel=TASKS,
    )
    include_path: Path | None = advanced_option(
        None,
        "Folder with YAML files of additional tasks.",
        panel=TASKS,
        reads="tasks",
        acts="always",
    )
    min_speedup: float | None = option(
        None,
        "Exit with code 3 unless the interval of the speed-up over plain decoding, prefill included, is above this for "
        "every draft and batch size.",
        ge=0,
    )

    only = (
        Only(
            ENGINE,
            lambda c: not c.served,
            "leave it out, because a server runs its own model with its own settings",
        ),
        shared.KEY_RULE,
        Only(
            ("minutes", "precision"),
            lambda c: not c.exhaustive,
            "leave it out, because --exhaustive times everything",
        ),
        Only(
            ("speculative_server",),
            lambda c: c.server,
            "needs --server: a server that runs the target alone, or the directory of its stored answers",
        ),
        Only(
            ("draft", "min_speedup"),
            lambda c: not c.served or c.speculative_server,
            "needs --speculative-server URL, a second server that runs the target with the draft",
        ),
        Only(
            ("rule", "server_rule", "top_k", "top_p", "min_p"),
            lambda c: c.temperature > 0,
            "works only with a --temperature above 0, because greedy decoding does not use this option",
        ),
        Only(
            ("rule",),
            lambda c: c.server_rule is None,
            "leave it out, because --server-rule sets it",
        ),
        Only(
            ("task_limit", "task_batch_size", "num_fewshot", "apply_chat_template", "include_path"),
            lambda c: c.tasks,
            "needs --tasks NAMES",
        ),
        Only(("int8",), lambda c: c.mode in ("auto", "native"), "needs --mode native"),
        *shared.CHAT_RULES,
    )

    @property
    def text_source(self) -> str | None:
        learns = any(spec.reads_data for spec in self.drafter)
        return self.data if self.prompt_file is None or learns else None

    @property
    def served(self) -> bool:
        """Return whether servers decode the prompts instead of draftlab's engine."""
        return self.server is not None or self.speculative_server is not None

    @model_validator(mode="after")
    def _rule_is_known(self) -> Self:
        known = [REJECTION, *RULES.names()]
        if self.rule not in known:
            raise ValueError(f"--rule {self.rule}: there is no such verify rule{did_you_mean(self.rule, known)}")
        return self

    def resolved(self) -> Self:
        if self.draft or self.drafter or self.served:
            return self
        return self.model_copy(update={"draft": [str(shared.newest_draft())]})


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Scored(Outcome):
    """The outcome of score. scores: One score for each draft, drafter and batch size."""

    scores: "list[Score]"

    @property
    def best(self) -> "Score":
        """Return the score with the highest speed-up of whole requests.

        Raises:
            UserError: Several batch sizes were measured, so the speed-ups have several baselines.
        """
        return _fastest(self.scores).score

    @property
    def interval(self) -> "Interval":
        """Return the speed-up of whole requests with its 95 % interval, if draft and K are chosen on other requests."""
        return _fastest(self.scores).gain

    @property
    def speedup(self) -> float:
        """Return the value of `interval`."""
        return self.interval.value


def _fastest(scores: "list[Score]") -> "Ranked":
    from draftlab.results.ranking import rank

    return rank(scores)[0]


def prepare(config: ScoreConfig, weights: bool) -> "Job[PlainAnswers | Score | list[Score]]":
    """Resolve and check the settings of the command `score`, and return the job.

    weights: Whether to download weight files. If False, only configurations and tokenizers are downloaded.

    Raises:
        UserError: A model, server, prompt file, task or data set is missing or does not fit the settings.
    """
    if config.include_path is not None and not config.include_path.is_dir():
        raise UserError(f"--include-path {config.include_path}: there is no such directory")
    tasks = None
    if config.tasks is not None and weights:
        from draftlab.scoring.lm_eval import load_tasks

        tasks = fill(
            load_tasks,
            config,
            names=[str(shipped.named("tasks").get(name, name)) for name in config.tasks.split(",")],
            limit=config.task_limit,
            batch_size=config.task_batch_size,
        )
    from draftlab.scoring import run, servers

    if config.served:
        served = _served(config, tasks, weights)
        return Job(partial(servers.score, served), served.name, served.facts)
    local = _local(config, tasks, weights)
    return Job(partial(run.score, local), local.name, local.facts)


@command(
    ScoreConfig,
    prepare=prepare,
    dry_run=True,
    example="score --draft runs/distill-3x128 --prompt-file users.jsonl",
)
def score(result: "PlainAnswers | Score | list[Score]", output: Output) -> Scored | Outcome:
    """Measure the acceptance, the speed-up over plain decoding and the accuracy of drafts, here or on servers."""
    from draftlab.scoring.servers import PlainAnswers

    if not isinstance(result, PlainAnswers):
        return _outcome(result if isinstance(result, list) else [result], output)
    speed = tokens_per_second([run.request for run in result.runs])
    config = output.config
    assert isinstance(config, ScoreConfig)
    # the same server, after a restart with the draft
    changes = {"server": str(output.out), "speculative_server": config.server, "out": None}
    return Outcome(
        path=output.out,
        show=[
            f"{len(result.runs)} answers of the target alone, {format_number(speed, 4)} tokens per second",
            str(output.out),
        ],
        data={"path": str(output.out), "output_tps": speed},
        next=config.model_copy(update=changes).command_line("score"),
    )


def _local(config: ScoreConfig, tasks: "Tasks | None", weights: bool) -> "Comparison":
    """Check the models, and return the comparison of drafts, which this process runs."""
    rule = chosen_rule(config.server_rule, config.rule)
    sampling = rule.target_sampling(_sampling(config))
    with about("--target"):
        target = hub.locate_model(config.target, weights)
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
    with note_if_slow("loading torch and transformers"):
        from draftlab.model import checkpoint, devices
        from draftlab.model.modes import engine_runs, resolve
        from draftlab.model.tokenizer import common_vocabulary
        from draftlab.scoring.comparison import Comparison, Effort, Engine
    named = [path for spec in specs for path in spec.paths(default, weights=weights, models_only=True)]
    models = list(dict.fromkeys([*drafts.values(), *named]))
    with about("--draft"):
        for directory in models:
            common_vocabulary(directory, target)
    if weights:
        for directory in (target, *models):
            checkpoint.check(directory)
    with about("--device"):
        device = devices.resolve_device(config.device)
    own = [path for path in models if engine_runs(path)]
    hosted = config.device_map is not None or not engine_runs(target)
    used = own or not hosted or any(spec.inputs() for spec in specs)
    if not used and config.mode not in ("auto", "eager"):
        raise UserError(f"--mode {config.mode}: leave it out, because transformers runs all models of this run")
    mode, choice = resolve(
        config.mode if used else "eager",
        config.dtype,
        device,
        target,
        own,
        hosted=hosted,
        threads=config.threads,
        int8=config.int8 is not None,
    )
    stop = checkpoint.eos_token_ids(target)
    comparison = Comparison(
        target=target,
        drafts=drafts,
        drafters=specs,
        default_draft=default,
        requests=_requests(config, target, replace(sampling, stop_token_ids=stop)),
        engine=fill(
            Engine,
            config,
            device=device,
            dtype=choice.dtype,
            dtype_reason=choice.reason,
            task_dtype=devices.resolve_dtype(config.dtype, device),
            mode=mode,
            target_int8=config.int8 in ("target", "both"),
            draft_int8=config.int8 in ("draft", "both"),
        ),
        ks=config.k,
        batches=config.batch,
        rule=rule,
        data=config.data,
        tasks=tasks,
        effort=fill(Effort, config, every=config.min_speedup is not None),
    )
    comparison.check()
    return comparison


def _served(config: ScoreConfig, tasks: "Tasks | None", weights: bool) -> "ServedComparison":
    """Connect to the servers, and return the comparison of their speeds."""
    from draftlab.reading import read_model
    from draftlab.servers.client import Server

    assert config.server is not None
    is_stored = config.speculative_server is not None and "://" not in config.server
    servers: dict[str, Server] = {}
    for name, flag, url in (
        ("plain", "--server", None if is_stored else config.server),
        ("speculative", "--speculative-server", config.speculative_server),
    ):
        if url is not None:
            with about(flag):
                servers[name] = Server.connect(
                    url, config.api_key_file, model=config.served_model_name, dry_run=not weights
                )
    with about("--target"):
        tokenizer = hub.locate_tokenizer(config.target)
    with note_if_slow("loading torch and transformers"):
        from draftlab.scoring.lm_eval import check_chat_template
        from draftlab.scoring.servers import PLAIN_FILE, PlainAnswers, ServedComparison
    with about("--server"):
        stored = read_model(PlainAnswers, Path(config.server), PLAIN_FILE) if is_stored else None
    if len(config.draft) > 1:
        raise UserError(
            f"--draft: there are {len(config.draft)} drafts, but the server runs one; name only the draft that it runs"
        )
    requests = _requests(config, tokenizer, _sampling(config))
    if config.apply_chat_template:
        check_chat_template(tokenizer)
    if tasks is not None and "plain" in servers:
        tasks.check_server(servers["plain"])
    return ServedComparison(
        servers=servers,
        stored=stored,
        draft=config.draft[0] if config.draft else "draft",
        tokenizer=tokenizer,
        requests=requests,
        tasks=tasks,
    )


def _sampling(config: ScoreConfig) -> SamplingParams:
    return fill(SamplingParams, config, max_tokens=config.max_new_tokens)


def _requests(config: ScoreConfig, tokenizer: Path, sampling: SamplingParams) -> "Requests":
    """Read the prompts, and return them with the sampling parameters. tokenizer: Directory of the tokenizer."""
    from draftlab.data.prompts import load_prompts
    from draftlab.model import checkpoint
    from draftlab.scoring.comparison import Requests

    option = "--data" if config.prompt_file is None else "--prompt-file"
    with about(option), note_if_slow(f"reading prompts of {config.prompt_file or config.data}"):
        prompts = fill(
            load_prompts,
            config,
            file=config.prompt_file,
            source=config.data,
            tokenizer=checkpoint.load_tokenizer(tokenizer),
            count=config.num_prompts,
            tokens=config.prompt_tokens,
        )
    usual = 3 if config.exhaustive or config.served else 1
    return Requests(prompts=prompts, sampling=sampling, repeats=config.repeats or usual)


def _drafts_by_name(names: list[str], weights: bool) -> dict[str, Path]:
    """Return the directory of each draft, by the draft's name. The name of a rounded draft ends in @TYPE.

    Raises:
        UserError: A draft is missing, or two drafts have the same name.
    """
    from draftlab.exporting.hf import parse_quantized_name

    drafts: dict[str, Path] = {}
    for name in names:
        base, kind = parse_quantized_name(name)
        before, _, unknown = name.rpartition("@")
        if kind is None and before and Path(before).exists():
            raise UserError(
                f"--draft {name}: {unknown!r} after the @ is not a GGUF type{did_you_mean(unknown, hub.ROUNDED)}"
            )
        path = hub.locate_model(base, weights)
        drafts[hub.checkpoint_name(path) + (f"@{kind}" if kind else "")] = path
    if len(drafts) < len(names):
        raise UserError("two drafts have the same directory name; rename one directory: " + ", ".join(names))
    return drafts


def _outcome(scores: "list[Score]", output: Output) -> Scored:
    from draftlab.results.ranking import (
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

    config = output.config
    assert isinstance(config, ScoreConfig)
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
    show += [*(f"warning: {text}" for text in score_warnings(scores)), str(output.out)]
    categories = {s.name: category_rows(s) for s in scores}
    return Scored(
        path=output.out,
        show=show,
        data={"scores": json_rows(scores), "categories": categories},
        missed=missed,
        scores=scores,
        next=export_command(groups) or typed("draftlab", "report", output.out, "--html", "report.html"),
    )
