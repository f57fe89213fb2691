"""Laws of the two code tasks and of what goes through lm-eval; models are small and random, text is the stdlib's."""

import contextlib
import functools
import io
import json
import logging
import math
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import build
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typer.testing import CliRunner

from draftlab.benchmark import lm_eval_model, lm_eval_tasks
from draftlab.benchmark.code_tasks import LineItem, next_line_items
from draftlab.benchmark.lm_eval_model import batch_size_for, code_model, continuation_log_probs, with_whole_head
from draftlab.benchmark.lm_eval_tasks import TaskOptions, evaluate_tasks, prepare
from draftlab.cli import app
from draftlab.console import heartbeat
from draftlab.data import Document, documents, open_heldout
from draftlab.errors import UserError
from draftlab.model import llama
from draftlab.model.checkpoint import load_model, load_tokenizer
from draftlab.model.decoder import Decoder
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.tokenizer import train_tokenizer
from draftlab.results.score import TaskResult

VOCAB = 600
WINDOW = 2048  # long enough for every context and text here
ITEMS = 24
YAML = """
task: own_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["yes", "no"]
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def docs() -> list[Document]:
    return documents("stdlib", "heldout")


@pytest.fixture(scope="module")
def items(docs: list[Document]) -> list[LineItem]:
    return next_line_items(docs, count=200, seed=0)


@pytest.fixture(scope="module")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory, docs: list[Document]) -> Path:
    """A random model with a long window; its tokenizer puts bos in front and joins ')', line break and indentation."""
    out = tmp_path_factory.mktemp("long")
    build("llama", max_position_embeddings=WINDOW, vocab_size=VOCAB).save_pretrained(out)
    train_tokenizer([doc.text for doc in docs], VOCAB, out)
    return out


@pytest.fixture(scope="module")
def text_dir(tmp_path_factory: pytest.TempPathFactory, docs: list[Document]) -> Path:
    """Five held-out documents of some 1,200 characters: files named so that the split takes them."""
    out = tmp_path_factory.mktemp("text")
    names = (f"text{i}.txt" for i in range(10_000))
    heldout = [name for name in names if Document(f"{name}:0", "").heldout]
    pieces = [doc.text[:1200] for doc in docs if len(doc.text) > 1200]
    for name, piece in zip(heldout[:5], pieces[:5], strict=True):
        (out / name).write_text(piece)
    return out


def evaluate(
    directory: Path, task: str, limit: int | None, context: int = 512, data: str = "stdlib", **options: Any
) -> dict[str, TaskResult]:
    tasks = prepare([task], TaskOptions(limit=limit, **options), data)
    results = evaluate_tasks(decoder(directory), directory, tasks, context=context)
    return {result.metric: result for result in results}


@functools.cache
def decoder(directory: Path) -> llama.Llama:
    return llama.load(directory, torch.float32)


@functools.cache
def loaded(directory: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return load_model(directory, torch.float32).eval(), load_tokenizer(directory)


def log_prob(directory: Path, text: str) -> float:
    """Natural log-probability of text's tokens after the first, bos, by one plain forward pass."""
    model, tokenizer = loaded(directory)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.no_grad():
        log_probs = model(ids).logits[0, :-1].log_softmax(-1)
    return float(log_probs.gather(-1, ids[0, 1:, None]).sum())


def test_the_answer_is_the_next_line_and_among_the_choices_once(items: list[LineItem], docs: list[Document]):
    assert len(items) == 200
    for item in items:
        answer = item.choices[item.answer]
        assert item.choices.count(answer) == 1
        assert any(item.context + answer in doc.text for doc in docs)


def test_a_context_is_whole_lines_of_a_file(items: list[LineItem], docs: list[Document]):
    for item in items:
        assert 200 <= len(item.context) <= 700
        assert any(doc.text.startswith(item.context) or "\n" + item.context in doc.text for doc in docs)


def test_distractors_are_other_lines_alike_in_indentation_and_length(items: list[LineItem], docs: list[Document]):
    lines = {line + "\n" for doc in docs for line in doc.text.split("\n")}
    for item in items:
        answer = item.choices[item.answer]
        assert len(set(item.choices)) == len(item.choices) == 4
        assert lines.issuperset(item.choices)
        for choice in item.choices:
            assert choice[: -len(choice.lstrip())] == answer[: -len(answer.lstrip())]
            assert 0.7 <= len(choice.strip()) / len(answer.strip()) <= 1.3
            assert choice is answer or choice.strip() not in item.context


def test_no_place_among_the_choices_is_favoured(items: list[LineItem]):
    counts = Counter(item.answer for item in items)
    assert all(25 <= counts[place] <= 75 for place in range(4)), counts  # 50 +- 4 standard deviations


def test_a_question_is_decided_by_the_seed_alone(docs: list[Document], items: list[LineItem]):
    assert next_line_items(docs, count=30, seed=0) == items[:30]
    assert next_line_items(docs, count=30, seed=1) != items[:30]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_a_shared_prefix_scores_as_whole_sequences_do(family: str, tmp_path: Path):
    """For prefixes and continuations of any lengths, in batches of any size, in any order."""
    model, rng = build(family), random.Random(0)
    prefixes = [[rng.randrange(300) for _ in range(length)] for length in (40, 3, 1, 17)]
    pairs = [(p, [rng.randrange(300) for _ in range(n)]) for p in prefixes for n in (9, 1, 14, 5)]
    rng.shuffle(pairs)
    expected = []
    for prefix, continuation in pairs:
        with torch.no_grad():
            logits = model(torch.tensor([prefix + continuation])).logits[0, len(prefix) - 1 : -1]
        ids = torch.tensor(continuation)
        expected.append(float(logits.log_softmax(-1).gather(-1, ids[:, None]).sum()))
    model.save_pretrained(tmp_path)
    run, seen = llama.load(tmp_path, torch.float32), list[tuple[int, int]]()
    for batch_size in (None, 1, 3, 6):
        found = continuation_log_probs(run, pairs, batch_size, lambda done, of: seen.append((done, of)))
        assert [score for score, _ in found] == pytest.approx(expected, abs=1e-3)
        assert seen[-1] == (len(pairs), len(pairs))


def test_a_batch_fits_the_context_and_the_batch_size(family_dirs: dict[str, Path]):
    """A long prefix and a long continuation of another one would exceed the context together."""
    model, rows = llama.load(family_dirs["llama"], torch.float32), list[int]()
    context, forward = model.context, model.forward
    model.forward = lambda ids, *rest, **more: rows.append(len(ids)) or forward(ids, *rest, **more)  # type: ignore
    pairs = [([7] * (context - 4), [8] * 3), ([9] * 5, [10] * (context - 9))]
    assert len(continuation_log_probs(model, pairs)) == 2
    rows.clear()
    continuation_log_probs(model, [([7, 8], [i]) for i in range(5)], 2)
    assert max(rows) == 2


def test_only_the_greedy_continuation_is_called_greedy(family_dirs: dict[str, Path]):
    model: Any = load_model(family_dirs["llama"], torch.float32).eval()
    prefix = [5, 6, 7]
    greedy = model.generate(torch.tensor([prefix]), max_new_tokens=4, do_sample=False, eos_token_id=None)[
        0, 3:
    ].tolist()
    pairs = [(prefix, greedy), (prefix, [*greedy[:-1], (greedy[-1] + 1) % 300])]
    found = continuation_log_probs(llama.load(family_dirs["llama"], torch.float32), pairs)
    assert [is_greedy for _, is_greedy in found] == [True, False]


def test_choices_differ_as_the_texts_they_end_do(checkpoint_dir: Path, items: list[LineItem]):
    """And not so in HFLM, which hides line breaks that share a token with what is before them."""
    model, tokenizer = loaded(checkpoint_dir)
    expected, ours, plain = [], [], []
    for item in items[:8]:
        texts = [log_prob(checkpoint_dir, item.context + choice) for choice in item.choices[:2]]
        pairs = [(item.context, choice) for choice in item.choices[:2]]
        asked = [Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=0) for pair in pairs]
        expected.append(texts[0] - texts[1])
        code: Any = code_model(decoder(checkpoint_dir), checkpoint_dir, tokenizer, WINDOW)
        hflm: Any = HFLM
        for lm, found in ((code, ours), (hflm(model, tokenizer=tokenizer), plain)):
            (first, _), (second, _) = lm.loglikelihood(asked, disable_tqdm=True)
            found.append(first - second)
    assert ours == pytest.approx(expected, abs=0.01)
    assert plain != pytest.approx(expected, abs=0.1)


def test_accuracy_is_the_share_of_items_whose_likeliest_text_has_the_answer(
    checkpoint_dir: Path, items: list[LineItem]
):
    right = 0
    for item in items[:ITEMS]:
        likely = [log_prob(checkpoint_dir, item.context + choice) for choice in item.choices]
        right += likely.index(max(likely)) == item.answer
    measured = evaluate(checkpoint_dir, "code_next_line", ITEMS, context=WINDOW)
    assert list(measured) == ["acc", "acc_norm"]
    assert measured["acc"].value == pytest.approx(right / ITEMS)
    assert measured["acc"].higher_is_better
    assert measured["acc"].stderr == pytest.approx(math.sqrt(right / ITEMS * (1 - right / ITEMS) / (ITEMS - 1)))


def test_a_short_window_keeps_the_end_of_the_context(checkpoint_dir: Path):
    assert 0 <= evaluate(checkpoint_dir, "code_next_line", 4, context=128)["acc"].value <= 1
    with pytest.raises(UserError, match="window of 16 tokens is too short"):
        evaluate(checkpoint_dir, "code_next_line", 4, context=16)


def test_bits_per_byte_is_that_of_a_forward_pass_behind_one_bos(checkpoint_dir: Path, text_dir: Path):
    texts = [doc.text for doc in documents(str(text_dir), "heldout")]
    measured = evaluate(checkpoint_dir, "code_bits_per_byte", None, data=str(text_dir), context=WINDOW)
    nats = -sum(log_prob(checkpoint_dir, text) for text in texts)
    expected = nats / math.log(2) / sum(len(text.encode()) for text in texts)
    assert measured["bits_per_byte"].value == pytest.approx(expected, rel=1e-5)
    assert measured["byte_perplexity"].value == pytest.approx(2**expected, rel=1e-4)
    assert not measured["bits_per_byte"].higher_is_better
    assert measured["bits_per_byte"].stderr is None


def test_bits_per_byte_agrees_with_the_training_loops(checkpoint_dir: Path, text_dir: Path):
    """Within 3 %: there the tokens bos and eos are predicted too, and each window begins without what came before."""
    heldout = open_heldout(str(text_dir), load_tokenizer(checkpoint_dir), rows=4, seq_len=128, most_rows=10_000)
    model, _ = loaded(checkpoint_dir)
    losses = []
    for batch in heldout.batches:
        ids = torch.as_tensor(batch.ids)
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits
        losses += torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").flatten()
    expected = heldout.bits_per_byte(float(torch.stack(losses).mean()))
    measured = evaluate(checkpoint_dir, "code_bits_per_byte", None, data=str(text_dir), context=128)
    assert measured["bits_per_byte"].value == pytest.approx(expected, rel=0.03)


def test_a_limit_takes_the_first_documents(checkpoint_dir: Path, text_dir: Path):
    first = documents(str(text_dir), "heldout")[0].text
    measured = evaluate(checkpoint_dir, "code_bits_per_byte", 1, data=str(text_dir), context=WINDOW)
    expected = -log_prob(checkpoint_dir, first) / math.log(2) / len(first.encode())
    assert measured["bits_per_byte"].value == pytest.approx(expected, rel=1e-5)
    with pytest.raises(UserError, match="limit 0"):
        evaluate(checkpoint_dir, "code_bits_per_byte", 0)


def test_a_call_repeats_itself_and_leaves_nothing_behind(checkpoint_dir: Path, capfd: pytest.CaptureFixture[str]):
    state, seen = random.getstate(), torch.random.get_rng_state()
    level, streams = logging.getLogger("lm_eval").level, (sys.stdout, sys.stderr)
    once = evaluate(checkpoint_dir, "code_next_line", 8, seed=3)
    assert random.getstate() == state
    assert torch.equal(torch.random.get_rng_state(), seen)
    assert (logging.getLogger("lm_eval").level, (sys.stdout, sys.stderr)) == (level, streams)
    assert capfd.readouterr() == ("", "")
    assert evaluate(checkpoint_dir, "code_next_line", 8, seed=3) == once


def test_an_unknown_task_is_refused_with_a_suggestion_before_a_model_is_looked_for():
    for name, near in (("helaswag", "hellaswag"), ("code_nextline", "code_next_line")):
        with pytest.raises(UserError, match=f"--tasks {name}: .*did you mean '{near}'"):
            evaluate(Path("nowhere"), name, 4)


def test_score_refuses_an_unknown_task_before_it_loads_anything(tmp_path: Path):
    words = [
        "score",
        "--target",
        "tiny",
        "--draft",
        "tiny",
        "--data",
        "stdlib",
        "--tasks",
        "helaswag",
        "--out",
        str(tmp_path / "out"),
    ]
    result = CliRunner().invoke(app, [*words, "--dry-run"])
    assert result.exit_code == 1
    assert "did you mean 'hellaswag'" in result.output


def test_a_task_of_ones_own_is_read_from_yaml(checkpoint_dir: Path, tmp_path: Path):
    rows = [{"question": f"Is {n} even?", "answer": n % 2} for n in range(12)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.yaml").write_text(YAML.format(data=data, cache=tmp_path / "cache"))
    right = 0
    for row in rows[:5]:
        likely = [log_prob(checkpoint_dir, f"{row['question']} {word}") for word in ("yes", "no")]
        right += likely.index(max(likely)) == row["answer"]
    measured = evaluate(checkpoint_dir, str(tmp_path / "own.yaml"), 5)
    assert measured["acc"].task == "own_words"
    assert measured["acc"].value == pytest.approx(right / 5)


def test_a_task_without_its_data_is_named(tmp_path: Path):
    task = tmp_path / "own.yaml"
    task.write_text(YAML.format(data=tmp_path / "missing.jsonl", cache=tmp_path / "cache"))
    with pytest.raises(UserError, match=r"lm-eval task '.*own\.yaml' cannot be loaded: .*missing\.jsonl"):
        evaluate(Path("nowhere"), str(task), 4)


GOLDEN = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{more}
"""
KINDS = {
    "multiple_choice": 'doc_to_choice: ["yes", "no", " maybe so"]\n'
    "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]",
    "loglikelihood_rolling": "metric_list:\n"
    "  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}",
    "generate_until": "generation_kwargs: {until: ['zz'], do_sample: false, max_gen_toks: 9}\n"
    "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]",
}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_in_memory_scores_what_hflm_does(
    family: str, family_dirs: dict[str, Path], tmp_path: Path, monkeypatch
):
    """Of every kind of task, each item: by the engine, by transformers in memory, and with a head that was trimmed."""
    place, names = family_dirs[family], []
    rows = [{"question": f"return self.{'x' * n}", "answer": n % 3 if n else 0} for n in range(7)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for kind, more in KINDS.items():
        text = GOLDEN.format(name=kind, data=tmp_path / "rows.jsonl", cache=tmp_path / "cache", kind=kind, more=more)
        (tmp_path / f"{kind}.yaml").write_text(text)
        names.append(str(tmp_path / f"{kind}.yaml"))
    monkeypatch.setattr(lm_eval_model, "BATCH_SIZE", 3)
    tasks = prepare(names, TaskOptions())
    model, tokenizer = loaded(place)
    trimmed = llama.load(place, torch.float32)
    trimmed.trim_head(list(range(5, 90)))
    with lm_eval_tasks._quiet(), lm_eval_tasks._seeded(0):
        hflm: Any = HFLM
        golden = lm_eval_tasks._evaluate(
            hflm(model, tokenizer=tokenizer, batch_size=3), tasks.registered, TaskOptions()
        )
    assert {result.task for result in golden} == set(KINDS)
    runs: list[Decoder] = [decoder(place), HFDecoder(model), with_whole_head(trimmed, place)]
    for run in runs:
        found = evaluate_tasks(run, place, tasks)
        assert [(r.task, r.metric, r.items) for r in found] == [(r.task, r.metric, r.items) for r in golden]
        assert [r.value for r in found] == pytest.approx([r.value for r in golden], rel=1e-5)


def test_a_batch_is_as_large_as_its_logits_allow():
    assert batch_size_for(512, 4096) == 16
    assert batch_size_for(2048, 128_256) == 1
    rows, row_bytes = batch_size_for(512, 49_152), 2 * 4 * 512 * 49_152
    assert row_bytes * rows <= 2e9 < row_bytes * (rows + 1)


def test_the_code_tasks_of_a_mixture_are_of_its_first_source(text_dir: Path):
    mixed = prepare(["code_bits_per_byte"], TaskOptions(limit=2), f"{text_dir}=0.5,stdlib=0.5")
    alone = prepare(["code_bits_per_byte"], TaskOptions(limit=2), str(text_dir))
    texts = [[doc["text"] for doc in t.own["tasks"]["code_bits_per_byte"].test_docs()] for t in (mixed, alone)]
    assert texts[0] == texts[1]


def test_evaluating_says_that_it_goes_on(capsys: pytest.CaptureFixture[str]):
    with heartbeat("lm-eval", seconds=0.05) as beat, contextlib.redirect_stderr(io.StringIO()):
        beat("3 of 4 requests")
        time.sleep(0.4)
    said = capsys.readouterr().err.splitlines()
    assert set(said) == {"lm-eval: 3 of 4 requests, 0 s"}
    time.sleep(0.2)
    assert capsys.readouterr().err == ""
