"""Exports of EAGLE-3 heads for vLLM, SGLang, llama.cpp and TensorRT-LLM.

R texts.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from draftlab.acceptance.chain_logprobs import score_chains
from draftlab.config.export import CheckConfig, ExportConfig, is_llama_server
from draftlab.config.inputs import TYPES
from draftlab.console import note
from draftlab.engine.drafters.eagle import EagleDrafter
from draftlab.engine.generate import Drafter, speculative_decode
from draftlab.errors import UserError, did_you_mean
from draftlab.exporting import card, gguf, head_checks, run, scripts, verify
from draftlab.exporting.compatibility import Finding, parse_runtimes, trial_prompts, warning
from draftlab.exporting.run import Exported
from draftlab.exporting.scripts import DraftKind
from draftlab.model import checkpoint, eagle, hub, llama
from draftlab.model.eagle import HeadConfig
from draftlab.model.eagle_llama import EagleLlama
from draftlab.model.llama import Llama
from draftlab.output import Output
from draftlab.prompts import Prompts
from draftlab.results.score import Score
from draftlab.sampling import SamplingParams

DEFAULT_K, MOST = 3, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleHead:
    """An EAGLE-3 head of a target."""

    folder: Path
    target: Path
    sizes: HeadConfig
    kind: DraftKind = "EAGLE-3 head"

    @property
    def layer_ids(self) -> Sequence[int]:
        return self.sizes.layer_ids

    @property
    def most(self) -> int:
        return MOST

    def read(self, dtype: torch.dtype) -> eagle.Head:
        return eagle.read(self.folder, self.target, dtype)

    def describe(self) -> str:
        config = self.sizes
        return (
            f"{config.params() / 1e6:,.4g}M parameters; reads the target's states after {_and(config.layer_ids)} "
            f"layers; predicts {config.draft_vocab:,} of its {config.vocab:,} ids; norm_before_residual "
            f"{str(config.norm_before_residual).lower()}"
        )

    def write(self, config: ExportConfig, out: Path, k: int, verifier: str) -> list[str]:
        stored = checkpoint.stored_dtype(self.folder)
        dtype = checkpoint.DTYPES[config.dtype] if config.dtype else stored
        layout = "speculators" if config.to == "speculators" else "native"
        with tempfile.TemporaryDirectory(dir=out.parent) as folder:
            place = Path(folder) if config.is_gguf else out
            eagle.write(place, self.read(dtype), layout, target=self.target, k=k, verifier=verifier)
            if not config.is_gguf:
                return []
            file = out / self.file(config)
            half = gguf.write_head(place, self.target, self.sizes, file, config.outtype)
        lines = [f"{len(half)} matrices stay f16: their rows do not divide into blocks"] if half else []
        return [*lines, f"{file.name}: {file.stat().st_size / 1e6:,.4g} MB"]

    def file(self, config: ExportConfig) -> str:
        return f"{self.folder.name}-{config.outtype}.gguf" if config.is_gguf else ""

    def drafter(self, target: Llama, outtype: str = "f32") -> Drafter:
        """outtype: see model."""
        return EagleDrafter(target, self.model(target, outtype))

    def model(self, target: Llama, outtype: str) -> EagleLlama:
        """outtype: the type of GGUF files that matrices are rounded to."""
        head = eagle.read(self.folder, self.target, target.embed.dtype, target.device)
        if outtype != "f32":
            rounded = {n: gguf.fake_quantize(w, outtype) if w.ndim == 2 else w for n, w in head.weights.items()}
            head = replace(head, weights=rounded)
        return EagleLlama(head, target.embed, self.folder)


def open_head(folder: Path, target: Path) -> EagleHead:
    """Raises UserError: a head of another target, or a broken one."""
    return EagleHead(folder=folder, target=target, sizes=eagle.check(folder, target))


def check(config: CheckConfig, draft: Path) -> list[Finding]:
    """Return all findings of heads; without --files-only the target decodes with them."""
    target = hub.locate(config.target, weights=False)
    findings = head_checks.check_files(draft, target, parse_runtimes(config.runtimes))
    if config.files_only or findings[0].level == "error":
        return findings
    heads, prompts, device = open_head(draft, target), trial_prompts(config, target), config.device
    try:
        llama.check_supported(target)
    except UserError as failure:
        return [*findings, warning("acceptance", f"not measured: {failure}", "ask the server's counters")]
    model = llama.load(hub.locate(config.target), torch.float32, checkpoint.resolve_device(device))
    return [*findings, head_checks.check_acceptance(model, heads.drafter(model), prompts, heads.most)]


def export(config: ExportConfig, output: Output) -> Exported:
    """Write heads for a runtime.

    Raises:
        UserError: the runtime computes no such heads, is missing, or has another acceptance than draftlab's engine.
    """
    folder = config.draft_directory()
    target = hub.locate(config.target, weights=config.verify_with is not None)
    heads = open_head(folder, target)
    scores = run.scores_of(config, folder, target)
    chains = [score for score in scores if "," not in score.name]
    k, reason, k_by_batch = run.predicted_k(config, folder) or (*_choose_k(config, heads, chains), None)
    _check(config, heads)
    prompts = run.load_verification_prompts(config, target, k) if config.verify_with is not None else None
    facts = run.facts_of(heads.folder)
    with output.directory() as work:
        lines, verified = heads.write(config, work, k, run.target_name(config.target, target)), None
        if config.verify_with is not None and prompts is not None:
            prompts, verified = _verify(config, heads, work, prompts, k)
            lines.append(verified.line())
        script = None
        if config.to not in ("hf", "gguf"):
            script = scripts.script(
                config.to, target=run.target_name(config.target, target), k=k, k_reason=reason, gguf=heads.file(config),
                kind=heads.kind, layer_ids=heads.layer_ids, k_by_batch=k_by_batch,
                sampling=run.choose_sampling(config, verified),
            )  # fmt: skip
            (work / script[0]).write_text(script[1])
            lines.append(f"serve with: sh {output.out / script[0]}")
        text = card.Card(
            name=heads.folder.name, target=config.target, kind=heads.kind, summary=heads.describe() + ".",
            commands=facts.commands, heldout=facts.heldout, scores=scores, script=script,
            verified=verified.line() if verified else "",
        ).text()  # fmt: skip
        (work / "README.md").write_text(text)
        notes: dict[str, object] = {"k": k} | run.verification_notes(prompts, verified)
        output.record(work, [heads.folder], **notes)
    if config.push_to_hub is not None:
        run.push(output.out, config.push_to_hub)
    return Exported(lines=lines, notes=notes, advice=run.advice(chains, heads.folder))


def _check(config: ExportConfig, heads: EagleHead) -> None:
    if config.use_heterogeneous_vocab:
        raise UserError(f"--use-heterogeneous-vocab: {heads.folder} has heads on the target's states, and its ids")
    if config.to == "transformers":
        raise UserError(f"{heads.folder} is an EAGLE-3 head, and transformers has no EAGLE-3")
    runtime = {"gguf": "llama.cpp", "speculators": "vllm"}.get(config.to, config.to)
    if runtime != "hf":
        for finding in head_checks.check_exported(heads.sizes, heads.target, runtime):
            if finding.level == "error":
                raise UserError(f"{heads.folder}: {runtime}: {finding.text}; {finding.fix}".removesuffix("; "))
    if config.is_gguf and config.outtype not in TYPES:
        raise UserError(f"--outtype {config.outtype}: no such type of heads{did_you_mean(config.outtype, TYPES)}")
    if config.verify_with is not None:
        llama.check_supported(heads.target)  # draftlab's engine counts what the runtime should accept
        if config.is_gguf and not is_llama_server(config.verify_with):
            raise UserError(f"--verify-with {config.verify_with}: heads are verified with llama.cpp's llama-server")


def _choose_k(config: ExportConfig, heads: EagleHead, scores: list[Score]) -> tuple[int, str]:
    if config.k is not None and config.k > heads.most:
        raise UserError(f"--k {config.k}: {heads.folder} drafts at most {heads.most} tokens")
    if config.k is None and not scores:
        return min(heads.most, DEFAULT_K), run.UNMEASURED_K
    return run.choose_k(config, scores, None)


def _verify(
    config: ExportConfig, heads: EagleHead, work: Path, prompts: Prompts, k: int
) -> tuple[Prompts, verify.Verification]:
    """Return a prompt for every turn, and what the runtime accepted of them."""
    assert config.verify_with is not None
    program = config.verify_with
    model = llama.load(heads.target, torch.float32, checkpoint.resolve_device(config.device))
    prompts = run.answer_turns(config, heads.target, prompts, model)
    rows, outtype = [prompt.ids for prompt in prompts.rows], config.outtype if config.is_gguf else "f32"
    if config.temperature > 0:
        note(f"sampling {len(rows)} texts with {program.name}, then drafting along them here")
        texts = verify.to_sample(rows, run.NEW_TOKENS, k)
        head = heads.model(model, outtype)

        def count(texts: verify.TargetTexts) -> verify.Counts:
            return count_chains(model, head, texts, config.temperature)

    else:
        note(f"decoding {len(rows)} texts with the heads here, then with {program.name}")
        sampling = SamplingParams(max_tokens=run.NEW_TOKENS, stop_token_ids=checkpoint.eos_token_ids(heads.target))
        texts, emitted = decode_texts(model, heads.drafter(model, outtype), rows, sampling, k)

        def count(texts: verify.TargetTexts) -> verify.Counts:
            return {"greedy": steps_of(emitted, texts)}

    if not config.is_gguf:
        method = "greedy" if config.to == "speculators" else run.choose_sampling(config).method
        speculative, target = scripts.speculative_config(str(work), k, heads.kind, method), heads.target
        if config.to == "speculators":
            speculative, target = None, work
        command = verify.vllm_command(program, target, speculative, config.gpu_memory_utilization)
        return prompts, verify.in_vllm(command, texts, count, config.temperature, method)
    return prompts, verify.against_llama_server(
        program, heads.target, work / heads.file(config), texts, "draft-eagle3", count, config.temperature
    )


def decode_texts(
    target: Llama, drafter: Drafter, prompts: list[list[int]], sampling: SamplingParams, k: int
) -> tuple[verify.TargetTexts, list[list[int]]]:
    """Decode greedily up to the end of each text and k tokens more; also return the tokens of each step after the
    prefill.
    """
    longer = replace(sampling, max_tokens=sampling.max_tokens + k + 1, stop_token_ids=())
    completions, emitted = [], []
    for prompt in prompts:
        steps = list(speculative_decode(target, drafter, [prompt], k, longer))
        completions.append([token for step in steps for token in step.tokens])
        emitted.append([len(step.tokens) for step in steps[1:]])
    return verify.up_to_end(prompts, completions, sampling, k), emitted


def count_chains(target: Llama, head: EagleLlama, texts: verify.TargetTexts, temperature: float) -> verify.Counts:
    """Return tokens after the prefill's and steps of each text, if a head drafts along it."""
    sampling, vocab = SamplingParams(temperature=temperature), target.shape.vocab
    scores = score_chains(target, head, texts.pairs, vocab, sampling, texts.k)
    return verify.counts_of(scores, lambda: target, vocab, texts, temperature)


def steps_of(emitted: Sequence[Sequence[int]], texts: verify.TargetTexts) -> np.ndarray:
    """Return tokens after the prefill's and steps of each text, [R, 2], up to its length; the last step counts whole.

    emitted: see decode_texts.
    """
    counts = []
    for steps, length in zip(emitted, texts.tokens, strict=True):
        reached = np.concatenate([[1], 1 + np.cumsum(steps)])  # tokens before each step, and after the last
        number = int((reached < length).sum())
        counts.append((float(reached[number]) - 1, float(number)))
    return np.array(counts)


def _and(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last
