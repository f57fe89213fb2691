"""The text part of a multimodal model is a checkpoint that computes what the complete model computes for text."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.builders import assert_rounds, logits_by_transformers
from helpers.errors import raises_option
from helpers.small_files import copy_tokenizer, edit, write_functions
from helpers.typed import call
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from draftlab.importing.run import inspect
from draftlab.model import checkpoint, hub

IDS = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(0))
TEXT = {
    "vocab_size": 307,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
INTERNVL_VISION = VISION | {"image_size": [28, 28], "patch_size": [14, 14]}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 32,
    "num_heads": 4,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [],
}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mistral3": (
        TEXT | {"model_type": "mistral", "sliding_window": None},
        VISION | {"model_type": "pixtral"},
    ),
    "llava": (TEXT | {"model_type": "llama"}, VISION | {"model_type": "clip_vision_model"}),
    "llava_next": (TEXT | {"model_type": "qwen2"}, VISION | {"model_type": "clip_vision_model"}),
    "internvl": (TEXT | {"model_type": "qwen3"}, INTERNVL_VISION),
    "qwen2_vl": (TEXT | {"rope_parameters": MROPE}, QWEN_VISION | {"hidden_size": 64}),
    "qwen2_5_vl": (TEXT | {"rope_parameters": MROPE}, QWEN_VISION),
    "qwen3_vl": (TEXT | {"rope_parameters": MROPE | {"mrope_interleaved": True}}, QWEN_VISION),
    "llama4": (TEXT | {"num_local_experts": 2, "intermediate_size_mlp": 96}, VISION),
}


def multimodal(kind: str, tokenizer: Path, out: Path, **fields: Any) -> torch.Tensor:
    """Save a small random model with an image part, and return its logits of IDS."""
    text, vision = MODELS[kind]
    made: Any = CONFIG_MAPPING[kind]
    config = made(text_config=text, vision_config=vision, **fields)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.08))
        model.save_pretrained(out)
        copy_tokenizer(tokenizer, out)
        return model(input_ids=IDS).logits


def rename(folder: Path, version: int) -> None:
    """Give the tensors the names that transformers 4 or 5 wrote for most multimodal models."""
    file, renamed = folder / "model.safetensors", {}
    for name, tensor in load_file(file).items():
        text = re.fullmatch(r".*?((?:layers|embed_tokens|norm|lm_head)\..*)", name)
        if text and "vis" not in name and "projector" not in name:
            old = "language_model." if "lm_head" in name else "language_model.model."
            new = "" if "lm_head" in name else "model.language_model."
            name = (old if version == 4 else new) + text[1]
        renamed[name] = tensor
    save_file(renamed, file)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "version"),
    [*((kind, None) for kind in MODELS), *((k, v) for k in ("llava", "qwen3_vl") for v in (4, 5))],
)
def test_the_text_part_computes_what_the_complete_model_computes(kind, version, tokenizer_dir, tmp_path):
    wanted = multimodal(kind, tokenizer_dir, tmp_path / "whole")
    if version is not None:
        rename(tmp_path / "whole", version)
    call(f"import {tmp_path}/whole --out {tmp_path}/text")
    assert_rounds(logits_by_transformers(tmp_path / "text", IDS), wanted)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["mistral3", "qwen2_5_vl"])
def test_the_text_part_is_a_source_and_a_target(kind, tokenizer_dir, tmp_path):
    out, text = tmp_path / "text", tmp_path / "text.txt"
    multimodal(kind, tokenizer_dir, tmp_path / "whole")
    call(f"import {tmp_path}/whole --out {out}")
    write_functions(text)
    call(f"check {out} --target {out} --files-only")
    call(f"prune --source {out} --data {text} --layers 1 --out {tmp_path}/p --dry-run")
    call(f"distill --draft {out} --target {out} --data {text} --out {tmp_path}/d --dry-run")
    call(f"export {out} --target {out} --to vllm --out {tmp_path}/e --dry-run")


def test_a_text_part_that_is_tied_and_flat_settings_of_qwen_are_read(tokenizer_dir, tmp_path):
    """Qwen2.5-VL-3B has the settings of the text part beside vision_config, and type mrope."""
    whole = tmp_path / "whole"
    wanted = multimodal("qwen2_5_vl", tokenizer_dir, whole, tie_word_embeddings=True)
    config = json.loads((whole / "config.json").read_text())
    text = config.pop("text_config")
    for name in ("rope_parameters", "model_type", "dtype", "tie_word_embeddings"):
        text.pop(name, None)
    rope = {"rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    (whole / "config.json").write_text(json.dumps(config | text | rope))
    call(f"import {whole} --out {tmp_path}/text")
    assert_rounds(logits_by_transformers(tmp_path / "text", IDS), wanted)
    assert checkpoint.read_shape(tmp_path / "text").tied
    assert checkpoint.eos_token_ids(tmp_path / "text") == (1,)


def test_a_multimodal_model_is_refused_with_the_command_that_imports_it(tokenizer_dir, tmp_path):
    multimodal("mistral3", tokenizer_dir, tmp_path / "whole")
    for refuse in (hub.locate, lambda place: checkpoint.Checkpoint(place).check()):
        with raises_option(f"draftlab import {tmp_path / 'whole'}"):
            refuse(tmp_path / "whole")
    assert hub.locate(tmp_path / "whole", weights=False) == tmp_path / "whole"  # a server runs it


def test_a_multimodal_model_without_a_text_part_is_refused_by_its_model_type(tokenizer_dir, tmp_path):
    made: Any = CONFIG_MAPPING["paligemma"]
    made(text_config=TEXT | {"model_type": "gemma"}).save_pretrained(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    copy_tokenizer(tokenizer_dir, tmp_path)
    with raises_option(tmp_path, "paligemma"):
        checkpoint.Checkpoint(tmp_path).check()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: edit_text(folder, num_hidden_layers=3),
        lambda folder: edit_text(folder, num_hidden_layers=1),
        lambda folder: edit_text(folder, vocab_size=300),
        lambda folder: edit_text(folder, model_type="bert"),
        lambda folder: edit(folder / "config.json", quantization_config={"quant_method": "fp8"}),
    ],
)
def test_a_text_part_that_does_not_fit_its_config_is_refused(spoil, tokenizer_dir, tmp_path):
    multimodal("mistral3", tokenizer_dir, tmp_path / "whole")
    spoil(tmp_path / "whole")
    with raises_option(tmp_path / "whole"):
        inspect(str(tmp_path / "whole"), None, None)


def edit_text(folder: Path, **changes: object) -> None:
    """Change settings of the text part."""
    config = json.loads((folder / "config.json").read_text())
    edit(folder / "config.json", text_config=config["text_config"] | changes)
