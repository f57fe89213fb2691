"""Servers as they answer: drafted and unfinished tokens, refused rows, slots, models, proxies, keys and counters.

llama.cpp's answers were recorded from its C++ server in xllamacpp 2026.10 (tests/files/llama_cpp_answers.json).
"""

import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from helpers.errors import raises_option
from helpers.loopback_servers import (
    LLAMA_CPP,
    RECORDED,
    Answering,
    Observed,
    RecordedLlamaCpp,
    SmallVLLM,
    raw_server,
    running,
)
from helpers.small_files import TEMPLATE, with_template, write_prompts
from helpers.typed import call

from draftlab.exporting import verify as verifying
from draftlab.model import checkpoint, hub
from draftlab.sampling import SamplingParams
from draftlab.scoring.lm_eval import _same_proxies
from draftlab.servers.client import (
    HttpClient,
    Server,
    parse_metrics,
    proxy_of,
    spec_decode_counters,
    undrafted,
)
from draftlab.servers.kinds import DraftedTokens, RowError
from draftlab.servers.llama_cpp import LlamaCpp
from draftlab.servers.vllm import VLLM
from draftlab.target_outputs.store import read_manifest, read_store
from draftlab.target_outputs.targets import (
    ServedTarget,
    check_server_template,
    check_server_tokenizer,
)

SAMPLED = SamplingParams(max_tokens=6, temperature=1.0)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


@pytest.fixture
def started() -> Iterator[Callable[[Answering], str]]:
    with ExitStack() as stack:
        yield lambda answering: stack.enter_context(running(answering))


def recorded(name: str, **timings: int) -> Answering:
    """Answer every completion as the server did once. timings: Other values than those recorded."""
    record = LLAMA_CPP[name]
    answer = record["answer"] | {"timings": record["answer"].get("timings", {}) | timings}

    def answering(method: str, path: str, body: Any) -> tuple[int, Any]:
        if path == "/completion":
            return record["status"], answer
        return RecordedLlamaCpp()(method, path, body)

    return answering


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize(("name", "timings"), [("drafted", {}), ("drafted", {"draft_n": 0}), ("plain", {"draft_n": 3})])
def test_log_probabilities_of_drafted_tokens_are_refused(name, timings, k, started):
    """The count of drafted tokens shows them, and so does the empty list of a token with log-probability 0.0."""
    server = Server.connect(started(recorded(name, **timings)))
    with raises_option(server.http.url, "draft", kind=DraftedTokens):
        server.generate([[504, 30, 31]], SAMPLED, k=k)
    with pytest.raises(DraftedTokens):
        server.generate_rows([[504, 30, 31]], SAMPLED, k=k)
    (row,) = server.generate_rows([[504, 30, 31]], SAMPLED, k=None)
    assert row.ids == LLAMA_CPP["drafted_ids"]["answer"]["tokens"]  # the text is the target's


def test_an_sglang_that_drafts_may_lack_log_probabilities(started):
    """sglang#10660: with lookahead, the answer has no output_token_logprobs."""
    meta = {"finish_reason": {"type": "length", "length": 2}, "spec_verify_ct": 1}

    def answering(method: str, path: str, body: Any) -> tuple[int, Any]:
        card = {"id": "m", "owned_by": "sglang", "max_model_len": 64}
        pages = {"/v1/models": {"data": [card]}, "/server_info": {"version": "0.5.23"}}
        return 200, pages.get(path, {"output_ids": [7, 8], "meta_info": meta})

    with raises_option("draft", kind=DraftedTokens):
        Server.connect(started(answering)).generate([[1]], SamplingParams(max_tokens=2))


@pytest.mark.parametrize("k", [1, 3])
def test_an_empty_list_is_that_of_a_drafted_token_in_vllm_too(k, started):
    """vllm#17876."""
    logprobs = {"token_logprobs": [-0.5, 0.0], "top_logprobs": [{"token_id:5": -0.5}, {}]}
    choice = {"token_ids": [5, 6], "logprobs": logprobs, "finish_reason": "length"}

    def answering(method: str, path: str, body: Any) -> tuple[int, Any]:
        pages = {"/v1/models": {"data": MODELS[:1]}, "/version": {"version": "0.32.0"}}
        return 200, pages.get(path, {"choices": [choice]})

    with raises_option("/v1/completions"):
        Server.connect(started(answering)).generate([[1]], SamplingParams(max_tokens=2), k=k)


def test_the_same_answer_without_a_draft_is_read(started):
    server = Server.connect(started(recorded("plain")))
    (row,) = server.generate([[504, 30, 31]], SAMPLED, k=2)
    assert row.top_ids[0] == [504, 1195]
    assert row.logprobs[1] == pytest.approx(-0.1829, abs=1e-4)


def test_a_server_that_drafts_is_a_target_for_greedy_answers_only(started, family_dirs):
    directory = family_dirs["llama"]
    fake = RecordedLlamaCpp(drafts=3, tokenizer=checkpoint.load_tokenizer(directory))
    server = Server.connect(started(fake))
    for sampling, k in ((SAMPLED, 0), (GREEDY, 2)):
        with raises_option("draft"):
            ServedTarget.connected(server, directory, sampling, k)
    assert ServedTarget.connected(server, directory, GREEDY, 0).probe.greedy


@pytest.mark.parametrize(("name", "count"), [("unfinished", 12), ("unfinished_only", 1)])
def test_an_answer_of_unfinished_characters_costs_its_row_only(name, count, started):
    server = Server.connect(started(recorded(name)))
    (row,) = server.generate_rows([[1]], SamplingParams(max_tokens=count, temperature=1.0), k=1)
    assert isinstance(row, RowError)
    assert not row.limited
    with pytest.raises(RowError):
        server.generate([[1]], SamplingParams(max_tokens=count, temperature=1.0))


@pytest.mark.parametrize("count", [1, 2])
def test_an_ascii_answer_cut_inside_a_character_costs_its_row_only(count, started):
    """The recorded form: tokens that leave a character unfinished have no log-probabilities and no text."""
    plain = LLAMA_CPP["plain"]["answer"]
    cut = plain | {"completion_probabilities": plain["completion_probabilities"][:-count]}
    assert plain["content"].isascii()

    def answering(method: str, path: str, body: Any) -> tuple[int, Any]:
        return (200, cut) if path == "/completion" else RecordedLlamaCpp()(method, path, body)

    (row,) = Server.connect(started(answering)).generate_rows([[1]], SAMPLED, k=1)
    assert isinstance(row, RowError)


def test_a_server_that_never_returns_probabilities_is_no_matter_of_characters(started):
    answer = LLAMA_CPP["plain"]["answer"] | {"completion_probabilities": []}  # llama.cpp#10733
    with raises_option("/completion") as caught:
        url = started(lambda m, p, b: RecordedLlamaCpp()(m, p, b) if p != "/completion" else (200, answer))
        Server.connect(url).generate([[1]], SAMPLED)
    assert not isinstance(caught.value, RowError)


@pytest.fixture
def build(tmp_path, monkeypatch, family_dirs, started) -> Callable[..., Any]:
    """Build a store of the answers to prompts of a file. settings: Fields of the server, with numbers of prompts."""
    monkeypatch.chdir(tmp_path)
    directory = family_dirs["llama"]
    tokenizer = checkpoint.load_tokenizer(directory)

    def built(*options: object, count: int = 12, code: int = 0, **settings: Any) -> Any:
        write_prompts(Path("prompts.jsonl"), count)
        rows = [tuple(tokenizer(f"def f{i}(x):")["input_ids"]) for i in range(count)]
        unfinished = frozenset(rows[i] for i in settings.get("unfinished", ()))
        refused = {rows[i]: (400, text) for i, text in settings.get("refused", {}).items()}
        fake = RecordedLlamaCpp(tokenizer=tokenizer, unfinished=unfinished, refused=refused)
        words = "outputs build --use replay --max-new-tokens 6 --prompt-file prompts.jsonl"
        placed = ("--out", "out", "--target", directory, "--server", started(fake))
        return fake, call(words, *placed, *options, code=code)

    return built


def test_rows_without_log_probabilities_are_left_out_and_counted(build):
    _, result = build("--temperature", 1, unfinished=(3, 7, 8))
    manifest, outputs = read_manifest(Path("out")), read_store(Path("out")).outputs
    assert (manifest.sequences, manifest.left_out, manifest.finished) == (9, 3, True)
    assert [o.number for o in outputs] == [0, 1, 2, 4, 5, 6, 9, 10, 11]
    assert "(row 4, row 8, row 9)" in " ".join(result.stderr.split())


def test_greedy_answers_need_no_log_probabilities(build):
    fake, _ = build(unfinished=(3, 7))
    assert len(read_store(Path("out")).outputs) == 12
    asked = [body for body in fake.bodies if body["n_predict"] == 6]
    assert [body["n_probs"] for body in asked] == [0] * 12


def test_a_shard_may_lose_all_its_rows(build):
    """The 33rd prompt is in the second shard; the longest prompts come first."""
    build("--temperature", 1, count=33, unfinished=(9,))
    sizes = [shard.sequences for shard in read_manifest(Path("out")).shards]
    assert sum(sizes) == 32
    assert len(read_store(Path("out")).outputs) == 32
    assert "32 of 33" in call("outputs info out").stdout


def test_a_store_of_nothing_is_refused(build):
    build("--temperature", 1, count=4, unfinished=range(4), code=1)
    assert not Path("out").exists()


def test_a_refused_row_is_left_out_and_many_are_an_error(build):
    too_long = LLAMA_CPP["too_long"]["answer"]
    build(refused={5: too_long})
    assert [o.number for o in read_store(Path("out")).outputs] == [0, 1, 2, 3, 4, *range(6, 12)]
    _, result = build("--out", "other", refused={5: too_long, 6: too_long}, code=1)
    text = " ".join(result.stderr.split())
    assert "(row 6, row 7)" in text
    assert "exceed_context_size_error" in text


def test_prompts_beyond_the_context_of_a_slot_are_refused_rows(started):
    server = Server.connect(started(RecordedLlamaCpp(n_ctx=16)))
    short, long = server.generate_rows([[1] * 10, [1] * 11], GREEDY, k=None)
    assert (short.ids, isinstance(long, RowError)) == ([65] * 6, True)


SHARED = LLAMA_CPP["shared_context"]


def test_slots_that_share_one_cache_get_fewer_requests_at_once(started):
    observed = Observed()

    def crowded(method: str, path: str, body: Any) -> tuple[int, Any]:
        if path == "/completion" and observed.now > 2:
            return SHARED["status"], SHARED["answer"]
        return RecordedLlamaCpp()(method, path, body)

    server = Server.connect(started(observed.of(crowded, seconds=0.05)))
    assert server.workers == LLAMA_CPP["props"]["total_slots"] == 4
    told: list[int] = []
    rows = server.generate_rows([[i] for i in range(12)], GREEDY, k=None, advance=told.append)
    assert [row.prompt_ids for row in rows] == [[i] for i in range(12)]
    assert max(told) == 12
    assert server.workers == 2
    assert observed.most == 4


def test_a_cache_that_holds_no_single_request_is_an_error_with_a_remedy(started):
    def full(method: str, path: str, body: Any) -> tuple[int, Any]:
        if path == "/completion":
            return SHARED["status"], SHARED["answer"]
        return RecordedLlamaCpp()(method, path, body)

    server = Server.connect(started(full))
    with raises_option("-np"):
        server.generate_rows([[1], [2]], GREEDY, k=None)
    with raises_option("-np"):
        server.generate_ids([1], GREEDY)


def test_a_router_of_llama_cpp_is_asked_for_the_pages_of_the_model(started):
    """llama-server without --model: its own /props has n_ctx 0 and no slots (SillyTavern#4914)."""
    own = {"role": "router", "default_generation_settings": {"n_ctx": 0}, "build_info": "b1"}
    names = ["a/b c:Q8_0", "other"]
    models = {"data": [{"id": name, "owned_by": "llamacpp"} for name in names]}
    seen: list[str] = []

    def router(method: str, path: str, body: Any) -> tuple[int, Any]:
        page, _, query = path.partition("?")
        if page == "/v1/models":
            return 200, models
        if not query:
            return (200, own) if page == "/props" else (400, "model name is missing")
        seen.append(unquote(query))
        return RecordedLlamaCpp(n_ctx=768)(method, page, body)

    server = Server.connect(started(router), model=names[0])
    assert (server.max_length, server.workers) == (768, 4)
    assert server.metrics()
    assert seen == [f"model={names[0]}"] * 2


MODELS = [{"id": "text-embedding-other", "owned_by": "vllm"}, {"id": "small", "owned_by": "vllm"}]


def several(method: str, path: str, body: Any) -> tuple[int, Any]:
    pages: dict[str, Any] = {"/v1/models": {"data": MODELS}, "/version": {"version": "0.32.0"}}
    choice = {"token_ids": [5] * 6, "finish_reason": "length", "index": (body or {}).get("model")}
    if path == "/v1/completions" and body["model"] != "small":
        return 404, {"error": "no such model"}
    return 200, pages.get(path, {"choices": [choice]})


def test_one_of_several_models_is_named_or_refused(started):
    url = started(several)
    with raises_option("--served-model-name", "text-embedding-other", "small"):
        Server.connect(url)
    with raises_option("--served-model-name", "text-embedding-other", "small"):
        Server.connect(url, model="smal")
    server = Server.connect(url, model="small")
    assert server.model == "small"
    assert server.generate_ids([1], GREEDY)[0] == [5] * 6


def test_a_model_may_be_named_by_an_alias(started):
    assert Server.connect(started(recorded("plain")), model="smollm2.gguf").model == "smollm2.gguf"
    with raises_option("--served-model-name", "smollm2.gguf"):
        Server.connect(started(recorded("plain")), model="other")


@pytest.fixture
def proxy(monkeypatch) -> Iterator[tuple[str, list[str]]]:
    """Yield a proxy of the environment, and what arrived there."""
    seen: list[str] = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        seen.append(f"{request.requestline} {request.headers}")
        request.wfile.write(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")

    with raw_server(answer) as url:
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, url.replace("//", "//user:SECRET@"))
            monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        yield url, seen


@pytest.mark.parametrize("other", [False, True])
def test_a_server_that_renders_chats_otherwise_teaches_no_conversations(other, started, tmp_path, family_dirs):
    served = with_template(family_dirs["llama"], tmp_path / "served")
    text = TEMPLATE.replace("[assistant]", "[bot]") if other else TEMPLATE
    own = with_template(family_dirs["llama"], tmp_path / "own", text)
    model = checkpoint.load_model(served, torch.float32).eval()
    tokenizer = checkpoint.load_tokenizer(served)
    server = Server.connect(started(SmallVLLM(model, tokenizer, frozenset())))
    with raises_option(str(own)) if other else nullcontext():
        check_server_template(server, own)


def test_a_proxy_gets_only_requests_to_https(proxy, monkeypatch):
    assert proxy_of("https://example.org/v1") == proxy[0].replace("//", "//user:SECRET@")
    for url in (
        "http://example.org",
        "https://127.0.0.1:1",
        "https://[::1]:1",
        "https://localhost",
    ):
        assert proxy_of(url) is None
    monkeypatch.setenv("no_proxy", "example.org")
    assert proxy_of("https://example.org/v1") is None
    assert proxy_of("https://example.com") is not None


def test_a_loopback_server_and_the_key_need_no_proxy(proxy, started, tmp_path):
    (tmp_path / "key").write_text("KEY")
    server = Server.connect(started(recorded("plain")), tmp_path / "key")
    server.generate([[1]], SAMPLED)
    assert proxy[1] == []


def test_an_error_names_the_proxy_but_not_its_password(proxy):
    with raises_option(proxy[0]) as caught:
        HttpClient("https://example.org", "KEY", lambda _: None).json("GET", "/x")
    assert "SECRET" not in str(caught.value)
    assert not [text for text in proxy[1] if "KEY" in text]


@pytest.mark.parametrize(
    "address",
    ["user:SECRET@x:1", "user:SEC://RET@x:1", "http://user:SEC/RET@x:1", "//user:SECRET@x:1"],
)
def test_a_proxy_shows_no_password_however_it_is_written(address, monkeypatch):
    for name in ("all_proxy", "no_proxy", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", address)
    with raises_option("x:1") as caught:
        client = HttpClient("https://example.org", None, lambda _: None, seconds=2.0)
        client.json("GET", "/y", tries=1)
    assert not [part for part in ("user", "SEC", "RET") if part in str(caught.value)]


@pytest.mark.parametrize("address", ["socks5://x:1", "nothing://x"])
def test_a_proxy_that_cannot_be_used_is_said(address, monkeypatch):
    monkeypatch.setenv("https_proxy", address)
    with raises_option(address):
        HttpClient("https://example.org", None, lambda _: None).json("GET", "/x", tries=1)


def test_lm_eval_sends_the_key_to_no_proxy(proxy):
    from requests.utils import should_bypass_proxies

    with _same_proxies("http://127.0.0.1:8"):
        assert should_bypass_proxies("http://127.0.0.1:8/v1", None)
        assert not should_bypass_proxies("https://example.org", None)
    assert "no_proxy" not in os.environ


PROGRAM = """#!{python}
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
words, pages = sys.argv[1:], {pages}
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        status, answer = pages.get(self.path, (404, ""))
        if answer == "die":
            print("error: the engine is dead", flush=True)
            os._exit(3)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())
    do_POST = do_GET
    def log_message(self, *words): pass
HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()
"""
CARD = {"data": [{"id": "m", "owned_by": "vllm"}]}
HEALTHY = {"/health": (200, ""), "/v1/models": (200, CARD), "/version": (200, {"version": "1"})}


def program(folder: Path, pages: dict[str, Any]) -> Path:
    """Write a server program, which answers with these pages."""
    file = folder / "a-server"
    file.write_text(PROGRAM.format(python=sys.executable, pages=pages))
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def test_a_started_server_is_polled_without_a_proxy(proxy, tmp_path):
    with verifying.running([program(tmp_path, HEALTHY)]) as (server, _):
        assert server.model == "m"
    assert proxy[1] == []


def test_a_started_server_is_stopped_by_a_job_that_ignores_interrupts(tmp_path):
    """A shell ignores SIGINT for a job with &, and the server inherits it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with verifying.running([program(tmp_path, HEALTHY)]) as (_, process):
            pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.returncode == -signal.SIGTERM  # not SIGKILL, after STOP_SECONDS


def test_a_server_that_ends_is_not_asked_again(tmp_path):
    dying = HEALTHY | {"/v1/completions": (200, "die")}
    started_at = time.monotonic()
    with raises_option("a-server", "engine is dead"):  # noqa: SIM117
        with verifying.running([program(tmp_path, dying)]) as (server, _):
            server.generate_ids([1], GREEDY)
    assert time.monotonic() - started_at < 12  # six tries alone would wait for 15 s


def test_a_page_with_an_unexpected_status_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(verifying, "UNEXPECTED_POLLS", 2)
    with raises_option("a-server", "404"), verifying.running([program(tmp_path, {})]):
        pass


@pytest.mark.parametrize(
    ("kind", "name"),
    [(LlamaCpp(), "LLAMA_API_KEY"), (LlamaCpp(), "LLAMA_ARG_API_PREFIX"), (VLLM(), "VLLM_API_KEY")],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_started_server_has_no_key_of_the_environment(kind, name, monkeypatch):
    monkeypatch.setenv(name, "x")
    monkeypatch.setenv("OTHER", "x")
    environ = verifying.own_environment(kind)
    assert name not in environ
    assert environ["OTHER"] == "x"


PAGE = RECORDED["metrics"]["after"]
WANTED = spec_decode_counters({}, parse_metrics(PAGE))


@pytest.mark.parametrize(
    "spelled",
    [
        lambda page: page.replace("vllm:", "vllm_"),
        lambda page: page.replace("vllm:", "ray_vllm_"),
        lambda page: page.replace("vllm:", "ray_vllm:"),
        lambda page: page.replace("vllm:", "llamacpp:"),
        lambda page: page.replace("vllm:", ""),
        lambda page: page.replace("_total{", "{"),
        lambda page: page + page.replace("vllm:", "vllm_"),
        lambda page: "".join(f"  {line}\t1795836048\n" for line in page.splitlines() if line[0] != "#"),
        lambda page: page + "# EOF\n",
    ],
)
def test_counters_may_be_spelled_as_the_format_allows(spelled):
    """vllm#33824, Ray's prefix, counters without _total, both spellings at once, times after values, OpenMetrics."""
    assert spec_decode_counters({}, parse_metrics(spelled(PAGE))) == WANTED


def test_samples_with_labels_of_any_text_and_exemplars():
    page = 'a{x="b} c\\" 1",y="z"} 3 # {trace="q"} 0.5\nb_bucket{le="+Inf"} +Inf\n'
    assert list(parse_metrics(page).values()) == [3.0, float("inf")]


def test_a_page_without_counters_is_not_a_server_that_drafted_nothing():
    """vLLM without a draft has no counters of drafts; llama.cpp always has them."""
    assert "spec_decode" in undrafted({"vllm:num_requests_running": 0.0})
    assert "spec_decode" not in undrafted(parse_metrics(LLAMA_CPP["metrics"]["plain"]))
    assert "spec_decode" not in undrafted({})  # SGLang's answers count


def test_accepted_tokens_that_are_not_counted_by_position_are_refused():
    page = {
        "vllm:spec_decode_num_drafts_total": 3.0,
        "vllm:spec_decode_num_draft_tokens_total": 9.0,
    }
    with raises_option("per_pos"):
        spec_decode_counters({}, page | {"vllm:spec_decode_num_accepted_tokens_total": 4.0})


def test_counters_of_another_model_on_the_same_server_are_left_out(started):
    name = 'vllm:spec_decode_num_drafts_total{{engine="0",model_name="{}"}} {}'

    def page(*models: str) -> Answering:
        text = "\n".join([name.format(model, 5) for model in models] + ["up 1"])
        return lambda m, p, b: (200, text) if p == "/metrics" else several(m, p, b)

    both = Server.connect(started(page("other", "small")), model="small").metrics()
    assert list(both) == [name.format("small", "").strip(), "up"]
    # requests to an adapter are counted under the name of its base model (vllm#10504)
    assert len(Server.connect(started(page("base")), model="small").metrics()) == 2


def test_a_server_may_split_text_otherwise_but_not_have_other_words(started, family_dirs):
    """Row 11: llama.cpp lacks the pre-tokenizer of some models, and splits text into smaller tokens."""
    directory = hub.locate("tiny")
    tokenizer = checkpoint.load_tokenizer(directory)

    def splitting(words: Callable[[str], list[int]]) -> Server:
        def answering(method: str, path: str, body: Any) -> tuple[int, Any]:
            if path == "/tokenize":
                return 200, {"tokens": words(body["content"])}
            return RecordedLlamaCpp()(method, path, body)

        return Server.connect(started(answering))

    def by_letters(text: str) -> list[int]:
        return [i for c in text for i in tokenizer(c, add_special_tokens=False)["input_ids"]]

    other = checkpoint.load_tokenizer(family_dirs["llama"])
    assert not check_server_tokenizer(splitting(by_letters), directory).split_alike
    whole = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    assert check_server_tokenizer(splitting(whole), directory).split_alike
    with raises_option("--target"):
        check_server_tokenizer(splitting(lambda text: other(text, add_special_tokens=False)["input_ids"]), directory)
