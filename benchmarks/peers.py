"""Time one target and draft in draftlab, transformers, llama.cpp and vLLM's CPU build, each at its best K.

All decode the same prompts greedily at batch size 1 on one thread. Each engine decodes in three ways, at each precision
that it supports on this machine: plainly, with the exported draft, and with n-gram lookup. Whole requests are timed,
and decoding after the prefill. K is chosen on other prompts than the timed prompts. Each combination of engine,
precision, way and K (an arm) runs in a separate process. The arms take turns, once for each part of the prompts. Times
are CPU seconds. Answers are kept in --work, so a run that was stopped resumes. Engines that are not installed are
skipped.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
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
from draftlab.data.prompts import Prompts, load_prompts
from draftlab.engine.drafters.ngram import LatestLookupDrafter
from draftlab.engine.generate import Drafter, ModelDrafter, speculative_decode
from draftlab.errors import UserError
from draftlab.exporting import gguf, hf
from draftlab.exporting.verify import running
from draftlab.intervals import Interval, Timing, Timings
from draftlab.model import checkpoint, devices, hub, llama
from draftlab.model.modes import with_mode
from draftlab.sampling import SamplingParams

INSIDE = Path(__file__).parent / "inside_peers.py"
WAYS = ("plain", "draft", "ngram")
OURS = "draftlab"
# instead of a K, stands for llama.cpp's defaults: n-grams of 12 tokens, drafts of 48 tokens
DEFAULTS = 0
BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "Q8_0": 8}
GGUF_TYPES = {"float32": "f32", "bfloat16": "bf16", "Q8_0": "q8_0"}
PRECISIONS = {  # precisions with 8 bits that each engine supports on a CPU, in addition to --dtype
    OURS: ("int8",),
    "transformers": (),
    "llama.cpp": ("Q8_0",),
    "vllm": (),
}
MODES = {
    OURS: "mode native",
    "transformers": "eager, assisted generation",
    "llama.cpp": "llama-server, GGML_NATIVE without AMX, whose kernels for Q8_0 end with an illegal instruction here",
    "vllm": "CPU build, compiled (enforce_eager=False), compiling not counted",
}
VLLM = {
    # one process must do all work, so that its CPU seconds count all of the work
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # numba, which finds vLLM's n-grams, would set PyTorch's OpenMP threads to all cores
    "NUMBA_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """An engine at one precision that decodes in one way, with at most k drafted tokens per step. Plain has k = 0."""

    engine: str
    precision: str
    way: str
    k: int

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.precision}-{self.way}-{self.k}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of inside_peers.timed() for an arm. prefill_seconds and seconds are CPU seconds by prompt."""

    prefill_seconds: list[float]
    seconds: list[float]
    wall_seconds: list[float]
    texts: list[list[int]]
    steps: list[list[int]]
    version: str

    def requests(self) -> list[Timing]:
        return [(len(text), seconds) for text, seconds in zip(self.texts, self.seconds, strict=True)]

    def decoding(self) -> list[Timing]:
        times = zip(self.texts, self.seconds, self.prefill_seconds, strict=True)
        return [(len(text) - 1, max(seconds - prefill, 1e-9)) for text, seconds, prefill in times]

    def and_then(self, other: "Answer") -> "Answer":
        """Return an Answer with these answers, followed by those to another part of the prompts."""
        mine, theirs = asdict(self), asdict(other)
        return Answer(
            **{name: mine[name] + theirs[name] for name in mine if name != "version"},
            version=self.version,
        )


Groups = dict[tuple[str, str, str], dict[int, Answer]]  # by engine, precision and way, then by K


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A target with its draft, and the prompts to decode.

    Args:
        peer_draft: Exported draft, for transformers and vLLM.
        files: GGUF files of target and draft, by precision.
        dtype: Data type of all engines, apart from PRECISIONS.
        context: Number of tokens of the longest prompt with its answer.
    """

    target: Path
    draft: Path
    peer_draft: Path
    files: dict[str, tuple[Path, Path]]
    prompts: list[list[int]]
    eos: list[int]
    new_tokens: int
    dtype: str
    context: int

    def asked(self, arm: Arm) -> dict[str, Any]:
        """Return the request to an engine as JSON values, see inside_peers.py."""
        return {
            "prompts": self.prompts,
            "way": arm.way,
            "k": arm.k,
            "new_tokens": self.new_tokens,
            "eos": self.eos,
            "dtype": self.dtype,
            "context": self.context,
        }


def main(
    draft: Annotated[Path, typer.Option(help="Draft checkpoint.")],
    work: Annotated[Path, typer.Option(help="Folder for answers, in which a stopped run resumes.")],
    target: Annotated[str, typer.Option(help="Target checkpoint.")] = "tiny",
    prompt_file: Annotated[Path | None, typer.Option(help="JSON-lines file with prompts or conversations.")] = None,
    data: Annotated[str, typer.Option(help="Without a prompt file: data whose beginnings are the prompts.")] = "stdlib",
    prompts: Annotated[int, typer.Option(help="Number of prompts, evenly spaced in the file.")] = 24,
    parts: Annotated[int, typer.Option(help="Number of parts into which prompts are split for the turns.")] = 2,
    new_tokens: Annotated[int, typer.Option(help="Largest number of tokens after each prompt.")] = 64,
    chat: Annotated[ChatMode, typer.Option(help="Use the chat template: auto, on or off.")] = "auto",
    k: Annotated[str, typer.Option(help="Numbers of tokens to draft with the draft model.")] = "1,2,3",
    ngram_k: Annotated[str, typer.Option(help="Numbers of tokens to draft with n-grams.")] = "2,5",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    llama_server: Annotated[Path | None, typer.Option(help="Path of llama-server.")] = None,
    vllm: Annotated[Path | None, typer.Option(help="Path of a Python that has vLLM's CPU build.")] = None,
    transformers: Annotated[Path | None, typer.Option(help="Path of a Python that has transformers.")] = Path(
        sys.executable
    ),
    out: Annotated[Path | None, typer.Option(help="File for the result, which is also printed.")] = None,
) -> None:
    torch.set_num_threads(1)
    programs = {"transformers": transformers, "llama.cpp": llama_server, "vllm": vllm}
    here = {name: program for name, program in programs.items() if program is not None and program.exists()}
    for name in programs.keys() - here.keys():
        note(f"{name} is not installed, and is skipped")
    locations = hub.locate(target), hub.locate(str(draft))
    tokenizer = checkpoint.load_tokenizer(locations[0])
    chosen = load_prompts(prompt_file, data, tokenizer, count=prompts + 1, tokens=None, seed=0, chat=chat)
    ks = {"plain": [0], "draft": _numbers(k), "ngram": _numbers(ngram_k)}
    arms = list(arms_of([OURS, *here], ks, dtype))
    work.mkdir(parents=True, exist_ok=True)
    jobs = _jobs(
        locations,
        work,
        chosen,
        parts,
        new_tokens,
        dtype,
        max(*ks["draft"], *ks["ngram"]),
        "llama.cpp" in here,
    )
    for part, job in enumerate(jobs):
        for number, arm in enumerate(arms if part % 2 == 0 else reversed(arms), 1):
            file = work / f"{arm.name}-{part}.json"
            if not file.exists():
                note(f"part {part + 1} of {parts}, arm {number} of {len(arms)}: {arm.name}")
                answer = _ours(job, arm) if arm.engine == OURS else _theirs(here[arm.engine], job, arm)
                file.write_text(json.dumps(asdict(answer)))
    answers = {arm: _answer(work, arm, parts) for arm in arms}
    about = {
        "benchmark": "peers",
        "target": locations[0].name,
        "draft": locations[1].name,
        "prompts": prompts,
        "data": chosen.source,
        "chat": chosen.chat,
        "new_tokens": new_tokens,
        "batch": 1,
        "temperature": 0,
        "skipped": sorted(programs.keys() - here.keys()),
    }
    text = json.dumps(result(answers) | about | environment(1), indent=1)
    if out is not None:
        out.write_text(text + "\n")
    print(text)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def arms_of(engines: Sequence[str], ks: dict[str, list[int]], dtype: str) -> Iterator[Arm]:
    """Yield every arm. Arms with the same way are adjacent, so that changes of the machine affect all engines alike."""
    for way, counts in ks.items():
        for engine in engines:
            for precision in (dtype, *PRECISIONS[engine]):
                own = [DEFAULTS] if (way, engine) == ("ngram", "llama.cpp") else []
                for k in [*own, *counts]:
                    yield Arm(engine=engine, precision=precision, way=way, k=k)


def _jobs(
    locations: tuple[Path, Path],
    work: Path,
    prompts: Prompts,
    parts: int,
    new_tokens: int,
    dtype: str,
    k: int,
    as_gguf: bool,
) -> list[Job]:
    """Export the draft, and return a job for each part of the prompts. The first prompt is the warm-up of every job."""
    target, draft = locations
    exported = work / "draft"
    if not exported.exists():
        exported.mkdir()
        hf.write(draft, exported, tokenizer_from=target, dtype=devices.DTYPES[dtype])
    files: dict[str, tuple[Path, Path]] = {}
    for precision in (dtype, *PRECISIONS["llama.cpp"]) if as_gguf else ():
        files[precision] = (work / f"target-{precision}.gguf", work / f"draft-{precision}.gguf")
        for directory, file in zip((target, exported), files[precision], strict=True):
            if not file.exists():
                gguf.write(directory, file, GGUF_TYPES[precision])
    ids = [row.ids for row in prompts.rows]
    context = max(map(len, ids)) + new_tokens + max(2 * k, 48) + 2
    return [
        Job(
            target=target,
            draft=draft,
            peer_draft=exported,
            files=files,
            prompts=[ids[0], *ids[1 + part :: parts]],
            eos=list(checkpoint.eos_token_ids(target)),
            new_tokens=new_tokens,
            dtype=dtype,
            context=context,
        )
        for part in range(parts)
    ]


def _answer(work: Path, arm: Arm, parts: int) -> Answer:
    answers = [Answer(**json.loads((work / f"{arm.name}-{part}.json").read_text())) for part in range(parts)]
    whole = answers[0]
    for answer in answers[1:]:
        whole = whole.and_then(answer)
    return whole


def _ours(job: Job, arm: Arm) -> Answer:
    dtype, int8 = getattr(torch, job.dtype), arm.precision == "int8"
    target = with_mode(llama.load(job.target, dtype), "native", int8)
    drafter: Drafter | None = None
    if arm.way == "draft":
        draft = with_mode(llama.load(job.draft, dtype), "native", int8)
        drafter = ModelDrafter(draft, checkpoint.vocab_size(job.target))
    elif arm.way == "ngram":
        drafter = LatestLookupDrafter(NGRAM)
    counted = [0, 0]

    def decode(prompt: list[int], new_tokens: int) -> list[int]:
        sampling = SamplingParams(max_tokens=new_tokens, stop_token_ids=tuple(job.eos))
        steps = list(speculative_decode(target, drafter, [prompt], arm.k if drafter else 0, sampling))
        counted[0] += sum(len(step.tokens) for step in steps[1:])
        counted[1] += len(steps) - 1
        return [token for step in steps for token in step.tokens]

    return Answer(**timed(decode, job.asked(arm), counted), version=draftlab.__version__)


def _theirs(program: Path, job: Job, arm: Arm) -> Answer:
    if arm.engine == "llama.cpp":
        return _ask_llama_server(program, job, arm)
    asked = job.asked(arm) | {
        "peer": arm.engine,
        "target": str(job.target),
        "draft": str(job.peer_draft),
    }
    environ = os.environ | VLLM | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([program, INSIDE], input=json.dumps(asked), capture_output=True, text=True, env=environ)
    if done.returncode:
        raise UserError(f"{program}: {done.stderr.strip()[-600:]}")
    return Answer(**json.loads(done.stdout))


def _ask_llama_server(program: Path, job: Job, arm: Arm) -> Answer:
    """Time an arm in llama.cpp's server. Times are CPU seconds of the server, which include HTTP."""
    counted = [0, 0]
    with running(_server_command(program, job, arm), os.environ | {"OMP_NUM_THREADS": "1"}) as (
        server,
        child,
    ):
        client, process = server.http.client, psutil.Process(child.pid)

        def decode(prompt: list[int], new_tokens: int) -> list[int]:
            answer = (
                client.post(
                    "/completion",
                    json={
                        "prompt": prompt,
                        "n_predict": new_tokens,
                        "temperature": 0.0,
                        "samplers": ["top_k"],
                        "top_k": 1,
                        "cache_prompt": False,
                        "return_tokens": True,
                    },
                )
                .raise_for_status()
                .json()
            )
            timings = answer["timings"]
            counted[0] += timings["predicted_n"] - 1
            counted[1] += timings["predicted_n"] - 1 - timings.get("draft_n_accepted", 0)
            return answer["tokens"]

        def cpu_seconds() -> float:
            used = process.cpu_times()
            return used.user + used.system

        return Answer(**timed(decode, job.asked(arm), counted, cpu_seconds), version=server.version)


def _server_command(program: Path, job: Job, arm: Arm) -> list[object]:
    """Return the command that starts llama-server for an arm.

    ngram-simple drafts at least as many tokens as its n-gram has, so the n-gram has at most K tokens. If k is
    DEFAULTS, llama.cpp's default lengths are used.
    """
    one = [
        "--threads",
        1,
        "--threads-batch",
        1,
        "--spec-draft-threads",
        1,
        "--spec-draft-threads-batch",
        1,
    ]
    size = ["--ctx-size", job.context, "--parallel", 1, "--cache-ram", 0]
    target, draft = job.files[arm.precision]
    speculative: list[object] = []
    if arm.way == "draft":
        speculative = [
            "--model-draft",
            draft,
            "--spec-type",
            "draft-simple",
            "--spec-draft-n-max",
            arm.k,
        ]
        speculative += ["--spec-draft-p-min", 0]
    if arm.way == "ngram":
        speculative = ["--spec-type", "ngram-simple"]
        if arm.k != DEFAULTS:
            lengths = [
                "--spec-ngram-simple-size-n",
                min(NGRAM, arm.k),
                "--spec-ngram-simple-size-m",
                arm.k,
            ]
            speculative += lengths
    return [program, "--model", target, *one, *size, *speculative]


def result(answers: dict[Arm, Answer]) -> dict[str, Any]:
    """Return the results of each engine, precision and way, and how much faster draftlab is than the fastest peer."""
    groups: Groups = {}
    for arm, answer in answers.items():
        groups.setdefault((arm.engine, arm.precision, arm.way), {})[arm.k] = answer
    rows = [_row(*key, by_k, groups) for key, by_k in groups.items()]
    return {"engines": rows, "over_best_peer": list(_leads(groups))}


def _row(
    engine: str,
    precision: str,
    way: str,
    by_k: dict[int, Answer],
    groups: dict[tuple[str, str, str], dict[int, Answer]],
) -> dict[str, Any]:
    best = max(by_k, key=lambda k: intervals.tokens_per_second(by_k[k].requests()))
    answer = by_k[best]
    plain = groups[engine, precision, "plain"][0]
    steps = intervals.ratio(np.array(answer.steps, dtype=float))
    return {
        "engine": engine,
        "version": answer.version,
        "mode": MODES[engine],
        "target_dtype": precision,
        "draft_dtype": precision if way == "draft" else None,
        "way": way,
        "k": best,
        "ks": sorted(by_k),
        "request_tps": _rate(list(by_k.values()), Answer.requests).model_dump(),
        "decode_tps": _rate([answer], Answer.decoding).model_dump(),
        "over_own_plain": _over(by_k, {0: plain}).model_dump(),
        "tokens_per_pass": steps.model_dump(),
        "same_texts": _same(answer, plain),
        "wall_over_cpu": sum(answer.wall_seconds) / sum(answer.seconds),
    }


def _rate(answers: list[Answer], timings: Any) -> Interval:
    """Return tokens per second at a K that is chosen on other prompts, see intervals.speedup.

    answers: The answers at each K. timings: Function that returns the timings of an answer.
    """
    one_a_second = [(1, 1.0)] * len(answers[0].texts)
    return intervals.speedup(Timings([timings(answer) for answer in answers], one_a_second))


def _over(first: dict[int, Answer], second: dict[int, Answer]) -> Interval:
    """Return the ratio of two speeds of whole requests, paired by prompt, each at a K chosen on other prompts."""
    # both speed-ups have the same baseline, which cancels out
    shared = next(iter(second.values())).requests()
    timings = [Timings([answer.requests() for answer in by_k.values()], shared) for by_k in (first, second)]
    return intervals.speedup_ratio(timings[0], timings[1], paired=True)


def _leads(groups: Groups) -> Iterator[dict[str, Any]]:
    """Yield, for each way and number of bits, the ratio of draftlab's speed of whole requests to the fastest peer's."""
    for (engine, precision, way), ours in groups.items():
        peers = {
            key: by_k
            for key, by_k in groups.items()
            if key[0] != OURS and key[2] == way and BITS[key[1]] == BITS[precision]
        }
        if engine != OURS or not peers:
            continue
        best = max(peers, key=lambda key: _rate(list(peers[key].values()), Answer.requests).value)
        lead = _over(ours, peers[best])
        yield {"bits": BITS[precision], "way": way, "peer": best[0], "over": lead.model_dump()}


def _same(answer: Answer, plain: Answer) -> float:
    """Return the fraction of texts that equal those of plain decoding. A missing end-of-text token is ignored."""
    pairs = zip(answer.texts, plain.texts, strict=True)
    return sum(a == b or ([*a, *b[len(a) :]] == b and len(b) - len(a) == 1) for a, b in pairs) / len(plain.texts)


if __name__ == "__main__":
    typer.run(main)
