"""What stands at a path, and the command that an error names."""

from pathlib import Path

import pytest

from draftlab.model.hf_files import other_layout


def folder(root: Path, *names: str) -> Path:
    root.mkdir(exist_ok=True)
    for name in names:
        (root / name).write_bytes(b"GGUF" if name.endswith(".gguf") else b"{}")
    return root


@pytest.mark.parametrize(
    ("names", "asked", "kind", "path"),
    [
        (["m.gguf"], "m.gguf", "gguf", "m.gguf"),
        (["m.gguf"], ".", "gguf", "m.gguf"),
        (
            ["config.json", "pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"],
            ".",
            "bin",
            ".",
        ),
        (["config.json", "pytorch_model.bin"], "pytorch_model.bin", "bin", "."),
        (["adapter_config.json", "config.json", "pytorch_model.bin"], ".", "adapter", "."),
    ],
)
def test_other_layouts_are_recognised(tmp_path, names, asked, kind, path):
    root = folder(tmp_path / "my model", *names)
    layout = other_layout(root / asked)
    assert layout is not None
    assert (layout.kind, layout.path) == (kind, root / path)
    assert f"draftlab import '{layout.path}' --out " in layout.advice()


@pytest.mark.parametrize(
    ("names", "asked"),
    [
        (
            ["config.json", "model.safetensors", "pytorch_model.bin"],
            ".",
        ),  # the hub has many with both
        (["a.gguf", "b.gguf"], "."),
        (["config.json"], "missing"),
        (["notes.txt"], "notes.txt"),
    ],
)
def test_other_things_are_not(tmp_path, names, asked):
    assert other_layout(folder(tmp_path / "model", *names) / asked) is None
