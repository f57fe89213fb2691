"""The command export, which writes a finished draft in the form that a server loads."""

from pathlib import Path

from draftlab.commands.base import Outcome
from draftlab.commands.checks import check_program
from draftlab.commands.models import located, opened_target
from draftlab.commands.settings.export import ExportConfig
from draftlab.data.prompts import load_prompts
from draftlab.engine.batch_generate import check_context
from draftlab.errors import UserError
from draftlab.exporting.artifact import Form, open_artifact
from draftlab.exporting.run import NEW_TOKENS, Export, Exported, Verifier, choose_k
from draftlab.model import devices, hub
from draftlab.results.score import Score, found_scores, read_score, score_files
from draftlab.runs import workspace
from draftlab.runs.provenance import fingerprint
from draftlab.shell import typed

PROMPT_TOKENS = 48  # length of prompts from a data source, in tokens


def prepare(config: ExportConfig, weights: bool) -> Export:
    """Resolve and check the settings of the command `export`, and return the job.

    Raises:
        UserError: The draft, target, scores, program or prompts are missing; the vocabularies differ; or
            the server or the GGUF format lacks the draft's architecture.
    """
    check_program(config.verify_with)
    draft = located(config.draft, "draftlab export")
    target = opened_target(config.target, weights=config.verify_with is not None)
    artifact = open_artifact(draft, target)
    form = Form(
        to=config.to,
        server=config.server,
        outtype=config.outtype if config.is_gguf else None,
        dtype=devices.DTYPES[config.dtype] if config.dtype else None,
        heterogeneous=config.use_heterogeneous_vocab,
    )
    artifact.refuse(form)
    if config.k is not None and config.k > artifact.most:
        raise UserError(f"--k {config.k}: {draft} drafts at most {artifact.most} tokens; lower --k")
    scores = _scores_of(config.scores, draft, target.directory)
    chosen = choose_k(artifact, config.k, scores)
    verifier = None
    if config.verify_with is not None:
        cut = None if config.prompt_file else PROMPT_TOKENS
        prompts = load_prompts(
            config.prompt_file,
            config.data,
            target.tokenizer,
            count=None,
            tokens=cut,
            seed=0,
        )
        new_tokens = NEW_TOKENS + chosen.k
        check_context(prompts.longest, new_tokens, target.max_model_len)
        device = devices.resolve_device(config.device)
        verifier = Verifier(program=config.verify_with, prompts=prompts, temperature=config.temperature, device=device)
    return Export(
        name=f"export-{hub.checkpoint_name(draft)}-{form.outtype or config.to}",
        artifact=artifact,
        form=form,
        target=config.target,
        chosen=chosen,
        scores=scores,
        verifier=verifier,
    )


def show(exported: Exported, config: ExportConfig, out: Path) -> Outcome:
    script = next(out.glob("serve.*"), None)
    show = [*exported.lines, str(out), exported.advice]
    starts = "sh" if script and script.suffix == ".sh" else "python"
    following = typed(starts, script) if script else None
    if script and config.server is not None and config.server.operands:  # the script needs the target in GGUF
        following = typed("draftlab", "export", config.target, "--target", config.target, "--to", "gguf")
    return Outcome(
        path=out,
        show=[text for text in show if text],
        data={"path": str(out), **exported.notes},
        next=following,
    )


def _scores_of(places: list[Path], draft: Path, target: Path) -> list[Score]:
    """Return the scores of a draft or head with a target: at most three, the newest first.

    A score belongs to the draft if the hash of the draft is the same.

    places: Files or directories of scores. If there are none, the workspace's runs are searched.
    """
    sha256 = fingerprint(draft)
    own: list[Score] = []
    scores = map(read_score, score_files(places)) if places else found_scores(workspace.load().runs)
    for score in scores:
        hashes = (score.draft.sha256, score.draft.heads_sha256)
        if sha256 in hashes and score.target.name == target.name:
            own.append(score)
    return sorted(own, key=lambda score: score.created, reverse=True)[:3]
