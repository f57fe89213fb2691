"""Damaged files of every kind get one line, never a traceback, and are never taken for good ones."""

import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damage import BOMB, HUGE_BYTES, Damaged
from fuzz import FAILURES, Fuzzer, run

from draftlab.errors import UserError
from draftlab.reading import read_json, read_lines, read_yaml

INPUTS = 150

Content = bytes | None | Callable[[Any], Any]


def _first(good: Any, name: str, **values: object) -> Any:
    """Return a record with other values in the first entry of a list."""
    return good | {name: [good[name][0] | values, *good[name][1:]]}


# what an earlier version failed at: kind of file, content (None: the good one and 400 MB of zeros), what the line says
OFFENDERS: dict[str, tuple[str, Content, str]] = {
    "aliases that multiply": ("recipe", BOMB.encode(), "values"),
    "an alias of itself": ("draftlab.yaml", b"target: &a [*a]", "values"),
    "a date that is none": ("profile", b"created: 2026-99-99", "month"),
    "a number of 5,000 digits": ("shape", b"layers: " + b"9" * 5000, "digits"),
    "no UTF-8 in YAML": ("--config", b"source: \xff\xfe", "not YAML"),
    "no UTF-8 in prompts": ("prompts", b'{"prompt": "\xff\xfe"}\n', "prompts.jsonl:1: not JSON"),
    "a list as a prompt": ("prompts", b"[1, 2]\n", "prompts.jsonl:1: not a JSON object"),
    "an empty prompt": ("prompts", b'{"prompt": " "}\n', "prompts.jsonl:1: the prompt is empty"),
    "settings that are a list": ("--config", b"- layers", "one NAME: VALUE"),
    "settings with a number as name": ("--config", b"1: 2", "one NAME: VALUE"),
    "a step with a list": ("recipe", b"steps: [{prune: [1]}]", "want NAME: VALUE"),
    "a step with a number as name": ("recipe", b"steps: [{1: {}}]", "no command 1"),
    "deep JSON": ("draftlab.json", b"[" * 100_000, "not a draftlab record"),
    "an empty record": ("draftlab.json", b"", "not a draftlab record"),
    "a score of 300 MB": ("score.json", None, "at most 134 MB"),
    "a million million layers": ("config.json", lambda good: good | {"num_hidden_layers": 10**12}, "num_hidden_layers"),
    "a million million heads": ("config.json", lambda good: good | {"num_attention_heads": 10**12}, "num_att"),
    "no layer": ("config.json", lambda good: good | {"num_hidden_layers": 0}, "num_hidden_layers"),
    "weights by MLX": ("config.json", lambda good: good | {"quantization": {"bits": 4}}, "is quantised (mlx)"),
    "weights by GPTQ": ("config.json", lambda good: good | {"quantization_config": {"quant_method": "gptq"}}, "(gptq)"),
    "an encoder": ("config.json", lambda good: good | {"architectures": ["BertForMaskedLM"]}, "is an encoder"),
    "no key heads": ("config.json", lambda good: good | {"num_key_value_heads": 0}, "kv_heads"),
    "layers as a list": ("EAGLE-3 config", lambda good: good | {"eagle_config": [1]}, "not of an EAGLE-3 head"),
    "a log with NaN": ("training log", b'{"step": 1, "loss": NaN, "grad_norm": 1}\n', "damaged"),
    "NaN in a config": ("config.json", lambda good: good | {"rms_norm_eps": math.nan}, "NaN"),
    "a text as eos": ("generation_config.json", b'{"eos_token_id": "x"}', "eos_token_id"),
    "ids that repeat": ("head_ids.json", b"[1, 1]", "each once"),
    "ids that are numbers with a point": ("head_ids.json", b"[1.5]", "head_ids.json"),
    "the same tensor in two files": ("index", b'{"weight_map": {"a": "x", "a": "y"}}', "two values of 'a'"),
    "an index with a number": ("index", b'{"weight_map": {"a": 1}}', "weight_map"),
    "a header of 2^64 bytes": ("model.safetensors", struct.pack("<Q", (1 << 64) - 1), "not a readable safetensors"),
    "half a head": ("EAGLE-3 head", struct.pack("<Q", 50) + b"{", "not a readable safetensors"),
    "a cache that is none": ("importance", b"GGUF", "not a readable safetensors"),
    "a GGUF file of four letters": ("GGUF", b"GGUF", "not a readable GGUF"),
    "a manifest with a million million texts": ("store manifest", b'{"planned": 1000000000000}', "manifest"),
    "a tokenizer without a model": ("tokenizer.json", b"{}", "no usable tokenizer"),
    "a tokenizer configuration that is a list": ("tokenizer_config.json", b"[]", "not a JSON object"),
    "escape sequences": ("draftlab.yaml", b'target: "\\e[31m"\nsource: [1]\ndata: x', "source"),
    "a probability of 2": ("replay.json", lambda good: _first(good, "texts", chances=[2.0, 0.5, 0.5]), "chances"),
    "a step of minus one second": ("score.json", lambda good: _first(good, "plain", draft_seconds=-1), "draft_seconds"),
    "more tokens than steps": ("score.json", lambda good: _first(good, "plain", tokens=10**12), "are not the prefill"),
    "an index with a long name": ("index", b'{"weight_map": {"a": "' + b"x" * 5000 + b'"}}', "no file name"),
    "an index with escapes": ("index", b'{"weight_map": {"a": "\\u001b[31m"}}', "no file name"),
    "a longest text in words": ("tokenizer_config.json", b'{"model_max_length": "long"}', "model_max_length"),
    "turns of nobody": ("turns", b"", "damaged"),
    "a pickle of code": (".bin", b"\x80\x02cos\nsystem\nX\x01\x00\x00\x00xR.", "code in pickles is not run"),
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
    name, content, says = OFFENDERS[offender]
    reader = next(reader for reader in fuzzer.readers if reader.name == name)
    good = reader.file.read_bytes()
    if callable(content):
        content = json.dumps(content(json.loads(good))).encode()
    damaged = Damaged(offender, content or (b"" if content is not None else good), True, sparse=content is None)
    verdict = fuzzer.read(reader, damaged)
    assert verdict.outcome == "refused", verdict
    assert says in verdict.detail


def test_the_same_seed_damages_in_the_same_way(fuzzer):
    assert [fuzzer.input(i)[1] for i in range(40)] == [fuzzer.input(i)[1] for i in range(40)]


def test_a_reader_that_takes_everything_is_found_out(fuzzer):
    """The fuzzer's own control: a reader without checks."""
    careless = type(fuzzer.readers[0])("careless", fuzzer.readers[0].file, "json", lambda file: file.stat().st_size)
    fuzzer.good["careless"] = -1
    assert fuzzer.read(careless, Damaged("cut", b"{", certain=True)).outcome == "silent"
    raising = type(careless)("raising", careless.file, "json", lambda file: {}[0])
    assert fuzzer.read(raising, Damaged("cut", b"{", certain=True)).outcome == "traceback"


def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for read in (read_json, lambda file: read_yaml(file, "x"), lambda file: list(read_lines(file))):
        with pytest.raises(UserError, match="not a regular file"):
            read(tmp_path / "pipe")


def test_a_line_that_does_not_end_is_not_read_whole(tmp_path):
    file = tmp_path / "long.jsonl"
    file.write_bytes(b"{}\n")
    os.truncate(file, HUGE_BYTES)
    with pytest.raises(UserError, match=r"long.jsonl:2: a line of more than 16 MiB"):
        list(read_lines(Path(file)))


def test_every_kind_of_damage_is_drawn(fuzzer):
    drawn = {fuzzer.input(i)[1].name for i in range(1000)}
    assert {"cut", "flip", "sparse", "deep", "nan", "key", "bomb", "overlap", "dtype", "drop", "length"} <= drawn
