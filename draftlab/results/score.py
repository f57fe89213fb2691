"""What a score holds: measurements as they were taken; every statistic is derived from them. No torch.

Names are vLLM's (0.32, per-request speculative metrics). A step is one target pass after the prefill and the drafting
before it; K_s tokens drafted, a_s accepted, e_s emitted (a_s + 1, less only where EOS or the length limit cuts).
"""

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from draftlab import intervals
from draftlab.errors import UserError
from draftlab.files import validation_text
from draftlab.intervals import Interval, Timing, Timings
from draftlab.model.shape import Shape

STALLED = 1.5  # one repeat of a prompt over another: the machine did something else
LOADED = 0.5  # of the cores, busy with other work

Kind = TypeVar("Kind", bound=BaseModel)


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Generation(_Frozen):
    """One prompt decoded once. The lists have one entry per step after the prefill, which emits the first token."""

    prompt: int  # index into the score's prompts
    tokens: int  # emitted in all, the prefill's included
    drafted: list[int]
    accepted: list[int]
    emitted: list[int]
    prefill_seconds: float
    draft_seconds: float
    verify_seconds: float
    host_seconds: float

    @model_validator(mode="after")
    def _adds_up(self) -> "Generation":
        if not len(self.drafted) == len(self.accepted) == len(self.emitted):
            raise ValueError("drafted, accepted and emitted have one entry per step each")
        if self.tokens != 1 + sum(self.emitted):
            raise ValueError(f"{self.tokens} tokens are not the prefill's and {sum(self.emitted)} of the steps")
        return self

    @property
    def decode_seconds(self) -> float:
        """Time after the prefill: the same counter for plain and speculative decoding."""
        return self.draft_seconds + self.verify_seconds + self.host_seconds

    @property
    def timing(self) -> Timing:
        """Tokens after the prefill's, and the seconds that they took."""
        return self.tokens - 1, self.decode_seconds


class ServedGeneration(_Frozen):
    """One prompt decoded once by a server, seen from outside: steps, and prefill apart from decoding, are not known."""

    prompt: int
    tokens: int
    seconds: float  # from request to answer

    @property
    def timing(self) -> Timing:
        """All tokens, and all seconds, the prefill's among them."""
        return self.tokens, self.seconds


AnyGeneration = Generation | ServedGeneration


class Counters(_Frozen):
    """What a server's speculative counters grew by, over all generations at one K."""

    num_drafts: float = Field(gt=0)
    num_draft_tokens: float
    num_accepted_tokens_per_pos: list[float]  # at each place, 1 ... K; the last ones may be left out where they are 0

    @property
    def k(self) -> int:
        return max(len(self.num_accepted_tokens_per_pos), math.ceil(self.num_draft_tokens / self.num_drafts))

    @property
    def acceptance(self) -> "Acceptance":
        """Every step is taken to have drafted K tokens; how many the end of a text cut is not known."""
        reached = [
            self.num_drafts,
            *self.num_accepted_tokens_per_pos,
            *[0.0] * (self.k - len(self.num_accepted_tokens_per_pos)),
        ]
        return acceptance_from_counts(
            reached=reached, eligible=reached[:-1], drafted=self.num_draft_tokens, truncated=None
        )


class Acceptance(_Frozen):
    """Acceptance over all steps of some generations; always read rate and length together.

    Counts are whole numbers where they were counted, expectations where they were replayed.
    """

    num_spec_steps: int | float
    num_draft_tokens: int | float
    num_accepted_draft_tokens: int | float
    draft_acceptance_rate: float  # accepted / drafted
    mean_acceptance_length: float  # tokens per target pass, the target's own included; the paper's TAR
    per_position_acceptance: list[float]  # share of steps that accepted at least i tokens, i = 1..K
    conditional_acceptance: list[float]  # share accepted at i of those steps that drafted and reached it
    acceptance_histogram: list[int | float]  # steps by accepted tokens, 0..K
    n_truncated_steps: int | float | None  # cut by EOS or the length limit; None: a server does not say


class Latency(_Frozen):
    """Time of one forward pass in milliseconds: median, quartiles, how many."""

    width: int  # tokens fed at once
    median_ms: float
    low_ms: float
    high_ms: float
    n: int


class TaskResult(_Frozen):
    """One lm-eval metric of one task. stderr is None where lm-eval gives none."""

    task: str
    metric: str
    value: float
    stderr: float | None
    higher_is_better: bool
    items: list[float] = []  # its value of each item in the task's order, where items have one: for paired tests


class Model(_Frozen):
    """A model that took part: its directory or name, its shape, what it costs to run, and its lm-eval results."""

    name: str
    sha256: str | None  # None, as for the shape: it is not here to be read
    shape: Shape | None
    latency: list[Latency]  # by width, from one token on; none: not measured
    tasks: list[TaskResult]
    via_transformers: bool = False  # transformers ran it: draftlab's own decoder does not know its architecture


class Prompt(_Frozen):
    """How long a prompt was, and of what kind its set says it is."""

    tokens: int
    category: str = ""


class Environment(_Frozen):
    """The machine, just before measuring."""

    system: str
    processor: str
    cores: int
    busy_cores: float  # by other work
    governor: str | None  # of CPU frequencies
    driver: str | None  # of NVIDIA's devices

    @property
    def busy(self) -> bool:
        return self.busy_cores > LOADED * self.cores


class Conditions(_Frozen):
    """What the numbers depend on."""

    device: str
    dtype: str
    mode: Literal["eager", "native", "graphs", "served"]
    threads: int | None  # None: as the server has it
    temperature: float
    data: str
    prompts_sha256: str | None = None
    prompts: int
    prompt_tokens: int | None  # prompts were cut to this; None: whole
    max_tokens: int
    repeats: int
    context: int | None  # cached tokens at which latency was measured
    seed: int
    batch: int = 1  # prompts decoded at once; a generation's seconds are its share of theirs
    draft_int8: bool = False  # the draft's weights were rounded to 8 bits
    rule: str = "rejection"  # of verifying; greedily all are one
    lossy: bool = False  # the rule changes what is written
    top_k: int = 0  # 0: tokens are drawn from all
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def decoding(self) -> str:
        """How tokens were chosen and verified, in words."""
        if self.temperature == 0:
            return "greedy"
        cuts = {"top-k": self.top_k, "top-p": self.top_p if self.top_p < 1 else 0, "min-p": self.min_p}
        warp = [f"temperature {self.temperature:g}", *(f"{name} {value:g}" for name, value in cuts.items() if value)]
        rule = [] if self.mode == "served" else [f"rule {self.rule}{' (LOSSY)' if self.lossy else ''}"]
        return f"sampled at {', '.join(warp + rule)}"


class Score(_Frozen):
    """One draft against one target: in one process and one engine, or in two servers of one kind. score.json."""

    version: Literal[1] = 1
    name: str
    target: Model
    draft: Model
    conditions: Conditions
    environment: Environment | None = None
    prompts: list[Prompt] = []
    speculative_tasks: list[
        TaskResult
    ] = []  # generation tasks of the target with this draft, through the speculative engine
    plain: list[Generation] | list[ServedGeneration]
    speculative: dict[int, list[Generation] | list[ServedGeneration]] = Field(min_length=1)  # by K
    counters: dict[int, Counters] = {}  # by K, where a server decoded
    identical: bool | None  # greedy: speculative tokens equal plain ones; None when sampling
    distinct_4grams: float  # of the target's output; low means a repetition loop, which flatters every draft
    command: str
    versions: dict[str, str]
    created: str

    @model_validator(mode="after")
    def _arms_match(self) -> "Score":
        prompts = sorted(g.prompt for g in self.plain)
        if any(sorted(g.prompt for g in runs) != prompts for runs in self.speculative.values()):
            raise ValueError("plain and speculative decoding hold different prompts")
        if not all(any(g.timing[0] for g in runs) for runs in (self.plain, *self.speculative.values())):
            raise ValueError("no text goes on behind its first token: nothing was timed")
        if self.served and set(self.counters) != set(self.speculative):
            raise ValueError("what a server decoded comes with its counters, for every K")
        return self

    @property
    def served(self) -> bool:
        """AnyGeneration by servers."""
        return any(isinstance(g, ServedGeneration) for g in self.plain)

    def generations(self, k: int) -> list[Generation]:
        """Step by step; [] where a server decoded, which does not say."""
        return [g for g in self.speculative[k] if isinstance(g, Generation)]

    def acceptance(self, k: int) -> Acceptance:
        return self.counters[k].acceptance if k in self.counters else count_acceptance(self.generations(k), k)

    def tokens_per_pass(self, k: int) -> float:
        """Over all target passes but prefills; acceptance leaves out those that had no draft. The same where servers
        decoded, which do not say."""
        steps = [emitted for g in self.generations(k) for emitted in g.emitted]
        return sum(steps) / len(steps) if steps else self.acceptance(k).mean_acceptance_length

    def share_without_draft(self, k: int) -> float:
        """Share of target passes that had no draft: nothing was found, or one token was left to write."""
        steps = [drafted for g in self.generations(k) for drafted in g.drafted]
        return steps.count(0) / len(steps) if steps else 0.0

    def timings(self, ks: Collection[int]) -> Timings:
        """What prompts took at each of ks, and without a draft."""
        return [median_timings(self.speculative[k]) for k in ks], median_timings(self.plain)

    def speedup(self, k: int) -> Interval:
        """Tokens per second, speculative over plain: ratio of sums over prompts, each at its typical repeat; the
        prefill is left out of both unless servers decoded."""
        return intervals.speedup(self.timings([k]))

    @property
    def best_k_speedup(self) -> Interval:
        """The speed-up of a K that was chosen on other prompts than those it is timed on: what best_k can promise."""
        return intervals.speedup(self.timings(self.speculative))

    @property
    def stalls(self) -> tuple[int, float]:
        """Prompts of which one repeat took over STALLED times as long as another, in some way; and the worst ratio."""
        arms = [timings_by_prompt(runs) for runs in (self.plain, *self.speculative.values())]
        worst = [max(map(intervals.slowest_over_fastest, ways)) for ways in zip(*arms, strict=True)]
        return sum(one > STALLED for one in worst), max(worst)

    def subset(self, prompts: Collection[int]) -> "Score":
        """The same score over some of its prompts. Counters of servers are of all prompts together and are left out."""
        speculative = {k: [g for g in runs if g.prompt in prompts] for k, runs in self.speculative.items()}
        plain = [g for g in self.plain if g.prompt in prompts]
        return self.model_copy(update={"plain": plain, "speculative": speculative, "counters": {}})

    @property
    def prompts_by_category(self) -> dict[str, list[int]]:
        """Prompts by what their set calls them; {} where it does not."""
        named = sorted({p.category for p in self.prompts if p.category})
        return {name: [i for i, p in enumerate(self.prompts) if p.category == name] for name in named}

    @property
    def output_differs(self) -> bool:
        """What was written is not the target's own, so that no speed-up counts."""
        return self.conditions.lossy or self.identical is False

    @property
    def best_k(self) -> int:
        return max(self.speculative, key=lambda k: self.speedup_value(k))

    def speedup_value(self, k: int) -> float:
        return self.output_tps(k) / self.output_tps(0)

    def output_tps(self, k: int) -> float:
        """Tokens per second after the prefill, or with it where servers decoded; K = 0 is plain decoding."""
        return intervals.tokens_per_second(median_timings(self.speculative[k] if k else self.plain))

    def time_shares(self, k: int) -> dict[str, float]:
        """Shares of decode time: drafting, verifying, host (accepting, sampling, bookkeeping); {} where unknown."""
        runs = [g for g in (self.speculative[k] if k else self.plain) if isinstance(g, Generation)]
        total = sum(g.decode_seconds for g in runs)
        return (
            {}
            if not total
            else {
                "draft": sum(g.draft_seconds for g in runs) / total,
                "verify": sum(g.verify_seconds for g in runs) / total,
                "host": sum(g.host_seconds for g in runs) / total,
            }
        )

    @property
    def draft_ms(self) -> float | None:
        """Median time of one draft pass over one token, where it was measured."""
        return self.draft.latency[0].median_ms if self.draft.latency else None

    @property
    def cost_ratio(self) -> float | None:
        """c: one draft pass over one target pass."""
        step = self.draft_ms
        return step / self.target.latency[0].median_ms if step is not None and self.target.latency else None

    def break_even_length(self, k: int) -> float:
        """Tokens per target pass at which this K would neither win nor lose, at the time per step that was measured."""
        return self.tokens_per_pass(k) / self.speedup_value(k)

    def verdict(self) -> str:
        """One sentence: what it gains, and what holds it back most."""
        k = self.best_k
        speedup, length = self.best_k_speedup, self.tokens_per_pass(k)
        spread = f"{speedup.low:.2f} to {speedup.high:.2f}" if speedup.n > 1 else "n = 1"
        gain = (
            f"K = {k} gives {speedup.value:.2f}x ({spread}): {length:.2f} tokens per target pass, "
            f"break-even {self.break_even_length(k):.2f}"
        )
        if speedup.n == 1 or speedup.low <= 1 <= speedup.high:
            gain = "No clear difference. " + gain
        else:
            gain = ("Faster. " if speedup.low > 1 else "Slower than no draft. ") + gain
        if self.output_differs:
            gain = f"{'LOSSY: not' if self.conditions.lossy else 'Not'} the target's own output. {gain}"
        return f"{gain}; {self._limit(k)}." if self.time_shares(k) else f"{gain}."

    def _limit(self, k: int) -> str:
        split = self.time_shares(k)
        remedy = {
            "draft": "a cheaper draft would help most, and depth is what costs",
            "verify": "more accepted tokens would help most",
            "host": "a faster engine would help most",
        }
        phase = max(split, key=lambda name: split[name])
        doing = {"draft": "drafting", "verify": "verifying", "host": "bookkeeping on the host"}[phase]
        return f"{doing} takes {split[phase]:.0%} of the time: {remedy[phase]}"


def count_acceptance(generations: list[Generation], k: int) -> Acceptance:
    """Counts over the steps that drafted something; the self-checks of the metrics hold by construction or raise.

    Raises:
        ValueError: the lists contradict each other.
    """
    steps = [(d, a, e) for g in generations for d, a, e in zip(g.drafted, g.accepted, g.emitted, strict=True) if d > 0]
    if any(not 0 <= a <= d <= k or not 1 <= e <= a + 1 for d, a, e in steps):
        raise ValueError(f"steps with accepted > drafted, drafted > K = {k}, or emitted > accepted + 1")
    return acceptance_from_counts(
        reached=[sum(a >= i for _, a, _ in steps) for i in range(k + 1)],
        eligible=[sum(a >= i - 1 and d >= i for d, a, _ in steps) for i in range(1, k + 1)],
        drafted=sum(d for d, _, _ in steps),
        truncated=sum(e < a + 1 for _, a, e in steps),
    )


def acceptance_from_counts(
    *, reached: Sequence[float], eligible: Sequence[float], drafted: float, truncated: float | None
) -> Acceptance:
    """From counts over the steps that drafted something, live ones or expected ones.

    Args:
        reached: steps that accepted at least i tokens, i = 0..K.
        eligible: steps that drafted an i-th token and accepted those before it, i = 1..K.
    """
    n, accepted = reached[0], sum(reached[1:])
    return Acceptance(
        num_spec_steps=n,
        num_draft_tokens=drafted,
        num_accepted_draft_tokens=accepted,
        draft_acceptance_rate=accepted / drafted if drafted else 0.0,
        mean_acceptance_length=1 + accepted / n if n else 1.0,
        per_position_acceptance=[r / n if n else 0.0 for r in reached[1:]],
        conditional_acceptance=[r / e if e else 0.0 for r, e in zip(reached[1:], eligible, strict=True)],
        acceptance_histogram=[a - b for a, b in zip(reached, [*reached[1:], 0], strict=True)],
        n_truncated_steps=truncated,
    )


def read_json(kind: type[Kind], path: Path, name: str, hint: str = "") -> Kind:
    """A file of one kind, from its path or the directory that holds it by name. hint: for when there is none.

    Raises:
        UserError: no such file, or not one of that kind.
    """
    file = path / name if path.is_dir() else path
    try:
        return kind.model_validate_json(file.read_text())
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}{hint}") from None
    except ValidationError as error:
        raise UserError(f"{file} is not a {kind.__name__.lower()}: {validation_text(error)[:200]}") from None


def read_score(path: Path) -> Score:
    """score.json; raises as read_json."""
    return read_json(Score, path, "score.json")


def timings_by_prompt(decoded: Sequence[AnyGeneration]) -> list[list[Timing]]:
    """Tokens and seconds of every repeat, in the order of the prompts."""
    found: dict[int, list[Timing]] = {}
    for g in decoded:
        found.setdefault(g.prompt, []).append(g.timing)
    return [found[prompt] for prompt in sorted(found)]


def median_timings(decoded: Sequence[AnyGeneration]) -> list[Timing]:
    """Tokens and seconds of each prompt's typical repeat."""
    return [intervals.median_repeat(one) for one in timings_by_prompt(decoded)]
