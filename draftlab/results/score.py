"""The schema of score.json: measurements as they were taken, and the statistics derived from them. No torch.

K drafted tokens per step; a step is one target pass after the prefill, and the drafting before it.
"""

import re
from collections.abc import Collection, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from draftlab import intervals
from draftlab.intervals import Interval, Timings
from draftlab.model.shape import Shape
from draftlab.provenance import Stage
from draftlab.reading import FileModel, read_model
from draftlab.results.decoding import (
    AcceptanceMetrics,
    Counters,
    Generation,
    ServedGeneration,
    count_acceptance,
    decode_timings,
    repeats_by_prompt,
    request_timings,
)
from draftlab.sampling import SamplingParams

BUSY = 0.5  # share of the cores that other work uses
LONG_WAITS = 0.1  # share of the time, for a core or without one
UNDER_PRESSURE = 0.5  # share of the time; below it are the short threads of every system


class Environment(FileModel):
    """The machine, just before measuring."""

    system: str
    processor: str
    cores: int
    busy_cores: float  # used by other work
    governor: str | None  # CPU frequency governor
    driver: str | None  # NVIDIA driver
    # while it was timed, where Linux says it:
    # share of the time in which the decoding thread wanted a core, without one
    waited_share: float | None = None
    # share of the cores' time, given to other machines by the hypervisor
    stolen_share: float | None = None
    # share of the time in which some thread of the machine waited for a core
    pressure: float | None = None

    @property
    def busy(self) -> bool:
        return self.busy_cores > BUSY * self.cores

    def counts_cpu_seconds(self, device: str, threads: int | None) -> bool:
        """Return whether times are CPU seconds, in which waits do not count: those of one CPU thread."""
        return device == self.processor and threads == 1

    def doubt(self, device: str, threads: int | None) -> str | None:
        """The reason to doubt times of that number of threads on a device; None: there is none.

        Other work and other machines slow what runs, too: they share its caches and its memory. Waits for a core are
        in wall-clock time only, but a core that was shared cost CPU seconds as well, and more of them where a step is
        wide: benchmarks.noise measured 1.29x to 1.70x where 1.79x is true. Pressure counts the waits of all threads.
        """
        if self.busy:
            return f"other work kept {self.busy_cores:.1f} of {self.cores} cores busy"
        if (self.stolen_share or 0) > LONG_WAITS:
            return (
                f"the hypervisor gave {self.stolen_share:.0%} of the cores' time to other machines"
            )
        if (self.waited_share or 0) > LONG_WAITS:
            return f"decoding waited for a core in {self.waited_share:.0%} of its time"
        if self.counts_cpu_seconds(device, threads):
            return None
        if device == self.processor and (self.pressure or 0) > UNDER_PRESSURE:
            return f"threads waited for a core in {self.pressure:.0%} of the time"
        return None


DISAGREE = 1.25  # ratio of the implied to the measured speed-up, or its inverse, from which one of them is wrong
MANY_STALLS = 0.1  # share of steps
UNEVEN = 1.5  # slowest over fastest repeat of a prompt, from which the machine must have been busy
# share of prompts: one in twenty is then slow in two repeats of three, so by its median, too
MANY_UNEVEN = 1 / 3


class Latency(FileModel):
    """Milliseconds of one forward pass: median and quartiles of n passes."""

    width: NonNegativeInt  # tokens fed at once
    median_ms: NonNegativeFloat
    low_ms: NonNegativeFloat
    high_ms: NonNegativeFloat
    n: NonNegativeInt


class TaskResult(FileModel):
    """One lm-eval metric of one task. stderr is None where lm-eval gives none."""

    task: str
    metric: str
    value: float
    stderr: float | None
    n: PositiveInt  # items
    higher_is_better: bool
    # the metric of each item, in the task's order, for paired tests
    items: list[float] = Field(default=[])
    items_sha256: str | None = None  # hash of items and prompts


class Model(FileModel):
    """A model that was measured: its directory or name, its shape, its latency and its lm-eval results."""

    name: str
    sha256: str | None  # None, as for the shape: its files are on the server only
    shape: Shape | None
    latency: list[Latency]  # one entry a width, from one token on; []: not measured
    tasks: list[TaskResult]
    # transformers ran it, which is slower than draftlab's own decoder
    via_transformers: bool = False
    parallel: bool = False  # it drafted all tokens of a step in one pass
    eagle: bool = False  # an EAGLE-3 head
    heads_sha256: str | None = None  # hash of heads on the states of the target


class PromptRecord(FileModel):
    """Length of a prompt, and its category in the prompt file."""

    tokens: NonNegativeInt
    category: str = ""


class Conditions(FileModel):
    """The conditions of the measurement; those of sampling have SamplingParams' names."""

    device: str
    dtype: str
    mode: Literal["eager", "native", "graphs", "served"]
    threads: int | None  # None: the server's choice
    data: str
    prompts_sha256: str | None = None
    prompts: PositiveInt
    prompt_tokens: int | None  # prompts were cut to this length; None: not cut
    chat: bool = False  # prompts had the form of the tokenizer's chat template
    max_tokens: PositiveInt
    repeats: PositiveInt
    context: int | None  # cached tokens at which latency was measured
    temperature: NonNegativeFloat
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int
    batch: int = 1  # prompts decoded at once; each generation gets its share of the batch's seconds
    target_weights: str  # precision of the weights that verify: a dtype's name, int8, or how a checkpoint is quantised
    draft_weights: str | None  # precision of the draft's weights; None: it has no model
    rule: str = "rejection"  # verification rule; without effect when greedy
    draft_temperature: float | None = None  # None: the target's
    in_phases: bool = False  # the servers ran one after the other

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(**{name: getattr(self, name) for name in SAMPLING})

    @property
    def precision(self) -> str:
        """The precision of both sides and how passes ran, in words."""
        if self.mode == "served":
            return "both as served"
        draft = "no draft model" if self.draft_weights is None else f"draft {self.draft_weights}"
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        return (
            f"weights: target {self.target_weights}, {draft}; activations {self.dtype}; "
            f"mode {self.mode}, {threads}, batch {self.batch}"
        )

    @property
    def decoding(self) -> str:
        """The way in which tokens were sampled and verified, in words."""
        if self.temperature == 0 or self.mode == "served":
            return self.sampling.describe()
        own = (
            ""
            if self.draft_temperature is None
            else f", drafts at temperature {self.draft_temperature:g}"
        )
        return f"{self.sampling.describe()}, rule {self.rule}{own}"


DRAFTERS = {
    "prompt-lookup": "prompt lookup",
    "fallback": "prompt lookup followed by the draft",
    "ngram": "n-gram model",
    "suffix": "suffix decoding",
    "eagle": "EAGLE-3 head",
}
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "seed")


class Score(FileModel):
    """One draft measured with one target: in one process and engine, or on two servers of one kind. score.json."""

    version: Literal[3] = 3
    name: str
    target: Model
    draft: Model
    conditions: Conditions
    environment: Environment | None = None
    prompts: list[PromptRecord] = Field(default=[])
    # the target alone, with the weights that verify
    plain: list[Generation] | list[ServedGeneration]
    # the target alone with other weights, by their name
    other_plain: dict[str, list[Generation]] = Field(default={})
    # keys: K
    speculative: dict[PositiveInt, list[Generation] | list[ServedGeneration]] = Field(min_length=1)
    counters: dict[int, Counters] = Field(default={})  # keys: K, if a server decoded
    # share of texts, over all K, that equal plain's; None when sampling
    equal_texts: float | None = Field(ge=0, le=1)
    # share, in the target's output; low in a loop, which drafts predict
    distinct_4grams: float = Field(ge=0, le=1)
    example: dict[str, Any] | None = None  # older files have it; nothing writes it
    # a drafter with the options that it learnt when it was built, as --drafter takes it
    learnt: str | None = None
    learnt_prompts: int = Field(default=0, ge=0)  # prompts whose answers the draft learnt from
    # commands that made the draft; []: nothing to make; None: not known
    made: list[Stage] | None = None
    command: str
    versions: dict[str, str]
    created: str

    @model_validator(mode="after")
    def _is_consistent(self) -> "Score":
        prompts = sorted(g.prompt for g in self.plain)
        for runs in self._arms:
            if sorted(g.prompt for g in runs) != prompts:
                raise ValueError("plain and speculative decoding must have the same prompts")
            if max(g.tokens for g in runs) <= 1:
                raise ValueError("every text ends with its first token, so that nothing was timed")
        if self.served and set(self.counters) != set(self.speculative):
            raise ValueError("what servers decoded needs counters for every K")
        return self

    @property
    def label(self) -> str:
        """The name in words: "prompt lookup followed by the draft (draft=X)" for the drafter fallback:draft=X."""
        drafter = re.match(r"([a-z-]+?)(@int8)?(-b\d+)?(?::(.*))?$", self.name)
        if drafter is None or drafter[1] not in DRAFTERS:
            return self.name
        words = DRAFTERS[drafter[1]] + "".join(filter(None, drafter.group(2, 3)))
        return f"{words} ({drafter[4]})" if drafter[4] else words

    @property
    def served(self) -> bool:
        """True if servers decoded."""
        return any(isinstance(g, ServedGeneration) for g in self.plain)

    @property
    def identical(self) -> bool | None:
        """Greedy: whether all texts equal those of the target alone with the same weights. None when sampling."""
        return None if self.equal_texts is None else self.equal_texts == 1

    @property
    def output_differs(self) -> bool:
        """True if the output is not the target's own, so that no speed-up counts."""
        return self.identical is False

    @property
    def plain_tps(self) -> dict[str, float]:
        """Tokens per second of whole requests without a draft, by the target's weights."""
        plain = {self.conditions.target_weights: self.plain, **self.other_plain}
        return {
            weights: intervals.tokens_per_second(request_timings(runs))
            for weights, runs in plain.items()
        }

    @property
    def baseline_weights(self) -> str:
        """The weights with which the target alone answers requests fastest: the base of a speed-up."""
        speeds = self.plain_tps
        return max(speeds, key=lambda weights: speeds[weights])

    @property
    def baseline(self) -> list[Generation] | list[ServedGeneration]:
        return self.other_plain.get(self.baseline_weights, self.plain)

    @property
    def _arms(self) -> list[list[Generation] | list[ServedGeneration]]:
        return [self.plain, *self.other_plain.values(), *self.speculative.values()]

    @property
    def speedup_by_k(self) -> dict[int, Interval]:
        return {k: self.speedup(k) for k in sorted(self.speculative)}

    @property
    def best_k(self) -> int:
        return max(self.speculative, key=self.speedup_value)

    @property
    def best_k_speedup(self) -> Interval:
        """Speed-up of whole requests at a K that was chosen on other prompts than those it is timed on."""
        return intervals.speedup(self.timings(self.speculative))

    @property
    def best_k_tpot_speedup(self) -> Interval | None:
        """Speed-up of the tokens after the first, at the K of best_k_speedup; None where servers decoded."""
        return self._tpot_speedup(self.speculative)

    def speedup(self, k: int) -> Interval:
        """Return tokens per second of whole requests over those of the fastest plain decoding.

        The ratio is one of sums over prompts' median repeats. A request is its prefill, the draft's included, and its
        decoding.
        """
        return intervals.speedup(self.timings([k]))

    def speedup_value(self, k: int) -> float:
        return self.output_tps(k) / self.output_tps(0)

    def output_tps(self, k: int) -> float:
        """Return tokens per second of whole requests; K = 0: the fastest plain decoding."""
        return intervals.tokens_per_second(request_timings(self._runs(k)))

    def timings(self, ks: Collection[int]) -> Timings:
        """Return the timings of requests at each of ks, and of the baseline."""
        return [request_timings(self.speculative[k]) for k in ks], request_timings(self.baseline)

    def tpot_speedup(self, k: int) -> Interval | None:
        """Return the speed-up of the tokens after the first (time per output token); None where servers decoded."""
        return self._tpot_speedup([k])

    def _tpot_speedup(self, ks: Collection[int]) -> Interval | None:
        drafted, plain = (
            [decode_timings(self.generations(k)) for k in ks],
            decode_timings(self.generations(0)),
        )
        if not any(tokens for tokens, _ in plain):
            return None
        return intervals.speedup((drafted, plain), chosen_by=self.timings(ks)[0])

    def decode_tps(self, k: int) -> float | None:
        """Return tokens per second after the first token; K = 0: the baseline. None where servers decoded."""
        return intervals.tokens_per_second(decode_timings(self.generations(k))) or None

    def tpot_ms(self, k: int) -> Interval | None:
        """Return the milliseconds per output token after the first; K and None as in decode_tps."""
        runs = decode_timings(self.generations(k))
        return (
            intervals.ratio([(1e3 * seconds, tokens) for tokens, seconds in runs]) if runs else None
        )

    def ttft_ms(self, k: int) -> Interval | None:
        """Return the mean milliseconds to the first token, the draft's prefill included; see decode_tps."""
        repeats = repeats_by_prompt(self.generations(k), lambda g: g.prefill_seconds)
        return (
            intervals.ratio([(1e3 * sorted(each)[(len(each) - 1) // 2], 1) for each in repeats])
            if repeats
            else None
        )

    def request_ms(self, k: int) -> Interval:
        """Return the mean milliseconds of a whole request; K = 0: the baseline."""
        return intervals.ratio(
            [(1e3 * seconds, 1) for _, seconds in request_timings(self._runs(k))]
        )

    def _runs(self, k: int) -> Sequence[Generation | ServedGeneration]:
        return self.speculative[k] if k else self.baseline

    def generations(self, k: int) -> list[Generation]:
        """Return the generations whose steps are known; [] where servers decoded. K = 0: plain decoding."""
        return [g for g in self._runs(k) if isinstance(g, Generation)]

    def acceptance(self, k: int) -> AcceptanceMetrics:
        return (
            self.counters[k].acceptance
            if k in self.counters
            else count_acceptance(self.generations(k), k)
        )

    def tokens_per_pass(self, k: int) -> float:
        """Return tokens over all target passes but prefills; acceptance() leaves out those that had no draft.

        Where servers decoded the two are equal, because servers count only passes with a draft.
        """
        runs = self.generations(k)
        steps = sum(len(g.emitted) for g in runs)
        if not steps:
            return self.acceptance(k).mean_acceptance_length
        return sum(g.tokens - 1 for g in runs) / steps

    def break_even_length(self, k: int) -> float:
        """Return the tokens per target pass at which this K neither gains nor loses, given its time per step.

        Prefills are left out where their time is known.
        """
        return self.tokens_per_pass(k) / (self.tpot_speedup_value(k) or self.speedup_value(k))

    def tpot_speedup_value(self, k: int) -> float | None:
        drafted, plain = self.decode_tps(k), self.decode_tps(0)
        return drafted / plain if drafted and plain else None

    def time_shares(self, k: int) -> dict[str, float]:
        """Return the shares of decoding time: drafting, verifying, host (sampling, bookkeeping); {} where unknown."""
        runs = self.generations(k)
        total = sum(g.decode_seconds for g in runs)
        if not total:
            return {}
        return {
            "draft": sum(g.draft_seconds for g in runs) / total,
            "verify": sum(g.verify_seconds for g in runs) / total,
            "host": sum(g.host_seconds for g in runs) / total,
        }

    @property
    def stalls(self) -> tuple[int, int]:
        """Passes that stalled and count as other passes of their kind, and all passes; 0 where servers decoded."""
        stalled = passes = 0
        for generation in chain.from_iterable(self._arms):
            if isinstance(generation, Generation):
                stalled += generation.stalled_passes
                passes += 1 + len(generation.drafted)
        return stalled, passes

    @property
    def uneven_prompts(self) -> tuple[int, float]:
        """Number of prompts with a repeat UNEVEN times as slow as another, and the worst ratio."""
        arms = [repeats_by_prompt(runs, lambda g: g.request) for runs in self._arms]
        worst = [
            max(map(intervals.slowest_over_fastest, repeats)) for repeats in zip(*arms, strict=True)
        ]
        worst = list(map(max, worst, self._prefill_spreads() or worst))
        return sum(ratio > UNEVEN for ratio in worst), max(worst)

    def _prefill_spreads(self) -> list[float]:
        """Return for each prompt how much longer its fastest request would take with its slowest prefill.

        Every K of a draft has the same prefill, so that even prompts that were decoded once tell. [] where servers
        decoded.
        """
        runs = list(chain.from_iterable(map(self.generations, self.speculative)))
        spreads = []
        for repeats in repeats_by_prompt(runs, lambda g: g):
            prefills = [g.prefill_seconds for g in repeats]
            fastest = min(g.request[1] for g in repeats)
            spreads.append(1 + (max(prefills) - min(prefills)) / fastest if fastest else 1.0)
        return spreads

    def subset(self, prompts: Collection[int]) -> "Score":
        """Return the same score over some of its prompts, over the baseline of all prompts alone.

        Server counters, which are of all prompts, are left out.
        """
        arms: dict[int, list[Generation | ServedGeneration]] = {}
        for k in (0, *self.speculative):
            arms[k] = [g for g in self._runs(k) if g.prompt in prompts]
        plain = arms.pop(0)
        parts = {"plain": plain, "other_plain": {}, "speculative": arms, "counters": {}}
        return self.model_copy(update=parts)

    @property
    def prompts_by_category(self) -> dict[str, list[int]]:
        """Indices of prompts by category; {} where the prompt file has none."""
        indices: dict[str, list[int]] = {}
        for i, prompt in enumerate(self.prompts):
            if prompt.category:
                indices.setdefault(prompt.category, []).append(i)
        return dict(sorted(indices.items()))

    @property
    def draft_ms(self) -> float | None:
        """Median time of a draft pass over one token, where it was measured."""
        return self.draft.latency[0].median_ms if self.draft.latency else None

    @property
    def cost_ratio(self) -> float | None:
        """c: time of a draft pass over that of a target pass."""
        return (
            self.draft_ms / self.target.latency[0].median_ms
            if self.draft_ms and self.target.latency
            else None
        )

    def implied_speedup(self, k: int) -> float | None:
        """Return the TPOT speed-up that tokens per pass and latencies of single passes imply; None: not measured.

        A draft model drafts K tokens one after the other, a parallel one all in one pass, then the target verifies them
        in one pass of K + 1. Drafters that take some of their tokens from elsewhere, which have no checkpoint of their
        own, imply nothing.
        """
        ms = {latency.width: latency.median_ms for latency in self.target.latency}
        if self.draft_ms is None or self.draft.sha256 is None or not {1, k + 1} <= ms.keys():
            return None
        drafting_ms = self._parallel_pass_ms(k) if self.draft.parallel else k * self.draft_ms
        verifying = intervals.tokens_per_second(
            decode_timings([g for g in self.plain if isinstance(g, Generation)])
        )
        # latencies are of the weights that verify
        over_baseline = verifying / (self.decode_tps(0) or verifying)
        return over_baseline * self.tokens_per_pass(k) * ms[1] / (drafting_ms + ms[k + 1])

    def _parallel_pass_ms(self, k: int) -> float:
        """Return the time of a pass over the last step's tokens and k - 1 mask tokens, on a line between the widths."""
        import numpy as np
        from scipy.interpolate import InterpolatedUnivariateSpline

        measured = sorted((latency.width, latency.median_ms) for latency in self.draft.latency)
        if len(measured) == 1:
            return measured[0][1]
        line = InterpolatedUnivariateSpline(
            [width for width, _ in measured], [ms for _, ms in measured], k=1
        )
        return float(np.asarray(line(self.tokens_per_pass(k) + k - 1)))

    @property
    def doubt(self) -> str | None:
        """The reason why nobody can tell from this score how fast the draft is; None: there is none."""
        k = self.best_k
        implied, measured = self.implied_speedup(k), self.tpot_speedup_value(k)
        if implied is not None and measured and not 1 / DISAGREE <= implied / measured <= DISAGREE:
            return f"latencies and acceptance imply a TPOT speed-up of {implied:.2f}x at K = {k}, not {measured:.2f}x"
        machine, running = self.environment, (self.conditions.device, self.conditions.threads)
        if machine is not None and (reason := machine.doubt(*running)) is not None:
            return reason
        stalled, steps = self.stalls
        if stalled > MANY_STALLS * steps:
            return f"{stalled} of {steps} passes stalled"
        if machine is not None and machine.counts_cpu_seconds(*running):
            return None
        uneven, worst = self.uneven_prompts
        if uneven > MANY_UNEVEN * self.conditions.prompts:
            return f"{uneven} of {self.conditions.prompts} prompts took up to {worst:.1f} times as long when repeated"
        return None

    def headline(self) -> str:
        """Return in words whether whole requests are faster with the draft, by how much, and over what."""
        gain, doubt = self.best_k_speedup, self.doubt
        opening = "Faster" if gain.low > 1 else "Slower than no draft"
        if gain.n == 1 or gain.low <= 1 <= gain.high:
            opening = "No clear difference"
        if doubt is not None:
            opening = f"Cannot tell, because {doubt}; measure again on a quiet machine. Measured"
        changed = "The output is not the target's own. " if self.output_differs else ""
        over = (
            f" over the target alone with {self.baseline_weights} weights"
            if self.other_plain
            else ""
        )
        return (
            f"{changed}{opening}: {gain.as_speedup()} in whole requests at K = {self.best_k}{over}"
        )

    def verdict(self) -> str:
        """Return in words the draft's gain, and its strongest limit."""
        k, said = self.best_k, [f"{self.headline()}."]
        tpot, implied = self.best_k_tpot_speedup, self.implied_speedup(k)
        if tpot is not None:
            implies = "" if implied is None else f" (latencies and acceptance imply {implied:.2f}x)"
            said.append(f"TPOT, the time per token after the first: {tpot.as_speedup()}{implies}.")
        with_draft, alone = self.ttft_ms(k), self.ttft_ms(0)
        if with_draft is not None and alone is not None:
            said.append(
                f"TTFT, the time to the first token: {with_draft.value:.3g} ms, {alone.value:.3g} ms without."
            )
        said.append(
            f"{self.tokens_per_pass(k):.2f} tokens per target pass (break-even of "
            f"{'whole requests' if self.served else 'TPOT'}: {self.break_even_length(k):.2f})."
        )
        if shares := self.time_shares(k):
            phase = max(shares, key=lambda name: shares[name])
            activity, advice = LIMITS[phase]
            said.append(
                f"{activity} takes {shares[phase]:.0%} of the time after the first token: {advice}."
            )
        return " ".join(said)


LIMITS = {
    "draft": ("Drafting", "a faster draft would help most, above all one with fewer layers"),
    "verify": ("Verification", "more accepted tokens would help most"),
    "host": ("Work on the host", "a faster engine would help most"),
}


def score_files(paths: Sequence[Path]) -> list[Path]:
    """Return score.json files, named or anywhere under directories."""
    files: list[Path] = []
    for path in paths:
        files += [path] if path.suffix == ".json" else sorted(path.rglob("score.json"))
    return files


def read_score(path: Path) -> Score:
    """Read score.json, from its path or its directory.

    Raises:
        UserError: no such file, or not a score.
    """
    return read_model(Score, path, "score.json")
