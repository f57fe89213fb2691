"""Tables of the pages, from the records of benchmarks and studies. Rows are ordered by their measured values."""

import re
from collections.abc import Iterator
from typing import Any

from benchmarks.formats import bounds, extension, fixed, interval, millions, percent

# names of drafters on pages, by the name in a record without its number of drafted tokens and "@int8"
DRAFTERS = {
    "latest-lookup": "prompt lookup",
    "smollm2-135m-draft": "the draft",
    "fallback:draft=models_smollm2-135m-draft": "prompt lookup followed by the draft",
    "fallback": "prompt lookup followed by the smaller draft",
    "10": "the draft",
    "parallel-2": "parallel draft",
    "eagle:heads=runs_rivals_eagle-2": "EAGLE-3 head",
}
TOKENS = re.compile(r",draft_tokens=\d+|@int8$")
WAYS = {"plain": "none", "draft": "ten-layer draft", "ngram": "n-grams of the prompt"}
LEARNT = (0, 1, 2, 5, 9, 16)  # stores of answers after which a row is shown
Lines = Iterator[str]


class Tables:
    """Tables by name: each method yields the lines of a table, or returns a sentence that follows from it."""

    def __init__(self, results: dict[str, Any]) -> None:
        self.results = results

    def coverage(self) -> Lines:
        """Yield the coverage of intervals by what is simulated and by number of conversations."""
        found = self.results["coverage"]["table"]
        yield from header("conversations", *next(iter(found.values())))
        for name, by_size in found.items():
            entries = []
            for row in by_size.values():
                covered, lowest, faster = (row[key].scaled(100) for key in ("coverage", "lowest", "false_faster"))
                entries.append(f"{covered:.1f} ({lowest:.0f}), {faster:.1f}")
            yield cells(name, *entries)
        widths = [row["width"].scaled(100) for row in found["one drafter, one K"].values()]
        yield cells("width of the interval, one drafter", *(f"{width:.0f}" for width in widths))

    @property
    def _readme_records(self) -> list[dict[str, Any]]:
        """Return the records of the README's table, by processor."""
        return [self.results["readme_table"], self.results["readme_table_avx512"]]

    def readme_table(self, weights: str) -> Lines:
        """Yield the speed-ups of whole requests over plain decoding in `weights`, by drafter, prompts and processor."""
        records = self._readme_records
        arms = {
            f"{kind}, {extension(about)}": about[kind][weights] for kind in ("questions", "edits") for about in records
        }
        yield from header("drafter", *arms)
        found = [{label(name): row for name, row in rows.items()} for rows in arms.values()]
        for name, _ in ordered(found[0]):
            rows = [scores[name] for scores in found]
            marks = [" ‡" if row["doubt"] else "" for row in rows]
            texts = [f"{interval(row['speedup'])}, K = {row['k']}" for row in rows]
            yield cells(name, *map("".join, zip(texts, marks, strict=True)))

    def readme_plain(self) -> str:
        """Return a sentence on the speed of the target alone, by processor, kind of prompts and precision."""
        texts = []
        doubts: set[str] = set()
        for about in self._readme_records:
            rates = []
            for kind in ("questions", "edits"):
                plain = next(iter(about[kind]["bfloat16"].values()))["plain"]
                rates.append(f"{plain['bfloat16']:.0f} and {plain['int8']:.0f} on the {kind}")
                doubts |= {row["doubt"] for rows in about[kind].values() for row in rows.values() if row["doubt"]}
            texts.append(f"{', '.join(rates)} ({extension(about)})")
        said = f"Without a draft, bfloat16 and int8 give these tokens per CPU second: {'; '.join(texts)}."
        return f"{said} ‡ No verdict: {'; '.join(sorted(doubts))}." if doubts else said

    def peers(self) -> Lines:
        """Yield the speed of whole requests over the fastest other engine, by way to draft and by bits."""
        leads = self.results["peers"]["over_best_peer"]
        bits = sorted({lead["bits"] for lead in leads}, reverse=True)
        yield from header("drafter", *(f"{each} bits" for each in bits))
        for way, name in WAYS.items():
            found = {lead["bits"]: lead for lead in leads if lead["way"] == way}
            over = [f"{interval(found[each]['over'])}, {found[each]['peer']}" for each in bits]
            yield cells(name, *over)

    def rivals(self) -> Lines:
        """Yield kinds of drafts after equal training."""
        about = self.results["rivals"]["drafters"]
        yield from header("draft", "CPU minutes", "best K", "whole request", "over the draft")
        for name, row in ordered({name: row for name, row in about.items() if "training" in row}):
            minutes = fixed(row["training"]["cpu_seconds"].scaled(1 / 60), 0)
            gains = interval(row["speedup"]), interval(row["over_draft"])
            yield cells(label(name), minutes, row["k"], *gains)

    def shapes_at_cost(self) -> Lines:
        """Yield the predicted speed-up of TPOT of each draft shape, next to each target."""
        targets = self.results["shapes_at_cost"]["targets"]
        titles = [f"{size}, {row['target_pass_ms']:.0f} ms" for size, row in targets.items()]
        yield from header("draft", *titles)
        largest = list(targets.values())[-1]["drafts"]
        for name in sorted(largest, key=lambda name: -largest[name]["speedup"]):
            yield cells(name, *(fixed(row["drafts"][name]["speedup"]) for row in targets.values()))

    def siblings(self) -> Lines:
        """Yield the predicted speed-ups of cuts of SmolLM2, as they are and distilled."""
        rows = self.results["smollm2_siblings"]["layers"]
        yield from header("layers", "as it is", "distilled, mean of the seeds")
        for layers in sorted(rows, key=int):
            row = rows[layers]
            yield cells(layers, interval(row["stock"]["speedup"]), fixed(row["speedup"]["mean"]))

    def streams(self) -> Lines:
        """Yield predicted and measured output tokens per second by K and number of streams."""
        rows = self.results["streams"]["rows"]
        ks = sorted({row["k"] for row in rows})
        yield from header("streams", *(f"K = {k:.0f}" if k else "no draft" for k in ks))
        for streams in sorted({row["streams"] for row in rows}):
            by_k = {row["k"]: row for row in rows if row["streams"] == streams}
            speeds = [f"{by_k[k]['predicted']:.0f}, {by_k[k]['measured']:.0f}" for k in ks]
            yield cells(streams, *speeds)

    def demo(self) -> Lines:
        """Yield the drafters of the demo."""
        yield from header("drafter", "K", "tokens per target pass", "whole request")
        for name, row in ordered(self.results["demo"]["drafts"]):
            length = fixed(row["tokens_per_pass"])
            yield cells(label(name), row["k"], length, interval(row["speedup"]))

    def large_target(self) -> Lines:
        """Yield each draft's measured speed-up next to LLaMA-65B on an H200, by acceptance probability."""
        live, rows = self.results["h200_live"], self.results["h200_live"]["rows"]
        alphas = list(live["speedup"])[::2]
        yield from header("draft", "c", *(f"speed-up at alpha {alpha}" for alpha in alphas))
        for draft in reversed(rows):
            gains = [live["speedup"][alpha][draft] for alpha in alphas]
            shown = [f"{fixed(gain['speedup'])}, K = {gain['k']}" for gain in gains]
            yield cells(draft, fixed(drafted_ms(rows[draft]) / live["plain_ms"], 3), *shown)

    def h200_predictions(self) -> Lines:
        """Yield each draft's speed-up on an H200 as measured and as predicted, at the largest K."""
        rows = self.results["h200_prediction"]["constants"]["rows"].values()
        live = self.results["h200_live"]["rows"]
        k = next(iter(live.values()))[-1]["k"]
        yield from header("draft", "ms of a drafted token", f"measured, K = {k}", "predicted")
        for draft, steps in reversed(live.items()):
            (row,) = (row for row in rows if (row["draft"], row["k"]) == (draft, k))
            yield cells(draft, *map(fixed, (drafted_ms(steps), row["measured"], row["predicted"])))

    def paper_predicted(self) -> Lines:
        """Yield the prediction of the paper's five drafts at their best K, the fastest first."""
        found = self.results["paper_predicted"]
        yield from header("draft", "draft pass / target pass", "best K", "tokens per pass", "tokens/s", "speed-up")
        for name, row in sorted(found["drafts"].items(), key=lambda row: -row[1]["speedup"]):
            shown = (
                fixed(row["c"], 3),
                row["k"],
                fixed(row["tokens_per_pass"]),
                fixed(row["tokens_per_second"], 0),
                fixed(row["speedup"]),
            )
            yield cells(name, *shown)
        yield cells("no draft", "", "", "", fixed(found["plain_tokens_per_second"], 0), "")

    def trimmed_heads(self) -> Lines:
        """Yield the fraction of acceptance that drafts keep with a trimmed LM head."""
        yield from header("ids", "of the answers' tokens", "a pruned draft", "a distilled draft")
        for name, row in self.results["trimmed_head"]["heads"].items():
            if name == "all":
                continue
            shares = []
            for draft in row["drafts"].values():
                share = [value.scaled(100) for value in draft["share_of_whole"]]
                shares.append(f"{interval(share, 1)} %")
            yield cells(name, percent(row["coverage"], 1), *shares)

    def learning(self) -> Lines:
        """Yield the tokens per target pass of the published draft after training on more and more answers."""
        found = self.results["learning_curve"]["drafts"]
        counts = found[0]["tokens_per_pass"]
        yield from header("million tokens of answers", *(f"tokens per pass, K = {k}" for k in counts))
        for place in LEARNT:
            row = found[place]
            yield cells(millions(row["tokens"], 1), *map(interval, row["tokens_per_pass"].values()))

    def costs(self) -> Lines:
        """Yield what making a draft costs by arithmetic, for several targets."""
        hours = {"write_text_hours": "target writes the text", "distill_hours": "distil"}
        sizes = {
            "distill_gb": "memory",
            "distill_from_outputs_gb": "memory, stored outputs",
            "outputs_gb": "disk of stored outputs",
        }
        yield from header("target", "draft", *hours.values(), *sizes.values())
        for name, row in self.results["costs"]["targets"].items():
            entries = [f"{row[key]:.1f} h" for key in hours]
            entries += [f"{row[key]:.1f} GB" for key in sizes]
            yield cells(name, f"{row['draft_parameters_millions']:.0f}M parameters", *entries)


def drafted_ms(rows: list[dict[str, Any]]) -> Any:
    """Return the milliseconds of a drafted token in steps of the largest K of benchmarks.large_target."""
    return rows[-1]["draft_ms"] / rows[-1]["k"]


def label(name: str) -> str:
    """Return the name of a drafter as it is printed on pages."""
    name = TOKENS.sub("", TOKENS.sub("", name))
    return DRAFTERS.get(name, name)


def ordered(rows: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the rows, the largest speed-up first."""
    return sorted(rows.items(), key=lambda row: -float(bounds(row[1]["speedup"])[0]))


def header(*names: str) -> Lines:
    """Yield the header of a table. The first column is text, and all others are numbers."""
    yield cells(*names)
    yield "|---|" + "---:|" * (len(names) - 1)


def cells(*values: object) -> str:
    return f"| {' | '.join(map(str, values))} |"
