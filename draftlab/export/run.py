"""Export on disk: the directory or file, its card, the script that serves it, and the same acceptance where it runs."""

import shlex
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from draftlab import provenance
from draftlab.console import note
from draftlab.data import heldout_prompts
from draftlab.errors import UserError, did_you_mean
from draftlab.export import card, gguf, hf, scripts, verify
from draftlab.model import checkpoint
from draftlab.model.checkpoint import max_model_len
from draftlab.model.size import read_size
from draftlab.model.tokenizer import common_vocabulary
from draftlab.results.score import Score, read_score

PROMPT_TOKENS, NEW_TOKENS, DEFAULT_K = 48, 64, 4
To = Literal["hf", "gguf", "vllm", "sglang", "llama.cpp", "transformers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to write, and how to look whether it is right. kind: of matrices in a GGUF file."""

    draft: Path
    target: Path
    target_name: str  # as it was given: a hub name stays one
    to: To
    kind: str
    dtype: torch.dtype | None
    k: int | None
    verify_with: Path | None
    data: str
    prompts: int
    runs: Path
    device: torch.device

    @property
    def as_gguf(self) -> bool:
        return self.to in ("gguf", "llama.cpp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What people and records are told."""

    lines: list[str]
    notes: dict[str, object]


def check(plan: Plan) -> None:
    """Refuse what cannot come out right, before anything is written.

    Raises:
        UserError: another vocabulary than the target's, an architecture or type that GGUF does not have, or a runtime
            that is not there.
    """
    common_vocabulary(plan.draft, plan.target)
    if plan.verify_with is not None:
        if plan.to in ("sglang", "transformers"):
            raise UserError(f"--verify-with is for vLLM and llama.cpp; {plan.to} is not run from here")
        if not plan.verify_with.is_file():
            raise UserError(f"no program at {plan.verify_with}")
    if plan.as_gguf:
        gguf.library()
        gguf.architecture(plan.draft)
        known = (*gguf.TYPES, *gguf.K_TYPES)
        if plan.kind not in known:
            raise UserError(f"no type {plan.kind!r}{did_you_mean(plan.kind, known)}")
        if plan.kind in gguf.K_TYPES and plan.verify_with is None:
            raise UserError(f"{plan.kind} is made by llama.cpp itself: name a python that has it with --verify-with")


def export(plan: Plan, work: Path, out: Path) -> Made:
    """Write into work, which will become out.

    Raises:
        UserError: a runtime gives another acceptance than this engine.
    """
    scores = _scores(plan)
    k, why_k = _k(plan, scores)
    with tempfile.TemporaryDirectory(dir=work.parent) if plan.as_gguf else nullcontext(str(work)) as place:
        plain = Path(place)
        vocab = checkpoint.vocab_size(plan.target)
        changed = hf.write(plan.draft, plain, words_from=plan.target, vocab=vocab, dtype=plan.dtype)
        lines, notes = [*changed], {"changed": changed, "k": k}
        file = f"{plan.draft.name}-{plan.kind}.gguf" if plan.as_gguf else ""
        if plan.as_gguf:
            lines += _write_gguf(plan, plain, work / file)
        if plan.verify_with is not None:
            found = _verified(plan, plain, work / file, k)
            lines.append(found.line())
            notes["verified"] = found.line()
        size, context = read_size(plain).describe(), max_model_len(plain, 2048)
    script = None
    if plan.to not in ("hf", "gguf"):
        script = scripts.script(plan.to, target=_target_text(plan), k=k, why_k=why_k, gguf=file)
        (work / script[0]).write_text(script[1])
        lines.append(f"serve with: {'sh' if script[0].endswith('.sh') else 'python'} {out / script[0]}")
    told = card.Card(
        name=plan.draft.name, target=plan.target_name, size=size, vocab=vocab, context=context,
        commands=_commands(plan.draft), held_out=_held_out(plan.draft), scores=scores, changed=changed, serving=script,
        verified=str(notes.get("verified", "")),
    )  # fmt: skip
    (work / "README.md").write_text(told.text())
    return Made(lines=lines, notes=notes)


def push(directory: Path, repository: str) -> None:
    """Upload a finished directory.

    Raises:
        UserError: the hub refuses or cannot be reached; what was written here stays.
    """
    from huggingface_hub import HfApi

    try:
        hub = HfApi()
        hub.create_repo(repository, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=directory)
    except Exception as error:  # offline, no token, no right: the hub client has a class for each
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{directory} is written; not uploaded to {repository} ({type(error).__name__}: {reason})"
        ) from None


def _write_gguf(plan: Plan, plain: Path, file: Path) -> list[str]:
    own = plan.kind in gguf.TYPES
    written = gguf.write(plain, file if own else plain / "wide.gguf", plan.kind if own else "f16")
    lines = []
    if not own:
        question = {"quantize": [str(written.path), str(file), plan.kind], "model": str(file), "rows": [], "texts": []}
        verify.ask(_runtime(plan), question)
    if written.wide:
        lines.append(f"{len(written.wide)} matrices stay f16: their rows do not divide into blocks of {plan.kind}")
    if written.words.same < 1:
        lines.append(
            f"llama.cpp has no pre-tokenizer that cuts text as this tokenizer does; {written.words.pre!r} gives "
            f"{written.words.same:.0%} of the probe texts the same ids. Target and draft are cut alike"
        )
    return [*lines, f"{file.name}: {file.stat().st_size / 1e6:,.4g} MB"]


def _verified(plan: Plan, plain: Path, file: Path, k: int) -> verify.Agreement:
    reader = checkpoint.load_tokenizer(plan.target)
    prompts = heldout_prompts(plan.data, reader, count=plan.prompts, length=PROMPT_TOKENS, seed=0)
    note(f"the target writes {plan.prompts} texts, then the draft is scored here and in {_runtime(plan).name}")
    writing = verify.write_texts(plan.target, prompts, NEW_TOKENS, k, plan.device)
    if not plan.as_gguf:
        return verify.in_vllm(_runtime(plan), plain, plan.target, writing, verify.hits(plain, writing, plan.device))
    with tempfile.TemporaryDirectory() as rounded:
        here = plain
        if plan.kind in gguf.TYPES and plan.kind != "f32":
            here = Path(rounded)
            hf.write_fake_quantized(plain, here, plan.kind)
        ours = verify.hits(here, writing, plan.device)
    return verify.in_llama_cpp(_runtime(plan), file, plan.kind, writing, ours, plain)


def _runtime(plan: Plan) -> Path:
    if plan.verify_with is None:
        raise ValueError("no runtime was named")
    return plan.verify_with


def _scores(plan: Plan) -> list[Score]:
    """Of this very draft against this target, the newest first."""
    mine = provenance.fingerprint(plan.draft)
    found = [read_score(file) for file in sorted(plan.runs.rglob("score.json"))]
    fitting = [s for s in found if s.draft.sha256 == mine and s.target.name == plan.target.name]
    return sorted(fitting, key=lambda s: s.created, reverse=True)[:3]


def _k(plan: Plan, scores: list[Score]) -> tuple[int, str]:
    if plan.k is not None:
        return plan.k, "as it was asked for"
    if scores:
        return scores[0].best_k, f"the fastest of those that draftlab score tried on {scores[0].conditions.device}"
    return DEFAULT_K, "not measured; draftlab score finds the best for a machine"


def _target_text(plan: Plan) -> str:
    return (
        str(plan.target.absolute()) if plan.target.exists() and plan.target_name.count("/") != 1 else plan.target_name
    )


def _commands(draft: Path) -> list[str]:
    """What made it, the first command first, as far back as there are records."""
    record = provenance.read_record(draft)
    if record is None:
        return []
    given = {n: v for n, v in record.config.items() if v not in (None, False)}
    words = [w for n, v in given.items() for w in ([f"--{n.replace('_', '-')}"] + ([] if v is True else [str(v)]))]
    before = [c for path in map(Path, record.inputs) if _made_here(path) for c in _commands(path)]
    return [*before, shlex.join(["draftlab", record.command, *words])]


def _made_here(path: Path) -> bool:
    """Whether path is a draft that another command began with."""
    record = provenance.read_record(path) if path.is_dir() else None
    return record is not None and record.command in ("prune", "distill")


def _held_out(draft: Path) -> tuple[float, float] | None:
    record = provenance.read_record(draft)
    before, after = ((record.notes.get(name) if record else None) for name in ("before", "after"))
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return None
    return float(before["acceptance"]), float(after["acceptance"])
