"""From a target to a served draft: the steps of a plan, in order, each sized by what the steps before it measured.

Everything that is decided is a function of the plan and of what steps recorded, so that a killed run decides the same.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from draftlab.atomic import write_atomic
from draftlab.drafters.eagle import EagleSpec
from draftlab.drafters.fallback import FALLBACK_LOOKUP_MAX, FallbackSpec
from draftlab.drafters.ngram import NgramSpec
from draftlab.drafters.prompt_lookup import PromptLookupSpec
from draftlab.errors import UserError
from draftlab.model import checkpoint, hub
from draftlab.model.decoder import resolve_mode
from draftlab.results.report import html
from draftlab.results.score import Score, read_score, score_files
from draftlab.searching import serving
from draftlab.searching import verdict as verdicts
from draftlab.searching.costs import BATCH_SIZE, MAX_TOKENS, OFFSET_COST, SEQ_LEN, WRITTEN, Costs
from draftlab.searching.plan import (
    ANSWER_TOKENS,
    KS,
    LEAST_PROMPTS,
    LEAST_SEQUENCES,
    LEAST_STEPS,
    OF_SHAPES,
    OFFSETS,
    Kind,
    Plan,
    Request,
    arms,
)
from draftlab.searching.schedule import NoCheapShape, read_search
from draftlab.searching.steps import Steps, number, record_of
from draftlab.searching.verdict import NO_DRAFT, Candidate, Choice, Round, Training, Verdict
from draftlab.target_outputs.replay import read_replay, rows_of
from draftlab.training.students.parallel import ParallelSpec

PLAN, VERDICT, PAGE, RECIPE = "plan.json", "auto.json", "index.html", "recipe.yaml"
REPORT = "report/report.html"
MIN_GAIN = 0.01  # of tokens per pass, in a round that doubles the training: less does not pay
MOST_SEQUENCES, MOST_STEPS = 20_000, 4000
BEHIND_LOOKUP = {"fallback": 2, "fallback-eagle": 3}  # tokens after no match; recipes/smollm2.yaml
CONTINUED_LR = 2.0e-3  # of a draft that has learnt already, as in recipes/smollm2.yaml
MOST_FASTER = 4.0  # or slower than planned; the record of a build that was killed counts the last run's time only
Scores = Mapping[int, Mapping[str, Score]]  # by streams and name


@dataclass(frozen=True, kw_only=True)
class AutoRun:
    """A plan that runs. step_of: the step of the plan that each output belongs to, by its name."""

    request: Request
    plan: Plan
    steps: Steps
    step_of: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.steps.folder

    def verdict(self) -> Verdict:
        """Make all candidates, choose by one half of the prompts, and measure the choice on the other.

        Raises:
            UserError: what a step raises.
        """
        self.request.prompts.write(self.folder / "prompts", self.request.target)
        left_out = dict(self.plan.left_out)
        candidates, training = self._candidates(left_out)
        by_name = {candidate.name: candidate for candidate in candidates}
        scores, scored = self._scores("score", candidates), [self.folder / "score"]
        ranking = verdicts.ranking(candidates, scores)
        best, measured = ranking[0], scores
        for count, finalist in enumerate(verdicts.finalists(ranking), 1):
            name = "final" if count == 1 else f"final-{count}"
            of_finalist = self._scores(name, [by_name[finalist.name]], finalist.k)
            gains, _ = verdicts.judged(verdicts.speedups(of_finalist, finalist))
            if gains or count == 1:
                best, measured, scored = finalist, of_finalist, [scored[0], self.folder / name]
            if gains:
                break
        speedups = verdicts.speedups(measured, best)
        of_best = [by_draft[best.name] for by_draft in measured.values()]
        use, reason = verdicts.judged(speedups)
        if best.changed:
            use, reason = False, f"every candidate changes the target's output in {self.plan.machine.dtype}"
        self._report(scored[0])
        notes = serving.unverified(self.request)
        choice: dict[str, Any] = {"choice": NO_DRAFT, "would_change": self._changes(ranking, scores, training)}
        if use:
            chosen = by_name[best.name]
            self.step_of["export"] = "export"
            serve, said = serving.serve(
                self.request,
                self.steps,
                chosen,
                {n: _best_k(by_draft[best.name]) for n, by_draft in scores.items()},
                k=best.k,
                scores=scored,
                int8=self._int8,
            )
            self._write_recipe()
            drafter = "" if chosen.drafter is None else chosen.drafter.text
            choice = {"choice": best.label, "kind": best.kind, "k": best.k, "drafter": drafter, "serve": serve}
            choice["draft"] = str(chosen.draft or "")
            notes += said
        return Verdict(
            target=hub.checkpoint_name(self.request.target),
            use=use,
            reason=reason,
            speedups=speedups,
            doubt="; ".join(dict.fromkeys(score.doubt for score in of_best if score.doubt is not None)),
            measured_on=verdicts.COMPARED if measured is scores else verdicts.UNSEEN,
            ranking=ranking,
            precision=of_best[0].conditions.precision,
            plain_tokens_per_second=next(iter(scores[min(scores)].values())).output_tps(0),
            training=training,
            left_out=left_out,
            planned_minutes=self.plan.minutes,
            minutes=self.steps.seconds() / 60,
            page=str(self.folder / PAGE),
            notes=notes,
            **choice,
        )

    def seconds_by_step(self) -> dict[str, float]:
        """Return what each step of the plan took; a candidate that turned out not to be possible took no time."""
        seconds = dict.fromkeys(self.step_of.values(), 0.0)
        for name in self.steps.done:
            seconds[self.step_of[name]] += self.steps.seconds([name])
        return seconds

    def _report(self, scores: Path) -> None:
        """Write the page of the candidates' scores."""
        file = self.folder / REPORT
        file.parent.mkdir(exist_ok=True)
        measured = [read_score(path) for path in score_files([scores])]
        write_atomic(file, html(measured, f"draftlab report {scores} --html {file}"))

    def _run(self, step: str, name: str, command: str, **settings: Any) -> Path:
        """Run a command once for a step of the plan. name: of its output."""
        self.step_of[name] = step
        out = self.steps.run(name, command, **settings)
        self._write_recipe()
        return out

    def _write_recipe(self) -> None:
        content = yaml.safe_dump({"steps": [step.entry for step in self.steps.done.values()]}, sort_keys=False)
        write_atomic(self.folder / RECIPE, f"# What draftlab auto ran, for draftlab run.\n{content}")

    def _seconds_for(self, step: str) -> float:
        return self.plan.seconds_for(step, self.steps.seconds())

    def _candidates(self, left_out: dict[Kind, str]) -> tuple[list[Candidate], Training | None]:
        """Return the candidates, made; those that turn out not to be possible join left_out."""
        kinds, answers, training = self.plan.candidates, None, None
        candidates = (
            [Candidate(kind="prompt-lookup", drafter=PromptLookupSpec.of())] if "prompt-lookup" in kinds else []
        )
        if any(step.name == "answers" for step in self.plan.steps):
            answers = self._answers()
        if "ngram" in kinds:
            candidates.append(Candidate(kind="ngram", drafter=NgramSpec.of(outputs=str(answers))))
        if "draft" in kinds and answers is not None:
            try:
                drafts, training = self._drafts(answers, left_out)
                candidates += drafts
            except NoCheapShape as error:
                left_out |= {kind: str(error) for kind in OF_SHAPES if kind in kinds}
        if "eagle" in kinds:
            steps = int(self._seconds_for("eagle") / self._costs.train_head(1))
            head = self._tried(left_out, "eagle", steps, student="eagle", target=self.request.name, outputs=answers)
            candidates += [] if head is None else self._with_head(head)
        return candidates, training

    def _with_head(self, head: Path) -> list[Candidate]:
        """Return the candidates that draft with an EAGLE-3 head."""
        candidates = [Candidate(kind="eagle", draft=head, drafter=EagleSpec.of(heads=str(head)))]
        if "fallback-eagle" in self.plan.candidates:
            lookup = {"prompt_lookup_max": FALLBACK_LOOKUP_MAX, "draft_tokens": BEHIND_LOOKUP["fallback-eagle"]}
            drafter = EagleSpec.of(heads=str(head), **lookup)
            candidates.append(Candidate(kind="fallback-eagle", draft=head, drafter=drafter))
        return candidates

    @cached_property
    def _costs(self) -> Costs:
        dtype = checkpoint.DTYPES[self.plan.machine.dtype]
        return Costs(machine=self.plan.machine, size=self.request.size, bytes_per_weight=dtype.itemsize)

    @cached_property
    def _answer_seconds(self) -> float:
        """Return the seconds of a scored answer without a draft: as the search measured it, else by the plan."""
        measured = [read_score(file) for file in score_files([self.folder / "search" / "score"])]
        return MAX_TOKENS / measured[0].output_tps(0) if measured else self._costs.write(1, MAX_TOKENS, 1)

    @cached_property
    def _int8(self) -> bool:
        """Return whether target and drafts are rounded to 8 bits: in mode native, where their passes get faster."""
        machine = self.plan.machine
        device, dtype = checkpoint.resolve_device(machine.device), checkpoint.DTYPES[machine.dtype]
        native = resolve_mode("auto", device, dtype, [self.request.target]) == "native"
        return self.request.server is None and native

    @cached_property
    def _texts(self) -> Path:
        return self._run(
            "texts",
            "texts",
            "outputs build",
            use="replay",
            target=self.request.name,
            prompt_file=self._prompts("choose"),
            max_new_tokens=WRITTEN,
            temperature=self.request.temperature,
            dtype=self.plan.machine.dtype,
        )

    def _prompts(self, part: str) -> Path:
        return self.folder / "prompts" / f"{part}.jsonl"

    def _answers(self) -> Path:
        """Store as much to learn from as the time allows, at the pace at which texts to replay were written.

        Text that the target continues is read, ten times as fast as it writes: training wants much of it.
        """
        costs, prompts, slower = self._costs, self.request.prompts, 1.0
        if any(step.name == "texts" for step in self.plan.steps):
            slower = record_of(self._texts).seconds / costs.write(prompts.choose, WRITTEN, 16)  # than planned
            slower = min(max(slower, 1 / MOST_FASTER), MOST_FASTER)
        seconds = (self._seconds_for("answers") - costs.start) / slower
        if prompts.train is None:
            count = min(MOST_SEQUENCES, max(LEAST_SEQUENCES, int(seconds / costs.read(SEQ_LEN))))
            settings: dict[str, Any] = {"data": prompts.data, "num_sequences": count, "seq_len": SEQ_LEN}
        else:
            count = max(LEAST_SEQUENCES, int(seconds / (costs.write(64, ANSWER_TOKENS, 64) / 64)))
            settings = {
                "prompt_file": self._prompts("train"),
                "num_prompts": min(MOST_SEQUENCES, prompts.train, count),
                "max_new_tokens": ANSWER_TOKENS,
                "temperature": max(0.5, self.request.temperature),
            }
        return self._run("answers", "answers", "outputs build", target=self.request.name, **settings)

    def _drafts(self, answers: Path, left_out: dict[Kind, str]) -> tuple[list[Candidate], Training]:
        """Search, train the winner in rounds, and make its variants."""
        kinds = self.plan.candidates
        searched = self._run(
            "search",
            "search",
            "search",
            target=self.request.name,
            source=self.request.name,
            outputs=answers,
            prompt_file=self._prompts("choose"),
            minutes=round(self._seconds_for("search") / 60, 2),
            layers=self.plan.layers,
            widths=self.plan.widths,
            first_steps=self.plan.first_steps,
            k="1-5",
        )
        winner = read_search(searched).winner
        draft, training = self._rounds(searched / "draft", winner.name, max(2, winner.k), answers)
        drafts = [Candidate(kind="draft", draft=draft, shape=winner.name)]
        if "fallback" in kinds:
            drafter = FallbackSpec.of(draft=str(draft), draft_tokens=BEHIND_LOOKUP["fallback"])
            drafts.append(Candidate(kind="fallback", draft=draft, drafter=drafter, shape=winner.name))
        pace = _pace(draft) / _tokens_per_step(draft)
        variants: dict[Kind, tuple[float, dict[str, Any]]] = {
            "parallel": (pace / OFFSET_COST, {"student": ParallelSpec.of(tokens=OFFSETS).text}),
            "trimmed": (pace, {"vocab": checkpoint.vocab_size(draft) // 4}),
        }
        for kind, (steps_per_second, settings) in variants.items():
            if kind in kinds:
                steps = int(self._seconds_for(kind) * steps_per_second)
                trained = self._tried(left_out, kind, steps, draft=str(draft), outputs=answers, **settings)
                drafts += [] if trained is None else [Candidate(kind=kind, draft=trained, shape=winner.name)]
        return drafts, training

    def _rounds(self, draft: Path, name: str, k: int, answers: Path) -> tuple[Path, Training]:
        """Train in rounds that double the training, until a round gains too little or the time is over.

        Return the best draft. A round too short to learn anything says nothing of more training: the next is twice as
        long.
        """
        start, budget = self.steps.seconds(), self._seconds_for("train")
        per_step, shortest, count = _tokens_per_step(draft), LEAST_STEPS, 0
        drafts, rounds = [draft], [self._replayed(draft, 0, k, Round(tokens=0, length=0, seconds=0))]
        while True:
            stopped = ""
            affordable = (budget - (self.steps.seconds() - start)) * _pace(drafts[-1]) / per_step
            steps = int(min(max(shortest, rounds[-1].tokens / per_step), affordable))
            if len(rounds) > 1 and rounds[-1].length < (1 + MIN_GAIN) * rounds[-2].length:
                stopped = f"the last round gained less than {MIN_GAIN:.0%}"
            elif steps < shortest:
                stopped = "no time was left for more"
            if stopped:
                best = max(range(len(rounds)), key=lambda i: rounds[i].length)
                return drafts[best], Training(k=k, rounds=rounds, stopped=stopped)
            count += 1
            longer = self._trained(
                "train", f"{name}-{count}", steps, draft=str(drafts[-1]), outputs=answers, seed=count
            )
            if _learnt(longer):
                rounds.append(self._replayed(longer, count, k, rounds[-1]))
                drafts.append(longer)
            else:
                shortest = 2 * steps

    def _replayed(self, draft: Path, count: int, k: int, before: Round) -> Round:
        """Replay a draft over the target's answers; return its tokens per pass after all its training."""
        replayed = self._run("train", f"replay-{count}", "replay", directory=self._texts, draft=[str(draft)], k=[k])
        row, record = rows_of(read_replay(replayed / draft.name), [k])[0], record_of(draft)
        tokens, seconds = number(record, "tokens"), number(record, "seconds")
        return Round(tokens=before.tokens + tokens, length=row.length.value, seconds=before.seconds + seconds)

    def _trained(self, step: str, name: str, steps: int, **settings: Any) -> Path:
        """Train for so many steps, at least the fewest that are worth it."""
        steps = max(LEAST_STEPS, min(steps, MOST_STEPS))
        return self._run(
            step,
            name,
            "distill",
            steps=steps,
            batch_size=BATCH_SIZE,
            lr=CONTINUED_LR,
            eval_steps=steps,
            save_steps=max(25, steps // 4),
            **settings,
        )

    def _tried(self, left_out: dict[Kind, str], kind: Kind, steps: int, **settings: Any) -> Path | None:
        """Train a candidate; one that cannot be trained joins left_out, with the reason."""
        try:
            return self._trained(kind, kind, steps, **settings)
        except UserError as error:
            left_out[kind] = str(error)
            return None

    def _scores(self, name: str, candidates: list[Candidate], k: int | None = None) -> Scores:
        """Score candidates at every number of streams. k: of a finalist, on the prompts to measure with."""
        streams, step, chosen = self.request.streams, name.partition("-")[0], k is None
        together = math.lcm(*streams)
        seconds = (self._seconds_for(step) - self._costs.start) / len(streams)
        afforded = int(seconds / (self._answer_seconds * arms(self.plan.candidates)))
        prompts = max(LEAST_PROMPTS, min(afforded - 5, self.request.prompts.choose)) // together * together or together
        rounded = {"int8": "both"} if self._int8 else {}
        counted = {"num_prompts": prompts, "repeats": 1} if chosen else {"repeats": 2}
        out = self._run(
            step,
            name,
            "score",
            target=self.request.name,
            draft=[str(each.draft) for each in candidates if each.drafter is None],
            drafter=[each.drafter.text for each in candidates if each.drafter is not None],
            k=list(KS) if k is None else [k],
            prompt_file=self._prompts("choose" if chosen else "measure"),
            max_tokens=MAX_TOKENS,
            batch=streams,
            temperature=self.request.temperature,
            **rounded,
            **counted,
        )
        scores: dict[int, dict[str, Score]] = {n: {} for n in streams}
        for score in map(read_score, score_files([out])):
            batch = score.conditions.batch
            scores[batch][score.name.removesuffix(f"-b{batch}").removesuffix("@int8")] = score
        return scores

    def _changes(self, ranking: list[Choice], scores: Scores, training: Training | None) -> list[str]:
        """Return what would make a draft pay."""
        changes, fewest = [], min(scores)
        trained = next((c for c in ranking if c.kind == "draft"), None)
        if trained is not None and training is not None:
            score = scores[fewest][trained.name]
            needed, share = score.break_even_length(trained.k), score.time_shares(trained.k).get("draft", 0.0)
            if trained.tokens_per_pass < needed:
                changes.append(
                    f"{trained.label} has {trained.tokens_per_pass:.2f} tokens per target pass at K = {trained.k} and "
                    f"needs {needed:.2f} to break even after the first token; drafting takes {share:.0%} of that time"
                )
        if len(scores) > 1 and any(score.speedup(ranking[0].k).low > 1 for score in scores[fewest].values()):
            changes.append(f"fewer streams: at {fewest} there is a gain")
        if any("minutes" in reason for reason in self.plan.left_out.values()):
            changes.append("more --minutes: some candidates were not tried")
        return changes or ["prompts whose answers repeat them, or a target whose passes cost more beside a draft's"]


def _best_k(score: Score) -> int:
    """Return the fastest K, 0 where no draft is faster."""
    return score.best_k if score.speedup(score.best_k).value > 1 else 0


def _learnt(draft: Path) -> bool:
    """Return whether a training's best evaluation came after some of its steps."""
    after = record_of(draft).notes["after"]
    return isinstance(after, dict) and after["step"] > 0


def _tokens_per_step(draft: Path) -> float:
    record = record_of(draft)
    return number(record, "tokens") / int(str(record.config["steps"]))


def _pace(draft: Path) -> float:
    """Return the tokens per second of a training."""
    record = record_of(draft)
    return number(record, "tokens") / max(record.worked_seconds, 1e-3)
