"""Parts of the HTML page beside the leaderboard: the tables under its plots, categories, and the cost of drafts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from draftlab.model.shape import format_count
from draftlab.provenance import CurvePoint, Stage
from draftlab.results import plots
from draftlab.results.compare import category_rows
from draftlab.results.leaderboard import NO_DRAFT, Entry, Mark, plain_rank, plain_rows, with_plain
from draftlab.results.tables import Rows, milliseconds, three_digits

PROMPT_SHOWN = 1200  # characters of the example's prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A plot with its caption and its numbers. key: the colours and markers that it uses, if they need one."""

    title: str
    svg: Markup
    caption: str
    heads: list[str]
    rows: Rows
    key: Sequence[Mark] = ()


def ranking(entries: list[Entry]) -> Figure:
    rows = [[e.score.name, str(e.k), e.best_k_speedup.as_speedup()] for e in entries]
    return Figure(
        title="Speed-up of each draft, whole requests", svg=plots.plot_ranking(entries),
        rows=with_plain(rows, plain_rows(entries), lambda plain: [plain.name, "–", plain.speedup]),
        heads=["draft", "K", "speed-up (95% interval)"],
        caption="Tokens per second of whole requests over the target's own (dashed line), each draft at its best K.",
    )  # fmt: skip


def figures(entries: list[Entry]) -> list[Figure]:
    """Return the figures on time and acceptance that there are data for."""
    made = [_prompts(entries[0]), _time(entries), _latency(entries), _positions(entries), _accuracy(entries)]
    return [figure for figure in made if figure is not None]


def training(entries: list[Entry]) -> list[Figure]:
    """Return the curves of the last training of each draft, where they are known: loss, and held-out acceptance."""
    curves = [(e, next((s.curve for s in reversed(e.score.made or []) if s.curve), [])) for e in entries]
    known = [(e, curve) for i, (e, curve) in enumerate(curves) if curve not in [[], *(c for _, c in curves[:i])]]
    accepted = [(e, [p for p in curve if p.acceptance is not None]) for e, curve in known]
    return [figure for figure in (_loss(known), _heldout([pair for pair in accepted if pair[1]])) if figure]


def categories(entries: list[Entry]) -> Figure | None:
    """Return the speed-up by category; None where the prompts have none, or the scores different ones."""
    by_draft = [category_rows(e.score) for e in entries]
    names = [[row["category"] for row in rows] for rows in by_draft]
    if not names[0] or any(other != names[0] for other in names):
        return None
    shown = entries[: plots.IN_CATEGORIES]
    more = f" of the {len(shown)} fastest drafts" if len(shown) < len(entries) else ""
    return Figure(
        title="Speed-up by category", svg=plots.plot_categories(entries, by_draft), key=_key(shown, entries),
        heads=["category", "n", *(e.score.name for e in entries)],
        rows=[[row[0]["category"], str(row[0]["prompts"]), *map(_gain, row)] for row in zip(*by_draft, strict=True)],
        caption=f"Speed-up of whole requests{more} on the prompts of each category, at the K that is best over all.",
    )  # fmt: skip


def batches(entries: list[Entry]) -> tuple[list[str], Rows] | None:
    """Return heads and rows of the speed-ups by batch size; None where all scores have the same one."""
    sizes = sorted({e.score.conditions.batch for e in entries})
    if len(sizes) == 1:
        return None
    rows: dict[str, dict[int, str]] = {}
    for e in entries:
        size = e.score.conditions.batch
        by_size = rows.setdefault(e.score.name.removesuffix(f"-b{size}"), {})
        by_size[size] = "cannot tell" if e.score.doubt else f"{e.best_k_speedup.as_speedup()}, K = {e.k}"
    heads = ["draft", *(f"batch {size}" for size in sizes)]
    return heads, [[name, *(by_size.get(size, "–") for size in sizes)] for name, by_size in rows.items()]


def cost_rows(entries: list[Entry]) -> Rows:
    """Return what each draft cost to make: minutes, tokens, commands."""
    return [[e.score.name, *_cost(e.score.made)] for e in entries]


def facts(best: Entry) -> list[tuple[str, str, str]]:
    """Return the headline numbers of the fastest draft: name, value, and what belongs to it."""
    score, gain, made = best.score, best.best_k_speedup, best.score.made
    spread = f"95% interval {gain.low:.2f} to {gain.high:.2f}, " if gain.n > 1 else ""
    name = "speed-up of requests" if score.doubt is None else "speed-up of requests, in doubt"
    tpot, ttft, alone = best.best_k_tpot_speedup, score.ttft_ms(best.k), score.ttft_ms(0)
    rows = [
        (name, f"{gain.value:.2f}x", f"{spread}n = {gain.n} prompts"),
        *([("TPOT speed-up", f"{tpot.value:.2f}x", "of the tokens after the first")] if tpot else []),
        *([("TTFT", f"{milliseconds(ttft)} ms", f"{milliseconds(alone)} without")] if ttft else []),
        ("tokens per second", three_digits(score.output_tps(best.k)), f"{three_digits(score.output_tps(0))} without"),
        ("tokens per target pass", f"{best.tokens_per_pass:.2f}", f"K = {best.k} drafted"),
    ]
    if made:
        rows.append(("made in", f"{_minutes(made)} min", _cost(made)[1] + " tokens"))
    return rows


def example_summary(entry: Entry) -> str:
    """Say in numbers what the example shows."""
    example = entry.score.example
    assert example is not None
    kept, lost = (sum(len(getattr(step, name)) for step in example.steps) for name in ("kept", "lost"))
    tokens = sum(len(step.kept) + bool(step.own) for step in example.steps)
    share = f" ({kept / (kept + lost):.0%})" if kept + lost else ""
    return (
        f"{entry.score.name}, K = {example.k}, the prompt of median speed-up: in {len(example.steps)} passes of the "
        f"target {kept + lost} tokens were drafted, {kept} of them kept{share} and {lost} lost; {tokens} were written."
    )


def example_rows(entry: Entry) -> Rows:
    """Return the steps of the example, with line breaks as signs."""
    assert entry.score.example is not None
    return [
        [str(i), *(one_line("".join(part)) for part in (step.kept, step.lost, step.own))]
        for i, step in enumerate(entry.score.example.steps, 1)
    ]


def one_line(text: str) -> str:
    return text.replace("\n", "↵")


def shown_prompt(text: str) -> str:
    """Return the end of a prompt."""
    return text if len(text) <= PROMPT_SHOWN else "… " + text[-PROMPT_SHOWN:]


def by_k(entries: list[Entry]) -> Figure:
    ks = sorted({k for e in entries for k in e.speedups})
    rows = [[e.score.name, *(e.speedups[k].as_speedup() if k in e.speedups else "–" for k in ks)] for e in entries]
    rows.insert(plain_rank(entries), [NO_DRAFT, *["1.00x"] * len(ks)])
    return Figure(
        title="Speed-up against K", svg=plots.plot_speedup(entries), key=_key(entries), rows=rows,
        heads=["draft", *(f"K = {k}" for k in ks)],
        caption="Tokens per second of whole requests over the target's own; above the dashed line the draft helps. "
        "Bands: 95% bootstrap interval over prompts.",
    )  # fmt: skip


def _prompts(best: Entry) -> Figure | None:
    rates = best.score.prompt_tps(best.k)
    if len(rates) < 2:
        return None
    names = {prompt: best.score.prompts[prompt].category if best.score.prompts else "" for prompt in rates}
    marks = {name: Mark.of(name or "others", number) for number, name in enumerate(sorted(set(names.values())))}
    return Figure(
        title="Speed-up by prompt", key=[*marks.values()] if len(marks) > 1 else [],
        svg=plots.plot_prompts([(marks[names[prompt]], *pair) for prompt, pair in rates.items()]),
        heads=["prompt", "category", "tokens/s plain", "tokens/s speculative", "speed-up"],
        rows=[
            [str(prompt), names[prompt] or "–", three_digits(plain), three_digits(drafted), f"{drafted / plain:.2f}x"]
            for prompt, (plain, drafted) in rates.items()
        ],
        caption=f"{best.score.name} at K = {best.k}: each whole request, plain and with the draft, at its repeat of "
        "median time. Above the dashed line the draft helps.",
    )  # fmt: skip


def _loss(curves: list[tuple[Entry, list[CurvePoint]]]) -> Figure | None:
    return None if not curves else Figure(
        title="Loss by step", svg=plots.plot_loss(curves), key=_key([e for e, _ in curves]),
        heads=["draft", "step", "loss on held-out text"],
        rows=[[e.score.name, f"{p.step:,}", f"{p.loss:.3f}"] for e, curve in curves for p in curve if p.heldout],
        caption="The last training of each draft: lines on its own batches, points on held-out text. Losses of "
        "different kinds cannot be compared.",
    )  # fmt: skip


def _heldout(curves: list[tuple[Entry, list[CurvePoint]]]) -> Figure | None:
    return None if not curves else Figure(
        title="Held-out acceptance by step", svg=plots.plot_heldout(curves), key=_key([e for e, _ in curves]),
        heads=["draft", "step", "acceptance on held-out text"],
        rows=[[e.score.name, f"{p.step:,}", f"{p.acceptance:.3f}"] for e, curve in curves for p in curve],
        caption="Acceptance of single tokens (sum of min(p, q)) on held-out text, where the draft always goes on from "
        "the target's tokens.",
    )  # fmt: skip


def _key(shown: list[Entry], entries: Sequence[Entry] = ()) -> list[Mark]:
    """Return the marks of the entries that a plot shows; none if there is only one in all."""
    return [entry.mark for entry in shown] if len(entries or shown) > 1 else []


def _time(entries: list[Entry]) -> Figure | None:
    svg = plots.plot_time(entries)
    rows = [
        [s.label, *(three_digits(s.ms[p]) for p in plots.PHASES), three_digits(s.total_ms), f"{s.tokens:.2f}",
         three_digits(s.total_ms / s.tokens)]
        for s in plots.step_times(entries)
    ]  # fmt: skip
    return None if svg is None else Figure(
        title="Where the time of a step goes", svg=svg, rows=rows, key=plots.PHASE_MARKS,
        heads=["draft", *(f"{name}, ms" for name in plots.PHASE_NAMES.values()), "step, ms", "tokens", "ms per token"],
        caption="One step at the best K: drafting, the target's pass over what was drafted, and everything else.",
    )  # fmt: skip


def _latency(entries: list[Entry]) -> Figure | None:
    svg = plots.plot_latency(entries)
    models = [(e.score.name, e.score.draft) for e in entries]
    models += [(f"{e.score.target.name} (target)", e.score.target) for e in entries if e.score.target.latency][:1]
    rows = [
        [name, str(m.shape.layers), format_count(m.shape.params()), three_digits(m.latency[0].median_ms),
         f"{three_digits(m.latency[0].low_ms)} to {three_digits(m.latency[0].high_ms)}"]
        for name, m in models if m.shape and m.latency
    ]  # fmt: skip
    return None if svg is None else Figure(
        title="Latency against depth", svg=svg, rows=rows,
        key=_key([e for e in entries if e.score.draft.latency], entries),
        heads=["model", "layers", "parameters", "ms per token", "quartiles"],
        caption="One forward pass over one token: median, and quartiles where they are wider than the point. A draft's "
        "area grows with its parameters; the star is the target.",
    )  # fmt: skip


def _positions(entries: list[Entry]) -> Figure:
    width = max(e.k for e in entries)
    shares = {e.score.name: e.score.acceptance(e.k).per_position_acceptance for e in entries}
    return Figure(
        title="Acceptance by position", svg=plots.plot_positions(entries), key=_key(entries),
        heads=["draft", *map(str, range(1, width + 1))],
        rows=[[name, *(f"{x:.2f}" for x in row), *["–"] * (width - len(row))] for name, row in shares.items()],
        caption="Share of steps that accepted at least this many drafted tokens, each draft at its best K.",
    )  # fmt: skip


def _accuracy(entries: list[Entry]) -> Figure | None:
    scored = [(e, e.accuracy) for e in entries if e.accuracy]
    svg = plots.plot_accuracy(entries)
    return None if svg is None else Figure(
        title="Accuracy against acceptance", svg=svg, key=_key([e for e, _ in scored], entries),
        heads=["draft", "accuracy", "standard error", "tokens per target pass"],
        rows=[
            [e.score.name, f"{a.value:.3f}", "–" if a.stderr is None else f"{a.stderr:.3f}", f"{e.tokens_per_pass:.2f}"]
            for e, a in scored
        ],
        caption="Each draft at its best K; bars show the standard error. A more accurate draft is not always accepted "
        "more often.",
    )  # fmt: skip


def _gain(row: dict[str, Any]) -> str:
    if row["speedup"] is None:
        return "–"
    ends = "" if row["speedup_low"] is None else f" ({row['speedup_low']:.2f} to {row['speedup_high']:.2f})"
    return f"{row['speedup']:.2f}x{ends if row['prompts'] > 1 else ''}"


def _cost(made: list[Stage] | None) -> list[str]:
    if made is None:
        return ["–", "–", "not recorded"]
    if not made:
        return ["0", "0", "nothing to make"]
    steps = [f"{s.command} {_minutes([s])} min" + _tokens(s.tokens, " (", " tokens)") for s in made]
    return [_minutes(made), _tokens(sum(s.tokens or 0 for s in made) or None) or "–", ", ".join(steps)]


def _minutes(made: list[Stage]) -> str:
    return f"{sum(stage.seconds for stage in made) / 60:,.1f}"


def _tokens(tokens: int | None, before: str = "", after: str = "") -> str:
    return "" if tokens is None else f"{before}{format_count(tokens)}{after}"
