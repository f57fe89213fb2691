"""Run the steps of auto's plan, from a target to a served draft. Time that early steps save goes to later steps.

All decisions depend only on the plan and on the records of finished steps. A killed run therefore decides in the same
way when it resumes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from draftlab.console import note
from draftlab.drafters.fallback import FALLBACK_LOOKUP_MAX, FallbackSpec
from draftlab.errors import UserError
from draftlab.heads.eagle3.drafter import EagleSpec
from draftlab.heads.eagle3.student import EagleStudent
from draftlab.model import checkpoint, devices, hub
from draftlab.model.modes import resolve_mode
from draftlab.output import Output
from draftlab.results.report import html
from draftlab.results.score import Score, read_score, score_files
from draftlab.runs.atomic import write_atomic
from draftlab.scoring.replay import read_replay, rows_of
from draftlab.searching import verdict
from draftlab.searching.plan import (
    ANSWER_TOKENS,
    BATCH_SIZE,
    CUT,
    HEADS,
    KS,
    LEAST_PROMPTS,
    LEAST_SEQUENCES,
    LEAST_STEPS,
    LOOKUP,
    MAX_TOKENS,
    MOST_PROMPTS,
    OFFSET_COST,
    OFFSETS,
    SEQ_LEN,
    WRITTEN,
    MachineCosts,
    Plan,
    Request,
    lookup_by_device,
    lookup_of,
    not_tried,
)
from draftlab.searching.schedule import NoCheapShape, StepRunner, number, read_search, record_of
from draftlab.searching.verdict import Arm, Round, Scores, TrainingRounds, Verdict
from draftlab.training.students.base import StudentSpec
from draftlab.training.students.draft import OrdinarySpec
from draftlab.training.students.parallel import ParallelStudent

PLAN = "plan.json"
VERDICT = "auto.json"
PAGE = "index.html"
RECIPE = "recipe.yaml"
# training stops after a round that gains less than this, relative to the tokens per pass before the round
MIN_GAIN = 0.01
MOST_SEQUENCES = 20_000
MOST_STEPS = 4000
# how many tokens a draft model or a head drafts if prompt lookup has no match; from studies/first-drafts
LOOKUP_DRAFT_TOKENS = 2
LOOKUP_HEAD_TOKENS = 3
# learning rate for a draft that is trained further; from studies/first-drafts
CONTINUED_LR = 2.0e-3
MOST_FASTER = 4.0  # largest factor by which generation is taken to be faster or slower than planned


@dataclass(frozen=True, kw_only=True)
class AutoRun:
    """The execution of auto's plan.

    Attributes:
        left_out: Candidates that are not tried, each with the reason.
        notes: Sentences to add to the verdict.
        ready_scores: Scores of the candidates that were measured before any draft was trained, by number of streams,
            then by name.
    """

    request: Request
    plan: Plan
    steps: StepRunner
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    ready_scores: dict[int, Mapping[str, Score]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.steps.folder

    def verdict(self) -> Verdict:
        """Make all candidates, choose the fastest on some prompts, measure it on other prompts, and return the verdict.

        Raises:
            UserError: A step fails.
        """
        self.left_out.update(self.plan.left_out)
        self.request.prompts.write(self.folder / "prompts", self.request.target)
        candidates, training = self._candidates()
        scores = self._compared(candidates)
        ranking = verdict.ranking(candidates, scores)
        best = ranking[0]
        chosen = next(arm for arm in candidates if arm.name == best.name)
        final = self._scores("final", [chosen], best.k)
        measured = {n: by_name[best.name] for n, by_name in final.items()}
        speedups = {n: score.speedup(best.k) for n, score in measured.items()}
        use, reason = verdict.judged(speedups)
        if best.changed:
            use = False
            reason = f"all candidates changed the target's output in {self.plan.machine.dtype}, so no draft is served"
        notes = [
            *self.notes,
            verdict.measured_here(self.request),
            *verdict.unverified(self.request),
        ]
        choice: dict[str, Any]
        if use:
            serve, more = verdict.serve(
                self.request, self.steps, chosen, k=best.k, int8=self._int8, scores=self._folder
            )
            self._write_recipe()
            notes += more
            choice = {
                "choice": best.label,
                "kind": best.kind,
                "k": best.k,
                "drafter": str(chosen.drafter or ""),
                "draft": str(chosen.draft or ""),
                "serve": serve,
            }
        else:
            choice = {"would_change": verdict.would_change(ranking, scores, self.plan.left_out)}
        return Verdict(
            target=hub.checkpoint_name(self.request.target),
            use=use,
            reason=reason,
            speedups=speedups,
            doubt="; ".join(dict.fromkeys(score.doubt for score in measured.values() if score.doubt)),
            ranking=ranking,
            precision=next(iter(measured.values())).conditions.precision,
            seconds=next(iter(measured.values())).seconds,
            plain_tokens_per_second=next(iter(scores[min(scores)].values())).output_tps(0),
            training=training,
            left_out=self.left_out,
            planned_minutes=self.plan.minutes,
            minutes=self.steps.seconds() / 60,
            page=str(self.folder / PAGE),
            notes=notes,
            **choice,
        )

    def _compared(self, candidates: list[Arm]) -> Scores:
        """Return the scores of all candidates. If none was made, those that chose whether to make any."""
        ready = {name for by_name in self.ready_scores.values() for name in by_name}
        if {arm.name for arm in candidates} == ready:
            return self.ready_scores
        return self._scores("score", candidates)

    @property
    def _folder(self) -> Path:
        """Return the directory of the scores by which the fastest candidate was chosen."""
        score = self.folder / "score"
        return score if score.exists() else self.folder / "ready"

    def write_report(self, found: Verdict, command: str) -> None:
        """Write the report of all candidates, which opens with the verdict. command: Command line of the run."""
        scores = list(map(read_score, score_files([self._folder])))
        decision = verdict.decision(found, self.plan, self.steps.seconds)
        page = html(scores, command, serve=found.serve, decision=decision)
        write_atomic(self.folder / PAGE, page)

    def _run(self, name: str, command: str, **settings: Any) -> Path:
        out = self.steps.run(name, command, **settings)
        self._write_recipe()
        return out

    def _write_recipe(self) -> None:
        steps = [step.entry for step in self.steps.done.values()]
        content = yaml.safe_dump({"steps": steps}, sort_keys=False)
        write_atomic(self.folder / RECIPE, f"# What draftlab auto ran, for draftlab run.\n{content}")

    def _seconds_for(self, step: str) -> float:
        return self.plan.seconds_for(step, self.steps.seconds())

    def _candidates(self) -> tuple[list[Arm], TrainingRounds | None]:
        """Make the candidates of the plan. Return them, and the training rounds of the draft model.

        A candidate that cannot be made is added to left_out, with the reason.
        """
        kinds = self.plan.candidates
        training = None
        candidates: list[Arm] = []
        for ready in self.request.ready:
            if ready.name in self.plan.ready:
                drafter = EagleSpec.of(heads=str(ready.path)) if ready.kind == "eagle" else None
                arm = Arm(kind=ready.kind, draft=ready.path, drafter=drafter, shape=ready.name)
                candidates.append(arm)
        if "prompt-lookup" in kinds:
            device = devices.resolve_device(self.plan.machine.device).type
            drafter = lookup_of(self.request.server, device)
            candidates.append(Arm(kind="prompt-lookup", drafter=drafter))
        if "ready" in (step.name for step in self.plan.steps):
            kinds = self._worth_training(kinds, candidates)
        elif candidates and self.plan.ready:
            self._say_what_training_could_gain(candidates)
        if "draft" in kinds:
            try:
                drafts, training = self._drafts()
                candidates += drafts
            except NoCheapShape as error:
                self.left_out.update({kind: str(error) for kind in CUT if kind in kinds})
        if "eagle" in kinds:
            steps = int(self._seconds_for("eagle") / self._costs.train_head(1))
            head = self._tried("eagle", steps, student=EagleStudent.of(), target=self.request.name)
            if head is not None:
                drafter = EagleSpec.of(heads=str(head))
                candidates.append(Arm(kind="eagle", draft=head, drafter=drafter))
                if "fallback-eagle" in kinds:
                    drafter = EagleSpec.of(
                        heads=str(head),
                        prompt_lookup_max=FALLBACK_LOOKUP_MAX,
                        draft_tokens=LOOKUP_HEAD_TOKENS,
                    )
                    candidates.append(Arm(kind="fallback-eagle", draft=head, drafter=drafter))
        return candidates, training

    def _worth_training(self, kinds: list[str], existing: list[Arm]) -> list[str]:
        """Return the kinds of candidates that are worth making in addition to the user's drafts.

        First measure the candidates that exist already. If no trained draft can become faster than the best of them,
        leave out all kinds that need training.

        Args:
            kinds: Kinds of candidates in the plan.
            existing: Candidates that need no training.
        """
        trained = [kind for kind in kinds if kind in (*CUT, *HEADS)]
        cheapest = self._costs.cheapest(trained)
        relative = {ready.name: min(1.0, cheapest / ready.pass_seconds(self._costs)) for ready in self.request.ready}
        relative = {arm.name: relative[arm.shape] for arm in existing if arm.shape}
        self.ready_scores.update(self._scores("ready", existing))
        ceiling = verdict.training_ceiling(existing, self.ready_scores, relative)
        other = ("ready", "score", "final", "export")
        minutes = sum(step.minutes for step in self.plan.steps if step.name not in other)
        if ceiling.may_gain:
            self.notes.append(f"new drafts were trained as well: {ceiling.text(minutes)}")
            return kinds
        self.left_out.update(dict.fromkeys(trained, ceiling.text(minutes)))
        return [kind for kind in kinds if kind not in trained]

    def _say_what_training_could_gain(self, existing: list[Arm]) -> None:
        """Replace the reason why no draft was trained in time, if no draft could become faster than those that exist.

        The time of passes was measured. existing: Candidates that need no training.
        """
        late = [kind for kind in (*CUT, *HEADS) if "--minutes" in self.plan.left_out.get(kind, "")]
        if not late or len(self.request.streams) > 1:
            return
        self.ready_scores.update(self._scores("score", existing))
        (scores,) = self.ready_scores.values()
        relative = self._costs.cheapest(late) / self._costs.pass_seconds(self.request.size)
        reason = verdict.beyond_reach(verdict.ranking(existing, self.ready_scores)[0], scores, relative)
        if reason is not None:
            self.left_out.update(dict.fromkeys(late, reason))

    @cached_property
    def _costs(self) -> MachineCosts:
        return MachineCosts(machine=self.plan.machine, size=self.request.size)

    @cached_property
    def _int8(self) -> bool:
        """Return whether target and drafts run with weights rounded to 8 bits: without a server, in mode native."""
        machine = self.plan.machine
        device = devices.resolve_device(machine.device)
        dtype = devices.DTYPES[machine.dtype]
        native = resolve_mode("auto", device, dtype, [self.request.target]) == "native"
        return self.request.server is None and native

    def _prompts(self, part: str) -> Path:
        return self.folder / "prompts" / f"{part}.jsonl"

    @cached_property
    def _texts(self) -> Path:
        """Store the target's answers, on which drafts are replayed. Return their directory.

        The prompts are those by which a draft is chosen.
        """
        return self._run(
            "texts",
            "outputs build",
            use="replay",
            target=self.request.name,
            prompt_file=self._prompts("choose"),
            max_new_tokens=WRITTEN,
            temperature=self.request.temperature,
            dtype=self.plan.machine.dtype,
        )

    @cached_property
    def _answers(self) -> Path:
        """Store as many target outputs to train on as the time allows. Return their directory.

        If there are prompts for training, the target answers them. The number of answers is estimated from the speed at
        which the target wrote the answers for replays. Without such prompts, the target only reads data, which is about
        ten times faster than writing.
        """
        costs = self._costs
        prompts = self.request.prompts
        slower = 1.0
        if "draft" in self.plan.candidates:
            slower = record_of(self._texts).seconds / costs.write(prompts.choose, WRITTEN, 16)
            slower = min(max(slower, 1 / MOST_FASTER), MOST_FASTER)
        seconds = (self._seconds_for("answers") - costs.start) / slower
        settings: dict[str, Any] = {"target": self.request.name}
        if prompts.train is None:
            count = min(MOST_SEQUENCES, max(LEAST_SEQUENCES, int(seconds / costs.read(SEQ_LEN))))
            settings |= {"data": prompts.data, "num_sequences": count, "seq_len": SEQ_LEN}
        else:
            count = max(LEAST_SEQUENCES, int(seconds / (costs.write(64, ANSWER_TOKENS, 64) / 64)))
            settings |= {
                "prompt_file": self._prompts("train"),
                "num_prompts": min(MOST_SEQUENCES, prompts.train, count),
                "max_new_tokens": ANSWER_TOKENS,
                "temperature": max(0.5, self.request.temperature),
            }
        return self._run("answers", "outputs build", **settings)

    def _drafts(self) -> tuple[list[Arm], TrainingRounds]:
        """Search for a draft, train it in rounds, and make its variants: fallback, parallel and trimmed.

        Return the draft with its variants as candidates, and the training rounds.
        """
        kinds = self.plan.candidates
        searched = self._run(
            "search",
            "search",
            target=self.request.name,
            source=self.request.name,
            outputs=self._answers,
            prompt_file=self._prompts("choose"),
            minutes=round(self._seconds_for("search") / 60, 2),
            layers=self.plan.layers,
            widths=self.plan.widths,
            first_steps=self.plan.first_steps,
            k="1-5",
        )
        winner = read_search(searched).winner
        draft, training = self._rounds(searched / "draft", winner.name, max(2, winner.k))
        drafts = [Arm(kind="draft", draft=draft, shape=winner.name)]
        if "fallback" in kinds:
            drafter = FallbackSpec.of(draft=str(draft), draft_tokens=LOOKUP_DRAFT_TOKENS)
            drafts.append(Arm(kind="fallback", draft=draft, drafter=drafter, shape=winner.name))
        pace = _pace(draft) / _tokens_per_step(draft)
        for kind, student, cost, vocab in (
            ("parallel", ParallelStudent.of(tokens=OFFSETS), OFFSET_COST, None),
            ("trimmed", OrdinarySpec.of(), 1.0, checkpoint.vocab_size(draft) // 4),
        ):
            if kind in kinds:
                steps = int(self._seconds_for(kind) * pace / cost)
                trained = self._tried(kind, steps, student=student, draft=str(draft), vocab=vocab)
                if trained is not None:
                    drafts.append(Arm(kind=kind, draft=trained, shape=winner.name))
        return drafts, training

    def _rounds(self, draft: Path, name: str, k: int) -> tuple[Path, TrainingRounds]:
        """Train a draft in rounds, and return the best draft and the rounds.

        A round has as many tokens as all training before it, or fewer if little time is left. Training stops when a
        round improves the draft too little, or when too little time is left for another round.

        Args:
            name: Name of the draft's shape.
            k: Number of drafted tokens per step (K) in the replays that compare rounds.
        """
        until = self.steps.seconds() + self._seconds_for("train")
        per_step = _tokens_per_step(draft)
        drafts = [draft]
        rounds = [self._replayed(draft, 0, k, 0.0)]
        stopped = "no time was left for another round"
        while True:
            left = until - self.steps.seconds()
            steps = int(min(rounds[-1].tokens, left * _pace(drafts[-1])) / per_step)
            if steps < LEAST_STEPS:
                break
            count = len(rounds)
            draft = self._trained(f"train/{name}-{count}", steps, draft=str(drafts[-1]), seed=count)
            drafts.append(draft)
            rounds.append(self._replayed(draft, count, k, rounds[-1].tokens))
            if rounds[-1].length < (1 + MIN_GAIN) * rounds[-2].length:
                stopped = f"the last round gained less than {MIN_GAIN:.0%}"
                break
        best = max(range(len(rounds)), key=lambda i: rounds[i].length)
        return drafts[best], TrainingRounds(k=k, rounds=rounds, stopped=stopped)

    def _replayed(self, draft: Path, count: int, k: int, tokens: float) -> Round:
        """Replay a draft on the target's answers, and return the round that trained it.

        count: Number of the round. tokens: Number of training tokens in earlier rounds.
        """
        replayed = self._run(f"train/replay-{count}", "replay", directory=self._texts, draft=[str(draft)], k=[k])
        row = rows_of(read_replay(replayed / draft.name), [k])[0]
        return Round(tokens=tokens + number(record_of(draft), "tokens"), length=row.length.value)

    def _trained(self, name: str, steps: int, **settings: Any) -> Path:
        """Train a draft or head for at least LEAST_STEPS and at most MOST_STEPS steps, and return its directory."""
        steps = max(LEAST_STEPS, min(steps, MOST_STEPS))
        return self._run(
            name,
            "distill",
            outputs=self._answers,
            steps=steps,
            batch_size=BATCH_SIZE,
            lr=CONTINUED_LR,
            eval_steps=steps,
            save_steps=max(25, steps // 4),
            **settings,
        )

    def _tried(self, kind: str, steps: int, *, student: StudentSpec, **settings: Any) -> Path | None:
        """Train a candidate, and return its directory. If training fails, add the error to left_out and return None."""
        try:
            return self._trained(kind, steps, student=student, **settings)
        except UserError as error:
            self.left_out[kind] = str(error)
            return None

    def _scores(self, step: str, candidates: list[Arm], k: int | None = None) -> Scores:
        """Measure candidates at every number of streams (concurrent requests), and return the scores.

        k: Best K of the chosen candidate, for the final measurement on other prompts. None measures every K, on the
        prompts by which a candidate is chosen.
        """
        streams = self.request.streams
        chosen = k is not None
        together = math.lcm(*streams)
        answer = self._costs.write(1, MAX_TOKENS, 1)
        if searched := score_files([self.folder / "search" / "score"]):
            answer = MAX_TOKENS / read_score(searched[0]).output_tps(0)
        seconds = (self._seconds_for(step) - self._costs.start) / len(streams)
        afforded = self._costs.prompts_in(seconds, len(candidates), answer)
        parts = self.request.prompts
        most = min(MOST_PROMPTS, parts.measure if chosen else parts.choose)
        wanted = max(LEAST_PROMPTS, min(afforded, most))
        prompts = max(together, wanted // together * together)
        out = self._run(
            step,
            "score",
            target=self.request.name,
            draft=[str(arm.draft) for arm in candidates if arm.drafter is None],
            drafter=[arm.drafter for arm in candidates if arm.drafter is not None],
            k=[k] if chosen else list(KS),
            prompt_file=self._prompts("measure" if chosen else "choose"),
            num_prompts=prompts,
            max_new_tokens=MAX_TOKENS,
            batch=streams,
            temperature=self.request.temperature,
            int8="both" if self._int8 else None,
        )
        scores: dict[int, dict[str, Score]] = {n: {} for n in streams}
        for score in map(read_score, score_files([out])):
            batch = score.conditions.batch
            scores[batch][score.name.removesuffix(f"-b{batch}").removesuffix("@int8")] = score
        return scores


def _tokens_per_step(draft: Path) -> float:
    record = record_of(draft)
    return number(record, "tokens") / int(str(record.config["steps"]))


def _pace(draft: Path) -> float:
    """Return the training speed of a draft in tokens per second."""
    record = record_of(draft)
    return number(record, "tokens") / max(record.worked_seconds, 1e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """A run of auto.

    Attributes:
        name: Default name of the output directory.
        make: Function that makes the steps, as in StepRunner.
    """

    name: str
    request: Request
    plan: Plan
    make: Callable[[str, dict[str, Any]], Any]

    def facts(self) -> Mapping[str, object]:
        """Return the facts that a dry run shows."""
        plan = self.plan
        facts = plan.facts() | {"minutes": round(plan.minutes)}
        device = devices.resolve_device(plan.machine.device).type
        lookup = lookup_by_device(self.request.server, device) if LOOKUP in plan.candidates else []
        if notes := [*not_tried(plan.left_out), *lookup, *verdict.unverified(self.request)]:
            facts["notes"] = "; ".join(notes)
        return facts

    def run(self, output: Output) -> Verdict:
        """Run every step of the plan, write the report and the verdict, and return the verdict.

        Raises:
            UserError: A step fails.
        """
        folder = output.out
        output.inputs([hub.locate(self.request.name)])
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / PLAN).exists():
            write_atomic(folder / PLAN, self.plan.model_dump_json(indent=1))
        for topic, value in self.facts().items():
            note(f"{topic}: {value}")

        def label(name: str, command: str) -> str:
            finish = datetime.now() + timedelta(minutes=max(0.0, self.plan.minutes - steps.seconds() / 60))
            return f"{name}: {command}, the whole run ends at about {finish:%H:%M}"

        steps = StepRunner(folder=folder, make=self.make, label=label)
        run = AutoRun(request=self.request, plan=self.plan, steps=steps)
        found = run.verdict()
        run.write_report(found, output.command_line)
        write_atomic(folder / VERDICT, found.model_dump_json(indent=1))
        output.record(folder, minutes=found.minutes)
        return found
