"""Shapes count what transformers builds, and refuse what cannot be built or cut."""

import re
from pathlib import Path

import pytest
import torch
from errors import raises_option
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draftlab.errors import UserError
from draftlab.model.shape import (
    Shape,
    check,
    check_within,
    fewest_kv_heads,
    format_count,
    parse_count,
    read_shape_file,
    resolve,
    write_shape_file,
)

WIDTHS = Path(__file__).parents[2] / "configs" / "widths"
FILES = sorted(WIDTHS.glob("*.yaml"))
SMALL = Shape(layers=3, hidden=40, heads=8, kv_heads=4, head_dim=12, ffn=56, vocab=101)
# LLaMA-3-8B's sizes without its name: 4 heads per KV head
GROUPED = Shape(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256)
FAMILIES = {  # model, config, the config's own options, the shape's options
    "llama": (LlamaForCausalLM, LlamaConfig, {}, {}),
    "llama_attention_bias": (
        LlamaForCausalLM,
        LlamaConfig,
        {"attention_bias": True},
        {"qkv_bias": True, "o_bias": True},
    ),
    "llama_mlp_bias": (LlamaForCausalLM, LlamaConfig, {"mlp_bias": True}, {"mlp_bias": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {}, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}, {"qkv_bias": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}, {"qk_norm": True}),
    "qwen3_attention_bias": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"attention_bias": True},
        {"qk_norm": True, "qkv_bias": True, "o_bias": True},
    ),
}


def preset(name: str) -> Shape:
    return read_shape_file(WIDTHS / f"{name}.yaml")


def weights_in_transformers(shape: Shape, family: str) -> list[tuple[str, tuple[int, ...]]]:
    model, config, options, _ = FAMILIES[family]
    sizes = config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        **options,
    )
    with torch.device("meta"):
        return [(name, tuple(weight.shape)) for name, weight in model(sizes).named_parameters()]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_axis_table_is_what_transformers_builds(family, tied):
    shape = SMALL.model_copy(update={"tied": tied, **FAMILIES[family][3]})
    assert [
        (name, shape.dims(axes)) for name, axes in shape.axes().items()
    ] == weights_in_transformers(shape, family)


def _options(shape: Shape) -> dict[str, bool]:
    return {
        name: True for name, value in shape.model_dump().items() if value is True and name != "tied"
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_params_of_a_shape_file_are_those_of_transformers(file):
    shape = read_shape_file(file)
    check(shape)
    family = next(name for name, (*_, options) in FAMILIES.items() if _options(shape) == options)
    weights = weights_in_transformers(shape, family)
    assert [(name, shape.dims(axes)) for name, axes in shape.axes().items()] == weights
    assert shape.params() == sum(torch.Size(size).numel() for _, size in weights)
    blocks = [size for name, size in weights if ".layers." in name]
    assert shape.body_params() == sum(torch.Size(size).numel() for size in blocks)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama-7b", 6_738_415_616),
        ("llama-65b", 65_285_660_672),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3.1-8b", 8_030_261_248),
        ("noft-1.3b", 1_345_423_360),
        ("llama-3.2-1b", 1_235_814_400),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-72b", 72_706_203_648),
        ("qwen3-8b", 8_190_735_360),
        ("mistral-7b-v0.1", 7_241_732_096),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_params_equal_the_published_count(name, count):
    """The hub's, from the headers of the repository's safetensors."""
    assert preset(name).params() == count


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("wide-1.3b", 1333.7),
        ("wide-796m", 796.3),
        ("fastdraft-150m-6x512", 154.1),
        ("direct-align-115m-4x1024", 116.9),
    ],
)
def test_params_equal_the_count_in_the_papers(name, millions):
    assert round(preset(name).params() / 1e6, 1) == millions


def test_wide_saves_three_eighths_of_the_kv_cache():
    assert (
        preset("wide-1.3b").kv_bytes_per_token() / preset("noft-1.3b").kv_bytes_per_token()
        == 1 - 0.375
    )


def test_kv_cache_of_llama_65b():
    assert preset("llama-65b").kv_bytes_per_token() == 2560 * 1024


@pytest.mark.parametrize("tied", [False, True])
def test_flops_per_token_by_hand(tied):
    shape = Shape(layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=16, vocab=32, tied=tied)
    attention, mlp, head = 8 * 8 + 2 * 4 * 8 + 8 * 8, 3 * 8 * 16, 32 * 8
    # two products, multiply and add, heads x head_dim, 9 cached and 1 new
    scores_and_values = 2 * 2 * (2 * 4) * 10
    assert shape.flops_per_token(9) == 2 * (2 * (attention + mlp) + head) + 2 * scores_and_values


def test_resolve_scales_heads_and_ffn_with_the_width():
    shape = resolve(preset("llama-7b"), layers=12, hidden=2560)
    assert (shape.layers, shape.heads, shape.kv_heads, shape.ffn) == (
        12,
        20,
        20,
        6880,
    )  # 11008 x 2560 / 4096


def test_resolve_keeps_all_heads_at_the_sources_width():
    wide = preset("llama-7b").model_copy(update={"hidden": 2560})  # attention wider than the stream
    assert resolve(wide, layers=5).heads == 32


@pytest.mark.parametrize(("params", "ffn"), [(1_333_721_600, 9280), (1_330_000_000, 9232)])
def test_resolve_solves_the_ffn_for_params(params, ffn):
    # a neuron is 12 layers x 3 x 2560 = 92,160 weights: 3.72M fewer are 40.4 neurons
    assert resolve(preset("llama-7b"), layers=12, hidden=2560, params=params).ffn == ffn


def test_params_out_of_reach_are_refused_with_the_range():
    with raises_option("12", "2560", "3B", "480M", "1.49B"):
        resolve(preset("llama-7b"), layers=12, hidden=2560, params=3_000_000_000)


def test_params_and_ffn_exclude_each_other():
    with raises_option("--params", "--ffn", "512"):
        resolve(preset("tiny-16x256"), params=4_000_000, ffn=512)


def test_a_width_that_heads_do_not_divide_is_refused_with_neighbours():
    shape = preset("tiny-16x256").model_copy(update={"hidden": 250, "heads": 4})
    with raises_option("250", "4", "248", "252"):
        check(shape)


def test_other_families_may_have_any_width():
    shape = preset("tiny-16x256").model_copy(update={"hidden": 250, "heads": 4})
    check(shape, llama=False)


def test_kv_heads_that_do_not_divide_heads_are_refused_with_neighbours():
    shape = SMALL.model_copy(update={"heads": 10})
    with raises_option("10", "kv_heads", "4"):
        check(shape)


@pytest.mark.parametrize(
    ("field", "value", "option"),
    [
        ("layers", 33, "--layers 33"),
        ("heads", 64, "64 heads with 8"),
        ("vocab", 32000, "vocab 32000"),
        ("qk_norm", True, "qk_norm True"),
    ],
)
def test_what_the_source_does_not_have_is_refused(field, value, option):
    with pytest.raises(UserError, match=option):
        check_within(GROUPED.model_copy(update={field: value}), GROUPED)


def test_larger_groups_than_the_sources_are_refused():
    shape = GROUPED.model_copy(update={"heads": 10, "kv_heads": 2})
    with raises_option("10", "2", "4"):
        check_within(shape, GROUPED)


@pytest.mark.parametrize(
    ("heads", "group", "fewest"), [(20, 4, 5), (10, 4, 5), (6, 4, 2), (7, 4, 7), (4, 1, 4)]
)
def test_fewest_kv_heads(heads, group, fewest):
    assert fewest_kv_heads(heads, group) == fewest


@pytest.mark.parametrize(
    ("text", "count"), [("1.3b", 1_300_000_000), ("0.57M", 570_000), ("42", 42)]
)
def test_parse_count(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "-1b", "nan"])
def test_what_is_no_count_is_refused(text):
    with pytest.raises(UserError, match=re.escape(repr(text))):
        parse_count(text)


@pytest.mark.parametrize(
    ("count", "text"), [(6_738_415_616, "6.74B"), (999_600_000, "1B"), (999, "999")]
)
def test_count_text(count, text):
    assert format_count(count) == text


def test_a_written_shape_file_reads_back(tmp_path):
    shape = SMALL.model_copy(update={"tied": True, "qk_norm": True})
    write_shape_file(shape, tmp_path / "new" / "small.yaml", "for a test")
    assert read_shape_file(tmp_path / "new" / "small.yaml") == shape


@pytest.mark.parametrize(
    ("line", "complaint"),
    [("width: 64", "width: "), ("layers: twelve", "layers: .*'twelve'"), ("layers: [1", "while")],
)
def test_a_bad_line_in_a_shape_file_is_named(tmp_path, line, complaint):
    text = (WIDTHS / "tiny-16x256.yaml").read_text()
    key = line.split(":")[0]
    path = tmp_path / "bad.yaml"
    path.write_text(
        "".join(old for old in text.splitlines(True) if not old.startswith(f"{key}:")) + line + "\n"
    )
    with pytest.raises(UserError, match=complaint):
        read_shape_file(path)


REAL = {  # width, heads, kv heads, head_dim, from the models' config.json
    "SmolLM2-360M": (960, 15, 5, 64),
    "Qwen2.5-0.5B": (896, 14, 2, 64),
    "Qwen3-0.6B": (1024, 16, 8, 128),
    "LLaMA-7B": (4096, 32, 32, 128),
}


@pytest.mark.parametrize("name", REAL)
def test_default_heads_of_every_width_are_legal(name):
    hidden, heads, kv_heads, head_dim = REAL[name]
    source = Shape(
        layers=4,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=4 * hidden,
        vocab=512,
    )
    for width in range(32, hidden + 1, 32):
        shape = resolve(source, hidden=width)
        check(shape)
        assert shape.kv_heads <= kv_heads
        assert shape.heads // shape.kv_heads <= heads // kv_heads
