"""The schema of score.json: the measurements, and the statistics that are derived from them. Torch is not imported.

K is the number of drafted tokens per step. A step is one target pass after the prefill, with the drafting before it.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from draftlab import intervals
from draftlab.config.base import MAX_K
from draftlab.console import note
from draftlab.errors import UserError
from draftlab.intervals import Interval, Timing, Timings
from draftlab.model.shape import Shape
from draftlab.quantities import format_number
from draftlab.reading import FileModel, read_model
from draftlab.results.decoding import (
    AcceptanceMetrics,
    Counters,
    Expected,
    Generation,
    ServedGeneration,
    count_acceptance,
    decode_timings,
    repeats_by_prompt,
    request_timings,
)
from draftlab.results.step_costs import StepCosts
from draftlab.runs.provenance import Stage
from draftlab.sampling import FILTERS, Filter, SamplingParams

# Above any of these three limits, times are in doubt.
BUSY = 0.5  # fraction of the cores that other work keeps busy
# fraction of the time in which a thread waits for a core, or the hypervisor gives cores to other machines
LONG_WAITS = 0.1
# fraction of the time in which any thread waits for a core; the short threads of an idle system stay below it
UNDER_PRESSURE = 0.5


Share = Annotated[float, Field(ge=0, le=1)]
Drafted = Annotated[int, Field(ge=1, le=MAX_K)]


class Environment(FileModel):
    """The state of the machine before the measurement, and its load during the measurement."""

    system: str
    processor: str
    cores: int
    busy_cores: NonNegativeFloat  # number of cores that other work keeps busy
    governor: str | None  # CPU frequency governor
    driver: str | None  # version of the NVIDIA driver
    dtype_reason: str = ""  # why --dtype auto stood for the dtype; "": a dtype was named
    # Linux reports the three fractions below for the time of the measurement. On other systems they are None.
    # fraction of its time in which the decoding thread waited for a core
    waited_share: Share | None = None
    # fraction of the cores' time that the hypervisor gave to other machines
    stolen_share: Share | None = None
    # fraction of the time in which any thread of the machine waited for a core
    pressure: Share | None = None

    @property
    def busy(self) -> bool:
        return self.busy_cores > BUSY * self.cores

    def counts_cpu_seconds(self, device: str, threads: int | None) -> bool:
        """Return whether times are measured in CPU seconds, which exclude waits: only if a single CPU thread decodes.

        device, threads: Device that decodes, and its number of CPU threads.
        """
        return device == self.processor and threads == 1

    def doubt(self, device: str, threads: int | None) -> str | None:
        """Return the reason to doubt times that were measured in this environment, or None.

        CPU seconds exclude the waits for a core, and all ways to decode a conversation are timed one after the other.
        Other programs therefore make intervals of CPU seconds wider, but seldom change a verdict (benchmarks.noise).
        Whether CPU seconds exclude what the hypervisor gave away depends on the machine.

        device, threads: Device that decodes, and its number of CPU threads.
        """
        if (self.stolen_share or 0) > LONG_WAITS:
            return f"the hypervisor gave {self.stolen_share:.0%} of the cores' time to other machines"
        if self.counts_cpu_seconds(device, threads):
            return None
        if self.busy:
            return f"other programs kept {self.busy_cores:.1f} of {self.cores} cores busy"
        if (self.waited_share or 0) > LONG_WAITS:
            return f"decoding waited for a free core {self.waited_share:.0%} of the time"
        if device == self.processor and (self.pressure or 0) > UNDER_PRESSURE:
            return f"a thread waited for a free core {self.pressure:.0%} of the time"
        return None


# a larger ratio between implied and measured speed-up means that one of the two is wrong
DISAGREE = 1.25
MANY_STALLS = 0.1  # fraction of stalled passes above which times are in doubt
UNEVEN = 1.5  # ratio of the slowest to the fastest repeat of a prompt above which the machine must have been busy
# Fraction of uneven prompts above which times are in doubt. About one prompt in twenty is then slow in two of three
# repeats, so that its median is slow.
MANY_UNEVEN = 1 / 3

Milliseconds = Annotated[float, Field(ge=0, le=1e12)]


class Latency(FileModel):
    """Milliseconds of one forward pass: median and quartiles over n passes."""

    width: NonNegativeInt  # number of new tokens in the pass
    median_ms: Milliseconds
    low_ms: Milliseconds
    high_ms: Milliseconds
    n: NonNegativeInt

    @model_validator(mode="after")
    def _ascends(self) -> "Latency":
        if not self.low_ms <= self.median_ms <= self.high_ms:
            raise ValueError("median_ms must lie between low_ms and high_ms")
        return self


class FollowingLatency(Latency):
    """Milliseconds of a one-token pass that follows `after` passes of the same model."""

    after: PositiveInt


class TaskResult(FileModel):
    """One lm-eval metric of one task. stderr: Standard error, or None if lm-eval reports none."""

    task: str
    metric: str
    value: float
    stderr: float | None
    n: PositiveInt  # number of items
    higher_is_better: bool
    # the metric of each item, in the order of the task, for paired tests
    items: list[float] = Field(default=[])
    # hash of the items and of their prompts, as the model read them
    items_sha256: str | None = None
    requests: NonNegativeInt = 0  # 0 for a group of tasks
    # number of requests whose start was cut, because the model's context is too short
    truncated: NonNegativeInt = 0


class Model(FileModel):
    """A model that was measured: its directory or name, its shape, its latency and its lm-eval results."""

    name: str
    sha256: str | None  # None if only the server has the model's files
    shape: Shape | None  # None if only the server has the model's files
    # passes that follow a pass of another model, as the first pass of a step; one entry per width, the first for one
    # token; []: they were not timed
    latency: list[Latency]
    # One-token passes that follow passes of the same model, as in plain decoding, and as the second and later passes of
    # a step with a draft. []: they were not timed; before 2026-11-28, `latency` mixed both kinds of passes.
    following: list[FollowingLatency] = Field(default=[])
    tasks: list[TaskResult]
    # True: transformers ran the model, which is slower than draftlab's engine
    via_transformers: bool = False
    parallel: bool = False  # True: the model drafted all tokens of a step in one pass
    eagle: bool = False  # True: the model is an EAGLE-3 head
    heads_sha256: str | None = None  # hash of a head, which reads the target's hidden states


class PromptRecord(FileModel):
    """The length of a prompt in tokens, its category in the prompt file, and its conversation.

    conversation: Number of the conversation of which the prompt is a turn, or of the document from which it is cut.
        Older files have no number.
    """

    tokens: NonNegativeInt
    category: str = ""
    conversation: NonNegativeInt | None = None


class Conditions(FileModel):
    """The conditions of a measurement. Sampling parameters have the names of SamplingParams."""

    device: str
    dtype: str
    mode: Literal["eager", "native", "graphs", "served"]
    threads: int | None  # number of CPU threads; None if a server decoded
    data: str
    # hash of the requests (see Prompts.selection); older files have none, but a hash of the prompt file
    selection: str | None = None
    prompts_sha256: str | None = None
    prompts: PositiveInt  # number of prompts
    prompt_tokens: int | None  # number of tokens to which prompts were cut; None: they were not cut
    chat: bool = False  # True: the tokenizer's chat template was applied to the prompts
    max_tokens: PositiveInt
    repeats: PositiveInt
    context: int | None  # number of cached tokens at which latency was measured
    temperature: NonNegativeFloat
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int
    # number of prompts decoded at once; the batch's seconds are divided among its generations
    batch: int = 1
    # precision of the target in verification: a dtype, int8, or a quantisation method
    target_weights: str
    draft_weights: str | None  # precision of the draft's weights; None: there is no draft model
    rule: str = "rejection"  # verify rule, which has no effect on greedy decoding
    filters: tuple[Filter, ...] = FILTERS  # see SamplingParams
    draft_filters: tuple[Filter, ...] = FILTERS  # those of the draft; (): the draft is greedy
    in_phases: bool = False  # True: the two servers ran one after the other

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(**{name: getattr(self, name) for name in SAMPLING})

    @property
    def precision(self) -> str:
        """Return text about the precision of target, draft and activations, and about mode, threads and batch size."""
        if self.mode == "served":
            return "with the servers' own settings"
        draft = "no draft model" if self.draft_weights is None else f"{self.draft_weights} draft"
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        return (
            f"{self.target_weights} target, {draft}, {self.dtype} activations, "
            f"mode {self.mode}, {threads}, batch {self.batch}"
        )

    @property
    def decoding(self) -> str:
        """Return text about the sampling parameters and the verify rule."""
        if self.temperature == 0 or self.mode == "served":
            return self.sampling.describe()
        text = f"{self.sampling.describe()}, rule {self.rule}"
        if not self.draft_filters:
            return f"{text}, the draft greedy"
        draft = replace(self.sampling, filters=self.draft_filters).describe()
        return text if draft == self.sampling.describe() else f"{text}, the draft {draft}"


class Rounding(FileModel):
    """The effect of int8 weights on the target's predictions, for the prompts and the answers of plain decoding.

    Args:
        tokens: Number of compared tokens.
        kl: KL(target || rounded target), in nats per token.
        top1: Fraction of the tokens after which both predict the same most probable token.
    """

    tokens: PositiveInt
    kl: float
    top1: Share


class Prediction(FileModel):
    """The speed of each request at each K, predicted before any request was timed with a draft.

    The target wrote the text of each prompt once. A replay over these texts gives the acceptance, and the time of
    single passes the seconds (scoring/prediction.py).

    Args:
        prompts: Index of each prompt in the score's prompts, [R].
        tokens: Number of tokens of each text, [R].
        plain: Seconds of each request without a draft, [R].
        by_k: What each K should give.
        best_k: K at which all requests together should be fastest.
        error: How far the predicted speed-up of a timed drafter of this run was off, at most, as a fraction. None: no
            drafter was both predicted and timed.
    """

    prompts: list[NonNegativeInt]
    tokens: list[PositiveInt]
    plain: list[NonNegativeFloat]
    by_k: dict[Drafted, Expected] = Field(min_length=1)
    best_k: Drafted
    error: NonNegativeFloat | None = None

    def timings(self, k: int) -> list[Timing]:
        """Return tokens and predicted seconds of each request at this K. k = 0 stands for plain decoding."""
        seconds = self.by_k[k].seconds if k else self.plain
        return list(zip(self.tokens, seconds, strict=True))

    def tokens_per_pass(self, k: int) -> float:
        passes = sum(self.by_k[k].passes)
        return (sum(self.tokens) - len(self.tokens)) / passes if passes else 1.0

    def only(self, prompts: Collection[int]) -> "Prediction":
        """Return the prediction for some prompts. The best K stays that of all prompts."""
        rows = [row for row, prompt in enumerate(self.prompts) if prompt in prompts]
        return self.model_copy(
            update={
                **{name: [getattr(self, name)[i] for i in rows] for name in ("prompts", "tokens", "plain")},
                "by_k": {k: each.only(rows) for k, each in self.by_k.items()},
            }
        )


DRAFTERS = {
    "latest-lookup": "prompt lookup",
    "prompt-lookup": "prompt lookup of vLLM and transformers",
    "ngram-gpu": "prompt lookup of vLLM on GPUs",
    "ngram-simple": "prompt lookup of llama.cpp",
    "fallback": "prompt lookup followed by the draft",
    "suffix": "suffix decoding",
    "eagle": "EAGLE-3 head",
}
Runs = list[Generation] | list[ServedGeneration]
Seconds = Literal["cpu", "wall"]
# units in words for each kind of seconds
RATES: dict[Seconds, str] = {"cpu": "tokens per CPU second", "wall": "tokens/s"}
MILLISECONDS: dict[Seconds, str] = {"cpu": "CPU ms", "wall": "ms"}
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "filters", "max_tokens", "seed")


class Score(FileModel):
    """The content of score.json: one draft, measured with one target, in draftlab's engine or on two servers."""

    version: Literal[3] = 3
    name: str
    target: Model
    draft: Model
    conditions: Conditions
    environment: Environment | None = None
    prompts: list[PromptRecord] = Field(default=[])
    # generations of plain decoding, with the precision of verification
    plain: Runs
    # generations of plain decoding at another precision, by the name of the precision
    other_plain: dict[str, list[Generation]] = Field(default={})
    # Speed of plain decoding at a precision that is clearly slower and was timed on a few prompts only, as a fraction
    # of the speed of `plain`, by the name of the precision
    slower_plain: dict[str, Share] = Field(default={})
    rounding: Rounding | None = None  # None: the target had no int8 weights
    # Generations with a draft, by K. With a prediction, each prompt was timed only at the K that is fastest for other
    # conversations by the prediction, or at none.
    speculative: dict[Drafted, Runs]
    prediction: Prediction | None = None  # None: every K was timed with all prompts
    # 1 minus the coverage of the intervals, see draftlab/sequential.py
    alpha: Annotated[float, Field(gt=0, le=0.05)] = intervals.ALPHA
    # counters of the server by K, if a server decoded
    counters: dict[int, Counters] = Field(default={})
    # fraction of texts, over all K, that equal the texts of plain decoding; None when sampling
    equal_texts: Share | None
    # Fraction of distinct 4-grams in the target's output. It is low if the output repeats itself, and drafts predict
    # repetitions well.
    distinct_4grams: Share
    # value of --drafter, with the options that the drafter learnt when it was built
    learnt: str | None = None
    learnt_prompts: NonNegativeInt = 0  # number of prompts that are in the draft's training data
    # commands that made the draft; []: there was nothing to make; None: unknown
    made: list[Stage] | None = None
    command: str
    versions: dict[str, str]
    created: str

    @model_validator(mode="after")
    def _is_consistent(self) -> "Score":
        if not (self.speculative or self.prediction):
            raise ValueError("there is neither a timing nor a prediction with a draft")
        prompts = sorted(g.prompt for g in self.plain)
        for runs in self._arms:
            if sorted(g.prompt for g in runs) != prompts:
                raise ValueError("plain and speculative decoding must have the same prompts")
            if max(g.tokens for g in runs) <= 1:
                raise ValueError("every text has one token, so no decoding was timed")
            if not sum(g.request[1] for g in runs):
                raise ValueError("the seconds of all requests are 0, so nothing was timed")
        for k, runs in self.speculative.items():
            # raises ValueError where the counts of a step contradict each other
            count_acceptance([g for g in runs if isinstance(g, Generation)], k)
        return self

    @property
    def label(self) -> str:
        """Return the name of the draft or drafter in words.

        For the drafter fallback:draft=X, the words are "prompt lookup followed by the draft (draft=X)".
        """
        drafter = re.match(r"([a-z-]+?)(@int8)?(-b\d+)?(?::(.*))?$", self.name)
        if drafter is None or drafter[1] not in DRAFTERS:
            return self.name
        words = DRAFTERS[drafter[1]] + "".join(filter(None, drafter.group(2, 3)))
        return f"{words} ({drafter[4]})" if drafter[4] else words

    @property
    def served(self) -> bool:
        """Return whether servers decoded the prompts instead of draftlab's engine."""
        return any(isinstance(g, ServedGeneration) for g in self.plain)

    @property
    def identical(self) -> bool | None:
        """Return whether all texts equal the texts of plain decoding at the same precision, or None when sampling."""
        return None if self.equal_texts is None else self.equal_texts == 1

    @property
    def output_differs(self) -> bool:
        """Return whether the draft changed the target's output. Its speed-up then does not count."""
        return self.identical is False

    @property
    def seconds(self) -> Seconds:
        """Return which seconds all times of the score are."""
        machine = self.environment
        conditions = self.conditions
        if machine is None:  # an older score, which does not name the processor
            return "wall"
        cpu = machine.counts_cpu_seconds(conditions.device, conditions.threads)
        return "cpu" if cpu else "wall"

    @property
    def plain_by_weights(self) -> dict[str, Runs]:
        """Return the generations of plain decoding by the precision of the target's weights."""
        return {self.conditions.target_weights: self.plain, **self.other_plain}

    @property
    def plain_tps(self) -> dict[str, float]:
        """Return the tokens per second of whole requests without a draft, by the precision of the target's weights."""
        speeds = {
            weights: intervals.tokens_per_second(request_timings(runs))
            for weights, runs in self.plain_by_weights.items()
        }
        verifying = speeds[self.conditions.target_weights]
        return speeds | {weights: verifying * part for weights, part in self.slower_plain.items()}

    @property
    def baseline_weights(self) -> str:
        """Return the precision at which the target alone is fastest: the baseline of speed-ups."""
        speeds = {weights: self.plain_tps[weights] for weights in self.plain_by_weights}
        return max(speeds, key=lambda weights: speeds[weights])

    @property
    def baseline(self) -> Runs:
        return self.other_plain.get(self.baseline_weights, self.plain)

    @property
    def _arms(self) -> list[Runs]:
        """Return the timed generations of each way to decode all prompts."""
        timed: list[Runs] = list(self.speculative.values())
        if self.prediction is not None:
            timed = [self.runs(self.best_k)] if self.timed else []
        return [self.plain, *self.other_plain.values(), *timed]

    @property
    def timed(self) -> bool:
        """Return whether any request was timed with the draft. If not, all its speeds are predicted."""
        return any(self.speculative.values())

    @property
    def ks(self) -> list[int]:
        """Return every K that was timed or predicted."""
        return sorted(self.prediction.by_k if self.prediction else self.speculative)

    @property
    def best_k(self) -> int:
        if self.prediction is not None:
            return self.prediction.best_k
        return max(self.speculative, key=self.speedup_value)

    @property
    def best_k_speedup(self) -> Interval:
        """Return the speed-up of whole requests at the best K, which is chosen on other requests.

        See intervals.speedup. If no request was timed with the draft, it is predicted.
        """
        if not self.timed:
            return self.predicted_speedup(self.best_k)
        return intervals.speedup(self.timings(self.speculative))

    @property
    def best_k_tpot_speedup(self) -> Interval | None:
        """Return the speed-up of the tokens after the first at the best K, or None if servers decoded.

        K is chosen as in best_k_speedup, by the speed of whole requests.
        """
        return self._tpot_speedup(self.ks)

    def speedup(self, k: int) -> Interval:
        """Return the speed-up: tokens per second at this K, divided by tokens per second of the fastest plain decoding.

        The rates are those of whole requests, which consist of the prefill of target and draft, and decoding. Tokens
        and seconds are summed over prompts. For each prompt, the repeat with the median time per token is used. The
        interval is over conversations.
        """
        if self.prediction is None:
            return intervals.speedup(self.timings([k]))
        return self.best_k_speedup if k == self.best_k else self.predicted_speedup(k)

    def predicted_speedup(self, k: int) -> Interval:
        """Return the predicted speed-up of whole requests at this K over plain decoding, with an interval."""
        assert self.prediction is not None
        drafted, plain = (self._predicted(self.prediction.timings(each)) for each in (k, 0))
        return intervals.speedup(Timings([drafted], plain))

    def _predicted(self, values: ArrayLike) -> np.ndarray:
        """Return sums over the requests of each conversation, [G, C]. values: For each predicted request, [R, C]."""
        assert self.prediction is not None
        talks = [self.prompts[i].conversation for i in self.prediction.prompts]
        return intervals.by_conversation(values, talks)

    def speedup_value(self, k: int) -> float:
        if self.is_timed(k):
            return self.output_tps(k) / self.output_tps(0)
        return self.predicted_speedup(k).value

    def is_timed(self, k: int) -> bool:
        """Return whether requests were timed at this K. k = 0 stands for the fastest plain decoding."""
        return bool(self.runs(k))

    def output_tps(self, k: int) -> float:
        """Return the tokens per second of whole requests. k = 0 stands for the fastest plain decoding."""
        if not self.is_timed(k):
            return self.predicted_speedup(k).value * self.output_tps(0)
        return intervals.tokens_per_second(request_timings(self.runs(k)))

    def tokens_per_second(self, runs: Runs) -> Interval:
        """Return the tokens per second of whole requests in these generations, with an interval over conversations."""
        return intervals.ratio(self._summed(request_timings(runs)))

    def timings(self, ks: Collection[int], conversations: Sequence[int | None] | None = None) -> Timings:
        """Return the timings of each conversation's requests at each K in `ks`, and in the fastest plain decoding.

        With a prediction, there is one column: every request at the K at which it was timed.

        conversations: Number of each prompt's conversation. Default: the numbers in `prompts`.
        """
        plain = self._summed(request_timings(self.baseline), conversations)
        if self.prediction is not None:
            timed = self._summed(request_timings(self.runs(self.best_k)), conversations)
            return Timings([timed], plain, self.alpha, self._swaps())
        drafted = [self._summed(request_timings(self.speculative[k]), conversations) for k in ks]
        return Timings(drafted, plain, self.alpha)

    def _swaps(self) -> np.ndarray:
        """Return by which factor the seconds of each timed conversation change if another one is left out, [1, G, G].

        K is chosen again on the predicted seconds of the conversations that are left.
        """
        assert self.prediction is not None
        by_k = np.transpose([each.seconds for each in self.prediction.by_k.values()])
        sums = self._predicted(by_k)  # [conversations, K]
        timed = {g.prompt for g in self.plain}
        among = [[float(i in timed)] for i in self.prediction.prompts]
        rows = np.flatnonzero(self._predicted(among)[:, 0])
        return intervals.swaps_of(sums, rows)[None]

    @property
    def conversations(self) -> int:
        """Return the number of conversations. A request of which no conversation is known counts for itself."""
        return len(self._summed(request_timings(self.plain)))

    def _summed(self, timings: Sequence[Timing], conversations: Sequence[int | None] | None = None) -> np.ndarray:
        """Return the sums of each conversation, [G, 2]. timings: For each prompt, in the order of the prompts."""
        known = conversations or [prompt.conversation for prompt in self.prompts]
        prompts = sorted({g.prompt for g in self.plain})
        return intervals.by_conversation(timings, [known[i] for i in prompts] if known else None)

    def tpot_speedup(self, k: int) -> Interval | None:
        """Return the speed-up of the tokens after the first (TPOT), or None if servers decoded."""
        return self._tpot_speedup([k])

    def _tpot_speedup(self, ks: Collection[int]) -> Interval | None:
        plain = decode_timings(self.generations(0))
        ks = [self.best_k] if self.prediction is not None and self.best_k in ks else list(ks)
        if not any(tokens for tokens, _ in plain) or not all(map(self.is_timed, ks)):
            return None
        drafted = [self._summed(decode_timings(self.generations(k))) for k in ks]
        timings = Timings(drafted, self._summed(plain), self.alpha)
        return intervals.speedup(timings, chosen_by=self.timings(ks).drafted)

    def decode_tps(self, k: int) -> float | None:
        """Return the tokens per second after the first token, or None if servers decoded.

        k = 0 stands for the fastest plain decoding.
        """
        return intervals.tokens_per_second(decode_timings(self.generations(k))) or None

    def tpot_ms(self, k: int) -> Interval | None:
        """Return the milliseconds per output token after the first (TPOT), or None if servers decoded.

        k = 0 stands for the fastest plain decoding.
        """
        pairs = [(1e3 * seconds, n) for n, seconds in decode_timings(self.generations(k))]
        return intervals.ratio(self._summed(pairs)) if pairs else None

    def ttft_ms(self, k: int) -> Interval | None:
        """Return the mean milliseconds to the first token (TTFT), or None if servers decoded.

        The time includes the prefill of the draft. k = 0 stands for the fastest plain decoding.
        """
        repeats = repeats_by_prompt(self.generations(k), lambda g: g.prefill_seconds)
        pairs = [(1e3 * sorted(each)[(len(each) - 1) // 2], 1) for each in repeats]
        return intervals.ratio(self._summed(pairs)) if pairs else None

    def request_ms(self, k: int) -> Interval:
        """Return the mean milliseconds of a whole request. k = 0 stands for the fastest plain decoding.

        If no request was timed at this K, they are predicted.
        """
        if not self.is_timed(k) and self.prediction is not None:
            pairs = [(1e3 * seconds, 1) for _, seconds in self.prediction.timings(k)]
            return intervals.ratio(self._predicted(pairs))
        runs = request_timings(self.runs(k))
        return intervals.ratio(self._summed([(1e3 * seconds, 1) for _, seconds in runs]))

    def runs(self, k: int) -> Runs:
        """Return the generations at this K, or [] if it was only predicted. k = 0: the fastest plain decoding.

        With a prediction, the generations at the best K are all that were timed. A few requests were timed at another
        K, which is faster for the other conversations.
        """
        if k == 0:
            return self.baseline
        if self.prediction is None:
            return self.speculative[k]
        runs: list[Generation] = []
        for each in self.speculative.values() if k == self.best_k else ():
            runs += [run for run in each if isinstance(run, Generation)]
        return sorted(runs, key=lambda run: run.prompt)

    def generations(self, k: int) -> list[Generation]:
        """Return the generations of draftlab's engine at this K. If servers decoded, return [].

        k = 0 stands for the fastest plain decoding.
        """
        return [g for g in self.runs(k) if isinstance(g, Generation)]

    def acceptance(self, k: int) -> AcceptanceMetrics:
        if k in self.counters:
            return self.counters[k].acceptance
        if self.prediction is not None:
            return self.prediction.by_k[k].acceptance
        return count_acceptance(self.generations(k), k)

    def tokens_per_pass(self, k: int) -> float:
        """Return the mean number of tokens per target pass after the prefill.

        Passes without a draft are counted too. Servers count only passes that verify a draft, as acceptance() does. If
        servers decoded, the result is therefore the acceptance length.
        """
        if self.prediction is not None:
            return self.prediction.tokens_per_pass(k)
        runs = self.generations(k)
        steps = sum(len(g.emitted) for g in runs)
        if not steps:
            return self.acceptance(k).mean_acceptance_length
        return sum(g.tokens - 1 for g in runs) / steps

    def break_even_length(self, k: int) -> float:
        """Return the tokens per target pass at which this K would be as fast as plain decoding.

        A step is assumed to take as long as it took in the measurement. The time of prefills is left out. If servers
        decoded, it is included, because a client cannot separate it.
        """
        return self.tokens_per_pass(k) / (self.tpot_speedup_value(k) or self.speedup_value(k))

    def tpot_speedup_value(self, k: int) -> float | None:
        drafted = self.decode_tps(k)
        plain = self.decode_tps(0)
        return drafted / plain if drafted and plain else None

    def time_shares(self, k: int) -> dict[str, float]:
        """Return the fractions of decoding time in the phases draft, verify and host, or {} if servers decoded.

        host is sampling and bookkeeping.
        """
        if self.is_timed(k) or self.prediction is None:
            runs = self.generations(k)
            seconds = {
                "draft": sum(g.draft_seconds for g in runs),
                "verify": sum(g.verify_seconds for g in runs),
                "host": sum(g.host_seconds for g in runs),
            }
        else:
            each = self.prediction.by_k[k]
            seconds = {
                "draft": sum(each.draft_seconds),
                "verify": sum(each.verify_seconds),
                "host": sum(each.host_seconds),
            }
        total = sum(seconds.values())
        return {phase: part / total for phase, part in seconds.items()} if total else {}

    @property
    def stalls(self) -> tuple[int, int]:
        """Return the number of stalled passes, which other work interrupted, and the number of all passes.

        The time of a stalled pass was replaced by the median of similar passes. If servers decoded, both numbers are 0.
        """
        runs = [g for g in chain.from_iterable(self._arms) if isinstance(g, Generation)]
        return sum(g.stalled_passes for g in runs), sum(1 + len(g.drafted) for g in runs)

    @property
    def uneven_prompts(self) -> tuple[int, float]:
        """Return the number of prompts whose times are uneven, and the largest ratio of times of all prompts.

        The ratio of a prompt is the time of its slowest repeat divided by the time of its fastest repeat, or its ratio
        by _prefill_spreads if that is larger. The times of a prompt are uneven if its ratio is above UNEVEN.
        """
        arms = [repeats_by_prompt(runs, lambda g: g.request) for runs in self._arms]
        worst = [max(map(intervals.slowest_over_fastest, each)) for each in zip(*arms, strict=True)]
        worst = list(map(max, worst, self._prefill_spreads() or worst))
        return sum(ratio > UNEVEN for ratio in worst), max(worst)

    def _prefill_spreads(self) -> list[float]:
        """Return, as a ratio, how much longer each prompt's fastest request would take with a slow prefill.

        The request then has the time of the slowest prefill of the prompt instead of the fastest. Prefills do not
        depend on K. With several K, they therefore show uneven times even without repeats. If servers decoded, return
        [].
        """
        timed = chain.from_iterable(self.speculative.values())
        runs = [g for g in timed if isinstance(g, Generation)]
        spreads = []
        for repeats in repeats_by_prompt(runs, lambda g: g):
            prefills = [g.prefill_seconds for g in repeats]
            fastest = min(g.request[1] for g in repeats)
            spreads.append(1 + (max(prefills) - min(prefills)) / fastest if fastest else 1.0)
        return spreads

    def subset(self, prompts: Collection[int]) -> "Score":
        """Return a score of only the prompts with these indices.

        The baseline stays the plain decoding that is fastest over all prompts of the whole score. Counters of servers
        are left out, because servers do not count by prompt.
        """
        arms: dict[int, list[Generation | ServedGeneration]] = {}
        for k, runs in self.speculative.items():
            arms[k] = [g for g in runs if g.prompt in prompts]
        plain = [g for g in self.baseline if g.prompt in prompts]
        parts = {"plain": plain, "other_plain": {}, "speculative": arms, "counters": {}}
        if self.prediction is not None:
            parts["prediction"] = self.prediction.only(prompts)
        return self.model_copy(update=parts)

    @property
    def prompts_by_category(self) -> dict[str, list[int]]:
        """Return the indices of the prompts in each category, or {} if the prompt file has no categories."""
        indices: dict[str, list[int]] = {}
        for i, prompt in enumerate(self.prompts):
            if prompt.category:
                indices.setdefault(prompt.category, []).append(i)
        return dict(sorted(indices.items()))

    @property
    def draft_ms(self) -> float | None:
        """Return the mean milliseconds of a draft pass in a step at the best K, or None if passes were not timed."""
        costs = self._step_costs
        k = self.best_k
        if costs is None or not costs.drafts(k):
            return None
        each = costs.drafting(k, unread=1)
        return sum(each) / len(each)

    @property
    def target_ms(self) -> float | None:
        """Return the milliseconds of a target pass in plain decoding, or None if it was not timed."""
        return self.target.following[-1].median_ms if self.target.following else None

    @property
    def cost_ratio(self) -> float | None:
        """Return c: draft_ms divided by target_ms, or None if a time is unknown."""
        return self.draft_ms / self.target_ms if self.draft_ms and self.target_ms else None

    def implied_tpot_ms(self, k: int) -> float | None:
        """Return the milliseconds per output token after the first that follow from acceptance and single passes.

        The passes of every step are added up (see StepCosts), and the measured time on the host is added. In a batch,
        the time of a pass is divided by the number of texts, so texts should be of similar length. The result is None
        if a latency is unknown, and for drafters without a checkpoint of their own, such as prompt lookup followed by a
        draft. k = 0 stands for plain decoding at the precision of verification.
        """
        costs = self._step_costs
        plain = [g for g in self.plain if isinstance(g, Generation)]
        runs = plain if k == 0 else self.generations(k)
        tokens = sum(g.tokens - 1 for g in runs)
        if costs is None or not tokens or not costs.timed(k) or self.draft.sha256 is None:
            return None
        host = 1e3 * sum(g.host_seconds for g in runs)
        if k == 0:
            passes = costs.alone * sum(len(g.drafted) for g in plain)
        else:
            # a drafter works on the host, too: once in a step, about as long as a step without a draft does
            preparing = 1e3 * sum(g.host_seconds for g in plain)
            preparing *= self.conditions.batch / max(1, sum(len(g.drafted) for g in plain))
            passes = costs.total_ms(runs, preparing)
        return (passes / self.conditions.batch + host) / tokens

    def implied_request_ms(self, k: int) -> float | None:
        """Return the mean milliseconds of a request: its measured TTFT, and implied_tpot_ms for each further token."""
        tpot = self.implied_tpot_ms(k)
        ttft = self.ttft_ms(k)
        if tpot is None or ttft is None:
            return None
        runs = self.generations(k)
        return ttft.value + tpot * sum(g.tokens - 1 for g in runs) / len(runs)

    def implied_speedup(self, k: int) -> float | None:
        """Return the TPOT speed-up that follows from acceptance and the latencies of single passes, or None."""
        alone = self.implied_tpot_ms(0)
        drafted = self.implied_tpot_ms(k)
        if not alone or not drafted:
            return None
        verifying = intervals.tokens_per_second(decode_timings([g for g in self.plain if isinstance(g, Generation)]))
        # the latencies were measured at the precision of verification
        over_baseline = verifying / (self.decode_tps(0) or verifying)
        return over_baseline * alone / drafted

    @property
    def _step_costs(self) -> StepCosts | None:
        return StepCosts.of(self.target, self.draft)

    @property
    def doubt(self) -> str | None:
        """Return the reason to doubt the speed-up of this score, or None."""
        if not self.timed:
            return "it was predicted, not timed"
        k = self.best_k
        implied = self.implied_speedup(k)
        measured = self.tpot_speedup_value(k)
        if implied is not None and measured and not 1 / DISAGREE <= implied / measured <= DISAGREE:
            return (
                f"by latencies and acceptance, the TPOT speed-up at K = {k} should be {implied:.2f}x, but "
                f"{measured:.2f}x was measured"
            )
        machine = self.environment
        running = (self.conditions.device, self.conditions.threads)
        if machine is not None and (reason := machine.doubt(*running)) is not None:
            return reason
        stalled, steps = self.stalls
        if stalled > MANY_STALLS * steps:
            return f"{stalled} of {steps} passes were interrupted by other work"
        if machine is not None and machine.counts_cpu_seconds(*running):
            return None
        uneven, worst = self.uneven_prompts
        if uneven > MANY_UNEVEN * self.conditions.prompts:
            return f"the repeats of {uneven} of {self.conditions.prompts} prompts differ in time, by up to {worst:.1f}x"
        return None

    @property
    def undecided(self) -> str | None:
        """Return the reason why the requests allow no verdict, or None."""
        k = self.best_k
        n = self.conversations
        if not self.acceptance(k).num_draft_tokens:
            return "no token was drafted"
        if n < 2:
            return "all requests are of one conversation"
        if n < intervals.FEWEST:
            return f"{n} conversations are too few"
        return None

    def headline(self) -> str:
        """Return text about the speed-up of whole requests, its baseline, and the reason to doubt it, if any."""
        if not self.timed:
            return f"Not timed. Predicted: {self.predicted_text()} in whole requests at K = {self.best_k}"
        gain = self.best_k_speedup
        doubt = self.doubt
        undecided = self.undecided
        opening = "No clear difference"
        if undecided is not None:
            opening = f"No verdict, because {undecided}. Measured"
        elif doubt is not None:
            opening = (
                f"Cannot tell whether the draft helps, because {doubt}; measure again on a machine without "
                "other work. Measured"
            )
        elif gain.above(1):
            opening = "Faster"
        elif gain.below(1):
            opening = "Slower than no draft"
        text = f"{opening}: {gain.as_speedup()} in whole requests at K = {self.best_k}"
        if self.output_differs:
            text = f"The output differs from the target's own. {text}"
        if self.other_plain:
            text += f" over the target alone with {self.baseline_weights} weights"
        return text

    def predicted_text(self) -> str:
        """Return the predicted speed-up at the best K as text, with the error of the predictions of this run."""
        assert self.prediction is not None
        text = f"{self.predicted_speedup(self.best_k).value:.2f}x"
        if self.prediction.error is None:
            return text
        return f"{text} (predictions of the timed drafts were off by up to {self.prediction.error:.1%})"

    def precision_first(self, gain: Interval) -> str | None:
        """Return advice on the target's precision if another one, without a draft, is faster than this draft.

        Otherwise, or if the timings are in doubt, return None.

        gain: Speed-up over the fastest plain decoding.
        """
        alone = self.baseline_weights
        here = self.conditions.target_weights
        k = self.best_k
        if alone == here or not self.timed or not gain.below(1) or self.undecided is not None or self.doubt is not None:
            return None
        advice = "do not quantise the target"
        if here != "int8":
            advice = "quantise the target first where its accuracy allows it"
        return (
            f"The target alone with {alone} weights makes {format_number(self.output_tps(0))} tokens/s, "
            f"more than the {here} target with {self.label} at K = {k} ({format_number(self.output_tps(k))}): {advice}."
        )

    def verdict(self) -> str:
        """Return text about the gain of the draft, and about the phase of a step that takes the most time."""
        k = self.best_k
        said = [f"{self.headline()}."]
        if (advice := self.precision_first(self.best_k_speedup)) is not None:
            said.append(advice)
        tpot = self.best_k_tpot_speedup
        implied = self.implied_speedup(k) if self.timed else None
        if tpot is not None:
            text = f"TPOT, the time per token after the first: {tpot.as_speedup()}"
            if implied is not None:
                text += f" (by latencies and acceptance it should be {implied:.2f}x)"
            said.append(f"{text}.")
        with_draft = self.ttft_ms(k)
        alone = self.ttft_ms(0)
        if with_draft is not None and alone is not None:
            said.append(
                f"TTFT, the time to the first token: {format_number(with_draft.value)} {MILLISECONDS[self.seconds]} "
                f"with the draft, {format_number(alone.value)} without."
            )
        said.append(
            f"{self.tokens_per_pass(k):.2f} tokens per target pass (break-even of "
            f"{'whole requests' if self.served else 'TPOT'}: {self.break_even_length(k):.2f})."
        )
        if shares := self.time_shares(k):
            phase = max(shares, key=lambda name: shares[name])
            activity, advice = LIMITS[phase]
            said.append(f"{activity} takes {shares[phase]:.0%} of the time after the first token: {advice}.")
        return " ".join(said)


LIMITS = {
    "draft": ("Drafting", "a faster draft would help most, for example a draft with fewer layers"),
    "verify": ("Verification", "more accepted tokens would help most"),
    "host": ("Work on the host", "a faster engine would help most"),
}


def score_files(paths: Sequence[Path]) -> list[Path]:
    """Return the paths of scores: all .json files among `paths`, and every score.json under the directories."""
    files: list[Path] = []
    for path in paths:
        files += [path] if path.suffix == ".json" else sorted(path.rglob("score.json"))
    return files


def found_scores(folder: Path) -> list[Score]:
    """Return all scores under a folder that the user did not name. A file that is not a score is left out, with a note.

    Such a file may be of another version, or of another project.
    """
    found: list[Score] = []
    for file in score_files([folder]):
        try:
            found.append(read_score(file))
        except UserError as error:
            note(f"left out: {error}")
    return found


def read_score(path: Path) -> Score:
    """Read score.json from its path or its directory.

    Raises:
        UserError: There is no such file, or the file is not a score.
    """
    return read_model(Score, path, "score.json")
