"""The command prune, which cuts a draft out of a source checkpoint."""

from pathlib import Path

from draftlab import shipped
from draftlab.commands.base import Outcome
from draftlab.commands.settings.prune import SIZES, PruneConfig
from draftlab.console import note, processes
from draftlab.data import is_chat_file
from draftlab.errors import UserError, about
from draftlab.model import devices, families, hub
from draftlab.model.checkpoint import Checkpoint
from draftlab.model.shape import Shape, check, parse_count
from draftlab.pruning.job import Pruning
from draftlab.pruning.masks.training import MaskTraining
from draftlab.pruning.refit import REFITS
from draftlab.pruning.run import PrunedDraft, Text
from draftlab.pruning.source import Source, check_cut, kv_saving
from draftlab.runs import workspace
from draftlab.shell import typed
from draftlab.target_outputs.store import check_tokenizer, finished_manifest
from draftlab.training import checkpointer
from draftlab.training.reweighing import Reweighing, parse_reference

FFN_MULTIPLE = 16  # an FFN size that is computed from other sizes is a multiple of this number


def prepare(config: PruneConfig, weights: bool) -> Pruning:
    """Resolve and check the settings of the command `prune`, and return the job.

    weights: Whether weight files must be present.

    Raises:
        UserError: The source, text or outputs are missing; the shape cannot be cut from the source; or the method does
            not work with several processes or with this lm_head.
    """
    if config.method == "masks":
        checkpointer.check(masks=True)
    elif processes() > 1:
        raise UserError(
            f"prune --method {config.method} runs in one process only; start it without accelerate or torchrun, or use "
            "--method masks"
        )
    with about("--device"):
        device = devices.resolve_device(config.device)
    with about("--source"):
        place, preset = _locate(config.source, weights)
        have = place.shape if isinstance(place, Checkpoint) else place
    if config.untie and not have.tied:
        raise UserError(f"--untie: {config.source} has a separate lm_head already; leave --untie out")
    have = have.model_copy(update={"tied": have.tied and not config.untie})
    source = None
    llama = not have.options - {"untied"}
    if isinstance(place, Checkpoint):
        source = Source(checkpoint=place, shape=have, device=device, untied=config.untie)
        llama = source.config.get("model_type") == "llama"
    shape = _requested(config, have, weights, llama)
    if source is not None:
        with about("--source"):
            check_cut(source.config, have, shape)
    if config.refit == "head" and have.tied:
        raise UserError(
            "--refit head: the source ties lm_head to the embedding, so the refit would change the embedding, too; add "
            "--untie"
        )
    if config.outputs is not None:
        with about("--outputs"):
            finished_manifest(config.outputs)
            if source is not None:
                check_tokenizer(config.outputs, source.directory)
    if source is not None:
        source.checkpoint.check_length(config.seq_len)
    masks = config.method == "masks"
    head = "" if config.vocab is None else f"-v{config.vocab}"
    return Pruning(
        name=f"prune-{'masks-' if masks else ''}{families.shape_name(shape)}{head}",
        source=source,
        have=have,
        shape=shape,
        text=Text(
            data=config.data,
            outputs=config.outputs,
            tokens=config.calibration_tokens,
            seq_len=config.seq_len,
            seed=config.seed,
        ),
        refit=REFITS[config.refitted],
        method=config.method,
        depth=config.depth,
        scores_cache=config.scores_cache,
        masks=_mask_training(config, source, weights) if masks else None,
        preset=preset,
    )


def _mask_training(config: PruneConfig, source: Source | None, weights: bool) -> MaskTraining:
    """Return the settings of mask training. source: Checkpoint whose losses are the default reference."""
    reweighing = None
    if config.reweigh_steps:
        with about("--reference-losses"):
            if config.reference_losses:
                reference = parse_reference(config.reference_losses, weights)
            elif source is not None:
                reference = source.directory
            else:
                reference = {}  # in a dry run of a shape
        reweighing = Reweighing(every=config.reweigh_steps, reference=reference)
    return MaskTraining(steps=config.steps, batch_size=config.batch_size, lr=config.lr, reweighing=reweighing)


def show(pruned: PrunedDraft, config: PruneConfig, out: Path) -> Outcome:
    shape = pruned.shape
    layers = pruned.keep.layers
    lines = [
        str(out),
        f"{shape.describe()}, {pruned.disk_bytes / 1e6:.1f} MB; layers {layers} of the source",
        kv_saving(pruned.source, shape),
    ]
    if pruned.head is not None and pruned.head.coverage is not None:
        lines.append(
            f"lm_head predicts {len(pruned.head.ids):,} of {shape.vocab:,} token ids; ids chosen on one half of "
            f"the text cover {pruned.head.coverage:.2%} of the other half"
        )
    data = {
        "path": str(out),
        "shape": shape.model_dump(),
        "params": shape.params(),
        "layers": layers,
    }
    if (agreement := pruned.agreement) is not None:
        counted = ""
        if agreement.predictable < agreement.tokens:
            counted = f" over the {agreement.predictable:,} tokens that its lm_head predicts"
        lines.append(
            f"against the source on {agreement.tokens:,} tokens: held-out acceptance {agreement.acceptance:.3f}, "
            f"top-1 {agreement.top1:.3f}, cross-entropy {agreement.cross_entropy:.3f} "
            f"(source {agreement.source_cross_entropy:.3f}){counted}"
        )
        data["acceptance"] = agreement.acceptance
    trains_on = config.repeated("data")
    if not workspace.load().target:  # a draft surely fits its source
        trains_on = ["--target", config.source, *trains_on]
    if is_chat_file(config.data):
        trains_on += ["--text", "target"]
    return Outcome(
        path=out,
        show=lines,
        data=data,
        next=typed("draftlab", "distill", "--draft", out, *trains_on),
    )


def _locate(name: str, weights: bool) -> tuple[Checkpoint | Shape, str | None]:
    """Return the checkpoint of a source, or its shape if it has no weights.

    In a dry run (weights=False), a shape that comes with draftlab is used in place of a source that cannot be
    downloaded. The second result is the name of this shape, or None.

    Raises:
        UserError: There is no such source, or weights are required but the source is only a shape.
    """
    try:
        _, place = families.locate_shape(name, weights)
    except UserError:
        shapes = families.presets(shipped.folder("widths"))
        called = name.partition("@")[0].rpartition("/")[2].lower()
        known = called in shapes and hub.local(name) is None
        if weights or not known or not hub.offline_reason():
            raise
        return shapes[called], called
    if weights and isinstance(place, Shape):
        raise UserError(f"{name} is a shape without weights, which works only with --dry-run; name a checkpoint")
    return (place if isinstance(place, Shape) else Checkpoint(place)), None


def _requested(config: PruneConfig, have: Shape, weights: bool, llama: bool) -> Shape:
    """Return the shape of the draft, from the settings.

    Args:
        have: Shape of the source.
        llama: Whether the source is of the family LLaMA.

    Raises:
        UserError: The shape cannot be cut from the source.
    """
    sizes = {
        "layers": config.layers,
        "hidden": config.width,
        "ffn": config.ffn,
        "params": parse_count(config.params) if config.params else None,
    }
    shape = have
    named = [config.flag(name) for name in (*SIZES, "shape") if config.is_set(name)]
    with about(", ".join(named) or "--layers"):
        if named or config.vocab is None:
            file = None if config.shape is None else shipped.locate(config.shape, "widths")
            shape, preset = families.requested_shape(have, **sizes, multiple_of=FFN_MULTIPLE, file=file)
            if preset is not None and weights:
                note(f"shape {preset}: {shape.describe()}")
        check(shape, llama=llama)
    size = config.vocab or shape.draft_vocab
    if have.draft_vocab not in (None, size):
        raise UserError(
            f"--vocab {size}: the source's lm_head is already trimmed to {have.draft_vocab:,} ids; leave --vocab out"
        )
    if size is not None and size >= have.vocab:
        raise UserError(f"--vocab {size}: the source has {have.vocab:,} token ids; use a smaller number")
    return shape.model_copy(update={"draft_vocab": size})
