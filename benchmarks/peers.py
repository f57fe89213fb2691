"""One pair in draftlab's native mode, in llama.cpp and in vLLM's CPU build: tokens per second, plain and drafted.

Greedy, batch 1, one thread, same prompts and K; each peer in its own Python and process, in turns with the others. CPU
seconds with the prefill.
"""

import json
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

import draftlab
from benchmarks import environment
from draftlab.console import note
from draftlab.data import heldout_prompts
from draftlab.engine.generate import ModelDrafter, speculative_decode
from draftlab.errors import UserError
from draftlab.export import gguf
from draftlab.model import checkpoint, hub, llama
from draftlab.model.decoder import with_mode
from draftlab.sampling import SamplingParams

INSIDE = Path(__file__).parent / "inside_peers.py"
VLLM = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in one process, so that its CPU seconds are all
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """CPU and wall seconds of all prompts but the first, what was written, and tokens per target pass."""

    seconds: float
    wall_seconds: float
    texts: list[list[int]]
    tokens_per_pass: float
    version: str


def main(
    draft: Annotated[Path, typer.Option(help="Draft checkpoint.")],
    llama_cpp: Annotated[Path | None, typer.Option(help="A Python that has llama-cpp-python.")] = None,
    vllm: Annotated[Path | None, typer.Option(help="A Python that has vLLM's CPU build.")] = None,
    target: Annotated[str, typer.Option(help="Target checkpoint.")] = "tiny",
    k: Annotated[int, typer.Option(help="Drafted tokens per step.")] = 2,
    prompts: Annotated[int, typer.Option(help="Number of prompts.")] = 8,
    new_tokens: Annotated[int, typer.Option(help="Tokens after each prompt.")] = 96,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
) -> None:
    torch.set_num_threads(1)
    pair = hub.locate(target), hub.locate(draft)
    texts = heldout_prompts("stdlib", checkpoint.load_tokenizer(pair[0]), count=prompts + 1, length=64, seed=0)
    asked = {"k": k, "prompts": texts, "new_tokens": new_tokens, "dtype": dtype}
    found: dict[str, Answer] = {}
    with tempfile.TemporaryDirectory() as folder:
        for drafted in (False, True):
            name = "speculative" if drafted else "plain"
            note(f"{name}: draftlab")
            found[f"draftlab_{name}"] = _ours(pair, drafted, dtype, texts, k, new_tokens)
            if llama_cpp:
                kind = {"float32": "f32", "bfloat16": "bf16"}[dtype]
                files = [_gguf(path, Path(folder) / f"{i}.gguf", kind) for i, path in enumerate(pair)]
                found[f"llama.cpp_{name}"] = _ask(llama_cpp, asked | _models("llama.cpp", files, drafted))
            if vllm:
                found[f"vllm_{name}"] = _ask(vllm, asked | _models("vllm", [str(path) for path in pair], drafted))
    print(
        json.dumps(_result(found) | {"benchmark": "peers", "k": k, "prompts": prompts, "dtype": dtype} | environment(1))
    )


def _models(peer: str, paths: list[str], drafted: bool) -> dict[str, object]:
    return {"peer": peer, "target": paths[0], "draft": paths[1] if drafted else None}


def _ours(
    pair: tuple[Path, Path], drafted: bool, dtype: str, texts: list[list[int]], k: int, new_tokens: int
) -> Answer:
    target, draft = (with_mode(llama.load(path, getattr(torch, dtype)), "native") for path in pair)
    drafter, sampling = ModelDrafter(draft) if drafted else None, SamplingParams(max_tokens=new_tokens)

    def decode(prompt: list[int]) -> list[list[int]]:
        return [step.tokens for step in speculative_decode(target, drafter, [prompt], k if drafted else 0, sampling)]

    decode(texts[0])  # warms up
    began, wall = time.process_time(), time.perf_counter()
    written = [decode(prompt) for prompt in texts[1:]]
    seconds, wall_seconds = time.process_time() - began, time.perf_counter() - wall
    flat = [[t for tokens in steps for t in tokens] for steps in written]
    emitted, passes = sum(len(text) - 1 for text in flat), sum(len(steps) - 1 for steps in written)
    return Answer(
        seconds=seconds,
        wall_seconds=wall_seconds,
        texts=flat,
        tokens_per_pass=emitted / passes,
        version=draftlab.__version__,
    )


def _gguf(directory: Path, out: Path, kind: str) -> str:
    if not out.exists():
        gguf.write(directory, out, kind)
    return str(out)


def _ask(python: Path, asked: dict[str, object]) -> Answer:
    note(f"{'speculative' if asked['draft'] else 'plain'}: {asked['peer']}")
    environ = os.environ | VLLM | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, INSIDE], input=json.dumps(asked), capture_output=True, text=True, env=environ)
    if done.returncode:
        raise UserError(f"{python}: {done.stderr.strip()[-400:]}")
    return Answer(**json.loads(done.stdout))


def _result(found: dict[str, Answer]) -> dict[str, object]:
    texts = found["draftlab_plain"].texts
    per_second = {name: sum(map(len, answer.texts)) / answer.seconds for name, answer in found.items()}
    peers = sorted({name.rsplit("_", 1)[0] for name in found})
    return {
        "tokens_per_second": per_second,
        "speedup": {peer: per_second[f"{peer}_speculative"] / per_second[f"{peer}_plain"] for peer in peers},
        "tokens_per_pass": {name: answer.tokens_per_pass for name, answer in found.items()},
        "wall_over_cpu": {name: answer.wall_seconds / answer.seconds for name, answer in found.items()},
        "same_texts": {
            name: sum(a == b for a, b in zip(answer.texts, texts, strict=True)) / len(texts)
            for name, answer in found.items()
        },
        "peers": {name: answer.version for name, answer in found.items()},
    }


if __name__ == "__main__":
    typer.run(main)
