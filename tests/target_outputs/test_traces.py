"""A trace says what the target wrote, and a replay over it is the draft at work; what is wrong with either is said."""

import itertools
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import build
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback_servers import SmallVLLM, running
from transformers import OPTConfig, OPTForCausalLM, TopKLogitsWarper, TopPLogitsWarper
from typer.testing import CliRunner

from draftlab import workspace
from draftlab.acceptance.token_logprobs import score_tokens
from draftlab.cli import app
from draftlab.engine.batch_generate import BatchSettings
from draftlab.engine.generate import ModelDrafter, decode, speculative_decode
from draftlab.errors import UserError
from draftlab.model import checkpoint, decoder
from draftlab.model.llama import load
from draftlab.prompts import Prompt, Prompts, file_prompts
from draftlab.results.decoding import Generation, count_acceptance
from draftlab.sampling import SamplingParams
from draftlab.servers.client import Server
from draftlab.target_outputs import sources, traces
from draftlab.target_outputs.repeats import repeats
from draftlab.target_outputs.replay import Drafting, Plan, check, read_replay, replay_draft, rows_of
from draftlab.target_outputs.sources import About, LocalWriter, PaperTrace, ServedWriter
from draftlab.target_outputs.traces import Decoding, Trace, read_trace

RUNNER = CliRunner()
CPU = torch.device("cpu")
LINES = [
    {"prompt": "def parse(line):\n    if not line:", "category": "code"},
    {"question_id": 7, "category": "chat", "turns": ["class Reader:", "and then?"]},
    {"prompt": "return", "category": "code"},
    {"text": "return [int(part) for part in line.split(',')]"},
    {"prompt": "def read(self):\n        return 1", "category": "chat"},
    {"prompt": "if not line:", "category": "code"},
    {"prompt": "if not part:", "category": "code"},
]


def greedy(**changes) -> Decoding:
    return Decoding(
        **{"temperature": 0, "top_k": 0, "top_p": 1, "seed": 0, "max_new_tokens": 24, "eos_ids": ()} | changes
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory, tokenizer_dir) -> dict[str, Path]:
    """A target that is sure now and then, the same with noise as its draft, and one of another architecture."""
    root = tmp_path_factory.mktemp("models")
    made = {"target": build("llama", 1), "draft": build("llama", 1)}
    torch.manual_seed(5)
    with torch.no_grad():
        for p in made["draft"].parameters():
            p.add_(torch.randn_like(p) * 0.002)
        for model in made.values():
            model.get_output_embeddings().get_parameter("weight").mul_(12)
    torch.manual_seed(0)
    made["opt"] = OPTForCausalLM(
        OPTConfig(
            vocab_size=307, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=128, word_embed_proj_dim=32, bos_token_id=0, eos_token_id=1, pad_token_id=2,
            init_std=0.5,
        )
    ).eval()  # fmt: skip
    for name, model in made.items():
        model.save_pretrained(root / name)
        for file in tokenizer_dir.iterdir():
            (root / name / file.name).write_bytes(file.read_bytes())
    return {name: root / name for name in made}


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return file


def prompts_of(file: Path, target: Path, most: int | None = None) -> Prompts:
    return file_prompts(file, checkpoint.load_tokenizer(target), count=most)


def recorded(
    out: Path, target: Path, prompts: Prompts, how: Decoding, rows: int = 16, top: int = 0, device_map=None
) -> Trace:
    about = About(
        target=target.name, target_sha256="0", written_by="draftlab", dtype="float32", rows=rows, logprobs="sampled"
    )

    def start() -> LocalWriter:
        return LocalWriter(
            decoder.load(target, torch.float32, CPU, device_map),
            how.sampling,
            BatchSettings(batch_size=rows, logprobs=top),
        )

    sources.run(out, about, start, prompts, how, top=top, tokenizer_from=target)
    return read_trace(out)


@pytest.fixture(scope="module")
def greedy_trace(tmp_path_factory, models, prompt_file) -> Trace:
    out = tmp_path_factory.mktemp("traces") / "greedy"
    return recorded(out, models["target"], prompts_of(prompt_file, models["target"]), greedy(), top=3)


def plan_of(**changes) -> Plan:
    return Plan(
        **{"rule": "rejection", "draft_temperature": None, "dtype": torch.float32, "device": CPU, "command": ""}
        | changes
    )


def nothing(done: int, word: str) -> None:
    pass


# recording


def test_a_greedy_trace_is_plain_decoding_of_whole_prompts(models, greedy_trace):
    model, tokenizer = load(models["target"], torch.float32), checkpoint.load_tokenizer(models["target"])
    texts = ["def parse(line):\n    if not line:", "class Reader:", "return", LINES[3]["text"]]
    assert len(greedy_trace.texts) == len(LINES)
    for text, prompt in zip(greedy_trace.texts, texts, strict=False):
        assert text.prompt.tolist() == tokenizer(prompt)["input_ids"]
        steps = decode(model, [text.prompt.tolist()], SamplingParams(max_tokens=24))
        assert text.ids.tolist() == [t for step in steps for t in step.tokens]
        assert (text.stop, text.log_p.tolist()) == ("length", [0.0] * 24)
        assert text.top_ids[:, 0].tolist() == text.ids.tolist()
        assert text.top_log_p.shape == (24, 3)
    assert [t.category for t in greedy_trace.texts] == ["code", "chat", "code", "", "chat", "code", "code"]
    assert [t.number for t in greedy_trace.texts] == list(range(7))


def test_sampled_text_has_the_log_probability_that_it_was_drawn_with(tmp_path, models, prompt_file):
    how = greedy(temperature=5.0, top_k=40, top_p=0.9, seed=3)
    found = recorded(tmp_path / "t", models["target"], prompts_of(prompt_file, models["target"]), how)
    model = checkpoint.load_model(models["target"], torch.float32).eval()
    for text in found.texts:
        ids = torch.from_numpy(np.concatenate([text.prompt, text.ids]).astype(np.int64))[None]
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(text.prompt) - 1 : -1] / 5.0
        warped = TopPLogitsWarper(0.9)(ids, TopKLogitsWarper(40)(ids, logits))  # type: ignore[arg-type]
        wanted = warped.log_softmax(-1).gather(1, ids[0, len(text.prompt) :, None]).squeeze(1)
        np.testing.assert_allclose(text.log_p, wanted, atol=1e-4)
        assert text.log_p.max() < 0


def test_what_is_sampled_depends_on_the_prompt_and_the_seed_alone(tmp_path, models, prompt_file):
    how, target = greedy(temperature=1.0, seed=3), models["target"]
    whole = prompts_of(prompt_file, target)
    together = recorded(tmp_path / "a", target, whole, how)
    one_by_one = recorded(tmp_path / "b", target, whole, how, rows=1)
    few = recorded(tmp_path / "c", target, prompts_of(prompt_file, target, 2), how)
    other = recorded(tmp_path / "d", target, whole, how.model_copy(update={"seed": 4}))
    texts = [t.ids.tolist() for t in together.texts]
    assert [t.ids.tolist() for t in one_by_one.texts] == texts
    assert [t.ids.tolist() for t in few.texts] == texts[:2]
    assert [t.ids.tolist() for t in other.texts] != texts


def test_text_ends_with_the_first_end_of_text_and_keeps_it(tmp_path, models, prompt_file, greedy_trace):
    ends = int(greedy_trace.texts[0].ids[9])
    how = greedy(eos_ids=(ends, 306))
    found = recorded(tmp_path / "t", models["target"], prompts_of(prompt_file, models["target"]), how)
    for text, whole in zip(found.texts, greedy_trace.texts, strict=True):
        at = whole.ids.tolist().index(ends) + 1 if ends in whole.ids else 24
        assert text.ids.tolist() == whole.ids[:at].tolist()
        assert text.stop == ("eos" if ends in whole.ids else "length")
    assert {t.stop for t in found.texts} >= {"eos"}


@pytest.mark.parametrize("device_map", [None, "cpu"])
def test_what_the_engine_does_not_know_transformers_writes(tmp_path, models, prompt_file, capsys, device_map):
    target = models["opt"]
    found = recorded(tmp_path / "t", target, prompts_of(prompt_file, target), greedy(), device_map=device_map)
    assert ("transformers runs it instead" in capsys.readouterr().err) == (device_map is None)
    model = checkpoint.load_model(target, torch.float32).eval()
    for text in found.texts:
        ids = torch.from_numpy(text.prompt.astype(np.int64))[None]
        whole = model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None
        )
        assert whole[0, ids.shape[1] :].tolist() == text.ids.tolist()


def served(out: Path, target: Path, prompts: Prompts, how: Decoding, stops=frozenset(), top: int = 0) -> Trace:
    """Recorded from a server that answers as vLLM does."""
    model = checkpoint.load_model(target, torch.float32).eval()
    with running(SmallVLLM(model, checkpoint.load_tokenizer(target), stops)) as url:
        writer = ServedWriter(Server.connect(url), how, top, target)
        sources.run(out, writer.about(), lambda: writer, prompts, how, top=top, tokenizer_from=target)
    return read_trace(out)


def test_a_server_records_what_the_target_in_memory_does(tmp_path, models, prompt_file, greedy_trace):
    prompts = prompts_of(prompt_file, models["target"])
    ends = int(greedy_trace.texts[0].ids[9])
    how = greedy(eos_ids=(ends,))
    local = recorded(tmp_path / "local", models["target"], prompts, how, top=3)
    found = served(tmp_path / "served", models["target"], prompts, how, frozenset({ends}), top=3)
    assert (found.manifest.written_by, found.manifest.logprobs) == ("vllm 0.32.0", "raw")
    for a, b in zip(found.texts, local.texts, strict=True):
        assert (a.ids.tolist(), a.stop, a.category) == (b.ids.tolist(), b.stop, b.category)
        assert a.log_p.tolist() == [0.0] * len(a.ids)
        assert a.top_ids.tolist() == b.top_ids.tolist()
        np.testing.assert_allclose(a.top_log_p, b.top_log_p, atol=1e-4)


def test_a_server_that_samples_keeps_the_log_probabilities_it_gives(tmp_path, models, prompt_file):
    prompts = prompts_of(prompt_file, models["target"])
    found = served(tmp_path / "t", models["target"], prompts, greedy(temperature=1.0))
    texts = [(t.prompt, t.ids) for t in found.texts]
    looked = score_tokens(load(models["target"], torch.float32), texts, 307, SamplingParams(temperature=1.0))
    for text, one in zip(found.texts, looked, strict=True):
        np.testing.assert_allclose(text.log_p, one.logprobs, atol=1e-4)
    other = served(tmp_path / "u", models["target"], prompts, greedy(temperature=1.0, seed=1))
    assert [t.ids.tolist() for t in other.texts] != [t.ids.tolist() for t in found.texts]


def test_a_server_with_another_tokenizer_is_refused(tmp_path, models, prompt_file):
    class Other(SmallVLLM):
        def __call__(self, method, path, body):
            return (200, {"tokens": [1, 2, 3]}) if path == "/tokenize" else super().__call__(method, path, body)

    model = checkpoint.load_model(models["target"], torch.float32).eval()
    tokenizer = checkpoint.load_tokenizer(models["target"])
    with running(Other(model, tokenizer, frozenset())) as url, pytest.raises(UserError, match="tokenizer"):
        ServedWriter(Server.connect(url), greedy(), 0, models["target"])


def test_prompts_are_taken_evenly_over_a_set():
    rows = [Prompt([i], category="abc"[i // 4]) for i in range(12)]
    given = Prompts(rows=rows, source="set", sha256="1", tokens=None)
    assert [p.category for p in given.spread(3).rows] == ["a", "b", "c"]
    assert [p.ids for p in given.spread(5).rows] == [[0], [2], [4], [7], [9]]
    assert given.spread(None) == given.spread(12) == given
    with pytest.raises(UserError, match="set has 12 prompts, not 13"):
        given.spread(13)


# resuming


def many(target: Path) -> Prompts:
    ids = np.random.default_rng(0).integers(3, 300, (5 * traces.SHARD_TEXTS // 2, 6))
    rows = [Prompt(row[: 3 + i % 3].tolist(), "ab"[i % 2]) for i, row in enumerate(ids)]
    return Prompts(rows=rows, source="many", sha256="1", tokens=None)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(f.relative_to(directory)): f.read_bytes() for f in directory.rglob("*") if f.is_file()}


def test_a_killed_recording_goes_on_to_the_same_bytes(tmp_path, models):
    how, target = greedy(temperature=1.0, max_new_tokens=40), models["target"]
    recorded(tmp_path / "whole", target, many(target), how)
    out = tmp_path / "killed"

    process = multiprocessing.get_context("fork").Process(
        target=recorded, args=(out, target, many(target), how), daemon=True
    )
    process.start()
    while not (out / "shard-00000.safetensors").exists():
        time.sleep(0.002)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    before = traces.read_manifest(out)
    assert before.texts < before.planned
    with pytest.raises(UserError, match=r"is unfinished .* repeat draftlab trace record"):
        read_trace(out)
    (out / ".shard-00001.safetensors.writing").write_bytes(b"cut short")
    recorded(out, target, many(target), how)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_finished_trace_starts_no_target(tmp_path, models, prompt_file):
    target = models["target"]
    recorded(tmp_path / "t", target, prompts_of(prompt_file, target), greedy())
    about = About(
        target="target", target_sha256="0", written_by="draftlab", dtype="float32", rows=16, logprobs="sampled"
    )

    def start() -> LocalWriter:
        raise AssertionError("started")

    prompts = prompts_of(prompt_file, target)
    held = sources.run(tmp_path / "t", about, start, prompts, greedy(), top=0, tokenizer_from=target)
    assert held.texts == len(LINES)


def test_another_trace_in_the_same_place_is_refused_and_named(tmp_path, models, prompt_file):
    target = models["target"]
    prompts = prompts_of(prompt_file, target)
    recorded(tmp_path / "t", target, prompts, greedy())
    with pytest.raises(UserError, match="holds another trace: its decoding is"):
        recorded(tmp_path / "t", target, prompts, greedy(temperature=1.0))
    with pytest.raises(UserError, match=r"its prompts is .*, not \"many\"; choose another --out"):
        recorded(tmp_path / "t", target, many(target), greedy())
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "mine.txt").write_text("")
    with pytest.raises(UserError, match="not empty"):
        recorded(tmp_path / "x", target, prompts, greedy())


# files that are not what they should be


def test_every_damage_to_a_shard_is_found(tmp_path, models, prompt_file):
    out, target = tmp_path / "t", models["target"]
    recorded(out, target, prompts_of(prompt_file, target), greedy())
    file = out / "shard-00000.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-100], whole[:40], b"", whole[:-1] + bytes([whole[-1] ^ 1])):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match="is corrupt: its checksum"):
            read_trace(out)
    file.unlink()
    with pytest.raises(UserError, match="No such file"):
        read_trace(out)


@pytest.mark.parametrize("manifest", ["", "{}", '{"version": 2}', '{"target": "x", "odd": 1}'])
def test_a_manifest_of_something_else_is_refused(tmp_path, manifest):
    with pytest.raises(UserError, match="is not a trace"):
        read_trace(tmp_path)
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(UserError, match="is not that of a trace"):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "has no prompts"),
        ("{", ":1: not JSON"),
        ("[1]\n", ":1: not a JSON object"),
        ('{"prompt": "a"}\n{"name": "b"}\n', ":2: no text; .*prompt, turns"),
        ('{"turns": []}\n', ":1: no text"),
    ],
)
def test_prompt_files_that_cannot_be_read_say_which_line(tmp_path, models, lines, message):
    file = tmp_path / "p.jsonl"
    file.write_text(lines)
    with pytest.raises(UserError, match=message):
        prompts_of(file, models["target"])


def test_prompts_are_cut_only_where_they_are_long_enough(prompt_file, models):
    reader = checkpoint.load_tokenizer(models["target"])
    cut = file_prompts(prompt_file, reader, count=1, tokens=4)
    assert cut.rows[0].ids == file_prompts(prompt_file, reader, count=1).rows[0].ids[:4]
    with pytest.raises(UserError, match=r"prompts.jsonl:3: the prompt has \d+ tokens, .*--prompt-tokens 8"):
        file_prompts(prompt_file, reader, tokens=8)


# the paper's trace files


def paper_file(path: Path, texts: list[list[int]]) -> Path:
    """As torch prints them."""
    path.write_text("\n".join(str(torch.tensor([text])) for text in texts) + "\n")
    return path


def test_a_trace_of_the_papers_scripts_replays_as_the_recorded_one(tmp_path, models, prompt_file, greedy_trace):
    prompts = prompts_of(prompt_file, models["target"])
    texts = [t.ids.tolist() for t in greedy_trace.texts]
    whole = [[*p.ids, *text] for p, text in zip(prompts.rows, texts, strict=True)]
    wanted = replay_draft(greedy_trace, models["draft"], plan_of(), nothing).chances()
    for name, written in (("output", texts), ("whole", whole)):
        paper = PaperTrace(paper_file(tmp_path / name, written), prompts.rows, None, 307, ())
        about = About(target="big", target_sha256=None, written_by="paper", dtype="float16", rows=1, logprobs="none")
        how = greedy(max_new_tokens=paper.longest)
        out = tmp_path / f"{name}-trace"
        sources.run(out, about, lambda p=paper: p, prompts, how, top=0, tokenizer_from=models["target"])
        found = replay_draft(read_trace(out), models["draft"], plan_of(), nothing).chances()
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_papers_own_example_is_read(tmp_path):
    """From the docstring of its parse_tensors_from_file."""
    text = """tensor([[  518, 799, 596, 18873,  1265,   322,  1510,   372,  1283,   304,   596,
          7875, 29991, 2]])
    tensor([[  518, 10568, 29962,  1522,  2924, 29889,   518, 10568, 29962,  1522,
          1176,   681, 29889,   518, 10568, 29962,  1522,   752,   465,   291]], device='cuda:0')"""
    (tmp_path / "t.txt").write_text(text)
    first, second = sources.paper_texts(tmp_path / "t.txt")
    assert first.tolist() == [518, 799, 596, 18873, 1265, 322, 1510, 372, 1283, 304, 596, 7875, 29991, 2]
    assert len(second) == 20


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nothing here", r"it has no tensor\(\[\[...\]\]\)"),
        ("tensor([[1, 2]])\ntensor([[3, 4", "its text 2 does not end"),
        ("tensor([[1, 2, ..., 9]])", "text 1 is abbreviated"),
        ("tensor([[1, 2]])\ntensor([[1, 2.5]])", "text 2: invalid literal"),
        ("tensor([[1, -2]])", "-2 is not a token id"),
        ("tensor([[1, 2]])", "holds 1 texts and there are 2 prompts"),
        ("tensor([[1, 2]])\ntensor([[400, 2]])", "text 2 has the id 400, the tokenizer only 307"),
    ],
)
def test_files_that_are_no_paper_trace_are_refused(tmp_path, content, message):
    (tmp_path / "t.txt").write_text(content)
    with pytest.raises(UserError, match=message):
        PaperTrace(tmp_path / "t.txt", [Prompt([5]), Prompt([6])], None, 307, ())


# replaying


def live(target: Path, draft: Path, prompts: list[list[int]], k: int, how: SamplingParams) -> list[Generation]:
    big, small = load(target, torch.float32), load(draft, torch.float32)
    found = []
    for number, prompt in enumerate(prompts):
        steps = list(speculative_decode(big, ModelDrafter(small), [prompt], k, how))
        found.append(
            Generation(
                prompt=number, tokens=sum(len(s.tokens) for s in steps), drafted=[s.drafted for s in steps[1:]],
                accepted=[s.accepted for s in steps[1:]], emitted=[len(s.tokens) for s in steps[1:]],
                prefill_seconds=0.0, draft_seconds=0.0, verify_seconds=0.0, host_seconds=0.0,
            )
        )  # fmt: skip
    return found


def test_a_replayed_trace_is_live_speculation(models, greedy_trace):
    found = replay_draft(greedy_trace, models["draft"], plan_of(), nothing)
    assert found.texts[0].chances == pytest.approx([float(r == 0) for r in found.texts[0].ranks])
    prompts = [t.prompt.tolist() for t in greedy_trace.texts]
    for k in (1, 2, 5):
        generations = live(models["target"], models["draft"], prompts, k, SamplingParams(max_tokens=24))
        wanted = count_acceptance(generations, k)
        assert found.counts(Drafting(k=k)).acceptance() == wanted
        assert 0.2 < wanted.draft_acceptance_rate < 0.95


def test_conventions_of_the_first_token(models, greedy_trace):
    """Drafted straight from the prompt, it is one more token that a step can begin at."""
    found = replay_draft(greedy_trace, models["draft"], plan_of(), nothing)
    prefill, prompt = (found.counts(Drafting(k=3), first) for first in ("prefill", "prompt"))
    assert (prefill.tokens == 23).all()
    assert (prompt.tokens == 24).all()
    for one, text in zip(found.chances("prompt"), found.texts, strict=True):
        assert one.tolist() == text.chances
    assert [c[0] for c in found.contexts("prefill")] == [len(t.prompt) + 1 for t in greedy_trace.texts]
    assert [c[0] for c in found.contexts("prompt")] == [len(t.prompt) for t in greedy_trace.texts]
    assert all(len(c) == len(a) for c, a in zip(found.contexts(), found.chances(), strict=True))


def test_sampled_chances_are_the_ratio_of_what_both_sampled_from(tmp_path, models, prompt_file):
    how, target = greedy(temperature=4.0, top_k=60, seed=1), models["target"]
    found = recorded(tmp_path / "t", target, prompts_of(prompt_file, target), how)
    ratio = replay_draft(found, models["draft"], plan_of(), nothing)
    match = replay_draft(found, models["draft"], plan_of(rule="match"), nothing)
    sharp = replay_draft(found, models["draft"], plan_of(draft_temperature=0.0), nothing)
    for text, a, b, c in zip(found.texts, ratio.texts, match.texts, sharp.texts, strict=True):
        np.testing.assert_allclose(a.chances, np.minimum(1, np.array(b.chances) / np.exp(text.log_p)), atol=1e-4)
        assert c.chances == [float(r == 0) for r in c.ranks]
    same = replay_draft(found, target, plan_of(), nothing)
    np.testing.assert_allclose(np.concatenate(same.chances("prompt")), 1, atol=1e-4)  # a draft that is the target


def test_text_that_ends_early_leaves_room_for_drafts_behind_its_end(tmp_path, models, prompt_file, greedy_trace):
    ends = int(greedy_trace.texts[0].ids[9])
    prompts = prompts_of(prompt_file, models["target"])
    found = recorded(tmp_path / "t", models["target"], prompts, greedy(eos_ids=(ends,)))
    replayed = replay_draft(found, models["draft"], plan_of(), nothing)
    k, how = 4, SamplingParams(max_tokens=24, stop_token_ids=(ends,))
    runs = live(models["target"], models["draft"], [p.ids for p in prompts.rows], k, how)
    counts = replayed.counts(Drafting(k=k))
    assert counts.passes.tolist() == [len(g.drafted) for g in runs]
    assert counts.drafted.tolist() == [sum(g.drafted) for g in runs]
    accepted = [sum(min(a, e) for a, e in zip(g.accepted, g.emitted, strict=True)) for g in runs]
    assert counts.accepted.tolist() == accepted


def test_trees_and_confidence_follow_from_the_same_file(models, greedy_trace):
    found = replay_draft(greedy_trace, models["draft"], plan_of(), nothing)
    chain, wide = found.counts(Drafting(k=3)), found.counts(Drafting(k=3, widths=(4, 2, 2)))
    sure = found.counts(Drafting(k=3, confidence=0.7))
    assert (wide.passes <= chain.passes).all()
    assert wide.passes.sum() < chain.passes.sum()
    assert sure.drafted.sum() < chain.drafted.sum()
    assert (sure.passes >= chain.passes).all()
    assert found.counts(Drafting(k=3, confidence=0.0)).acceptance() == chain.acceptance()
    assert found.counts(Drafting(k=3, widths=(1, 1, 1))).acceptance() == chain.acceptance()


def test_a_replay_is_read_back_as_it_was_and_nothing_else_is(tmp_path, models, greedy_trace):
    found = replay_draft(greedy_trace, models["draft"], plan_of(), nothing)
    (tmp_path / "replay.json").write_text(found.model_dump_json())
    assert read_replay(tmp_path) == found == read_replay(tmp_path / "replay.json")
    fields = json.loads(found.model_dump_json())
    fields["texts"][0]["ranks"].pop()
    for content in ("", "{}", json.dumps(fields)):
        (tmp_path / "replay.json").write_text(content)
        with pytest.raises(UserError, match="is not a replay"):
            read_replay(tmp_path)
    with pytest.raises(UserError, match="draftlab trace replay writes one"):
        read_replay(tmp_path / "none")


def test_rows_of_categories_are_their_texts_alone(models, greedy_trace):
    found = replay_draft(greedy_trace, models["draft"], plan_of(), nothing)
    rows = rows_of(found, [Drafting(k=2), Drafting(k=4)], "prefill")
    assert [(r.group, r.texts, r.drafting.k) for r in rows[:2]] == [("all", 7, 2), ("all", 7, 4)]
    by_group = {r.group: r for r in rows[2:]}
    assert by_group["code"].texts == 4
    alone = replay_draft(greedy_trace.of_category("code"), models["draft"], plan_of(), nothing)
    assert by_group["code"].acceptance == alone.counts(Drafting(k=4)).acceptance()
    for row in rows:
        assert row.length.value == pytest.approx(row.acceptance.mean_acceptance_length)
        assert row.rate.value == pytest.approx(row.acceptance.draft_acceptance_rate)
        assert [c.value for c in row.conditional] == pytest.approx(row.acceptance.conditional_acceptance)
        assert row.length.low <= row.length.value <= row.length.high
    if found.degenerate.any():
        assert by_group["without loops"].texts == int((~found.degenerate).sum())


def test_log_probabilities_that_the_rule_cannot_use_are_refused(tmp_path, models, prompt_file):
    how, target = greedy(temperature=0.7), models["target"]
    found = recorded(tmp_path / "t", target, prompts_of(prompt_file, target), how)
    raw = Trace(found.directory, found.manifest.model_copy(update={"logprobs": "raw"}), found.texts)
    with pytest.raises(UserError, match="holds raw log-probabilities; --rule rejection needs"):
        check(raw, models["draft"], plan_of())
    check(raw, models["draft"], plan_of(rule="match"))
    check(raw, models["draft"], plan_of(draft_temperature=0.0))
    at_one = raw.manifest.decoding.model_copy(update={"temperature": 1.0})
    check(Trace(raw.directory, raw.manifest.model_copy(update={"decoding": at_one}), raw.texts), target, plan_of())


# loops


@given(st.lists(st.integers(0, 2), max_size=24))
@settings(max_examples=80, deadline=None)
def test_the_longest_repeat_is_the_longest_stretch_that_stands_twice(ids):
    n = len(ids)
    pairs = itertools.combinations(range(n), 2)
    sizes = ((i, j, size) for i, j in pairs for size in range(1, n - j + 1))
    longest = max((size for i, j, size in sizes if ids[i : i + size] == ids[j : j + size]), default=0)
    other = [1, 0, 1, 0, 2]  # another text beside it, of another length
    found = repeats([np.array(ids, dtype=np.uint32), np.array(other)])
    assert [r.longest_repeat for r in found] == [longest, 2]


def test_a_loop_is_degenerate_and_varied_text_is_not():
    rng = np.random.default_rng(0)
    loop, text = np.tile([5, 6, 7], 20), rng.integers(0, 300, 60)
    assert [r.degenerate for r in repeats([loop, text, text[:3]])] == [True, False, False]
    assert repeats([loop])[0].longest_repeat == 57


# the command line


@pytest.fixture
def space(tmp_path, monkeypatch, models) -> Path:
    monkeypatch.chdir(tmp_path)
    target = str(models["target"])
    workspace.write(workspace.Workspace(target=target, source=target, data="stdlib"))
    return tmp_path


def call(*arguments: object, code: int = 0):
    result = RUNNER.invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_record_info_and_replay_as_typed(space, models, prompt_file):
    made = call("trace", "record", "--prompt-file", prompt_file, "--max-new-tokens", 20)
    assert "runs/trace-target" in made.stdout
    assert "7 of 7 texts, 140 tokens" in made.stdout
    facts = json.loads(call("trace", "info", "runs/trace-target", "--json").stdout)
    assert facts["categories"] == {"chat": 2, "code": 4}
    found = call("trace", "replay", "runs/trace-target", "--draft", models["draft"], "--k", "1-3")
    assert "acceptance length" in found.stdout
    assert "code" in found.stdout
    assert (space / "runs/replay-trace-target/draft/replay.json").is_file()
    again = call("trace", "replay", "runs/trace-target", "--draft", models["draft"], code=1)
    assert "--force" in again.stderr
    tree = ("--tree", "3,2", "--category", "chat", "--force", "--json")
    rows = json.loads(call("trace", "replay", "runs/trace-target", "--draft", models["draft"], *tree).stdout)
    (row, *_) = rows["replays"][0]["rows"]
    assert (row["texts"], row["drafting"], row["num_speculative_tokens"]) == (2, "tree 3x2", 2)


def test_prompts_of_a_data_source_and_a_dry_run(space, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(f"def f{i}(line):\n    return [line, {i}]\n" * 60 for i in range(80)))
    how = ("--data", file, "--prompts", 3, "--prompt-tokens", 9, "--max-new-tokens", 4)
    assert "would write runs/trace-target" in call("trace", "record", *how, "--dry-run").stdout
    assert not (space / "runs").exists()
    call("trace", "record", *how)
    texts = read_trace(space / "runs/trace-target").texts
    assert [len(t.prompt) for t in texts] == [9, 9, 9]


def test_importing_as_typed(space, models, prompt_file, greedy_trace):
    paper_file(space / "big.txt", [t.ids.tolist() for t in greedy_trace.texts])
    made = call(
        "trace", "import", "big.txt", "--prompt-file", prompt_file, "--tokenizer", models["target"], "--name", "big"
    )
    assert "7 of 7 texts, 168 tokens of big, greedy" in made.stdout
    call("trace", "replay", "runs/trace-big", "--draft", models["draft"])


def test_mistakes_get_one_clear_line(space, models, prompt_file, tmp_path):
    call("trace", "record", "--prompt-file", prompt_file, "--max-new-tokens", 8)
    other = tmp_path / "other"
    other.mkdir()
    for file in models["draft"].iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    words = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(words.replace('"<pad>"', '"<blank>"'))
    replay = ("trace", "replay", "runs/trace-target", "--draft")
    cases = [
        ((*replay, other), "have different tokenizers: id 2 is '<blank>' and '<pad>'"),
        ((*replay, models["draft"], "--category", "cod"), "no category 'cod'; did you mean 'code'?"),
        ((*replay, models["draft"], "--tree", "4,x"), "want widths from 1 on"),
        ((*replay, models["draft"], "--tree", "4", "--confidence", "0.4"), "do not go together"),
        ((*replay, models["draft"], "--k", "0"), "0"),
        ((*replay, "nope"), "no checkpoint at nope"),
        (("trace", "replay", "nope", "--draft", models["draft"]), "is not a trace"),
        (("trace", "info", "nope"), "is not a trace"),
        (("trace", "record", "--prompt-file", "nope.jsonl"), "nope.jsonl: No such file"),
        (("trace", "record", "--prompt-file", prompt_file, "--data", "stdlib"), "give prompts one way"),
        (("trace", "record", "--prompt-file", prompt_file, "--seed", 1), "holds another trace: its decoding"),
        (
            ("trace", "record", "--prompt-file", prompt_file, "--max-new-tokens", 999, "--out", "x"),
            "target's context of 256",
        ),
        (("trace", "record", "--prompt-file", prompt_file, "--server", "localhost:1"), "is not an address"),
    ]
    for arguments, message in cases:
        result = call(*arguments, code=1)
        assert result.stdout == ""
        assert len(result.stderr.splitlines()) == 1, result.stderr
        assert message in result.stderr
