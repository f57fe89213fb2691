"""Commands on target outputs on disk, and replay of drafts over them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from draftlab import workspace
from draftlab.commands.base import Outcome, command
from draftlab.config.drafters import DrafterSpec
from draftlab.config.outputs import OutputsBuildConfig, OutputsInfoConfig, ReplayConfig
from draftlab.console import note_if_slow
from draftlab.errors import UserError, about
from draftlab.model import hub
from draftlab.output import Output

if TYPE_CHECKING:
    from draftlab.intervals import Interval
    from draftlab.prompts import Prompts
    from draftlab.sampling import SamplingParams
    from draftlab.target_outputs.build import Rows, TargetAnswers
    from draftlab.target_outputs.replay import AcceptanceRow, Drafting, Replay
    from draftlab.target_outputs.server_log import ServerLog
    from draftlab.target_outputs.store import Manifest, StoredOutputs
    from draftlab.target_outputs.targets import Target

PROMPTS_OF_DATA = 64
START_TOKENS, PROMPT_TOKENS = 32, 64  # of data: what a target continues to distil on, and answers to replay


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBuild:
    """What to store. target: None where it is not there yet, or a log has what it wrote. directory: its tokenizer."""

    name: str
    directory: Path
    target: "Target | None"
    text: "Rows | TargetAnswers | ServerLog"
    top_logprobs: int
    served: bool
    inputs: list[Path]

    def facts(self) -> Mapping[str, object]:
        """Return what a build would compute and write."""
        from draftlab.target_outputs.build import Rows, TargetAnswers, bytes_per_token

        text = self.text
        if not isinstance(text, Rows | TargetAnswers):
            return {"requests": len(text.starts), "listed tokens": text.top_logprobs}
        tokens, sampling = text.tokens, text.sampling
        facts: dict[str, object] = {"prompts": text.prompts.requests} if isinstance(text, TargetAnswers) else {}
        most = "at most " if isinstance(text, TargetAnswers) else ""
        facts["tokens"] = f"{most}{tokens:,}"
        if sampling is not None:
            facts["sampling"] = sampling.describe()
        facts["disk"] = f"{most}{tokens * bytes_per_token(text, self.top_logprobs, self.served) / 1e6:,.4g} MB"
        if isinstance(text, Rows) and not self.served:
            from draftlab.model.size import read_size

            flops = tokens * read_size(self.directory).flops_per_token(text.seq_len // 2)
            facts["compute"] = f"{flops / 1e12:,.3g} TFLOP"
        return facts


def prepare_build(config: OutputsBuildConfig, weights: bool) -> PreparedBuild:
    """Resolve and check the settings.

    weights: the files of weights must be here, and a server must answer.

    Raises:
        UserError: there is no such target, text or log, they do not fit each other, or nothing could be distilled from.
    """
    with note_if_slow("outputs build: loading torch and transformers"):
        from draftlab.target_outputs import build as building
        from draftlab.target_outputs.server_log import ServerLog
        from draftlab.target_outputs.store import logits_of
    served, listed = config.server is not None, config.top_logprobs
    directory = _located(config.target, tokenizer_only=served or config.from_file is not None, weights=weights)
    if config.from_file is not None:
        with about("--from"):
            most, vocab = building.DISTILL_TOP_LOGPROBS if listed is None else listed, logits_of(directory)
            log = ServerLog.open(config.from_file, vocab=vocab, seq_len=config.seq_len, top_logprobs=min(most, vocab))
        return PreparedBuild(
            name=f"outputs-{config.from_file.stem}", directory=directory, target=None, text=log,
            top_logprobs=log.top_logprobs, served=True, inputs=[config.from_file],
        )  # fmt: skip
    from draftlab.model.tokenizer import known_ids

    if listed is None:
        listed = building.DISTILL_TOP_LOGPROBS if config.use == "distill" else 0
    k = min(listed, logits_of(directory) if served else known_ids(directory))
    text = _text(config, directory, weights)
    if isinstance(text, building.TargetAnswers):
        text.check(k)
    elif not k:
        raise UserError("--top-logprobs 0 leaves nothing to distil from; take 1 or more")
    target = _target(config, directory, text.sampling, k) if weights or not served else None
    if target is not None and isinstance(text, building.TargetAnswers):
        with about("--max-new-tokens"):
            target.check_length(text.prompts.longest, text.sampling.max_tokens)
    return PreparedBuild(
        name=f"outputs-{config.use}-{hub.checkpoint_name(directory)}", directory=directory, target=target, text=text,
        top_logprobs=k, served=served, inputs=[] if config.prompt_file is None else [config.prompt_file],
    )  # fmt: skip


@command(OutputsBuildConfig, name="outputs build", prepare=prepare_build, dry_run=True, resumes=True)
def build(prepared: PreparedBuild, output: Output) -> Outcome:
    """Store what a target writes or reads, to distil and to replay drafts without it; a killed build resumes."""
    from draftlab.target_outputs import build as building

    text = prepared.text
    if isinstance(text, building.Rows | building.TargetAnswers):
        assert prepared.target is not None  # prepare() wanted it
        manifest = building.build(prepared.target, text, prepared.top_logprobs, output, prepared.inputs)
    else:
        manifest = building.store_log(text, prepared.directory, output)
    return _shown(output.out, manifest)


def _located(name: str, *, tokenizer_only: bool, weights: bool) -> Path:
    """Return the directory of a target; only with its tokenizer where a server runs it."""
    from draftlab.model import checkpoint

    with about("--target"):
        if tokenizer_only:
            return hub.locate_tokenizer(name)
        directory = hub.locate_model(name, weights)
        if weights:
            checkpoint.check(directory)
        return directory


def _text(config: OutputsBuildConfig, directory: Path, weights: bool) -> "Rows | TargetAnswers":
    """Return what the target reads, or the prompts that it answers."""
    from draftlab.data import is_chat_file
    from draftlab.model import checkpoint
    from draftlab.model.hf_files import check_length
    from draftlab.sampling import SamplingParams
    from draftlab.target_outputs.build import Rows, TargetAnswers

    if config.prompt_file is None:
        with about("--data"):
            hub.check_data(config.data) if weights else hub.check_local_data(config.data)
    temperature = config.temperature
    if temperature is None:
        temperature = 1.0 if config.use == "distill" else 0.0
    sampling = SamplingParams(
        temperature=temperature, max_tokens=config.max_new_tokens, seed=config.seed,
        stop_token_ids=checkpoint.eos_token_ids(directory),
    )  # fmt: skip
    chats = not config.answers and config.text == "target" and is_chat_file(config.data)
    if chats and (config.is_set("seq_len") or config.is_set("num_sequences")):
        raise UserError("--seq-len, --num-sequences: the data has conversations to answer; take --num-prompts")
    if config.answers or chats:
        with about("--data" if config.prompt_file is None else "--prompt-file"):
            prompts = _prompts(config, directory, chats)
        return TargetAnswers(prompts=prompts, use=config.use, sampling=sampling, seed=config.seed)
    asked = {"--num-prompts": config.num_prompts is not None, "--chat": config.chat != "auto"}
    asked["--max-new-tokens"] = config.is_set("max_new_tokens")
    if idle := [option for option, is_given in asked.items() if is_given]:
        raise UserError(f"{', '.join(idle)}: {config.data} is no file of conversations; add --prompt-file")
    with about("--seq-len"):
        check_length(directory, config.seq_len)
    rows = Rows(data=config.data, count=config.num_sequences, seq_len=config.seq_len, seed=config.seed)
    return rows if config.text == "data" else _continued(rows, sampling, config.prompt_tokens or START_TOKENS)


def _continued(rows: "Rows", sampling: "SamplingParams", starts: int) -> "Rows":
    """Return rows that the target continues after tokens of the data."""
    from draftlab.data import loss_on_of

    if starts > rows.seq_len:
        raise UserError(f"--prompt-tokens {starts} leaves nothing to write in {rows.seq_len} tokens")
    if loss_on_of(rows.data, None) is not None:
        raise UserError("--text target: the data has conversations; name one file of them, so that they are answered")
    return replace(rows, prompt_tokens=starts, sampling=replace(sampling, max_tokens=rows.seq_len + 1 - starts))


def _prompts(config: OutputsBuildConfig, directory: Path, chats: bool) -> "Prompts":
    """Return the prompts to answer. chats: those of the data, without its held-out lines."""
    from draftlab.model import checkpoint
    from draftlab.prompts import data_prompts, file_prompts

    tokenizer, file = checkpoint.load_tokenizer(directory), Path(config.data) if chats else config.prompt_file
    if file is not None:
        return file_prompts(
            file, tokenizer, count=config.num_prompts, tokens=config.prompt_tokens, chat=config.chat,
            split="train" if chats else None,
        )  # fmt: skip
    tokens = config.prompt_tokens or (START_TOKENS if config.use == "distill" else PROMPT_TOKENS)
    count = config.num_prompts or PROMPTS_OF_DATA
    return data_prompts(config.data, tokenizer, count=count, tokens=tokens, seed=config.seed)


def _target(config: OutputsBuildConfig, directory: Path, sampling: "SamplingParams | None", k: int) -> "Target":
    """Return the target, able to write with sampling (None: only to score) and to list k tokens; nothing is loaded."""
    from draftlab.target_outputs.build import DISTILL_BATCH, REPLAY_BATCH

    if config.server is not None:
        return _served(config.server, config.api_key_file, directory, sampling, k)
    from draftlab.model import checkpoint
    from draftlab.target_outputs.targets import LocalTarget

    with about("--device"):
        device = checkpoint.resolve_device(config.device)
    dtype = config.dtype or (workspace.load().dtype if config.use == "replay" else None)
    return LocalTarget(
        directory, device, None if dtype is None else checkpoint.resolve_dtype(dtype, device), config.device_map,
        batch_size=DISTILL_BATCH if config.use == "distill" else REPLAY_BATCH,
    )  # fmt: skip


def _served(
    url: str, api_key_file: Path | None, directory: Path, sampling: "SamplingParams | None", k: int
) -> "Target":
    from draftlab.servers.client import Server
    from draftlab.target_outputs.targets import ServedTarget

    with about("--server"):
        server = Server.connect(url, api_key_file=api_key_file)
    return ServedTarget.connected(server, directory, sampling, k)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedInfo:
    """The store to show. target: scores some of its sequences again; None where nothing is verified."""

    directory: Path
    manifest: "Manifest"
    target: "Target | None"


def prepare_info(config: OutputsInfoConfig, weights: bool) -> PreparedInfo:
    """Raises UserError: no store, or no target that could verify it."""
    from draftlab.target_outputs.store import read_manifest

    manifest, target = read_manifest(config.directory), None
    if config.verify:
        target = _verifier(config, manifest)
    return PreparedInfo(directory=config.directory, manifest=manifest, target=target)


def _verifier(config: OutputsInfoConfig, manifest: "Manifest") -> "Target":
    """Return the target that scores stored sequences again, in the data type in which it wrote them."""
    from draftlab.model import checkpoint
    from draftlab.target_outputs.targets import LocalTarget

    directory = _located(config.target, tokenizer_only=config.server is not None, weights=True)
    if config.server is not None:
        return _served(config.server, config.api_key_file, directory, None, manifest.top_logprobs)
    device = checkpoint.resolve_device(workspace.load().device)
    dtype = checkpoint.DTYPES.get(manifest.dtype)
    return LocalTarget(directory, device, dtype, batch_size=1)


@command(OutputsInfoConfig, name="outputs info", prepare=prepare_info)
def info(prepared: PreparedInfo) -> Outcome:
    """Show what is stored, and whether the target's texts are loops; --verify checks it against the target."""
    from draftlab.target_outputs.store import describe
    from draftlab.target_outputs.verify import verify

    shown = _shown(prepared.directory, prepared.manifest, describe(prepared.directory))
    if prepared.target is None:
        return shown
    result = verify(prepared.directory, prepared.target)
    shards = "1 shard" if result.shards == 1 else f"{result.shards} shards"
    text = (
        f"{shards} with checksums and lists; {result.sequences} sequences scored again: "
        f"log-probabilities differ by {result.mean:.4f} on average and by {result.worst:.4f} at most, "
        f"{result.same_top:.2%} of the most probable tokens are the same"
    )
    missed = [] if result.good else [f"{prepared.directory} differs from what the target gives now"]
    return replace(shown, show=[*shown.show, text], data=shown.data | {"verified": result.as_dict()}, missed=missed)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Replayed(Outcome):
    """Acceptance by draft, for each group of texts and K."""

    rows: "dict[str, list[AcceptanceRow]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedReplay:
    """Drafters to replay over a store. ks: numbers of drafted tokens to show."""

    name: str
    store: "StoredOutputs"
    drafters: list[DrafterSpec]
    drafting: "Drafting"
    ks: list[int]


def prepare_replay(config: ReplayConfig, weights: bool) -> PreparedReplay:
    """Resolve and check the settings.

    Raises:
        UserError: no store, drafts of one name, or a draft or rule that does not fit the stored outputs.
    """
    from draftlab.model import checkpoint
    from draftlab.target_outputs.replay import Drafting, check, drafter_of
    from draftlab.target_outputs.store import read_store

    store = read_store(config.directory)
    with about("--draft"):
        drafters = [drafter_of(hub.locate(name, weights)) for name in config.draft]
    for spec in config.drafter:
        spec.check_inputs(weights)
        if "" in spec.drafts:
            raise UserError(f"--drafter {spec.text}: add draft=DIR")
        drafters.append(spec)
    names = [spec.name for spec in drafters]
    if len(set(names)) < len(names):
        raise UserError(
            f"two drafts have the same name; rename one: {', '.join([*config.draft, *map(str, config.drafter)])}"
        )
    target = None
    if config.reads_target:
        with about("--target"):
            target = hub.locate(config.target, weights)
    with about("--device"):
        device = checkpoint.resolve_device(config.device)
    rule, temperature = config.acceptance
    dtype = checkpoint.resolve_dtype(config.dtype, device)
    drafting = Drafting(
        k=max(config.k), rule=rule, temperature=temperature, dtype=dtype, device=device, target=target
    )  # fmt: skip
    for spec in drafters:
        check(store, spec, drafting)
    name = config.directory.name.removeprefix("outputs-").removeprefix("replay-")
    return PreparedReplay(name=f"replay-{name}", store=store, drafters=drafters, drafting=drafting, ks=config.k)


@command(ReplayConfig, prepare=prepare_replay)
def replay(prepared: PreparedReplay, output: Output) -> Replayed:
    """Compute the acceptance of drafts for every K from one pass over target outputs; the target is not needed."""
    from draftlab.target_outputs.replay import replay, rows_of

    replays = replay(prepared.store, prepared.drafters, prepared.drafting, output)
    rows = {name: rows_of(each, prepared.ks) for name, each in replays.items()}
    show: list[object] = [part for name, each in replays.items() for part in _table(each, rows[name])]
    data = [{"draft": name, "rows": [row.as_dict() for row in table]} for name, table in rows.items()]
    return Replayed(
        path=output.out, show=[*show, str(output.out)], data={"out": str(output.out), "replays": data}, rows=rows
    )


def _shown(directory: Path, manifest: "Manifest", facts: Mapping[str, object] | None = None) -> Outcome:
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


def _table(replayed: "Replay", rows: "list[AcceptanceRow]") -> list[object]:
    from draftlab.results.tables import terminal_table

    positions = [f"at\n{i}" for i in range(1, max(row.k for row in rows) + 1)]
    heads = ["texts\nof", "n", "K", "acceptance\nlength", "acceptance\nrate", *positions]
    cells: list[list[str]] = []
    for row in rows:
        by_position = [f"{share.value:.2f}" for share in row.conditional]
        cells.append([row.group, str(row.texts), str(row.k), _spread(row.length), _spread(row.rate), *by_position])
    title = f"{replayed.draft} on {replayed.target}, {replayed.sampling.describe()}"
    notes = [
        "acceptance length: tokens per target pass, with the target's own; rate: accepted over drafted tokens; at i: "
        "share accepted of the tokens drafted there; 95 % intervals over texts"
    ]
    if loops := int(replayed.degenerate.sum()):
        notes.append(f"{loops} of {len(replayed.texts)} texts are mostly loops: acceptance on them is not typical")
    return [terminal_table(heads, cells, title=title), *notes]


def _spread(interval: "Interval") -> str:
    return f"{interval.value:.3f} ±{(interval.high - interval.low) / 2:.3f}"
