"""An adapter becomes the model that PEFT computes with it, or one line before the base's weights are read."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.builders import assert_rounds, build
from helpers.errors import raises_option
from helpers.small_files import copy_tokenizer, edit, write_functions
from helpers.typed import call
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from draftlab.importing import adapters
from draftlab.importing.run import inspect
from draftlab.model import checkpoint, hub

IDS = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(0))
BASES = {"tied": "qwen2_tied", "untied": "llama"}
SIZES = {
    "num_hidden_layers": 2,
    "head_dim": 8,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
}
Q, EMBEDDING, HEAD = "q_proj", "embed_tokens", "lm_head"
FORMS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": "all-linear", "exclude_modules": ["k_proj"]},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "modules_to_save": {"modules_to_save": [EMBEDDING, HEAD]},
    "saved embedding": {"modules_to_save": [EMBEDDING]},
    "saved head": {"modules_to_save": [HEAD]},
    "saved norm": {"modules_to_save": ["norm"]},
    "saved and tied": {"modules_to_save": [EMBEDDING], "ensure_weight_tying": True},
    "tokens": {"trainable_token_indices": [3, 7]},
    "tokens of both": {"trainable_token_indices": {EMBEDDING: [3, 7], HEAD: [3, 8]}},
    "head": {"target_modules": [Q, HEAD]},
    "embedding": {"target_modules": [Q, EMBEDDING]},
    "both": {"target_modules": [Q, EMBEDDING, HEAD]},
    "head, dora": {"target_modules": [Q, HEAD], "use_dora": True},
    "embedding, dora": {"target_modules": [Q, EMBEDDING], "use_dora": True},
    "embedding, tied": {"target_modules": [Q, EMBEDDING], "ensure_weight_tying": True},
    "patterns": {
        "rank_pattern": {"layers.1.self_attn.q_proj": 2},
        "alpha_pattern": {"layers.0.self_attn.q_proj": 1},
    },
    "one layer": {"layers_to_transform": 1, "layers_pattern": "layers"},
    "first layer": {"layers_to_transform": [0]},
    "expression": {"target_modules": r".*layers\.1.*(q|down)_proj"},
    "fan_in_fan_out": {"fan_in_fan_out": True},
    "biases": {"bias": "all"},
    "biases of lora": {"bias": "lora_only"},
    "resized": {"vocab": 311},
    "smaller": {"vocab": 299},
    "resized and saved": {"vocab": 311, "modules_to_save": [EMBEDDING, HEAD]},
    "new tokens": {"vocab": 311, "trainable_token_indices": [307, 308]},
}
LAYERS_ONLY = {
    "rslora",
    "saved norm",
    "patterns",
    "one layer",
    "first layer",
    "expression",
    "fan_in_fan_out",
    "biases of lora",
}
UNTIED = {
    "modules_to_save",
    "saved embedding",
    "saved head",
    "tokens of both",
    "head",
    "embedding",
    "both",
    "head, dora",
    "embedding, dora",
    "resized and saved",
}


@pytest.fixture(scope="module")
def bases(tokenizer_dir, tmp_path_factory) -> dict[str, Path]:
    """Return a base whose LM head is tied to its embedding, and one whose head is not."""
    root = tmp_path_factory.mktemp("bases")
    for name, family in BASES.items():
        build(family, **SIZES).save_pretrained(root / name)
        copy_tokenizer(tokenizer_dir, root / name)
    return {name: root / name for name in BASES}


def adapt(base: Path, out: Path, **settings: Any) -> torch.Tensor:
    """Save an adapter whose parameters are random, and return the logits of PEFT's model."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    vocab = settings.pop("vocab", None)
    if vocab is not None:
        model.resize_token_embeddings(vocab, mean_resizing=False)
    defaults = {"r": 4, "target_modules": [Q], "task_type": "CAUSAL_LM"}
    adapted = get_peft_model(model, LoraConfig(**defaults | settings)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        adapted.save_pretrained(str(out))
        return adapted(input_ids=IDS % (vocab or 307)).logits


@pytest.mark.filterwarnings("ignore")  # PEFT warns of tied embeddings
@pytest.mark.parametrize(
    ("form", "base"),
    [(form, base) for base in BASES for form in FORMS if base == "tied" or form not in LAYERS_ONLY],
)
def test_the_merged_model_is_the_one_that_peft_computes(form, base, bases, tmp_path):
    source, settings = bases[base], FORMS[form]
    vocab = settings.get("vocab", 307)
    wanted = adapt(source, tmp_path, **settings)
    adapters.check_fits(tmp_path, source)
    model = adapters.merge(checkpoint.load_model(source, torch.float32), tmp_path, source)
    with torch.no_grad():
        assert_rounds(model(IDS % vocab).logits, wanted)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == model.config.tie_word_embeddings == (base == "tied" and form not in UNTIED)
    assert model.config.vocab_size == vocab


def adapter_on(form: str, base: str, shards: str = "5GB") -> Callable[[dict[str, Path], Path], str]:
    """Save an adapter beside a copy of its base, in shards of that size, and return what is typed to import it."""

    def write(bases: dict[str, Path], folder: Path) -> str:
        build(BASES[base], **SIZES).save_pretrained(folder / "base", max_shard_size=shards)
        copy_tokenizer(bases[base], folder / "base")
        adapt(folder / "base", folder / "adapter", **FORMS[form])
        return f"import {folder}/adapter"

    return write


def bin_file(base: str) -> Callable[[dict[str, Path], Path], str]:
    """Save a checkpoint in a .bin file, and return what is typed to import it."""

    def write(bases: dict[str, Path], folder: Path) -> str:
        shutil.copytree(bases[base], folder / "bin")
        (folder / "bin/model.safetensors").unlink()
        torch.save(build(BASES[base], **SIZES).state_dict(), folder / "bin/pytorch_model.bin")
        return f"import {folder}/bin"

    return write


def untied_bin_file(bases: dict[str, Path], folder: Path) -> str:
    """Save a .bin file with a head of its own under a config that ties it. transformers unties them."""
    command = bin_file("untied")(bases, folder)
    edit(folder / "bin/config.json", tie_word_embeddings=True)
    return command


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "write",
    [
        *(adapter_on(form, base) for form in ("modules_to_save", "embedding", "resized") for base in BASES),
        adapter_on("lora", "tied", shards="40KB"),
        *(bin_file(base) for base in BASES),
        untied_bin_file,
    ],
)
def test_what_is_imported_is_what_the_next_commands_take(write, bases, tmp_path):
    out, target, text = tmp_path / "out", bases["tied"], tmp_path / "text.txt"
    write_functions(text)
    call(f"{write(bases, tmp_path)} --out {out}")
    AutoModelForCausalLM.from_pretrained(out)
    call(f"check {out} --target {out} --files-only")
    call(f"prune --source {out} --data {text} --layers 1 --out {tmp_path}/p --dry-run")
    call(f"distill --draft {out} --target {target} --data {text} --out {tmp_path}/d --dry-run")
    call(f"outputs build --target {out} --data {text} --out {tmp_path}/o --dry-run")
    call(f"export {out} --target {target} --to vllm --out {tmp_path}/e --dry-run")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("megatron_config", {"x": 1}),
        ("megatron_core", "shared.adapter.evil"),
        ("auto_mapping", {"base_model_class": "Evil", "parent_library": "shared.adapter.evil"}),
        ("runtime_config", {"ephemeral_gpu_offload": True}),
        ("a_field_of_tomorrow", {"plugin": "evil"}),
        ("layer_replication", [[0, 2], [1, 3]]),
        ("alora_invocation_tokens", [3]),
        ("use_qalora", True),
        ("arrow_config", {"top_k": 2}),
        ("init_lora_weights", "pissa"),
        ("task_type", "SEQ_CLS"),
        ("peft_type", "IA3"),
        ("r", "four"),
        ("target_modules", {"q_proj": 1}),
        ("rank_pattern", {"q_proj": 0}),
        ("bias", "some"),
    ],
)
def test_a_field_that_is_not_merged_is_refused_by_name(field, value, bases, tmp_path):
    adapt(bases["untied"], tmp_path / "adapter")
    edit(tmp_path / "adapter/adapter_config.json", **{field: value})
    with raises_option("adapter_config.json", field):
        inspect(str(tmp_path / "adapter"), None, str(bases["untied"]))


def test_every_field_that_peft_writes_by_itself_is_accepted(bases, tmp_path):
    """Without a task_type PEFT adds the class of the base, to which Unsloth adds a mark."""
    source = bases["untied"]
    adapt(source, tmp_path, task_type=None, lora_dropout=0.1, init_lora_weights="gaussian")
    file = tmp_path / "adapter_config.json"
    mapping = json.loads(file.read_text())["auto_mapping"]
    edit(file, auto_mapping=mapping | {"unsloth_fixed": True}, a_field_of_tomorrow=None)
    assert inspect(str(tmp_path), None, None).base == source


def test_code_that_an_adapter_names_is_not_imported(bases, tmp_path, monkeypatch):
    """peft before 0.20 imported it."""
    adapt(bases["untied"], tmp_path / "shared")
    (tmp_path / "evil.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    edit(tmp_path / "shared/adapter_config.json", megatron_config={"x": 1}, megatron_core="evil")
    call(f"import shared --base {bases['untied']} --out out", code=1)
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["dora", "resized", "head"])
@pytest.mark.parametrize(
    "changes",
    [{"num_hidden_layers": 1}, {"num_hidden_layers": 3}, {"hidden_size": 80}, {"vocab_size": 280}],
)
def test_an_adapter_for_another_base_is_named_with_that_base(changes, form, bases, tmp_path):
    """An adapter without rows of tokens, or with every row of both matrices, fits any vocabulary."""
    adapt(bases["untied"], tmp_path / "adapter", **FORMS[form])
    build("llama", **SIZES | changes).save_pretrained(tmp_path / "other")
    copy_tokenizer(bases["untied"], tmp_path / "other")
    fits = "vocab_size" in changes and form != "head"
    names = (tmp_path / "adapter", tmp_path / "other", "--base")
    with nullcontext() if fits else raises_option(*names):
        inspect(str(tmp_path / "adapter"), None, str(tmp_path / "other"))


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_a_head_whose_base_got_new_tokens_lacks_their_embedding(bases, tmp_path):
    """peft issue 1396: PEFT saves the rows of the head that it targets, and not those of the embedding."""
    adapt(bases["untied"], tmp_path, vocab=308, target_modules=[Q, HEAD])
    with raises_option(tmp_path, bases["untied"], "save_embedding_layers"):
        inspect(str(tmp_path), None, str(bases["untied"]))


def test_an_adapter_beside_the_weights_of_a_model_is_not_passed_over(bases, tmp_path):
    """unsloth issue 1061. transformers loads the adapter's base in place of these weights."""
    adapt(bases["untied"], tmp_path / "both")
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bases["untied"] / name, tmp_path / "both")
    for refuse in (hub.locate, lambda place: checkpoint.Checkpoint(place).check()):
        with raises_option(f"draftlab import {tmp_path}/both"):
            refuse(tmp_path / "both")


def test_an_adapter_of_a_quantised_base_asks_for_another_base(bases, tmp_path):
    """unsloth issue 2516: adapters that were trained on a base in 4 bits name that base."""
    shutil.copytree(bases["untied"], tmp_path / "base-bnb-4bit")
    adapt(tmp_path / "base-bnb-4bit", tmp_path / "adapter")
    edit(tmp_path / "base-bnb-4bit/config.json", quantization_config={"quant_method": "bitsandbytes"})
    with raises_option(tmp_path / "base-bnb-4bit", "--base"):
        inspect(str(tmp_path / "adapter"), None, None)
    assert inspect(str(tmp_path / "adapter"), None, str(bases["untied"])).base == bases["untied"]


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_a_complete_multimodal_model_does_not_fit_its_text_part(bases, tmp_path):
    """vLLM issue 48022: adapters of the text class and of the multimodal class have other names."""
    adapt(bases["untied"], tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    renamed = {k.replace(".model.layers", ".model.language_model.layers"): t for k, t in load_file(file).items()}
    save_file(renamed, file)
    with raises_option(tmp_path, bases["untied"], "language_model"):
        inspect(str(tmp_path), None, str(bases["untied"]))
