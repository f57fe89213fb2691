"""Profiles of what vLLM serves: the passes of the target alone, and of its draft, timed from outside under load.

Every stream gets the same prompt, so that all take the same steps and end together; the difference between two lengths
of the answer leaves prefill and transport out.

* vLLM puts the tokens of all streams in one pass. So a pass over w tokens of each of B streams is taken to cost what
  one over a single token of w B streams does, but for keys and values, which it reads of B streams only. N streams
  alone are therefore timed for N up to (K + 2) B, and keys and values by several lengths of prompts.
* A step with the draft is a pass over K + 1 tokens of the target, one over K + 2 and K - 1 over one of the draft
  (steps.py). The draft's passes are taken to cost the same share of the target's; its time in the server's steps at
  every B gives that share. So the server's other time for drafting is in it, too.
"""

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from draftlab import provenance
from draftlab.console import heartbeat, progress
from draftlab.errors import UserError
from draftlab.latency.cost_model import Point, Profile, SteadyPoint, exact, write_profile
from draftlab.latency.machine_state import read_environment, warn_if_busy
from draftlab.output import Output
from draftlab.results.score import Latency
from draftlab.sampling import SamplingParams
from draftlab.servers.client import Server, spec_decode_counters

SETTLED = 16  # tokens of the shorter answer: all prefills are over by then
TOKENS = 64  # tokens that the longer answer has more
At = tuple[int, int]  # streams, context


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPasses:
    """Milliseconds of a pass over N tokens without cached tokens, [N], and of a cached token of a row."""

    streams: Sequence[int]
    tokens_ms: np.ndarray
    cached_ms: float

    @staticmethod
    def of(times: Mapping[At, float]) -> "ServedPasses":
        """Return passes from the milliseconds of one token each of N streams after L cached tokens, by N and L."""
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
                "--server: cached tokens seem to cost more than passes: other work disturbs the servers"
            )
        return ServedPasses(streams=sorted(by_streams), tokens_ms=np.array(bare), cached_ms=cached)

    def ms(self, width: int, batch: int, context: float) -> float:
        """Return the time of a pass over width tokens of each row after a number of cached tokens."""
        return (
            float(np.interp(width * batch, self.streams, self.tokens_ms))
            + self.cached_ms * batch * context
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Meter:
    """Asks a server for answers of two lengths to one prompt, in some streams at once. advance: Called per timing."""

    server: Server
    prompt: list[int]
    repeats: int
    advance: Callable[[], None]

    def step_ms(self, streams: int, context: int, *, drafts: bool) -> float:
        """Return the median time of a step of all streams.

        Raises:
            UserError: the server drafts and should not, or the other way round.
        """
        self.answer(streams, context, 2)  # warms up
        times = [self._step_seconds(streams, context, drafts) for _ in range(self.repeats)]
        if statistics.median(times) <= 0:
            raise UserError(
                f"{self.server.http.url} took less time for more tokens: other work disturbs it"
            )
        return 1e3 * statistics.median(times)

    def _step_seconds(self, streams: int, context: int, drafts: bool) -> float:
        before = self.server.metrics()
        short, middle = self.answer(streams, context, SETTLED), self.server.metrics()
        long, after = self.answer(streams, context, SETTLED + TOKENS), self.server.metrics()
        first, second = spec_decode_counters(before, middle), spec_decode_counters(middle, after)
        self.advance()
        if first is None and second is None and not drafts:
            return (long - short) / TOKENS
        if first is None or second is None or not drafts:
            said = "drafts nothing" if drafts else "drafts; it must run the target alone"
            raise UserError(f"--server: {self.server.http.url} {said}")
        return (long - short) * streams / (second.num_drafts - first.num_drafts)

    def prefill_ms(self, context: int) -> float:
        """Return the median time of an answer of one token."""
        return 1e3 * statistics.median(self.answer(1, context, 1) for _ in range(self.repeats))

    def answer(self, streams: int, context: int, tokens: int) -> float:
        """Return the seconds until all streams have their answers."""
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
    """Measure the running servers, and write NAME.yaml of the target, and of the draft where a second server drafts.

    models: the target, and the draft of the second server; directories or names.

    Raises:
        UserError: a server that drafts or does not as the other one should, or times that contradict each other.
    """
    warn_if_busy(read_environment())
    k = drafted_tokens(servers[1], prompt) if len(servers) > 1 else 0
    wider = {max(streams) * width for width in range(2, k + 3)}
    places = list(itertools.product(streams, contexts))
    alone = [*places, *((n, min(contexts)) for n in sorted(wider))]
    done = itertools.count(1)
    with (
        heartbeat("requests"),
        progress("timings", repeats * (len(alone) + len(places) * (len(servers) - 1))) as shown,
    ):
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
        output.record(work, [model for model in models if model.is_dir()])
    return profiles


def middle(context: int) -> int:
    """Return the cached tokens in the middle of the timed tokens after a prompt of this length."""
    return context + SETTLED + TOKENS // 2


def draft_shares(passes: ServedPasses, steps: Mapping[At, float], k: int) -> dict[int, float]:
    """Return the share of a draft's pass in the target's by batch size, from the times of whole steps of K tokens.

    Raises:
        UserError: a step takes no longer than the target's own pass over the same number of tokens.
    """
    drafting: dict[int, list[float]] = defaultdict(list)
    like_target: dict[int, list[float]] = defaultdict(list)
    for (batch, context), ms in steps.items():
        drafting[batch].append(ms - passes.ms(k + 1, batch, context))
        like_target[batch].append(
            passes.ms(k + 2, batch, context) + (k - 1) * passes.ms(1, batch, context)
        )
    shares = {batch: sum(drafting[batch]) / sum(like_target[batch]) for batch in drafting}
    if (least := min(shares, key=lambda batch: shares[batch])) and shares[least] <= 0:
        raise UserError(
            f"with {least} streams, a step with the draft took no longer than the target alone, which cannot be: "
            "other work disturbs the servers; repeat this on a quiet machine"
        )
    return shares


def drafted_tokens(server: Server, prompt: list[int]) -> int:
    """Return the K of a server. Raises UserError: it drafts nothing."""
    before = server.metrics()
    server.generate_ids(prompt, SamplingParams(max_tokens=SETTLED, ignore_eos=True))
    counters = spec_decode_counters(before, server.metrics())
    if counters is None:
        raise UserError(f"--server {server.http.url} drafts nothing; start it with a draft")
    return counters.k


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
        shape=None,
        device=f"{server.kind} {server.version}",
        dtype="as served",
        mode="served",
        threads=None,
        forward=forward,
        steady=[SteadyPoint(**p.model_dump(), after=1) for p in forward if p.width == 1],
        prefill=[Latency(width=n, **exact(ms, repeats)) for n, ms in prefill.items()],
        host=[Latency(width=w, **exact(0.0)) for w in (1, widest)],
        bandwidth_gbs=None,
        matmul_tflops={},
        command=command,
        versions=provenance.versions() | {server.kind: server.version},
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
