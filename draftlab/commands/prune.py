"""The command prune, which cuts a draft out of a source checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from draftlab import shipped
from draftlab.commands.base import Job, Outcome, command, fill
from draftlab.config.base import TRAINING, Only, OutputConfig, advanced_option, option
from draftlab.config.shared import (
    CheckpointSettings,
    Count,
    Vocab,
    data,
    device,
    draft_vocab,
    reference_losses,
    reweigh_steps,
    seed,
    source,
)
from draftlab.console import note, processes
from draftlab.errors import UserError, about
from draftlab.model import families, hub
from draftlab.model.families import shape_name
from draftlab.model.shape import Shape, check, parse_count
from draftlab.output import Output
from draftlab.quantities import format_bytes
from draftlab.runs import workspace
from draftlab.shell import typed

if TYPE_CHECKING:
    from draftlab.pruning.masks.training import MaskTraining
    from draftlab.pruning.run import Prune, PrunedDraft, Text

# panels of --help
SHAPE = "Shape of the draft"
CALIBRATION = "Calibration and refit"
SIZES = ("layers", "width", "ffn", "params")


class PruneConfig(OutputConfig, CheckpointSettings):
    """The settings of the command `prune`: source, shape of the draft, choice of weights, and calibration text."""

    layers: int | None = option(None, "Number of layers to keep.", ge=1, panel=SHAPE)
    width: int | None = option(None, "Number of hidden dimensions to keep.", ge=1, panel=SHAPE)
    ffn: int | None = option(
        None,
        "Number of FFN neurons to keep. Default: as many per hidden dimension as in the source.",
        ge=1,
        panel=SHAPE,
    )
    params: Count = option(
        None,
        "Number of parameters of the draft, as 1.3b; the FFN size is chosen to match.",
        panel=SHAPE,
    )
    shape: Path | None = option(
        None,
        "Shape, which sets the numbers of layers, hidden dimensions, FFN neurons and parameters: a shape file, or the "
        "name of a shape that comes with draftlab, such as wide-796m.",
        panel=SHAPE,
        reads="shape",
    )
    vocab: Vocab = draft_vocab("--outputs or --data", panel=SHAPE)
    untie: bool = advanced_option(
        False,
        "Give the draft a separate lm_head, for a source that ties lm_head to the embedding. prune can then rotate the "
        "residual stream and refit lm_head.",
        panel=SHAPE,
    )
    source: str = source()
    data: str = data("Calibration text: one SOURCE, or a mixture, SOURCE=WEIGHT,SOURCE=WEIGHT.")
    outputs: Path | None = option(
        None,
        "Stored target outputs (draftlab outputs build) to calibrate on, in place of --data. --vocab then keeps the "
        "most frequent token ids of these outputs.",
        panel=CALIBRATION,
    )
    calibration_tokens: int = advanced_option(32768, "Number of tokens of calibration text.", ge=1, panel=CALIBRATION)
    seq_len: int = advanced_option(512, "Length of each sequence in tokens.", ge=8, panel=CALIBRATION)
    refit: Literal["none", "norms", "layers", "head"] | None = advanced_option(
        None,
        "Weights to adjust after the cut. none: no weights; norms: scale the norms to the smaller width; layers: also "
        "fit o_proj and down_proj to the source's residual stream; head: also fit lm_head to the source's logits. "
        "Default: layers, or none with --lr, which trains weights away from the source's.",
        panel=CALIBRATION,
    )
    method: Literal["importance", "masks", "random", "first"] = option(
        "importance",
        "How to choose the weights to keep. importance: by activations; masks: by trained masks (Sheared LLaMA); "
        "random, first: baselines.",
    )
    depth: Literal["influence", "even"] = advanced_option(
        "influence",
        "Which layers to keep. influence: the layers that change their input most; even: evenly spaced layers.",
        panel=CALIBRATION,
    )
    scores_cache: Path | None = advanced_option(
        None,
        "File for the importance scores. If it exists, the scores are read from it, and no calibration is needed.",
        panel=CALIBRATION,
        reads="nothing",
        acts="always",
    )
    steps: int = option(300, "Number of optimizer steps that train the masks.", ge=1, panel=TRAINING)
    batch_size: int = advanced_option(
        16, "Number of sequences per step, over all processes.", ge=1, le=1 << 16, panel=TRAINING
    )
    lr: float | None = advanced_option(
        None,
        "Train the weights along with the masks, with this peak learning rate. Default: the weights are frozen.",
        gt=0,
        panel=TRAINING,
    )
    reweigh_steps: int = reweigh_steps()
    reference_losses: str | None = reference_losses("source")
    device: str = device()
    seed: int = seed()

    only = (
        Only(SIZES, lambda c: c.shape is None, "leave it out, because --shape sets all sizes"),
        Only(
            ("outputs",),
            lambda c: c.calibrates or c.vocab or c.shape,
            "leave it out, or add --vocab: without a refit, this --method reads text only to choose token ids",
        ),
        Only(
            ("data",),
            lambda c: c.outputs is None or c.method == "masks",
            "leave it out, because --outputs has the text",
        ),
        Only(
            ("calibration_tokens",),
            lambda c: c.calibrates,
            "leave it out, because without a refit, this --method reads no calibration text",
        ),
        Only(
            ("depth", "scores_cache"),
            lambda c: c.method == "importance",
            "works only with --method importance",
        ),
        Only(
            ("steps", "batch_size", "lr", "reweigh_steps"),
            lambda c: c.method == "masks",
            "works only with --method masks",
        ),
        Only(("reference_losses",), lambda c: c.reweigh_steps, "needs --reweigh-steps N"),
        Only(
            ("seed",),
            lambda c: c.calibrates or c.method in ("random", "masks"),
            "leave it out, because nothing in this run is random",
        ),
    )

    @property
    def text_source(self) -> str | None:
        return self.data if self.outputs is None or self.method == "masks" else None

    @property
    def calibrates(self) -> bool:
        """Return whether the draft's weights depend on calibration text."""
        return self.method == "importance" or self.refitted != "none"

    @property
    def refitted(self) -> str:
        """Return which weights are adjusted after the cut: the value of the setting `refit`, or its default."""
        return self.refit or ("layers" if self.lr is None else "none")


FFN_MULTIPLE = 16  # an FFN size that is computed from other sizes is a multiple of this number


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Pruned(Outcome):
    """The outcome of prune.

    Attributes:
        layers: Indices of the source's layers that the draft keeps.
        acceptance: Acceptance rate of the draft's tokens by the source on held-out text. None if it was not measured.
    """

    shape: Shape
    layers: list[int]
    acceptance: float | None


def prepare(config: PruneConfig, weights: bool) -> "Job[PrunedDraft]":
    """Resolve and check the settings of the command `prune`, and return the job.

    weights: Whether weight files must be present.

    Raises:
        UserError: The source, text or outputs are missing; the shape cannot be cut from the source; or the method does
            not work with several processes or with this lm_head.
    """
    from draftlab.model import checkpoint, devices
    from draftlab.model.hf_files import check_length
    from draftlab.pruning.masks.training import MaskTraining
    from draftlab.pruning.refit import REFITS
    from draftlab.pruning.run import Prune, Text
    from draftlab.pruning.source import Source, check_cut
    from draftlab.target_outputs.store import check_tokenizer, finished_manifest
    from draftlab.training import checkpointer
    from draftlab.training.reweighing import Reweighing, parse_reference

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
        have = checkpoint.read_shape(place) if isinstance(place, Path) else place
    if config.untie and not have.tied:
        raise UserError(f"--untie: {config.source} has a separate lm_head already; leave --untie out")
    have = have.model_copy(update={"tied": have.tied and not config.untie})
    source, llama = None, not have.options - {"untied"}
    if isinstance(place, Path):
        source = Source(directory=place, shape=have, device=device, untied=config.untie)
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
        check_length(source.directory, config.seq_len)
    head = "" if config.vocab is None else f"-v{config.vocab}"
    text = fill(Text, config, tokens=config.calibration_tokens)
    training = None
    if config.method == "masks":
        reweighing = None
        if config.reweigh_steps:
            with about("--reference-losses"):
                asked = config.reference_losses
                reference = parse_reference(asked, weights) if asked else cast(Path, place)
            reweighing = Reweighing(every=config.reweigh_steps, reference=reference)
        training = fill(MaskTraining, config, reweighing=reweighing)
    cut = partial(Prune, source=cast(Source, source), shape=shape, text=text, refit=REFITS[config.refitted])
    run = partial(
        _prune,
        cut=cut,
        training=training,
        method=config.method,
        depth=config.depth,
        scores_cache=config.scores_cache,
    )
    dtype_bytes = 2 if source is None else source.planned_dtype.itemsize
    return Job(
        run,
        f"prune-{'masks-' if training else ''}{shape_name(shape)}{head}",
        partial(_facts, have, shape, text, training, dtype_bytes=dtype_bytes, preset=preset),
    )


def _prune(
    output: Output, *, cut: Callable[..., "Prune"], training: "MaskTraining | None", **how: Any
) -> "PrunedDraft":
    """Cut the source, and return the draft.

    Args:
        cut: Function that makes the Prune for an output.
        training: Settings of --method masks. None for other methods.
        how: Arguments of Prune.by_scores, for all methods except masks.
    """
    from draftlab.pruning.masks.training import prune_by_masks

    if training is not None:
        return prune_by_masks(cut(output=output), training)
    return cut(output=output).by_scores(**how)


def _facts(
    have: Shape,
    shape: Shape,
    text: "Text",
    training: "MaskTraining | None",
    *,
    dtype_bytes: int,
    preset: str | None,
) -> dict[str, object]:
    """Return the facts that a dry run shows. No weights are read or downloaded.

    Args:
        have: Shape of the source.
        shape: Shape of the draft.
        preset: Name of the shape that is used in place of a source that cannot be downloaded, or None.
    """
    from draftlab.pruning.run import HELDOUT_TOKENS
    from draftlab.pruning.source import kv_saving

    source = have.describe()
    if preset is not None:
        source += f" (computed from the shape {preset} in draftlab; nothing was downloaded)"
    weights = 2 * dtype_bytes * (have.vocab * have.hidden + have.body_params() // have.layers)
    # three copies of the source's residual stream, and one of the draft's
    per_token = dtype_bytes * (3 * have.hidden + shape.hidden)
    gram = 20 * shape.ffn**2  # bytes: once in float32, and twice in float64 while it is solved
    memory = weights + (text.tokens + HELDOUT_TOKENS) * per_token + gram + 1e9
    facts: dict[str, object] = {
        "source": source,
        "draft": shape.describe(),
        "kv": kv_saving(have, shape),
        "memory": f"about {memory / 1e9:.1f} GB",
        "flops": 2 * text.tokens * have.flops_per_token(0),
        "disk": f"{format_bytes(shape.weight_bytes())} in bf16",
        "tensor parallel": f"splits evenly over {', '.join(map(str, shape.tensor_parallel()))} devices",
    }
    if training is not None:
        tokens = training.steps * training.batch_size * text.seq_len
        # bytes per fp32 weight: 4, or 16 with its gradient and two Adam moments
        memory = have.params() * (16 if training.lr else 4) + have.weight_bytes() + 1e9
        facts["training tokens"] = f"{tokens:,}"
        facts["memory"] = f"about {memory / 1e9:.1f} GB and activations"
        facts["flops"] = tokens * 4 * have.flops_per_token(text.seq_len // 2)
    return facts


@command(PruneConfig, prepare=prepare, dry_run=True, example="prune --layers 12 --width 2560")
def prune(pruned: "PrunedDraft", output: Output) -> Pruned:
    """Cut a LLaMA-like checkpoint to an exact shape, and refit the draft to follow the source."""
    from draftlab.data import is_chat_file
    from draftlab.pruning.source import kv_saving

    shape, layers = pruned.shape, pruned.keep.layers
    lines = [
        str(output.out),
        f"{shape.describe()}, {pruned.disk_bytes / 1e6:.1f} MB; layers {layers} of the source",
        kv_saving(pruned.source, shape),
    ]
    if pruned.head is not None and pruned.head.coverage is not None:
        lines.append(
            f"lm_head predicts {len(pruned.head.ids):,} of {shape.vocab:,} token ids; ids chosen on one half of "
            f"the text cover {pruned.head.coverage:.2%} of the other half"
        )
    data = {
        "path": str(output.out),
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
    config = output.config
    assert isinstance(config, PruneConfig)
    trains_on = config.repeated("data")
    if not workspace.load().target:  # a draft surely fits its source
        trains_on = ["--target", config.source, *trains_on]
    if is_chat_file(config.data):
        trains_on += ["--text", "target"]
    return Pruned(
        path=output.out,
        show=lines,
        data=data,
        shape=shape,
        layers=list(layers),
        acceptance=agreement.acceptance if agreement else None,
        next=typed("draftlab", "distill", "--draft", output.out, *trains_on),
    )


def _locate(name: str, weights: bool) -> tuple[Path | Shape, str | None]:
    """Return the directory of a source, or its shape if it has no weights.

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
    return place, None


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
