"""Commands for a target's distributions on disk."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from draftlab import workspace
from draftlab.commands.shared import (
    ApiKeyFile,
    Data,
    DeviceMap,
    DryRun,
    Memory,
    Out,
    Outcome,
    Seed,
    ServedModel,
    ServerUrl,
    TargetName,
    TokenizerDir,
    WeightsDtype,
    connect,
    plan,
    recorded,
)
from draftlab.console import note_if_slow
from draftlab.errors import UserError
from draftlab.model import hub

if TYPE_CHECKING:
    from draftlab.target_outputs.cache import Manifest
    from draftlab.target_outputs.logprob_sources import Origin

CacheDir = Annotated[Path, Argument(help="Directory of the cache.")]


def build(
    target: TargetName = None,
    server: ServerUrl = None,
    model: ServedModel = None,
    tokenizer: TokenizerDir = None,
    api_key_file: ApiKeyFile = None,
    traffic: Annotated[
        Path | None, Option(help="A server's log in JSON lines (docs/formats.md) to keep whole, instead.")
    ] = None,
    data: Data = None,
    text: Annotated[
        Literal["data", "target"], Option(help="Keep distributions on the data, or on what the target writes.")
    ] = "data",
    sequences: Annotated[int, Option(min=1, help="Sequences to keep.")] = 4096,
    seq_len: Annotated[int, Option(min=8, help="Tokens per sequence.")] = 256,
    prompt_tokens: Annotated[int, Option(min=1, help="With --text target: tokens of each prompt.")] = 32,
    sample_temperature: Annotated[float, Option(min=0, help="With --text target: how the target samples.")] = 1.0,
    k: Annotated[int, Option(min=1, help="Most probable tokens kept of each distribution.")] = 64,
    dtype: WeightsDtype = None,
    device_map: DeviceMap = None,
    memory: Memory = 2.0,
    seed: Seed = 0,
    out: Out = None,
    dry_run: DryRun = False,
) -> Outcome:
    """Keep a target's distributions, for distilling without it; a killed build goes on where it stopped."""
    arguments, began = recorded(locals())
    space = workspace.load()
    directory = _directory(target, tokenizer, weights=server is None and traffic is None and not dry_run)
    if traffic is None:
        hub.check_data(data or space.data)

    with note_if_slow("cache build: loading torch and transformers"):
        from draftlab import provenance
        from draftlab.model import checkpoint
        from draftlab.model.size import read_size
        from draftlab.model.tokenizer import known_ids
        from draftlab.target_outputs import cache, logprob_sources

    if server is not None and traffic is not None:
        raise UserError(f"--server {server} and --traffic {traffic} are two sources; leave out one")
    if traffic is None and text == "target" and prompt_tokens > seq_len:
        raise UserError(f"--prompt-tokens {prompt_tokens} leaves nothing to write in sequences of {seq_len}")
    out = out or space.runs / f"cache-{traffic.stem if traffic else hub.checkpoint_name(directory)}"
    k = min(k, known_ids(directory) if (directory / "config.json").is_file() else logprob_sources.vocab_of(directory))
    if traffic is not None:
        log = cache.Traffic.open(traffic, vocab=logprob_sources.vocab_of(directory), seq_len=seq_len, k=k)
        if dry_run:
            return plan(out, _disk(len(log.starts), seq_len, log.k, temperatures=1))
        manifest = cache.build_from_traffic(log, directory, out)
        provenance.write_record(out, "cache build", arguments, [traffic], began)
        return _shown(out, manifest)
    if dry_run and server is not None:
        return plan(out, _disk(sequences, seq_len, k, temperatures=1))
    if dry_run:
        flops = sequences * seq_len * read_size(directory).flops_per_token(seq_len // 2)
        facts = _disk(sequences, seq_len, k, temperatures=len(logprob_sources.TEMPERATURES))
        return plan(out, facts | {"compute": f"{flops / 1e12:,.3g} TFLOP"})
    how = cache.Building(
        data=data or space.data, text=text, sequences=sequences, seq_len=seq_len, prompt_tokens=prompt_tokens,
        temperature=sample_temperature, k=k, seed=seed,
    )  # fmt: skip
    if server is None:
        checkpoint.check(directory)
    whose, notes, inputs = _origin(
        directory, server, model, api_key_file, sample_temperature if text == "target" else None,
        dtype=dtype, device_map=device_map, memory=memory,
    )  # fmt: skip
    manifest = cache.build(how, whose, out)
    provenance.write_record(out, "cache build", arguments, inputs, began, **notes)
    return _shown(out, manifest)


def info(directory: CacheDir) -> Outcome:
    """What a cache holds."""
    from draftlab.target_outputs.cache import read_manifest

    return _shown(directory, read_manifest(directory))


def verify(
    directory: CacheDir,
    target: TargetName = None,
    server: ServerUrl = None,
    model: ServedModel = None,
    tokenizer: TokenizerDir = None,
    api_key_file: ApiKeyFile = None,
    seed: Seed = 0,
) -> Outcome:
    """Check a cache: every checksum and list, and some sequences scored again by the target."""
    place = _directory(target, tokenizer, weights=server is None)

    from draftlab.target_outputs import cache

    whose, _, _ = _origin(place, server, model, api_key_file, None)
    found = cache.verify(directory, whose, seed)
    text = (
        f"{found.shards} shards with their checksums and lists; {found.sequences} sequences scored again: "
        f"log-probabilities {found.mean:.4f} apart on average and {found.worst:.4f} at most, "
        f"{found.same_top:.2%} of the most probable tokens the same"
    )
    missed = [] if found.good else [f"{directory} is not what {server or place} says now"]
    return Outcome(path=directory, show=[text], data=found.as_dict(), missed=missed)


def _directory(target: str | None, tokenizer: Path | None, *, weights: bool) -> Path:
    """With the tokenizer, and with the target itself where no server runs it."""
    return tokenizer or hub.locate(target or workspace.load().target, weights)


def _origin(
    directory: Path,
    server: str | None,
    model: str | None,
    api_key_file: Path | None,
    temperature: float | None,
    *,
    dtype: str | None = None,
    device_map: str | None = None,
    memory: float = 2.0,
) -> "tuple[Origin, dict[str, object], list[Path]]":
    """Whose distributions are kept, notes for the record, and inputs. temperature: None where no text is written."""
    from draftlab.model import checkpoint
    from draftlab.target_outputs import logprob_sources

    if server is None:
        device = checkpoint.resolve_device(workspace.load().device)
        wanted = None if dtype is None else checkpoint.DTYPES[dtype]
        return logprob_sources.Local(directory, device, wanted, device_map, memory), {}, [directory]
    running = connect(server, model, api_key_file)
    about = {"kind": running.kind, "version": running.version, "model": running.model}
    return logprob_sources.Served.of(running, directory, temperature), {"server": about}, []


def _disk(sequences: int, seq_len: int, k: int, temperatures: int) -> dict[str, str]:
    tokens = sequences * seq_len
    return {"tokens": f"{tokens:,}", "disk": f"about {tokens * (6 * k + 14 + 4 * temperatures) / 1e6:,.4g} MB"}


def _shown(directory: Path, manifest: "Manifest") -> Outcome:
    size = sum(f.stat().st_size for f in directory.rglob("*.safetensors"))
    per_token = size / max(1, manifest.tokens)
    text = [
        str(directory),
        f"{manifest.sequences:,} of {manifest.planned:,} sequences, {manifest.tokens:,} tokens, {size / 1e6:,.1f} MB "
        f"({per_token:.0f} bytes per token, 1/{2 * manifest.vocab / per_token:,.0f} of fp16 logits)",
        f"{manifest.target} ({manifest.source}), {manifest.k} of {manifest.vocab:,} tokens listed; "
        f"text: {manifest.data} ({manifest.text})",
    ]
    return Outcome(path=directory, show=text, data={**manifest.model_dump(mode="json"), "bytes": size})
