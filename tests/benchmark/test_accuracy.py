"""Laws of draftlab accuracy: lm-eval's own numbers, nothing lost after a kill, joined to the model that it is of."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks.hellaswag.utils import process_docs
from test_report import change, score

from draftlab.benchmark import accuracy as benchmark
from draftlab.commands import COMMANDS
from draftlab.errors import UserError
from draftlab.model.checkpoint import load_model, load_tokenizer
from draftlab.provenance import fingerprint
from draftlab.results.accuracy import Accuracies, Accuracy, AccuracyConditions, ModelAccuracy, with_accuracy
from draftlab.results.compare import read_candidates
from draftlab.results.score import TaskResult

MAKE = Path(__file__).parents[2] / "recipes/tasks/make_tasks.py"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
HELLASWAG = [
    {
        "ind": n, "activity_label": "Coding", "ctx_a": f"def f{n}(self, x): [step] opens the file.", "ctx_b": "then it",
        "ctx": "both together", "endings": [f"return {n}", "  raise [title] an error", "pass", f"self.x{n} = x"],
        "label": str(n % 4), "split": "val",
    }
    for n in range(6)
]  # fmt: skip
ARC = [
    {"question": {"stem": "Which is a loop?", "choices": [{"text": "for", "label": "A"}, {"text": "if", "label": "B"}]},
     "answerKey": "A"},
    {"question": "Which is a test?", "choices": {"text": ["1", "if"], "label": ["1", "2"]}, "answerKey": "2"},
]  # fmt: skip
GSM8K = [{"question": f"What is {n} + {n}?", "answer": f"It is {n} + {n}.\n#### {2 * n}"} for n in range(9)]
WIKITEXT = ""  # as the data set is written: headings, a space before each full stop
for title in ("Alpha", "Beta", "Gamma", "Delta"):
    WIKITEXT += f" = {title} = \n \n"
    for part in ("north", "south", "east", "west"):
        own = [
            f"The {part} tower number {ord(title[0])}{n} was built of old stone by a king who is long dead"
            for n in range(3)
        ]
        WIKITEXT += f" {' . '.join(own)} . \n"


@pytest.fixture(scope="module")
def tiny(fp32: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target in fp32, with a chat template."""
    out = tmp_path_factory.mktemp("chat") / "tiny-chat"
    shutil.copytree(fp32, out)
    (out / "chat_template.jinja").write_text(TEMPLATE)
    return out


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tasks of recipes/tasks, made of small files, by name."""
    out = tmp_path_factory.mktemp("tasks")
    made = [("hellaswag", HELLASWAG, ()), ("arc", ARC, ()), ("gsm8k", GSM8K, ("--examples", "gsm8k.jsonl"))]
    for name, rows, options in made:
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        make(out, name, f"{name}.jsonl", *options)
    (out / "wiki.txt").write_text(WIKITEXT)
    make(out, "next-sentence", "wiki.txt")
    make(out, "which-article", "wiki.txt")
    for file in out.glob("*.yaml"):
        text = file.read_text().replace("dataset_kwargs: {", f"dataset_kwargs: {{cache_dir: {out / 'cache'}, ")
        file.write_text(text.replace("do_sample: false", "do_sample: false, max_gen_toks: 12"))
    return {file.stem: file for file in out.glob("*.yaml")}


def make(folder: Path, *words: str) -> None:
    subprocess.run([sys.executable, MAKE, *words, "--out", "."], cwd=folder, check=True, capture_output=True)


def rows(task: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in task.with_suffix(".jsonl").read_text().splitlines()]


def accuracy(models: list[Path], names: list[Path], out: Path, **settings: Any) -> Accuracy:
    COMMANDS["accuracy"](models=list(map(str, models)), tasks=",".join(map(str, names)), out=out, **settings)
    return Accuracy.model_validate_json((out / "accuracy.json").read_bytes())


def golden(directory: Path, names: list[Path], **settings: Any) -> dict[tuple[str, str], list[float]]:
    """What lm-eval's own model and evaluator say of every item."""
    hflm: Any = HFLM
    lm = hflm(load_model(directory, torch.float32).eval(), tokenizer=load_tokenizer(directory), batch_size=2)
    found: Any = simple_evaluate(
        lm, tasks=list(map(str, names)), task_manager=TaskManager(include_defaults=False), bootstrap_iters=0, **settings
    )
    items: dict[tuple[str, str], list[float]] = {}
    for task, samples in found["samples"].items():
        for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
            for metric in sample["metrics"]:
                name = metric if sample["filter"] == "none" else f"{metric},{sample['filter']}"
                items.setdefault((task, name), []).append(sample[metric])
    return items


def test_numbers_are_lm_evals_own_to_the_last_item(tiny: Path, tasks: dict[str, Path], tmp_path: Path):
    """Without and with examples and chat template: choices, log-likelihoods and generated answers."""
    names = [tasks[name] for name in ("local_hellaswag", "local_gsm8k", "local_gsm8k_answer")]
    ways = {"plain": {}, "chat": {"num_fewshot": 2, "apply_chat_template": True}}
    bits, asked = {}, set()
    for way, settings in ways.items():
        (model,) = accuracy([tiny], names, tmp_path / way, limit=5, batch_size=3, **settings).models
        more = {"fewshot_as_multiturn": True} if settings else {}
        expected = golden(tiny, names, limit=5, **settings, **more)
        found = {(r.task, r.metric): r.items for r in model.results if r.items}
        assert found.keys() | {("local_gsm8k_answer", "bits_per_byte")} == expected.keys()
        bits[way] = found.pop(("local_gsm8k_answer", "answer_bits"))
        assert bits[way] == pytest.approx(expected["local_gsm8k_answer", "answer_bits"], rel=1e-5)
        assert {key: expected[key] for key in found} == found
        assert all(len(items) == 5 for items in found.values())
        asked |= {r.items_sha256 for r in model.results}
    assert bits["plain"] != pytest.approx(bits["chat"], rel=0.01)  # so that the options were not ignored
    assert len(asked) == 2 * len(names)


def test_what_finished_before_a_kill_is_not_measured_again(
    family_dirs: dict[str, Path], tasks: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    models, names = [family_dirs["llama"], family_dirs["qwen3"]], [tasks["local_arc"], tasks["which_article"]]
    whole = accuracy(models, names, tmp_path / "whole", limit=3)
    evaluate, asked = benchmark.evaluate_tasks, list[tuple[str, str]]()

    def killed_at(most: int) -> Any:
        def run(model: Any, directory: Path, *args: Any, **more: Any) -> list[TaskResult]:
            if len(asked) == most:
                raise KeyboardInterrupt
            asked.append((directory.name, more["label"]))
            return evaluate(model, directory, *args, **more)

        return run

    for most in (1, 3):
        monkeypatch.setattr(benchmark, "evaluate_tasks", killed_at(most))
        with pytest.raises(KeyboardInterrupt):
            accuracy(models, names, tmp_path / "killed", limit=3)
    with pytest.raises(UserError, match="limit"):
        accuracy(models, names, tmp_path / "killed", limit=2)
    monkeypatch.setattr(benchmark, "evaluate_tasks", killed_at(9))
    resumed = accuracy(models, names, tmp_path / "killed", limit=3, batch_size=1)
    assert asked == [(model.name, str(name)) for model in models for name in names]
    assert [(m.name, m.sha256) for m in resumed.models] == [(model.name, fingerprint(model)) for model in models]
    pairs = zip(resumed.models, whole.models, strict=True)
    assert all([r.items for r in a.results] == [r.items for r in b.results] for a, b in pairs)
    assert not list(tmp_path.glob(".killed*"))


def test_a_dry_run_counts_items_and_writes_nothing(tiny: Path, tasks: dict[str, Path], tmp_path: Path):
    names = ",".join(str(tasks[name]) for name in ("local_arc", "local_gsm8k"))
    shown = COMMANDS["accuracy"](models=[str(tiny)], tasks=names, limit=5, out=tmp_path / "out", dry_run=True).data
    assert str(shown[str(tasks["local_arc"])]).startswith("2 items")
    assert "5 items" in str(shown[str(tasks["local_gsm8k"])])
    assert "at most 60 to write" in str(shown[str(tasks["local_gsm8k"])])
    assert "about" in str(shown["time"])
    assert not (tmp_path / "out").exists()


def test_missing_data_is_named_with_its_remedy_before_a_model_loads(tiny: Path, tmp_path: Path, capfd, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    task = tmp_path / "remote.yaml"
    task.write_text(
        "task: remote\ndataset_path: nobody/nothing\ntest_split: test\noutput_type: loglikelihood\n"
        "doc_to_text: '{{a}}'\ndoc_to_target: '{{b}}'\nmetric_list: [{metric: acc}]\n"
    )
    with pytest.raises(UserError, match=r"remote\.yaml.*data set nobody/nothing.*HF_HOME.*YAML task with local data"):
        accuracy([tiny], [task], tmp_path / "out")
    assert "loading tiny" not in capfd.readouterr().err


def test_options_that_a_task_ignores_are_refused(tiny: Path, fp32: Path, tasks: dict[str, Path], tmp_path: Path):
    fixed = tmp_path / "fixed.yaml"
    fixed.write_text(tasks["local_arc"].read_text().replace("local_arc", "fixed_arc", 1) + "num_fewshot: 0\n")
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"tasks": str(fixed), "num_fewshot": 2}, "fixed_arc sets 0"),
        ({"tasks": "code_next_line", "apply_chat_template": True, "data": "stdlib"}, "--apply-chat-template"),
        ({"tasks": "code_next_line", "num_fewshot": 2, "data": "stdlib"}, "--num-fewshot"),
        ({"tasks": str(fixed), "apply_chat_template": True, "models": [str(fp32)]}, "no chat template"),
        ({"tasks": str(fixed), "data": "stdlib"}, "--data"),
        ({"tasks": str(fixed), "include_path": tmp_path / "none"}, "no such directory"),
        ({"tasks": f"{fixed},{fixed}"}, "different names"),
    ]
    for settings, message in refusals:
        with pytest.raises(UserError, match=message):
            COMMANDS["accuracy"](**{"models": [str(tiny)], "out": tmp_path / "out"} | settings)


def test_hellaswags_rows_are_those_of_lm_evals_task(tasks: dict[str, Path]):
    from datasets import Dataset

    expected = process_docs(Dataset.from_list(HELLASWAG))
    for row, theirs in zip(rows(tasks["local_hellaswag"]), expected, strict=True):
        assert row == {"query": theirs["query"], "choices": theirs["choices"], "label": theirs["gold"]}


def test_both_layouts_of_arc_are_read(tasks: dict[str, Path]):
    first, second = rows(tasks["local_arc"])
    assert first == {"query": "Which is a loop?", "choices": ["for", "if"], "label": 0}
    assert second == {"query": "Which is a test?", "choices": ["1", "if"], "label": 1}


def test_stand_ins_have_one_right_choice_of_four(tasks: dict[str, Path]):
    for name in ("next_sentence", "which_article"):
        items = rows(tasks[name])
        assert items
        for item in items:
            assert len(set(item["choices"])) == 4
            assert 0 <= item["label"] < 4
    for item in rows(tasks["next_sentence"]):
        assert f"{item['query']} {item['choices'][item['label']]}" in WIKITEXT.replace(" .", ".")


def test_a_folder_of_tasks_is_found_by_name(family_dirs: dict[str, Path], tasks: dict[str, Path], tmp_path: Path):
    folder = tasks["local_arc"].parent
    (model,) = accuracy([family_dirs["llama"]], [Path("local_arc")], tmp_path / "out", include_path=folder).models
    assert {r.task for r in model.results} == {"local_arc"}


def result(value: float, task: str = "t", items: tuple[float, ...] = ()) -> TaskResult:
    return TaskResult(task=task, metric="acc", value=value, stderr=None, higher_is_better=True, items=list(items))


def written(folder: Path, *models: tuple[str, str, TaskResult]) -> Path:
    conditions = AccuracyConditions(
        limit=None, num_fewshot=None, apply_chat_template=False, data="stdlib", dtype="float32", seed=0
    )
    each = [ModelAccuracy(name=name, sha256=sha256, results=[found]) for name, sha256, found in models]
    made = Accuracy(models=each, conditions=conditions, items={"t": 2}, command="", versions={}, created="")
    folder.mkdir()
    (folder / "accuracy.json").write_text(made.model_dump_json())
    return folder


def test_accuracy_joins_the_same_weights_and_no_others(tmp_path: Path):
    narrow, wide = score("narrow", layers=2, tasks=()), score("wide", layers=3, tasks=())
    hashes = [str(each.draft.sha256) for each in (narrow, wide)]
    both = written(tmp_path / "both", ("renamed", hashes[0], result(0.25)), ("b", hashes[1], result(0.5)))
    joined = with_accuracy([narrow, wide], [both])
    assert [[r.value for r in each.draft.tasks] for each in joined] == [[0.25], [0.5]]
    assert joined[0].target == narrow.target
    other = written(tmp_path / "other", (narrow.draft.name, "0" * 64, result(0.75)))
    with pytest.raises(UserError, match="none with the name and weights of"):
        with_accuracy([narrow], [other])
    unknown = change(narrow, draft=narrow.draft.model_copy(update={"sha256": None}))  # of a server: by name
    assert [r.value for r in with_accuracy([unknown], [other])[0].draft.tasks] == [0.75]
    differing = written(tmp_path / "differing", ("a", hashes[0], result(0.3)))
    with pytest.raises(UserError, match="two outputs differ in t, acc"):
        Accuracies([both, differing])
    with pytest.raises(UserError, match="draftlab accuracy"):
        Accuracies([tmp_path])


def test_scores_and_predictions_are_compared_by_accuracy(tmp_path: Path):
    wide = score("wide", layers=3, tasks=())
    (tmp_path / "score.json").write_text(wide.model_dump_json())
    one = {"value": 2.0, "low": 1.9, "high": 2.1, "n": 5}
    row = {"k": 2, "tokens_per_pass": one, "speedup": one, "tokens_per_second": 10.0}
    predicted = {"name": "narrow, native", "target": wide.target.name, "rows": [row], "draft_model": "narrow"}
    (tmp_path / "predicted.json").write_text(json.dumps({"predictions": [predicted]}))
    sha256 = str(wide.draft.sha256)
    items = ("wide", sha256, result(0.5, items=(1, 0))), ("narrow", "0" * 64, result(1.0, items=(1, 1)))
    found = read_candidates([tmp_path / "score.json", tmp_path / "predicted.json"], [written(tmp_path / "a", *items)])
    assert [[r.value for r in candidate.tasks] for candidate in found] == [[0.5], [1.0]]
