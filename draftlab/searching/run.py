"""Search for the draft shape and K with which a target is fastest: cut, distil, replay and measure candidates.

K is the number of drafted tokens per step. Every step of the search is a command with its output in the state directory
of the search. All decisions depend only on the records of these steps. A killed search therefore decides in the same
way when it resumes, and repeats no finished step.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from draftlab.acceptance.expected import chain
from draftlab.console import note
from draftlab.latency.cost_model import CostModel, read_profile
from draftlab.latency.predict import best_k
from draftlab.latency.scaling_law import ScalingLaw, read_law
from draftlab.latency.workload import Workload
from draftlab.model import hub
from draftlab.model.hf_files import max_model_len
from draftlab.model.shape import Shape, resolve, write_shape_file
from draftlab.model.size import read_size
from draftlab.output import Output
from draftlab.results.ranking import rank
from draftlab.results.score import read_score
from draftlab.runs.atomic import remove_state
from draftlab.scoring.replay import read_replay, workload_of_replay
from draftlab.searching.schedule import (
    MAX_PASS_SHARE,
    MAX_WIDE_SHARE,
    MEASURED_PROMPTS,
    REPLAYED_TEXTS,
    MeasuredDraft,
    NoCheapShape,
    Rung,
    Search,
    ShapeTrial,
    StepRunner,
    candidates,
    count_in_time,
    number,
    record_of,
    remaining_rejections,
    write_search,
)
from draftlab.target_outputs.build import REPLAY_BATCH
from draftlab.training.students.base import StudentSpec
from draftlab.training.students.draft import OrdinarySpec
from draftlab.training.students.parallel import ParallelStudent

CALIBRATION_TOKENS = 8192
SEQ_LEN = 256
TOP_LOGPROBS = 64  # number of log-probabilities that are stored for each token, to distil from
# the learning rate of the recipe quickstart, for Muon
BATCH_SIZE = 8
LR = 4.0e-3
MOST_STEPS = 1000
REDUCTION = 3  # one candidate in three advances (Hyperband's usual factor)
FINALISTS = 2
MEASURED_SHARE = 0.25  # fraction of the time that is reserved to measure the best candidates
# fraction of the time after which no further candidate is tried, on rung 0 and on later rungs
TRIED_SHARES = (0.3, 0.6)
PROMPT_TOKENS = 64
MAX_TOKENS = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The settings of a search: the models, the shapes to consider, the text, and the time.

    Args:
        minutes: Approximate time to spend.
        ks: Numbers of drafted tokens per step to try.
        offsets: Number of tokens that a draft learns to draft in one pass. More than 1 makes parallel drafts.
        first_steps: Number of distillation steps when candidates are trained for the first time.
        tried: Shapes to consider. Shapes with cheap passes become candidates.
        text: Settings (data or outputs) for the text on which drafts are calibrated and trained.
        prompts: Settings for the prompts on which drafts are replayed and measured.
        requests: Number of prompts in the prompt file. None: prompts are cut from text.
    """

    target: Path
    source: Path
    source_shape: Shape
    minutes: float
    ks: list[int]
    offsets: int
    first_steps: int
    tried: list[Shape]
    text: dict[str, Any]
    prompts: dict[str, Any]
    requests: int | None = None

    def at_most_all(self, limits: tuple[int, int]) -> tuple[int, int]:
        """Return limits of a number of prompts that a prompt file can give."""
        fewest, most = limits
        count = most if self.requests is None else self.requests
        return min(fewest, count), min(most, count)

    @property
    def student(self) -> StudentSpec:
        return OrdinarySpec.of() if self.offsets == 1 else ParallelStudent.of(tokens=self.offsets)


def shapes_to_try(source: Shape, layers: Sequence[int] | None, widths: Sequence[int] | None) -> list[Shape]:
    """Return a shape for every combination of a number of layers and a width. None takes default numbers or widths.

    Raises:
        UserError: The source has fewer layers or a smaller width.
    """
    depths = layers or default_depths(source)
    wide = widths or default_widths(source)
    return [resolve(source, layers=n, hidden=width) for n, width in product(depths, wide)]


def default_depths(source: Shape) -> list[int]:
    """Return the numbers of layers to try by default: 1, 2, 3, 4, 6, 8, ..., up to half of the source's layers."""
    powers = [2**i for i in range(8)]
    depths = {1, *(2 * n for n in powers), *(3 * n for n in powers)}
    return sorted(n for n in depths if n <= max(1, source.layers // 2))


def default_widths(source: Shape) -> list[int]:
    """Return the widths to try by default: 1/2, 3/4 and 1 times the source's width, as whole numbers of heads."""
    heads = {max(1, source.heads * n // 4) for n in (2, 3, 4)}
    return sorted(n * source.hidden // source.heads for n in heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Searching:
    """A search to run.

    Attributes:
        name: Default name of the output directory.
        make: Function that makes the steps, as in StepRunner.
    """

    name: str
    wanted: Wanted
    make: Callable[[str, dict[str, Any]], Any]

    def facts(self) -> Mapping[str, object]:
        """Return the facts that a dry run shows."""
        return {
            "target": read_size(self.wanted.target).describe(),
            "source": self.wanted.source_shape.describe(),
            "try": ", ".join(f"{each.layers} x {each.hidden}" for each in self.wanted.tried),
            "minutes": self.wanted.minutes,
        }

    def run(self, output: Output) -> Search:
        """Run the search. Write its output: the fastest draft, the target's texts, the scores and search.json.

        Raises:
            UserError: Too few shapes are cheap enough, or a step fails.
        """
        output.claim_state([self.wanted.target, self.wanted.source])
        searcher = Searcher(wanted=self.wanted, steps=StepRunner(folder=output.state, make=self.make))
        try:
            result = searcher.search()
        except NoCheapShape as error:
            raise NoCheapShape(f"--layers, --widths: {error}; try smaller numbers") from None
        with output.directory() as directory:
            shutil.copytree(searcher.draft(len(result.rungs) - 1, result.winner.name), directory / "draft")
            for part in ("texts", "score"):
                shutil.copytree(output.state / part, directory / part)
            write_search(result, directory)
            output.record(directory, total_seconds=result.spent_seconds)
        remove_state(output.state)
        return result


@dataclass(frozen=True, kw_only=True)
class Searcher:
    """The steps and decisions of a search, in the state directory."""

    wanted: Wanted
    steps: StepRunner

    def search(self) -> Search:
        rungs = self._halve()
        leaders = rungs[-1].trials[:FINALISTS]
        return Search(
            target=str(self.wanted.target),
            source=str(self.wanted.source),
            shapes=self.shapes,
            rungs=rungs,
            measured=self._measure(len(rungs) - 1, leaders),
            spent_seconds=self.steps.seconds(),
        )

    def draft(self, rung: int, name: str) -> Path:
        return self.steps.folder / f"rung-{rung}" / name

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Return the shapes that are cheap enough to be candidates, by name. Shapes of medium cost come first."""
        parallel = self.wanted.offsets > 1
        target_ms = self._pass_ms(self._target_cost)
        share = MAX_WIDE_SHARE if parallel else MAX_PASS_SHARE
        pass_ms = self._wide_ms if parallel else self._law.ms
        return candidates(self.wanted.source_shape, self.wanted.tried, pass_ms, target_ms, share)

    def _halve(self) -> list[Rung]:
        """Run the rungs of successive halving, and return them.

        All candidates are cut on rung 0 and distilled for a few steps on rung 1. On each later rung, the best third is
        distilled again, from the cut draft and for more steps.
        """
        rungs = [self._rung(None, 0, 0, list(self.shapes))]
        steps = self.wanted.first_steps
        names = [trial.name for trial in rungs[0].trials]
        while True:
            rungs.append(self._rung(rungs[-1], len(rungs), steps, names))
            last = [trial.name for trial in rungs[-1].trials]
            if len(names) <= FINALISTS and len(rungs) > 2:
                return rungs
            names = last[: max(FINALISTS, -(-len(last) // REDUCTION))]
            steps = REDUCTION * rungs[-1].steps
            if len(names) <= FINALISTS:
                steps = self._last_steps(len(rungs) - 1, rungs[-1].steps, names)
                if steps <= rungs[-1].steps:
                    return rungs
            note(f"rung {len(rungs)}: {len(names)} drafts, {steps} steps each")

    def _rung(self, before: Rung | None, index: int, steps: int, names: Sequence[str]) -> Rung:
        """Make and replay candidates in the order of `names`, and return them as a rung.

        After the first FINALISTS candidates, more are made only while time is left.

        Args:
            before: The previous rung.
            steps: Number of distillation steps of each candidate. With 0, candidates are only cut.
        """
        until = TRIED_SHARES[min(index, 1)] * 60 * self.wanted.minutes
        works: dict[str, Workload] = {}
        for name in names:
            if len(works) >= FINALISTS and self.steps.seconds() > until:
                note(f"rung {index}: no time is left for {len(names) - len(works)} more drafts")
                break
            works[name] = self._replayed(index, name, steps)
        rejections = {name: _rejection(work) for name, work in works.items()}
        left = remaining_rejections(before, rejections)
        trials = [self._trial(name, work, rejections[name], left) for name, work in works.items()]
        return Rung(steps=steps, trials=sorted(trials, key=lambda trial: -trial.promise))

    def _replayed(self, rung: int, name: str, steps: int) -> Workload:
        """Make and replay a candidate. Return the target's texts with the acceptance probability of each token."""
        draft = self._distilled(rung, name, steps) if steps else self._cut(name)
        replayed = self.steps.run(
            f"replay-{rung}/{name}",
            "replay",
            directory=self._texts,
            draft=[str(draft)],
            k=[self.wanted.offsets],
        )
        return workload_of_replay(read_replay(replayed / draft.name))

    def _trial(self, name: str, work: Workload, rejection: float, left: float) -> ShapeTrial:
        """Return a candidate with its predicted speed, now and after one more rung.

        Args:
            work: The target's texts with the acceptance probability of each token.
            rejection: Mean probability that a drafted token is rejected.
            left: Factor by which one more rung is expected to change the probability of rejection.
        """
        cost = self._shape_cost(self.shapes[name])
        ks = self.wanted.ks
        k, speedup, rate = best_k(cost, self._target_cost, work, ks)
        learnt = work.with_chances(1 - left * (1 - work.texts.chances))
        return ShapeTrial(
            name=name,
            k=k,
            length=chain(work.texts, k).acceptance().mean_acceptance_length,
            tokens_per_second=rate,
            speedup=speedup,
            rejection=rejection,
            draft_ms=self._pass_ms(cost),
            promise=best_k(cost, self._target_cost, learnt, ks)[2],
        )

    def _last_steps(self, rung: int, steps: int, names: Sequence[str]) -> int:
        """Return the number of distillation steps of each candidate on the last rung.

        It is as large as the remaining time allows, but at least first_steps and at most MOST_STEPS.

        Args:
            rung: Number of the previous rung.
            steps: Number of distillation steps on the previous rung.
            names: Candidates of the last rung.
        """
        step_seconds = 0.0
        overhead = 0.0
        for name in names:
            record = record_of(self.draft(rung, name))
            trained = number(record, "seconds")
            step_seconds += trained / steps
            overhead += record.total_seconds - trained + record_of(self.steps.folder / f"replay-{rung}/{name}").seconds
        left = (1 - MEASURED_SHARE) * 60 * self.wanted.minutes - self.steps.seconds()
        return int(max(self.wanted.first_steps, min(MOST_STEPS, (left - overhead) / step_seconds)))

    def _measure(self, rung: int, leaders: Sequence[ShapeTrial]) -> list[MeasuredDraft]:
        """Measure the best candidates of a rung by draftlab score. Return them, the fastest first."""
        ks = sorted({leader.k for leader in leaders})
        speedups = [leader.speedup for leader in leaders for _ in ks]
        minutes = self.wanted.minutes
        left = max(60 * minutes - self.steps.seconds(), MEASURED_SHARE * 60 * minutes)
        each = self._answer_seconds(1) * (1 + sum(1 / speedup for speedup in speedups))
        scores = self.steps.run(
            "score",
            "score",
            draft=[str(self.draft(rung, leader.name)) for leader in leaders],
            target=str(self.wanted.target),
            **self.wanted.prompts,
            k=ks,
            num_prompts=count_in_time(
                left,
                each,
                self.wanted.at_most_all(MEASURED_PROMPTS),
                "the best drafts are measured on",
            ),
            max_new_tokens=MAX_TOKENS,
            repeats=1,
            seed=1,  # the measurement uses other prompts than the replays
        )
        ranked = rank([read_score(scores / each.name) for each in leaders])
        return [
            MeasuredDraft(
                name=row.name,
                k=row.k,
                length=row.score.tokens_per_pass(row.k),
                gain=row.speedup,
                tokens_per_second=row.score.output_tps(row.k),
                seconds=row.score.seconds,
                changed=row.score.output_differs,
            )
            for row in ranked
        ]

    def _answer_seconds(self, together: int) -> float:
        """Return the seconds that the target takes for each answer. together: Number of answers in a batch."""
        cost = self._target_cost
        context = np.array(self._law.context)
        prefill_ms = float(cost.prefill_ms(np.array([PROMPT_TOKENS]))[0])
        pass_ms = float(cost.forward_ms(together, 1, context))
        return (prefill_ms + MAX_TOKENS * pass_ms / together) / 1e3

    @cached_property
    def _law(self) -> ScalingLaw:
        """Measure and return a latency law for drafts. It covers passes as wide as a parallel draft's widest pass."""
        k = 2 * self.wanted.offsets - 1
        return read_law(self.steps.run("law", "profile", models=[str(self.wanted.source)], law=True, k=k, **self._grid))

    @cached_property
    def _target_cost(self) -> CostModel:
        target = self.wanted.target
        k = max(self.wanted.ks)
        profiles = self.steps.run("profile", "profile", models=[str(target)], k=k, **self._grid)
        return CostModel.of(read_profile(profiles / f"{hub.checkpoint_name(target)}.yaml"), extrapolate=True)

    @property
    def _grid(self) -> dict[str, Any]:
        return {"context": [16, PROMPT_TOKENS + MAX_TOKENS + max(self.wanted.ks)], "repeats": 8}

    def _shape_cost(self, shape: Shape) -> CostModel:
        return CostModel.of(self._law.profile(shape, ""), extrapolate=True)

    def _pass_ms(self, cost: CostModel) -> float:
        return float(cost.forward_ms(1, 1, np.array(self._law.context)))

    def _wide_ms(self, shape: Shape) -> float:
        """Return the milliseconds of a parallel draft's pass after a step that accepted half of the drafted tokens."""
        width = 3 * self.wanted.offsets // 2
        return float(self._shape_cost(shape).forward_ms(width, 1, np.array(self._law.context)))

    @cached_property
    def _texts(self) -> Path:
        """Store the target's answers, on which candidates are replayed. Return their directory.

        Half of the time that is left for rung 0 is for these answers.
        """
        left = TRIED_SHARES[0] * 60 * self.wanted.minutes - self.steps.seconds()
        each = self._answer_seconds(REPLAY_BATCH)
        return self.steps.run(
            "texts",
            "outputs build",
            use="replay",
            target=str(self.wanted.target),
            **self.wanted.prompts,
            num_prompts=count_in_time(
                left / 2, each, self.wanted.at_most_all(REPLAYED_TEXTS), "drafts are replayed on"
            ),
            max_new_tokens=MAX_TOKENS,
        )

    def _cut(self, name: str) -> Path:
        shape = self.shapes[name]
        file = self.steps.folder / f"{name}.yaml"
        write_shape_file(shape.with_whole_head(), file, name)
        return self.steps.run(
            f"rung-0/{name}",
            "prune",
            source=str(self.wanted.source),
            shape=file,
            vocab=shape.draft_vocab,
            **self.wanted.text,
            calibration_tokens=CALIBRATION_TOKENS,
            seq_len=min(SEQ_LEN, max_model_len(self.wanted.source)),
            scores_cache=self.steps.folder / "calibration.safetensors",
        )

    def _distilled(self, rung: int, name: str, steps: int) -> Path:
        stored = self.wanted.text.get("outputs") or self.steps.run(
            f"outputs-{steps}",
            "outputs build",
            target=str(self.wanted.target),
            **self.wanted.text,
            num_sequences=steps * BATCH_SIZE,
            seq_len=SEQ_LEN,
            top_logprobs=TOP_LOGPROBS,
        )
        return self.steps.run(
            f"rung-{rung}/{name}",
            "distill",
            draft=str(self.draft(0, name)),
            outputs=stored,
            steps=steps,
            batch_size=BATCH_SIZE,
            lr=LR,
            eval_steps=steps,
            save_steps=steps,
            student=self.wanted.student,
        )


def _rejection(work: Workload) -> float:
    inside = np.arange(work.texts.chances.shape[1]) < work.texts.lengths[:, None]
    return float(1 - work.texts.chances[inside].mean())
