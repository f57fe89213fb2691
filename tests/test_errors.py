"""Messages are one line that a terminal shows as it is, and suggest what could have been meant."""

import pytest

from draftlab.errors import did_you_mean, one_line
from draftlab.reading import parse_yaml


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


def test_yaml_that_contains_itself_or_grows_without_end_is_refused():
    """json.dumps fails at the first, and does not end at the second."""
    laughs = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))
    for text in ("layers: &a [*a]", "x: &a {b: *a}", f"a0: &a0 [1]\n{laughs}"):
        with pytest.raises(ValueError, match="aliases"):
            parse_yaml(text.encode())
    assert parse_yaml(b"x: &a [1, {y: 2}]\nz: *a") == {"x": [1, {"y": 2}], "z": [1, {"y": 2}]}
