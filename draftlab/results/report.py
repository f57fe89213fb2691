"""Reports of scores: tables, Markdown, a self-contained HTML page, and flat JSON rows."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftlab.errors import UserError
from draftlab.intervals import FEWEST, Interval
from draftlab.model import hub
from draftlab.model.shape import format_count
from draftlab.quantities import format_duration, format_number
from draftlab.reading import command_words
from draftlab.results.ranking import (
    NO_DRAFT,
    Group,
    Ranked,
    category_rows,
    flat,
    grouped,
    overall,
    score_warnings,
    verdict_lines,
)
from draftlab.results.score import MILLISECONDS, RATES, Score, Seconds, TaskResult
from draftlab.results.tables import (
    Table,
    markdown_text,
    milliseconds,
    optional,
    page_template,
    speedup_text,
)
from draftlab.runs.provenance import Stage
from draftlab.shell import typed

if TYPE_CHECKING:
    from markupsafe import Markup

    from draftlab.results.plots import Mark

PHASES = ("draft", "verify", "host")
# names of metrics in lm-eval, without the name of a filter
ACCURACY_METRICS = ("acc", "exact_match")
WIDE = frozenset(
    {
        "TTFT,\nms",
        "TTFT,\nCPU ms",
        "weights, target/draft",
        "draft ms per pass",
        "draft CPU ms per pass",
        "layers x hidden",
        "parameters",
    }
)
TIED = "~ "  # before the name of a draft that is not shown to be slower than the fastest draft
# heads of columns
SPEEDUP = "speed-up\n(95%)"
RELATIVE = "relative\nto best"
TPOT = "TPOT\n(95%)"
# heads of the columns with tokens per second of whole requests
RATE_HEADS: dict[Seconds, str] = {"cpu": "tok per\nCPU s", "wall": "tok/s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A plot, with a table of its values. key: Colours and markers that the page explains next to the plot."""

    svg: "Markup"
    table: Table
    key: "Sequence[Mark]" = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A ranking on a page, under its plot, with sentences about it.

    Args:
        first: Plot of the speed-ups.
        figures: Plots for the details.
    """

    first: Figure
    table: Table
    lines: Sequence[str]
    figures: Sequence[Figure]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision that a report explains, in place of the verdict on the fastest draft.

    Args:
        answer: Sentence with which the report opens.
        tables: Tables about the decision.
        lists: Sentences by the title of their section.
    """

    answer: str
    tables: Sequence[Table]
    lists: Mapping[str, Sequence[str]]


def ranking_table(group: Group) -> Table:
    """Return a table with rows for all drafts and for plain decoding, the fastest first.

    Drafts that changed the output are last. The first row is marked as the best, unless the fastest draft kept the
    output but its score is in doubt.
    """
    scores = group.scores
    seconds = group.seconds
    shown = _accuracy_metric(scores)
    rows = []
    for ranked in group.ranking:
        score = ranked.score
        rows.append(
            (
                score.output_differs,
                not score.timed,
                -ranked.speedup.value,
                _board_row(ranked, shown),
            )
        )
    heads = dict.fromkeys(chain.from_iterable(cells for *_, cells in rows), "")
    for plain in group.plain:
        cells = heads | {
            "draft": plain.name,
            "tokens\nper pass": "1.00",
            RATE_HEADS[seconds]: format_number(plain.tokens_per_second),
            SPEEDUP: f"{plain.speedup:.2f}x" if plain.timed else f"≈ {plain.speedup:.2f}x",
        }
        rows.append((False, not plain.timed, -plain.speedup, cells))
    rows.sort(key=lambda row: row[:3])
    first = group.ranking[0]
    praised = first.doubt is None or first.score.output_differs
    table = Table.of(
        [row for *_, row in rows],
        title=_titled("Ranking", group),
        best=0 if praised else None,
        wide=WIDE,
    )
    return replace(table, caption=" ".join(_explained(group, table, shown)))


def _explained(group: Group, table: Table, shown: tuple[str, str] | None) -> Iterator[str]:
    """Yield sentences about the marks and columns that a ranking has, and about how it was measured.

    shown: Task and metric of the column with accuracy.
    """
    scores = group.scores
    cells = list(chain.from_iterable(table.rows))
    if table.best is not None:
        yield "* Fastest."
    if any(cell.startswith(TIED) for cell in cells):
        yield "~ Not shown to be slower than the fastest draft."
    if len(scores) > 1:
        yield (
            "Each row has the draft's own speed-up at its best K, chosen on other requests. That of the fastest row "
            "may exceed the gain of choosing it, which the text names."
        )
    yield "speed-up: speed of whole requests (prefill and decoding), divided by that of the baseline."
    yield f"Baseline: {NO_DRAFT}, {group.baseline}."
    if RELATIVE in table.heads:
        yield "relative to best: speed-up divided by the fastest draft's speed-up."
    if TPOT in table.heads:
        yield "TPOT: speed-up of the tokens after the first."
    yield "Intervals: 95% over conversations."
    yield f"{RATE_HEADS[group.seconds]}: {RATES[group.seconds]} of whole requests.".replace("\n", " ")
    if any(cell.startswith("≈") for cell in cells):
        yield predicted_caption(scores)
    if shown:
        yield f"accuracy: {shown[1]} of {shown[0]}."
    decoding = "; ".join(dict.fromkeys(score.conditions.decoding for score in scores))
    yield f"Decoding: {decoding}. How both sides ran: {precision(scores)}."


def gain_at(score: Score, k: int, gain: Interval) -> str:
    """Return a speed-up at K as text: with its interval, or marked as predicted if nothing was timed at this K."""
    return gain.as_speedup() if score.is_timed(k) else f"≈ {gain.value:.2f}x"


def predicted_caption(scores: Sequence[Score]) -> str:
    """Return text about rows that were not timed, and about the error of their predicted speed-ups."""
    errors = [s.prediction.error for s in scores if s.prediction and s.prediction.error is not None]
    text = "≈: not timed, but predicted from a replay and the time of single passes"
    return f"{text} (off by up to {max(errors):.1%} where drafts were timed)." if errors else f"{text}."


def _titled(title: str, group: Group) -> str:
    return f"{title}: {group.name}" if group.name else title


def overall_lines(groups: Sequence[Group]) -> list[str]:
    """Return the sentence about the fastest way of all groups, or [] if there is one group."""
    return [overall(groups).line] if len(groups) > 1 else []


def accuracy_table(scores: Sequence[Score]) -> Table | None:
    """Return a table with one row per task, metric and model, or None if no task was evaluated."""
    models = {score.draft.name: score.draft for score in scores}
    models |= {score.target.name: score.target for score in scores}
    rows = []
    for name, model in models.items():
        for r in model.tasks:
            error = optional(r.stderr, ".4f")
            cut = f"{r.truncated} of {r.requests}" if r.truncated else "0"
            rows.append([r.task, r.metric, name, f"{r.value:.4f}", error, str(r.n), cut])
    if not rows:
        return None
    heads = ["task", "metric", "model", "value", "standard\nerror", "items"]
    caption = "The standard errors are those of lm-eval."
    if any(r.truncated for model in models.values() for r in model.tasks):
        heads.append("truncated\nrequests")
        caption += (
            " Truncated requests lost their start, because the model's context is too short. Models with different "
            "truncation read different prompts, so they are not compared item by item."
        )
    return Table(
        heads=heads,
        rows=sorted((row[: len(heads)] for row in rows), key=lambda row: (row[0], row[1])),
        title="Accuracy",
        caption=caption,
    )


def category_table(score: Score) -> Table | None:
    """Return a table with one row per category of prompts, the fastest first, or None without categories.

    K is the best K over all prompts.
    """
    rows = []
    for row in sorted(category_rows(score), key=lambda row: -(row["speedup"] or 0)):
        gain = "–"
        if row["speedup"] is not None:
            gain = f"{row['speedup']:.2f}x"
            if row["conversations"] >= FEWEST:
                gain += f" ({row['speedup_low']:.2f} to {row['speedup_high']:.2f})"
        passes = optional(row["tokens_per_target_pass"], ".2f")
        speed = optional(row["output_tps"], ".4g")
        rows.append([row["category"], str(row["prompts"]), passes, speed, gain])
    if not rows:
        return None
    rate = RATE_HEADS[score.seconds]
    heads = ("prompts", "n", "tokens per\ntarget pass", rate, "speed-up of\nrequests (95%)")
    title = f"{score.name} at K = {score.best_k}, by category of prompts"
    return Table(heads=heads, rows=rows, title=title)


def precision(scores: Sequence[Score]) -> str:
    """Return text about the precision of target, draft and activations, and the mode of passes.

    If scores differ in these settings, the text names the drafts with each setting.
    """
    by_setting: dict[str, list[str]] = {}
    for score in scores:
        by_setting.setdefault(score.conditions.precision, []).append(score.label)
    if len(by_setting) == 1:
        return next(iter(by_setting))
    return "; ".join(f"{', '.join(names)}: {setting}" for setting, names in by_setting.items())


def markdown(scores: Sequence[Score]) -> str:
    """Return a report as Markdown: the rankings, with verdicts, warnings and conditions."""
    groups = grouped(scores)
    ordered = [score for group in groups for score in group.scores]
    parts = []
    for group in groups:
        board = ranking_table(group)
        parts += [
            f"## {markdown_text(board.title)}" if group.name else "",
            "\n".join(f"- {markdown_text(line)}" for line in verdict_lines(group.ranking)),
            board.markdown(),
            markdown_text(board.caption),
        ]
    parts += [
        "## All groups" if len(groups) > 1 else "",
        *map(markdown_text, overall_lines(groups)),
        "\n".join(f"- **{markdown_text(s.label)}**: {markdown_text(s.verdict())}" for s in ordered),
        "\n".join(f"- Warning: {markdown_text(text)}" for text in score_warnings(scores)),
        *(table.markdown() for table in _last_tables(ordered)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def html(
    scores: Sequence[Score],
    command: str,
    serve: str | None = None,
    decision: Decision | None = None,
) -> str:
    """Return a report as an HTML page that loads no other file: styles and plots are part of the page.

    Args:
        command: Command that made the page.
        serve: Command that serves the target with the fastest draft, or "". Default: the result of export_command.
        decision: Default: the verdict on the fastest draft.
    """
    from draftlab.results import plots

    groups = grouped(scores)
    ordered = [score for group in groups for score in group.scores]
    marks = {score.label: plots.Mark.of(score.label, i) for i, score in enumerate(ordered)}
    speedups = {s.label: {k: s.speedup(k) for k in s.ks} for s in ordered}
    boards = []
    for group in groups:
        first, *figures = _figures(group, marks, speedups)
        lines = verdict_lines(group.ranking)
        boards.append(Board(first=first, table=ranking_table(group), lines=lines, figures=figures))
    if decision is None:
        answer = (overall_lines(groups) or verdict_lines(groups[0].ranking))[0]
        decision = Decision(answer=answer, tables=[], lists={})
    written = page_template("report.html.j2").render(
        target=ordered[0].target.name,
        answer=decision.answer,
        serve=export_command(groups) if serve is None else serve,
        lists=decision.lists,
        warnings=score_warnings(scores),
        boards=boards,
        drafts=[(score, _k_table(score, speedups[score.label]), category_table(score)) for score in ordered],
        tables=[*decision.tables, *_last_tables(ordered)],
        marks=marks,
        colours=(plots.COLOURS, plots.DARK_COLOURS),
        page_colour=plots.VARIABLES.__getitem__,
        command=command,
    )
    return written.strip() + "\n"


def _last_tables(scores: Sequence[Score]) -> list[Table]:
    tables = (accuracy_table(scores), _cost_table(scores), _conditions_table(scores))
    return [table for table in tables if table]


def fastest_draft(groups: Sequence[Group]) -> Ranked | None:
    """Return the fastest draft of the only group, or of all groups if it is the fastest way of all. Otherwise None."""
    if len(groups) == 1:
        return groups[0].ranking[0]
    way = overall(groups).way
    first = [group.ranking[0] for group in groups]
    return next((ranked for ranked in first if way and way.k and ranked.score is way.score), None)


def export_command(groups: Sequence[Group]) -> str:
    """Return the command that exports the fastest draft for vLLM, or "" if there is nothing to export.

    There is nothing to export if the draft changed the output, if its gain is in doubt or not significant, if it was
    measured on servers, if it is not a checkpoint that the score's command names with --draft, or if no draft is the
    fastest of all groups.
    """
    fastest = fastest_draft(groups)
    if fastest is None or fastest.doubt or fastest.score.output_differs or not fastest.gain.above(1):
        return ""
    score = fastest.score
    named = _named(score, "--draft")
    drafts = [draft for draft in named if draft.endswith(score.draft.name)]
    if not drafts or score.draft.sha256 is None or score.served:
        return ""
    draft = drafts[0]
    form = ["vllm"]
    base, _, rounded = draft.rpartition("@")
    if rounded in hub.ROUNDED:  # a type of GGUF files
        draft = base
        form = ["llama.cpp", "--outtype", rounded]
    words = ["draftlab", "export", Path(draft)]
    if target := target_named(score):
        words += ["--target", target]
    return typed(*words, "--to", *form, "--k", fastest.k)


def target_named(score: Score) -> str | None:
    """Return the value of --target in the command that made a score, or None if the command has no --target."""
    return next(iter(_named(score, "--target")), None)


def _named(score: Score, option: str) -> list[str]:
    """Return all values of an option in the command that made a score."""
    try:
        words = command_words(score.command)
    except UserError:  # the file is another's
        return []
    return [value for name, value in pairwise(words) if name == option]


def json_rows(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """Return one flat JSON row per draft and K, in the order of the scores. Metrics have vLLM's names."""
    shown = _accuracy_metric(scores)
    rows = []
    for score in scores:
        rows += [_json_row(score, k, shown) for k in score.ks]
    return rows


def _accuracy_metric(scores: Sequence[Score]) -> tuple[str, str] | None:
    """Return the first task and accuracy metric that any draft has, or None. The ranking shows only this task."""
    for score in scores:
        for result in score.draft.tasks:
            if result.metric.partition(",")[0] in ACCURACY_METRICS:
                return result.task, result.metric
    return None


def _accuracy(tasks: Sequence[TaskResult], shown: tuple[str, str] | None) -> TaskResult | None:
    return next((r for r in tasks if (r.task, r.metric) == shown), None)


def _board_row(ranked: Ranked, shown: tuple[str, str] | None) -> dict[str, str]:
    """Return the cells of a draft's row in the ranking, by column head."""
    score = ranked.score
    k = ranked.k
    tie = TIED if ranked.significant is False and not score.output_differs else ""
    ratio = ranked.ratio_to_fastest
    ms = MILLISECONDS[score.seconds]
    row = {
        "draft": f"{tie}{score.label}",
        "K": str(k),
        "tokens\nper pass": f"{score.tokens_per_pass(k):.2f}",
        "accept\nrate": f"{score.acceptance(k).draft_acceptance_rate:.1%}",
        RATE_HEADS[score.seconds]: format_number(score.output_tps(k)),
        SPEEDUP: gain_at(score, k, ranked.speedup),
        RELATIVE: "" if ratio is None else str(ratio),
        TPOT: speedup_text(score.best_k_tpot_speedup),
        f"TTFT,\n{ms}": milliseconds(score.ttft_ms(k)),
        "accu-\nracy": "",
        "equal\ntexts": optional(score.equal_texts, ".1%") if score.output_differs else "",
        "weights, target/draft": f"{score.conditions.target_weights}/{score.conditions.draft_weights or '–'}",
    }
    if (accuracy := _accuracy(score.draft.tasks, shown)) is not None:
        error = "" if accuracy.stderr is None else f" ± {accuracy.stderr:.3f}"
        row["accu-\nracy"] = f"{accuracy.value:.3f}{error}"
    if score.draft_ms is not None:
        row[f"draft {ms} per pass"] = format_number(score.draft_ms)
    if (shape := score.draft.shape) is not None:
        row |= {
            "layers x hidden": f"{shape.layers} x {shape.hidden}",
            "parameters": format_count(shape.used_params()),
        }
    return row


def _figures(group: Group, marks: "Mapping[str, Mark]", speedups: Mapping[str, Mapping[int, Interval]]) -> list[Figure]:
    """Return the plots of a group. The plot of the ranking is first.

    marks, speedups: Mark, and speed-up by K, for the label of each draft of the page.
    """
    from draftlab.results import plots

    scores = group.scores
    key = [marks[score.label] for score in scores] if len(marks) > 1 else []
    accepted = {score.label: score.acceptance(score.best_k).per_position_acceptance for score in scores}
    k_rows = []
    position_rows = []
    by_label = {score.label: score for score in scores}
    predicted = any(not score.is_timed(k) for score in scores for k in score.ks)
    unsure = " ≈: predicted, not timed." if predicted else ""
    for name in accepted:
        score = by_label[name]
        gains = {f"K = {k}": gain_at(score, k, gain) for k, gain in speedups[name].items()}
        shares = {str(i): f"{share:.2f}" for i, share in enumerate(accepted[name], 1)}
        k_rows.append({"draft": name, **gains})
        position_rows.append({"draft": name, **shares})
    figures = [
        Figure(
            svg=plots.plot_ranking(
                [(_marked(marks[ranked.score.label], ranked.score), ranked.speedup) for ranked in group.ranking],
                NO_DRAFT if len(group.plain) == 1 else f"{NO_DRAFT}, {group.baseline}",
            ),
            table=Table(
                heads=(),
                rows=[],  # the table of the ranking has the values
                title=_titled("Speed-up of each draft", group),
                caption="Speed-up of whole requests: tokens per second with the draft, divided by tokens per second "
                f"of the baseline: {NO_DRAFT}, {group.baseline}. Each draft has its best K.{unsure}",
            ),
        ),
        Figure(
            svg=plots.plot_by_k([(marks[name], speedups[name]) for name in accepted]),
            table=Table.of(
                k_rows,
                title=_titled("Speed-up against K", group),
                caption="Speed-up of whole requests by K, the number of drafted tokens. Above the dashed line the "
                f"draft helps. Bands are 95% intervals over conversations.{unsure}",
            ),
            key=key,
        ),
        Figure(
            svg=plots.plot_positions([(marks[name], shares) for name, shares in accepted.items()]),
            table=Table.of(
                position_rows,
                title=_titled("Acceptance by position", group),
                caption="Fraction of target passes that accepted at least this number of drafted tokens. Each draft "
                "has its best K.",
            ),
            key=key,
        ),
    ]
    time = _time_figure(group)
    return figures if time is None else [*figures, time]


def _marked(mark: "Mark", score: Score) -> "Mark":
    """Return the mark of a draft, with a sign before its name if its speed-up was not timed."""
    return mark if score.timed else replace(mark, name=f"≈ {mark.name}")


def _time_figure(group: Group) -> Figure | None:
    """Return the plot of the time of a step by phase, without a draft and with each draft at its best K.

    If servers decoded, return None.
    """
    from draftlab.results import plots

    scores = group.scores
    unit = MILLISECONDS[group.seconds]
    steps: list[tuple[str, Mapping[str, float]]] = []
    rows = []
    timed = [score for score in scores if score.timed]
    for score, k in [(scores[0], 0), *((score, score.best_k) for score in timed)]:
        tokens = score.tokens_per_pass(k) if k else 1.0
        if not (speed := score.decode_tps(k)):
            continue
        ms = {phase: 1000 * tokens / speed * share for phase, share in score.time_shares(k).items()}
        name = f"{score.label}, K = {k}" if k else NO_DRAFT
        total = sum(ms.values())
        each = format_number(total / tokens)
        steps.append((f"{plots.short(name)}: {tokens:.2f} tokens, {each} {unit} each", ms))
        row = {"draft": name}
        for phase, mark in plots.PHASES.items():
            row[f"{mark.name}, {unit}"] = format_number(ms[phase])
        row |= {
            f"step, {unit}": format_number(total),
            "tokens": f"{tokens:.2f}",
            f"{unit} per token": each,
        }
        rows.append(row)
    if not steps:
        return None
    caption = "Time of one step at the best K: drafting, the target's pass that verifies, and all other work."
    title = _titled("Where the time of a step goes", group)
    table = Table.of(rows, title=title, caption=caption)
    return Figure(svg=plots.plot_time(steps, unit), table=table, key=list(plots.PHASES.values()))


def _k_table(score: Score, speedups: Mapping[int, Interval]) -> Table:
    rows = []
    for k, gain in speedups.items():
        acceptance = score.acceptance(k)
        shares = score.time_shares(k)
        rows.append(
            {
                "K": str(k),
                "speed-up (95%)": gain_at(score, k, gain),
                "TPOT (95%)": speedup_text(score.tpot_speedup(k)),
                "implied TPOT": optional(score.implied_speedup(k), ".2f"),
                f"TTFT, {MILLISECONDS[score.seconds]}": milliseconds(score.ttft_ms(k)),
                "tokens/pass": f"{score.tokens_per_pass(k):.2f}",
                "break-even": f"{score.break_even_length(k):.2f}",
                "accept rate": f"{acceptance.draft_acceptance_rate:.1%}",
                "draft/verify/host, %": "/".join(f"{100 * share:.0f}" for share in shares.values()),
                "steps": f"{acceptance.num_spec_steps:,}",
            }
        )
    return Table.of(rows, title=f"{score.label} by K", best=list(speedups).index(score.best_k))


def _cost_table(scores: Sequence[Score]) -> Table:
    return Table(
        title="What the drafts cost to make",
        heads=("draft", "minutes", "tokens", "made by"),
        rows=[[score.label, *_cost(score.made)] for score in scores],
        caption="The commands that made each draft from its source, from the records at the time of the score. The "
        "training of the source and of the target does not count.",
    )


def _cost(made: list[Stage] | None) -> list[str]:
    if not made:
        return ["–", "–", "not recorded"] if made is None else ["0", "0", "nothing to make"]
    tokens = sum(stage.tokens or 0 for stage in made)
    steps = []
    for stage in made:
        read = "" if stage.tokens is None else f" ({format_count(stage.tokens)} tokens)"
        steps.append(f"{stage.command} {format_duration(stage.seconds)}{read}")
    minutes = sum(stage.seconds for stage in made) / 60
    return [f"{minutes:,.1f}", format_count(tokens) if tokens else "–", ", ".join(steps)]


def _conditions_table(scores: Sequence[Score]) -> Table:
    """Return a table of all conditions. If drafts differ in a condition, its row names the drafts with each value."""
    identical = {True: "yes", False: "NO", None: "not comparable when sampling"}
    by_fact: dict[str, dict[str, list[str]]] = {}
    for score in scores:
        facts = {"target": score.target.name}
        for name, value in score.conditions.model_dump(exclude_none=True).items():
            if value is not False:
                facts[name.replace("_", " ")] = "yes" if value is True else str(value)
        facts["output equals the target's own"] = identical[score.identical]
        facts["weights of the baseline (no draft)"] = score.baseline_weights
        facts["distinct 4-grams"] = f"{score.distinct_4grams:.2f}"
        facts |= score.versions
        for name, value in facts.items():
            by_fact.setdefault(name, {}).setdefault(value, []).append(score.label)
    rows = []
    for name, values in by_fact.items():
        told = [f"{value} ({', '.join(names)})" for value, names in values.items()]
        rows.append([name, next(iter(values)) if len(values) == 1 else "; ".join(told)])
    return Table(title="Conditions", heads=("condition", "value"), rows=rows)


def _json_row(score: Score, k: int, shown: tuple[str, str] | None) -> dict[str, Any]:
    shape = score.draft.shape
    shares = score.time_shares(k)
    accuracy = _accuracy(score.draft.tasks, shown)
    bits = re.search(r"\d+", score.conditions.dtype)  # the name of a dtype has its number of bits
    estimates = {
        "speedup": score.speedup(k),
        "tpot_speedup": score.tpot_speedup(k),
        "best_k_speedup": score.best_k_speedup,
        "best_k_tpot_speedup": score.best_k_tpot_speedup,
        "request_ms": score.request_ms(k),
        "ttft_ms": score.ttft_ms(k),
        "tpot_ms": score.tpot_ms(k),
        "plain_request_ms": score.request_ms(0),
        "plain_ttft_ms": score.ttft_ms(0),
        "plain_tpot_ms": score.tpot_ms(0),
    }
    row: dict[str, Any] = {
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
        "implied_speedup": score.implied_speedup(k),
        "timed": score.is_timed(k),
        "prediction_error": score.prediction and score.prediction.error,
        "doubt": score.doubt,
        "seconds": score.seconds,
        "output_tps": score.output_tps(k),
        "plain_output_tps": score.output_tps(0),
        "break_even_length": score.break_even_length(k),
        **{f"{phase}_share": shares.get(phase) for phase in PHASES},
        "accuracy": accuracy and accuracy.value,
        "accuracy_stderr": accuracy and accuracy.stderr,
        "identical": score.identical,
        "equal_texts": score.equal_texts,
        "baseline_weights": score.baseline_weights,
        "distinct_4grams": score.distinct_4grams,
        **score.conditions.model_dump(),
        "created": score.created,
    }
    if score.other_plain:
        row |= {f"plain_output_tps_{weights}": speed for weights, speed in score.plain_tps.items()}
    if score.rounding is not None:
        row |= {"int8_kl": score.rounding.kl, "int8_top1": score.rounding.top1}
    for name, estimate in estimates.items():
        row |= flat(name, estimate)
    return row
