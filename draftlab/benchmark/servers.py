"""Score a draft through running servers: one runs the target alone, one the target with its draft.

Requests go one at a time, to both servers in turn. Seen from outside a request is one time: prefill, decoding and
transport.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from draftlab import provenance, turns
from draftlab.benchmark.setup import shared_conditions
from draftlab.config.score import ScoreServersConfig
from draftlab.console import note, note_if_slow, progress
from draftlab.engine.generate import Clock
from draftlab.errors import UserError
from draftlab.latency.machine_state import read_environment, warm_up, warn_if_busy
from draftlab.model import checkpoint, hub
from draftlab.output import Output
from draftlab.prompts import Prompts, load_prompts
from draftlab.results.accuracy import Accuracies
from draftlab.results.decoding import Counters, ServedGeneration
from draftlab.results.score import Conditions, Environment, Model, Prompt, Score
from draftlab.sampling import SamplingParams
from draftlab.servers.client import Server, spec_decode_counters
from draftlab.target_outputs.repeats import distinct_ngrams
from draftlab.target_outputs.targets import check_server_tokenizer

PREFIX_HITS = ":prefix_cache_hits_total"  # prompt tokens, in vLLM


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSetup:
    """Two servers and what to ask them. tokenizer: the target's directory, or one with its tokenizer alone."""

    config: ScoreServersConfig
    plain: Server
    speculative: Server
    tokenizer: Path
    prompts: Prompts
    accuracies: Accuracies


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


def score(config: ScoreServersConfig, output: Output) -> Score:
    """Measure, write score.json, and return the score.

    Raises:
        UserError: another vocabulary than the tokenizer's, servers that both draft or both do not, or that served
            others at the same time.
    """
    setup = set_up(config)
    for server in (setup.plain, setup.speculative):
        check_server_tokenizer(server, setup.tokenizer)
    setup = with_turns(setup)
    environment = read_environment()
    warn_if_busy(environment)
    with progress("decode", len(setup.prompts.rows) * config.repeats) as advance:
        plain, speculative = measure(setup, lambda done: advance(done, "2 servers each"))
    result = _score(setup, plain, speculative, environment, output.command_line)
    with output.directory() as work:
        (work / "score.json").write_text(result.model_dump_json(indent=1))
        output.record(work, [path for path in (setup.tokenizer, Path(config.draft)) if path.is_dir()])
    return result


def describe(config: ScoreServersConfig) -> dict[str, object]:
    """Return what score would do, for a plan."""
    setup = set_up(config)
    requests = 2 * config.repeats * setup.prompts.requests
    return {
        "servers": f"{setup.plain.describe()}; {setup.speculative.describe()}",
        "work": f"{requests} requests of at most {config.max_tokens} tokens",
    }


def set_up(config: ScoreServersConfig) -> ServerSetup:
    """Connect to both servers and read the prompts."""
    accuracies, draft = Accuracies(config.accuracy), _model(Path(config.draft), config.draft)
    accuracies.check([(draft.name, draft.sha256)])
    place = config.tokenizer or hub.locate(config.target, weights=False)
    source = config.data if config.prompt_file else hub.check_data(config.data)
    plain, speculative = (
        Server.connect(url, config.served_model, config.api_key_file)
        for url in (config.server, config.speculative_server)
    )
    with note_if_slow(f"reading prompts of {config.prompt_file or source}"):
        prompts = load_prompts(
            config.prompt_file, source, checkpoint.load_tokenizer(place), count=config.num_prompts,
            tokens=config.prompt_tokens, seed=config.seed, chat=config.chat, system_prompt=config.system_prompt,
        )  # fmt: skip
    return ServerSetup(
        config=config, plain=plain, speculative=speculative, tokenizer=place, prompts=prompts, accuracies=accuracies
    )


def with_turns(setup: ServerSetup) -> ServerSetup:
    """Return the setup with a prompt for every turn, after the plain server's answers."""
    server, sampling = setup.plain, setup.config.sampling

    def answer(prompts: list[turns.Prompt], _: list[int]) -> list[list[int]]:
        return [completion.ids for completion in server.generate([p.ids for p in prompts], sampling)]

    tokenizer, target = checkpoint.load_tokenizer(setup.tokenizer), f"{server.kind} {server.model}"
    prompts = turns.answered(setup.prompts, tokenizer, target=target, sampling=sampling, answer=answer)
    return replace(setup, prompts=prompts)


def measure(
    setup: ServerSetup, advance: Callable[[int], None], clock: Clock = time.perf_counter
) -> tuple[Answers, Answers]:
    """Send every prompt to both servers, repeats times, in alternating order. Raises as score."""
    prompts = [prompt.ids for prompt in setup.prompts.rows]
    arms = (setup.plain, setup.speculative)
    _warm_up(setup, prompts[0][::-1], clock)  # as long as a prompt, and no cached prefix of one
    answers = Answers(before=_metrics(arms[0])), Answers(before=_metrics(arms[1]))
    for turn in range(setup.config.repeats * len(prompts)):
        repeat, index = divmod(turn, len(prompts))
        for arm in (1, 0) if (repeat + index) % 2 else (0, 1):
            ids, seconds, counters = _ask(arms[arm], prompts[index], setup.config.sampling, clock)
            answers[arm].runs.append(ServedGeneration(prompt=index, tokens=len(ids), seconds=seconds))
            answers[arm].answer_counters.extend([counters] if counters is not None else [])
            if repeat == 0:
                answers[arm].tokens.append(ids)
        advance(turn + 1)
    for server, answer in zip(arms, answers, strict=True):
        answer.after = _metrics(server)
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
    """Check the roles of the servers with one request each, then warm both up."""
    for server, should_draft in ((setup.plain, False), (setup.speculative, True)):
        answers = Answers(before=_metrics(server))
        *_, counters = _ask(server, prompt, setup.config.sampling, clock)
        answers.answer_counters += [counters] if counters is not None else []
        answers.after = _metrics(server)
        check_role(server, answers.counters is not None, should_draft)
    for server in (setup.plain, setup.speculative):
        if not warm_up(lambda server=server: _ask(server, prompt, setup.config.sampling, clock)[1]):
            note(f"{server.http.url} does not reach a steady state: its times vary by more than a tenth")


def _ask(
    server: Server, prompt: list[int], sampling: SamplingParams, clock: Clock
) -> tuple[list[int], float, Counters | None]:
    start = clock()
    ids, counters = server.generate_ids(prompt, sampling)
    return ids, clock() - start, counters


def _score(setup: ServerSetup, plain: Answers, speculative: Answers, environment: Environment, command: str) -> Score:
    config, counters = setup.config, speculative.counters
    if counters is None:
        raise UserError(f"{setup.speculative.http.url} has drafted nothing for these prompts")
    check_alone(speculative.runs, counters, setup.speculative.http.url)
    for server, answers in ((setup.plain, plain), (setup.speculative, speculative)):
        if answers.cached_prompt_tokens:
            note(
                f"{server.http.url} took {answers.cached_prompt_tokens:.0f} prompt tokens from its cache, so later "
                "repeats cost less than the first; start vLLM with --no-enable-prefix-caching"
            )
    return Score(
        name=Path(config.draft).name,
        target=setup.accuracies.join(_model(setup.tokenizer, setup.plain.model)),
        draft=setup.accuracies.join(_model(Path(config.draft), config.draft)),
        conditions=_conditions(setup),
        environment=environment,
        prompts=[Prompt(tokens=len(p.ids), category=p.category) for p in setup.prompts.rows],
        plain=plain.runs,
        speculative={counters.k: speculative.runs},
        counters={counters.k: counters},
        identical=plain.tokens == speculative.tokens if config.temperature == 0 else None,
        distinct_4grams=distinct_ngrams(plain.tokens, 4),
        command=command,
        versions=provenance.versions() | {s.kind: s.version for s in (setup.plain, setup.speculative)},
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _conditions(setup: ServerSetup) -> Conditions:
    server = setup.speculative
    return Conditions(
        **shared_conditions(setup.config, setup.prompts),
        device=f"{server.kind} {server.version}".strip(),
        dtype="as served",
        mode="served",
        threads=None,
        context=None,
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
