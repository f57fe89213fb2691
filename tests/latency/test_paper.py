"""predict draws the drafts of "Decoding Speculative Decoding" as docs/paper.md types it."""

import json
import re
import shlex
from pathlib import Path

import pytest
from helpers.drawings import check_figure, texts
from helpers.typed import call

from draftlab.latency.cost_model import expected_tokens

ROOT = Path(__file__).parents[2]


def typed_on_the_page() -> list[str]:
    text = (ROOT / "docs/paper.md").read_text()
    (line,) = re.findall(r"```\n(draftlab predict.*?)```", text.replace("\\\n", " "), re.DOTALL)
    return shlex.split(line)[1:]


def test_the_papers_drafts_are_drawn_and_predicted_as_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = typed_on_the_page()
    picture = tmp_path / words[words.index("--plot") + 1]
    found = json.loads(call("", *words, "--json").stdout)["predictions"]
    record = json.loads((ROOT / "studies/llama-65b/paper_predicted.json").read_text())
    drafts = {each["name"].partition(",")[0]: each for each in found}
    assert drafts.keys() == record["drafts"].keys()
    for name, row in record["drafts"].items():
        assert drafts[name]["best_k"] == row["k"]
        best = next(each for each in drafts[name]["rows"] if each["k"] == row["k"])
        assert best["speedup"]["value"] == pytest.approx(row["speedup"], rel=1e-6)
        # a text of 200 tokens has whole steps, except the last
        assert best["tokens_per_pass"]["value"] == pytest.approx(
            expected_tokens(record["acceptance"], row["k"]), rel=0.02
        )
    check_figure(picture)
    written = {text for text, _ in texts(picture.read_text())}
    assert {"no draft", *(each["name"] for each in found)} <= written


def test_a_picture_of_another_kind_is_refused_before_the_prediction(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = typed_on_the_page()
    words[words.index("--plot") + 1] = "page.pdf"
    assert call("", *words, code=1).stderr.startswith("error: --plot ")
