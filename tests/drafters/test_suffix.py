"""Suffix decoding drafts what Arctic Inference's trees draft, which vLLM takes."""

import json
from pathlib import Path

import pytest
from helpers.drafter_laws import check_greedy, check_rows, save_models

from draftlab.drafters.base import parse_drafter
from draftlab.drafters.suffix import Memory, SuffixDrafter

# drafts of arctic-inference 0.3.0 (its C++ tree, by its own bindings) for random texts of twelve tokens
# in which no two tokens followed equally often: the order of equals is that of its lists
GOLDEN = json.loads((Path(__file__).parents[1] / "files" / "arctic_suffix.json").read_text())


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


def test_vllm_gets_the_options_of_drafters_without_weights():
    """The names are those of SpeculativeConfig in vLLM 0.32, vllm/config/speculative.py."""
    assert parse_drafter("suffix:max_spec_factor=2").speculative_config(5) == {
        "method": "suffix",
        "num_speculative_tokens": 5,
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_spec_factor": 2.0,
        "suffix_decoding_min_token_prob": 0.1,
    }
    lookup = parse_drafter("prompt-lookup:prompt_lookup_max=5").speculative_config(4)
    assert lookup is not None
    assert (lookup["method"], lookup["prompt_lookup_max"]) == ("ngram", 5)
    assert parse_drafter("latest-lookup").speculative_config(4) is None
