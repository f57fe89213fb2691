"""Tables for terminals of any width from 80 columns."""

import re
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from draftlab.intervals import Interval
from draftlab.model.shape import Shape, format_count
from draftlab.results.leaderboard import Entry, leaderboard, plain_rank, plain_rows, precision, with_plain
from draftlab.results.score import Score, TaskResult

SCORE_HEADS = (
    "draft\nshape, size",
    "ms\nc",
    "K",
    "accept\nrate",
    "tokens/\npass",
    "tok/s\nplain",
    "request\n95%",
    "TPOT\n95%",
    "TTFT\nplain",
)
SHAPE_HEADS = (
    "layers\nx width", "heads", "ffn", "para-\nmeters", "in\nblocks", "embed-\ndings", "KV bytes\nper token",
    "MFLOP\nper token",
)  # fmt: skip

Rows = list[list[str]]


def terminal_table(
    heads: Sequence[str], rows: Rows, best: int | None = None, flexible: int = 0, title: str = ""
) -> Table:
    """Return a table of text. best: row to mark. flexible: the one column that gives way on a narrow terminal."""
    table = Table(
        title=Text(title) if title else None, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False,
        show_edge=False, title_justify="left", caption_justify="left",
    )  # fmt: skip
    for i, head in enumerate(heads):
        justify = "left" if i == flexible else "right"
        table.add_column(head, justify=justify, no_wrap=i != flexible, overflow="fold", vertical="top")
    for i, cells in enumerate(rows):
        first = f"* {cells[0]}" if i == best else cells[0]
        table.add_row(*map(Text, (first, *cells[1:])), style="bold green" if i == best else None)
    return table


def score_table(scores: list[Score]) -> Table:
    """Return one row per draft at its best K, the fastest first and marked, with plain decoding at its place."""
    entries = leaderboard(scores)
    accuracy = next((e.accuracy.task for e in entries if e.accuracy), None)
    differs = any(score.output_differs for score in scores)
    optional_heads = [*(["acc"] if accuracy else []), *(["equal\ntexts"] if differs else [])]
    blank = ["–"] * len(optional_heads)
    rows = with_plain(
        [_score_row(e, accuracy is not None, differs) for e in entries],
        plain_rows(entries),
        lambda p: [p.name, "–", "–", "–", "1.00", p.speed(three_digits), p.speedup, "–", "–", *blank],
    )
    doubtful = plain_rank(entries) > 0 and entries[0].score.doubt is not None
    table = terminal_table([*SCORE_HEADS, *optional_heads], rows, best=None if doubtful else 0)
    sampling = "; ".join(dict.fromkeys(s.conditions.decoding for s in scores))
    prompts = {e.best_k_speedup.n for e in entries}
    table.caption = Text(
        f"* Fastest. Each draft at its best K, {sampling}; {precision(scores)}. ms: of a draft pass; c: over that of a "
        "target pass. tok/s: of whole requests. request: speed-up of whole requests, prefill and decoding, over the "
        "fastest plain decoding. TPOT: speed-up of the tokens after the first. Both are of a K chosen on other "
        "prompts, with a 95% bootstrap interval over prompts, "
        f"n = {' to '.join(map(str, sorted({min(prompts), max(prompts)})))}. TTFT: ms to the first token."
        + (f" acc: {accuracy}." if accuracy else "")
        + (" equal texts: share that equals the target's own." if differs else "")
    )
    return table


def accuracy_table(models: Sequence[tuple[str, Sequence[TaskResult]]]) -> Table:
    """Return one row per task, metric and model, of models with their names."""
    results = [(name, result) for name, tasks in models for result in tasks]
    order = {key: None for _, r in results for key in [(r.task, r.metric)]}
    rows = [
        [
            *((task, metric) if i == 0 else ("", "")), name, f"{r.value:.4f}",
            "–" if r.stderr is None else f"{r.stderr:.4f}", str(r.n),
        ]
        for task, metric in order
        for i, (name, r) in enumerate((n, r) for n, r in results if (r.task, r.metric) == (task, metric))
    ]  # fmt: skip
    table = terminal_table(("task", "metric", "model", "value", "standard\nerror", "items"), rows, flexible=0)
    table.caption = Text("Standard error: lm-eval's. draftlab compare has paired tests of drafts.")
    return table


def shape_table(shapes: dict[str, Shape], latency_ms: dict[str, float]) -> Table:
    """Return one row per named shape. latency_ms: of one pass, predicted; {} without a latency law."""
    rows = [
        [
            name, f"{s.heads}/{s.kv_heads}", str(s.ffn), format_count(s.params()), format_count(s.body_params()),
            f"{1 - s.body_params() / s.params():.0%}", f"{s.kv_bytes_per_token():,}",
            f"{s.flops_per_token(0) / 1e6:,.1f}", *([f"{latency_ms[name]:.3g}"] if latency_ms else []),
        ]
        for name, s in shapes.items()
    ]  # fmt: skip
    table = terminal_table([*SHAPE_HEADS, *(["ms, pre-\ndicted"] if latency_ms else [])], rows)
    table.caption = Text(
        "heads: query/key. embeddings: their share of the parameters, including the head and the last norm. KV in bf16."
        + (" ms: one pass over one token, by the latency law." if latency_ms else "")
    )
    return table


def kv_bytes(score: Score) -> int | None:
    """Return the draft's KV cache bytes per token; None where its dtype or shape is not known."""
    bits, shape = re.search(r"\d+", score.conditions.dtype), score.draft.shape  # a dtype's name ends in its bits
    return shape.kv_bytes_per_token(int(bits[0]) / 8) if bits and shape else None


def three_digits(value: float) -> str:
    """Return three significant digits, never an exponent."""
    return f"{value:#.3g}".rstrip(".") if value < 999.5 else f"{value:,.0f}"


def optional(value: float | None, digits: str) -> str:
    return "–" if value is None else format(value, digits)


def milliseconds(estimate: Interval | None) -> str:
    return "–" if estimate is None else three_digits(estimate.value)


def _score_row(entry: Entry, accuracy: bool, equal_texts: bool) -> list[str]:
    """Return the leaderboard's cells in half the width: two lines each, as in their heads, and no quartiles."""
    score, shape, ms = entry.score, entry.score.draft.shape, entry.score.draft_ms
    return [
        f"{score.name}\n{shape.layers}x{shape.hidden}, {format_count(shape.params())}" if shape else score.name,
        "–" if ms is None else f"{three_digits(ms)}\n{optional(score.cost_ratio, '.3f')}",
        str(entry.k),
        f"{score.acceptance(entry.k).draft_acceptance_rate:.1%}",
        f"{entry.tokens_per_pass:.2f}",
        f"{three_digits(score.output_tps(entry.k))}\n{three_digits(score.output_tps(0))}",
        two_lines(entry.best_k_speedup),
        two_lines(entry.best_k_tpot_speedup),
        f"{milliseconds(score.ttft_ms(entry.k))}\n{milliseconds(score.ttft_ms(0))}",
        *([optional(entry.accuracy and entry.accuracy.value, ".3f")] if accuracy else []),
        *([optional(score.equal_texts, ".1%")] if equal_texts else []),
    ]


def two_lines(gain: Interval | None) -> str:
    """Return a speed-up, and its interval on the next line."""
    if gain is None:
        return "–"
    return f"{gain.value:.2f}x\n" + (f"{gain.low:.2f}-{gain.high:.2f}" if gain.n > 1 else "n = 1")
