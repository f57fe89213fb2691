"""A checkpoint in several files."""

import json
import shutil

from safetensors.torch import load_file, save_file

SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]


def sharded(directory, out):
    """Write a checkpoint as the hub has it: two shards and an index."""
    shutil.copytree(directory, out)
    (out / "model.safetensors").unlink()
    tensors = load_file(directory / "model.safetensors")
    names, where = sorted(tensors), {}
    for file, part in zip(SHARDS, (names[::2], names[1::2]), strict=True):
        save_file({name: tensors[name] for name in part}, out / file)
        where |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return out
