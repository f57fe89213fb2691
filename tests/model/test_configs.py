"""config.json: it follows the cut, transformers 4 and 5 read it alike, and lengths are those of vLLM."""

import copy
import json

import pytest
import torch
from helpers.builders import LLAMA3_ROPE, SIZES, assert_rounds, logits_by_transformers, random_model
from transformers import AutoConfig, LlamaConfig, MistralConfig, Qwen2Config

from draftlab.heads.base import layer_config, sizes_of
from draftlab.heads.dflash import layout as dflash_layout
from draftlab.heads.eagle3 import layout as eagle3_layout
from draftlab.heads.eagle3.layout import Head
from draftlab.model import checkpoint, llama, modes, saving
from draftlab.model.hf_files import context_of
from draftlab.pruning.source import check_prunable

FULL, SLIDING = "full_attention", "sliding_attention"
KEPT = [0, 3, 4]
THETA = 500000.0
# families that prune cuts, with their fields that are not plain numbers
PRUNED = {
    "ernie4_5": {"use_bias": True},
    "granite": {"attention_bias": True, "mlp_bias": True},
    "helium": {"attention_bias": True},
    "hunyuan_v1_dense": {},
    "iquestcoder": {},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "ministral": {"layer_types": [SLIDING, FULL, FULL, SLIDING, FULL]},
    "ministral3": {"max_position_embeddings": 262144},  # 16 x the original context
    "mistral": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4},
    "qwen3": {"layer_types": [SLIDING, FULL, FULL, SLIDING, FULL], "use_sliding_window": True},
    "seed_oss": {"attention_out_bias": True},
    "smollm3": {
        "no_rope_layers": [1, 0, 1, 0, 1],
        "layer_types": [SLIDING, FULL, FULL, SLIDING, FULL],
        "use_sliding_window": True,
    },
}
# lists that are as long as the model is deep by chance
BY_CHANCE = {"eos_token_id": [1, 5, 6, 7, 8], "bad_words_ids": [[1], [2], [3], [4], [5]]}


def changed(value):
    """Return another value of the same kind."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else value * 1.5


def optional_fields(kind: str) -> dict[str, object]:
    """Return every numeric field of a family's config that is not a size, with another value than the default."""
    default = AutoConfig.for_model(kind).to_dict()
    fixed = SIZES.keys() | {"model_type", "pretraining_tp", "max_window_layers"}
    return {
        name: changed(value)
        for name, value in default.items()
        if isinstance(value, bool | int | float) and name not in fixed
    }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", PRUNED)
def test_a_drafts_config_is_transformers_own_for_the_kept_layers(kind, tied, tmp_path):
    fields = {"model_type": kind} | SIZES | optional_fields(kind) | PRUNED[kind] | BY_CHANCE
    source = AutoConfig.for_model(**copy.deepcopy(fields)).to_dict()
    shape = checkpoint.shape_of(fields | {"tie_word_embeddings": tied}, {})
    shape = shape.model_copy(update={"layers": 3, "hidden": 32, "heads": 4, "kv_heads": 2})
    saving.write_config(tmp_path, checkpoint.config_for(shape, fields, KEPT), "bfloat16")
    draft = AutoConfig.from_pretrained(tmp_path).to_dict()
    expected = source | {
        name: [source[name][i] for i in KEPT] for name in ("layer_types", "no_rope_layers") if name in source
    }
    sizes = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4}
    expected |= sizes | {"num_key_value_heads": 2, "tie_word_embeddings": tied}
    expected |= {"dtype": "bfloat16", "head_dim": SIZES["head_dim"], "_name_or_path": str(tmp_path)}
    beside = {"rope_theta", "rope_scaling", "max_window_layers"}
    assert {k: v for k, v in draft.items() if k not in beside} == {k: v for k, v in expected.items() if k not in beside}
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["torch_dtype"] == written["dtype"] == "bfloat16"
    assert {name: written[name] for name in BY_CHANCE} == BY_CHANCE
    if "max_window_layers" in source:  # transformers 4.51: layers from this index on have a window
        first = [source["max_window_layers"], draft["max_window_layers"]]
        assert [i >= first[0] for i in KEPT] == [i >= first[1] for i in range(3)]


def test_the_layers_of_a_source_without_layer_types_keep_their_windows(tmp_path):
    """Case B3: Qwen2, as saved by transformers 4."""
    fields = {"model_type": "qwen2"} | SIZES | PRUNED["qwen2"]
    shape = checkpoint.shape_of(fields, {}).model_copy(update={"layers": 3})
    assert checkpoint.config_for(shape, fields, [0, 1, 4])["layer_types"] == [FULL, FULL, SLIDING]


# The fields that transformers 4.51.3 and 4.57.3 read, for rope_parameters of transformers 5 at a context of 256 tokens.
# From these they compute the rotary frequencies and factors that 5.23 computes from rope_parameters (run 2026-11-28).
YARN = {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0}
FACTORS = {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
LONGROPE = {"rope_type": "longrope", "rope_theta": THETA, "original_max_position_embeddings": 64}
GOLDEN = {
    "default": ({"rope_type": "default", "rope_theta": THETA}, {}),
    "linear": (
        {"rope_type": "linear", "rope_theta": THETA, "factor": 4.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "llama3": (
        LLAMA3_ROPE,
        {"rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}},
    ),
    "yarn": (
        YARN | {"original_max_position_embeddings": 64},
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "yarn at the original context": (
        YARN | {"original_max_position_embeddings": 256},
        {
            "max_position_embeddings": 1024,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "longrope": (
        LONGROPE | FACTORS,
        {
            "original_max_position_embeddings": 64,
            "rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 64} | FACTORS,
        },
    ),
}


def old_layout(config):
    """Return a config with rotary fields as transformers 4 writes them."""
    rope = dict(config["rope_parameters"])
    fields = {name: value for name, value in config.items() if name != "rope_parameters"}
    return fields | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("rope", GOLDEN)
def test_transformers_4_and_5_read_the_same_rotary_fields(rope, kind, old):
    new, golden = GOLDEN[rope]
    source = {"model_type": kind} | SIZES | {"rope_parameters": new, "torch_dtype": "float32"}
    source = old_layout(source) if old else source
    written = saving.portable_config(source, "bfloat16")
    both = {"dtype": "bfloat16", "torch_dtype": "bfloat16", "rope_theta": THETA}
    expected = SIZES | both | {"rope_parameters": new} | golden
    assert {name: written[name] for name in expected} == expected
    assert ("rope_scaling" in written) == ("rope_scaling" in golden)
    read = [checkpoint.read_by_transformers(config).rope_parameters for config in (source, written)]
    assert read[0] == read[1] == new


@pytest.mark.parametrize(
    ("kind", "new", "golden"),
    [
        (
            "gemma3_text",
            {
                FULL: {"rope_type": "linear", "rope_theta": 2e6, "factor": 8.0},
                SLIDING: {"rope_type": "default", "rope_theta": 2e4},
            },
            {
                "rope_theta": 2e6,
                "rope_local_base_freq": 2e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
        (
            "olmo3",
            {
                FULL: YARN | {"original_max_position_embeddings": 64},
                SLIDING: {"rope_type": "default", "rope_theta": THETA},
            },
            {"rope_theta": THETA, "rope_scaling": GOLDEN["yarn"][1]["rope_scaling"]},
        ),
        (
            "phi3",
            LONGROPE | FACTORS | {"partial_rotary_factor": 1.0},
            {
                "rope_theta": THETA,
                "original_max_position_embeddings": 64,
                "rope_scaling": {"type": "longrope"} | FACTORS,
            },
        ),
        (
            "gpt_neox",
            {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.5},
            {"rotary_emb_base": THETA, "rotary_pct": 0.5},
        ),
    ],
)
def test_transformers_4_reads_models_with_rotary_fields_of_their_own(kind, new, golden):
    """transformers 4.57.3 computes the same rotary frequencies from these fields, 4.51.3 too if it knows the model."""
    source = {"model_type": kind} | SIZES | {"head_dim": 12, "hidden_size": 96}
    source |= {"rope_parameters": new, "original_max_position_embeddings": 64}
    written = saving.portable_config(source, "float32")
    assert {name: written[name] for name in golden} == golden
    read = checkpoint.read_by_transformers(written).rope_parameters
    assert {name: read[name] for name in new} == new


def test_the_parts_of_a_config_are_written_alike(tmp_path):
    part = {"model_type": "llama"} | SIZES | {"rope_parameters": LLAMA3_ROPE, "dtype": "float32"}
    whole = saving.portable_config({"model_type": "unknown", "text_config": part}, "bfloat16")
    assert whole["text_config"] == saving.portable_config(part, "bfloat16")
    assert whole["text_config"]["rope_theta"] == LLAMA3_ROPE["rope_theta"]


@pytest.mark.parametrize("layout", ["native", "speculators", "dflash"])
def test_heads_have_the_rotary_fields_of_transformers_4(layout, family_dirs, tmp_path):
    """Failure 2 of the peers: a head without rope_scaling has unscaled frequencies in readers on transformers 4."""
    target = family_dirs["llama3_tied"]
    if layout == "dflash":
        content = dflash_layout.new_json(target, 2, None, 4, 0)
        dflash_layout.write(tmp_path, content, {"fc.weight": torch.zeros(1, dtype=torch.bfloat16)})
    else:
        shape = eagle3_layout.head_config(target, None, 307)
        weights = {name: torch.zeros(size) for name, size in shape.sizes().items()}
        head = Head(config=shape, weights=weights, ids=torch.arange(307), embedding=None)
        eagle3_layout.write(tmp_path, head, layout, target=target, k=3)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"]
    layer = config.get("transformer_layer_config", config)
    golden = {"rope_theta": THETA, "rope_parameters": LLAMA3_ROPE} | GOLDEN["llama3"][1]
    assert {name: layer[name] for name in golden} == golden
    assert LlamaConfig(**layer).rope_parameters == LLAMA3_ROPE


@pytest.mark.parametrize(
    ("rope", "rows"),
    [
        ({FULL: {"rope_type": "linear", "rope_theta": 2e6, "factor": 8.0}}, (2e6, 8.0)),
        ({"rope_type": "default", "rope_theta": 2e6, "partial_rotary_factor": 0.5}, (2e6, None)),
    ],
)
def test_a_head_rotates_all_dimensions_as_full_attention_does(rope, rows, family_dirs, tmp_path):
    """Gemma 3 has a base per kind of layer. Phi rotates some dimensions; a server would read that for the head, too."""
    kind = "gemma3_text" if FULL in rope else "stablelm"
    fields = {"model_type": kind} | SIZES | {"rope_parameters": rope}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    head = eagle3_layout.head_config(tmp_path, [1, 2, 4], 307)
    assert (head.rope["rope_theta"], head.rope.get("factor")) == rows
    assert "partial_rotary_factor" not in head.rope


@pytest.mark.parametrize("factors", [{"rope_type": "linear"}, YARN, {"rope_type": "default"}])
def test_a_head_reads_as_far_as_its_target(factors, family_dirs, tmp_path):
    rope = {"rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": 64} | factors
    fields = {"model_type": "llama"} | SIZES | {"max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"rope_parameters": rope}))
    head = eagle3_layout.head_config(tmp_path, [1, 2, 4], 307)
    written = saving.portable_config(eagle3_layout.layer_config_json(head), "float32")
    read = sizes_of(layer_config(LlamaConfig, written))
    assert read["context"] == head.context == (64 if factors["rope_type"] == "default" else 256)


def test_a_head_that_is_said_to_be_tied_keeps_its_lm_head(family_dirs, tmp_path):
    """SpecForge#139: the config of a head for Qwen3-4B had tie_word_embeddings true."""
    shape = eagle3_layout.head_config(family_dirs["llama"], None, 307)
    weights = {name: torch.zeros(size) for name, size in shape.sizes().items()}
    head = Head(config=shape, weights=weights, ids=torch.arange(307), embedding=None)
    eagle3_layout.write(tmp_path, head, "native", target=family_dirs["llama"], k=3)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert "lm_head.weight" in checkpoint.Weights(tmp_path)


# vLLM 0.33, vllm/config/model.py:_get_and_verify_max_len
LENGTHS = [
    ({"max_position_embeddings": 512, "sliding_window": 8, "use_sliding_window": True}, 512),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 1024),
    (
        {
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            "max_position_embeddings": 64,
        },
        256,
    ),
    (
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 64,
            }
        },
        128,
    ),
    ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 1024),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 512),
    ({"rope_parameters": LLAMA3_ROPE}, 256),
    ({"rope_parameters": LONGROPE | FACTORS}, 256),
    ({"rope_scaling": {"type": "su"} | FACTORS}, 256),
    (
        {
            "model_type": "gemma3_text",
            "rope_parameters": {FULL: {"rope_type": "linear", "factor": 8.0}, SLIDING: {}},
        },
        256,
    ),
    (
        {"rope_parameters": {FULL: YARN | {"original_max_position_embeddings": 32}, SLIDING: {}}},
        128,
    ),
    ({"model_max_length": 4096}, 4096),
]


@pytest.mark.parametrize(("config", "length"), LENGTHS)
def test_the_context_is_the_one_that_vllm_derives(config, length):
    assert context_of({"max_position_embeddings": 256} | config) == length
    assert context_of({}, default=7) == 7


def test_a_decoder_reads_as_far_as_yarn_reaches(tmp_path):
    """Cases B5: max_position_embeddings was left at the original context, as in Qwen2.5's instructions."""
    rope = YARN | {"original_max_position_embeddings": 64}
    config = LlamaConfig(**SIZES | {"max_position_embeddings": 64, "rope_parameters": rope})
    model = random_model(config)
    model.save_pretrained(tmp_path)
    engine = llama.load(tmp_path, torch.float32)
    assert engine.context == modes.hosted(model).context == 256
    ids = torch.arange(200).unsqueeze(0)
    found = engine.forward(ids, engine.new_cache(1, 256))
    assert_rounds(found, logits_by_transformers(tmp_path, ids))


@pytest.mark.parametrize("mode", ["eager", "native"])
def test_a_sliding_window_is_computed_and_no_limit(mode, tmp_path):
    random_model(MistralConfig(**SIZES, sliding_window=8)).save_pretrained(tmp_path)
    ids = torch.arange(40).reshape(2, 20)
    expected = logits_by_transformers(tmp_path, ids)
    model = modes.with_mode(llama.load(tmp_path, torch.float32), mode)
    assert model.context == SIZES["max_position_embeddings"]
    cache = model.new_cache(2, 20)
    found = [model.forward(ids[:, at : at + 4], cache) for at in range(0, 20, 4)]
    assert_rounds(torch.cat(found, 1), expected)


def test_layers_with_and_without_a_window_are_run_by_transformers(tmp_path):
    """Case B4."""
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    random_model(Qwen2Config(**SIZES | window)).save_pretrained(tmp_path)
    assert not modes.engine_runs(tmp_path)
    model = modes.load(tmp_path, torch.float32, torch.device("cpu"))
    assert model.context == SIZES["max_position_embeddings"]


def test_a_longrope_source_can_be_cut(tmp_path):
    """Case B6: the factors, one for each pair of dimensions of a head, follow head_dim."""
    config = {"model_type": "llama"} | SIZES | {"rope_parameters": LONGROPE | FACTORS}
    shape = checkpoint.shape_of(config, {})
    check_prunable(config, shape)
    narrow = shape.model_copy(update={"head_dim": 8})
    rope = checkpoint.config_for(narrow, config)["rope_parameters"]
    assert rope == LONGROPE | {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
