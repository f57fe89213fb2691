"""A server that misbehaves gets one line, in time and within memory; its values are checked, and its key is kept."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from loopback_servers import running

from draftlab.errors import UserError
from draftlab.sampling import SamplingParams
from draftlab.servers.client import HttpClient, Server, parse_metrics, spec_decode_counters

Raw = Callable[[BaseHTTPRequestHandler], None]
GREEDY = SamplingParams(max_tokens=2, temperature=0.0)
CARD = {"id": "m", "owned_by": "vllm"}


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


def client(url: str, key: str | None = None, **limits: Any) -> HttpClient:
    return HttpClient(url, key, lambda _: None, **limits)


def drip(before: bytes, after: bytes = b"") -> Raw:
    """Return an answer of which a byte comes now and then, for ever."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(before)
        while True:
            request.wfile.write(after or b" ")
            request.wfile.flush()
            time.sleep(0.02)

    return answer


@pytest.mark.parametrize(
    "answer",
    [
        drip(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n"),
        drip(b"HTTP/1.1 200 OK\r\nx: "),
        drip(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        lambda request: time.sleep(3),
    ],
    ids=["body", "header", "chunks", "silence"],
)
def test_an_answer_that_never_ends_is_given_up_in_time(answer):
    with raw_server(answer) as url:
        impatient, started = client(url, seconds=0.3), time.monotonic()
        with pytest.raises(UserError, match=r"/x: no whole answer in 0.3 s"):
            impatient.get("/x")
        assert time.monotonic() - started < 2.5  # of 0.3 s, on a busy machine; the silent one would take 3


def test_a_huge_answer_is_not_kept():
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            request.wfile.write(b" " * 65536)

    with raw_server(answer) as url, pytest.raises(UserError, match="an answer of more than 1 MB"):
        client(url, most_bytes=10**6).get("/x")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[" * 100_000, b'{"a": NaN}', b'{"a": 1e999}', b'{"a": 1, "a": 2}', b"\xff", b"1" * 5000],
    ids=["empty", "cut", "deep", "nan", "infinite", "twice", "bytes", "digits"],
)
def test_what_is_not_json_is_said(content):
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n" + content)

    with raw_server(answer) as url, pytest.raises(UserError, match="the answer is not JSON") as caught:
        client(url).get("/x")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "written",
    [b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n\r\nno gzip", b"HTTP/1.1 999999 X\r\n\r\n"],
    ids=["protocol", "gzip", "status"],
)
def test_what_is_not_http_is_said(written):
    with raw_server(lambda r: r.wfile.write(written) and None) as url, pytest.raises(UserError, match="/x"):
        client(url).get("/x", tries=1)


def test_a_key_goes_to_no_other_server():
    seen: list[str | None] = []

    def other(request: BaseHTTPRequestHandler) -> None:
        seen.append(request.headers.get("authorization"))
        request.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n{}")

    with raw_server(other) as there:

        def away(request: BaseHTTPRequestHandler) -> None:
            request.wfile.write(f"HTTP/1.1 302 Found\r\nlocation: {there}/x\r\n\r\n".encode())

        with raw_server(away) as url, pytest.raises(UserError, match=r"refused \(302\)"):
            client(url, "secret").get("/x")
    assert seen == []


@pytest.mark.parametrize("content", [b"", b"two\nlines", b"\xff\xfe", b"caf\xc3\xa9", b"x\x00y"])
def test_a_key_that_no_header_may_have_is_refused_and_not_shown(content, tmp_path):
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(UserError, match="key has no key: one line of printable ASCII") as caught:
        Server.connect("http://127.0.0.1:1", api_key_file=tmp_path / "key")
    assert "two" not in str(caught.value)


@pytest.mark.parametrize("pause", ["1e9", "9" * 400, "-5", "²", "soon"])
def test_a_pause_is_limited(pause):
    waits: list[float] = []

    def busy(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(f"HTTP/1.1 503 Busy\r\nretry-after: {pause}\r\n\r\n".encode("latin-1"))

    with raw_server(busy) as url, pytest.raises(UserError, match="no answer from"):
        HttpClient(url, None, waits.append).get("/x", tries=6)
    assert len(waits) == 5
    assert 0 < min(waits) <= max(waits) <= 30


CARDS = [
    ({"id": ".."}, "is no name"),
    ({"id": "x\nK = 3"}, "is no name"),
    ({"id": "\x1b[31m"}, "is no name"),
    ({"id": ""}, "is no name"),
    ({"id": "x" * 1000}, "is no name"),
    ({"id": 7}, "is no name"),
    ({"id": ["m"]}, "lists no model"),
    ("m", "lists no model"),
    (CARD | {"max_model_len": -1}, "no number of tokens"),
    (CARD | {"max_model_len": "many"}, "no number of tokens"),
    (CARD | {"max_model_len": 1e12}, "no number of tokens"),
]


@pytest.mark.parametrize(("card", "message"), CARDS)
def test_what_a_server_says_about_itself_is_checked(card, message):
    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        return (200, {"data": [card]}) if path == "/v1/models" else (200, {"version": "0.32.0"})

    with running(answer) as url, pytest.raises(UserError, match=message) as caught:
        Server.connect(url)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("version", ["0.32\ntouch X #", 7, {"a": 1}, "\x1b]0;x\x07", "x" * 1000, ""])
def test_a_version_is_one_short_line(version):
    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        return (200, {"data": [CARD]}) if path == "/v1/models" else (200, {"version": version})

    with running(answer) as url, pytest.raises(UserError, match="as its version"):
        Server.connect(url)


def choice(ids: Any = (5, 6), values: Any = (-0.5, -0.25), tops: Any = None, reason: Any = "length") -> dict[str, Any]:
    tops = (
        [{"token_id:5": -0.5, "token_id:6": -1.0}, {"token_id:6": -0.25, "token_id:7": -3.0}] if tops is None else tops
    )
    logprobs = {"token_logprobs": list(values) if isinstance(values, tuple) else values, "top_logprobs": tops}
    return {"token_ids": list(ids) if isinstance(ids, tuple) else ids, "logprobs": logprobs, "finish_reason": reason}


WRITTEN = {
    "a negative id": choice(ids=(-5, 6)),
    "an id beyond 2^24": choice(ids=(1 << 40, 6)),
    "an id with a point": choice(ids=(5.5, 6)),
    "true as an id": choice(ids=(True, 6)),
    "a text as an id": choice(ids=("5", 6)),
    "more tokens than asked": choice((5, 6, 7), (-1, -1, -1), [{"token_id:5": -1, "token_id:6": -1}] * 3),
    "fewer values": choice(values=(-0.5,)),
    "no value": choice(values=(None, -0.25)),
    "a text as a value": choice(values=("-0.5", -0.25)),
    "ids that are a text": choice(ids="56"),
    "fewer lists": choice(tops=[{"token_id:5": -0.5, "token_id:6": -1.0}]),
    "shorter lists": choice(tops=[{"token_id:5": -0.5}, {"token_id:6": -0.25}]),
    "a list of no ids": choice(tops=[{"a": -0.5, "b": -1}] * 2),
    "a negative id in a list": choice(tops=[{"token_id:-5": -0.5, "token_id:6": -1.0}] * 2),
    "no value in a list": choice(tops=[{"token_id:5": -0.5, "token_id:6": None}] * 2),
    "another end": choice(reason="tired"),
    "no choice": None,
}  # fmt: skip


def serving(answer: Any) -> Callable[[str, str, Any], tuple[int, Any]]:
    def answering(method: str, path: str, body: Any) -> tuple[int, Any]:
        pages = {"/v1/models": {"data": [CARD]}, "/version": {"version": "0.32.0"}}
        return 200, pages.get(path, answer)

    return answering


@pytest.mark.parametrize("what", WRITTEN)
def test_what_was_written_is_checked_when_it_comes(what):
    with running(serving({"choices": [WRITTEN[what]]})) as url:
        server = Server.connect(url)
        with pytest.raises(UserError, match="incomplete answer") as caught:
            server.generate([[1, 2]], GREEDY, k=2)
    assert str(caught.value).isprintable()


def test_a_good_answer_passes():
    with running(serving({"choices": [choice()]})) as url:
        assert Server.connect(url).generate([[1, 2]], GREEDY, k=2)[0].ids == [5, 6]


@pytest.mark.parametrize("ids", [[-1], [1 << 40], [1.5], "12", [1] * 3, None])
def test_generated_ids_are_checked_where_only_they_are_asked_for(ids):
    with running(serving({"choices": [{"token_ids": ids}]})) as url:
        server = Server.connect(url)
        with pytest.raises(UserError, match="incomplete answer"):
            server.generate_ids([1, 2], GREEDY)


SCORED = {
    "a list too few": [None, {"2": {"logprob": -1}, "3": {"logprob": -2}}],
    "a list too many": [None, *[{"2": {"logprob": -1}, "3": {"logprob": -2}}] * 3],
    "another token": [None, *[{"7": {"logprob": -1}, "3": {"logprob": -2}}] * 2],
    "no value": [None, *[{"2": {"logprob": None}, "3": {"logprob": -2}}] * 2],
    "a negative id": [None, *[{"2": {"logprob": -1}, "-3": {"logprob": -2}}] * 2],
    "a text": "nothing",
}


@pytest.mark.parametrize("what", SCORED)
def test_scores_are_checked_when_they_come(what):
    with running(serving({"choices": [{"prompt_logprobs": SCORED[what]}]})) as url:
        server = Server.connect(url)
        with pytest.raises(UserError, match="incomplete answer"):
            server.prompt_logprobs([[1, 2, 2]], 2)


def test_logits_are_not_taken_for_log_probabilities():
    row = {"2": {"logprob": 8.0}, "3": {"logprob": -2}}
    with running(serving({"choices": [{"prompt_logprobs": [None, row, row]}]})) as url:
        server = Server.connect(url)
        with pytest.raises(UserError, match="logits instead of log-probabilities"):
            server.prompt_logprobs([[1, 2, 2]], 2)


@pytest.mark.parametrize("tokens", [[-1], ["a"], 5, None, [1] * 10_000])
def test_ids_of_a_text_are_checked(tokens):
    with running(serving({"tokens": tokens})) as url, pytest.raises(UserError, match="incomplete answer"):
        Server.connect(url).tokenize("def")


def test_a_refusal_is_shown_without_what_a_terminal_would_obey():
    refusal = (400, {"error": "\x1b]0;x\x07 red \x1b[31m\nline"})
    with running(lambda *_: refusal) as url, pytest.raises(UserError, match=r"refused \(400\)") as caught:
        Server.connect(url)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("page", ["a b c", "vllm:spec_decode_num_drafts_total many"])
def test_a_page_of_no_metrics_is_said(page):
    with pytest.raises(ValueError, match="could not convert"):
        parse_metrics(page)
    answer = serving({})
    answering = lambda m, path, b: (200, page) if path == "/metrics" else answer(m, path, b)  # noqa: E731
    with running(answering) as url, pytest.raises(UserError, match="/metrics"):
        Server.connect(url).metrics()


NAME = "vllm:spec_decode_num_{}_total"


@pytest.mark.parametrize(
    ("after", "message"),
    [
        ({NAME.format("drafts"): 1.0}, "went back"),
        ({NAME.format("drafts"): float("nan")}, "not finite"),
        ({NAME.format("drafts"): 9.0, NAME.format("accepted_tokens_per_pos") + '{position="x"}': 1.0}, "at position"),
        ({NAME.format("drafts"): 9.0, NAME.format("accepted_tokens_per_pos"): 1.0}, "at position"),
    ],
)
def test_counters_that_cannot_be_are_refused(after, message):
    with pytest.raises(UserError, match=message):
        spec_decode_counters({NAME.format("drafts"): 5.0}, after)
