"""Commands that train: a draft against a target, or a model on text."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from draftlab import workspace
from draftlab.commands.shared import (
    KEEPING,
    SERVED,
    TRAINING,
    ApiKeyFile,
    Compile,
    Data,
    DeviceMap,
    DryRun,
    Dtype,
    EvalEvery,
    Force,
    KeepLast,
    Lr,
    Memory,
    MicroTokens,
    Optimizer,
    Out,
    Outcome,
    Patience,
    ReweighEvery,
    Rows,
    SaveEvery,
    Seed,
    ServedModel,
    ServerUrl,
    Steps,
    TargetName,
    Track,
    WeightDecay,
    connect,
    newest,
    newest_draft,
    plan,
    recorded,
)
from draftlab.console import note, note_if_slow
from draftlab.errors import UserError
from draftlab.model import hub

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from draftlab.distill.evaluate import Length
    from draftlab.distill.run import TrainingResult

LOSS, WRITTEN, ONLINE = "Loss", "Text that models write", "Following traffic"  # panels of --help


def train(
    data: Annotated[str, Option(help="Text to train on: SOURCE, or SOURCE=WEIGHT,SOURCE=WEIGHT.")],
    out: Annotated[Path, Option(help="Directory to write.")],
    model: Annotated[str | None, Option(help="Checkpoint to continue from.")] = None,
    shape: Annotated[Path | None, Option(help="Or a shape file: start from random weights.")] = None,
    tokenizer: Annotated[str | None, Option(help="Checkpoint or directory with the tokenizer of a new model.")] = None,
    steps: Steps = 1000,
    rows: Rows = 16,
    micro_tokens: MicroTokens = 0,
    seq_len: Annotated[int, Option(min=8, help="Tokens per sequence.")] = 512,
    context: Annotated[int, Option(min=8, help="Longest context of a new model.")] = 2048,
    lr: Lr = 1.0e-3,
    optimizer: Optimizer = "adamw",
    weight_decay: WeightDecay = 0.1,
    dtype: Dtype = "auto",
    compile: Compile = False,
    eval_every: EvalEvery = 200,
    save_every: SaveEvery = 200,
    keep_last: KeepLast = 1,
    patience: Patience = 0,
    track: Track = None,
    seed: Seed = 0,
    force: Force = False,
    dry_run: DryRun = False,
) -> Outcome:
    """Train with cross-entropy on text: a new model, or continued pretraining after pruning."""
    arguments, began = recorded(locals())
    source = hub.locate(model, weights=not dry_run) if model else _tokenizer_place(tokenizer)
    text = hub.check_data(data)
    import torch

    from draftlab.data import open_batches, open_heldout
    from draftlab.distill import distributed, run
    from draftlab.distill.optimizers import training_dtype
    from draftlab.distill.trackers import check as check_trackers
    from draftlab.distill.trainer import Settings, TrainingSetup
    from draftlab.model import checkpoint
    from draftlab.model.shape import read_shape_file
    from draftlab.model.size import read_size, training_cost

    check_trackers(tuple(track or ()))
    distributed.check(optimizer=optimizer)
    checkpoint.check_free(out, force=force)
    check_rate(lr)
    check_length(source if model else None, seq_len)
    if source is not None and model is not None:
        tok, config = checkpoint.load_tokenizer(source), checkpoint.read_config(source)
        start = read_size(source)
    elif shape is not None and source is not None:
        tok, start = checkpoint.load_tokenizer(source), read_shape_file(shape)
        config = checkpoint.llama_config(start, context=context, **checkpoint.special_ids(tok))
    else:
        raise UserError("say what to train: --model CHECKPOINT, or --shape FILE with --tokenizer DIR for a new model")
    if dry_run:
        cost = training_cost(start, None, tokens=steps * rows * seq_len, seq_len=seq_len)
        return plan(out, {"model": start.describe()} | cost)
    if model:
        checkpoint.check(source)
    student = checkpoint.load_model(source, torch.float32) if model else checkpoint.new_model(config, seed)
    batches = open_batches(text, tok, rows=rows, seq_len=seq_len, steps=steps, seed=seed)
    heldout = open_heldout(text, tok, rows=rows, seq_len=seq_len, most_rows=512)
    settings = Settings.of(arguments, loss="ce", dtype=training_dtype(dtype))
    job = run.Job(
        command="train", arguments=arguments, inputs=[source], out=out, like=source, config=config, began=began,
        force=force, track=tuple(track or ()),
    )  # fmt: skip
    fitted = run.fit_and_write(job, student, TrainingSetup(teacher=None, batches=batches, heldout=heldout), settings)
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
    server: ServerUrl = None,
    model: ServedModel = None,
    api_key_file: ApiKeyFile = None,
    k: Annotated[
        int, Option(min=1, help="With --server: most probable tokens asked for.", rich_help_panel=SERVED)
    ] = 20,
    online: Annotated[
        Path | None,
        Option(
            help="Folder of caches of served traffic, by name in time: one round of following it, with --cache.",
            rich_help_panel=ONLINE,
        ),
    ] = None,
    replay: Annotated[
        float,
        Option(
            min=0,
            max=0.99,
            help="With --online: share of steps on --cache, against forgetting.",
            rich_help_panel=ONLINE,
        ),
    ] = 0.25,
    window: Annotated[
        int, Option(min=1, help="With --online: newest caches of traffic that train.", rich_help_panel=ONLINE)
    ] = 4,
    loss: Annotated[
        str,
        Option(
            help="fkl, rkl, jsd(0.5), tvd, nla, lk(3), ce; 0.9*fkl + 0.1*ce; in turn: fkl@0.2 -> lk(3).",
            rich_help_panel=LOSS,
        ),
    ] = "fkl",
    select_with: Annotated[
        str | None,
        Option(
            help="Draft distilled before: only tokens count on which this one is furthest behind it.",
            rich_help_panel=LOSS,
        ),
    ] = None,
    select_keep: Annotated[
        float, Option(min=0.01, max=1, help="With --select-with: share of tokens to count.", rich_help_panel=LOSS)
    ] = 0.4,
    temperature: Annotated[
        float, Option(min=0.01, help="Softens both distributions in the loss.", rich_help_panel=LOSS)
    ] = 1.0,
    serve_temperature: Annotated[
        float,
        Option(
            min=0,
            help="Temperature at which tokens per target pass are reported; 0 is greedy.",
            rich_help_panel=KEEPING,
        ),
    ] = 0.0,
    sample_temperature: Annotated[
        float, Option(min=0, help="How target and draft sample what they write.", rich_help_panel=WRITTEN)
    ] = 1.0,
    prompt_tokens: Annotated[
        int, Option(min=1, help="Tokens of each prompt for what they write.", rich_help_panel=WRITTEN)
    ] = 32,
    lora: Annotated[
        int, Option(min=0, help="Train adapters of this rank instead of all weights; 0: all.", rich_help_panel=TRAINING)
    ] = 0,
    checkpointing: Annotated[
        bool,
        Option(
            "--checkpointing",
            help="Compute activations again in the backward pass: less memory, more time.",
            rich_help_panel=TRAINING,
        ),
    ] = False,
    steps: Steps = 500,
    rows: Rows = 16,
    micro_tokens: MicroTokens = 0,
    seq_len: Annotated[
        int | None,
        Option(min=8, help="Tokens per sequence, 256 if left out; a cache brings its own.", rich_help_panel=TRAINING),
    ] = None,
    lr: Lr = 1.0e-3,
    optimizer: Optimizer = "adamw",
    weight_decay: WeightDecay = 0.0,
    dtype: Dtype = "auto",
    compile: Compile = False,
    eval_every: EvalEvery = 100,
    save_every: SaveEvery = 100,
    keep_last: KeepLast = 1,
    patience: Patience = 0,
    pilot: Annotated[
        int,
        Option(
            min=0,
            help="First try several losses for so many steps each, and keep the best; 0: take --loss.",
            rich_help_panel=LOSS,
        ),
    ] = 0,
    reweigh_every: ReweighEvery = 0,
    device_map: DeviceMap = None,
    memory: Memory = 2.0,
    track: Track = None,
    seed: Seed = 0,
    out: Out = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> Outcome:
    """Train a draft to agree with the target."""
    arguments, began = recorded(locals())
    if cache is None and online is None:
        hub.check_data(data or workspace.load().data)  # before torch is imported
    with note_if_slow("distill: loading torch and transformers"):
        from draftlab.distill import checkpointer, distributed, run
        from draftlab.distill.losses import parse_loss
        from draftlab.distill.on_policy import parse_texts
        from draftlab.distill.optimizers import training_dtype
        from draftlab.distill.pilot import pilot as try_losses
        from draftlab.distill.selection import Selection
        from draftlab.distill.trackers import check as check_trackers
        from draftlab.distill.trainer import Settings
        from draftlab.distill.training_setup import Reading, cached_lesson, served_teacher, target_lesson
        from draftlab.model import checkpoint
        from draftlab.model.size import read_size, training_cost
        from draftlab.model.tokenizer import common_vocabulary

    space = workspace.load()
    texts, told = parse_texts(text), tuple(track or ())
    check_trackers(told)
    distributed.check(optimizer=optimizer, pilot=pilot > 0)
    check_rate(lr)
    given = {
        "--target": target, "--data": data, "--text": list(texts) != ["data"], "--server": server,
        "--seq-len": seq_len, "--reweigh-every": reweigh_every, "--device-map": device_map,
    }  # fmt: skip
    if idle := [name for name, value in given.items() if value and cache is not None]:
        raise UserError(f"--cache {cache} brings its own text and the target's word on it; leave out {', '.join(idle)}")
    if online is not None:
        return _follow(arguments, began, dry_run)
    seq_len = seq_len or 256
    if server is not None and (target or reweigh_every or "target" in texts):
        raise UserError(
            f"--server {server} is the target, and only looks at text; leave out --target and "
            "--reweigh-every, and build a cache for --text target (draftlab cache build --server)"
        )
    if pilot and reweigh_every:
        raise UserError("--pilot compares losses on the same text, and --reweigh-every changes it; leave out one")
    compared = bool(pilot) or parse_loss(loss).needs_teacher
    source = hub.locate(draft or newest(space, ("prune",), "prune"), weights=not dry_run)
    needed = cache is None and server is None and (compared or "target" in texts or reweigh_every)
    target_dir = hub.locate(target or space.target, weights=not dry_run) if needed else None
    reference = hub.locate(select_with, weights=not dry_run) if select_with else None
    from_data = data or space.data if cache else hub.check_data(data or space.data)
    out = out or space.runs / f"distill-{hub.checkpoint_name(source).removeprefix('prune-')}"
    checkpoint.check_free(out, force=force)
    for place in (source, target_dir) if cache is None else ():
        check_length(place, seq_len)
    if target_dir is not None:
        common_vocabulary(source, target_dir)
    if reference is not None:
        common_vocabulary(source, reference)
    if dry_run:
        small, teaching = read_size(source), read_size(target_dir) if target_dir else None
        cost = training_cost(small, teaching, tokens=steps * rows * seq_len, seq_len=seq_len)
        return plan(out, {"draft": small.describe(), "target": teaching.describe() if teaching else "none"} | cost)
    for place in (source, target_dir, reference):
        if place is not None:
            checkpoint.check(place)
    job = run.Job(
        command="distill", arguments=arguments, inputs=[p for p in (source, target_dir, cache) if p], out=out,
        like=source, config=checkpoint.read_config(source), began=began, force=force, lora=lora,
        vocab=checkpoint.vocab_size(target_dir) if target_dir else None, track=told,
    )  # fmt: skip
    computing, device = training_dtype(dtype), checkpoint.resolve_device(space.device)
    settings = Settings.of(arguments, dtype=computing)
    checkpointer.process_state(None if space.device == "auto" else device)
    with run.claimed(job) as state:
        student = _student(source, lora, checkpointing, seed)
        if cache is not None:
            setup = cached_lesson(cache, source, rows=rows, temperature=temperature)
        else:
            reading = Reading.of(
                arguments,
                data=from_data,
                texts=texts,
                compared=compared,
                seq_len=seq_len,
                device=device,
                dtype=computing,
            )
            teacher = served_teacher(connect(server, model, api_key_file), source, k) if server else None
            setup = target_lesson(student, source, target_dir, reading, state, teacher)
        if reference is not None:
            selecting = checkpoint.load_model(reference, checkpoint.DTYPES[computing])
            setup = replace(setup, selection=Selection(selecting, select_keep))
        notes: dict[str, object] = {}
        if pilot:
            notes["pilot"] = merits = try_losses(student, setup, settings, pilot, state)
            settings = replace(settings, loss=next(iter(merits)))
            note("pilot: " + ", ".join(f"{name} {merit:.3f}" for name, merit in merits.items()))
        fitted = run.fit_and_write(job, student, setup, settings, **notes)
        return _trained(out, fitted)


def check_rate(lr: float) -> None:
    """Raises UserError: no rate to train at."""
    if not 0 < lr < float("inf"):
        raise UserError(f"--lr {lr}: want a number above 0")


def check_length(place: Path | None, seq_len: int) -> None:
    """Raises UserError: sequences longer than a checkpoint's context."""
    from draftlab.model.checkpoint import max_model_len

    if place is not None and seq_len > max_model_len(place):
        raise UserError(f"--seq-len {seq_len}: {place} reads at most {max_model_len(place)} tokens")


def _tokenizer_place(name: str | None) -> Path | None:
    """The directory of a new model's tokenizer, which need be no checkpoint; None where none is named."""
    if name is None or Path(name).is_dir():
        return Path(name) if name else None
    return hub.locate(name, weights=False)


def _follow(arguments: dict[str, Any], began: float, dry_run: bool) -> Outcome:
    """One round of --online: train on traffic, be judged by newer traffic, be promoted or not."""
    from draftlab.distill import online, run
    from draftlab.distill.optimizers import training_dtype
    from draftlab.distill.trainer import Settings
    from draftlab.model import checkpoint

    space, cache, rows, steps = workspace.load(), arguments["cache"], arguments["rows"], arguments["steps"]
    if cache is None:
        raise UserError("--online needs --cache: what the draft must not forget, and what it must not get worse at")
    folder = arguments["out"] or space.runs / "online"
    how = online.Online(
        folder=folder, traffic=arguments["online"], base=cache, replay=arguments["replay"],
        window=arguments["window"], temperature=arguments["temperature"],
    )  # fmt: skip
    older, newest_cache = how.newest()
    if idle := [name for name in ("pilot", "select_with") if arguments[name]]:
        raise UserError(f"--online follows traffic with one loss; leave out --{idle[0].replace('_', '-')}")
    if dry_run:
        trains = ", ".join(path.name for path in older)
        return plan(folder, {"trains on": trains, "judged by": newest_cache.name, "steps": steps})
    if (folder / online.LEDGER).exists():
        if newest_cache.name in online.ledger(folder).judged():
            return Outcome(path=folder, show=[f"{newest_cache.name} has judged already; nothing newer"], data={})
    else:
        online.start(folder, hub.locate(arguments["draft"] or newest_draft(space)))
    live = online.version(folder, online.ledger(folder).live)
    setup, made = online.setup(how, live, rows=rows, steps=steps), online.candidate(how)
    if not made.exists():
        job = run.Job(
            command="distill", arguments=arguments, inputs=[live, cache], out=made, like=live,
            config=checkpoint.read_config(live), began=began, force=False, lora=arguments["lora"],
        )  # fmt: skip
        student = _student(live, arguments["lora"], arguments["checkpointing"], arguments["seed"])
        settings = Settings.of(arguments, dtype=training_dtype(arguments["dtype"]))
        run.fit_and_write(job, student, setup, settings)
    found = online.judge(how, made, checkpoint.resolve_device(space.device))
    online.settle(folder, made, found)
    verdict = f"promoted: version {found.version} is live" if found.promoted else "not promoted: the live version stays"
    text = (
        f"tokens per target pass at K = {online.JUDGED_K} on {found.judged_by}: "
        f"{found.before:.3f} -> {found.after:.3f}, at least {found.gain_low - 1:+.1%}; "
        f"on {cache.name}: {found.anchor - 1:+.1%}"
    )
    return Outcome(path=folder, show=[str(folder / online.LIVE), text, verdict], data=found.model_dump())


def rollback(folder: Annotated[Path, Argument(help="What draftlab distill --online keeps.")]) -> Outcome:
    """Make the version before the live one live again."""
    from draftlab.distill import online

    number = online.rollback(folder)
    live = folder / online.LIVE
    return Outcome(path=live, show=[str(live), f"version {number} is live"], data={"path": str(live), "live": number})


def _student(source: Path, lora: int, checkpointing: bool, seed: int) -> "PreTrainedModel":
    import torch

    from draftlab.distill.lora import adapt
    from draftlab.model import checkpoint

    student = checkpoint.load_model(source, torch.float32)
    if checkpointing:
        student.gradient_checkpointing_enable()
    return adapt(student, lora, seed) if lora else student


def _trained(out: Path, fitted: "TrainingResult") -> Outcome:
    lines = [
        str(out),
        f"{fitted.tokens:,} tokens in {fitted.seconds:.0f} s; {fitted.bits_per_byte:.3f} bits per byte held out",
    ]
    before, after = fitted.before.acceptance, fitted.after.acceptance
    if before is not None and after is not None:
        more = f" (or up to {fitted.after.slack:.3f} more: only the likeliest tokens are listed)"
        lines.append(f"held-out acceptance {before:.3f} -> {after:.3f}" + (more if fitted.after.slack > 0.001 else ""))
    if fitted.lengths:
        lines.append("tokens per target pass: " + "; ".join(_length_text(n) for n in fitted.lengths if n.k in (2, 4)))
    if fitted.lengths and all(n.gain_low <= 1 for n in fitted.lengths):
        lines.append("no gain beyond the noise at any K: more steps, a larger rate or other text may help")
    return Outcome(path=out, show=lines, data={"path": str(out), **fitted.as_dict()})


def _length_text(found: "Length") -> str:
    return f"K = {found.k}: {found.before:.2f} -> {found.after:.2f} ({found.low:.2f} to {found.high:.2f})"
