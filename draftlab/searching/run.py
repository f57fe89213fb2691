"""Search for the shape and K with which a target is fastest here: cut, distil, replay, price and measure candidates.

Every step is a command whose output lies in the state directory of the search; a killed search resumes with these.
"""

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from draftlab.acceptance.expected import chain
from draftlab.atomic import remove_state
from draftlab.console import note
from draftlab.drafters.eagle import EagleSpec
from draftlab.latency.cost_model import CostModel, read_profile
from draftlab.latency.predict import best_k
from draftlab.latency.scaling_law import ScalingLaw, read_law
from draftlab.latency.workload import Workload, workload_of_replay
from draftlab.model import hub
from draftlab.model.shape import Shape, resolve, write_shape_file
from draftlab.output import Output
from draftlab.results.ranking import rank
from draftlab.results.score import read_score
from draftlab.searching.schedule import (
    FILE,
    MAX_PASS_SHARE,
    MAX_WIDE_SHARE,
    REDUCTION,
    Measured,
    Rung,
    Search,
    Trial,
    affordable_steps,
    candidates,
    read_search,
    write_search,
)
from draftlab.searching.steps import Steps, number, record_of
from draftlab.target_outputs.replay import read_replay
from draftlab.training.students.parallel import ParallelSpec

CALIBRATION_TOKENS, SEQ_LEN = 8192, 256
TOP_LOGPROBS = 64  # of the target, to distil from
BATCH_SIZE, LR, MOST_STEPS = 8, 4.0e-3, 1000  # of a training; the rate is Muon's, as in recipes/quickstart.yaml
FINALISTS, MEASURED_PROMPTS = 2, 16
MEASURED_SHARE = 0.25  # of the time, reserved to measure the leaders
TRIED_SHARES = (0.3, 0.6)  # of the time, after which rung 0, or a later one, has no further candidates
REPLAYED_TEXTS, PROMPT_TOKENS, MAX_TOKENS = 48, 64, 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a search tries.

    tried: shapes to cut from source, of which the cheap ones are candidates. named: shapes that stay to the end, by
    name. heads: EAGLE-3 heads of the target, which stay, too. offsets: tokens that a draft learns to draft in one pass.
    text: settings of the text that drafts are cut with, data or outputs. prompts: settings of the prompts that they are
    replayed and measured on.
    """

    target: Path
    source: Path
    source_shape: Shape
    minutes: float
    ks: list[int]
    offsets: int
    first_steps: int
    tried: list[Shape]
    named: dict[str, Shape]
    heads: list[EagleSpec]
    head_params: list[int]
    text: dict[str, Any]
    prompts: dict[str, Any]
    inputs: list[Path] = field(default_factory=list)

    @property
    def student(self) -> str:
        """Return what candidates are trained as, as distill takes it."""
        return "draft" if self.offsets == 1 else ParallelSpec.of(tokens=self.offsets).text

    @property
    def outputs(self) -> Path | None:
        """Return the stored outputs to distil from; None: the target reads text."""
        return self.text.get("outputs")


def shapes_to_try(source: Shape, layers: Sequence[int] | None, widths: Sequence[int] | None) -> list[Shape]:
    """Return every depth at every width. Raises UserError: a size that the source has not."""
    depths, wide = layers or default_depths(source), widths or default_widths(source)
    return [resolve(source, layers=n, hidden=width) for n in depths for width in wide]


def default_depths(source: Shape) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, 16 ... up to half of the source."""
    steps = {n * 2**i for i in range(8) for n in (2, 3)} | {1}
    return sorted(n for n in steps if n <= max(1, source.layers // 2))


def default_widths(source: Shape) -> list[int]:
    """Return half, three quarters and all of the source's width, in whole heads."""
    heads = {max(1, source.heads * n // 4) for n in (2, 3, 4)}
    return sorted(n * source.hidden // source.heads for n in heads)


def search(wanted: Wanted, steps: Steps, output: Output) -> Search:
    """Search, and write the winner's draft or head, the target's texts, the scores and search.json.

    steps: of the search's state directory.

    Raises:
        UserError: too few cheap shapes, and what a step raises.
    """
    inputs = [wanted.target, wanted.source, *wanted.inputs]
    output.claim_state(inputs, but=["minutes"])  # a search may resume with another number of minutes
    searcher = Searcher(wanted=wanted, steps=steps, started_at=output.started_at)
    result = searcher.measure(searcher.halve(searcher.start()))
    with output.directory() as directory:
        shutil.copytree(searcher.draft(result.winner.name, len(result.rungs) - 1), directory / "draft")
        for part in ("texts", "score"):
            shutil.copytree(output.state / part, directory / part)
        write_search(result, directory)
        output.record(directory, inputs, total_seconds=result.spent_seconds)
    remove_state(output.state)
    return result


@dataclass(frozen=True, kw_only=True)
class Searcher:
    """A search that runs."""

    wanted: Wanted
    steps: Steps
    started_at: float

    @property
    def state(self) -> Path:
        return self.steps.folder

    def start(self) -> Search:
        """Return the search that an earlier run left, or rung 0 with every candidate."""
        wanted = self.wanted
        if (self.state / FILE).exists():
            return read_search(self.state)
        pass_ms, share = (self._wide_ms, MAX_WIDE_SHARE) if wanted.offsets > 1 else (self.law.ms, MAX_PASS_SHARE)
        target_ms = self._pass_ms(self.target_cost)
        cheap = candidates(wanted.source_shape, wanted.tried, pass_ms, target_ms, share)
        shapes = {name: shape for name, shape in cheap.items() if shape not in wanted.named.values()} | wanted.named
        heads = {head.name: params for head, params in zip(wanted.heads, wanted.head_params, strict=True)}
        return Search(
            target=str(wanted.target),
            source=str(wanted.source),
            shapes=shapes,
            heads=heads,
            named=[*wanted.named, *heads],
            rungs=[Rung(steps=0, names=[*shapes, *heads])],
        )

    def halve(self, search: Search) -> Search:
        """Distil all candidates for a few steps, since a cut alone says little; then one in three on each rung."""
        before = search.spent_seconds
        while True:
            search = self._try_all(search, before)
            last, rungs = search.rungs[-1], len(search.rungs)
            competing = len(last.names) - len(search.named)
            if rungs > 2 and competing <= FINALISTS:
                return search
            search = search.with_promises(self._promises(search))
            advancing, steps = search.best(competing), self.wanted.first_steps
            if rungs > 1:
                advancing = search.best(max(FINALISTS, -(-competing // REDUCTION)))
                steps = REDUCTION * last.steps
                if len(advancing) - len(search.named) <= FINALISTS:
                    steps = self._last_steps(search, advancing)
                    if steps <= last.steps:  # the drafts are there already
                        return search.with_only([trial.name for trial in advancing])
            search = search.next_rung(steps, advancing)
            note(f"rung {rungs}: {len(advancing)} drafts, {steps} steps each")
            write_search(search, self.state)

    def _last_steps(self, search: Search, advancing: Sequence[Trial]) -> int:
        """Return the steps of the last rung, for which the time suffices."""
        left = (1 - MEASURED_SHARE) * 60 * self.wanted.minutes - search.spent_seconds
        shapes = [trial for trial in advancing if trial.name not in search.heads]
        return affordable_steps(left, shapes, search.rungs[-1].steps, fewest=self.wanted.first_steps, most=MOST_STEPS)

    def _try_all(self, search: Search, before: float) -> Search:
        """Return the search with a trial of every candidate of the last rung, or of those that the time allows.

        before: seconds that earlier processes spent.
        """
        until = TRIED_SHARES[min(len(search.rungs) - 1, 1)] * 60 * self.wanted.minutes
        while left := search.rungs[-1].left:
            fewer = search.without_late(FINALISTS)
            if search.spent_seconds > until and fewer != search:
                note(f"rung {len(search.rungs) - 1}: no time for {len(left) - len(fewer.rungs[-1].left)} more drafts")
                search = fewer
                continue
            search = search.with_trial(self._trial(search, left[0]), before + time.time() - self.started_at)
            write_search(search, self.state)
        return search

    def measure(self, search: Search) -> Search:
        """Score the leaders together, and rank them by their measured speed."""
        last, start = search.rungs[-1], time.time()
        scores = self.steps.run(
            "score",
            "score",
            draft=[str(self.draft(name, len(search.rungs) - 1)) for name in last.names if name in search.shapes],
            drafter=[head.text for head in self.wanted.heads],
            target=str(self.wanted.target),
            **self.wanted.prompts,
            k=sorted({trial.k for trial in last.trials if trial.name in last.names}),
            num_prompts=MEASURED_PROMPTS,
            max_tokens=MAX_TOKENS,
            repeats=1,
            seed=1,  # other prompts than those replayed
        )
        ranked = rank([read_score(scores / name) for name in last.names])
        measured = [
            Measured(
                name=row.name,
                k=row.k,
                length=row.score.tokens_per_pass(row.k),
                gain=row.speedup,
                tokens_per_second=row.score.output_tps(row.k),
                ratio_to_fastest=row.ratio_to_fastest,
                changed=row.score.output_differs,
            )
            for row in ranked
        ]
        spent = search.spent_seconds + time.time() - start
        return search.model_copy(update={"measured": measured, "spent_seconds": spent})

    def draft(self, name: str, rung: int) -> Path:
        return self._heads.get(name) or self.state / f"rung-{rung}" / name

    @cached_property
    def _heads(self) -> dict[str, Path]:
        return {head.name: Path(head.heads) for head in self.wanted.heads}

    @cached_property
    def law(self) -> ScalingLaw:
        """The latency law of drafts, up to the widest pass of a parallel draft."""
        k = 2 * self.wanted.offsets - 1
        return read_law(self.steps.run("law", "profile", models=[str(self.wanted.source)], law=True, k=k, **self._grid))

    @cached_property
    def profiles(self) -> Path:
        """The measured passes of the target and of the heads."""
        models = [str(path) for path in (self.wanted.target, *self._heads.values())]
        return self.steps.run("profile", "profile", models=models, k=max(self.wanted.ks), **self._grid)

    @property
    def _grid(self) -> dict[str, Any]:
        return {"context": [16, PROMPT_TOKENS + MAX_TOKENS + max(self.wanted.ks)], "repeats": 8}

    @cached_property
    def target_cost(self) -> CostModel:
        return self._measured_cost(self.wanted.target)

    def _measured_cost(self, model: Path) -> CostModel:
        """Return the measured latency of the target or of a head."""
        return CostModel.of(read_profile(self.profiles / f"{hub.checkpoint_name(model)}.yaml"), extrapolate=True)

    def _shape_cost(self, shape: Shape) -> CostModel:
        return CostModel.of(self.law.profile(shape, ""), extrapolate=True)

    def _pass_ms(self, cost: CostModel) -> float:
        return float(cost.forward_ms(1, 1, np.array(self.law.context)))

    def _wide_ms(self, shape: Shape) -> float:
        """Return the time of a parallel draft's pass after a step that accepted half of its tokens."""
        width, contexts = 3 * self.wanted.offsets // 2, np.array(self.law.context)
        return float(self._shape_cost(shape).forward_ms(width, 1, contexts))

    def _trial(self, search: Search, name: str) -> Trial:
        """Make one candidate, replay it, and price it; rung 0 only has heads to do."""
        rung, steps, wanted = len(search.rungs) - 1, search.rungs[-1].steps, self.wanted
        texts, start = self._texts, time.time()
        replayed: dict[str, Any] = {"k": [wanted.offsets]}
        if name in self._heads:
            draft, replayed = self._heads[name], {"k": [max(wanted.ks)], "target": str(wanted.target)}
        elif steps == 0:
            draft = self._cut(name, search.shapes[name])
        else:
            draft = self._distilled(name, rung, steps)
        self.steps.run(f"replay-{rung}/{name}", "replay", directory=texts, draft=[str(draft)], **replayed)
        work, cost = self._workload(rung, name), self._draft_cost(search, name)
        k, speedup, rate = best_k(cost, self.target_cost, work, wanted.ks, 1)
        inside = np.arange(work.texts.chances.shape[1]) < work.texts.lengths[:, None]
        return Trial(
            name=name,
            k=k,
            length=chain(work.texts, k).acceptance().mean_acceptance_length,
            tokens_per_second=rate,
            speedup=speedup,
            rejection=float(1 - work.texts.chances[inside].mean()),
            draft_ms=self._pass_ms(cost),
            seconds=time.time() - start,
            step_seconds=number(record_of(draft), "seconds") / steps if steps else 0.0,
        )

    def _promises(self, search: Search) -> Mapping[str, float]:
        """Return tokens per second of each candidate if the next rung leaves the share of rejections that this did."""
        rung, left, promises = len(search.rungs) - 1, search.remaining_rejections(), dict[str, float]()
        for trial in search.rungs[-1].trials:
            if trial.name in search.heads:  # no rung trains these
                promises[trial.name] = trial.tokens_per_second
                continue
            work, cost = self._workload(rung, trial.name), self._draft_cost(search, trial.name)
            learnt = work.with_chances(1 - left * (1 - work.texts.chances))
            promises[trial.name] = best_k(cost, self.target_cost, learnt, self.wanted.ks, 1)[2]
        return promises

    def _workload(self, rung: int, name: str) -> Workload:
        draft = hub.checkpoint_name(self.draft(name, rung))
        return workload_of_replay(read_replay(self.state / f"replay-{rung}" / name / draft))

    def _draft_cost(self, search: Search, name: str) -> CostModel:
        if name in self._heads:
            return self._measured_cost(self._heads[name])
        return self._shape_cost(search.shapes[name])

    @cached_property
    def _texts(self) -> Path:
        return self.steps.run(
            "texts",
            "outputs build",
            use="replay",
            target=str(self.wanted.target),
            **self.wanted.prompts,
            num_prompts=REPLAYED_TEXTS,
            max_new_tokens=MAX_TOKENS,
        )

    def _cut(self, name: str, shape: Shape) -> Path:
        file = self.state / f"{name}.yaml"
        write_shape_file(shape.with_whole_head(), file, name)
        return self.steps.run(
            f"rung-0/{name}",
            "prune",
            source=str(self.wanted.source),
            shape=file,
            vocab=shape.draft_vocab,
            **self.wanted.text,
            calibration_tokens=CALIBRATION_TOKENS,
            seq_len=SEQ_LEN,
            scores_cache=self.state / "calibration.safetensors",
        )

    def _distilled(self, name: str, rung: int, steps: int) -> Path:
        stored = self.wanted.outputs or self.steps.run(
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
            draft=str(self.draft(name, 0)),
            outputs=stored,
            steps=steps,
            batch_size=BATCH_SIZE,
            lr=LR,
            eval_steps=steps,
            save_steps=steps,
            student=self.wanted.student,
        )
