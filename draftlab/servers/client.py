"""A running server as the target: what it writes, what it thinks of text, what it counts. vLLM, SGLang, llama.cpp.

No torch. Servers are spoken to in token ids, never in text: adapters.py has how each kind wants that.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import httpx

from draftlab.errors import UserError, did_you_mean
from draftlab.results.score import Counters
from draftlab.sampling import SamplingParams
from draftlab.servers.adapters import ADAPTERS, SCORING_ADAPTERS, Answer, Completion, PromptLogprobs

WORKERS = 8  # requests at a time
TRIES = 6
LONGEST_WAIT_SECONDS = 30.0  # before a request is repeated
TIMEOUT = httpx.Timeout(600.0, connect=10.0)  # seconds for one answer
BUSY = (429, 503)
DROPPED = (httpx.NetworkError, httpx.RemoteProtocolError)
PROBED = 5  # most probable tokens that a probe looks at

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What the log-probabilities of written tokens are, in vLLM's words, and whether temperature 0 is greedy.

    raw_logprobs: of the model's own logits. processed_logprobs: after temperature. raw_logits, processed_logits: no
    probabilities at all.
    """

    logprobs_mode: str
    greedy: bool


class HttpClient:
    """Requests to one server, repeated where it is busy or drops the connection.

    Raises:
        UserError: it cannot be reached or refuses; with its own message where it gives one.
    """

    def __init__(self, url: str, api_key: str | None, wait: Callable[[float], None]) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.url, self.wait = url, wait
        self.client = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT)

    def get(self, path: str, tries: int = TRIES) -> Answer:
        return self._json(path, self._accepted(path, self._send("GET", path, None, tries)))

    def page(self, path: str) -> dict[str, Any]:
        """What a page says; nothing where the server has none or does not show it."""
        answer = self._send("GET", path, None, TRIES)
        found = self._json(path, answer) if answer.status_code == 200 else {}
        return found if isinstance(found, dict) else {}

    def text(self, path: str) -> str:
        return self._accepted(path, self._send("GET", path, None, TRIES)).text

    def post(self, path: str, body: dict[str, Any]) -> Answer:
        return self._json(path, self._accepted(path, self._send("POST", path, body, TRIES)))

    def post_if_there(self, path: str, body: dict[str, Any]) -> Answer | None:
        answer = self._send("POST", path, body, TRIES)
        return None if answer.status_code in (404, 405) else self._json(path, self._accepted(path, answer))

    def _send(self, method: str, path: str, body: dict[str, Any] | None, tries: int) -> httpx.Response:
        problem, pause = "", 0.5
        for left in reversed(range(tries)):
            try:
                answer = self.client.request(method, path, json=body)
                if answer.status_code not in BUSY:
                    return answer
                problem = f"{answer.status_code}: {_message(answer)}"
                pause = max(pause, _retry_after_seconds(answer))
            except DROPPED as error:
                problem = str(error) or type(error).__name__
            except httpx.TimeoutException:
                raise UserError(f"{self.url}{path} gave no answer in time") from None
            except httpx.HTTPError as error:
                raise UserError(f"{self.url}{path}: {error}") from None
            if left:
                self.wait(min(pause, LONGEST_WAIT_SECONDS))
                pause *= 2
        raise UserError(f"no answer from {self.url}{path}: {problem}; is the server running there?")

    def _accepted(self, path: str, answer: httpx.Response) -> httpx.Response:
        if answer.status_code != 200:
            raise UserError(f"{self.url}{path} refused ({answer.status_code}): {_message(answer)}")
        return answer

    def _json(self, path: str, answer: httpx.Response) -> Answer:
        try:
            return answer.json()
        except ValueError:
            raise UserError(f"{self.url}{path} answered with something that is not JSON") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server that runs and the model of it that is asked. kind: vllm, sglang, llamacpp, or openai for all others."""

    kind: str
    model: str
    version: str
    max_length: int | None  # tokens of prompt and text together; None where the server does not say
    http: HttpClient
    workers: int

    @classmethod
    def connect(
        cls,
        url: str,
        model: str | None = None,
        api_key: str | None = None,
        *,
        workers: int = WORKERS,
        wait: Callable[[float], None] = time.sleep,
    ) -> "Server":
        """Find out what runs at url (with or without /v1). model: its first one if left out.

        Raises:
            UserError: nothing answers there, it is no such server, or it has no such model.
        """
        base = url.rstrip("/").removesuffix("/v1")
        if not base.startswith(("http://", "https://")):
            raise UserError(f"server {url!r} is not an address; want http://HOST:PORT")
        http = HttpClient(base, api_key, wait)
        listing = http.get("/v1/models", tries=1)
        try:
            cards = {card["id"]: card for card in listing["data"]}
            name = next(iter(cards)) if model is None else model
        except (KeyError, TypeError, StopIteration):
            raise UserError(f"{base} is not an OpenAI-compatible server: /v1/models lists no model") from None
        if name not in cards:
            raise UserError(f"{base} serves no model {name!r}{did_you_mean(name, cards)}")
        owner = cards[name].get("owned_by")
        kind = owner if owner in ADAPTERS else "openai"
        version, longest = ADAPTERS[kind].about(http.page(ADAPTERS[kind].about_path), cards[name])
        return cls(kind=kind, model=name, version=version, max_length=longest, http=http, workers=workers)

    def describe(self) -> str:
        return f"{self.model} by {self.kind} {self.version} at {self.http.url}"

    @property
    def supports_prompt_logprobs(self) -> bool:
        """Whether it can score text that it did not write."""
        return self.kind in SCORING_ADAPTERS

    def generate(self, prompts: Sequence[list[int]], sampling: SamplingParams, *, k: int = 0) -> list[Completion]:
        """What it writes after each prompt, with the k most probable tokens at each place."""
        self._check_length(max(map(len, prompts), default=0) + sampling.max_tokens)
        seeds = range(sampling.seed, sampling.seed + len(prompts))

        jobs = [(prompt, replace(sampling, seed=seed)) for prompt, seed in zip(prompts, seeds, strict=True)]
        return self._each(lambda job: self._generate(job[0], job[1], k), jobs)

    def generate_ids(self, prompt: list[int], sampling: SamplingParams) -> tuple[list[int], Counters | None]:
        """What it writes after a prompt, at the least cost, and what it says there of its drafts (SGLang)."""
        self._check_length(len(prompt) + sampling.max_tokens)
        adapter = ADAPTERS[self.kind]
        answer = self._post(adapter.path, adapter.generate(prompt, sampling, None))
        return self._read(adapter.path, lambda: (adapter.ids(answer), adapter.counters(answer)))

    def prompt_logprobs(self, rows: Sequence[list[int]], k: int) -> list[PromptLogprobs]:
        """What it thinks of each text, whoever wrote it, with the k most probable tokens at each place.

        Raises:
            UserError: it cannot, or its values are not log-probabilities.
        """
        if self.kind not in SCORING_ADAPTERS:
            raise UserError(f"{self.http.url} ({self.kind}) does not score text; vLLM and SGLang do")
        adapter = SCORING_ADAPTERS[self.kind]
        self._check_length(max(map(len, rows), default=0) + 1)

        def one(ids: list[int]) -> PromptLogprobs:
            answer = self._post(adapter.path, adapter.prompt_logprobs_request(ids, k))
            found = self._read(adapter.path, lambda: adapter.prompt_logprobs(ids, answer, k))
            self._check_probabilities(found)
            return found

        return self._each(one, rows)

    def probe(self, prompt: list[int]) -> Probe:
        """Ask for one token at two temperatures, and for some greedy ones."""
        warm, cool = (self._generate(prompt, SamplingParams(max_tokens=1, temperature=t), PROBED) for t in (1.0, 0.5))
        at_1, at_half = (dict(zip(w.top_ids[0], w.top_logprobs[0], strict=True)) for w in (warm, cool))
        apart = max(abs(at_1[i] - at_half[i]) for i in at_1.keys() & at_half.keys())
        mode = "processed" if apart > 0.05 else "raw"
        logits = sum(map(math.exp, at_1.values())) > 1.01
        greedy = self._generate(prompt, SamplingParams(max_tokens=8, temperature=0.0), PROBED)
        chosen = zip(greedy.logprobs, greedy.top_logprobs, strict=True)
        return Probe(
            logprobs_mode=f"{mode}_{'logits' if logits else 'logprobs'}",
            greedy=all(came > top[0] - 1e-3 for came, top in chosen),
        )

    def tokenize(self, text: str) -> list[int] | None:
        """Its ids of a text, without special tokens; None where it does not say."""
        body = ADAPTERS[self.kind].tokenize(text) | {"model": self.model}
        answer = self.http.post_if_there("/tokenize", body)
        return None if answer is None else self._read("/tokenize", lambda: list(map(int, answer["tokens"])))

    def metrics(self) -> dict[str, float]:
        """Every series of its Prometheus page, by name with labels as they are written there."""
        return parse_metrics(self.http.text("/metrics"))

    def _generate(self, prompt: list[int], sampling: SamplingParams, k: int) -> Completion:
        adapter = ADAPTERS[self.kind]
        answer = self._post(adapter.path, adapter.generate(prompt, sampling, k))
        return self._read(adapter.path, lambda: adapter.completion(prompt, answer, k))

    def _post(self, path: str, body: dict[str, Any]) -> Answer:
        return self.http.post(path, body | {"model": self.model})

    def _read(self, path: str, take: Callable[[], Result]) -> Result:
        try:
            return take()
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{self.http.url}{path} ({self.kind}) answered without what is needed ({error}); token ids with "
                "log-probabilities come from vLLM, SGLang and llama.cpp's server (docs/servers.md)"
            ) from None

    def _each(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """In order, some at a time; after a failure none is begun."""
        with ThreadPoolExecutor(self.workers) as pool:
            futures = [pool.submit(work, item) for item in items]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _check_length(self, tokens: int) -> None:
        if self.max_length is not None and tokens > self.max_length:
            raise UserError(f"{self.http.url} takes {self.max_length} tokens in all, and {tokens} are wanted")

    def _check_probabilities(self, found: PromptLogprobs) -> None:
        if any(max(values, default=0.0) > 1e-3 for values in (found.logprobs, *found.top_logprobs)):
            raise UserError(
                f"{self.http.url} gives logits where log-probabilities are wanted; start vLLM with "
                "--logprobs-mode raw_logprobs"
            )


def parse_metrics(text: str) -> dict[str, float]:
    """Series of Prometheus' text format: ``name{label="value"}`` -> value."""
    lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {series: float(value) for series, _, value in lines}


def spec_decode_counters(before: Mapping[str, float], after: Mapping[str, float]) -> Counters | None:
    """What the counters of vLLM or llama.cpp grew by between two looks at its metrics, over all requests and engines.

    None: the server did not speculate in between.
    """

    def grown(name: str) -> dict[str, float]:
        """By label set, of the counter of that name under any prefix."""
        series = {s: v for s, v in after.items() if s.partition("{")[0].endswith(f":spec_decode_{name}_total")}
        return {s: value - before.get(s, 0.0) for s, value in series.items()}

    steps, drafted = (sum(grown(name).values()) for name in ("num_drafts", "num_draft_tokens"))
    if not steps:
        return None
    by_place: dict[int, float] = {}
    for series, value in grown("num_accepted_tokens_per_pos").items():
        place = int(series.partition('position="')[2].partition('"')[0])
        by_place[place] = by_place.get(place, 0.0) + value
    return Counters(
        num_drafts=steps,
        num_draft_tokens=drafted,
        num_accepted_tokens_per_pos=[by_place[place] for place in sorted(by_place)],
    )


def _message(answer: httpx.Response) -> str:
    """What a server says about a refusal, in one line: each kind puts it elsewhere."""
    try:
        found = answer.json()
    except ValueError:
        found = answer.text
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return " ".join(str(found).split())[:300] or answer.reason_phrase


def _retry_after_seconds(answer: httpx.Response) -> float:
    """0 where the server does not say, or names a date."""
    value = answer.headers.get("retry-after", "")
    return float(value) if value.isdigit() else 0.0
