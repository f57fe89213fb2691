"""Score a draft through running servers: one runs the target alone, one the target with its draft.

Requests go one at a time, to both servers in turn, or to one in each of two phases. Seen from outside a request is one
time: prefill, decoding and transport.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic import Field

from draftlab import provenance, turns
from draftlab.benchmark.lm_eval import Tasks, check_chat_template
from draftlab.benchmark.setup import shared_conditions, tasks_of
from draftlab.config.score import ScoreServersConfig
from draftlab.console import note, note_if_slow, progress
from draftlab.engine.clocks import Clock
from draftlab.errors import UserError
from draftlab.latency.machine_state import read_core_time, read_environment, warm_up, warn_if_busy, with_waiting
from draftlab.model import checkpoint, hub
from draftlab.output import Output
from draftlab.prompts import Prompts, load_prompts
from draftlab.reading import FileModel, read_model
from draftlab.results.decoding import Counters, ServedGeneration, share_of_equal_texts
from draftlab.results.environment import Environment
from draftlab.results.score import Conditions, Model, Prompt, Score, TaskResult
from draftlab.sampling import SamplingParams
from draftlab.servers.client import Server, spec_decode_counters
from draftlab.target_outputs.repeats import distinct_ngrams
from draftlab.target_outputs.targets import check_server_tokenizer

PLAIN, SPECULATIVE = "plain", "speculative"
PLAIN_FILE = "plain.json"
PREFIX_HITS = ":prefix_cache_hits_total"  # prompt tokens, in vLLM


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSetup:
    """The servers of this phase and what to ask them. tokenizer: the target's directory, or its tokenizer alone."""

    config: ScoreServersConfig
    servers: dict[str, Server]  # by PLAIN and SPECULATIVE
    tokenizer: Path
    prompts: Prompts
    tasks: Tasks | None


class PlainAnswers(FileModel):
    """The plain server's answers, on disk between two phases. asked: the conditions that both phases have in common."""

    kind: str
    model: str
    version: str
    asked: dict[str, Any]
    runs: list[ServedGeneration]
    tokens: list[list[int]]
    tasks: list[TaskResult] = Field(default=[])


@dataclass(slots=True)
class Answers:
    """Answers of one server. tokens: of the first repeat. counters: those in its answers. before, after: metrics."""

    runs: list[ServedGeneration] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    answer_counters: list[Counters] = field(default_factory=list)
    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)

    @property
    def counters(self) -> Counters | None:
        """Return how its speculative counters grew, or None where nothing was drafted."""
        if not self.answer_counters:
            return spec_decode_counters(self.before, self.after)
        positions = max(len(c.num_accepted_tokens_per_pos) for c in self.answer_counters)
        return Counters(
            num_drafts=sum(c.num_drafts for c in self.answer_counters),
            num_draft_tokens=sum(c.num_draft_tokens for c in self.answer_counters),
            num_accepted_tokens_per_pos=[
                sum(
                    c.num_accepted_tokens_per_pos[i]
                    for c in self.answer_counters
                    if i < len(c.num_accepted_tokens_per_pos)
                )
                for i in range(positions)
            ],
        )

    @property
    def cached_prompt_tokens(self) -> float:
        """Return how many prompt tokens the server took from its prefix cache."""
        series = [name for name in self.after if name.partition("{")[0].endswith(PREFIX_HITS)]
        return sum(self.after[name] - self.before.get(name, 0.0) for name in series)


def score(config: ScoreServersConfig, output: Output) -> Score | PlainAnswers:
    """Measure, write score.json, and return the score; in phase plain write and return the plain server's answers.

    Raises:
        UserError: another vocabulary than the tokenizer's, servers that both draft or both do not, or that served
            others at the same time; answers of a phase that asked for something else.
    """
    setup = set_up(config)
    stored = None if config.plain is None else read_model(PlainAnswers, config.plain, PLAIN_FILE)
    for server in setup.servers.values():
        check_server_tokenizer(server, setup.tokenizer)
    setup = with_turns(setup, stored)
    if stored is not None:
        _check_same(stored, setup, config.plain)
    environment = read_environment()
    warn_if_busy(environment)
    before = read_core_time()
    with progress("decode", len(setup.prompts.rows) * config.repeats) as advance:
        answers = measure(setup, lambda done: advance(done, "of each server"))
    environment = with_waiting(environment, before, read_core_time())
    plain = stored or _plain_answers(setup, answers[PLAIN])
    places = (setup.tokenizer, Path(config.draft), config.plain)
    scored = config.phase != "plain"
    result = _score(setup, plain, answers[SPECULATIVE], environment, output.command_line) if scored else plain
    with output.directory() as work:
        (work / ("score.json" if scored else PLAIN_FILE)).write_text(result.model_dump_json(indent=1))
        output.record(work, [path for path in places if path is not None and path.is_dir()])
    return result


def describe(config: ScoreServersConfig) -> dict[str, object]:
    """Return what score would do, for a plan."""
    setup = set_up(config)
    requests = len(setup.servers) * config.repeats * setup.prompts.requests
    return {
        "servers": "; ".join(server.describe() for server in setup.servers.values()),
        "work": f"{requests} requests of at most {config.max_tokens} tokens",
    }


def set_up(config: ScoreServersConfig) -> ServerSetup:
    """Connect to the servers of this phase and read the prompts."""
    place = config.tokenizer or hub.locate(config.target, weights=False)
    source = config.data if config.prompt_file else hub.check_data(config.data)
    urls = {PLAIN: config.server, SPECULATIVE: config.speculative_server}
    servers = {
        role: Server.connect(url, config.served_model, config.api_key_file)
        for role, url in urls.items()
        if url is not None
    }
    with note_if_slow(f"reading prompts of {config.prompt_file or source}"):
        prompts = load_prompts(
            config.prompt_file, source, checkpoint.load_tokenizer(place), count=config.num_prompts,
            tokens=config.prompt_tokens, seed=config.seed, chat=config.chat, system_prompt=config.system_prompt,
        )  # fmt: skip
    if config.apply_chat_template:
        check_chat_template(place)
    tasks = tasks_of(config) if config.task_names else None
    if tasks is not None and PLAIN in servers:
        tasks.check_server(servers[PLAIN])
    return ServerSetup(config=config, servers=servers, tokenizer=place, prompts=prompts, tasks=tasks)


def with_turns(setup: ServerSetup, stored: PlainAnswers | None = None) -> ServerSetup:
    """Return the setup with a prompt for every turn, after the plain server's answers."""
    server, sampling = setup.servers.get(PLAIN), setup.config.sampling

    def answer(prompts: list[turns.Prompt], _: list[int]) -> list[list[int]]:
        if server is None:
            raise UserError(f"the answers to earlier turns are gone from {turns.FOLDER}; repeat --phase plain")
        return [completion.ids for completion in server.generate([p.ids for p in prompts], sampling)]

    named = stored or server
    assert named is not None  # the config wants one of the two
    tokenizer, target = checkpoint.load_tokenizer(setup.tokenizer), f"{named.kind} {named.model}"
    prompts = turns.answered(setup.prompts, tokenizer, target=target, sampling=sampling, answer=answer)
    return replace(setup, prompts=prompts)


def measure(setup: ServerSetup, advance: Callable[[int], None], clock: Clock = time.perf_counter) -> dict[str, Answers]:
    """Send every prompt to every server, repeats times, in alternating order. Raises as score."""
    prompts = [prompt.ids for prompt in setup.prompts.rows]
    _warm_up(setup, prompts[0][::-1], clock)  # as long as a prompt, and no cached prefix of one
    answers = {role: Answers(before=_metrics(server)) for role, server in setup.servers.items()}
    for turn in range(setup.config.repeats * len(prompts)):
        repeat, index = divmod(turn, len(prompts))
        for role in reversed(answers) if (repeat + index) % 2 else answers:
            ids, seconds, counters = _ask(setup.servers[role], prompts[index], setup.config.sampling, clock)
            answers[role].runs.append(ServedGeneration(prompt=index, tokens=len(ids), seconds=seconds))
            answers[role].answer_counters.extend([counters] if counters is not None else [])
            if repeat == 0:
                answers[role].tokens.append(ids)
        advance(turn + 1)
    for role, server in setup.servers.items():
        answers[role].after = _metrics(server)
        _note_cached(server, answers[role].cached_prompt_tokens)
    return answers


def check_role(server: Server, drafted: bool, should: bool) -> None:
    """Raises UserError: the server drafts and should not, or the other way round."""
    if should and not drafted:
        raise UserError(
            f"--speculative-server {server.http.url} drafts nothing; start it with a draft (docs/servers.md)"
        )
    if drafted and not should:
        raise UserError(f"--server {server.http.url} drafts; it must run the target alone")


def check_alone(runs: list[ServedGeneration], counters: Counters, url: str) -> None:
    """Check the tokens received against the counters: the first of each answer, one of each step, and those accepted.

    Raises:
        UserError: the counters do not match our requests, so the server answered others, too.
    """
    tokens = sum(r.tokens for r in runs)
    most = len(runs) + counters.num_drafts + sum(counters.num_accepted_tokens_per_pos)
    if not tokens <= most <= tokens + len(runs) * (counters.k + 1):  # the end of a text cuts its last step
        raise UserError(
            f"{url} counted {counters.num_drafts:.0f} steps, which give {most:.0f} tokens, and {tokens} arrived: it "
            "answered other requests at the same time; score needs it alone"
        )


def _warm_up(setup: ServerSetup, prompt: list[int], clock: Clock) -> None:
    """Check the roles of the servers with one request each, then warm them up."""
    for role, server in setup.servers.items():
        answers = Answers(before=_metrics(server))
        *_, counters = _ask(server, prompt, setup.config.sampling, clock)
        answers.answer_counters += [counters] if counters is not None else []
        answers.after = _metrics(server)
        check_role(server, answers.counters is not None, role == SPECULATIVE)
    for server in setup.servers.values():
        if not warm_up(lambda server=server: _ask(server, prompt, setup.config.sampling, clock)[1]):
            note(f"{server.http.url} does not reach a steady state: its times vary by more than a tenth")


def _ask(
    server: Server, prompt: list[int], sampling: SamplingParams, clock: Clock
) -> tuple[list[int], float, Counters | None]:
    start = clock()
    ids, counters = server.generate_ids(prompt, sampling)
    return ids, clock() - start, counters


def _plain_answers(setup: ServerSetup, answers: Answers) -> PlainAnswers:
    server = setup.servers[PLAIN]
    return PlainAnswers(
        kind=server.kind, model=server.model, version=server.version, asked=_asked(setup), runs=answers.runs,
        tokens=answers.tokens, tasks=setup.tasks.of_server(server, setup.tokenizer) if setup.tasks else [],
    )  # fmt: skip


def _draft_tasks(setup: ServerSetup, draft: Model) -> list[TaskResult]:
    """Return the lm-eval results of the draft, which runs here; none where its checkpoint is on the server only."""
    if setup.tasks is None:
        return []
    if draft.sha256 is None:
        note(f"--tasks: {draft.name} is no checkpoint here, so that only the target is evaluated")
        return []
    device = checkpoint.resolve_device("auto")
    return setup.tasks.of_checkpoint(Path(setup.config.draft), checkpoint.resolve_dtype("auto", device), device)


def _asked(setup: ServerSetup) -> dict[str, Any]:
    return json.loads(json.dumps(shared_conditions(setup.config, setup.prompts)))


def _check_same(stored: PlainAnswers, setup: ServerSetup, place: Path | None) -> None:
    """Raises UserError: the plain phase asked for something else, or its server is of another kind."""
    server = setup.servers[SPECULATIVE]
    before, now = stored.asked | {"server": stored.kind}, _asked(setup) | {"server": server.kind}
    differing = [name for name in now if before.get(name) != now[name]]
    if differing:
        name = differing[0]
        raise UserError(
            f"{place} has answers with {name} = {before.get(name)!r}, and this phase has {now[name]!r}; repeat the "
            "options of --phase plain, or that phase"
        )


def _note_cached(server: Server, tokens: float) -> None:
    if tokens:
        note(
            f"{server.http.url} took {tokens:.0f} prompt tokens from its cache, so later repeats cost less than the "
            "first; start vLLM with --no-enable-prefix-caching"
        )


def _score(
    setup: ServerSetup, plain: PlainAnswers, speculative: Answers, environment: Environment, command: str
) -> Score:
    config, counters, server = setup.config, speculative.counters, setup.servers[SPECULATIVE]
    draft = _model(Path(config.draft), config.draft)
    if counters is None:
        raise UserError(f"{server.http.url} has drafted nothing for these prompts")
    check_alone(speculative.runs, counters, server.http.url)
    return Score(
        name=Path(config.draft).name,
        target=_model(setup.tokenizer, plain.model).model_copy(update={"tasks": plain.tasks}),
        draft=draft.model_copy(update={"tasks": _draft_tasks(setup, draft)}),
        conditions=_conditions(setup),
        environment=environment,
        prompts=[Prompt(tokens=len(p.ids), category=p.category) for p in setup.prompts.rows],
        plain=plain.runs,
        speculative={counters.k: speculative.runs},
        counters={counters.k: counters},
        equal_texts=share_of_equal_texts(plain.tokens, [speculative.tokens]) if config.temperature == 0 else None,
        distinct_4grams=distinct_ngrams(plain.tokens, 4),
        command=command,
        versions=provenance.versions() | {plain.kind: plain.version, server.kind: server.version},
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _conditions(setup: ServerSetup) -> Conditions:
    server = setup.servers[SPECULATIVE]
    return Conditions(
        **shared_conditions(setup.config, setup.prompts),
        device=f"{server.kind} {server.version}".strip(),
        dtype="as served",
        target_weights="as served",
        draft_weights="as served",
        mode="served",
        threads=None,
        context=None,
        in_phases=setup.config.phase != "both",
    )


def _metrics(server: Server) -> dict[str, float]:
    """Return the counters of the server's metrics page; SGLang's are in its answers."""
    return {} if server.kind == "sglang" else server.metrics()


def _model(directory: Path, name: str) -> Model:
    """Describe a checkpoint if it is here, else its name alone."""
    if not (directory / "config.json").is_file() or not any(directory.glob("*.safetensors")):
        return Model(name=Path(name).name, sha256=None, shape=None, latency=[], tasks=[])
    shape, digest = checkpoint.read_shape(directory), provenance.fingerprint(directory)
    return Model(name=hub.checkpoint_name(directory), sha256=digest, shape=shape, latency=[], tasks=[])
