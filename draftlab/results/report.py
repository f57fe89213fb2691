"""Scores as Markdown, as one self-contained HTML page, and as flat JSON rows."""

from collections.abc import Sequence
from html import escape
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from draftlab.intervals import Interval
from draftlab.model.shape import format_count
from draftlab.results import page, plots
from draftlab.results.leaderboard import (
    COLOURS,
    DARK_COLOURS,
    Entry,
    Plain,
    accuracy_metric,
    entries_of,
    leaderboard,
    plain_rows,
    precision,
    with_plain,
)
from draftlab.results.score import Latency, Score, TaskResult
from draftlab.results.tables import Rows, kv_bytes, milliseconds, optional, three_digits
from draftlab.results.warnings import score_warnings

BOARD_HEADS = (
    "draft",
    "speed-up of requests (95% interval)",
    "TPOT speed-up (95% interval)",
    "TTFT, ms",
    "tokens/s speculative",
    "tokens/s plain",
    "K",
    "tokens per target pass",
    "acceptance rate",
    "weights, target/draft",
    "equal texts",
    "draft ms per token (quartiles)",
    "c",
    "layers x hidden",
    "parameters",
    "accuracy",
    "KV bytes per token",
)
K_HEADS = (
    "K",
    "speed-up of\nrequests\n(95% interval)",
    "TPOT\nspeed-up\n(95% interval)",
    "implied\nTPOT\nspeed-up",
    "TTFT,\nms",
    "tokens\nper\ntarget\npass",
    "break\neven",
    "acceptance\nrate",
    "draft/\nverify/\nhost, %",
    "steps",
    "accepted\nat least\n1, 2, ... K",
)


def markdown(scores: list[Score]) -> str:
    """Return the leaderboard as a Markdown table, then verdicts, warnings and conditions."""
    entries = leaderboard(scores)
    parts = [
        _plain(_answer(entries)),
        _markdown_table(_board_heads(scores), _board_rows(entries)),
        _plain(about_speedups([e.score for e in entries])),
        _markdown_table(*by_batch) if (by_batch := page.batches(entries)) else "",
        _markdown_table(["draft", "minutes", "tokens", "made by"], page.cost_rows(entries)),
        "\n".join(f"- **{_plain(e.score.name)}**: {e.score.verdict()}" for e in entries),
        "\n".join(f"- Warning: {_plain(text)}" for text in score_warnings(scores)),
        _markdown_table(["condition", "value"], _conditions([e.score for e in entries])),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def html(scores: list[Score], command: str) -> str:
    """Return one page that loads nothing: styles and plots are inside. command: what made the page."""
    entries = leaderboard(scores, every_k=True)
    ordered = [e.score for e in entries]
    marked = with_plain(entries, plain_rows(entries), lambda _: None)
    environment = Environment(loader=PackageLoader("draftlab.results"), autoescape=True, undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True
    written = environment.get_template("report.html.j2").render(
        targets=sorted({s.target.name for s in scores}),
        answer=_answer(entries),
        warnings=score_warnings(scores),
        entries=entries,
        board=(_board_heads(scores), _board_rows(entries), marked),
        about_speedups=about_speedups(ordered),
        best=None if entries[0].score.output_differs else entries[0],
        shown=next((e for e in entries if e.score.example), None),
        page=page,
        colours=(COLOURS, DARK_COLOURS),
        page_colour=plots.VARIABLES.__getitem__,
        k_heads=K_HEADS,
        k_rows=_k_rows,
        models=_models,
        conditions=_conditions(ordered),
        versions=_agreement(ordered, [s.versions for s in ordered]),
        command=command,
    )
    return written.strip() + "\n"


def json_rows(scores: list[Score]) -> list[dict[str, Any]]:
    """Return one flat row per draft and K, in the order of the scores; metrics have vLLM's names."""
    return [_json_row(entry, k) for entry in entries_of(scores, every_k=True) for k in entry.speedups]


def _answer(entries: list[Entry]) -> str:
    """Say which draft is fastest, by how much, what limits it, and whether the runner-up is really slower."""
    best, *others = entries
    name, target, gain = best.score.name, best.score.target.name, best.best_k_speedup
    if best.score.output_differs:
        lead = f"Every draft here changes the output of {target}, so that no speed-up counts."
    elif best.score.doubt is not None:
        lead = f"The best draft for {target} here is {name}."
    elif gain.low > 1:
        lead = f"With {name} as its draft, {target} answers whole requests {gain.value:.2f} times as fast."
    elif gain.high < 1:
        lead = f"No draft here helps {target}: with the best one, {name}, it runs at {gain.value:.0%} of its own speed."
    else:
        lead = f"No draft here makes whole requests of {target} significantly faster; the best one is {name}."
    parts = [lead, best.score.verdict()]
    if others:
        second = others[0].best_k_speedup
        overlap = "; the two intervals overlap, so these scores alone do not separate them"
        note = overlap if second.high >= gain.low else ""
        parts.append(f"The second of {len(entries)} drafts is {others[0].score.name} at {second.as_speedup()}{note}.")
    return " ".join(parts)


def about_speedups(scores: Sequence[Score]) -> str:
    """Say what the speed-ups of a table are of, over what, and how both sides ran."""
    return (
        "Speed-ups are of whole requests, prefill and decoding, over the target alone at the fastest precision that "
        "was measured; TPOT is of the tokens after the first. Each draft at its best K; intervals are over prompts. "
        f"How both sides ran: {precision(scores)}."
    )


def _board_heads(scores: Sequence[Score]) -> list[str]:
    shown = accuracy_metric(scores)
    return [f"{shown[1]}, {shown[0]}" if head == "accuracy" and shown else head for head in BOARD_HEADS]


def _board_rows(entries: list[Entry]) -> Rows:
    """Return one row per draft, with plain decoding at its place."""
    return with_plain(list(map(_board_row, entries)), plain_rows(entries), _plain_row)


def _plain_row(plain: Plain) -> list[str]:
    speed = plain.speed(three_digits)
    cells = [plain.name, plain.speedup, "–", "–", speed, speed, "–", "1.00"]
    return cells + ["–"] * (len(BOARD_HEADS) - len(cells))


def _board_row(entry: Entry) -> list[str]:
    score, shape, kv = entry.score, entry.score.draft.shape, kv_bytes(entry.score)
    return [
        score.name,
        entry.best_k_speedup.as_speedup(),
        _speedup_text(entry.best_k_tpot_speedup),
        f"{milliseconds(score.ttft_ms(entry.k))}, {milliseconds(score.ttft_ms(0))} without",
        three_digits(score.output_tps(entry.k)),
        three_digits(score.output_tps(0)),
        str(entry.k),
        f"{entry.tokens_per_pass:.2f}",
        f"{score.acceptance(entry.k).draft_acceptance_rate:.1%}",
        f"{score.conditions.target_weights}/{score.conditions.draft_weights or '–'}",
        optional(score.equal_texts, ".1%"),
        _latency_text(score.draft.latency[0]) if score.draft.latency else "–",
        optional(score.cost_ratio, ".3f"),
        f"{shape.layers} x {shape.hidden}" if shape else "–",
        format_count(shape.params()) if shape else "–",
        _task_text(entry.accuracy) if entry.accuracy else "–",
        optional(kv, ","),
    ]


def _k_rows(entry: Entry) -> Rows:
    return [_k_row(entry, k) for k in entry.speedups]


def _k_row(entry: Entry, k: int) -> list[str]:
    score, acceptance, shares = entry.score, entry.score.acceptance(k), entry.score.time_shares(k)
    return [
        str(k),
        entry.speedups[k].as_speedup(),
        _speedup_text(entry.tpot_speedups[k]),
        optional(score.implied_speedup(k), ".2f"),
        milliseconds(score.ttft_ms(k)),
        f"{score.tokens_per_pass(k):.2f}",
        f"{score.break_even_length(k):.2f}",
        f"{acceptance.draft_acceptance_rate:.1%}",
        "/".join(f"{100 * shares[phase]:.0f}" for phase in plots.PHASES) if shares else "–",
        f"{acceptance.num_spec_steps:,}",
        " ".join(f"{share:.2f}" for share in acceptance.per_position_acceptance),
    ]


def _json_row(entry: Entry, k: int) -> dict[str, Any]:
    score, shape, accuracy = entry.score, entry.score.draft.shape, entry.accuracy
    return {
        "draft": score.name,
        "target": score.target.name,
        "layers": shape and shape.layers,
        "hidden": shape and shape.hidden,
        "params": shape and shape.params(),
        "kv_bytes_per_token": kv_bytes(score),
        "draft_ms": score.draft_ms,
        "cost_ratio": score.cost_ratio,
        "num_speculative_tokens": k,
        "best": k == entry.k,
        **score.acceptance(k).model_dump(),
        "tokens_per_target_pass": score.tokens_per_pass(k),
        **_speedup_columns(entry, k),
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
        **{f"{phase}_share": score.time_shares(k).get(phase) for phase in plots.PHASES},
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


def _speedup_columns(entry: Entry, k: int) -> dict[str, float | None]:
    return {
        **_columns("speedup", entry.speedups[k]),
        "speedup_n": entry.speedups[k].n,
        **_columns("tpot_speedup", entry.tpot_speedups[k]),
        **_columns("best_k_speedup", entry.best_k_speedup),
        **_columns("best_k_tpot_speedup", entry.best_k_tpot_speedup),
    }


def _columns(name: str, estimate: Interval | None) -> dict[str, float | None]:
    """Return an estimate and the ends of its interval as three columns."""
    return {
        name: estimate and estimate.value,
        f"{name}_low": estimate and estimate.low,
        f"{name}_high": estimate and estimate.high,
    }


def _speedup_text(speedup: Interval | None) -> str:
    return "–" if speedup is None else speedup.as_speedup()


def _models(score: Score) -> Rows:
    """Return draft and target side by side: shape, latency of a pass, task results."""
    draft, target = (
        {
            "model": model.name,
            "shape": model.shape.describe() if model.shape else "–",
            "sha256": (model.sha256 or "–")[:12],
        }
        | {f"ms, tokens fed: {x.width}": f"{_latency_text(x)}, n = {x.n}" for x in model.latency}
        | {f"{r.task}, {r.metric}": f"{_task_text(r)}, n = {r.n}" for r in model.tasks}
        for model in (score.draft, score.target)
    )
    rows = [[name, draft.get(name, "–"), target.get(name, "–")] for name in dict.fromkeys([*draft, *target])]
    return rows


def _conditions(scores: Sequence[Score]) -> Rows:
    identical = {True: "yes", False: "NO", None: "not comparable when sampling"}
    facts = [
        {"target": s.target.name}
        | {name.replace("_", " "): str(value) for name, value in s.conditions.model_dump().items()}
        | {
            "output equals the target's own": identical[s.identical],
            "equal texts": optional(s.equal_texts, ".1%"),
            "speed-ups are over weights in": s.baseline_weights,
            "distinct 4-grams": f"{s.distinct_4grams:.2f}",
        }
        for s in scores
    ]
    return _agreement(scores, facts)


def _agreement(scores: Sequence[Score], facts: Sequence[dict[str, str]]) -> Rows:
    """Return each fact with its value or, where drafts differ, with every value and the drafts that have it."""
    rows = []
    for fact in dict.fromkeys(fact for column in facts for fact in column):
        drafts: dict[str, list[str]] = {}
        for score, column in zip(scores, facts, strict=True):
            drafts.setdefault(column.get(fact, "–"), []).append(score.name)
        values = list(drafts) if len(drafts) == 1 else [f"{v} ({', '.join(names)})" for v, names in drafts.items()]
        rows.append([fact, "; ".join(values)])
    return rows


def _markdown_table(heads: Sequence[str], rows: Rows) -> str:
    rule = ["---"] + ["---:"] * (len(heads) - 1)
    return "\n".join("| " + " | ".join(map(_plain, row)) + " |" for row in (heads, rule, *rows))


def _plain(text: str) -> str:
    """Return text that Markdown shows as it is: no HTML, no new cell, no new line."""
    return escape(" ".join(text.split()), quote=False).replace("|", "\\|")


def _latency_text(latency: Latency) -> str:
    return f"{three_digits(latency.median_ms)} ({three_digits(latency.low_ms)} to {three_digits(latency.high_ms)})"


def _task_text(result: TaskResult) -> str:
    return f"{result.value:.3f}" + ("" if result.stderr is None else f" ± {result.stderr:.3f}")
