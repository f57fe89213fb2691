"""The command init, which writes draftlab.yaml."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from draftlab.commands import IMPORT
from draftlab.commands.base import Outcome
from draftlab.commands.checks import check_data
from draftlab.commands.settings.make import InitConfig
from draftlab.commands.settings.prune import PruneConfig
from draftlab.console import note
from draftlab.data.batches import SourceSize, measure_source
from draftlab.errors import UserError, about
from draftlab.importing.run import CODE_FOR_CHAT, PUBLISHED, is_chat_model, is_imported, smollm2_file
from draftlab.intervals import ENOUGH, RARE
from draftlab.model import hub
from draftlab.model.hf_files import read_config
from draftlab.model.tokenizer import load_tokenizer
from draftlab.runs import workspace
from draftlab.runs.workspace import Workspace
from draftlab.shell import typed

# preset -> size of its first draft: the paper's Wide-1.3B, as in docs/paper.md
FIRST_DRAFTS = {"llama-65b": ("--layers", "12", "--width", "2560")}


@dataclass(frozen=True, slots=True)
class WrittenWorkspace:
    """The workspace that the command `init` wrote, and the size of each text source that is a local file or folder.

    questions: File of the prompts that belong to the published draft. None if the workspace does not use this draft.
    """

    space: Workspace
    sizes: dict[str, SourceSize]
    questions: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWorkspace:
    """A workspace to write. It runs the command `import` for GGUF files.

    Attributes:
        imports: GGUF file of each directory to write.
        fetch: Whether the target may be looked up on the hub.
        force: Whether to replace an earlier import.
    """

    space: Workspace
    imports: Mapping[str, Path]
    fetch: bool
    force: bool

    def run(self) -> WrittenWorkspace:
        """Import GGUF files, and write draftlab.yaml. Raises UserError: an import fails, or text cannot be read."""
        warning = questions = None
        for name, gguf in self.imports.items():
            out = Path(name)
            if gguf.parent == PUBLISHED:
                questions = PUBLISHED / "questions.jsonl"
            if is_imported(gguf, out):
                note(
                    f"{out} was imported from {gguf} before and is not imported again; to import "
                    "the file again, remove this directory"
                )
            else:
                IMPORT(source=str(gguf), out=out, force=self.force)
        if self.space.data == "stdlib" and is_chat_model(self.space.target, fetch=self.fetch):
            warning = f"{self.space.target} {CODE_FOR_CHAT}"
            note(warning)
        with about("--data"):
            sizes = _sizes(self.space)
        workspace.write(self.space, comment=warning)
        return WrittenWorkspace(self.space, sizes, questions)


def prepare(config: InitConfig, weights: bool) -> NewWorkspace:
    """Resolve and check the settings of the command `init`, and return the job.

    Raises:
        UserError: draftlab.yaml exists and --force is off, or a checkpoint, file or text is missing.
    """
    space = workspace.preset(config.preset) if config.preset else None
    imports: dict[str, Path] = {}  # GGUF file of each directory to write
    if workspace.FILE.exists() and not config.overwrite:
        raise UserError(f"{workspace.FILE} exists already; edit the file, or add --force to replace it")
    if config.gguf is not None and not config.gguf.is_file():
        raise UserError(f"--gguf {config.gguf}: there is no such file")
    if config.data is not None:
        check_data(config.data, weights=False)
    if config.target is not None:
        source = config.source or config.target
        for name in filter(None, (config.target, config.source, config.draft)):
            hub.locate(name, weights=False)
        space = Workspace(target=config.target, source=source, data="stdlib", draft=config.draft)
    elif config.gguf or config.preset == "smollm2":
        gguf = config.gguf or smollm2_file()
        target = space.target if space else f"models/{gguf.stem.lower()}"
        imports[target] = gguf
        draft = None
        published = next(PUBLISHED.glob("*.gguf"), None)
        if config.preset and config.data is None and published is not None:
            draft = "models/smollm2-135m-draft"
            imports[draft] = published
        space = Workspace(target=target, source=target, data="stdlib", draft=draft)
    assert space is not None  # the settings name a preset, a target or a GGUF file
    space = space.model_copy(update={"data": config.data or space.data})
    return NewWorkspace(space=space, imports=imports, fetch=config.preset is None, force=config.overwrite)


def show(written: WrittenWorkspace, config: InitConfig) -> Outcome:
    show = [str(workspace.FILE)]
    for source, size in written.sizes.items():
        show += _size_lines(source, size)
    data = written.space.model_dump(mode="json", exclude_none=True)
    if written.sizes:
        data["text"] = {source: asdict(size) for source, size in written.sizes.items()}
    plan = [] if hub.local(written.space.source) else ["--dry-run"]  # shows what prune would download
    size = FIRST_DRAFTS.get(config.preset or "") or ("--layers", str(_layers(written.space)))
    then = typed("draftlab", "prune", *size, *plan)
    if written.questions is not None:
        words = [
            "draftlab",
            "score",
            "--draft",
            written.space.draft,
            "--drafter",
            "fallback:draft_tokens=3",
        ]
        words += ["--int8", "both", "--prompt-file", written.questions]
        words += ["--k", "2-4", "--max-new-tokens", "64", "--repeats", "1"]
        then = typed(*words)
    elif written.space.draft is not None:
        target = Path(written.space.target)
        then = typed("draftlab", "auto", target, "--draft", written.space.draft, "--dry-run")
    return Outcome(path=workspace.FILE, show=show, data=data, next=then)


def _size_lines(source: str, size: SourceSize) -> list[str]:
    """Return lines of text about the size of a text source, and about how much of it prune, distill and score use."""
    whole = size.whole
    train = size.train
    heldout = size.heldout
    calibration = PruneConfig.model_fields["calibration_tokens"].default
    kind = f"{whole.rows:,} texts"
    measures = "score takes prompts from their beginnings"
    teaches = f"distill trains on {train.tokens:,} tokens an epoch"
    if whole.conversations:
        kind = f"{whole.conversations:,} conversations with {whole.answers:,} answers of the assistant"
        if whole.rows > whole.conversations:
            kind += f", {whole.rows - whole.conversations:,} texts"
        if not whole.answers:
            teaches = f"distill --text target trains on the target's answers to {train.questions:,} prompts"
        measures = f"score takes {heldout.questions:,} prompts"
        if heldout.questions < RARE:
            measures += f", too few for a narrow interval: add conversations, or name {ENOUGH} prompts by --prompt-file"
    return [
        f"{source}: {kind}, {whole.tokens:,} tokens",
        f"  training: {train.rows:,} rows; prune calibrates on {min(calibration, train.tokens):,} tokens, {teaches}",
        f"  held out: {heldout.rows:,} rows, {heldout.tokens:,} tokens; {measures}",
    ]


def _layers(space: Workspace) -> int:
    """Return the number of layers to suggest for a first draft.

    It is a third of the source's layers, or 2 if the source is not on this machine.
    """
    source = hub.local(space.source)
    layers = read_config(source).get("num_hidden_layers") if source is not None else None
    return max(1, layers // 3) if isinstance(layers, int) else 2


def _sizes(space: Workspace) -> dict[str, SourceSize]:
    """Return the size of each local text source in tokens of the target, or {} if the target is not local.

    Raises:
        UserError: A source cannot be read.
    """
    sources = [name for name in hub.source_names(space.data) if Path(name).exists() and name not in hub.BUILT_IN_TEXT]
    target = hub.local(space.target) if sources else None
    if target is None:
        return {}
    tokenizer = load_tokenizer(target)
    return {source: measure_source(source, tokenizer) for source in sources}
