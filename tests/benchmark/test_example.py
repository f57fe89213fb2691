"""An example is the run's own text: kept and own tokens are the output, and lost ones are what was drafted besides."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from builders import build

from draftlab.benchmark.example import record_example
from draftlab.benchmark.setup import Setup
from draftlab.config.drafters import parse_drafter
from draftlab.engine.drafters.ngram import PromptLookupDrafter
from draftlab.engine.generate import ModelDrafter, decode, output_tokens, speculative_decode
from draftlab.model import checkpoint, hub, llama
from draftlab.provenance import lineage, write_record
from draftlab.sampling import SamplingParams

SAMPLING = {"greedy": SamplingParams(max_tokens=24), "sampled": SamplingParams(max_tokens=24, temperature=1, seed=3)}
VOCAB = 307


def numbers(ids: list[int]) -> str:
    return "".join(f"{i} " for i in ids)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("example")
    target, noisy = build("llama", 1, num_hidden_layers=3), build("llama", 1, num_hidden_layers=3)
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in noisy.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    for name, model in (("target", target), ("draft", noisy)):
        model.save_pretrained(root / name)
    return [llama.load(root / name, torch.float32) for name in ("target", "draft")]


DRAFTERS = {"model": lambda draft: ModelDrafter(draft, VOCAB), "lookup": lambda draft: PromptLookupDrafter(2)}


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("name", DRAFTERS)
def test_an_example_is_the_runs_own_text(models, name, sampling):
    target, draft = models
    prompt, k = [0, 17, 44, 101, 9, 17, 44], 3
    drafter = DRAFTERS[name](draft)
    steps = list(speculative_decode(target, drafter, [prompt], k, sampling, numbers=[2]))
    example = record_example(target, drafter, numbers, prompt, number=2, k=k, sampling=sampling, rule=None)
    text = example.first + "".join("".join(step.kept) + step.own for step in example.steps)
    assert text == numbers(output_tokens(steps)[0])
    assert example.text == numbers(prompt)
    counts = [(len(s.kept), len(s.kept) + len(s.lost)) for s in example.steps]
    assert counts == [(s.accepted, s.drafted) for s in steps[1:]]
    if name != "lookup":  # the random target repeats itself always or never
        assert 0 < sum(kept for kept, _ in counts) < sum(drafted for _, drafted in counts)


def test_lost_tokens_are_not_the_targets(models):
    """Greedy: the first lost token of a chain differs from the target's own at that place."""
    target, draft = models
    example = record_example(
        target, ModelDrafter(draft, VOCAB), numbers, [0, 17, 44], number=0, k=4, sampling=SAMPLING["greedy"], rule=None
    )
    lost = [(step.lost[0], step.own) for step in example.steps if step.lost]
    assert lost
    assert all(first != own for first, own in lost)


def test_characters_of_several_tokens_come_whole():
    directory = hub.locate("tiny")
    tokenizer, target = checkpoint.load_tokenizer(directory), llama.load(directory, torch.float32)
    prompt = tokenizer("# é ü 漢字 🙂\nname = '漢字 🙂 漢字'\nprint('漢字")["input_ids"]
    sampling = SamplingParams(max_tokens=12)

    def as_text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids))

    example = record_example(
        target, PromptLookupDrafter(3), as_text, prompt, number=0, k=4, sampling=sampling, rule=None
    )
    text = example.first + "".join("".join(step.kept) + step.own for step in example.steps)
    (ids,) = output_tokens(decode(target, [prompt], sampling))
    assert (example.text + text).rstrip("\ufffd") == as_text(prompt + ids).rstrip("\ufffd")


def record(directory: Path, command: str, inputs: list[Path], created: str, **notes: object) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(directory.name)
    write_record(directory, command, {"calibration_tokens": 50} if command == "prune" else {}, inputs, 0.0, **notes)
    written = json.loads((directory / "draftlab.json").read_text())
    written |= {"created": created, "seconds": 3.0}
    (directory / "draftlab.json").write_text(json.dumps(written))
    return directory


def test_lineage_is_every_command_but_those_of_the_target(tmp_path):
    target = record(tmp_path / "target", "train", [], "2026-01-01", tokens=10**9)
    source = record(tmp_path / "source", "import", [], "2026-01-01")
    pruned = record(tmp_path / "pruned", "prune", [source], "2026-01-02")
    store = record(tmp_path / "store", "outputs build", [target], "2026-01-03", tokens=700)
    draft = record(tmp_path / "draft", "distill", [pruned, target, store], "2026-01-04", tokens=9, seconds=8.5)
    stages = lineage(draft, target)
    assert stages is not None
    assert [(s.command, s.output, s.seconds, s.tokens) for s in stages] == [
        ("prune", "pruned", 3.0, 50),
        ("outputs build", "store", 3.0, 700),
        ("distill", "draft", 8.5, 9),  # resumed: the steps took longer than the last process
    ]


def write_log(draft: Path, steps: int) -> None:
    evals = [{"step": i, "tokens": 9, "loss": 3.0, "acceptance": 0.5} for i in range(0, steps + 1, 10)]
    taken = [{"step": i, "loss": i / 2, "acceptance": 0.4, "grad_norm": None} for i in range(1, steps + 1)]
    lines = sorted(evals + taken, key=lambda line: (line["step"], "grad_norm" not in line))
    (draft / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("steps", [30, 250, 2500])
def test_a_stage_has_its_curve_in_few_points(tmp_path, steps):
    draft = record(tmp_path / "draft", "distill", [], "2026-01-04")
    write_log(draft, steps)
    (stage,) = lineage(draft, tmp_path) or []
    taken, evals = ([p for p in stage.curve if p.heldout is heldout] for heldout in (False, True))
    each = {30: 1, 250: 3, 2500: 25}[steps]
    assert len(taken) == -(-steps // each) <= 100
    assert taken[0].loss == pytest.approx((each + 1) / 4)  # the mean of 1/2, 2/2, ... each/2
    assert len(evals) <= 101
    assert (evals[0].step, evals[-1].step, taken[-1].step) == (0, steps, steps)
    assert [p.step for p in evals] == sorted({p.step for p in evals})
    assert {p.acceptance for p in evals} == {0.5}


HUGE = json.dumps({"step": 10**400, "loss": 1.0, "acceptance": None}) + "\n"


@pytest.mark.parametrize("text", ["{", "7\n", HUGE, '{"step": 1, "loss": NaN, "acceptance": null}\n', '{"loss": 1}\n'])
def test_a_damaged_log_costs_the_curve_only(tmp_path, text, capsys):
    draft = record(tmp_path / "draft", "distill", [], "2026-01-04")
    (draft / "log.jsonl").write_text(text)
    (stage,) = lineage(draft, tmp_path) or []
    assert stage.curve == []
    assert "log.jsonl is damaged" in capsys.readouterr().err


def test_a_drafter_was_made_by_what_made_all_that_it_reads(tmp_path):
    target = record(tmp_path / "target", "train", [], "2026-01-01")
    draft = record(tmp_path / "draft", "distill", [target], "2026-01-02")
    build("llama").save_pretrained(draft)
    store = record(tmp_path / "store", "outputs build", [target], "2026-01-02")
    head = record(tmp_path / "head", "eagle", [target, store], "2026-01-03")
    foreign = tmp_path / "foreign"
    made = {
        f"eagle:heads={head}": ["outputs build", "eagle"],
        f"eagle:heads={foreign}": None,
        f"ngram:outputs={store}": ["outputs build"],
        f"fallback:draft={draft}": ["distill"],
        f"learnt-fallback:draft={draft},outputs={store}": ["distill", "outputs build"],
        "prompt-lookup": [],
    }
    for text, commands in made.items():
        spec = parse_drafter(text)
        setup = cast(Any, SimpleNamespace(drafters=[spec], drafts={}, default_draft=None, target=target))
        stages = Setup.made(setup, spec.name)
        assert (stages and [stage.command for stage in stages]) == commands, text


def test_what_was_rewritten_since_is_not_counted(tmp_path):
    target = record(tmp_path / "target", "train", [], "2026-01-01")
    pruned = record(tmp_path / "pruned", "prune", [target], "2026-01-05")
    draft = record(tmp_path / "draft", "distill", [pruned, target], "2026-01-04", tokens=9)
    stages = lineage(draft, target)
    assert stages is not None
    assert [s.command for s in stages] == ["distill"]
    assert lineage(tmp_path, target) is None
