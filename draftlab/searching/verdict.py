"""The verdict of auto: which draft to serve and why, or why no draft helps. The module also exports the draft.

The export is verified in the server if the server is installed. The verdict also opens the report of the candidates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from pydantic import Field

from draftlab.drafters.base import DrafterSpec
from draftlab.drafters.model import DraftModelSpec
from draftlab.errors import UserError
from draftlab.exporting.run import target_name
from draftlab.intervals import Interval
from draftlab.model import hub
from draftlab.quantities import format_duration
from draftlab.reading import FileModel
from draftlab.registry import SERVERS
from draftlab.results.ranking import NO_DRAFT
from draftlab.results.report import Decision
from draftlab.results.score import Score, Seconds
from draftlab.results.tables import Table
from draftlab.runs.atomic import write_atomic
from draftlab.searching.plan import Plan, Request, in_words, not_tried, streams
from draftlab.searching.schedule import StepRunner, record_of
from draftlab.servers.kinds import Launch
from draftlab.shell import typed

Scores = Mapping[int, Mapping[str, Score]]  # scores by number of streams, then by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A candidate of auto: a draft model, a head or another drafter.

    Args:
        kind: Kind of candidate, a key of LABELS in plan.py.
        draft: Directory of the draft model or head. None if the drafter needs no weights.
        shape: Name of the draft model's shape, or name of a draft of the user.
        drafter: The drafter. None for a draft model that drafts alone.
    """

    kind: str
    draft: Path | None = None
    shape: str = ""
    drafter: DrafterSpec | None = None

    @property
    def name(self) -> str:
        """Return the name of the candidate in scores."""
        if self.drafter is not None:
            return self.drafter.name
        assert self.draft is not None
        return hub.checkpoint_name(self.draft)

    @property
    def label(self) -> str:
        """Return the candidate as text for the user."""
        return in_words(self.kind, self.shape)


# highest acceptance rate of a token that a draft reached in an hour of training (studies/first-drafts)
REACHED = 0.62


class Choice(FileModel):
    """A measured candidate at its best K.

    Args:
        kind: Kind of candidate, a key of LABELS in plan.py.
        name: Name of the candidate in scores.
        label: The candidate as text for the user.
        speedup: Speed-up of whole requests: the geometric mean over all numbers of concurrent requests.
        at_fewest: Speed-up at the lowest number of concurrent requests.
        tokens_per_pass, tokens_per_second: Speed at the lowest number of concurrent requests.
        changed: Whether the output differs from the target's output. If so, the speed-up does not count.
        timed: Whether requests were timed with the candidate. If not, its speed-up is predicted.
    """

    kind: str
    name: str
    label: str
    k: int
    speedup: float
    at_fewest: Interval
    tokens_per_pass: float
    tokens_per_second: float
    changed: bool = False
    timed: bool = True


class Round(FileModel, extra="ignore"):
    """A draft after a round of training.

    tokens: Number of training tokens up to this round. length: Tokens per target pass.
    """

    tokens: float
    length: float


class TrainingRounds(FileModel):
    """The rounds in which a draft was trained. A round has at most about as many tokens as all training before it.

    k: K at which the rounds are compared. stopped: Reason why training ended.
    """

    k: int
    rounds: list[Round]
    stopped: str = ""

    def line(self) -> str:
        """Return the rounds as one line of text."""
        lengths = ", ".join(f"{each.length:.2f} after {each.tokens:,.0f} training tokens" for each in self.rounds)
        return f"tokens per pass at K = {self.k}: {lengths}; training ended because {self.stopped}"


class Verdict(FileModel, extra="ignore"):
    """The content of auto.json.

    Args:
        use: Whether to serve the target with a draft.
        choice: Label of the chosen candidate, or "no draft".
        speedups: Speed-ups of whole requests by number of concurrent requests, on prompts that were not used for the
            choice.
        seconds: Which seconds all times of the scores are.
        precision: Precision of target and draft, as text.
        reason: Reason why the choice is served or not.
        doubt: Reason why the measurement decides nothing, or "".
        would_change: Sentences about what would make a draft faster.
        left_out: Candidates that were not tried, each with the reason.
        draft: Directory of the chosen draft model or head.
        drafter: Value of score --drafter for the choice. Empty for a draft model that drafts alone.
        serve: Command that serves the target with the choice.
    """

    version: int = 3
    target: str
    use: bool
    choice: str = NO_DRAFT
    kind: str | None = None
    k: int | None = None
    speedups: dict[int, Interval]
    precision: str = ""
    plain_tokens_per_second: float
    seconds: Seconds
    reason: str
    doubt: str = ""
    would_change: list[str] = Field(default_factory=list)
    ranking: list[Choice]
    training: TrainingRounds | None
    left_out: dict[str, str]
    planned_minutes: float
    minutes: float
    draft: str = ""
    drafter: str = ""
    serve: str = ""
    page: str = ""
    notes: list[str] = Field(default_factory=list)

    def head(self) -> str:
        choice = f"use {self.choice} with K = {self.k}" if self.use else "do not use a draft here"
        if self.doubt:
            return (
                f"The measurement is not certain, because {self.doubt}; measure again on a machine without other work. "
                f"By this measurement, {choice}"
            )
        return choice[0].upper() + choice[1:]

    def lines(self) -> list[str]:
        """Return the verdict as lines of text for the user."""
        gains = [f"{gain.as_speedup()} at {streams([n])}" for n, gain in self.speedups.items()]
        ran = f"; whole requests, {self.precision}" if self.precision else ""
        lines = [
            f"{self.head()}: {self.reason}.",
            f"measured: {'; '.join(gains)}, on prompts that were not used for the choice{ran}",
        ]
        lines += [f"what would help: {text}" for text in self.would_change]
        if self.training is not None:
            lines.append(f"training: {self.training.line()}")
        lines += not_tried(self.left_out) + self.notes
        return lines + [text for text in (self.serve and f"run it: {self.serve}", self.page) if text]


def ranking(arms: Sequence[Arm], scores: Scores) -> list[Choice]:
    """Return each candidate at the K that is fastest on average over all numbers of concurrent requests.

    The fastest candidate is first. Candidates that were not timed come after those that were, and candidates that
    changed the target's text are last.

    arms: The candidates. scores: Their scores.
    """
    choices = [_at_best_k(arm, [names[arm.name] for names in scores.values()]) for arm in arms]
    return sorted(choices, key=lambda each: (each.changed, not each.timed, -each.speedup))


def _at_best_k(arm: Arm, scores: Sequence[Score]) -> Choice:
    ks = set.intersection(*(set(score.ks) for score in scores))
    if all(score.timed for score in scores):
        ks = {k for k in ks if all(score.is_timed(k) for score in scores)} or ks
    gains = {k: geometric_mean([score.speedup_value(k) for score in scores]) for k in ks}
    k = max(gains, key=gains.__getitem__)
    return Choice(
        kind=arm.kind,
        name=arm.name,
        label=arm.label,
        k=k,
        speedup=gains[k],
        at_fewest=scores[0].speedup(k),
        tokens_per_pass=scores[0].tokens_per_pass(k),
        tokens_per_second=scores[0].output_tps(k),
        changed=any(score.output_differs for score in scores),
        timed=all(score.timed for score in scores),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """A comparison between drafts that auto could train and candidates that exist already.

    Args:
        name: Label of the user's draft from whose measurement `speedup` is computed.
        speedup: Upper limit on the speed-up of a draft that auto could train.
        best: The fastest candidate that exists already.
    """

    name: str
    speedup: float
    best: Choice

    @property
    def may_gain(self) -> bool:
        """Return whether a trained draft may become significantly faster than `best`.

        It may if the limit is above the 95 % interval of the speed-up of `best`.
        """
        return self.speedup > self.best.speedup * self.best.at_fewest.drawn[1] / self.best.at_fewest.value

    def text(self, minutes: float) -> str:
        """Return the comparison as a sentence for the user. minutes: Planned minutes of the training."""
        sentence = (
            f"the cheapest draft that can be made would reach {self.speedup:.2f}x with the acceptance rate of "
            f"{self.name}, or with a rate of {REACHED} if that is higher"
        )
        best = f"{self.best.label} already reaches {self.best.at_fewest.as_speedup()}"
        if not self.may_gain:
            return f"{sentence}, but {best}"
        hours = minutes / 60 / (1 - self.best.speedup / self.speedup)
        saved = format_duration(3600 * hours)
        return f"{sentence}; {best}; {saved} of decoding would save as much time as the training takes"


def training_ceiling(arms: Sequence[Arm], scores: Scores, relative: Mapping[str, float]) -> Ceiling:
    """Return a comparison between the drafts that auto could train and the candidates that exist already.

    The upper limit is for a draft as fast as the cheapest draft. It is assumed to have the acceptance rate of the
    user's draft, but at least REACHED.

    Args:
        arms: Candidates that exist already.
        scores: Scores of these candidates.
        relative: Time of a pass of the cheapest draft, divided by the time of a pass of each of the user's drafts, by
            the name of this draft in scores. At most 1.
    """
    choices = ranking(arms, scores)
    ceilings = dict[str, float]()
    for name, cheaper in relative.items():
        own = [names[name] for names in scores.values()]
        for k in set.intersection(*(set(score.ks) for score in own)):
            gains = [_at_ceiling(score, k, cheaper) for score in own]
            ceilings[name] = max(ceilings.get(name, 0.0), geometric_mean(gains))
    best = max(ceilings, key=ceilings.__getitem__)
    label = next(choice.label for choice in choices if choice.name == best)
    return Ceiling(name=label, speedup=ceilings[best], best=choices[0])


def _at_ceiling(score: Score, k: int, cheaper: float) -> float:
    """Return the speed-up at K under two assumptions.

    The time of drafting is multiplied by `cheaper`, and the acceptance rate per token is at least REACHED.
    """
    length = score.tokens_per_pass(k)
    share = score.time_shares(k).get("draft", 0.0)
    longer = max(1.0, (1 - REACHED ** (k + 1)) / (1 - REACHED) / length)
    return score.speedup_value(k) * longer / (1 - share * (1 - cheaper))


# acceptance rate of a token that no trained draft exceeds
BEST_RATE = 0.95


def beyond_reach(best: Choice, scores: Mapping[str, Score], relative: float) -> str | None:
    """Return why no draft that auto could train would be faster than the best candidate, or None if one may be.

    The draft is assumed to have BEST_RATE of its tokens accepted. The target's passes were timed in the scores.

    relative: Time of a pass of the cheapest draft, divided by the time of the target's pass over one token.
    """
    score = scores[best.name]
    alone = score.target_ms
    ttft = score.ttft_ms(0)
    request = score.request_ms(0)
    if alone is None or ttft is None or request.value <= ttft.value:
        return None
    # output tokens after the first, by the time of plain decoding
    tokens = (request.value - ttft.value) / alone
    gains: list[float] = []
    for each in score.target.latency:
        k = each.width - 1
        length = (1 - BEST_RATE ** (k + 1)) / (1 - BEST_RATE)
        step = each.median_ms + k * relative * alone
        gains.append(request.value / (ttft.value + tokens * step / length))
    if max(gains) >= best.at_fewest.value:
        return None
    return (
        f"even with {BEST_RATE:.0%} of its tokens accepted, the cheapest draft would reach {max(gains):.2f}x by the "
        f"time of passes measured here, and {best.label} already reaches {best.at_fewest.as_speedup()}"
    )


def would_change(ranking: Sequence[Choice], scores: Scores, left_out: Mapping[str, str]) -> list[str]:
    """Return sentences about what would make a draft faster than plain decoding."""
    changes = []
    fewest = min(scores)
    trained = next((choice for choice in ranking if choice.kind == "draft"), None)
    if trained is not None:
        score = scores[fewest][trained.name]
        needed = score.break_even_length(trained.k)
        share = score.time_shares(trained.k).get("draft", 0.0)
        if trained.tokens_per_pass < needed:
            changes.append(
                f"{trained.label} gives {trained.tokens_per_pass:.2f} tokens per target pass at K = {trained.k}, "
                f"but needs {needed:.2f} to break even in TPOT; drafting takes {share:.0%} of the time after the first "
                "token"
            )
    if any("--minutes" in reason for reason in left_out.values()):
        changes.append("more --minutes, because some candidates were not tried")
    return changes or [
        "prompts whose answers repeat parts of the prompt, or a larger target, compared with which a draft costs less"
    ]


def judged(speedups: Mapping[int, Interval]) -> tuple[bool, str]:
    """Return whether to serve the fastest candidate, and the reason.

    speedups: Speed-ups of this candidate, by number of concurrent requests.
    """
    gains = [n for n, gain in speedups.items() if gain.above(1)]
    losses = [n for n, gain in speedups.items() if gain.value < 1]
    if not gains:
        best = max(speedups.values(), key=lambda gain: gain.value)
        return False, f"the fastest candidate has no significant gain: {best.as_speedup()}"
    if losses and geometric_mean(gain.value for gain in speedups.values()) <= 1:
        return (
            False,
            f"the fastest candidate gains at {streams(gains)}, but loses more at {streams(losses)}",
        )
    if len(speedups) == 1:
        (gain,) = speedups.values()
        return True, f"whole requests run at {gain.as_speedup()} the speed of the target alone"
    reason = f"whole requests are faster than with the target alone at {streams(gains)}"
    if losses:
        reason += f"; at {streams(losses)} they are slower, so serve the target alone there"
    return True, reason


FASTEST = "the fastest K that draftlab auto measured"


def serve(
    request: Request, steps: StepRunner, chosen: Arm, *, k: int, int8: bool, scores: Path
) -> tuple[str, list[str]]:
    """Export the chosen draft with a start script. Return the command that serves it, and notes for the user.

    Without a server, the command runs draftlab score with the draft.

    Args:
        chosen: The chosen candidate.
        k: Best K on average over all numbers of concurrent requests.
        int8: Whether the scores were measured with weights rounded to 8 bits.
        scores: Directory of the scores by which the candidate was chosen.
    """
    prompts = steps.folder / "prompts/measure.jsonl"
    server = request.server
    settings: dict[str, Any] = {
        "draft": str(chosen.draft),
        "target": request.name,
        "scores": [str(scores), str(steps.folder / "final")],
    }
    if server is None:
        drafter = chosen.drafter
        if chosen.draft is not None:
            out = steps.run("export", "export", **settings, to="hf")
            drafter = drafter or DraftModelSpec.of(draft=str(out))
        assert drafter is not None
        rounded = ["--int8", "target" if chosen.draft is None else "both"] if int8 else []
        note = "to choose for a server and get a start script, add --for vllm, sglang, llama.cpp or transformers"
        words = ["--drafter", drafter.text, "--k", k, *rounded, "--prompt-file", prompts]
        return typed("draftlab", "score", "--target", request.name, *words), [note]
    if chosen.draft is None:
        folder = steps.folder / "export"
        launch = Launch(
            target=target_name(request.name, request.target),
            k=k,
            reason=FASTEST,
            kind="prompt lookup",
        )
        file, text = SERVERS.get(server, "--for").script(launch)
        folder.mkdir(exist_ok=True)
        write_atomic(folder / file, text)
        return _typed(folder), ["there is nothing to verify, because prompt lookup has no weights"]
    settings |= {"to": server, "k": k}
    notes: list[str] = []
    if request.program is not None:
        verify: dict[str, Any] = {"verify_with": request.program, "prompt_file": prompts}
        if request.temperature > 0:
            verify["temperature"] = request.temperature
        try:
            out = steps.run("export", "export", **settings, **verify)
            return _typed(out), [str(record_of(out).notes["verified"])]
        except UserError as error:
            notes = [f"not verified in {server}: {error}"]
    return _typed(steps.run("export", "export", **settings)), notes


def measured_here(request: Request) -> str:
    """Return a sentence about where the candidates were measured."""
    if request.server is None:
        return "all times were measured in draftlab's engine"
    return (
        f"all times were measured in draftlab's engine, not in {request.server}; measure the started server with "
        "draftlab check --server URL"
    )


def unverified(request: Request) -> list[str]:
    """Return the reason why the export is not verified in the server, as one sentence, or [] if it can be verified."""
    if request.server is None or request.program is not None:
        return []
    program = SERVERS.get(request.server, "--for").program
    if not program:
        return [f"not verified in {request.server}, because draftlab can start only vLLM and llama.cpp"]
    return [f"the export is not verified, because {program} is not on the PATH; add --verify-with PROGRAM"]


def _typed(export: Path) -> str:
    script = export / "assist.py"
    if script.exists():
        return typed("python", script, "a prompt")
    return typed("sh", export / "serve.sh")


def decision(verdict: Verdict, plan: Plan, seconds: Callable[[str], float]) -> Decision:
    """Return the verdict for the report of the candidates.

    seconds: Function that returns how many seconds a step of the plan took, from the name of the step.
    """
    ran = f" How both sides ran: {verdict.precision}." if verdict.precision else ""
    measured = Table(
        title="The choice on other prompts",
        heads=["concurrent requests", "speed-up of whole requests (95% interval over prompts)"],
        rows=[[str(n), gain.as_speedup()] for n, gain in verdict.speedups.items()],
        caption="Tokens per second of whole requests (prefill included), divided by those of the target alone, on "
        f"prompts that were not used for the choice.{ran}",
    )
    steps = Table(
        title="Steps",
        heads=["step", "what it does", "planned minutes", "actual minutes"],
        rows=[[step.name, step.what, f"{step.minutes:.1f}", f"{seconds(step.name) / 60:.1f}"] for step in plan.steps],
        caption=f"{plan.machine.describe()}. Prompts: {plan.prompts}. The file recipe.yaml beside this page has all "
        "commands with their settings.",
    )
    tables = [_candidates(verdict), measured, steps]
    if verdict.training is not None:
        training = Table(
            title="Training",
            heads=["training tokens", "tokens per target pass"],
            rows=[[f"{each.tokens:,.0f}", f"{each.length:.2f}"] for each in verdict.training.rounds],
            caption="Acceptance of the draft after each round, replayed on the target's answers. Training ended "
            f"because {verdict.training.stopped}.",
        )
        tables.insert(2, training)
    return Decision(
        answer=f"{verdict.head()}: {verdict.reason}.",
        tables=tables,
        lists={
            "What would help": verdict.would_change,
            "Notes": not_tried(verdict.left_out) + verdict.notes,
        },
    )


def _candidates(verdict: Verdict) -> Table:
    heads = ["candidate", "name in the ranking", "drafted tokens (K)", "speed-up, mean"]
    rows = [[each.label, each.name, str(each.k), f"{each.speedup:.2f}x"] for each in verdict.ranking]
    return Table(
        heads=heads,
        rows=rows,
        title="Candidates",
        caption="Each candidate at the K that is best on average over all numbers of concurrent requests, on the "
        "prompts by which it was chosen. On other prompts the speed-up of the chosen candidate is usually lower.",
    )
