"""The verdict of auto: which draft to serve, or that none helps, and why; with its export and its page.

The export is verified in the server if the server is installed.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from pydantic import Field

from draftlab import provenance
from draftlab.atomic import write_atomic
from draftlab.config.kinds import DrafterSpec
from draftlab.drafters.model import DraftModelSpec
from draftlab.errors import UserError
from draftlab.exporting.run import target_name
from draftlab.intervals import Interval
from draftlab.latency.k_schedule import schedule_of
from draftlab.model import hub
from draftlab.reading import FileModel
from draftlab.registry import SERVERS
from draftlab.results import plots
from draftlab.results.ranking import NO_DRAFT
from draftlab.results.report import Figure
from draftlab.results.score import Score
from draftlab.results.tables import Table, page_template, three_digits
from draftlab.searching.plan import Plan, Request, in_words, not_tried, streams
from draftlab.searching.schedule import StepRunner, record_of
from draftlab.servers.kinds import Launch

Scores = Mapping[int, Mapping[str, Score]]  # keys: number of streams, then name of the score


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to draft, to be compared with others.

    Args:
        draft: Checkpoint or head. None if the drafter needs no weights.
        shape: Name of a draft model's shape, or of a ready draft.
        drafter: None for a draft model without another drafter.
    """

    kind: str
    draft: Path | None = None
    shape: str = ""
    drafter: DrafterSpec | None = None

    @property
    def name(self) -> str:
        """Return the name of the arm's scores."""
        if self.drafter is not None:
            return self.drafter.name
        assert self.draft is not None
        return hub.checkpoint_name(self.draft)

    @property
    def label(self) -> str:
        """Return the arm as text for a person."""
        return in_words(self.kind, self.shape)


class Choice(FileModel):
    """An arm (a way to draft) at its best K.

    Args:
        name: Name of the arm's scores.
        label: The arm as text for a person.
        speedup: Speed-up of whole requests, the geometric mean over all numbers of streams.
        at_fewest: Speed-up at the fewest streams. tokens_per_pass and tokens_per_second are measured there, too.
        changed: Whether the arm changed the target's output. Its speed-up then does not count.
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


class Round(FileModel, extra="ignore"):
    """A draft after a round of training. tokens: All training tokens so far. length: Tokens per target pass."""

    tokens: float
    length: float


class TrainingRounds(FileModel):
    """Rounds of training, each as long as all rounds before it. stopped: Reason why no round follows."""

    k: int
    rounds: list[Round]
    stopped: str = ""

    def line(self) -> str:
        """Return the rounds as one line of text."""
        lengths = ", ".join(
            f"{each.length:.2f} after {each.tokens:,.0f} tokens" for each in self.rounds
        )
        return f"tokens per pass at K = {self.k}: {lengths}; it ended because {self.stopped}"


class Verdict(FileModel, extra="ignore"):
    """The contents of auto.json.

    Args:
        choice: Label of an arm, or "no draft".
        speedups: Speed-ups of whole requests by number of streams, on prompts that had no part in the choice.
        precision: Precision of target and draft, as text.
        doubt: Reason why the scores decide nothing, or "".
        draft: Checkpoint or head of the choice.
        drafter: Text for score --drafter. Empty for a draft model without another drafter.
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
                f"Cannot tell, because {self.doubt}; measure again on a machine without other work. By these "
                f"numbers, {choice}"
            )
        return choice[0].upper() + choice[1:]

    def lines(self) -> list[str]:
        """Return the lines of the verdict, for a person to read."""
        gains = [f"{gain.as_speedup()} at {streams([n])}" for n, gain in self.speedups.items()]
        ran = f"; whole requests, {self.precision}" if self.precision else ""
        lines = [
            f"{self.head()}: {self.reason}.",
            f"measured: {'; '.join(gains)}, on other prompts{ran}",
        ]
        lines += [f"what would help: {text}" for text in self.would_change]
        if self.training is not None:
            lines.append(f"training: {self.training.line()}")
        lines += not_tried(self.left_out) + self.notes
        return lines + [
            text for text in (self.serve and f"run it: {self.serve}", self.page) if text
        ]


def ranking(arms: Sequence[Arm], scores: Scores) -> list[Choice]:
    """Return each arm at its best K over all streams, the fastest first."""
    choices = [_at_best_k(arm, [names[arm.name] for names in scores.values()]) for arm in arms]
    return sorted(choices, key=lambda choice: (choice.changed, -choice.speedup))


def _at_best_k(arm: Arm, scores: Sequence[Score]) -> Choice:
    ks = set.intersection(*(set(score.speculative) for score in scores))
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
    )


def would_change(
    ranking: Sequence[Choice], scores: Scores, left_out: Mapping[str, str]
) -> list[str]:
    """Return lines on what would make a draft faster than plain decoding, or faster than it is."""
    changes, fewest = [], min(scores)
    trained = next((choice for choice in ranking if choice.kind == "draft"), None)
    if trained is not None:
        score = scores[fewest][trained.name]
        needed = score.break_even_length(trained.k)
        share = score.time_shares(trained.k).get("draft", 0.0)
        if trained.tokens_per_pass < needed:
            changes.append(
                f"{trained.label} gives {trained.tokens_per_pass:.2f} tokens per target pass at K = {trained.k}, "
                f"and needs {needed:.2f} to break even after the first token; drafting takes {share:.0%} of that time"
            )
    if any("minutes" in reason for reason in left_out.values()):
        changes.append("more --minutes, because some candidates were not tried")
    return changes or [
        "prompts whose answers repeat parts of the prompt, or a larger target, next to whose passes drafting "
        "costs less"
    ]


def judged(speedups: Mapping[int, Interval]) -> tuple[bool, str]:
    """Return whether to serve the choice, and the reason. speedups: Speed-ups by number of streams."""
    gains = [n for n, gain in speedups.items() if gain.low > 1]
    losses = [n for n, gain in speedups.items() if gain.value < 1]
    if not gains:
        best = max(speedups.values(), key=lambda gain: gain.value)
        return False, f"the fastest candidate has no significant gain: {best.as_speedup()}"
    if losses and geometric_mean(gain.value for gain in speedups.values()) <= 1:
        return False, f"it is faster at {streams(gains)}, but loses more at {streams(losses)}"
    if len(speedups) == 1:
        (gain,) = speedups.values()
        return True, f"whole requests run at {gain.as_speedup()} the speed of the target alone"
    reason = f"whole requests are faster than with the target alone at {streams(gains)}"
    if losses:
        reason += f"; at {streams(losses)} they are slower, so serve without a draft there"
    return True, reason


FASTEST = "the fastest K that draftlab auto measured"


def serve(
    request: Request,
    steps: StepRunner,
    chosen: Arm,
    k_by_streams: Mapping[int, int],
    *,
    k: int,
    int8: bool,
) -> tuple[str, list[str]]:
    """Export the choice with its script. Return the command that serves it, and notes.

    Args:
        k_by_streams: Best K by number of streams. 0 stands for no draft.
        int8: Whether weights were rounded to 8 bits in the scores.
    """
    prompts, server = steps.folder / "prompts/measure.jsonl", request.server
    scores = [str(steps.folder / name) for name in ("score", "final")]
    settings: dict[str, Any] = {
        "draft": str(chosen.draft),
        "target": request.name,
        "scores": scores,
    }
    if server is None:
        drafter = chosen.drafter
        if chosen.draft is not None:
            out = steps.run("export", "export", **settings, to="hf")
            drafter = drafter or DraftModelSpec.of(draft=str(out))
        assert drafter is not None
        rounded = f" --int8 {'target' if chosen.draft is None else 'both'}" if int8 else ""
        note = "to choose for a server and get its start script, give --for vllm, sglang, llama.cpp or transformers"
        options = f"--drafter {drafter.text} --k {k}{rounded} --prompt-file {prompts}"
        return f"draftlab score --target {request.name} {options}", [note]
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
    schedule = schedule_of(k_by_streams)
    changes = schedule.pays_up_to > 0 and len(schedule.ranges) > 1
    if server == "vllm" and chosen.kind != "parallel" and changes:
        file = steps.folder / "k-by-streams.json"
        row = {
            "draft_sha256": provenance.fingerprint(chosen.draft),
            "schedule": schedule.model_dump(),
        }
        write_atomic(file, json.dumps({"predictions": [row]}))
        del settings["k"]
        settings["prediction"] = file
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


def unverified(request: Request) -> list[str]:
    """Return a line on why the export is not verified in the server, or no lines if it is."""
    if request.server is None or request.program is not None:
        return []
    if not SERVERS.get(request.server, "--for").program:
        return [
            f"not verified in {request.server}, because draftlab can start only vLLM and llama.cpp"
        ]
    return [
        f"the export is not verified, because {request.server} is not on the PATH; give its program by --verify-with"
    ]


def _typed(export: Path) -> str:
    script = export / "assist.py"
    if script.exists():
        return f"python {shlex.quote(str(script))} 'a prompt'"
    return f"sh {shlex.quote(str(export / 'serve.sh'))}"


def page(verdict: Verdict, plan: Plan, seconds: Callable[[str], float], command: str) -> str:
    """Return an HTML page that loads no other files.

    Args:
        seconds: Returns the seconds that a step of the plan took, by the name of the step.
        command: Command that resumes the run.
    """
    board = _candidates(verdict)
    labels = [choice.label for choice in verdict.ranking]
    marks = {label: plots.Mark.of(label, i) for i, label in enumerate(labels)}
    gains = [(marks[choice.label], choice.at_fewest) for choice in verdict.ranking]
    at_fewest = streams([min(verdict.speedups)])
    first = Figure(
        svg=plots.plot_ranking(gains),
        table=Table(
            heads=(),
            rows=[],  # the table of candidates has the numbers
            title="Speed-up of each candidate",
            caption=f"Speed-up of whole requests at {at_fewest}: tokens per second with the draft, divided by "
            "those of the target alone. Each candidate has its best number of drafted tokens.",
        ),
    )
    return page_template("auto.html.j2").render(
        target=verdict.target,
        answer=f"{verdict.head()}: {verdict.reason}.",
        serve=verdict.serve,
        changes=verdict.would_change,
        first=first,
        board=board,
        tables=_tables(verdict, plan, seconds),
        notes=not_tried(verdict.left_out) + verdict.notes,
        marks=marks,
        colours=(plots.COLOURS, plots.DARK_COLOURS),
        page_colour=plots.VARIABLES.__getitem__,
        command=command,
    )


def _candidates(verdict: Verdict) -> Table:
    several = len(verdict.speedups) > 1
    rows = []
    for choice in verdict.ranking:
        cells = {
            "candidate": choice.label,
            "drafted tokens (K)": str(choice.k),
            "tokens per target pass": f"{choice.tokens_per_pass:.2f}",
            "tokens/s": three_digits(choice.tokens_per_second),
            f"speed-up, {streams([min(verdict.speedups)])}": choice.at_fewest.as_speedup(),
        }
        rows.append(cells | ({"speed-up, mean": f"{choice.speedup:.2f}x"} if several else {}))
    plain = dict.fromkeys(rows[0], "1.00x") | {
        "candidate": NO_DRAFT,
        "drafted tokens (K)": "–",
        "tokens per target pass": "1.00",
        "tokens/s": three_digits(verdict.plain_tokens_per_second),
    }
    faster = sum(choice.speedup > 1 and not choice.changed for choice in verdict.ranking)
    rows.insert(faster, plain)
    labels = [row["candidate"] for row in rows]
    return Table.of(
        rows,
        title="Candidates",
        caption="Each candidate at its best K, on the prompts by which K was chosen. On other prompts the choice "
        "looks less good.",
        best=labels.index(verdict.choice) if verdict.use and not verdict.doubt else None,
    )


def _tables(verdict: Verdict, plan: Plan, seconds: Callable[[str], float]) -> list[Table]:
    """Return the tables of details: the choice on other prompts, the training, and the steps."""
    ran = f" How both sides ran: {verdict.precision}." if verdict.precision else ""
    measured = Table(
        title="The choice on other prompts",
        heads=["concurrent requests", "speed-up of whole requests (95% interval over prompts)"],
        rows=[[str(n), gain.as_speedup()] for n, gain in verdict.speedups.items()],
        caption="Tokens per second of whole requests, prefill included, divided by those of the target alone, on "
        f"prompts that had no part in the choice.{ran}",
    )
    steps = Table(
        title="Steps",
        heads=["step", "what it made", "planned, minutes", "taken, minutes"],
        rows=[
            [step.name, step.what, f"{step.minutes:.1f}", f"{seconds(step.name) / 60:.1f}"]
            for step in plan.steps
        ],
        caption=f"{plan.machine.describe()}. Prompts: {plan.prompts}.",
    )
    if verdict.training is None:
        return [measured, steps]
    training = Table(
        title="What training gave",
        heads=["tokens trained on", "tokens per target pass"],
        rows=[[f"{each.tokens:,.0f}", f"{each.length:.2f}"] for each in verdict.training.rounds],
        caption="Acceptance of the draft after each round, replayed on the target's answers. Training ended "
        f"because {verdict.training.stopped}.",
    )
    return [measured, training, steps]
