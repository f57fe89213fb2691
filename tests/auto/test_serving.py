"""The choice comes with what serves it, in every server; what is not verified is said, and exported all the same."""

import shutil
from pathlib import Path

import pytest
import torch
from builders import build

from draftlab.config.auto import AutoConfig
from draftlab.model import eagle
from draftlab.pipeline.costs import Machine
from draftlab.pipeline.plan import Plan, PlannedStep, served_by
from draftlab.pipeline.serving import FASTEST, serve, unverified
from draftlab.pipeline.steps import Steps
from draftlab.pipeline.verdict import Candidate

MACHINE = Machine(
    device="cpu", cores=1, dtype="float32", tflops=1, training_dtype="float32", training_tflops=1, slowdown=1,
    gigabytes_per_second=1, free_memory=1, free_disk=1,
)  # fmt: skip
SERVERS = ["vllm", "sglang", "llama.cpp", "transformers"]


@pytest.fixture
def space(tmp_path, monkeypatch, family_dirs):
    """A draft and a head of the small llama; no server is installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    target = family_dirs["llama"]
    build("llama", 1, num_hidden_layers=2).save_pretrained("draft")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(target / name, Path("draft") / name)
    config = eagle.head_config(target, None, 64)
    torch.manual_seed(0)
    weights = {name: 0.02 * torch.randn(size) for name, size in config.sizes().items()}
    head = eagle.Head(config=config, weights=weights, ids=torch.arange(64), embedding=None)
    Path("head").mkdir()
    eagle.write(Path("head"), head, "native", target=target, k=3)
    Path("prompts.jsonl").write_text('{"prompt": "def f(x):"}\n{"prompt": "class A:"}\n')
    return tmp_path


def served(
    target: Path, chosen: Candidate, k_by_streams: dict[int, int] | None = None, **settings: object
) -> tuple[str, list[str]]:
    config = AutoConfig.build({"target": str(target), "out": Path("out"), **settings})
    export = PlannedStep(name="export", command="export", what="", minutes=1, least_minutes=0)
    plan = Plan(
        settings={}, target="", machine=MACHINE, prompts="", candidates=[], left_out={}, layers=[], widths=[],
        first_steps=0, steps=[export],
    )  # fmt: skip
    Path("out").mkdir(exist_ok=True)
    steps = Steps(config=config, plan=plan, folder=Path("out"))
    by_streams = k_by_streams or {1: 3}
    return serve(steps, chosen, 3, scores=[], prompts=Path("prompts.jsonl"), int8=False, k_by_streams=by_streams)


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("kind", ["draft", "eagle", "prompt-lookup"])
def test_every_server_gets_its_export_and_script(kind, server, space, family_dirs):
    if kind not in served_by(server):
        pytest.skip("not tried there")
    draft = {"draft": Path("draft"), "eagle": Path("head"), "prompt-lookup": None}[kind]
    drafter = "" if kind == "draft" else "eagle:heads=head" if kind == "eagle" else "prompt-lookup"
    command, notes = served(family_dirs["llama"], Candidate(kind=kind, draft=draft, drafter=drafter), server=server)
    program, script = command.split()[:2]
    assert Path(script).is_file()
    assert (program, Path(script).name) == (("python", "assist.py") if server == "transformers" else ("sh", "serve.sh"))
    assert f"K = 3: {FASTEST}" in Path(script).read_text()
    assert Path("out/export/README.md").is_file() == (draft is not None)
    assert (notes == []) == (draft is not None)
    if server == "llama.cpp" and draft is not None:
        assert list(Path("out/export").glob("*.gguf"))


def test_drafts_are_chosen_by_the_rule_that_the_script_for_vllm_sets(space, family_dirs):
    target, settings = family_dirs["llama"], {"server": "vllm", "temperature": 0.8}
    rule = AutoConfig.build({"target": str(target), **settings}).rule
    command, _ = served(target, Candidate(kind="draft", draft=Path("draft")), **settings)
    method = {"vllm-probabilistic": "probabilistic", "vllm": "greedy"}[rule]
    assert f"draft_sample_method = {method}, above temperature 0" in Path(command.split()[1]).read_text()
    assert AutoConfig.build({"target": str(target), **settings, "temperature": 0}).rule is None


@pytest.mark.parametrize(
    ("ks", "server", "ranges"),
    [
        ({1: 3, 4: 2, 16: 0}, "vllm", "[[1, 3, 3], [4, 15, 2], [16, 16, 0]]"),
        ({2: 3, 4: 3, 8: 1}, "vllm", "[[1, 7, 3], [8, 8, 1]]"),
        ({1: 3, 4: 3}, "vllm", None),
        ({1: 0, 4: 3}, "vllm", None),
        ({1: 3, 4: 2}, "sglang", None),
    ],
)
def test_k_by_streams_is_in_vllms_script_where_it_differs_and_the_draft_pays_from_one_on(
    ks, server, ranges, space, family_dirs
):
    chosen = Candidate(kind="draft", draft=Path("draft"))
    command, _ = served(family_dirs["llama"], chosen, ks, server=server, streams=",".join(map(str, ks)))
    text = Path(command.split()[1]).read_text()
    assert (f'per_batch_size\\": {ranges}' in text) if ranges else ("per_batch_size" not in text)
    assert "# K = 3: " in text


def test_what_is_not_verified_is_said():
    said = {name: unverified(AutoConfig.build({"target": "tiny", "server": name})) for name in ("sglang", None)}
    assert said == {"sglang": ["not verified in sglang: draftlab starts vllm and llama.cpp only"], None: []}
    program = {"target": "tiny", "server": "vllm", "verify_with": Path("/bin/false")}
    assert unverified(AutoConfig.build(program)) == []


def test_a_server_that_does_not_start_costs_the_verification_only(space, family_dirs):
    chosen = Candidate(kind="draft", draft=Path("draft"))
    settings = {"server": "vllm", "verify_with": Path("/bin/false")}
    command, notes = served(family_dirs["llama"], chosen, **settings)
    assert Path(command.split()[1]).is_file()
    assert len(notes) == 1
    assert notes[0].startswith("not verified in vllm: ")
    assert served(family_dirs["llama"], chosen, **settings) == (
        command,
        ["not verified; remove the export to try again"],
    )


def test_draftlabs_own_engine_gets_a_command(space, family_dirs):
    target = family_dirs["llama"]
    lookup, _ = served(target, Candidate(kind="prompt-lookup", drafter="prompt-lookup"))
    assert lookup == f"draftlab score --target {target} --drafter prompt-lookup --k 3 --prompt-file prompts.jsonl"
    command, _ = served(target, Candidate(kind="draft", draft=Path("draft")))
    assert (
        command
        == f"draftlab score --target {target} --drafter model:draft=out/export --k 3 --prompt-file prompts.jsonl"
    )
    assert Path("out/export/config.json").is_file()
