"""The command that cuts a draft out of a source."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from draftlab import workspace
from draftlab.commands.shared import (
    Data,
    DryRun,
    Dtype,
    EvalEvery,
    Force,
    Lr,
    MicroTokens,
    Out,
    Outcome,
    ReweighEvery,
    Rows,
    SaveEvery,
    Seed,
    Steps,
    plan,
    recorded,
    subject,
)
from draftlab.console import note
from draftlab.errors import UserError
from draftlab.model import hub
from draftlab.model.shape import Shape

if TYPE_CHECKING:
    from draftlab.prune.refit import Agreement


def prune(
    layers: Annotated[int | None, Option(min=1, help="Layers to keep.")] = None,
    width: Annotated[int | None, Option(min=1, help="Hidden dimensions to keep.")] = None,
    heads: Annotated[int | None, Option(min=1, help="Query heads to keep; width / head_dim if left out.")] = None,
    kv_heads: Annotated[int | None, Option(min=1, help="Key-value heads to keep.")] = None,
    ffn: Annotated[int | None, Option(min=1, help="Neurons to keep; the source's ratio if left out.")] = None,
    params: Annotated[str | None, Option(help="Total parameters: solves for ffn, as in 1.3b.")] = None,
    multiple_of: Annotated[int, Option(min=1, help="ffn is a multiple of this; 256 suits GGUF's K-quants.")] = 16,
    shape: Annotated[Path | None, Option(help="Shape file instead of the numbers above.")] = None,
    source: Annotated[
        str | None,
        Option(help="Checkpoint to cut; the workspace's if left out. With --dry-run a shape or its name, too."),
    ] = None,
    method: Annotated[
        Literal["activation", "masks", "random", "first", "magnitude"],
        Option(help="What decides which parts stay: one calibration, masks trained to it, or a baseline."),
    ] = "activation",
    depth: Annotated[
        Literal["influence", "contiguous", "even", "greedy"],
        Option(help="With activation, which layers stay. greedy holds the whole source in memory."),
    ] = "influence",
    basis: Annotated[
        Literal["auto", "pca", "coordinates"],
        Option(help="pca rotates the residual stream before cutting its width; auto: where the head is not tied."),
    ] = "auto",
    norm_comp: Annotated[bool, Option(help="Rescale norms to the smaller width.")] = True,
    refit: Annotated[bool, Option(help="Refit o_proj and down_proj to follow the source's residual stream.")] = True,
    refit_head: Annotated[bool, Option(help="Refit the head to the source's logits too.")] = False,
    ridge: Annotated[float, Option(min=1e-8, help="Pull of the cut weights in the refit.")] = 0.005,
    data: Data = None,
    tokens: Annotated[int, Option(min=1, help="Calibration tokens.")] = 32768,
    seq_len: Annotated[int, Option(min=8, help="Tokens per calibration sequence.")] = 512,
    scores_cache: Annotated[Path | None, Option(help="File that keeps the calibration, for many shapes.")] = None,
    train: Annotated[
        Literal["frozen", "lora", "full"], Option(help="With masks: what becomes of the weights meanwhile.")
    ] = "frozen",
    loss: Annotated[str, Option(help="With masks: ce, or fkl, rkl, jsd(0.5) against the target.")] = "fkl",
    target: Annotated[str | None, Option(help="With masks: the target of the loss; the source if left out.")] = None,
    steps: Steps = 300,
    rows: Rows = 16,
    micro_tokens: MicroTokens = 0,
    lr: Lr = 1.0e-4,
    dtype: Dtype = "auto",
    eval_every: EvalEvery = 100,
    save_every: SaveEvery = 100,
    reweigh_every: ReweighEvery = 0,
    seed: Seed = 0,
    out: Out = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> Outcome:
    """Cut a LLaMA-like checkpoint to an exact shape, and refit what is left to follow the source."""
    arguments, began = recorded(locals())
    space = workspace.load()
    called, cut_from = subject(source or space.source, weights=not dry_run)
    chosen_target = hub.locate(target, weights=not dry_run) if target else None
    text = hub.check_data(data or space.data)

    from draftlab.distill.optimizers import training_dtype
    from draftlab.distill.trainer import Settings
    from draftlab.model import checkpoint, families
    from draftlab.model.shape import check, parse_count
    from draftlab.prune import run
    from draftlab.prune.masks.training import Learning
    from draftlab.prune.refit import Fit

    have = checkpoint.planned_shape(cut_from) if isinstance(cut_from, Path) else cut_from
    wanted, preset = families.requested_shape(
        have,
        layers=layers,
        hidden=width,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        params=parse_count(params) if params else None,
        multiple_of=multiple_of,
        file=shape,
    )
    if preset is not None:
        note(f"shape {preset}: {wanted.describe()}")
    out = out or space.runs / f"prune-{families.shape_name(wanted)}"
    checkpoint.check_free(out, force=force)
    if not isinstance(cut_from, Path):
        check(wanted, llama=not have.options - {"untied"})
        if dry_run:
            return plan(out, _cost(have, wanted, tokens))
        raise UserError(f"{called} is a shape without weights: --dry-run plans with it, and cutting needs a checkpoint")
    check(wanted, llama=checkpoint.read_config(cut_from).get("model_type") == "llama")
    learning = Learning(
        settings=Settings.of(arguments, warmup_share=0.1, weight_decay=0.0, dtype=training_dtype(dtype)),
        weights=train,
        rows=rows,
        seq_len=seq_len,
        target=chosen_target,
        reweigh_every=reweigh_every,
    )
    chosen = run.Plan(
        source=cut_from,
        shape=wanted,
        method=method,
        depth=depth,
        basis=basis,
        fit=Fit(norms=norm_comp, outputs=refit, head=refit_head, ridge=ridge),
        data=text,
        tokens=tokens,
        seq_len=seq_len,
        seed=seed,
        device=checkpoint.resolve_device(space.device),
        scores_cache=scores_cache,
        learning=learning if method == "masks" else None,
    )
    run.check_plan(chosen)
    if dry_run:
        return plan(out, _cost(have, wanted, tokens))
    pruned = run.prune(chosen, out=out, arguments=arguments, began=began, force=force)
    lines = [str(out), f"{wanted.describe()}, {pruned.disk_bytes / 1e6:.1f} MB; layers {pruned.keep.layers}"]
    lines.append(_kv_saving(have, wanted))
    facts = {"path": str(out), "shape": wanted.model_dump(), "params": wanted.params(), "layers": pruned.keep.layers}
    if pruned.agreement is not None:
        lines.append(_agreement(pruned.agreement))
        facts["acceptance"] = pruned.agreement.acceptance
    return Outcome(path=out, show=lines, data=facts)


def _cost(have: Shape, wanted: Shape, tokens: int) -> dict[str, str]:
    embedding = 2 * have.vocab * have.hidden
    layer = 2 * have.body_params() // have.layers
    gram = 16 * wanted.ffn**2
    streams = 4 * tokens * have.hidden
    return {
        "source": have.describe(),
        "draft": wanted.describe(),
        "kv": _kv_saving(have, wanted),
        "memory": f"about {(2 * embedding + 2 * layer + gram + streams + 1_000_000_000) / 1e9:.2g} GB",
        "compute": f"{2 * tokens * have.flops_per_token(0) / 1e12:,.3g} TFLOP",
        "disk": f"{wanted.weight_bytes() / 1e6:,.4g} MB in bf16",
        "tensor parallel": f"splits evenly over {', '.join(map(str, wanted.tensor_parallel()))} devices",
    }


def _kv_saving(have: Shape, wanted: Shape) -> str:
    saved = 1 - wanted.kv_bytes_per_token() / have.kv_bytes_per_token()
    return f"KV cache {wanted.kv_bytes_per_token() / 1024:.3g} KiB per token in bf16 ({saved:.1%} less than the source)"


def _agreement(found: "Agreement") -> str:
    return (
        f"against the source on {found.tokens:,} held-out tokens: acceptance {found.acceptance:.3f}, "
        f"top-1 {found.top1:.3f}, cross-entropy {found.cross_entropy:.3f} (source {found.source_cross_entropy:.3f})"
    )
