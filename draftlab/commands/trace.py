"""Commands for a target's own output: record it once, then replay any draft over it without the target."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from draftlab import workspace
from draftlab.commands.shared import (
    ApiKeyFile,
    DeviceMap,
    DryRun,
    Force,
    Memory,
    Out,
    Outcome,
    PromptFile,
    Seed,
    ServedModel,
    ServerUrl,
    TargetName,
    TopK,
    TopP,
    WeightsDtype,
    command_line,
    connect,
    newest_draft,
    plan,
    recorded,
)
from draftlab.console import note_if_slow
from draftlab.errors import UserError
from draftlab.model import hub
from draftlab.model.shape import parse_numbers

if TYPE_CHECKING:
    from draftlab.intervals import Interval
    from draftlab.target_outputs.replay import Drafting, Replay, Row
    from draftlab.target_outputs.traces import Manifest

TraceDir = Annotated[Path, Argument(help="Directory of the trace.")]
Count = Annotated[int | None, Option(min=1, help="Number of prompts; all of a file, 64 of a source if left out.")]
TokenizerDir = Annotated[
    Path | None, Option(help="Directory with the target's tokenizer, where the target itself is not here.")
]
FROM_DATA = 64  # prompts of a data source, and tokens of each


def record(
    target: TargetName = None,
    data: Annotated[
        str | None, Option(help="Prompts: held-out text of this source; the workspace's if left out.")
    ] = None,
    prompt_file: PromptFile = None,
    prompts: Count = None,
    prompt_tokens: Annotated[
        int | None, Option(min=1, help="Cut prompts to so many tokens; those of a file stay whole if left out.")
    ] = None,
    max_new_tokens: Annotated[int, Option(min=2, help="Most tokens after each prompt.")] = 128,
    temperature: Annotated[float, Option(min=0, help="0 is greedy.")] = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    top: Annotated[int, Option(min=0, help="Also list so many most probable tokens at each place.")] = 0,
    rows: Annotated[int, Option(min=1, help="Prompts decoded together.")] = 16,
    memory: Memory = 2.0,
    dtype: WeightsDtype = None,
    device_map: DeviceMap = None,
    server: ServerUrl = None,
    model: ServedModel = None,
    tokenizer: TokenizerDir = None,
    api_key_file: ApiKeyFile = None,
    seed: Seed = 0,
    out: Out = None,
    dry_run: DryRun = False,
) -> Outcome:
    """Record what the target writes after prompts; a killed recording goes on where it stopped."""
    arguments, began = recorded(locals())
    space = workspace.load()
    place = tokenizer or hub.locate(target or space.target, weights=server is None and not dry_run)
    if prompt_file is None:
        hub.check_data(data or space.data)

    with note_if_slow("trace record: loading torch and transformers"):
        from draftlab import provenance
        from draftlab.engine.batch_generate import BatchSettings, check_context, load_generator
        from draftlab.model import checkpoint
        from draftlab.model.checkpoint import max_model_len
        from draftlab.model.tokenizer import known_ids
        from draftlab.prompts import data_prompts, file_prompts
        from draftlab.target_outputs import sources
        from draftlab.target_outputs.traces import Decoding

    if data is not None and prompt_file is not None:
        raise UserError("give prompts one way: --data SOURCE or --prompt-file FILE")
    reader = checkpoint.load_tokenizer(place)
    if prompt_file is not None:
        given = file_prompts(prompt_file, reader, count=prompts, tokens=prompt_tokens)
    else:
        source, count, length = data or space.data, prompts or FROM_DATA, prompt_tokens or FROM_DATA
        given = data_prompts(source, reader, count=count, tokens=length, seed=seed)
    how = Decoding(
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, max_new_tokens=max_new_tokens,
        eos_ids=checkpoint.eos_token_ids(place),
    )  # fmt: skip
    out = out or space.runs / f"trace-{hub.checkpoint_name(place)}"
    if dry_run:
        tokens = len(given.rows) * max_new_tokens
        facts = {"prompts": len(given.rows), "tokens": f"at most {tokens:,}", "decoding": how.words()}
        return plan(out, facts | {"disk": f"at most {tokens * (8 + 8 * top) / 1e6:,.3g} MB"})
    if server is not None:
        served = sources.ServedWriter(connect(server, model, api_key_file), how, top, place)
        manifest = sources.run(out, served.about(), lambda: served, given, how, top=top, tokenizer_from=place)
    else:
        checkpoint.check(place)
        check_context(given.longest, max_new_tokens, max_model_len(place))
        device = checkpoint.resolve_device(space.device)
        weights = checkpoint.resolve_dtype(dtype or space.dtype, device)
        about = sources.About(
            target=hub.checkpoint_name(place), target_sha256=provenance.fingerprint(place), written_by="draftlab",
            dtype=checkpoint.dtype_name(weights), rows=rows, logprobs="sampled",
        )  # fmt: skip

        def start() -> sources.LocalWriter:
            model = load_generator(place, weights, device, device_map)
            settings = BatchSettings(vocab=known_ids(place), logprobs=top, batch_size=rows, memory=memory)
            return sources.LocalWriter(model, how.sampling, settings)

        manifest = sources.run(out, about, start, given, how, top=top, tokenizer_from=place)
    inputs = [path for path in (place, prompt_file) if path is not None]
    provenance.write_record(out, "trace record", arguments, inputs, began)
    return _shown(out, manifest)


def from_paper(
    file: Annotated[Path, Argument(help="Trace file of the paper's scripts: tensor([[...]]) for each prompt.")],
    prompt_file: Annotated[Path, Option(help="The prompts that it was made with, one JSON line each.")],
    tokenizer: Annotated[Path, Option(help="Directory with the target's tokenizer.")],
    name: Annotated[str, Option(help="What the target is called.")] = "llama-65b",
    prompts: Annotated[int | None, Option(min=1, help="Take the first so many of both; all if left out.")] = None,
    out: Out = None,
) -> Outcome:
    """Read a greedy trace as the scripts of "Decoding Speculative Decoding" keep it."""
    arguments, began = recorded(locals())
    from draftlab import provenance
    from draftlab.model import checkpoint
    from draftlab.prompts import file_prompts
    from draftlab.target_outputs import sources
    from draftlab.target_outputs.logprob_sources import vocab_of
    from draftlab.target_outputs.traces import Decoding

    reader = checkpoint.load_tokenizer(tokenizer)
    given = file_prompts(prompt_file, reader, count=prompts)
    eos = checkpoint.eos_token_ids(tokenizer)
    paper = sources.PaperTrace(file, given.rows, prompts, vocab_of(tokenizer), eos)
    how = Decoding(temperature=0, top_k=0, top_p=1, seed=0, max_new_tokens=paper.longest, eos_ids=eos)
    about = sources.About(
        target=name, target_sha256=None, written_by="the paper's scripts", dtype="float16", rows=1, logprobs="none"
    )
    out = out or workspace.load().runs / f"trace-{name}"
    manifest = sources.run(out, about, lambda: paper, given, how, top=0, tokenizer_from=tokenizer)
    provenance.write_record(out, "trace import", arguments, [file, prompt_file], began)
    return _shown(out, manifest)


def info(directory: TraceDir) -> Outcome:
    """What a trace holds, and whether its texts are loops."""
    from draftlab.target_outputs.repeats import repeats
    from draftlab.target_outputs.traces import read_manifest, read_trace

    manifest = read_manifest(directory)
    if manifest.texts < manifest.planned:
        return _shown(directory, manifest)
    texts = read_trace(directory).texts
    loops = repeats([t.ids for t in texts])
    facts: dict[str, object] = {
        "categories": {name: sum(t.category == name for t in texts) for name in manifest.categories if name},
        "prompt_tokens": [min(len(t.prompt) for t in texts), max(len(t.prompt) for t in texts)],
        "stopped_at_eos": sum(t.stop == "eos" for t in texts),
        "degenerate_texts": sum(r.degenerate for r in loops),
        "longest_repeat": max(r.longest_repeat for r in loops),
    }
    return _shown(directory, manifest, facts)


def replay(
    directory: TraceDir,
    draft: Annotated[
        list[str] | None, Option(help="Draft to replay, again for each; the newest one if left out.")
    ] = None,
    k: Annotated[str, Option(help="Numbers of drafted tokens, as 1-8 or 2,4,8.")] = "1-8",
    tree: Annotated[
        str | None, Option(help="A tree instead: how many of the most probable tokens at each depth, as 4,2,1.")
    ] = None,
    confidence: Annotated[
        float | None, Option(min=0, max=1, help="Draft only as long as the draft's largest probability is this.")
    ] = None,
    unsure: Annotated[
        Literal["keep", "drop"], Option(help="The token that is less sure: keep as transformers, drop as llama.cpp.")
    ] = "keep",
    rule: Annotated[
        Literal["rejection", "match"],
        Option(help="min(1, q/p), or the draft's token stands where it is the target's own sample."),
    ] = "rejection",
    draft_temperature: Annotated[
        float | None, Option(min=0, help="How the draft samples, 0 greedily; as the target if left out.")
    ] = None,
    first: Annotated[
        Literal["prefill", "prompt"],
        Option(help="The first token comes with the target's prefill, or is drafted like the others."),
    ] = "prefill",
    category: Annotated[str | None, Option(help="Only texts of this category.")] = None,
    dtype: WeightsDtype = None,
    out: Out = None,
    force: Force = False,
) -> Outcome:
    """Acceptance of drafts for every K from one pass over a trace; the target is not needed."""
    arguments, began = recorded(locals())
    from draftlab import provenance
    from draftlab.console import progress
    from draftlab.model import checkpoint
    from draftlab.target_outputs.replay import FILE, Plan, check, replay_draft, rows_of
    from draftlab.target_outputs.traces import read_trace

    ways = _ways(k, tree, confidence, unsure == "keep")
    space = workspace.load()
    trace = read_trace(directory) if category is None else read_trace(directory).of_category(category)
    names = draft or [str(newest_draft(space))]
    drafts = {hub.checkpoint_name(place): place for place in map(hub.locate, names)}
    if len(drafts) < len(names):
        raise UserError(f"two drafts have the same directory name; rename one: {', '.join(names)}")
    out = out or space.runs / f"replay-{directory.name}"
    checkpoint.check_free(out, force=force)
    device = checkpoint.resolve_device(space.device)
    how = Plan(
        rule=rule, draft_temperature=draft_temperature, dtype=checkpoint.resolve_dtype(dtype or space.dtype, device),
        device=device, command=command_line("trace replay", arguments, bare="directory"),
    )  # fmt: skip
    for place in drafts.values():
        check(trace, place, how)
    found: dict[str, Replay] = {}
    for name, place in drafts.items():
        with progress(f"replay {name}", len(trace.texts)) as advance:
            found[name] = replay_draft(trace, place, how, advance)
    with checkpoint.new_directory(out, force=force) as work:
        for name, one in found.items():
            (work / name).mkdir()
            (work / name / FILE).write_text(one.model_dump_json())
        provenance.write_record(work, "trace replay", arguments, [directory, *drafts.values()], began)
    rows = {name: rows_of(one, ways, first) for name, one in found.items()}
    show: list[object] = [text for name, one in found.items() for text in _replayed(one, rows[name])]
    data = [{"draft": name, "rows": [row.as_dict() for row in table]} for name, table in rows.items()]
    return Outcome(path=out, show=[*show, str(out)], data={"out": str(out), "replays": data})


def _ways(k: str, tree: str | None, confidence: float | None, keep_unsure: bool) -> "list[Drafting]":
    from draftlab.target_outputs.replay import Drafting

    if tree is None:
        return [Drafting(k=n, confidence=confidence, keep_unsure=keep_unsure) for n in parse_numbers(k)]
    if confidence is not None:
        raise UserError("--tree and --confidence do not go together: a tree is drafted whole")
    try:
        widths = tuple(int(word) for word in tree.split(","))
    except ValueError:
        widths = ()
    if not widths or min(widths) < 1:
        raise UserError(f"--tree {tree!r}: want widths from 1 on by comma, as 4,2,1")
    return [Drafting(k=len(widths), widths=widths)]


def _replayed(found: "Replay", rows: "list[Row]") -> list[object]:
    from rich.table import Table

    table = Table(title=f"{found.draft} on {found.target}, {found.decoding.words()}", title_justify="left")
    deepest = max(row.drafting.k for row in rows)
    columns = ("texts of", "n", "K", "acceptance length", "acceptance rate")
    for name in (*columns, *(f"at {i}" for i in range(1, deepest + 1))):
        table.add_column(name, justify="left" if name == columns[0] else "right")
    for row in rows:
        shares = [f"{c.value:.2f}" for c in row.conditional]
        table.add_row(row.group, str(row.texts), row.drafting.words, _spread(row.length), _spread(row.rate), *shares)
    notes = [
        "acceptance length: tokens per target pass, the target's own included; rate: accepted over drafted; at i: "
        "accepted of those that got there; 95 % intervals over texts"
    ]
    loops = int(found.degenerate.sum())
    if loops:
        notes.append(
            f"{loops} of {len(found.texts)} texts are mostly loops: acceptance on them says little about others"
        )
    return [table, *notes]


def _spread(value: "Interval") -> str:
    return f"{value.value:.3f} ±{(value.high - value.low) / 2:.3f}"


def _shown(out: Path, manifest: "Manifest", facts: dict[str, object] | None = None) -> Outcome:
    text = [
        str(out),
        f"{manifest.texts:,} of {manifest.planned:,} texts, {manifest.tokens:,} tokens of {manifest.target}, "
        f"{manifest.decoding.words()}, at most {manifest.decoding.max_new_tokens} each; prompts: {manifest.prompts}",
        *(f"{name.replace('_', ' ')}: {value}" for name, value in (facts or {}).items() if value),
    ]
    return Outcome(path=out, show=text, data={"path": str(out), **manifest.model_dump(mode="json"), **(facts or {})})
