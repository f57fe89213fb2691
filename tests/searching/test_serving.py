"""The choice comes with what serves it, in every server; what is not verified is said, and exported all the same."""

from pathlib import Path

import pytest
from helpers.builders import build
from helpers.published_heads import written
from helpers.small_files import copy_tokenizer, write_prompts

from draftlab.commands.settings.auto import AutoConfig
from draftlab.commands.steps import step_of
from draftlab.heads.eagle3.drafter import EagleSpec
from draftlab.model.size import read_size
from draftlab.searching.plan import Request, lookup_by_device, lookup_of, served_by
from draftlab.searching.prompts import PromptSplit
from draftlab.searching.schedule import StepRunner
from draftlab.searching.verdict import Arm, serve

SERVERS = ["vllm", "sglang", "llama.cpp", "transformers"]


@pytest.fixture
def space(tmp_path, monkeypatch, family_dirs):
    """Return a draft and a head of the small llama; no server is installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    target = family_dirs["llama"]
    build("llama", 1, num_hidden_layers=2).save_pretrained("draft")
    copy_tokenizer(target, Path("draft"))
    written(Path("head"), target)
    Path("out/prompts").mkdir(parents=True)
    write_prompts(Path("out/prompts/measure.jsonl"), 2)
    return tmp_path


def request_of(target: Path, server: str | None = None, program: Path | None = None, temperature: float = 0) -> Request:
    return Request(
        name=str(target),
        target=target,
        size=read_size(target),
        server=server,
        streams=[1],
        temperature=temperature,
        prompts=PromptSplit(about="", rows=[], data=None, choose=1, measure=1),
        program=program,
    )


def served(target: Path, chosen: Arm, **wanted: object) -> tuple[str, list[str]]:
    steps = StepRunner(folder=Path("out"), make=lambda name, settings: step_of(name, settings, {}, "auto"))
    request = request_of(target, **wanted)
    return serve(request, steps, chosen, k=3, int8=False, scores=Path("out/score"))


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("kind", ["draft", "eagle", "prompt-lookup"])
def test_every_server_gets_its_export_and_script(kind, server, space, family_dirs):
    if kind not in served_by(server):
        pytest.skip("not tried there")
    draft, drafter = {
        "draft": (Path("draft"), None),
        "eagle": (Path("head"), EagleSpec.of(heads="head")),
        "prompt-lookup": (None, lookup_of(server, "cpu")),
    }[kind]
    chosen = Arm(kind=kind, draft=draft, drafter=drafter)
    command, notes = served(family_dirs["llama"], chosen, server=server)
    program, script = command.split()[:2]
    wanted = ("python", "assist.py") if server == "transformers" else ("sh", "serve.sh")
    assert (program, Path(script).name) == wanted
    assert "K = 3: " in Path(script).read_text()
    assert Path("out/export/README.md").is_file() == (draft is not None)
    assert (notes == []) == (draft is not None)
    if server == "llama.cpp" and draft is not None:
        assert list(Path("out/export").glob("*.gguf"))


def test_the_lookup_that_depends_on_the_device_is_said():
    for device in ("cpu", "cuda"):
        (said,) = lookup_by_device("vllm", device)
        lookup = lookup_of("vllm", device)
        assert lookup is not None
        assert lookup.text in said
        assert f"--device is {device}" in said
    assert lookup_by_device("llama.cpp", "cpu") == lookup_by_device(None, "cpu") == []


def test_drafts_are_chosen_by_the_rule_that_the_script_for_vllm_sets(space, family_dirs):
    target = family_dirs["llama"]
    config = AutoConfig.build({"target": str(target), "server": "vllm", "temperature": 0.8})
    chosen = Arm(kind="draft", draft=Path("draft"))
    command, _ = served(target, chosen, server="vllm", temperature=0.8)
    method = {"vllm": "probabilistic", "vllm-greedy": "greedy"}[str(config.sampled_rule)]
    assert f"draft_sample_method = {method}" in Path(command.split()[1]).read_text()
    assert config.model_copy(update={"temperature": 0.0}).sampled_rule is None


def test_a_server_that_does_not_start_costs_the_verification_only(space, family_dirs):
    chosen = Arm(kind="draft", draft=Path("draft"))
    settings = {"server": "vllm", "program": Path("/bin/false")}
    command, notes = served(family_dirs["llama"], chosen, **settings)
    assert Path(command.split()[1]).is_file()
    assert len(notes) == 1
    assert served(family_dirs["llama"], chosen, **settings)[0] == command
