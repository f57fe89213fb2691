"""Commands that make something: a workspace, shapes, a tokenizer, a trained model or draft."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from draftlab import workspace
from draftlab.commands.shared import DryRun, Force, LawDir, Outcome, find_law, plan, recorded, shape_of
from draftlab.console import note
from draftlab.errors import UserError
from draftlab.model import hub
from draftlab.model.shape import parse_numbers

if TYPE_CHECKING:
    from draftlab.model.shape import Shape

CODE_FOR_CHAT = (
    "is a chat model, and its text here is Python's standard library: a draft then learns to continue code. Better is "
    "what your users ask and are answered: --data FILE.jsonl, or change data in draftlab.yaml"
)


def init(
    preset: Annotated[
        str | None, Option(help="Target, source and text that belong together: " + ", ".join(workspace.PRESETS) + ".")
    ] = None,
    target: Annotated[
        str | None, Option(help="Instead: a checkpoint's directory, or NAME[@REVISION] on the hub.")
    ] = None,
    source: Annotated[
        str | None, Option(help="With --target: what drafts are cut from; the target if left out.")
    ] = None,
    gguf: Annotated[
        Path | None,
        Option(help="Instead, or for --preset smollm2: a GGUF file, imported under models/."),
    ] = None,
    data: Annotated[str | None, Option(help="Text: SOURCE, or SOURCE=WEIGHT,SOURCE=WEIGHT.")] = None,
    force: Force = False,
) -> Outcome:
    """Write draftlab.yaml here: target, source and data for the commands that follow."""
    known = workspace.preset(preset) if preset else None
    if workspace.FILE.exists() and not force:
        raise UserError(f"{workspace.FILE} exists; edit it, or --force to replace it")
    if ((preset or gguf) is None) == (target is None) or (gguf and preset not in (None, "smollm2")):
        raise UserError("say what to work on, one of: --preset tiny, --preset smollm2, --target NAME, --gguf FILE")
    if source is not None and target is None:
        raise UserError(f"--source {source} needs a --target beside it")
    if target is not None:
        chosen = _located(target, source or target)
    elif gguf or preset == "smollm2":
        chosen = _imported(gguf or workspace.smollm2_file(), known.target if known else None, force=force)
    else:
        assert known is not None
        chosen = known
    chosen = chosen.model_copy(update={"data": data or chosen.data})
    words = f"{chosen.target} {CODE_FOR_CHAT}" if chosen.data == "stdlib" and _is_chat(chosen, preset) else None
    path = workspace.write(chosen, comment=words)
    if words:
        note(words)
    return Outcome(path=path, show=[str(path)], data=chosen.model_dump(mode="json"))


def import_checkpoint(
    source: Annotated[
        str, Argument(help="A GGUF file, or a directory or hub name with pytorch_model.bin or a PEFT adapter.")
    ],
    out: Annotated[Path, Option(help="Directory to write.")],
    base: Annotated[
        str | None, Option(help="Of an adapter, the checkpoint it was trained on; as its config says if left out.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Option(help="Of the weights written; as stored if left out, bfloat16 where they are quantised."),
    ] = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> Outcome:
    """Make a Hugging Face directory of a GGUF file, of .bin files, or of a PEFT adapter and its base."""
    arguments, began = recorded(locals())
    note(f"looking at {source}")
    from draftlab.importing import run
    from draftlab.model import checkpoint

    checkpoint.check_free(out, force=force)
    planned = run.plan(source, None if dtype is None else checkpoint.DTYPES[dtype], base)
    if dry_run:
        return plan(out, planned.facts())
    run.run(planned, out, arguments, began, force=force)
    lines = [f"{planned.stored}, {planned.weights:,} weights", str(out)]
    return Outcome(path=out, show=lines, data={"path": str(out), **planned.facts()})


def design(
    params: Annotated[str | None, Option(help="Budget in parameters of each shape: 1.3b, 796m, 4m.")] = None,
    kv_kib: Annotated[float | None, Option(help="Or a budget of KV cache: KiB per token in bf16.")] = None,
    latency_ms: Annotated[float | None, Option(help="Or of one pass over one token, by the latency law.")] = None,
    body: Annotated[bool, Option("--body", help="Count the blocks only, not embedding and head.")] = False,
    layers: Annotated[str, Option(help="Depths to try, as 2,4,8 or 1-8.")] = "1-12",
    source: Annotated[
        str | None,
        Option(help="Checkpoint, shape file or its name to cut from; the workspace's if left out."),
    ] = None,
    free: Annotated[
        bool, Option("--free", help="Go beyond the source, whose proportions are kept: to train from scratch.")
    ] = False,
    multiple_of: Annotated[int, Option(min=1, help="ffn is a multiple of this.")] = 64,
    width_multiple_of: Annotated[int, Option(min=1, help="Width is a multiple of this, and of head_dim.")] = 1,
    tensor_parallel: Annotated[int, Option(min=1, help="Heads, kv-heads and ffn split over so many devices.")] = 1,
    law: LawDir = None,
    plot: Annotated[Path | None, Option(help="Figure to write, .svg or .png.")] = None,
    out: Annotated[Path | None, Option(help="Folder for one shape file per depth; none: only show.")] = None,
    force: Force = False,
) -> Outcome:
    """Shapes of equal budget from deep and narrow to shallow and wide."""
    from draftlab.model import families
    from draftlab.model.shape import parse_count, write_shape_file
    from draftlab.results.report import shape_table

    budgets = {"--params": params, "--kv-kib": kv_kib, "--latency-ms": latency_ms}
    given = [name for name, value in budgets.items() if value is not None]
    if len(given) != 1:
        raise UserError(
            f"give one budget: --params 1.3b, --kv-kib 120 or --latency-ms 2; got {' and '.join(given) or 'none'}"
        )
    if body and params is None:
        raise UserError(f"--body counts parameters, and the budget is {given[0]}")
    name, have = shape_of(source or workspace.load().source)
    measured = find_law(law, needed=latency_ms is not None)
    kinds: dict[str, families.Budget] = {"--kv-kib": "kv", "--latency-ms": "latency"}
    kind = kinds.get(given[0], "body" if body else "total")
    shapes = families.family(
        families.unbounded(have) if free else have,
        budget=parse_count(params) if params else 1024 * kv_kib if kv_kib else latency_ms or 0,
        kind=kind,
        depths=parse_numbers(layers),
        multiple_of=multiple_of,
        width_multiple_of=width_multiple_of,
        tensor_parallel=tensor_parallel,
        latency_ms=measured.ms if measured and kind == "latency" else None,
    )
    named = {families.shape_name(s): s for s in shapes}
    latency = {n: measured.ms(s) for n, s in named.items()} if measured else {}
    for label, shape in named.items() if out else ():
        file = Path(str(out)) / f"{label}.yaml"
        if file.exists() and not force:
            raise UserError(f"{file} exists; --force to replace it")
        write_shape_file(
            shape, file, f"draftlab design: {kind} budget {next(filter(None, budgets.values()))}, from {name}"
        )
    if plot is not None:
        _plot(plot, named, latency)
    rows = {n: s.model_dump() | {"params": s.params(), "latency_ms": latency.get(n)} for n, s in named.items()}
    return Outcome(path=out, show=[shape_table(named, latency)], data={"shapes": rows})


def _located(target: str, source: str) -> workspace.Workspace:
    for name in (target, source):
        hub.locate(name, weights=False)
    return workspace.Workspace(target=target, source=source, data="stdlib")


def _imported(file: Path, place: str | None, *, force: bool) -> workspace.Workspace:
    """A workspace around a GGUF file, which is imported unless its place holds it already."""
    from draftlab import provenance

    out = Path(place or f"models/{file.stem.lower()}")
    record = provenance.read_record(out)
    if record and record.command == "import" and list(record.inputs.values()) == [provenance.fingerprint(file)]:
        note(f"{out} was imported from {file} already")
    else:
        import_checkpoint(source=str(file), out=out, force=force)
    return workspace.Workspace(target=str(out), source=str(out), data="stdlib")


def _is_chat(space: workspace.Workspace, preset: str | None) -> bool:
    """Whether the target's tokenizer has a chat template; a preset's target is not fetched for it."""
    folder = Path(space.target) if preset else hub.locate(space.target, weights=False)
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        settings = {}
    return (folder / "chat_template.jinja").is_file() or "chat_template" in settings


def _plot(path: Path, shapes: dict[str, "Shape"], latency: dict[str, float]) -> None:
    from draftlab.results.plots import Panel, save_figure

    sizes = {
        "width": [(float(s.layers), float(s.hidden)) for s in shapes.values()],
        "ffn": [(float(s.layers), float(s.ffn)) for s in shapes.values()],
    }
    panels = [Panel(x="layers", y="width and ffn", series=sizes)]
    if latency:
        points = [(float(s.layers), latency[name]) for name, s in shapes.items()]
        panels.append(Panel(x="layers", y="ms per pass, predicted", series={"one token": points}))
    save_figure(path, panels)


def tokenizer(
    data: Annotated[str, Option(help="Text to learn from: SOURCE, or SOURCE=WEIGHT,SOURCE=WEIGHT by size.")],
    out: Annotated[Path, Option(help="Directory to write.")],
    vocab: Annotated[int, Option(min=260, help="Token ids, special tokens included.")] = 4096,
    megabytes: Annotated[float, Option(help="Text read in all.")] = 24.0,
    force: Force = False,
) -> Outcome:
    """Train a byte-level BPE tokenizer for source code."""
    arguments, began = recorded(locals())
    from draftlab import provenance
    from draftlab.data import documents, parse_mixture, take_bytes
    from draftlab.model import checkpoint
    from draftlab.model.tokenizer import train_tokenizer

    checkpoint.check_free(out, force=force)
    limits = {name: int(megabytes * 1e6 * weight) for name, weight in parse_mixture(data).items()}
    texts = [d.text for name, most in limits.items() for d in take_bytes(documents(name, "train"), most)]
    with checkpoint.new_directory(out, force=force) as work:
        train_tokenizer(texts, vocab, work)
        provenance.write_record(work, "tokenizer", arguments, [], began)
    return Outcome(path=out, show=[str(out)], data={"path": str(out), "vocab": vocab})
