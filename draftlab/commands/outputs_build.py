"""The command outputs build, which stores a target's text and probabilities."""

from dataclasses import replace
from pathlib import Path

from draftlab.commands.base import Outcome
from draftlab.commands.models import located_target
from draftlab.commands.stores import served_target, shown
from draftlab.config.outputs import OutputsBuildConfig
from draftlab.data import is_chat_file, loss_on_of
from draftlab.data.prompts import Prompts, file_prompts, load_prompts
from draftlab.errors import UserError, about
from draftlab.model import checkpoint, devices, hub
from draftlab.model.modes import engine_runs, resolve_mode
from draftlab.model.precision import READING, choose
from draftlab.model.tokenizer import known_ids
from draftlab.runs import workspace
from draftlab.sampling import SamplingParams
from draftlab.shell import typed
from draftlab.target_outputs.build import (
    DISTILL_TOP_LOGPROBS,
    LogStorage,
    OutputsStorage,
    Rows,
    ServerLog,
    TargetAnswers,
    batch_size,
)
from draftlab.target_outputs.store import Manifest, logits_of, resume_date_of
from draftlab.target_outputs.targets import LocalTarget, Target

PROMPTS_OF_DATA = 64
START_TOKENS = 32  # default number of tokens of data that the target continues


def prepare(config: OutputsBuildConfig, weights: bool) -> LogStorage | OutputsStorage:
    """Resolve and check the settings of the command `outputs build`, and return the job.

    weights: Whether weight files must be present, and a server must answer.

    Raises:
        UserError: The target, the text or the log is missing, or they do not fit together. Or no draft could be
            distilled from these outputs.
    """
    served = config.server is not None
    file = config.from_file
    directory = located_target(config.target, tokenizer_only=served or file is not None, weights=weights)
    listed = config.top_logprobs
    if listed is None:
        listed = 0 if config.use == "replay" else DISTILL_TOP_LOGPROBS
    if file is not None:
        vocab = logits_of(directory)
        with about("--from"):
            log = ServerLog.open(file, vocab=vocab, seq_len=config.seq_len, top_logprobs=min(listed, vocab))
        return LogStorage(log=log, directory=directory)
    k = min(listed, logits_of(directory) if served else known_ids(directory))
    name = f"outputs-{config.use}-{hub.checkpoint_name(directory)}"
    resume_date_of(config.out or workspace.load().runs / name)
    text = _text(config, directory)
    if isinstance(text, TargetAnswers):
        text.check(k)
    elif not k:
        raise UserError("--top-logprobs 0: drafts can be distilled only from stored probabilities; use 1 or more")
    target = _target(config, directory, text.sampling, k) if weights or not served else None
    if target is not None and isinstance(text, TargetAnswers):
        with about("--max-new-tokens"):
            target.check_length(text.prompts.longest, text.sampling.max_tokens)
    return OutputsStorage(name=name, directory=directory, target=target, text=text, k=k, served=served)


def show(manifest: Manifest, config: OutputsBuildConfig, out: Path) -> Outcome:
    then = ["distill", "--outputs"] if manifest.top_logprobs else ["replay"]
    return replace(shown(out, manifest, {}), next=typed("draftlab", *then, out))


def _text(config: OutputsBuildConfig, directory: Path) -> Rows | TargetAnswers:
    """Return the text to store: rows of data that the target reads or continues, or prompts that the target answers.

    Raises:
        UserError: The data or prompts are missing, or a setting does not fit them.
    """
    temperature = config.temperature
    if temperature is None:
        temperature = 1.0 if config.use == "distill" else 0.0
    stop = checkpoint.eos_token_ids(directory)
    sampling = SamplingParams(
        temperature=temperature,
        max_tokens=config.max_new_tokens,
        seed=config.seed,
        stop_token_ids=stop,
    )
    chats = not config.answers and config.text == "target" and is_chat_file(config.data)
    if chats:
        if config.is_set("num_sequences"):
            raise UserError("--num-sequences: the target answers the conversations of the data; use --num-prompts")
        config.note_if_given("seq_len", reason="the target answers the conversations of the data")
    if config.answers or chats:
        with about("--data" if config.prompt_file is None else "--prompt-file"):
            prompts = _prompts(config, directory, chats)
        return TargetAnswers(prompts=prompts, use=config.use, sampling=sampling, seed=config.seed)
    lacks = f"--data {config.data} has no conversations"
    if config.num_prompts is not None:
        raise UserError(f"--num-prompts: works only with prompts, but {lacks}; add --prompt-file FILE")
    config.note_if_given("chat", "max_new_tokens", reason=f"works only with prompts, but {lacks}")
    with about("--seq-len"):
        checkpoint.Checkpoint(directory).check_length(config.seq_len)
    rows = Rows(data=config.data, count=config.num_sequences, seq_len=config.seq_len, seed=config.seed)
    if config.text == "data":
        return rows
    starts = config.prompt_tokens or START_TOKENS
    if starts > rows.seq_len:
        raise UserError(
            f"--prompt-tokens {starts} leaves no room for generated text in --seq-len {rows.seq_len}; lower "
            "--prompt-tokens"
        )
    if loss_on_of(rows.data, None) is not None:
        raise UserError(
            "--text target: the data has conversations, which the target can answer only if --data is a single file; "
            "name this file"
        )
    sampling = replace(sampling, max_tokens=rows.seq_len + 1 - starts)
    return replace(rows, prompt_tokens=starts, sampling=sampling)


def _prompts(config: OutputsBuildConfig, directory: Path, chats: bool) -> Prompts:
    """Return the prompts that the target answers.

    chats: Whether the prompts are the conversations of --data that are not held out.
    """
    tokenizer = checkpoint.load_tokenizer(directory)
    if chats:
        return file_prompts(
            Path(config.data),
            tokenizer,
            count=config.num_prompts,
            tokens=config.prompt_tokens,
            chat=config.chat,
            split="train",
        )
    return load_prompts(
        config.prompt_file,
        config.data,
        tokenizer,
        count=config.num_prompts,
        tokens=config.prompt_tokens,
        seed=config.seed,
        chat=config.chat,
        from_data=PROMPTS_OF_DATA,
    )


def _target(config: OutputsBuildConfig, directory: Path, sampling: SamplingParams | None, k: int) -> Target:
    """Return the target: a checkpoint, which is not loaded yet, or a server.

    Args:
        sampling: Parameters with which the target writes text. None if the target only scores text.
        k: Number of log-probabilities that a server lists for each token.
    """
    if config.server is not None:
        return served_target(config, config.server, directory, sampling, k)
    with about("--device"):
        device = devices.resolve_device(config.device)
    name = config.dtype or (workspace.load().dtype if config.use == "replay" else None)
    if name is None and config.writes and device.type == "cpu":
        name = "auto"  # text is written in native passes of few tokens, which may be faster in 16 bits
    if config.int8:
        resolve_mode("auto", device, None, [directory], int8=True)
    dtype = None
    if name is not None:
        hosted = config.device_map is not None or not engine_runs(directory)
        mode = "eager" if hosted else resolve_mode("auto", device, None, [])
        dtype = choose(name, device, mode, directory, passes=READING).dtype
    return LocalTarget(
        directory,
        device,
        dtype,
        config.device_map,
        batch_size=batch_size(config.use, device),
        int8=config.int8,
    )
