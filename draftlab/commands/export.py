"""The commands that bring a finished draft to where it runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftlab import workspace
from draftlab.commands.base import Outcome, command
from draftlab.config.export import CheckConfig, DraftConfig, ExportConfig
from draftlab.errors import UserError, about
from draftlab.model import hub
from draftlab.output import Output
from draftlab.registry import SERVERS
from draftlab.servers.kinds import Finding, ServerKind

if TYPE_CHECKING:
    import torch

    from draftlab.exporting.artifact import Exportable
    from draftlab.exporting.form import Form
    from draftlab.exporting.run import ChosenK, Verifier
    from draftlab.prompts import Prompts
    from draftlab.results.score import Score

PROMPT_TOKENS = 48  # of a prompt to verify with that is cut from text


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Checked(Outcome):
    """Findings on a draft or head, by server."""

    findings: list[Finding]

    @property
    def fits(self) -> bool:
        """True if nothing has to be fixed before it is served."""
        return all(finding.level != "error" for finding in self.findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCheck:
    """A draft or head, its target, and the servers to check for. device: None where only files are read."""

    draft: Path
    target: Path
    servers: list[ServerKind]
    data: str
    prompt_file: Path | None
    device: "torch.device | None"


def prepare_check(config: CheckConfig, weights: bool) -> PreparedCheck:
    """Resolve and check the settings. Raises UserError: no such draft, target, text or device."""
    draft, target = _located(config, weights=False)
    from draftlab.model import checkpoint

    device = None
    if not config.files_only:
        device = checkpoint.resolve_device(workspace.load().device)
        if config.prompt_file is None:
            with about("--data"):
                hub.check_local_data(config.data)
        elif not config.prompt_file.is_file():
            raise UserError(f"--prompt-file {config.prompt_file}: No such file or directory")
    if config.servers is None:
        servers = SERVERS.loadable()
    else:
        names = {part.strip() for part in config.servers.split(",")}
        servers = [SERVERS.get(name, "--for") for name in SERVERS.names() if name in names]
    return PreparedCheck(
        draft=draft, target=target, servers=servers, data=config.data, prompt_file=config.prompt_file, device=device
    )


@command(CheckConfig, prepare=prepare_check)
def check(prepared: PreparedCheck) -> Checked:
    """Check that a draft or head fits its target and works in vLLM, SGLang, llama.cpp, ...; exit code 3 if not."""
    from draftlab.exporting.artifact import check_files, open_artifact
    from draftlab.exporting.trials import trial_prompts
    from draftlab.servers.kinds import error

    draft = prepared.draft
    try:
        artifact = open_artifact(draft, prepared.target)
        findings = list(check_files(artifact, prepared.servers))
    except UserError as failure:
        if not hub.is_eagle_head(draft):
            raise
        findings = [error("head", str(failure), "train one with draftlab distill --student eagle")]
    else:
        if prepared.device is not None:
            reader = prepared.target if artifact.difference() is None else draft
            prompts = trial_prompts(reader, prepared.data, prepared.prompt_file)
            findings += artifact.trial(prompts, prepared.device)
    errors = sum(finding.level == "error" for finding in findings)
    missed = []
    if errors:
        missed = [f"{errors} finding{'s' * (errors > 1)} to fix before {hub.checkpoint_name(draft)} is served"]
    rows = [{"about": f.about, "level": f.level, "text": f.text, "fix": f.fix} for f in findings]
    data: dict[str, object] = {"findings": rows, "fits": not errors}
    lines = [finding.line() for finding in findings]
    return Checked(path=draft, show=lines, data=data, missed=missed, findings=findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedExport:
    """A draft or head, the form to write it in, and K. target: as script and card name it."""

    name: str
    artifact: "Exportable"
    form: "Form"
    target: str
    chosen: "ChosenK"
    scores: "list[Score]"
    verifier: "Verifier | None"

    def facts(self) -> Mapping[str, object]:
        return {"draft": self.artifact.path, "target": self.target, "k": self.chosen.k, "because": self.chosen.reason}


def prepare_export(config: ExportConfig, weights: bool) -> PreparedExport:
    """Resolve and check the settings.

    Raises:
        UserError: no such draft or target; another vocabulary than the target's, or an architecture that the server or
            GGUF does not have; no such scores, predictions, program or prompts.
    """
    if config.verify_with is not None and not config.verify_with.is_file():
        raise UserError(f"--verify-with {config.verify_with}: no such program")
    draft, target = _located(config, weights=config.verify_with is not None)
    from draftlab.exporting.artifact import open_artifact
    from draftlab.exporting.form import Form
    from draftlab.exporting.run import ChosenK, Verifier, choose_k
    from draftlab.latency.k_schedule import read_schedule
    from draftlab.model import checkpoint
    from draftlab.provenance import fingerprint

    artifact = open_artifact(draft, target)
    form = Form(
        to=config.to,
        server=config.server,
        outtype=config.outtype if config.is_gguf else None,
        dtype=checkpoint.DTYPES[config.dtype] if config.dtype else None,
        heterogeneous=config.use_heterogeneous_vocab,
    )
    artifact.refuse(form)
    if config.k is not None and config.k > artifact.most:
        raise UserError(f"--k {config.k}: {draft} drafts at most {artifact.most} tokens")
    scores = _scores_of(config.scores, draft, target)
    chosen = choose_k(artifact, config.k, scores)
    if config.prediction is not None:
        with about("--prediction"):
            schedule = read_schedule(config.prediction, draft.name, fingerprint(draft))
        reason = f"the largest for {schedule.describe()}"
        chosen = ChosenK(k=schedule.largest_k, reason=reason, by_batch=list(schedule.ranges))
    verifier = None
    if config.verify_with is not None:
        verifier = Verifier(
            program=config.verify_with,
            prompts=_prompts(config.prompt_file, config.data, target, chosen.k),
            temperature=config.temperature,
            device=checkpoint.resolve_device(config.device),
        )
    return PreparedExport(
        name=f"export-{hub.checkpoint_name(draft)}-{form.outtype or config.to}",
        artifact=artifact,
        form=form,
        target=config.target,
        chosen=chosen,
        scores=scores,
        verifier=verifier,
    )


@command(ExportConfig, prepare=prepare_export, dry_run=True)
def export(prepared: PreparedExport, output: Output) -> Outcome:
    """Write a draft or head as servers load it, with a card and a script that serves it; verify it where it runs."""
    from draftlab.exporting import run

    exported = run.export(
        prepared.artifact,
        output,
        form=prepared.form,
        target=prepared.target,
        chosen=prepared.chosen,
        scores=prepared.scores,
        verifier=prepared.verifier,
    )
    facts = {"path": str(output.out), **exported.notes}
    show = [*exported.lines, str(output.out), *([exported.advice] if exported.advice else [])]
    return Outcome(path=output.out, show=show, data=facts)


def _located(config: DraftConfig, *, weights: bool) -> tuple[Path, Path]:
    """Return the directories of draft and target. weights: the target's are needed."""
    assert config.draft is not None  # resolved() names the newest draft
    draft = hub.locate(config.draft)
    with about("--target"):
        return draft, hub.locate_model(config.target, weights)


def _scores_of(places: list[Path], draft: Path, target: Path) -> "list[Score]":
    """Return the newest scores of this very draft or head with this target, up to three."""
    from draftlab.provenance import fingerprint
    from draftlab.results.score import read_score, score_files

    sha256, own = fingerprint(draft), []
    for file in score_files(places or [workspace.load().runs]):
        score = read_score(file)
        if sha256 in (score.draft.sha256, score.draft.heads_sha256) and score.target.name == target.name:
            own.append(score)
    return sorted(own, key=lambda score: score.created, reverse=True)[:3]


def _prompts(file: Path | None, data: str, target: Path, k: int) -> "Prompts":
    from draftlab.engine.batch_generate import check_context
    from draftlab.exporting.run import NEW_TOKENS
    from draftlab.model import checkpoint
    from draftlab.prompts import load_prompts

    tokenizer = checkpoint.load_tokenizer(target)
    prompts = load_prompts(file, data, tokenizer, count=None, tokens=None if file else PROMPT_TOKENS, seed=0)
    check_context(prompts.longest, NEW_TOKENS + k, checkpoint.max_model_len(target))
    return prompts
