"""Verification of a draft in a server: its acceptance there must equal its acceptance in draftlab's engine.

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
from draftlab.intervals import Interval, ratio
from draftlab.model.decoder import Decoder
from draftlab.results.decoding import Counters
from draftlab.sampling import SamplingParams
from draftlab.servers.answers import ServerAnswers, check_alone, read_metrics
from draftlab.servers.client import SILENT_SECONDS, Server
from draftlab.servers.kinds import SampleMethod, ServerKind
from draftlab.target_outputs.targets import check_ids
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
        name = Path(words[0]).name
        url = f"http://{HOST}:{port}"

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
                raise UserError(f"{name} answered {unexpected[-1]} at {url}, not 200; is it a server with this page?")
            wait(1)
    raise UserError(f"{name} did not answer within {START_SECONDS} s after the start; start {name} by hand to see why")


def _check_alive(process: subprocess.Popen[bytes], log: IO[str], what: str) -> None:
    """Raise UserError if a server has ended. what: Start of the message."""
    if (code := process.poll()) is not None:
        log.seek(0)
        raise UserError(f"{what} (exit code {code}): {reason(log.read())}")


def own_environment(server: ServerKind) -> dict[str, str]:
    """Return the environment for a server that draftlab starts, without the user's settings of another server."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(server.environment)}
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
    """Texts that a server wrote, on which it is compared with draftlab.

    Args:
        completions: The answers. At temperature 0, k tokens of the target follow each answer, see extended.
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
        return [(np.array(p), np.array(c)) for p, c in zip(self.prompts, self.completions, strict=True)]

    @property
    def draft_sampling(self) -> SamplingParams:
        """Return the sampling parameters in which the log-probabilities of the texts' tokens are computed."""
        return SamplingParams(temperature=self.temperature)


# number of tokens and steps of each text in draftlab, [R, 2], by the draft's sampling method
Counts = Mapping[SampleMethod, np.ndarray]
# probability that each token of a text is accepted, [n] or [n, K] for each text, by the draft's sampling method
Chances = Mapping[SampleMethod, Sequence[np.ndarray]]


class NothingDrafted(UserError):
    """A server drafted nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """Answers of a server, and the growth of its counters of speculative decoding meanwhile.

    measured: Tokens per target pass in the server.
    """

    texts: TargetTexts
    counters: Counters
    measured: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The acceptance of a draft in a server, and in draftlab on the same texts.

    Args:
        measured: Tokens per target pass in the server.
        expected: Tokens per target pass in draftlab, with a 95 % interval over texts.
        method: How the draft samples above temperature 0.
        by_method: `expected` by the draft's sampling method. At temperature 0, it has only "greedy".
        there, here: Fraction of steps that accept at least i tokens, i = 1..K, in the server and in draftlab.
    """

    runtime: str
    k: int
    temperature: float
    texts: int
    measured: float
    expected: Interval
    method: SampleMethod
    by_method: Mapping[SampleMethod, Interval]
    there: Sequence[float]
    here: Sequence[float]

    @property
    def agrees(self) -> bool:
        """Return whether the server's acceptance length is inside the interval that draftlab expects."""
        return self.expected.low <= self.measured <= self.expected.high

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
            lengths = {name: length.value for name, length in self.by_method.items()}
            facts |= {"draft_sample_method": self.method, "by_method": lengths}
        return facts | {
            "gap": self.measured - expected.value,
            "measured": self.measured,
            "draftlab": expected.value,
            **expected.model_dump(include={"low", "high"}),
        }

    def line(self) -> str:
        sampled = f"temperature {self.temperature:g}, {self.method} draft, "
        return (
            f"{self.runtime}: {self.measured:.3f} tokens per target pass; draftlab expects {self.expected.text(3)}, "
            f"K = {self.k}, {sampled if self.temperature else ''}{self.texts} texts"
        )


def ask(
    server: Server,
    prompts: list[list[int]],
    *,
    tokens: int,
    temperature: float,
    vocab: int,
    k: int | None = None,
) -> Answered:
    """Send prompts to a running server, one after the other, and return its answers.

    Args:
        tokens: Largest number of tokens of each answer.
        vocab: Number of the target's logits.
        k: Number of tokens that the server drafts per step. Default: the server's counters tell it.

    Raises:
        NothingDrafted: The server drafted nothing.
        UserError: The server refused a request, it also answered other clients meanwhile, or its counters contradict
            its answers.
    """
    answers = ServerAnswers(before=read_metrics(server))
    completions = []
    for seed, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed)
        ids, _ = answers.ask(server, prompt, sampling, time.perf_counter)
        check_ids(ids, vocab, f"prompt {seed}")
        completions.append(ids)
    answers.after = read_metrics(server)
    counters = answers.counters
    if counters is None:
        raise NothingDrafted(f"{server.http.url} {answers.undrafted}")
    check_alone(server, counters, answers.lengths)
    texts = TargetTexts(
        prompts=prompts,
        completions=completions,
        tokens=answers.lengths,
        k=k or counters.k,
        temperature=temperature,
    )
    measured = measured_length(server.adapter, counters, answers.lengths)
    return Answered(texts=texts, counters=counters, measured=measured)


def compare(
    server: Server,
    answered: Answered,
    model: Decoder,
    score: Callable[[TargetTexts], Sequence[TokenLogprobs]],
    *,
    ends: Sequence[int],
    vocab: int,
    method: SampleMethod | None = None,
) -> Verification:
    """Compare the acceptance in a server with the acceptance in draftlab, on the server's answers.

    Args:
        model: The target.
        score: Function that returns the draft's log-probabilities and ranks of the texts' tokens.
        ends: Ids of end-of-text tokens.
        vocab: Number of the target's logits.
        method: How the server's draft samples above temperature 0. Default: by the method whose acceptance length is
            nearest to the server's.
    """
    adapter = server.adapter
    texts = answered.texts
    measured = answered.measured
    if texts.temperature == 0:
        texts = before_end(extended(texts, model), adapter, ends)
    chances = chances_of(score(texts), texts, model, vocab)
    counts = counts_of(adapter, chances, texts)
    lengths: dict[SampleMethod, Interval] = {name: ratio(rows) for name, rows in counts.items()}
    if method not in lengths:
        method = min(lengths, key=lambda name: abs(lengths[name].value - measured))
    steps = expected_steps(chances[method], texts.k)
    return Verification(
        runtime=f"{adapter.name} {server.version}",
        k=texts.k,
        temperature=texts.temperature,
        texts=len(texts.tokens),
        measured=measured,
        expected=lengths[method],
        method=method,
        by_method=lengths,
        there=answered.counters.acceptance.per_position_acceptance,
        here=steps.acceptance().per_position_acceptance,
    )


def extended(texts: TargetTexts, model: Decoder) -> TargetTexts:
    """Continue greedy texts by k tokens of the target, because the server's last step may draft beyond their end."""
    rows = [p + c for p, c in zip(texts.prompts, texts.completions, strict=True)]
    more = output_tokens(decode(model, rows, SamplingParams(max_tokens=texts.k)))
    return replace(texts, completions=[c + m for c, m in zip(texts.completions, more, strict=True)])


def chances_of(scores: Sequence[TokenLogprobs], texts: TargetTexts, target: Decoder, vocab: int) -> Chances:
    """Return the acceptance probabilities of the texts' tokens, for a greedy draft and for a draft that samples.

    For a greedy draft each probability is 0 or 1. Those for a draft that samples are computed only above temperature 0,
    from the target's own log-probabilities.

    Args:
        scores: The draft's log-probabilities and ranks of the tokens.
        vocab: Number of the target's logits.
    """
    greedy = [scored.ranks == 0 for scored in scores]
    if texts.temperature == 0:
        return {"greedy": greedy}
    own = score_tokens(target, texts.pairs, vocab, texts.draft_sampling)
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
    at = 1
    steps = 0
    while at < tokens:
        drafted = by_age[at : at + k].diagonal()
        accepted = next((i for i, hit in enumerate(drafted) if not hit), len(drafted))
        at = at + accepted + 1
        steps = steps + 1
    return at - 1, steps


def count_steps(hits: Sequence[np.ndarray], texts: TargetTexts) -> np.ndarray:
    """Return the tokens and the steps of each text with a greedy draft, [R, 2]. hits: Same as in greedy_steps."""
    rows = zip(hits, texts.tokens, strict=True)
    return np.array([greedy_steps(row, texts.k, tokens) for row, tokens in rows], dtype=np.float64)


def measured_length(server: ServerKind, counters: Counters, lengths: Sequence[int]) -> float:
    """Return the tokens per target pass in a server. lengths: Number of tokens of each answer.

    A server with cuts_last_step does not count the passes that draft nothing. Every pass adds a token of its own to the
    accepted tokens.

    Raises:
        UserError: More tokens were accepted than the answers have after their first tokens.
    """
    if not server.cuts_last_step:
        return counters.acceptance.mean_acceptance_length
    tokens = sum(lengths) - len(lengths)
    accepted = sum(counters.num_accepted_tokens_per_pos)
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
