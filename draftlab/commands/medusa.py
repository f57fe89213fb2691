"""The command that trains Medusa heads."""

import shutil
from typing import Annotated, Any, cast

from typer import Option

from draftlab import workspace
from draftlab.commands.shared import (
    TRAINING,
    Data,
    DryRun,
    Dtype,
    EvalEvery,
    Force,
    KeepLast,
    Lr,
    Out,
    Outcome,
    Patience,
    Rows,
    SaveEvery,
    Seed,
    Steps,
    TargetName,
    plan,
    recorded,
)
from draftlab.model import hub


def medusa(
    heads: Annotated[int, Option(min=1, max=8, help="How many; as many tokens can be drafted.")] = 3,
    target: TargetName = None,
    data: Data = None,
    steps: Steps = 500,
    rows: Rows = 8,
    seq_len: Annotated[int, Option(min=16, help="Tokens per sequence.", rich_help_panel=TRAINING)] = 256,
    lr: Lr = 1.0e-3,
    dtype: Dtype = "auto",
    eval_every: EvalEvery = 100,
    save_every: SaveEvery = 100,
    keep_last: KeepLast = 1,
    patience: Patience = 0,
    seed: Seed = 0,
    out: Out = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> Outcome:
    """Train Medusa heads on the frozen target, for score --drafter medusa:heads=DIR."""
    arguments, began = recorded(locals())
    space = workspace.load()
    place = hub.locate(target or space.target, weights=not dry_run)
    source = hub.check_data(data or space.data)

    from draftlab import provenance
    from draftlab.data import open_batches, open_heldout
    from draftlab.distill import checkpointer, run
    from draftlab.distill import medusa_heads as training
    from draftlab.distill.optimizers import training_dtype
    from draftlab.distill.trainer import Settings
    from draftlab.engine.drafters.medusa import write
    from draftlab.files import claim_state, state_directory
    from draftlab.model import checkpoint, llama

    shape = llama.check_supported(place)  # the engine drafts with what the heads read
    out = out or space.runs / f"medusa-{hub.checkpoint_name(place)}"
    checkpoint.check_free(out, force=force)
    if dry_run:
        weights = heads * shape.hidden**2
        return plan(out, {"heads": f"{heads} of {weights // heads:,} parameters each", "steps": steps})
    checkpoint.check(place)
    identity = arguments | {"command": "medusa", "inputs": [provenance.fingerprint(place)]}
    state = state_directory(out)
    claim_state(state, identity)
    tokenizer = checkpoint.load_tokenizer(place)
    computing = training_dtype(dtype)
    model = checkpoint.load_model(place, checkpoint.DTYPES[computing], cast(Any, checkpointer.process_state().device))
    student = training.Heads(training.Trunk(model), heads)
    setup = training.setup(
        student,
        open_batches(source, tokenizer, rows=rows, seq_len=seq_len, steps=steps, seed=seed),
        open_heldout(source, tokenizer, rows=rows, seq_len=seq_len, most_rows=64),
    )
    settings = Settings.of(arguments, loss=training.LOSS, weight_decay=0.0, dtype=computing)
    fitted = run.fit(cast(Any, student), setup, settings, state=state, what="medusa")
    best = checkpointer.best_weights(state, "student")
    found = training.by_head(student, best, setup)
    with checkpoint.new_directory(out, force=force) as work:
        stored = checkpoint.stored_dtype(place)
        write(work, {name: weight.to(stored) for name, weight in best.items()}, place)
        shutil.copyfile(state / "log.jsonl", work / "log.jsonl")
        provenance.write_record(work, "medusa", arguments, [place], began, heads=found, **fitted.as_dict())
    shutil.rmtree(state)
    lines = [
        f"head {k}: held-out acceptance {one['acceptance']:.3f}, same token {one['agreement']:.3f}"
        for k, one in enumerate(found, 1)
    ]
    took = f"{fitted.tokens:,} predictions in {fitted.seconds:.0f} s"
    return Outcome(path=out, show=[str(out), took, *lines], data={"path": str(out), "heads": found} | fitted.as_dict())
