"""One export on disk: a directory or GGUF file, its card, a script that serves it, and its verification."""

import contextlib
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from draftlab import provenance, turns, workspace
from draftlab.config.export import ExportConfig, is_llama_server
from draftlab.config.inputs import TYPES
from draftlab.console import note
from draftlab.engine.batch_generate import check_context, turn_answers
from draftlab.errors import UserError, one_line
from draftlab.exporting import card, gguf, hf, scripts, verify
from draftlab.exporting.compatibility import PARALLEL_RUNTIMES, ModelFiles, check_vocabulary
from draftlab.latency.k_schedule import Ranges, read_schedule
from draftlab.model import checkpoint, decoder, hub, parallel
from draftlab.model.decoder import Decoder
from draftlab.model.size import read_size
from draftlab.model.tokenizer import common_vocabulary, known_ids
from draftlab.output import Output
from draftlab.prompts import Prompts, load_prompts
from draftlab.results.score import Score, read_score, score_files
from draftlab.sampling import SamplingParams

PROMPT_TOKENS, NEW_TOKENS, DEFAULT_K, DEFAULT_CONTEXT = 48, 64, 4, 2048
UNMEASURED_K = "a default; draftlab score measures the fastest"
TURN_TOKENS = 128  # of an answer to an earlier turn, as score's by default


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """lines: for people. notes: for draftlab.json. advice: see advice()."""

    lines: list[str]
    notes: dict[str, object]
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The records of a draft. commands: that made it, the first one first. heldout: acceptance before and after."""

    commands: list[str]
    heldout: tuple[float, float] | None


def export(config: ExportConfig, output: Output) -> Exported:
    """Write a draft model for a runtime.

    Raises:
        UserError: another vocabulary than the target's, an architecture or type that GGUF does not have, a runtime
            that is missing or accepts other tokens than draftlab's engine, or a failed upload.
    """
    target = hub.locate(config.target, weights=config.verify_with is not None)
    draft = config.draft_directory()
    _check(config, draft, target)
    output.check_space(read_size(draft).weight_bytes(2), "the export")
    scores = scores_of(config, draft, target)
    k, k_reason, k_by_batch = predicted_k(config, draft) or (
        *choose_k(config, scores, parallel.trained_offsets(draft)), None
    )  # fmt: skip
    in_parallel, facts = parallel.pard_token(draft) is not None, facts_of(draft)
    prompts = load_verification_prompts(config, target, k) if config.verify_with is not None else None
    with output.directory() as work:
        file = f"{draft.name}-{config.outtype}.gguf" if config.is_gguf else ""
        with tempfile.TemporaryDirectory(dir=work.parent) if config.is_gguf else contextlib.nullcontext(work) as place:
            directory = Path(place)
            words = draft if config.use_heterogeneous_vocab else target
            vocab, dtype = checkpoint.vocab_size(words), config.dtype and checkpoint.DTYPES[config.dtype]
            changed = hf.write(draft, directory, tokenizer_from=words, vocab=vocab, dtype=dtype)
            lines, verified = [*changed], None
            if config.is_gguf:
                lines += _write_gguf(config, directory, work / file)
            if config.verify_with is not None and prompts is not None:
                prompts, texts = _target_texts(config, target, prompts, k)
                verified = _verify(config, config.verify_with, directory, work / file, target, texts)
                lines.append(verified.line())
            size = read_size(directory).describe()
            context = checkpoint.max_model_len(directory, DEFAULT_CONTEXT)
        script = None
        if config.to not in ("hf", "gguf"):
            script = scripts.script(
                config.to, target=target_name(config.target, target), k=k, k_reason=k_reason, gguf=file,
                kind="parallel draft" if in_parallel else "draft model", heterogeneous=config.use_heterogeneous_vocab,
                k_by_batch=k_by_batch, sampling=choose_sampling(config, verified),
            )  # fmt: skip
            (work / script[0]).write_text(script[1])
            if in_parallel and config.to not in PARALLEL_RUNTIMES:
                lines.append(f"{config.to} cannot draft in parallel: it drafts with one pass for each token")
            lines.append(f"serve with: {'sh' if script[0].endswith('.sh') else 'python'} {output.out / script[0]}")
        owner = "its own, which the server translates" if config.use_heterogeneous_vocab else "the target's"
        changes = f" Changed in this export: {', '.join(changed)}." if changed else ""
        text = card.Card(
            name=draft.name, target=config.target, kind="draft model", commands=facts.commands,
            summary=f"{size}; vocabulary of {vocab:,} tokens, {owner}; context of {context:,} tokens.{changes}",
            heldout=facts.heldout, scores=scores, script=script,
            verified=verified.line() if verified else "",
        ).text()  # fmt: skip
        (work / "README.md").write_text(text)
        notes: dict[str, object] = {"changed": changed, "k": k} | verification_notes(prompts, verified)
        output.record(work, [draft], **notes)
    if config.push_to_hub is not None:
        push(output.out, config.push_to_hub)
    return Exported(lines=lines, notes=notes, advice=advice(scores, draft))


def verification_notes(prompts: Prompts | None, verified: verify.Verification | None) -> dict[str, object]:
    """Return the notes on what an export was verified with; none where it was not."""
    if prompts is None or verified is None:
        return {}
    about = {"data": prompts.source, "sha256": prompts.sha256, "chat": prompts.chat}
    return {"verified": verified.line(), "acceptance": verified.facts(), "prompts": about}


def push(directory: Path, repository: str) -> None:
    """Upload a finished directory.

    Raises:
        UserError: the hub refuses or cannot be reached; the directory stays.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=directory)
    except Exception as error:  # the hub client has an exception for each reason
        reason = f"{type(error).__name__}: {one_line(error, 200)}"
        raise UserError(f"{directory} is written, but not uploaded to {repository} ({reason})") from None


def _check(config: ExportConfig, draft: Path, target: Path) -> None:
    if config.to == "speculators":
        raise UserError(f"{draft} is a draft model, and speculators' layout is for EAGLE-3 heads: --to vllm")
    checkpoint.check(draft)
    if config.use_heterogeneous_vocab:
        _check_heterogeneous(config, draft, target)
    else:
        common_vocabulary(draft, target)
    if config.is_gguf:
        gguf.library()
        gguf.architecture(draft)


def _check_heterogeneous(config: ExportConfig, draft: Path, target: Path) -> None:
    """Raises UserError: the draft has the target's vocabulary, or the runtime does not translate between these two."""
    models = [ModelFiles.read(model) for model in (draft, target)]
    if models[0].difference(models[1]) is None:
        raise UserError(f"--use-heterogeneous-vocab: {draft} has the target's vocabulary; leave it out")
    for finding in check_vocabulary(config.to, *models):
        if finding.level == "error":
            raise UserError(f"{draft}: {finding.about} {finding.text}; {finding.fix}")


def _write_gguf(config: ExportConfig, directory: Path, file: Path) -> list[str]:
    native = config.outtype in TYPES
    written = gguf.write(directory, file if native else directory / "f16.gguf", config.outtype if native else "f16")
    if config.verify_with is not None and not native:
        job = {"quantize": [str(written.path), str(file), config.outtype], "model": str(file), "rows": [], "texts": []}
        verify.run_llama_cpp(config.verify_with, job)
    lines = []
    if written.unquantized:
        lines.append(f"{len(written.unquantized)} matrices stay f16: their rows do not divide into blocks")
    tokenizer = written.tokenizer
    if tokenizer.match < 1:
        lines.append(
            f"llama.cpp has no pre-tokenizer that splits text as this tokenizer does; {tokenizer.pre!r} gives the same "
            f"ids for {tokenizer.match:.0%} of the probe texts, for target and draft alike"
        )
    return [*lines, f"{file.name}: {file.stat().st_size / 1e6:,.4g} MB"]


def load_verification_prompts(config: ExportConfig, target: Path, k: int) -> Prompts:
    prompts = load_prompts(
        config.prompt_file, config.data, checkpoint.load_tokenizer(target), count=config.prompts,
        tokens=None if config.prompt_file else PROMPT_TOKENS, seed=0, chat=config.chat,
        system_prompt=config.system_prompt,
    )  # fmt: skip
    check_context(prompts.longest, NEW_TOKENS + k, checkpoint.max_model_len(target, DEFAULT_CONTEXT))
    return prompts


def _verify(
    config: ExportConfig, runtime: Path, directory: Path, file: Path, target: Path, texts: verify.TargetTexts
) -> verify.Verification:
    device = checkpoint.resolve_device(config.device)
    note(f"scoring the draft in {runtime.name} and here")
    if not config.is_gguf:
        kind = "draft model" if parallel.pard_token(directory) is None else "parallel draft"
        method = choose_sampling(config).method
        speculative = scripts.speculative_config(str(directory.absolute()), texts.k, kind, method)
        command = verify.vllm_command(runtime, target, speculative, config.gpu_memory_utilization)
        return verify.in_vllm(
            command, texts, lambda texts: verify.count_draft(directory, target, texts, config.temperature, device),
            config.temperature, method,
        )  # fmt: skip

    def hits(texts: verify.TargetTexts) -> list[np.ndarray]:
        with tempfile.TemporaryDirectory() as folder:
            reference = directory
            if config.outtype in TYPES and config.outtype != "f32":
                reference = Path(folder)
                hf.write_fake_quantized(directory, reference, config.outtype)
            return verify.top1_hits(reference, texts, device)

    if not is_llama_server(runtime):
        return verify.in_llama_cpp(runtime, file, config.outtype, texts, hits(texts), directory)
    return verify.against_llama_server(
        runtime, target, file, texts, "draft-simple",
        lambda texts: {"greedy": verify.count_steps(hits(texts), texts)}, config.temperature,
    )  # fmt: skip


def answer_turns(config: ExportConfig, target: Path, prompts: Prompts, model: Decoder) -> Prompts:
    """Return a prompt for every turn, after the target's greedy answers to earlier ones. model: the target."""
    sampling = SamplingParams(max_tokens=TURN_TOKENS, stop_token_ids=checkpoint.eos_token_ids(target))
    return turns.answered(
        prompts, checkpoint.load_tokenizer(target), target=provenance.fingerprint(target), sampling=sampling,
        answer=turn_answers(model, known_ids(target), sampling),
    )  # fmt: skip


def _target_texts(config: ExportConfig, target: Path, prompts: Prompts, k: int) -> tuple[Prompts, verify.TargetTexts]:
    """Return a prompt for every turn, and the target's greedy answers in float32; sampled ones are the server's."""
    model = decoder.load(target, torch.float32, checkpoint.resolve_device(config.device))
    prompts = answer_turns(config, target, prompts, model)
    if config.temperature > 0:
        return prompts, verify.to_sample([prompt.ids for prompt in prompts.rows], NEW_TOKENS, k)
    note(f"generating {len(prompts.rows)} texts with the target")
    sampling = SamplingParams(max_tokens=NEW_TOKENS, stop_token_ids=checkpoint.eos_token_ids(target))
    return prompts, verify.generate_texts(model, [prompt.ids for prompt in prompts.rows], sampling, k)


def scores_of(config: ExportConfig, draft: Path, target: Path) -> list[Score]:
    """Return the newest scores of this very draft or head with this target."""
    sha256 = provenance.fingerprint(draft)
    scores = map(read_score, score_files(config.scores or [workspace.load().runs]))
    own = [s for s in scores if sha256 in (s.draft.sha256, s.draft.heads_sha256) and s.target.name == target.name]
    return sorted(own, key=lambda s: s.created, reverse=True)[:3]


def predicted_k(config: ExportConfig, draft: Path) -> tuple[int, str, Ranges] | None:
    """Return the largest K of --prediction, why, and K by batch size; None without that option."""
    if config.prediction is None:
        return None
    schedule = read_schedule(config.prediction, draft.name, provenance.fingerprint(draft))
    return schedule.largest_k, f"the largest for {schedule.describe()}", list(schedule.ranges)


def choose_k(config: ExportConfig, scores: list[Score], trained: int | None) -> tuple[int, str]:
    """Return K and why, with what the newest score says. trained: tokens that a parallel draft learnt to draft."""
    measured = _headline(scores[0]) if scores else ""
    if config.k is not None:
        reason = config.k_reason or "set by --k"
        return config.k, f"{reason}. Score: {measured}" if measured else reason
    if scores:
        return scores[0].best_k, f"the best that draftlab score measured on {scores[0].conditions.device}. {measured}"
    if trained is not None:
        return trained, "as many as the draft learnt to draft in one pass; draftlab score measures the fastest"
    return DEFAULT_K, UNMEASURED_K


def _headline(score: Score) -> str:
    headline = score.headline()
    if not headline.startswith("Faster"):
        note(f"{score.name}: {headline}")
    return headline


def choose_sampling(config: ExportConfig, verified: verify.Verification | None = None) -> scripts.Sampling:
    """Return how the draft proposes above temperature 0: as asked, or as more stands of what was sampled to verify."""
    if config.use_heterogeneous_vocab:
        return scripts.Sampling("greedy", "all that vLLM does where vocabularies differ")
    if config.draft_sample_method is not None:
        return scripts.Sampling(config.draft_sample_method, "set by --draft-sample-method")
    if verified is None or len(verified.by_method) == 1:
        return scripts.DEFAULT_SAMPLING
    lengths = ", ".join(f"{name} {length:.3f}" for name, length in verified.by_method.items())
    best = max(verified.by_method, key=verified.by_method.__getitem__)
    return scripts.Sampling(best, f"tokens per target pass at {verified.temperature:g}: {lengths}")


def target_name(named: str, target: Path) -> str:
    """Return what a script, which runs in any folder, calls the target: an absolute path, or its name on the hub."""
    if Path(named).is_dir():
        return str(Path(named).absolute())
    return named if named.count("/") == 1 or not target.exists() else str(target.absolute())


def advice(scores: Sequence[Score], draft: Path) -> str:
    """Return why a draft should not be served as it is; empty if it was measured to be no slower than none."""
    if not scores:
        return f"not measured yet: draftlab score --draft {draft} tells whether to serve it"
    gain = scores[0].best_k_speedup
    if scores[0].doubt is not None:
        return f"the score of {draft.name} cannot tell whether it pays: measure it again on a quiet machine"
    return f"{draft.name} is slower than no draft, {gain.as_speedup()}: do not serve it" if gain.high < 1 else ""


def facts_of(draft: Path) -> Facts:
    """Return what the records of a draft and of its parents say; those of other versions say nothing."""
    with contextlib.suppress(UserError):
        return Facts(commands=_commands(draft), heldout=_heldout(draft))
    note(f"the records of what made {draft} are of another version of draftlab: the card leaves them out")
    return Facts(commands=[], heldout=None)


def _commands(draft: Path) -> list[str]:
    """Return the commands that made a draft, the first one first, as far back as there are records."""
    record = provenance.read_record(draft) if draft.is_dir() else None
    if record is None:
        return []
    before = [line for path in record.inputs for line in _commands(Path(path))]
    return [*before, _typed(record)]


def _typed(record: provenance.Record) -> str:
    """Return the command of a record, with what draftlab.yaml named: a reader of the card has another workspace."""
    line, named = str(record.notes.get("command_line", f"draftlab {record.command}")), {}
    for name in ("source", "target", "data"):
        if (value := record.config.get(name)) is not None and f" --{name} " not in line:
            named[f"--{name}"] = str(value)
    return " ".join([line, *(f"{flag} {shlex.quote(value)}" for flag, value in named.items())])


def _heldout(draft: Path) -> tuple[float, float] | None:
    record = provenance.read_record(draft)
    before, after = ((record.notes.get(name) if record else None) for name in ("before", "after"))
    if not isinstance(before, Mapping) or not isinstance(after, Mapping) or after["acceptance"] is None:
        return None
    return float(before["acceptance"]), float(after["acceptance"])
