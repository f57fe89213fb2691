"""Accuracy is lm-eval's own to the last item, of checkpoints and of served models; what cannot run is refused early."""

import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.builders import PASS_ROUNDING, build
from helpers.errors import raises_option
from helpers.loopback_servers import SmallVLLM, running
from helpers.small_files import edit, with_template, write_rows
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from draftlab.commands import COMMANDS
from draftlab.model.checkpoint import load_model, load_tokenizer
from draftlab.model.hf_files import write_head_ids
from draftlab.results.ranking import score_warnings
from draftlab.results.report import accuracy_table
from draftlab.results.score import TaskResult, read_score
from draftlab.scoring.lm_eval import Tasks, load_tasks

CPU = torch.device("cpu")
FEW = {"num_prompts": 2, "prompt_tokens": 8, "max_new_tokens": 9, "repeats": 1, "data": "stdlib"}
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}, train: {data}}}, cache_dir: {cache}}}
test_split: test
fewshot_split: train
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{more}
"""
KINDS = {
    "multiple_choice": (
        'doc_to_choice: ["yes", "no", " maybe so"]\nmetric_list: '
        "[{metric: acc, aggregation: mean, higher_is_better: true}]"
    ),
    "loglikelihood_rolling": (
        "metric_list:\n  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}"
    ),
    "generate_until": "generation_kwargs: {until: ['zz'], do_sample: false, max_gen_toks: 9}\n"
    "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]",
}
GROUP = """
group: both
task: [multiple_choice, generate_until]
aggregate_metric_list: [{metric: acc, aggregation: mean, weight_by_size: true}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a task of every kind of request, and a group of two of them."""
    out = tmp_path_factory.mktemp("tasks")
    rows = [{"question": f"return self.{'x' * n}", "answer": n % 3} for n in range(7)]
    write_rows(out / "rows.jsonl", rows)
    for kind, more in KINDS.items():
        text = TASK.format(name=kind, data=out / "rows.jsonl", cache=out / "cache", kind=kind, more=more)
        (out / f"{kind}.yaml").write_text(text)
    (out / "both.yaml").write_text(GROUP)
    return out


@pytest.fixture(scope="module")
def chat(family_dirs, tmp_path_factory) -> Path:
    """Return a small model whose tokenizer has a chat template."""
    return with_template(family_dirs["llama"], tmp_path_factory.mktemp("chat") / "llama")


def golden(directory: Path, names: list[str], folder: Path, **settings: Any) -> dict[tuple[str, str], list[float]]:
    """Return the values of every item, and that of the task last, by lm-eval's own model and evaluator."""
    model = {"pretrained": str(directory), "dtype": "float32"}
    index = TaskManager(include_path=folder, include_defaults=False)
    found: Any = simple_evaluate("hf", model, names, device="cpu", task_manager=index, bootstrap_iters=0, **settings)
    values: dict[tuple[str, str], list[float]] = {}
    for task, samples in found["samples"].items():
        for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
            for metric in sample["metrics"]:
                if isinstance(sample[metric], float | int):
                    values.setdefault((task, metric), []).append(sample[metric])
    for task, measured in found["results"].items():
        for key, value in measured.items():
            if key.endswith(",none") and "_stderr" not in key:
                values.setdefault((task, key.partition(",")[0]), []).append(value)
    return values


def measured(results: list[TaskResult]) -> dict[tuple[str, str], list[float]]:
    return {(r.task, r.metric): [*r.items, r.value] for r in results}


def tasks(folder: Path, *kinds: str, **settings: Any) -> Tasks:
    return load_tasks([str(folder / f"{kind}.yaml") for kind in kinds], **{"limit": 5, "batch_size": 2} | settings)


def close(found: dict[tuple[str, str], list[float]], expected: dict[tuple[str, str], list[float]]) -> bool:
    assert found.keys() == expected.keys()
    return all(found[key] == pytest.approx(expected[key], rel=PASS_ROUNDING) for key in expected)


def test_every_kind_of_task_has_lm_evals_own_items(family_dirs, folder):
    place = family_dirs["llama"]
    results = tasks(folder, *KINDS).of_checkpoint(place, torch.float32, CPU)
    assert close(measured(results), golden(place, list(KINDS), folder, limit=5, batch_size=3))
    assert {(r.task, r.n) for r in results} == {(kind, 5) for kind in KINDS}


def test_a_score_passes_lm_evals_options_on(chat, folder, tmp_path):
    settings = {"num_fewshot": 2, "apply_chat_template": True}
    few = FEW | {"k": "1", "mode": "eager"}
    names = {"tasks": "both", "include_path": folder, "task_limit": 4, "task_batch_size": 2}
    models = {"target": str(chat), "draft": [str(chat)], "dtype": "float32"}
    COMMANDS["score"](**few, **names, **models, **settings, out=tmp_path / "out")
    result = read_score(tmp_path / "out/llama")
    expected = golden(chat, ["both"], folder, limit=4, fewshot_as_multiturn=True, **settings)
    assert close(measured(result.target.tasks), expected)
    assert result.draft.tasks == result.target.tasks
    (group,) = (r for r in result.target.tasks if r.task == "both")
    assert (group.n, group.items) == (8, [])  # four of each task
    plain = tasks(folder, "multiple_choice", limit=4).of_checkpoint(chat, torch.float32, CPU)
    shown = next(r for r in result.target.tasks if r.task == "multiple_choice")
    assert plain[0].items_sha256 != shown.items_sha256  # neither examples nor template were ignored


def test_requests_that_lm_eval_truncates_are_counted_for_each_model(family_dirs, folder, tmp_path, caplog):
    """lm-eval warns once for each truncated request. With long examples, one context is too short for them."""
    place = family_dirs["llama"]
    tokens = len(load_tokenizer(place)("return self.xxxx")["input_ids"])
    short = shutil.copytree(place, tmp_path / "short")
    edit(short / "config.json", max_position_embeddings=4 * tokens)
    asked: dict[str, Any] = {"num_fewshot": 3, "limit": 5, "batch_size": 1}
    read: dict[Path, dict[str, TaskResult]] = {}
    for model in (place, short):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            golden(model, list(KINDS), folder, num_fewshot=3, limit=5, batch_size=1)
        warned = [
            sum(text in record.message for record in caplog.records)
            for text in ("exceeds model's maximum length", "Left truncation applied")
        ]
        results = tasks(folder, *KINDS, **asked).of_checkpoint(model, torch.float32, CPU)
        read[model] = {result.task: result for result in results}
        names = ("multiple_choice", "generate_until")
        assert [read[model][name].truncated for name in names] == warned
        assert read[model]["loglikelihood_rolling"].truncated == 0  # read in windows
    assert read[place]["multiple_choice"].truncated == 0
    cut = read[short]["multiple_choice"]
    assert 0 < cut.truncated <= cut.requests == 15
    for name, result in read[place].items():
        assert (read[short][name].items_sha256 == result.items_sha256) == (read[short][name].truncated == 0)


def test_accuracies_of_different_prompts_are_not_paired_and_this_is_said(chat, folder, tmp_path):
    short = shutil.copytree(chat, tmp_path / "short")
    edit(short / "config.json", max_position_embeddings=24)
    few: dict[str, Any] = FEW | {"k": "1", "mode": "eager", "target": str(chat)}
    names: dict[str, Any] = {
        "tasks": str(folder / "multiple_choice.yaml"),
        "task_limit": 4,
        "num_fewshot": 3,
    }
    out, drafts = tmp_path / "out", [str(short), str(chat)]
    COMMANDS["score"](**few, **names, draft=drafts, dtype="float32", out=out)
    results = {name: read_score(out / name) for name in ("short", "llama")}
    cut = {name: score.draft.tasks[0].truncated for name, score in results.items()}
    assert cut["short"] > 0 == cut["llama"]
    for name, score in results.items():
        concerned = any("multiple_choice" in text for text in score_warnings([score]))
        assert concerned == (name == "short")
    table = accuracy_table([*results.values()])
    assert table is not None
    assert {row[2]: row[-1] for row in table.rows} == {
        "short": f"{cut['short']} of 12",
        "llama": "0",
    }


def test_a_trimmed_head_and_a_parallel_draft_are_whole_models_for_lm_eval(family_dirs, folder, tmp_path):
    place = tmp_path / "draft"
    shutil.copytree(family_dirs["llama"], place)
    write_head_ids(place, list(range(5, 90)))
    edit(place / "config.json", pard_token=300, spd_type="pard")
    asked = tasks(folder, "multiple_choice", "loglikelihood_rolling")
    expected = asked.of_checkpoint(family_dirs["llama"], torch.float32, CPU)
    assert asked.of_checkpoint(place, torch.float32, CPU) == expected


@pytest.fixture
def served(family_dirs) -> Iterator[dict[str, Any]]:
    """Settings of score around two running servers of the small llama."""
    place = family_dirs["llama"]
    model, tokenizer = load_model(place, torch.float32).eval(), load_tokenizer(place)
    plain, drafting = (SmallVLLM(model, tokenizer, frozenset(), draft=draft) for draft in (None, build("llama", 1)))
    with running(plain) as url, running(drafting) as other:
        yield FEW | {"server": url, "speculative_server": other, "target": str(place)}


def test_a_served_target_has_the_accuracy_of_its_checkpoint(served, family_dirs, folder, tmp_path):
    place, draft = family_dirs["llama"], family_dirs["qwen3"]
    names = ",".join(str(folder / f"{kind}.yaml") for kind in KINDS)
    COMMANDS["score"](**served, tasks=names, task_limit=5, draft=[str(draft)], out=tmp_path / "out")
    result = read_score(tmp_path / "out")
    assert close(measured(result.target.tasks), golden(place, list(KINDS), folder, limit=5))
    assert close(measured(result.draft.tasks), golden(draft, list(KINDS), folder, limit=5))


def test_data_that_cannot_be_had_is_said_before_a_model_is_loaded(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    task = tmp_path / "remote.yaml"
    task.write_text(
        "task: remote\ndataset_path: nobody/nothing\ntest_split: test\noutput_type: loglikelihood\n"
        "doc_to_text: '{{a}}'\ndoc_to_target: '{{b}}'\nmetric_list: [{metric: acc}]\n"
    )
    with raises_option("--tasks", "remote.yaml", "nobody/nothing"):
        COMMANDS["score"](target="tiny", draft=["tiny"], data="stdlib", tasks=str(task), out=tmp_path / "out")
    assert "loading tiny" not in capfd.readouterr().err


def test_options_that_a_task_ignores_are_refused(family_dirs, folder, tmp_path):
    text, place = (folder / "multiple_choice.yaml").read_text(), str(family_dirs["llama"])
    for name, more in (("fixed", "num_fewshot: 0"), ("unsafe", "unsafe_code: true")):
        (tmp_path / f"{name}.yaml").write_text(f"{text}{more}\n")
    fixed, unsafe = ({"tasks": str(tmp_path / f"{name}.yaml")} for name in ("fixed", "unsafe"))
    refusals: list[tuple[dict[str, Any], str]] = [
        (fixed | {"num_fewshot": 2}, "--num-fewshot"),
        (fixed | {"apply_chat_template": True}, "--apply-chat-template"),
        (unsafe, "--tasks"),
    ]
    asked = {"target": place, "draft": [place], "data": "stdlib", "out": tmp_path / "out"}
    for settings, option in refusals:
        with raises_option(option):
            COMMANDS["score"](**asked, **settings)
    with raises_option("--tasks", "helaswag"):
        load_tasks(["both", "helaswag"], limit=1, batch_size=1, include_path=folder)


def test_a_call_leaves_logging_and_streams_as_they_were(family_dirs, folder, capfd):
    before = logging.root.manager.disable, sys.stdout, sys.stderr
    tasks(folder, "multiple_choice").of_checkpoint(family_dirs["llama"], torch.float32, CPU)
    assert (logging.root.manager.disable, sys.stdout, sys.stderr) == before
    assert capfd.readouterr() == ("", "")
