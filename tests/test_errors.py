"""Messages are one line that a terminal shows as it is, and suggest what could have been meant."""

from itertools import pairwise

import pytest
from helpers.errors import raises_option

from draftlab.errors import did_you_mean, one_line
from draftlab.reading import read_yaml


@pytest.mark.parametrize(
    ("name", "known", "says"),
    [
        ("drat", ["draft", "other"], "did you mean 'draft'"),
        ("q8", ["q8_0", "f16"], "did you mean 'q8_0'"),
        ("distill-3x265", ["distill-3x256"], "did you mean"),
        ("llama-66b", ["llama-65b"], "did you mean 'llama-65b'"),
        ("tensorrt", ["transformers", "vllm"], "known: transformers, vllm"),
    ],
)
def test_a_suggestion_is_one_for_a_typing_error(name, known, says):
    assert says in did_you_mean(name, known)


@pytest.mark.parametrize("text", ["\x1b[31mred", "a\nb\r\nc", "\u202egnirts", "x" * 10_000, "\x00"])
def test_any_text_is_one_short_line(text):
    line = one_line(text)
    assert line.isprintable()
    assert len(line) <= 300


@pytest.mark.parametrize("bomb", ["aliases", "cycle"])
def test_yaml_that_repeats_itself_without_end_is_one_line(bomb, tmp_path):
    lines = ["a: &a [x]"] if bomb == "aliases" else ["a: &a [*a]"]
    for name, before in pairwise("abcdefghij"):
        lines.append(f"{before}: &{before} [{', '.join([f'*{name}'] * 9)}]")
    (tmp_path / "own.yaml").write_text("\n".join(lines))
    with raises_option("own.yaml"):
        read_yaml(tmp_path / "own.yaml", "own.yaml")
    (tmp_path / "own.yaml").write_text("a: &a [x]\nb: [*a, *a]\n")
    assert read_yaml(tmp_path / "own.yaml", "own.yaml") == {"a": ["x"], "b": [["x"], ["x"]]}
