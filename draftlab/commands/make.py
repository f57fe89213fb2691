"""Commands that make something: a workspace, shapes, a tokenizer, a trained model or draft."""

from pathlib import Path
from typing import Annotated

from typer import Option

from draftlab import workspace
from draftlab.commands.shared import Force, Outcome, recorded
from draftlab.errors import UserError
from draftlab.shape import parse_numbers


def init(
    preset: Annotated[str, Option(help="tiny, llama-65b, llama-2-70b, llama-3-70b, or a checkpoint directory.")],
    force: Force = False,
) -> Outcome:
    """Write draftlab.yaml here: target, source and data for the commands that follow."""
    chosen = workspace.preset(preset)
    if workspace.FILE.exists() and not force:
        raise UserError(f"{workspace.FILE} exists; edit it, or --force to replace it")
    path = workspace.write(chosen)
    return Outcome(path=path, show=[str(path)], data=chosen.model_dump(mode="json"))


def design(
    params: Annotated[str | None, Option(help="Budget in parameters of each shape: 1.3b, 796m, 4m.")] = None,
    kv_kib: Annotated[float | None, Option(help="Or a budget of KV cache: KiB per token in bf16.")] = None,
    body: Annotated[bool, Option("--body", help="Count the blocks only, not embedding and head.")] = False,
    layers: Annotated[str, Option(help="Depths to try, as 2,4,8 or 1-8.")] = "1-12",
    source: Annotated[str | None, Option(help="Checkpoint to cut from; the workspace's if left out.")] = None,
    multiple_of: Annotated[int, Option(min=1, help="ffn is a multiple of this.")] = 64,
    out: Annotated[Path | None, Option(help="Folder for one shape file per depth; none: only show.")] = None,
    force: Force = False,
) -> Outcome:
    """Shapes of equal budget from deep and narrow to shallow and wide."""
    from draftlab import checkpoint, family
    from draftlab.report import shape_table
    from draftlab.shape import parse_count, write_shape_file

    if (params is None) == (kv_kib is None):
        raise UserError("give one budget: --params 1.3b or --kv-kib 120")
    directory = checkpoint.locate(source or workspace.load().source)
    kind: family.Budget = "kv" if kv_kib is not None else "body" if body else "total"
    budget = parse_count(params) if params is not None else int((kv_kib or 0) * 1024)
    shapes = family.family(
        checkpoint.read_shape(directory),
        budget=budget,
        kind=kind,
        depths=parse_numbers(layers),
        multiple_of=multiple_of,
    )
    named = {family.shape_name(s): s for s in shapes}
    for name, shape in named.items() if out else ():
        file = Path(str(out)) / f"{name}.yaml"
        if file.exists() and not force:
            raise UserError(f"{file} exists; --force to replace it")
        write_shape_file(shape, file, f"draftlab design: {kind} budget {params or kv_kib}, cut from {directory.name}")
    rows = {name: s.model_dump() | {"params": s.params()} for name, s in named.items()}
    return Outcome(path=out, show=[shape_table(named)], data={"shapes": rows})


def tokenizer(
    data: Annotated[str, Option(help="Text to learn from: SOURCE, or SOURCE=WEIGHT,SOURCE=WEIGHT by size.")],
    out: Annotated[Path, Option(help="Directory to write.")],
    vocab: Annotated[int, Option(min=260, help="Token ids, special tokens included.")] = 4096,
    megabytes: Annotated[float, Option(help="Text read in all.")] = 24.0,
    force: Force = False,
) -> Outcome:
    """Train a byte-level BPE tokenizer for source code."""
    arguments, began = recorded(locals())
    from draftlab import checkpoint, provenance
    from draftlab.data import documents, parse_mixture, take_bytes
    from draftlab.tokenizer import train_tokenizer

    checkpoint.check_free(out, force=force)
    limits = {name: int(megabytes * 1e6 * weight) for name, weight in parse_mixture(data).items()}
    texts = [d.text for name, most in limits.items() for d in take_bytes(documents(name, "train"), most)]
    with checkpoint.new_directory(out, force=force) as work:
        train_tokenizer(texts, vocab, work)
        provenance.write_record(work, "tokenizer", arguments, [], began)
    return Outcome(path=out, show=[str(out)], data={"path": str(out), "vocab": vocab})
