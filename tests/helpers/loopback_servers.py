"""Servers of other people's kinds, for tests: one that replays what a real one said, one around a small model."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftlab.exporting import verify as verifying
from draftlab.servers.client import Server

# vLLM 0.32.0, CPU, fp32
RECORDED = json.loads((Path(__file__).parents[1] / "files" / "vllm_tiny.json").read_text())
# llama.cpp's C++ server in xllamacpp 2026.10, SmolLM2-135M-Instruct
LLAMA_CPP = json.loads((Path(__file__).parents[1] / "files" / "llama_cpp_answers.json").read_text())
Answering = Callable[[str, str, Any], tuple[int, Any]]  # method, path, body -> status, answer
DROP = -1  # a status: close the connection without an answer
Raw = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def running(answering: Answering) -> Iterator[str]:
    """URL of a server that answers so, each request in a thread of its own."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            length = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            if "authorization" in self.headers:
                body = {"authorization": self.headers["authorization"]} | (body or {})
            status, answer = answering(self.command, self.path, body)
            if status == DROP:
                self.close_connection = True
                return
            content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            if status in (429, 503):
                self.send_header("retry-after", "7")
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def replay(which: str) -> Answering:
    """Return what a real vLLM answered to the same requests."""

    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        found = [r for r in RECORDED[which] if (r["method"], r["path"], r["body"]) == (method, path, body)]
        return (found[0]["status"], found[0]["answer"]) if found else (500, f"{method} {path} was not recorded")

    return answer


@dataclass
class Observed:
    """The number of requests, and the largest number of requests at once."""

    now: int = 0
    most: int = 0
    paths: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, answering: Answering, seconds: float = 0.0) -> Answering:
        def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
            with self.lock:
                self.paths.append(path)
                self.now += 1
                self.most = max(self.most, self.now)
            time.sleep(seconds)
            found = answering(method, path, body)
            with self.lock:
                self.now -= 1
            return found

        return answer


def vllm_page(
    path: str,
    body: Any,
    tokenizer: PreTrainedTokenizerBase,
    grown: dict[str, float],
    longest: int = 128,
) -> tuple[int, Any] | None:
    """Answer all but completions as vLLM does. grown: Its speculative counters."""
    if path == "/metrics":
        series = (f"vllm:spec_decode_{name} {value}\n" for name, value in grown.items())
        return 200, "".join(series)
    if path == "/v1/models":
        return 200, {"data": [{"id": "small", "owned_by": "vllm", "max_model_len": longest}]}
    if path == "/version":
        return 200, {"version": "0.32.0"}
    if path == "/tokenize":
        return 200, {"tokens": tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]}
    if path == "/v1/chat/completions":
        ids = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
        return 200, {"prompt_token_ids": ids, "usage": {"prompt_tokens": len(ids)}}
    return None


@dataclass(frozen=True)
class RecordedLlamaCpp:
    """llama-server's pages as recorded, and completions in the recorded form, in which every token is the same.

    refused: Status and answer to a prompt, in place of a completion. unfinished: Prompts whose answers are no whole
    characters. drafts: Tokens drafted for an answer of several tokens.
    """

    token: int = 65
    drafts: int = 0
    refused: dict[tuple[int, ...], tuple[int, Any]] = field(default_factory=dict)
    unfinished: frozenset[tuple[int, ...]] = frozenset()
    tokenizer: PreTrainedTokenizerBase | None = None
    n_ctx: int = 512
    bodies: list[Any] = field(default_factory=list)

    def __call__(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if path == "/tokenize" and self.tokenizer is not None:
            ids = self.tokenizer(body["content"], add_special_tokens=False)["input_ids"]
            return 200, {"tokens": ids}
        path = path.partition("?")[0]
        pages = {
            "/v1/models": LLAMA_CPP["models"],
            "/props": LLAMA_CPP["props"] | {"default_generation_settings": {"n_ctx": self.n_ctx}},
            "/metrics": LLAMA_CPP["metrics"]["drafted" if self.drafts else "plain"],
        }
        if path in pages:
            return 200, pages[path]
        self.bodies.append(body)
        prompt = tuple(body["prompt"])
        return self.refused.get(prompt) or (200, self._completion(prompt, body))

    def _completion(self, prompt: tuple[int, ...], body: Any) -> dict[str, Any]:
        count, k = body["n_predict"], body["n_probs"]
        drafted = self.drafts if count > 1 else 0  # the first token comes from the prefill
        listed = [{"id": self.token + i, "token": "?", "logprob": -0.5 - i} for i in range(k)]
        first = {"id": self.token, "token": "?", "logprob": -0.5, "top_logprobs": listed}
        later = first | ({"logprob": 0.0, "top_logprobs": []} if drafted else {})
        whole = prompt not in self.unfinished
        answer = {
            "content": "?" * count if whole else "\N{BIRTHDAY CAKE}",
            "tokens": [self.token] * count,
            "stop_type": "limit",
            "timings": {"draft_n": drafted, "draft_n_accepted": drafted} if drafted else {},
        }
        if k and whole:
            answer["completion_probabilities"] = [first, *[later] * (count - 1)]
        elif k and count > 1:
            answer["completion_probabilities"] = [first] * (count // 3)
        return answer


@dataclass(frozen=True)
class SmallVLLM:
    """vLLM's answers, in the form that was recorded, from a transformers model in fp32. Text ends with one of stops.

    draft: a model that proposes k tokens for every step, greedily; what stands of them is counted as vLLM does.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stops: frozenset[int]
    draft: PreTrainedModel | None = None
    k: int = 3
    grown: dict[str, float] = field(default_factory=dict)
    longest: int = 128

    def __call__(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if page := vllm_page(path, body, self.tokenizer, self.grown, self.longest):
            return page
        if isinstance(body["prompt"][0], list):
            return 200, {"choices": [self._of_batch(body, *body["prompt"])]}
        return 200, {"choices": [self._scored(body) if "prompt_logprobs" in body else self._written(body)]}

    def _of_batch(self, body: Any, ids: list[int]) -> dict[str, Any]:
        """Return what lm-eval asks of one prompt: greedy text, or with echo the prompt's log-probabilities."""
        if "echo" not in body:
            text = list(ids)
            for _ in range(body["max_tokens"]):
                text.append(int(self._log_probs(text)[-1].argmax()))
            return {
                "index": 0,
                "text": self.tokenizer.decode(text[len(ids) :], skip_special_tokens=True),
            }
        log_p = self._log_probs(ids)
        values = [float(row[i]) for row, i in zip(log_p, ids[1:], strict=False)]
        tops = [{str(int(row.argmax())): float(row.max())} for row in log_p]
        logprobs = {
            "token_logprobs": [None, *values, float(log_p[-1].max())],
            "top_logprobs": [None, *tops],
        }
        return {"index": 0, "logprobs": logprobs}

    @torch.no_grad()
    def _log_probs(self, ids: list[int]) -> torch.Tensor:
        return self.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)  # [T, V]

    def _scored(self, body: Any) -> dict[str, Any]:
        ids = body["prompt"]
        rows: list[dict[str, Any] | None] = [None]
        for log_p, came in zip(self._log_probs(ids), ids[1:], strict=False):
            listed = [came, *log_p.topk(body["prompt_logprobs"]).indices.tolist()]
            rows.append({str(i): {"logprob": float(log_p[i]), "decoded_token": "?"} for i in listed})
        return {"prompt_logprobs": rows}

    def _written(self, body: Any) -> dict[str, Any]:
        rng, ids, values, tops = torch.Generator().manual_seed(body["seed"]), [], [], []
        while len(ids) < body["max_tokens"]:
            log_p = self._log_probs(body["prompt"] + ids)[-1]
            heat = body["temperature"]
            new = torch.multinomial((log_p / heat).softmax(-1), 1, generator=rng) if heat else log_p.argmax(-1)
            ids.append(int(new))
            values.append(float(log_p[ids[-1]]))
            listed = [ids[-1], *log_p.topk(body.get("logprobs", 0)).indices.tolist()]
            tops.append({f"token_id:{i}": float(log_p[i]) for i in listed})
            if ids[-1] in self.stops and not body["ignore_eos"]:
                break
        self._count(body["prompt"], ids)
        reason = "stop" if ids[-1] in self.stops and not body["ignore_eos"] else "length"
        return self._choice(ids, values, tops, reason)

    @torch.no_grad()
    def _count(self, prompt: list[int], ids: list[int]) -> None:
        """Steps behind the first token, which comes with the prefill."""
        at = 1
        while self.draft is not None and at < len(ids):
            text = prompt + ids[:at]
            for _ in range(self.k):
                text.append(int(self.draft(input_ids=torch.tensor([text])).logits[0, -1].argmax()))
            pairs = zip(text[len(prompt) + at :], ids[at:], strict=False)
            stood = next((i for i, (a, b) in enumerate(pairs) if a != b), min(self.k, len(ids) - at))
            self._grow({"num_drafts_total": 1, "num_draft_tokens_total": self.k})
            self._grow({f'num_accepted_tokens_per_pos_total{{position="{i}"}}': i < stood for i in range(self.k)})
            at += stood + 1

    def _grow(self, by: dict[str, float]) -> None:
        for name, value in by.items():
            self.grown[name] = self.grown.get(name, 0.0) + value

    @staticmethod
    def _choice(ids: list[int], values: list[float], tops: list[Any], reason: str) -> dict[str, Any]:
        return {
            "token_ids": ids,
            "logprobs": {"token_logprobs": values, "top_logprobs": tops},
            "finish_reason": reason,
        }


@contextmanager
def serving_vllm(directory: Path, *options: object) -> Iterator[Server]:
    """Yield a real vLLM around a checkpoint (docs/servers.md)."""
    program = os.environ.get("DRAFTLAB_TEST_VLLM")
    if program is None:
        pytest.skip("DRAFTLAB_TEST_VLLM does not name a vllm binary")
    flags = "--served-model-name tiny --dtype float32 --max-logprobs 64 --no-enable-prefix-caching --enforce-eager"
    command = [program, "serve", directory, *flags.split(), *options]
    with verifying.running(command, verifying.VLLM_ON_CPU | os.environ) as (server, _):
        yield server


@contextmanager
def raw_server(answer: Raw) -> Iterator[str]:
    """Yield the URL of a server that writes what it likes to the socket."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                answer(self)
            except OSError:
                return  # the client has left

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.socket.close()
