"""Scores as people and programs read them: terminal tables, Markdown, one self-contained HTML page, flat JSON rows."""

import re
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich import box
from rich.table import Table
from rich.text import Text

from draftlab.errors import UserError
from draftlab.intervals import Interval
from draftlab.model.shape import Shape, format_count
from draftlab.results import plots
from draftlab.results.plots import Entry
from draftlab.results.score import Latency, Model, Score, TaskResult
from draftlab.results.warnings import score_warnings

BOARD_HEADS = (
    "draft",
    "layers x hidden",
    "parameters",
    "draft ms per token (quartiles)",
    "c",
    "K",
    "acceptance rate",
    "tokens per target pass",
    "tokens/s plain",
    "tokens/s speculative",
    "speed-up (95% interval)",
    "accuracy",
    "KV bytes per token",
)
TERMINAL_HEADS = (
    "draft\nshape, size",
    "draft ms\nc",
    "K",
    "accept\nrate",
    "tokens per\ntarget pass",
    "tok/s\nplain",
    "speed-up\n95%",
    "acc",
    "KV\nbytes",
)
K_HEADS = (
    "K",
    "acceptance\nrate",
    "tokens\nper\ntarget\npass",
    "break\neven",
    "speed-up\n(95% interval)",
    "draft/\nverify/\nhost, %",
    "steps",
    "accepted\nat least\n1, 2, ... K",
)

Rows = list[list[str]]


def score_table(scores: list[Score]) -> Table:
    """One row per draft at its best K, fastest first and marked; any width from 80 columns shows every number."""
    entries, task = _rank(scores), _accuracy_task(scores)
    table = terminal_table(TERMINAL_HEADS, [_terminal_row(e) for e in entries], best=0, flexible=0)
    decoding = "; ".join(dict.fromkeys(s.conditions.decoding for s in scores))
    table.caption = Text(
        f"* fastest, each at its best K, {decoding}. c: one draft pass over one target pass. plain: tok/s without a "
        f"draft. Speed-up: of a K chosen on other prompts, 95% bootstrap interval over prompts, "
        f"n = {_span([e.best_k_speedup.n for e in entries])}. KV bytes: "
        "per token." + (f" acc: {task}." if task else "")
    )
    return table


def k_table(score: Score) -> Table:
    """One row per K of one draft, the best marked."""
    entry = _entry(score, 0, None, every_k=True)
    best = list(entry.speedups).index(entry.k)
    table = terminal_table(K_HEADS, _k_rows(entry), best=best, flexible=len(K_HEADS) - 1)
    table.caption = Text(
        f"{score.name}. * fastest K. Intervals: 95% bootstrap over prompts, n = {entry.best_k_speedup.n}."
    )
    return table


def shape_table(shapes: dict[str, Shape], latency_ms: dict[str, float]) -> Table:
    """One row per named shape: sizes and what it costs to run. latency_ms: of one pass, empty where no law says it."""
    heads = (
        "layers\nx width",
        "heads",
        "ffn",
        "para-\nmeters",
        "in\nblocks",
        "embed-\ndings",
        "KV bytes\nper token",
        "MFLOP\nper token",
        *(["ms, pre-\ndicted"] if latency_ms else []),
    )
    rows = [
        [
            name,
            f"{s.heads}/{s.kv_heads}",
            str(s.ffn),
            format_count(s.params()),
            format_count(s.body_params()),
            f"{1 - s.body_params() / s.params():.0%}",
            f"{s.kv_bytes_per_token():,}",
            f"{s.flops_per_token(0) / 1e6:,.1f}",
            *([f"{latency_ms[name]:.3g}"] if latency_ms else []),
        ]
        for name, s in shapes.items()
    ]
    table = terminal_table(heads, rows, best=-1, flexible=0)
    table.caption = Text(
        "heads: queries/keys. Embeddings: share of the parameters, head and last norm included. KV in bf16."
        + (" Milliseconds of one pass over one token, by the latency law." if latency_ms else "")
    )
    return table


def markdown(scores: list[Score]) -> str:
    """The leaderboard as a Markdown table, then verdicts, warnings and conditions."""
    entries = _rank(scores)
    parts = [
        _plain(_answer(entries)),
        _markdown_table(_board_heads(scores), [_board_row(e) for e in entries]),
        "\n".join(f"- **{_plain(e.score.name)}**: {e.score.verdict()}" for e in entries),
        "\n".join(f"- Warning: {_plain(text)}" for text in score_warnings(scores)),
        _markdown_table(["condition", "value"], _conditions([e.score for e in entries])),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def html(scores: list[Score], command: str) -> str:
    """One page that loads nothing: styles and plots are inside. command: what made the page."""
    entries = _rank(scores, every_k=True)
    ordered = [e.score for e in entries]
    environment = Environment(loader=PackageLoader("draftlab.results"), autoescape=True, undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True
    page = environment.get_template("report.html.j2").render(
        targets=sorted({s.target.name for s in scores}),
        answer=_answer(entries),
        warnings=score_warnings(scores),
        entries=entries,
        board=(_board_heads(scores), [_board_row(e) for e in entries]),
        plots=plots,
        k_heads=K_HEADS,
        k_rows=_k_rows,
        models=_models,
        conditions=_conditions(ordered),
        versions=_agreement(ordered, [s.versions for s in ordered]),
        command=command,
    )
    return page.strip() + "\n"


def json_rows(scores: list[Score]) -> list[dict[str, Any]]:
    """One flat row per draft and K, in the order given; metrics have vLLM's names."""
    task = _accuracy_task(scores)
    entries = [_entry(score, 0, task, every_k=True) for score in scores]
    return [_json_row(entry, k) for entry in entries for k in entry.speedups]


def _rank(scores: Sequence[Score], every_k: bool = False) -> list[Entry]:
    """Fastest first, but a draft that changed the output, or whose rule may, behind every draft that did not."""
    if not scores:
        raise UserError("no scores to report; make one with draftlab score")
    task = _accuracy_task(scores)
    entries = [_entry(score, 0, task, every_k) for score in scores]
    ordered = sorted(entries, key=lambda e: (not e.score.output_differs, e.best_k_speedup.value), reverse=True)
    return [replace(entry, rank=rank) for rank, entry in enumerate(ordered)]


def _entry(score: Score, rank: int, task: str | None, every_k: bool) -> Entry:
    """Takes the speed-ups once: the bootstrap is not free."""
    gains = {k: score.speedup(k) for k in sorted(score.speculative)} if every_k else {}
    accuracy = _accuracy(score.draft, task)
    return Entry(
        score=score, rank=rank, k=score.best_k, best_k_speedup=score.best_k_speedup, speedups=gains, accuracy=accuracy
    )


def _accuracy_task(scores: Sequence[Score]) -> str | None:
    """The first task that any draft has an acc of; one for all, so that a column never mixes tasks."""
    return next((r.task for score in scores for r in score.draft.tasks if r.metric == "acc"), None)


def _accuracy(model: Model, task: str | None) -> TaskResult | None:
    return next((r for r in model.tasks if r.task == task and r.metric == "acc"), None)


def _answer(entries: list[Entry]) -> str:
    """Which draft is fastest, by how much, what limits it, and whether the runner-up is really behind."""
    best, *others = entries
    name, target, gain = best.score.name, best.score.target.name, best.best_k_speedup
    if best.score.output_differs:
        lead = f"No draft here leaves the output of {target} what it is, so no speed-up counts."
    elif gain.low > 1:
        lead = f"With {name} as its draft, {target} writes {gain.value:.2f} times as many tokens per second as alone."
    elif gain.high < 1:
        lead = f"No draft here helps {target}: even with the best, {name}, it keeps {gain.value:.0%} of its own speed."
    else:
        lead = f"No draft here makes {target} clearly faster; {name} comes nearest."
    parts = [lead, best.score.verdict()]
    if others:
        second = others[0].best_k_speedup
        near = "; the two intervals overlap, so this run does not tell them apart" if second.high >= gain.low else ""
        parts.append(f"Next of {len(entries)} drafts is {others[0].score.name} at {_gain_text(second)}{near}.")
    return " ".join(parts)


def _board_heads(scores: Sequence[Score]) -> list[str]:
    task = _accuracy_task(scores)
    return [f"acc, {task}" if head == "accuracy" and task else head for head in BOARD_HEADS]


def _board_row(entry: Entry) -> list[str]:
    score, accuracy, shape, kv = entry.score, entry.accuracy, entry.score.draft.shape, _kv_bytes(entry.score)
    return [
        score.name,
        f"{shape.layers} x {shape.hidden}" if shape else "–",
        format_count(shape.params()) if shape else "–",
        _latency_text(score.draft.latency[0]) if score.draft.latency else "–",
        _ratio_text(score.cost_ratio),
        str(entry.k),
        f"{score.acceptance(entry.k).draft_acceptance_rate:.1%}",
        f"{entry.tokens_per_pass:.2f}",
        _digits(score.output_tps(0)),
        _digits(score.output_tps(entry.k)),
        _gain_text(entry.best_k_speedup),
        _task_text(accuracy) if accuracy else "–",
        "–" if kv is None else f"{kv:,}",
    ]


def _terminal_row(entry: Entry) -> list[str]:
    """The leaderboard's cells in half the width: two lines each, as in their heads, and no quartiles."""
    score, shape, gain = entry.score, entry.score.draft.shape, entry.best_k_speedup
    interval = f"{gain.low:.2f}-{gain.high:.2f}" if gain.n > 1 else "n = 1"
    step, kv = score.draft_ms, _kv_bytes(score)
    return [
        f"{score.name}\n{shape.layers}x{shape.hidden}, {format_count(shape.params())}" if shape else score.name,
        "–" if step is None else f"{_digits(step)}\n{_ratio_text(score.cost_ratio)}",
        str(entry.k),
        f"{score.acceptance(entry.k).draft_acceptance_rate:.1%}",
        f"{entry.tokens_per_pass:.2f}",
        f"{_digits(score.output_tps(entry.k))}\n{_digits(score.output_tps(0))}",
        f"{gain.value:.2f}x\n{interval}",
        f"{entry.accuracy.value:.3f}" if entry.accuracy else "–",
        "–" if kv is None else format_count(kv),
    ]


def _k_rows(entry: Entry) -> Rows:
    rows = []
    for k, gain in entry.speedups.items():
        acceptance, split = entry.score.acceptance(k), entry.score.time_shares(k)
        rows.append(
            [
                str(k),
                f"{acceptance.draft_acceptance_rate:.1%}",
                f"{entry.score.tokens_per_pass(k):.2f}",
                f"{entry.score.break_even_length(k):.2f}",
                _gain_text(gain),
                "/".join(f"{100 * split[phase]:.0f}" for phase in plots.PHASES) if split else "–",
                f"{acceptance.num_spec_steps:,}",
                " ".join(f"{share:.2f}" for share in acceptance.per_position_acceptance),
            ]
        )
    return rows


def _json_row(entry: Entry, k: int) -> dict[str, Any]:
    score, shape, gain, accuracy = entry.score, entry.score.draft.shape, entry.speedups[k], entry.accuracy
    return {
        "draft": score.name,
        "target": score.target.name,
        "layers": shape and shape.layers,
        "hidden": shape and shape.hidden,
        "params": shape and shape.params(),
        "kv_bytes_per_token": _kv_bytes(score),
        "draft_ms": score.draft_ms,
        "cost_ratio": score.cost_ratio,
        "num_speculative_tokens": k,
        "best": k == entry.k,
        **score.acceptance(k).model_dump(),
        "tokens_per_target_pass": score.tokens_per_pass(k),
        "speedup": gain.value,
        "speedup_low": gain.low,
        "speedup_high": gain.high,
        "speedup_n": gain.n,
        "best_k_speedup": entry.best_k_speedup.value,
        "best_k_speedup_low": entry.best_k_speedup.low,
        "best_k_speedup_high": entry.best_k_speedup.high,
        "output_tps": score.output_tps(k),
        "plain_output_tps": score.output_tps(0),
        "break_even_length": score.break_even_length(k),
        **{f"{phase}_share": score.time_shares(k).get(phase) for phase in plots.PHASES},
        "accuracy_task": accuracy and accuracy.task,
        "accuracy": accuracy and accuracy.value,
        "accuracy_stderr": accuracy and accuracy.stderr,
        "identical": score.identical,
        "distinct_4grams": score.distinct_4grams,
        **score.conditions.model_dump(),
        "created": score.created,
    }


def _models(score: Score) -> Rows:
    """Draft and target side by side: what they are, how long a pass takes, what they score."""
    draft, target = (
        {
            "model": model.name,
            "shape": model.shape.describe() if model.shape else "–",
            "sha256": (model.sha256 or "–")[:12],
        }
        | {f"ms, tokens fed: {x.width}": f"{_latency_text(x)}, n = {x.n}" for x in model.latency}
        | {f"{r.task}, {r.metric}": _task_text(r) for r in model.tasks}
        for model in (score.draft, score.target)
    )
    rows = [[name, draft.get(name, "–"), target.get(name, "–")] for name in dict.fromkeys([*draft, *target])]
    return rows + [[f"{r.task}, {r.metric}, with the draft", "–", _task_text(r)] for r in score.speculative_tasks]


def _conditions(scores: Sequence[Score]) -> Rows:
    identical = {True: "yes", False: "NO", None: "not comparable when sampling"}
    facts = [
        {"target": s.target.name}
        | {name.replace("_", " "): str(value) for name, value in s.conditions.model_dump().items()}
        | {"output equals the target's own": identical[s.identical], "distinct 4-grams": f"{s.distinct_4grams:.2f}"}
        for s in scores
    ]
    return _agreement(scores, facts)


def _agreement(scores: Sequence[Score], facts: Sequence[dict[str, str]]) -> Rows:
    """Each fact with its value or, where drafts differ, with every value and the drafts that have it."""
    rows = []
    for name in dict.fromkeys(name for column in facts for name in column):
        holders: dict[str, list[str]] = {}
        for score, column in zip(scores, facts, strict=True):
            holders.setdefault(column.get(name, "–"), []).append(score.name)
        values = list(holders) if len(holders) == 1 else [f"{v} ({', '.join(who)})" for v, who in holders.items()]
        rows.append([name, "; ".join(values)])
    return rows


def terminal_table(heads: Sequence[str], rows: Rows, best: int, flexible: int) -> Table:
    """flexible: the one column that gives way on a narrow terminal."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, caption_justify="left")
    for i, head in enumerate(heads):
        justify = "left" if i == flexible else "right"
        table.add_column(head, justify=justify, no_wrap=i != flexible, overflow="fold", vertical="top")
    for i, cells in enumerate(rows):
        first = f"* {cells[0]}" if i == best else cells[0]
        table.add_row(*map(Text, (first, *cells[1:])), style="bold green" if i == best else None)
    return table


def _markdown_table(heads: Sequence[str], rows: Rows) -> str:
    rule = ["---"] + ["---:"] * (len(heads) - 1)
    return "\n".join("| " + " | ".join(map(_plain, row)) + " |" for row in (heads, rule, *rows))


def _plain(text: str) -> str:
    """Text that Markdown shows as it is: no HTML, no new cell, no new line."""
    return escape(" ".join(text.split()), quote=False).replace("|", "\\|")


def _gain_text(gain: Interval) -> str:
    """One prompt has no spread to resample."""
    return f"{gain.value:.2f}x " + (f"({gain.low:.2f} to {gain.high:.2f})" if gain.n > 1 else "(n = 1)")


def _latency_text(latency: Latency) -> str:
    return f"{_digits(latency.median_ms)} ({_digits(latency.low_ms)} to {_digits(latency.high_ms)})"


def _task_text(result: TaskResult) -> str:
    return f"{result.value:.3f}" + ("" if result.stderr is None else f" ± {result.stderr:.3f}")


def _ratio_text(c: float | None) -> str:
    return "–" if c is None else f"{c:.3f}"


def _kv_bytes(score: Score) -> int | None:
    """The cache has the dtype of the run, whose name ends in its bits; None where dtype or shape are not known."""
    bits, shape = re.search(r"\d+", score.conditions.dtype), score.draft.shape
    return shape.kv_bytes_per_token(int(bits[0]) / 8) if bits and shape else None


def _digits(value: float) -> str:
    """Three significant digits, never an exponent."""
    return f"{value:#.3g}".rstrip(".") if value < 999.5 else f"{value:,.0f}"


def _span(values: Sequence[int]) -> str:
    return str(min(values)) if min(values) == max(values) else f"{min(values)} to {max(values)}"
