"""Latency profiles of vLLM servers: the passes of a target and of its draft, timed by a client under load.

B streams (concurrent requests), K drafted tokens per step, w tokens of a stream in a pass. Every stream gets the same
prompt, so that all streams take the same steps and end together. Each time is the difference between answers of two
lengths, which leaves out prefill and transport.

* Target passes: vLLM computes the tokens of all streams in one pass. A pass over w tokens of each of B streams is
  therefore assumed to cost as much as a pass over one token of each of w B streams. Only the cost of keys and values
  differs, because they are read for B streams. The server of the target alone is timed with up to (K + 2) B streams.
  Prompts of several lengths give the cost of keys and values.
* Draft passes: A step with the draft has one target pass over K + 1 tokens, one draft pass over K + 2 tokens and K - 1
  draft passes over one token (steps.py). A draft pass is assumed to cost a fixed fraction of a target pass of the same
  size. The time of the server's steps gives this fraction for every B. It includes the server's other time for
  drafting.
"""

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from draftlab import provenance
from draftlab.console import progress
from draftlab.errors import UserError, about
from draftlab.latency.cost_model import Point, Profile, SteadyPoint, exact, write_profile
from draftlab.latency.machine_state import read_environment, warn_if_busy
from draftlab.output import Output
from draftlab.results.score import Latency
from draftlab.sampling import SamplingParams
from draftlab.servers.client import Server, spec_decode_counters

SETTLED = 16  # length of the shorter answer, after which all prefills are over
TOKENS = 64  # additional tokens of the longer answer
At = tuple[int, int]  # streams, context


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPasses:
    """The latency of a server's target passes, by the number of streams and of cached tokens.

    Args:
        streams: Number of tokens in each timed pass, ascending, [N]. Each stream has one token in a pass.
        tokens_ms: Milliseconds of each pass without cached tokens, [N].
        cached_ms: Additional milliseconds per cached token of a stream.
    """

    streams: Sequence[int]
    tokens_ms: np.ndarray
    cached_ms: float

    @staticmethod
    def of(times: Mapping[At, float]) -> "ServedPasses":
        """Fit the latency to the times of steps that compute one token per stream.

        times: Milliseconds of a step, by number of streams and context.

        Raises:
            UserError: Cached tokens seem to take longer than whole passes.
        """
        by_streams: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for (streams, context), ms in times.items():
            by_streams[streams].append((context, ms))
        lines = {n: np.array(row).T for n, row in by_streams.items() if len(row) > 1}
        slopes = {n: float(np.polyfit(contexts, ms, 1)[0]) for n, (contexts, ms) in lines.items()}
        weight = sum(n * n for n in slopes)
        cached = max(0.0, sum(n * slope for n, slope in slopes.items()) / weight) if slopes else 0.0
        bare = []
        for n in sorted(by_streams):
            bare.append(float(np.mean([ms - cached * n * c for c, ms in by_streams[n]])))
        if min(bare) <= 0:
            raise UserError(
                "--server: the times contradict each other (cached tokens cost more than whole passes); repeat the "
                "command without other load on the servers"
            )
        return ServedPasses(streams=sorted(by_streams), tokens_ms=np.array(bare), cached_ms=cached)

    def ms(self, width: int, batch: int, context: float) -> float:
        """Return the milliseconds of a pass over `width` tokens of each stream after `context` cached tokens."""
        return (
            float(np.interp(width * batch, self.streams, self.tokens_ms))
            + self.cached_ms * batch * context
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Meter:
    """A timer of a server's steps, which requests answers of two lengths to one prompt.

    Args:
        repeats: Number of timings of each step.
        advance: Function to call after each timing.
    """

    server: Server
    prompt: list[int]
    repeats: int
    advance: Callable[[], None]

    def step_ms(self, streams: int, context: int, *, drafts: bool) -> float:
        """Return the median milliseconds of a step, which serves all streams at once.

        drafts: Whether the server is expected to draft.

        Raises:
            UserError: The server drafts although `drafts` is False, or it does not draft although `drafts` is True; or
                longer answers took no more time.
        """
        self.answer(streams, context, 2)  # warms up
        times = [self._step_seconds(streams, context, drafts) for _ in range(self.repeats)]
        if statistics.median(times) <= 0:
            raise UserError(
                f"{self.server.http.url} took no more time or steps for {TOKENS} more tokens; repeat the command "
                "without other load on the server"
            )
        return 1e3 * statistics.median(times)

    def _step_seconds(self, streams: int, context: int, drafts: bool) -> float:
        before = self.server.metrics()
        short, middle = self.answer(streams, context, SETTLED), self.server.metrics()
        long, after = self.answer(streams, context, SETTLED + TOKENS), self.server.metrics()
        first, second = spec_decode_counters(before, middle), spec_decode_counters(middle, after)
        self.advance()
        if second is None and not drafts:
            return (long - short) / TOKENS
        if first is None or second is None or not drafts:
            raise UserError(
                f"--server {self.server.http.url}: the first server must run the target alone, and the second server "
                "must draft; start only the second with --speculative-config"
            )
        steps = second.num_drafts - first.num_drafts
        return (long - short) * streams / steps if steps > 0 else 0.0

    def prefill_ms(self, context: int) -> float:
        """Return the median milliseconds of an answer of one token, which is the prefill."""
        return 1e3 * statistics.median(self.answer(1, context, 1) for _ in range(self.repeats))

    def answer(self, streams: int, context: int, tokens: int) -> float:
        """Send the prompt in all streams at once. Return the seconds until all answers of `tokens` tokens arrived."""
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        with ThreadPoolExecutor(streams) as pool:
            list(
                pool.map(
                    lambda _: self.server.generate_ids(self.prompt[:context], sampling),
                    range(streams),
                )
            )
        return time.perf_counter() - start


def profile_servers(
    servers: Sequence[Server],
    models: Sequence[Path],
    prompt: list[int],
    *,
    streams: Sequence[int],
    contexts: Sequence[int],
    repeats: int,
    output: Output,
) -> list[Profile]:
    """Measure running servers, and write NAME.yaml for the target and, with a second server, for its draft.

    Args:
        servers: A server of the target alone and, optionally, a server of the target with the draft.
        models: Directory or name of the target and, with a second server, of its draft.

    Raises:
        UserError: The first server drafts, the second server does not draft, or times contradict each other.
    """
    output.inputs([model for model in models if model.is_dir()])
    warn_if_busy(read_environment())
    k = drafted_tokens(servers[1], prompt) if len(servers) > 1 else 0
    wider = {max(streams) * width for width in range(2, k + 3)}
    places = list(itertools.product(streams, contexts))
    alone = [*places, *((n, min(contexts)) for n in sorted(wider))]
    done = itertools.count(1)
    timings = repeats * (len(alone) + len(places) * (len(servers) - 1))
    with progress("timing requests", timings) as shown:
        meters = [
            Meter(
                server=server, prompt=prompt, repeats=repeats, advance=lambda: shown(next(done), "")
            )
            for server in servers
        ]
        passes = ServedPasses.of(
            {(n, middle(c)): meters[0].step_ms(n, c, drafts=False) for n, c in alone}
        )
        prefill = [{c: meters[0].prefill_ms(c) for c in contexts}]
        shares = [dict.fromkeys(streams, 1.0)]
        for drafting in meters[1:]:
            steps = {(n, middle(c)): drafting.step_ms(n, c, drafts=True) for n, c in places}
            shares.append(draft_shares(passes, steps, k))
            prefill.append(
                {c: max(0.0, drafting.prefill_ms(c) - ms) for c, ms in prefill[0].items()}
            )
    farthest = middle(max(contexts))
    profiles = [
        _profile(
            server, model, _points(passes, share, k, farthest), ms, repeats, output.command_line
        )
        for server, model, share, ms in zip(servers, models, shares, prefill, strict=True)
    ]
    with output.directory() as work:
        for profile in profiles:
            write_profile(profile, work / f"{profile.name}.yaml")
        output.record(work)
    return profiles


def middle(context: int) -> int:
    """Return the mean number of cached tokens during the timed steps, for a prompt of `context` tokens."""
    return context + SETTLED + TOKENS // 2


def draft_shares(passes: ServedPasses, steps: Mapping[At, float], k: int) -> dict[int, float]:
    """Return the time of a draft pass divided by the time of a target pass of the same size, by batch size.

    Args:
        passes: Latency of the target's passes.
        steps: Milliseconds of a whole step with k drafted tokens, by number of streams and context.

    Raises:
        UserError: A step with the draft took no longer than a target pass over k + 1 tokens.
    """
    drafting: dict[int, float] = defaultdict(float)
    like_target: dict[int, float] = defaultdict(float)
    for (batch, context), ms in steps.items():
        drafting[batch] += ms - passes.ms(k + 1, batch, context)
        rest = (k - 1) * passes.ms(1, batch, context)
        like_target[batch] += passes.ms(k + 2, batch, context) + rest
    for batch, ms in drafting.items():
        if ms <= 0:
            raise UserError(
                f"with {batch} streams, a step with the draft took no longer than a pass of the target over {k + 1} "
                "tokens, which is impossible; repeat the command without other load on the servers"
            )
    return {batch: ms / like_target[batch] for batch, ms in drafting.items()}


def drafted_tokens(server: Server, prompt: list[int]) -> int:
    """Return how many tokens a server drafts per step. Raises UserError: the server does not draft."""
    before = server.metrics()
    server.generate_ids(prompt, SamplingParams(max_tokens=SETTLED, ignore_eos=True))
    with about("--server"):
        return server.grown(before).k


def _points(
    passes: ServedPasses, shares: Mapping[int, float], k: int, farthest: int
) -> list[Point]:
    grid = itertools.product(range(1, k + 3), shares, (0, farthest))
    times = ((w, b, c, shares[b] * passes.ms(w, b, c)) for w, b, c in grid)
    return [Point(width=w, batch=b, context=c, **exact(ms)) for w, b, c, ms in times]


def _profile(
    server: Server,
    model: Path,
    forward: list[Point],
    prefill: Mapping[int, float],
    repeats: int,
    command: str,
) -> Profile:
    local = (model / "config.json").is_file()
    widest = max(p.width for p in forward)
    return Profile(
        kind="served",
        name=model.name,
        sha256=provenance.fingerprint(model) if local else None,
        device=f"{server.kind} {server.version}",
        dtype="as served",
        mode="served",
        forward=forward,
        steady=[SteadyPoint(**p.model_dump(), after=1) for p in forward if p.width == 1],
        prefill=[Latency(width=n, **exact(ms, repeats)) for n, ms in prefill.items()],
        host=[Latency(width=w, **exact(0.0)) for w in (1, widest)],
        command=command,
        versions=provenance.versions() | {server.kind: server.version},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
