"""Damaged files of every kind get one line, never a traceback, and are never taken for good ones."""

import json
import math
import struct
from collections.abc import Callable
from typing import Any

import pytest
from damage import Damaged
from fuzz import FAILURES, Fuzzer, run

INPUTS = 150

Content = bytes | Callable[[Any], Any]


def _first(good: Any, name: str, **values: object) -> Any:
    """Return a record with other values in the first entry of a list."""
    return good | {name: [good[name][0] | values, *good[name][1:]]}


# what an earlier version failed at: kind of file, content
OFFENDERS: dict[str, tuple[str, Content]] = {
    "no UTF-8 in YAML": ("--config", b"source: \xff\xfe"),
    "no UTF-8 in prompts": ("prompts", b'{"prompt": "\xff\xfe"}\n'),
    "a list as a prompt": ("prompts", b"[1, 2]\n"),
    "an empty prompt": ("prompts", b'{"prompt": " "}\n'),
    "settings that are a list": ("--config", b"- layers"),
    "settings with a number as name": ("--config", b"1: 2"),
    "a step with a list": ("recipe", b"steps: [{prune: [1]}]"),
    "a step with a number as name": ("recipe", b"steps: [{1: {}}]"),
    "an empty record": ("draftlab.json", b""),
    "a million million layers": ("config.json", lambda good: good | {"num_hidden_layers": 10**12}),
    "weights by MLX": ("config.json", lambda good: good | {"quantization": {"bits": 4}}),
    "weights by GPTQ": ("config.json", lambda good: good | {"quantization_config": {"quant_method": "gptq"}}),
    "an encoder": ("config.json", lambda good: good | {"architectures": ["BertForMaskedLM"]}),
    "no key heads": ("config.json", lambda good: good | {"num_key_value_heads": 0}),
    "layers as a list": ("EAGLE-3 config", lambda good: good | {"eagle_config": [1]}),
    "NaN in a config": ("config.json", lambda good: good | {"rms_norm_eps": math.nan}),
    "a text as eos": ("generation_config.json", b'{"eos_token_id": "x"}'),
    "ids that repeat": ("head_ids.json", b"[1, 1]"),
    "ids that are numbers with a point": ("head_ids.json", b"[1.5]"),
    "an index with a number": ("index", b'{"weight_map": {"a": 1}}'),
    "a header of 2^64 bytes": ("model.safetensors", struct.pack("<Q", (1 << 64) - 1)),
    "a cache that is none": ("importance", b"GGUF"),
    "a GGUF file of four letters": ("GGUF", b"GGUF"),
    "a tokenizer without a model": ("tokenizer.json", b"{}"),
    "a tokenizer configuration that is a list": ("tokenizer_config.json", b"[]"),
    "a probability of 2": ("replay.json", lambda good: _first(good, "texts", chances=[2.0, 0.5, 0.5])),
    "a step of minus one second": ("score.json", lambda good: _first(good, "plain", draft_seconds=-1)),
    "more tokens than steps": ("score.json", lambda good: _first(good, "plain", tokens=10**12)),
    "turns of nobody": ("turns", b""),
    "a pickle of code": (".bin", b"\x80\x02cos\nsystem\nX\x01\x00\x00\x00xR."),
}  # fmt: skip


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Fuzzer:
    return Fuzzer(tmp_path_factory.mktemp("fuzz"), seed=0)


def test_damage_is_refused_in_one_line_or_harmless(fuzzer, capsys):
    result = run(fuzzer, range(INPUTS))
    assert not any(result[name] for name in FAILURES), capsys.readouterr().out
    assert result["refused"] > 0.6 * INPUTS


@pytest.mark.parametrize("offender", OFFENDERS)
def test_what_once_failed_is_refused_in_one_line(fuzzer, offender):
    name, content = OFFENDERS[offender]
    reader = next(reader for reader in fuzzer.readers if reader.name == name)
    good = reader.file.read_bytes()
    if callable(content):
        content = json.dumps(content(json.loads(good))).encode()
    verdict = fuzzer.read(reader, Damaged(offender, content, True))
    assert verdict.outcome == "refused", verdict


def test_the_same_seed_damages_in_the_same_way(fuzzer):
    assert [fuzzer.input(i)[1] for i in range(40)] == [fuzzer.input(i)[1] for i in range(40)]


def test_a_reader_that_takes_everything_is_found_out(fuzzer):
    """The fuzzer's own control: a reader without checks."""
    careless = type(fuzzer.readers[0])("careless", fuzzer.readers[0].file, "json", lambda file: file.stat().st_size)
    fuzzer.good["careless"] = -1
    assert fuzzer.read(careless, Damaged("cut", b"{", certain=True)).outcome == "silent"
    raising = type(careless)("raising", careless.file, "json", lambda file: {}[0])
    assert fuzzer.read(raising, Damaged("cut", b"{", certain=True)).outcome == "traceback"


def test_every_kind_of_damage_is_drawn(fuzzer):
    drawn = {fuzzer.input(i)[1].name for i in range(1000)}
    assert {"cut", "flip", "nan", "overlap", "dtype", "drop", "length"} <= drawn
