"""The drafter of docs/extending.md goes through help, errors and score from outside; a broken one is one clear line."""

import json
from pathlib import Path

import pytest
from helpers.outside import draftlab, example, install

GROUP = "draftlab.drafters"
BROKEN = {
    "needs_more": ("import a_package_that_is_not_there", "a_package_that_is_not_there"),
    "registers_nothing": ("", "'registers-nothing'"),
    "lacks_build": (
        "from draftlab.drafters import base\n@base.drafter('lacks-build')\nclass Spec(base.DrafterSpec): ...",
        "no method build()",
    ),
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    install(tmp_path / "site", "custom-drafter", {"follower": example("follower")}, GROUP)
    install(
        tmp_path / "site",
        "broken-drafters",
        {module: text for module, (text, _) in BROKEN.items()},
        GROUP,
    )
    install(tmp_path / "site", "other-lookup", {"prompt_lookup": ""}, GROUP)
    return tmp_path / "site"


def test_a_drafter_from_outside_is_in_the_help_and_in_errors(site):
    assert "follower" in draftlab(site, "score", "--help").stdout
    score = ("score", "--target", "tiny", "--data", "stdlib", "--drafter")
    for text, words in (
        ("folower", "did you mean 'follower'"),
        ("follower:leest=2", "did you mean 'least'"),
    ):
        refused = draftlab(site, *score, text)
        assert (refused.returncode, words in refused.stderr) == (1, True), refused.stderr


def test_a_drafter_from_outside_is_scored(site, family_dirs, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def parse(line):"}\n{"prompt": "return [int(part)"}\n')
    asked = {
        "--target": str(family_dirs["llama"]),
        "--prompt-file": "prompts.jsonl",
        "--out": "out",
        "--k": "2",
    }
    asked |= {"--max-new-tokens": "24", "--repeats": "1", "--dtype": "float32", "--mode": "eager"}
    words = [word for option in asked.items() for word in option]
    ran = draftlab(site, "score", *words, "--drafter", "follower:least=1", "--json")
    assert ran.returncode == 0, ran.stderr
    score = json.loads((tmp_path / "out" / "follower:least=1" / "score.json").read_text())
    assert score["equal_texts"] == 1
    assert sum(sum(run["drafted"]) for run in score["speculative"]["2"]) > 0


@pytest.mark.parametrize("module", BROKEN)
def test_a_broken_package_is_named_in_one_line_and_breaks_nothing_else(site, module):
    score = ("score", "--target", "tiny", "--data", "stdlib", "--drafter")
    refused = draftlab(site, *score, module.replace("_", "-"))
    assert refused.returncode == 1
    assert len(refused.stderr.splitlines()) == 1, refused.stderr
    assert "broken-drafters" in refused.stderr
    assert BROKEN[module][1] in refused.stderr


def test_a_name_that_two_packages_offer_is_refused_with_both(site):
    refused = draftlab(site, "score", "--target", "tiny", "--data", "stdlib", "--drafter", "prompt-lookup")
    assert refused.returncode == 1
    assert "other-lookup" in refused.stderr
    assert "draftlab" in refused.stderr
