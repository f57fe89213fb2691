"""What an exported draft holds is the draft: tensors, words and numbers, read back by other people's code."""

import json
from itertools import pairwise
from pathlib import Path

import gguf as library
import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from draftlab import checkpoint
from draftlab.errors import UserError
from draftlab.export import gguf, words
from draftlab.tokenizer import PROBES

GGUF_FAMILIES = ["llama", "llama_mha", "llama3_tied", "llama_biases", "mistral", "qwen2", "qwen2_tied", "qwen3"]


def contents(file: Path) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """Settings and tensors, dequantised."""
    reader = library.GGUFReader(file)
    fields = {f.name: f.contents() for f in reader.fields.values()}
    tensors = {
        t.name: torch.from_numpy(np.array(library.quants.dequantize(t.data, t.tensor_type))) for t in reader.tensors
    }
    return fields, tensors


def neighbours_apart(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of each head from llama.cpp's order (0, C/2, 1, C/2 + 1, ...) to that of Hugging Face."""
    order = torch.cat([torch.arange(0, head_dim, 2), torch.arange(1, head_dim, 2)])
    heads = weight.shape[0] // head_dim
    return weight.view(heads, head_dim, *weight.shape[1:])[:, order].flatten(0, 1)


def reloaded(file: Path, like: Path, *, put_back: bool = True):
    """The transformers model with the file's tensors."""
    fields, tensors = contents(file)
    turned = fields["general.architecture"] == "llama" and put_back
    model = AutoModelForCausalLM.from_pretrained(like, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        short = (
            name.replace("model.layers.", "blk.").replace("self_attn.q_norm", "attn_q_norm")
            .replace("self_attn.k_norm", "attn_k_norm").replace("self_attn.o_proj", "attn_output")
            .replace("self_attn.", "attn_").replace("mlp.", "ffn_").replace("_proj", "")
            .replace("input_layernorm", "attn_norm").replace("post_attention_layernorm", "ffn_norm")
            .replace("model.embed_tokens", "token_embd").replace("model.norm", "output_norm")
            .replace("lm_head", "output")
        )  # fmt: skip
        tensor = tensors.pop(short)
        if turned and ("attn_q." in short or "attn_k." in short):
            tensor = neighbours_apart(tensor, model.config.head_dim)
        parameter.data.copy_(tensor)
    assert set(tensors) <= {"rope_freqs.weight"}
    return model.eval()


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_the_model_in_a_file_is_the_model(family, family_dirs, tmp_path):
    gguf.write(family_dirs[family], tmp_path / "a.gguf", "f32")
    ids = torch.randint(0, 300, (2, 12), generator=torch.Generator().manual_seed(0))
    source = AutoModelForCausalLM.from_pretrained(family_dirs[family], dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(reloaded(tmp_path / "a.gguf", family_dirs[family])(ids).logits, source(ids).logits)


def test_rows_that_were_not_put_back_are_another_model(family_dirs, tmp_path):
    gguf.write(family_dirs["llama"], tmp_path / "a.gguf", "f32")
    ids = torch.tensor([[0, 5, 9, 30]])
    right, wrong = (reloaded(tmp_path / "a.gguf", family_dirs["llama"], put_back=p) for p in (True, False))
    with torch.no_grad():
        assert (right(ids).logits - wrong(ids).logits).abs().max() > 0.1


def test_settings_are_the_configs(family_dirs, tmp_path):
    gguf.write(family_dirs["llama"], tmp_path / "a.gguf", "q8_0")
    fields, _ = contents(tmp_path / "a.gguf")
    wanted = {
        "general.architecture": "llama", "general.file_type": 7, "llama.context_length": 256,
        "llama.embedding_length": 64, "llama.block_count": 5, "llama.feed_forward_length": 88,
        "llama.attention.head_count": 8, "llama.attention.head_count_kv": 4, "llama.attention.key_length": 12,
        "llama.attention.value_length": 12, "llama.rope.dimension_count": 12, "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": 307, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.padding_token_id": 2, "tokenizer.ggml.add_bos_token": True,
    }  # fmt: skip
    assert {name: fields[name] for name in wanted} == wanted
    assert fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)


def test_llama_3s_rotary_scaling_is_llama_cpps(family_dirs, tmp_path):
    """convert_hf_to_gguf.py of llama-cpp-python 0.3.36 on the same checkpoint."""
    gguf.write(family_dirs["llama3_tied"], tmp_path / "a.gguf", "f32")
    _, tensors = contents(tmp_path / "a.gguf")
    golden = json.loads((Path(__file__).parent / "data" / "llama_cpp_rope_freqs.json").read_text())
    assert tensors["rope_freqs.weight"].tolist() == pytest.approx(golden, rel=1e-6)


@pytest.mark.parametrize(("kind", "worst"), [("f16", 5e-4), ("bf16", 4e-3), ("q8_0", 4e-3), ("q4_0", 0.126)])
def test_types_round_as_much_as_they_may(kind, worst):
    """Relative to the largest of each block of 32; Q4_0 ends at 7 / 8 of it on one side."""
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    apart = (gguf.rounded(weight, kind) - weight).abs().unflatten(1, (-1, 32)).amax(-1)
    assert float((apart / weight.abs().unflatten(1, (-1, 32)).amax(-1)).max()) < worst
    assert gguf.rounded(weight[:, :40], "q8_0").equal(weight[:, :40])  # rows that do not divide stay


def test_matrices_whose_rows_do_not_divide_stay_wide_and_vectors_whole(family_dirs, tmp_path):
    written = gguf.write(family_dirs["llama"], tmp_path / "a.gguf", "q8_0")
    kinds = {t.name: t.tensor_type.name for t in library.GGUFReader(tmp_path / "a.gguf").tensors}
    assert written.wide == [f"blk.{i}.ffn_down.weight" for i in range(5)]
    assert {kinds[name] for name in written.wide} == {"F16"}
    assert kinds["blk.0.attn_q.weight"] == "Q8_0"
    assert {kind for name, kind in kinds.items() if "norm" in name} == {"F32"}


def test_what_llama_cpp_does_not_know_is_refused(family_dirs, tmp_path):
    config = json.loads((family_dirs["llama"] / "config.json").read_text())
    for change, said in (({"model_type": "opt"}, "is a opt model"), ({"hidden_act": "gelu"}, "activation 'gelu'")):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=said):
            gguf.architecture(tmp_path)


def test_words_of_a_byte_level_vocabulary(family_dirs):
    found = words.read(family_dirs["llama"], 310)
    tokenizer = checkpoint.load_tokenizer(family_dirs["llama"])
    assert found.tokens[:307] == tokenizer.convert_ids_to_tokens(range(307))
    assert found.tokens[307:] == ["[PAD307]", "[PAD308]", "[PAD309]"]
    assert found.types == [words.CONTROL] * 3 + [words.NORMAL] * 304 + [words.UNUSED] * 3
    spec = json.loads((family_dirs["llama"] / "tokenizer.json").read_text())
    assert found.merges == [" ".join(pair) for pair in spec["model"]["merges"]]
    assert (found.add_bos, found.add_eos, found.scores) == (True, False, None)
    with pytest.raises(UserError, match="has the id 306, the model only 200 logits"):
        words.read(family_dirs["llama"], 200)


@pytest.mark.parametrize("name", words.CUTTINGS)
def test_a_way_to_cut_text_is_recognised(name):
    """Of a tokenizer that was trained on text cut so."""
    cutting = words.CUTTINGS[name]
    inner = Tokenizer(models.BPE(ignore_merges=cutting.whole))
    splits = [pre_tokenizers.Split(Regex(e), "isolated") for e in cutting.expressions]
    inner.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(PROBES * 3, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet))
    assert words.nearest_cutting(inner) == (name, 1.0)


def test_a_way_that_llama_cpp_does_not_have_is_seen(family_dirs):
    found = words.read(family_dirs["llama"], 307)
    assert found.pre in words.CUTTINGS
    assert 0 < found.same < 1


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory) -> Path:
    """BPE as LLaMA 1 and 2 have it: spaces are letters, bytes fall back."""
    out = tmp_path_factory.mktemp("sentencepiece")
    letters = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        *"▁etaoinsrhldcum",
        "▁t",
        "he",
        "▁the",
        "in",
    ]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "n")]
    inner = Tokenizer(
        models.BPE({t: i for i, t in enumerate(letters)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(out)
    return out


def by_scores(text: str, found: words.Words) -> list[int]:
    """SentencePiece's way: of neighbours that make a token those with the highest score merge, the first of equals."""
    ids = {token: i for i, token in enumerate(found.tokens)}
    parts = list(text)
    while True:
        pairs = [(found.scores[ids[a + b]], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not pairs:
            break
        i = -max(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [i for p in parts for i in ([ids[p]] if p in ids else [ids[f"<0x{b:02X}>"] for b in p.encode()])]


def test_scores_merge_as_the_list_of_merges_does(sentencepiece):
    found = words.read(sentencepiece, 290)
    tokenizer = checkpoint.load_tokenizer(sentencepiece)
    assert (found.model, found.pre, found.merges) == ("llama", "default", None)
    for text in ("the hen ate in the inn", "then the tin hut", "her theme é"):
        wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert by_scores("▁" + text.replace(" ", "▁"), found) == wanted
    assert found.types[:4] == [words.UNKNOWN, words.CONTROL, words.CONTROL, words.BYTE]


def test_other_tokenizers_are_refused(tmp_path):
    inner = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="is WordLevel; GGUF is written for BPE only"):
        words.read(tmp_path, 2)
