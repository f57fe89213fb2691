"""The recipe of the embedded target begins with a model of random weights and a tokenizer of its own."""

import torch
from small_files import write_functions

from benchmarks import tiny_target
from draftlab.commands import COMMANDS
from draftlab.model import checkpoint
from draftlab.model.shape import Shape, write_shape_file

SHAPE = Shape(layers=2, hidden=32, heads=2, kv_heads=2, head_dim=16, ffn=48, vocab=300)


def test_a_new_model_learns_from_text_alone(tmp_path):
    write_shape_file(SHAPE, tmp_path / "shape.yaml", "a test")
    text, new = write_functions(tmp_path / "text.txt", 80, 60), tmp_path / "new"
    tiny_target.main(out=new, shape=tmp_path / "shape.yaml", data=text, megabytes=0.02, context=64)
    assert checkpoint.read_shape(new) == SHAPE
    assert checkpoint.stored_dtype(new) == torch.bfloat16
    settings = {"draft": str(new), "loss": "ce", "data": text, "out": tmp_path / "trained"}
    result = COMMANDS["distill"](**settings, steps=8, batch_size=4, seq_len=32)
    before, after = result.data["before"], result.data["after"]
    assert after["cross_entropy"] < 0.9 * before["cross_entropy"]
