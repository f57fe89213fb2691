"""A draft that will not work is called so, with the reason; one that will is not."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers.builders import TOKENIZER_TEXT, build
from helpers.small_files import edit
from helpers.typed import call
from safetensors.torch import save_file

from benchmarks.tiny_target import train_tokenizer
from draftlab.commands import COMMANDS
from draftlab.exporting import artifact, trials
from draftlab.model import checkpoint, llama
from draftlab.model.checkpoint import Checkpoint
from draftlab.model.sentencepiece import PROBES
from draftlab.registry import SERVERS
from draftlab.servers.kinds import Finding
from draftlab.training.vocabulary import resize


def findings(draft: Path, target: Path) -> list[Finding]:
    return list(artifact.check_files(artifact.open_artifact(draft, Checkpoint(target)), SERVERS.loadable()))


@pytest.fixture
def pair(tmp_path, family_dirs) -> tuple[Path, Path]:
    """Return a draft and a target, the same model; each test spoils one of them."""
    for name in ("draft", "target"):
        shutil.copytree(family_dirs["llama"], tmp_path / name)
    return tmp_path / "draft", tmp_path / "target"


def spoil(directory: Path, name: str, value: float) -> None:
    weights = dict(checkpoint.Weights(directory))
    weights[name] = torch.full_like(weights[name], value)
    # draftlab itself writes no weights that are not finite
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def error(pair: tuple[Path, Path], about: str) -> str:
    """Return the one error about something."""
    found = [f for f in findings(*pair) if f.about == about and f.level == "error"]
    assert len(found) == 1
    return found[0].text


def notes(pair: tuple[Path, Path], about: str) -> str:
    return " ".join(f.line() for f in findings(*pair) if f.about == about and f.level == "warning")


def test_a_model_fits_itself_wherever_heads_of_12_run(pair):
    assert {f.about for f in findings(*pair) if f.level == "error"} == {"vllm"}
    assert "head_dim" in error(pair, "vllm")


@pytest.mark.parametrize(
    ("spoilt", "file", "change", "level", "about"),
    [
        ("draft", "tokenizer_config.json", {"eos_token": "<pad>"}, "error", "special tokens"),
        ("target", "generation_config.json", {"eos_token_id": [1, 5]}, "warning", "special tokens"),
        ("draft", "config.json", {"max_position_embeddings": 128}, "warning", "context"),
        ("draft", "config.json", {"pard_token": 307}, "error", "pard_token"),
    ],
)
def test_a_difference_has_its_finding(pair, spoilt, file, change, level, about):
    edit(pair[0].parent / spoilt / file, **change)
    assert about in {f.about for f in findings(*pair) if f.level == level}


def test_ids_that_mean_something_else_are_named(pair):
    file = pair[1] / "tokenizer.json"
    model = json.loads(file.read_text())["model"]
    a, b = (next(w for w, i in model["vocab"].items() if i == n) for n in (270, 271))
    edit(file, model=model | {"vocab": model["vocab"] | {a: 271, b: 270}, "merges": []})
    assert "270" in error(pair, "tokenizer")


@pytest.fixture
def foreign(pair) -> tuple[Path, Path]:
    """Return a draft with a vocabulary of its own, and the target."""
    train_tokenizer([*TOKENIZER_TEXT, "for line in lines: print(line)\n" * 9], 330, pair[0])
    build("llama", vocab_size=330).save_pretrained(pair[0])
    return pair


def test_another_vocabulary_is_named_with_the_servers_that_translate(foreign):
    found = findings(*foreign)
    (wrong,) = (f for f in found if f.about == "tokenizer")
    assert wrong.level == "error"
    assert not {"special tokens", "vocabulary", "chat template"} & {f.about for f in found}
    translated = {f.about: f for f in found if "--use-heterogeneous-vocab" in f.fix}
    assert set(translated) == {"vllm", "transformers"}
    tokens = [checkpoint.load_tokenizer(d).get_vocab() for d in foreign]
    assert f"{len(tokens[0].keys() & tokens[1].keys())} of 307" in translated["vllm"].text
    refused = {f.about for f in found if f.fix.startswith("mergekit-tokensurgeon")} - {"tokenizer"}
    assert refused == {"sglang", "llama.cpp", "tensorrt-llm"}


def test_transformers_takes_two_tokenizers_only_where_the_logits_differ_in_number(foreign):
    resize(foreign[1], 330)
    assert "330" in error(foreign, "transformers")


def test_one_tokenizer_that_transformers_reads_in_two_ways_is_no_error(pair):
    """transformers 5 takes Qwen2Tokenizer for every Qwen2, whatever tokenizer_config.json says."""
    build("qwen2").save_pretrained(pair[0])
    (said,) = (f for f in findings(*pair) if f.about == "tokenizer" and "probe" in f.text)
    assert said.level == "warning"
    assert "tokenizer.json" in said.text


def test_one_vocabulary_that_cuts_text_otherwise_is_found_by_probe_texts(pair):
    file = pair[1] / "tokenizer.json"
    cuts = json.loads(file.read_text())["pre_tokenizer"]
    cuts["pretokenizers"][0]["pattern"] = {"Regex": "."}
    edit(file, pre_tokenizer=cuts)
    assert f"of {len(PROBES)} probe texts" in error(pair, "tokenizer")


def test_servers_that_cannot_draft_in_parallel_are_named(pair):
    edit(pair[0] / "config.json", pard_token=2, pard_offsets=6)
    found = findings(*pair)
    refused = {f.about for f in found if f.level != "ok" and "parallel" in f.text}
    assert refused >= {"sglang", "llama.cpp", "transformers"}
    assert "vllm" not in refused
    (said,) = (f.text for f in found if f.about == "pard_token")
    assert re.findall(r"\d+", said) == ["2", "6"]


def test_an_end_beyond_the_vocabulary_is_named(pair):
    edit(pair[0] / "config.json", eos_token_id=[1, 307])
    assert re.findall(r"\d+", error(pair, "special tokens")) == ["307", "0", "306"]


def test_a_server_is_the_subject_of_the_reason_why_it_cannot_run_a_draft(pair):
    edit(pair[0] / "config.json", hidden_act="gelu")
    said = error(pair, "llama.cpp")
    assert "gelu" in said
    assert not said.startswith(str(pair[0]))


def test_padded_vocabularies_are_refused_where_they_are(pair):
    resize(pair[1], 320)
    assert "307" in notes(pair, "vocabulary")
    said = [f for f in findings(*pair) if f.level == "error" and "320" in f.text]
    # llama.cpp lets them differ by 128
    assert {f.about for f in said} == {"vllm", "sglang", "tensorrt-llm", "transformers"}
    assert all("export" in f.fix for f in said)
    resize(pair[1], 307 + 129)
    assert "128" in error(pair, "llama.cpp")


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_broken_weights_are_found(pair, value):
    spoil(pair[0], "model.layers.1.mlp.up_proj.weight", value)
    assert "model.layers.1.mlp.up_proj.weight" in error(pair, "weights")


def test_devices_that_a_shape_splits_over_are_told(pair):
    assert "1, 2, 4" not in notes(pair, "vllm")
    build("llama", intermediate_size=44).save_pretrained(pair[0])
    assert re.search(r"1, 2, 4(?!, 8)", notes(pair, "vllm"))


def test_a_draft_accepts_itself_unless_decoding_is_broken(family_dirs):
    model = llama.load(family_dirs["llama"], torch.float32)
    prompts = [[0, 5, 9, 20], [0, 7, 7, 30]]
    assert trials.check_decoding(model, prompts).level == "ok"

    class Forgetful(llama.Llama):
        def forward(self, ids, cache, last=0):
            cache.keys.mul_(0.5)
            return super().forward(ids, cache, last)

    broken = object.__new__(Forgetful)
    broken.__dict__.update(model.__dict__)
    assert trials.check_decoding(broken, prompts).level == "error"


def test_a_draft_of_another_vocabulary_is_tried_on_its_own_words(family_dirs):
    """The tiny target has ids that the draft does not embed."""
    found = COMMANDS["check"](draft=str(family_dirs["llama"]), target="tiny", data="stdlib", servers="vllm")
    about = {finding["about"]: finding["level"] for finding in found.data["findings"]}
    assert (about["decoding"], about["vllm"]) == ("ok", "error")
    assert "sglang" not in about


def test_the_command_exits_with_3_when_something_is_bad(pair):
    check = f"check {pair[0]} --target {pair[1]} --files-only"
    result = call(f"{check} --for vllm --json", code=3)
    assert json.loads(result.stdout)["fits"] is False
    call(f"{check} --for transformers")
