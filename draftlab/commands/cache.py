"""Commands for a target's distributions on disk."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from draftlab import workspace
from draftlab.commands.shared import Data, DryRun, Out, Outcome, Seed, TargetName, plan, recorded

if TYPE_CHECKING:
    from draftlab.distill.cache import Manifest

CacheDir = Annotated[Path, Argument(help="Directory of the cache.")]


def build(
    target: TargetName = None,
    data: Data = None,
    text: Annotated[
        Literal["data", "target"], Option(help="Keep distributions on the data, or on what the target writes.")
    ] = "data",
    sequences: Annotated[int, Option(min=1, help="Sequences to keep.")] = 4096,
    seq_len: Annotated[int, Option(min=8, help="Tokens per sequence.")] = 256,
    prompt_tokens: Annotated[int, Option(min=1, help="With --text target: tokens of each prompt.")] = 32,
    sample_temperature: Annotated[float, Option(min=0, help="With --text target: how the target samples.")] = 1.0,
    k: Annotated[int, Option(min=1, help="Most probable tokens kept of each distribution.")] = 64,
    seed: Seed = 0,
    out: Out = None,
    dry_run: DryRun = False,
) -> Outcome:
    """Keep a target's distributions, for distilling without it; a killed build goes on where it stopped."""
    arguments, began = recorded(locals())
    from draftlab import checkpoint, provenance
    from draftlab.distill import cache

    space = workspace.load()
    directory = checkpoint.locate(target or space.target)
    out = out or space.runs / f"cache-{directory.name}"
    shape = checkpoint.read_shape(directory)
    size = sequences * seq_len * (6 * k + 6 + 4 * len(cache.TEMPERATURES) + 8)
    if dry_run:
        facts = {"tokens": f"{sequences * seq_len:,}", "disk": f"about {size / 1e6:,.4g} MB"}
        cost = {"compute": f"{sequences * seq_len * shape.flops_per_token(seq_len // 2) / 1e12:,.3g} TFLOP"}
        return plan(out, facts | cost)
    how = cache.Building(
        target=directory, data=data or space.data, text=text, sequences=sequences, seq_len=seq_len,
        prompt_tokens=prompt_tokens, temperature=sample_temperature, k=min(k, shape.vocab), seed=seed,
        device=checkpoint.resolve_device(space.device),
    )  # fmt: skip
    manifest = cache.build(how, out)
    provenance.write_record(out, "cache build", arguments, [directory], began)
    return _shown(out, manifest)


def info(directory: CacheDir) -> Outcome:
    """What a cache holds."""
    from draftlab.distill.cache import read_manifest

    return _shown(directory, read_manifest(directory))


def verify(
    directory: CacheDir,
    target: TargetName = None,
    seed: Seed = 0,
) -> Outcome:
    """Check a cache: every checksum and list, and some sequences scored again by the target."""
    from draftlab import checkpoint
    from draftlab.distill import cache

    space = workspace.load()
    place = checkpoint.locate(target or space.target)
    found = cache.verify(directory, place, seed, checkpoint.resolve_device(space.device))
    text = (
        f"{found.shards} shards with their checksums and lists; {found.sequences} sequences scored again: "
        f"log-probabilities within {found.worst:.4f}, {found.same_top:.2%} of the most probable tokens the same"
    )
    missed = [] if found.good else [f"{directory} is not what {place} says now"]
    return Outcome(path=directory, show=[text], data=found.as_dict(), missed=missed)


def _shown(directory: Path, manifest: "Manifest") -> Outcome:
    size = sum(f.stat().st_size for f in directory.rglob("*.safetensors"))
    per_token = size / max(1, manifest.tokens)
    text = [
        str(directory),
        f"{manifest.sequences:,} of {manifest.planned:,} sequences, {manifest.tokens:,} tokens, {size / 1e6:,.1f} MB "
        f"({per_token:.0f} bytes per token, 1/{2 * manifest.vocab / per_token:,.0f} of fp16 logits)",
        f"{manifest.target}, {manifest.k} of {manifest.vocab:,} tokens listed; text: {manifest.data} ({manifest.text})",
    ]
    return Outcome(path=directory, show=text, data={**manifest.model_dump(mode="json"), "bytes": size})
