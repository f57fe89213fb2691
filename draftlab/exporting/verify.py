"""Verification of an export: its acceptance in the server must equal its acceptance in draftlab's engine.

A damaged draft does not change the text, because the target verifies every token. Only the speed-up is lost. R texts, n
tokens of a text, K drafted tokens per step.
"""

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO

import httpx
import numpy as np

from draftlab.acceptance import expected
from draftlab.acceptance.token_logprobs import Text, TokenLogprobs, score_tokens
from draftlab.console import heartbeat
from draftlab.engine.generate import decode, output_tokens
from draftlab.errors import UserError
from draftlab.intervals import FEWEST, Interval, ratio
from draftlab.model.decoder import Decoder
from draftlab.results.decoding import Counters
from draftlab.sampling import SamplingParams
from draftlab.servers.client import SILENT_SECONDS, Server
from draftlab.servers.kinds import SampleMethod, ServerKind, ServerTrial
from draftlab.trust import printable

START_SECONDS = 1800
STOP_SECONDS = 60
LOADING = 503  # status of a server's /health while it loads the model
# number of polls with another status, such as 404 or 502, after which the server is given up
UNEXPECTED_POLLS = 30
HOST = "127.0.0.1"


@contextlib.contextmanager
def running(
    command: Sequence[object], environ: Mapping[str, str] | None = None
) -> Iterator[tuple[Server, subprocess.Popen[bytes]]]:
    """Start a server on a free port, and yield its client and its process. Stop the server after the block.

    command: Command without --host and --port.

    Raises:
        UserError: The server does not start, or ends inside the block. The message quotes its log.
    """
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    words = [str(word) for word in (*command, "--host", HOST, "--port", port)]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        try:
            process = subprocess.Popen(words, stdout=log, stderr=log, env=environ)
        except OSError as error:
            raise UserError(
                f"{words[0]} cannot be started ({error.strerror}); name the path of the program with --verify-with"
            ) from None
        name, url = Path(words[0]).name, f"http://{HOST}:{port}"

        def wait(seconds: float, what: str = "ended") -> None:
            _check_alive(process, log, f"{name} {what}")
            time.sleep(seconds)

        try:
            with heartbeat(f"waiting for {name} to start", SILENT_SECONDS):
                _wait_for(f"{url}/health", name, partial(wait, what="did not start"))
            try:
                yield Server.connect(url, workers=1, wait=wait), process
            except UserError:
                _check_alive(process, log, f"{name} ended")
                raise
        finally:
            # every server stops at SIGTERM; a job that a shell started with & ignores SIGINT, and so do its children
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            process.kill()
            process.wait()


def _wait_for(url: str, name: str, wait: Callable[[float], None]) -> None:
    """Poll a page until it answers 200.

    wait: Function that waits for a number of seconds. It raises UserError if the server has ended.

    Raises:
        UserError: `wait` raises it, or the page does not answer 200 in time.
    """
    unexpected: list[int] = []
    # without the proxies of the environment, which could not reach this address
    with httpx.Client(trust_env=False, timeout=10) as client:
        for _ in range(START_SECONDS):
            with contextlib.suppress(httpx.TransportError):
                status = client.get(url).status_code
                if status == 200:
                    return
                unexpected += [status] * (status != LOADING)
            if len(unexpected) == UNEXPECTED_POLLS:
                raise UserError(
                    f"{name} answered {unexpected[-1]} at {url}, not 200; is it a server with this page?"
                )
            wait(1)
    raise UserError(
        f"{name} did not answer within {START_SECONDS} s after the start; start {name} by hand to see why"
    )


def _check_alive(process: subprocess.Popen[bytes], log: IO[str], what: str) -> None:
    """Raise UserError if a server has ended. what: Start of the message."""
    if (code := process.poll()) is not None:
        log.seek(0)
        raise UserError(f"{what} (exit code {code}): {reason(log.read())}")


def own_environment(server: ServerKind) -> dict[str, str]:
    """Return the environment for a server that draftlab starts, without the user's settings of another server."""
    kept = {
        name: text for name, text in os.environ.items() if not name.startswith(server.environment)
    }
    return VLLM_ON_CPU | kept


def reason(log: str) -> str:
    """Return the lines of a server's log that say why the server ended.

    They are the last line with an error, without vLLM's general errors, or the last three lines.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line]
    causes = [line for line in errors if not any(text in line for text in ENVELOPES)]
    if found := causes or errors:
        return printable(found[-1])[-300:]
    return printable(" / ".join(lines[-3:]))[-300:] or "it printed nothing"


ENVELOPES = ("Engine core initialization failed", "EngineCore failed", "See root cause above")


# without these variables, vLLM's CPU build takes half of the memory, and pins each thread to a core
VLLM_ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTexts:
    """Texts of the target on which to compare a server with draftlab.

    At temperature 0, the target writes the texts in draftlab. They are k tokens longer than the compared part, because
    every step drafts k tokens. Above temperature 0, the server writes the texts, so `completions` are empty until then.

    Args:
        tokens: Number of tokens of each text to compare, [R].
        k: Number of tokens drafted per step.
    """

    prompts: list[list[int]]
    completions: list[list[int]]
    tokens: list[int]
    k: int
    temperature: float = 0.0

    @property
    def pairs(self) -> list[Text]:
        return [
            (np.array(p), np.array(c)) for p, c in zip(self.prompts, self.completions, strict=True)
        ]

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts)) + max(self.tokens)

    @property
    def draft_sampling(self) -> SamplingParams:
        """Return the sampling parameters in which the log-probabilities of the texts' tokens are computed."""
        return SamplingParams(temperature=self.temperature)


# number of tokens and steps of each text in draftlab, [R, 2], by the draft's sampling method
Counts = Mapping[SampleMethod, np.ndarray]
# probability that each token of a text is accepted, [n] or [n, K] for each text, by the draft's sampling method
Chances = Mapping[SampleMethod, Sequence[np.ndarray]]
Count = Callable[[TargetTexts], Counts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The acceptance length in the server (measured), and in draftlab (expected, with a 95 % interval over texts).

    by_method: Acceptance length in draftlab, by the draft's sampling method. At temperature 0, it has only "greedy".
    """

    runtime: str
    k: int
    temperature: float
    texts: int
    expected: Interval
    measured: float
    method: SampleMethod
    by_method: Mapping[SampleMethod, float]
    details: str

    def facts(self) -> dict[str, object]:
        """Return the verification as JSON values. `gap` is the server's acceptance length minus draftlab's."""
        expected = self.expected
        facts: dict[str, object] = {
            "runtime": self.runtime,
            "k": self.k,
            "temperature": self.temperature,
            "texts": self.texts,
        }
        if self.temperature:
            facts |= {"draft_sample_method": self.method, "by_method": dict(self.by_method)}
        return facts | {
            "gap": self.measured - expected.value,
            "measured": self.measured,
            "draftlab": expected.value,
            **expected.model_dump(include={"low", "high"}),
        }

    def line(self) -> str:
        sampled = (
            f"temperature {self.temperature:g}, {self.method} drafts, " if self.temperature else ""
        )
        return (
            f"{self.runtime}: {self.measured:.3f} tokens per target pass; draftlab expects "
            f"{self.expected.text(3)}, K = {self.k}, {sampled}{self.texts} texts; "
            f"{self.details}"
        )


def to_sample(prompts: list[list[int]], tokens: int, k: int, temperature: float) -> TargetTexts:
    """Return texts whose completions are empty, because the server writes them. tokens: Length of each completion."""
    empty: list[list[int]] = [[] for _ in prompts]
    return TargetTexts(
        prompts=prompts,
        completions=empty,
        tokens=[tokens] * len(prompts),
        k=k,
        temperature=temperature,
    )


def generate_texts(
    model: Decoder, prompts: list[list[int]], sampling: SamplingParams, k: int
) -> TargetTexts:
    """Let the target write each text greedily. After the end of the text, it writes k more tokens."""
    longer = replace(sampling, max_tokens=sampling.max_tokens + k, stop_token_ids=())
    completions, lengths = [], []
    for ids in output_tokens(decode(model, prompts, longer)):
        ends = (place for place, token in enumerate(ids, 1) if token in sampling.stop_token_ids)
        length = min(sampling.max_tokens, next(ends, sampling.max_tokens))
        lengths.append(length)
        completions.append(ids[: length + k])
    return TargetTexts(prompts=prompts, completions=completions, tokens=lengths, k=k)


def chances_of(
    scores: Sequence[TokenLogprobs],
    texts: TargetTexts,
    load_target: Callable[[], Decoder],
    vocab: int,
) -> Chances:
    """Return the acceptance probabilities of the texts' tokens, for a greedy draft and for a draft that samples.

    For a greedy draft each probability is 0 or 1. Those for a draft that samples are computed only above temperature 0,
    from the target's own log-probabilities.

    Args:
        scores: The draft's log-probabilities and ranks of the tokens.
        load_target: Function that loads the target. It is called only above temperature 0.
        vocab: Number of the target's logits.
    """
    greedy = [scored.ranks == 0 for scored in scores]
    if texts.temperature == 0:
        return {"greedy": greedy}
    own = score_tokens(load_target(), texts.pairs, vocab, texts.draft_sampling)
    pairs = zip(scores, own, strict=True)
    sampled = [q.chances(p.logprobs) for q, p in pairs]
    return {"greedy": greedy, "probabilistic": sampled}


def counts_of(server: ServerKind, chances: Chances, texts: TargetTexts) -> Counts:
    """Count the steps of the texts as a server counts them, by the draft's sampling method.

    For a greedy draft the number of steps is exact (greedy_steps). For a draft that samples it is the expected number
    (expected_steps). A server with cuts_last_step drafts greedily, and does not count tokens beyond the end of a text.
    """
    counts: dict[SampleMethod, np.ndarray] = {"greedy": count_steps(chances["greedy"], texts)}
    if server.cuts_last_step:
        counts["greedy"][:, 0] = np.array(texts.tokens) - 1
    elif "probabilistic" in chances:
        steps = expected_steps(chances["probabilistic"], texts.k)
        # if a step ends the text with a drafted token, the token that the target would add is counted, too
        counts["probabilistic"] = np.stack([steps.tokens + steps.truncated, steps.steps], 1)
    return counts


def expected_steps(chances: Sequence[np.ndarray], k: int) -> expected.Counts:
    """Return the expected counts of decoding the texts with steps that draft k tokens.

    The first token of a text is not counted, because the prefill gives it.

    chances: Probability that each token is accepted, [n], or [n, K] with a column per position in the draft.
    """
    rows = [row[1:] for row in chances]
    limits = np.array([len(row) + k for row in rows])
    return expected.chain(expected.texts_of(rows, limits), k)


def greedy_steps(hits: np.ndarray, k: int, tokens: int) -> tuple[int, int]:
    """Count the tokens and the steps of speculative decoding of one text with a greedy draft.

    The first token is not counted, because the prefill gives it. At any temperature, the server accepts a greedily
    drafted token exactly if it is the token in the text, because a server replaces a rejected token by another token.

    Args:
        hits: Whether the draft's most probable token is the token in the text, [n]. In [n, K], column j is for a step
            that began j tokens earlier. Tokens after the n-th count as misses.
        k: Number of tokens drafted per step.
        tokens: Number of tokens of the text to count.
    """
    by_age = hits if hits.ndim == 2 else np.repeat(hits[:, None], k, axis=1)
    at, steps = 1, 0
    while at < tokens:
        drafted = by_age[at : at + k].diagonal()
        accepted = next((i for i, hit in enumerate(drafted) if not hit), len(drafted))
        at, steps = at + accepted + 1, steps + 1
    return at - 1, steps


def count_steps(hits: Sequence[np.ndarray], texts: TargetTexts) -> np.ndarray:
    """Return the tokens and the steps of each text with a greedy draft, [R, 2]. hits: Same as in greedy_steps."""
    rows = zip(hits, texts.tokens, strict=True)
    return np.array([greedy_steps(row, texts.k, tokens) for row, tokens in rows], dtype=np.float64)


def verify(
    server: ServerKind, program: Path, trial: ServerTrial, texts: TargetTexts, count: Count
) -> Verification:
    """Start a server with target and draft, and compare its acceptance length with draftlab's.

    Args:
        program: The server's program.
        count: Function that counts draftlab's steps on the texts, as counts_of does.

    Raises:
        UserError: There are too few prompts, the server does not start, or its acceptance length is outside draftlab's
            95 % interval.
    """
    if len(texts.prompts) < FEWEST:
        raise UserError(
            f"--verify-with: {len(texts.prompts)} prompts are too few to compare acceptance; name {FEWEST} or more"
        )
    with running(server.command(program, trial), own_environment(server)) as (client, _):
        completions, measured = ask(server, client, texts)
    texts, details = as_served(texts, completions)
    counts = count(texts)
    runtime = f"{server.name} {client.version}"
    result = compare(runtime, texts, counts, measured, details, trial.method)
    if not result.expected.low <= measured <= result.expected.high:
        raise UserError(
            "--verify-with: the acceptance length in the server is outside the interval that draftlab expects, so the "
            f"server may run the draft wrongly. {result.line()}"
        )
    return result


def ask(server: ServerKind, client: Server, texts: TargetTexts) -> tuple[list[list[int]], float]:
    """Send the prompts to a running server, one after the other. Return its answers, and its acceptance length.

    Raises:
        UserError: The server counts no speculative steps, or its counters contradict its answers.
    """
    before, longest = client.metrics(), max(texts.tokens)
    answers: list[list[int]] = []
    for seed, (prompt, tokens) in enumerate(zip(texts.prompts, texts.tokens, strict=True)):
        limit = tokens if server.cuts_last_step else longest
        sampling = SamplingParams(max_tokens=limit, temperature=texts.temperature, seed=seed)
        answers.append(client.generate_ids(prompt, sampling)[0])
    return answers, measured_length(server, client.grown(before), list(map(len, answers)))


def measured_length(server: ServerKind, counters: Counters, lengths: Sequence[int]) -> float:
    """Return the tokens per target pass in a server. lengths: Number of tokens of each answer.

    A server with cuts_last_step does not count the passes that draft nothing. Every pass adds a token of its own to the
    accepted tokens.

    Raises:
        UserError: More tokens were accepted than the answers have after their first tokens.
    """
    if not server.cuts_last_step:
        return counters.acceptance.mean_acceptance_length
    tokens, accepted = sum(lengths) - len(lengths), sum(counters.num_accepted_tokens_per_pos)
    if accepted >= tokens:
        raise UserError(
            f"the server's counters contradict its answers: {accepted:g} drafted tokens were accepted, but the answers "
            f"have {tokens} tokens after their first tokens; try another version of {server.name}"
        )
    return tokens / (tokens - accepted)


def before_end(texts: TargetTexts, server: ServerKind, ends: Sequence[int]) -> TargetTexts:
    """Leave a final end-of-text token out of each text's length, unless the server counts it.

    ends: Ids of end-of-text tokens.
    """
    if server.counts_end:
        return texts
    pairs = zip(texts.completions, texts.tokens, strict=True)
    return replace(texts, tokens=[length - (ids[length - 1] in ends) for ids, length in pairs])


def as_served(texts: TargetTexts, completions: list[list[int]]) -> tuple[TargetTexts, str]:
    """Return the texts in which to count draftlab's steps, and a remark on the server's completions.

    At temperature 0, the texts are those that the target wrote in draftlab. Above it, they are the server's
    completions.
    """
    if texts.temperature == 0:
        same: list[bool] = []
        for written, ids in zip(completions, texts.completions, strict=True):
            same += [a == b for a, b in zip(written, ids, strict=False)]
        return texts, f"{np.mean(same):.2%} of its output tokens are the target's"
    lengths = list(map(len, completions))
    return replace(texts, completions=completions, tokens=lengths), f"{sum(lengths)} sampled tokens"


def compare(
    runtime: str,
    texts: TargetTexts,
    counts: Counts,
    measured: float,
    details: str,
    method: SampleMethod = "greedy",
) -> Verification:
    """Compare a server's acceptance length with draftlab's. method: The draft's method above temperature 0."""
    method = method if texts.temperature and method in counts else "greedy"
    lengths: dict[SampleMethod, float] = {}
    for name, rows in counts.items():
        tokens, steps = rows.sum(0)
        lengths[name] = float(tokens / steps)
    return Verification(
        runtime=runtime,
        k=texts.k,
        temperature=texts.temperature,
        texts=len(texts.tokens),
        method=method,
        details=details,
        expected=ratio(counts[method]),
        measured=measured,
        by_method=lengths,
    )
