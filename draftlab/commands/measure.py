"""Commands that measure: scores and reports."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from draftlab import workspace
from draftlab.commands.shared import (
    SERVED,
    ApiKeyFile,
    DeviceMap,
    DryRun,
    Force,
    Out,
    Outcome,
    PromptFile,
    Seed,
    TargetName,
    Threads,
    TokenizerDir,
    TopK,
    TopP,
    WeightsDtype,
    command_line,
    connect,
    newest_draft,
    plan,
    recorded,
    rounded_drafts,
)
from draftlab.console import note_if_slow
from draftlab.errors import UserError
from draftlab.model import hub
from draftlab.model.shape import parse_numbers

KS, TASK_LIMIT = "1-6", 200

if TYPE_CHECKING:
    from draftlab.prompts import Prompts
    from draftlab.results.score import Score
    from draftlab.servers.client import Server


def score(
    draft: Annotated[
        list[str] | None,
        Option(help="Draft to score, again for each; DRAFT@q8_0: as that GGUF type rounds it. The newest if left out."),
    ] = None,
    drafter: Annotated[
        list[str] | None,
        Option(help="NAME or NAME:KEY=VALUE,... (docs/drafters.md): ngram, lookup, skip, tree, ...; again for each."),
    ] = None,
    rule: Annotated[
        Literal["rejection", "match", "block", "recursive", "k-sequential", "typical", "lenient"],
        Option(help="How drafts are verified when sampling; the last two are LOSSY."),
    ] = "rejection",
    target: TargetName = None,
    data: Annotated[
        str | None,
        Option(help="Held-out text of this source for prompts and code tasks; the workspace's if left out."),
    ] = None,
    k: Annotated[
        str | None, Option(help="Numbers of drafted tokens to try, as 1-6, which is the default, or 2,4,8.")
    ] = None,
    prompt_file: PromptFile = None,
    prompts: Annotated[
        int | None, Option(min=1, help="Number of prompts, evenly over a file: all of it if left out; 16 of a source.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, Option(min=1, help="Tokens of each prompt: 64 of a source if left out; those of a file stay whole.")
    ] = None,
    max_new_tokens: Annotated[int, Option(min=2, help="Tokens decoded after each prompt.")] = 128,
    repeats: Annotated[int, Option(min=1, help="Times every prompt is decoded in every way.")] = 3,
    temperature: Annotated[float, Option(min=0, help="0 is greedy.")] = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: Annotated[
        float, Option(min=0, max=1, help="Leave out tokens less probable than this times the most probable one.")
    ] = 0.0,
    tasks: Annotated[
        str | None,
        Option(help="lm-eval tasks, by comma; 'none' for none; code_next_line,code_bits_per_byte if left out."),
    ] = None,
    task_limit: Annotated[int | None, Option(min=1, help="Items per task; 200 if left out.")] = None,
    dtype: WeightsDtype = None,
    device_map: DeviceMap = None,
    mode: Annotated[
        Literal["auto", "eager", "native", "graphs"],
        Option(help="compiled: passes in C++, for CPUs; built once. graphs: CUDA graphs. auto: compiled if that runs."),
    ] = "eager",
    draft_int8: Annotated[
        bool, Option("--draft-int8", help="Round the draft's weights to 8 bits; in mode native.")
    ] = False,
    batch: Annotated[str, Option(help="Prompts decoded at once, as 1,2,4,8: one score for each.")] = "1",
    server: Annotated[
        str | None,
        Option(
            help="URL of a server that runs the target: measure it and --speculative-server instead.",
            rich_help_panel=SERVED,
        ),
    ] = None,
    speculative_server: Annotated[
        str | None,
        Option(
            help="URL of a server that runs the target with the draft; --draft says what it is called.",
            rich_help_panel=SERVED,
        ),
    ] = None,
    tokenizer: TokenizerDir = None,
    api_key_file: ApiKeyFile = None,
    threads: Threads = None,
    seed: Seed = 0,
    min_speedup: Annotated[float | None, Option(help="Exit with 3 if no K of some draft gets there.")] = None,
    min_acceptance_length: Annotated[
        float | None, Option(help="Likewise; tokens per pass of those with a draft, as vLLM's mean acceptance length.")
    ] = None,
    out: Out = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> Outcome:
    """Measure drafts against the target: accuracy, acceptance, tokens per second with and without, in one process."""
    arguments, began = recorded(locals())
    space = workspace.load()
    served_here = server is not None or speculative_server is not None
    place = tokenizer if tokenizer and served_here else None
    place = place or hub.locate(target or space.target, weights=not (served_here or dry_run))
    text = data or space.data if prompt_file else hub.check_data(data or space.data)

    with note_if_slow("loading torch and transformers"):
        from draftlab.benchmark import drafter_factory, run, servers
        from draftlab.benchmark.code_tasks import OWN_TASKS
        from draftlab.engine.drafters import medusa
        from draftlab.model import checkpoint
        from draftlab.model.decoder import resolve_mode
        from draftlab.model.tokenizer import common_vocabulary
        from draftlab.prompts import load_prompts
        from draftlab.sampling import SamplingParams

    def chosen() -> "Prompts":
        with note_if_slow(f"reading prompts of {prompt_file or text}"):
            reader = checkpoint.load_tokenizer(place)
            return load_prompts(prompt_file, text, reader, count=prompts, tokens=prompt_tokens, seed=seed)

    if served_here:
        if parse_numbers(batch) != [1] or draft_int8 or mode != "eager":
            raise UserError("servers get one request at a time and run as they were started: no batch, mode or int8")
        if drafter or rule != "rejection" or min_p:
            raise UserError("servers draft and verify in their own way: no --drafter, --rule or --min-p")
        _refuse(
            "a server answers prompts as it was started",
            {"--tasks": tasks, "--task-limit": task_limit, "--k": k, "--dtype": dtype, "--threads": threads,
             "--device-map": device_map},
        )  # fmt: skip
        out = out or space.runs / "score-served"
        if not dry_run:
            checkpoint.check_free(out, force=force)
        plain, speculative = _servers(server, speculative_server, api_key_file)
        asking = servers.Plan(
            plain=plain, speculative=speculative, tokenizer=place, draft=_called(draft), prompts=chosen(),
            sampling=SamplingParams(
                max_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
            ),
            repeats=repeats, command=command_line("score", arguments),
        )  # fmt: skip
        if dry_run:
            work = f"{2 * repeats * len(asking.prompts.rows)} requests of at most {max_new_tokens} tokens"
            return plan(out, {"servers": f"{plain.describe()}; {speculative.describe()}", "work": work})
        found = servers.score(asking, out=out, arguments=arguments, began=began, force=force)
        return _scored([found], out, min_speedup, min_acceptance_length)
    _refuse("without --server the models are here", {"--tokenizer": tokenizer, "--api-key-file": api_key_file})
    specs = [drafter_factory.parse(text) for text in drafter or []]
    needed = any(spec.needs_draft and not spec.words("draft") for spec in specs)
    names = draft or ([str(newest_draft(space))] if needed or not specs else [])
    given = _by_name(names, weights=not dry_run)
    drafts = given if draft or not specs else {}
    labels = [name.split("-", 1)[-1] for name in drafts] + [spec.kind for spec in specs]
    out = out or space.runs / ("score-" + "-".join(labels))
    if not dry_run:
        checkpoint.check_free(out, force=force)
    named = [
        hub.locate(spec.words("draft"), weights=not dry_run)
        for spec in specs
        if spec.needs_draft and spec.words("draft")
    ]
    for directory in [*given.values(), *named]:
        common_vocabulary(directory, place)
    heads = [Path(spec.words("heads")) for spec in specs if spec.kind == "medusa"]
    for folder in heads:
        medusa.read(folder, place)
    device = checkpoint.resolve_device(space.device)
    weights = checkpoint.resolve_dtype(dtype or space.dtype, device)
    measuring = run.Plan(
        target=place,
        drafts=drafts,
        inputs=[place, *given.values(), *named, *heads],
        data=text,
        ks=parse_numbers(k or KS),
        prompts=chosen(),
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        warp=SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p),
        tasks=[] if tasks == "none" else list(OWN_TASKS) if tasks is None else tasks.split(","),
        task_limit=task_limit or TASK_LIMIT,
        dtype=weights,
        device=device,
        threads=threads,
        seed=seed,
        command=command_line("score", arguments),
        mode="eager"
        if mode == "auto" and device_map
        else resolve_mode(mode, device, weights, [] if dry_run else [place, *given.values(), *named]),
        draft_int8=draft_int8,
        batches=parse_numbers(batch),
        drafters=specs,
        default_draft=next(iter(given.values()), None),
        rule=rule,
        device_map=device_map,
    )
    run.check(measuring)
    if dry_run:
        shapes = {name: _described(path) for name, path in drafts.items()}
        count = (
            len(measuring.prompts.rows)
            * repeats
            * (1 + (len(drafts) + len(specs)) * len(measuring.ks))
            * len(measuring.batches)
        )
        work = f"at most {count} generations of {max_new_tokens} tokens"
        return plan(out, {"target": _described(place), **shapes, "work": work})
    for directory in (place, *given.values(), *named):
        checkpoint.check(directory)
    with contextlib.ExitStack() as stack:
        measuring = replace(measuring, drafts=rounded_drafts(drafts, stack))
        scores = run.score(measuring, out=out, arguments=arguments, began=began, force=force)
    return _scored(scores, out, min_speedup, min_acceptance_length)


def _refuse(why: str, given: dict[str, object]) -> None:
    """Raises UserError: one of these options was given."""
    if named := [name for name, value in given.items() if value is not None]:
        raise UserError(f"{why}: no {', '.join(named)}")


def _described(directory: Path) -> str:
    from draftlab.model import llama

    try:
        return llama.check_supported(directory).describe()
    except UserError as error:
        return f"{error}; transformers runs it"


def _scored(
    scores: "list[Score]", out: Path, min_speedup: float | None, min_acceptance_length: float | None
) -> Outcome:
    from draftlab.results.compare import candidate_of, category_rows, category_table, prompt_rows, rank, verdict_lines
    from draftlab.results.report import json_rows
    from draftlab.results.tables import score_table
    from draftlab.results.warnings import score_warnings

    bars = min_speedup, min_acceptance_length
    missed = []
    for s in scores:
        longest = max(s.acceptance(k).mean_acceptance_length for k in s.speculative)
        missed += _missed(s.name, s.output_differs, s.best_k_speedup.value, longest, *bars)
    verdicts = [f"{s.name}: {s.verdict()}" for s in scores]
    warnings = [f"warning: {text}" for text in score_warnings(scores)]
    several = len(scores) > 1 and len({s.conditions.batch for s in scores}) == 1
    ranking = verdict_lines(rank([candidate_of(s) for s in scores])) if several else []
    kinds = [category_table(s) for s in scores if s.prompts_by_category]
    data = {
        "scores": json_rows(scores),
        "categories": {s.name: category_rows(s) for s in scores},
        "prompts": {s.name: prompt_rows(s) for s in scores},
    }
    show = [score_table(scores), *kinds, *verdicts, *ranking, *warnings, str(out)]
    return Outcome(path=out, show=show, data=data, missed=missed)


def _missed(
    name: str,
    changed: bool,
    speedup: float,
    length: float,
    min_speedup: float | None,
    min_acceptance_length: float | None,
) -> list[str]:
    """What a draft falls short of, in words. changed: what was written is not the target's own."""
    missed = []
    if min_speedup is not None and changed:
        missed.append(f"{name}: its texts are not the target's own, so that no speed-up counts")
    if min_speedup is not None and speedup < min_speedup:
        missed.append(f"{name}: speed-up {speedup:.3f} is below --min-speedup {min_speedup}")
    if min_acceptance_length is not None and length < min_acceptance_length:
        missed.append(f"{name}: acceptance length {length:.3f} is below the wanted {min_acceptance_length}")
    return missed


def _servers(plain: str | None, speculative: str | None, key: Path | None) -> "tuple[Server, Server]":
    if plain is None or speculative is None:
        raise UserError(
            "a speed-up needs two servers: the target alone as --server, the target with its draft as "
            "--speculative-server"
        )
    return connect(plain, None, key), connect(speculative, None, key)


def _called(draft: list[str] | None) -> str:
    if draft is not None and len(draft) > 1:
        raise UserError(f"a server has one draft, not {len(draft)}: {', '.join(draft)}")
    return draft[0] if draft else "draft"


def _by_name(given: list[str], weights: bool) -> dict[str, Path]:
    """Directories by their names, which end with @TYPE where it was asked for so."""
    from draftlab.export.hf import parse_quantized_name

    parts = [parse_quantized_name(name) for name in given]
    found = [(hub.locate(base, weights), kind) for base, kind in parts]
    named = {hub.checkpoint_name(path) + (f"@{kind}" if kind else ""): path for path, kind in found}
    if len(named) < len(given):
        raise UserError("two drafts have the same directory name; rename one: " + ", ".join(given))
    return named
