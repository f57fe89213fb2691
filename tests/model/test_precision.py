"""Dtype auto: the stored dtype where passes of the mode that runs were at least as fast in it, else float32."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.builders import build
from helpers.errors import raises_option

from draftlab.model import devices, modes, native_cpu, precision
from draftlab.model.precision import DECODING, READING, Speeds

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Iterator[Path]:
    """Yield an empty cache folder of a user whose models are small, so that they are timed in a moment."""
    small = {"layers": 1, "hidden": 64, "heads": 1, "kv_heads": 1, "ffn": 64, "vocab": 64}
    monkeypatch.setattr(precision, "SHAPE", precision.SHAPE.model_copy(update=small))
    monkeypatch.setattr(precision, "SECONDS", 0.01)
    # the library stays where it is: it is loaded before the folder changes
    native_cpu.library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    precision._speeds.cache_clear()
    yield tmp_path / "cache" / "draftlab"
    precision._speeds.cache_clear()


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> dict[str, Path]:
    """Return the same checkpoint in each dtype."""
    root = tmp_path_factory.mktemp("stored")
    for dtype in devices.DTYPES:
        build("llama").to(devices.DTYPES[dtype]).save_pretrained(root / dtype)
    return {dtype: root / dtype for dtype in devices.DTYPES}


def write(cache: Path, mode: str, ratios: dict[str, float]) -> None:
    """Make a cache in which passes of a dtype take so many times as long as those in float32."""
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    passes = {dtype: {tokens: ratios.get(dtype, 1.0) for tokens in DECODING} for dtype in precision.DTYPES[mode]}
    name = f"speeds-{precision._key(mode, torch.get_num_threads())}.json"
    (cache / name).write_text(json.dumps(passes))


@pytest.mark.parametrize("mode", ["native", "eager"])
def test_passes_are_timed_once_and_kept(mode, cache, capsys):
    measured = precision.speeds(mode)
    assert capsys.readouterr().err.count("timing passes") == 1
    assert set(measured.passes) == set(precision.DTYPES[mode])
    assert all(0 < ms < 1e4 for each in measured.passes.values() for ms in each.values())
    assert measured.over_float32("float32") == 1
    precision._speeds.cache_clear()  # as in another process
    assert precision.speeds(mode) == measured
    assert not capsys.readouterr().err


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"float32": 1}', None], ids=lambda text: repr(text))
def test_a_damaged_file_is_measured_anew(damage, cache):
    precision.speeds("native")
    (file,) = cache.glob("speeds-*")
    whole = file.read_text()
    text = whole.replace(whole[whole.index(": {") :], ': {"1": NaN}}') if damage is None else damage
    file.write_text(text)
    precision._speeds.cache_clear()
    precision.speeds("native")
    assert file.read_text() != text
    assert set(json.loads(file.read_text())) == set(precision.DTYPES["native"])


def test_where_the_cache_cannot_be_written_passes_are_timed(tmp_path, cache, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert set(precision.speeds("native").passes) == {"float32", "bfloat16"}


def test_speeds_that_another_user_may_have_written_are_not_read(cache):
    write(cache, "native", {"bfloat16": 1e3})
    (file,) = cache.glob("speeds-*")
    os.chmod(file, 0o666)
    assert precision.speeds("native").passes["bfloat16"] != dict.fromkeys(DECODING, 1000.0)


@pytest.mark.parametrize(
    ("kept", "mode", "ratio", "chosen"),
    [
        ("bfloat16", "native", 0.5, "bfloat16"),
        ("bfloat16", "native", 1.04, "bfloat16"),
        ("bfloat16", "native", 1.2, "float32"),
        ("bfloat16", "eager", 1.2, "float32"),
        ("float32", "native", 0.5, "float32"),
        ("float16", "native", 0.5, "float32"),
        ("float16", "eager", 0.5, "float32"),
        ("bfloat16", "eager", 0.5, "float32"),
        (None, "native", 0.5, "bfloat16"),
    ],
)
def test_the_stored_dtype_is_taken_where_it_is_at_least_as_fast(kept, mode, ratio, chosen, cache, stored, capsys):
    write(cache, mode, {"bfloat16": ratio, "float16": ratio})
    directory = None if kept is None else stored[kept]
    models = [] if directory is None else [directory]
    found, choice = modes.resolve(mode, "auto", CPU, directory, models)
    assert (found, devices.dtype_name(choice.dtype)) == (mode, chosen)
    assert f"dtype {chosen}: {choice.reason}" in capsys.readouterr().err
    assert choice.reason


def test_a_dtype_that_is_named_is_taken_and_a_slow_one_is_noted(cache, stored, capsys):
    write(cache, "eager", {"bfloat16": 4.0})
    write(cache, "native", {"bfloat16": 0.5})
    for mode, said in (("eager", "0.25 times as fast as float32 in mode eager"), ("native", "")):
        _, choice = modes.resolve(mode, "bfloat16", CPU, stored["float32"], [])
        assert choice.dtype == torch.bfloat16
        text = capsys.readouterr().err
        assert said in text if said else not text
    assert modes.resolve("eager", "float32", CPU, stored["bfloat16"], [])[1].reason == ""
    with raises_option("float16"):
        modes.resolve("native", "float16", CPU, stored["float16"], [])


def test_a_target_that_transformers_runs_is_in_float32_like_mode_eager(cache, stored):
    write(cache, "eager", {"bfloat16": 0.5})
    write(cache, "native", {"bfloat16": 0.5})
    target, drafts = stored["bfloat16"], [stored["bfloat16"]]
    for hosted, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        mode, choice = modes.resolve("auto", "auto", CPU, target, drafts, hosted=hosted)
        assert (mode, choice.dtype) == ("native", dtype)


def test_wide_passes_count_where_text_is_read():
    passes = {"float32": {1: 20.0, 4: 20.0, 32: 80.0}, "bfloat16": {1: 10.0, 4: 10.0, 32: 160.0}}
    speeds = Speeds("native", passes)
    assert speeds.over_float32("bfloat16", READING) == 0.5
    # 16 x 20 + 16 x 20 + 4 x 80 over 16 x 10 + 16 x 10 + 4 x 160
    assert speeds.over_float32("bfloat16", DECODING) == 1.0


def test_without_weights_the_config_names_the_stored_dtype(cache, stored, tmp_path):
    write(cache, "native", {"bfloat16": 0.5})
    shutil.copy(stored["bfloat16"] / "config.json", tmp_path)
    assert precision.choose("auto", CPU, "native", tmp_path).dtype == torch.bfloat16


@pytest.mark.parametrize("mode", ["native", "eager"])
def test_a_dtype_that_is_named_is_not_replaced_and_nothing_is_timed_to_choose_it(mode, cache, stored):
    for name, dtype in devices.DTYPES.items():
        chosen = precision.choose(name, CPU, mode, stored["bfloat16"], passes=READING)
        assert (chosen.dtype, chosen.reason) == (dtype, "")
    assert not list(cache.glob("speeds-*"))


@pytest.mark.parametrize(("ratio", "faster"), [(0.5, True), (4.0, False)])
def test_text_is_read_in_16_bits_where_passes_are_faster(ratio, faster, cache):
    """On a CPU that emulates bfloat16, they never are, and nothing is timed."""
    write(cache, "eager", {"bfloat16": ratio})
    wanted = faster and devices.is_fast(torch.bfloat16, CPU)
    assert precision.reads_fast(torch.bfloat16, CPU) == wanted
    assert precision.reads_fast(torch.float32, CPU)
    assert precision.reads_fast(torch.bfloat16, torch.device("cuda"))
