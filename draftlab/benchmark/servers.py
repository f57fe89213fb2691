"""A draft scored through running servers: the target alone in one, the target with its draft in another.

Requests go one at a time, the two in turn. From outside a request is one time: prefill, decoding and transport.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from draftlab import provenance
from draftlab.console import note, progress
from draftlab.engine.generate import Clock
from draftlab.errors import UserError
from draftlab.latency.machine_state import read_environment, warm_up, warn_if_busy
from draftlab.model import checkpoint, hub
from draftlab.prompts import Prompts
from draftlab.results.decoding import Counters, ServedGeneration
from draftlab.results.score import Conditions, Model, Prompt, Score
from draftlab.sampling import SamplingParams
from draftlab.servers.client import Server, spec_decode_counters
from draftlab.target_outputs.logprob_sources import same_ids
from draftlab.target_outputs.repeats import distinct_ngrams

PREFIX_HITS = ":prefix_cache_hits_total"  # tokens of prompts, in vLLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure. tokenizer: the target's directory, or one with its tokenizer alone."""

    plain: Server
    speculative: Server
    tokenizer: Path
    draft: str
    prompts: Prompts
    sampling: SamplingParams
    repeats: int
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one server did. tokens: of the first repeat."""

    runs: list[ServedGeneration]
    tokens: list[list[int]]
    counters: Counters | None  # None: it did not speculate
    cached: float  # tokens of prompts that it took from its cache


def score(plan: Plan, *, out: Path, arguments: dict[str, object], began: float, force: bool) -> Score:
    """Measure, write out/score.json, and return the score.

    Raises:
        UserError: another vocabulary than the tokenizer's, servers that speculate both or neither, or that served
            somebody else meanwhile.
    """
    for server in (plan.plain, plan.speculative):
        same_ids(server, plan.tokenizer)
    here = read_environment()
    warn_if_busy(here)
    with progress("decode", len(plan.prompts.rows) * plan.repeats) as advance:
        plain, speculative = measure(plan, lambda done: advance(done, "2 servers each"))
    found = _score(plan, plain, speculative).model_copy(update={"environment": here})
    with checkpoint.new_directory(out, force=force) as work:
        (work / "score.json").write_text(found.model_dump_json(indent=1))
        inputs = [path for path in (plan.tokenizer, Path(plan.draft)) if path.is_dir()]
        provenance.write_record(work, "score", arguments, inputs, began)
    return found


def measure(plan: Plan, advance: Callable[[int], None], clock: Clock = time.perf_counter) -> tuple[Measured, Measured]:
    """Every prompt in both servers, repeats times, in turning order.

    Raises:
        UserError: see score.
    """
    prompts = [prompt.ids for prompt in plan.prompts.rows]
    spare = prompts[0][::-1]  # to warm up: as long as a prompt, and no cached prefix of one
    arms = (plan.plain, plan.speculative)

    def ask(server: Server, prompt: list[int]) -> tuple[list[int], float, Counters | None]:
        start = clock()
        ids, counters = server.generate_ids(prompt, plan.sampling)
        return ids, clock() - start, counters

    for server, drafts in zip(arms, (False, True), strict=True):
        began = _page(server)
        answers = [counters for *_, counters in [ask(server, spare)] if counters is not None]
        check_role(server, _counters(answers, began, _page(server)) is not None, drafts)
    for server in arms:
        if not warm_up(lambda server=server: ask(server, spare)[1]):
            note(f"{server.http.url} does not become steady: its times vary by more than a tenth")
    before = [_page(server) for server in arms]
    runs: tuple[list[ServedGeneration], ...] = ([], [])
    tokens: tuple[list[list[int]], ...] = ([], [])
    counted: tuple[list[Counters], ...] = ([], [])
    for turn in range(plan.repeats * len(prompts)):
        repeat, index = divmod(turn, len(prompts))
        for arm in (1, 0) if (repeat + index) % 2 else (0, 1):
            ids, seconds, counters = ask(arms[arm], prompts[index])
            runs[arm].append(ServedGeneration(prompt=index, tokens=len(ids), seconds=seconds))
            counted[arm].extend([counters] if counters is not None else [])
            if repeat == 0:
                tokens[arm].append(ids)
        advance(turn + 1)
    after = [_page(server) for server in arms]
    plain, speculative = (
        Measured(runs=r, tokens=t, counters=_counters(c, b, a), cached=_cached(b, a))
        for r, t, c, b, a in zip(runs, tokens, counted, before, after, strict=True)
    )
    return plain, speculative


def check_role(server: Server, drafted: bool, should: bool) -> None:
    """Raises UserError: it drafts and should not, or the other way round."""
    if should and not drafted:
        raise UserError(f"{server.http.url} has drafted nothing; start it with a draft (docs/servers.md)")
    if drafted and not should:
        raise UserError(f"{server.http.url} drafts, too; --server is the target alone")


def check_alone(runs: list[ServedGeneration], counters: Counters, url: str) -> None:
    """The tokens that came are the first ones of each answer, one of each step, and those accepted.

    Raises:
        UserError: the counters grew by more than that, or less, than our requests explain.
    """
    tokens = sum(r.tokens for r in runs)
    most = len(runs) + counters.num_drafts + sum(counters.num_accepted_tokens_per_pos)
    if not tokens <= most <= tokens + len(runs) * (counters.k + 1):  # the end of a text cuts its last step
        raise UserError(
            f"{url} counted {counters.num_drafts:.0f} steps that make {most:.0f} tokens, and {tokens} came: "
            "it served others meanwhile; have it to yourself"
        )


def _score(plan: Plan, plain: Measured, speculative: Measured) -> Score:
    counters = speculative.counters
    if counters is None:
        raise UserError(f"{plan.speculative.http.url} has drafted nothing for these prompts")
    check_alone(speculative.runs, counters, plan.speculative.http.url)
    for server, measured in ((plan.plain, plain), (plan.speculative, speculative)):
        if measured.cached:
            note(
                f"{server.http.url} took {measured.cached:.0f} tokens of prompts from its cache, so that later repeats "
                "cost less than first ones; vLLM takes --no-enable-prefix-caching"
            )
    server, k = plan.speculative, counters.k
    return Score(
        name=Path(plan.draft).name,
        target=_model(plan.tokenizer, plan.plain.model),
        draft=_model(Path(plan.draft), plan.draft),
        conditions=Conditions(
            device=f"{server.kind} {server.version}".strip(), dtype="as served", mode="served", threads=None,
            temperature=plan.sampling.temperature, top_k=plan.sampling.top_k, top_p=plan.sampling.top_p,
            data=plan.prompts.source, prompts_sha256=plan.prompts.sha256,
            prompts=len(plan.prompts.rows), prompt_tokens=plan.prompts.tokens, max_tokens=plan.sampling.max_tokens,
            repeats=plan.repeats, context=None, seed=plan.sampling.seed,
        ),
        prompts=[Prompt(tokens=len(p.ids), category=p.category) for p in plan.prompts.rows],
        plain=plain.runs,
        speculative={k: speculative.runs},
        counters={k: counters},
        identical=plain.tokens == speculative.tokens if plan.sampling.temperature == 0 else None,
        distinct_4grams=distinct_ngrams(plain.tokens, 4),
        command=plan.command,
        versions=provenance.versions() | {s.kind: s.version for s in (plan.plain, plan.speculative)},
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )  # fmt: skip


def _page(server: Server) -> dict[str, float]:
    """Its counters; SGLang's are in its answers."""
    return {} if server.kind == "sglang" else server.metrics()


def _counters(answers: list[Counters], before: Mapping[str, float], after: Mapping[str, float]) -> Counters | None:
    """From the answers where they hold them, else from the metrics; None where nothing was drafted."""
    if not answers:
        return spec_decode_counters(before, after)
    accepted = [c.num_accepted_tokens_per_pos for c in answers]
    deepest = max(map(len, accepted))
    return Counters(
        num_drafts=sum(c.num_drafts for c in answers),
        num_draft_tokens=sum(c.num_draft_tokens for c in answers),
        num_accepted_tokens_per_pos=[
            sum(c.num_accepted_tokens_per_pos[i] for c in answers if i < len(c.num_accepted_tokens_per_pos))
            for i in range(deepest)
        ],
    )


def _cached(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    series = [name for name in after if name.partition("{")[0].endswith(PREFIX_HITS)]
    return sum(after[name] - before.get(name, 0.0) for name in series)


def _model(place: Path, name: str) -> Model:
    """What can be read of it here: a checkpoint whole, a tokenizer or a mere name only that."""
    if not (place / "config.json").is_file() or not any(place.glob("*.safetensors")):
        return Model(name=Path(name).name, sha256=None, shape=None, latency=[], tasks=[])
    shape, digest = checkpoint.read_shape(place), provenance.fingerprint(place)
    return Model(name=hub.checkpoint_name(place), sha256=digest, shape=shape, latency=[], tasks=[])
