"""Tables and sentences for the pages, from benchmarks/results. Rows are ordered by their measured values."""

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.formats import (
    Value,
    against_plain,
    bounds,
    fixed,
    interval,
    mean,
    measured,
    percent,
    processor,
    separates,
    total,
)

DRAFTERS = {
    "fallback:draft=models_smollm2-135m-draft": "prompt lookup followed by the draft",
    "smollm2-135m-draft": "the draft",
    "10": "the draft",
    "draft": "the draft",
    "eagle": "EAGLE-3 head",
    "parallel-2": "parallel draft",
    "eagle:heads=runs_rivals_eagle-2": "EAGLE-3 head",
    "fallback:draft=runs_distilled_10": "prompt lookup followed by the draft",
    "adaptive:draft=runs_distilled_10,outputs=runs_calibration": "the policy: copy, draft or neither",
    "eagle:heads=runs_eagle": "EAGLE-3 head",
    "eagle:heads=runs_eagle,prompt_lookup_max=8,draft_tokens=3": "prompt lookup followed by the EAGLE-3 head",
    "fallback:draft=runs_distilled_parallel,draft_tokens=2": "prompt lookup followed by the parallel draft",
    "fallback:draft=runs_distilled_plain,draft_tokens=2": "prompt lookup followed by the ten-layer draft",
    "ngram:outputs=runs_answers": "n-grams of the target's answers",
    "parallel": "parallel draft",
    "plain": "ten-layer draft",
    "latest-lookup": "prompt lookup",
    "fallback": "prompt lookup followed by the smaller draft",
}
TOKENS = re.compile(r",draft_tokens=\d+")
DRAWN = ("ten-layer draft", "prompt lookup", "prompt lookup followed by the EAGLE-3 head")
WAYS = {"plain": "none", "draft": "ten-layer draft", "ngram": "n-grams of the prompt"}
TRAININGS = {
    "distilled/10": "ten-layer draft, first stage",
    "distilled/plain": "ten-layer draft, second stage",
    "distilled/parallel": "parallel draft, second stage",
    "eagle-first": "EAGLE-3 head, first stage",
    "eagle": "EAGLE-3 head, second stage",
}
LEARNT = {
    "pruned/6x256": "the cut, untrained",
    "distilled/1": "after one store of answers",
    "distilled/10": "after ten stores of answers",
}
STUDENTS = {
    "plain": "six-layer draft",
    "parallel": "six-layer parallel draft",
    "eagle": "EAGLE-3 head",
    "dflash": "DFlash head of two layers",
}
CUTS = {
    "default": "the default: activations, refitted, layers by influence",
    "pca": "the default with `--untie`",
    "even": "layers at even distances",
    "masks": "masks, weights frozen",
    "first": "the first layers and neurons",
    "no-refit": "activations without the refit",
    "random": "random layers and neurons",
}
AT_SIZE = {
    "10": "ten layers, trained once",
    "24": "{} layers, cut and refitted, not trained",
    "plain": "ten layers, trained twice",
    "parallel": "ten layers, parallel",
}


class Tables:
    """Tables and sentences by name: a method yields the lines of a table, or returns a sentence."""

    def __init__(self, results: dict[str, Any]) -> None:
        self.results = results
        self.studies = results["smollm2_studies"]
        # the K at which the studies give tokens per target pass
        self.studied_k = f"{self.studies['accuracy']['k']:.0f}"

    def coverage(self) -> Iterator[str]:
        """Yield a table of the coverage of intervals by what is simulated and by number of conversations."""
        found = self.results["coverage"]["table"]
        yield from header("conversations", *next(iter(found.values())))
        for name, by_size in found.items():
            entries = []
            for row in by_size.values():
                covered, lowest, faster = (
                    row[key].scaled(100) for key in ("coverage", "lowest", "false_faster")
                )
                entries.append(f"{covered:.1f} ({lowest:.0f}), {faster:.1f}")
            yield cells(name, *entries)
        widths = [row["width"].scaled(100) for row in found["one drafter, one K"].values()]
        yield cells("width of the interval, one drafter", *(f"{width:.0f}" for width in widths))

    def smollm2(self, record: str = "") -> Iterator[str]:
        """Yield a table of SmolLM2's drafters, ordered by the speed-up of whole requests."""
        about = self.results[record or "smollm2"]
        greedy, sampled = about["greedy"], about.get("sampled", {})
        names = ["whole request", "TPOT", "TTFT, ms", "tokens per target pass"]
        if sampled:
            names.append(
                f"temperature {about['settings']['sampled']['temperature']:g}, whole request"
            )
        yield from header("drafter", "K", *names)
        for name, row in ordered(greedy, request_gain):
            first, length = fixed(row["ttft_ms"], 0), fixed(row["tokens_per_pass"])
            of_sampled = [request(sampled[name]) if name in sampled else ""] if sampled else []
            yield cells(label(name), row["k"], request(row), tpot(row), first, length, *of_sampled)

    def smollm2_reading(self, record: str = "") -> str:
        """Return a sentence that compares plain decoding, prompt lookup and draft models by whole requests."""
        greedy = self.results[record or "smollm2"]["greedy"]
        lookup = greedy["latest-lookup"]
        best, row = ordered(greedy, request_gain)[0]
        text = f"{label(best)} gains most: {request(row)}"
        rivals: dict[str, list[str]] = {}
        for name in sorted(name for name in greedy if name.startswith("fallback:")):
            rivals.setdefault(relation(lookup, greedy[name]), []).append(
                f"{label(name)} ({request(greedy[name])})"
            )
        compared = [f"{words} {' and '.join(names)}" for words, names in rivals.items()]
        if row is not lookup:
            compared = [f"{relation(lookup, row)} that", *compared]
            text += f". Prompt lookup alone ({request(lookup)}) {', and '.join(compared)}"
        if "tpot_speedup" not in lookup:
            return f"The record has no intervals of whole requests. By the estimates alone, {text}."
        verdicts: dict[str, list[str]] = {}
        for name, each in ordered(greedy, request_gain):
            verdicts.setdefault(against_plain(each["speedup"]), []).append(label(name))
        told = [f"{words} with {' and '.join(names)}" for words, names in verdicts.items()]
        return (
            f"By their intervals, whole requests are {'; '.join(told)}. By the estimates, {text}."
        )

    def smollm2_precision(self, record: str = "") -> str:
        """Return a sentence on the precision of the target's and the drafts' weights."""
        about = self.results[record or "smollm2"]["settings"]["greedy"]
        return f"The target ran in {about['target_weights']} and the drafts in {', '.join(about['draft_weights'])}."

    def smollm2_baseline(self, record: str = "") -> str:
        """Return a sentence on the target's speed without a draft at each precision."""
        row = self.results[record or "smollm2"]["greedy"]["latest-lookup"]
        if "plain_tokens_per_second_by_weights" in row:
            rates = [
                f"{rate:.0f} tokens/s in {name}"
                for name, rate in row["plain_tokens_per_second_by_weights"].items()
            ]
            return f"Without a draft the target makes {' and '.join(rates)}. Speed-ups are over the faster."
        passes = self.results["passes"]["milliseconds"]
        share = fixed(passes["native_int8"]["1"] / passes["native"]["1"])
        return (
            f"The target was not run in int8. A pass in int8 takes {share} of the time of a pass in bf16 "
            "(`passes.json`), so the gain over the fastest plain decoding is not known."
        )

    def of(self, name: str) -> dict[str, Any]:
        """Return SmolLM2's results with a drafter. name: Name of the drafter in tables."""
        (row,) = [
            row for key, row in self.results["smollm2"]["greedy"].items() if label(key) == name
        ]
        return row

    def smollm2_texts(self, record: str = "") -> str:
        """Return a sentence on the fraction of greedy texts that equal those of plain decoding."""
        rows = list(self.results[record or "smollm2"]["greedy"].values())
        if all(row["identical"] for row in rows):
            return "Every drafter wrote the text of plain decoding in every greedy request."
        shares = [row["equal_texts"] for row in rows]
        least, most = percent(min(shares)), percent(max(shares))
        return f"Of the greedy texts {least} to {most}, by drafter, are those of plain decoding."

    def smollm2_categories(self) -> Iterator[str]:
        """Yield a table of the speed-up of TPOT in the categories with the most requests."""
        greedy = self.results["smollm2"]["greedy"]
        names = sorted(
            (name for name in greedy if label(name) in DRAWN),
            key=lambda name: DRAWN.index(label(name)),
        )
        categories = greedy["latest-lookup"]["by_category"]
        most = max(row["prompts"] for row in categories.values())
        yield from header(
            "category", "requests", *(f"{label(name)}, {measure(greedy[name])}" for name in names)
        )
        for category in [name for name, row in categories.items() if row["prompts"] == most]:
            gains = [interval(greedy[name]["by_category"][category]["speedup"]) for name in names]
            yield cells(category.replace("_", " "), categories[category]["prompts"], *gains)

    def smollm2_training(self) -> Iterator[str]:
        yield from header("training", "tokens", "seconds", "held-out acceptance before", "after")
        for name, row in self.results["smollm2"]["training"].items():
            learnt = [fixed(row[when]["acceptance"], 3) for when in ("before", "after")]
            yield cells(TRAININGS[name], row["tokens"], fixed(row["training_seconds"], 0), *learnt)

    def peers_setting(self) -> str:
        peers = self.results["peers"]
        modes = {
            row["engine"]: f"{row['engine']} {row['version']}: {row['mode']}"
            for row in peers["engines"]
        }
        text = f"`python -m benchmarks.peers` (`peers.json`; {measured(peers)}): {peers['prompts']} prompts, "
        text += f"{peers['new_tokens']} new tokens, greedy, batch {peers['batch']}. Each engine runs at the K that is "
        return f"{text}best on other prompts. Tokens per CPU second. {'; '.join(modes.values())}."

    def peers(self) -> Iterator[str]:
        """Yield a table of engines for each way to draft, ordered by tokens per second of whole requests."""
        peers = self.results["peers"]
        names = (
            "tokens/s, whole request",
            "tokens/s after the first",
            "over its own plain",
            "tokens per target pass",
        )
        yield from header(
            "engine, target's weights", "drafter", "K", *names, "texts of plain decoding"
        )
        for way in WAYS:
            rows = [row for row in peers["engines"] if row["way"] == way]
            for row in sorted(rows, key=lambda row: -row["request_tps"]["value"]):
                yield cells(
                    f"{row['engine']}, {row['target_dtype']}",
                    WAYS[way],
                    row["k"] or ("" if way == "plain" else "its defaults"),
                    interval(row["request_tps"], 1),
                    interval(row["decode_tps"], 1),
                    "" if way == "plain" else interval(row["over_own_plain"]),
                    fixed(row["tokens_per_pass"]["value"]),
                    percent(row["same_texts"]),
                )

    def peers_reading(self) -> str:
        """Return a sentence that compares draftlab's speed with the fastest other engine's, for each way to draft."""
        peers = self.results["peers"]
        leads = []
        for lead in peers["over_best_peer"]:
            _, low, high = bounds(lead["over"])
            unclear = ", no clear difference" if low <= 1 <= high else ""
            leads.append(
                f"{interval(lead['over'])} ({WAYS[lead['way']]}, {lead['bits']} bits, {lead['peer']}{unclear})"
            )
        return f"Whole requests of draftlab over the fastest other engine at equal bits: {'; '.join(leads)}."

    def depth(self) -> Iterator[str]:
        study = self.studies["depth"]
        names = "ms a pass, native", "ms a pass, eager", "K", "TPOT"
        yield from header(
            "draft", "held-out acceptance", f"tokens per target pass, K = {self.studied_k}", *names
        )
        for name, row in sorted(
            study["drafts"].items(), key=lambda row: int(row[0].partition("x")[0])
        ):
            live, eager = study["live"][name], study["passes"]["eager"][name]["ms"]["1 x 256"]
            length = interval(row["tokens_per_pass"][self.studied_k])
            passes = fixed(live["pass_ms"]), fixed(eager)
            yield cells(name, fixed(row["acceptance"], 3), length, *passes, live["k"], tpot(live))

    def pruning(self) -> Iterator[str]:
        names = "seconds to cut", "held-out acceptance, cut", "distilled"
        yield from header("cut by", *names, f"tokens per target pass, K = {self.studied_k}")
        for name, row in ordered(self.studies["pruning"], lambda row: row["acceptance"]):
            label = CUTS.get(name) or f"joint masks, rate {name.removeprefix('joint-')}"
            learnt = [fixed(row[key], 3) for key in ("acceptance_before", "acceptance")]
            length = interval(row["tokens_per_pass"][self.studied_k])
            yield cells(label, fixed(row["cut_seconds"], 0), *learnt, length)

    def siblings(self) -> Iterator[str]:
        names = "as it is", "distilled, mean of the seeds"
        yield from header(
            "layers",
            "parameters",
            *(f"acceptance {name}" for name in names),
            *(f"speed-up {name}" for name in names),
        )
        for layers, row in sorted(
            self.results["smollm2_siblings"]["layers"].items(), key=lambda row: int(row[0])
        ):
            stock = row["stock"]
            learnt = fixed(stock["acceptance"], 3), mean(row["acceptance"])
            gains = interval(stock["speedup"]), mean(row["speedup"])
            yield cells(layers, f"{row['parameters'] / 1e6:.0f}M", *learnt, *gains)

    def siblings_reading(self) -> str:
        """Return a sentence that says for which cuts the intervals of all distilled seeds are above the stock cut's.

        Each distilled draft is compared with the cut of as many layers.
        """
        rows = self.results["smollm2_siblings"]["layers"]
        better = [
            layers
            for layers, row in sorted(rows.items(), key=lambda row: int(row[0]))
            if min(bounds(each["speedup"])[1] for each in row["distilled"])
            > bounds(row["stock"]["speedup"])[2]
        ]
        if not better:
            return "For no number of layers do all distilled seeds lie above the cut as it is."
        return (
            f"With {' and '.join(better)} layers, all distilled seeds lie above the cut as it is by their intervals. "
            "With other numbers of layers, some intervals overlap."
        )

    def losses(self) -> Iterator[str]:
        """Yield a table of losses, each at the learning rate that ran with several seeds."""
        yield from header(
            "loss, rate", "seeds", "held-out acceptance", f"tokens per pass, K = {self.studied_k}"
        )
        rows = {name: row for name, row in self.studies["losses"].items() if row["seeds"] > 1}
        for name, row in ordered(rows, lambda row: row["acceptance"]["mean"]):
            learnt = mean(row["acceptance"]), mean(row["tokens_per_pass"])
            yield cells(name.replace("-", ", ", 1), row["seeds"], *learnt)

    def published_draft(self) -> Iterator[str]:
        """Yield the speed-ups of whole requests with the published draft, for each score."""
        about = self.results["published_draft"]
        heat = f"temperature {about['settings']['sampled']['temperature']:g}"
        titles = {"greedy": "bfloat16 target", "int8": "int8 target", "sampled": heat}
        yield from header(
            "drafter", *itertools.chain(*((f"K, {title}", title) for title in titles.values()))
        )
        scores = [{label(name): row for name, row in about[score].items()} for score in titles]
        for name, _ in ordered(scores[0], request_gain):
            found = [score.get(name) for score in scores]
            pairs = [(row["k"], interval(row["speedup"])) if row else ("", "") for row in found]
            yield cells(name, *itertools.chain(*pairs))

    def published_baseline(self) -> str:
        """Return a sentence on the target's speed without a draft, and on the best bfloat16 target next to int8."""
        about = self.results["published_draft"]
        plain = next(iter(about["greedy"].values()))["plain"]
        rates = [f"{rate:.0f} tokens/s in {name}" for name, rate in plain.items()]
        best = interval(about["request_best_drafter"]["over_fastest"])
        return (
            f"Without a draft the target makes {' and '.join(rates)}. The bfloat16 target with its best drafter runs "
            f"at {best} of the faster of these: round the target first where its accuracy allows it."
        )

    def readme_table(self) -> Iterator[str]:
        """Yield the speed-ups of whole requests by drafter, kind of prompts and precision of the target."""
        about = self.results["readme_table"]
        arms = [(kind, weights) for kind in ("questions", "edits") for weights in about[kind]]
        yield from header("drafter", *(f"{kind}, {weights} target" for kind, weights in arms))
        found = [
            {label(name): row for name, row in about[kind][weights].items()}
            for kind, weights in arms
        ]
        for name, _ in ordered(found[0], request_gain):
            rows = [scores[name] for scores in found]
            texts = [f"{interval(row['speedup'])}, K = {row['k']}" for row in rows]
            doubts = [" ‡" if row["doubt"] else "" for row in rows]
            yield cells(name, *map("".join, zip(texts, doubts, strict=True)))

    def readme_plain(self) -> str:
        """Return a sentence on the speed of the target alone, by kind of prompts and precision."""
        about = self.results["readme_table"]
        texts = []
        for kind in ("questions", "edits"):
            plain = next(iter(about[kind]["bfloat16"].values()))["plain"]
            rates = [f"{rate:.0f} in {weights}" for weights, rate in plain.items()]
            texts.append(f"{' and '.join(rates)} on the {kind}")
        said = f"Without a draft the target makes these tokens per CPU second: {', '.join(texts)}."
        arms = [each for kind in ("questions", "edits") for each in about[kind].values()]
        doubts = sorted({row["doubt"] for each in arms for row in each.values() if row["doubt"]})
        return f"{said} ‡ No verdict: {'; '.join(doubts)}." if doubts else said

    def published_draft_tokens(self) -> str:
        """Return the largest number of tokens that the published draft drafts after prompt lookup."""
        return self.published_options().partition("=")[2]

    def shapes_at_cost(self) -> Iterator[str]:
        """Yield the predicted speed-up of TPOT and its K of each draft shape, next to each target."""
        targets = self.results["shapes_at_cost"]["targets"]
        titles = [f"{size}, {row['target_pass_ms']:.0f} ms" for size, row in targets.items()]
        yield from header("draft", *itertools.chain(*((title, "K") for title in titles)))
        largest = list(targets.values())[-1]["drafts"]
        for name, _ in ordered(largest, lambda row: row["speedup"]):
            rows = [target["drafts"][name] for target in targets.values()]
            yield cells(
                name, *itertools.chain(*((fixed(row["speedup"]), row["k"]) for row in rows))
            )

    def search_by_cost(self) -> Iterator[str]:
        """Yield the candidates of a search next to each target, with the measured speed-up of whole requests."""
        yield from header(
            "target", "draft", "K", "ms of a pass", "tokens per pass", "TPOT, predicted", "K, measured",
            "requests, measured",
        )  # fmt: skip
        for size, found in self.results["search_by_cost"]["targets"].items():
            for name, row in found["candidates"].items():
                own = found["measured"].get(name)
                yield cells(
                    size, name, row["k"], fixed(row["pass_ms"], 1), fixed(row["tokens_per_pass"]),
                    fixed(row["predicted_tpot"]), own["k"] if own else "", interval(own["speedup"]) if own else "",
                )  # fmt: skip

    def lookup_first(self) -> Iterator[str]:
        """Yield tokens per target pass by draft and by the shortest match that fallback copies."""
        drafts = self.results["lookup_first"]["drafts"]
        lengths = list(next(iter(drafts.values())))
        yield from header("draft", *(f"`min_match={each}`" for each in lengths))
        for name, row in drafts.items():
            yield cells(LEARNT[name], *(interval(row[each]["tokens_per_pass"]) for each in lengths))

    def verify_rules(self) -> Iterator[str]:
        """Yield tokens per target pass of sampled drafts by K and by verify rule."""
        yield from header("K", "`--rule rejection`", "`--rule block`", "block over rejection")
        for k, row in self.results["verify_rules"]["by_k"].items():
            yield cells(k, *map(interval, row.values()))

    def published_options(self) -> str:
        """Return the options of prompt lookup followed by the published draft, as they are typed."""
        name = self.results["published_draft"]["request_best_drafter"]["name"]
        return name.partition(",")[2].removesuffix("@int8")

    def published_expanded(self) -> Iterator[str]:
        """Yield the speed-ups of whole requests with the published draft at the cost of larger targets."""
        yield from header(
            "target, ms of its pass", "drafter", "K", "whole request", "TPOT", "tokens per target pass"
        )  # fmt: skip
        about = self.results["published_draft"]
        for size in (size for size in about if f"at_{size}_best" in about):
            for name, row in ordered(about[size], request_gain):
                yield cells(
                    f"{size}, {row['target_pass_ms']:.0f}", label(name), row["k"], interval(row["speedup"]), tpot(row),
                    fixed(row["tokens_per_pass"]),
                )  # fmt: skip

    def rivals(self) -> Iterator[str]:
        """Yield kinds of drafts after equal training."""
        about = self.results["rivals"]["drafters"]
        trained = {name: row for name, row in about.items() if "training" in row}
        ks = list(next(iter(trained.values()))["tokens_per_pass_by_k"])
        yield from header(
            "draft", "million tokens of answers", "CPU minutes of training",
            *(f"tokens per pass, K = {k}" for k in ks), "best K", "whole request", "over the draft",
        )  # fmt: skip
        for name, row in ordered(trained, request_gain):
            made, lengths = row["training"], row["tokens_per_pass_by_k"]
            yield cells(
                label(name), fixed(made["tokens"].scaled(1e-6)), fixed(made["cpu_seconds"].scaled(1 / 60), 0),
                *(fixed(lengths[k]) for k in ks), row["k"], interval(row["speedup"]), interval(row["over_draft"]),
            )  # fmt: skip

    def rival_seeds(self) -> Iterator[str]:
        """Yield kinds of drafts after equal, shorter training with several seeds."""
        kinds = self.results["rival_seeds"]["drafters"]
        seeds = list(kinds["draft"])
        ks = list(kinds["draft"][seeds[0]]["tokens_per_pass"])
        yield from header(
            "draft", "seed", "million tokens of answers", "CPU minutes of training",
            *(f"tokens per pass, K = {k}" for k in ks), f"over the draft, K = {ks[-1]}",
        )  # fmt: skip
        for kind, by_seed in kinds.items():
            for seed in seeds:
                row = by_seed[seed]
                yield cells(
                    label(kind), seed, fixed(row["training"]["tokens"].scaled(1e-6)),
                    fixed(row["training"]["cpu_seconds"].scaled(1 / 60), 0),
                    *(interval(row["tokens_per_pass"][k]) for k in ks), interval(row["over_draft"][ks[-1]]),
                )  # fmt: skip

    def rival_policies(self) -> Iterator[str]:
        """Yield ways to decide at each step what is drafted, and how many tokens."""
        about = self.results["rivals"]["drafters"]
        yield from header(
            "drafter", "largest K", "tokens per pass", "whole request", "over prompt lookup, then the draft"
        )  # fmt: skip
        ways = {name: row for name, row in about.items() if "training" not in row}
        for name, row in ordered(ways, request_gain):
            yield cells(
                label(name), row["k"], fixed(row["tokens_per_pass"]), interval(row["speedup"]),
                interval(row["over_fallback"]),
            )  # fmt: skip

    def learnt_tokens(self) -> str:
        """Return the number of tokens that the published draft learnt from."""
        return f"{int(self.results['learning_curve']['drafts'][-1]['tokens']):,}"

    def learnt_losses(self) -> str:
        """Return a sentence that says for which stores the published draft was trained with which loss and rates."""
        rows = self.results["learning_curve"]["drafts"][1:]
        losses = dict.fromkeys(row["loss"] for row in rows)
        told = []
        for loss in losses:
            rates = [row["lr"] for row in rows if row["loss"] == loss]
            told.append(
                f"{loss} for {len(rates)} stores, at rates from {max(rates):g} down to {min(rates):g}"
            )
        return f"The loss is {', then '.join(told)}."

    def learning_curve(self) -> Iterator[str]:
        """Yield the acceptance of the published draft, by the number of tokens that it has learnt from."""
        about = self.results["learning_curve"]
        ks = list(about["drafts"][0]["tokens_per_pass"])
        yield from header(
            "million tokens of answers", "temperature of the last", "held-out acceptance",
            *(f"tokens per pass, K = {k}" for k in ks),
        )  # fmt: skip
        heats = ["", *(f"{store['temperature']:g}" for store in about["answers"])]
        for heat, row in zip(heats, about["drafts"], strict=True):
            lengths = [interval(row["tokens_per_pass"][k]) for k in ks]
            yield cells(fixed(row["tokens"] / 1e6), heat, fixed(row["acceptance"], 3), *lengths)

    def students(self) -> Iterator[str]:
        """Yield each kind of student of equal compute, with the timed gain of each seed."""
        rows = self.results["smollm2_students"]["kinds"]
        per_k = list(rows["plain"]["tokens_per_pass"])
        yield from header(
            "student", "CPU seconds", "held-out acceptance", *(f"tokens per pass, K = {k}" for k in per_k),
            "speed-up of whole requests, by seed",
        )  # fmt: skip
        for name, row in ordered(rows, lambda row: row["speedup"]["mean"]):
            gains = ", ".join(interval(each["speedup"]) for each in row["trained"])
            per_pass = [mean(row["tokens_per_pass"][k]) for k in per_k]
            spent = f"{row['cpu_seconds']['mean']:.0f}"
            yield cells(STUDENTS[name], spent, mean(row["acceptance"]), *per_pass, gains)

    def batches(self) -> Iterator[str]:
        yield from header("drafter", "batch", "K", "TPOT", "the score says")
        for name, row in self.studies["batches"].items():
            says = (
                "cannot tell"
                if row["doubt"]
                else against_plain(row.get("tpot_speedup", row["speedup"]))
            )
            drafter = label(name.rpartition("-b")[0])
            yield cells(drafter, row["batch"], row["k"], tpot(row), says)

    def shape_tokens(self) -> str:
        """Return the total number of training tokens of the draft that the search found."""
        trainings = self.studies["shape"]["trainings"]
        return str(
            total(row["tokens"] for name, row in trainings.items() if "parallel" not in name)
        )

    def contexts(self) -> Iterator[str]:
        """Yield a table of the acceptance of the first drafted token, by the number of tokens before this token."""
        drafts = self.results["eagle_tiny"]["smollm2_by_context"]
        yield from header("tokens before", *drafts)
        for rows in zip(*drafts.values(), strict=True):
            yield cells(
                f"{rows[0]['from']} to {rows[0]['to']}", *(fixed(row["first"], 3) for row in rows)
            )

    def at_size(self) -> Iterator[str]:
        names = "K", "tokens per target pass", "live TPOT", "predicted", "other work ran"
        yield from header("target, ms of its pass", "draft, ms of its pass", *names)
        rows = [row for row in self.results["at_size"]["rows"] if row["best"] and row["predicted"]]
        # the two expansions of one draft are left out, because their costs were chosen to be equal
        rows = [row for row in rows if not row["draft"].endswith("one-text")]
        for row in sorted(rows, key=lambda row: -row["speedup"]):
            target = f"{row['size']}, {row['target_pass_ms']:.1f}"
            draft = f"{AT_SIZE.get(row['draft'], '{}').format(row['draft'])}, {row['pass_ms']:.2f}"
            live, predicted = interval([row["speedup"], *row["interval"]]), fixed(row["predicted"])
            busy = "yes" if row["doubt"] else "no"
            yield cells(
                target, draft, row["k"], fixed(row["tokens_per_pass"]), live, predicted, busy
            )

    def served(self) -> Iterator[str]:
        """Yield a table of the acceptance of exported drafts and heads, by the server's counters and by draftlab."""
        yield from header(
            "served", "in", "temperature", "K", "texts", "server counts", "draftlab counts"
        )
        for name, row in self.results["eagle_served"]["served"].items():
            if name in ("vllm", "vllm, speculators", "llama.cpp"):
                yield served("tiny, head", row)
        for row in self.results["eagle_served_smollm2"]["served"]:
            yield served(f"SmolLM2, {row['draft']}", row)
        for row in self.results["server_rules"]["rows"]:
            method = f"`{row['draft_sample_method']}`"
            yield served(f"SmolLM2, {row['draft']}, {method}", row | {"runtime": row["server"]})

    @staticmethod
    def same_machine(*results: dict[str, Any]) -> str:
        """Return the day and the processor of several results, which must be the same in all."""
        ((date, cpu),) = {(result["date"], processor(result)) for result in results}
        return f"{date}, {cpu}"

    def streams(self) -> Iterator[str]:
        rows = self.results["streams"]["rows"]
        ks = sorted({row["k"] for row in rows})
        yield from header("streams", *(f"K = {k:.0f}" if k else "no draft" for k in ks))
        for streams in sorted({row["streams"] for row in rows}):
            by_k = {row["k"]: row for row in rows if row["streams"] == streams}
            yield cells(
                streams, *(f"{by_k[k]['predicted']:.1f}, {by_k[k]['measured']:.1f}" for k in ks)
            )

    def largest_streams_error(self) -> str:
        worst = max((row["error"] for row in self.results["streams"]["rows"]), key=abs)
        return percent(worst.scaled(-1 if worst < 0 else 1), 1)

    def demo(self) -> Iterator[str]:
        rows = ordered(self.results["demo"]["drafts"], lambda row: row["speedup"][0])
        names = "ms of a draft pass", "tokens per target pass", "tokens/s"
        yield from header("drafter", "K", *names, measure(rows[0][1]))
        for name, row in rows:
            model = name not in DRAFTERS
            yield cells(
                f"{name}, {row['parameters'].scaled(1e-6):.2f}M parameters"
                if model
                else label(name),
                row["k"],
                fixed(row["pass_ms"]) if model else "",
                fixed(row["tokens_per_pass"]),
                fixed(row["tokens_per_second"], 0),
                interval(row["speedup"]),
            )

    def earlier_demo(self) -> str:
        rows = ordered(self.results["demo_avx512"]["drafts"], lambda row: row["speedup"][0])
        return ", ".join(f"{fixed(row['speedup'][0])} ({label(name)})" for name, row in rows)

    def demo_minutes(self) -> str:
        return fixed(total(self.results["demo"]["seconds"].values()).scaled(1 / 60), 1)

    def demo_reading(self) -> str:
        """Return sentences on the speed-ups and on the training of the demo's two draft models."""
        rows = {
            name: row
            for name, row in self.results["demo"]["drafts"].items()
            if name not in DRAFTERS
        }
        (name, row), (other, less) = ordered(rows, lambda row: row["speedup"][0])
        trained = self.results["demo"]["acceptance"]
        tokens = [trained[f"distilled/{each}"]["tokens"] for each in (name, other)]
        text = f"The {name} draft gains {interval(row['speedup'])} and the {other} draft {interval(less['speedup'])} "
        text += f"({measure(row)}). "
        text += f"They were trained on {tokens[0]} and {tokens[1]} tokens. "
        if separates(row["speedup"], less["speedup"]):
            return f"{text}The intervals do not overlap."
        return f"{text}Neither is shown to be faster."

    def llama_65b(self) -> Iterator[str]:
        """Yield a table of the predicted tokens per second at the best K, by the acceptance probability alpha."""
        modes = self.results["llama_65b"]["modes"]
        alphas = list(modes["eager"]["tokens_per_second"]["wide-796m"])[::2]
        yield from header("draft", "mode", "ms of a pass", *(f"alpha {alpha}" for alpha in alphas))
        for mode, table in modes.items():
            for draft, pass_ms in table["draft_ms"].items():
                speeds = [table["tokens_per_second"][draft][alpha] for alpha in alphas]
                best = [max(speed, key=speed.__getitem__) for speed in speeds]
                found = [f"{speed[k]:.1f} (K = {k})" for speed, k in zip(speeds, best, strict=True)]
                yield cells(draft, mode, fixed(pass_ms, 1), *found)

    def batch_of_65b(self) -> str:
        """Return a sentence on the predicted speed-up of wide-796m by batch size, at the shortest prompts."""
        rows = [
            row
            for row in self.results["study_rows"]["rows"]
            if row["draft"].startswith("wide-796m")
        ]
        shortest = min(row["prompt_tokens"] for row in rows)
        at = {row["batch"]: row["speedup"] for row in rows if row["prompt_tokens"] == shortest}
        first, last = min(at), max(at)
        return f"from {fixed(at[first])} at batch {first} to {fixed(at[last])} at batch {last}"

    def large_target(self) -> Iterator[str]:
        """Yield a table of each draft's measured speed-up next to LLaMA-65B on an H200, by acceptance probability."""
        live, rows = self.results["h200_live"], self.results["h200_live"]["rows"]
        alphas = list(live["speedup"])[::2]
        yield from header("draft", "c", *(f"speed-up at alpha {alpha}" for alpha in alphas))
        for draft in reversed(rows):
            gains = [live["speedup"][alpha][draft] for alpha in alphas]
            shown = [f"{fixed(gain['speedup'])}, K = {gain['k']}" for gain in gains]
            yield cells(draft, fixed(drafted_ms(rows[draft]) / live["plain_ms"], 3), *shown)

    def h200_predictions(self) -> Iterator[str]:
        """Yield a table of each draft's speed-up on an H200 as measured and as predicted, at two K."""
        rows = self.results["h200_prediction"]["constants"]["rows"].values()
        live = self.results["h200_live"]
        ks = [row["k"] for row in live["rows"]["wide-796m"]][2::2]
        yield from header(
            "draft", "ms of a drafted token", *(f"K = {k}, {kind}" for k in ks for kind in ("measured", "predicted"))
        )  # fmt: skip
        for draft, steps in reversed(live["rows"].items()):
            mine = [row for row in rows if row["draft"] == draft and row["k"] in ks]
            both = [fixed(row[kind]) for row in mine for kind in ("measured", "predicted")]
            yield cells(draft, fixed(drafted_ms(steps)), *both)

    def trimmed_heads(self) -> Iterator[str]:
        """Yield a table of the fraction of acceptance that drafts keep with a trimmed LM head."""
        heads = {
            name: row
            for name, row in self.results["trimmed_head"]["heads"].items()
            if name != "all"
        }
        yield from header("ids", "of the answers' tokens", "a pruned draft", "a distilled draft")
        for name, row in heads.items():
            kept = [
                [value.scaled(100) for value in draft["share_of_whole"]]
                for draft in row["drafts"].values()
            ]
            yield cells(
                name, percent(row["coverage"], 1), *(f"{interval(shares, 1)} %" for shares in kept)
            )

    def costs(self) -> Iterator[str]:
        names = (
            "target writes the text",
            "distil",
            "memory",
            "memory, stored outputs",
            "disk of stored outputs",
        )
        yield from header("target", "draft", *names)
        for name, row in self.results["costs"]["targets"].items():
            hours = [f"{row[key]:.1f} h" for key in ("write_text_hours", "distill_hours")]
            sizes = [
                f"{row[key]:.1f} GB"
                for key in ("distill_gb", "distill_from_outputs_gb", "outputs_gb")
            ]
            yield cells(name, f"{row['draft_parameters_millions']:.0f}M parameters", *hours, *sizes)


def drafted_ms(rows: list[dict[str, Any]]) -> Any:
    """Return the milliseconds of a drafted token in steps of the largest K of benchmarks.large_target."""
    return rows[-1]["draft_ms"] / rows[-1]["k"]


def label(name: str) -> str:
    """Return the name of a drafter as it is printed on pages."""
    name = name.removesuffix("@int8")
    return DRAFTERS.get(name) or DRAFTERS.get(TOKENS.sub("", name), name)


def served(name: str, row: dict[str, Any]) -> str:
    counted = fixed(row["measured"], 3), interval([row["draftlab"], row["low"], row["high"]], 3)
    return cells(
        name, row["runtime"], f"{row.get('temperature', 0):g}", row["k"], row["texts"], *counted
    )


def request_gain(row: dict[str, Any]) -> Value:
    """Return the speed-up of a whole request. In older results, it is the ratio of the stored times."""
    if "tpot_speedup" in row:
        return bounds(row["speedup"])[0]
    return row["plain_request_ms"] / row["request_ms"]


def request(row: dict[str, Any]) -> str:
    return interval(row["speedup"]) if "tpot_speedup" in row else fixed(request_gain(row))


def tpot(row: dict[str, Any]) -> str:
    """Return the speed-up of TPOT as text. In older results, the key "speedup" has it."""
    return interval(row.get("tpot_speedup", row["speedup"]))


def measure(row: dict[str, Any]) -> str:
    """Return the quantity whose speed-up is in row["speedup"]: "whole request" or, in older results, "TPOT"."""
    return "whole request" if "tpot_speedup" in row else "TPOT"


def relation(row: dict[str, Any], other: dict[str, Any]) -> str:
    """Return "gains more than", "gains less than" or "does not differ clearly from", by speed-up of whole requests."""
    if "tpot_speedup" in row and not separates(row["speedup"], other["speedup"]):
        return "does not differ clearly from"
    return "gains more than" if request_gain(row) > request_gain(other) else "gains less than"


def ordered(rows: dict[str, Any], gain: Callable[[Any], float]) -> list[tuple[str, Any]]:
    """Return the rows, sorted by `gain` of each, the largest first."""
    return sorted(rows.items(), key=lambda row: -float(gain(row[1])))


def header(*names: str) -> Iterator[str]:
    """Yield the header of a table. The first column is text, and all others are numbers."""
    yield cells(*names)
    yield "|---|" + "---:|" * (len(names) - 1)


def cells(*values: object) -> str:
    return f"| {' | '.join(map(str, values))} |"
