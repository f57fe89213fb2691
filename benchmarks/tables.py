"""Tables of the pages: functions of benchmarks/results. The order of rows follows what was measured."""

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.formats import Value, bounds, fixed, interval, separates

DRAFTERS = {
    "eagle:heads=runs_eagle": "EAGLE-3 head",
    "eagle:heads=runs_eagle,prompt_lookup_max=8,draft_tokens=3": "prompt lookup, then the EAGLE-3 head",
    "fallback:draft=runs_distilled_parallel,draft_tokens=2@int8": "prompt lookup, then the parallel draft",
    "fallback:draft=runs_distilled_plain,draft_tokens=2@int8": "prompt lookup, then the ten-layer draft",
    "ngram:outputs=runs_answers": "n-grams of the target's answers",
    "parallel@int8": "parallel draft",
    "plain@int8": "ten-layer draft",
    "prompt-lookup": "prompt lookup",
    "fallback": "prompt lookup, then the smaller draft",
}


class Tables:
    """Each method yields the lines of a table."""

    def __init__(self, results: dict[str, Any]) -> None:
        self.results = results

    def smollm2(self) -> Iterator[str]:
        """Yield SmolLM2's drafters by what a whole request gains."""
        greedy, sampled = self.results["smollm2"]["greedy"], self.results["smollm2"]["sampled"]
        yield from header(
            "drafter",
            "K",
            "whole request",
            "TPOT",
            "first token, ms",
            "tokens per target pass",
            "sampled, whole request",
        )
        for name, row in ordered(greedy, request_gain):
            yield cells(
                DRAFTERS[name],
                row["k"],
                request(row),
                interval(row["speedup"]),
                fixed(row["first_token_ms"], 0),
                fixed(row["tokens_per_pass"]),
                request(sampled[name]) if name in sampled else "",
            )

    def smollm2_reading(self) -> str:
        """Return what the whole requests say about prompt lookup and draft models."""
        greedy = self.results["smollm2"]["greedy"]
        lookup = greedy["prompt-lookup"]
        best, row = ordered(greedy, request_gain)[0]
        followed = [each for name, each in greedy.items() if name.startswith("fallback:")]
        text = f"The largest gain of a request is that of {DRAFTERS[best]}, {request(row)}."
        if row is not lookup:
            text += f" Prompt lookup alone has {request(lookup)}{unless_separate(row, lookup)}."
        for each in sorted(followed, key=request_gain):
            more = "less" if request_gain(each) < request_gain(lookup) else "more"
            text += (
                f" With a draft model after the lookup it is {more}, {request(each)}{unless_separate(each, lookup)}."
            )
        return text if "request_speedup" in lookup else f"{text} The record has no intervals of whole requests."

    def demo(self) -> Iterator[str]:
        yield from header("drafter", "K", "ms of a draft pass", "tokens per target pass", "tokens/s", "TPOT speed-up")
        for name, row in ordered(self.results["demo"]["drafts"], lambda row: bounds(row["speedup"])[0]):
            own = name not in DRAFTERS  # a draft model by itself
            yield cells(
                f"{name}, {row['parameters'].scaled(1e-6):.2f}M parameters" if own else DRAFTERS[name],
                row["k"],
                fixed(row["pass_ms"]) if own else "",
                fixed(row["tokens_per_pass"]),
                fixed(row["tokens_per_second"], 0),
                interval(row["speedup"]),
            )


def request_gain(row: dict[str, Any]) -> Value:
    """Return the speed-up of a whole request, of which some records keep the times alone."""
    return (
        bounds(row["request_speedup"])[0] if "request_speedup" in row else row["plain_request_ms"] / row["request_ms"]
    )


def request(row: dict[str, Any]) -> str:
    return interval(row["request_speedup"]) if "request_speedup" in row else fixed(request_gain(row))


def unless_separate(row: dict[str, Any], other: dict[str, Any]) -> str:
    """Return a clause where intervals of whole requests overlap."""
    if "request_speedup" not in row or separates(row["request_speedup"], other["request_speedup"]):
        return ""
    return ", and the intervals overlap"


def ordered(rows: dict[str, Any], gain: Callable[[Any], float]) -> list[tuple[str, Any]]:
    """Return rows by their gain, the largest first."""
    return sorted(rows.items(), key=lambda row: -float(gain(row[1])))


def header(*names: str) -> Iterator[str]:
    """Yield the head of a table whose first column is text."""
    yield cells(*names)
    yield "|---|" + "---:|" * (len(names) - 1)


def cells(*values: object) -> str:
    return f"| {' | '.join(map(str, values))} |"
