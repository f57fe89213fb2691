"""The kinds of heads: a kind that draftlab does not compute is named, and so is the package of a kind elsewhere."""

import json
from typing import Any

import pytest
import torch
from helpers.dflash_heads import LAYER
from helpers.errors import raises_option
from safetensors.torch import save_file

from draftlab.drafters.base import DRAFTERS
from draftlab.model import hub

MTP: dict[str, Any] = {
    "speculators_model_type": "mtp",
    "num_nextn_predict_layers": 1,
    "transformer_layer_config": LAYER,
}


@pytest.mark.parametrize(
    ("content", "kind"), [(MTP, "kind mtp"), ({"speculators_model_type": "xpress"}, "kind xpress")]
)
def test_a_head_of_a_kind_that_is_not_computed_is_named(target, tmp_path, content, kind):
    (tmp_path / "config.json").write_text(json.dumps(content))
    save_file({"mtp.fc.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with raises_option(kind) as error:
        hub.locate_model(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", sorted(DRAFTERS.elsewhere))
def test_the_package_of_a_kind_that_is_not_installed_is_named(monkeypatch, name):
    monkeypatch.setattr(DRAFTERS, "plugins", {})
    monkeypatch.delitem(DRAFTERS.kinds, name, raising=False)
    with raises_option("draftlab-research"):
        DRAFTERS.get(name, "--drafter")
