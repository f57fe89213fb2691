"""Modes are chosen by the device and the models, and caches of transformers roll back as the engine's do."""

import shutil

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from draftlab.errors import UserError
from draftlab.model import decoder, native_cpu
from draftlab.model.hf_decoder import HFDecoder

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def opt_dir(tmp_path):
    config = OPTConfig(
        vocab_size=307, hidden_size=32, num_hidden_layers=1, ffn_dim=64, num_attention_heads=2, word_embed_proj_dim=32
    )
    OPTForCausalLM(config).save_pretrained(tmp_path / "opt")
    return tmp_path / "opt"


@pytest.mark.parametrize(("device", "dtype", "mode"), [(CUDA, torch.bfloat16, "graphs"), (CPU, torch.float16, "eager")])
def test_auto_is_the_fastest_mode_that_runs(device, dtype, mode, family_dirs):
    assert decoder.resolve_mode("auto", device, dtype, [family_dirs["llama"]]) == mode


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_auto_is_native_on_a_cpu(family_dirs):
    assert native_cpu.library()
    assert decoder.resolve_mode("auto", CPU, torch.float32, [family_dirs["llama"], family_dirs["qwen3"]]) == "native"


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_auto_is_eager_if_one_model_needs_transformers(device, family_dirs, opt_dir, capsys):
    assert decoder.resolve_mode("auto", device, torch.float32, [family_dirs["llama"], opt_dir]) == "eager"
    assert "mode eager" in capsys.readouterr().err


def test_a_named_mode_is_not_changed():
    assert decoder.resolve_mode("eager", CUDA, torch.float32, []) == "eager"


def test_graphs_need_cuda():
    with pytest.raises(UserError, match="graphs"):
        decoder.check_mode("graphs", CPU, torch.float32)


def test_an_expanded_cache_serves_every_row(family_dirs):
    """Logits after a shared prompt are those of separate caches, for both kinds of decoders."""
    ours = decoder.load(family_dirs["llama"], torch.float32, CPU)
    theirs = decoder.load(family_dirs["llama"], torch.float32, CPU, device_map="cpu")
    assert isinstance(theirs, HFDecoder)
    prompt, rows = torch.tensor([[0, 5, 9, 11]]), torch.tensor([[7], [8], [13]])
    for model in (ours, theirs):
        cache = model.new_cache(1, 16)
        model.forward(prompt, cache, last=1)
        together = model.forward(rows, cache.expand(3), last=1)
        for row, logits in zip(rows, together, strict=True):
            alone = model.new_cache(1, 16)
            model.forward(prompt, alone, last=1)
            torch.testing.assert_close(model.forward(row.unsqueeze(0), alone, last=1)[0], logits, atol=1e-4, rtol=1e-4)
