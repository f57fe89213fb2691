"""Score a draft with two running servers: a plain server with the target, and a server with target and draft.

Requests are sent one at a time. If both servers run at the same time, they get the requests in turn. Otherwise a first
command asks the plain server, and a second command asks the other server. The time of a request includes prefill,
decoding and transport, which a client cannot separate.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from draftlab.console import note, progress
from draftlab.data import turns
from draftlab.data.bad_rows import BadRows
from draftlab.engine.clocks import Clock
from draftlab.errors import UserError
from draftlab.latency.machine_state import (
    read_core_time,
    read_environment,
    warm_up,
    warn_if_busy,
    with_waiting,
)
from draftlab.model import checkpoint, devices, hub
from draftlab.output import Output
from draftlab.reading import FileModel, reading
from draftlab.results.decoding import ServedGeneration
from draftlab.results.ranking import ScoreResult
from draftlab.results.score import Conditions, Environment, Model, Score, TaskResult
from draftlab.runs import provenance
from draftlab.scoring.comparison import Requests
from draftlab.scoring.lm_eval import Tasks
from draftlab.scoring.throughput import interleaved
from draftlab.servers.answers import ServerAnswers, check_alone, read_metrics, renumbered
from draftlab.servers.client import Server
from draftlab.servers.kinds import RowError
from draftlab.target_outputs.store import logits_of
from draftlab.target_outputs.targets import check_ids, check_server_tokenizer

Item = TypeVar("Item")
PLAIN = "plain"
SPECULATIVE = "speculative"
PLAIN_FILE = "plain.json"
OPTIONS = {PLAIN: "--server", SPECULATIVE: "--speculative-server"}


class PlainAnswers(FileModel):
    """Answers of the server without a draft, which are stored until the server with the draft runs.

    Args:
        kind, model, version: Kind of the server, name of its model, and version of the server.
        asked: Conditions of the requests. Both servers must get the same requests.
        runs: Generations, in the order of the requests. Prompts are numbered without those in left_out.
        tokens: Token ids of each answer in the first repeat.
        left_out: Numbers of the prompts, from 0, that the server refused.
    """

    kind: str
    model: str
    version: str
    asked: dict[str, Any]
    runs: list[ServedGeneration]
    tokens: list[list[int]]
    left_out: list[int] = Field(default=[])
    tasks: list[TaskResult] = Field(default=[])


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedComparison:
    """Two servers to compare, and the requests to send to them.

    Args:
        servers: The running servers, under the keys PLAIN and SPECULATIVE.
        stored: Answers of the plain server in an earlier run, or None.
        draft: Name or directory of the draft.
        tokenizer: Directory of the target. Only its tokenizer is needed.
    """

    servers: dict[str, Server]
    stored: PlainAnswers | None
    draft: str
    tokenizer: Path
    requests: Requests
    tasks: Tasks | None = None

    @property
    def name(self) -> str:
        return "score-served" if SPECULATIVE in self.servers else "score-served-plain"

    def without(self, refused: Sequence[int]) -> "ServedComparison":
        """Return the comparison without the prompts of these numbers. The prompts after them are numbered anew."""
        if not refused:
            return self
        rows = _without(self.requests.prompts.rows, refused)
        prompts = replace(self.requests.prompts, rows=rows)
        return replace(self, requests=replace(self.requests, prompts=prompts))

    @property
    def conditions(self) -> dict[str, Any]:
        """Return the conditions of the requests as JSON values. They are equal for both servers."""
        return json.loads(json.dumps(self.requests.conditions()))

    def facts(self) -> Mapping[str, object]:
        """Return the facts that a dry run shows."""
        count = len(self.servers) * self.requests.repeats * self.requests.prompts.requests
        return {
            "servers": "; ".join(server.describe() for server in self.servers.values()),
            "work": f"{count} requests of up to {self.requests.sampling.max_tokens} tokens",
        }

    def run(self, output: Output) -> ScoreResult | PlainAnswers:
        """Measure the servers, and write and return the score. With only a plain server, write and return its answers.

        Raises:
            UserError: The vocabulary of a server differs from the vocabulary of the tokenizer; the plain server drafts;
                the other server does not draft, or also answered other clients meanwhile; or the stored answers belong
                to other requests.
        """
        comparison = self
        drafts = [Path(comparison.draft)] if Path(comparison.draft).is_dir() else []
        output.inputs([comparison.tokenizer, *drafts])
        for server in comparison.servers.values():
            check_server_tokenizer(server, comparison.tokenizer)
        comparison = with_turns(comparison)
        _check_same(comparison)
        asked = comparison.conditions
        stored = comparison.stored
        if stored is not None:
            comparison = comparison.without(stored.left_out)
        environment = read_environment()
        warn_if_busy(environment)
        before = read_core_time()
        requests = comparison.requests
        count = len(comparison.servers) * len(requests.prompts.rows) * requests.repeats
        with progress("decoding", count) as advance:
            answers, refused = measure(comparison, lambda done: advance(done, "answers"))
        environment = with_waiting(environment, before, read_core_time())
        comparison = comparison.without(refused)
        if stored is None:
            plain = _plain_answers(comparison, answers[PLAIN], asked, refused)
        else:
            runs = renumbered(stored.runs, refused)
            tokens = _without(stored.tokens, refused)
            plain = stored.model_copy(update={"runs": runs, "tokens": tokens})
        score = None
        if SPECULATIVE in comparison.servers:
            score = _score(comparison, plain, answers[SPECULATIVE], environment, output.command_line)
        with output.directory() as work:
            if score is None:
                (work / PLAIN_FILE).write_text(plain.model_dump_json(indent=1))
            else:
                (work / "score.json").write_text(score.model_dump_json(indent=1))
            output.record(work)
        return plain if score is None else ScoreResult([score])


def with_turns(comparison: ServedComparison) -> ServedComparison:
    """Return a copy of the comparison with a prompt for every turn of a conversation.

    The prompt of a turn contains the earlier turns and the plain server's answers to them.

    Raises:
        UserError: The answers are missing and there is no running plain server, or the server fails.
    """
    server = comparison.servers.get(PLAIN)
    requests = comparison.requests

    def answer(prompts: list[turns.Prompt], _: list[int]) -> list[list[int] | UserError]:
        if server is None:
            raise UserError(
                f"the answers to earlier turns are missing in the folder {turns.FOLDER} of the workspace's runs; run "
                "draftlab score --server URL again"
            )
        rows = server.generate_rows([p.ids for p in prompts], requests.sampling, k=None)
        vocab = logits_of(comparison.tokenizer)
        written: list[list[int] | UserError] = []
        for row, prompt in zip(rows, prompts, strict=True):
            if isinstance(row, RowError):
                written.append(row)
                continue
            check_ids(row.ids, vocab, f"a turn of conversation {prompt.conversation}")
            written.append(row.ids)
        return written

    named = comparison.stored or server
    assert named is not None  # prepare() requires --server, which is a server or stored answers
    prompts = turns.answered(
        requests.prompts,
        checkpoint.load_tokenizer(comparison.tokenizer),
        target=f"{named.kind} {named.model}",
        sampling=requests.sampling,
        answer=answer,
    )
    return replace(comparison, requests=replace(requests, prompts=prompts))


def measure(
    comparison: ServedComparison, advance: Callable[[int], None], clock: Clock = time.perf_counter
) -> tuple[dict[str, ServerAnswers], list[int]]:
    """Warm up the servers, and send every prompt to every server in each repeat. The servers take turns.

    A prompt that a server refuses is a bad row. All answers to it are left out, but the counters of a server include
    them.

    Args:
        advance: Function that is called with the number of answers, or a server's refusals.

    Returns: The answers by server, and the numbers of the prompts that are left out.

    Raises:
        UserError: The plain server drafts, or the speculative server does not, or too many prompts are refused.
    """
    servers = comparison.servers
    requests = comparison.requests
    prompts = [prompt.ids for prompt in requests.prompts.rows]
    # the shortest prompt is least likely to be refused; reversed, it leaves nothing useful in the prefix cache
    _warm_up(comparison, min(prompts, key=len)[::-1], clock)
    answers = {role: ServerAnswers(before=read_metrics(server)) for role, server in servers.items()}
    vocab = logits_of(comparison.tokenizer)
    bad = BadRows(requests.prompts.source, len(prompts))
    refused = list[int]()
    order = interleaved(list(servers), len(prompts), requests.repeats)
    for done, (role, repeat, index) in enumerate(order, 1):
        if index in refused:
            continue
        prompt = prompts[index]
        try:
            ids, seconds = answers[role].ask(servers[role], prompt, requests.sampling, clock)
        except RowError as error:
            refused.append(index)
            bad.leave_out(f"prompt {index + 1}", str(error))
            bad.check()
            continue
        answers[role].runs.append(ServedGeneration(prompt=index, tokens=len(ids), seconds=seconds))
        if repeat == 0:
            check_ids(ids, vocab, f"prompt {index}")
            answers[role].tokens[index] = ids
        advance(done)
    for role, server in servers.items():
        answers[role].after = read_metrics(server)
        if (tokens := answers[role].cached_prompt_tokens) > 0:
            note(
                f"{server.http.url} took {tokens:.0f} prompt tokens from its prefix cache, so it read prompts faster "
                "that it had seen; start both servers with --no-enable-prefix-caching"
            )
        answers[role].without(refused)
    bad.settle()
    return answers, sorted(refused)


def _warm_up(comparison: ServedComparison, prompt: list[int], clock: Clock) -> None:
    """Check with one request per server that only the speculative server drafts, and then warm up the servers.

    Raises:
        UserError: The plain server drafts, or the speculative server does not.
    """
    sampling = comparison.requests.sampling
    for role, server in comparison.servers.items():
        answers = ServerAnswers(before=read_metrics(server))
        answers.ask(server, prompt, sampling, clock)
        answers.after = read_metrics(server)
        drafts = answers.counters is not None
        if drafts != (role == SPECULATIVE):
            wrong = (
                "drafts, but must run the target alone; start the server without a draft"
                if drafts
                else answers.undrafted
            )
            raise UserError(f"{OPTIONS[role]} {server.http.url} {wrong}")
    discarded = ServerAnswers()
    for server in comparison.servers.values():
        if not warm_up(lambda server=server: discarded.ask(server, prompt, sampling, clock)[1]):
            note(
                f"the answer times of {server.http.url} still vary by more than 10 % after the warm-up; other load "
                "may disturb the server"
            )


def _without(items: Sequence[Item], refused: Sequence[int]) -> list[Item]:
    return [item for number, item in enumerate(items) if number not in refused]


def _plain_answers(
    comparison: ServedComparison, answers: ServerAnswers, asked: dict[str, Any], refused: list[int]
) -> PlainAnswers:
    server = comparison.servers[PLAIN]
    tasks = comparison.tasks
    return PlainAnswers(
        kind=server.kind,
        model=server.model,
        version=server.version,
        asked=asked,
        runs=answers.runs,
        tokens=[*answers.tokens.values()],
        left_out=refused,
        tasks=tasks.of_server(server, comparison.tokenizer) if tasks else [],
    )


def _check_same(comparison: ServedComparison) -> None:
    """Check that the stored answers of the plain server can be compared with answers of the speculative server.

    Raises:
        UserError: The two servers are of different kinds, their requests differ, or answers are missing.
    """
    stored = comparison.stored
    if stored is None:
        return
    before = stored.asked | {"server": stored.kind}
    now = comparison.conditions | {"server": comparison.servers[SPECULATIVE].kind}
    for name, value in now.items():
        if before.get(name) != value:
            raise UserError(
                f"--server: the stored answers have {name} = {before.get(name)!r}, but this command has "
                f"{value!r}; use the same value, or run draftlab score --server URL again"
            )
    count = len(comparison.requests.prompts.rows) - len(set(stored.left_out))
    answered = sorted(run.prompt for run in stored.runs)
    if len(stored.tokens) != count or answered != sorted([*range(count)] * comparison.requests.repeats):
        raise UserError(
            f"--server: the stored answers lack some of {count} prompts; run draftlab score --server URL again"
        )


def _score(
    comparison: ServedComparison,
    plain: PlainAnswers,
    answers: ServerAnswers,
    environment: Environment,
    command: str,
) -> Score:
    counters = answers.counters
    server = comparison.servers[SPECULATIVE]
    if counters is None:
        raise UserError(f"{server.http.url} {answers.undrafted}")
    check_alone(server, counters, answers.lengths)
    with reading("--server: the answers contradict each other"):
        return Score(
            name=Path(comparison.draft).name,
            target=_model(comparison.tokenizer, plain.model, plain.tasks),
            draft=_model(Path(comparison.draft), comparison.draft, _draft_tasks(comparison)),
            conditions=Conditions(
                **comparison.requests.conditions(),
                device=f"{server.kind} {server.version}".strip(),
                dtype="as served",
                target_weights="as served",
                draft_weights="as served",
                mode="served",
                threads=None,
                context=None,
                in_phases=comparison.stored is not None,
            ),
            environment=environment,
            plain=plain.runs,
            speculative={counters.k: answers.runs},
            counters={counters.k: counters},
            command=command,
            versions=provenance.versions() | {plain.kind: plain.version, server.kind: server.version},
            **comparison.requests.score_facts(dict(enumerate(plain.tokens)), [answers.tokens]),
        )


def _draft_tasks(comparison: ServedComparison) -> list[TaskResult]:
    """Evaluate the draft on this machine with lm-eval, and return the results, or [] without a local checkpoint."""
    if comparison.tasks is None:
        return []
    if not _is_checkpoint(Path(comparison.draft)):
        note(
            f"--tasks: only the target is evaluated, because {comparison.draft} is not a checkpoint on this machine; "
            "name the draft's directory by --draft"
        )
        return []
    device = devices.resolve_device("auto")
    return comparison.tasks.of_checkpoint(Path(comparison.draft), devices.resolve_dtype("auto", device), device)


def _is_checkpoint(directory: Path) -> bool:
    return (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))


def _model(directory: Path, name: str, tasks: list[TaskResult]) -> Model:
    """Return a local checkpoint as the Model of a score. Without a checkpoint, the Model has only a name and tasks."""
    if not _is_checkpoint(directory):
        return Model(name=Path(name).name, sha256=None, shape=None, latency=[], tasks=tasks)
    return Model(
        name=hub.checkpoint_name(directory),
        sha256=provenance.fingerprint(directory),
        shape=checkpoint.read_shape(directory),
        latency=[],
        tasks=tasks,
    )
