"""The commands that bring a finished draft to where it runs."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftlab import workspace
from draftlab.commands.base import Job, Outcome, check_data, check_program, command, fill
from draftlab.config.export import CheckConfig, DraftConfig, ExportConfig
from draftlab.errors import UserError, about
from draftlab.model import hub
from draftlab.output import Output
from draftlab.registry import SERVERS
from draftlab.servers.kinds import Finding

if TYPE_CHECKING:
    import torch

    from draftlab.exporting.run import Exported
    from draftlab.prompts import Prompts
    from draftlab.results.score import Score

PROMPT_TOKENS = 48  # tokens of a prompt from a data source


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Checked(Outcome):
    """Findings on a draft or head, by server."""

    findings: list[Finding]

    @property
    def fits(self) -> bool:
        """True if nothing has to be fixed before it is served."""
        return all(finding.level != "error" for finding in self.findings)


def prepare_check(config: CheckConfig, weights: bool) -> Job[tuple[Path, list[Finding]]]:
    """Resolve and check the settings. Raises UserError: no such draft, target, text or device."""
    from draftlab.model import checkpoint

    draft, target = _located(config, weights=False)
    device = None
    if not config.files_only:
        device = checkpoint.resolve_device(workspace.load().device)
        if config.prompt_file is None:
            check_data(config.data, weights=False)
        elif not config.prompt_file.is_file():
            raise UserError(f"--prompt-file {config.prompt_file}: No such file or directory")
    servers = SERVERS.loadable()
    if config.servers is not None:
        names = {part.strip() for part in config.servers.split(",")}
        servers = [SERVERS.get(name, "--for") for name in SERVERS.names() if name in names]
    return Job(partial(_findings, draft, target, servers, device, config.data, config.prompt_file))


def _findings(
    draft: Path,
    target: Path,
    servers: list[Any],
    device: "torch.device | None",
    data: str,
    prompts: Path | None,
) -> tuple[Path, list[Finding]]:
    """Return the draft with the findings on it. Without a device only files are read."""
    from draftlab.exporting.artifact import check_files, open_artifact
    from draftlab.exporting.trials import trial_prompts
    from draftlab.servers.kinds import error

    try:
        artifact = open_artifact(draft, target)
        findings = list(check_files(artifact, servers))
    except UserError as failure:
        if not hub.is_eagle_head(draft):
            raise
        return draft, [
            error("head", str(failure), "train one with draftlab distill --student eagle")
        ]
    if device is not None:
        reader = target if artifact.difference() is None else draft
        findings += artifact.trial(trial_prompts(reader, data, prompts), device)
    return draft, findings


@command(CheckConfig, prepare=prepare_check)
def check(found: tuple[Path, list[Finding]]) -> Checked:
    """Check that a draft or head fits its target and works in vLLM, SGLang, llama.cpp, ...; exit code 3 if not."""
    draft, findings = found
    errors = sum(finding.level == "error" for finding in findings)
    missed = (
        [
            f"{errors} finding{'s' * (errors > 1)} to fix before {hub.checkpoint_name(draft)} is served"
        ]
        if errors
        else []
    )
    rows = [
        {name: getattr(each, name) for name in ("about", "level", "text", "fix")}
        for each in findings
    ]
    return Checked(
        path=draft,
        show=[finding.line() for finding in findings],
        data={"findings": rows, "fits": not errors},
        missed=missed,
        findings=findings,
        next=None if errors else f"draftlab export {draft} --to vllm",
    )


def prepare_export(config: ExportConfig, weights: bool) -> "Job[Exported]":
    """Resolve and check the settings.

    Raises:
        UserError: no such draft or target; another vocabulary than the target's, or an architecture that the server or
            GGUF does not have; no such scores, predictions, program or prompts.
    """
    check_program(config.verify_with)
    draft, target = _located(config, weights=config.verify_with is not None)
    from draftlab.exporting import run
    from draftlab.exporting.artifact import Form, open_artifact
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
        prompts = _prompts(config.prompt_file, config.data, target, chosen.k)
        device = checkpoint.resolve_device(config.device)
        verifier = fill(
            Verifier, config, program=config.verify_with, prompts=prompts, device=device
        )
    facts = {
        "draft": artifact.path,
        "target": config.target,
        "k": chosen.k,
        "because": chosen.reason,
    }
    return Job(
        partial(
            run.export,
            artifact,
            form=form,
            target=config.target,
            chosen=chosen,
            scores=scores,
            verifier=verifier,
        ),
        f"export-{hub.checkpoint_name(draft)}-{form.outtype or config.to}",
        lambda: facts,
    )


@command(ExportConfig, prepare=prepare_export, dry_run=True)
def export(exported: "Exported", output: Output) -> Outcome:
    """Write a draft or head as servers load it, with a card and a script that serves it; verify it where it runs."""
    scripts = [*output.out.glob("serve.*")]
    return Outcome(
        path=output.out,
        show=[*exported.lines, str(output.out), *([exported.advice] if exported.advice else [])],
        data={"path": str(output.out), **exported.notes},
        next=f"{'sh' if scripts[0].suffix == '.sh' else 'python'} {scripts[0]}"
        if scripts
        else None,
    )


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
        if (
            sha256 in (score.draft.sha256, score.draft.heads_sha256)
            and score.target.name == target.name
        ):
            own.append(score)
    return sorted(own, key=lambda score: score.created, reverse=True)[:3]


def _prompts(file: Path | None, data: str, target: Path, k: int) -> "Prompts":
    from draftlab.engine.batch_generate import check_context
    from draftlab.exporting.run import NEW_TOKENS
    from draftlab.model import checkpoint
    from draftlab.prompts import load_prompts

    tokenizer = checkpoint.load_tokenizer(target)
    prompts = load_prompts(
        file, data, tokenizer, count=None, tokens=None if file else PROMPT_TOKENS, seed=0
    )
    check_context(prompts.longest, NEW_TOKENS + k, checkpoint.max_model_len(target))
    return prompts
