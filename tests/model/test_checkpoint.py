"""Directories: read strictly, loaded as transformers loads them, and recorded by their weights."""

import json
import shutil

import pytest
import torch
from helpers.builders import SIZES, assert_rounds, build, logits_by_transformers, random_model
from helpers.errors import raises_option
from helpers.sharded import SHARDS, sharded
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, SmolLM3Config

from draftlab.errors import UserError
from draftlab.model import checkpoint, llama, saving
from draftlab.runs import provenance


def test_sharded_checkpoints_load_in_transformers(tmp_path, family_dirs):
    model, source = build("llama", seed=4), family_dirs["llama"]
    weights = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    config = checkpoint.read_config(source)
    saving.write_checkpoint(tmp_path, config, weights, source, shard_bytes=100_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


@pytest.mark.parametrize("family", ["llama", "llama3_tied", "qwen2", "qwen3", "llama_biases"])
def test_a_shape_is_planned_without_weights(family, family_dirs, tmp_path):
    shutil.copy(family_dirs[family] / "config.json", tmp_path)
    shape = checkpoint.read_shape(tmp_path)
    assert shape == checkpoint.read_shape(family_dirs[family])
    assert shape.params() == sum(p.numel() for p in build(family).parameters())


def listed(place, name):
    """Let the index list a file of that name for one tensor."""
    index = json.loads((place / "model.safetensors.index.json").read_text())
    index["weight_map"][min(index["weight_map"])] = name
    (place / "model.safetensors.index.json").write_text(json.dumps(index))


def configured(place, **changes):
    file = place / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda p: (p / SHARDS[1]).unlink(), SHARDS[1]),
        (lambda p: (p / SHARDS[1]).write_bytes((p / SHARDS[1]).read_bytes()[:-100]), SHARDS[1]),
        (lambda p: (p / "model.safetensors.index.json").write_text("[]"), "index.json"),
        (lambda p: listed(p, "../model.safetensors"), "index.json"),
        (lambda p: listed(p, "/etc/passwd"), "index.json"),
    ],
)
def test_a_broken_checkpoint_is_one_line_that_says_what_and_where(family_dirs, tmp_path, change, named):
    place = sharded(family_dirs["llama"], tmp_path / "m")
    change(place)
    for read in (lambda place: checkpoint.Checkpoint(place).check(), checkpoint.read_shape):
        with raises_option(named) as error:
            read(place)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError):
        checkpoint.load_model(place, torch.float32)


@pytest.mark.parametrize(
    ("field", "value", "stored"),
    [
        ("num_hidden_layers", 7, 5),
        ("num_hidden_layers", 3, 5),
        ("hidden_size", 32, 64),
        ("intermediate_size", 96, 88),
        ("vocab_size", 300, 307),
        ("num_attention_heads", 16, 8),
        ("num_key_value_heads", 8, 4),
        ("head_dim", 8, 12),
        ("tie_word_embeddings", True, False),
        ("attention_bias", True, False),
    ],
)
def test_a_config_that_contradicts_the_weights_is_named_with_both_values(field, value, stored, family_dirs, tmp_path):
    """stored: the value that the weights of tests/helpers/builders.py have."""
    place = shutil.copytree(family_dirs["llama"], tmp_path / "m")
    configured(place, **{field: value})
    for read in (lambda place: checkpoint.Checkpoint(place).check(), checkpoint.read_shape):
        with raises_option(place, field, json.dumps(value), json.dumps(stored)) as error:
            read(place)
        assert "\n" not in str(error.value)


def test_a_tied_head_that_is_said_to_be_its_own_is_named(family_dirs, tmp_path):
    place = shutil.copytree(family_dirs["qwen2_tied"], tmp_path / "m")
    configured(place, tie_word_embeddings=False)
    with raises_option("tie_word_embeddings", "false", "true"):
        checkpoint.read_shape(place)


@pytest.mark.parametrize("name", ["layer_types", "no_rope_layers"])
def test_a_list_with_too_few_layers_is_named_with_both_lengths(name, family_dirs, tmp_path):
    place = tmp_path / "m"
    random_model(SmolLM3Config(**SIZES)).save_pretrained(place)
    values = json.loads((place / "config.json").read_text())[name]
    configured(place, **{name: values[:3]})
    with raises_option("num_hidden_layers 5", name, "3"):
        checkpoint.read_shape(place)


def test_a_tied_checkpoint_that_stores_only_the_head_is_read(family_dirs, tmp_path):
    """Case B9: transformers ties the embedding to the head."""
    source, place = family_dirs["qwen2_tied"], tmp_path / "m"
    shutil.copytree(source, place)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    ids = torch.arange(9).unsqueeze(0)
    expected = logits_by_transformers(source, ids)
    assert torch.equal(logits_by_transformers(place, ids), expected)
    assert checkpoint.read_shape(place) == checkpoint.read_shape(source)
    assert torch.equal(checkpoint.load_model(place, torch.float32)(ids).logits, expected)
    engine = llama.load(place, torch.float32)
    assert_rounds(engine.forward(ids, engine.new_cache(1, 9)), expected)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "factor": 0.0}}, "factor"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, "theta"),
        ({"rope_parameters": {"rope_theta": {"__float__": "Infinity"}}}, "theta"),
        ({"rope_parameters": {"rope_theta": 1e300}}, "theta"),
        ({"rms_norm_eps": {"__float__": "small"}}, "small"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1.0}}, "beta_fast"),
        ({"rope_scaling": {"low_freq_factor": 4.0, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"sliding_window": -1}, "sliding_window"),
        ({"attention_bias": True}, "attention_bias"),
        ({"text_config": {"rms_norm_eps": 0.0}}, "rms_norm_eps"),
    ],
)
def test_settings_with_which_no_model_computes_are_refused(settings, named, family_dirs, tmp_path):
    """The pass would go on with logits that are finite and wrong, or the server would not start."""
    place = shutil.copytree(family_dirs["llama"], tmp_path / "m")
    configured(place, **settings)
    for read in (lambda place: checkpoint.Checkpoint(place).check(), checkpoint.read_shape):
        with raises_option(place, named):
            read(place)


def damaged_norm(tensors, value, dtype):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    tensors["model.norm.weight"][63] = value


def other_head(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


def load(place):
    return checkpoint.load_model(place, torch.float32)


def norm(place):
    return checkpoint.Weights(place)["model.norm.weight"]


@pytest.mark.parametrize(
    ("family", "change", "reads", "named"),
    [
        ("llama", lambda t: damaged_norm(t, torch.nan, torch.float32), (norm, load), "norm.weight"),
        (
            "llama",
            lambda t: damaged_norm(t, torch.inf, torch.bfloat16),
            (norm, load),
            "norm.weight",
        ),
        (
            "llama",
            lambda t: damaged_norm(t, 1, torch.int32),
            (checkpoint.read_shape, load),
            "norm.weight",
        ),
        ("llama3_tied", other_head, (checkpoint.read_shape,), "tie_word_embeddings"),
    ],
)
def test_weights_that_cannot_be_right_are_named(family, change, reads, named, family_dirs, tmp_path):
    place = shutil.copytree(family_dirs[family], tmp_path / "m")
    tensors = load_file(place / "model.safetensors")
    change(tensors)
    save_file(tensors, place / "model.safetensors")
    for read in reads:
        with raises_option(named):
            read(place)


@pytest.mark.parametrize("change", [{"mlp_bias": None}, {"rope_parameters": {"rope_type": "x"}}])
def test_a_model_that_transformers_cannot_build_is_one_line(change, family_dirs):
    config = checkpoint.read_config(family_dirs["llama"]) | change
    with pytest.raises(UserError) as error:
        checkpoint.new_model(config, seed=0)
    assert "\n" not in str(error.value)


def test_ids_that_end_a_text_come_from_tokenizer_and_every_config(tokenizer_dir, tmp_path):
    place = shutil.copytree(tokenizer_dir, tmp_path / "m")
    assert checkpoint.eos_token_ids(place) == (1,)
    (place / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    (place / "config.json").write_text('{"eos_token_id": 4}')
    assert checkpoint.eos_token_ids(place) == (1, 4, 7, 9)


def test_per_layer_lists_are_sliced_to_the_kept_layers(family_dirs):
    shape = checkpoint.read_shape(family_dirs["qwen3"]).model_copy(update={"layers": 2})
    full, sliding = "full_attention", "sliding_attention"
    lists = {
        "layer_types": [full, sliding, full, full, full],
        "unknown": [1, 2, 3, 4, 5],
        "short": [1, 2],
        "eos_token_id": [1, 2, 3, 4, 5],
        "suppress_tokens": [1, 2, 3, 4, 5],
    }
    config = checkpoint.config_for(shape, checkpoint.read_config(family_dirs["qwen3"]) | lists, [1, 4])
    kept = {"layer_types": [sliding, full], "unknown": [2, 5]}
    assert {name: config[name] for name in lists} == lists | kept


def test_a_fingerprint_sees_the_weights_and_not_the_notes(family_dirs, tmp_path):
    copy = shutil.copytree(family_dirs["llama"], tmp_path / "copy")
    before = provenance.fingerprint(copy)
    assert before == provenance.fingerprint(family_dirs["llama"])
    (copy / "README.md").write_text("x")
    assert provenance.fingerprint(copy) == before
    with (copy / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"\x01")
    assert provenance.fingerprint(copy) != before


def test_of_padded_heads_the_smaller_size_is_common(family_dirs, tmp_path):
    place = shutil.copytree(family_dirs["llama"], tmp_path / "m")
    configured(place, vocab_size=320)
    padded, plain = checkpoint.Checkpoint(place), checkpoint.Checkpoint(family_dirs["llama"])
    assert padded.common_vocabulary(plain) == 307
    assert plain.common_vocabulary(padded) == 307


@pytest.mark.parametrize("family", ["llama3_tied", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_what_transformers_itself_loads(family_dirs, family, dtype, monkeypatch):
    """Also where its tensors are read in pieces."""
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 1000)
    place = family_dirs[family]
    wanted = AutoModelForCausalLM.from_pretrained(place, dtype=dtype)
    found = checkpoint.load_model(place, dtype)
    state, own = wanted.state_dict(), found.state_dict()
    assert {name: tensor.dtype for name, tensor in own.items()} == dict.fromkeys(state, dtype)
    assert all(torch.equal(tensor, state[name]) for name, tensor in own.items())
    assert all(torch.equal(a, b) for a, b in zip(found.buffers(), wanted.buffers(), strict=True))
    assert found.config.to_dict() == wanted.config.to_dict()
    assert found.generation_config.to_dict() == wanted.generation_config.to_dict()
    assert (found.training, found.name_or_path) == (False, wanted.name_or_path)


@pytest.mark.parametrize("places", ["auto", "disk"])
def test_a_model_that_is_spread_computes_the_same(family_dirs, tmp_path, places):
    ids, place = torch.tensor([[0, 17, 44, 9]]), family_dirs["qwen2"]
    modules = ("model.embed_tokens", "model.layers", "model.norm", "lm_head")
    parts = dict.fromkeys(modules, "cpu") | {"model.layers": "disk"}
    (tmp_path / "map.json").write_text(json.dumps(parts))
    given = {"auto": "auto", "disk": str(tmp_path / "map.json")}[places]
    spread = checkpoint.load_model(place, torch.float32, device_map=given)
    wanted = checkpoint.load_model(place, torch.float32)(ids).logits
    torch.testing.assert_close(spread(ids).logits, wanted)
    assert any(p.is_meta for p in spread.parameters()) == (places == "disk")


@pytest.mark.slow
def test_loading_peaks_at_little_more_than_the_weights(tmp_path):
    """A child process each; 100M parameters, of which the embedding has a quarter."""
    from benchmarks.load_peak import SHAPE, load_peak_ratio, write_random

    small = {"layers": 10, "hidden": 768, "heads": 12, "kv_heads": 4, "ffn": 2304, "vocab": 32000}
    shape = SHAPE.model_copy(update=small)
    write_random(shape, tmp_path / "made", torch.bfloat16)
    assert load_peak_ratio(tmp_path / "made") <= 1.15
