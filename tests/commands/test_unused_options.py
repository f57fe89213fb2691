"""Options that a mode does not use are refused where that protects a result, and otherwise named in a note."""

from pathlib import Path

import pytest
from helpers.errors import raises_option
from helpers.small_files import write_functions

from draftlab.commands import COMMANDS
from draftlab.config.base import Config, Only, option
from draftlab.runs.provenance import read_record


class Settings(Config):
    kind: str = option("plain", "Kind.")
    depth: int = option(1, "Depth, for kind deep.")
    width: int = option(2, "Width, for a depth above 1.")
    gate: int = option(0, "Gate, for kind deep.")

    only = (
        Only(("depth",), lambda c: c.kind == "deep", "works only with --kind deep", refused=False),
        Only(("width",), lambda c: c.depth > 1, "works only with a --depth above 1", refused=False),
        Only(("gate",), lambda c: c.kind == "deep", "works only with --kind deep"),
    )


def test_an_option_without_effect_is_named_and_left_out(capfd):
    config = Settings.build({"kind": "plain", "depth": 5})
    config.note_unused()
    printed = capfd.readouterr()
    assert (printed.out, len(printed.err.splitlines())) == ("", 1)
    assert "--depth" in printed.err
    assert "--kind deep" in printed.err
    assert config.depth == 1
    assert config.command_line("x") == "draftlab x"
    assert config.settings() == {"kind": "plain"}


def test_a_setting_that_needs_one_without_effect_has_none_either(capfd):
    config = Settings.build({"depth": 5, "width": 7})
    config.note_unused()
    assert [line.partition(":")[0] for line in capfd.readouterr().err.splitlines()] == ["--depth", "--width"]
    assert config.settings() == Settings().settings()


def test_no_note_without_reason(capfd):
    for settings in ({"kind": "deep", "depth": 5, "width": 7, "gate": 1}, {"depth": 1}, {}):
        assert Settings.build(settings).settings().items() >= settings.items() or settings == {"depth": 1}
        Settings.build(settings).note_unused()
    assert capfd.readouterr().err == ""


def test_a_refused_option_stays_refused():
    with raises_option("--gate", "--kind deep"):
        Settings.build({"gate": 1})


@pytest.mark.parametrize(
    ("command", "settings", "noted"),
    [
        ("prune", {"layers": 2, "lr": 0.1, "batch_size": 3}, ["--lr", "--batch-size"]),
        ("prune", {"layers": 2, "method": "masks", "depth": "even"}, ["--depth"]),
        ("prune", {"layers": 2, "method": "first", "refit": "none", "calibration_tokens": 9, "seed": 1}, ["--seed"]),
        ("score", {"task_limit": 3, "num_fewshot": 1}, ["--task-limit", "--num-fewshot"]),
        ("score", {"rule": "match"}, ["--rule"]),
        ("score", {"server": "http://localhost:9", "threads": 3, "k": "2"}, ["--threads", "--k"]),
        ("outputs build", {"server": "http://localhost:9", "device": "cuda"}, ["--device"]),
        ("outputs build", {"from_file": "log.jsonl", "seed": 3, "num_prompts": 3}, ["--seed", "--num-prompts"]),
        ("distill", {"outputs": "store", "seq_len": 9, "top_logprobs": 3}, ["--seq-len", "--top-logprobs"]),
        ("profile", {"law": True, "models": ["x"], "device_map": "auto"}, ["--device-map"]),
        ("check", {"draft": "x", "files_only": True, "prompt_file": "p.jsonl"}, ["--prompt-file"]),
        ("export", {"draft": "x", "k": 3, "outtype": "q8_0"}, ["--k", "--outtype"]),
    ],
)
def test_tidiness_is_a_note(command, settings, noted, capfd):
    named = {name: "x" for name in ("target", "source", "data") if name in COMMANDS[command].config.model_fields}
    if settings.keys() & {"outputs", "from_file", "prompt_file"}:  # these replace --data
        named.pop("data")
    if "outputs" in settings:
        named = {}
    COMMANDS[command].config.build(named | settings).note_unused()
    printed = capfd.readouterr().err
    assert all(flag in printed for flag in noted)


@pytest.mark.parametrize("name", COMMANDS)
def test_rules_name_settings_of_the_command(name):
    config = COMMANDS[name].config
    for rule in config.only:
        assert set(rule.options) <= config.model_fields.keys()


def test_a_command_goes_on_and_its_record_lacks_the_option(family_dirs, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    text = write_functions(tmp_path / "text.txt", 40)
    prune = COMMANDS["prune"]
    sizes = {"layers": 1, "width": 32, "ffn": 48, "seq_len": 64, "calibration_tokens": 64}
    noted = prune(source=str(family_dirs["llama"]), data=str(text), out=Path("noted"), lr=0.5, steps=9, **sizes)
    assert [line for line in capfd.readouterr().err.splitlines() if "--steps, --lr" in line]
    plain = prune(source=str(family_dirs["llama"]), data=str(text), out=Path("plain"), **sizes)
    assert noted.path is not None
    assert plain.path is not None
    assert (noted.path / "model.safetensors").read_bytes() == (plain.path / "model.safetensors").read_bytes()
    record = read_record(noted.path)
    assert record is not None
    assert not {"lr", "steps"} & record.config.keys()
