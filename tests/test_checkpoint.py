"""Directories: written whole or not at all, read strictly, with a record of what made them."""

import json
import resource
import subprocess
import sys
import textwrap

import pytest
import torch
from conftest import build
from safetensors.torch import load_file, save_file

from draftlab import checkpoint, provenance
from draftlab.errors import UserError
from draftlab.tokenizer import common_vocabulary, train_tokenizer


def test_a_failed_write_leaves_nothing(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(TypeError), checkpoint.new_directory(out, force=False) as work:
        (work / "half").write_bytes(b"x" + (work / "half").touch())
    assert list(tmp_path.iterdir()) == []


def test_a_failed_replacement_keeps_the_old(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("x")
    with pytest.raises(ZeroDivisionError), checkpoint.new_directory(out, force=True):
        raise ZeroDivisionError
    assert [p.name for p in out.iterdir()] == ["old"]


def test_force_replaces_and_without_it_nothing_is_overwritten(tmp_path):
    out = tmp_path / "out"
    for name in ("a", "b"):
        with checkpoint.new_directory(out, force=name == "b") as work:
            (work / name).write_text("x")
    assert [p.name for p in out.iterdir()] == ["b"]
    with pytest.raises(UserError, match="--force"):
        checkpoint.check_free(out, force=False)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_unwritable_place_is_refused_first(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="not a writable directory"):
        checkpoint.check_free(tmp_path / "file" / "out", force=False)
    with pytest.raises(UserError, match="not a directory"):
        checkpoint.check_free(tmp_path / "file", force=True)


def test_a_full_disk_is_one_clear_line_and_leaves_nothing(tmp_path):
    """A file-size limit of 64 KiB stands in for the full disk: the kernel refuses the write in the same way."""
    code = f"""
        import resource, signal, torch
        from pathlib import Path
        from draftlab import checkpoint, provenance
        from draftlab.errors import UserError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))
        try:
            with checkpoint.new_directory(Path({str(tmp_path / "out")!r}), force=False) as work:
                checkpoint.write_checkpoint(work, {{}}, [("w", torch.zeros(100_000))], None)
        except UserError as error:
            print(error)
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert out.stdout.startswith(f"cannot write {tmp_path / 'out'}: ")
    assert len(out.stdout.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_sharded_checkpoints_load_in_transformers(tmp_path, family_dirs, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 100_000)
    model = build("llama", seed=4)
    config = checkpoint.read_config(family_dirs["llama"])
    checkpoint.write_checkpoint(tmp_path, config, checkpoint.model_weights(model, torch.float32), family_dirs["llama"])
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    assert checkpoint.read_shape(tmp_path) == checkpoint.read_shape(family_dirs["llama"])


@pytest.mark.parametrize("family", ["llama", "llama3_tied", "qwen2", "qwen3", "llama_biases"])
def test_shape_is_recognised_by_structure(family, family_dirs):
    shape = checkpoint.read_shape(family_dirs[family])
    flags = {"tied": "tied" in family, "qkv_bias": family in ("qwen2", "llama_biases"), "qk_norm": family == "qwen3"}
    assert {name: getattr(shape, name) for name in flags} == flags
    assert shape.params() == sum(p.numel() for p in build(family).parameters())


def spoil(directory, tmp_path, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    return tmp_path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.2.mlp.up_proj.weight"), "no tensor 'model.layers.2.mlp.up_proj.weight'"),
        (lambda t: t.update({"model.layers.0.mlp.router.weight": torch.ones(2)}), "unknown tensor"),
        (lambda t: t.update({"model.norm.weight": torch.ones(63)}), r"is \(63,\), its config.json says \(64,\)"),
    ],
)
def test_a_checkpoint_that_contradicts_its_config_is_refused(family_dirs, tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        checkpoint.read_shape(spoil(family_dirs["llama"], tmp_path, change))


def test_missing_checkpoints_say_what_was_tried(tmp_path):
    with pytest.raises(UserError, match="did you mean 'tiny'"):
        checkpoint.locate("tini")
    with pytest.raises(UserError, match=r"no config\.json"):
        checkpoint.locate(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="holds no"):
        checkpoint.Weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(UserError, match="not a readable safetensors file"):
        checkpoint.Weights(tmp_path)


def test_pickles_are_not_read(tmp_path):
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickles are not read"):
        checkpoint.Weights(tmp_path)


def test_per_layer_lists_are_sliced_to_the_kept_layers(family_dirs):
    shape = checkpoint.read_shape(family_dirs["qwen3"]).model_copy(update={"layers": 2})
    base = checkpoint.read_config(family_dirs["qwen3"]) | {"layer_types": ["a", "b", "c", "d", "e"], "other": [1, 2]}
    config = checkpoint.config_for(shape, base, [1, 4])
    assert config["layer_types"] == ["b", "e"]
    assert config["other"] == [1, 2]
    assert config["architectures"] == base["architectures"]


def test_a_record_reads_back_as_written(tmp_path, family_dirs):
    arguments = {"out": tmp_path, "steps": 3, "names": ["a"], "none": None}
    record = provenance.write_record(tmp_path, "prune", arguments, [family_dirs["llama"]], 0.0, params=7)
    assert provenance.read_record(tmp_path) == record
    assert record.arguments == provenance.plain(arguments)
    assert record.notes == {"params": 7}
    (tmp_path / "draftlab.json").write_text(json.dumps({"command": "x"}))
    with pytest.raises(UserError, match="not a draftlab record"):
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
    with pytest.raises(UserError, match=r"different tokenizers: id \d+ is .* and .*same vocabulary"):
        common_vocabulary(other, family_dirs["llama"])


def test_of_padded_heads_the_smaller_size_is_common(family_dirs, tmp_path):
    for file in family_dirs["llama"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = checkpoint.read_config(tmp_path) | {"vocab_size": 320}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert common_vocabulary(tmp_path, family_dirs["llama"]) == 307
    assert common_vocabulary(family_dirs["llama"], tmp_path) == 307
