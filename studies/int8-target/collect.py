"""Measure what int8 weights cost a target on real text: bits per byte, and agreement with the target in bfloat16.

python -m benchmarks.int8_target TARGET TEXT
"""

import json
import math
from pathlib import Path

import torch
import typer
from torch.nn import functional as F

from benchmarks import environment
from draftlab.model import checkpoint, llama
from draftlab.model.modes import with_mode
from draftlab.scoring.run import compare


def main(target: Path, text: Path, windows: int = 20, tokens: int = 512) -> None:
    torch.set_num_threads(1)
    model = llama.load(target, torch.bfloat16)
    whole, rounded = (with_mode(model, "native", int8) for int8 in (False, True))
    tokenizer = checkpoint.load_tokenizer(target)
    ids = tokenizer(text.read_text("utf-8"), verbose=False)["input_ids"]
    texts = [ids[i * tokens : (i + 1) * tokens] for i in range(windows)]
    counted = [token for window in texts for token in window[1:]]
    text_bytes = len(str(tokenizer.decode(counted)).encode())
    bits = {}
    for name, each in (("bfloat16", whole), ("int8", rounded)):
        nats = sum(
            float(
                F.cross_entropy(
                    each.forward_uncached(torch.tensor([window]), tokens)[0, :-1].float(),
                    torch.tensor(window[1:]),
                    reduction="sum",
                )
            )
            for window in texts
        )
        bits[name] = nats / math.log(2) / text_bytes
    result = {
        "benchmark": "int8_target",
        "target": target.name,
        "text": text.name,
        **compare(whole, rounded, texts).model_dump(),
        "bits_per_byte": bits,
    }
    print(json.dumps(result | environment(1)))


if __name__ == "__main__":
    typer.run(main)
