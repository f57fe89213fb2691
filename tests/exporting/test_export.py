"""What an exported draft holds is the draft: tensors, words and numbers, read back by other people's code."""

import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf as library
import numpy as np
import pytest
import torch
from helpers.builders import build, logits_by_transformers
from helpers.errors import raises_option
from helpers.gguf_files import contents, neighbours_apart
from helpers.real_llama_cpp import llama_server
from helpers.sentencepiece_files import sentencepiece_fixture  # noqa: F401
from helpers.small_files import copy_tokenizer, edit, write_functions, write_workspace
from helpers.typed import call
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import Result

from draftlab.engine.generate import ModelDrafter, decode, output_tokens, speculative_decode
from draftlab.engine.verify import rule_named
from draftlab.errors import UserError
from draftlab.exporting import gguf, gguf_tokenizer, hf, run, verify
from draftlab.exporting.artifact import DraftModel, Form, open_artifact
from draftlab.exporting.card import history
from draftlab.exporting.verify import running
from draftlab.intervals import Interval
from draftlab.model import checkpoint, llama
from draftlab.model.checkpoint import Checkpoint
from draftlab.registry import SERVERS
from draftlab.results.score import read_score
from draftlab.runs import provenance, workspace
from draftlab.sampling import SamplingParams
from draftlab.servers.kinds import DEFAULT_SAMPLING, Launch
from draftlab.training.vocabulary import resize

SHORT = "--mode eager --num-prompts 2 --prompt-tokens 8 --max-new-tokens 6 --repeats 1"  # a small score
GGUF_FAMILIES = [
    "llama",
    "llama_mha",
    "llama3_tied",
    "llama_biases",
    "mistral",
    "qwen2",
    "qwen2_tied",
    "qwen3",
    "olmo2",
    "granite",
]


def written(source: Path, folder: Path, kind: str = "f32") -> tuple[dict[str, Any], dict[str, Any]]:
    """Write a model as a GGUF file, a.gguf in the folder; return its fields and tensors."""
    gguf.write(source, folder / "a.gguf", kind)
    return contents(folder / "a.gguf")


def reloaded(source: Path, folder: Path):
    """Return the transformers model with the tensors of its GGUF file."""
    fields, tensors = written(source, folder)
    turned = fields["general.architecture"] in ("llama", "granite")
    post_norm = "post_attention_norm" if fields["general.architecture"] == "olmo2" else "ffn_norm"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    heads = model.config.num_key_value_heads, model.config.num_attention_heads
    for name, parameter in model.named_parameters():
        short = (
            name.replace("model.layers.", "blk.")
            .replace("self_attn.q_norm", "attn_q_norm")
            .replace("self_attn.k_norm", "attn_k_norm")
            .replace("self_attn.o_proj", "attn_output")
            .replace("self_attn.", "attn_")
            .replace("mlp.", "ffn_")
            .replace("_proj", "")
            .replace("input_layernorm", "attn_norm")
            .replace("post_attention_layernorm", post_norm)
            .replace("post_feedforward_layernorm", "post_ffw_norm")
            .replace("model.embed_tokens", "token_embd")
            .replace("model.norm", "output_norm")
            .replace("lm_head", "output")
        )
        tensor = tensors.pop(short)
        if turned and ("attn_q." in short or "attn_k." in short):
            tensor = neighbours_apart(tensor, parameter.shape[0] // heads["attn_q." in short])
        parameter.data.copy_(tensor)
    assert set(tensors) <= {"rope_freqs.weight"}
    return model.eval()


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_the_model_in_a_file_is_the_model(family, family_dirs, tmp_path):
    ids = torch.randint(0, 300, (2, 12), generator=torch.Generator().manual_seed(0))
    wanted = logits_by_transformers(family_dirs[family], ids)
    with torch.no_grad():
        found = reloaded(family_dirs[family], tmp_path)(ids).logits
    torch.testing.assert_close(found, wanted)


def test_settings_are_the_configs(family_dirs, tmp_path):
    fields, _ = written(family_dirs["llama"], tmp_path, "q8_0")
    wanted = {
        "general.architecture": "llama",
        "general.file_type": 7,
        "llama.context_length": 256,
        "llama.embedding_length": 64,
        "llama.block_count": 5,
        "llama.feed_forward_length": 88,
        "llama.attention.head_count": 8,
        "llama.attention.head_count_kv": 4,
        "llama.attention.key_length": 12,
        "llama.attention.value_length": 12,
        "llama.rope.dimension_count": 12,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": 307,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    }
    assert {name: fields[name] for name in wanted} == wanted
    assert fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)


def test_llama_3s_rotary_scaling_is_llama_cpps(family_dirs, tmp_path):
    """convert_hf_to_gguf.py of llama-cpp-python 0.3.36 on the same checkpoint."""
    _, tensors = written(family_dirs["llama3_tied"], tmp_path)
    file = Path(__file__).parents[1] / "files/llama_cpp_rope_freqs.json"
    golden = json.loads(file.read_text())
    assert tensors["rope_freqs.weight"].tolist() == pytest.approx(golden, rel=1e-6)


@pytest.mark.parametrize(("kind", "worst"), [("f16", 5e-4), ("bf16", 4e-3), ("q8_0", 4e-3), ("q4_0", 0.126)])
def test_types_round_as_much_as_they_may(kind, worst):
    """Relative to the largest of each block of 32; Q4_0 ends at 7 / 8 of it on one side."""
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    apart = (gguf.fake_quantize(weight, kind) - weight).abs().unflatten(1, (-1, 32)).amax(-1)
    assert float((apart / weight.abs().unflatten(1, (-1, 32)).amax(-1)).max()) < worst
    # rows that do not divide stay
    assert gguf.fake_quantize(weight[:, :40], "q8_0").equal(weight[:, :40])


def test_matrices_whose_rows_do_not_divide_stay_wide_and_vectors_whole(family_dirs, tmp_path):
    told = gguf.write(family_dirs["llama"], tmp_path / "a.gguf", "q8_0")
    kinds = {t.name: t.tensor_type.name for t in library.GGUFReader(tmp_path / "a.gguf").tensors}
    assert told.unquantized == [f"blk.{i}.ffn_down.weight" for i in range(5)]
    assert {kinds[name] for name in told.unquantized} == {"F16"}
    assert kinds["blk.0.attn_q.weight"] == "Q8_0"
    assert {kind for name, kind in kinds.items() if "norm" in name} == {"F32"}


def test_what_llama_cpp_does_not_know_is_refused(family_dirs, tmp_path):
    shutil.copytree(family_dirs["llama"], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    for name, value in {"model_type": "opt", "hidden_act": "gelu"}.items():
        (tmp_path / "config.json").write_text(json.dumps(config | {name: value}))
        with raises_option(value):
            gguf.architecture(tmp_path)
    inner = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(tmp_path)
    with raises_option("WordLevel"):
        gguf_tokenizer.read_tokenizer(tmp_path, 2)


def test_words_of_a_byte_level_vocabulary(family_dirs):
    found = gguf_tokenizer.read_tokenizer(family_dirs["llama"], 310)
    tokenizer = checkpoint.load_tokenizer(family_dirs["llama"])
    assert found.tokens[:307] == tokenizer.convert_ids_to_tokens(range(307))
    assert found.tokens[307:] == ["[PAD307]", "[PAD308]", "[PAD309]"]
    control, normal, unused = (getattr(gguf_tokenizer, n) for n in ("CONTROL", "NORMAL", "UNUSED"))
    assert found.types == [control] * 3 + [normal] * 304 + [unused] * 3
    assert found.pre in gguf_tokenizer.PRE_TOKENIZERS
    assert 0 < found.match < 1
    spec = json.loads((family_dirs["llama"] / "tokenizer.json").read_text())
    assert found.merges == [" ".join(pair) for pair in spec["model"]["merges"]]
    assert (found.add_bos, found.add_eos, found.scores) == (True, False, None)
    with raises_option("306", "200"):
        gguf_tokenizer.read_tokenizer(family_dirs["llama"], 200)


def by_scores(text: str, found: gguf_tokenizer.GGUFTokenizer) -> list[int]:
    """SentencePiece's way: of neighbours that make a token those with the highest score merge, the first of equals."""
    ids = {token: i for i, token in enumerate(found.tokens)}
    parts = list(text)
    while pairs := [(found.scores[ids[a + b]], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids]:
        i = -max(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    pieces = ([p] if p in ids else [f"<0x{b:02X}>" for b in p.encode()] for p in parts)
    return [ids[piece] for each in pieces for piece in each]


def test_scores_merge_as_the_list_of_merges_does(sentencepiece):
    found = gguf_tokenizer.read_tokenizer(sentencepiece, 290)
    tokenizer = checkpoint.load_tokenizer(sentencepiece)
    assert (found.model, found.pre, found.merges) == ("llama", "default", None)
    for text in ("the hen ate in the inn", "then the tin hut", "her theme é"):
        wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert by_scores("▁" + text.replace(" ", "▁"), found) == wanted
    unknown, control, byte = (getattr(gguf_tokenizer, n) for n in ("UNKNOWN", "CONTROL", "BYTE"))
    assert found.types[:4] == [unknown, control, control, byte]


@pytest.fixture
def space(tmp_path, monkeypatch, family_dirs) -> Path:
    """Return a workspace with a draft, the small llama cut to two layers, and its target."""
    monkeypatch.chdir(tmp_path)
    write_workspace(family_dirs["llama"], write_functions(tmp_path / "text.txt", 80, 60))
    build("llama", 1, num_hidden_layers=2, num_key_value_heads=2).save_pretrained("draft")
    copy_tokenizer(family_dirs["llama"], tmp_path / "draft")
    return tmp_path


def export(options: str, code: int = 0) -> Result:
    return call(f"export draft {options}", code=code)


def test_a_directory_is_the_draft_at_the_targets_size_and_dtype(space, family_dirs):
    shutil.copytree(family_dirs["llama"], "wide")
    resize(Path("wide"), 320)
    export("--target wide --dtype bfloat16 --out out")
    assert checkpoint.vocab_size(Path("out")) == 320
    made, source = checkpoint.Weights(Path("out")), checkpoint.Weights(Path("draft"))
    for name, tensor in source.items():
        assert made[name][: len(tensor)].equal(tensor.bfloat16())
    assert json.loads(Path("out/draftlab.json").read_text())["notes"]["changed"] == [
        "weights from float32 to bfloat16",
        "logits 307 -> 320",
    ]


@pytest.mark.parametrize("runtime", ["vllm", "sglang", "llama.cpp"])
def test_a_script_starts_the_runtime_with_the_draft_beside_it(runtime, space):
    """Run by sh, with a program of the runtime's name that says what it was called with."""
    shown = call(f"export draft --to {runtime} --k 3 --out", "a folder").stdout
    for name in ("vllm", "python", "llama-server"):
        Path(name).write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
        Path(name).chmod(0o755)
    target = ["t.gguf"] if runtime == "llama.cpp" else []
    command = ["/bin/sh", "a folder/serve.sh", *target, "--port", "1"]
    path = {"PATH": f"{space}:/usr/bin:/bin"}
    words = subprocess.run(command, env=path, capture_output=True, text=True, check=True).stdout.splitlines()
    told = dict(pairwise(words))
    assert told["--port"] == "1"
    place = str(space / "a folder")
    if runtime == "vllm":
        config = json.loads(told["--speculative-config"])
        asked = {"method": "draft_model", "model": place, "num_speculative_tokens": 3}
        assert config == asked | {"draft_sample_method": "probabilistic"}
        (options,) = (line for line in shown.splitlines() if line.startswith("or add to your own command: "))
        *_, flag, value = shlex.split(options)
        assert (flag, json.loads(value)) == ("--speculative-config", config)
    elif runtime == "sglang":
        assert told["--speculative-draft-model-path"] == place
        assert told["--speculative-num-draft-tokens"] == "4"
    else:
        assert told["--spec-draft-model"] == f"{place}/draft-f16.gguf"
        assert told["--model"] == "t.gguf"
        assert (told["--spec-type"], told["-np"]) == ("draft-simple", "1")


def test_export_script_and_card_say_that_the_draft_reads_less_than_the_target(space):
    """vllm#57941: the draft's context limits where it drafts."""
    edit(Path("draft/config.json"), max_position_embeddings=64)
    for runtime, script in (("vllm", "serve.sh"), ("transformers", "assist.py")):
        result = export(f"--to {runtime} --k 3 --out {runtime}")
        text = (Path(runtime) / script).read_text()
        for said in (result.stdout, text, Path(runtime, "README.md").read_text()):
            assert "the draft reads up to 64 tokens" in " ".join(said.split())
    Path("vllm/vllm").write_text("#!/bin/sh\n")
    Path("vllm/vllm").chmod(0o755)
    path = {"PATH": f"{space}/vllm:/usr/bin:/bin"}
    ran = subprocess.run(["/bin/sh", "vllm/serve.sh"], env=path, capture_output=True, text=True)
    assert "64 tokens" in ran.stderr


@pytest.mark.parametrize("out", ['a"b', "a\\b", "a\nb"])
def test_a_script_does_not_start_from_a_path_that_its_config_cannot_hold(out, space):
    call("export draft --to vllm --k 3 --out", out)
    said = subprocess.run(["/bin/sh", f"{out}/serve.sh"], capture_output=True, text=True)
    assert said.returncode == 1
    assert said.stderr.startswith("move this folder")


def test_the_script_for_transformers_decodes_as_the_target_alone(space, family_dirs, capsys, monkeypatch):
    export("--to transformers --k 2 --out out")
    monkeypatch.setattr(sys, "argv", ["assist.py", "def f"])
    runpy.run_path("out/assist.py")
    tokenizer = checkpoint.load_tokenizer(family_dirs["llama"])
    model = AutoModelForCausalLM.from_pretrained(family_dirs["llama"])
    ids = tokenizer("def f", return_tensors="pt")["input_ids"]
    alone = tokenizer.decode(model.generate(ids, max_new_tokens=64, do_sample=False)[0])
    assert capsys.readouterr().out.strip() == alone.strip()


def test_a_card_tells_what_was_measured_and_how_the_draft_was_made(space):
    call(f"score --draft draft --k 1,2 {SHORT}")
    export("--to vllm --out out")
    text = Path("out/README.md").read_text()
    score = read_score(next(Path("runs").rglob("score.json")))
    assert score.headline() in " ".join(text.split())
    assert f'\\"num_speculative_tokens\\": {score.best_k}' in Path("out/serve.sh").read_text()


def test_a_file_that_is_no_score_counts_only_where_it_is_named(space):
    """In the folder of runs it may be of another version. It costs the export a note, and not the other scores."""
    call(f"score --draft draft --k 1,2 {SHORT}")
    (file,) = Path("runs").rglob("score.json")
    foreign = Path("runs/another/score.json")
    foreign.parent.mkdir()
    foreign.write_text("{}")
    assert str(foreign) in export("--to vllm --out out").stderr
    assert read_score(file).headline() in " ".join(Path("out/README.md").read_text().split())
    export(f"--to vllm --scores {foreign} --out named", code=1)


def test_a_card_has_no_folder_of_this_machine_and_each_step_once(space):
    """Source and target of a draft come from one file, whose import both records name."""
    shutil.copytree("draft", "imported")
    file = Path("model.gguf").absolute()
    provenance.write_record(
        Path("imported"),
        "import",
        {"source": str(file)},
        {},
        0.0,
        command_line=f"draftlab import --out imported {file}",
    )
    shutil.copytree("draft", "made")
    line = "draftlab distill --out made"
    inputs = dict.fromkeys(["imported", str(Path("imported").absolute())], "")
    provenance.write_record(Path("made"), "distill", {}, inputs, 0.0, command_line=line)
    call("export made --target imported --to vllm --out out")
    card = Path("out/README.md").read_text()
    assert str(Path.cwd()) not in card
    assert card.startswith("---\nbase_model: imported\n")
    made = card.partition("## How it was made")[2].splitlines()
    commands = [each for each in made if each.startswith("draftlab")]
    assert commands == ["draftlab import --out imported model.gguf", line]
    assert str(Path("imported").absolute()) in Path("out/serve.sh").read_text()


def test_steps_of_a_parallel_chain_by_hand():
    """A token counts by the offset that it is drafted with."""
    hit = np.array([[1, 1, 1], [1, 1, 1], [1, 0, 1], [1, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]], dtype=bool)
    # 1 stands, 2 falls as the second of its step and is the target's own; 3 stands, 4 as the second, 5 as the third
    assert verify.greedy_steps(hit, 3, 6) == (6, 2)


def script_of(server: str, **launch: Any) -> tuple[str, str]:
    return SERVERS.get(server, "--to").script(Launch(**{"target": "t", "reason": "", "k": 6} | launch))


@pytest.mark.parametrize(
    ("kind", "runtime", "words"),
    [
        ("prompt lookup", "vllm", '\\"method\\": \\"ngram\\", \\"num_speculative_tokens\\": 6'),
        ("prompt lookup", "llama.cpp", "--spec-type ngram-simple"),
        ("prompt lookup", "transformers", "prompt_lookup_num_tokens=6, max_matching_ngram_size=3"),
        ("parallel draft", "vllm", '\\"parallel_drafting\\": true'),
        ("parallel draft", "tensorrt-llm", "decoding_type: PARD"),
        ("EAGLE-3 head", "vllm", '\\"method\\": \\"eagle3\\"'),
        ("EAGLE-3 head", "sglang", "--speculative-algorithm EAGLE3"),
        ("EAGLE-3 head", "llama.cpp", "--spec-type draft-eagle3"),
        ("EAGLE-3 head", "tensorrt-llm", "eagle3_layers_to_capture: [1, 7, 12]"),
    ],
)
def test_a_script_starts_a_server_with_the_kind_of_draft(kind, runtime, words):
    layers = (2, 8, 13) if kind == "EAGLE-3 head" else ()
    file, text = script_of(runtime, kind=kind, layer_ids=layers)
    assert words in text
    assert words not in script_of(runtime)[1]
    if file.endswith(".py"):
        compile(text, file, "exec")


def ranks_of(draft: Path, writing: verify.TargetTexts, target: Path | None = None) -> list[np.ndarray]:
    """Return which tokens of each text are the draft's most probable tokens."""
    artifact = DraftModel(draft, Checkpoint(target or draft))
    scores = artifact.scores(draft, Form(to="hf"), writing, torch.device("cpu"))
    return [scored.ranks == 0 for scored in scores]


def texts_of(
    prompts: list[list[int]], answers: list[list[int]], k: int, temperature: float = 0.0
) -> verify.TargetTexts:
    lengths = [*map(len, answers)]
    return verify.TargetTexts(prompts=prompts, completions=answers, tokens=lengths, k=k, temperature=temperature)


def target_and_draft(family: Path) -> tuple[llama.Llama, llama.Llama]:
    """Write a target, and a draft that agrees with it now and then; return both."""
    model: Any = build("llama", 1, num_hidden_layers=2)
    for folder, scale in (("target", 12), ("draft", 1.2)):
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(scale)
            model.model.layers[0].mlp.down_proj.weight.mul_(scale)
        model.save_pretrained(folder)
        copy_tokenizer(family, Path(folder))
    target, draft = (llama.load(Path(folder), torch.float32) for folder in ("target", "draft"))
    return target, draft


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_a_sampled_text_tells_the_steps_that_made_it(space, family_dirs, rule):
    """A server that lets the draft's most probable token stand with the target's probability, by either rule."""
    target, draft = target_and_draft(family_dirs["llama"])
    prompts, how = [[0, 17, 44], [0, 5, 250, 31]], SamplingParams(max_tokens=24, temperature=1.0)
    by = {"rule": rule_named(rule), "draft_sampling": replace(how, temperature=0.0)}
    live = list(speculative_decode(target, ModelDrafter(draft), prompts, 3, how, **by))
    served = texts_of(prompts, output_tokens(live), 3, 1.0)
    counts = verify.count_steps(ranks_of(Path("draft"), served, Path("target")), served)
    for row, (tokens, steps) in enumerate(counts):
        assert steps == len([step for step in live if step.row == row]) - 1
        assert 23 <= tokens <= 24
    assert counts[:, 0].sum() > counts[:, 1].sum()


@pytest.mark.parametrize("k", [1, 3])
def test_steps_that_are_certain_are_expected_as_they_are(k):
    """The last step of a text is cut, is whole, or has accepted all of its draft."""
    hits = [np.random.default_rng(seed).random((seed % 9 + 1, k)) < 0.7 for seed in range(60)]
    texts = verify.TargetTexts(
        prompts=[[1]] * 60, completions=[[1] * len(h) for h in hits], tokens=[*map(len, hits)], k=k
    )
    for rows in (hits, [row[:, 0] for row in hits]):
        expected = verify.expected_steps(rows, k)
        counts = np.stack([expected.tokens + expected.truncated, expected.steps], 1)
        np.testing.assert_allclose(counts, verify.count_steps(rows, texts))


def test_a_server_whose_draft_samples_takes_as_many_steps_as_expected(space, family_dirs):
    """Over many texts, within five standard errors; as a greedy draft would is another number."""
    target, draft = target_and_draft(family_dirs["llama"])
    prompts, how = [[0, 17, 44]] * 200, SamplingParams(max_tokens=24, temperature=0.8)
    live = list(speculative_decode(target, ModelDrafter(draft), prompts, 3, how))
    served = texts_of(prompts, output_tokens(live), 3, 0.8)
    artifact = open_artifact(Path("draft"), Checkpoint(Path("target")))
    scores = artifact.scores(Path("draft"), Form(to="vllm"), served, torch.device("cpu"))
    chances = verify.chances_of(scores, served, target, 307)
    counts = verify.counts_of(SERVERS.get("vllm", "--to"), chances, served)
    taken = np.bincount([step.row for step in live]) - 1

    def error(rows: np.ndarray) -> float:
        differences = taken - rows[:, 1]
        return abs(differences.mean()) / (differences.std(ddof=1) / len(differences) ** 0.5)

    assert error(counts["probabilistic"]) < 5 < error(counts["greedy"])


def test_a_script_drafts_above_temperature_0_as_more_is_accepted():
    """The acceptance is what draftlab counts in the texts of the verification, else a default."""

    def verified(**lengths: float) -> verify.Verification:
        by_method: Any = {name: Interval(value=n, low=n, high=n, n=2) for name, n in lengths.items()}
        return verify.Verification(
            runtime="vLLM",
            k=3,
            temperature=0.7,
            texts=2,
            measured=1.5,
            expected=by_method["greedy"],
            method="greedy",
            by_method=by_method,
            there=[],
            here=[],
        )

    for lengths, best in (((1.5, 1.25), "greedy"), ((1.25, 1.5), "probabilistic")):
        found = verified(greedy=lengths[0], probabilistic=lengths[1])
        text = script_of("vllm", k=3, sampling=run.choose_sampling(False, found))[1]
        assert f"draft_sample_method = {best}" in text
    assert run.choose_sampling(False, verified(greedy=1.5)) == DEFAULT_SAMPLING


def test_greedy_answers_are_continued_as_the_target_would(family_dirs):
    model = llama.load(family_dirs["llama"], torch.float32)
    prompts = [[0, 17, 44], [0, 5, 250, 31]]
    answers = output_tokens(decode(model, prompts, SamplingParams(max_tokens=12)))
    whole = output_tokens(decode(model, prompts, SamplingParams(max_tokens=15)))
    found = verify.extended(texts_of(prompts, answers, 3), model)
    assert (found.completions, found.tokens) == (whole, [12, 12])


def test_a_program_that_is_no_server_is_refused(tmp_path):
    false = shutil.which("false")
    with raises_option("start"), running([false]):
        pass
    with pytest.raises(UserError), running([tmp_path / "none"]):
        pass


def test_a_rounded_draft_is_a_row_of_its_own_in_a_score(space):
    call(f"score --draft draft --draft draft@q4_0 --k 1 {SHORT} --out scored")
    plain, rounded = (read_score(Path("scored") / name) for name in ("draft", "draft@q4_0"))
    assert (plain.draft.name, rounded.draft.name) == ("draft", "draft@q4_0")
    assert plain.draft.sha256 != rounded.draft.sha256
    inputs = json.loads(Path("scored/draftlab.json").read_text())["inputs"]
    assert inputs.keys() == {workspace.load().target, "draft", workspace.load().data}


def test_rounded_weights_are_the_files(family_dirs, tmp_path):
    """The weights of DRAFT@q8_0 are those that llama.cpp reads in the GGUF."""
    _, held = written(family_dirs["qwen3"], tmp_path, "q8_0")
    with hf.as_quantized(family_dirs["qwen3"], "q8_0") as rounded:
        mine = checkpoint.Weights(rounded)["model.layers.1.self_attn.k_proj.weight"]
    torch.testing.assert_close(mine, held["blk.1.attn_k.weight"], rtol=0, atol=0)


@pytest.mark.llamacpp
@pytest.mark.parametrize("family", [*GGUF_FAMILIES, "qwen2 with heads of 8"])
def test_a_real_llama_cpp_finds_the_same_tokens_most_probable(family, family_dirs, tmp_path):
    program = llama_server()
    model = family_dirs.get(family, tmp_path / "model")
    if family not in family_dirs:
        shutil.copytree(family_dirs["qwen2"], model)
        build("qwen2", head_dim=8).save_pretrained(model)
    gguf.write(model, tmp_path / "a.gguf", "f32")
    rows = np.random.default_rng(0).integers(3, 300, (6, 20)).tolist()
    source = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    how = SamplingParams(max_tokens=12, ignore_eos=True)
    with running([program, "--model", tmp_path / "a.gguf", "--flash-attn", "off", "--threads", 1]) as (client, _):
        written = [client.generate_ids(row, how)[0] for row in rows]
    for row, ids in zip(rows, written, strict=True):
        with torch.no_grad():
            logits = source(torch.tensor([row + ids])).logits[0, len(row) - 1 : -1]
        logits[:, source.config.eos_token_id] = -torch.inf  # as ignore_eos has it
        chosen = logits.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
        # llama.cpp keeps its cache in f16
        assert ((logits.amax(1) - chosen) < 0.02 * logits[:, 2:].std()).all()


@pytest.mark.vllm
@pytest.mark.parametrize("sampling", ["", "--temperature 0.7"])
def test_a_real_vllm_accepts_what_is_accepted_here(space, family_dirs, sampling):
    """The draft is the first layers of the embedded target: some tokens stand, and some do not."""
    program = os.environ.get("DRAFTLAB_TEST_VLLM")
    if program is None:
        pytest.skip("DRAFTLAB_TEST_VLLM does not name a vllm binary")
    call("prune --source tiny --layers 8 --data stdlib --calibration-tokens 4096 --out cut")
    export = f"export cut --to vllm --target tiny --data stdlib --out out --verify-with {program}"
    assert "draftlab" in call(f"{export} {sampling}").stdout


def test_values_beyond_those_of_a_type_are_refused(family_dirs, tmp_path):
    model = shutil.copytree(family_dirs["llama"], tmp_path / "model")
    weights = dict(checkpoint.Weights(model))
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e5
    save_file(weights, model / "model.safetensors")
    with raises_option("--outtype f16", "mlp.up_proj"):
        gguf.write(model, tmp_path / "a.gguf", "f16")
    gguf.write(model, tmp_path / "b.gguf", "f32")


RECORD = {
    "command": "distill",
    "config": {},
    "versions": {},
    "created": "2026-01-01",
    "seconds": 1,
    "peak_memory_bytes": 1,
}


@pytest.mark.parametrize(
    ("inputs", "notes"),
    [
        ({"dr": "x"}, {}),  # names itself
        ({"other": "x"}, {}),  # names an output that names this one
        ({}, {"command_line": "draftlab distill 'x"}),
        ({}, {"before": {}, "after": {"acceptance": 0.5}}),
        ({}, {"before": {"acceptance": "high"}, "after": {"acceptance": []}}),
    ],
)
def test_records_of_others_end_in_a_card(inputs, notes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, named in (("dr", inputs), ("other", {"dr": "x"})):
        record = RECORD | {"inputs": named, "notes": notes}
        Path(name).mkdir()
        (Path(name) / "draftlab.json").write_text(json.dumps(record))
    commands, heldout = history(Path("dr"))
    assert commands == ([] if "command_line" in notes else ["draftlab distill"])
    assert heldout is None
