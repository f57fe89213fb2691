"""Scores as tables, as Markdown, as one self-contained HTML page, and as flat JSON rows."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftlab.intervals import Interval
from draftlab.model.shape import format_count
from draftlab.provenance import Stage
from draftlab.results.ranking import (
    ACCURACY_METRICS,
    NO_DRAFT,
    Candidate,
    Ranked,
    candidate_of,
    category_rows,
    rank,
    verdict_lines,
)
from draftlab.results.score import Score, TaskResult
from draftlab.results.tables import Table, markdown_text, milliseconds, optional, speedup_text, three_digits
from draftlab.results.warnings import score_warnings

if TYPE_CHECKING:
    from markupsafe import Markup

    from draftlab.results.plots import Mark

PHASES = ("draft", "verify", "host")
BOARD_HEADS = (
    "draft",
    "K",
    "tokens\nper pass",
    "accept\nrate",
    "tok/s",
    "requests\n(95%)",
    "relative\nto best",
    "TPOT\n(95%)",
    "TTFT,\nms",
    "accu-\nracy",
    "equal\ntexts",
    "weights, target/draft",
    "draft ms per token (quartiles)",
    "c",
    "layers x hidden",
    "parameters",
)
WIDE = (8, *range(11, 16))  # columns of BOARD_HEADS that terminals leave out
CAPTION = (
    "* Fastest. ~ No significant difference from the fastest draft. Each draft at its best K. requests: speed-up of "
    "whole requests, prefill and decoding, over the fastest plain decoding, at a K chosen on other prompts; TPOT: of "
    "the tokens after the first, as are predictions. Relative to best: ratio of the two speed-ups. Intervals: 95% "
    "bootstrap over prompts. tok/s: of whole requests."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A plot with its numbers. key: the colours and markers that it uses, if it needs them."""

    svg: "Markup"
    table: Table
    key: "Sequence[Mark]" = ()


def ranking_table(ranking: Sequence[Ranked]) -> Table:
    """Return one row per draft, the fastest first and marked, with plain decoding at its place."""
    candidates = [ranked.candidate for ranked in ranking]
    scores = [c.score for c in candidates if c.score]
    shown = _accuracy_metric(candidates)
    rows = [(c.speedup.value, c.output_differs, _board_row(r, shown)) for r, c in zip(ranking, candidates, strict=True)]
    plain = candidates[0].plain_tps
    for weights, speed in plain.items():
        name, gain = (f"{NO_DRAFT}, {weights}" if len(plain) > 1 else NO_DRAFT), speed / max(plain.values())
        cells = [name, "–", "1.00", "–", three_digits(speed), f"{gain:.2f}x", *["–"] * (len(BOARD_HEADS) - 6)]
        rows.append((gain, False, cells))
    rows.sort(key=lambda row: (row[1], -row[0]))
    unused = {6} if len(candidates) == 1 else set()
    unused |= {9} if shown is None else set()
    unused |= {10} if not any(c.output_differs for c in candidates) else set()
    first = candidates[0]
    doubtful = first.doubt is not None and first.speedup.value > 1 and not first.output_differs
    sampling = "; ".join(dict.fromkeys(score.conditions.decoding for score in scores))
    told = f" Decoding: {sampling}. How both sides ran: {precision(scores)}." if scores else ""
    return Table(
        heads=BOARD_HEADS,
        rows=[row for *_, row in rows],
        title="Ranking",
        caption=CAPTION + (f" accuracy: {shown[1]} of {shown[0]}." if shown else "") + told,
        best=None if doubtful else 0,
        wide=frozenset({*WIDE, *unused}),
    )


def accuracy_table(scores: Sequence[Score]) -> Table | None:
    """Return one row per task, metric and model; None where no task was evaluated."""
    models = {model.name: model.tasks for score in scores for model in (score.draft, score.target)}
    rows = [
        [r.task, r.metric, name, f"{r.value:.4f}", optional(r.stderr, ".4f"), str(r.n)]
        for name, tasks in models.items()
        for r in tasks
    ]
    if not rows:
        return None
    return Table(
        heads=("task", "metric", "model", "value", "standard\nerror", "items"),
        rows=sorted(rows, key=lambda row: (row[0], row[1])),
        title="Accuracy",
        caption="Standard error: lm-eval's. draftlab report has paired tests of drafts.",
    )


def category_table(score: Score) -> Table | None:
    """Return the best K by category of prompts, the fastest first; None where prompts have no categories."""
    rows = []
    for row in sorted(category_rows(score), key=lambda row: -(row["speedup"] or 0)):
        gain = optional(row["speedup"], ".2f")
        if row["speedup"] is not None:
            gain += "x" + (f" ({row['speedup_low']:.2f} to {row['speedup_high']:.2f})" if row["prompts"] > 1 else "")
        passes, speed = optional(row["tokens_per_target_pass"], ".2f"), optional(row["output_tps"], ".4g")
        rows.append([row["category"], str(row["prompts"]), passes, speed, gain])
    if not rows:
        return None
    heads = ("prompts", "n", "tokens per\ntarget pass", "tok/s", "speed-up of\nrequests (95%)")
    title = f"{score.name} at K = {score.best_k}, by category of prompts"
    return Table(heads=heads, rows=rows, title=title)


def precision(scores: Sequence[Score]) -> str:
    """Return the precision of both sides and how passes ran, of all scores."""
    by_setting: dict[str, list[str]] = {}
    for score in scores:
        by_setting.setdefault(score.conditions.precision, []).append(score.name)
    if len(by_setting) == 1:
        return next(iter(by_setting))
    return "; ".join(f"{', '.join(names)}: {setting}" for setting, names in by_setting.items())


def markdown(scores: Sequence[Score]) -> str:
    """Return the ranking as Markdown, with verdicts, warnings and conditions."""
    ranking = rank(list(map(candidate_of, scores)))
    ordered = [ranked.candidate.score for ranked in ranking if ranked.candidate.score]
    board = ranking_table(ranking)
    tables = [accuracy_table(ordered), _cost_table(ordered), _conditions_table(ordered)]
    parts = [
        "\n".join(f"- {markdown_text(line)}" for line in verdict_lines(ranking)),
        board.markdown(),
        markdown_text(board.caption),
        "\n".join(f"- **{markdown_text(s.name)}**: {markdown_text(s.verdict())}" for s in ordered),
        "\n".join(f"- Warning: {markdown_text(text)}" for text in score_warnings(scores)),
        *(table.markdown() for table in tables if table),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def html(scores: Sequence[Score], command: str) -> str:
    """Return one page that loads nothing: styles and plots are inside. command: what made the page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from draftlab.results import plots

    ranking = rank(list(map(candidate_of, scores)))
    ordered = [ranked.candidate.score for ranked in ranking if ranked.candidate.score]
    tables = [accuracy_table(ordered), _cost_table(ordered), _conditions_table(ordered)]
    environment = Environment(loader=PackageLoader("draftlab.results"), autoescape=True, undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True
    marks = {score.name: plots.Mark.of(score.name, i) for i, score in enumerate(ordered)}
    speedups = {score.name: {k: score.speedup(k) for k in sorted(score.speculative)} for score in ordered}
    written = environment.get_template("report.html.j2").render(
        target=ordered[0].target.name,
        lines=verdict_lines(ranking),
        warnings=score_warnings(scores),
        board=ranking_table(ranking),
        figures=_figures(ranking, ordered, marks, speedups),
        drafts=[(score, _k_table(score, speedups[score.name]), category_table(score)) for score in ordered],
        tables=[table for table in tables if table],
        marks=marks,
        colours=(plots.COLOURS, plots.DARK_COLOURS),
        page_colour=plots.VARIABLES.__getitem__,
        command=command,
    )
    return written.strip() + "\n"


def json_rows(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """Return one flat row per draft and K, in the order of the scores; metrics have vLLM's names."""
    shown = _accuracy_metric(list(map(candidate_of, scores)))
    return [_json_row(score, k, shown) for score in scores for k in sorted(score.speculative)]


def _accuracy_metric(candidates: Sequence[Candidate]) -> tuple[str, str] | None:
    """Return the first task and metric of accuracy that any draft has: one for all, so that a column mixes no tasks."""
    results = [result for candidate in candidates for result in candidate.tasks]
    return next(((r.task, r.metric) for r in results if r.metric.partition(",")[0] in ACCURACY_METRICS), None)


def _accuracy(tasks: Sequence[TaskResult], shown: tuple[str, str] | None) -> TaskResult | None:
    return next((r for r in tasks if (r.task, r.metric) == shown), None)


def _board_row(ranked: Ranked, shown: tuple[str, str] | None) -> list[str]:
    c, score, ratio = ranked.candidate, ranked.candidate.score, ranked.ratio_to_fastest
    near = ranked.significant is False and not c.output_differs
    name = ("~ " if near else "") + c.name + ("" if score else " (predicted)")
    speeds = [
        three_digits(c.tokens_per_second),
        c.speedup.as_speedup(),
        str(ratio or "–"),
        speedup_text(c.tpot_speedup),
    ]
    if score is None:
        return [name, str(c.k), f"{c.tokens_per_pass:.2f}", "–", *speeds, *["–"] * (len(BOARD_HEADS) - 8)]
    accuracy, shape, latency = _accuracy(c.tasks, shown), score.draft.shape, score.draft.latency[:1]
    error = "" if accuracy is None or accuracy.stderr is None else f" ± {accuracy.stderr:.3f}"
    return [
        name,
        str(c.k),
        f"{c.tokens_per_pass:.2f}",
        f"{score.acceptance(c.k).draft_acceptance_rate:.1%}",
        *speeds,
        milliseconds(score.ttft_ms(c.k)),
        f"{accuracy.value:.3f}{error}" if accuracy else "–",
        optional(score.equal_texts, ".1%"),
        f"{score.conditions.target_weights}/{score.conditions.draft_weights or '–'}",
        "".join(f"{three_digits(x.median_ms)} ({three_digits(x.low_ms)} to {three_digits(x.high_ms)})" for x in latency)
        or "–",
        optional(score.cost_ratio, ".3f"),
        f"{shape.layers} x {shape.hidden}" if shape else "–",
        format_count(shape.params()) if shape else "–",
    ]


def _figures(
    ranking: Sequence[Ranked],
    scores: Sequence[Score],
    marks: "Mapping[str, Mark]",
    speedups: Mapping[str, Mapping[int, Interval]],
) -> list[Figure]:
    from draftlab.results import plots

    key = list(marks.values()) if len(marks) > 1 else []
    board, ks = ranking_table(ranking), sorted({k for by_k in speedups.values() for k in by_k})
    gains = [(marks[r.candidate.name], r.candidate.speedup) for r in ranking]
    by_k = [[name, *(speedup_text(own.get(k)) for k in ks)] for name, own in speedups.items()]
    accepted = {s.name: s.acceptance(s.best_k).per_position_acceptance for s in scores}
    widest = max(map(len, accepted.values()))
    shares = [[name, *(f"{x:.2f}" for x in own), *["–"] * (widest - len(own))] for name, own in accepted.items()]
    figures = [
        Figure(
            svg=plots.plot_ranking(gains),
            table=Table(
                title="Speed-up of each draft",
                heads=("draft", "K", "speed-up (95%)"),
                rows=[[row[0], row[1], row[5]] for row in board.rows],
                caption="Tokens per second of whole requests over those of the target alone, each draft at its best K.",
            ),
        ),
        Figure(
            svg=plots.plot_by_k([(marks[name], own) for name, own in speedups.items()]),
            table=Table(
                title="Speed-up against K",
                heads=("draft", *(f"K = {k}" for k in ks)),
                rows=by_k,
                caption="Whole requests; above the dashed line the draft helps. Bands: 95% bootstrap over prompts.",
            ),
            key=key,
        ),
        Figure(
            svg=plots.plot_positions([(marks[name], own) for name, own in accepted.items()]),
            table=Table(
                title="Acceptance by position",
                heads=("draft", *(str(i + 1) for i in range(widest))),
                rows=shares,
                caption="Share of steps that accepted at least this many drafted tokens, each draft at its best K.",
            ),
            key=key,
        ),
    ]
    return [*figures, *(f for f in (_time_figure(scores, marks), _prompts_figure(scores[0])) if f)]


def _time_figure(scores: Sequence[Score], marks: "Mapping[str, Mark]") -> Figure | None:
    """Return the time of a step by phase, without a draft and with each; None where servers decoded."""
    from draftlab.results import plots

    known = [score for score in scores if score.time_shares(score.best_k)]
    steps: list[tuple[str, Mapping[str, float]]] = []
    rows = []
    for score, k in [*((s, 0) for s in known[:1]), *((s, s.best_k) for s in known)]:
        tokens, speed = score.tokens_per_pass(k) if k else 1.0, score.decode_tps(k)
        if not speed:
            continue
        ms = {phase: 1000 * tokens / speed * share for phase, share in score.time_shares(k).items()}
        name, total = f"{marks[score.name].label}, K = {k}" if k else NO_DRAFT, sum(ms.values())
        steps.append((f"{name}: {tokens:.2f} tokens, {total / tokens:.3g} ms each", ms))
        rows.append([name, *map(three_digits, ms.values()), three_digits(total), f"{tokens:.2f}"])
        rows[-1].append(three_digits(total / tokens))
    if not steps:
        return None
    heads = ("draft", *(f"{mark.name}, ms" for mark in plots.PHASE_MARKS), "step, ms", "tokens", "ms per token")
    caption = "One step at the best K: drafting, the target's pass over what was drafted, and everything else."
    table = Table(title="Where the time of a step goes", heads=heads, rows=rows, caption=caption)
    return Figure(svg=plots.plot_time(steps), table=table, key=plots.PHASE_MARKS)


def _prompts_figure(score: Score) -> Figure | None:
    """Return the speed of each prompt, plain and with the fastest draft; None where there is one prompt."""
    from draftlab.results import plots

    rates = score.prompt_tps(score.best_k)
    if len(rates) < 2:
        return None
    names = {prompt: score.prompts[prompt].category if score.prompts else "" for prompt in rates}
    marks = {name: plots.Mark.of(name or "others", i) for i, name in enumerate(sorted(set(names.values())))}
    rows = [
        [str(prompt), names[prompt] or "–", three_digits(plain), three_digits(drafted), f"{drafted / plain:.2f}x"]
        for prompt, (plain, drafted) in rates.items()
    ]
    table = Table(
        title="Speed-up by prompt",
        heads=("prompt", "category", "tokens/s plain", "tokens/s speculative", "speed-up"),
        rows=rows,
        caption=f"{score.name} at K = {score.best_k}: each whole request at its repeat of median time. Above "
        "the dashed line the draft helps.",
    )
    svg = plots.plot_prompts([(marks[names[prompt]], *pair) for prompt, pair in rates.items()])
    return Figure(svg=svg, table=table, key=[*marks.values()] if len(marks) > 1 else [])


def _k_table(score: Score, speedups: Mapping[int, Interval]) -> Table:
    rows = []
    for k, gain in speedups.items():
        acceptance, shares = score.acceptance(k), score.time_shares(k)
        rows.append(
            [
                str(k),
                gain.as_speedup(),
                speedup_text(score.tpot_speedup(k)),
                optional(score.implied_speedup(k), ".2f"),
                milliseconds(score.ttft_ms(k)),
                f"{score.tokens_per_pass(k):.2f}",
                f"{score.break_even_length(k):.2f}",
                f"{acceptance.draft_acceptance_rate:.1%}",
                "/".join(f"{100 * shares[phase]:.0f}" for phase in PHASES) if shares else "–",
                f"{acceptance.num_spec_steps:,}",
            ]
        )
    heads = ("K", "requests (95%)", "TPOT (95%)", "implied TPOT", "TTFT, ms", "tokens/pass", "break-even")
    heads += ("accept rate", "draft/verify/host, %", "steps")
    return Table(title=f"{score.name} by K", heads=heads, rows=rows, best=list(speedups).index(score.best_k))


def _cost_table(scores: Sequence[Score]) -> Table:
    return Table(
        title="What the drafts cost to make",
        heads=("draft", "minutes", "tokens", "made by"),
        rows=[[score.name, *_cost(score.made)] for score in scores],
        caption="From the records of each draft's directory and of what it was made from, when it was scored.",
    )


def _cost(made: list[Stage] | None) -> list[str]:
    if not made:
        return ["–", "–", "not recorded"] if made is None else ["0", "0", "nothing to make"]
    tokens = sum(stage.tokens or 0 for stage in made)
    steps = []
    for stage in made:
        read = "" if stage.tokens is None else f" ({format_count(stage.tokens)} tokens)"
        steps.append(f"{stage.command} {stage.seconds / 60:,.1f} min{read}")
    minutes = sum(stage.seconds for stage in made) / 60
    return [f"{minutes:,.1f}", format_count(tokens) if tokens else "–", ", ".join(steps)]


def _conditions_table(scores: Sequence[Score]) -> Table:
    """Return each condition with its value or, where drafts differ, with every value and the drafts that have it."""
    identical = {True: "yes", False: "NO", None: "not comparable when sampling"}
    by_fact: dict[str, dict[str, list[str]]] = {}
    for score in scores:
        facts = {"target": score.target.name}
        facts |= {name.replace("_", " "): str(value) for name, value in score.conditions.model_dump().items()}
        facts["output equals the target's own"] = identical[score.identical]
        facts["speed-ups are over weights in"] = score.baseline_weights
        facts["distinct 4-grams"] = f"{score.distinct_4grams:.2f}"
        facts |= score.versions
        for name, value in facts.items():
            by_fact.setdefault(name, {}).setdefault(value, []).append(score.name)
    rows = []
    for name, values in by_fact.items():
        told = [f"{value} ({', '.join(names)})" for value, names in values.items()]
        rows.append([name, next(iter(values)) if len(values) == 1 else "; ".join(told)])
    return Table(title="Conditions", heads=("condition", "value"), rows=rows)


def _json_row(score: Score, k: int, shown: tuple[str, str] | None) -> dict[str, Any]:
    shape, accuracy, shares = score.draft.shape, _accuracy(score.draft.tasks, shown), score.time_shares(k)
    gain = score.speedup(k)
    bits = re.search(r"\d+", score.conditions.dtype)  # a dtype's name ends in its bits
    return {
        "draft": score.name,
        "target": score.target.name,
        "layers": shape and shape.layers,
        "hidden": shape and shape.hidden,
        "params": shape and shape.params(),
        "kv_bytes_per_token": shape.kv_bytes_per_token(int(bits[0]) / 8) if bits and shape else None,
        "draft_ms": score.draft_ms,
        "cost_ratio": score.cost_ratio,
        "num_speculative_tokens": k,
        "best": k == score.best_k,
        **score.acceptance(k).model_dump(),
        "tokens_per_target_pass": score.tokens_per_pass(k),
        **_columns("speedup", gain),
        "speedup_n": gain.n,
        **_columns("tpot_speedup", score.tpot_speedup(k)),
        **_columns("best_k_speedup", score.best_k_speedup),
        **_columns("best_k_tpot_speedup", score.best_k_tpot_speedup),
        "implied_speedup": score.implied_speedup(k),
        "doubt": score.doubt,
        "output_tps": score.output_tps(k),
        "plain_output_tps": score.output_tps(0),
        **{f"plain_output_tps_{weights}": speed for weights, speed in score.plain_tps.items() if score.other_plain},
        **_columns("request_ms", score.request_ms(k)),
        **_columns("plain_request_ms", score.request_ms(0)),
        **_columns("ttft_ms", score.ttft_ms(k)),
        **_columns("plain_ttft_ms", score.ttft_ms(0)),
        **_columns("tpot_ms", score.tpot_ms(k)),
        **_columns("plain_tpot_ms", score.tpot_ms(0)),
        "break_even_length": score.break_even_length(k),
        **{f"{phase}_share": shares.get(phase) for phase in PHASES},
        "accuracy_task": accuracy and accuracy.task,
        "accuracy": accuracy and accuracy.value,
        "accuracy_stderr": accuracy and accuracy.stderr,
        "identical": score.identical,
        "equal_texts": score.equal_texts,
        "baseline_weights": score.baseline_weights,
        "distinct_4grams": score.distinct_4grams,
        **score.conditions.model_dump(),
        "created": score.created,
    }


def _columns(name: str, estimate: Interval | None) -> dict[str, float | None]:
    """Return an estimate and the ends of its interval as three columns."""
    if estimate is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
