"""Shapes count what transformers builds, and refuse what cannot be built or cut."""

from pathlib import Path

import pytest
import torch
from helpers.errors import raises_option
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

from draftlab.model.shape import (
    Shape,
    check,
    check_within,
    fewest_kv_heads,
    format_count,
    parse_count,
    parse_vocab,
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
    assert [(name, shape.dims(axes)) for name, axes in shape.axes().items()] == weights_in_transformers(shape, family)


def _options(shape: Shape) -> dict[str, bool]:
    return {name: True for name, value in shape.model_dump().items() if value is True and name != "tied"}


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


@pytest.mark.parametrize(("params", "ffn"), [(1_333_260_800, 9280), (1_330_000_000, 9232)])
def test_resolve_solves_the_ffn_for_params(params, ffn):
    # a neuron is 12 layers x 3 x 2560 = 92,160 weights: 3.72M fewer are 40.4 neurons
    assert resolve(preset("llama-7b"), layers=12, hidden=2560, params=params).ffn == ffn


@pytest.mark.parametrize(
    ("hidden", "heads", "kv_heads", "head_dim"),
    [(960, 15, 5, 64), (896, 14, 2, 64), (1024, 16, 8, 128)],  # SmolLM2, Qwen2.5, Qwen3
)
def test_default_heads_of_every_width_are_legal(hidden, heads, kv_heads, head_dim):
    sizes = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    source = SMALL.model_copy(update=sizes | {"ffn": 4 * hidden})
    for width in range(32, hidden + 1, 32):
        shape = resolve(source, hidden=width)
        check(shape)
        check_within(shape, source)


@pytest.mark.parametrize(("heads", "group", "fewest"), [(20, 4, 5), (10, 4, 5), (6, 4, 2), (7, 4, 7), (4, 1, 4)])
def test_fewest_kv_heads(heads, group, fewest):
    assert fewest_kv_heads(heads, group) == fewest


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layers": 33}, ("--layers 33",)),
        ({"heads": 64}, ("64 heads with 8",)),
        ({"vocab": 32000}, ("vocab 32000",)),
        ({"qk_norm": True}, ("qk_norm True",)),
        ({"heads": 10, "kv_heads": 2}, ("10", "2", "4")),
    ],
)
def test_what_the_source_does_not_have_is_refused(changes, named):
    with raises_option(*named):
        check_within(GROUPED.model_copy(update=changes), GROUPED)


def test_heads_that_do_not_divide_are_refused_with_neighbours():
    wide = preset("tiny-16x256").model_copy(update={"hidden": 250, "heads": 4})
    with raises_option("250", "4", "248", "252"):
        check(wide)
    check(wide, llama=False)
    with raises_option("10", "kv_heads", "4"):
        check(SMALL.model_copy(update={"heads": 10}))


def test_counts_and_numbers_of_ids_as_typed():
    typed = {"1.3b": 1_300_000_000, "0.57M": 570_000, "42": 42}
    assert {text: parse_count(text) for text in typed} == typed
    ids = {"16k": 16384, "4K": 4096, "12000": 12000}
    assert {text: parse_vocab(text) for text in ids} == ids
    counts = {6_738_415_616: "6.74B", 999_600_000: "1B", 999: "999"}
    assert {count: format_count(count) for count in counts} == counts
    for parse, text in (
        (parse_count, "-1b"),
        (parse_count, "nan"),
        (parse_vocab, "16m"),
        (parse_vocab, "0"),
    ):
        with raises_option(repr(text)):
            parse(text)


def test_a_written_shape_file_reads_back(tmp_path):
    shape = SMALL.model_copy(update={"tied": True, "qk_norm": True})
    write_shape_file(shape, tmp_path / "new" / "small.yaml", "for a test")
    assert read_shape_file(tmp_path / "new" / "small.yaml") == shape
