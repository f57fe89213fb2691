"""Servers say what the model says; what they refuse or cannot do is one clear line.

What vLLM answers was recorded from vLLM 0.32.0 around the embedded target (tests/files/vllm_tiny.json); SGLang's and
llama.cpp's answers follow their source and documentation. Tests marked vllm start a real one: DRAFTLAB_TEST_VLLM
names its binary.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from helpers.builders import assert_rounds
from helpers.errors import raises_option
from helpers.loopback_servers import (
    DROP,
    RECORDED,
    Answering,
    Observed,
    replay,
    running,
    serving_vllm,
)
from safetensors.numpy import load_file

from draftlab.commands import COMMANDS
from draftlab.errors import UserError
from draftlab.exporting import verify as verifying
from draftlab.model import checkpoint, hub
from draftlab.sampling import SamplingParams
from draftlab.servers.client import TRIES, Probe, Server, parse_metrics, spec_decode_counters
from draftlab.servers.llama_cpp import LlamaCpp
from draftlab.servers.sglang import SGLang
from draftlab.servers.vllm import VLLM
from draftlab.target_outputs.targets import PROBE_TEXT, LocalTarget, ServedTarget, verify

PROMPT = [0, 309, 293, 653, 570, 346, 546]
NEVER = lambda _: pytest.fail("waited")  # noqa: E731


@pytest.fixture
def started() -> Iterator[Callable[[Answering], str]]:
    """Starts servers that end with the test."""
    with ExitStack() as stack:
        yield lambda answering: stack.enter_context(running(answering))


@pytest.fixture
def recorded(started) -> Server:
    return Server.connect(started(replay("raw_logprobs")))


@pytest.fixture(scope="session")
def tiny() -> Callable[[list[int]], torch.Tensor]:
    """log-probabilities [T, V] of the embedded target in fp32, by transformers."""
    model = checkpoint.load_model(hub.locate("tiny"), torch.float32).eval()

    @torch.no_grad()
    def log_probs(ids: list[int]) -> torch.Tensor:
        return model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)

    return log_probs


def of(log_p: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """Return the log-probability of each token."""
    return log_p.gather(1, torch.tensor(ids)[:, None]).squeeze(1)


def test_a_server_says_what_it_is_and_how_it_cuts_text(recorded):
    about = (recorded.kind, recorded.model, recorded.version, recorded.max_length)
    assert about == ("vllm", "tiny", "0.32.0", 2048)
    tokenizer = checkpoint.load_tokenizer(hub.locate("tiny"))
    ids = tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"]
    assert recorded.tokenize(PROBE_TEXT) == ids


def test_what_vllm_wrote_is_read_with_its_log_probabilities(recorded, tiny):
    first, second = recorded.generate([PROMPT, PROMPT[:3]], SamplingParams(max_tokens=4, temperature=0.0), k=3)
    assert (first.ids, first.finish_reason, first.prompt_ids) == (
        [372, 309, 293, 653],
        "length",
        PROMPT,
    )
    assert first.top_ids == [[372, 456, 701], [309, 572, 5], [293, 546, 405], [653, 1028, 10]]
    for written in (first, second):
        log_p = tiny(written.prompt_ids + written.ids)[len(written.prompt_ids) - 1 : -1]
        assert log_p.topk(3).indices.tolist() == written.top_ids
        assert_rounds(written.top_logprobs, log_p.topk(3).values)
        assert written.logprobs == [values[0] for values in written.top_logprobs]


def test_a_sampled_token_has_its_log_probability_without_lists(recorded, tiny):
    (written,) = recorded.generate([PROMPT], SamplingParams(max_tokens=4, seed=7, temperature=1.0))
    assert_rounds(written.logprobs, of(tiny(PROMPT + written.ids)[len(PROMPT) - 1 : -1], written.ids))
    assert written.ids[0] == 456  # not the most probable one
    assert written.top_ids == []


def test_what_vllm_thinks_of_a_text_is_what_transformers_does(recorded, tiny):
    texts = (PROMPT, PROMPT[:4])
    for ids, scored in zip(texts, recorded.prompt_logprobs(texts, 3), strict=True):
        log_p = tiny(ids)[:-1]
        assert scored.top_ids == log_p.topk(3).indices.tolist()
        assert_rounds(scored.top_logprobs, log_p.topk(3).values)
        assert_rounds(scored.logprobs, of(log_p, ids[1:]))


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "processed_logits"])
def test_a_probe_finds_out_what_log_probabilities_are(mode, started):
    probe = Server.connect(started(replay(mode))).probe(PROMPT)
    assert (probe.logprobs_mode, probe.greedy) == (mode, True)


def test_a_server_that_samples_at_temperature_0_is_found_out(started):
    def shuffled(method: str, path: str, body: Any) -> tuple[int, Any]:
        status, answer = replay("raw_logprobs")(method, path, body)
        if body and body.get("max_tokens") == 8:
            answer = json.loads(json.dumps(answer))
            answer["choices"][0]["logprobs"]["token_logprobs"][3] -= 2.0
        return status, answer

    assert not Server.connect(started(shuffled)).probe(PROMPT).greedy


def test_logits_are_no_log_probabilities(started):
    with raises_option("--logprobs-mode", "raw_logprobs"):
        Server.connect(started(replay("processed_logits"))).prompt_logprobs([PROMPT], 3)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda s: s.generate([[5000]], SamplingParams(max_tokens=2, temperature=1.0)), "5000"),
        (lambda s: s.prompt_logprobs([PROMPT * 300], 3), "2101"),
    ],
)
def test_a_refusal_comes_with_the_servers_own_words(ask, words, recorded):
    with raises_option(words):
        ask(recorded)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((200, "<html>hello</html>"), "/v1/models"),
        ((200, {"data": []}), "/v1/models"),
        ((503, {"error": {"message": "Loading model"}}), "Loading model"),
    ],
)
def test_what_is_no_such_server_is_said_at_once(answer, words, started):
    with raises_option(words):
        Server.connect(started(lambda *_: answer), wait=NEVER)


def test_the_key_is_sent_and_v1_may_be_named(started, tmp_path):
    key = tmp_path / "key"
    key.write_text("secret\n")

    def locked(method: str, path: str, body: Any) -> tuple[int, Any]:
        ok = body == {"authorization": "Bearer secret"} and path in ("/v1/models", "/version")
        return (200, {"data": [{"id": "a", "owned_by": "vllm"}]}) if ok else (401, {"error": "Unauthorized"})

    url = started(locked)
    assert Server.connect(url + "/v1/", api_key_file=key).model == "a"
    with raises_option("Unauthorized"):
        Server.connect(url)


@pytest.mark.parametrize("trouble", [503, 429, DROP])
def test_a_busy_server_or_a_dropped_connection_is_asked_again_and_then_given_up(trouble, started):
    waited, troubles = [], [trouble] * 2

    def flaky(method: str, path: str, body: Any) -> tuple[int, Any]:
        if method == "POST" and troubles:
            return troubles.pop(), {"error": {"message": "busy"}}
        return replay("raw_logprobs")(method, path, body)

    server = Server.connect(started(flaky), wait=waited.append)
    assert len(server.prompt_logprobs([PROMPT], 3)) == 1
    assert waited == [0.5, 1.0]
    troubles += [trouble] * TRIES
    with pytest.raises(UserError):
        server.prompt_logprobs([PROMPT], 3)
    assert len(waited) == 2 + TRIES - 1


def test_a_fault_of_the_server_is_not_repeated(started):
    observed = Observed()
    server = Server.connect(started(observed.of(replay("raw_logprobs"))), wait=NEVER)
    observed.paths.clear()
    with raises_option("500"):
        server.prompt_logprobs([[1, 2, 3]], 3)
    assert len(observed.paths) == 1


def test_several_requests_run_at_once_but_no_more_than_asked(started):
    observed = Observed()
    url = started(observed.of(replay("raw_logprobs"), seconds=0.05))
    rows = [PROMPT, PROMPT[:4]] * 6
    found = Server.connect(url, workers=3).prompt_logprobs(rows, 3)
    assert [len(scored.logprobs) for scored in found] == [len(ids) - 1 for ids in rows]  # in order
    assert observed.most == 3


def test_a_server_that_speaks_in_text_only_is_said_to(started):
    def plain(method: str, path: str, body: Any) -> tuple[int, Any]:
        if method == "GET":
            return 200, {"data": [{"id": "gpt", "owned_by": "somebody"}]}
        choice = {
            "text": " a",
            "logprobs": {"tokens": [" a"], "token_logprobs": [-1.0]},
            "finish_reason": "length",
        }
        return 200, {"choices": [choice]}

    server = Server.connect(started(plain))
    assert (server.kind, server.max_length) == ("openai", None)
    with raises_option("/v1"):
        server.generate([PROMPT], SamplingParams(max_tokens=1, temperature=1.0))
    with raises_option("/v1"):
        server.prompt_logprobs([PROMPT], 2)


def sglang(method: str, path: str, body: Any) -> tuple[int, Any]:
    """SGLang 0.5.23's forms, by its source: io_struct.py, tokenizer_manager.py, http_server.py, api_types.py."""
    pages = {
        "/v1/models": {"data": [{"id": "m", "owned_by": "sglang", "max_model_len": 64}]},
        "/server_info": {"version": "0.5.23"},
        "/tokenize": {"tokens": [5, 6], "count": 2, "max_model_len": 64},
    }
    if path in pages:
        return 200, pages[path]
    entries = [[-0.5, 7, None], [-1.5, 8, None]]
    meta: dict[str, Any] = {"finish_reason": {"type": "length", "length": 2}}
    if body["sampling_params"]["max_new_tokens"] == 0:
        assert body["logprob_start_len"] == 0
        came = [[None, 4, None], [-2.5, 5, None], [-0.5, 7, None]]
        tops = [None, entries, [*reversed(entries)]]
        found = {"input_token_logprobs": came, "input_top_logprobs": tops}
        return 200, {"text": "", "output_ids": [], "meta_info": meta | found}
    meta["output_token_logprobs"] = entries
    if body["top_logprobs_num"]:
        meta["output_top_logprobs"] = [entries, entries]
    return 200, {"text": "xy", "output_ids": [7, 8], "meta_info": meta}


def test_sglangs_answers_are_read(started):
    server = Server.connect(started(sglang))
    assert (server.kind, server.version, server.max_length) == ("sglang", "0.5.23", 64)
    sampling = SamplingParams(max_tokens=2, temperature=1.0)
    (written,) = server.generate([[1, 2, 3]], sampling, k=2)
    assert (written.ids, written.logprobs) == ([7, 8], [-0.5, -1.5])
    assert written.finish_reason == "length"
    assert (written.top_ids, written.top_logprobs[0]) == ([[7, 8], [7, 8]], [-0.5, -1.5])
    assert server.generate([[1, 2, 3]], sampling)[0].top_ids == []
    (scored,) = server.prompt_logprobs([[4, 5, 7]], 2)
    assert (scored.logprobs, scored.top_ids) == ([-2.5, -0.5], [[7, 8], [7, 8]])
    assert server.tokenize("x") == [5, 6]


@pytest.mark.parametrize("adapter", [VLLM(), SGLang(), LlamaCpp()], ids=lambda each: each.name)
def test_every_sampling_setting_is_sent(adapter):
    sampling = SamplingParams(max_tokens=3, temperature=0.7, top_k=11, top_p=0.9, min_p=0.05, seed=13, ignore_eos=True)
    body = adapter.completion_request([1], sampling, None)
    sent = list((body | body.get("sampling_params", {})).values())
    for value in (3, 0.7, 11, 0.9, 0.05, 13, True):
        assert value in sent
    if adapter.name == "sglang":
        of_all = adapter.completion_request([1], SamplingParams(), 4)
        assert of_all["sampling_params"]["top_k"] == -1
    if adapter.name == "llama.cpp":
        assert "min_p" in body["samplers"]


@pytest.mark.parametrize("adapter", [VLLM(), SGLang()], ids=lambda each: each.name)
def test_ends_of_text_are_sent_where_they_can_be(adapter):
    sampling = SamplingParams(stop_token_ids=(4, 5))
    body = adapter.completion_request([1], sampling, None)
    assert [4, 5] in (body | body.get("sampling_params", {})).values()
    with raises_option("stop_token_ids"):
        LlamaCpp().completion_request([1], sampling, None)


def llama_cpp(method: str, path: str, body: Any) -> tuple[int, Any]:
    """llama-server's forms, by tools/server/README.md."""
    pages = {
        "/v1/models": {"data": [{"id": "m.gguf", "owned_by": "llamacpp", "meta": {"n_vocab": 9}}]},
        "/props": {"default_generation_settings": {"n_ctx": 64}, "build_info": "b6700-abc"},
        "/tokenize": {"tokens": [5, 6] if body and "content" in body else None},
    }
    if page := pages.get(path.partition("?")[0]):
        return 200, page
    assert body["prompt"] == [1, 2]
    assert body["return_tokens"]
    top = [
        {"id": 7, "token": "x", "bytes": [120], "logprob": -0.5},
        {"id": 8, "token": "y", "logprob": -1.5},
    ]
    tokens = [{"id": i, "token": "x", "logprob": p, "top_logprobs": top} for i, p in ((7, -0.5), (1, -4.0))]
    answer = {"content": "x", "tokens": [7, 1], "completion_probabilities": tokens}
    return 200, answer | {"stop": True, "stop_type": "eos"}


def test_llama_cpps_answers_are_read_and_it_scores_no_text(started):
    server = Server.connect(started(llama_cpp))
    assert (server.kind, server.version, server.max_length) == ("llamacpp", "b6700-abc", 64)
    (written,) = server.generate([[1, 2]], SamplingParams(max_tokens=2, temperature=1.0), k=2)
    assert (written.ids, written.logprobs, written.finish_reason) == ([7, 1], [-0.5, -4.0], "stop")
    assert written.top_ids == [[7, 8], [7, 8]]
    assert server.tokenize("x") == [5, 6]
    with raises_option("llamacpp"):
        server.prompt_logprobs([[1, 2]], 2)


def test_metrics_are_series_with_their_labels():
    text = '# HELP a b\n# TYPE a counter\na_total{engine="0",x="y z"} 3.0\nb 1e-3\n\nc NaN\n'
    found = parse_metrics(text)
    assert found['a_total{engine="0",x="y z"}'] == 3.0
    assert found["b"] == 0.001
    assert math.isnan(found["c"])


def test_acceptance_is_what_the_counters_grew_by():
    """Counters of a real run: 24 steps drafted 72 tokens, of which 17, 16 and 9 stood at each place."""
    pages = RECORDED["metrics"]
    before, after = (parse_metrics(pages[name]) for name in ("before", "after"))
    grown = spec_decode_counters(before, after)
    found = grown.acceptance
    assert (found.num_spec_steps, found.num_draft_tokens) == (24, 72)
    assert found.mean_acceptance_length == pytest.approx(1 + 42 / 24)
    assert found.per_position_acceptance == pytest.approx([17 / 24, 16 / 24, 9 / 24])
    assert found.acceptance_histogram == [7, 1, 7, 9]
    assert spec_decode_counters({}, after) == grown  # a server that was asked nothing before
    assert spec_decode_counters(after, after) is None
    of_llama_cpp = parse_metrics(pages["after"].replace("vllm:", "llamacpp:"))
    assert spec_decode_counters({}, of_llama_cpp) == grown


@pytest.mark.parametrize("accepted", [1, 5])
def test_a_llama_cpp_that_accepted_as_many_tokens_as_it_wrote_is_refused(started, accepted):
    pages = iter([0, accepted])

    def counting(method: str, path: str, body: Any) -> tuple[int, Any]:
        if path.partition("?")[0] != "/metrics":
            return llama_cpp(method, path, body)
        count, name = next(pages), "llamacpp:spec_decode_num_{}_total"
        lines = [f"{name.format(each)} {count}" for each in ("drafts", "draft_tokens")]
        position = name.format("accepted_tokens_per_pos") + '{position="0"}'
        return 200, "\n".join([*lines, f"{position} {count}"])

    server = Server.connect(started(counting))
    with raises_option(f"{accepted} "):
        verifying.ask(server, [[1, 2]], tokens=2, temperature=0.0, vocab=50_000, k=1)


@pytest.fixture(scope="session")
def vllm(fp32) -> Iterator[Server]:
    with serving_vllm(fp32) as server:
        yield server


@pytest.mark.vllm
def test_a_real_vllm_writes_greedily_what_transformers_finds_most_probable(vllm, tiny):
    assert vllm.probe(PROMPT) == Probe(logprobs_mode="raw_logprobs", greedy=True)
    (written,) = vllm.generate([PROMPT], SamplingParams(max_tokens=32, temperature=0.0), k=4)
    log_p = tiny(PROMPT + written.ids)[len(PROMPT) - 1 : -1]
    assert log_p.argmax(-1).tolist() == written.ids
    assert_rounds(written.top_logprobs, log_p.topk(4).values)


@pytest.mark.vllm
@pytest.mark.parametrize("text", ["data", "target"])
def test_outputs_of_a_real_vllm_are_those_of_the_local_model(text, vllm, fp32, tmp_path):
    sizes = {"num_sequences": 16, "seq_len": 64, "top_logprobs": 32, "text": text, "data": "stdlib"}
    sizes |= {"prompt_tokens": 16} if text == "target" else {}
    build = COMMANDS["outputs build"]
    build(target=str(fp32), server=vllm.http.url, out=tmp_path / "served", **sizes)
    found = verify(tmp_path / "served", LocalTarget(fp32, torch.device("cpu")), 0)
    assert (found.sequences, found.same_top) == (16, 1.0)
    assert found.worst < 0.02  # fp16
    if text == "data":
        build(target=str(fp32), out=tmp_path / "local", **sizes)
        again = verify(tmp_path / "local", ServedTarget.connected(vllm, fp32, None, 32), 0)
        assert again.worst < 0.02
        ours, theirs = (load_file(tmp_path / n / "shard-00000.safetensors") for n in ("served", "local"))
        assert (ours["ids"] == theirs["ids"]).all()
        rest = [np.exp(shard["rest_logprob"]) for shard in (ours, theirs)]
        assert_rounds(*rest)
