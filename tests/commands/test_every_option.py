"""Every option is used or refused, in every mode of every command.

Each case runs a command for real on small models and records which settings it reads. A setting that a mode neither
reads nor refuses would be accepted and ignored.
"""

import atexit
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from loopback_servers import SmallVLLM, running
from pydantic.fields import FieldInfo
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from draftlab.commands import COMMANDS
from draftlab.commands.base import Command
from draftlab.config.base import Config, extra, option
from draftlab.errors import UserError
from draftlab.model import checkpoint
from draftlab.model.shape import write_shape_file
from draftlab.recipe import run


@dataclass(frozen=True)
class World:
    """What the cases work on: directories of small models, text, and outputs of earlier cases."""

    root: Path
    source: Path
    draft: Path
    text: Path


Settings = dict[str, Any]
CASES: dict[tuple[str, str], Callable[[World], Settings]] = {}
SERVERS = ExitStack()
atexit.register(SERVERS.close)
TINY_CUT: Settings = {"layers": 2, "width": 48, "heads": 4, "kv_heads": 2, "ffn": 40, "seq_len": 16}


def case(command: str, mode: str) -> Callable[[Callable[[World], Settings]], Callable[[World], Settings]]:
    def register(settings: Callable[[World], Settings]) -> Callable[[World], Settings]:
        CASES[command, mode] = settings
        return settings

    return register


@case("prune", "activation")
def _(w: World) -> Settings:
    return TINY_CUT | {"source": str(w.source), "data": str(w.text), "calibration_tokens": 64}


@case("prune", "random")
def _(w: World) -> Settings:
    return TINY_CUT | {"source": str(w.source), "data": str(w.text), "method": "random", "calibration_tokens": 64}


@case("prune", "first, nothing refitted")
def _(w: World) -> Settings:
    off = {"refit": False, "rescale_norms": False, "method": "first"}
    return TINY_CUT | off | {"source": str(w.source), "data": str(w.text)}


@case("prune-masks", "frozen")
def _(w: World) -> Settings:
    return TINY_CUT | {"source": str(w.source), "data": str(w.text), "steps": 2, "batch_size": 2, "save_steps": 1}


@case("prune-masks", "full")
def _(w: World) -> Settings:
    few = {"steps": 2, "batch_size": 2, "save_steps": 1, "train_weights": "full", "loss": "ce"}
    return TINY_CUT | few | {"source": str(w.source), "data": str(w.text)}


@case("tokenizer", "")
def _(w: World) -> Settings:
    return {"data": str(w.text), "vocab": 300, "megabytes": 0.01}


@case("design", "parameters")
def _(w: World) -> Settings:
    return {"source": "tiny", "params": "4m", "layers": "2,4"}


FEW: Settings = {"steps": 2, "batch_size": 2, "seq_len": 24, "save_steps": 1}


def distilling(w: World, **more: Any) -> Settings:
    return FEW | {"draft": str(w.draft), "target": str(w.source), "data": str(w.text)} | more


@case("distill", "data")
def _(w: World) -> Settings:
    return distilling(w)


@case("distill", "text of both models, LoRA")
def _(w: World) -> Settings:
    return distilling(w, text="target=0.5,draft=0.5", prompt_tokens=8, lora_rank=2)


@case("distill", "cross-entropy")
def _(w: World) -> Settings:
    return FEW | {"draft": str(w.draft), "data": str(w.text), "loss": "ce"}


@case("train", "continued")
def _(w: World) -> Settings:
    return FEW | {"model": str(w.source), "data": str(w.text)}


@case("train", "new")
def _(w: World) -> Settings:
    shape = w.root / "shape.yaml"
    write_shape_file(checkpoint.read_shape(w.draft), shape, "a test")
    return FEW | {"shape": shape, "tokenizer": str(w.source), "data": str(w.text)}


@case("medusa", "")
def _(w: World) -> Settings:
    return FEW | {"target": str(w.source), "data": str(w.text), "heads": 2}


@case("check", "run")
def _(w: World) -> Settings:
    return {"draft": str(w.draft), "target": str(w.source), "data": str(w.text)}


@case("check", "files only")
def _(w: World) -> Settings:
    return {"draft": str(w.draft), "target": str(w.source), "files_only": True}


@case("export", "hf")
def _(w: World) -> Settings:
    return {"draft": str(w.draft), "target": str(w.source)}


@case("export", "vllm")
def _(w: World) -> Settings:
    return {"draft": str(w.draft), "target": str(w.source), "to": "vllm", "k": 2}


@case("import", "")
def _(w: World) -> Settings:
    folder = w.root / "bin"
    if not folder.exists():
        AutoModelForCausalLM.from_pretrained(w.draft).save_pretrained(folder, safe_serialization=False)
        if not (folder / "pytorch_model.bin").exists():
            weights = load_file(w.draft / "model.safetensors")
            (folder / "model.safetensors").unlink(missing_ok=True)
            torch.save(weights, folder / "pytorch_model.bin")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((w.draft / name).read_bytes())
    return {"source": str(folder)}


@case("init", "target")
def _(w: World) -> Settings:
    Path("draftlab.yaml").touch()
    return {"target": str(w.source), "source": str(w.draft), "overwrite": True}


@case("init", "preset")
def _(w: World) -> Settings:
    Path("draftlab.yaml").touch()
    return {"preset": "tiny", "overwrite": True}


LAW: Settings = {"layers": "1,2,3,4", "widths": "24,48", "repeats": 3, "context": "8", "threads": 1, "mode": "eager"}


@case("law", "")
def _(w: World) -> Settings:
    return LAW | {"source": str(w.source), "plot": Path("law.svg")}


@case("law-fit", "")
def _(w: World) -> Settings:
    COMMANDS["law"](**LAW, source=str(w.source), out=Path("law"))
    return {"profiles": Path("law"), "plot": Path("law.svg")}


@case("profile", "eager")
def _(w: World) -> Settings:
    return {"models": [str(w.draft)], "k": 1, "context": "8", "repeats": 3, "mode": "eager"}


@case("profile", "native")
def _(w: World) -> Settings:
    return {"models": [str(w.draft)], "k": 1, "context": "8", "repeats": 3, "mode": "native"}


@case("predict", "alpha")
def _(w: World) -> Settings:
    return profiles() | {"alpha": 0.7}


@case("predict", "acceptance length")
def _(w: World) -> Settings:
    return profiles() | {"acceptance_length": "2.5@4", "batch": "1,2"}


def scoring(w: World, **more: Any) -> Settings:
    few = {"data": str(w.text), "num_prompts": 2, "prompt_tokens": 4, "max_tokens": 4, "repeats": 1}
    return few | more


@case("score", "greedy")
def _(w: World) -> Settings:
    models = {"draft": [str(w.draft)], "target": str(w.source)}
    return scoring(w, **models, k="2", tasks="none", mode="eager")


@case("score", "sampled")
def _(w: World) -> Settings:
    models = {"draft": [str(w.draft)], "target": str(w.source), "drafter": ["prompt-lookup"]}
    return scoring(w, **models, k="2", tasks="code_bits_per_byte", task_limit=1, temperature=1.0)


@case("score-servers", "greedy")
def _(w: World) -> Settings:
    model = AutoModelForCausalLM.from_pretrained(w.source, dtype=torch.float32).eval()
    servers = [SmallVLLM(model, checkpoint.load_tokenizer(w.source), frozenset(), k=3, **draft)
               for draft in ({}, {"draft": model})]  # fmt: skip
    plain, speculative = (SERVERS.enter_context(running(server)) for server in servers)
    return scoring(w, server=plain, speculative_server=speculative, target=str(w.source))


@case("score-servers", "sampled")
def _(w: World) -> Settings:
    settings = CASES["score-servers", "greedy"](w)
    return {name: value for name, value in settings.items() if name != "target"} | {
        "tokenizer": w.source, "temperature": 1.0,
    }  # fmt: skip


def profiles() -> Settings:
    return {"draft_profile": ["wide-796m@a100-80gb,eager"], "target_profile": "llama-65b@4xa100-80gb,eager"}


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
    """Run a command; return the settings that it neither read nor refuses in this mode."""
    config_class, read = traced(command.config)
    config = config_class(**settings)
    read.clear()  # what rules and validators read is not used
    command.run(config)
    ignored = set(command.config.model_fields) - read
    return {name for name in ignored if not refuses(command.config, settings, name)}


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
        bounds = [getattr(part, "le", None) for part in field.metadata]
        high = next((bound for bound in bounds if bound is not None), None)
        return high if high is not None and high != field.default else (field.default or 1) + 1
    return "other"


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_every_option_is_read_or_refused(name: str, mode: str, world: World, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert unread(COMMANDS[name], CASES[name, mode](world)) == set()


def test_every_command_has_a_case() -> None:
    without = {"env"}  # has no settings
    assert {name for name, _ in CASES} | without == set(COMMANDS)


def test_an_ignored_option_is_noticed(world: World, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = COMMANDS["tokenizer"]

    class Ignoring(command.config):  # type: ignore[name-defined, misc]
        shuffled: int = option(0, "Ignored.")

    def forgets(config: Any, output: Any) -> object:
        return command.function(config, output)

    ignoring = Command(name="tokenizer", config=Ignoring, function=forgets, dry_run=False, resumes=False)
    assert unread(ignoring, CASES["tokenizer", ""](world)) == {"shuffled"}


@pytest.mark.parametrize("command", [*COMMANDS.values(), run], ids=lambda command: command.name)
def test_refused_options_exist(command: Command) -> None:
    for rule in command.config.only:
        assert set(rule.options) <= set(command.config.model_fields)
        assert rule.reason


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, family_dirs: dict[str, Path]) -> World:
    root = tmp_path_factory.mktemp("world")
    text = root / "text.jsonl"
    line = (
        "def parse(line):\n    if not line:\n        return None\n    return [int(part) for part in line.split(',')]\n"
    )
    text.write_text("".join(json.dumps({"text": f"# {i}\n" + line * 6}) + "\n" for i in range(80)))
    source = family_dirs["llama"]
    draft = root / "draft"
    COMMANDS["prune"](**TINY_CUT, source=str(source), data=str(text), calibration_tokens=64, refit=False, out=draft)
    return World(root=root, source=source, draft=draft, text=text)
