"""Trace files of the paper's scripts: drafts can be replayed on their texts, and broken files are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftlab.commands import COMMANDS
from draftlab.config.server_rules import DecodingRule
from draftlab.data.prompts import Prompt
from draftlab.errors import UserError
from draftlab.scoring.replay import Drafting, drafter_of, replay_draft
from draftlab.target_outputs.store import read_store
from draftlab_research.import_paper_trace import IMPORT_PAPER_TRACE
from draftlab_research.paper_trace import paper_texts, trace_outputs


def paper_file(path: Path, texts: list[list[int]]) -> Path:
    """Write texts to a file in the format in which torch prints tensors, and return the file."""
    path.write_text("\n".join(str(torch.tensor([text])) for text in texts) + "\n")
    return path


def test_a_trace_of_the_papers_scripts_replays_as_the_recorded_one(tmp_path, family_dirs):
    target, draft, prompts = family_dirs["llama"], family_dirs["qwen3"], tmp_path / "prompts.jsonl"
    lines = ["def parse(line):", "class Reader:", "return"]
    prompts.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    asked: dict[str, Any] = {
        "use": "replay",
        "target": str(target),
        "prompt_file": prompts,
        "dtype": "float32",
    }
    COMMANDS["outputs build"](**asked, max_new_tokens=24, out=tmp_path / "store")
    stored = read_store(tmp_path / "store")
    settings = Drafting(k=8, rule=DecodingRule("rejection"), dtype=torch.float32, device=torch.device("cpu"))
    wanted = replay_draft(stored, drafter_of(draft), settings).chances()
    texts = [output.ids.tolist() for output in stored.outputs]
    with_prompts = [[*output.prompt.tolist(), *output.ids.tolist()] for output in stored.outputs]
    for name, written in (("alone", texts), ("with-prompts", with_prompts)):
        file, out = paper_file(tmp_path / name, written), tmp_path / f"{name}-store"
        outcome = IMPORT_PAPER_TRACE(file=file, prompt_file=prompts, target=str(target), name="big", out=out)
        assert outcome.data["sequences"] == 3
        found = replay_draft(read_store(out), drafter_of(draft), settings).chances()
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_papers_own_example_is_read(tmp_path):
    """The text comes from the docstring of parse_tensors_from_file in the paper's scripts."""
    text = """tensor([[  518, 799, 596, 18873,  1265,   322,  1510,   372,  1283,   304,   596,
          7875, 29991, 2]])
    tensor([[  518, 10568, 29962,  1522,  2924, 29889,   518, 10568, 29962,  1522,
          1176,   681, 29889,   518, 10568, 29962,  1522,   752,   465,   291]], device='cuda:0')"""
    (tmp_path / "t.txt").write_text(text)
    first, second = paper_texts(tmp_path / "t.txt")
    assert first.tolist() == [
        518,
        799,
        596,
        18873,
        1265,
        322,
        1510,
        372,
        1283,
        304,
        596,
        7875,
        29991,
        2,
    ]
    assert len(second) == 20


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nothing here", "t.txt is not a complete trace"),
        ("tensor([[1, 2]])\ntensor([[3, 4", "t.txt is not a complete trace"),
        ("tensor([[1, 2, ..., 9]])", "t.txt is not a complete trace"),
        ("tensor([[1, 2]])\ntensor([[1, 2.5]])", "t.txt is not a complete trace"),
        ("tensor([[1, 2]])", "1 texts.* 2 prompts"),
        ("tensor([[1, 2]])\ntensor([[1, -2]])", "text 2"),
        ("tensor([[1, 2]])\ntensor([[400, 2]])", "text 2"),
    ],
)
def test_files_that_are_no_paper_trace_are_refused(tmp_path, content, message):
    (tmp_path / "t.txt").write_text(content)
    with pytest.raises(UserError, match=message):
        trace_outputs(tmp_path / "t.txt", [Prompt([5]), Prompt([6])], vocab=307, eos_ids=())
