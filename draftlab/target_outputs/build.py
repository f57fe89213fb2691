"""Build a store of target outputs: by a target in memory or on a server, or from a file of what it wrote."""

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from draftlab import provenance, turns
from draftlab.config.outputs import OutputsBuildConfig, OutputsImportConfig, OutputsVerifyConfig
from draftlab.data import Batch, loss_on_of, open_batches, open_heldout
from draftlab.errors import UserError
from draftlab.model import checkpoint, hub
from draftlab.model.size import read_size
from draftlab.model.tokenizer import known_ids
from draftlab.output import Output
from draftlab.prompts import Prompt, Prompts, data_prompts, file_prompts
from draftlab.sampling import SamplingParams
from draftlab.servers.client import Server
from draftlab.target_outputs.outputs import TEMPERATURES, TargetOutput, split
from draftlab.target_outputs.server_log import ServerLog
from draftlab.target_outputs.store import Manifest, logits_of, vocabulary_sha256, write_store
from draftlab.target_outputs.targets import LocalTarget, ServedTarget, Target

DISTILL_SHARD, REPLAY_SHARD = 256, 32  # sequences; a kill loses at most a shard
HELDOUT_SEQUENCES = 64


def build(config: OutputsBuildConfig, output: Output) -> Manifest:
    """Write the outputs of a target, resuming what a killed build left.

    Raises:
        UserError: settings that do not fit each other, the target or the server; another store in the same place.
    """
    directory = locate_target(config)
    if config.prompt_file is None:
        hub.check_data(config.data)
    sampling = config.sampling(checkpoint.eos_token_ids(directory))
    if sampling is not None and sampling.max_tokens < 1:
        raise UserError(f"--prompt-tokens {config.prompt_length} leaves nothing to write in {config.seq_len} tokens")
    top_logprobs = min(config.listed, _ids(directory, config.server))
    if not config.answers:  # these end sooner than their limit
        per_token = _bytes_per_token(config, top_logprobs, 1 if config.server else len(TEMPERATURES))
        output.check_space(config.num_sequences * config.seq_len * per_token, "the outputs")
    target = open_target(config, directory, sampling, top_logprobs)
    write = _write_answers if config.answers else _write_rows
    manifest = write(config, output.out, target, sampling, top_logprobs)
    inputs = [path for path in (None if config.server else directory, config.prompt_file) if path is not None]
    about = {"server": target.describe()} if isinstance(target, ServedTarget) else {}
    output.record(output.out, inputs, tokens=manifest.tokens, **about)
    return manifest


def estimate(config: OutputsBuildConfig) -> dict[str, object]:
    """Return what a build would compute and write."""
    directory = locate_target(config, weights=False)
    temperatures = 1 if config.server else len(TEMPERATURES)
    k = min(config.listed, _ids(directory, config.server))
    if config.answers:
        prompts = prompts_of(config, directory)
        tokens, sampling = prompts.requests * config.max_new_tokens, config.sampling(())
        assert sampling is not None
        facts = {"prompts": prompts.requests, "tokens": f"at most {tokens:,}", "sampling": sampling.describe()}
        return facts | {"disk": f"at most {tokens * _bytes_per_token(config, k, temperatures) / 1e6:,.3g} MB"}
    tokens = config.num_sequences * config.seq_len
    facts: dict[str, object] = {"tokens": f"{tokens:,}"}
    facts["disk"] = f"about {tokens * _bytes_per_token(config, k, temperatures) / 1e6:,.4g} MB"
    if config.server is None:
        flops = tokens * read_size(directory).flops_per_token(config.seq_len // 2)
        facts["compute"] = f"{flops / 1e12:,.3g} TFLOP"
    return facts


def _bytes_per_token(config: OutputsBuildConfig, k: int, temperatures: int) -> int:
    """Return the bytes of a token: its id, its log-probability where it is sampled, and the lists."""
    return 4 + 4 * config.writes + (6 * k + 6 + 4 * temperatures if k else 0)


def open_target(
    config: OutputsBuildConfig | OutputsVerifyConfig, directory: Path, sampling: SamplingParams | None, k: int
) -> Target:
    """Return the target of these settings, able to write with sampling (None: only to score) and to list k tokens."""
    if config.server is not None:
        server = Server.connect(config.server, config.served_model, config.api_key_file)
        return ServedTarget.connected(server, directory, sampling, k)
    checkpoint.check(directory)
    device = checkpoint.resolve_device(config.device)
    dtype = None if config.weights_dtype is None else checkpoint.resolve_dtype(config.weights_dtype, device)
    batch_size = config.decoded_together if isinstance(config, OutputsBuildConfig) else 1
    return LocalTarget(directory, device, dtype, config.device_map, config.memory, batch_size)


def locate_target(config: OutputsBuildConfig | OutputsVerifyConfig, weights: bool = True) -> Path:
    """Return the directory of the target's tokenizer, and of the target itself unless a server runs it."""
    return config.tokenizer or hub.locate(config.target, weights=weights and config.server is None)


def _write_rows(
    config: OutputsBuildConfig, out: Path, target: Target, sampling: SamplingParams | None, k: int
) -> Manifest:
    """Write rows of training text, or what the target writes after their starts, and a few of held-out text."""
    if not k:
        raise UserError("--top-logprobs 0 leaves nothing to distil from; take 1 or more")
    tokenizer, seq_len, planned = checkpoint.load_tokenizer(target.directory), config.seq_len, config.num_sequences

    loss_on = loss_on_of(config.data, config.loss_on)
    if loss_on is not None and sampling is not None:
        raise UserError("--text target: the data has conversations; --prompt-file lets the target answer prompts")

    @functools.cache
    def batches() -> Callable[[int], Batch]:
        steps = -(-planned // DISTILL_SHARD)
        return open_batches(
            config.data, tokenizer, rows=DISTILL_SHARD, seq_len=seq_len, steps=steps, seed=config.seed,
            loss_on=loss_on,
        ).batch  # fmt: skip

    def outputs(batch: Batch, first: int) -> list[TargetOutput]:
        if sampling is None:
            return split(batch, target.score(batch, k), first)
        prompts = [Prompt(ids) for ids in batch.ids[:, : config.prompt_length].tolist()]
        return target.generate(prompts, range(first, first + len(prompts)), sampling, k)

    def shard(number: int) -> list[TargetOutput]:
        first = number * DISTILL_SHARD
        return outputs(batches()(number).rows(slice(0, planned - first)), first)

    def heldout() -> list[TargetOutput]:
        windows = open_heldout(
            config.data, tokenizer, rows=HELDOUT_SEQUENCES, seq_len=seq_len, most_rows=HELDOUT_SEQUENCES,
            loss_on=loss_on,
        )  # fmt: skip
        return outputs(windows.batches[0], planned)  # numbers, and with them seeds, of no training sequence

    manifest = _manifest(
        target, text=config.text, data=config.data, loss_on=loss_on, data_sha256=None,
        prompt_tokens=config.prompt_length, sampling=sampling, top_logprobs=k, seq_len=seq_len, seed=config.seed,
        planned=planned,
    )  # fmt: skip
    return write_store(out, manifest, shard, tokenizer=target.directory, heldout=heldout)


def _write_answers(
    config: OutputsBuildConfig, out: Path, target: Target, sampling: SamplingParams | None, k: int
) -> Manifest:
    """Write prompts with the target's answers.

    To replay, the longest prompts come first: what fits in memory shows at once. To distil, the order is random, and
    some answers are held out, with all turns of their conversations.

    Raises:
        UserError: a prompt with its answer does not fit the context; too few prompts to hold some out.
    """
    assert sampling is not None
    prompts = _answered(prompts_of(config, target.directory), target, sampling)
    target.check_length(prompts.longest, sampling.max_tokens)
    size, apart = REPLAY_SHARD, 0
    order = sorted(range(len(prompts.rows)), key=lambda i: -len(prompts.rows[i].ids))
    if config.use == "distill":
        size, apart = DISTILL_SHARD, min(HELDOUT_SEQUENCES, len(prompts.rows) // 10)
        random.Random(config.seed).shuffle(order)
        if not apart or not k:
            missing = "--top-logprobs 0 leaves nothing" if apart else f"{len(prompts.rows)} prompts are too few"
            raise UserError(
                f"{missing} to distil from and to evaluate on; take 1 log-probability and 10 prompts or more"
            )
    heldout = _whole_conversations(prompts, order[:apart])
    set_aside = set(heldout)
    written = [number for number in order if number not in set_aside]

    def answers(numbers: Sequence[int]) -> list[TargetOutput]:
        return target.generate([prompts.rows[i] for i in numbers], numbers, sampling, k)

    def shard(number: int) -> list[TargetOutput]:
        return answers(written[number * size : (number + 1) * size])

    manifest = _manifest(
        target, text="target", data=prompts.source, chat=prompts.chat, data_sha256=prompts.sha256,
        prompt_tokens=prompts.tokens, categories=prompts.categories, sampling=sampling, top_logprobs=k,
        seq_len=None, seed=config.seed, planned=len(written),
    )  # fmt: skip
    held_out = functools.partial(answers, heldout) if apart else None
    return write_store(out, manifest, shard, tokenizer=target.directory, heldout=held_out)


def _answered(prompts: Prompts, target: Target, sampling: SamplingParams) -> Prompts:
    """Return a prompt for every turn."""

    def answer(asked: list[Prompt], numbers: list[int]) -> list[list[int]]:
        return [output.ids.tolist() for output in target.generate(asked, numbers, sampling, 0)]

    tokenizer, info = checkpoint.load_tokenizer(target.directory), target.info()
    name = info.target_sha256 or f"{info.source} {info.target}"
    return turns.answered(prompts, tokenizer, target=name, sampling=sampling, answer=answer)


def _whole_conversations(prompts: Prompts, numbers: list[int]) -> list[int]:
    """Return numbers with those of the other turns of their conversations."""
    talks, already = [prompt.conversation for prompt in prompts.rows], set(numbers)
    chosen = {talks[number] for number in numbers}
    return numbers + [i for i, talk in enumerate(talks) if talk in chosen and i not in already]


def _manifest(target: Target, *, sampling: SamplingParams | None, **facts: object) -> Manifest:
    info = asdict(target.info())
    info |= {} if sampling is not None else {"logprobs": "none"}
    return Manifest.model_validate(
        info | facts | {"sampling": sampling, "tokenizer_sha256": vocabulary_sha256(target.directory)}
        | {"versions": provenance.versions()}
    )  # fmt: skip


def import_file(config: OutputsImportConfig, output: Output) -> Manifest:
    """Write the sequences of a server's log.

    Raises:
        UserError: a file that is not in the format, or does not fit the tokenizer.
    """
    directory = config.tokenizer or hub.locate(config.target, weights=False)
    log = ServerLog.open(
        config.file, vocab=logits_of(directory), seq_len=config.seq_len,
        top_logprobs=min(config.top_logprobs, logits_of(directory)),
    )  # fmt: skip
    trained, heldout = log.split(HELDOUT_SEQUENCES)
    manifest = Manifest(
        source="log", target=hub.checkpoint_name(directory), target_sha256=None, vocab=log.vocab,
        tokenizer_sha256=vocabulary_sha256(directory), dtype="as served", batch_size=1, text="target",
        data=config.file.name, data_sha256=provenance.file_sha256(config.file), prompt_tokens=None, sampling=None,
        logprobs="raw", top_logprobs=log.top_logprobs, temperatures=(1.0,), seq_len=config.seq_len, seed=0,
        planned=len(trained), versions=provenance.versions(),
    )  # fmt: skip

    def shard(number: int) -> list[TargetOutput]:
        return log.outputs(trained[number * DISTILL_SHARD : (number + 1) * DISTILL_SHARD])

    manifest = write_store(output.out, manifest, shard, tokenizer=directory, heldout=lambda: log.outputs(heldout))
    output.record(output.out, [config.file])
    return manifest


def prompts_of(config: OutputsBuildConfig, directory: Path) -> Prompts:
    tokenizer = checkpoint.load_tokenizer(directory)
    if config.prompt_file is not None:
        return file_prompts(
            config.prompt_file, tokenizer, count=config.num_prompts, tokens=config.prompt_length, chat=config.chat,
            system_prompt=config.system_prompt, split=None if config.prompt_split == "all" else config.prompt_split,
        )  # fmt: skip
    return data_prompts(
        config.data, tokenizer, count=config.prompts_of_data, tokens=config.prompt_length or 0, seed=config.seed
    )


def _ids(directory: Path, server: str | None) -> int:
    """Return how many ids can be listed."""
    return known_ids(directory) if server is None else logits_of(directory)
