"""Verification of an export: its acceptance in the runtime must be its acceptance in draftlab's engine.

The target verifies every token, so a draft that a conversion broke still gives fluent text, but no speed-up. R texts.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from draftlab.acceptance import expected
from draftlab.acceptance.offset_logprobs import score_offsets
from draftlab.acceptance.token_logprobs import Text, TokenLogprobs, score_tokens
from draftlab.config.server_rules import SampleMethod
from draftlab.console import note
from draftlab.engine.generate import decode, output_tokens
from draftlab.errors import UserError, one_line
from draftlab.exporting import gguf
from draftlab.intervals import Interval, ratio_interval
from draftlab.model import checkpoint, decoder, parallel
from draftlab.model.decoder import Decoder
from draftlab.model.sentencepiece import PROBES
from draftlab.reading import parse_json
from draftlab.sampling import SamplingParams
from draftlab.servers.client import Server, spec_decode_counters
from draftlab.servers.processes import running

# without these its CPU build takes half of the memory, and a core of its own for every thread
VLLM_ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
WORKER = Path(__file__).parent / "llama_cpp_worker.py"
MATCH = {"f32": 0.995, "f16": 0.98, "bf16": 0.97, "q8_0": 0.95}  # lowest share of tokens with the same hit or miss
MATCH_BELOW_8_BITS = 0.9  # llama.cpp rounds activations to 8 bits, too


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTexts:
    """Texts of the target. tokens: scored ones of each text, [R]; a greedy text is k longer: every step drafts k.

    A sampled text is the server's, and without completions before it has answered.
    """

    prompts: list[list[int]]
    completions: list[list[int]]
    tokens: list[int]
    k: int

    @property
    def rows(self) -> list[list[int]]:
        return [p + c for p, c in zip(self.prompts, self.completions, strict=True)]

    @property
    def pairs(self) -> list[Text]:
        return [(np.array(p), np.array(c)) for p, c in zip(self.prompts, self.completions, strict=True)]


Counts = Mapping[SampleMethod, np.ndarray]  # draftlab's tokens and steps of each text, [R, 2]
Count = Callable[[TargetTexts], Counts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Acceptance length in draftlab, with a 95 % interval over texts, and in the runtime.

    by_method: in draftlab, by how the draft samples; greedy alone at temperature 0.
    """

    runtime: str
    k: int
    temperature: float
    texts: int
    expected: Interval
    measured: float
    method: SampleMethod
    by_method: Mapping[SampleMethod, float]
    details: str

    def facts(self) -> dict[str, object]:
        """Return it as JSON has it. gap: the runtime's less draftlab's."""
        expected = self.expected
        numbers = {"measured": self.measured, "draftlab": expected.value, "low": expected.low, "high": expected.high}
        gap = self.measured - expected.value
        asked = {"k": self.k, "temperature": self.temperature, "texts": self.texts}
        drafts = {"draft_sample_method": self.method, "by_method": dict(self.by_method)} if self.temperature else {}
        return {"runtime": self.runtime, **asked, **drafts, "gap": gap, **numbers}

    def line(self) -> str:
        sampled = f"temperature {self.temperature:g}, {self.method} drafts, " if self.temperature else ""
        return (
            f"{self.runtime}: {self.measured:.3f} tokens per target pass, in draftlab {self.expected.value:.3f} "
            f"({self.expected.low:.3f} to {self.expected.high:.3f}), K = {self.k}, {sampled}{self.texts} texts; "
            f"{self.details}"
        )


def to_sample(prompts: list[list[int]], tokens: int, k: int) -> TargetTexts:
    """Return texts that the server is yet to write."""
    return TargetTexts(prompts=prompts, completions=[[] for _ in prompts], tokens=[tokens] * len(prompts), k=k)


def generate_texts(model: Decoder, prompts: list[list[int]], sampling: SamplingParams, k: int) -> TargetTexts:
    """Generate greedily up to the end of each text, and k tokens more."""
    longer = replace(sampling, max_tokens=sampling.max_tokens + k, stop_token_ids=())
    return up_to_end(prompts, output_tokens(decode(model, prompts, longer)), sampling, k)


def up_to_end(prompts: list[list[int]], completions: list[list[int]], sampling: SamplingParams, k: int) -> TargetTexts:
    """Return texts that end as sampling says, and k tokens more of each."""
    lengths = []
    for ids in completions:
        ends = (place for place, token in enumerate(ids, 1) if token in sampling.stop_token_ids)
        lengths.append(min(sampling.max_tokens, next(ends, sampling.max_tokens)))
    texts = [ids[: length + k] for ids, length in zip(completions, lengths, strict=True)]
    return TargetTexts(prompts=prompts, completions=texts, tokens=lengths, k=k)


def top1_hits(draft: Path, texts: TargetTexts, device: torch.device) -> list[np.ndarray]:
    """Return for each text which of its tokens are the draft's argmax, bool [n]."""
    model = decoder.load(draft, torch.float32, device)
    scores = score_tokens(model, texts.pairs, checkpoint.vocab_size(draft), SamplingParams())
    return [scored.ranks == 0 for scored in scores]


def count_draft(draft: Path, target: Path, texts: TargetTexts, temperature: float, device: torch.device) -> Counts:
    """Count the steps of a draft that drafts as it was trained to, and that samples as its target does."""
    model, vocab = decoder.load(draft, torch.float32, device), checkpoint.vocab_size(draft)
    sampling, token = SamplingParams(temperature=temperature), parallel.pard_token(draft)
    scores = (
        score_tokens(model, texts.pairs, vocab, sampling)
        if token is None
        else score_offsets(model, texts.pairs, vocab, sampling, texts.k, token)
    )
    return counts_of(scores, lambda: decoder.load(target, torch.float32, device), vocab, texts, temperature)


def counts_of(
    scores: Sequence[TokenLogprobs], target: Callable[[], Decoder], vocab: int, texts: TargetTexts, temperature: float
) -> Counts:
    """Count the steps of a draft with this view of the texts' tokens, at their temperature.

    A greedy draft's steps are certain, see greedy_steps; those of one that samples are expected (acceptance/expected).
    vocab: logits that count.
    """
    greedy = count_steps([scored.ranks == 0 for scored in scores], texts)
    if temperature == 0:
        return {"greedy": greedy}
    own = score_tokens(target(), texts.pairs, vocab, SamplingParams(temperature=temperature))
    chances = [expected.chances(q.logprobs.T, p.logprobs).T for q, p in zip(scores, own, strict=True)]
    return {"greedy": greedy, "probabilistic": expected_steps(chances, texts)}


def expected_steps(chances: Sequence[np.ndarray], texts: TargetTexts) -> np.ndarray:
    """Return tokens and expected steps of each text, [R, 2], where each drafts k tokens; the prefill gives the first.

    chances: that each token is accepted, [n] or [n, K] by the age of the step.
    """
    lengths = np.array(texts.tokens) - 1
    counts = expected.chain(expected.texts_of([row[1:] for row in chances], lengths + texts.k), texts.k)
    return np.stack([counts.tokens + counts.truncated, counts.steps], 1)  # a cut step's own token counts, too


def greedy_steps(hits: Sequence[bool] | np.ndarray, k: int, tokens: int) -> tuple[int, int]:
    """Return tokens and steps of speculative decoding of one text; the prefill gives the first token.

    hits: where the draft's most probable token is the text's, [n], or [n, K] by the age of the step. None counts beyond
    n. Servers let such tokens stand at any temperature, and no other: what replaces a rejected token is another one.
    """
    rows = np.asarray(hits)
    by_age, at, steps = np.broadcast_to(rows if rows.ndim == 2 else rows[:, None], (len(rows), k)), 1, 0
    while at < tokens:
        accepted = next((i for i in range(k) if at + i >= len(rows) or not by_age[at + i, i]), k)
        at, steps = at + accepted + 1, steps + 1
    return at - 1, steps


def in_llama_cpp(
    python: Path, file: Path, qtype: str, texts: TargetTexts, hits: list[np.ndarray], tokenizer_from: Path
) -> Verification:
    """Score a GGUF file in the llama.cpp of a Python. hits: in draftlab.

    Raises:
        UserError: it does not run, or gives another acceptance or other tokens.
    """
    answer = run_llama_cpp(python, {"model": str(file), "rows": texts.rows, "texts": list(PROBES)})
    rows = zip(texts.prompts, texts.completions, answer["best"], strict=True)
    own = [np.array(best[len(prompt) - 1 : -1]) == np.array(completion) for prompt, completion, best in rows]
    match = float(np.mean(np.concatenate(hits) == np.concatenate(own)))
    tokenizer = checkpoint.load_tokenizer(tokenizer_from)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in PROBES]
    same = sum(a == b for a, b in zip(answer["ids"], ids, strict=True))
    tokens, steps = count_steps(own, texts).sum(0)
    result = compare(
        f"llama.cpp ({answer['version']})", texts, 0.0, {"greedy": count_steps(hits, texts)}, float(tokens / steps),
        f"the same hits for {match:.2%} of tokens; its tokenizer gives the same ids for {same} of {len(PROBES)} "
        "probe texts",
    )  # fmt: skip
    if match < MATCH.get(qtype, MATCH_BELOW_8_BITS):
        raise UserError(f"--verify-with: the export drafts other tokens in llama.cpp. {result.line()}")
    return result


def in_vllm(
    command: Sequence[object], texts: TargetTexts, count: Count, temperature: float, method: SampleMethod = "greedy"
) -> Verification:
    """Start a vLLM server of draft and target, and read its counters. method: that of the command.

    Raises:
        UserError: it does not start, or has another acceptance.
    """
    with running(command, VLLM_ON_CPU | os.environ) as (server, _):
        completions, measured = served_by_vllm(server, texts, temperature)
    texts, details = as_served(texts, completions, temperature)
    return compare(f"vLLM {server.version}", texts, temperature, count(texts), measured, details, method)


def served_by_vllm(server: Server, texts: TargetTexts, temperature: float) -> tuple[list[list[int]], float]:
    """Return what a running server writes after the prompts, and its tokens per target pass.

    Raises:
        UserError: its metrics count no speculative steps.
    """
    before = server.metrics()
    sampling = SamplingParams(max_tokens=max(texts.tokens), temperature=temperature)
    completions = [completion.ids for completion in server.generate(texts.prompts, sampling)]
    counters = spec_decode_counters(before, server.metrics())
    if counters is None:
        raise UserError(f"{server.http.url} drafted nothing: its /metrics count no speculative steps")
    return completions, counters.acceptance.mean_acceptance_length


def as_served(texts: TargetTexts, completions: Sequence[list[int]], temperature: float) -> tuple[TargetTexts, str]:
    """Return the texts to count steps of: the target's greedy ones, or what the server sampled; and a remark."""
    if temperature == 0:
        return texts, f"{share_of_same(completions, texts):.2%} of its output tokens are the target's"
    lengths = list(map(len, completions))
    return replace(texts, completions=list(completions), tokens=lengths), f"{sum(lengths)} sampled tokens"


def against_llama_server(
    program: Path, target: Path, draft: Path, texts: TargetTexts, spec_type: str, count: Count, temperature: float
) -> Verification:
    """Score a GGUF file of a draft in llama-server, with the target in float32.

    Raises UserError: see in_llama_server.
    """
    with tempfile.TemporaryDirectory(dir=draft.parent) as folder:
        file = Path(folder) / "target.gguf"
        note(f"writing {target.name} as GGUF for {program.name}")
        gguf.write(target, file, "f32")
        command = llama_server_command(program, file, draft, texts, spec_type)
        if temperature == 0:
            texts = replace(texts, tokens=lengths_before_end(texts, checkpoint.eos_token_ids(target)))
        return in_llama_server(command, texts, count, temperature)


def lengths_before_end(texts: TargetTexts, ends: Sequence[int]) -> list[int]:
    """Return the tokens of each text without its end of text, [R]: drafted tokens beyond it do not count then."""
    pairs = zip(texts.completions, texts.tokens, strict=True)
    return [length - (ids[length - 1] in ends) for ids, length in pairs]


def in_llama_server(command: Sequence[object], texts: TargetTexts, count: Count, temperature: float) -> Verification:
    """Start llama.cpp's server with target and draft, and read its counters.

    Raises:
        UserError: it does not start, or has another acceptance.
    """
    with running(command, VLLM_ON_CPU | os.environ) as (server, _):
        completions, measured = served_by_llama_cpp(server, texts, temperature)
    texts, details = as_served(texts, completions, temperature)
    counts = to_the_limit(count(texts), texts)
    return compare(f"llama.cpp {server.version}", texts, temperature, counts, measured, details)


def served_by_llama_cpp(server: Server, texts: TargetTexts, temperature: float) -> tuple[list[list[int]], float]:
    """Return what a running server writes after the prompts, and its tokens per target pass.

    Raises:
        UserError: its metrics count no speculative steps.
    """
    before = server.metrics()
    asked = [SamplingParams(max_tokens=n, temperature=temperature, seed=i) for i, n in enumerate(texts.tokens)]
    completions = [server.generate_ids(*each)[0] for each in zip(texts.prompts, asked, strict=True)]
    counters = spec_decode_counters(before, server.metrics())
    if counters is None:
        raise UserError(f"{server.http.url} drafted nothing: its /metrics count no speculative steps")
    tokens = sum(len(ids) - 1 for ids in completions)
    return completions, tokens / (tokens - sum(counters.num_accepted_tokens_per_pos))


def to_the_limit(counts: Counts, texts: TargetTexts) -> Counts:
    """Return the counts of a server that drafts greedily, and in the last step no more than fits a text."""
    return {"greedy": np.stack([np.array(texts.tokens) - 1.0, counts["greedy"][:, 1]], 1)}


def llama_server_command(program: Path, target: Path, draft: Path, texts: TargetTexts, spec_type: str) -> list[object]:
    """Return the command of a server that computes and caches in float32. target, draft: GGUF files."""
    context = max(map(len, texts.prompts)) + max(texts.tokens) + 2 * texts.k + 2
    command: list[object] = [program.absolute(), "--model", target]
    command += ["--spec-type", spec_type, "--spec-draft-model", draft]
    command += ["--spec-draft-n-max", texts.k, "--spec-draft-p-min", 0, "--ctx-size", max(256, context), "--metrics"]
    command += ["--parallel", 1, "--threads", torch.get_num_threads(), "--cache-ram", 0, "--flash-attn", "off"]
    for cache in ("cache-type", "spec-draft-type"):
        command += [f"--{cache}-k", "f32", f"--{cache}-v", "f32"]
    return command


def share_of_same(completions: Sequence[list[int]], texts: TargetTexts) -> float:
    """Return the share of a server's tokens that are the target's at their places."""
    pairs = zip(completions, texts.completions, strict=True)
    return float(np.mean([a == b for ids, text in pairs for a, b in zip(ids, text, strict=False)]))


def run_llama_cpp(python: Path, job: dict[str, object]) -> dict:
    """Run llama_cpp_worker.py in a Python that has llama-cpp-python. Raises UserError: it fails."""
    try:
        done = subprocess.run([python.absolute(), WORKER], input=json.dumps(job), capture_output=True, text=True)
    except OSError as error:
        raise UserError(f"{python} cannot be run: {error.strerror}") from None
    if done.returncode:
        silent = f"signal {-done.returncode} ended it" if done.returncode < 0 else "it printed nothing"
        message = (done.stderr.strip().splitlines() or [silent])[-1]
        hint = "; it wants a Python with llama-cpp-python" if "No module named" in message else ""
        raise UserError(f"{python} could not run llama.cpp: {message[:200]}{hint}")
    try:
        return parse_json(done.stdout)
    except ValueError as error:
        raise UserError(f"{python} could not run llama.cpp: its answer is not JSON ({one_line(error)})") from None


def count_steps(hits: list[np.ndarray], texts: TargetTexts) -> np.ndarray:
    """Return tokens and steps of each text, [R, 2]."""
    rows = zip(hits, texts.tokens, strict=True)
    return np.array([greedy_steps(row, texts.k, tokens) for row, tokens in rows], dtype=np.float64)


def compare(
    runtime: str, texts: TargetTexts, temperature: float, counts: Counts, measured: float, details: str,
    method: SampleMethod = "greedy",
) -> Verification:  # fmt: skip
    """Compare a runtime's acceptance length with draftlab's, see beside.

    Raises:
        UserError: it is outside the interval of draftlab's.
    """
    result = beside(runtime, texts, temperature, counts, measured, details, method)
    if not result.expected.low <= measured <= result.expected.high:
        raise UserError(f"--verify-with: the export has another acceptance. {result.line()}")
    return result


def beside(
    runtime: str, texts: TargetTexts, temperature: float, counts: Counts, measured: float, details: str,
    method: SampleMethod = "greedy",
) -> Verification:  # fmt: skip
    """Return a runtime's acceptance length beside draftlab's. method: of the runtime's draft, above temperature 0."""
    method = method if temperature else "greedy"
    sums: dict[SampleMethod, np.ndarray] = {name: rows.sum(0) for name, rows in counts.items()}
    lengths: dict[SampleMethod, float] = {name: float(tokens / steps) for name, (tokens, steps) in sums.items()}
    return Verification(
        runtime=runtime, k=texts.k, temperature=temperature, texts=len(texts.tokens), method=method, details=details,
        expected=ratio_interval(counts[method]), measured=measured, by_method=lengths,
    )  # fmt: skip


def vllm_command(
    program: Path, target: Path | str, speculative: dict[str, object] | None, gpu_memory_utilization: float | None
) -> list[object]:
    """Return the command of a float32 server. speculative: None, as the target's own configuration says."""
    command: list[object] = [program.absolute(), "serve", target, "--dtype", "float32", "--enforce-eager"]
    command += ["--no-enable-prefix-caching"]
    command += [] if speculative is None else ["--speculative-config", json.dumps(speculative)]
    share = gpu_memory_utilization
    return command + ([] if share is None else ["--gpu-memory-utilization", share])
