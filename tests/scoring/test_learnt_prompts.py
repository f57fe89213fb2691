"""A score counts the prompts whose answers the draft learnt from."""

import shutil
import time
from pathlib import Path

from helpers.small_files import write_prompts

import draftlab
from draftlab.results.ranking import score_warnings
from draftlab.runs import provenance
from draftlab.target_outputs.store import read_texts


def test_prompts_in_the_stores_that_a_draft_learnt_from_are_counted(family_dirs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = str(family_dirs["llama"])
    mixed = write_prompts(Path("mixed.jsonl"), 20)
    lines = mixed.read_text().splitlines(keepends=True)
    Path("seen.jsonl").write_text("".join(lines[:12]))
    mixed.write_text("".join(lines[8:]))
    asked = {"target": target, "prompt_file": "seen.jsonl", "max_new_tokens": 4}
    store = draftlab.outputs_build(**asked, out="store").path
    shutil.copytree(target, "draft")
    provenance.write_record(Path("draft"), "distill", {}, {str(store): ""}, time.time())
    settings = {"target": target, "k": "1", "max_new_tokens": 4, "repeats": 1}
    learnt = draftlab.score(draft=["draft"], prompt_file=mixed, out="learnt", **settings)
    # the store holds some prompts out
    learnt_from = {output.number for output in read_texts(store)}
    assert learnt.result.scores[0].learnt_prompts == len(learnt_from & set(range(8, 12))) > 0
    other = draftlab.score(draft=[target], prompt_file=mixed, out="other", **settings)
    assert other.result.scores[0].learnt_prompts == 0
    assert len(score_warnings(learnt.result.scores)) == len(score_warnings(other.result.scores)) + 1
