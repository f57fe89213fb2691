"""A server from one file outside the tree is in help and errors, checked for, exported to, and given its script."""

import json
from pathlib import Path

import pytest
from helpers.outside import draftlab, example, install


@pytest.fixture
def site(tmp_path: Path) -> Path:
    site, broken = tmp_path / "site", "import a_package_that_is_not_there"
    install(site, "toy-serve", {"toyserve": example("toyserve")}, "draftlab.servers")
    install(site, "broken-servers", {"needs_more": broken}, "draftlab.servers")
    return site


def test_a_server_from_outside_is_checked_for_and_exported_to(site, family_dirs, tmp_path):
    model = str(family_dirs["llama"])
    checked = draftlab(site, "check", model, "--target", model, "--files-only", "--json")
    found = {row["about"]: row["level"] for row in json.loads(checked.stdout)["findings"]}
    assert found["toyserve"] == "error"
    assert {"vllm", "llama.cpp"} <= found.keys()  # a broken package breaks nothing else
    words = ("export", model, "--target", model, "--to", "toyserve", "--k", "3", "--out", "out")
    made = draftlab(site, *words)
    assert made.returncode == 0, made.stderr
    script = (tmp_path / "out" / "serve.sh").read_text()
    assert script.splitlines()[1:] == ["# K = 3: set by --k", f"exec toyserve {model} --k 3"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "exec toyserve llama --k 3" in card  # without this machine's folders
