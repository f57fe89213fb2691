"""What a run read is known by its content: text, prompts, tasks, templates; and the date that a template prints."""

import json
import os
import shutil
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from helpers.builders import training_killed_at
from helpers.errors import raises_option
from helpers.small_files import with_template, write_functions, write_prompts, write_rows
from transformers.utils import chat_template_utils

from draftlab.commands import COMMANDS
from draftlab.commands.steps import step_of
from draftlab.config.base import OutputConfig, extra
from draftlab.data.prompts import file_prompts
from draftlab.dates import fixed_date, resume_date
from draftlab.inputs import inputs_of, task_files, text_inputs
from draftlab.model import checkpoint
from draftlab.output import Output
from draftlab.runs import provenance
from draftlab.target_outputs import build as building
from draftlab.target_outputs import store

# a part of the templates of Llama 3.1 to 3.3, which print the date
DATED = (
    "{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}"
    "Today Date: {{ date_string }}\n"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
TRAINING = {"steps": 4, "batch_size": 2, "seq_len": 32, "eval_steps": 2, "save_steps": 2}


@pytest.fixture
def space(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_functions(Path("text.txt"), 600, 8)
    return tmp_path


def other_text() -> None:
    """Replace the text by another of the same length, as an edit in place does."""
    old = Path("text.txt").read_text()
    Path("text.txt").write_text(old.replace("line", "rows"))
    assert len(old) == Path("text.txt").stat().st_size


def test_training_does_not_resume_on_another_text(space, family_dirs):
    llama = str(family_dirs["llama"])
    asked = TRAINING | {"draft": llama, "target": llama, "data": "text.txt", "out": Path("out")}
    with training_killed_at(3):
        COMMANDS["distill"](**asked)
    kept = Path("text.txt").read_bytes()
    other_text()
    with raises_option("text.txt", "--force"):
        COMMANDS["distill"](**asked)
    Path("text.txt").write_bytes(kept)
    COMMANDS["distill"](**asked)
    record = provenance.read_record(Path("out"))
    assert record is not None
    assert record.inputs.keys() == {"text.txt", llama}


def test_masks_do_not_resume_on_another_text(space, family_dirs):
    masks = {"method": "masks", "source": str(family_dirs["llama"]), "data": "text.txt"}
    sizes = {"layers": 2, "steps": 4, "batch_size": 2, "seq_len": 32, "out": Path("out")}
    with training_killed_at(3):
        COMMANDS["prune"](**masks, **sizes)
    other_text()
    with raises_option("text.txt", "--force"):
        COMMANDS["prune"](**masks, **sizes)


def test_a_recipe_does_not_call_a_step_done_that_read_another_text(space, family_dirs):
    settings = {"source": str(family_dirs["llama"]), "data": "text.txt", "out": "cut"}
    settings |= {"layers": 2, "seq_len": 32, "calibration_tokens": 64}
    step = step_of("prune", settings, {}, "recipe")
    step.run("first")
    assert step.is_done()
    other_text()
    assert not step.is_done()
    with raises_option("text.txt", "cut"):
        step.run("again")
    shutil.rmtree("cut")
    step.run("anew")
    assert step.is_done()


def test_scores_are_not_used_again_for_another_text(space, family_dirs):
    settings = {"source": str(family_dirs["llama"]), "data": "text.txt", "layers": 2}
    settings |= {"seq_len": 32, "calibration_tokens": 64, "scores_cache": Path("scores")}
    for out in ("a", "b"):
        COMMANDS["prune"](**settings, out=Path(out))
    other_text()
    with raises_option("--scores-cache", "text.txt"):
        COMMANDS["prune"](**settings, out=Path("c"))


def killed_after(shards: int, monkeypatch: pytest.MonkeyPatch, build: Callable[[], Any]) -> None:
    """Interrupt a build of target outputs when it has written some shards, of the held-out text or of the rest."""
    add, written = store._add_shard, []

    def killed(*arguments: Any) -> Any:
        if len(written) == shards:
            raise KeyboardInterrupt
        written.append(arguments)
        return add(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(store, "_add_shard", killed)
        with pytest.raises(KeyboardInterrupt):
            build()


@pytest.mark.parametrize("source", ["text.txt", "folder"])
def test_a_store_does_not_mix_two_texts(space, family_dirs, monkeypatch, source):
    monkeypatch.setattr(building, "DISTILL_SHARD", 8)
    Path("folder/deep").mkdir(parents=True)
    os.link("text.txt", "folder/deep/text.txt")
    asked = {"target": str(family_dirs["llama"]), "data": source, "out": Path("out")}
    asked |= {"num_sequences": 20, "seq_len": 16}
    killed_after(2, monkeypatch, lambda: COMMANDS["outputs build"](**asked))
    other_text()
    with raises_option(source, "--out"):
        COMMANDS["outputs build"](**asked)


def test_answers_do_not_mix_two_prompt_files_or_templates(space, family_dirs, monkeypatch):
    monkeypatch.setattr(building, "DISTILL_SHARD", 8)
    target = with_template(family_dirs["llama"], Path("chat"))
    prompts = write_prompts(Path("prompts.jsonl"), 20)
    asked = {"target": str(target), "prompt_file": prompts, "max_new_tokens": 4, "out": Path("out")}
    killed_after(2, monkeypatch, lambda: COMMANDS["outputs build"](**asked))
    kept, template = prompts.read_text(), (target / "chat_template.jinja").read_text()
    prompts.write_text(kept.replace("def", "DEF"))
    with raises_option("prompts.jsonl"):
        COMMANDS["outputs build"](**asked)
    prompts.write_text(kept)
    (target / "chat_template.jinja").write_text("Be brief. " + template)
    with raises_option("chat"):
        COMMANDS["outputs build"](**asked)
    (target / "chat_template.jinja").write_text(template)
    COMMANDS["outputs build"](**asked)


@pytest.mark.parametrize(
    "name",
    ["tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json"],
)
def test_every_file_that_decides_results_identifies_a_checkpoint(family_dirs, tmp_path, name):
    model = with_template(family_dirs["llama"], tmp_path / "model")
    (model / "generation_config.json").write_text('{"eos_token_id": 1}')
    before = provenance.fingerprint(model)
    (model / "README.md").write_text("# A card")
    (model / provenance.RECORD_FILE).write_text("{}")
    assert provenance.fingerprint(model) == before
    (model / name).write_text((model / name).read_text() + " ")
    assert provenance.fingerprint(model) != before


def test_every_file_of_a_task_is_an_input(space):
    """lm-eval includes YAML, reads data files, and calls functions of Python files that the YAML names."""
    Path("tasks").mkdir()
    Path("tasks/base.yaml").write_text("dataset_kwargs: {data_files: {test: rows.jsonl}}\n")
    Path("tasks/one.yaml").write_text(
        "include: base.yaml\ntask: one\nprocess_docs: !function helpers.clean\noutput_type: loglikelihood\n"
    )
    Path("tasks/helpers.py").write_text("def clean(docs): return docs\n")
    Path("tasks/notes.md").write_text("nothing reads this\n")
    write_rows(Path("rows.jsonl"), [{"a": 1}])
    names = {"tasks/one.yaml", "tasks/base.yaml", "tasks/helpers.py", "rows.jsonl"}
    assert {str(file) for file in task_files(Path("tasks/one.yaml"))} == names
    assert [*task_files(Path("hellaswag"))] == []  # lm-eval's own
    config = COMMANDS["score"].config.build(
        {"draft": ["d"], "target": "t", "data": "text.txt", "tasks": "tasks/one.yaml,hellaswag"}
    )
    before = inputs_of(config)
    assert before.keys() == names | {"text.txt"}
    for name in sorted(names):
        kept = Path(name).read_text()
        Path(name).write_text(kept + "\n")
        assert [n for n in before if inputs_of(config)[n] != before[n]] == [name]
        Path(name).write_text(kept)


def test_a_source_is_known_by_its_content(space):
    write_rows(Path("rows.jsonl"), [{"text": "a", "domain": "x"}])
    mixture = "rows.jsonl#domain=0.5,stdlib=0.2,packages=0.2,text.txt=0.1"
    before = text_inputs(mixture)
    assert before.keys() == {"rows.jsonl", "stdlib", "packages", "text.txt"}
    assert text_inputs(mixture) == before
    assert len(set(before.values())) == 4
    times = Path("rows.jsonl").stat()
    os.utime("rows.jsonl", ns=(times.st_atime_ns, times.st_mtime_ns + 10**9))
    assert text_inputs(mixture) == before  # the time alone is no change
    write_rows(Path("rows.jsonl"), [{"text": "b", "domain": "x"}])
    after = text_inputs(mixture)
    assert [name for name in before if after[name] != before[name]] == ["rows.jsonl"]


def test_an_input_that_changes_during_a_run_is_recorded_as_it_was_read(space, family_dirs):
    config = COMMANDS["prune"].config.build({"source": "tiny", "data": "text.txt"})
    output = Output(command="prune", config=config, out=Path("out"))
    before = output.inputs()
    other_text()
    output.record(space)
    record = provenance.read_record(space)
    assert record is not None
    assert record.inputs == before != inputs_of(config)


def test_every_option_that_names_a_file_is_an_input_or_says_that_it_is_not():
    """A new option is an input without further work; these alone name files that are not read, or decide nothing."""
    nothing = {
        (name, field)
        for name, command in COMMANDS.items()
        if issubclass(command.config, OutputConfig)
        for field, info in command.config.model_fields.items()
        if extra(info)["reads"] == "nothing"
    }
    written = {"out", "scores_cache", "api_key_file", "verify_with"}
    assert {field for _, field in nothing} == written


class Yesterday(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime.now(tz) - timedelta(days=1)


def test_a_template_prints_the_date_of_the_start_also_after_a_resume(space, family_dirs, monkeypatch):
    """The text of a day comes from transformers, whose clock is put back."""
    monkeypatch.setattr(building, "DISTILL_SHARD", 8)
    target = with_template(family_dirs["llama"], Path("chat"), DATED)
    prompts, tokenizer = write_prompts(Path("prompts.jsonl"), 20), checkpoint.load_tokenizer(target)
    message = [{"role": "user", "content": "def f0(x):"}]

    def by_transformers() -> list[int]:
        return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)

    today = by_transformers()
    with monkeypatch.context() as patched:
        patched.setattr(chat_template_utils, "datetime", Yesterday)
        yesterday = by_transformers()
    assert yesterday != today
    start = (datetime.now() - timedelta(days=1)).isoformat(timespec="seconds")
    with fixed_date():
        assert file_prompts(prompts, tokenizer, chat="on").rows[0].ids == today
        resume_date(start)
        assert file_prompts(prompts, tokenizer, chat="on").rows[0].ids == yesterday
    asked = {"target": str(target), "prompt_file": prompts, "max_new_tokens": 4, "out": Path("out")}
    killed_after(2, monkeypatch, lambda: COMMANDS["outputs build"](**asked))
    manifest = json.loads(Path("out/manifest.json").read_text())
    assert manifest["date"].startswith(f"{datetime.now():%Y-%m-%d}")
    shutil.rmtree("out")

    def begun_yesterday() -> None:
        with fixed_date():
            resume_date(start)
            COMMANDS["outputs build"](**asked)

    killed_after(2, monkeypatch, begun_yesterday)
    COMMANDS["outputs build"](**asked)
    outputs = [*store.read_texts(Path("out")), *store.read_texts(Path("out/heldout"))]
    assert yesterday in [output.prompt.tolist() for output in outputs]
    assert today not in [output.prompt.tolist() for output in outputs]


def test_a_resumed_training_reads_text_of_the_date_of_its_start(space, family_dirs, monkeypatch):
    llama = str(with_template(family_dirs["llama"], Path("chat"), DATED))
    talk = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one two three"}]
    write_rows(
        Path("chats.jsonl"),
        [{"messages": [talk[0] | {"content": f"count {i}"}, talk[1]]} for i in range(60)],
    )
    asked = TRAINING | {"draft": llama, "target": llama, "data": "chats.jsonl", "seq_len": 64}
    start = (datetime.now() - timedelta(days=1)).isoformat(timespec="seconds")
    with fixed_date():
        resume_date(start)
        COMMANDS["distill"](**asked, out=Path("whole"))
        with training_killed_at(3):
            COMMANDS["distill"](**asked, out=Path("out"))
    COMMANDS["distill"](**asked, out=Path("out"))
    logs = [[json.loads(line) for line in (Path(n) / "log.jsonl").open()] for n in ("whole", "out")]
    assert [step["loss"] for step in logs[0] if "loss" in step] == [step["loss"] for step in logs[1] if "loss" in step]
    record = provenance.read_record(Path("out"))
    assert record is not None
    assert record.notes["date"] == start
