"""The command that trains a student of a target."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from draftlab.commands.base import Job, Outcome, check_data, command, fill
from draftlab.config.distill import DistillConfig
from draftlab.config.outputs import check_store
from draftlab.console import note_if_slow
from draftlab.errors import UserError, about
from draftlab.model import hub
from draftlab.output import Output
from draftlab.trust import check_address

if TYPE_CHECKING:
    from draftlab.servers.client import Server
    from draftlab.training.answers import PromptFile
    from draftlab.training.run import LengthComparison, TrainingResult
    from draftlab.training.texts import TrainingText


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Trained(Outcome):
    """A trained draft or head. acceptance: held out, before training and of the weights that are written.

    tokens: trained on. lengths: tokens per target pass for every K; empty where no target could write text.
    """

    acceptance_before: float | None
    acceptance: float | None
    tokens: int
    seconds: float
    lengths: "list[LengthComparison]"


def prepare(config: DistillConfig, weights: bool) -> "Job[TrainingResult]":
    """Resolve and check the settings.

    weights: the files of weights must be here.

    Raises:
        UserError: a checkpoint, text, server or outputs that are not there or do not fit each other; settings that
            cannot be trained.
    """
    with note_if_slow("distill: loading torch and transformers"):
        from draftlab.training import distributed, trackers
        from draftlab.training.distill import Distillation
        from draftlab.training.distill import distill as library
        from draftlab.training.loop import Hardware, Loop
        from draftlab.training.losses import parse_loss

    with about("--loss"):
        parse_loss(config.loss)
    trackers.check(config.report_to)
    distributed.check(optimizer=config.optimizer)
    draft = target = None
    if config.draft is not None:
        with about("--draft"):
            locate = hub.locate_model if config.student.starts_from_draft else hub.locate
            draft = locate(config.draft, weights)
    if config.needs_target:
        with about("--target"):
            target = hub.locate_model(config.target, weights)
    if config.outputs is not None:
        with about("--outputs"):
            check_store(config.outputs)
    answers = _answers(config, target)
    if config.outputs is None and answers is None:
        check_data(config.data, weights=True)
    _check_models(
        config, draft, target, windows=config.outputs is None and answers is None, weights=weights
    )
    job = fill(
        Distillation,
        config,
        draft=draft,
        target=target,
        text=_text(config, answered=answers is not None),
        loop=fill(Loop, config, dtype=config.training_dtype),
        answers=answers,
        server=_server(config, weights),
        hardware=fill(Hardware, config),
    )
    config.student.check(job)
    name = config.student.name(Path(config.draft or ""), Path(config.target.partition("@")[0]))
    return Job(partial(library, job), name, partial(config.student.facts, job))


@command(DistillConfig, prepare=prepare, dry_run=True)
def distill(result: "TrainingResult", output: Output) -> Trained:
    """Train a draft to agree with the target, or a head on the target's states."""
    cost = f"{result.tokens:,} tokens in {result.seconds:.0f} s; {result.bits_per_byte:.3f} bits per byte held out"
    lines = [str(output.out), cost]
    before, after = result.before.acceptance, result.after.acceptance
    if before is not None and after is not None:
        more = f" (or up to {result.after.slack:.3f} more: the stored answers list the most probable tokens alone)"
        lines.append(
            f"held-out acceptance {before:.3f} -> {after:.3f}"
            + (more if result.after.slack > 0.001 else "")
        )
    if result.after.offsets:
        lines.append(
            "held-out acceptance by token: " + " ".join(f"{a:.3f}" for a in result.after.offsets)
        )
    if result.lengths:
        chosen = {2, 4, result.lengths[-1].k} if result.after.offsets else {2, 4}
        shown = [n for n in result.lengths if n.k in chosen]
        text = [
            f"K = {n.k}: {n.before:.2f} -> {n.after:.2f} ({n.low:.2f} to {n.high:.2f})"
            for n in shown
        ]
        lines.append("tokens per target pass: " + "; ".join(text))
    if result.lengths and all(n.gain_low <= 1 for n in result.lengths):
        lines.append(
            "no gain beyond the noise at any K: more steps, another --lr or other text may help"
        )
    return Trained(
        path=output.out,
        show=lines,
        data={"path": str(output.out), **result.as_dict()},
        acceptance_before=before,
        acceptance=after,
        tokens=result.tokens,
        seconds=result.seconds,
        lengths=result.lengths,
        next=_next(output),
    )


def _next(output: Output) -> str:
    config = output.config
    assert isinstance(config, DistillConfig)
    if config.student.starts_from_draft:
        return f"draftlab score --draft {output.out}"
    return f"draftlab score --drafter {config.student.kind}:heads={output.out}"


def _check_models(
    config: DistillConfig, draft: Path | None, target: Path | None, *, windows: bool, weights: bool
) -> None:
    """Check that draft and target fit the text and each other."""
    from draftlab.model import checkpoint
    from draftlab.model.hf_files import check_length, check_trimmable
    from draftlab.model.tokenizer import common_vocabulary

    starts = config.student.starts_from_draft
    for model in (draft, target) if windows or not starts else ():
        if model is not None:
            with about("--seq-len"):
                check_length(model, config.seq_len)
    if starts and draft is not None and target is not None:
        with about("--draft"):
            common_vocabulary(draft, target)
    if starts and draft is not None and config.vocab is not None:
        with about("--vocab"):
            check_trimmable(draft, config.vocab)
    for model in (draft if starts else None, target) if weights else ():
        if model is not None:
            checkpoint.check(model)


def _text(config: DistillConfig, *, answered: bool) -> "TrainingText":
    from draftlab.data import loss_on_of, parse_mixture
    from draftlab.training.texts import TrainingText

    read = config.outputs is None and not answered
    with about("--text"):
        shares = parse_mixture(config.text)
    loss_on = loss_on_of(config.data, config.loss_on) if read else None
    return fill(
        TrainingText, config, shares=shares, loss_on=loss_on, temperature=config.sample_temperature
    )


def _answers(config: DistillConfig, target: Path | None) -> "PromptFile | None":
    """Return the prompts that the target answers: those of the file, or the conversations of the data.

    The held-out conversations are left out: `score` takes its prompts from those.
    """
    from draftlab.data import is_chat_file
    from draftlab.data.text import check_prompts
    from draftlab.training.answers import PromptFile
    from draftlab.training.loop import Hardware

    file, of_data, longest = config.prompt_file, False, config.max_new_tokens
    if file is not None:
        with about("--prompt-file"):
            check_prompts(file)
    elif config.may_answer_data and is_chat_file(config.data):
        file, of_data = Path(config.data), True
    elif config.is_set("max_new_tokens"):
        raise UserError(
            f"--max-new-tokens: {config.data} has no conversations to answer; name prompts by --prompt-file"
        )
    if file is None or target is None:
        return None
    answers = fill(
        PromptFile,
        config,
        name=config.target,
        target=target,
        file=file,
        of_data=of_data,
        max_new_tokens=longest,
        temperature=config.sample_temperature,
        hardware=fill(Hardware, config),
    )
    answers.check(config.temperature)
    return answers


def _server(config: DistillConfig, weights: bool) -> "Server | None":
    """Return the server of the target; a plan asks none."""
    if config.server is None:
        return None
    from draftlab.servers.client import Server

    with about("--server"):
        check_address(config.server)
    if config.api_key_file is not None and not config.api_key_file.exists():
        raise UserError(f"--api-key-file {config.api_key_file}: No such file or directory")
    return (
        Server.connect(config.server, config.served_model, config.api_key_file) if weights else None
    )
