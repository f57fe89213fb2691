"""Measured latencies by shape, and cost models made of them."""

import itertools
from collections.abc import Callable, Iterable, Sequence

from draftlab.latency.cost_model import Profile
from draftlab.model.shape import Shape
from draftlab.results.score import Latency

SHAPE = Shape(layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=176, vocab=307)
WIDTHS, BATCHES, CONTEXTS = (1, 2, 5), (1, 4), (16, 64)


def latency(width: int, ms: float) -> Latency:
    return Latency(width=width, median_ms=ms, low_ms=ms, high_ms=ms, n=3)


def profile_of(
    ms: Callable[[int, int, int, int], float],
    *,
    widths: Iterable[int] = WIDTHS,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    after: Sequence[int] = (1, 2),
    **changes: object,
) -> Profile:
    """Return a profile of a law. ms: By width, batch, context and passes of the same model before it."""

    def point(width: int, batch: int, context: int, before: int = 0) -> dict[str, object]:
        took = latency(width, ms(width, batch, context, before))
        return took.model_dump() | {"batch": batch, "context": context}

    places = list(itertools.product(batches, contexts))
    fields = {
        "kind": "measured",
        "name": "m",
        "sha256": None,
        "shape": SHAPE,
        "device": "here",
        "dtype": "float32",
        "mode": "eager",
        "threads": 1,
        "forward": [point(w, *at) for w in widths for at in places],
        "steady": [point(1, *at, n) | {"after": n} for n in after for at in places],
        "prefill": [latency(16, 5), latency(64, 9)],
        "host": [latency(1, 0.1), latency(5, 0.5)],
        "bandwidth_gbs": 10,
        "matmul_tflops": {"float32": 0.1},
        "command": "",
        "versions": {},
        "created": "",
    }
    return Profile.model_validate(fields | changes)
