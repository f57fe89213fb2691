"""A score counts the prompts whose answers the draft learnt from."""

import json
import shutil
import time
from pathlib import Path

import draftlab
from draftlab import provenance
from draftlab.results.ranking import score_warnings
from draftlab.target_outputs.store import read_texts


def prompts(name: str, numbers: range) -> Path:
    file = Path(name)
    file.write_text(
        "".join(json.dumps({"prompt": f"def add_{number}(a, b):"}) + "\n" for number in numbers)
    )
    return file


def test_prompts_in_the_stores_that_a_draft_learnt_from_are_counted(
    family_dirs, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    target = str(family_dirs["llama"])
    seen, mixed = prompts("seen.jsonl", range(12)), prompts("mixed.jsonl", range(8, 20))
    store = draftlab.outputs_build(
        target=target, prompt_file=seen, max_new_tokens=4, out="store"
    ).path
    shutil.copytree(target, "draft")
    provenance.write_record(Path("draft"), "distill", {}, [store], time.time())
    settings = {"target": target, "k": "1", "max_new_tokens": 4, "repeats": 1}
    learnt = draftlab.score(draft=["draft"], prompt_file=mixed, out="learnt", **settings)
    # the store holds some prompts out
    learnt_from = {output.number for output in read_texts(store)}
    assert learnt.scores[0].learnt_prompts == len(learnt_from & set(range(8, 12))) > 0
    other = draftlab.score(draft=[target], prompt_file=mixed, out="other", **settings)
    assert other.scores[0].learnt_prompts == 0
    assert len(score_warnings(learnt.scores)) == len(score_warnings(other.scores)) + 1
