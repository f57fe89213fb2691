"""From a target to a served draft: the steps of a plan, in order, each sized by what the steps before it measured.

Everything that is decided is a function of the plan and of what steps recorded, so that a killed run decides the same.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from draftlab.atomic import check_space, write_atomic
from draftlab.config.auto import AutoConfig
from draftlab.console import note
from draftlab.drafters.fallback import FALLBACK_LOOKUP_MAX
from draftlab.errors import UserError
from draftlab.model import checkpoint, hub
from draftlab.model.decoder import resolve_mode
from draftlab.model.size import read_size
from draftlab.output import Output
from draftlab.pipeline import serving
from draftlab.pipeline import verdict as verdicts
from draftlab.pipeline.costs import BATCH_SIZE, MAX_TOKENS, OFFSET_COST, SEQ_LEN, WRITTEN, Costs, measure_machine
from draftlab.pipeline.page import page
from draftlab.pipeline.plan import (
    ANSWER_TOKENS,
    KS,
    LEAST_PROMPTS,
    LEAST_SEQUENCES,
    LEAST_STEPS,
    OF_SHAPES,
    OFFSETS,
    Kind,
    Plan,
    answers_settings,
    arms,
    make_plan,
)
from draftlab.pipeline.prompts import CHOOSE, PromptFiles, write_prompts
from draftlab.pipeline.steps import Steps
from draftlab.pipeline.verdict import NO_DRAFT, Candidate, Choice, Training, Verdict
from draftlab.reading import read_model
from draftlab.results.report import html
from draftlab.results.score import Score, read_score, score_files
from draftlab.searching.schedule import NoCheapShape, read_search
from draftlab.target_outputs.replay import read_replay, rows_of
from draftlab.training.learning_curve import Forecast, Pilot, fit, forecast

PLAN, TRAINING, VERDICT, PAGE = "plan.json", "training.json", "auto.json", "index.html"
REPORT = "report/report.html"
MIN_GAIN = 0.01  # of tokens per pass, by twice the training: less does not pay
MOST_SEQUENCES, MOST_STEPS = 20_000, 4000
BEHIND_LOOKUP = {"fallback": 2, "fallback-eagle": 3}  # tokens after no match; recipes/smollm2.yaml
CONTINUED_LR = 2.0e-3  # of a draft that has learnt already, as in recipes/smollm2.yaml
MOST_FASTER = 4.0  # or slower than planned; the record of a build that was killed counts the last run's time only
NOT_SAME = ("acceptance_length", "out")  # settings that a repeated command may change


def plan(config: AutoConfig, folder: Path) -> Plan:
    """Return the plan of an unfinished run in folder, or a new one.

    Raises:
        UserError: the run there had other settings, or the disk is too small; see make_plan.
    """
    if not (folder / PLAN).exists():
        new = make_plan(config, measure_machine(config))
        check_space(folder, new.disk, "its drafts")
        return new
    before = read_model(Plan, folder, PLAN)
    now, then = ({k: v for k, v in s.items() if k not in NOT_SAME} for s in (config.settings(), before.settings))
    if changed := [config.flag(name) for name in now if now[name] != then.get(name)]:
        raise UserError(f"{folder} is a run with other {', '.join(changed)}; choose another --out, or remove it")
    return before


def expected_cost(config: AutoConfig, folder: Path) -> Forecast | None:
    """Return what --acceptance-length would cost by the rounds in folder; None where they are not there yet."""
    training = read_model(Training, folder, TRAINING) if (folder / TRAINING).exists() else None
    return _cost(config.acceptance_length, training)


def auto(config: AutoConfig, output: Output) -> Verdict:
    """Run the plan, and return the verdict.

    Raises:
        UserError: see plan, and what a step raises.
    """
    folder = output.out
    steps = plan(config, folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / PLAN).exists():
        write_atomic(folder / PLAN, steps.model_dump_json(indent=1))
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    for line in steps.lines():
        note(line)
    target = hub.locate(config.target)
    prompts = write_prompts(config, target, folder / "prompts")
    run = AutoRun(config=config, plan=steps, steps=Steps(config=config, plan=steps, folder=folder), prompts=prompts)
    result = run.verdict()
    write_atomic(folder / PAGE, page(result, run.steps, output.command_line))
    write_atomic(folder / VERDICT, result.model_dump_json(indent=1))
    output.record(folder, [target], minutes=result.minutes)
    return result


@dataclass(frozen=True, kw_only=True)
class AutoRun:
    """A plan that runs."""

    config: AutoConfig
    plan: Plan
    steps: Steps
    prompts: PromptFiles

    def verdict(self) -> Verdict:
        """Make all candidates, choose by one half of the prompts, and measure the choice on the other."""
        left_out = dict(self.plan.left_out)
        candidates, training = self._candidates(left_out)
        scores, scored = self._scores("score", candidates), [self.steps.folder / "score"]
        ranking = verdicts.ranking(candidates, scores)
        best, measured = ranking[0], scores
        for number, finalist in enumerate(verdicts.finalists(ranking)):
            name = "final" if number == 0 else f"final-{number + 1}"
            of_finalist = self._scores("final", [_named(candidates, finalist.name)], finalist.k, name)
            gains, _ = verdicts.judged(verdicts.speedups(of_finalist, finalist))
            if gains or number == 0:
                best, measured = finalist, of_finalist
                scored = [scored[0], self.steps.folder / name]
            if gains:
                break
        chosen, speedups = _named(candidates, best.name), verdicts.speedups(measured, best)
        of_best = [by_name[best.name] for by_name in measured.values()]
        use, reason = verdicts.judged(speedups)
        if best.changed:
            use, reason = False, f"every candidate changes the target's output in {self.plan.machine.dtype}"
        self._report(scored[0])
        goal, notes = self.config.acceptance_length, serving.unverified(self.config)
        cost = _cost(goal, training)
        if goal is not None and cost is None:
            notes.append(f"the cost of {goal:g} tokens per pass is not known: that takes two rounds of training")
        choice: dict[str, Any] = {"choice": NO_DRAFT, "would_change": self._changes(ranking, scores, training)}
        if use:
            serve, said = serving.serve(
                self.steps, chosen, best.k, scores=scored, prompts=self.prompts.measure, int8=self._int8,
                k_by_streams={n: _best_k(by_name[best.name]) for n, by_name in scores.items()},
            )  # fmt: skip
            choice = {
                "choice": best.label, "kind": best.kind, "k": best.k, "drafter": chosen.drafter, "serve": serve,
                "draft": str(chosen.draft or ""),
            }  # fmt: skip
            notes += said
        return Verdict(
            target=hub.checkpoint_name(hub.locate(self.config.target)), use=use, reason=reason, speedups=speedups,
            doubt="; ".join(dict.fromkeys(score.doubt for score in of_best if score.doubt is not None)),
            measured_on=verdicts.COMPARED if measured is scores else verdicts.UNSEEN, ranking=ranking,
            precision=of_best[0].conditions.precision,
            plain_tokens_per_second=next(iter(scores[min(scores)].values())).output_tps(0), training=training,
            forecast=cost, left_out=left_out, planned_minutes=self.plan.minutes, minutes=self.steps.spent / 60,
            page=str(self.steps.folder / PAGE), notes=notes, **choice,
        )  # fmt: skip

    def _report(self, scores: Path) -> None:
        """Write the page of the candidates' scores."""
        file = self.steps.folder / REPORT
        file.parent.mkdir(exist_ok=True)
        measured = [read_score(path) for path in score_files([scores])]
        write_atomic(file, html(measured, f"draftlab report {scores} --html {file}"))

    def _candidates(self, left_out: dict[Kind, str]) -> tuple[list[Candidate], Training | None]:
        """Return the candidates, made; those that turn out not to be possible join left_out."""
        kinds, answers, training = self.plan.candidates, None, None
        candidates = [Candidate(kind="prompt-lookup", drafter="prompt-lookup")] if "prompt-lookup" in kinds else []
        if any(step.name == "answers" for step in self.plan.steps):
            answers = self._answers()
        if "ngram" in kinds:
            candidates.append(Candidate(kind="ngram", drafter=f"ngram:outputs={answers}"))
        if "draft" in kinds and answers is not None:
            try:
                drafts, training = self._drafts(answers, left_out)
                candidates += drafts
            except NoCheapShape as error:
                left_out |= {kind: str(error) for kind in OF_SHAPES if kind in kinds}
        if "eagle" in kinds:
            count = int(self.steps.seconds_for("eagle") / self._costs.train_head(1))
            head = self._tried(left_out, "eagle", count, student="eagle", target=self.config.target, outputs=answers)
            candidates += self._with_head(head) if head is not None else []
        return candidates, training

    def _with_head(self, head: Path) -> list[Candidate]:
        """Return the candidates that draft with an EAGLE-3 head."""
        lookup = f"prompt_lookup_max={FALLBACK_LOOKUP_MAX},draft_tokens={BEHIND_LOOKUP['fallback-eagle']}"
        candidates = [Candidate(kind="eagle", draft=head, drafter=f"eagle:heads={head}")]
        if "fallback-eagle" in self.plan.candidates:
            candidates.append(Candidate(kind="fallback-eagle", draft=head, drafter=f"eagle:heads={head},{lookup}"))
        return candidates

    @cached_property
    def _costs(self) -> Costs:
        size = read_size(hub.locate(self.config.target))
        dtype = checkpoint.DTYPES[self.plan.machine.dtype]
        return Costs(machine=self.plan.machine, size=size, bytes_per_weight=dtype.itemsize)

    @cached_property
    def _answer_seconds(self) -> float:
        """Return the seconds of a scored answer without a draft: as the search measured it, else by the plan."""
        measured = [read_score(file) for file in score_files([self.steps.folder / "search" / "score"])]
        return MAX_TOKENS / measured[0].output_tps(0) if measured else self._costs.write(1, MAX_TOKENS, 1)

    @cached_property
    def _int8(self) -> bool:
        """Return whether target and drafts are rounded to 8 bits: in mode native, where their passes get faster."""
        device = checkpoint.resolve_device(self.config.device)
        dtype, target = checkpoint.DTYPES[self.plan.machine.dtype], hub.locate(self.config.target)
        return self.config.server is None and resolve_mode("auto", device, dtype, [target]) == "native"

    @cached_property
    def _texts(self) -> Path:
        return self.steps.make(
            "texts", "texts", "outputs build", use="replay", target=self.config.target, prompt_file=self.prompts.choose,
            max_new_tokens=WRITTEN, temperature=self.config.temperature, dtype=self.config.dtype,
        )  # fmt: skip

    def _answers(self) -> Path:
        """Store as much to learn from as the time allows, at the pace at which texts to replay were written."""
        costs, slower = self._costs, 1.0  # than planned
        if any(step.name == "texts" for step in self.plan.steps):
            slower = self.steps.record(self._texts).seconds / costs.write(CHOOSE, WRITTEN, 16)
            slower = min(max(slower, 1 / MOST_FASTER), MOST_FASTER)
        seconds = self.steps.seconds_for("answers") - costs.start
        most, sequence_seconds = MOST_SEQUENCES, costs.read(SEQ_LEN)
        if self.prompts.train_count is not None:
            most, sequence_seconds = min(most, self.prompts.train_count), costs.write(64, ANSWER_TOKENS, 64) / 64
        count = min(most, max(LEAST_SEQUENCES, int(seconds / (slower * sequence_seconds))))
        settings = answers_settings(self.config, self.prompts, count)
        return self.steps.make("answers", "answers", "outputs build", **settings)

    def _drafts(self, answers: Path, left_out: dict[Kind, str]) -> tuple[list[Candidate], Training]:
        """Search, train the winner in rounds, and make its variants."""
        config, kinds = self.config, self.plan.candidates
        searched = self.steps.make(
            "search", "search", "search", target=config.target, source=config.target, outputs=answers,
            prompt_file=self.prompts.choose, minutes=round(self.steps.seconds_for("search") / 60, 2),
            layers=self.plan.layers, widths=self.plan.widths, first_steps=self.plan.first_steps, k="1-5",
        )  # fmt: skip
        winner = read_search(searched).winner
        draft, training = self._rounds(searched / "draft", winner.name, max(2, winner.k), answers)
        drafts = [Candidate(kind="draft", draft=draft, shape=winner.name)]
        if "fallback" in kinds:
            drafter = f"fallback:draft={draft},draft_tokens={BEHIND_LOOKUP['fallback']}"
            drafts.append(Candidate(kind="fallback", draft=draft, drafter=drafter, shape=winner.name))
        pace = self.steps.rate(draft) / self._tokens_per_step(draft)
        variants: dict[Kind, tuple[float, dict[str, Any]]] = {
            "parallel": (pace / OFFSET_COST, {"student": f"parallel:tokens={OFFSETS}"}),
            "trimmed": (pace, {"vocab": checkpoint.vocab_size(draft) // 4}),
        }
        for kind, (steps_per_second, settings) in variants.items():
            if kind in kinds:
                count = int(self.steps.seconds_for(kind) * steps_per_second)
                trained = self._tried(left_out, kind, count, draft=str(draft), outputs=answers, **settings)
                drafts += [Candidate(kind=kind, draft=trained, shape=winner.name)] if trained is not None else []
        return drafts, training

    def _rounds(self, draft: Path, name: str, k: int, answers: Path) -> tuple[Path, Training]:
        """Train in rounds that double the training, until the curve or the time says stop; return the best draft.

        A round too short to learn anything says nothing of more training: the next one is twice as long.
        """
        start, budget = self.steps.spent, self.steps.seconds_for("train")
        per_step, shortest, rounds = self._tokens_per_step(draft), LEAST_STEPS, 0
        drafts, pilots = [draft], [self._pilot(draft, 0, k, None)]
        while True:
            training = self._training(k, pilots)
            affordable = (budget - (self.steps.spent - start)) * self.steps.rate(drafts[-1]) / per_step
            count = int(min(max(shortest, pilots[-1].tokens / per_step), affordable))
            if not training.stopped and count < shortest:
                training = training.model_copy(update={"stopped": "no time was left for more"})
            write_atomic(self.steps.folder / TRAINING, training.model_dump_json(indent=1))
            if training.stopped:
                return max(zip(drafts, pilots, strict=True), key=lambda pair: pair[1].length)[0], training
            rounds += 1
            longer = self._distilled(
                "train", f"{name}-{rounds}", count, draft=str(drafts[-1]), outputs=answers,
                seed=self.config.seed + rounds,
            )  # fmt: skip
            if self._learnt(longer):
                drafts.append(longer)
                pilots.append(self._pilot(longer, rounds, k, pilots[-1]))
            else:
                shortest = 2 * count

    def _learnt(self, draft: Path) -> bool:
        """Return whether a training's best evaluation came after some of its steps."""
        after = self.steps.record(draft).notes["after"]
        return isinstance(after, dict) and after["step"] > 0

    def _pilot(self, draft: Path, number: int, k: int, before: Pilot | None) -> Pilot:
        """Replay a draft over the target's answers; return its tokens per pass after all its training."""
        replayed = self.steps.make(
            "train", f"replay-{number}", "replay", directory=self._texts, draft=[str(draft)], k=[k]
        )
        row = rows_of(read_replay(replayed / draft.name), [k])[0]
        notes = self.steps.record(draft).notes
        tokens, seconds = float(str(notes["tokens"])), float(str(notes["seconds"]))
        done = (before.tokens, before.seconds) if before is not None else (0.0, 0.0)
        return Pilot.of(tokens + done[0], row.length, seconds + done[1])

    def _training(self, k: int, pilots: list[Pilot]) -> Training:
        """Return the training so far, with the curve where there is one; stopped: why more does not pay."""
        if len(pilots) < 2:
            return Training(k=k, pilots=pilots)
        curve, last = fit(pilots, k), pilots[-1]
        gain = curve.gain(last.tokens, 2 * last.tokens)
        small = gain.value < MIN_GAIN * last.length
        stopped = (
            f"twice the training would give {gain.value:.3f} tokens more, less than {MIN_GAIN:.0%}" if small else ""
        )
        return Training(k=k, pilots=pilots, expected=curve.at(2 * last.tokens), most=curve.most, stopped=stopped)

    def _distilled(self, step: str, name: str, count: int, **settings: Any) -> Path:
        """Train for so many steps, at least the fewest that are worth it."""
        count = max(LEAST_STEPS, min(count, MOST_STEPS))
        return self.steps.make(
            step, name, "distill", steps=count, batch_size=BATCH_SIZE, lr=CONTINUED_LR, eval_steps=count,
            save_steps=max(25, count // 4), **settings,
        )  # fmt: skip

    def _tried(self, left_out: dict[Kind, str], kind: Kind, count: int, **settings: Any) -> Path | None:
        """Train a candidate; one that cannot be trained joins left_out, with the reason."""
        try:
            return self._distilled(kind, kind, count, **settings)
        except UserError as error:
            left_out[kind] = str(error)
            return None

    def _tokens_per_step(self, draft: Path) -> float:
        record = self.steps.record(draft)
        return float(str(record.notes["tokens"])) / int(str(record.config["steps"]))

    def _scores(
        self, step: str, candidates: list[Candidate], k: int | None = None, name: str = ""
    ) -> dict[int, dict[str, Score]]:
        """Score candidates at every number of streams.

        k: a choice's, on the prompts to measure with; None: several, on those to choose by. name: of the output.
        """
        config, streams = self.config, self.config.streams
        together, scores = math.lcm(*streams), dict[int, dict[str, Score]]()
        each = (self.steps.seconds_for(step) - self._costs.start) / len(streams)
        afforded = int(each / (self._answer_seconds * arms(self.plan.candidates)))
        choose = len(self.prompts.choose.read_text().splitlines())
        prompts = max(LEAST_PROMPTS, min(afforded - 5, choose)) // together * together or together
        rounded = {"int8": "both"} if self._int8 else {}
        chosen_on = {"prompt_file": self.prompts.choose, "num_prompts": prompts, "repeats": 1}
        measured_on = {"prompt_file": self.prompts.measure, "repeats": 2}
        out = self.steps.make(
            step, name or step, "score", target=config.target,
            draft=[str(c.draft) for c in candidates if not c.drafter],
            drafter=[c.drafter for c in candidates if c.drafter], k=list(KS) if k is None else [k],
            max_tokens=MAX_TOKENS, batch=streams, temperature=config.temperature, **rounded,
            **(chosen_on if k is None else measured_on),
        )  # fmt: skip
        for score in map(read_score, score_files([out])):
            batch = score.conditions.batch
            scores.setdefault(batch, {})[score.name.removesuffix(f"-b{batch}").removesuffix("@int8")] = score
        return dict(sorted(scores.items()))

    def _changes(
        self, ranking: list[Choice], scores: dict[int, dict[str, Score]], training: Training | None
    ) -> list[str]:
        """Return what would make a draft pay."""
        changes, fewest = [], min(scores)
        trained = next((c for c in ranking if c.kind == "draft"), None)
        needed = 0.0 if trained is None else scores[fewest][trained.name].break_even_length(trained.k)
        if trained is not None and training is not None and trained.tokens_per_pass < needed:
            share = scores[fewest][trained.name].time_shares(trained.k).get("draft", 0.0)
            changes.append(
                f"{trained.label} has {trained.tokens_per_pass:.2f} tokens per target pass at K = {trained.k} and "
                f"needs {needed:.2f} to break even after the first token; drafting takes {share:.0%} of that time"
            )
            if len(training.pilots) > 1 and needed <= training.k + 1:
                changes.append(f"more training: {forecast(training.pilots, needed, k=training.k).line()}")
        if len(scores) > 1 and any(score.speedup(ranking[0].k).low > 1 for score in scores[fewest].values()):
            changes.append(f"fewer streams: at {fewest} there is a gain")
        if any("minutes" in reason for reason in self.plan.left_out.values()):
            changes.append("more --minutes: some candidates were not tried")
        return changes or ["prompts whose answers repeat them, or a target whose passes cost more beside a draft's"]


def _named(candidates: list[Candidate], name: str) -> Candidate:
    return next(each for each in candidates if each.name == name)


def _best_k(score: Score) -> int:
    """Return the fastest K, 0 where no draft is faster."""
    return score.best_k if score.speedup(score.best_k).value > 1 else 0


def _cost(length: float | None, training: Training | None) -> Forecast | None:
    """Return what training to a length costs; None where none is asked for, or fewer than two rounds say it."""
    if length is None or training is None or len(training.pilots) < 2:
        return None
    return forecast(training.pilots, length, k=training.k)
