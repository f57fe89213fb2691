"""Terminal tables of latency profiles, latency laws and predictions. K is the number of drafted tokens per step."""

from collections.abc import Sequence

from draftlab.intervals import Interval
from draftlab.latency.cost_model import Profile, pass_bytes
from draftlab.latency.predict import DraftPrediction, LatencyPrediction, required_length
from draftlab.latency.scaling_law import ScalingLaw
from draftlab.quantities import format_number
from draftlab.results.ranking import NO_DRAFT
from draftlab.results.score import Latency
from draftlab.results.tables import TerminalTable


def profile_table(profile: Profile) -> TerminalTable:
    """Return a table of milliseconds per pass, by batch size, number of tokens and context.

    The caption has the memory bandwidth of the device, and its speed in matrix products.
    """
    contexts = sorted({p.context for p in profile.forward})
    last = max(p.after for p in profile.steady)
    rows = []
    for batch in sorted({p.batch for p in profile.forward}):
        steady = [p for p in profile.steady if (p.after, p.batch) == (last, batch)]
        rows.append([str(batch), "1, steady", *_cells(steady)])
        for width in sorted({p.width for p in profile.forward}):
            points = [p for p in profile.forward if (p.width, p.batch) == (width, batch)]
            rows.append([str(batch), str(width), *_cells(points)])
    heads = ("batch", "tokens", *(f"context {c}" for c in contexts))
    steady_ms = min(profile.steady, key=lambda p: (p.batch, p.context, -p.after)).median_ms
    reached = limits = ""
    if profile.shape:
        rate = pass_bytes(profile.shape, profile.dtype) / 1e6 / steady_ms
        reached = f"In plain decoding, a one-token pass reads weights at {format_number(rate)} GB/s; "
    products = ", ".join(f"{format_number(value)} in {name}" for name, value in profile.matmul_tflops.items())
    prompts = ", ".join(f"{p.width} tokens in {_ms(p)}" for p in profile.prefill)
    if profile.bandwidth_gbs:
        limits = (
            f"a matrix-vector product reaches {format_number(profile.bandwidth_gbs)} GB/s, "
            f"a large matrix product {products} TFLOP/s. "
        )
    caption = (
        f"{reached}{limits}Prompts: {prompts}. Host time per step in ms: {_ms(profile.host[0])}, or "
        f"{_ms(profile.host[-1])} to verify {profile.host[-1].width} tokens. Rows marked steady are timed after {last} "
        "passes of the same model, as in plain decoding. Other rows are timed right after other work, as in "
        "speculative decoding."
    )
    title = f"{profile.describe()}: milliseconds per pass (quartiles)"
    return TerminalTable(heads=heads, rows=rows, title=title, caption=caption)


def law_table(law: ScalingLaw) -> TerminalTable:
    """Return a table with a row per shape: the measured latency, the law's latency with its parts, and the law's error.

    The error in a row is the error of a law that is fitted to all shapes except the shape of this row.
    """
    first = law.profiles[0]
    rows = []
    for profile, shape, measured, error in zip(
        law.profiles, law.shapes, law.measured_ms, law.held_out_errors, strict=True
    ):
        cells = [measured, law.ms(shape), *law.curve.parts(shape)]
        rows.append([profile.name, *(format_number(cell) for cell in cells), f"{error:+.1%}"])
    title = f"{first.device}, {first.dtype}, {first.mode}: ms of a one-token pass after {law.context} cached tokens"
    heads = ("shape", "measured", "fitted", "issue", "work", "error when\nheld out")
    return TerminalTable(heads=heads, rows=rows, title=title)


def k_table(prediction: LatencyPrediction) -> TerminalTable:
    """Return a table with one row for plain decoding and one row per K. The fastest row is marked."""
    heads = (
        "K",
        "tokens\nper pass",
        "break\neven",
        "tok/s",
        _speedup_head([row.speedup for row in prediction.rows]),
        "free\ndraft",
        "perfect\ndraft",
        "% draft,\nverify, host",
    )
    rows = []
    for row in prediction.rows:
        shares = (f"{100 * row.shares[name]:.0f}" for name in ("draft", "verify", "host"))
        cells = [
            str(row.k),
            f"{row.tokens_per_pass.value:.2f}",
            f"{row.break_even_length:.2f}",
            format_number(row.tokens_per_second, 4),
            _speedup(row.speedup),
            f"{row.free_draft:.2f}",
            f"{row.perfect_draft:.2f}",
            ", ".join(shares),
        ]
        rows.append(cells)
    best = prediction.best
    plain = format_number(prediction.plain_tokens_per_second, 4)
    rows.insert(0, [NO_DRAFT, "1.00", "–", plain, "1.00", "–", "–", "–"])
    fastest = prediction.rows.index(best) + 1 if best.speedup.value > 1 else 0
    title = f"Predicted: {prediction.draft}\nwith {prediction.target}, batch size {prediction.batch}"
    caption = (
        "* Fastest. Tokens per pass include the target's own token. Free draft: speed-up if drafting took no "
        "time. Perfect draft: speed-up if every drafted token were accepted. The closed form, with c = "
        f"{prediction.c:.3f} (draft pass / target pass) and beta = {best.beta:.2f} (target pass over K + 1 tokens / "
        f"over one token), gives {best.closed_form_speedup:.2f} at K = {best.k}."
    )
    if best.speedup.exists:
        caption += " Intervals are over conversations; the spread of latencies is not included."
    return TerminalTable(heads=heads, rows=rows, best=fastest, title=title, caption=caption)


def draft_table(predictions: list[LatencyPrediction]) -> TerminalTable:
    """Return a table with a row per draft, and plain decoding as the last row.

    A row has the best K of its draft. It also has the number of tokens per target pass that this draft would need to be
    as fast as the fastest draft.
    """
    fastest = max(predictions, key=lambda p: p.best.speedup.value)
    helps = fastest.best.speedup.value > 1
    heads = (
        "draft",
        "c",
        "K",
        "tokens\nper pass",
        "tok/s",
        _speedup_head([p.best.speedup for p in predictions]),
        "needed to\nbe fastest",
    )
    rows = []
    for p in predictions:
        needed = required_length(p, max(1.0, fastest.best.speedup.value))
        text = "impossible" if needed is None else f"{needed[1]:.2f} at K = {needed[0]}"
        rows.append(
            [
                p.name,
                f"{p.c:.3f}",
                str(p.best.k),
                f"{p.best.tokens_per_pass.value:.2f}",
                format_number(p.best.tokens_per_second, 4),
                _speedup(p.best.speedup),
                "" if helps and p is fastest else text,
            ]
        )
    title = f"Predicted with {fastest.target}, batch size {fastest.batch}"
    rows.append([NO_DRAFT, "–", "–", "1.00", format_number(fastest.plain_tokens_per_second, 4), "1.00", ""])
    caption = (
        "* Fastest. c: time of a draft pass / time of a target pass. Needed to be fastest: tokens per target pass "
        "with which this draft would be as fast as the fastest draft."
    )
    best = predictions.index(fastest) if helps else len(predictions)
    return TerminalTable(heads=heads, rows=rows, best=best, title=title, caption=caption)


def best_k_table(draft: DraftPrediction) -> TerminalTable:
    """Return a table of the best K for each batch size and prompt length."""
    rows = [
        [
            str(best.batch),
            str(best.prompt_tokens or "of the texts"),
            str(best.k) if best.k else "no draft",
            f"{best.speedup:.2f}",
            format_number(best.tokens_per_second, 4),
        ]
        for best in draft.best_ks
    ]
    heads = ("batch", "prompt\ntokens", "K", "speed-up", "tok/s of\nthe batch")
    return TerminalTable(heads=heads, rows=rows, title=f"Best K of {draft.prediction.name}")


def _speedup_head(speedups: Sequence[Interval]) -> str:
    return "speed-up\n95% interval" if any(each.exists for each in speedups) else "\nspeed-up"


def _speedup(speedup: Interval) -> str:
    return str(speedup) if speedup.exists else f"{speedup.value:.2f}"


def _cells(points: Sequence[Latency]) -> list[str]:
    return [_ms(p) for p in sorted(points, key=lambda p: getattr(p, "context", 0))]


def _ms(latency: Latency) -> str:
    return f"{format_number(latency.median_ms)} ({format_number(latency.low_ms)}, {format_number(latency.high_ms)})"
