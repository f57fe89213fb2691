"""Rotary scaling and layouts in GGUF files: llama.cpp's server computes the log-probabilities of transformers.

test_a_real_server_... confirmed the settings below in xllamacpp 2026.10.11549. The log-probabilities differ by at most
0.001 nats; a lost field makes 2 to 10. DRAFTLAB_TEST_LLAMA_SERVER=... pytest -m llamacpp asks again.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.builders import build
from helpers.errors import raises_option
from helpers.gguf_files import contents
from helpers.real_llama_cpp import in_float32, llama_server, log_probabilities
from helpers.small_files import copy_tokenizer, edit
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from draftlab.exporting import gguf

# sizes for which llama.cpp's qwen2 and olmo2 work, too
SIZES = {"num_hidden_layers": 2, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
CONTEXT = 512
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 256,
    "factor": 2.0,
    "short_factor": [1 + i / 8 for i in range(8)],
    "long_factor": [1 + i / 2 for i in range(8)],
}
ROPES: dict[str, dict[str, Any]] = {
    "none": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "attention factor": YARN | {"attention_factor": 1.0},
    "mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
    "betas": YARN | {"beta_fast": 4.0, "beta_slow": 0.5},
    "no truncation": YARN | {"truncate": False, "attention_factor": 1.3},
    "longrope": LONG,
}
TENSORS = ("llama3", "betas", "no truncation", "longrope")  # those that need a tensor


def saved(family: str, rope: dict[str, Any], tokenizer: Path, folder: Path, **fields: Any) -> Path:
    build(family, max_position_embeddings=CONTEXT, **SIZES).save_pretrained(folder)
    edit(folder / "config.json", rope_parameters={"rope_theta": 10000.0} | rope, **fields)
    copy_tokenizer(tokenizer, folder)
    return folder


def fields_of(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor], list[str]]:
    """Settings of rotary embeddings without the architecture's name, tensors, and lines of an export."""
    lines = gguf.write(folder, folder / "a.gguf", "f32").lines()
    fields, tensors = contents(folder / "a.gguf")
    rope = {name.partition(".rope.")[2]: v for name, v in fields.items() if ".rope." in name}
    return rope, tensors, lines


@pytest.mark.parametrize(
    ("rope", "kind", "wanted"),
    [
        ("none", None, {}),
        ("linear", "linear", {"factor": 4.0}),
        ("yarn", "yarn", {"factor": 4.0, "original_context_length": 128}),
        # llama.cpp multiplies attn_factor by 0.1 ln 4 + 1 = 1.13863, and ignores yarn_attn_factor
        (
            "attention factor",
            "yarn",
            {"factor": 4.0, "original_context_length": 128, "attn_factor": 1 / 1.1386294},
        ),
        # (0.07 ln 4 + 1) / 1.13863, relative to 1.13863
        (
            "mscale",
            "yarn",
            {
                "factor": 4.0,
                "original_context_length": 128,
                "attn_factor": 1.0970406 / 1.1386294**2,
            },
        ),
        ("betas", None, {"attn_factor": 1.1386294}),
        ("no truncation", None, {"attn_factor": 1.3}),
        # sqrt(1 + ln 2 / ln 256)
        ("longrope", "longrope", {"original_context_length": 256, "attn_factor": 1.0606602}),
    ],
)
def test_settings_of_rotary_scaling(rope, kind, wanted, family_dirs, tmp_path):
    found, tensors, _ = fields_of(saved("llama", ROPES[rope], family_dirs["llama"], tmp_path))
    assert found.pop("freq_base") == 10000.0
    assert found.pop("scaling.type", None) == kind
    scaling = {k.removeprefix("scaling."): v for k, v in found.items() if "scaling" in k}
    assert scaling == pytest.approx(wanted, rel=1e-5)
    assert any(name.startswith("rope_") for name in tensors) == (rope in TENSORS)


@pytest.mark.parametrize("rope", TENSORS)
def test_tensors_of_rotary_scaling_are_transformers_frequencies(rope, family_dirs, tmp_path):
    folder = saved("llama", ROPES[rope], family_dirs["llama"], tmp_path)
    _, tensors, lines = fields_of(folder)
    unscaled = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    rotary = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb
    name = "rope_factors_short.weight" if rope == "longrope" else "rope_freqs.weight"
    torch.testing.assert_close(unscaled / tensors[name], rotary.inv_freq)
    if rope == "longrope":
        assert tensors["rope_factors_long.weight"].tolist() == pytest.approx(LONG["long_factor"])
        assert any("-c 256" in line for line in lines)


@pytest.mark.parametrize(
    ("family", "rope", "word"),
    [
        ("qwen3", "llama3", "llama3"),
        ("qwen3", "longrope", "longrope"),
        ("qwen3", "no truncation", "truncate"),
        ("olmo2", "betas", "beta_fast"),
        ("olmo2", "llama3", "llama3"),
    ],
)
def test_scaling_that_an_architecture_lacks_is_refused(family, rope, word, family_dirs, tmp_path):
    folder = saved(family, ROPES[rope], family_dirs["llama"], tmp_path)
    with raises_option(word):
        gguf.write(folder, folder / "a.gguf", "f32")


def test_qwen2_is_a_llama_where_its_architecture_lacks_a_tensor(family_dirs, tmp_path):
    for rope, arch in (("yarn", "qwen2"), ("betas", "llama"), ("llama3", "llama")):
        folder = saved("qwen2", ROPES[rope], family_dirs["llama"], tmp_path / rope)
        fields_of(folder)
        assert contents(folder / "a.gguf")[0]["general.architecture"] == arch


@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_biases_that_llama_cpp_does_not_read_are_refused(family, family_dirs, tmp_path):
    """The server cannot load such a file: wrong number of tensors."""
    folder = saved(family, {}, family_dirs["llama"], tmp_path, attention_bias=True)
    biased = AutoModelForCausalLM.from_pretrained(folder)
    biased.save_pretrained(folder)
    with raises_option("attention_bias"):
        gguf.write(folder, folder / "a.gguf", "f32")


def test_a_tied_olmo2_has_an_lm_head(family_dirs, tmp_path):
    """Without it, llama.cpp finds no tensor 'output.weight' (alike for GPT-2 in llama.cpp#12567)."""
    folder = saved("olmo2", {}, family_dirs["llama"], tmp_path, tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _, tensors, _ = fields_of(folder)
    assert tensors["output.weight"].equal(tensors["token_embd.weight"])


@pytest.mark.parametrize("slides", [True, False])
def test_a_sliding_window_is_named_where_a_layer_has_it(slides, family_dirs, tmp_path):
    kind = "sliding_attention" if slides else "full_attention"
    types = ["full_attention", kind]
    window = {"use_sliding_window": True, "sliding_window": 64, "layer_types": types}
    folder = saved("qwen2", {}, family_dirs["llama"], tmp_path, **window)
    _, _, lines = fields_of(folder)
    assert contents(folder / "a.gguf")[0]["qwen2.context_length"] == (64 if slides else CONTEXT)
    assert any("sliding_window 64" in line for line in lines) == slides


@pytest.mark.llamacpp
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "llama3_tied",
        "llama_biases",
        "mistral",
        "qwen2",
        "qwen2_tied",
        "qwen3",
        "olmo2",
        "granite",
    ],
)
def test_a_real_server_computes_the_log_probabilities_of_transformers(family, rope, family_dirs, tmp_path):
    llama_server()
    if family in ("qwen3", "olmo2") and rope in TENSORS:
        pytest.skip("refused, see test_scaling_that_an_architecture_lacks_is_refused")
    folder = saved(family, ROPES[rope], family_dirs["llama"], tmp_path)
    gguf.write(folder, folder / "a.gguf", "f32")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(3, 300, (500,), generator=torch.Generator().manual_seed(3)).tolist()
    letter = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("a")
    context = 256 if rope == "longrope" else CONTEXT  # the server's context chooses the frequencies
    with in_float32(folder / "a.gguf", context) as (client, _):
        for length in (16, 60, 250) if rope == "longrope" else (16, 130, 480):
            with torch.no_grad():
                wanted = model(torch.tensor([ids[:length]])).logits[0, -1].log_softmax(-1)
            found = log_probabilities(client, ids[:length], len(wanted), letter)
            torch.testing.assert_close(found, wanted, atol=0.005, rtol=0)
