"""Each option of prune is read or refused; the plan is that of the dtype computed with."""

from typing import Any

from helpers.errors import raises_option

from draftlab import shipped
from draftlab.commands import PRUNE
from draftlab.model.families import presets


def test_without_a_network_the_paper_s_draft_is_planned_from_the_shipped_shape(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    paper: dict[str, Any] = {"source": "huggyllama/llama-7b", "data": "stdlib"}
    planned = PRUNE(layers=12, width=2560, **paper, dry_run=True).data
    assert presets(shipped.folder("widths"))["llama-7b"].describe() in planned["source"]
    assert planned["source"]
    assert planned["draft"] == presets(shipped.folder("widths"))["wide-1.3b"].describe()
    assert list(tmp_path.iterdir()) == []
    with raises_option("--source"):
        PRUNE(layers=12, width=2560, **paper)
    with raises_option("--source"):
        PRUNE(layers=12, source="nobody/other-7b", data="stdlib", dry_run=True)
