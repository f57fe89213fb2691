"""Commands that make something: a workspace, shapes, a tokenizer, a trained model or draft."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from draftlab import workspace
from draftlab.commands.shared import (
    Compile,
    Data,
    DryRun,
    Dtype,
    EvalEvery,
    Force,
    Lr,
    MicroRows,
    Optimizer,
    Out,
    Outcome,
    ReweighEvery,
    Rows,
    SaveEvery,
    Seed,
    Steps,
    TargetName,
    WeightDecay,
    newest,
    plan,
    recorded,
)
from draftlab.errors import UserError
from draftlab.shape import parse_numbers, training_cost

if TYPE_CHECKING:
    from draftlab.distill.evaluate import Length
    from draftlab.distill.run import Fitted


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


def train(
    data: Annotated[str, Option(help="Text to train on: SOURCE, or SOURCE=WEIGHT,SOURCE=WEIGHT.")],
    out: Annotated[Path, Option(help="Directory to write.")],
    model: Annotated[str | None, Option(help="Checkpoint to continue from.")] = None,
    shape: Annotated[Path | None, Option(help="Or a shape file: start from random weights.")] = None,
    tokenizer: Annotated[str | None, Option(help="Checkpoint or directory with the tokenizer of a new model.")] = None,
    steps: Steps = 1000,
    rows: Rows = 16,
    micro_rows: MicroRows = 0,
    seq_len: Annotated[int, Option(min=8, help="Tokens per sequence.")] = 512,
    context: Annotated[int, Option(min=8, help="Longest context of a new model.")] = 2048,
    lr: Lr = 1.0e-3,
    optimizer: Optimizer = "adamw",
    weight_decay: WeightDecay = 0.1,
    dtype: Dtype = "bfloat16",
    compile: Compile = False,
    eval_every: EvalEvery = 200,
    save_every: SaveEvery = 200,
    seed: Seed = 0,
    force: Force = False,
    dry_run: DryRun = False,
) -> Outcome:
    """Train with cross-entropy on text: a new model, or continued pretraining after pruning."""
    arguments, began = recorded(locals())
    import torch

    from draftlab import checkpoint
    from draftlab.data import open_batches, open_heldout
    from draftlab.distill import run
    from draftlab.distill.loop import Settings
    from draftlab.shape import read_shape_file

    checkpoint.check_free(out, force=force)
    if model is not None:
        source = checkpoint.locate(model)
        tok, config = checkpoint.load_tokenizer(source), checkpoint.read_config(source)
        start = checkpoint.read_shape(source)
    elif shape is not None and tokenizer is not None:
        source = Path(tokenizer) if Path(tokenizer).is_dir() else checkpoint.locate(tokenizer)
        tok, start = checkpoint.load_tokenizer(source), read_shape_file(shape)
        config = checkpoint.llama_config(start, context=context, **checkpoint.special_ids(tok))
    else:
        raise UserError("say what to train: --model CHECKPOINT, or --shape FILE with --tokenizer DIR for a new model")
    if dry_run:
        cost = training_cost(start, None, tokens=steps * rows * seq_len, rows=micro_rows or rows, seq_len=seq_len)
        return plan(out, {"model": start.describe()} | cost)
    student = checkpoint.load_model(source, torch.float32) if model else checkpoint.new_model(config, seed)
    batches = open_batches(data, tok, rows=rows, seq_len=seq_len, steps=steps, seed=seed)
    heldout = open_heldout(data, tok, rows=rows, seq_len=seq_len, most_rows=512)
    settings = Settings.of(arguments, loss="ce")
    job = run.Job(
        command="train", arguments=arguments, inputs=[source], out=out, like=source, config=config, began=began,
        force=force,
    )  # fmt: skip
    fitted = run.fit_and_write(job, student, None, batches, heldout, settings)
    return _trained(out, fitted)


def distill(
    draft: Annotated[str | None, Option(help="Checkpoint to train; the newest pruned one if left out.")] = None,
    target: TargetName = None,
    data: Data = None,
    text: Annotated[
        str,
        Option(help="Train on data itself, what the target writes, what the draft writes; or target=0.7,draft=0.3."),
    ] = "data",
    cache: Annotated[
        Path | None, Option(help="Distil from this cache instead: neither target nor data are needed.")
    ] = None,
    loss: Annotated[
        str, Option(help="fkl, rkl, jsd(0.5), tvd, nla, lk(3), ce; 0.9*fkl + 0.1*ce; in turn: fkl@0.2 -> lk(3).")
    ] = "fkl",
    temperature: Annotated[float, Option(min=0.01, help="Softens both distributions in the loss.")] = 1.0,
    serve_temperature: Annotated[
        float, Option(min=0, help="Temperature at which tokens per target pass are reported; 0 is greedy.")
    ] = 0.0,
    sample_temperature: Annotated[float, Option(min=0, help="How target and draft sample what they write.")] = 1.0,
    prompt_tokens: Annotated[int, Option(min=1, help="Tokens of each prompt for what they write.")] = 32,
    lora: Annotated[int, Option(min=0, help="Train adapters of this rank instead of all weights; 0: all.")] = 0,
    checkpointing: Annotated[
        bool, Option("--checkpointing", help="Compute activations again in the backward pass: less memory, more time.")
    ] = False,
    steps: Steps = 500,
    rows: Rows = 16,
    micro_rows: MicroRows = 0,
    seq_len: Annotated[int, Option(min=8, help="Tokens per sequence.")] = 256,
    lr: Lr = 1.0e-3,
    optimizer: Optimizer = "adamw",
    weight_decay: WeightDecay = 0.0,
    dtype: Dtype = "bfloat16",
    compile: Compile = False,
    eval_every: EvalEvery = 100,
    save_every: SaveEvery = 100,
    reweigh_every: ReweighEvery = 0,
    seed: Seed = 0,
    out: Out = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> Outcome:
    """Train a draft to agree with the target."""
    arguments, began = recorded(locals())
    import torch

    from draftlab import checkpoint
    from draftlab.data import open_batches, open_heldout
    from draftlab.distill import run
    from draftlab.distill.adapters import adapt
    from draftlab.distill.cache import open_cache
    from draftlab.distill.loop import GivenTeacher, Settings
    from draftlab.distill.losses import parse_loss
    from draftlab.distill.text import parse_texts
    from draftlab.tokenizer import check_same_vocabulary

    space = workspace.load()
    texts = parse_texts(text)
    if cache is not None and (data or list(texts) != ["data"] or reweigh_every):
        raise UserError(f"--cache {cache} brings its own text; leave out --data, --text and --reweigh-every")
    needs_target = cache is None and (parse_loss(loss).needs_teacher or "target" in texts)
    source = checkpoint.locate(draft or newest(space, ("prune",), "prune"))
    teacher_dir = checkpoint.locate(target or space.target) if needs_target else None
    out = out or space.runs / f"distill-{source.name.removeprefix('prune-')}"
    checkpoint.check_free(out, force=force)
    if teacher_dir is not None:
        check_same_vocabulary(source, teacher_dir)
    if dry_run:
        small, teaching = checkpoint.read_shape(source), checkpoint.read_shape(teacher_dir) if teacher_dir else None
        cost = training_cost(small, teaching, tokens=steps * rows * seq_len, rows=micro_rows or rows, seq_len=seq_len)
        return plan(out, {"draft": small.describe(), "target": teaching.describe() if teaching else "none"} | cost)
    job = run.Job(
        command="distill", arguments=arguments, inputs=[p for p in (source, teacher_dir, cache) if p], out=out,
        like=source, config=checkpoint.read_config(source), began=began, force=force,
    )  # fmt: skip
    settings = Settings.of(arguments)
    eos_id = checkpoint.special_ids(checkpoint.load_tokenizer(source))["eos"]
    student = checkpoint.load_model(source, torch.float32)
    if checkpointing:
        student.gradient_checkpointing_enable()
    student = adapt(student, lora) if lora else student
    teacher: GivenTeacher = None
    if cache is not None:
        batches, heldout = open_cache(cache, source, rows=rows, temperature=temperature)
        teacher = "cached"
    else:
        spec, tok = data or space.data, checkpoint.load_tokenizer(source)
        heldout = open_heldout(spec, tok, rows=rows, seq_len=seq_len, most_rows=64)
        batches = open_batches(spec, tok, rows=rows, seq_len=seq_len, steps=steps, seed=seed)
        device = checkpoint.resolve_device(space.device)
        if reweigh_every:
            reference = teacher_dir or checkpoint.locate(target or space.target)
            batches = run.reweighing(batches, reference, tok, device, reweigh_every)
        writing = run.Writing(prompt=prompt_tokens, temperature=sample_temperature, eos_id=eos_id, seed=seed)
        batches = run.mixed(
            texts, batches, writing, student=student, target=teacher_dir, state=run.claim(job), steps=steps,
            device=device,
        )  # fmt: skip
        if parse_loss(loss).needs_teacher and teacher_dir:
            teacher = checkpoint.load_model(teacher_dir, torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    replay = run.Replay(temperature=serve_temperature, texts=48, prompt=min(64, seq_len), length=64, eos_id=eos_id)
    fitted = run.fit_and_write(job, student, teacher, batches, heldout, settings, replay)
    return _trained(out, fitted)


def _trained(out: Path, fitted: "Fitted") -> Outcome:
    lines = [
        str(out),
        f"{fitted.tokens:,} tokens in {fitted.seconds:.0f} s; {fitted.bits_per_byte:.3f} bits per byte held out",
    ]
    before, after = fitted.before.acceptance, fitted.after.acceptance
    if before is not None and after is not None:
        more = f" (or up to {fitted.after.slack:.3f} more: the cache lists the likeliest tokens only)"
        lines.append(f"held-out acceptance {before:.3f} -> {after:.3f}" + (more if fitted.after.slack > 0.001 else ""))
    if fitted.lengths:
        lines.append("tokens per target pass: " + "; ".join(_length_text(n) for n in fitted.lengths if n.k in (2, 4)))
    if fitted.lengths and all(n.gain_low <= 1 for n in fitted.lengths):
        lines.append("no gain beyond the noise at any K: more steps, a larger rate or other text may help")
    return Outcome(path=out, show=lines, data={"path": str(out), **fitted.as_dict()})


def _length_text(found: "Length") -> str:
    return f"K = {found.k}: {found.before:.2f} -> {found.after:.2f} ({found.low:.2f} to {found.high:.2f})"
