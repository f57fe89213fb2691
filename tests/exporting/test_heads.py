"""What an exported head holds is the head, and what keeps a server from it is said before the target is read."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.gguf_files import contents, neighbours_apart
from helpers.published_heads import K, folder_fixture, target_fixture, written  # noqa: F401
from helpers.real_llama_cpp import llama_server
from helpers.small_files import edit, write_prompts, write_rows
from helpers.typed import call
from safetensors.torch import load_file, save_file

from draftlab.engine.generate import decode, output_tokens, speculative_decode
from draftlab.exporting import verify
from draftlab.exporting.artifact import Form, check_files, open_artifact
from draftlab.heads.base import TargetSizes
from draftlab.heads.eagle3 import decoder, layout
from draftlab.heads.eagle3.drafter import EagleDrafter
from draftlab.model import llama
from draftlab.model.checkpoint import Checkpoint
from draftlab.registry import SERVERS
from draftlab.sampling import SamplingParams


def exported(head: Path, target: Path, to: str, more: str = "") -> Path:
    out = head.parent / f"out-{to}"
    call(f"export {head} --target {target} --to {to} --out {out} {more}")
    return out


def test_scores_of_a_head_choose_k_and_fill_its_card(folder, target, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl", 2)
    head = f"eagle:heads={folder}"
    for k, drafter in ((1, head), (2, f"{head},prompt_lookup_max=3")):
        few = f"--k {k} --max-new-tokens 6 --repeats 1 --prompt-file {prompts}"
        call(f"score --target {target} --drafter {drafter} {few} --out {tmp_path}/at-{k}")
    scores = f"--scores {tmp_path}/at-1 --scores {tmp_path}/at-2"
    out = exported(folder, target, "vllm", scores)
    assert "prompts.jsonl" in (out / "README.md").read_text()
    # of the head alone, which is exported
    assert '\\"num_speculative_tokens\\": 1' in (out / "serve.sh").read_text()


def refused(head: Path, target: Path, to: str) -> str:
    result = call(f"export {head} --target {target} --out never --to {to}", code=1)
    assert not Path("never").exists()
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    return result.stderr


@pytest.mark.parametrize("to", ["hf", "vllm", "speculators", "sglang", "tensorrt-llm"])
def test_a_directory_is_the_head(to, folder, target):
    out = exported(folder, target, to, "" if to == "hf" else "--k 5")
    mine, theirs = (layout.read(place, target, torch.float32) for place in (folder, out))
    assert mine.config == theirs.config
    assert torch.equal(mine.ids, theirs.ids)
    for name, weight in mine.weights.items():
        assert torch.equal(weight, theirs.weights[name])
    assert "EAGLE-3" in (out / "README.md").read_text()
    if to == "speculators":
        told = json.loads((out / "config.json").read_text())["speculators_config"]
        assert told["verifier"]["name_or_path"] == str(target.absolute())
        assert told["proposal_methods"][0]["speculative_tokens"] == 5
        words = shlex.split((out / "serve.sh").read_text().splitlines()[-1])
        set_by_script = json.loads(words[words.index("--speculative-config") + 1])
        assert set_by_script == {"draft_sample_method": "probabilistic"}  # as --server-rule vllm


@pytest.mark.parametrize("normed", [False, True])
def test_a_gguf_file_is_the_head(normed, target, tmp_path):
    """Names and settings are those of llama.cpp's src/models/eagle3.cpp and src/llama-arch.cpp."""
    folder = written(tmp_path / "head", target, normed=normed)
    out = exported(folder, target, "llama.cpp", "--outtype f32")
    fields, tensors = contents(out / "head-f32.gguf")
    mine = layout.read(folder, target, torch.float32)
    assert fields["general.architecture"] == "eagle3"
    assert fields["eagle3.target_layers"] == list(mine.config.layer_ids)
    assert fields["eagle3.target_hidden_size"] == 64
    assert fields["eagle3.norm_before_residual"] is normed
    assert fields["eagle3.block_count"] == 1
    assert len(list(fields["tokenizer.ggml.tokens"])) == mine.config.vocab  # type: ignore[call-overload]
    assert torch.equal(tensors.pop("d2t"), mine.ids)
    short = {
        "fc.weight": "fc.weight",
        "norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
        "input_layernorm": "attn_norm",
        "hidden_norm": "attn_norm_2",
        "post_attention_layernorm": "ffn_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    }
    for name, weight in mine.weights.items():
        there = short.get(name) or f"blk.0.{short[name.split('.')[-2]]}.weight"
        stored = tensors.pop(there)
        turned = (
            neighbours_apart(stored, mine.config.head_dim)
            if there[6:] in ("attn_q.weight", "attn_k.weight")
            else stored
        )
        assert torch.equal(turned, weight), name
    assert tensors == {}


def test_a_head_of_the_whole_vocabulary_has_no_d2t(target, tmp_path):
    """vLLM has no parameter for one."""
    whole = written(tmp_path / "head", target, draft_vocab=TargetSizes.of(target).vocab)
    assert not {"d2t", "t2d"} & load_file(whole / "model.safetensors").keys()
    out = exported(whole, target, "gguf", "--outtype f32")
    assert "d2t" not in contents(out / "head-f32.gguf")[1]


def greedy_counts(artifact: Any, texts: verify.TargetTexts) -> np.ndarray:
    scores = artifact.scores(artifact.path, Form(to="hf"), texts, torch.device("cpu"))
    return verify.count_steps([scored.ranks == 0 for scored in scores], texts)


def test_steps_are_those_of_live_decoding(target, tmp_path):
    """The length limit is llama.cpp's: the last step drafts no more than fits."""
    model = llama.load(target, torch.float32)
    artifact: Any = open_artifact(written(tmp_path / "head", target), Checkpoint(target))
    drafter = EagleDrafter(model, decoder.load(artifact.path, target, model, model.device))
    prompts = [np.random.default_rng(i).integers(3, 300, 6).tolist() for i in range(4)]
    completions = output_tokens(decode(model, prompts, SamplingParams(max_tokens=12 + K)))
    texts = verify.TargetTexts(prompts=prompts, completions=completions, tokens=[12, 9, 2, 1], k=K)
    counts = greedy_counts(artifact, texts)
    for row, length in enumerate([12, 9, 2, 1]):
        how = SamplingParams(max_tokens=length)
        live = list(speculative_decode(model, drafter, [prompts[row]], K, how))
        assert counts[row, 1] == len(live) - 1
        assert texts.completions[row][:length] == [token for step in live for token in step.tokens]
        assert counts[row, 0] >= length - 1


def test_the_end_of_a_text_is_not_asked_of_llama_cpp():
    written = {"completions": [[5, 6, 2, 9], [5, 6, 7, 9]], "tokens": [3, 3]}
    texts = verify.TargetTexts(prompts=[[1], [1]], k=1, **written)
    llama_cpp = SERVERS.get("llama.cpp", "--to")
    assert verify.before_end(texts, llama_cpp, (2,)).tokens == [2, 3]


def without(head: Path, name: str) -> None:
    """Remove a setting from a head's configuration."""
    config = json.loads((head / "config.json").read_text())
    del config[name]
    (head / "config.json").write_text(json.dumps(config))


def levels(head: Path, target: Path) -> dict[str, str]:
    return {f.about: f.level for f in check_files(open_artifact(head, Checkpoint(target)), SERVERS.loadable())}


def test_check_knows_who_takes_a_head(target, tmp_path):
    theirs = written(tmp_path / "d", target, "speculators")
    wanted = {
        written(tmp_path / "a", target): "sglang ok, llama.cpp ok, tensorrt-llm ok, transformers warning, head ok",
        written(tmp_path / "b", target, normed=True): "sglang error, tensorrt-llm error, llama.cpp ok",
        written(tmp_path / "c", target, layer_ids=(1, 2)): "sglang ok, llama.cpp error",
        theirs: "sglang error, llama.cpp ok",
    }
    for head, about in wanted.items():
        assert dict(each.split(" ") for each in about.split(", ")).items() <= levels(head, target).items()
    without(theirs, "norm_before_residual")
    said = check_files(open_artifact(theirs, Checkpoint(target)), [SERVERS.get("vllm", "--for")])
    assert [f.level for f in said if "norm_before_residual" in f.text] == ["error"]


def test_sglang_finds_its_layers(folder, target):
    without(folder, "eagle_config")
    assert levels(folder, target)["sglang"] == "error"
    assert levels(exported(folder, target, "sglang"), target)["sglang"] == "ok"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target_hidden_size": 96}, "96"),
        ({"vocab_size": 4096}, "4096"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 40]}, "40"),
        ({"d2t": None}, "d2t"),
    ],
)
def test_a_head_for_another_target_is_refused_before_the_targets_weights_are_read(
    change, words, folder, target, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    bare = tmp_path / "target"
    shutil.copytree(target, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    if "d2t" in change:
        tensors = load_file(folder / "model.safetensors")
        del tensors["d2t"]
        save_file(tensors, folder / "model.safetensors")
    else:
        edit(folder / "config.json", **change)
    assert words in refused(folder, bare, "vllm")
    assert words in call(f"check {folder} --target {bare} --data stdlib", code=3).stdout


def test_what_a_runtime_computes_otherwise_is_not_exported_to_it(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    normed = written(tmp_path / "head", target, normed=True)
    assert "norm_before_residual" in refused(normed, target, "sglang")
    assert "EAGLE-3" in refused(normed, target, "transformers")
    refused(target, target, "speculators")


def test_a_head_that_drafts_nothing_right_is_said_to(folder, target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(Path("prompts.jsonl"), ({"prompt": f"def f{i}(line):"} for i in range(4)))
    result = call(f"check {folder} --target {target} --prompt-file prompts.jsonl", code=3)
    assert re.search(r"K = 3\b.*\b4 prompts", " ".join(result.stdout.split()))


@pytest.mark.llamacpp
def test_a_real_llama_server_accepts_what_is_accepted_here(target, tmp_path):
    program = llama_server()
    folder = tmp_path / "head"
    pair = "--target tiny --data stdlib"
    few = "--steps 20 --batch-size 4 --seq-len 128"
    call(f"distill --student eagle {pair} {few} --out {folder}")
    ask = f"{pair} --to gguf --outtype f32 --k 3 --verify-with {program}"
    result = call(f"export {folder} {ask} --out {tmp_path}/out")
    assert "100.00" in result.stdout
