"""One pair in draftlab, transformers, llama.cpp and vLLM's CPU build: tokens per second, plain, drafted and looked up.

Greedy, batch 1, one thread, the same prompts and K; plain, with the draft as `export` writes it, and n-grams of the
text looked up. Each peer in its own process, in turns with the others; CPU seconds. A peer that is not here is skipped.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import torch
import typer

import draftlab
from benchmarks import environment
from benchmarks.inside_peers import NGRAM, timed
from draftlab import intervals
from draftlab.config.shared import ChatMode
from draftlab.console import note
from draftlab.engine.drafters.ngram import PromptLookupDrafter
from draftlab.engine.generate import Drafter, ModelDrafter, speculative_decode
from draftlab.errors import UserError
from draftlab.exporting import gguf, hf
from draftlab.intervals import Interval
from draftlab.model import checkpoint, hub, llama
from draftlab.model.decoder import with_mode
from draftlab.prompts import Prompts, load_prompts
from draftlab.sampling import SamplingParams
from draftlab.servers.processes import running

INSIDE = Path(__file__).parent / "inside_peers.py"
WAYS = ("plain", "draft", "ngram")
OURS = "draftlab"
CONDITIONS = {
    "draftlab": "mode native",
    "transformers": "eager, assisted generation",
    "llama.cpp": "GGUF of the same dtype; n-grams no longer than K",
    "llama-cpp-python": "GGUF of the same dtype; drafts through Python",
    "vllm": "CPU build, enforce_eager",
}
GGUF_TYPES = {"float32": "f32", "bfloat16": "bf16"}
VLLM = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in one process, so that its CPU seconds are all
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "NUMBA_NUM_THREADS": "1",  # numba finds its n-grams, and would set OpenMP's threads to all cores, PyTorch's too
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What inside_peers.timed() returns. prefill_seconds and seconds are of CPU time, by prompt."""

    prefill_seconds: list[float]
    seconds: list[float]
    wall_seconds: list[float]
    texts: list[list[int]]
    steps: list[list[int]]
    version: str

    @property
    def tokens_per_pass(self) -> Interval:
        return intervals.ratio_interval(np.array(self.steps, dtype=float))

    def timings(self) -> list[intervals.Timing]:
        return [(len(text), seconds) for text, seconds in zip(self.texts, self.seconds, strict=True)]

    def timings_after_prefill(self) -> list[intervals.Timing]:
        times = zip(self.texts, self.seconds, self.prefill_seconds, strict=True)
        return [(len(text) - 1, max(seconds - prefill, 1e-9)) for text, seconds, prefill in times]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One pair and its prompts. peer_draft: the draft as peers get it; files: both as GGUF files."""

    target: Path
    draft: Path
    peer_draft: Path
    files: tuple[Path, Path]
    prompts: list[list[int]]
    eos: list[int]
    k: int
    new_tokens: int
    dtype: str

    @property
    def asked(self) -> dict[str, Any]:
        """Return what every peer is asked alike."""
        context = max(map(len, self.prompts)) + self.new_tokens + 2 * self.k + 2
        return {
            "prompts": self.prompts, "k": self.k, "new_tokens": self.new_tokens, "eos": self.eos,
            "dtype": self.dtype, "context": context,
        }  # fmt: skip


def main(
    draft: Annotated[Path, typer.Option(help="Draft checkpoint.")],
    target: Annotated[str, typer.Option(help="Target checkpoint.")] = "tiny",
    prompt_file: Annotated[Path | None, typer.Option(help="JSON lines; as conversations for a chat model.")] = None,
    data: Annotated[str, typer.Option(help="Prompts without a prompt file: starts of this source's texts.")] = "stdlib",
    prompts: Annotated[int, typer.Option(help="Number of prompts, evenly spaced in the file.")] = 8,
    new_tokens: Annotated[int, typer.Option(help="Tokens after each prompt, at most.")] = 96,
    chat: Annotated[ChatMode, typer.Option(help="auto, on or off.")] = "auto",
    k: Annotated[int, typer.Option(help="Drafted tokens per step.")] = 2,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    ways: Annotated[str, typer.Option(help="Which of plain, draft and ngram.")] = ",".join(WAYS),
    llama_server: Annotated[Path | None, typer.Option(help="llama.cpp's llama-server.")] = None,
    llama_cpp: Annotated[Path | None, typer.Option(help="A Python that has llama-cpp-python.")] = None,
    vllm: Annotated[Path | None, typer.Option(help="A Python that has vLLM's CPU build.")] = None,
    transformers: Annotated[Path | None, typer.Option(help="A Python that has transformers.")] = Path(sys.executable),
    out: Annotated[Path | None, typer.Option(help="Also write the result here.")] = None,
) -> None:
    torch.set_num_threads(1)
    places = {"transformers": transformers, "llama.cpp": llama_server, "llama-cpp-python": llama_cpp, "vllm": vllm}
    here = {name: place for name, place in places.items() if place is not None and place.exists()}
    skipped = {name: "absent" for name in places if name not in here}
    for name, word in skipped.items():
        note(f"{name}: {word}")
    locations = hub.locate(target), hub.locate(str(draft))
    tokenizer = checkpoint.load_tokenizer(locations[0])
    chosen = load_prompts(prompt_file, data, tokenizer, count=prompts + 1, tokens=None, seed=0, chat=chat)
    found: dict[str, dict[str, Answer]] = {}
    with tempfile.TemporaryDirectory() as folder:
        as_gguf = "llama.cpp" in here or "llama-cpp-python" in here
        job = _job(locations, Path(folder), chosen, k, new_tokens, dtype, as_gguf)
        for way in ways.split(","):
            note(f"{way}: {OURS}")
            found[way] = {OURS: _ours(job, way)}
            for name, place in here.items():
                note(f"{way}: {name}")
                ask = _ask_llama_server if name == "llama.cpp" else _ask
                found[way][name] = ask(name, place, job, way)
    about = {
        "benchmark": "peers", "target": locations[0].name, "draft": locations[1].name, "k": k, "prompts": prompts,
        "data": chosen.source, "chat": chosen.chat, "new_tokens": new_tokens, "dtype": dtype, "skipped": skipped,
        "conditions": {name: CONDITIONS[name] for name in (OURS, *here)},
    }  # fmt: skip
    text = json.dumps(_result(found) | about | environment(1))
    if out is not None:
        out.write_text(text + "\n")
    print(text)


def _job(
    locations: tuple[Path, Path], folder: Path, prompts: Prompts, k: int, new_tokens: int, dtype: str, as_gguf: bool
) -> Job:
    target, draft = locations
    (folder / "draft").mkdir()
    hf.write(
        draft, folder / "draft", tokenizer_from=target, vocab=checkpoint.vocab_size(target),
        dtype=checkpoint.DTYPES[dtype],
    )  # fmt: skip
    files = folder / "target.gguf", folder / "draft.gguf"
    for directory, file in zip((target, folder / "draft"), files, strict=True) if as_gguf else ():
        gguf.write(directory, file, GGUF_TYPES[dtype])
    return Job(
        target=target, draft=draft, peer_draft=folder / "draft", files=files, prompts=[p.ids for p in prompts.rows],
        eos=list(checkpoint.eos_token_ids(target)), k=k, new_tokens=new_tokens, dtype=dtype,
    )  # fmt: skip


def _ours(job: Job, way: str) -> Answer:
    dtype = getattr(torch, job.dtype)
    target = with_mode(llama.load(job.target, dtype), "native")
    drafter: Drafter | None = None
    if way == "draft":
        drafter = ModelDrafter(with_mode(llama.load(job.draft, dtype), "native"), checkpoint.vocab_size(job.target))
    elif way == "ngram":
        drafter = PromptLookupDrafter(NGRAM)
    counted = [0, 0]

    def decode(prompt: list[int], new_tokens: int) -> list[int]:
        sampling = SamplingParams(max_tokens=new_tokens, stop_token_ids=tuple(job.eos))
        steps = list(speculative_decode(target, drafter, [prompt], job.k if drafter else 0, sampling))
        counted[0] += sum(len(step.tokens) for step in steps[1:])
        counted[1] += len(steps) - 1
        return [token for step in steps for token in step.tokens]

    return Answer(**timed(decode, job.asked, counted), version=draftlab.__version__)


def _ask(peer: str, python: Path, job: Job, way: str) -> Answer:
    paths = job.files if peer == "llama-cpp-python" else (job.target, job.peer_draft)
    asked = job.asked | {"peer": peer, "way": way, "target": str(paths[0]), "draft": str(paths[1])}
    environ = os.environ | VLLM | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, INSIDE], input=json.dumps(asked), capture_output=True, text=True, env=environ)
    if done.returncode:
        raise UserError(f"{python}: {done.stderr.strip()[-600:]}")
    return Answer(**json.loads(done.stdout))


def _ask_llama_server(peer: str, program: Path, job: Job, way: str) -> Answer:
    """Time llama.cpp's own loop: CPU seconds are the server's, HTTP included; its answers count what was accepted."""
    counted, drafted = [0, 0], 0
    with running(_server_command(program, job, way), os.environ | {"OMP_NUM_THREADS": "1"}) as (server, child):
        client, process = server.http.client, psutil.Process(child.pid)

        def decode(prompt: list[int], new_tokens: int) -> list[int]:
            answer = client.post(
                "/completion",
                json={
                    "prompt": prompt, "n_predict": new_tokens, "temperature": 0.0, "samplers": ["top_k"], "top_k": 1,
                    "cache_prompt": False, "return_tokens": True,
                },
            ).raise_for_status().json()  # fmt: skip
            nonlocal drafted
            timings = answer["timings"]
            drafted += timings.get("draft_n", 0)
            counted[0] += timings["predicted_n"] - 1
            counted[1] += timings["predicted_n"] - 1 - timings.get("draft_n_accepted", 0)
            return answer["tokens"]

        def cpu_seconds() -> float:
            used = process.cpu_times()
            return used.user + used.system

        found = timed(decode, job.asked, counted, cpu_seconds)
    if way == "ngram":
        note(f"llama.cpp drafted {drafted} tokens: where the text's last {min(NGRAM, job.k)} came before")
    return Answer(**found, version=server.version)


def _server_command(program: Path, job: Job, way: str) -> list[object]:
    """Return llama-server's command.

    ngram-simple drafts nothing shorter than the n-gram that it looks up, which is therefore at most K long.
    """
    one = ["--threads", 1, "--threads-batch", 1, "--spec-draft-threads", 1, "--spec-draft-threads-batch", 1]
    size = ["--ctx-size", job.asked["context"], "--parallel", 1, "--cache-ram", 0]
    speculative = {
        "plain": [],
        "draft": [
            "--model-draft", job.files[1], "--spec-type", "draft-simple", "--spec-draft-n-max", job.k,
            "--spec-draft-p-min", 0,
        ],
        "ngram": [
            "--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", min(NGRAM, job.k),
            "--spec-ngram-simple-size-m", job.k,
        ],
    }[way]  # fmt: skip
    return [program, "--model", job.files[0], *one, *size, *speculative]


def _result(found: dict[str, dict[str, Answer]]) -> dict[str, Any]:
    """Return speeds by way and peer, ours over each peer's, and the acceptance of each."""

    def each(value: Callable[[Answer, Answer], Any]) -> dict[str, dict[str, Any]]:
        return {way: {peer: value(answer, by[OURS]) for peer, answer in by.items()} for way, by in found.items()}

    over = each(lambda answer, ours: _over(ours, answer).model_dump())
    over_whole = each(lambda answer, ours: intervals.speedup(([ours.timings()], answer.timings())).model_dump())
    acceptance = each(lambda answer, _: answer.tokens_per_pass)
    return {
        "tokens_per_second": each(lambda answer, _: intervals.tokens_per_second(answer.timings_after_prefill())),
        "tokens_per_second_with_prefill": each(lambda answer, _: intervals.tokens_per_second(answer.timings())),
        "over_peer": over,
        "over_peer_with_prefill": over_whole,
        "over_best_peer": {
            way: min((gain["value"] for peer, gain in by.items() if peer != OURS), default=None)
            for way, by in over.items()
        },
        "tokens_per_pass": {way: {peer: x.model_dump() for peer, x in by.items()} for way, by in acceptance.items()},
        "acceptance_gap": {
            way: {peer: x.value / by[OURS].value - 1 for peer, x in by.items()} for way, by in acceptance.items()
        },
        "within_our_interval": {
            way: {peer: by[OURS].low <= x.value <= by[OURS].high for peer, x in by.items()}
            for way, by in acceptance.items()
        },
        "same_texts": each(_same),
        "wall_over_cpu": each(lambda answer, _: sum(answer.wall_seconds) / sum(answer.seconds)),
        "peers": {peer: answer.version for by in found.values() for peer, answer in by.items()},
    }


def _over(ours: Answer, peer: Answer) -> Interval:
    """Return our tokens per CPU second after the prefill over a peer's, with its interval over prompts."""
    return intervals.speedup(([ours.timings_after_prefill()], peer.timings_after_prefill()))


def _same(answer: Answer, ours: Answer) -> float:
    """Return the share of texts that are ours; servers differ in whether the end of a text is one of its tokens."""
    pairs = zip(answer.texts, ours.texts, strict=True)
    return sum(a == b or ([*a, *b[len(a) :]] == b and len(b) - len(a) == 1) for a, b in pairs) / len(ours.texts)


if __name__ == "__main__":
    typer.run(main)
