"""A number that no option can have is refused by name, by every command, mode, student and drafter alike."""

import contextlib
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import pytest
import yaml
from helpers.errors import raises_option
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.testing import CliRunner

from draftlab.cli import app
from draftlab.commands import COMMANDS
from draftlab.config.base import LARGEST, bound
from draftlab.config.kinds import parse_kind
from draftlab.data import parse_mixture
from draftlab.drafters.base import DRAFTERS
from draftlab.errors import UserError
from draftlab.registry import Registry
from draftlab.training.losses import parse_loss
from draftlab.training.reweighing import parse_reference
from draftlab.training.students.base import STUDENTS

MODES = yaml.safe_load((Path(__file__).parents[1] / "files/every_option.yaml").read_text())
NEVER = ("nan", "inf", "-inf", "-1", "1" + "0" * 30, "1e30", "text")
HUGE = str(LARGEST)
# the smallest settings of commands that every_option.yaml does not have
OTHERS = {"auto": {"plain": {"target": "tiny"}}}


def takes_numbers(annotation: Any) -> bool:
    """Return whether a type is a number, or has numbers as parts."""
    if get_origin(annotation) in (Union, types.UnionType, list):
        return any(map(takes_numbers, get_args(annotation)))
    if get_origin(annotation) is not None:  # Annotated, which pydantic leaves in parts of a type
        return takes_numbers(get_args(annotation)[0]) if get_args(annotation) else False
    return annotation in (int, float)


def numeric(options: type[BaseModel]) -> list[str]:
    return [n for n, f in options.model_fields.items() if takes_numbers(f.annotation)]


def within(value: Any, field: FieldInfo) -> bool:
    high = bound(field, "le")
    values = value if isinstance(value, list) else [value]
    return all(v is None or 0 <= v <= (LARGEST if high is None else high) for v in values)


COMMANDS_WITH_NUMBERS = [(name, n) for name, c in COMMANDS.items() for n in numeric(c.config)]


@pytest.mark.parametrize(("name", "option"), COMMANDS_WITH_NUMBERS)
def test_every_mode_of_a_command_refuses_bad_numbers_by_name(name, option):
    config = COMMANDS[name].config
    modes = (MODES | OTHERS)[name]
    for settings in modes.values():
        for value in NEVER:
            with raises_option(config.flag(option)) as caught:
                config.build(settings | {option: value})
            assert "\n" not in str(caught.value)
        for value in ("0", HUGE):
            with contextlib.suppress(UserError):
                built = config.build(settings | {option: value})
                assert within(getattr(built, option), config.model_fields[option])


KINDS: list[tuple[Registry[Any], str, str]] = [
    (registry, kind, option)
    for registry in (DRAFTERS, STUDENTS)
    for kind in registry.names()
    for option in numeric(registry.get(kind, ""))
]


@pytest.mark.parametrize(("registry", "kind", "option"), KINDS)
def test_every_student_and_drafter_refuses_bad_numbers_by_name(registry, kind, option):
    for value in NEVER:
        with raises_option(option) as caught:
            parse_kind(f"{kind}:{option}={value}", registry, "--kind")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0", "text", "1e400"])
@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_loss, "lk({})"),
        (parse_loss, "jsd({})"),
        (parse_loss, "{}*fkl + ce"),
        (parse_loss, "fkl@{} -> tvd"),
        (parse_mixture, "a={},b=1"),
        (lambda text: parse_reference(text, False), "a={},b=2"),
    ],
)
def test_bad_numbers_in_losses_and_mixtures_are_refused(parse, text, value):
    with raises_option(value.removesuffix("e400")):
        parse(text.format(value))


@pytest.mark.parametrize("loss", ["1e300*fkl", "jsd(1)", "fkl@1 -> tvd"])
def test_numbers_beyond_the_range_of_a_loss_are_refused(loss):
    with raises_option("loss"):
        parse_loss(loss)


@pytest.mark.parametrize(
    "words",
    [
        "--steps nan",
        "--seed -1",
        "--lr inf",
        "--lr -1e-3",
        "--temperature nan",
        "--seed 4294967296",
    ],
)
def test_the_command_line_says_it_in_one_line(words):
    result = CliRunner().invoke(app, ["distill", "--dry-run", "--draft", "tiny", *words.split()])
    assert result.exit_code in (1, 2)
    assert words.split()[0] in result.stderr
    assert "Traceback" not in result.stderr
