"""The command replay, which computes the acceptance of drafts from stored target outputs."""

from collections.abc import Mapping
from pathlib import Path

from draftlab.commands.base import Outcome
from draftlab.commands.models import refuse_own_head
from draftlab.commands.settings.replay import ReplayConfig
from draftlab.config.shared import newest_draft
from draftlab.console import note
from draftlab.drafters.base import DRAFTERS, check_served
from draftlab.errors import UserError, about
from draftlab.intervals import FEWEST, Interval
from draftlab.model import devices, hub
from draftlab.results.tables import TerminalTable
from draftlab.runs import provenance, workspace
from draftlab.scoring.replay import (
    AcceptanceRow,
    Drafting,
    Replay,
    ReplayedDraft,
    Replaying,
    check,
    drafter_of,
)
from draftlab.shell import typed
from draftlab.target_outputs.store import read_store

SHOWN_POSITIONS = 5  # a narrow terminal leaves out the columns of later positions


def prepare(config: ReplayConfig, weights: bool) -> Replaying:
    """Resolve and check the settings of the command `replay`, and return the job.

    Raises:
        UserError: The directory has no stored outputs, two drafts have the same name, or a draft or verify rule does
            not fit the outputs.
    """
    store = read_store(config.directory)
    for name in config.draft:
        refuse_own_head(name, "--draft")
    with about("--draft"):
        drafters = [drafter_of(hub.locate(name, weights)) for name in config.draft]
    for spec in config.drafter:
        check_served(spec, config.server_rule)
        spec.check_inputs(weights)
    models = [path for spec in drafters for path in spec.paths(None, models_only=True)]
    default = next(iter(models), None)
    if default is None and any("" in spec.drafts for spec in config.drafter):
        default = hub.locate(str(newest_draft()), weights)
        note(f"draft model for drafters without draft=: {default}")
    drafters += config.drafter
    names = [spec.name for spec in drafters]
    if len(set(names)) < len(names):
        raise UserError(
            "two drafts have the same name; rename a directory or file: "
            + ", ".join([*config.draft, *map(str, config.drafter)])
        )
    target = None
    if config.reads_target:
        # the target that wrote the outputs, unless another directory with the same weights is named
        known = config.target or store.target or workspace.load().target
        if not known:
            raise UserError(
                f"--target: the target that wrote {config.directory} is not where it was; type --target NAME"
            )
        with about("--target"):
            target = hub.locate(known, weights)
    elif weights:
        config.note_if_given("target", "device_map", reason="none of these drafters reads the target's hidden states")
    with about("--device"):
        device = devices.resolve_device(config.device)
    dtype = devices.resolve_dtype(config.dtype, device)
    drafting = Drafting(
        k=max(config.k),
        rule=config.decoding,
        dtype=dtype,
        device=device,
        target=target,
        draft=default,
        device_map=config.device_map,
    )
    for spec in drafters:
        check(store, spec, drafting)
    name = config.directory.name.removeprefix("outputs-").removeprefix("replay-")
    return Replaying(name=f"replay-{name}", store=store, drafters=drafters, drafting=drafting, ks=config.k)


def show(replays: Mapping[str, ReplayedDraft], config: ReplayConfig, out: Path) -> Outcome:
    show: list[object] = []
    data: list[dict[str, object]] = []
    priced = [
        name
        for name, each in replays.items()
        if DRAFTERS.get(each.replay.kind, "").is_priced() and each.replay.padded().modelled is None
    ]
    for name, each in replays.items():
        show += _table(each.replay, each.rows)
        data.append({"draft": name, "rows": [row.as_dict() for row in each.rows]})
    return Outcome(
        path=out,
        show=[*show, str(out)],
        data={"out": str(out), "replays": data},
        next=_profiling(config) if priced else None,
    )


def _profiling(config: ReplayConfig) -> str | None:
    """Return the command that profiles the target and the drafts, or None if they are not there or cannot be named."""
    target = _target_named(config)
    if target is None or not config.draft:
        return None
    models = [target, *map(Path, config.draft)]
    if len({path.name for path in models}) < len(models):
        return None  # profile names models by their directories
    return typed("draftlab", "profile", *models)


def _target_named(config: ReplayConfig) -> Path | None:
    """Return the target as it was named here or when the outputs were stored, or None if it is not there any more."""
    record = provenance.read_record(config.directory)
    named = config.target or (record.config.get("target") if record else None)
    if not isinstance(named, str):
        return None
    return Path(named) if hub.kind_of_name(named) else None


def _table(replayed: Replay, rows: list[AcceptanceRow]) -> list[object]:
    deepest = max(row.k for row in rows)
    positions = [f"at\n{i}" for i in range(1, deepest + 1)]
    heads = ["texts\nof", "n", "K", "acceptance\nlength", "acceptance\nrate", *positions]
    cells: list[list[str]] = []
    for row in rows:
        by_position = [f"{share.value:.2f}" for share in row.conditional]
        by_position += [""] * (deepest - len(by_position))
        spreads = [_spread(row.length), _spread(row.rate)]
        cells.append([row.group, str(row.texts), str(row.k), *spreads, *by_position])
    title = f"{replayed.draft} on {replayed.target}, {replayed.sampling.describe()}"
    notes = [
        "acceptance length: tokens per target pass, including the target's own token. acceptance rate: accepted tokens "
        "over drafted tokens. at i: the rate at position i if all earlier tokens are accepted. ±: half of the 95 % "
        f"interval over conversations, if there are {FEWEST} or more"
    ]
    if loops := int(replayed.degenerate.sum()):
        notes.append(
            f"{loops} of {len(replayed.texts)} texts mostly repeat themselves, so drafts are accepted more often than "
            "usual"
        )
    wide = frozenset(positions[SHOWN_POSITIONS:])
    return [TerminalTable(heads=heads, rows=cells, title=title, wide=wide), *notes]


def _spread(interval: Interval) -> str:
    spread = f" ±{(interval.high - interval.low) / 2:.3f}" if interval.decides else ""
    return f"{interval.value:.3f}{spread}"
