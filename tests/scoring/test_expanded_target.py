"""A target expanded in memory writes the text of its source, and its drafts keep the source's acceptance."""

import json
from pathlib import Path

import pytest
from helpers.small_files import write_functions

from benchmarks import expanded_target
from draftlab.model import checkpoint
from draftlab.model.shape import write_shape_file

LARGER = {"layers": 7, "hidden": 96, "heads": 6, "kv_heads": 6, "head_dim": 16, "ffn": 104}


@pytest.mark.parametrize("mode", ["eager", "native"])
def test_the_text_and_acceptance_are_the_sources_at_another_cost(family_dirs, tmp_path, monkeypatch, capsys, mode):
    source = family_dirs["llama_mha"]
    shape = checkpoint.read_shape(source)
    target, draft, shallow = (tmp_path / f"{n}.yaml" for n in ("target", "draft", "shallow"))
    for file, layers in ((target, 7), (draft, 5), (shallow, 1)):
        write_shape_file(shape.model_copy(update=LARGER | {"layers": layers}), file, "a test")
    text = write_functions(tmp_path / "text.txt", 40, 60)
    expanded_target.main(
        cut=Path(source),
        source=str(source),
        target=str(target),
        drafts=f"{draft},{shallow}",
        k="3",
        data=text,
        prompts=2,
        prompt_tokens=12,
        new_tokens=16,
        mode=mode,
        dtype="float32",
        device="cpu",
        room=1e7,
    )
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["layers"], found["of_layers"]) == (7, 7)
    ((name, (row,)),) = found["rows"].items()  # one layer does not contain five
    assert name == str(draft)
    assert row["same_tokens"] == 1
    # the draft is the source, so that all but the end is accepted
    assert row["tokens_per_pass"] >= 15 / 4
    assert found["share_of_bandwidth"] > 0
    assert found["beside_paper"]["wide_796m_over_noft_1.3b"] is None
