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
        (["config.json", "pytorch_model.bin.index.json"], ".", "bin", "."),
        (["config.json", "pytorch_model.bin"], "pytorch_model.bin", "bin", "."),
        (["adapter_config.json", "config.json", "pytorch_model.bin"], ".", "adapter", "."),
        (["config.json", "model.safetensors", "pytorch_model.bin"], ".", None, ""),
        (["a.gguf", "b.gguf"], ".", None, ""),
        (["notes.txt"], "notes.txt", None, ""),
    ],
)
def test_other_layouts_are_recognised(tmp_path, names, asked, kind, path):
    """The hub has many with both .safetensors and .bin."""
    root = folder(tmp_path / "my model", *names)
    layout = other_layout(root / asked)
    assert (layout is None) == (kind is None)
    if layout is not None:
        assert (layout.kind, layout.path) == (kind, root / path)
        assert f"draftlab import '{layout.path}' --out " in layout.advice()
