"""check --server: what differs between a running server and the same draft here is named, and nothing else is."""

import copy
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.dflash_heads import NATIVE, written
from helpers.errors import raises_option
from helpers.loopback_servers import SmallVLLM, running
from helpers.small_files import with_template, write_prompts
from tokenizers import pre_tokenizers

from draftlab.commands import COMMANDS
from draftlab.exporting import verify
from draftlab.intervals import FEWEST
from draftlab.model import checkpoint
from draftlab.runs.provenance import read_record
from draftlab.servers.client import Server
from draftlab.servers.kinds import Finding


@pytest.fixture(scope="module")
def target(family_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a target with a chat template."""
    return with_template(family_dirs["llama"], tmp_path_factory.mktemp("served") / "target")


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the target with noise, which it accepts now and then."""
    folder = tmp_path_factory.mktemp("served") / "draft"
    shutil.copytree(target, folder)
    noisy(checkpoint.load_model(target, torch.float32), 0.01).save_pretrained(folder)
    return folder


def noisy(model: Any, noise: float) -> Any:
    torch.manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * noise)
    return model.eval()


def served(target: Path, place: Path | None, **changes: Any) -> SmallVLLM:
    def load(path: Path) -> Any:
        return checkpoint.load_model(path, torch.float32).eval()

    whole: dict[str, Any] = {
        "model": load(target),
        "tokenizer": checkpoint.load_tokenizer(target),
        "stops": frozenset(),
        "draft": None if place is None else load(place),
        "longest": 256,
    }
    return SmallVLLM(**whole | changes)


def compared(answering: SmallVLLM, target: Path, draft: Path, **more: Any) -> list[Finding]:
    """Return the findings on the layers of serving."""
    prompts = write_prompts(draft.parent / "prompts.jsonl", 6)
    asked = {"draft": str(draft), "target": str(target), "prompt_file": prompts, "servers": "vllm"}
    with running(answering) as url:
        found = COMMANDS["check"](**asked, server=url, **more).result.findings
    return found[[finding.about for finding in found].index("server") :]


def levels(answering: SmallVLLM, target: Path, draft: Path) -> Mapping[str, str]:
    """Return the level of each layer of serving, by its name."""
    return {finding.about: finding.level for finding in compared(answering, target, draft)}


def test_nothing_differs_from_a_server_of_the_same_draft(target, draft):
    found = levels(served(target, draft), target, draft)
    assert set(found.values()) == {"ok"}
    assert found.keys() == {
        "server",
        "tokenizer",
        "chat template",
        "context",
        "target",
        "precision",
        "acceptance",
    }


def test_another_draft_is_an_acceptance_that_differs(target, draft):
    other = served(target, None, draft=noisy(checkpoint.load_model(target, torch.float32), 0.2))
    found = levels(other, target, draft)
    assert [about for about, level in found.items() if level == "error"] == ["acceptance"]


def test_another_target_is_named_by_its_tokens_and_probabilities(target, draft):
    other = served(target, draft, model=noisy(checkpoint.load_model(target, torch.float32), 0.1))
    found = levels(other, target, draft)
    assert (found["target"], found["precision"], found["tokenizer"]) == ("error", "error", "ok")


def test_another_template_or_context_is_named(target, draft):
    tokenizer = copy.deepcopy(checkpoint.load_tokenizer(target))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    found = levels(served(target, draft, tokenizer=tokenizer, longest=4096), target, draft)
    assert (found["chat template"], found["context"]) == ("error", "warning")
    assert found["acceptance"] == "ok"


def test_another_tokenizer_is_named_and_the_other_layers_are_compared(target, draft):
    """llama.cpp splits text by the nearest rule that it knows."""
    tokenizer = copy.deepcopy(checkpoint.load_tokenizer(target))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    found = levels(served(target, draft, tokenizer=tokenizer), target, draft)
    assert (found["tokenizer"], found["target"], found["acceptance"]) == ("error", "ok", "ok")


def test_a_server_without_a_draft_is_told(target, draft):
    assert levels(served(target, None), target, draft)["acceptance"] == "error"


def test_other_requests_at_the_same_time_end_the_comparison(target, draft):
    class Busy(SmallVLLM):
        def _count(self, prompt: list[int], ids: list[int]) -> None:
            super()._count(prompt, ids)
            super()._count(prompt, ids)

    whole = served(target, draft)
    busy = Busy(**{name: getattr(whole, name) for name in SmallVLLM.__dataclass_fields__})
    with raises_option("other clients"):
        levels(busy, target, draft)


def test_the_rule_that_fits_is_named_above_temperature_0(target, draft):
    """The loopback server drafts greedily."""
    found = compared(served(target, draft), target, draft, temperature=0.5)
    rule = next(finding for finding in found if finding.about == "rule")
    assert "nearest to a greedy draft" in rule.text


def test_an_export_is_verified_in_the_server_that_it_starts(target, draft, tmp_path, monkeypatch):
    """A server of another draft fails, and so does a draft that is greedy although it was started to sample."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", FEWEST)

    def exported(answering: SmallVLLM, name: str, temperature: float = 0.0) -> Any:
        @contextmanager
        def started(command: Any, environ: Any) -> Iterator[tuple[Server, None]]:
            with running(answering) as url:
                yield Server.connect(url, workers=1), None

        monkeypatch.setattr(verify, "running", started)
        asked = {"prompt_file": prompts, "temperature": temperature, "k": answering.k}
        COMMANDS["export"](
            draft=str(draft),
            target=str(target),
            to="vllm",
            verify_with=Path(sys.executable),
            out=tmp_path / name,
            device="cpu",
            **asked,
        )
        return read_record(tmp_path / name).notes["acceptance"]

    found = exported(served(target, draft), "same")
    assert found["low"] <= found["measured"] <= found["high"]
    other = served(target, None, draft=noisy(checkpoint.load_model(target, torch.float32), 0.2))
    for refused, temperature in ((other, 0.0), (served(target, draft), 0.7)):
        with raises_option("--verify-with"):
            exported(refused, "other", temperature)
        assert not (tmp_path / "other").exists()


def test_heads_that_are_not_exported_are_checked_too(target, tmp_path):
    head = written(tmp_path / "head", target, NATIVE)
    checked = COMMANDS["check"](draft=str(head), target=str(target), data="stdlib")
    found = {finding.about: finding.level for finding in checked.result.findings}
    assert (found["head"], found["vllm"], found["llama.cpp"]) == ("ok", "ok", "warning")
    assert checked.next is None  # servers load it as it is
