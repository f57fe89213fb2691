"""The command design, which finds draft shapes with the same budget."""

from draftlab.commands.base import Outcome
from draftlab.commands.settings.make import DesignConfig
from draftlab.errors import about
from draftlab.latency.scaling_law import Design, Designing, read_law
from draftlab.model.families import Budget, BudgetKind
from draftlab.model.hf_files import check_head_size
from draftlab.model.shape import parse_count
from draftlab.pruning.source import prunable_shape
from draftlab.results.tables import shape_table
from draftlab.shell import typed


def prepare(config: DesignConfig, weights: bool) -> Designing:
    """Resolve and check the settings of the command `design`, and return the job.

    Raises:
        UserError: No draft can be cut from the source, or there is no such law.
    """
    with about("--source"):
        name, source = prunable_shape(config.source)
    if config.vocab is not None:
        check_head_size(config.vocab, source.vocab)
        source = source.model_copy(update={"draft_vocab": config.vocab})
    law = None
    if config.law is not None:
        with about("--law"):
            law = read_law(config.law)
    kind: BudgetKind = "latency"
    amount = config.latency_ms or 0.0
    if config.params is not None:
        kind = "total"
        amount = float(parse_count(config.params))
    elif config.kv_kib is not None:
        kind = "kv"
        amount = 1024 * config.kv_kib
    latency_ms = law.ms if law is not None and kind == "latency" else None
    budget = Budget(
        amount=amount,
        kind=kind,
        latency_ms=latency_ms,
        multiple_of=config.multiple_of,
        tensor_parallel=config.tensor_parallel,
    )
    return Designing(
        source=source,
        layers=config.layers,
        budget=budget,
        law=law,
        out=config.out,
        comment=f"draftlab design: {kind} budget {amount:g}, from {name}",
        overwrite=config.overwrite,
    )


def show(design: Design, config: DesignConfig) -> Outcome:
    rows = {
        name: shape.model_dump() | {"params": shape.params(), "latency_ms": design.latency_ms.get(name)}
        for name, shape in design.shapes.items()
    }
    name, first = next(iter(design.shapes.items()))
    sizes: list[object] = ["--layers", first.layers, "--width", first.hidden, "--ffn", first.ffn]
    if config.out is not None:
        sizes = ["--shape", config.out / f"{name}.yaml"]
    return Outcome(
        path=config.out,
        show=[shape_table(design.shapes, design.latency_ms)],
        data={"shapes": rows},
        next=typed("draftlab", "prune", *config.repeated("source"), *sizes),
    )
