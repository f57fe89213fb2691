"""Tokenizers and chat templates of GGUF files: what llama.cpp makes of them, by answers of its server.

tests/files/llama_cpp_tokenize.json: ids of the texts below by /tokenize of xllamacpp 2026.10.11549, from files that
gguf.write made of the tokenizers below. DRAFTLAB_TEST_LLAMA_SERVER=... pytest -m llamacpp asks a server again.
"""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.builders import build
from helpers.errors import raises_option
from helpers.gguf_files import contents
from helpers.real_llama_cpp import llama_server, tokenize
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from draftlab.exporting import gguf, gguf_tokenizer, llama_cpp_tokenizer
from draftlab.exporting.verify import running

GOLDEN = json.loads((Path(__file__).parents[1] / "files/llama_cpp_tokenize.json").read_text())
TEXTS = [
    "the cat",
    "[INST]the cat[/INST]hello",
    "[INST] the cat [/INST] hello",
    "<tool>the cat",
    "hello two words cat",
    "  the cat",
    "the  cat",
    "",
    "[INST]two words[/INST]",
    "the cat <pad> hello",
    "the <pad>cat",
    "é北 the\n[INST]\ncat",
    "e\u0301 the cat",
    "[INST][/INST]the",
    "a<pad>  [INST] ",
]
WORDS = ("a", "the", "cat", "sat", "hello", "user")
LETTERS = "▁abcdefghijklmnopqrstuvwxyzABC.,!?[]/<>|_0123456789"
SCHEMES = ["first", "always", "never", "legacy"]


def sentencepiece(scheme: str, words: tuple[str, ...] = WORDS) -> Tokenizer:
    """BPE with byte fallback, as LLaMA 1 and 2 and Mistral have it. scheme: Where a space is put before a text."""
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *LETTERS]
    vocab = {token: i for i, token in enumerate(letters)}
    merges: list[tuple[str, str]] = []
    for word in words:
        pairs = [(word[:i], word[i]) for i in range(1, len(word))]
        for left, right in [*pairs, ("▁", word)]:
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
    inner = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if scheme == "legacy":
        spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        inner.normalizer = normalizers.Sequence(spaces)
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)  # type: ignore[arg-type]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence(steps)
    return inner


def byte_level(composes: bool) -> Tokenizer:
    """Byte-level BPE. composes: Whether it normalizes to NFC, as Qwen2's tokenizer does."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "t"), ("c", "at"), ("Ã", "©")]
    vocab = {token: i for i, token in enumerate([*letters, *map("".join, merges)])}
    inner = Tokenizer(models.BPE(vocab, merges))
    inner.normalizer = normalizers.NFC() if composes else None
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = decoders.ByteLevel()
    return inner


TOKENIZERS = {
    **{scheme: lambda scheme=scheme: sentencepiece(scheme) for scheme in SCHEMES},
    "first, few words": lambda: sentencepiece("first", ("cat",)),
    "legacy, few words": lambda: sentencepiece("legacy", ("cat",)),
    "bytes": lambda: byte_level(False),
    "bytes, NFC": lambda: byte_level(True),
}


def saved(name: str, folder: Path) -> Path:
    """Save a small LLaMA with one of the tokenizers. <pad> takes the white space on its right, as in Phi-3."""
    inner = TOKENIZERS[name]()
    known = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
    inner.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in known])
    inner.add_special_tokens([AddedToken("<pad>", special=True, normalized=False, rstrip=True)])
    inner.add_tokens([AddedToken(s, normalized=False) for s in ("<tool>", "two words")])
    roles = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    template = "{% for m in messages %}[INST]{{ m['content'] }}[/INST]{% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=inner, **roles, chat_template=template).save_pretrained(folder)
    build("llama", vocab_size=inner.get_vocab_size(), num_hidden_layers=1).save_pretrained(folder)
    return folder


def emulated(fields: dict[str, Any], text: str) -> list[int]:
    """Return ids of a text by llama_cpp_tokenizer, from the fields of a GGUF file."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    kinds = (gguf_tokenizer.UNKNOWN, gguf_tokenizer.CONTROL, gguf_tokenizer.USER_DEFINED)
    special = {t: i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind in kinds}
    inner = llama_cpp_tokenizer.SentencePiece(
        tokens, fields["tokenizer.ggml.scores"], fields["tokenizer.ggml.add_space_prefix"]
    )
    return llama_cpp_tokenizer.encode(text, special, inner.encode)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_share_of_equal_texts_is_that_of_the_server(name, tmp_path):
    found = gguf_tokenizer.read_tokenizer(saved(name, tmp_path), 400)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    wanted = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    equal = [a == b for a, b in zip(GOLDEN[name], wanted, strict=True)]
    if found.match == 1:
        assert all(equal)
    else:
        assert not all(equal)
    beside = [same for same, text in zip(equal, TEXTS, strict=True) if "[" in text or "<" in text]
    assert (found.match_special == 1) == all(beside)


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if "bytes" not in name])
def test_sentencepiece_is_emulated_as_the_server_computes_it(name, tmp_path):
    gguf.write(saved(name, tmp_path), tmp_path / "a.gguf", "f32")
    fields, _ = contents(tmp_path / "a.gguf")
    assert [emulated(fields, text) for text in TEXTS] == GOLDEN[name]
    # LLaMA's normalizer and an unconditional space are llama.cpp's prefix; also where no token is "▁a"
    assert fields["tokenizer.ggml.add_space_prefix"] == ("never" not in name)


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if "bytes" in name])
def test_byte_level_bpe_is_emulated_as_the_server_computes_it(name, tmp_path):
    """Special tokens are found first, without the white space beside them, and nothing is normalized."""
    spec = json.loads((saved(name, tmp_path) / "tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in spec["added_tokens"]}
    probes = gguf_tokenizer.Probes(texts=TEXTS, ids=GOLDEN[name], plain=0)
    _, equal = gguf_tokenizer.nearest_pre_tokenizer(spec, special, probes)
    assert all(equal)


@pytest.mark.llamacpp
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_real_server_gives_the_recorded_ids(name, tmp_path):
    program = llama_server()
    tokenizer = gguf.write(saved(name, tmp_path), tmp_path / "a.gguf", "f32").tokenizer
    with running([program, "--model", tmp_path / "a.gguf", "--threads", 1]) as (client, _):
        assert [tokenize(client, text) for text in TEXTS] == GOLDEN[name]
        # the share that an export prints is that of the server
        assert tokenizer.probes.equal(partial(tokenize, client)) == tokenizer.equal


DEFAULT, TOOLS = "{{ messages[0].content }}", "{{ tools }}{{ messages[0].content }}"


def in_a_list(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    named = {"default": DEFAULT, "tool use": TOOLS}
    content = [{"name": name, "template": template} for name, template in named.items()]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": content}))


def in_files(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(DEFAULT)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool use.jinja").write_text(TOOLS)


@pytest.mark.parametrize("store", [in_a_list, in_files])
def test_named_chat_templates_are_in_the_file(store, family_dirs, tmp_path):
    folder = Path(shutil.copytree(family_dirs["llama"], tmp_path / "model"))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    store(folder)
    gguf.write(folder, tmp_path / "a.gguf", "f32")
    fields, _ = contents(tmp_path / "a.gguf")
    assert fields["tokenizer.chat_template"] == DEFAULT
    assert fields["tokenizer.chat_template.tool_use"] == TOOLS  # as gguf-py names it
    assert fields["tokenizer.chat_templates"] == ["tool_use"]


def test_a_tokenizer_without_merges_is_refused(tmp_path):
    saved("bytes", tmp_path)
    file = tmp_path / "tokenizer.json"
    spec = json.loads(file.read_text())
    spec["model"]["merges"] = []
    file.write_text(json.dumps(spec))
    with raises_option("merges"):
        gguf.write(tmp_path, tmp_path / "a.gguf", "f32")


@pytest.mark.parametrize("name", ["Phi-3-draft", "phi3-draft", "draft"])
def test_a_name_that_changes_how_llama_cpp_tokenizes_is_left_out(name, family_dirs, tmp_path):
    """llama-vocab.cpp: such a file does not load (_Map_base::at), or skips the white space after special tokens."""
    gguf.write(family_dirs["llama"], tmp_path / f"{name}.gguf", "f32")
    fields, _ = contents(tmp_path / f"{name}.gguf")
    assert ("general.name" in fields) == (name == "draft")


@pytest.mark.parametrize(
    ("ends", "wanted", "unheld"),
    [
        (1, [1], []),
        ([7, 1], [1, 7], []),
        ([7, 1, 8], [1, 7, 8], []),
        ([7, 1, 8, 9], [1, 7, 8], [9]),
    ],
)
def test_each_token_that_ends_a_text_is_in_the_file_or_named(ends, wanted, unheld, family_dirs, tmp_path):
    """llama.cpp#9606: a list of eos ids; 1 is the tokenizer's."""
    folder = Path(shutil.copytree(family_dirs["llama"], tmp_path / "model"))
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": ends}))
    lines = gguf.write(folder, tmp_path / "a.gguf", "f32").lines()
    fields, _ = contents(tmp_path / "a.gguf")
    roles = [f"tokenizer.ggml.{role}_token_id" for role in ("eos", "eot", "eom")]
    assert [fields[role] for role in roles if role in fields] == wanted
    said = [line for line in lines if "eos_token_id" in line]
    names = AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens(unheld)
    assert len(said) == len(names)
    assert all(name in line for name, line in zip(names, said, strict=True))
