"""The commands that come before the first draft: init, import, design and env."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Self, TypeAlias

from pydantic import model_validator

from draftlab.commands.base import Job, Outcome, check_data, command, fill
from draftlab.commands.prune import PruneConfig
from draftlab.config import shared
from draftlab.config.base import (
    Config,
    Numbers,
    Only,
    OutputConfig,
    advanced_option,
    numbers,
    option,
)
from draftlab.console import note, note_if_slow
from draftlab.errors import UserError, about
from draftlab.model import hub
from draftlab.model.hf_files import read_config
from draftlab.output import Output
from draftlab.runs import provenance, workspace
from draftlab.runs.workspace import Workspace
from draftlab.shell import typed

if TYPE_CHECKING:
    from draftlab.data.batches import SourceSize
    from draftlab.importing.run import ImportSource
    from draftlab.latency.scaling_law import Design
    from draftlab.model.shape import Shape


class InitConfig(Config):
    """The settings of the command `init`, which writes draftlab.yaml from a preset, a checkpoint or a GGUF file."""

    preset: str | None = option(None, f"Preset of target, source and text: {', '.join(workspace.PRESETS)}.")
    target: str | None = option(None, "Checkpoint of the target: a directory or a hub name, optionally with @REVISION.")
    source: str | None = option(None, "Checkpoint from which drafts are cut. Default: the target.")
    draft: str | None = option(
        None,
        "Draft that exists already, such as a smaller model of the same family. Commands use it until you make a "
        "draft.",
    )
    gguf: Path | None = option(None, "GGUF file of the target, which is imported under models/.")
    data: str | None = option(
        None,
        "Text to train and measure on: one SOURCE, or a mixture, SOURCE=WEIGHT,SOURCE=WEIGHT.",
        shown_default="the preset's",
    )
    overwrite: bool = option(False, "Replace an existing draftlab.yaml.", flag="--force")

    only = (
        Only(("source", "draft"), lambda c: c.target, "needs --target NAME"),
        Only(
            ("gguf",),
            lambda c: c.preset in (None, "smollm2"),
            "works only with --preset smollm2 or without --preset",
        ),
    )

    @model_validator(mode="after")
    def _names_one_target(self) -> Self:
        if (self.preset is None and self.gguf is None) == (self.target is None):
            raise ValueError(
                "name the target: --preset NAME, --gguf FILE or --target NAME; --target excludes --preset and --gguf"
            )
        return self


class ImportConfig(OutputConfig):
    """The settings of the command `import`, which converts checkpoints in other layouts to Hugging Face directories."""

    source: str = option(
        help="A GGUF file, or a directory or hub name with pytorch_model.bin, a LoRA adapter or a multimodal model.",
        argument=True,
    )
    base: str | None = option(
        None,
        "Base checkpoint of a PEFT adapter. Default: the base that the adapter's config names.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "Data type of the written weights; auto: the data type of the file, or bfloat16 for a quantised file.",
    )


class DesignConfig(Config):
    """The settings of the command `design`, which finds a shape for each number of layers within the same budget."""

    params: shared.Count = option(None, "Budget: number of parameters of each shape, such as 1.3b or 796m.")
    kv_kib: float | None = option(None, "Budget: KiB of KV cache per token in bf16.", gt=0)
    latency_ms: float | None = option(None, "Budget: milliseconds of a one-token pass, predicted by --law.", gt=0)
    layers: Numbers = numbers("1-12", "Numbers of layers to try, as 2,4,8 or 1-8.")
    source: str = shared.source()
    vocab: shared.Vocab = shared.draft_vocab("the target's answers")
    multiple_of: int = advanced_option(64, "The FFN size is a multiple of this number.", ge=1)
    tensor_parallel: int = option(
        1,
        "Number of tensor-parallel devices over which heads, KV heads and FFN must split evenly.",
        ge=1,
    )
    law: Path | None = option(None, "Latency law: an output of draftlab profile --law.")
    out: Path | None = option(
        None,
        "Folder to write a file for each shape to. Default: shapes are shown and not written.",
        acts="always",
    )
    overwrite: bool = option(False, "Replace existing shape files.", flag="--force")

    only = (
        Only(("overwrite",), lambda c: c.out, "needs --out FOLDER"),
        Only(
            ("latency_ms",),
            lambda c: c.law,
            "needs a latency law: run draftlab profile --law SOURCE --out law, then add --law law",
        ),
    )

    @model_validator(mode="after")
    def _has_one_budget(self) -> Self:
        if sum(budget is not None for budget in (self.params, self.kv_kib, self.latency_ms)) != 1:
            raise ValueError("write exactly one budget: --params 1.3b, --kv-kib 120 or --latency-ms 2")
        return self


class EnvConfig(Config):
    """The settings of the command `env`. There are none."""


Designing: TypeAlias = "tuple[Design, Path | None, list[object]]"  # shapes, their folder, and words of --source


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Designed(Outcome):
    """The outcome of design. shapes: Shapes with the same budget, by name."""

    shapes: "dict[str, Shape]"


class NewWorkspace(NamedTuple):
    """The workspace that the command `init` wrote, and the size of each text source that is a local file or folder.

    questions: File of the prompts that belong to the published draft. None if the workspace does not use this draft.
    """

    space: Workspace
    sizes: "dict[str, SourceSize]"
    questions: Path | None


def prepare_import(config: ImportConfig, weights: bool) -> "Job[ImportSource]":
    """Resolve and check the settings of the command `import`, and return the job.

    Raises:
        UserError: The source cannot be read.
    """
    from draftlab.importing.run import convert, inspect
    from draftlab.model.devices import DTYPES

    source = inspect(config.source, DTYPES.get(config.dtype), config.base)

    def run(output: Output) -> "ImportSource":
        convert(source, output)
        return source

    return Job(run, source.name, source.facts)


@command(
    ImportConfig,
    name="import",
    prepare=prepare_import,
    dry_run=True,
    example="import model-q8_0.gguf --out models/model",
)
def import_checkpoint(source: "ImportSource", output: Output) -> Outcome:
    """Convert a GGUF file, .bin files, a LoRA adapter and its base, or a multimodal model to a text checkpoint."""
    data = {"path": str(output.out), **source.facts()}
    return Outcome(
        path=output.out,
        show=[str(output.out)],
        data=data,
        next=typed("draftlab", "init", "--target", output.out),
    )


def prepare_init(config: InitConfig, weights: bool) -> Job[NewWorkspace]:
    """Resolve and check the settings of the command `init`, and return the job.

    Raises:
        UserError: draftlab.yaml exists and --force is off, or a checkpoint, file or text is missing.
    """
    from draftlab.importing.run import PUBLISHED, smollm2_file

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
        imports[target], draft = gguf, None
        published = next(PUBLISHED.glob("*.gguf"), None)
        if config.preset and config.data is None and published is not None:
            draft = "models/smollm2-135m-draft"
            imports[draft] = published
        space = Workspace(target=target, source=target, data="stdlib", draft=draft)
    assert space is not None  # the settings name a preset, a target or a GGUF file
    space = space.model_copy(update={"data": config.data or space.data})
    return Job(partial(_write, space, imports, fetch=config.preset is None, force=config.overwrite))


def _write(space: Workspace, imports: dict[str, Path], *, fetch: bool, force: bool) -> NewWorkspace:
    """Import GGUF files, and write draftlab.yaml.

    Args:
        imports: GGUF file of each directory to write.
        fetch: Whether the target may be looked up on the hub.
        force: Whether to replace an earlier import.
    """
    from draftlab.importing.run import CODE_FOR_CHAT, PUBLISHED, is_chat_model, is_imported

    warning = questions = None
    for name, gguf in imports.items():
        out = Path(name)
        if gguf.parent == PUBLISHED:
            questions = PUBLISHED / "questions.jsonl"
        if is_imported(gguf, out):
            note(
                f"{out} was imported from {gguf} before and is not imported again; to import "
                "the file again, remove this directory"
            )
        else:
            import_checkpoint(source=str(gguf), out=out, force=force)
    if space.data == "stdlib" and is_chat_model(space.target, fetch=fetch):
        warning = f"{space.target} {CODE_FOR_CHAT}"
        note(warning)
    with about("--data"):
        sizes = _sizes(space)
    workspace.write(space, comment=warning)
    return NewWorkspace(space, sizes, questions)


def _sizes(space: Workspace) -> "dict[str, SourceSize]":
    """Return the size of each local text source in tokens of the target, or {} if the target is not local.

    Raises:
        UserError: A source cannot be read.
    """
    sources = [name for name in hub.source_names(space.data) if Path(name).exists() and name not in hub.BUILT_IN_TEXT]
    target = hub.local(space.target) if sources else None
    if target is None:
        return {}
    with note_if_slow("loading transformers"):
        from draftlab.data.batches import measure_source
        from draftlab.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(target)
    return {source: measure_source(source, tokenizer) for source in sources}


@command(InitConfig, prepare=prepare_init, example="init --preset tiny")
def init(written: NewWorkspace) -> Outcome:
    """Write draftlab.yaml with the default target, source and data of all commands; show the size of local text."""
    space, sizes, questions = written
    show = [str(workspace.FILE)]
    for source, size in sizes.items():
        show += _size_lines(source, size)
    data = space.model_dump(mode="json", exclude_none=True)
    if sizes:
        data["text"] = {source: asdict(size) for source, size in sizes.items()}
    plan = [] if hub.local(space.source) else ["--dry-run"]  # shows what prune would download
    then = typed("draftlab", "prune", "--layers", _layers(space), *plan)
    if questions is not None:
        words = [
            "draftlab",
            "score",
            "--draft",
            space.draft,
            "--drafter",
            "fallback:draft_tokens=3",
        ]
        words += ["--int8", "both", "--prompt-file", questions]
        words += ["--k", "2-4", "--max-new-tokens", "64", "--repeats", "1"]
        then = typed(*words)
    elif space.draft is not None:
        target = Path(space.target)
        then = typed("draftlab", "auto", target, "--draft", space.draft, "--dry-run")
    return Outcome(path=workspace.FILE, show=show, data=data, next=then)


def _size_lines(source: str, size: "SourceSize") -> list[str]:
    """Return lines of text about the size of a text source, and about how much of it prune, distill and score use."""
    from draftlab.intervals import ENOUGH, RARE

    whole, train, heldout = size.whole, size.train, size.heldout
    calibration = PruneConfig.model_fields["calibration_tokens"].default
    kind, measures = f"{whole.rows:,} texts", "score takes prompts from their beginnings"
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


def prepare_design(config: DesignConfig, weights: bool) -> Job[Designing]:
    """Resolve and check the settings of the command `design`, and return the job.

    Raises:
        UserError: No draft can be cut from the source, or there is no such law.
    """
    from draftlab.latency import scaling_law
    from draftlab.model.families import Budget, BudgetKind
    from draftlab.model.hf_files import check_head_size
    from draftlab.model.shape import parse_count
    from draftlab.pruning.source import prunable_shape

    with about("--source"):
        name, source = prunable_shape(config.source)
    if config.vocab is not None:
        check_head_size(config.vocab, source.vocab)
        source = source.model_copy(update={"draft_vocab": config.vocab})
    law = None
    if config.law is not None:
        with about("--law"):
            law = scaling_law.read_law(config.law)
    kind: BudgetKind = "latency"
    amount = config.latency_ms or 0.0
    if config.params is not None:
        kind, amount = "total", float(parse_count(config.params))
    elif config.kv_kib is not None:
        kind, amount = "kv", 1024 * config.kv_kib
    latency_ms = law.ms if law is not None and kind == "latency" else None
    budget = fill(Budget, config, amount=amount, kind=kind, latency_ms=latency_ms)
    layers, out, overwrite = config.layers, config.out, config.overwrite
    typed_source = config.repeated("source")

    def run() -> Designing:
        found = scaling_law.design(source, layers, budget, law)
        if out is not None:
            found.write(out, f"draftlab design: {kind} budget {amount:g}, from {name}", overwrite=overwrite)
        return found, out, typed_source

    return Job(run)


@command(DesignConfig, prepare=prepare_design, example="design --params 796m --layers 2-12")
def design(designed: Designing) -> Designed:
    """Find draft shapes with the same budget, from deep and narrow to shallow and wide."""
    from draftlab.results.tables import shape_table

    found, out, source = designed
    rows = {
        name: shape.model_dump() | {"params": shape.params(), "latency_ms": found.latency_ms.get(name)}
        for name, shape in found.shapes.items()
    }
    name, first = next(iter(found.shapes.items()))
    sizes: list[object] = ["--layers", first.layers, "--width", first.hidden, "--ffn", first.ffn]
    if out is not None:
        sizes = ["--shape", out / f"{name}.yaml"]
    return Designed(
        path=out,
        show=[shape_table(found.shapes, found.latency_ms)],
        data={"shapes": rows},
        shapes=found.shapes,
        next=typed("draftlab", "prune", *source, *sizes),
    )


@command(EnvConfig, example="env")
def env(config: EnvConfig) -> Outcome:
    """Show what a bug report needs: versions, the machine and the workspace."""
    import torch

    from draftlab.latency.machine_state import device_name, read_environment
    from draftlab.model import devices, precision

    space, machine = workspace.load(), read_environment()
    device = devices.resolve_device(space.device)
    facts: dict[str, object] = {
        **provenance.versions(),
        "system": machine.system,
        "processor": f"{machine.processor}, {machine.cores} cores, {machine.busy_cores:.1f} busy with other work",
        "device": device_name(device),
        "driver": machine.driver or "none",
        "threads": torch.get_num_threads(),
        "workspace": str(workspace.FILE.absolute())
        if workspace.FILE.exists()
        else f"none; {workspace.FILE} is not in this folder",
        "target": space.target or "none",
        "source": space.source or "none",
        "dtype": space.dtype,
    }
    for mode in precision.DTYPES if device.type == "cpu" else ():
        try:
            facts[f"speed over float32 in mode {mode}"] = precision.speeds(mode).describe()
        except UserError as error:
            facts[f"mode {mode}"] = str(error)
    return Outcome(path=None, show=[f"{name}: {value}" for name, value in facts.items()], data=facts)
