"""Write an export: a directory or GGUF file with a model card and a server's start script. Verify it in that server."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from draftlab.console import note
from draftlab.data.prompts import Prompts
from draftlab.engine.batch_generate import answer_turns
from draftlab.errors import UserError
from draftlab.exporting import gguf, verify
from draftlab.exporting.artifact import Exportable, Form
from draftlab.exporting.card import Card, history
from draftlab.intervals import FEWEST
from draftlab.model import checkpoint, hub, modes
from draftlab.model.size import read_size
from draftlab.output import Output
from draftlab.results.score import Score
from draftlab.sampling import SamplingParams
from draftlab.servers.kinds import DEFAULT_SAMPLING, Launch, Sampling, ServerTrial
from draftlab.shell import typed

NEW_TOKENS = 64  # length of each text that verifies an export
# most tokens in the target's answer to an earlier turn, as by default in draftlab score
TURN_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenK:
    """The number of tokens to draft per step, and the reason."""

    k: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier:
    """The server program in which to verify an export, and the requests to send to it."""

    program: Path
    prompts: Prompts
    temperature: float
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A finished export.

    lines: Text to print. notes: Entries of draftlab.json. advice: Reason not to serve the draft, or "".
    """

    lines: list[str]
    notes: dict[str, object]
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The export of a draft or head in a form.

    Attributes:
        name: Default name of the output directory.
        target: Name of the target in the start script and in the model card.
        chosen: Number of tokens to draft.
        scores: Scores of this draft, the newest first.
        verifier: The server in which to verify the export, or None.
    """

    name: str
    artifact: Exportable
    form: Form
    target: str
    chosen: ChosenK
    scores: Sequence[Score]
    verifier: Verifier | None

    def facts(self) -> Mapping[str, object]:
        """Return the facts that a dry run shows."""
        return {
            "draft": self.artifact.path,
            "target": self.target,
            "k": self.chosen.k,
            "because": self.chosen.reason,
        }

    def run(self, output: Output) -> Exported:
        """Write the export. With a verifier, also verify it in a server.

        Raises:
            UserError: The disk is full, the server does not start, or its acceptance differs from the acceptance in
                draftlab.
        """
        artifact = self.artifact
        form = self.form
        chosen = self.chosen
        draft = artifact.path
        serving = target_name(self.target, artifact.target)
        params = read_size(draft).params() if artifact.head is None else artifact.head.params()
        output.check_space(2 * params, "the export")
        file = f"{draft.name}-{form.outtype}.gguf" if form.outtype else ""
        verified = None
        output.inputs([draft])
        with output.directory() as work, tempfile.TemporaryDirectory(dir=work) as temporary:
            directory = Path(temporary) if form.outtype else work
            changed = artifact.write(directory, form, chosen.k, serving)
            lines = list(changed)
            if form.outtype:
                lines += artifact.write_gguf(directory, work / file, form.outtype).lines()
            notes: dict[str, object] = {"changed": changed, "k": chosen.k}
            if self.verifier is not None:
                prompts, verified = _verify(artifact, form, directory, work / file, chosen.k, self.verifier)
                lines.append(verified.line())
                about = {"data": prompts.source, "selection": prompts.selection, "chat": prompts.chat}
                notes |= {"verified": verified.line(), "acceptance": verified.facts(), "prompts": about}
            if artifact.context_limit:
                lines.append(artifact.context_limit)
            script = None
            if form.server is not None and form.to != "gguf":
                launch = Launch(
                    target=serving,
                    k=chosen.k,
                    reason=chosen.reason,
                    kind=artifact.kind,
                    file=file,
                    layer_ids=artifact.layer_ids,
                    sliding_window=None if artifact.head is None else artifact.head.sliding_window,
                    heterogeneous=form.heterogeneous,
                    sampling=choose_sampling(form.heterogeneous, verified),
                    own_target=form.layout == "speculators",
                    limit=artifact.context_limit,
                )
                script = form.server.script(launch)
                (work / script[0]).write_text(script[1], encoding="utf-8")
                if artifact.in_parallel and not form.server.parallel:
                    lines.append(
                        f"--to {form.to}: {form.server.name} cannot draft several tokens in one pass, so this draft "
                        "makes one pass for each drafted token"
                    )
                shell = "sh" if script[0].endswith(".sh") else "python"
                lines.append(f"serve with: {typed(shell, output.out / script[0], *form.server.operands)}")
                if options := form.server.options(launch, output.out.absolute()):
                    notes["options"] = typed(*options)
                    lines.append(f"or add to your own command: {notes['options']}")
            changes = f" Changed in this export: {', '.join(changed)}." if changed else ""
            commands, heldout = history(draft)
            card = Card(
                name=draft.name,
                target=self.target,
                kind=artifact.kind,
                summary=artifact.summary(directory, form) + changes,
                commands=commands,
                heldout=heldout,
                scores=self.scores,
                script=script,
                verified=verified.line() if verified else "",
            )
            (work / "README.md").write_text(card.text())
            output.record(work, **notes)
        return Exported(lines=lines, notes=notes, advice=advice(self.scores, draft))


def _verify(
    artifact: Exportable, form: Form, directory: Path, written: Path, k: int, verifier: Verifier
) -> tuple[Prompts, verify.Verification]:
    """Compare acceptance in the server with acceptance in draftlab. Return the prompts, and the comparison.

    Args:
        directory: The export as a Hugging Face directory.
        written: File or directory that the server loads.

    Returns:
        A prompt for every turn of the verifier's conversations, and the comparison.
    """
    server = form.server
    target = artifact.target
    assert server is not None  # the settings require it with --verify-with
    ends = checkpoint.eos_token_ids(target)
    model = modes.load(target, torch.float32, verifier.device)
    turns = SamplingParams(max_tokens=TURN_TOKENS, stop_token_ids=ends)
    prompts = answer_turns(verifier.prompts, target, model, turns)
    rows = [prompt.ids for prompt in prompts.rows]
    if len(rows) < FEWEST:
        raise UserError(f"--verify-with: {len(rows)} prompts are too few to compare acceptance; name {FEWEST} or more")
    del model
    torch.cuda.empty_cache()  # the server needs most of the memory
    note(f"drafting over {len(rows)} texts in {verifier.program.name} and in draftlab")
    vocab = artifact.target_vocab
    # inside the unfinished output, which the next run removes if this run is killed
    inside = written if written.is_dir() else written.parent
    with tempfile.TemporaryDirectory(dir=inside) as folder:
        served = target
        if server.loads_gguf:
            served = gguf.write(target, Path(folder) / "target.gguf", "f32").path
        trial = ServerTrial(
            target=served,
            draft=written,
            kind=artifact.kind,
            k=k,
            longest=prompts.longest + NEW_TOKENS,
            method=DEFAULT_SAMPLING.method,
            own_target=form.layout == "speculators",
        )
        command = server.command(verifier.program, trial)
        with verify.running(command, verify.own_environment(server)) as (client, _):
            answered = verify.ask(client, rows, tokens=NEW_TOKENS, temperature=verifier.temperature, vocab=vocab, k=k)
    found = verify.compare(
        client,
        answered,
        modes.load(target, torch.float32, verifier.device),
        lambda texts: artifact.scores(directory, form, texts, verifier.device),
        ends=ends,
        vocab=vocab,
        method=trial.method,
    )
    if not found.agrees:
        raise UserError(
            "--verify-with: the acceptance length in the server is outside the interval that draftlab expects, so the "
            f"server may run the draft wrongly. {found.line()}"
        )
    return prompts, found


def choose_sampling(heterogeneous: bool, verified: verify.Verification | None) -> Sampling:
    """Return the draft's sampling method above temperature 0.

    It is greedy if draft and target have different vocabularies. Otherwise it is the method with the largest acceptance
    length in the verification, or the default method without a verification that compares methods.
    """
    if heterogeneous:
        return Sampling("greedy", "the only method of vLLM for different vocabularies")
    if verified is None or len(verified.by_method) == 1:
        return DEFAULT_SAMPLING
    lengths = ", ".join(f"{name} {length.value:.3f}" for name, length in verified.by_method.items())
    best = max(verified.by_method, key=lambda name: verified.by_method[name].value)
    return Sampling(best, f"tokens per target pass at temperature {verified.temperature:g}: {lengths}")


def target_name(named: str, target: Path) -> str:
    """Return the target's name for a script that may run in any folder: an absolute path, or a name on the hub."""
    return named if hub.kind_of_name(named) == "hub" else str(target.absolute())


def choose_k(artifact: Exportable, asked: int | None, scores: Sequence[Score]) -> ChosenK:
    """Return K and the reason for it. The user's K comes first, then the newest score's best K, then the default K."""
    scores = _alone(scores)
    measured = ""
    if scores:
        measured = scores[0].headline()
        if not measured.startswith("Faster"):
            note(f"{scores[0].name}: {measured}")
    if asked is not None:
        return ChosenK(k=asked, reason=f"set by --k. Score: {measured}" if measured else "set by --k")
    if scores:
        reason = f"the fastest K in draftlab score on {scores[0].conditions.device}. {measured}"
        return ChosenK(k=scores[0].best_k, reason=reason)
    k, reason = artifact.default_k
    return ChosenK(k=k, reason=reason)


def _alone(scores: Sequence[Score]) -> list[Score]:
    """Return the scores in which the draft is the only drafter, because pairs of drafters cannot be exported.

    A score in which the draft was only predicted counts only if it was timed in none.
    """
    alone = [score for score in scores if "," not in score.name]
    timed = [score for score in alone if score.timed]
    return timed or alone


def advice(scores: Sequence[Score], draft: Path) -> str:
    """Return the reason not to serve a draft, or "" if its newest score does not show that it is slower."""
    scores = _alone(scores)
    if not scores:
        measure = typed("draftlab", "score", "--draft", draft)
        return f"{draft.name} is not measured yet; run {measure} before you serve it"
    newest = scores[0]
    again = typed("draftlab", "score", "--draft", draft)
    if not newest.timed:
        return (
            f"{draft.name} was not timed, because others in its score were clearly faster; "
            f"{again} without them times it alone"
        )
    if newest.doubt is not None:
        return (
            f"the score of {draft.name} does not show whether the draft makes the target faster: {newest.doubt}; "
            f"repeat {again}"
        )
    gain = newest.best_k_speedup
    return (
        f"do not serve {draft.name}: with it the target runs at {gain.as_speedup()} of its speed without a draft"
        if gain.below(1)
        else ""
    )
