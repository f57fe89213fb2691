"""Client of a running server: completions, log-probabilities of prompts, metrics. Torch is not imported.

Requests contain token ids, never text. Only the requests of tokenize() and chat_prompt() contain text. The class of the
server's kind (kinds.py) knows its protocol.
"""

import contextlib
import ipaddress
import math
import re
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from draftlab.console import note, note_once
from draftlab.errors import UserError, one_line
from draftlab.reading import parse_json, reading
from draftlab.registry import SERVERS
from draftlab.results.decoding import Counters
from draftlab.sampling import SamplingParams
from draftlab.servers.kinds import (
    TOKEN_IDS,
    Answer,
    DraftedTokens,
    PromptLogprobs,
    RowError,
    ServedCompletion,
    ServerCompletion,
    ServerKind,
)
from draftlab.trust import check_address, checked_name, folder_name, printable, without_secrets

WORKERS = 8  # concurrent requests to a server that reports no number of slots
TRIES = 6
FIRST_PAUSE = 0.5  # seconds before the second attempt; every further pause is twice as long
ANSWER_SECONDS = 600.0
CONNECT_SECONDS = 10.0
SILENT_SECONDS = 12.0  # if no answer arrives for longer, a note is printed
ANSWER_BYTES = 1 << 28  # 64 log-probabilities of 32k tokens take about 150 MB
BUSY = (429, 503)
LOCKED = (401, 403)
MISSING = (404, 405)
# the server refuses what a request contains, such as a prompt that is too long
BAD_REQUEST = (400, 413, 422)
DROPPED = (httpx.NetworkError, httpx.RemoteProtocolError)
NO_PAGE: Answer = {}
PROBE_TOP_K = 5
# tokens to cut from the end of a probe's prompt, until its answer has log-probabilities
PROBE_CUTS = (0, 1, 2, 4, 8)
ROUNDING = 1e-3  # nats by which rounding may raise a log-probability above 0
# llama-server has four slots and one cache if it is started without -np
SHARED_CONTEXT = "its slots share one context (-c); start llama-server with -np N, so that each slot has its own part"
WITHOUT_DRAFT = "the server drafts; start it without a draft to get log-probabilities"
OPENAI = "openai"  # kind of a server whose owned_by draftlab does not know; it gets the same requests as vLLM

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Properties of a server, which Server.probe() finds out by a few requests.

    Args:
        logprobs_mode: Values that the server returns as log-probabilities, named as in vLLM's --logprobs-mode.
            raw_logprobs are computed from the model's own logits, processed_logprobs after temperature. raw_logits and
            processed_logits are not normalised.
        greedy: Whether the server decodes greedily at temperature 0.
        drafts: Whether the server drafts, and returns no log-probabilities of the tokens of such steps.
    """

    logprobs_mode: str
    greedy: bool
    drafts: bool = False


class Overloaded(UserError):
    """A server refused a request because it answered too many requests at once."""


def proxy_of(url: str) -> str | None:
    """Return the proxy of the environment for requests to a URL, or None.

    Only requests to an https address use a proxy, because the proxy of an http address could read the API key. A
    loopback address never has a proxy, nor has an address in NO_PROXY.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme != "https" or is_loopback(host) or urllib.request.proxy_bypass(host):
        return None
    proxies = urllib.request.getproxies()
    proxy = proxies.get("https") or proxies.get("all")
    if proxy is None or re.match("[a-z][a-z0-9+.-]+://", proxy, re.I):
        return proxy
    return f"http://{proxy}"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class RefusedRequest(UserError):
    """A server refused a request, with this status and reason, for another cause than the request's content."""

    def __init__(self, message: str, status: int, reason: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class HttpClient:
    """An HTTP client of one server. If the server is busy or drops the connection, a request is repeated a few times.

    Args:
        wait: Function that waits for a number of seconds before the next attempt.
        send_secrets: Whether to send the API key, and the user and password in the address.
        seconds: Longest time from a request to the end of its answer.
        most_bytes: Largest size of an answer.

    Raises:
        UserError: The server cannot be reached or refuses a request, or its answer is too large. The error quotes the
            server's message.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        wait: Callable[[float], None],
        *,
        send_secrets: bool = True,
        seconds: float = ANSWER_SECONDS,
        most_bytes: int = ANSWER_BYTES,
    ) -> None:
        address = httpx.URL(url)
        if not send_secrets:
            api_key = None
            address = address.copy_with(userinfo=b"")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = without_secrets(url)  # for messages
        self.wait = wait
        self.seconds = seconds
        self.most_bytes = most_bytes
        self.send_secrets = send_secrets
        self.answered_at = time.monotonic()
        proxy = proxy_of(url)
        shown = "" if proxy is None else without_secrets(proxy)
        self.via = f" through the proxy {shown} of the environment" if shown else ""
        timeout = httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))
        certificates = httpx.create_ssl_context()  # with those that SSL_CERT_FILE names
        try:
            # the caller limits the number of workers
            self.client = httpx.Client(
                base_url=address,
                headers=headers,
                timeout=timeout,
                limits=httpx.Limits(max_connections=None),
                verify=certificates,
                proxy=proxy,
                trust_env=False,
            )
        except (ValueError, ImportError, httpx.InvalidURL):  # they quote parts of a password
            raise UserError(
                f"{self.url}: the proxy {shown} of the environment cannot be used; write http://HOST:PORT, and in a "
                "password / ? # @ as %2F %3F %23 %40"
            ) from None

    def json(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        tries: int = TRIES,
        default: Answer = None,
    ) -> Answer:
        """Send a request, and return the parsed JSON of the answer.

        default: Value to return if the server lacks the page. With None, a missing page is an error.
        """
        answer = self._send(method, path, body, tries)
        if default is not None and answer.status_code in MISSING:
            return default
        with reading(f"{self.url}{path}: the answer is not JSON"):
            return parse_json(self._accepted(path, answer).content)

    def text(self, path: str) -> str:
        return self._accepted(path, self._send("GET", path, None, TRIES)).text

    def _send(self, method: str, path: str, body: dict[str, Any] | None, tries: int) -> httpx.Response:
        problem = ""
        for attempt in range(tries):
            if attempt:
                self.wait(FIRST_PAUSE * 2 ** (attempt - 1))
            try:
                answer = self._answer(method, path, body)
            except DROPPED as error:
                problem = str(error) or type(error).__name__
                continue
            except (httpx.TimeoutException, FutureTimeoutError):
                raise UserError(
                    f"{self.url}{path}{self.via}: no whole answer within {self.seconds:g} s; the server may be "
                    "overloaded or stopped"
                ) from None
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise UserError(f"{self.url}{path}{self.via}: {one_line(error)}") from None
            if answer.status_code not in BUSY:
                return answer
            problem = f"{answer.status_code}: {one_line(answer.text)}"
        raise UserError(
            f"no answer from {self.url}{path}{self.via}: {problem}; check that the server runs at this address"
        )

    def _answer(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        """Send a request, and return the answer with its whole body.

        httpx limits the time of each read only, so a thread reads the answer and this thread limits its whole time.

        Raises:
            UserError: The answer is too large.
            FutureTimeoutError: The answer did not end in time. Other errors are those of httpx.
        """
        started = time.monotonic()
        result: Future[httpx.Response] = Future()

        def read() -> None:
            try:
                result.set_result(self._read(method, path, body, started + self.seconds))
            except Exception as error:
                result.set_exception(error)

        threading.Thread(target=read, daemon=True).start()
        silent = min(SILENT_SECONDS, self.seconds)
        try:
            answer = result.result(silent)
        except FutureTimeoutError:
            # a server that answers other requests meanwhile is only slow
            if self.answered_at < started and not result.done():
                note_once(f"waiting up to {self.seconds:g} s for an answer from {self.url}{path}")
            answer = result.result(max(0.0, started + self.seconds - time.monotonic()))
        self.answered_at = time.monotonic()
        return answer

    def _read(self, method: str, path: str, body: dict[str, Any] | None, deadline: float) -> httpx.Response:
        """Send a request and read the answer, at most until the deadline. Raises FutureTimeoutError after that."""
        content = bytearray()
        with self.client.stream(method, path, json=body) as answer:
            for chunk in answer.iter_bytes():
                content += chunk
                if len(content) > self.most_bytes:
                    raise UserError(
                        f"{self.url}{path}{self.via}: the answer is larger than {self.most_bytes / 1e6:,.0f} MB; check "
                        "that this is the address of the server, or ask for fewer log-probabilities"
                    )
                if time.monotonic() > deadline:
                    raise FutureTimeoutError
            return httpx.Response(
                answer.status_code,
                content=bytes(content),
                extensions={"reason_phrase": answer.reason_phrase.encode()},
            )

    def _accepted(self, path: str, answer: httpx.Response) -> httpx.Response:
        if answer.status_code == 200:
            return answer
        reason = one_line(answer.text) or answer.reason_phrase
        text = f"{self.url}{path}{self.via} refused the request ({answer.status_code}): {reason}"
        if answer.status_code in LOCKED and not self.send_secrets:
            raise UserError(f"{text}; a dry run sends no API key, so repeat the command without it")
        if answer.status_code in BAD_REQUEST:
            raise RowError(text, reason)
        raise RefusedRequest(text, answer.status_code, reason)


@dataclass(slots=True, kw_only=True)
class Server:
    """A model on a running server.

    Args:
        kind: Value of owned_by in /v1/models, such as vllm, sglang or llamacpp; "openai" if draftlab does not know the
            value.
        workers: Number of concurrent requests. It falls if the server cannot answer so many.
    """

    kind: str
    model: str
    version: str
    # most tokens of prompt and completion together; None if the server does not report it
    max_length: int | None
    http: HttpClient
    workers: int
    adapter: ServerKind

    @classmethod
    def connect(
        cls,
        url: str,
        api_key_file: Path | None = None,
        *,
        model: str | None = None,
        workers: int | None = None,
        wait: Callable[[float], None] = time.sleep,
        dry_run: bool = False,
    ) -> "Server":
        """Connect to the server at a URL, with or without /v1, and identify its kind and version.

        Args:
            api_key_file: File with the API key.
            model: Name of the model, as the server lists it. Needed if the server lists several models.
            workers: Number of concurrent requests. Default: the server's number of slots, or WORKERS.
            dry_run: Whether nothing secret is sent: no API key, and no password of the address.

        Raises:
            UserError: There is no answer, the server is not OpenAI-compatible, it lists several models or not this
                model, or the key file cannot be read.
        """
        check_address(url)
        http = HttpClient(
            url.rstrip("/").removesuffix("/v1"),
            _read_key(api_key_file),
            wait,
            send_secrets=not dry_run,
        )
        listing = http.json("GET", "/v1/models", tries=1)
        with reading(f"{http.url} is not the address of an OpenAI-compatible server; reading /v1/models failed"):
            cards = {card["id"]: card for card in listing["data"]}
            card = _chosen(cards, model, http.url)
            name = card["id"]
        # the model's name is used for directories, scripts and pages
        folder_name(name, f"the model of {http.url}")
        owner = card.get("owned_by")
        known = [kind for kind in SERVERS.loadable() if kind.owned_by and kind.owned_by == owner]
        kind, adapter = (owner, known[0]) if known else (OPENAI, SERVERS.get("vllm", "--server"))
        about_path = adapter.page(adapter.about_path, name)
        page = http.json("GET", about_path, default={})
        with reading(f"{http.url}{about_path} does not answer as a {kind} server should"):
            about = adapter.about(page, card)
            version = checked_name(about.version, f"the version of {http.url}")
            max_length = None if about.max_length is None else int(about.max_length)
            slots = WORKERS if about.slots is None else max(1, int(about.slots))
        return cls(
            kind=kind,
            model=name,
            version=version,
            max_length=max_length,
            http=http,
            workers=workers or slots,
            adapter=adapter,
        )

    def describe(self) -> str:
        return f"{self.model} by {self.kind} {self.version} at {self.http.url}"

    def generate(self, prompts: Sequence[list[int]], sampling: SamplingParams, *, k: int = 0) -> list[ServedCompletion]:
        """Return a completion of each prompt, with the k most probable tokens at each position.

        The request for prompt i has the seed sampling.seed + i.

        Raises:
            UserError: The server refuses a request, or an answer lacks a log-probability.
        """
        answers = self._each(prompts, sampling, lambda job: self._generate(*job, k))
        return [_required(answer) for answer in answers]

    def generate_rows(
        self,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        *,
        k: int | None,
        advance: Callable[[int], None] = lambda done: None,
    ) -> list[ServerCompletion | RowError]:
        """Return a completion of each prompt, or the reason why the server cannot answer this prompt.

        Args:
            k: Number of most probable tokens at each position. None requests no log-probabilities.
            advance: Callback that receives the number of answers so far, from the threads that wait for them.

        Raises:
            UserError: The server fails, or drafts tokens whose log-probabilities are requested.
        """

        def work(job: tuple[list[int], SamplingParams]) -> ServerCompletion:
            prompt, each = job
            if k is not None:
                return self._generate(prompt, each, k)
            ids, reason, _ = self._written(prompt, each)
            return ServerCompletion(prompt_ids=prompt, ids=ids, finish_reason=reason)

        return self._each(prompts, sampling, work, advance)

    def generate_ids(self, prompt: list[int], sampling: SamplingParams) -> tuple[list[int], Counters | None]:
        """Return the tokens of a completion, and the speculative counters in the answer, which only SGLang sends."""
        self._check_length(len(prompt) + sampling.max_tokens)
        ids, _, counters = self._written(prompt, sampling)
        return ids, counters

    def prompt_logprobs(self, rows: Sequence[list[int]], k: int) -> list[PromptLogprobs]:
        """Return the log-probabilities of the tokens of each text, with the k most probable tokens at each position.

        rows: Token ids of each text.

        Raises:
            UserError: The server does not score prompts, or its values are not log-probabilities.
        """
        if not self.adapter.has_prompt_logprobs:
            raise UserError(
                f"{self.http.url} ({self.kind}) returns no log-probabilities of prompts; use vLLM or SGLang"
            )
        self._check_length(max(map(len, rows), default=0) + 1)
        return [_required(row) for row in self._map(lambda ids: self._prompt_logprobs(ids, k), rows)]

    def probe(self, prompt: list[int]) -> Probe:
        """Find out what the server returns as log-probabilities, and whether temperature 0 decodes greedily.

        The prompt is completed at temperatures 1, 0.5 and 0. If an answer lacks log-probabilities, the prompt is cut.

        Raises:
            UserError: No answer has log-probabilities.
        """
        for cut in PROBE_CUTS[:-1]:
            try:
                return self._probe(prompt[: len(prompt) - cut])
            except RowError:
                continue
        return self._probe(prompt[: len(prompt) - PROBE_CUTS[-1]])

    def _probe(self, prompt: list[int]) -> Probe:
        at_temperature = (SamplingParams(max_tokens=1, temperature=value) for value in (1.0, 0.5))
        hot, cold = (self._generate(prompt, sampling, PROBE_TOP_K) for sampling in at_temperature)
        with self._reading(self.adapter.path):  # the answers may be empty
            at_1, at_half = (dict(zip(c.top_ids[0], c.top_logprobs[0], strict=True)) for c in (hot, cold))
        difference = max((abs(at_1[i] - at_half[i]) for i in at_1.keys() & at_half.keys()), default=0.0)
        mode = "processed" if difference > 0.05 else "raw"
        logits = max(at_1.values()) > ROUNDING or sum(map(math.exp, at_1.values())) > 1.01
        sampling = SamplingParams(max_tokens=8, temperature=0.0)
        drafts = False
        try:
            greedy = self._generate(prompt, sampling, PROBE_TOP_K)
        except DraftedTokens:  # the first token comes from the prefill, and is never drafted
            greedy = self._generate(prompt, replace(sampling, max_tokens=1), PROBE_TOP_K)
            drafts = True
        chosen = zip(greedy.logprobs, greedy.top_logprobs, strict=True)
        return Probe(
            logprobs_mode=f"{mode}_{'logits' if logits else 'logprobs'}",
            greedy=all(actual > top[0] - 1e-3 for actual, top in chosen),
            drafts=drafts,
        )

    def check_logprobs(self, scored: PromptLogprobs) -> None:
        """Check that no log-probability is above 0. Raises UserError if one is."""
        worst = max(max(row, default=0.0) for row in (scored.logprobs, *scored.top_logprobs))
        if worst > ROUNDING:
            raise UserError(
                f"{self.http.url} returned {worst:g} as a log-probability, which cannot be above 0; start vLLM "
                "with --logprobs-mode raw_logprobs"
            )

    def tokenize(self, text: str) -> list[int] | None:
        """Return the server's token ids of a text, without special tokens. None if the server cannot tokenize."""
        body = self.adapter.tokenize_request(text) | {"model": self.model}
        answer = self.http.json("POST", "/tokenize", body, default=NO_PAGE)
        if answer is NO_PAGE:
            return None
        with self._reading("/tokenize"):
            return TOKEN_IDS.validate_python(answer["tokens"])

    def chat_prompt(self, text: str) -> tuple[list[int] | None, int]:
        """Return the token ids to which the server converts a chat with one user message, and their number.

        The ids are None if the server returns only the number.

        Raises:
            UserError: The server does not answer chats.
        """
        path = "/v1/chat/completions"
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 1,
            "temperature": 0.0,
            "return_token_ids": True,  # vLLM returns the ids
        }
        answer = self.http.json("POST", path, body)
        with self._reading(path):
            ids = answer.get("prompt_token_ids")
            ids = None if ids is None else TOKEN_IDS.validate_python(ids)
            return ids, len(ids) if ids else int(answer["usage"]["prompt_tokens"])

    def metrics(self) -> dict[str, float]:
        """Return the values on the server's Prometheus page (/metrics), by name with labels.

        If the page has values of this model by name, the values of other models are left out.
        """
        page = self.http.text(self.adapter.page("/metrics", self.model))
        with self._reading("/metrics"):
            values = parse_metrics(page)
        owners = {series: MODEL_LABEL.search(series) for series in values}
        if any(owner and owner[1] == self.model for owner in owners.values()):
            return {s: v for s, v in values.items() if (o := owners[s]) is None or o[1] == self.model}
        return values

    def _each(
        self,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        work: Callable[[tuple[list[int], SamplingParams]], Result],
        advance: Callable[[int], None] = lambda done: None,
    ) -> list[Result | RowError]:
        """Call `work` with each prompt and its sampling parameters, and return the results or errors of the rows."""

        def fitting(job: tuple[list[int], SamplingParams]) -> Result:
            self._check_length(len(job[0]) + sampling.max_tokens)
            return work(job)

        jobs = [(prompt, replace(sampling, seed=sampling.seed + i)) for i, prompt in enumerate(prompts)]
        return self._map(fitting, jobs, advance)

    def _written(self, prompt: list[int], sampling: SamplingParams) -> tuple[list[int], Any, Counters | None]:
        """Return the tokens, the finish reason and the speculative counters of a completion."""
        answer = self._post(self.adapter.completion_request(prompt, sampling, None))
        with self._reading(self.adapter.path):
            ids, reason = self.adapter.written(answer)
            _check_count(TOKEN_IDS.validate_python(ids), reason, sampling)
            return ids, reason, self.adapter.counters(answer)

    def _generate(self, prompt: list[int], sampling: SamplingParams, k: int) -> ServedCompletion:
        answer = self._post(self.adapter.completion_request(prompt, sampling, k))
        with self._reading(self.adapter.path):
            written = self.adapter.completion(prompt, answer, k)
            _check_count(written.ids, written.finish_reason, sampling)
            _check_lists(written, k)
            return written

    def _prompt_logprobs(self, ids: list[int], k: int) -> PromptLogprobs:
        answer = self._post(self.adapter.prompt_logprobs_request(ids, k))
        with self._reading(self.adapter.path):
            scored = self.adapter.prompt_logprobs(ids, answer, k)
            if len(scored.logprobs) != len(ids) - 1:
                raise ValueError(f"the answer has {len(scored.logprobs)} log-probabilities for {len(ids) - 1} tokens")
            _check_lists(scored, k)
        self.check_logprobs(scored)
        return scored

    def _post(self, body: dict[str, Any]) -> Answer:
        try:
            return self.http.json("POST", self.adapter.path, body | {"model": self.model})
        except RefusedRequest as refusal:
            if not self.adapter.shares_context(refusal.status, refusal.reason):
                raise
            raise Overloaded(f"{refusal}; {SHARED_CONTEXT}") from None

    @contextlib.contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        where = f"{self.http.url}{path} ({self.kind})"
        remedy = "; use vLLM, SGLang or llama.cpp's server" if self.kind == OPENAI else ""
        try:
            with reading(f"{where}: the answer lacks token ids or log-probabilities{remedy}"):
                yield
        except RowError as error:
            raise RowError(f"{where}: {error}", error.reason, limited=error.limited) from None
        except DraftedTokens as error:
            raise DraftedTokens(f"{where}: {error}; {WITHOUT_DRAFT}") from None

    def _map(
        self, work: Callable[[Item], Result], items: Sequence[Item], advance: Callable[[int], None] = lambda done: None
    ) -> list[Result | RowError]:
        """Return the results of `work` for all items, or the errors of single rows, computed in self.workers threads.

        If the server cannot answer so many requests at once, the number of workers is halved, and the requests that
        failed are repeated. Any other failure is raised.
        """
        results: dict[int, Result | RowError] = {}

        def attempt(number: int) -> None:
            try:
                results[number] = work(items[number])
            except RowError as error:
                results[number] = error
            except Overloaded:
                if self.workers == 1:
                    raise
            advance(len(results))

        waiting = list(range(len(items)))
        while waiting:
            with ThreadPoolExecutor(self.workers) as pool:
                list(pool.map(attempt, waiting))
            waiting = [number for number in waiting if number not in results]
            if waiting:
                self.workers = max(1, self.workers // 2)
                note(
                    f"{self.http.url} cannot answer so many requests at once: {SHARED_CONTEXT}; continuing with "
                    f"{self.workers} at once"
                )
        return [results[number] for number in range(len(items))]

    def _check_length(self, tokens: int) -> None:
        if self.max_length is not None and tokens > self.max_length:
            text = (
                f"at most {self.max_length} tokens fit, but {tokens} are needed; start the server with a longer "
                "context, or shorten prompts"
            )
            raise RowError(f"{self.http.url}: {text}", text)


# a line of Prometheus' text format or of OpenMetrics: name, labels, value, and perhaps a time or an exemplar
SAMPLE = re.compile(r'\s*([a-zA-Z_:][\w:]*)\s*(\{(?:"(?:[^"\\]|\\.)*"|[^"}])*\})?\s*(\S+)(?:\s.*)?')
MODEL_LABEL = re.compile(r'[{,]\s*model_name="([^"]*)"')
# names of the counters, which servers, versions and exporters spell vllm:spec_decode_num_drafts_total,
# llamacpp:spec_decode_..., vllm_spec_decode_... or ray_vllm_spec_decode_...
SPEC_DECODE = re.compile(r"(|.*[:_])spec_decode_(num_\w+?)(?:_total)?")


def parse_metrics(text: str) -> dict[str, float]:
    """Parse Prometheus' text format into a dict from ``name{label="value"}`` to the value of this series.

    Raises:
        ValueError: A line is no sample, or a value is not a number.
    """
    values: dict[str, float] = {}
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        sample = SAMPLE.fullmatch(line)
        if sample is None:
            raise ValueError(f"not a sample of a metric: {line[:80]}")
        values[sample[1] + (sample[2] or "")] = float(sample[3])
    return values


def undrafted(metrics: Mapping[str, float]) -> str:
    """Return why a server with these metrics has no acceptance, as the predicate of a sentence about the server."""
    # SGLang counts in its answers, and its metrics are not read
    if not metrics or any(SPEC_DECODE.fullmatch(series.partition("{")[0]) for series in metrics):
        return "drafted nothing for these prompts; start the server with a draft"
    return (
        "has no counters of speculative decoding (spec_decode_num_drafts) on its /metrics page; start the server with "
        "a draft, in a version that counts its drafts"
    )


@reading("the server's counters of speculative decoding")
def spec_decode_counters(before: Mapping[str, float], after: Mapping[str, float]) -> Counters | None:
    """Return the growth of vLLM's or llama.cpp's counters between two reads of the metrics, summed over engines.

    Return None if the server drafted nothing in between.

    Raises:
        UserError: The counters contradict each other, for example because one decreased or is not finite.
    """
    totals: dict[str, float] = defaultdict(float)
    accepted: dict[int, float] = {}
    names = {series: SPEC_DECODE.fullmatch(series.partition("{")[0]) for series in after}
    # an exporter may repeat the counters in a second spelling
    spelling = max((name[1] for name in names.values() if name), default="", key=len)
    for series, value in after.items():
        name = names[series]
        if name is None or name[1] != spelling or name[2].endswith("_created"):
            continue
        growth = value - before.get(series, 0.0)
        if not (math.isfinite(growth) and growth >= 0):
            raise UserError(
                f"the server's counter {name[2]} decreased or is not finite; repeat the command without restarting "
                "the server"
            )
        label = re.search(r'position="([^"]*)"', series)
        if label is None:
            totals[name[2]] += growth
        else:
            position = int(label[1])
            accepted[position] = accepted.get(position, 0.0) + growth
    if not totals["num_drafts"]:
        return None
    if not accepted and totals["num_accepted_tokens"]:
        raise UserError(
            "the server counts accepted tokens, but not by position (num_accepted_tokens_per_pos); use a newer version"
        )
    return Counters(
        num_drafts=totals["num_drafts"],
        num_draft_tokens=totals["num_draft_tokens"],
        num_accepted_tokens_per_pos=[accepted[position] for position in range(len(accepted))],
    )


def _required(answer: Result | RowError) -> Result:
    if isinstance(answer, RowError):
        raise answer
    return answer


def _chosen(cards: Mapping[str, Any], model: str | None, url: str) -> Any:
    """Return the card of a model in /v1/models.

    Raises:
        UserError: There are several models, and `model` is None; or the model is not listed.
    """
    names = ", ".join(printable(str(name))[:80] for name in cards)
    if model is None:
        if len(cards) > 1:
            raise UserError(f"{url} serves several models; name the target's with --served-model-name: {names}")
        (card,) = cards.values()
        return card
    for name, card in cards.items():
        if model == name or model in card.get("aliases", []):
            return card
    raise UserError(f"--served-model-name {model}: {url} does not serve this model; it serves {names}")


def _check_count(ids: list[int], reason: object, sampling: SamplingParams) -> None:
    count = len(ids)
    most = sampling.max_tokens
    if count > most or (count < most and (reason != "stop" or sampling.ignore_eos)):
        raise ValueError(f"the answer has {count} tokens instead of {most}, and the finish reason {reason}")


def _check_lists(answer: PromptLogprobs, k: int) -> None:
    if k and len(answer.top_ids) < len(answer.logprobs):
        raise ValueError(f"the answer lacks lists of the {k} most probable tokens")


def _read_key(file: Path | None) -> str | None:
    if file is None:
        return None
    with reading(file):
        key = file.read_text("ascii").strip()
    if not key.isprintable() or not key:
        raise UserError(f"{file} must contain only the API key, as one line of printable ASCII characters")
    return key
