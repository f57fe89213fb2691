"""The commands check and export, which bring a finished draft into a server."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import field_validator

from draftlab.commands.base import Job, Outcome, check_program, command, fill
from draftlab.config.base import MAX_K, Config, Only, OutputConfig, advanced_option, option
from draftlab.config.shared import (
    KEY_RULE,
    ONE_SOURCE,
    CheckpointSettings,
    api_key_file,
    data,
    device,
    newest_draft,
    prompt_file,
    served_model_name,
    target,
)
from draftlab.console import note
from draftlab.errors import UserError, about, did_you_mean
from draftlab.model import hub
from draftlab.model.hub import ROUNDED
from draftlab.output import Output
from draftlab.registry import SERVERS
from draftlab.runs import workspace
from draftlab.servers.kinds import Finding
from draftlab.shell import typed

if TYPE_CHECKING:
    from draftlab.exporting.run import Exported
    from draftlab.results.score import Score

# format -> the server that loads this format; "" if all servers do
FORMATS = {"hf": "", "gguf": "llama.cpp", "speculators": "vllm"}


class DraftConfig(Config, CheckpointSettings):
    draft: str | None = option(
        None, "Checkpoint of the draft, or EAGLE-3 head. Default: the newest draft.", argument=True
    )
    target: str = target()

    def resolved(self) -> Self:
        if self.draft is not None:
            return self
        note(f"draft: {newest_draft()}")
        return self.model_copy(update={"draft": str(newest_draft())})


class CheckConfig(DraftConfig):
    servers: str | None = option(
        None,
        f"Servers that should run the draft, separated by commas: {SERVERS.listed()}. Default: all.",
        flag="--for",
    )
    data: str = data("Text on which perplexity is measured.")
    prompt_file: Path | None = prompt_file()
    files_only: bool = option(False, "Only check the files, and do not run the draft.")
    server: str | None = option(
        None,
        "Server that runs the draft, http://HOST:PORT. Its answers are compared with the draft's answers on this "
        "machine.",
        acts="always",
    )
    temperature: float = option(0.0, "Temperature of the requests to the server.", ge=0)
    api_key_file: Path | None = api_key_file()
    served_model_name: str | None = served_model_name()

    only = (
        Only(
            ("data", "prompt_file", "server"),
            lambda c: not c.files_only,
            "leave it out, because --files-only does not run the draft",
        ),
        Only(("temperature",), lambda c: c.server, "needs --server URL"),
        KEY_RULE,
        ONE_SOURCE,
    )

    @property
    def text_source(self) -> str | None:
        return None if self.files_only or self.prompt_file is not None else self.data


class ExportConfig(DraftConfig, OutputConfig):
    to: str = option(
        "hf",
        "Format: hf, a Hugging Face directory; gguf, a GGUF file; speculators, an EAGLE-3 head for vLLM; or the name "
        f"of a server ({SERVERS.listed()}), for the format of this server with a start script.",
    )
    outtype: str = option("f16", f"Data type of the matrices in a GGUF file: {', '.join(ROUNDED)}.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        None, "Data type of the weights in a Hugging Face directory. Default: the checkpoint's."
    )
    use_heterogeneous_vocab: bool = option(
        False,
        "Export a draft whose vocabulary differs from the target's; only vLLM and transformers can run it.",
    )
    k: int | None = option(
        None,
        "Number of drafted tokens per step (K). Default: the best K of the newest score; without a score, "
        "a K for this kind of draft.",
        ge=1,
        le=MAX_K,
    )
    scores: list[Path] = option(
        factory=list,
        help="Scores of the draft, for the choice of K and for the model card: score.json files, or directories that "
        "have such files.",
        shown_default="runs/, or runs in draftlab.yaml",
    )
    verify_with: Path | None = option(
        None,
        "Path of the program vllm or llama-server, in which the export is tested. The draft's acceptance there must "
        "equal its acceptance in draftlab's engine.",
        reads="nothing",
        acts="always",
    )
    temperature: float = advanced_option(0.0, "Temperature with --verify-with; 0 is greedy.", ge=0)
    data: str = data("Text source of the prompts with --verify-with.", advanced=True)
    prompt_file: Path | None = prompt_file(advanced=True)
    device: str = device()

    @field_validator("outtype")
    @classmethod
    def _is_a_type(cls, outtype: str) -> str:
        if outtype not in ROUNDED:
            raise ValueError(
                f"export does not write this type{did_you_mean(outtype, ROUNDED)}; for other types, "
                "export with f16, then run llama.cpp's llama-quantize"
            )
        return outtype

    only = (
        Only(("outtype",), lambda c: c.is_gguf, "works only with --to gguf or --to llama.cpp"),
        Only(
            ("dtype",),
            lambda c: not c.is_gguf,
            "leave it out, because --outtype sets the data type of a GGUF file",
        ),
        Only(
            ("use_heterogeneous_vocab",),
            lambda c: c.server is not None and c.server.translates and c.verify_with is None,
            "works only with --to vllm or --to transformers, and without --verify-with",
        ),
        Only(
            ("k",),
            lambda c: c.to not in ("hf", "gguf") or c.verify_with,
            "works only with --to SERVER, --to speculators or --verify-with",
        ),
        Only(
            ("verify_with",),
            lambda c: c.server is not None and c.server.program,
            "works only with --to vllm, speculators, gguf or llama.cpp, because draftlab starts no other servers",
        ),
        Only(
            ("temperature", "data", "prompt_file", "device"),
            lambda c: c.verify_with,
            "works only with --verify-with PROGRAM",
        ),
        ONE_SOURCE,
    )

    @property
    def text_source(self) -> str | None:
        return self.data if self.verify_with is not None and self.prompt_file is None else None

    @property
    def server(self) -> Any:
        """Return the registered class of the server that loads the export, or None if all servers load it."""
        name = FORMATS.get(self.to, self.to)
        return SERVERS.get(name, f"--to {self.to}") if name else None

    @property
    def is_gguf(self) -> bool:
        return self.server is not None and self.server.loads_gguf


PROMPT_TOKENS = 48  # length of prompts from a data source, in tokens
CheckedDraft = tuple[Path, list[Finding], list[object]]  # draft, findings, words of the export


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Checked(Outcome):
    """The outcome of check. findings: What is right or wrong with a draft or head, for each server."""

    findings: list[Finding]

    @property
    def fits(self) -> bool:
        """Return whether the draft can be served as it is."""
        return all(finding.level != "error" for finding in self.findings)


def prepare_check(config: CheckConfig, weights: bool) -> Job[CheckedDraft]:
    """Resolve and check the settings of the command `check`, and return the job.

    Raises:
        UserError: The draft, target, text, device or server is missing.
    """
    from draftlab.exporting.artifact import check_files, open_checkable
    from draftlab.exporting.serving_check import PROMPT_TOKENS, PROMPTS, ServedDraft
    from draftlab.exporting.trials import trial_prompts
    from draftlab.model import devices
    from draftlab.servers.client import Server
    from draftlab.servers.kinds import error

    draft = _located(config.draft)
    target = _located_target(config.target, weights=False)
    data, prompt_file = config.data, config.prompt_file
    device = None if config.files_only else devices.resolve_device(workspace.load().device)
    servers = SERVERS.loadable()
    if config.servers is not None:
        servers = [SERVERS.get(name.strip(), "--for") for name in config.servers.split(",")]
    to = servers[0].name if config.servers else "vllm"
    following = [*config.repeated("target"), "--to", to]
    running = None
    if config.server is not None:
        with about("--server"):
            running = Server.connect(config.server, config.api_key_file, model=config.served_model_name, workers=1)

    def run() -> CheckedDraft:
        try:
            artifact = open_checkable(draft, target)
            findings = list(check_files(artifact, servers))
        except UserError as failure:
            kind = hub.head_kind(draft)
            if kind not in hub.HEADS:
                raise
            remedy = "train one with draftlab distill --student eagle" if kind == "eagle" else ""
            return draft, [error("head", str(failure), remedy)], following
        if device is None:
            return draft, findings, following
        # a head drafts with the target, and a server's answers are compared with the target's
        if running is not None or hub.head_kind(draft) is not None:
            _located_target(config.target, weights=True)
        reader = target if artifact.difference() is None else draft
        findings += artifact.trial(trial_prompts(reader, data, prompt_file), device)
        if running is not None:
            served = ServedDraft(
                artifact=artifact,
                server=running,
                prompts=trial_prompts(target, data, prompt_file, PROMPTS, PROMPT_TOKENS),
                temperature=config.temperature,
                device=device,
            )
            findings += served.findings()
        return draft, findings, following

    return Job(run)


@command(CheckConfig, prepare=prepare_check, example="check runs/distill-3x128 --target tiny --for vllm")
def check(found: CheckedDraft) -> Checked:
    """Check that a draft or head fits its target and that servers can run it; exit with code 3 if a check fails."""
    draft, findings, following = found
    exported = hub.head_kind(draft) in (None, "eagle")  # servers load other heads as they are
    errors = sum(finding.level == "error" for finding in findings)
    missed = (
        f"{hub.checkpoint_name(draft)} cannot be served yet; fix the {errors} error{'s' * (errors > 1)} in the list"
    )
    return Checked(
        path=draft,
        show=[finding.line() for finding in findings],
        data={"findings": list(map(asdict, findings)), "fits": not errors},
        missed=[missed] if errors else [],
        findings=findings,
        next=None if errors or not exported else typed("draftlab", "export", draft, *following),
    )


def prepare_export(config: ExportConfig, weights: bool) -> "Job[Exported]":
    """Resolve and check the settings of the command `export`, and return the job.

    Raises:
        UserError: The draft, target, scores, program or prompts are missing; the vocabularies differ; or
            the server or the GGUF format lacks the draft's architecture.
    """
    check_program(config.verify_with)
    draft = _located(config.draft)
    target = _located_target(config.target, weights=config.verify_with is not None)
    from draftlab.data.prompts import load_prompts
    from draftlab.engine.batch_generate import check_context
    from draftlab.exporting import run
    from draftlab.exporting.artifact import Form, open_artifact
    from draftlab.exporting.run import Verifier, choose_k
    from draftlab.model import checkpoint, devices

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
    scores = _scores_of(config.scores, draft, target)
    chosen = choose_k(artifact, config.k, scores)
    verifier = None
    if config.verify_with is not None:
        cut = None if config.prompt_file else PROMPT_TOKENS
        prompts = load_prompts(
            config.prompt_file,
            config.data,
            checkpoint.load_tokenizer(target),
            count=None,
            tokens=cut,
            seed=0,
        )
        new_tokens = run.NEW_TOKENS + chosen.k
        check_context(prompts.longest, new_tokens, checkpoint.max_model_len(target))
        device = devices.resolve_device(config.device)
        verifier = fill(Verifier, config, program=config.verify_with, prompts=prompts, device=device)
    name = config.target
    facts = {"draft": artifact.path, "target": name, "k": chosen.k, "because": chosen.reason}
    return Job(
        partial(
            run.export,
            artifact,
            form=form,
            target=name,
            chosen=chosen,
            scores=scores,
            verifier=verifier,
        ),
        f"export-{hub.checkpoint_name(draft)}-{form.outtype or config.to}",
        lambda: facts,
    )


@command(
    ExportConfig,
    prepare=prepare_export,
    dry_run=True,
    example="export runs/distill-3x128 --target tiny --to vllm",
)
def export(exported: "Exported", output: Output) -> Outcome:
    """Write a draft or head in the format of a server, with a card and a start script; --verify-with tests the
    result."""
    script = next(output.out.glob("serve.*"), None)
    show = [*exported.lines, str(output.out), exported.advice]
    starts = "sh" if script and script.suffix == ".sh" else "python"
    return Outcome(
        path=output.out,
        show=[text for text in show if text],
        data={"path": str(output.out), **exported.notes},
        next=typed(starts, script) if script else None,
    )


def _located(draft: str | None) -> Path:
    assert draft is not None  # resolved() names the newest draft
    return hub.locate(draft)


def _located_target(target: str, *, weights: bool) -> Path:
    """Return the directory of the target. weights: Whether the target needs weight files."""
    with about("--target"):
        return hub.locate_model(target, weights)


def _scores_of(places: list[Path], draft: Path, target: Path) -> "list[Score]":
    """Return the scores of a draft or head with a target: at most three, the newest first.

    A score belongs to the draft if the hash of the draft is the same.

    places: Files or directories of scores. If there are none, the workspace's runs are searched.
    """
    from draftlab.results.score import read_score, score_files
    from draftlab.runs.provenance import fingerprint

    sha256, own = fingerprint(draft), []
    for score in map(read_score, score_files(places or [workspace.load().runs])):
        hashes = (score.draft.sha256, score.draft.heads_sha256)
        if sha256 in hashes and score.target.name == target.name:
            own.append(score)
    return sorted(own, key=lambda score: score.created, reverse=True)[:3]
