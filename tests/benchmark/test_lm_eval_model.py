"""Generation tasks through the speculative engine score what the target scores alone, and a wrong engine does not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import build
from test_report import ACC, change, model, score

from draftlab.benchmark import lm_eval_model
from draftlab.benchmark.lm_eval_model import Generate, engine_generate
from draftlab.benchmark.lm_eval_tasks import TaskOptions, evaluate_tasks, prepare
from draftlab.engine.generate import ModelDrafter
from draftlab.errors import UserError
from draftlab.model import llama
from draftlab.model.checkpoint import load_model, load_tokenizer
from draftlab.model.hf_decoder import HFDecoder
from draftlab.results.score import TaskResult
from draftlab.results.warnings import score_warnings
from draftlab.sampling import SamplingParams

TASK = """
task: goes_on
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: [{until}], do_sample: {sample}, max_gen_toks: 12}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
QUESTIONS = [
    "def parse(line):",
    "return [int(part)",
    "class Reader:\n    def",
    "if not line:\n        return",
    "self.path",
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory, tokenizer_dir) -> dict[str, Path]:
    """A target and a draft that agrees with it now and then."""
    root = tmp_path_factory.mktemp("pair")
    torch.manual_seed(5)
    target, draft = build("llama", 1), build("llama", 1)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(torch.randn_like(p) * 0.01)
    for name, made in (("target", target), ("draft", draft)):
        made.save_pretrained(root / name)
        for file in tokenizer_dir.iterdir():
            (root / name / file.name).write_bytes(file.read_bytes())
    return {name: root / name for name in ("target", "draft")}


@pytest.fixture(scope="module")
def answers(pair) -> list[str]:
    """What the target writes by transformers, greedily, for three of the questions; two answers are wrong."""
    target: Any = load_model(pair["target"], torch.float32)
    tokenizer = load_tokenizer(pair["target"])
    found = []
    for question in QUESTIONS[:3]:
        ids = torch.tensor([tokenizer(question)["input_ids"]])
        new = target.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=2)[0, ids.shape[1] :]
        found.append(tokenizer.decode(new, skip_special_tokens=True))
    return [*found, "wrong", "wrong"]


def task(folder: Path, answers: list[str], until: str = '"\\x00"', sample: str = "false") -> str:
    rows = [{"question": q, "answer": a} for q, a in zip(QUESTIONS, answers, strict=True)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = TASK.format(data=folder / "rows.jsonl", cache=folder / "cache", until=until, sample=sample)
    (folder / "goes_on.yaml").write_text(text)
    return str(folder / "goes_on.yaml")


def with_draft(pair, name: str, k: int, wrong: bool = False):
    target, draft = (llama.load(pair[n], torch.float32) for n in ("target", name))
    generate = engine_generate(target, ModelDrafter(draft), k, load_tokenizer(pair["target"]), (1,))
    if not wrong:
        return generate
    return lambda prompts, how, stops: [[17] * len(text) for text in generate(prompts, how, stops)]


def evaluate(pair, name: str, limit: int | None = None, generate: Generate | None = None) -> list[TaskResult]:
    target = llama.load(pair["target"], torch.float32)
    return evaluate_tasks(target, pair["target"], prepare([name], TaskOptions(limit=limit)), generate=generate)


def test_the_engine_scores_what_the_target_does_item_by_item(pair, answers, tmp_path, monkeypatch):
    monkeypatch.setattr(lm_eval_model, "BATCH_SIZE", 2)
    name = task(tmp_path, answers)
    generated = prepare([name, "code_next_line"], TaskOptions(limit=2)).generation
    assert (list(generated.registered["tasks"]), generated.own["tasks"]) == (["goes_on"], {})
    (alone,) = evaluate(pair, name)
    assert (alone.value, alone.items) == (pytest.approx(0.6), [1, 1, 1, 0, 0])
    for k in (1, 4):
        generate = with_draft(pair, "draft", k)
        assert evaluate(pair, name, generate=generate) == [alone]
    generate = with_draft(pair, "draft", 4, wrong=True)
    (broken,) = evaluate(pair, name, generate=generate)
    assert broken.value == 0


def test_writing_ends_at_a_stop_that_lies_inside_a_draft(pair, answers, tmp_path):
    """The target drafts for itself: every step accepts all, and what is behind the stop is cut as lm-eval cuts it."""
    stop = answers[0][3]
    name = task(tmp_path, [a.split(stop)[0] for a in answers], until=json.dumps(stop))
    (alone,) = evaluate(pair, name)
    generate = with_draft(pair, "target", 8)
    assert evaluate(pair, name, generate=generate) == [alone]
    assert alone.value == pytest.approx(0.6)
    assert len(generate([[0, 5, 6]], SamplingParams(max_tokens=200), [""])[0]) < 20


def test_a_task_that_samples_is_refused(pair, answers, tmp_path):
    name = task(tmp_path, answers, sample="true")
    with pytest.raises(UserError, match="must be greedy"):
        evaluate(pair, name, limit=1, generate=with_draft(pair, "draft", 2))


def test_a_target_that_transformers_runs_writes_one_prompt_at_a_time(pair, answers, tmp_path):
    name = task(tmp_path, answers)
    target = HFDecoder(load_model(pair["target"], torch.float32).eval())
    draft = llama.load(pair["draft"], torch.float32)
    generate = engine_generate(target, ModelDrafter(draft), 3, load_tokenizer(pair["target"]), (1,))
    tasks = prepare([name], TaskOptions())
    assert evaluate_tasks(target, pair["target"], tasks, generate=generate) == evaluate(pair, name)


def test_a_score_that_differs_with_the_draft_is_a_warning():
    target = model("target", 12, 20.0, [ACC])
    lower = TaskResult(task=ACC.task, metric="acc", value=0.6, stderr=None, higher_is_better=True)
    assert score_warnings([change(score(), target=target, speculative_tasks=[ACC])]) == []
    (found,) = score_warnings([change(score(), target=target, speculative_tasks=[lower])])
    assert all(word in found for word in ("py_choice", "0.600", "0.612"))
