"""Ids without a row in the embedding: an error that names row and token, in text, stored outputs and server answers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.builders import SIZES
from helpers.errors import raises_option
from helpers.small_files import edit, write_functions
from transformers import AutoTokenizer

from draftlab.commands import OUTPUTS_BUILD, SCORE
from draftlab.data import open_batches, tokenize
from draftlab.data.sources import Document
from draftlab.data.text import chat_ids, text_ids
from draftlab.model.tokenizer import load_tokenizer
from draftlab.target_outputs.batches import open_stored
from draftlab.target_outputs.store import check_tokenizer
from draftlab.training.vocabulary import resize

VOCAB = SIZES["vocab_size"]
ROWS = 200  # of a smaller draft
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory, family_dirs) -> Path:
    """Return a checkpoint whose tokenizer has added tokens. <first> and <far> have no rows; the others have."""
    out = tmp_path_factory.mktemp("models") / "target"
    shutil.copytree(family_dirs["llama"], out)
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<first>", "<far>"]})
    assert tokenizer.convert_tokens_to_ids("<first>") == VOCAB
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(out)
    return out


def plain_ids(model: Path, text: str) -> list[int]:
    return AutoTokenizer.from_pretrained(model)(text)["input_ids"]


@pytest.mark.parametrize("token", ["<first>", "<far>"])
def test_a_text_and_a_conversation_name_row_and_token(model, token):
    tokenizer, text = load_tokenizer(model), f"def f{token}(x):"
    number = plain_ids(model, text)
    assert max(number) >= VOCAB
    with raises_option("a.jsonl:7", token, max(number), VOCAB, model):
        text_ids(text, tokenizer, "a.jsonl:7")
    with raises_option("a.jsonl:7", token, max(number), VOCAB, model):
        chat_ids([{"role": "user", "content": text}], tokenizer, "a.jsonl:7")


def test_other_texts_of_the_same_tokenizer_are_read(model):
    text = AutoTokenizer.from_pretrained(model).decode([VOCAB - 1])
    assert max(plain_ids(model, text)) == VOCAB - 1
    assert text_ids(text, load_tokenizer(model), "a") == plain_ids(model, text)


def test_every_model_that_reads_the_ids_counts(model, family_dirs, tmp_path):
    small = tmp_path / "small"
    shutil.copytree(family_dirs["llama"], small)
    resize(small, ROWS)
    text = next(chr(i) for i in range(33, 127) if max(plain_ids(model, chr(i))) < ROWS)
    far = next(t for t in ("def", "return", "import", "class") if max(plain_ids(model, t)) >= ROWS)
    assert text_ids(text, load_tokenizer(model, small), "a") == plain_ids(model, text)
    with raises_option("a", ROWS, small):
        text_ids(far, load_tokenizer(model, small), "a")


def test_an_end_of_text_without_a_row_is_refused(model, tmp_path):
    changed = tmp_path / "eos"
    shutil.copytree(model, changed)
    edit(changed / "tokenizer_config.json", eos_token="<far>")
    tokenizer = load_tokenizer(changed)
    assert tokenizer.eos_token == "<far>"
    with raises_option("<far>", VOCAB):
        tokenize([Document("a", "text")], tokenizer)


def test_commands_refuse_before_a_pass(model, tmp_path, monkeypatch):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f(x):"}\n{"prompt": "def <far>"}\n' * 2)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"def f{i}(x): <far>"}) + "\n" for i in range(99)))

    def pass_runs(*_: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("draftlab.model.modes.load", pass_runs)
    monkeypatch.setattr("draftlab.engine.batch_generate.load", pass_runs)
    target: dict[str, Any] = {"target": str(model), "device": "cpu"}
    for chat in ("off", "on"):
        for mode in ("native", "eager"):
            with raises_option("--prompt-file", "prompts.jsonl:2", "<far>"):
                SCORE(**target, draft=[str(model)], prompt_file=prompts, chat=chat, mode=mode)
        with raises_option("prompts.jsonl:2", "<far>"):
            OUTPUTS_BUILD(**target, prompt_file=prompts, chat=chat, use="replay", out=tmp_path / "a")
    with raises_option("data.jsonl:", "<far>"):
        OUTPUTS_BUILD(**target, data=str(data), num_sequences=20, seq_len=16, out=tmp_path / "b")
    with raises_option("data.jsonl:", "<far>"):
        open_batches(str(data), load_tokenizer(model), rows=1, seq_len=16, steps=1, seed=0)


@pytest.fixture(scope="module")
def store(family_dirs, tmp_path_factory) -> Path:
    """Outputs of a target with all ids of its tokenizer."""
    space = tmp_path_factory.mktemp("store")
    OUTPUTS_BUILD(
        target=str(family_dirs["llama"]),
        data=write_functions(space / "text.txt", 200, 8),
        num_sequences=20,
        seq_len=16,
        top_logprobs=8,
        out=space / "c",
    )
    return space / "c"


def test_stored_ids_without_a_row_name_the_text(store, family_dirs, tmp_path):
    small, same = tmp_path / "small", family_dirs["llama"]
    shutil.copytree(same, small)
    resize(small, ROWS)
    check_tokenizer(store, same)
    with raises_option("text ", store, ROWS, small):
        check_tokenizer(store, small)
    with raises_option("text ", store, ROWS, small):
        open_stored(store, small, batch_size=4, temperature=1.0)


def test_a_larger_vocabulary_of_the_store_is_no_error_if_no_text_uses_it(store, family_dirs, tmp_path):
    wide = tmp_path / "wide"
    shutil.copytree(store, wide)
    for manifest in wide.rglob("manifest.json"):
        edit(manifest, vocab=VOCAB + 50)
    check_tokenizer(wide, family_dirs["llama"])


def test_a_shard_is_read_only_if_it_has_an_id_without_a_row(store, family_dirs, tmp_path):
    """A server's vocabulary is often the larger, padded one."""
    wide = tmp_path / "wide"
    shutil.copytree(store, wide)
    for manifest in wide.rglob("manifest.json"):
        edit(manifest, vocab=VOCAB + 50)
    for shard in wide.rglob("shard-*"):
        shard.unlink()
    check_tokenizer(wide, family_dirs["llama"])
    small = tmp_path / "small"
    shutil.copytree(family_dirs["llama"], small)
    resize(small, ROWS)
    with raises_option("shard"):
        check_tokenizer(wide, small)
