"""Commands on target outputs on disk, and replay of drafts over them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftlab.commands.base import Outcome, command, plan
from draftlab.config.outputs import (
    OutputsBuildConfig,
    OutputsImportConfig,
    OutputsInfoConfig,
    OutputsVerifyConfig,
    ReplayConfig,
)
from draftlab.console import note_if_slow
from draftlab.output import Output

if TYPE_CHECKING:
    from draftlab.intervals import Interval
    from draftlab.target_outputs.replay import Replay, Row
    from draftlab.target_outputs.store import Manifest


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Replayed(Outcome):
    """Acceptance by draft, for each group of texts and K."""

    rows: "dict[str, list[Row]]"


@command(OutputsBuildConfig, name="outputs build", dry_run=True, resumes=True)
def build(config: OutputsBuildConfig, output: Output) -> Outcome:
    """Store what a target writes or reads, to distil and to replay drafts without it; a killed build resumes."""
    if not output.dry_run and config.server is not None:
        from draftlab.servers.client import Server

        Server.check(config.server, model=config.served_model, api_key_file=config.api_key_file)
    with note_if_slow("outputs build: loading torch and transformers"):
        from draftlab.target_outputs import build as building
    if output.dry_run:
        return plan(output, building.estimate(config))
    return _shown(output.out, building.build(config, output))


@command(OutputsImportConfig, name="outputs import", resumes=True)
def import_file(config: OutputsImportConfig, output: Output) -> Outcome:
    """Store target outputs from a server's log."""
    from draftlab.target_outputs.build import import_file

    return _shown(output.out, import_file(config, output))


@command(OutputsInfoConfig, name="outputs info")
def info(config: OutputsInfoConfig) -> Outcome:
    """Show what is stored, and whether the target's texts are loops."""
    from draftlab.target_outputs.store import describe, read_manifest

    return _shown(config.directory, read_manifest(config.directory), describe(config.directory))


@command(OutputsVerifyConfig, name="outputs verify")
def verify(config: OutputsVerifyConfig) -> Outcome:
    """Check stored outputs: every checksum and list, and some sequences scored again by the target."""
    from draftlab.target_outputs.verify import verify

    result = verify(config)
    shards = "1 shard" if result.shards == 1 else f"{result.shards} shards"
    text = (
        f"{shards} with checksums and lists; {result.sequences} sequences scored again: "
        f"log-probabilities differ by {result.mean:.4f} on average and by {result.worst:.4f} at most, "
        f"{result.same_top:.2%} of the most probable tokens are the same"
    )
    missed = [] if result.good else [f"{config.directory} differs from what {config.server or config.target} gives now"]
    return Outcome(path=config.directory, show=[text], data=result.as_dict(), missed=missed)


@command(ReplayConfig)
def replay(config: ReplayConfig, output: Output) -> Replayed:
    """Compute the acceptance of drafts for every K from one pass over target outputs; the target is not needed."""
    from draftlab.target_outputs.replay import draftings, replay, rows_of

    replays = replay(config, output)
    rows = {name: rows_of(each, draftings(config), config.first) for name, each in replays.items()}
    show: list[object] = [part for name, each in replays.items() for part in _table(each, rows[name])]
    data = [{"draft": name, "rows": [row.as_dict() for row in table]} for name, table in rows.items()]
    return Replayed(
        path=output.out, show=[*show, str(output.out)], data={"out": str(output.out), "replays": data}, rows=rows
    )


def _shown(directory: Path, manifest: "Manifest", facts: dict[str, object] | None = None) -> Outcome:
    size = sum(f.stat().st_size for f in directory.rglob("*.safetensors"))
    per_token = size / max(1, manifest.tokens)
    lists = ""
    if manifest.top_logprobs:
        lists = f"{manifest.top_logprobs} of {manifest.vocab:,} tokens listed"
        lists += f", 1/{2 * manifest.vocab / per_token:,.0f} of fp16 logits; "
    written = "" if manifest.sampling is None else f"{manifest.sampling.describe()}, "
    written += f"at most {manifest.sampling.max_tokens} tokens each; " if manifest.sampling else ""
    text = [
        str(directory),
        f"{manifest.sequences:,} of {manifest.planned:,} sequences, {manifest.tokens:,} tokens, {size / 1e6:,.1f} MB "
        f"({per_token:.0f} bytes per token)",
        f"{manifest.target} ({manifest.source}); {lists}text: {written}{manifest.data} ({manifest.text}"
        f"{', chat' if manifest.chat else ''})",
        *(f"{name.replace('_', ' ')}: {value}" for name, value in (facts or {}).items() if value),
    ]
    data = {"path": str(directory), **manifest.model_dump(mode="json"), "bytes": size, **(facts or {})}
    return Outcome(path=directory, show=text, data=data)


def _table(replayed: "Replay", rows: "list[Row]") -> list[object]:
    from draftlab.results.tables import terminal_table

    deepest = max(row.drafting.k for row in rows)
    heads = [
        "texts\nof",
        "n",
        "K",
        "acceptance\nlength",
        "acceptance\nrate",
        *(f"at\n{i}" for i in range(1, deepest + 1)),
    ]
    table = terminal_table(
        heads,
        [
            [row.group, str(row.texts), row.drafting.describe(), _spread(row.length), _spread(row.rate),
             *(f"{c.value:.2f}" for c in row.conditional)]
            for row in rows
        ],
        title=f"{replayed.draft} on {replayed.target}, {replayed.sampling.describe()}",
    )  # fmt: skip
    notes = [
        "acceptance length: tokens per target pass, with the target's own; rate: accepted over drafted tokens; at i: "
        "share accepted of the tokens drafted there; 95 % intervals over texts"
    ]
    if loops := int(replayed.degenerate.sum()):
        notes.append(f"{loops} of {len(replayed.texts)} texts are mostly loops: acceptance on them is not typical")
    return [table, *notes]


def _spread(interval: "Interval") -> str:
    return f"{interval.value:.3f} ±{(interval.high - interval.low) / 2:.3f}"
