"""Every option is used, refused or named in a note, in every mode of every command.

Each case of data/every_option.yaml plans a command on small models and records which settings it reads, and runs it if
the plan leaves some unread. A setting that a mode neither reads, refuses nor names would be accepted and ignored.
"""

import contextlib
import io
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
import yaml
from helpers.builders import TOKENIZER_TEXT, build, save_neox
from helpers.loopback_servers import SmallVLLM, running
from helpers.small_files import copy_tokenizer, with_template, write_prompts, write_rows
from pydantic.fields import FieldInfo
from safetensors.torch import load_file

from benchmarks.expand import expand
from benchmarks.tiny_target import train_tokenizer
from draftlab.commands import AUTO, COMMANDS
from draftlab.commands.base import Command
from draftlab.config.base import Config, bound, extra, option
from draftlab.errors import UserError
from draftlab.model import checkpoint
from draftlab.searching.schedule import NoCheapShape

Settings = dict[str, Any]
MODES = yaml.safe_load((Path(__file__).parents[1] / "files/every_option.yaml").read_text())
del MODES["shared"]
CASES = [(command, mode) for command, modes in MODES.items() for mode in modes]
TASK = """
task: own
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}, cache_dir: {rows}-cache}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["yes", "no"]
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""


@dataclass(frozen=True)
class World:
    """The inputs of the cases. places: Paths of models and files, and addresses of servers, by name."""

    root: Path
    places: dict[str, str]

    def settings(self, command: str, mode: str) -> Settings:
        return {name: self.filled(value) for name, value in MODES[command][mode].items()}

    def filled(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.filled(each) for each in value]
        if isinstance(value, str):
            return re.sub(r"\{(.*?)\}", lambda name: self.places.get(name[1]) or self.made(name[1]), value)
        return value

    def made(self, case: str) -> str:
        """Return the output of a case, which is made once."""
        command, mode = case.split(": ")
        out = self.root / case
        if not out.exists():
            COMMANDS[command](**self.settings(command, mode), out=out)
        return str(out)


def traced(config: type[Config]) -> tuple[type[Config], set[str]]:
    """Return a config class that records which settings are read from its instances."""
    read: set[str] = set()

    class Traced(config):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            if name in config.model_fields:
                read.add(name)
            return super().__getattribute__(name)

    return Traced, read


def unread(command: Command, settings: Settings) -> set[str]:
    """Return the settings that a command neither reads, refuses nor names as without effect in this mode."""
    config_class, read = traced(command.config)
    config = config_class.build(settings)
    read.clear()  # rules and validators do not use a setting
    for dry_run in (True, False) if command.dry_run else (False,):
        command.run(config, dry_run=dry_run)
        ignored = set(command.config.model_fields) - read
        ignored = {name for name in ignored if not noticed(command, settings, name)}
        if not ignored:
            break
    return ignored


def noticed(command: Command, settings: Settings, name: str) -> bool:
    """Return whether a setting with another value than its default is refused beside the others, or named in a note.

    Some notes depend on the contents of files, which a plan reads.
    """
    flag = command.config.flag(name)
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            config = command.config.build(settings | {name: another_value(command.config.model_fields[name])})
            config.note_unused()
            if flag not in stderr.getvalue() and command.dry_run:
                command.run(config, dry_run=True)
    except UserError as error:
        return flag in str(error)
    return flag in stderr.getvalue()


def another_value(field: FieldInfo) -> Any:
    """Return a valid value that is not the default."""
    kinds = get_args(field.annotation) or (field.annotation,)
    if get_origin(field.annotation) is Literal:
        return next(value for value in kinds if value != field.default)
    if extra(field)["typed"] is str:
        return "3,5"
    if bool in kinds:
        return not field.default
    if get_origin(field.annotation) is list:
        return ["other"]
    if int in kinds or float in kinds:
        high = bound(field, "le")
        return high if high is not None and high != field.default else (field.default or 1) + 1
    return "other"


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_every_option_is_read_or_noticed(name, mode, world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "init":
        Path("draftlab.yaml").touch()
    assert unread(COMMANDS[name], world.settings(name, mode)) == set()


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_every_mode_runs(name, mode, device, world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = world.settings(name, mode)
    if device == "cuda":
        placed = "device" in COMMANDS[name].config.model_fields and settings.get("mode") != "native"
        if not (placed and torch.cuda.is_available()):
            pytest.skip("for CPUs")
        settings["device"] = device
    try:
        COMMANDS[name](**settings)
    except UserError as error:
        # the models of a server, say, have a place already; on a shared GPU, the times of passes decide what is cheap
        unfit = str(error).startswith("--device:") or isinstance(error, NoCheapShape)
        if device == "cuda" and unfit:
            pytest.skip(str(error))
        raise


def test_every_option_of_auto_is_read_or_noticed(tokenizer_dir, tmp_path, monkeypatch):
    """A target that cannot be pruned has prompt lookup as its only candidate in vLLM, which is quick."""
    monkeypatch.chdir(tmp_path)
    target = save_neox(tmp_path / "neox", tokenizer_dir)
    settings = {
        "target": str(target),
        "prompt_file": write_prompts(Path("prompts.jsonl"), 96),
        "server": "vllm",
        "out": Path("auto"),
        "verify_with": Path(shutil.which("true") or ""),
    }
    assert unread(AUTO, settings) == set()


def test_every_command_has_a_case():
    without = {"env", "auto"}  # env has no settings, auto a test of its own
    assert MODES.keys() | without == COMMANDS.keys()


def test_an_ignored_option_is_noticed(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = COMMANDS["design"]

    class Ignoring(command.config):  # type: ignore[name-defined, misc]
        shuffled: int = option(0, "Ignored.")

    ignoring = replace(command, config=Ignoring)
    assert unread(ignoring, world.settings("design", "parameters")) == {"shuffled"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, family_dirs: dict[str, Path]) -> Iterator[World]:
    root = tmp_path_factory.mktemp("world")
    source, draft, wordy, chat, pickled = (
        family_dirs["llama"],
        *(root / name for name in ("draft", "other_words", "chat", "pickled")),
    )
    build("llama", 1, num_hidden_layers=2).save_pretrained(draft)
    copy_tokenizer(source, draft)
    build("llama", vocab_size=330).save_pretrained(wordy)
    train_tokenizer([*TOKENIZER_TEXT, "for line in lines: print(line)\n" * 9], 330, wordy)
    with_template(source, chat)
    shutil.copytree(draft, pickled)
    torch.save(load_file(draft / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    # layers that add nothing, so that shapes are cheap beside it on any machine
    deep = checkpoint.read_shape(source).model_copy(update={"layers": 24})
    places = {"source": source, "costly": expand(source, root / "costly", deep)}
    places |= {path.name: path for path in (draft, wordy, chat, pickled)} | write_files(root)
    model, small = (checkpoint.load_model(path, torch.float32).eval() for path in (source, draft))
    tokenizer = checkpoint.load_tokenizer(source)
    servers = {
        "server": SmallVLLM(model, tokenizer, frozenset()),
        "drafting": SmallVLLM(model, tokenizer, frozenset(), draft=small),
    }
    with ExitStack() as stack:
        urls = {name: stack.enter_context(running(server)) for name, server in servers.items()}
        yield World(root, {name: str(place) for name, place in places.items()} | urls)


def write_files(root: Path) -> dict[str, Path]:
    """Write the files that cases read, and return them by name."""
    row = {"prompt_ids": [0, 30, 29], "ids": [65, 57], "logprobs": [-1.61, -0.52]}
    row |= {"top_ids": [[65, 135], [57, 14]], "top_logprobs": [[-1.61, -2.69], [-0.52, -1.07]]}
    logged = [row | {"prompt_ids": [0, 30 + i, 29]} for i in range(4)]
    turns = ([("user", f"def parse{i}(line):"), ("assistant", "return None")] for i in range(60))
    talks = [{"messages": [{"role": role, "content": content} for role, content in talk]} for talk in turns]
    texts = ({"text": f"# {i}\n{TOKENIZER_TEXT[0] * 6}"} for i in range(700))
    files = {
        "more": write_rows(root / "more.jsonl", texts),
        "prompts": write_prompts(root / "prompts.jsonl", 12),
        "asked": write_prompts(root / "asked.jsonl", 60),
        "few": write_prompts(root / "few.jsonl", 4),
        "talks": write_rows(root / "talks.jsonl", talks),
        "log": write_rows(root / "day.jsonl", logged),
        "text": root / "text.jsonl",
        "task": root / "own.yaml",
    }
    files["text"].write_text("".join(files["more"].read_text().splitlines(keepends=True)[:160]))
    questions = ({"question": f"return {n}", "answer": n % 2} for n in range(4))
    files["task"].write_text(TASK.format(rows=write_rows(root / "rows.jsonl", questions)))
    return files
