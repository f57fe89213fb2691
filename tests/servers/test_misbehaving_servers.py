"""A server that misbehaves gets one line; its values are checked, and its key is kept."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.errors import raises_option
from helpers.loopback_servers import DROP, raw_server, running

from draftlab.data.prompts import Prompt
from draftlab.errors import UserError
from draftlab.sampling import SamplingParams
from draftlab.servers.client import TRIES, HttpClient, Probe, Server, spec_decode_counters
from draftlab.servers.kinds import top_k
from draftlab.target_outputs.outputs import StoredLogprobs
from draftlab.target_outputs.targets import ServedTarget

GREEDY = SamplingParams(max_tokens=2, temperature=0.0)
CARD = {"id": "m", "owned_by": "vllm"}


def client(url: str, key: str | None = None, **limits: Any) -> HttpClient:
    return HttpClient(url, key, lambda _: None, **limits)


def test_a_silent_server_is_given_up_in_time():
    with raw_server(lambda request: time.sleep(3)) as url:
        impatient, started = client(url, seconds=0.3), time.monotonic()
        with raises_option("/x"):
            impatient.json("GET", "/x")
        assert time.monotonic() - started < 2.5  # of 0.3 s, on a busy machine


@pytest.fixture
def closed() -> int:
    """Return a port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("check tiny --target tiny --data stdlib --server {closed}", "--server"),
        ("score --target tiny --data stdlib --server {closed}/v1", "--server"),
        ("score --target tiny --data stdlib --server {open} --speculative-server {closed}", "--speculative-server"),
        ("outputs build --target tiny --data stdlib --server {closed}", "--server"),
    ],
)
def test_a_refused_connection_is_said_before_anything_is_loaded(command, flag, closed, tmp_path):
    """The modules that a command needs take from ten seconds to minutes to load on a busy machine."""
    url = f"http://u:secret@127.0.0.1:{closed}"
    with raw_server(lambda request: None) as other:
        words = command.format(closed=url, open=other).split()
        ended = subprocess.run([sys.executable, "-c", LOADED, *words], cwd=tmp_path, capture_output=True, text=True)
    (error,) = ended.stderr.splitlines()
    assert f"{flag}: " in error
    assert f"http://127.0.0.1:{closed}" in error
    assert "secret" not in error
    assert ended.stdout.split() == ["1", "False"]


# prints the exit code, and whether torch was imported
LOADED = """import sys
from draftlab.cli import main
try:
    main()
except SystemExit as ended:
    print(ended.code, "torch" in sys.modules)
"""


def test_a_server_that_answered_before_is_asked_again():
    """A connection that is then refused is that of a server that starts again."""
    waited: list[float] = []
    stopped = False
    with running(lambda *_: (DROP, "") if stopped else (200, {"data": [CARD]})) as url:
        server = Server.connect(url, wait=waited.append)
    stopped = True  # for the connection that is still open
    with raises_option(url, "refused"):
        server.http.json("GET", "/metrics")
    assert len(waited) == TRIES - 1


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize("start", [HEAD + b"\r\n", HEAD + b"x: ", b""], ids=["body", "head", "line"])
def test_a_dripping_answer_is_given_up_in_time(start):
    """Every read gets a byte in time, so no limit of single reads ends this."""

    def drip(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(start)
        for _ in range(40):
            time.sleep(0.1)
            request.wfile.write(b" ")

    with raw_server(drip) as url:
        impatient, started = client(url, seconds=0.5), time.monotonic()
        with raises_option("/x"):
            impatient.json("GET", "/x")
        assert time.monotonic() - started < 3


@pytest.mark.parametrize("status", [200, 400, 503])
def test_an_endless_answer_is_given_up(status):
    sent = 0

    def flood(request: BaseHTTPRequestHandler) -> None:
        nonlocal sent
        request.wfile.write(f"HTTP/1.1 {status} X\r\n\r\n".encode())
        while True:
            sent += request.wfile.write(b" " * 65536)

    with raw_server(flood) as url, raises_option("/x", "MB"):
        client(url, most_bytes=1 << 20).json("GET", "/x")
    assert sent < 64 << 20  # what the socket's buffers take, too


def test_an_answer_of_the_largest_size_is_read():
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(HEAD + b"\r\n" + b"[0, 1]")

    with raw_server(answer) as url:
        assert client(url, most_bytes=6).json("GET", "/x") == [0, 1]


@pytest.mark.parametrize("content", [b'{"a": NaN}', b"\xff"])
def test_what_is_not_json_is_said(content):
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n" + content)

    with raw_server(answer) as url, raises_option("/x") as caught:
        client(url).json("GET", "/x")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "written",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n\r\nno gzip",
        b"HTTP/1.1 999999 X\r\n\r\n",
    ],
    ids=["protocol", "gzip", "status"],
)
def test_what_is_not_http_is_said(written):
    with raw_server(lambda r: r.wfile.write(written) and None) as url, raises_option("/x"):
        client(url).json("GET", "/x", tries=1)


def test_a_key_goes_to_no_other_server():
    seen: list[str | None] = []

    def other(request: BaseHTTPRequestHandler) -> None:
        seen.append(request.headers.get("authorization"))
        request.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n{}")

    with raw_server(other) as there:

        def away(request: BaseHTTPRequestHandler) -> None:
            request.wfile.write(f"HTTP/1.1 302 Found\r\nlocation: {there}/x\r\n\r\n".encode())

        with raw_server(away) as url, raises_option("302"):
            client(url, "secret").json("GET", "/x")
    assert seen == []


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_dry_run_sends_no_key_and_no_password(dry_run, tmp_path):
    (tmp_path / "key").write_text("KEY")
    seen: list[str | None] = []

    def locked(request: BaseHTTPRequestHandler) -> None:
        seen.append(request.headers.get("authorization"))
        request.wfile.write(b"HTTP/1.1 401 Unauthorized\r\n\r\n")

    with raw_server(locked) as url:
        for address, key in ((url, tmp_path / "key"), (url.replace("//", "//user:pw@"), None)):
            with raises_option("401") as caught:
                Server.connect(address, key, dry_run=dry_run)
            assert ("dry run" in str(caught.value)) == dry_run
    if dry_run:
        assert seen == [None, None]
    else:
        assert seen == ["Bearer KEY", "Basic dXNlcjpwdw=="]


@pytest.mark.parametrize("content", [b"", b"two\nlines", b"\xff\xfe"])
def test_a_key_that_no_header_may_have_is_refused_and_not_shown(content, tmp_path):
    (tmp_path / "key").write_bytes(content)
    with raises_option("key") as caught:
        Server.connect("http://127.0.0.1:1", api_key_file=tmp_path / "key")
    assert "two" not in str(caught.value)


@pytest.mark.parametrize("card", [{"id": "x\nK = 3"}, "m", CARD | {"max_model_len": "many"}])
def test_what_a_server_says_about_itself_is_checked(card):
    with running(lambda *_: (200, {"data": [card]})) as url, pytest.raises(UserError) as caught:
        Server.connect(url)
    assert str(caught.value).isprintable()


TOPS = [{"token_id:5": -0.5, "token_id:6": -1.0}, {"token_id:6": -0.25, "token_id:7": -3.0}]


def choice(ids: Any = (5, 6), values: Any = (-0.5, -0.25), tops: Any = TOPS, reason: str = "length") -> dict[str, Any]:
    logprobs = {"token_logprobs": values, "top_logprobs": tops}
    return {"token_ids": ids, "logprobs": logprobs, "finish_reason": reason}


WRITTEN = {
    "a negative id": choice(ids=(-5, 6)),
    "more tokens than asked": choice((5, 6, 7), (-0.5, -0.25, -1), [*TOPS, TOPS[0]]),
    "no value": choice(values=(None, -0.25)),
    "fewer lists": choice(tops=TOPS[:1]),
    "no lists": choice(tops=[]),
}


def serving(answer: Any) -> Callable[[str, str, Any], tuple[int, Any]]:
    def answering(method: str, path: str, body: Any) -> tuple[int, Any]:
        pages = {"/v1/models": {"data": [CARD]}, "/version": {"version": "0.32.0"}}
        return 200, pages.get(path, answer)

    return answering


@pytest.mark.parametrize("what", WRITTEN)
def test_what_was_written_is_checked_when_it_comes(what):
    with running(serving({"choices": [WRITTEN[what]]})) as url:
        server = Server.connect(url)
        with raises_option("/v1/completions") as caught:
            server.generate([[1, 2]], GREEDY, k=2)
    assert str(caught.value).isprintable()


IMPOSSIBLE = {
    "an id beyond the vocabulary": choice((5, 9), (-0.5, -3.5)),
    "probabilities above 1": choice(
        values=(-0.1, -0.1),
        tops=[{"token_id:5": -0.1, "token_id:6": -0.1}, {"token_id:6": -0.1, "token_id:7": -0.1}],
    ),
    "a log-probability beyond float32": choice((5, 8), (-0.5, -1e39)),
    "a log-probability above 0": choice(values=(0.5, -0.25), tops=[{"token_id:5": 0.5, "token_id:6": -1.0}, TOPS[1]]),
}


@pytest.mark.parametrize("what", [None, *IMPOSSIBLE])
def test_a_target_on_a_server_gives_tokens_of_its_vocabulary_with_log_probabilities(what):
    answer = IMPOSSIBLE[what] if what else choice()
    with running(serving({"choices": [answer]})) as url:
        probe = Probe(logprobs_mode="raw_logprobs", greedy=True)
        target = ServedTarget(Server.connect(url), Path(), 9, probe)
        ask = ([Prompt([1, 2])], [0], GREEDY, 2)
        if what is None:
            assert target.generate(*ask)[0].ids.tolist() == [5, 6]
        else:
            with pytest.raises(UserError):
                target.generate(*ask)


@pytest.mark.parametrize(
    ("answer", "ask"),
    [
        ({"choices": [{"token_ids": [-1]}]}, lambda s: s.generate_ids([1, 2], GREEDY)),
        ({"tokens": [-1]}, lambda s: s.tokenize("def")),
        (
            {"choices": [{"prompt_logprobs": [None, *[{"7": {"logprob": -1}}] * 2]}]},
            lambda s: s.prompt_logprobs([[1, 2, 2]], 1),
        ),
    ],
)
def test_ids_and_scores_are_checked_when_they_come(answer, ask):
    with running(serving(answer)) as url:
        server = Server.connect(url)
        with raises_option(url):
            ask(server)


def test_a_refusal_is_shown_without_what_a_terminal_would_obey():
    refusal = (400, {"error": "\x1b]0;x\x07 red \x1b[31m\nline"})
    with running(lambda *_: refusal) as url, raises_option("400") as caught:
        Server.connect(url)
    assert str(caught.value).isprintable()


def test_a_page_of_no_metrics_is_said():
    with running(serving("a b c")) as url, raises_option("/metrics"):
        Server.connect(url).metrics()


NAME = "vllm:spec_decode_num_{}_total"


@pytest.mark.parametrize("drafts", [1.0, float("nan")])
def test_counters_that_went_back_or_are_no_numbers_are_refused(drafts):
    """Those of one engine, while the other's grow by more."""
    first, second = (f'{NAME.format("drafts")}{{engine="{i}"}}' for i in range(2))
    with pytest.raises(UserError):
        spec_decode_counters({first: 5.0, second: 5.0}, {first: drafts, second: 20.0})


POSITION = NAME.format("accepted_tokens_per_pos") + '{{position="{}"}}'


@pytest.mark.parametrize(
    "grown",
    [
        {NAME.format("draft_tokens"): 1e300},
        {NAME.format("draft_tokens"): 1.0, POSITION.format(0): 2.0},
        {POSITION.format("x"): 1.0},
        {POSITION.format(1): 1.0},
        {POSITION.format(0): 3.0},
        {POSITION.format(0): 1.0, POSITION.format(1): 2.0},
    ],
)
def test_counters_that_contradict_each_other_are_refused(grown):
    whole = {NAME.format("drafts"): 2.0, NAME.format("draft_tokens"): 4.0}
    with pytest.raises(UserError, match="counters"):
        spec_decode_counters({}, whole | grown)


@pytest.mark.parametrize(("reason", "ignore_eos"), [("length", False), ("stop", True)])
def test_an_answer_that_ended_early_is_no_measurement(reason, ignore_eos):
    sampling = SamplingParams(max_tokens=2, ignore_eos=ignore_eos)
    with running(serving({"choices": [choice((5,), reason=reason)]})) as url, raises_option("/v1"):
        Server.connect(url).generate_ids([1, 2], sampling)


def test_a_probability_of_0_is_stored_as_a_number_that_can_be_read():
    least = -3.4028234663852886e38  # llama.cpp's logarithm of 0
    stored = StoredLogprobs.of_lists(np.array([[5, 6]]), np.array([[0.0, least]]), np.array([least]), np.array([6]))
    assert np.isfinite(stored.logprobs.astype(np.float16)).all()
    assert np.isfinite(stored.token.astype(np.float16)).all()


def test_an_answer_without_tokens_says_nothing_of_log_probabilities():
    with running(serving({"choices": [choice((), (), [], "stop")]})) as url, raises_option("/v1"):
        Server.connect(url).probe([1, 2])


def test_a_page_without_tokens_is_not_a_server_that_cannot_tokenize():
    with running(serving({})) as url, raises_option("/tokenize"):
        Server.connect(url).tokenize("def")


ENTRIES = [[-0.5, 5, None], [-1.5, 6, None]]


@pytest.mark.parametrize(
    ("owner", "answer"),
    [
        (
            "sglang",
            {
                "output_ids": [5, 7],
                "meta_info": {
                    "finish_reason": {"type": "length"},
                    "output_token_logprobs": ENTRIES,
                    "output_top_logprobs": [ENTRIES] * 2,
                },
            },
        ),
        (
            "llamacpp",
            {
                "tokens": [5, 7],
                "stop_type": "limit",
                "completion_probabilities": [
                    {"id": i, "logprob": p, "top_logprobs": [{"id": i, "logprob": p}]} for p, i, _ in ENTRIES
                ],
            },
        ),
    ],
)
def test_log_probabilities_of_other_tokens_are_refused(owner, answer):
    def answering(method: str, path: str, body: Any) -> tuple[int, Any]:
        return 200, {"data": [CARD | {"owned_by": owner}]} if path == "/v1/models" else answer

    with running(answering) as url, raises_option("other tokens"):
        Server.connect(url).generate([[1, 2]], GREEDY, k=1)


def test_a_token_twice_in_a_list_is_refused():
    with pytest.raises(ValueError, match="different"):
        top_k([(5, -0.5), (6, -1.0), (5, -0.5)], 3)
