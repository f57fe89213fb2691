"""A score through servers holds what they did; servers that cannot give a ratio are refused in one line."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.errors import raises_option
from helpers.loopback_servers import Answering, Observed, SmallVLLM, running, serving_vllm
from helpers.small_files import with_template, write_rows, write_workspace
from helpers.typed import call
from typer.testing import Result

from draftlab.commands import COMMANDS
from draftlab.data import heldout_prompts
from draftlab.engine.generate import ModelDrafter, speculative_decode
from draftlab.model import checkpoint, llama
from draftlab.results.decoding import Counters
from draftlab.results.score import read_score
from draftlab.runs import provenance, workspace
from draftlab.sampling import SamplingParams
from draftlab.servers.answers import check_alone
from draftlab.servers.sglang import SGLang

K, NEW = 3, 9  # the first token comes with the prefill; the others are two steps of K + 1


@pytest.fixture
def started() -> Iterator[Callable[[Answering], str]]:
    with ExitStack() as stack:
        yield lambda answering: stack.enter_context(running(answering))


@pytest.fixture
def space(tmp_path, monkeypatch, family_dirs) -> Path:
    """Return a workspace around the small llama, and prompts of two kinds."""
    monkeypatch.chdir(tmp_path)
    write_workspace(family_dirs["llama"])
    rows = [
        {"prompt": "def parse(line):", "category": "code"},
        {"turns": ["return 1"], "category": "chat"},
    ]
    write_rows(tmp_path / "prompts.jsonl", rows)
    return tmp_path


def small(**options: Any) -> SmallVLLM:
    """Return a server of the workspace's target."""
    directory = Path(workspace.load().target)
    model = checkpoint.load_model(directory, torch.float32).eval()
    return SmallVLLM(model, checkpoint.load_tokenizer(directory), frozenset(), k=K, **options)


ASKED = f"score --prompt-file prompts.jsonl --max-new-tokens {NEW} --repeats 2"


def score(plain: str, other: str, *arguments: str, code: int = 0) -> Result:
    return apart("--server", plain, "--speculative-server", other, *arguments, code=code)


def apart(*arguments: str, code: int = 0) -> Result:
    """Score one server after the other; the first call's answers are under runs/score-served-plain."""
    return call(ASKED, *arguments, code=code)


def test_the_password_of_an_address_stands_in_nothing_that_is_written_or_printed(space, started):
    target = small()
    urls = [started(answering).replace("//", "//user:SECRET@") for answering in (target, small(draft=target.model))]
    away = "http://user:SECRET@127.0.0.1:9"
    results = [score(*urls), call("report"), score(urls[0], away, code=1)]
    assert (space / "runs/score-served/score.json").is_file()
    written = [file.read_bytes() for file in space.rglob("*") if file.is_file()]
    printed = [text.encode() for result in results for text in (result.stdout, result.stderr)]
    assert not [text for text in (*written, *printed) if b"SECRET" in text]


def test_a_draft_that_is_the_target_is_accepted_whole_by_the_counters(space, started):
    target = small()
    drafting = small(draft=target.model)
    asked = ("--draft", "its own", "--json", "--min-speedup", "99")
    result = score(started(target), started(drafting), *asked, code=3)
    assert "own" in result.stderr
    (row,) = json.loads(result.stdout)["scores"]
    wanted = {"draft": "its own", "num_speculative_tokens": K, "draft_acceptance_rate": 1.0}
    wanted |= {
        "num_spec_steps": 2 * 2 * 2,
        "mean_acceptance_length": K + 1,
    }  # prompts, repeats, steps
    wanted |= {"identical": True, "draft_share": None, "n_truncated_steps": None}
    assert {name: row[name] for name in wanted} == wanted
    found = read_score(space / "runs/score-served")
    assert [p.category for p in found.prompts] == ["code", "chat"]
    runs = (found.plain, found.speculative[K])
    assert all(g.request == (NEW, g.seconds) for of in runs for g in of)
    times = [  # of two repeats the faster one counts
        sum(min(g.request[1] for g in of if g.prompt == prompt) for prompt in (0, 1)) for of in runs
    ]
    assert row["speedup"] == pytest.approx(times[0] / times[1])
    assert found.generations(K) == []
    assert provenance.read_record(space / "runs/score-served").command == "score"


STORED = "runs/score-served-plain"


def test_servers_one_after_the_other_give_what_both_at_once_give(space, started):
    target = small()
    with running(target) as plain:
        assert "answers" in apart("--server", plain).stdout
    drafting = started(small(draft=target.model))
    second = ("--server", STORED, "--speculative-server", drafting)
    (row,) = json.loads(apart(*second, "--draft", "its own", "--json").stdout)["scores"]
    assert (row["draft"], row["mean_acceptance_length"]) == ("its own", K + 1)
    assert (row["identical"], row["num_spec_steps"]) == (True, 2 * 2 * 2)
    result = read_score(space / "runs/score-served")
    assert result.conditions.in_phases
    assert (len(result.plain), len(result.speculative[K])) == (4, 4)
    apart(*second, "--out", "again")  # for another draft


@pytest.mark.parametrize(
    ("place", "refusing", "phases"),
    [(0, "plain", 1), (2, "drafting", 1), (2, "plain", 2), (0, "drafting", 2)],
)
def test_a_prompt_that_a_server_refuses_is_a_bad_row(place, refusing, phases, space, started):
    """Its answers of both servers are left out, and the rest is the score of a file without it."""
    target = small()
    rows = (space / "prompts.jsonl").read_text().splitlines()
    rows.insert(place, json.dumps({"prompt": "class Reader: of lines", "category": "code"}))
    long = target.tokenizer("class Reader: of lines")["input_ids"]
    servers = {"plain": target, "drafting": small(draft=target.model)}

    def answering(name: str) -> Answering:
        def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
            if name == refusing and (body or {}).get("prompt") == long:
                return 400, {"error": "the prompt is too long"}
            return servers[name](method, path, body)

        return answer

    def scored(plain: str, drafting: str, out: str) -> tuple[Any, str]:
        if phases == 1:
            said = apart("--server", plain, "--speculative-server", drafting, "--out", out).stderr
        else:
            said = apart("--server", plain, "--out", f"{out}-plain").stderr
            second = ("--server", f"{out}-plain", "--speculative-server", drafting)
            said += apart(*second, "--out", out).stderr
        return read_score(space / out), said

    expected, _ = scored(started(target), started(small(draft=target.model)), "clean")
    (space / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    found, said = scored(started(answering("plain")), started(answering("drafting")), "found")
    assert f"prompt {place + 1}" in " ".join(said.split())
    assert [p.category for p in found.prompts] == [p.category for p in expected.prompts]
    for of, wanted in (
        (found.plain, expected.plain),
        (found.speculative[K], expected.speculative[K]),
    ):
        assert sorted((g.prompt, g.tokens) for g in of) == sorted((g.prompt, g.tokens) for g in wanted)
    assert found.conditions.prompts == 2
    assert found.equal_texts == 1
    if refusing == "drafting" or phases == 2:  # or else the counters may have its answers, too
        assert found.counters == expected.counters


def test_stored_answers_to_other_requests_are_refused(space, started):
    target = small()
    plain, drafting = started(target), started(small(draft=target.model))
    second = ("--server", STORED, "--speculative-server")
    assert "--server" in apart(*second, drafting, code=1).stderr  # no answers are there
    apart("--server", plain)
    assert "--server: " in apart(*second, drafting, "--temperature", "0.5", code=1).stderr
    assert "--server" in apart("--server", drafting, "--out", "other", code=1).stderr
    assert "--draft: " in apart("--server", plain, "--draft", "d", code=1).stderr
    assert "--server" in apart("--speculative-server", drafting, code=1).stderr
    assert not (space / "runs/score-served").exists()


def test_two_runs_share_the_answers_to_earlier_turns(space, started, family_dirs):
    write_rows(space / "prompts.jsonl", [{"turns": ["def parse(line):", "return 1"]}])
    write_workspace(with_template(family_dirs["llama"], space / "chat"))
    target = small()
    with running(target) as plain:
        apart("--server", plain)
    apart("--server", STORED, "--speculative-server", started(small(draft=target.model)))
    assert len(read_score(space / "runs/score-served").prompts) == 2


def test_servers_that_give_no_ratio_are_refused(space, started):
    target = small()
    plain, drafting = started(target), started(small(draft=target.model))
    assert f"--speculative-server {plain} " in score(plain, plain, code=1).stderr
    assert f"--server {drafting} drafts" in score(drafting, drafting, code=1).stderr
    assert not list(space.glob("runs/*"))


def test_a_server_of_another_vocabulary_is_refused(space, started):
    target = small()

    def other(method: str, path: str, body: Any) -> tuple[int, Any]:
        return (200, {"tokens": [1, 2, 3]}) if path == "/tokenize" else target(method, path, body)

    assert "tokenizer" in score(started(target), started(other), code=1).stderr


@pytest.mark.parametrize("prompt", [{"prompt": "return 1"}, {"turns": ["return 1", "and 2"]}])
def test_a_server_that_writes_ids_beyond_the_vocabulary_is_refused(space, started, prompt):
    target = small()

    def other(method: str, path: str, body: Any) -> tuple[int, Any]:
        status, answer = target(method, path, body)
        if path == "/v1/completions":
            answer["choices"][0]["token_ids"][0] = 307
        return status, answer

    write_rows(space / "prompts.jsonl", [prompt])
    assert "307" in apart("--server", started(other), code=1).stderr
    assert not list(space.glob("runs/*"))


@pytest.mark.parametrize(
    ("steps", "cuts", "fine"),
    [
        (10, False, True),
        (13, False, True),
        (9, False, False),
        (40, False, False),
        (8, True, True),
        (7, True, False),
        (40, True, False),
    ],
)
def test_counters_that_others_moved_are_refused(steps, cuts, fine):
    """Two answers of 20 tokens: 2 with the prefills, 28 accepted, and one of each step; an end cuts at most K + 1.

    cuts: As llama.cpp, which drafts nothing for the last token of an answer (get_n_draft_max in server-context.cpp).
    """
    adapter = SimpleNamespace(cuts_last_step=cuts)
    server: Any = SimpleNamespace(http=SimpleNamespace(url="http://here"), adapter=adapter)
    counters = Counters(num_drafts=steps, num_draft_tokens=4.0 * steps, num_accepted_tokens_per_pos=[7.0] * 4)
    with nullcontext() if fine else raises_option("http://here", "40"):
        check_alone(server, counters, [20, 20])


def test_sglangs_counters_are_in_its_answers():
    """The source of 0.5.23 gives three steps of 4 drafted tokens accepted 0, 2 and 2."""
    meta = {"spec_verify_ct": 3, "spec_num_proposed_drafts": 12}
    meta |= {"spec_correct_drafts_histogram": [1, 0, 2]}
    found = SGLang().counters({"meta_info": meta})
    assert (found.num_drafts, found.num_accepted_tokens_per_pos) == (3, [2.0, 2.0])
    assert (found.k, found.acceptance.mean_acceptance_length) == (4, pytest.approx(1 + 4 / 3))
    assert found.acceptance.acceptance_histogram == [1, 0, 2, 0, 0]
    assert SGLang().counters({"meta_info": {}}) is None


@pytest.mark.vllm
def test_a_real_vllm_accepts_what_the_engine_does(tmp_path, monkeypatch, fp32):
    """The embedded target with its own first layers as the draft, both in fp32."""
    draft = tmp_path / "draft"
    monkeypatch.chdir(tmp_path)
    few = "--layers 8 --width 256 --calibration-tokens 4096 --data stdlib"
    call(f"prune {few} --source {fp32} --out {draft}")
    write_workspace(fp32)
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": K}
    with (
        serving_vllm(fp32) as plain,
        serving_vllm(fp32, "--speculative-config", json.dumps(speculation)) as other,
    ):
        urls = f"--server {plain.http.url} --speculative-server {other.http.url} --draft {draft}"
        how = "--num-prompts 8 --prompt-tokens 32 --max-new-tokens 48 --repeats 1 --json"
        result = call(f"score {urls} {how}")
    (row,) = json.loads(result.stdout)["scores"]
    target, drafter = (
        llama.load(fp32, torch.float32),
        ModelDrafter(llama.load(draft, torch.float32)),
    )
    texts = heldout_prompts("stdlib", checkpoint.load_tokenizer(fp32), count=8, length=32, seed=0)
    sampling = SamplingParams(max_tokens=48, stop_token_ids=(1,))
    runs = [list(speculative_decode(target, drafter, [text], K, sampling))[1:] for text in texts]
    length = 1 + sum(s.accepted for run in runs for s in run) / sum(map(len, runs))
    assert row["identical"]
    # ends are drafted and counted otherwise
    assert row["mean_acceptance_length"] == pytest.approx(length, abs=0.1)


@pytest.mark.vllm
def test_a_real_vllm_accepts_what_is_accepted_here_of_a_dflash_head(tmp_path, fp32):
    """Sampled, since a head of a few steps is seldom right greedily."""
    head = str(tmp_path / "head")
    few = {"steps": 20, "batch_size": 8, "seq_len": 64, "training_dtype": "float32"}
    COMMANDS["distill"](student="dflash", target=str(fp32), data="stdlib", **few, out=head)
    speculation = {
        "method": "dflash",
        "model": head,
        "num_speculative_tokens": K,
        "draft_sample_method": "probabilistic",
    }
    with serving_vllm(fp32, "--speculative-config", json.dumps(speculation)) as server:
        where = {
            "target": str(fp32),
            "data": "stdlib",
            "servers": "vllm",
            "server": server.http.url,
        }
        found = COMMANDS["check"](draft=head, temperature=1.0, **where).result.findings
    _, served = (each for each in found if each.about == "acceptance")  # here alone, and there
    print(served.text)
    assert served.level == "ok"


def test_stored_answers_that_lack_a_run_are_refused(space, started):
    target = small()
    apart("--server", started(target))
    file = space / STORED / "plain.json"
    stored = json.loads(file.read_text())
    file.write_text(json.dumps(stored | {"runs": stored["runs"][1:]}))
    asked, drafting = Observed(), small(draft=target.model)
    second = ("--server", STORED, "--speculative-server", started(asked.of(drafting)))
    assert "--server" in apart(*second, code=1).stderr
    assert "/v1/completions" not in asked.paths
    assert not (space / "runs/score-served").exists()
