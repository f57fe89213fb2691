"""The command distill, which trains a draft model or a head by distillation from a target."""

from pathlib import Path

from draftlab.commands.base import Outcome
from draftlab.commands.settings.distill import DistillConfig
from draftlab.config.outputs import check_store
from draftlab.data import is_chat_file, loss_on_of, parse_mixture
from draftlab.data.text import check_prompts
from draftlab.drafters.base import DRAFTERS
from draftlab.errors import UserError, about
from draftlab.model import hub
from draftlab.model.checkpoint import Checkpoint
from draftlab.servers.client import Server
from draftlab.shell import typed
from draftlab.training import checkpointer
from draftlab.training.answers import PromptFile
from draftlab.training.loop import Hardware, Loop
from draftlab.training.losses import parse_loss
from draftlab.training.reweighing import Reweighing, parse_reference
from draftlab.training.run import Distillation, TrainingResult, check_trackers
from draftlab.training.texts import TrainingText
from draftlab.trust import check_address


def prepare(config: DistillConfig, weights: bool) -> Distillation:
    """Find the models and texts of the settings, check that they fit together, and return the job.

    weights: Whether weight files must be present.

    Raises:
        UserError: A checkpoint, the text, the server or the stored outputs are missing or do not fit together, or a
            model cannot be trained with these settings.
    """
    with about("--loss"):
        parse_loss(config.loss)
    check_trackers(config.report_to)
    checkpointer.check(optimizer=config.optimizer)
    draft = None
    target = None
    if config.draft is not None:
        with about("--draft"):
            locate = hub.locate_model if config.student.starts_from_draft else hub.locate
            draft = Checkpoint(locate(config.draft, weights))
    if config.needs_target:
        with about("--target"):
            target = Checkpoint(hub.locate_model(config.target, weights))
    if config.outputs is not None:
        with about("--outputs"):
            check_store(config.outputs)
    answers = _answers(config, target)
    reads_data = config.outputs is None and answers is None
    _check_models(config, draft, target, reads_data=reads_data, weights=weights)
    with about("--text"):
        shares = parse_mixture(config.text)
    reweighing = None
    if config.reweigh_steps:
        with about("--reference-losses"):
            if config.reference_losses:
                reference = parse_reference(config.reference_losses, weights)
            else:
                assert target is not None  # this run loads the target
                reference = target.directory
        reweighing = Reweighing(every=config.reweigh_steps, reference=reference)
    server = None
    if config.api_key_file is not None and not config.api_key_file.exists():
        raise UserError(f"--api-key-file {config.api_key_file}: there is no such file")
    if config.server is not None:
        with about("--server"):
            check_address(config.server)
            name = config.served_model_name
            server = Server.connect(config.server, config.api_key_file, model=name) if weights else None
    job = Distillation(
        name=config.student.name(Path(config.draft or ""), Path(config.target.partition("@")[0])),
        student=config.student,
        draft=None if draft is None else draft.directory,
        target=None if target is None else target.directory,
        text=TrainingText(
            data=config.data,
            shares=shares,
            seq_len=config.seq_len,
            loss_on=loss_on_of(config.data, config.loss_on) if reads_data else None,
            prompt_tokens=config.prompt_tokens,
            temperature=config.sample_temperature,
            reweighing=reweighing,
        ),
        loop=_loop(config),
        loss=config.loss,
        temperature=config.temperature,
        vocab=config.vocab,
        outputs=config.outputs,
        answers=answers,
        server=server,
        top_logprobs=config.top_logprobs,
        hardware=_hardware(config),
        gradient_checkpointing=config.gradient_checkpointing,
        report_to=config.report_to,
    )
    config.student.check(job)
    return job


def _loop(config: DistillConfig) -> Loop:
    return Loop(
        steps=config.steps,
        lr=config.lr,
        batch_size=config.batch_size,
        seed=config.seed,
        optimizer=config.optimizer,
        weight_decay=config.weight_decay,
        warmup_ratio=config.warmup_ratio,
        dtype=config.training_dtype,
        micro_batch_tokens=config.micro_batch_tokens,
        torch_compile=config.torch_compile,
        eval_steps=config.eval_steps,
        save_steps=config.save_steps,
    )


def _hardware(config: DistillConfig) -> Hardware:
    return Hardware(device=config.device, device_map=config.device_map, memory=config.memory)


def show(result: TrainingResult, config: DistillConfig, out: Path) -> Outcome:
    cost = f"{result.tokens:,} tokens in {result.seconds:.0f} s; held-out loss {result.bits_per_byte:.3f} bits per byte"
    lines = [str(out), cost]
    before = result.before.acceptance
    after = result.after.acceptance
    slack = result.after.slack
    offsets = result.after.offsets
    lengths = result.lengths
    if before is not None and after is not None:
        more = f" (up to {slack:.3f} higher in truth, because only the most probable tokens were stored)"
        served = result.after.temperature
        at = "" if served == 1 else f" at temperature {served:g}" if served else " at temperature 0 (greedy)"
        gain = f"held-out acceptance{at} {before:.3f} -> {after:.3f}"
        lines.append(gain + (more if slack > 0.001 else ""))
    if offsets:
        lines.append("held-out acceptance by position in the draft: " + " ".join(f"{a:.3f}" for a in offsets))
    if lengths:
        chosen = {2, 4, lengths[-1].k} if offsets else {2, 4}
        text = [f"K = {n.k}: {n.before:.2f} -> {n.after}" for n in lengths if n.k in chosen]
        lines.append("tokens per target pass before -> after (95% interval): " + "; ".join(text))
        if not any(n.gain.above(1) for n in lengths):
            lines.append("no significant gain at any K; try more --steps, another --lr or other text")
    if result.skipped_steps:
        lines.append(
            f"{result.skipped_steps:,} of {config.steps:,} steps were skipped, because their loss or gradient norm was "
            "not finite"
        )
    kind = config.student.kind
    drafter: list[object] = ["--drafter", f"{kind}:heads={out}"]
    if config.student.starts_from_draft:
        drafter = ["--draft", out]
    # a comma separates the options of drafters, and a plug-in may have a student without a drafter
    elif "," in str(out) or kind not in DRAFTERS.names():
        drafter = []
    return Outcome(
        path=out,
        show=lines,
        data={"path": str(out), **result.as_dict()},
        next=typed("draftlab", "score", *drafter, *config.repeated("target", "data")),
    )


def _check_models(
    config: DistillConfig,
    draft: Checkpoint | None,
    target: Checkpoint | None,
    *,
    reads_data: bool,
    weights: bool,
) -> None:
    """Check that draft and target can read sequences of this length, share a vocabulary, and have usable weight files.

    Raises:
        UserError: One of these checks fails.
    """
    starts = config.student.starts_from_draft
    for model in filter(None, (draft, target)) if reads_data or not starts else ():
        with about("--seq-len"):
            model.check_length(config.seq_len)
    if starts and draft is not None:
        if target is not None:
            with about("--draft"):
                draft.common_vocabulary(target)
        if config.vocab is not None:
            with about("--vocab"):
                draft.check_trimmable(config.vocab)
    for model in filter(None, (draft if starts else None, target)) if weights else ():
        model.check()


def _answers(config: DistillConfig, target: Checkpoint | None) -> PromptFile | None:
    """Return the prompts that the target answers before training, or None without such prompts.

    The prompts come from --prompt-file. Without this option and with --text target, they may come from the
    conversations in --data. Held-out conversations are left out, because the command `score` takes its prompts from
    them.
    """
    file = config.prompt_file
    of_data = False
    longest = config.max_new_tokens
    if file is not None:
        with about("--prompt-file"):
            check_prompts(file)
    elif config.may_answer_data and is_chat_file(config.data):
        file = Path(config.data)
        of_data = True
    else:
        reason = f"{config.data} has no conversations that the target could answer; add --prompt-file FILE"
        config.note_if_given("max_new_tokens", reason=reason)
    if file is None or target is None:
        return None
    answers = PromptFile(
        name=config.target,
        target=target.directory,
        file=file,
        of_data=of_data,
        chat=config.chat,
        system_prompt=config.system_prompt,
        max_new_tokens=longest,
        temperature=config.sample_temperature,
        seed=config.seed,
        hardware=_hardware(config),
    )
    answers.check(config.temperature)
    return answers
