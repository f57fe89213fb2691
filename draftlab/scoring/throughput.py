"""Time plain and speculative decoding in turns, in the same engine and on the same prompts.

An arm is one way to decode: with a draft at one K, or without a draft (plain decoding). With int8 weights, there is a
second arm of plain decoding, at the other precision. Every repeat runs all arms on each batch of prompts, in
alternating order, so that drift of the machine affects all arms equally.

A step is one target pass, with the drafting before it. Two steps are of the same kind if they draft the same number of
tokens for the same number of texts; they do nearly the same work. A step is called stalled if it takes more than FACTOR
times as long as the quantile USUAL of its kind. It was then interrupted by other work, and its time is replaced by the
median of its kind. The interruptions would change a mean, and even a median over prompts if most prompts were
interrupted. A prefill is compared with prefills of the same prompt. Runs with many stalled steps are repeated.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import attrgetter
from statistics import median_low
from typing import Any, TypeVar

import numpy as np

from draftlab.console import note, note_if_slow, progress
from draftlab.engine.clocks import StepClock, step_clock_for
from draftlab.engine.generate import Drafter, Step, decode, speculative_decode
from draftlab.engine.verify import Rule
from draftlab.errors import UserError
from draftlab.latency.machine_state import warm_up
from draftlab.model.cuda_graphs import BUCKET
from draftlab.model.decoder import Decoder
from draftlab.results.decoding import Generation
from draftlab.sampling import SamplingParams

# a step has stalled if it takes more than FACTOR times the quantile USUAL of its kind
FACTOR = 3.0
USUAL = 0.8  # fraction of the steps that are assumed free of stalls
# A kind with fewer steps than this is too rare for a median of its own. Its steps are compared with all of the arm's.
ENOUGH = 10
PHASES = ("draft_seconds", "verify_seconds", "host_seconds")


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step, and the number of unfinished texts in the batch (rows).

    stall: Seconds by which the time of the step was shortened because it had stalled; 0 if it had not.
    """

    step: Step
    rows: int
    stall: float = 0.0


def timed_steps(rows: Sequence[Sequence[Step]]) -> list[list[TimedStep]]:
    """Return the steps of each text of a batch as TimedSteps, without the prefill. rows: Steps of each text."""
    lengths = np.array([len(row) for row in rows])
    timed: list[list[TimedStep]] = []
    for row in rows:
        timed.append([TimedStep(s, int((lengths > i).sum())) for i, s in enumerate(row) if i])
    return timed


def without_stalls(runs: Sequence[Sequence[TimedStep]]) -> list[list[TimedStep]]:
    """Return the steps of all generations of one arm, with the times of stalled steps replaced.

    A stalled step gets the median time of each phase in the steps of its kind that did not stall. If its kind has fewer
    than ENOUGH steps, it is compared with all steps of the arm instead.
    """
    kinds: dict[Hashable, list[Step]] = defaultdict(list)
    every = list(chain.from_iterable(runs))
    for timed in every:
        kinds[_kind(timed)].append(timed.step)
    whole = _Usual.of([timed.step for timed in every]) if every else None
    usual = {kind: _Usual.of(steps) if len(steps) >= ENOUGH else whole for kind, steps in kinds.items()}
    return [[_mended(timed, usual[_kind(timed)]) for timed in run] for run in runs]


@dataclass(frozen=True, slots=True)
class _Usual:
    """The times that one kind of step takes if it is not interrupted.

    limit: Seconds above which a step has stalled. phases: Median seconds of each phase in the steps up to this limit.
    """

    limit: float
    phases: tuple[float, ...]

    @classmethod
    def of(cls, steps: Sequence[Step]) -> "_Usual":
        seconds = np.array(list(map(attrgetter(*PHASES), steps)))  # [steps, 3]
        limit = FACTOR * float(np.quantile(seconds.sum(1), USUAL))
        return cls(limit, tuple(np.median(seconds[seconds.sum(1) <= limit], axis=0).tolist()))


def _kind(timed: TimedStep) -> Hashable:
    return timed.step.drafted, timed.rows


def _mended(timed: TimedStep, usual: _Usual | None) -> TimedStep:
    seconds = _seconds(timed.step)
    if usual is None or seconds <= usual.limit:
        return timed
    step = replace(timed.step, **dict(zip(PHASES, usual.phases, strict=True)))
    return TimedStep(step, timed.rows, seconds - sum(usual.phases))


MANY_STALLED = 0.2  # fraction of stalled steps above which a run is repeated, 1 - USUAL
WARM_UP_TOKENS = 48  # number of new tokens of each warm-up text
BRIEF = 8  # the same, if everything else is warm already
TRIES = 2  # most repetitions of a run with too many stalled steps

AnyArm = TypeVar("AnyArm")
Arm = tuple[str, int]  # name of a draft, and K; K = 0 is plain decoding
PLAIN: Arm = ("", 0)
OTHER_PLAIN: Arm = ("plain decoding with other weights", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedArms:
    """Timed generations by arm (way to decode). tokens: Token ids of each prompt's text in the first repeat, by arm."""

    generations: dict[Arm, list[Generation]]
    tokens: dict[Arm, dict[int, list[int]]]


@dataclass(slots=True)
class Run:
    """One prompt that was decoded once: its prefill, and the steps after the prefill."""

    prompt: int
    prefill: TimedStep
    steps: list[TimedStep]

    @property
    def tokens(self) -> list[int]:
        return [token for timed in (self.prefill, *self.steps) for token in timed.step.tokens]


# an arm, the number of the repeat, and the number of the group of prompts
Place = tuple[Arm, int, int]


class LiveTiming:
    """Decodes groups of prompts in several ways, and keeps the times.

    groups: Indices of the prompts in each group, which are decoded at once.
    """

    def __init__(
        self,
        target: Decoder,
        drafters: Mapping[str, Drafter],
        prompts: list[list[int]],
        *,
        sampling: SamplingParams,
        other_target: Decoder | None = None,
        clock: StepClock | None = None,
        batch: int = 1,
        rule: Rule | None = None,
        draft_sampling: SamplingParams | None = None,
        kept: MutableMapping[Place, list[Run]] | None = None,
    ) -> None:
        """Prepare the timing of prompts, without decoding any.

        Args:
            drafters: Drafters by name.
            prompts: Token ids of each prompt.
            other_target: Target at another precision. Only plain decoding is timed with it.
            clock: Clock in seconds; wall time by default.
            batch: Number of prompts that are decoded at once.
            rule: Verify rule, see speculative_decode.
            draft_sampling: Sampling parameters of drafts, see speculative_decode.
            kept: Runs that were timed before. New runs are added.
        """
        self.alone = {PLAIN: target} | ({} if other_target is None else {OTHER_PLAIN: other_target})
        self.target = target
        self.drafters = drafters
        self.prompts = prompts
        self.sampling = sampling
        self.clock = clock or step_clock_for(target.device)
        self.rule = rule
        self.draft_sampling = draft_sampling
        self.groups = [list(range(at, min(at + batch, len(prompts)))) for at in range(0, len(prompts), batch)]
        self.runs: MutableMapping[Place, list[Run]] = {} if kept is None else kept
        self.asked: set[Place] = set()  # the runs to return; an interrupted run may have timed more

    def time_all(self, arms: Sequence[Arm], group: int, repeat: int) -> None:
        """Decode a group of prompts once in each way, one after the other.

        If only some ways are done, they are decoded again, so that all have the same state of the machine.
        """
        places = [(arm, repeat, group) for arm in arms]
        if not all(place in self.runs for place in places):
            for place in places:
                self.runs.pop(place, None)
        for arm in reversed(arms) if (repeat + group) % 2 else arms:
            self.time(arm, repeat, group)

    def warm_up(self, arms: Sequence[Arm], *, briefly: bool = False) -> None:
        """Decode a text in each way until its times are steady. On CUDA, capture all graphs first.

        briefly: Whether to decode a few tokens of it once.
        """
        to_the_end = replace(self.sampling, stop_token_ids=())
        for arm in sorted(arms, key=lambda arm: -arm[1]) if self.target.replays_passes else []:
            with note_if_slow(f"capturing CUDA graphs of {_arm_name(arm)}"):
                # the longest texts first, because a longer cache replaces the memory of a shorter cache
                for group in _first_of_each_length(self.groups, self.prompts):
                    deque(self._steps(arm, group, to_the_end), maxlen=0)
        few = replace(
            self.sampling,
            max_tokens=min(self.sampling.max_tokens, BRIEF if briefly else WARM_UP_TOKENS),
        )
        if briefly:
            with progress("warming up", len(arms)) as advance:
                for number, arm in enumerate(arms, 1):
                    deque(self._steps(arm, self.groups[0], few), maxlen=0)
                    advance(number, _arm_name(arm))
            return
        _warm_up(arms, lambda arm: self._steps(arm, self.groups[0], few))

    def time(self, arm: Arm, repeat: int, group: int) -> list[Run]:
        """Decode a group of prompts in one way, unless it is done, and return the runs of its prompts."""
        self.asked.add((arm, repeat, group))
        if (arm, repeat, group) not in self.runs:
            self.runs[arm, repeat, group] = self._decode(arm, group)
        return self.runs[arm, repeat, group]

    def finish(self) -> TimedArms:
        """Repeat runs with many stalled steps, and return the generations of all arms that were asked for.

        Raises:
            UserError: Every text ends with its first token, so that there is nothing to time.
        """
        runs_of: dict[Arm, dict[tuple[int, int], list[Run]]] = {}
        for place in sorted(self.asked, key=lambda place: (place[1:], place[0])):
            arm, repeat, group = place
            runs_of.setdefault(arm, {})[repeat, group] = self.runs[place]
        if not any(run.steps for run in chain.from_iterable(runs_of[PLAIN].values())):
            raise UserError(
                f"the target answers all {len(self.prompts)} prompts with only the end-of-text token, so there is "
                "nothing to time; use other prompts, for example with --prompt-file FILE"
            )
        with note_if_slow("repeating answers that other programs disturbed"):
            _repeat_stalled(runs_of, self._again)
        every = {arm: list(chain.from_iterable(runs.values())) for arm, runs in runs_of.items()}
        tokens: dict[Arm, dict[int, list[int]]] = {arm: {} for arm in every}
        for arm, runs in every.items():
            for each in runs:
                tokens[arm].setdefault(each.prompt, each.tokens)
        _mend_prefills([(arm, run) for arm, runs in every.items() for run in runs])
        return TimedArms(generations={arm: _generations(runs) for arm, runs in every.items()}, tokens=tokens)

    def _again(self, arm: Arm, at: tuple[int, int]) -> list[Run]:
        self.runs[arm, *at] = self._decode(arm, at[1])
        return self.runs[arm, *at]

    def _decode(self, arm: Arm, group: int) -> list[Run]:
        rows: list[list[Step]] = [[] for _ in self.groups[group]]
        for step in self._steps(arm, self.groups[group], self.sampling):
            rows[step.row].append(step)
        prefills = [TimedStep(row[0], len(rows)) for row in rows]
        return list(map(Run, self.groups[group], prefills, timed_steps(rows)))

    def _steps(self, arm: Arm, group: list[int], sampling: SamplingParams) -> Iterator[Step]:
        texts = [self.prompts[i] for i in group]
        if arm in self.alone:
            return decode(self.alone[arm], texts, sampling, self.clock, group)
        name, k = arm
        return speculative_decode(
            self.target,
            self.drafters[name],
            texts,
            k,
            sampling,
            self.clock,
            group,
            self.rule,
            self.draft_sampling,
        )


def measure_throughput(
    target: Decoder,
    drafters: Mapping[str, tuple[Drafter, list[int]]],
    prompts: list[list[int]],
    *,
    repeats: int,
    advance: Callable[[int], None],
    other_target: Decoder | None = None,
    **settings: Any,
) -> TimedArms:
    """Decode every prompt `repeats` times without a draft and with each drafter at each K, after a warm-up.

    Args:
        drafters: Drafters with their values of K, by name.
        advance: Function that takes the number of finished batches of prompts, each arm and repeat counted.
        settings: Further arguments of LiveTiming.

    Raises:
        UserError: Every text ends with its first token, so that there is nothing to time.
    """
    live = LiveTiming(
        target,
        {name: drafter for name, (drafter, _) in drafters.items()},
        prompts,
        other_target=other_target,
        **settings,
    )
    arms = [*live.alone, *((name, k) for name, (_, ks) in drafters.items() for k in ks)]
    live.warm_up(arms)
    order = list(interleaved(arms, len(live.groups), repeats))
    with progress("decoding", len(order) * len(live.groups[0])) as show:
        for done, (arm, repeat, number) in enumerate(order, 1):
            live.time(arm, repeat, number)
            advance(done)
            show(done * len(live.groups[0]), "answers")
    return live.finish()


def interleaved(arms: Sequence[AnyArm], groups: int, repeats: int) -> Iterator[tuple[AnyArm, int, int]]:
    """Yield all combinations of an arm, a repeat and a group of prompts. The order of the arms alternates."""
    for repeat in range(repeats):
        for group in range(groups):
            for arm in reversed(arms) if (repeat + group) % 2 else arms:
                yield arm, repeat, group


def _warm_up(arms: Sequence[Arm], decode_first: Callable[[Arm], Iterator[Step]]) -> None:
    unsteady = []
    with progress("warming up", len(arms)) as advance:
        for number, arm in enumerate(arms, 1):
            steady = warm_up(lambda arm=arm: sum(s.draft_seconds + s.verify_seconds for s in decode_first(arm)))
            advance(number, _arm_name(arm))
            if not steady:
                unsteady.append(_arm_name(arm))
    if unsteady:
        note(
            f"the time of {', '.join(unsteady)} still varies after the warm-up; other programs may be running on this "
            "machine"
        )


def _arm_name(arm: Arm) -> str:
    name, k = arm
    return f"{name} at K = {k}" if k else name or "plain decoding"


def _first_of_each_length(groups: list[list[int]], prompts: list[list[int]]) -> list[list[int]]:
    """Return one group of prompts for each size of a group and range of lengths, the longest prompts first.

    A CUDA graph is captured at its first use, which must not be a timed pass. Decoding the returned groups captures all
    graphs.

    groups: Indices of the prompts in each group.
    """

    def longest(group: list[int]) -> int:
        return max(len(prompts[i]) for i in group)

    by_length = {(len(group), longest(group) // BUCKET): group for group in sorted(groups, key=longest)}
    return sorted(by_length.values(), key=longest, reverse=True)


def _mend_prefills(runs: Sequence[tuple[Arm, Run]]) -> None:
    """Replace the times of stalled prefills by the median of the prefills of the same prompt.

    The median of the target's time is over all repeats of all arms with the same weights of the target. The median of a
    draft's time is over all repeats at all K of this draft.
    """
    target_seconds: dict[tuple[bool, int], list[float]] = defaultdict(list)
    draft_seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for arm, run in runs:
        step = run.prefill.step
        target_seconds[arm == OTHER_PLAIN, run.prompt].append(step.verify_seconds + step.host_seconds)
        draft_seconds[arm[0], run.prompt].append(step.draft_seconds)
    for arm, run in runs:
        target = median_low(target_seconds[arm == OTHER_PLAIN, run.prompt])
        # plain decoding drafts nothing
        draft = median_low(draft_seconds[arm[0], run.prompt]) if arm[1] else 0.0
        stall = _seconds(run.prefill.step) - target - draft
        if stall > (FACTOR - 1) * (target + draft):
            usual = replace(run.prefill.step, draft_seconds=draft, verify_seconds=target, host_seconds=0.0)
            run.prefill = TimedStep(usual, run.prefill.rows, stall)


def _repeat_stalled(
    runs_of: Mapping[Arm, dict[tuple[int, int], list[Run]]],
    rerun: Callable[[Arm, tuple[int, int]], list[Run]],
) -> None:
    """Repeat runs in which too many steps stalled, at most TRIES times each, and replace them in `runs_of`.

    rerun: Function that decodes a group of prompts again. Its arguments are the arm, and the
        numbers of the repeat and of the group.
    """
    for _ in range(TRIES):
        stalled = [(arm, at) for arm, runs in runs_of.items() for at in _stalled(runs)]
        if stalled:
            note(
                f"repeating {len(stalled)} runs, because other work interrupted more than {MANY_STALLED:.0%} of their "
                "steps"
            )
        for arm, at in stalled:
            runs_of[arm][at] = rerun(arm, at)


def _stalled(runs: Mapping[tuple[int, int], list[Run]]) -> list[tuple[int, int]]:
    """Return the runs of an arm in which too many steps stalled, as pairs of the repeat and the group."""
    mended = iter(without_stalls([run.steps for run in chain.from_iterable(runs.values())]))
    stalled: list[tuple[int, int]] = []
    for at, each in runs.items():
        steps = list(chain.from_iterable(islice(mended, len(each))))
        if sum(step.stall > 0 for step in steps) > MANY_STALLED * len(steps):
            stalled.append(at)
    return stalled


def _generations(runs: list[Run]) -> list[Generation]:
    """Return the runs of an arm as generations. A stalled step gets median times, see without_stalls."""
    generations: list[Generation] = []
    for run, timed in zip(runs, without_stalls([run.steps for run in runs]), strict=True):
        steps = [t.step for t in timed]
        passes = (run.prefill, *timed)
        generation = Generation(
            prompt=run.prompt,
            tokens=len(run.tokens),
            drafted=[s.drafted for s in steps],
            accepted=[s.accepted for s in steps],
            emitted=[len(s.tokens) for s in steps],
            prefill_seconds=_seconds(run.prefill.step),
            draft_seconds=sum(s.draft_seconds for s in steps),
            verify_seconds=sum(s.verify_seconds for s in steps),
            host_seconds=sum(s.host_seconds for s in steps),
            stalled_passes=sum(t.stall > 0 for t in passes),
            stalled_seconds=sum(t.stall for t in passes),
        )
        generations.append(generation)
    return generations


def _seconds(step: Step) -> float:
    return step.draft_seconds + step.verify_seconds + step.host_seconds
