"""Commands that separate latency from acceptance: measure the one anywhere, and compose it with the other."""

from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from draftlab import workspace
from draftlab.commands.shared import (
    DeviceMap,
    DryRun,
    Force,
    Out,
    Outcome,
    PassMode,
    Threads,
    WeightsDtype,
    command_line,
    plan,
    recorded,
    shape_of,
    subject,
    table_of,
)
from draftlab.errors import UserError
from draftlab.model.shape import Shape, parse_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from draftlab.intervals import Interval
    from draftlab.latency.cost_model import CostModel, Point, Profile
    from draftlab.latency.predict import Prediction, Workload
    from draftlab.results.score import Latency

ASSUMED_PROMPT = 128
PROFILE_HELP = (
    "A profile that draftlab profile wrote; SHAPE@FOLDER by the law that draftlab law wrote there; or "
    "SHAPE@DEVICE,MODE[,DTYPE] to compute one from constants"
)


def profile(
    models: Annotated[
        list[str], Argument(help="Checkpoints, or shape files and their names: these get random weights.")
    ],
    k: Annotated[int, Option(min=1, help="Most drafted tokens: passes take 1 to K + 1 tokens.")] = 8,
    batch: Annotated[str, Option(help="Rows at once, as 1,4,16.")] = "1",
    context: Annotated[str, Option(help="Cached tokens before a pass, and lengths of prompts.")] = "16,128,480",
    repeats: Annotated[int, Option(min=3, help="Times every pass is measured, once all is warm.")] = 20,
    mode: PassMode = "eager",
    dtype: WeightsDtype = None,
    device_map: DeviceMap = None,
    threads: Threads = None,
    out: Out = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> Outcome:
    """Measure what a pass of a model costs: by tokens fed, rows and context; models given together take turns."""
    arguments, began = recorded(locals())
    from draftlab.latency import profiler as profiling
    from draftlab.model import checkpoint

    space = workspace.load()
    subjects = _subjects(models, weights=not dry_run)
    out = out or space.runs / ("profile-" + "-".join(subjects))
    if not dry_run:
        checkpoint.check_free(out, force=force)
    device = checkpoint.resolve_device(space.device)
    contexts = parse_numbers(context)
    grid = profiling.Grid(
        widths=range(1, k + 2), batches=parse_numbers(batch), contexts=contexts, prompts=contexts, repeats=repeats
    )
    measuring = profiling.Plan(
        subjects=subjects,
        grid=grid,
        mode=mode,
        dtype=checkpoint.resolve_dtype(dtype or space.dtype, device),
        device=device,
        threads=threads,
        command=command_line("profile", arguments, bare="models"),
        device_map=device_map,
    )
    profiling.check(measuring)
    if dry_run:
        held = profiling.needed_bytes(measuring)
        facts = {name: shape.describe() for name, shape in measuring.sizes().items()}
        points = len(grid.widths) * len(grid.batches) * len(grid.contexts)
        work = points * repeats * len(facts)
        return plan(out, facts | {"passes": work, "memory": f"{sum(held.values()) / 1e9:.3g} GB"})
    for found in subjects.values():
        if isinstance(found, Path):
            checkpoint.check(found)
    profiles = profiling.run(measuring, out=out, arguments=arguments, began=began, force=force)
    data = {"out": str(out), "profiles": [p.model_dump() for p in profiles]}
    return Outcome(path=out, show=[*(_profile_table(p) for p in profiles), str(out)], data=data)


def predict(
    draft_profile: Annotated[list[str], Option(help=PROFILE_HELP + "; again for each draft.")],
    target_profile: Annotated[str, Option(help=PROFILE_HELP + ".")],
    replay: Annotated[
        list[Path] | None, Option(help="Acceptance as draftlab trace replay found it; one, or one for each draft.")
    ] = None,
    score: Annotated[
        list[Path] | None, Option(help="Acceptance as a score saw it; one, or one for each draft.")
    ] = None,
    alpha: Annotated[float | None, Option(min=0, max=1, help="Every token accepted with this chance.")] = None,
    acceptance_length: Annotated[
        str | None, Option(help="Tokens per target pass at some K, as 2.8@4: the alpha that gives it.")
    ] = None,
    k: Annotated[str, Option(help="Numbers of drafted tokens, as 1-8 or 2,4,8.")] = "1-8",
    batch: Annotated[
        str, Option(help="Rows at once, as 1,4,16: the fewest are shown by K, all by their best K.")
    ] = "1",
    context: Annotated[
        str | None, Option(help="Tokens of a prompt, likewise; those of the texts, or 128, if left out.")
    ] = None,
    max_new_tokens: Annotated[int, Option(min=2, help="Tokens of a text where acceptance is assumed.")] = 128,
    extrapolate: Annotated[bool, Option("--extrapolate", help="Go beyond the widths and contexts measured.")] = False,
) -> Outcome:
    """Predict the speed-up of a pair for every K, from acceptance and profiles that may come from other machines."""
    from draftlab.latency import predict as predicting
    from draftlab.latency.cost_model import CostModel, parse_profile

    ks, batches, contexts = parse_numbers(k), parse_numbers(batch), parse_numbers(context) if context else []
    works = _workloads(replay, score, alpha, acceptance_length, max_new_tokens)
    if len(works) not in (1, len(draft_profile)):
        raise UserError(
            f"{len(works)} sources of acceptance for {len(draft_profile)} drafts; give one, or one for each"
        )
    works *= len(draft_profile) // len(works)
    longest = max([_longest(work, prompt) for work in works for prompt in contexts or [None]]) + max(ks)

    def cost(spec: str) -> CostModel:
        profile = _by_law(spec) or parse_profile(
            spec, widths=range(1, max(ks) + 2), batches=sorted(batches), longest=longest
        )
        return CostModel.of(profile, extrapolate=extrapolate)

    target, drafts = cost(target_profile), [cost(spec) for spec in draft_profile]
    here = [predicting.with_prompt_tokens(work, contexts[0]) for work in works] if contexts else works
    found = [predicting.predict(d, target, work, ks, batches[0]) for d, work in zip(drafts, here, strict=True)]
    show: list[object] = [_k_table(found[0])] if len(found) == 1 else [_draft_table(found)]
    where = [_best_rows(d, target, work, ks, batches, contexts) for d, work in zip(drafts, works, strict=True)]
    show += [_where_table(p, rows) for p, rows in zip(found, where, strict=True) if len(rows) > 1]
    show += [f"{p.name}: {predicting.verdict(p)}" if len(found) > 1 else predicting.verdict(p) for p in found]
    show += [f"note: {text}" for text in dict.fromkeys(text for p in found for text in p.notes)]
    data = [_as_dict(p) | {"where": rows} for p, rows in zip(found, where, strict=True)]
    return Outcome(path=None, show=show, data={"predictions": data})


def _subjects(models: list[str], weights: bool) -> "dict[str, Path | Shape]":
    found = dict(subject(model, weights) for model in models)
    if len(found) < len(models):
        raise UserError(f"two models have the same name; rename one: {', '.join(models)}")
    return found


def _by_law(spec: str) -> "Profile | None":
    """SHAPE@FOLDER, by the latency law of the profiles in it; None for what is not such a spec."""
    from draftlab.latency.scaling_law import read_law

    name, _, folder = spec.rpartition("@")
    if not name or not Path(folder).is_dir():
        return None
    called, shape = shape_of(name)
    return read_law(Path(folder)).profile(shape, called)


def _workloads(
    replay: list[Path] | None, score: list[Path] | None, alpha: float | None, length: str | None, tokens: int
) -> "list[Workload]":
    """Acceptance from the one source that was given."""
    from draftlab.latency import predict as predicting
    from draftlab.latency.cost_model import alpha_for

    given = {"--replay": replay, "--score": score, "--alpha": alpha, "--acceptance-length": length}
    named = [name for name, value in given.items() if value is not None and value != []]
    if len(named) != 1:
        raise UserError(f"say once what is accepted: {', '.join(given)}; got {' and '.join(named) or 'none of them'}")
    if replay:
        from draftlab.target_outputs.replay import read_replay

        return [predicting.workload_of_replay(read_replay(path)) for path in replay]
    if score:
        from draftlab.results.score import read_score

        return [predicting.workload_of_score(read_score(path)) for path in score]
    if length is not None:
        value, _, k = length.partition("@")
        try:
            alpha = alpha_for(float(value), int(k))
        except ValueError:
            raise UserError(f"--acceptance-length {length!r}: write the length and its K, as 2.8@4") from None
    assert alpha is not None
    return [predicting.constant_workload(alpha, tokens=tokens, prompt_tokens=ASSUMED_PROMPT)]


def _longest(work: "Workload", prompt: int | None) -> int:
    prompts = work.prompt_tokens if prompt is None else 0 * work.prompt_tokens + prompt
    return int((prompts + work.texts.lengths).max())


def _best_rows(
    draft: "CostModel", target: "CostModel", work: "Workload", ks: list[int], batches: list[int], contexts: list[int]
) -> list[dict[str, float | int | None]]:
    """The best K for every batch and context."""
    from draftlab.latency import predict as predicting

    rows: list[dict[str, float | int | None]] = []
    for count, prompt in product(batches, contexts or [None]):
        there = work if prompt is None else predicting.with_prompt_tokens(work, prompt)
        best, speedup, rate = predicting.best_k(draft, target, there, ks, count)
        found = {"batch": count, "prompt_tokens": prompt, "k": best, "speedup": speedup, "tokens_per_second": rate}
        rows.append(found)
    return rows


def _as_dict(prediction: "Prediction") -> dict[str, object]:
    rows = [
        asdict(row)
        | {"tokens_per_pass": row.tokens_per_pass.model_dump(), "speedup": row.speedup.model_dump()}
        | {"break_even_length": row.break_even_length}
        for row in prediction.rows
    ]
    return asdict(prediction) | {"rows": rows, "best_k": prediction.best.k}


def _profile_table(profile: "Profile") -> "Table":
    """Milliseconds by tokens fed, and how near a pass over one token comes to what memory allows."""
    from draftlab.latency.cost_model import BYTES, active_params

    contexts = sorted({p.context for p in profile.forward})
    heads = ("rows", "tokens", *(f"behind {c}" for c in contexts))
    table = table_of(f"{profile.describe()}: milliseconds (quartiles)", heads)
    for batch in sorted({p.batch for p in profile.forward}):
        settled = max(p.after for p in profile.steady)
        lines: list[tuple[str, Sequence[Point]]] = [
            ("1 again", [p for p in profile.steady if (p.after, p.batch) == (settled, batch)])
        ]
        for width in sorted({p.width for p in profile.forward}):
            lines.append((str(width), [p for p in profile.forward if (p.width, p.batch) == (width, batch)]))
        for name, points in lines:
            cells = [_ms(p) for p in sorted(points, key=lambda p: p.context)]
            table.add_row(str(batch), name, *cells)
    one = min(profile.steady, key=lambda p: (p.batch, p.context, -p.after)).median_ms
    weights = active_params(profile.shape) * BYTES[profile.dtype] if profile.shape else 0
    reached = f"One token again reads its weights at {weights / 1e6 / one:.3g} GB/s; " if weights else ""
    products = ", ".join(f"{name} {value:.3g}" for name, value in profile.matmul_tflops.items())
    table.caption = (
        f"{reached}a matrix-vector product gets {profile.bandwidth_gbs:.3g} GB/s, large products {products} TFLOP/s. "
        + "Prompts: "
        + ", ".join(f"{p.width} in {_ms(p)}" for p in profile.prefill)
        + f". Host beside a pass: {_ms(profile.host[0])}; to judge {profile.host[-1].width}: {_ms(profile.host[-1])}. "
        + "Again: behind like passes, as in plain decoding; the others behind other work."
    )
    return table


def _k_table(prediction: "Prediction") -> "Table":
    """One row per K, the best marked."""
    heads = (
        "K", "tokens\nper pass", "break\neven", "tok/s", "speed-up\n95% interval", "free\ndraft",
        "perfect\ndraft", "% draft,\nverify, host",
    )  # fmt: skip
    table = table_of(f"Predicted: {prediction.draft}\nwith {prediction.target}, {_rows(prediction.batch)}", heads)
    for row in prediction.rows:
        best = row is prediction.best
        split = ", ".join(f"{100 * row.split[name]:.0f}" for name in ("draft", "verify", "host"))
        cells = (
            f"* {row.k}" if best else str(row.k), f"{row.tokens_per_pass.value:.2f}", f"{row.break_even_length:.2f}",
            f"{row.tokens_per_second:.4g}", _spread(row.speedup), f"{row.free_draft:.2f}",
            f"{row.perfect_draft:.2f}", split,
        )  # fmt: skip
        table.add_row(*cells, style="bold green" if best else None)
    best = prediction.best
    table.caption = (
        f"Without a draft {prediction.plain_tokens_per_second:.4g} tok/s. Tokens per target pass, its own included. "
        f"Free: drafting takes no time; perfect: all is accepted. At K = {best.k} the closed form with "
        f"c = {prediction.c:.3f} and beta = {best.beta:.2f} gives {best.closed_form_speedup:.2f}. "
        "Intervals over texts, without the spread of latencies."
    )
    return table


def _draft_table(predictions: "list[Prediction]") -> "Table":
    """One row per draft at its best K, and what each would need to be as fast as the fastest."""
    from draftlab.latency.predict import required_length

    fastest = max(predictions, key=lambda p: p.best.speedup.value)
    heads = ("draft", "c", "K", "tokens\nper pass", "tok/s", "speed-up\n95% interval", "needed to\nbe fastest")
    table = table_of(f"Predicted with {fastest.target}, {_rows(fastest.batch)}", heads)
    for p in predictions:
        needed = required_length(p, fastest.best.speedup.value)
        words = "cannot" if needed is None else f"{needed[1]:.2f} at K = {needed[0]}"
        row, best = p.best, p is fastest
        cells = (
            f"* {p.name}" if best else p.name, f"{p.c:.3f}", str(row.k), f"{row.tokens_per_pass.value:.2f}",
            f"{row.tokens_per_second:.4g}", _spread(row.speedup), "" if best else words,
        )  # fmt: skip
        table.add_row(*cells, style="bold green" if best else None)
    table.caption = f"Without a draft {fastest.plain_tokens_per_second:.4g} tok/s. Needed: tokens per target pass."
    return table


def _where_table(prediction: "Prediction", rows: "list[dict[str, float | int | None]]") -> "Table":
    table = table_of(f"Best K of {prediction.name}", ("rows", "prompt", "K", "speed-up", "tok/s of all rows"))
    for row in rows:
        prompt = "as the texts" if row["prompt_tokens"] is None else str(row["prompt_tokens"])
        table.add_row(
            str(row["batch"]), prompt, str(row["k"]), f"{row['speedup']:.2f}", f"{row['tokens_per_second']:.4g}"
        )
    return table


def _rows(batch: int) -> str:
    return f"{batch} row{'s' if batch > 1 else ''}"


def _spread(value: "Interval") -> str:
    return f"{value.value:.2f} ({value.low:.2f} to {value.high:.2f})" if value.n > 1 else f"{value.value:.2f}"


def _ms(latency: "Latency") -> str:
    return f"{latency.median_ms:.3g} ({latency.low_ms:.3g}, {latency.high_ms:.3g})"
