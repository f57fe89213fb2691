"""The commands on stored target outputs: outputs build, outputs info, and replay."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from draftlab.commands.base import Job, Outcome, command, fill
from draftlab.commands.replay_settings import ReplayConfig
from draftlab.config.outputs import OutputsBuildConfig, OutputsInfoConfig
from draftlab.config.shared import ServerSettings, newest_draft
from draftlab.console import note, note_if_slow
from draftlab.drafters.base import DRAFTERS, check_served
from draftlab.errors import UserError, about
from draftlab.model import hub
from draftlab.output import Output
from draftlab.quantities import format_bytes
from draftlab.runs import workspace
from draftlab.shell import typed

if TYPE_CHECKING:
    from draftlab.data.prompts import Prompts
    from draftlab.intervals import Interval
    from draftlab.sampling import SamplingParams
    from draftlab.scoring.replay import AcceptanceRow, Replay
    from draftlab.target_outputs.build import Rows, TargetAnswers
    from draftlab.target_outputs.store import Manifest
    from draftlab.target_outputs.targets import StoreVerification, Target

PROMPTS_OF_DATA = 64
START_TOKENS = 32  # default number of tokens of data that the target continues


def prepare_build(config: OutputsBuildConfig, weights: bool) -> "Job[Manifest]":
    """Resolve and check the settings of the command `outputs build`, and return the job.

    weights: Whether weight files must be present, and a server must answer.

    Raises:
        UserError: The target, the text or the log is missing, or they do not fit together. Or no draft could be
            distilled from these outputs.
    """
    with note_if_slow("outputs build: loading torch and transformers"):
        from draftlab.target_outputs import build as building
        from draftlab.target_outputs.build import ServerLog
        from draftlab.target_outputs.store import logits_of, resume_date_of
    served, file = config.server is not None, config.from_file
    directory = _located(config.target, tokenizer_only=served or file is not None, weights=weights)
    listed = config.top_logprobs
    if listed is None:
        listed = 0 if config.use == "replay" else building.DISTILL_TOP_LOGPROBS
    if file is not None:
        vocab = logits_of(directory)
        with about("--from"):
            log = ServerLog.open(file, vocab=vocab, seq_len=config.seq_len, top_logprobs=min(listed, vocab))
        plan = {"requests": len(log.starts), "listed tokens": log.top_logprobs}
        return Job(partial(building.store_log, log, directory), f"outputs-{file.stem}", lambda: plan)
    from draftlab.model.tokenizer import known_ids

    k = min(listed, logits_of(directory) if served else known_ids(directory))
    name = f"outputs-{config.use}-{hub.checkpoint_name(directory)}"
    resume_date_of(config.out or workspace.load().runs / name)
    text = _text(config, directory)
    if isinstance(text, building.TargetAnswers):
        text.check(k)
    elif not k:
        raise UserError("--top-logprobs 0: drafts can be distilled only from stored probabilities; use 1 or more")
    target = _target(config, directory, text.sampling, k) if weights or not served else None
    if target is not None and isinstance(text, building.TargetAnswers):
        with about("--max-new-tokens"):
            target.check_length(text.prompts.longest, text.sampling.max_tokens)
    return Job(
        partial(building.build, cast("Target", target), text, k),
        name,
        partial(_build_facts, text, k, directory, served=served),
    )


def _build_facts(text: "Rows | TargetAnswers", k: int, directory: Path, *, served: bool) -> dict[str, object]:
    """Return the facts that a dry run shows.

    k: Number of log-probabilities to store for each token. directory: Directory of the target.
    """
    from draftlab.model.size import read_size
    from draftlab.target_outputs.build import TargetAnswers, bytes_per_token

    facts: dict[str, object] = {}
    most = ""
    if isinstance(text, TargetAnswers):
        facts["prompts"], most = text.prompts.requests, "at most "
    facts["tokens"] = f"{most}{text.tokens:,}"
    if text.sampling is not None:
        facts["sampling"] = text.sampling.describe()
    facts["disk"] = f"{most}{format_bytes(text.tokens * bytes_per_token(text, k, served))}"
    if not isinstance(text, TargetAnswers) and not served:
        facts["flops"] = text.tokens * read_size(directory).flops_per_token(text.seq_len // 2)
    return facts


@command(
    OutputsBuildConfig,
    name="outputs build",
    prepare=prepare_build,
    dry_run=True,
    resumes=True,
    example="outputs build --prompt-file users.jsonl --num-prompts 2000",
)
def build(manifest: "Manifest", output: Output) -> Outcome:
    """Store a target's text and probabilities, to distil drafts or to replay drafts; a killed build resumes."""
    then = ["distill", "--outputs"] if manifest.top_logprobs else ["replay"]
    following = typed("draftlab", *then, output.out)
    return replace(_shown(output.out, manifest, {}), next=following)


def _located(name: str, *, tokenizer_only: bool, weights: bool) -> Path:
    """Return the directory of a target. tokenizer_only: Whether a directory that has only a tokenizer is accepted."""
    from draftlab.model import checkpoint

    with about("--target"):
        if tokenizer_only:
            return hub.locate_tokenizer(name)
        directory = hub.locate_model(name, weights)
        if weights:
            checkpoint.check(directory)
        return directory


def _text(config: OutputsBuildConfig, directory: Path) -> "Rows | TargetAnswers":
    """Return the text to store: rows of data that the target reads or continues, or prompts that the target answers.

    Raises:
        UserError: The data or prompts are missing, or a setting does not fit them.
    """
    from draftlab.data import is_chat_file, loss_on_of
    from draftlab.model import checkpoint
    from draftlab.model.hf_files import check_length
    from draftlab.sampling import SamplingParams
    from draftlab.target_outputs.build import Rows, TargetAnswers

    temperature = config.temperature
    if temperature is None:
        temperature = 1.0 if config.use == "distill" else 0.0
    stop = checkpoint.eos_token_ids(directory)
    sampling = fill(
        SamplingParams,
        config,
        temperature=temperature,
        max_tokens=config.max_new_tokens,
        stop_token_ids=stop,
    )
    chats = not config.answers and config.text == "target" and is_chat_file(config.data)
    if chats and (config.is_set("seq_len") or config.is_set("num_sequences")):
        raise UserError(
            "--seq-len, --num-sequences: leave them out, because the target answers the conversations of the data; "
            "use --num-prompts"
        )
    if config.answers or chats:
        with about("--data" if config.prompt_file is None else "--prompt-file"):
            prompts = _prompts(config, directory, chats)
        return fill(TargetAnswers, config, prompts=prompts, sampling=sampling)
    asked = {
        "--num-prompts": config.num_prompts is not None,
        "--chat": config.chat != "auto",
        "--max-new-tokens": config.is_set("max_new_tokens"),
    }
    if idle := [option for option, is_given in asked.items() if is_given]:
        raise UserError(
            f"{', '.join(idle)}: works only with prompts, but --data {config.data} has no conversations; "
            "add --prompt-file FILE"
        )
    with about("--seq-len"):
        check_length(directory, config.seq_len)
    rows = fill(Rows, config, count=config.num_sequences, prompt_tokens=None)
    if config.text == "data":
        return rows
    starts = config.prompt_tokens or START_TOKENS
    if starts > rows.seq_len:
        raise UserError(
            f"--prompt-tokens {starts} leaves no room for generated text in --seq-len {rows.seq_len}; lower "
            "--prompt-tokens"
        )
    if loss_on_of(rows.data, None) is not None:
        raise UserError(
            "--text target: the data has conversations, which the target can answer only if --data is a single file; "
            "name this file"
        )
    sampling = replace(sampling, max_tokens=rows.seq_len + 1 - starts)
    return replace(rows, prompt_tokens=starts, sampling=sampling)


def _prompts(config: OutputsBuildConfig, directory: Path, chats: bool) -> "Prompts":
    """Return the prompts that the target answers.

    chats: Whether the prompts are the conversations of --data that are not held out.
    """
    from draftlab.data.prompts import file_prompts, load_prompts
    from draftlab.model import checkpoint

    tokenizer = checkpoint.load_tokenizer(directory)
    asked = {
        "tokenizer": tokenizer,
        "count": config.num_prompts,
        "tokens": config.prompt_tokens,
        "chat": config.chat,
    }
    if chats:
        return file_prompts(Path(config.data), **asked, split="train")
    return load_prompts(config.prompt_file, config.data, **asked, seed=config.seed, from_data=PROMPTS_OF_DATA)


def _target(config: OutputsBuildConfig, directory: Path, sampling: "SamplingParams | None", k: int) -> "Target":
    """Return the target: a checkpoint, which is not loaded yet, or a server.

    Args:
        sampling: Parameters with which the target writes text. None if the target only scores text.
        k: Number of log-probabilities that a server lists for each token.
    """
    from draftlab.target_outputs.build import batch_size

    if config.server is not None:
        return _served(config, config.server, directory, sampling, k)
    from draftlab.model import devices
    from draftlab.model.modes import engine_runs, resolve_mode
    from draftlab.model.precision import READING, choose
    from draftlab.target_outputs.targets import LocalTarget

    with about("--device"):
        device = devices.resolve_device(config.device)
    name = config.dtype or (workspace.load().dtype if config.use == "replay" else None)
    if name is None and config.writes and device.type == "cpu":
        name = "auto"  # text is written in native passes of few tokens, which may be faster in 16 bits
    if config.int8:
        resolve_mode("auto", device, None, [directory], int8=True)
    dtype = None
    if name is not None:
        hosted = config.device_map is not None or not engine_runs(directory)
        mode = "eager" if hosted else resolve_mode("auto", device, None, [])
        dtype = choose(name, device, mode, directory, passes=READING).dtype
    return LocalTarget(
        directory,
        device,
        dtype,
        config.device_map,
        batch_size=batch_size(config.use, device),
        int8=config.int8,
    )


def _served(config: ServerSettings, url: str, directory: Path, sampling: "SamplingParams | None", k: int) -> "Target":
    from draftlab.servers.client import Server
    from draftlab.target_outputs.targets import ServedTarget

    with about("--server"):
        server = Server.connect(url, config.api_key_file, model=config.served_model_name)
    return ServedTarget.connected(server, directory, sampling, k)


def prepare_info(config: OutputsInfoConfig, weights: bool) -> "Job[tuple[Path, StoreVerification | None]]":
    """Check the settings of the command `outputs info`, and return the job.

    With --verify, the job compares the outputs with the target.

    Raises:
        UserError: The directory has no stored outputs, or the target is missing.
    """
    from draftlab.target_outputs.store import read_manifest

    manifest = read_manifest(config.directory)
    if not config.verify:
        return Job(lambda: (config.directory, None))
    from draftlab.model import devices
    from draftlab.target_outputs.targets import INT8, LocalTarget, verify

    directory = _located(config.target, tokenizer_only=config.server is not None, weights=True)
    if config.server is not None:
        target = _served(config, config.server, directory, None, manifest.top_logprobs)
    else:  # the target runs in the data type in which it wrote the sequences
        device = devices.resolve_device(workspace.load().device)
        dtype, int8 = devices.DTYPES.get(manifest.dtype), manifest.dtype == INT8
        target = LocalTarget(directory, device, dtype, batch_size=1, int8=int8)
    return Job(lambda: (config.directory, verify(config.directory, target)))


@command(
    OutputsInfoConfig,
    name="outputs info",
    prepare=prepare_info,
    example="outputs info runs/outputs-tiny --verify",
)
def info(verified: "tuple[Path, StoreVerification | None]") -> Outcome:
    """Show what stored outputs contain, and how many texts repeat themselves; --verify compares with the target."""
    from draftlab.target_outputs.store import describe, read_manifest

    directory, result = verified
    shown = _shown(directory, read_manifest(directory), describe(directory))
    if result is None:
        return shown
    text = (
        f"{result.shards} shards match their checksums. The target computed {result.sequences} sequences again: "
        f"log-probabilities differ by {result.mean:.4f} on average and {result.worst:.4f} at most, and the most "
        f"probable token is the same at {result.same_top:.2%} of the positions"
    )
    missed = (
        []
        if result.good
        else [f"{directory} differs from what the target computes now; check the target, or build the outputs again"]
    )
    return replace(
        shown,
        show=[*shown.show, text],
        data=shown.data | {"verified": result.as_dict()},
        missed=missed,
    )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Replayed(Outcome):
    """The outcome of replay. rows: Acceptance for each group of texts and each K, by the name of the draft."""

    rows: "dict[str, list[AcceptanceRow]]"


def prepare_replay(config: ReplayConfig, weights: bool) -> "Job[dict[str, tuple[Replay, list[AcceptanceRow]]]]":
    """Resolve and check the settings of the command `replay`, and return the job.

    Raises:
        UserError: The directory has no stored outputs, two drafts have the same name, or a draft or verify rule does
            not fit the outputs.
    """
    from draftlab.model import devices
    from draftlab.scoring.replay import Drafting, check, drafter_of, replay, rows_of
    from draftlab.target_outputs.store import read_store

    store = read_store(config.directory)
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
    elif weights and (unread := [o for o in ("target", "device_map") if config.is_set(o)]):
        raise UserError(
            f"{', '.join(map(config.flag, unread))}: leave it out, because none of these drafters reads the target's "
            "hidden states"
        )
    with about("--device"):
        device = devices.resolve_device(config.device)
    dtype = devices.resolve_dtype(config.dtype, device)
    ks = config.k
    drafting = fill(
        Drafting,
        config,
        k=max(ks),
        rule=config.decoding,
        dtype=dtype,
        device=device,
        target=target,
        draft=default,
    )
    for spec in drafters:
        check(store, spec, drafting)
    name = config.directory.name.removeprefix("outputs-").removeprefix("replay-")

    def run(output: Output) -> "dict[str, tuple[Replay, list[AcceptanceRow]]]":
        replays = replay(store, drafters, drafting, output)
        return {name: (each, rows_of(each, ks)) for name, each in replays.items()}

    return Job(run, f"replay-{name}")


@command(
    ReplayConfig,
    prepare=prepare_replay,
    example="replay runs/outputs-replay-tiny --draft runs/distill-3x128 --k 1-8",
)
def replay(replays: "dict[str, tuple[Replay, list[AcceptanceRow]]]", output: Output) -> Replayed:
    """Compute the acceptance of drafts at every K from stored target outputs; only heads also need the target."""
    from draftlab.target_outputs.store import read_manifest

    rows, show, data = dict[str, list["AcceptanceRow"]](), list[object](), []
    priced = [
        name
        for name, (each, _) in replays.items()
        if DRAFTERS.get(each.kind, "").is_priced() and each.padded().modelled is None
    ]
    config = output.config
    assert isinstance(config, ReplayConfig)
    target = read_manifest(config.directory).target
    drafts = [Path(name.partition("@")[0]) for name in config.draft]
    for name, (each, table) in replays.items():
        rows[name] = table
        show += _table(each, table)
        data.append({"draft": name, "rows": [row.as_dict() for row in table]})
    return Replayed(
        path=output.out,
        show=[*show, str(output.out)],
        data={"out": str(output.out), "replays": data},
        rows=rows,
        next=typed("draftlab", "profile", Path(target), *drafts) if priced and drafts else None,
    )


def _shown(directory: Path, manifest: "Manifest", facts: Mapping[str, object]) -> Outcome:
    size = sum(f.stat().st_size for f in directory.rglob("*.safetensors"))
    per_token = size / max(1, manifest.tokens)
    lists = written = ""
    if manifest.top_logprobs:
        lists = f"the {manifest.top_logprobs} most probable of {manifest.vocab:,} tokens"
        lists += f" stored, 1/{2 * manifest.vocab / per_token:,.0f} of the bytes of fp16 logits; "
    if (sampling := manifest.sampling) is not None:
        written = f"{sampling.describe()}, at most {sampling.max_tokens} tokens each; "
    text = [
        str(directory),
        f"{manifest.sequences:,} of {manifest.planned:,} sequences, {manifest.tokens:,} tokens, {size / 1e6:,.1f} MB "
        f"({per_token:.0f} bytes per token)",
        f"{manifest.target} ({manifest.source}); {lists}text: {written}{manifest.data} ({manifest.text}"
        f"{', chat' if manifest.chat else ''})",
        *(f"{name.replace('_', ' ')}: {value}" for name, value in facts.items() if value),
    ]
    data = {"path": str(directory), **manifest.model_dump(mode="json"), "bytes": size, **facts}
    return Outcome(path=directory, show=text, data=data)


SHOWN_POSITIONS = 5  # a narrow terminal leaves out the columns of later positions


def _table(replayed: "Replay", rows: "list[AcceptanceRow]") -> list[object]:
    from draftlab.intervals import FEWEST
    from draftlab.results.tables import TerminalTable

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


def _spread(interval: "Interval") -> str:
    spread = f" ±{(interval.high - interval.low) / 2:.3f}" if interval.decides else ""
    return f"{interval.value:.3f}{spread}"
