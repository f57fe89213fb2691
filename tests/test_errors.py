"""Messages are one line that a terminal shows as it is, and suggest what could have been meant."""

import pytest

from draftlab.errors import did_you_mean, one_line


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
