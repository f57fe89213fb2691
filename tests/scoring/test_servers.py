"""A score through servers holds what they did; servers that cannot give a ratio are refused in one line."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import build
from errors import raises_option
from loopback_servers import Answering, Observed, SmallVLLM, running
from test_client import serving_vllm
from typer.testing import CliRunner

from draftlab import provenance, workspace
from draftlab.cli import app
from draftlab.data import heldout_prompts
from draftlab.engine.generate import ModelDrafter, speculative_decode
from draftlab.model import checkpoint, llama
from draftlab.results.decoding import Counters, ServedGeneration
from draftlab.results.score import read_score
from draftlab.sampling import SamplingParams
from draftlab.scoring.servers import check_alone
from draftlab.servers.sglang import SGLang

K, NEW = 3, 9  # the first token comes with the prefill; the others are two steps of K + 1


@pytest.fixture
def started() -> Iterator[Callable[[Answering], str]]:
    with ExitStack() as stack:
        yield lambda answering: stack.enter_context(running(answering))


@pytest.fixture
def space(tmp_path, monkeypatch, family_dirs) -> Path:
    """A workspace around the small llama, and prompts of two kinds."""
    monkeypatch.chdir(tmp_path)
    target = str(family_dirs["llama"])
    workspace.write(workspace.Workspace(target=target, source=target, data="stdlib"))
    rows = [
        {"prompt": "def parse(line):", "category": "code"},
        {"turns": ["return 1"], "category": "chat"},
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def small(space: Path, **options: Any) -> SmallVLLM:
    directory = Path(workspace.load().target)
    tokenizer = checkpoint.load_tokenizer(directory)
    return SmallVLLM(
        checkpoint.load_model(directory, torch.float32).eval(),
        tokenizer,
        frozenset(),
        k=K,
        **options,
    )


def score(plain: str, other: str, *arguments: str, code: int = 0):
    urls = ("--server", plain, "--speculative-server", other)
    how = ("--prompt-file", "prompts.jsonl", "--max-new-tokens", NEW, "--repeats", 2)
    result = CliRunner().invoke(app, ["score", *map(str, (*urls, *how, *arguments))])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_the_password_of_an_address_stands_in_nothing_that_is_written_or_printed(space, started):
    target = small(space)
    urls = [
        started(answering).replace("//", "//user:SECRET@")
        for answering in (target, small(space, draft=target.model))
    ]
    results = [
        score(*urls),
        CliRunner().invoke(app, ["report"]),
        score(urls[0], "http://user:SECRET@127.0.0.1:9", code=1),
    ]
    assert (space / "runs/score-served/score.json").is_file()
    written = [file.read_bytes() for file in space.rglob("*") if file.is_file()]
    assert not [text for text in written if b"SECRET" in text]
    assert not [
        text for result in results for text in (result.stdout, result.stderr) if "SECRET" in text
    ]


def test_a_draft_that_is_the_target_is_accepted_whole_by_the_counters(space, started):
    target = small(space)
    drafting = small(space, draft=target.model)
    result = score(
        started(target),
        started(drafting),
        "--draft",
        "its own",
        "--json",
        "--min-speedup",
        "99",
        code=3,
    )
    assert "own" in result.stderr
    (row,) = json.loads(result.stdout)["scores"]
    assert (row["draft"], row["num_speculative_tokens"], row["draft_acceptance_rate"]) == (
        "its own",
        K,
        1.0,
    )
    assert (row["num_spec_steps"], row["mean_acceptance_length"]) == (
        2 * 2 * 2,
        K + 1,
    )  # prompts, repeats, steps
    assert (row["identical"], row["draft_share"], row["n_truncated_steps"]) == (True, None, None)
    found = read_score(space / "runs/score-served")
    assert [p.category for p in found.prompts] == ["code", "chat"]
    assert all(
        g.request == (NEW, g.seconds)
        for g in (*found.plain, *found.speculative[K])
        if isinstance(g, ServedGeneration)
    )
    runs = (found.plain, found.speculative[K])  # of two repeats the faster one counts
    times = [
        sum(min(g.request[1] for g in of if g.prompt == prompt) for prompt in (0, 1)) for of in runs
    ]
    assert row["speedup"] == pytest.approx(times[0] / times[1])
    assert found.generations(K) == []
    record = provenance.read_record(space / "runs/score-served")
    assert record is not None
    assert record.command == "score"


def apart(space: Path, *arguments: str, code: int = 0):
    """Score one server after the other; the first call's answers are under runs/score-served-plain."""
    how = ("--prompt-file", "prompts.jsonl", "--max-new-tokens", str(NEW), "--repeats", "2")
    result = CliRunner().invoke(app, ["score", *how, *arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


STORED = "runs/score-served-plain"


def test_servers_one_after_the_other_give_what_both_at_once_give(space, started):
    target = small(space)
    with running(target) as plain:
        assert "answers" in apart(space, "--server", plain).stdout
    drafting = started(small(space, draft=target.model))
    second = ("--server", STORED, "--speculative-server", drafting)
    (row,) = json.loads(apart(space, *second, "--draft", "its own", "--json").stdout)["scores"]
    assert (row["draft"], row["num_speculative_tokens"], row["mean_acceptance_length"]) == (
        "its own",
        K,
        K + 1,
    )
    assert (row["identical"], row["num_spec_steps"]) == (True, 2 * 2 * 2)
    result = read_score(space / "runs/score-served")
    assert result.conditions.in_phases
    assert (len(result.plain), len(result.speculative[K])) == (4, 4)
    # for another draft
    assert apart(space, *second, "--out", "again").exit_code == 0


def test_stored_answers_to_other_requests_are_refused(space, started):
    target = small(space)
    plain, drafting = started(target), started(small(space, draft=target.model))
    second = ("--server", STORED, "--speculative-server")
    assert "--server" in apart(space, *second, drafting, code=1).stderr  # no answers are there
    apart(space, "--server", plain)
    assert "--server: " in apart(space, *second, drafting, "--temperature", "0.5", code=1).stderr
    assert "--server" in apart(space, "--server", drafting, "--out", "other", code=1).stderr
    assert "--draft: " in apart(space, "--server", plain, "--draft", "d", code=1).stderr
    assert "--server" in apart(space, "--speculative-server", drafting, code=2).stderr
    assert not (space / "runs/score-served").exists()


def test_two_runs_share_the_answers_to_earlier_turns(space, started, family_dirs):
    chat = space / "chat"
    shutil.copytree(family_dirs["llama"], chat)
    (chat / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    )
    (space / "prompts.jsonl").write_text(json.dumps({"turns": ["def parse(line):", "return 1"]}))
    workspace.write(workspace.Workspace(target=str(chat), source=str(chat), data="stdlib"))
    target = small(space)
    with running(target) as plain:
        apart(space, "--server", plain)
    apart(
        space, "--server", STORED, "--speculative-server", started(small(space, draft=target.model))
    )
    assert len(read_score(space / "runs/score-served").prompts) == 2


def test_a_draft_that_is_always_wrong_gives_one_token_a_step(space, started):
    other = build("llama", 9)
    # id 0, which the target never writes here
    other.get_output_embeddings().get_parameter("weight").data.zero_()
    drafting = small(space, draft=other)
    (row,) = json.loads(score(started(small(space)), started(drafting), "--json").stdout)["scores"]
    assert (row["mean_acceptance_length"], row["num_spec_steps"]) == (1.0, 2 * 2 * (NEW - 1))


def test_servers_that_give_no_ratio_are_refused(space, started):
    target = small(space)
    plain, drafting = started(target), started(small(space, draft=target.model))
    assert f"--speculative-server {plain} drafts nothing" in score(plain, plain, code=1).stderr
    assert f"--server {drafting} drafts" in score(drafting, drafting, code=1).stderr
    assert not list(space.glob("runs/*"))


def test_a_server_of_another_vocabulary_is_refused(space, started):
    target = small(space)

    def other(method: str, path: str, body: Any) -> tuple[int, Any]:
        return (200, {"tokens": [1, 2, 3]}) if path == "/tokenize" else target(method, path, body)

    assert (
        "the server's tokenizer is not that of"
        in score(started(target), started(other), code=1).stderr
    )


@pytest.mark.parametrize(("steps", "fine"), [(10, True), (13, True), (9, False), (40, False)])
def test_counters_that_others_moved_are_refused(steps, fine):
    """Two answers of 20 tokens: 2 with the prefills, 28 accepted, and one of each step; an end cuts at most K + 1."""
    runs = [ServedGeneration(prompt=i, tokens=20, seconds=1.0) for i in range(2)]
    counters = Counters(
        num_drafts=steps, num_draft_tokens=4.0 * steps, num_accepted_tokens_per_pos=[7.0] * 4
    )
    if fine:
        check_alone(runs, counters, "http://here")
        return
    with raises_option("http://here", "40"):
        check_alone(runs, counters, "http://here")


def test_sglangs_counters_are_in_its_answers():
    """By the source of 0.5.23: three steps of 4 drafted tokens accepted 0, 2 and 2."""
    meta = {
        "spec_verify_ct": 3,
        "spec_num_proposed_drafts": 12,
        "spec_correct_drafts_histogram": [1, 0, 2],
    }
    found = SGLang().counters({"meta_info": meta})
    assert found == Counters(
        num_drafts=3, num_draft_tokens=12, num_accepted_tokens_per_pos=[2.0, 2.0]
    )
    assert (found.k, found.acceptance.mean_acceptance_length) == (4, pytest.approx(1 + 4 / 3))
    assert found.acceptance.acceptance_histogram == [1, 0, 2, 0, 0]
    assert SGLang().counters({"meta_info": {}}) is None


@pytest.mark.vllm
def test_a_real_vllm_accepts_what_the_engine_does(tmp_path, monkeypatch, fp32):
    """The embedded target with its own first layers as the draft, both in fp32."""
    draft = tmp_path / "draft"
    monkeypatch.chdir(tmp_path)
    prune = "prune --layers 8 --width 256 --calibration-tokens 4096 --data stdlib"
    made = CliRunner().invoke(app, [*prune.split(), "--source", str(fp32), "--out", str(draft)])
    assert made.exit_code == 0, made.output
    workspace.write(workspace.Workspace(target=str(fp32), source=str(fp32), data="stdlib"))
    speculation = json.dumps(
        {"method": "draft_model", "model": str(draft), "num_speculative_tokens": K}
    )
    with (
        serving_vllm(fp32) as plain,
        serving_vllm(fp32, "--speculative-config", speculation) as other,
    ):
        urls = (
            "--server",
            plain.http.url,
            "--speculative-server",
            other.http.url,
            "--draft",
            draft,
        )
        how = "--num-prompts 8 --prompt-tokens 32 --max-new-tokens 48 --repeats 1 --json"
        result = CliRunner().invoke(app, ["score", *map(str, urls), *how.split()])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["scores"]
    target, small = (llama.load(d, torch.float32) for d in (fp32, draft))
    texts = heldout_prompts("stdlib", checkpoint.load_tokenizer(fp32), count=8, length=32, seed=0)
    sampling = SamplingParams(max_tokens=48, stop_token_ids=(1,))
    steps = [
        s
        for text in texts
        for s in list(speculative_decode(target, ModelDrafter(small), [text], K, sampling))[1:]
    ]
    length = 1 + sum(s.accepted for s in steps) / len(steps)
    print(
        f"vLLM: {row['mean_acceptance_length']:.3f} tokens per pass, here {length:.3f}; {row['speedup']:.2f}x"
    )
    assert row["identical"]
    # ends are drafted and counted otherwise
    assert row["mean_acceptance_length"] == pytest.approx(length, abs=0.1)


def test_stored_answers_that_lack_a_run_are_refused(space, started):
    target = small(space)
    apart(space, "--server", started(target))
    file = space / STORED / "plain.json"
    stored = json.loads(file.read_text())
    file.write_text(json.dumps(stored | {"runs": stored["runs"][1:]}))
    asked, drafting = Observed(), small(space, draft=target.model)
    second = ("--server", STORED, "--speculative-server", started(asked.of(drafting)))
    assert "--server" in apart(space, *second, code=1).stderr
    assert "/v1/completions" not in asked.paths
    assert not (space / "runs/score-served").exists()
