"""Suffix decoding drafts what Arctic Inference's trees draft, which vLLM takes."""

import json
from pathlib import Path

import pytest
from drafter_laws import check_greedy, check_rows, save_models
from test_kinds import built

from draftlab.engine.drafters.suffix import Memory, SuffixDrafter

# drafts of arctic-inference 0.3.0 (its C++ tree, by its own bindings) for random texts of twelve tokens
# in which no two tokens followed equally often: the order of equals is that of its lists
GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "arctic_suffix.json").read_text())


@pytest.mark.parametrize("row", GOLDEN, ids=range(len(GOLDEN)))
def test_drafts_are_those_of_arctic_inference(row):
    memory = Memory(row["memory"]) if row["memory"] else None
    drafter = SuffixDrafter(memory, row["depth"], row["factor"], row["min_prob"])
    assert drafter.draft(row["text"], row["count"]) == row["drafted"]


def test_a_remembered_text_is_drafted_to_its_end_only():
    drafter = SuffixDrafter(Memory([[1, 2, 3, 4, 5], [9, 8]]), 24, 2.0, 0.1)
    assert drafter.draft([7, 2, 3], 9) == [4, 5]
    assert drafter.draft([7, 6], 9) == []


def test_greedy_texts_and_rows_are_those_of_the_target(tmp_path):
    models = save_models(tmp_path)
    memory = Memory([[3, 1, 4, 1, 5] * 4])
    for k in (1, 6):
        check_greedy(models["target"], SuffixDrafter(memory, 24, 1.0, 0.1), k)
    check_rows(models["target"], SuffixDrafter(memory, 24, 1.0, 0.1))


def test_a_store_of_answers_is_remembered(context, stored):
    run = built(context, f"suffix:outputs={stored}")
    assert run.model is None
    assert isinstance(run.drafter, SuffixDrafter)
    assert run.drafter.memory is not None
