"""Client of a running server: completions, prompt log-probabilities, metrics. No torch.

Requests are token ids, never text; a kind of server has its protocol (kinds.py).
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx

from draftlab.console import note_if_slow
from draftlab.errors import UserError, did_you_mean, one_line
from draftlab.reading import parse_json
from draftlab.registry import SERVERS
from draftlab.results.decoding import Counters
from draftlab.sampling import SamplingParams
from draftlab.servers.answers import TOKEN_IDS, Answer, Completion, PromptLogprobs
from draftlab.servers.kinds import ServerKind
from draftlab.trust import check_address, folder_name, is_name, without_secrets

WORKERS = 8  # concurrent requests
TRIES = 6
MAX_WAIT_SECONDS = 30.0  # between attempts
ANSWER_SECONDS, CONNECT_SECONDS = 600.0, 10.0
SILENT_SECONDS = 12.0  # of waiting for an answer before it is said
BUSY = (429, 503)
DROPPED = (httpx.NetworkError, httpx.RemoteProtocolError)
PROBE_TOP_K = 5
ROUNDING = 1e-3  # nats that rounding may put a log-probability above 0
OPENAI = "openai"  # kind of a server that says nothing known about itself; it is spoken to as vLLM

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

    seconds: of waiting for an answer.

    Raises:
        UserError: it cannot be reached or refuses; quotes the server's message.
    """

    def __init__(
        self, url: str, api_key: str | None, wait: Callable[[float], None], *, seconds: float = ANSWER_SECONDS
    ) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.url, self.wait, self.seconds = without_secrets(url), wait, seconds  # the address as it is shown
        timeout = httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))
        limits = httpx.Limits(max_connections=None)  # as many as the caller has workers
        self.client = httpx.Client(base_url=url, headers=headers, timeout=timeout, limits=limits)

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
        """Return the answer; None if the server does not have the page."""
        answer = self._send("POST", path, body, TRIES)
        return None if answer.status_code in (404, 405) else self._json(path, self._accepted(path, answer))

    def _send(self, method: str, path: str, body: dict[str, Any] | None, tries: int) -> httpx.Response:
        problem, pause = "", 0.5
        for left in reversed(range(tries)):
            try:
                with note_if_slow(f"waiting for {self.url}{path}, {self.seconds:g} s at most", SILENT_SECONDS):
                    answer = self.client.request(method, path, json=body)
                if answer.status_code not in BUSY:
                    return answer
                problem = f"{answer.status_code}: {_message(answer)}"
                pause = max(pause, _retry_after_seconds(answer))
            except DROPPED as error:
                problem = str(error) or type(error).__name__
            except httpx.TimeoutException:
                raise UserError(f"{self.url}{path}: no whole answer in {self.seconds:g} s") from None
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # of httpx's decoders too
                raise UserError(f"{self.url}{path}: {one_line(error)}") from None
            if left:
                pause = min(pause, MAX_WAIT_SECONDS)
                with note_if_slow(f"{self.url} is busy ({problem}); asking again in {pause:g} s", SILENT_SECONDS):
                    self.wait(pause)
                pause *= 2
        raise UserError(f"no answer from {self.url}{path}: {problem}; is the server running?")

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
    """One model of a running server. kind: vllm, sglang, llamacpp, another owned_by of a kind, or openai."""

    kind: str
    model: str
    version: str
    max_length: int | None  # tokens of prompt and completion; None if the server does not tell
    http: HttpClient
    workers: int
    adapter: ServerKind

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
        check_address(url)
        http = HttpClient(url.rstrip("/").removesuffix("/v1"), _read_key(api_key_file), wait)
        listing = http.get("/v1/models", tries=1)
        try:
            cards = {card["id"]: card for card in listing["data"]}
            name = next(iter(cards)) if model is None else model
        except (AttributeError, KeyError, TypeError, StopIteration):
            raise UserError(f"{http.url} is not an OpenAI-compatible server: /v1/models lists no model") from None
        if name not in cards:
            raise UserError(f"{http.url} serves no model {name!r}{did_you_mean(name, cards)}")
        folder_name(name, f"the model of {http.url}")  # it names directories, and stands in scripts and pages
        kind, adapter = _kind_of(cards[name].get("owned_by"))
        try:
            version, max_length = adapter.about(http.page(adapter.about_path), cards[name])
        except AttributeError:
            raise UserError(f"{http.url}{adapter.about_path} does not say what {kind} says there") from None
        if not is_name(version) or not isinstance(max_length, int | None):
            about = one_line(f"version {version!r}, at most {max_length!r} tokens", 80)
            raise UserError(f"{http.url} says about itself: {about}; want a name and a number")
        return cls(
            kind=kind, model=name, version=version, max_length=max_length, http=http, workers=workers, adapter=adapter
        )

    def describe(self) -> str:
        return f"{self.model} by {self.kind} {self.version} at {self.http.url}"

    def generate(self, prompts: Sequence[list[int]], sampling: SamplingParams, *, k: int = 0) -> list[Completion]:
        """Return a completion of each prompt, with the k top tokens of each position."""
        self._check_length(max(map(len, prompts), default=0) + sampling.max_tokens)
        jobs = [(prompt, replace(sampling, seed=sampling.seed + i)) for i, prompt in enumerate(prompts)]
        return self._map(lambda job: self._generate(*job, k), jobs)

    def generate_ids(self, prompt: list[int], sampling: SamplingParams) -> tuple[list[int], Counters | None]:
        """Return the generated tokens at the least cost, and the speculative counters of the answer (SGLang)."""
        self._check_length(len(prompt) + sampling.max_tokens)
        answer = self._post(self.adapter.completion_request(prompt, sampling, None))

        def parse() -> tuple[list[int], Counters | None]:
            ids = TOKEN_IDS.validate_python(self.adapter.ids(answer))
            _check_count(ids, sampling.max_tokens)
            return ids, self.adapter.counters(answer)

        return self._parse(parse)

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
        at_1, at_half = (dict(zip(c.top_ids[0], c.top_logprobs[0], strict=True)) for c in (hot, cold))
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
        if answer is None:
            return None
        return self._parse(lambda: TOKEN_IDS.validate_python(answer["tokens"]), "/tokenize")

    def metrics(self) -> dict[str, float]:
        """Return every series of the Prometheus page, by name with labels."""
        page = self.http.text("/metrics")
        return self._parse(lambda: parse_metrics(page), "/metrics")

    def grown(self, before: Mapping[str, float]) -> Counters:
        """Return the growth of the speculative counters since an earlier metrics(). Raises UserError: there is none."""
        counters = spec_decode_counters(before, self.metrics())
        if counters is None:
            raise UserError(f"{self.http.url} drafted nothing: its /metrics count no speculative steps")
        return counters

    def _generate(self, prompt: list[int], sampling: SamplingParams, k: int) -> Completion:
        answer = self._post(self.adapter.completion_request(prompt, sampling, k))

        def parse() -> Completion:
            written = self.adapter.completion(prompt, answer, k)
            _check_count(written.ids, sampling.max_tokens)
            return written

        return self._parse(parse)

    def _prompt_logprobs(self, ids: list[int], k: int) -> PromptLogprobs:
        answer = self._post(self.adapter.prompt_logprobs_request(ids, k))

        def parse() -> PromptLogprobs:
            found = self.adapter.prompt_logprobs(ids, answer, k)
            if len(found.logprobs) != len(ids) - 1:
                raise ValueError(f"{len(found.logprobs)} values for {len(ids) - 1} tokens")
            return found

        scored = self._parse(parse)
        if any(max(values, default=0.0) > ROUNDING for values in (scored.logprobs, *scored.top_logprobs)):
            raise UserError(
                f"{self.http.url} returns logits instead of log-probabilities; start vLLM with "
                "--logprobs-mode raw_logprobs"
            )
        return scored

    def _post(self, body: dict[str, Any]) -> Answer:
        return self.http.post(self.adapter.path, body | {"model": self.model})

    def _parse(self, parse: Callable[[], Result], path: str | None = None) -> Result:
        try:
            return parse()
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            reason = one_line(error, 120)
            raise UserError(
                f"{self.http.url}{path or self.adapter.path} ({self.kind}): incomplete answer ({reason}); "
                "token ids with log-probabilities come from vLLM, SGLang and llama.cpp's server (docs/servers.md)"
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
        position = int(series.partition('position="')[2].partition('"')[0])
        accepted[position] = accepted.get(position, 0.0) + value
    return Counters(
        num_drafts=drafts,
        num_draft_tokens=draft_tokens,
        num_accepted_tokens_per_pos=[accepted[position] for position in sorted(accepted)],
    )


def _kind_of(owner: object) -> tuple[str, ServerKind]:
    """Return the kind of the server whose /v1/models says this owned_by."""
    known = next((kind for kind in SERVERS.loadable() if kind.owned_by and kind.owned_by == owner), None)
    return (OPENAI, SERVERS.get("vllm", "--server")) if known is None else (known.owned_by, known)


def _check_count(ids: list[int], most: int) -> None:
    if len(ids) > most:
        raise ValueError(f"{len(ids)} tokens instead of {most} at most")


def _read_key(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        key = file.read_text("ascii").strip()
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
    return min(float(value), MAX_WAIT_SECONDS) if value.isascii() and value.isdecimal() else 0.0
