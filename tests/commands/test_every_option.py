"""Every option is used or refused, in every mode of every command.

Each case plans a command on small models and records which settings it reads, and runs it if the plan leaves some
unread. A setting that a mode neither reads nor refuses would be accepted and ignored.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from builders import TOKENIZER_TEXT, build, save_neox
from loopback_servers import PacedVLLM, SmallVLLM, running
from pydantic.fields import FieldInfo
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.expand import expand
from benchmarks.tiny_target import train_tokenizer
from draftlab import provenance
from draftlab.commands import COMMANDS
from draftlab.commands.auto import auto
from draftlab.commands.base import Command
from draftlab.config.base import Config, bound, extra, option
from draftlab.errors import UserError
from draftlab.model import checkpoint
from draftlab.recipe import run


@dataclass(frozen=True)
class World:
    """What the cases work on: directories of small models, text, and outputs of earlier cases."""

    root: Path
    source: str
    draft: str
    text: str
    server: str  # runs source
    drafting_server: str  # runs source with draft
    paced: str  # takes a known time for every step
    paced_drafting: str

    @property
    def cut(self) -> dict[str, Any]:
        return {"source": self.source, "data": self.text}

    @property
    def asked(self) -> dict[str, Any]:
        return {"target": self.source, "data": self.text}

    @property
    def pair(self) -> dict[str, Any]:
        return {"draft": self.draft, "target": self.source}


Settings = dict[str, Any]
CASES: dict[tuple[str, str], Callable[[World], Settings]] = {}
TINY_CUT: Settings = {"layers": 2, "width": 48, "ffn": 40, "seq_len": 16}


def without(settings: Settings, *names: str) -> Settings:
    return {name: value for name, value in settings.items() if name not in names}


def made(w: World, name: str, command: str, mode: str) -> Path:
    """Return the output of a case, which is made once."""
    out = w.root / name
    if not out.exists():
        COMMANDS[command](**CASES[command, mode](w), out=out)
    return out


def answers(w: World) -> Path:
    return made(w, "answers", "outputs build", "replay")


def stored(w: World) -> Path:
    return made(w, "stored", "outputs build", "distill, data")


def head(w: World) -> str:
    """An EAGLE-3 head of the source."""
    return str(made(w, "head", "distill", "a head, stored outputs"))


def case(
    command: str, mode: str
) -> Callable[[Callable[[World], Settings]], Callable[[World], Settings]]:
    def register(settings: Callable[[World], Settings]) -> Callable[[World], Settings]:
        CASES[command, mode] = settings
        return settings

    return register


CASES["prune", "importance"] = lambda w: TINY_CUT | {**w.cut, "calibration_tokens": 64}


CASES["prune", "random"] = lambda w: (
    TINY_CUT | {**w.cut, "method": "random", "calibration_tokens": 64}
)


CASES["prune", "first, nothing refitted"] = lambda w: (
    TINY_CUT | {"refit": "none", "method": "first"} | w.cut
)


CASES["prune", "head trimmed to the target's answers"] = lambda w: (
    TINY_CUT | {"source": w.source, "vocab": "200", "outputs": answers(w), "calibration_tokens": 64}
)


MASKS: Settings = TINY_CUT | {
    "method": "masks",
    "steps": 2,
    "batch_size": 2,
    "calibration_tokens": 512,
}


CASES["prune", "masks, frozen"] = lambda w: MASKS | w.cut


CASES["prune", "masks, full"] = lambda w: CASES["prune", "masks, frozen"](w) | {"lr": 1e-4}


def other_words(w: World) -> str:
    """A whole model with another vocabulary."""
    folder = w.root / "other-words"
    if not folder.exists():
        build("llama", vocab_size=330).save_pretrained(folder)
        train_tokenizer([*TOKENIZER_TEXT, "for line in lines: print(line)\n" * 9], 330, folder)
    return str(folder)


CASES["export", "vllm, another vocabulary"] = lambda w: {
    "draft": w.draft,
    "target": other_words(w),
    "to": "vllm",
    "use_heterogeneous_vocab": True,
}


CASES["design", "parameters"] = lambda w: {"source": "tiny", "params": "4m", "layers": "2,4"}


FEW: Settings = {"steps": 2, "batch_size": 2, "seq_len": 24, "save_steps": 1}


def distilling(w: World, **more: Any) -> Settings:
    return FEW | {**w.pair, "data": w.text} | more


CASES["distill", "data"] = lambda w: distilling(w)


CASES["distill", "text of both models"] = lambda w: distilling(
    w, text="target=0.5,draft=0.5", prompt_tokens=8
)


CASES["distill", "trimmed head"] = lambda w: distilling(w, vocab="200")


@case("distill", "answers to prompts")
def _(w: World) -> Settings:
    settings = chat(w)
    Path("prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"def parse{i}(line):"}) + "\n" for i in range(12))
    )
    few = without(FEW, "seq_len")
    return few | settings | {"draft": w.draft, "text": "target", "max_new_tokens": 6}


def talks(w: World) -> Settings:
    """Conversations, for a copy of the source with a chat template."""
    messages = [
        {"role": "user", "content": "def parse(line):"},
        {"role": "assistant", "content": "return None"},
    ]
    Path("chat.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 60)
    return {"target": chat(w)["target"], "data": "chat.jsonl", "seq_len": 48}


CASES["distill", "conversations"] = lambda w: (
    FEW | {"loss": "ce", "draft": talks(w)["target"], "data": "chat.jsonl", "seq_len": 48}
)


CASES["outputs build", "conversations"] = lambda w: (
    talks(w) | {"num_sequences": 4, "top_logprobs": 4}
)


CASES["distill", "cross-entropy"] = lambda w: FEW | {"draft": w.draft, "data": w.text, "loss": "ce"}


CASES["distill", "in parallel"] = lambda w: distilling(w, student="parallel:tokens=3")


CASES["distill", "a head, text of the target"] = lambda w: (
    FEW
    | {"student": "eagle:ttt_steps=2,layer_ids=1+2", "text": "target", "prompt_tokens": 8}
    | w.asked
)


CASES["distill", "a head, stored outputs"] = lambda w: (
    FEW
    | {
        "student": "eagle:ttt_steps=2,layer_ids=1+2+3",
        "seq_len": 64,
        "target": w.source,
        "outputs": answers(w),
    }
)


CASES["distill", "a head to train on"] = lambda w: (
    CASES["distill", "a head, stored outputs"](w)
    | {"student": "eagle:ttt_steps=2", "draft": head(w)}
)


CASES["replay", "an EAGLE-3 head"] = lambda w: {
    "draft": [head(w)],
    "directory": answers(w),
    "target": w.source,
    "k": "1,2",
}


CASES["replay", "a drafter"] = lambda w: {
    "drafter": [f"model:draft={w.draft}"],
    "directory": answers(w),
    "k": "1,2",
}


CASES["profile", "an EAGLE-3 head"] = lambda w: (
    CASES["profile", "native"](w) | {"models": [w.source, head(w)]}
)


CASES["check", "run"] = lambda w: {**w.pair, "data": w.text}


CASES["check", "conversations"] = lambda w: {"draft": w.draft} | chat(w)


CASES["check", "files only"] = lambda w: {**w.pair, "files_only": True}


CASES["check", "EAGLE-3 head"] = lambda w: {"draft": head(w), **w.asked}


CASES["export", "EAGLE-3 head"] = lambda w: {
    "draft": head(w),
    "target": w.source,
    "to": "vllm",
    "k": 2,
}


CASES["export", "EAGLE-3 head, GGUF"] = lambda w: {
    "draft": head(w),
    "target": w.source,
    "to": "llama.cpp",
}


CASES["export", "hf"] = lambda w: w.pair


CASES["export", "vllm"] = lambda w: {**w.pair, "to": "vllm", "k": 2}


@case("export", "K by batch size")
def _(w: World) -> Settings:
    ranges = {"ranges": [[1, 4, 2], [5, 8, 0]], "pays_up_to": 4}
    row = {"draft_sha256": provenance.fingerprint(Path(w.draft)), "schedule": ranges}
    Path("prediction.json").write_text(json.dumps({"predictions": [row]}))
    return {**w.pair, "to": "vllm", "prediction": Path("prediction.json")}


@case("import", "")
def _(w: World) -> Settings:
    folder = w.root / "bin"
    if not folder.exists():
        AutoModelForCausalLM.from_pretrained(w.draft).save_pretrained(
            folder, safe_serialization=False
        )
        if not (folder / "pytorch_model.bin").exists():
            weights = load_file(Path(w.draft) / "model.safetensors")
            (folder / "model.safetensors").unlink(missing_ok=True)
            torch.save(weights, folder / "pytorch_model.bin")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(w.draft) / name, folder)
    return {"source": str(folder)}


@case("init", "target")
def _(w: World) -> Settings:
    Path("draftlab.yaml").touch()
    return {"target": w.source, "source": w.draft, "overwrite": True}


@case("init", "preset")
def _(w: World) -> Settings:
    Path("draftlab.yaml").touch()
    return {"preset": "tiny", "overwrite": True}


@case("search", "widths")
def _(w: World) -> Settings:
    few = {
        "minutes": 0.01,
        "layers": "1,2",
        "widths": "24,48",
        "k": "1,2",
        "first_steps": 1,
        "threads": 1,
    }
    data = str(write_text(Path("more.jsonl"), 700))
    return few | {"target": str(costly_target(w)), "source": w.source, "data": data}


def costly_target(w: World) -> Path:
    """The source with layers that add nothing, so that shapes are cheap beside it on any machine."""
    folder = w.root / "costly"
    if not folder.exists():
        expand(
            Path(w.source),
            folder,
            checkpoint.read_shape(Path(w.source)).model_copy(update={"layers": 10}),
        )
    return folder


CASES["search", "parallel drafts"] = lambda w: CASES["search", "widths"](w) | {"parallel": True}


@case("search", "stored outputs and prompts")
def _(w: World) -> Settings:
    prompts = [{"prompt": f"def parse{i}(line):"} for i in range(60)]
    Path("asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    settings = without(CASES["search", "widths"](w), "data")
    return settings | {"outputs": stored(w), "prompt_file": Path("asked.jsonl"), "vocab": "200"}


LAW: Settings = {"law": True, "repeats": 3, "context": "8", "threads": 1, "mode": "eager"}


CASES["profile", "law"] = lambda w: LAW | {"models": [w.source]}


CASES["profile", "law of profiles"] = lambda w: {
    "models": [str(made(w, "law", "profile", "law"))],
    "law": True,
}


CASES["profile", "eager"] = lambda w: {
    "models": [w.draft],
    "k": 1,
    "context": "8",
    "repeats": 3,
    "mode": "eager",
}


CASES["profile", "native"] = lambda w: {
    "models": [w.draft],
    "k": 1,
    "context": "8",
    "repeats": 3,
    "mode": "native",
}


CASES["predict", "alpha"] = lambda w: profiles() | {"acceptance": ["0.7"]}


CASES["predict", "acceptance length"] = lambda w: (
    profiles() | {"acceptance": ["2.5@4"], "batch": "1,2"}
)


CASES["predict", "vLLM, by batch size"] = lambda w: (
    profiles() | {"acceptance": ["0.7"], "batch": "1,2", "server": "vllm"}
)


def profiles() -> Settings:
    return {
        "draft_profile": ["wide-796m@a100-80gb,eager"],
        "target_profile": "llama-65b@4xa100-80gb,eager",
    }


def scoring(w: World, **more: Any) -> Settings:
    few = {
        "k": "1,2",
        "num_prompts": 2,
        "prompt_tokens": 8,
        "max_new_tokens": 6,
        "repeats": 1,
        "mode": "eager",
    }
    return few | {"draft": [w.draft], **w.asked} | more


CASES["score", "greedy"] = lambda w: scoring(w)


CASES["score", "lm-eval's task"] = lambda w: scoring(w, tasks=task(w), task_limit=2)


def task(w: World) -> str:
    """A task of lm-eval with data on this disk."""
    rows = "".join(
        json.dumps({"question": f"return {n}", "answer": n % 2}) + "\n" for n in range(4)
    )
    (w.root / "rows.jsonl").write_text(rows)
    data = f"{{data_files: {{test: {w.root / 'rows.jsonl'}}}, cache_dir: {w.root / 'cache'}}}"
    text = f"task: own\ndataset_path: json\ndataset_kwargs: {data}\ntest_split: test\noutput_type: multiple_choice\n"
    text += 'doc_to_text: "{{question}}"\ndoc_to_choice: ["yes", "no"]\ndoc_to_target: answer\n'
    (w.root / "own.yaml").write_text(text + "metric_list: [{metric: acc}]\n")
    return str(w.root / "own.yaml")


CASES["score", "sampled, drafters, native"] = lambda w: scoring(
    w, temperature=1.0, drafter=["prompt-lookup"], mode="native", threads=1
)


CASES["score", "sampled as vLLM"] = lambda w: scoring(w, temperature=1.0, server_rule="vllm")


CASES["score", "conversations"] = lambda w: without(scoring(w), "prompt_tokens") | chat(w)


def chat(w: World) -> Settings:
    """A prompt file, for a copy of the source with a chat template."""
    folder = w.root / "chat"
    if not folder.exists():
        shutil.copytree(w.source, folder)
        (folder / "chat_template.jinja").write_text(
            "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
        )
    Path("prompts.jsonl").write_text((json.dumps({"prompt": "def parse(line):"}) + "\n") * 4)
    return {"prompt_file": Path("prompts.jsonl"), "target": str(folder)}


CASES["outputs build", "distill, data"] = lambda w: {
    **w.asked,
    "num_sequences": 4,
    "seq_len": 24,
    "top_logprobs": 4,
}


CASES["outputs build", "distill, text of the target"] = lambda w: (
    {"num_sequences": 4, "seq_len": 24, "top_logprobs": 4, "prompt_tokens": 8, "text": "target"}
    | w.asked
)


CASES["outputs build", "replay"] = lambda w: replayable(w)


def replayable(w: World) -> Settings:
    few = {"use": "replay", "num_prompts": 4, "prompt_tokens": 8, "max_new_tokens": 8}
    return few | w.asked


CASES["outputs build", "replay, conversations"] = lambda w: (
    {name: replayable(w)[name] for name in ("use", "num_prompts", "max_new_tokens")} | chat(w)
)


CASES["outputs info", ""] = lambda w: {"directory": stored(w)}


CASES["outputs info", "verify"] = lambda w: (
    CASES["outputs info", ""](w) | {"verify": True, "target": w.source}
)


CASES["distill", "stored outputs"] = lambda w: (
    without(FEW, "seq_len") | {"draft": w.draft, "outputs": stored(w)}
)


CASES["replay", "chains"] = lambda w: {"directory": answers(w), "draft": [w.draft], "k": "1,2"}


CASES["replay", "as llama.cpp"] = lambda w: (
    CASES["replay", "chains"](w) | {"server_rule": "llama.cpp"}
)


CASES["report", ""] = lambda w: {
    "scores": [made(w, "scored", "score", "greedy")],
    "min_speedup": 0.01,
    "min_acceptance_length": 1.0,
    "html": Path("page.html"),
}


@case("outputs build", "log")
def _(w: World) -> Settings:
    row = {"prompt_ids": [0, 30, 29], "ids": [65, 57], "logprobs": [-1.61, -0.52]}
    row |= {"top_ids": [[65, 135], [57, 14]], "top_logprobs": [[-1.61, -2.69], [-0.52, -1.07]]}
    Path("day.jsonl").write_text((json.dumps(row) + "\n") * 4)
    return {"from_file": Path("day.jsonl"), "target": w.source, "seq_len": 8, "top_logprobs": 2}


CASES["distill", "server"] = lambda w: (
    FEW | {"draft": w.draft, "data": w.text, "server": w.server, "top_logprobs": 4}
)


CASES["outputs build", "server"] = lambda w: (
    {"num_sequences": 4, "seq_len": 24, "top_logprobs": 4, "server": w.server} | w.asked
)


CASES["outputs build", "replay, server"] = lambda w: replayable(w) | {"server": w.server}


CASES["outputs info", "verify, server"] = lambda w: {
    "directory": made(w, "served", "outputs build", "server"),
    "verify": True,
    "server": w.server,
    "target": w.source,
}


CASES["score", "servers"] = lambda w: {
    "num_prompts": 2,
    "prompt_tokens": 8,
    "max_new_tokens": 9,
    "repeats": 1,
    "server": w.server,
    "speculative_server": w.drafting_server,
    "draft": [w.draft],
    **w.asked,
}


CASES["score", "servers, lm-eval's task"] = lambda w: (
    CASES["score", "servers"](w) | {"tasks": task(w), "task_limit": 2}
)


CASES["score", "the plain server"] = lambda w: without(
    CASES["score", "servers"](w), "speculative_server", "draft"
)


CASES["score", "a drafting server"] = lambda w: (
    CASES["score", "servers"](w) | {"server": str(made(w, "plain", "score", "the plain server"))}
)


CASES["score", "servers, conversations"] = lambda w: without(
    CASES["score", "servers"](w) | chat(w), "data", "prompt_tokens"
)


CASES["profile", "servers"] = lambda w: (
    {"batch": "1", "context": "4,40", "repeats": 3}
    | {"models": [w.source, "mine"], "server": [w.paced, w.paced_drafting]}
)


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
    """Return the settings that a command neither reads nor refuses in this mode."""
    config_class, read = traced(command.config)
    config = config_class(**settings)
    read.clear()  # rules and validators do not use a setting
    for dry_run in (True, False) if command.dry_run else (False,):
        command.run(config, dry_run=dry_run)
        ignored = set(command.config.model_fields) - read
        ignored = {name for name in ignored if not refuses(command.config, settings, name)}
        if not ignored:
            break
    return ignored


def refuses(config: type[Config], settings: Settings, name: str) -> bool:
    """Return whether a setting with another value than its default is refused beside the others, by its name."""
    try:
        config.build(settings | {name: another_value(config.model_fields[name])})
    except UserError as error:
        return config.flag(name) in str(error)
    return False


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
def test_every_option_is_read_or_refused(
    name: str, mode: str, world: World, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert unread(COMMANDS[name], CASES[name, mode](world)) == set()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_every_mode_runs(name: str, mode: str, world: World, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    COMMANDS[name](**CASES[name, mode](world))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    ("name", "mode"), [key for key in CASES if "device" in COMMANDS[key[0]].config.model_fields]
)
def test_every_mode_runs_on_a_gpu(
    name: str, mode: str, world: World, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = CASES[name, mode](world)
    if settings.get("mode") == "native" or settings.get("int8"):
        pytest.skip("for CPUs")
    COMMANDS[name](**settings | {"device": "cuda"})


def test_every_option_of_auto_is_read_or_refused(
    tokenizer_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    """A target that cannot be pruned has prompt lookup as its only candidate in vLLM, which is quick."""
    monkeypatch.chdir(tmp_path)
    target = save_neox(tmp_path / "neox", tokenizer_dir)
    Path("prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"def f{i}(x):"}) + "\n" for i in range(96))
    )
    program = {"verify_with": Path(shutil.which("true") or "")}
    settings = {
        "target": str(target),
        "prompt_file": Path("prompts.jsonl"),
        "server": "vllm",
        "out": Path("auto"),
    }
    assert unread(auto, settings | program) == set()


def test_every_command_has_a_case() -> None:
    without = {"env", "auto"}  # env has no settings, auto a test of its own
    assert {name for name, _ in CASES} | without == set(COMMANDS)


def test_an_ignored_option_is_noticed(world: World, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = COMMANDS["design"]

    class Ignoring(command.config):  # type: ignore[name-defined, misc]
        shuffled: int = option(0, "Ignored.")

    ignoring = replace(command, config=Ignoring)
    assert unread(ignoring, CASES["design", "parameters"](world)) == {"shuffled"}


@pytest.mark.parametrize("command", [*COMMANDS.values(), run], ids=lambda command: command.name)
def test_refused_options_exist(command: Command) -> None:
    for rule in command.config.only:
        assert set(rule.options) <= set(command.config.model_fields)
        assert rule.reason


def write_text(file: Path, documents: int) -> Path:
    file.write_text(
        "".join(
            json.dumps({"text": f"# {i}\n{TOKENIZER_TEXT[0] * 6}"}) + "\n" for i in range(documents)
        )
    )
    return file


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, family_dirs: dict[str, Path]
) -> Iterator[World]:
    root = tmp_path_factory.mktemp("world")
    text = write_text(root / "text.jsonl", 80)
    source, draft = family_dirs["llama"], root / "draft"
    COMMANDS["prune"](
        **TINY_CUT,
        source=str(source),
        data=str(text),
        calibration_tokens=64,
        refit="none",
        out=draft,
    )
    model, small = (checkpoint.load_model(path, torch.float32).eval() for path in (source, draft))
    tokenizer = checkpoint.load_tokenizer(source)
    with ExitStack() as stack:
        server = stack.enter_context(running(SmallVLLM(model, tokenizer, frozenset())))
        drafting = stack.enter_context(
            running(SmallVLLM(model, tokenizer, frozenset(), draft=small))
        )
        paced = [
            stack.enter_context(running(PacedVLLM(tokenizer, *pace)))
            for pace in ((0.005,), (0.015, 3))
        ]
        yield World(root, str(source), str(draft), str(text), server, drafting, *paced)
