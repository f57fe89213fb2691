"""An exported draft scored where it runs: its acceptance there must be its acceptance here, or the export is wrong.

The target verifies every token, so a draft that a conversion broke still gives fluent text, only no speed. R texts.
"""

import contextlib
import json
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch

from draftlab.acceptance import token_logprobs
from draftlab.engine.generate import decode, output_tokens
from draftlab.errors import UserError
from draftlab.intervals import ratio_interval
from draftlab.model import checkpoint, decoder
from draftlab.model.sentencepiece import PROBES
from draftlab.sampling import SamplingParams
from draftlab.servers.client import Server, spec_decode_counters

INSIDE = Path(__file__).parent / "llama_cpp_worker.py"
START_SECONDS = 600  # of a server
SAME = {"f32": 0.995, "f16": 0.98, "bf16": 0.97, "q8_0": 0.95}  # share of places with the same hit or miss
SAME_BELOW_8_BITS = 0.9  # activations are rounded to 8 bits there, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """What the target writes greedily after some prompts, and how much of it counts."""

    prompts: list[list[int]]
    texts: list[list[int]]  # k tokens longer than tokens, so that the last step can draft as many as the others
    tokens: int
    k: int

    @property
    def rows(self) -> list[list[int]]:
        return [p + t for p, t in zip(self.prompts, self.texts, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Tokens per target pass here, with a 95 % interval over texts, and there."""

    runtime: str
    k: int
    texts: int
    here: float
    low: float
    high: float
    there: float
    words: str

    def line(self) -> str:
        return (
            f"{self.runtime}: {self.there:.3f} tokens per target pass, here {self.here:.3f} ({self.low:.3f} to "
            f"{self.high:.3f}), K = {self.k}, {self.texts} texts; {self.words}"
        )


def write_texts(target: Path, prompts: list[list[int]], tokens: int, k: int, device: torch.device) -> Writing:
    """In float32, and through an end-of-text token: what counts is that both sides see the same."""
    model = decoder.load(target, torch.float32, device)
    texts = output_tokens(decode(model, prompts, SamplingParams(max_tokens=tokens + k)))
    return Writing(prompts=prompts, texts=texts, tokens=tokens, k=k)


def hits(draft: Path, writing: Writing, device: torch.device) -> list[np.ndarray]:
    """Of each text, which tokens are the draft's most probable ones, bool [n]."""
    model = decoder.load(draft, torch.float32, device)
    pairs = [(np.array(p), np.array(t)) for p, t in zip(writing.prompts, writing.texts, strict=True)]
    return [
        one.ranks == 0
        for one in token_logprobs.score_tokens(model, pairs, checkpoint.vocab_size(draft), SamplingParams())
    ]


def chain(hit: Sequence[bool], k: int, tokens: int) -> tuple[int, int]:
    """Greedy steps over one text, and the tokens they emit. The first token comes with the prefill."""
    at, steps = 1, 0
    while at < tokens:
        run = next((i for i in range(k) if not hit[at + i]), k)
        at, steps = at + run + 1, steps + 1
    return at - 1, steps


def in_llama_cpp(
    python: Path, file: Path, kind: str, writing: Writing, ours: list[np.ndarray], words: Path
) -> Agreement:
    """file in the llama.cpp that python has. words: directory of the tokenizer.

    Raises:
        UserError: it cannot be run, or gives another acceptance or other tokens.
    """
    answer = ask(python, {"model": str(file), "rows": writing.rows, "texts": list(PROBES)})
    theirs = [
        np.array(best[len(prompt) - 1 : -1]) == np.array(text)
        for prompt, text, best in zip(writing.prompts, writing.texts, answer["best"], strict=True)
    ]
    same = float(np.mean(np.concatenate(ours) == np.concatenate(theirs)))
    tokenizer = checkpoint.load_tokenizer(words)
    wanted = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in PROBES]
    cut = sum(a == b for a, b in zip(answer["ids"], wanted, strict=True))
    emitted, steps = _counts(theirs, writing).sum(0)
    found = _agreement(
        f"llama.cpp ({answer['version']})", writing, ours, float(emitted / steps),
        f"the same hits in {same:.2%} of places; its tokenizer gives the ids of {cut} of {len(PROBES)} probe texts",
    )  # fmt: skip
    if same < SAME.get(kind, SAME_BELOW_8_BITS):
        raise UserError(f"the exported draft drafts other tokens there. {found.line()}")
    return found


def in_vllm(binary: Path, draft: Path, target: Path, writing: Writing, ours: list[np.ndarray]) -> Agreement:
    """draft beside target in a vLLM server that is started for it, by its own counters.

    Raises:
        UserError: it does not start, or its acceptance is another.
    """
    speculative = {"method": "draft_model", "model": str(draft.absolute()), "num_speculative_tokens": writing.k}
    with _vllm(binary, target, speculative) as server:
        before = server.metrics()
        asked = SamplingParams(max_tokens=writing.tokens, temperature=0.0, ignore_eos=True)
        wrote = [one.ids for one in server.generate(writing.prompts, asked)]
        counted = spec_decode_counters(before, server.metrics())
    if counted is None:
        raise UserError(f"{binary} drafted nothing: its /metrics count no speculative steps")
    same = [a == b for ids, text in zip(wrote, writing.texts, strict=True) for a, b in zip(ids, text, strict=False)]
    return _agreement(
        f"vLLM {server.version}", writing, ours, counted.acceptance.mean_acceptance_length,
        f"it wrote what the target writes here in {float(np.mean(same)):.2%} of places",
    )  # fmt: skip


def ask(python: Path, question: dict[str, object]) -> dict:
    """What llama_cpp_worker.py answers under that Python."""
    try:
        done = subprocess.run([python, INSIDE], input=json.dumps(question), capture_output=True, text=True)
    except OSError as error:
        raise UserError(f"{python} cannot be run: {error.strerror}") from None
    if done.returncode:
        silent = f"it was ended by signal {-done.returncode}" if done.returncode < 0 else "no word"
        said = (done.stderr.strip().splitlines() or [silent])[-1]
        hint = "; it wants a Python with llama-cpp-python" if "No module named" in said else ""
        raise UserError(f"{python} could not run llama.cpp: {said[:200]}{hint}")
    return json.loads(done.stdout)


def _counts(hits: list[np.ndarray], writing: Writing) -> np.ndarray:
    """Of each text tokens and steps, [R, 2]."""
    return np.array([chain(hit.tolist(), writing.k, writing.tokens) for hit in hits], dtype=np.float64)


def _agreement(runtime: str, writing: Writing, ours: list[np.ndarray], there: float, words: str) -> Agreement:
    """Raises UserError: what was found there lies outside what texts like these vary by here."""
    here = ratio_interval(_counts(ours, writing))
    found = Agreement(
        runtime=runtime, k=writing.k, texts=len(ours), here=here.value, low=here.low, high=here.high, there=there,
        words=words,
    )  # fmt: skip
    if not here.low <= there <= here.high:
        raise UserError(f"the exported draft is not what it is here. {found.line()}")
    return found


@contextlib.contextmanager
def _vllm(binary: Path, target: Path, speculative: dict[str, object]) -> Iterator[Server]:
    """A server of its own on a free port, in float32, ended with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [binary, "serve", target, "--host", "127.0.0.1", "--port", port, "--dtype", "float32", "--enforce-eager"]
    command += ["--no-enable-prefix-caching", "--speculative-config", json.dumps(speculative)]
    with tempfile.TemporaryFile("w+") as log:
        try:
            process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log)
        except OSError as error:
            raise UserError(f"{binary} cannot be run: {error.strerror}") from None
        try:
            yield _ready(f"http://127.0.0.1:{port}", process, log)
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()


def _ready(url: str, process: subprocess.Popen[bytes], log: IO[str]) -> Server:
    for _ in range(START_SECONDS):
        if process.poll() is not None:
            log.seek(0)
            said = [line for line in log.read().splitlines() if "Error" in line] or ["no word"]
            raise UserError(f"vLLM did not start: {said[-1].strip()[-300:]}")
        with contextlib.suppress(UserError):
            return Server.connect(url, workers=1)
        time.sleep(1)
    raise UserError(f"vLLM did not start within {START_SECONDS} s")
