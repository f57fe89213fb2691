"""Client of a running server: completions, prompt log-probabilities, metrics. vLLM, SGLang, llama.cpp. No torch.

Requests are token ids, never text; adapters.py has the protocol of each kind of server.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout  # of its own before Python 3.11
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx

from draftlab.errors import UserError, did_you_mean, one_line
from draftlab.reading import parse_json
from draftlab.results.decoding import Counters
from draftlab.sampling import SamplingParams
from draftlab.servers.adapters import ADAPTERS, ROUNDING, Adapter, Answer, Completion, PromptLogprobs, checked_ids
from draftlab.trust import check_address, is_name, without_secrets

WORKERS = 8  # concurrent requests
TRIES = 6
MAX_WAIT_SECONDS = 30.0  # between attempts
ANSWER_SECONDS, CONNECT_SECONDS = 600.0, 10.0  # for one answer as a whole
ANSWER_BYTES = 64 << 20  # 4,096 tokens with the 100 most probable ones are about 40 MB
BUSY = (429, 503)
DROPPED = (httpx.NetworkError, httpx.RemoteProtocolError)
PROBE_TOP_K = 5

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The meaning of a server's log-probabilities, as vLLM's --logprobs-mode, and whether temperature 0 is greedy.

    raw_logprobs: of the model's own logits. processed_logprobs: after temperature. raw_logits, processed_logits: not
    normalised.
    """

    logprobs_mode: str
    greedy: bool


class HttpClient:
    """Requests to one server, repeated while it is busy or drops the connection; the key goes to no other.

    seconds: for one answer as a whole, however slowly its bytes come. most_bytes: of one answer.

    Raises:
        UserError: it cannot be reached or refuses; quotes the server's message.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        wait: Callable[[float], None],
        *,
        seconds: float = ANSWER_SECONDS,
        most_bytes: int = ANSWER_BYTES,
    ) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.url, self.wait = without_secrets(url), wait  # the address as it is shown
        self.seconds, self.most_bytes = seconds, most_bytes
        timeout = httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))
        limits = httpx.Limits(max_connections=None)  # as many as the caller has workers
        self.client = httpx.Client(
            base_url=url, headers=headers, timeout=timeout, limits=limits, follow_redirects=False
        )

    def get(self, path: str, tries: int = TRIES) -> Answer:
        return self._json(path, self._accepted(path, self._send("GET", path, None, tries)))

    def page(self, path: str) -> dict[str, Any]:
        """Return a page's JSON object, empty if the server does not have the page."""
        answer = self._send("GET", path, None, TRIES)
        page = self._json(path, answer) if answer.status_code == 200 else {}
        return page if isinstance(page, dict) else {}

    def text(self, path: str) -> str:
        return self._accepted(path, self._send("GET", path, None, TRIES)).text

    def post(self, path: str, body: dict[str, Any]) -> Answer:
        return self._json(path, self._accepted(path, self._send("POST", path, body, TRIES)))

    def post_optional(self, path: str, body: dict[str, Any]) -> Answer | None:
        answer = self._send("POST", path, body, TRIES)
        return None if answer.status_code in (404, 405) else self._json(path, self._accepted(path, answer))

    def _send(self, method: str, path: str, body: dict[str, Any] | None, tries: int) -> httpx.Response:
        problem, pause = "", 0.5
        for left in reversed(range(tries)):
            try:
                answer = self._within(method, path, body)
                if answer.status_code not in BUSY:
                    return answer
                problem = f"{answer.status_code}: {_message(answer)}"
                pause = max(pause, _retry_after_seconds(answer))
            except DROPPED as error:
                problem = str(error) or type(error).__name__
            except (httpx.TimeoutException, FutureTimeout):
                raise UserError(f"{self.url}{path}: no whole answer in {self.seconds:g} s") from None
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # of httpx's decoders too
                raise UserError(f"{self.url}{path}: {one_line(error)}") from None
            if left:
                self.wait(min(pause, MAX_WAIT_SECONDS))
                pause *= 2
        raise UserError(f"no answer from {self.url}{path}: {problem}; is the server running?")

    def _within(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        """Return an answer that is whole in time: httpx limits each read, which a server that drips never exceeds."""
        outcome: Future[httpx.Response] = Future()

        def ask() -> None:
            try:
                outcome.set_result(self._limited(method, path, body))
            except BaseException as error:
                outcome.set_exception(error)

        threading.Thread(target=ask, daemon=True).start()  # left alone after a timeout; its memory is limited
        return outcome.result(timeout=self.seconds)

    def _limited(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        end, content = time.monotonic() + self.seconds, bytearray()
        with self.client.stream(method, path, json=body) as answer:
            for chunk in answer.iter_bytes(1 << 16):
                content += chunk
                if len(content) > self.most_bytes:
                    raise UserError(f"{self.url}{path}: an answer of more than {self.most_bytes / 1e6:,.0f} MB")
                if time.monotonic() > end:
                    raise httpx.ReadTimeout("")
            return httpx.Response(answer.status_code, headers=_plain_headers(answer), content=bytes(content))

    def _accepted(self, path: str, answer: httpx.Response) -> httpx.Response:
        if answer.status_code != 200:
            raise UserError(f"{self.url}{path} refused ({answer.status_code}): {_message(answer)}")
        return answer

    def _json(self, path: str, answer: httpx.Response) -> Answer:
        try:
            return parse_json(answer.content)
        except ValueError as error:
            raise UserError(f"{self.url}{path}: the answer is not JSON ({one_line(error)})") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One model of a running server. kind: vllm, sglang, llamacpp, or openai for all others."""

    kind: str
    model: str
    version: str
    max_length: int | None  # tokens of prompt and completion; None if the server does not tell
    http: HttpClient
    workers: int

    @classmethod
    def connect(
        cls,
        url: str,
        model: str | None = None,
        api_key_file: Path | None = None,
        *,
        workers: int = WORKERS,
        wait: Callable[[float], None] = time.sleep,
    ) -> "Server":
        """Identify the server at url (with or without /v1). model: default the server's first.

        Raises:
            UserError: no answer, not an OpenAI-compatible server, no such model, or the key file cannot be read.
        """
        base = url.rstrip("/").removesuffix("/v1")
        check_address(url)
        http = HttpClient(base, _read_key(api_key_file), wait)
        listing = http.get("/v1/models", tries=1)
        try:
            cards = {card["id"]: card for card in listing["data"]}
            name = next(iter(cards)) if model is None else model
        except (AttributeError, KeyError, TypeError, StopIteration):
            raise UserError(f"{http.url} is not an OpenAI-compatible server: /v1/models lists no model") from None
        if name not in cards:
            raise UserError(f"{http.url} serves no model {name!r}{did_you_mean(name, cards)}")
        if not is_name(name) or name in (".", ".."):  # it names directories, and stands in scripts and pages
            raise UserError(f"{http.url} calls its model {one_line(name, 80)!r}, which is no name")
        owner = cards[name].get("owned_by")
        kind = owner if isinstance(owner, str) and owner in ADAPTERS else "openai"
        page = http.page(ADAPTERS[kind].about_path)
        try:
            version, max_length = ADAPTERS[kind].about(page, cards[name])
        except AttributeError:
            raise UserError(f"{http.url}{ADAPTERS[kind].about_path} does not say what {kind} says there") from None
        if not is_name(version):
            raise UserError(f"{http.url} gives {one_line(version, 80)!r} as its version")
        if max_length is not None and (type(max_length) is not int or max_length < 1):
            shown = one_line(max_length, 80)
            raise UserError(f"{http.url} takes {shown!r} tokens at most, which is no number of tokens")
        return cls(kind=kind, model=name, version=version, max_length=max_length, http=http, workers=workers)

    @classmethod
    def check(cls, *urls: str | None, model: str | None, api_key_file: Path | None) -> None:
        """Connect to servers that are used later, before torch is imported. Raises UserError: see connect."""
        for url in filter(None, urls):
            cls.connect(url, model, api_key_file)

    def describe(self) -> str:
        return f"{self.model} by {self.kind} {self.version} at {self.http.url}"

    @property
    def adapter(self) -> Adapter:
        return ADAPTERS[self.kind]

    def generate(self, prompts: Sequence[list[int]], sampling: SamplingParams, *, k: int = 0) -> list[Completion]:
        """Return a completion of each prompt, with the k top tokens of each position."""
        self._check_length(max(map(len, prompts), default=0) + sampling.max_tokens)
        jobs = [(prompt, replace(sampling, seed=sampling.seed + i)) for i, prompt in enumerate(prompts)]
        return self._map(lambda job: self._generate(*job, k), jobs)

    def generate_ids(self, prompt: list[int], sampling: SamplingParams) -> tuple[list[int], Counters | None]:
        """Return the generated tokens at the least cost, and the speculative counters of the answer (SGLang)."""
        self._check_length(len(prompt) + sampling.max_tokens)
        answer = self._post(self.adapter.completion_request(prompt, sampling, None))
        return self._parse(
            lambda: (checked_ids(self.adapter.ids(answer), sampling.max_tokens), self.adapter.counters(answer))
        )

    def prompt_logprobs(self, rows: Sequence[list[int]], k: int) -> list[PromptLogprobs]:
        """Return the log-probabilities of the tokens of each text, with the k top tokens of each position.

        Raises:
            UserError: the server does not score prompts, or returns something else than log-probabilities.
        """
        if not self.adapter.has_prompt_logprobs:
            raise UserError(f"{self.http.url} ({self.kind}) does not score prompts; vLLM and SGLang do")
        self._check_length(max(map(len, rows), default=0) + 1)
        return self._map(lambda ids: self._prompt_logprobs(ids, k), rows)

    def probe(self, prompt: list[int]) -> Probe:
        """Request one token at two temperatures and a few greedy ones, and compare their log-probabilities."""
        at_temperature = (SamplingParams(max_tokens=1, temperature=value) for value in (1.0, 0.5))
        hot, cold = (self._generate(prompt, sampling, PROBE_TOP_K) for sampling in at_temperature)
        tops = self._parse(lambda: [dict(zip(c.top_ids[0], c.top_logprobs[0], strict=True)) for c in (hot, cold)])
        at_1, at_half = tops
        difference = max((abs(at_1[i] - at_half[i]) for i in at_1.keys() & at_half.keys()), default=0.0)
        mode = "processed" if difference > 0.05 else "raw"
        logits = max(at_1.values()) > ROUNDING or sum(map(math.exp, at_1.values())) > 1.01
        greedy = self._generate(prompt, SamplingParams(max_tokens=8, temperature=0.0), PROBE_TOP_K)
        chosen = zip(greedy.logprobs, greedy.top_logprobs, strict=True)
        return Probe(
            logprobs_mode=f"{mode}_{'logits' if logits else 'logprobs'}",
            greedy=all(actual > top[0] - 1e-3 for actual, top in chosen),
        )

    def tokenize(self, text: str) -> list[int] | None:
        """Return the server's ids of a text without special tokens; None if it has no such page."""
        answer = self.http.post_optional("/tokenize", self.adapter.tokenize_request(text) | {"model": self.model})
        return (
            None
            if answer is None
            else self._parse(lambda: checked_ids(answer["tokens"], 4 * len(text) + 8), "/tokenize")
        )

    def metrics(self) -> dict[str, float]:
        """Return every series of the Prometheus page, by name with labels."""
        page = self.http.text("/metrics")
        return self._parse(lambda: parse_metrics(page), "/metrics")

    def _generate(self, prompt: list[int], sampling: SamplingParams, k: int) -> Completion:
        answer = self._post(self.adapter.completion_request(prompt, sampling, k))
        return self._parse(lambda: self.adapter.completion(prompt, answer, k).checked(sampling.max_tokens, k))

    def _prompt_logprobs(self, ids: list[int], k: int) -> PromptLogprobs:
        answer = self._post(self.adapter.prompt_logprobs_request(ids, k))
        logprobs = self._parse(lambda: self.adapter.prompt_logprobs(ids, answer, k).checked(len(ids) - 1, k))
        if any(max(values, default=0.0) > ROUNDING for values in (logprobs.logprobs, *logprobs.top_logprobs)):
            raise UserError(
                f"{self.http.url} returns logits instead of log-probabilities; start vLLM with "
                "--logprobs-mode raw_logprobs"
            )
        return logprobs

    def _post(self, body: dict[str, Any]) -> Answer:
        return self.http.post(self.adapter.path, body | {"model": self.model})

    def _parse(self, parse: Callable[[], Result], path: str | None = None) -> Result:
        try:
            return parse()
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            reason = one_line(error, 120)
            raise UserError(
                f"{self.http.url}{path or self.adapter.path} ({self.kind}): incomplete answer ({reason}); token ids "
                "with log-probabilities come from vLLM, SGLang and llama.cpp's server (docs/servers.md)"
            ) from None

    def _map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Apply work to all items, several at a time; after a failure no more are started."""
        with ThreadPoolExecutor(self.workers) as pool:
            futures = [pool.submit(work, item) for item in items]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _check_length(self, tokens: int) -> None:
        if self.max_length is not None and tokens > self.max_length:
            raise UserError(f"{self.http.url} takes at most {self.max_length} tokens, and {tokens} are needed")


def parse_metrics(text: str) -> dict[str, float]:
    """Parse Prometheus' text format: ``name{label="value"}`` -> value. Raises ValueError: a value is no number."""
    lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {series: float(value) for series, _, value in lines}


def spec_decode_counters(before: Mapping[str, float], after: Mapping[str, float]) -> Counters | None:
    """Return the growth of vLLM's or llama.cpp's counters between two reads of the metrics, over all engines.

    None: the server did not speculate in between.
    """

    def growth(name: str) -> dict[str, float]:
        """Return the growth by label set, of the counter of that name under any prefix."""
        series = {s: v for s, v in after.items() if s.partition("{")[0].endswith(f":spec_decode_{name}_total")}
        grown = {s: value - before.get(s, 0.0) for s, value in series.items()}
        if not all(math.isfinite(value) and value >= 0 for value in grown.values()):
            raise UserError(f"the server's counter {name} went back or is not finite; was it restarted meanwhile?")
        return grown

    drafts, draft_tokens = (sum(growth(name).values()) for name in ("num_drafts", "num_draft_tokens"))
    if not drafts:
        return None
    accepted: dict[int, float] = {}
    for series, value in growth("num_accepted_tokens_per_pos").items():
        digits = series.partition('position="')[2].partition('"')[0]
        if not digits.isdecimal() or len(digits) > 3:
            raise UserError(
                f"the server counts accepted tokens at position {one_line(digits, 40)!r}, which is no number"
            )
        position = int(digits)
        accepted[position] = accepted.get(position, 0.0) + value
    return Counters(
        num_drafts=drafts,
        num_draft_tokens=draft_tokens,
        num_accepted_tokens_per_pos=[accepted[position] for position in sorted(accepted)],
    )


def _read_key(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        key = file.read_bytes().decode("ascii").strip()
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        key = ""
    if not key or not key.isprintable():  # no header may have it, and no message shows it
        raise UserError(f"{file} has no key: one line of printable ASCII")
    return key


def _message(answer: httpx.Response) -> str:
    """Return a server's own words about a refusal on one line; each kind puts them elsewhere."""
    try:
        body = parse_json(answer.content)
    except ValueError:
        body = answer.text
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and key in body:
            body = body[key]
    return one_line(body) or answer.reason_phrase


def _retry_after_seconds(answer: httpx.Response) -> float:
    value = answer.headers.get("retry-after", "")
    return float(value) if value.isascii() and value.isdecimal() and len(value) < 10 else 0.0


def _plain_headers(answer: httpx.Response) -> list[tuple[bytes, bytes]]:
    """Return the headers that are read of an answer whose content is decoded already."""
    return [(name, value) for name, value in answer.headers.raw if name.lower() in (b"content-type", b"retry-after")]
