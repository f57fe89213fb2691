"""A draft with another vocabulary: shared tokens keep their rows, however they are spelled; others are means."""

import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import FAMILIES, TOKENIZER_TEXT, build, logits_by_transformers, rounding
from test_sentencepiece import CONFIG, train_sentencepiece
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from draftlab import workspace
from draftlab.cli import app
from draftlab.commands.make import transplant
from draftlab.config.make import TransplantConfig
from draftlab.model import checkpoint, saving
from draftlab.model.head_ids import read_head_ids, write_head_ids
from draftlab.model.sentencepiece import PROBES
from draftlab.model.token_bytes import Vocabulary, read_vocabulary
from draftlab.model.tokenizer import train_tokenizer
from draftlab.prune.transplant import Plan, matching_roles, new_rows, open_pair, plan_rows, roles_of

OTHER_TEXT = [*TOKENIZER_TEXT, *PROBES, "for line in lines:\n    print(line, naïve, 北京, 12345)\n" * 20]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TURNS = "{% for m in messages %}<begin>{{ m.role }}<head>{{ m.content }}<over>{% endfor %}"


def write_config(out: Path, like: Path, **changes: object) -> Path:
    config = json.loads((like / "config.json").read_text()) | changes
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory, family_dirs) -> Path:
    """Files of a target with byte-level BPE of other text; its model has ids without a token."""
    out = tmp_path_factory.mktemp("byte-level")
    train_tokenizer(OTHER_TEXT, 420, out)
    return write_config(out, family_dirs["llama"], vocab_size=424, eos_token_id=[1, 300])


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory, family_dirs) -> Path:
    """Files of a target with SentencePiece's BPE, spelled otherwise throughout."""
    out = tmp_path_factory.mktemp("sentencepiece")
    train_sentencepiece(out)
    (out / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    return write_config(out, family_dirs["llama"], vocab_size=480, bos_token_id=1, eos_token_id=2, pad_token_id=None)


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory, family_dirs) -> Path:
    """Files of a target with the draft's tokens under other ids."""
    out = tmp_path_factory.mktemp("shuffled")
    spec = json.loads((family_dirs["llama"] / "tokenizer.json").read_text())
    spec["model"]["vocab"] = {token: (i if i < 3 else 309 - i) for token, i in spec["model"]["vocab"].items()}
    (out / "tokenizer.json").write_text(json.dumps(spec))
    shutil.copyfile(family_dirs["llama"] / "tokenizer_config.json", out / "tokenizer_config.json")
    return write_config(out, family_dirs["llama"])


def with_template(source: Path, out: Path, template: str, *markers: str) -> Path:
    """A copy with special tokens in a chat template."""
    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"additional_special_tokens": list(markers)})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(out)
    return write_config(out, source, vocab_size=len(tokenizer))


def planned(draft: Path, target: Path) -> Plan:
    return open_pair(TransplantConfig(draft=str(draft), target=str(target))).plan


def vocabulary(directory: Path) -> Vocabulary:
    return read_vocabulary(directory, checkpoint.vocab_size(directory))


def written_by(tokenizer: Any, ids: list[int]) -> str:
    """The text of ids behind an x, by the tokenizer's own decoder."""
    (x,) = (i for token, i in tokenizer.get_vocab().items() if token == "x")
    text = tokenizer.decode([x, *ids], clean_up_tokenization_spaces=False)
    assert text[0] == "x"
    return text[1:]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_that_both_have_keep_their_rows_bit_for_bit(family, family_dirs, byte_level, tmp_path):
    transplant(draft=str(family_dirs[family]), target=str(byte_level), out=tmp_path / "out")
    ids = [json.loads((d / "tokenizer.json").read_text())["model"]["vocab"] for d in (family_dirs[family], byte_level)]
    shared = sorted(ids[0].keys() & ids[1].keys())
    before, after = (checkpoint.Weights(d) for d in (family_dirs[family], tmp_path / "out"))
    assert 256 < len(shared) < 420
    for name in (EMBEDDING, *([HEAD] if HEAD in before else [])):
        old, new = before[name], after[name]
        assert new.shape == (424, 64)
        assert torch.equal(new[[ids[1][t] for t in shared]], old[[ids[0][t] for t in shared]])
    for name in set(before) - {EMBEDDING, HEAD}:
        assert torch.equal(before[name], after[name])
    assert set(before) == set(after)


def test_a_permuted_vocabulary_and_back_are_the_same_bytes(family_dirs, shuffled, tmp_path):
    there, back = tmp_path / "there", tmp_path / "back"
    transplant(draft=str(family_dirs["llama"]), target=str(shuffled), out=there)
    transplant(draft=str(there), target=str(family_dirs["llama"]), out=back)
    before, moved, after = (checkpoint.Weights(d) for d in (family_dirs["llama"], there, back))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not torch.equal(before[EMBEDDING], moved[EMBEDDING])


@pytest.mark.parametrize("target", ["byte_level", "sentencepiece"])
def test_the_same_tokenizer_is_the_identity(target, request):
    words = vocabulary(request.getfixturevalue(target))
    tokens = max(words.spelling) + 1
    sources = plan_rows(words, words, tokens, matching_roles(words, words, {"eos": 1}, {"eos": 1}))
    assert sources == [[i] for i in range(tokens)]
    rows = torch.randn(tokens, 8)
    assert torch.equal(new_rows(rows, Plan(sources=sources, known=[0], roles={})), rows)


@pytest.mark.parametrize(
    ("draft", "target"), [("byte_level", "sentencepiece"), ("sentencepiece", "byte_level"), ("small", "byte_level")]
)
def test_pieces_write_the_bytes_of_their_token(draft, target, request, family_dirs):
    old, new = (family_dirs["llama"] if n == "small" else request.getfixturevalue(n) for n in (draft, target))
    words, new_words = vocabulary(old), vocabulary(new)
    tokenizers = [checkpoint.load_tokenizer(d) for d in (old, new)]
    sources = plan_rows(words, new_words, checkpoint.vocab_size(new), {})
    lengths = set()
    for i, text in new_words.text.items():
        if not sources[i]:  # a byte that another token of the target stands for
            assert new_words.canonical[text] != i
            continue
        lengths.add(len(sources[i]))
        assert b"".join(words.text[piece] for piece in sources[i]) == text
        if "\N{REPLACEMENT CHARACTER}" not in (expected := written_by(tokenizers[1], [i])):
            assert written_by(tokenizers[0], sources[i]) == expected
            assert expected.encode() == text
    assert {1, 2, 3} <= lengths


def test_matching_by_spelling_would_lose_what_another_family_spells_otherwise(byte_level, sentencepiece):
    """The negative control: the bytes of ▁def and Ġdef are the same, their spellings are not."""
    old, new = vocabulary(byte_level), vocabulary(sentencepiece)
    sources = plan_rows(old, new, 480, {})
    copied = {i for i in new.text if len(sources[i]) == 1}
    by_spelling = {i for i in copied if new.spelling[i] in old.spelling.values()}
    spaced = {i for i in copied if new.text[i].startswith(b" ")}
    assert spaced
    assert not spaced & by_spelling
    assert all(old.spelling[sources[i][0]].startswith("Ġ") for i in spaced)


def test_rows_of_other_tokens_are_the_mean_of_their_pieces(family_dirs, byte_level, tmp_path):
    transplant(draft=str(family_dirs["llama"]), target=str(byte_level), out=tmp_path / "out")
    plan = planned(family_dirs["llama"], byte_level)
    before, after = checkpoint.Weights(family_dirs["llama"]), checkpoint.Weights(tmp_path / "out")
    for name in (EMBEDDING, HEAD):
        old, new = before[name], after[name]
        for i, pieces in enumerate(plan.sources):
            wanted = old[pieces].double().mean(0) if pieces else old.double().mean(0)
            error = rounding(torch.float32, max(1, len(pieces or old)), float(old.abs().max()))
            torch.testing.assert_close(new[i].double(), wanted, atol=error, rtol=0)
    assert plan.at_mean == 4  # ids without a token
    wrong = Plan(sources=[list(reversed(plan.sources))[i] for i in range(424)], known=plan.known, roles={})
    assert not torch.allclose(new_rows(before[HEAD], wrong), after[HEAD], atol=1e-3)


def test_logits_of_shared_tokens_are_the_sources(family_dirs, byte_level, tmp_path):
    draft = family_dirs["llama"]
    transplant(draft=str(draft), target=str(byte_level), out=tmp_path / "out")
    plan = planned(draft, byte_level)
    shared = [(i, ids[0]) for i, ids in enumerate(plan.sources) if len(ids) == 1]
    ids = torch.tensor(shared)  # [n, 2]: in the new vocabulary, in the old
    text = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))[:20]]
    new = logits_by_transformers(tmp_path / "out", text[None, :, 0])[0][:, ids[:, 0]]
    old = logits_by_transformers(draft, text[None, :, 1])[0][:, ids[:, 1]]
    torch.testing.assert_close(new, old, atol=rounding(torch.float32, 64, float(old.abs().max())), rtol=0)
    other = logits_by_transformers(draft, text[None, :, 0].clamp_max(306))[0][:, ids[:, 1]]
    assert (other - new).abs().max() > 0.1  # the ids of another vocabulary


def test_ids_tokenizer_and_ends_are_the_targets(family_dirs, sentencepiece, tmp_path):
    draft = tmp_path / "draft"
    shutil.copytree(family_dirs["llama3_tied"], draft)
    write_config(draft, draft, unk_token_id=5)
    target = tmp_path / "target"
    shutil.copytree(sentencepiece, target)
    (target / "generation_config.json").write_text('{"eos_token_id": [2, 9], "temperature": 0.6}')
    (target / "chat_template.jinja").write_text(CHAT)
    transplant(draft=str(draft), target=str(target), out=tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [1, 2, None]
    assert config["vocab_size"] == 480
    assert "unk_token_id" not in config
    assert config["tie_word_embeddings"]
    for name in ("tokenizer.model", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (target / name).read_bytes()
    assert not (tmp_path / "out/tokenizer.json").exists()
    assert checkpoint.eos_token_ids(tmp_path / "out") == (2, 9)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").lm_head.weight.shape == (480, 64)
    assert checkpoint.read_shape(tmp_path / "out").tied


def test_special_tokens_take_the_rows_of_their_roles(family_dirs, tmp_path):
    source = family_dirs["llama"]
    draft = with_template(source, tmp_path / "draft", CHAT, "<|im_start|>", "<|im_end|>", "<tool>")
    target = with_template(source, tmp_path / "target", TURNS, "<idle>", "<begin>", "<head>", "<over>", "<tool>")
    old, new = vocabulary(draft), vocabulary(target)
    roles = matching_roles(old, new, roles_of(draft), roles_of(target))
    assert {name: (new.special[a], old.special[b]) for name, (a, b) in roles.items()} == {
        "start of turn": ("<begin>", "<|im_start|>"),
        "end of turn": ("<over>", "<|im_end|>"),
    }
    sources = plan_rows(old, new, 312, roles)
    assert sources[new.added["<tool>"]] == [old.added["<tool>"]]
    assert sources[0] == [0]  # <s> of both
    assert not sources[new.added["<head>"]]
    assert not sources[new.added["<idle>"]]


def test_text_that_reads_like_a_special_token_is_none(family_dirs, tmp_path):
    """A role's token is not made of the letters of its name, nor are such letters the token."""
    words = vocabulary(family_dirs["llama"])
    pieces = words.split(b"a</s>b")
    assert 1 not in pieces
    assert b"".join(words.text[i] for i in pieces) == b"a</s>b"


def test_padding_takes_no_row_that_ends_a_text(family_dirs, tmp_path):
    draft = tmp_path / "draft"
    shutil.copytree(family_dirs["llama"], draft)
    file = draft / "tokenizer_config.json"
    file.write_text(file.read_text().replace("<pad>", "</s>"))
    assert roles_of(draft)["pad"] == roles_of(draft)["eos"] == 1
    target = write_config(tmp_path, family_dirs["llama"])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (family_dirs["llama"] / name).read_text()
        text = text.replace("<pad>", "<nothing>").replace("</s>", "<end>").replace("<s>", "<begin>")
        (target / name).write_text(text)
    plan = planned(draft, target)
    assert plan.sources[:3] == [[0], [1], []]
    assert plan.roles == {"eos": ("<end>", "</s>"), "bos": ("<begin>", "<s>")}


def test_a_trimmed_head_stays_trimmed(family_dirs, shuffled, byte_level, tmp_path):
    draft = tmp_path / "draft"
    shutil.copytree(family_dirs["llama"], draft)
    write_head_ids(draft, [0, 1, *range(3, 280)])
    transplant(draft=str(draft), target=str(shuffled), out=tmp_path / "out")
    assert read_head_ids(tmp_path / "out", 307) == [0, 1, *range(30, 307)]
    plan = planned(draft, byte_level)
    transplant(draft=str(draft), target=str(byte_level), out=tmp_path / "other")
    ids = read_head_ids(tmp_path / "other", 424)
    assert ids == [i for i, pieces in enumerate(plan.sources) if pieces and all(p < 280 and p != 2 for p in pieces)]
    assert checkpoint.read_shape(tmp_path / "other").draft_vocab == len(ids or [])


def test_a_parallel_drafts_mask_token_moves_to_an_id_that_no_text_has(family_dirs, byte_level, tmp_path):
    draft = tmp_path / "draft"
    shutil.copytree(family_dirs["llama"], draft)
    write_config(draft, draft, pard_token=2, pard_offsets=4)
    transplant(draft=str(draft), target=str(byte_level), out=tmp_path / "out")
    token = checkpoint.read_config(tmp_path / "out")["pard_token"]
    assert token == 420  # the first id without a token
    before, after = (checkpoint.Weights(d)[EMBEDDING] for d in (draft, tmp_path / "out"))
    assert torch.equal(after[420], before[2])


def test_weights_are_streamed_in_their_dtype(family_dirs, byte_level, tmp_path, monkeypatch):
    draft = tmp_path / "draft"
    shutil.copytree(family_dirs["llama"], draft)
    weights = [(name, tensor.bfloat16()) for name, tensor in checkpoint.Weights(draft).items()]
    saving.write_checkpoint(draft, checkpoint.read_config(draft), weights, None)
    transplant(draft=str(draft), target=str(byte_level), out=tmp_path / "whole")
    monkeypatch.setattr(saving, "SHARD_BYTES", 100_000)
    transplant(draft=str(draft), target=str(byte_level), out=tmp_path / "sharded")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    whole, sharded = (checkpoint.Weights(tmp_path / name) for name in ("whole", "sharded"))
    assert whole.dtype == torch.bfloat16
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


def test_the_plan_says_what_is_written_and_writes_nothing(family_dirs, byte_level, tmp_path):
    call: dict[str, Any] = {"draft": str(family_dirs["llama"]), "target": str(byte_level), "out": tmp_path / "out"}
    facts: Any = transplant(**call, dry_run=True).data
    assert not (tmp_path / "out").exists()
    outcome = transplant(**call)
    assert {name: outcome.data[name] for name in ("ids", "copied", "from_pieces", "at_mean")} == {
        name: facts[name] for name in ("ids", "copied", "from_pieces", "at_mean")
    }
    assert facts["copied"] + facts["from_pieces"] + facts["at_mean"] == facts["ids"] == 424
    assert float(str(facts["disk"]).split()[0]) == pytest.approx(outcome_bytes(tmp_path / "out") / 1e6, rel=1e-3)
    card = (tmp_path / "out/README.md").read_text()
    assert f"{facts['copied']:,} of 424 rows" in card
    assert "draftlab transplant" in card


def outcome_bytes(out: Path) -> int:
    return sum(tensor.nbytes for tensor in checkpoint.Weights(out).values())


@pytest.fixture
def space(tmp_path, monkeypatch, family_dirs, byte_level) -> Path:
    """A workspace with a whole target of another vocabulary than the draft's."""
    build("llama", seed=3, vocab_size=424).save_pretrained(tmp_path / "target")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(byte_level / name, tmp_path / "target" / name)
    shutil.copytree(family_dirs["llama"], tmp_path / "draft")
    (tmp_path / "text.txt").write_text(
        "\n\n".join(f"def f{i}(line):\n    return [line, {i}]\n" * 60 for i in range(60))
    )
    monkeypatch.chdir(tmp_path)
    workspace.write(workspace.Workspace(target="target", source="target", data="text.txt"))
    return tmp_path


def call(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


def test_every_command_takes_the_result(space):
    facts = json.loads(call("check", "draft", "--files-only", "--json", "--for", "llama.cpp", code=3))
    assert not facts["fits"]
    call("transplant", "draft")
    out = "runs/transplant-draft-target"
    assert json.loads(call("check", out, "--files-only", "--json", "--for", "llama.cpp"))["fits"]
    call("distill", "--steps", "2", "--batch-size", "2", "--seq-len", "16", "--training-dtype", "float32")
    few = ("--num-prompts", "2", "--prompt-tokens", "8")
    score = ("score", "--draft", out, "--draft", "runs/distill-transplant-draft-target", "--k", "1", *few)
    assert "transplant-draft-target" in call(*score, "--max-tokens", "6", "--repeats", "1", "--tasks", "none")
    call("outputs", "build", "--use", "replay", "--max-new-tokens", "8", *few, "--out", "stored")
    call("replay", "stored", "--draft", out)
    call("prune", "--source", out, "--layers", "2", "--calibration-tokens", "64", "--seq-len", "16")
    for runtime in ("hf", "gguf"):
        call("export", out, "--to", runtime, "--out", f"export-{runtime}")
    assert "draftlab transplant draft" in Path("export-hf/README.md").read_text()


def test_a_draft_of_another_vocabulary_decodes_as_the_target_with_two_tokenizers(space, capsys, monkeypatch):
    call("export", "draft", "--to", "transformers", "--use-heterogeneous-vocab", "--k", "2", "--out", "out")
    assert (space / "out/tokenizer.json").read_bytes() == (space / "draft/tokenizer.json").read_bytes()
    monkeypatch.setattr(sys, "argv", ["assist.py", "def f"])
    runpy.run_path("out/assist.py")
    tokenizer: Any = checkpoint.load_tokenizer(space / "target")
    model: Any = AutoModelForCausalLM.from_pretrained(space / "target")
    ids = tokenizer("def f", return_tensors="pt")["input_ids"]
    alone = tokenizer.decode(model.generate(ids, max_new_tokens=64, do_sample=False)[0])
    assert capsys.readouterr().out.strip() == alone.strip()


def test_the_script_for_vllm_lets_it_translate(space):
    call("export", "draft", "--to", "vllm", "--use-heterogeneous-vocab", "--k", "3", "--out", "out")
    assert '\\"use_heterogeneous_vocab\\": true' in (space / "out/serve.sh").read_text()
    assert '\\"draft_sample_method\\": \\"greedy\\"' in (space / "out/serve.sh").read_text()
    assert checkpoint.vocab_size(space / "out") == 307
    assert "its own, which the server translates" in (space / "out/README.md").read_text()
