"""Directories: written whole or not at all, read strictly, with a record of what made them."""

import json

import pytest
import torch
from builders import build
from errors import raises_option
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.tiny_target import train_tokenizer
from draftlab import atomic, provenance
from draftlab.errors import UserError
from draftlab.model import checkpoint, hub, saving
from draftlab.model.tokenizer import common_vocabulary


def test_a_failed_replacement_keeps_the_old(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("x")
    with pytest.raises(ZeroDivisionError), atomic.new_directory(out, force=True):
        raise ZeroDivisionError
    assert list(tmp_path.rglob("*")) == [out, out / "old"]


def test_force_replaces_and_without_it_nothing_is_overwritten(tmp_path):
    out = tmp_path / "out"
    for name in ("a", "b"):
        with atomic.new_directory(out, force=name == "b") as work:
            (work / name).write_text("x")
    assert [p.name for p in out.iterdir()] == ["b"]
    with raises_option("--force"):
        atomic.check_free(out, force=False)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_unwritable_place_is_refused_first(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=str(tmp_path)):
        atomic.check_free(tmp_path / "file" / "out", force=False)
    with pytest.raises(UserError):
        atomic.check_free(tmp_path / "file", force=True)


def test_sharded_checkpoints_load_in_transformers(tmp_path, family_dirs, monkeypatch):
    monkeypatch.setattr(saving, "SHARD_BYTES", 100_000)
    model = build("llama", seed=4)
    config = checkpoint.read_config(family_dirs["llama"])
    saving.write_checkpoint(
        tmp_path, config, saving.model_weights(model, torch.float32), family_dirs["llama"]
    )
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True)
    )
    assert checkpoint.read_shape(tmp_path) == checkpoint.read_shape(family_dirs["llama"])


@pytest.mark.parametrize("family", ["llama", "llama3_tied", "qwen2", "qwen3", "llama_biases"])
def test_shape_is_recognised_by_structure_and_planned_without_weights(
    family, family_dirs, tmp_path
):
    shape = checkpoint.read_shape(family_dirs[family])
    (tmp_path / "config.json").write_text((family_dirs[family] / "config.json").read_text())
    assert checkpoint.planned_shape(tmp_path) == shape
    flags = {
        "tied": "tied" in family,
        "qkv_bias": family in ("qwen2", "llama_biases"),
        "qk_norm": family == "qwen3",
    }
    assert {name: getattr(shape, name) for name in flags} == flags
    assert shape.params() == sum(p.numel() for p in build(family).parameters())


def spoil(directory, tmp_path, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    return tmp_path


def test_a_tensor_that_the_family_lacks_is_refused_by_its_name(family_dirs, tmp_path):
    router = {"model.layers.0.mlp.router.weight": torch.ones(2)}
    with raises_option("router"):
        checkpoint.read_shape(spoil(family_dirs["llama"], tmp_path, lambda t: t.update(router)))


def test_missing_checkpoints_say_what_was_tried(tmp_path):
    with pytest.raises(UserError):
        hub.locate("tini")
    with raises_option("config.json"):
        hub.locate(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with raises_option("model.safetensors"):
        checkpoint.Weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with raises_option("safetensors"):
        checkpoint.Weights(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "m.Q4_K.gguf", "adapter_config.json"])
def test_other_layouts_are_answered_with_the_command_that_imports_them(tmp_path, name):
    (tmp_path / name).write_text("{}")
    with raises_option(tmp_path):
        hub.locate(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with raises_option(tmp_path):
        checkpoint.Weights(tmp_path)


SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]


def sharded(directory, out):
    """Write a checkpoint as the hub has it: two shards and an index."""
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    parts = dict(zip(SHARDS, (names[::2], names[1::2]), strict=True))
    out.mkdir(exist_ok=True)
    for file in directory.iterdir():
        if file.suffix != ".safetensors":
            (out / file.name).write_bytes(file.read_bytes())
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, out / file)
    index = {
        "metadata": {},
        "weight_map": {name: file for file, part in parts.items() for name in part},
    }
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return out


def test_the_index_says_which_files_and_tensors_count(family_dirs, tmp_path):
    plain = checkpoint.Weights(family_dirs["llama"])
    place = sharded(family_dirs["llama"], tmp_path / "m")
    save_file({"layers.0.attention.wq.weight": torch.ones(3)}, place / "consolidated.safetensors")
    (place / "original").mkdir()
    save_file({"output.weight": torch.ones(3)}, place / "original/consolidated.00.safetensors")
    weights = checkpoint.Weights(place)
    assert set(weights) == set(plain)
    assert all(torch.equal(weights[name], plain[name]) for name in plain)
    assert checkpoint.read_shape(place) == checkpoint.read_shape(family_dirs["llama"])


def test_beside_one_whole_file_other_files_do_not_count(family_dirs, tmp_path):
    place = spoil(family_dirs["llama"], tmp_path, lambda tensors: None)
    save_file({"layers.0.attention.wq.weight": torch.ones(3)}, place / "consolidated.safetensors")
    assert set(checkpoint.Weights(place)) == set(checkpoint.Weights(family_dirs["llama"]))


def test_rotary_buffers_of_llama_1_and_2_are_ignored_as_transformers_ignores_them(
    family_dirs, tmp_path
):
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(6) for i in range(5)}
    place = spoil(family_dirs["llama"], tmp_path, lambda tensors: tensors.update(buffers))
    assert checkpoint.read_shape(place) == checkpoint.read_shape(family_dirs["llama"])
    assert set(checkpoint.Weights(place)) == set(checkpoint.Weights(family_dirs["llama"]))
    checkpoint.load_model(place, torch.float32)


def test_a_tied_head_that_is_also_stored_is_read_and_another_one_is_refused(family_dirs, tmp_path):
    def head(tensors, plus):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + plus

    place = spoil(family_dirs["llama3_tied"], tmp_path, lambda tensors: head(tensors, 0))
    assert checkpoint.read_shape(place) == checkpoint.read_shape(family_dirs["llama3_tied"])
    place = spoil(family_dirs["llama3_tied"], tmp_path, lambda tensors: head(tensors, 1))
    with raises_option("tie_word_embeddings"):
        checkpoint.read_shape(place)


def configured(place, **changes):
    file = place / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def doubled(place):
    for file in SHARDS:
        save_file(load_file(place / file) | {"model.norm.weight": torch.ones(64)}, place / file)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda p: (p / SHARDS[1]).unlink(), SHARDS[1]),
        (lambda p: (p / SHARDS[1]).write_bytes((p / SHARDS[1]).read_bytes()[:-100]), SHARDS[1]),
        (lambda p: (p / "model.safetensors.index.json").write_text("[]"), "index.json"),
        (doubled, "model.norm.weight"),
        (lambda p: configured(p, intermediate_size=96), "(96, 64)"),
        (lambda p: configured(p, num_hidden_layers=7), "model.layers.5"),
    ],
)
def test_a_broken_checkpoint_is_one_line_that_says_what_and_where(
    family_dirs, tmp_path, change, named
):
    place = sharded(family_dirs["llama"], tmp_path / "m")
    change(place)
    for read in (checkpoint.check, checkpoint.read_shape):
        with raises_option(named) as error:
            read(place)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError):
        checkpoint.load_model(place, torch.float32)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "factor": 0.0}}, "factor"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, "theta"),
        ({"rope_parameters": {"rope_theta": {"__float__": "Infinity"}}}, "theta"),
        ({"rms_norm_eps": {"__float__": "small"}}, "small"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1.0}}, "beta_fast"),
        ({"rope_scaling": {"low_freq_factor": 4.0, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"sliding_window": -1}, "sliding_window"),
        ({"attention_bias": True}, "attention_bias"),
        ({"dtype": "int4"}, "dtype"),
        ({"text_config": {"rms_norm_eps": 0.0}}, "rms_norm_eps"),
    ],
)
def test_settings_with_which_no_model_computes_are_refused(settings, named, family_dirs, tmp_path):
    """The pass would go on with logits that are finite and wrong, or the server would not start."""
    place = spoil(family_dirs["llama"], tmp_path, lambda tensors: None)
    configured(place, **settings)
    for read in (checkpoint.check, checkpoint.read_shape):
        with raises_option(place, named):
            read(place)


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float32, torch.nan), (torch.bfloat16, torch.inf)]
)
def test_a_weight_that_is_no_number_is_named(family_dirs, tmp_path, dtype, value):
    def change(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
        tensors["model.norm.weight"][63] = value

    place = spoil(family_dirs["llama"], tmp_path, change)
    with raises_option("model.norm.weight"):
        checkpoint.Weights(place)["model.norm.weight"]
    with raises_option("model.norm.weight"):
        checkpoint.load_model(place, torch.float32)


def test_ids_that_end_a_text_come_from_tokenizer_and_every_config(tokenizer_dir, tmp_path):
    for file in tokenizer_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert checkpoint.eos_token_ids(tmp_path) == (1,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 4}')
    assert checkpoint.eos_token_ids(tmp_path) == (1, 4, 7, 9)


def test_per_layer_lists_are_sliced_to_the_kept_layers(family_dirs):
    shape = checkpoint.read_shape(family_dirs["qwen3"]).model_copy(update={"layers": 2})
    base = checkpoint.read_config(family_dirs["qwen3"]) | {
        "layer_types": ["a", "b", "c", "d", "e"],
        "other": [1, 2],
    }
    config = checkpoint.config_for(shape, base, [1, 4])
    assert config["layer_types"] == ["b", "e"]
    assert config["other"] == [1, 2]
    assert config["architectures"] == base["architectures"]


def test_a_record_reads_back_as_written(tmp_path, family_dirs):
    arguments = {"out": tmp_path, "steps": 3, "names": ["a"], "none": None}
    record = provenance.write_record(
        tmp_path, "prune", arguments, [family_dirs["llama"]], 0.0, params=7
    )
    assert record.inputs == {
        str(family_dirs["llama"]): provenance.fingerprint(family_dirs["llama"])
    }
    found = provenance.read_record(tmp_path)
    assert found is not None
    assert found.config == arguments | {"out": str(tmp_path)}
    assert found.notes == {"params": 7}
    (tmp_path / "draftlab.json").write_text(json.dumps({"command": "x"}))
    with pytest.raises(UserError, match=str(tmp_path)):
        provenance.read_record(tmp_path)


def test_a_fingerprint_sees_the_weights_and_not_the_notes(family_dirs, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in family_dirs["llama"].iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    before = provenance.fingerprint(copy)
    assert before == provenance.fingerprint(family_dirs["llama"])
    (copy / "README.md").write_text("x")
    assert provenance.fingerprint(copy) == before
    with (copy / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"\x01")
    assert provenance.fingerprint(copy) != before


def test_unequal_vocabularies_are_refused_by_the_first_differing_id(family_dirs, tmp_path):
    common_vocabulary(family_dirs["llama"], family_dirs["qwen3"])
    other = tmp_path / "other"
    train_tokenizer(["x = y + z\n" * 40, "while True:\n    pass\n" * 30], 307, other)
    (other / "config.json").write_text((family_dirs["llama"] / "config.json").read_text())
    with raises_option("tokenizers", "is", "and"):
        common_vocabulary(other, family_dirs["llama"])


def test_of_padded_heads_the_smaller_size_is_common(family_dirs, tmp_path):
    for file in family_dirs["llama"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = checkpoint.read_config(tmp_path) | {"vocab_size": 320}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert common_vocabulary(tmp_path, family_dirs["llama"]) == 307
    assert common_vocabulary(family_dirs["llama"], tmp_path) == 307


@pytest.mark.parametrize("family", ["llama3_tied", "qwen2"])
def test_a_model_is_what_transformers_itself_loads(family_dirs, family):
    place = family_dirs[family]
    for dtype in (torch.float32, torch.bfloat16):
        wanted, found = (
            AutoModelForCausalLM.from_pretrained(place, dtype=dtype),
            checkpoint.load_model(place, dtype),
        )
        state = wanted.state_dict()
        assert {name: tensor.dtype for name, tensor in found.state_dict().items()} == dict.fromkeys(
            state, dtype
        )
        assert all(torch.equal(tensor, state[name]) for name, tensor in found.state_dict().items())
        assert all(
            torch.equal(a, b) for a, b in zip(found.buffers(), wanted.buffers(), strict=True)
        )
        assert found.config.to_dict() == wanted.config.to_dict()
        assert found.generation_config.to_dict() == wanted.generation_config.to_dict()
        assert (found.training, found.name_or_path) == (False, wanted.name_or_path)


def test_a_tensor_read_in_pieces_is_the_whole(family_dirs, monkeypatch):
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 1000)
    for dtype in (None, torch.bfloat16):
        found = checkpoint.Weights(family_dirs["llama"], dtype)
        wanted = load_file(family_dirs["llama"] / "model.safetensors")
        assert all(
            torch.equal(found[name], wanted[name].to(dtype or wanted[name].dtype))
            for name in wanted
        )


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
