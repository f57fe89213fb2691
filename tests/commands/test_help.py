"""The text of --help: whole words at 80 columns, an example that can be typed, and every option that pages type."""

import re
import shlex
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer
from helpers.typed import call

from draftlab.cli import app
from draftlab.commands import COMMANDS
from draftlab.config.base import Config, extra
from draftlab.recipe import RUN
from draftlab.registry import LOSSES, Registry

ROOT = Path(__file__).parents[2]
ALL = {**COMMANDS, "run": RUN}


def read_by_the_command_line(words: list[str]) -> Config:
    """Return the config of a typed command. Nothing runs."""
    name = " ".join(words[:2]) if words[0] == "outputs" else words[0]
    command = typer.main.get_command(app)
    for word in name.split():
        command = command.commands[word]
    context = command.make_context(name, words[len(name.split()) :])
    config = ALL[name].config
    given = {
        key: value
        for key, value in context.params.items()
        if key in config.model_fields and context.get_parameter_source(key).name == "COMMANDLINE"
    }
    return config.build(given)


def help_of(name: str, monkeypatch: pytest.MonkeyPatch, option: str = "--help") -> str:
    monkeypatch.setenv("COLUMNS", "80")
    return call(f"{name} {option}").stdout


def one_line(text: str | None) -> str:
    return " ".join((text or "").split())


@pytest.mark.parametrize("name", ["", "outputs", *ALL])
def test_lines_break_between_words(name, monkeypatch):
    text = help_of(name, monkeypatch)
    assert max(map(len, text.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in text


@pytest.mark.parametrize("name", ALL)
def test_every_option_is_shown_whole_by_help_or_by_help_all(name, monkeypatch):
    config = ALL[name].config
    for option in ("--help", "--help-all"):
        text = help_of(name, monkeypatch, option)
        assert max(map(len, text.splitlines())) <= 80
        shown = re.findall(r"^  (--[a-z0-9-]+|[A-Z]+)", text, re.MULTILINE)
        assert len(shown) == len(set(shown))
        for key, field in config.model_fields.items():
            visible = option == "--help-all" or not extra(field)["advanced"]
            assert (config.flag(key) in shown) == visible
            assert not visible or one_line(field.description) in one_line(text)


@pytest.mark.parametrize("name", ALL)
def test_the_usage_has_what_is_required(name, monkeypatch):
    usage = help_of(name, monkeypatch).split("\n\n")[0]
    config = ALL[name].config
    for key, field in config.model_fields.items():
        words = rf"(?<![\[\w-]){re.escape(config.flag(key))}(?![\w-])"
        assert bool(re.search(words, usage)) == field.is_required()


@pytest.mark.parametrize("name", ALL)
def test_every_command_has_an_example_that_it_reads(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = ALL[name].example
    assert f"draftlab {example}" in one_line(help_of(name, monkeypatch).replace("\\\n", " "))
    call("init --preset tiny")
    read_by_the_command_line(shlex.split(example))


def test_what_a_page_types_is_in_the_help():
    hidden = set()
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("drafts/*/README.md")]:
        text = page.read_text().replace("\\\n", " ")
        for name, words in re.findall(r"draftlab ((?:outputs )?[a-z]+)([^`\n#]*)", text):
            config = ALL[name].config if name in ALL else Config
            for key, field in config.model_fields.items():
                if extra(field)["advanced"] and config.flag(key) in words.split():
                    hidden.add((page.name, name, config.flag(key)))
    assert hidden == set()


def test_kinds_of_a_plug_in_are_marked(monkeypatch):
    registry: Registry[object] = Registry("no.such.group", "loss", LOSSES.builtin)
    assert registry.listed("ce") == f"ce, {', '.join(LOSSES.builtin)}"
    modules = {"mine": "my_package.losses", "other": "my_package.losses", "theirs": "their_package"}
    entries = {name: [EntryPoint(name, module, registry.group)] for name, module in modules.items()}
    monkeypatch.setitem(registry.__dict__, "plugins", {"mine": entries["mine"]})
    assert registry.listed("ce") == f"ce, {', '.join(LOSSES.builtin)} (and mine from my_package.losses)"
    monkeypatch.setitem(registry.__dict__, "plugins", entries)
    assert registry.listed().endswith(" (and mine, other from my_package.losses; theirs from their_package)")
