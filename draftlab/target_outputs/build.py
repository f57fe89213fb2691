"""Build a store of target outputs from a target in memory, a target on a server, or the log of a server.

A log has one JSON line per request, with the target's top log-probabilities (docs/formats.md).
"""

import functools
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ConfigDict, Field, model_validator

from draftlab.console import note
from draftlab.data import (
    Batch,
    grouped_holdout,
    loss_on_of,
    note_repeated,
    open_batches,
    open_heldout,
    turns,
)
from draftlab.data.bad_rows import BadRows
from draftlab.data.prompts import Prompt, Prompts, selection
from draftlab.dates import asks_for_date, run_date
from draftlab.errors import UserError
from draftlab.model import checkpoint, hub
from draftlab.model.size import read_size
from draftlab.output import Output
from draftlab.quantities import format_bytes
from draftlab.reading import open_bytes, parse_json, read_lines, reading
from draftlab.runs import provenance
from draftlab.sampling import SamplingParams
from draftlab.servers.kinds import RowError, ServedCompletion, TokenId, completion, top_k
from draftlab.target_outputs.outputs import TEMPERATURES, TargetOutput, split
from draftlab.target_outputs.store import Manifest, vocabulary_sha256, write_store
from draftlab.target_outputs.targets import SEEDS, ServedTarget, Target, outputs_of

HELDOUT_SHARE = 1 / 12  # share of a log's lines that is held out


class _Line(ServedCompletion):
    """A request in a server's log: its tokens and, for each generated token, the most probable tokens in any order."""

    model_config = ConfigDict(strict=True, extra="forbid")

    # a prompt has at least one token, such as bos
    prompt_ids: list[TokenId] = Field(min_length=1)

    @model_validator(mode="after")
    def _has_a_list_for_each_token(self) -> "_Line":
        if len(self.top_ids) < len(self.ids) or not all(self.top_ids):
            raise ValueError("a token of ids has no list in top_ids, or an empty list")
        return self

    def completion(self, most: int | None = None) -> ServedCompletion:
        """Return the request as a completion, with each list sorted by probability, the most probable token first.

        most: Number of generated tokens to which the completion is cut.
        """
        rows = zip(self.top_ids[:most], self.top_logprobs[:most], strict=True)
        tops = [top_k([*zip(*row, strict=True)], len(row[0])) for row in rows]
        ended = self.finish_reason if most is None or len(self.ids) <= most else None
        return completion(self.prompt_ids, (self.ids[:most], ended), self.logprobs[:most], tops)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLog:
    """The usable lines of a server's log: those with generated tokens, and with a prompt of at most seq_len tokens.

    Each generated token has a list of at least top_logprobs most probable tokens.
    """

    path: Path
    vocab: int
    seq_len: int
    top_logprobs: int
    starts: list[int]  # first byte of each line
    keys: list[str]  # hash of the prompt of each line

    @classmethod
    def open(cls, path: Path, *, vocab: int, seq_len: int, top_logprobs: int) -> "ServerLog":
        """Open a server's log and check every line.

        Args:
            top_logprobs: Largest number of tokens to use from each list. All lists are cut to the shortest list.

        Raises:
            UserError: There is no such file, too many lines are bad, or fewer than two lines are usable.
        """
        starts = list[int]()
        keys = list[str]()
        shortest = top_logprobs
        left_out = 0
        bad = BadRows(str(path))
        for number, start, text in read_lines(path):
            bad.total += 1
            line: _Line | None = None
            with bad.leaving_out(where := f"{path}:{number}"):
                line = _checked(text, where, vocab)
            if line is None:
                continue
            if line.ids and len(line.prompt_ids) <= seq_len:
                starts.append(start)
                # a hash, since a log may have millions of long prompts
                keys.append(hashlib.sha256(str(line.prompt_ids).encode()).hexdigest()[:16])
                shortest = min(shortest, *map(len, line.top_ids))
            else:
                left_out += 1
        bad.settle()
        if left_out:
            note(
                f"{path}: {left_out} lines are left out, because they have no generated tokens, or a prompt of more "
                f"than {seq_len} tokens (--seq-len)"
            )
        if len(starts) < 2:
            raise UserError(
                f"{path} has {len(starts)} usable lines, but needs 2 or more, because at least 1 is held out; add lines"
            )
        if shortest < top_logprobs:
            note(
                f"{path}: only {shortest} tokens per list are stored, not {top_logprobs}, because the shortest list "
                "has no more"
            )
        return cls(path=path, vocab=vocab, seq_len=seq_len, top_logprobs=shortest, starts=starts, keys=keys)

    def split(self) -> tuple[list[int], list[int]]:
        """Return the indices of the lines to train on, and of about HELDOUT_SEQUENCES or fewer lines to hold out.

        A hash of the prompts decides. Lines with the same prompt stay together.

        Raises:
            UserError: All lines have the same prompt.
        """
        every = range(len(self.starts))
        count = min(HELDOUT_SEQUENCES, max(1, round(HELDOUT_SHARE * len(every))))
        heldout = sorted(grouped_holdout(self.keys, None, count))
        if not heldout:
            raise UserError(
                f"{self.path}: all {len(every)} usable lines have the same prompt, so none can be held out; add lines "
                "with other prompts"
            )
        return sorted(set(every) - set(heldout)), heldout

    def outputs(self, which: Sequence[int]) -> list[TargetOutput]:
        """Return the usable lines of the log at the indices `which`, as TargetOutputs.

        The prompt and the answer of a line are cut to seq_len + 1 tokens together.
        """
        written = []
        with open_bytes(self.path) as stream:
            for i in which:
                stream.seek(self.starts[i])
                line = _Line.model_validate_json(stream.readline())
                written.append(line.completion(self.seq_len + 1 - len(line.prompt_ids)))
        return outputs_of(written, which, self.top_logprobs)


def _checked(text: bytes, where: str, vocab: int) -> _Line:
    """Parse a line of a log. Raises UserError: the line is invalid. The message names `where` and the first error."""
    with reading(where):
        line = _Line.model_validate(parse_json(text))
        # outputs_of compares the log-probability of each token with its list
        outputs_of([line.completion()], [0], min(map(len, line.top_ids), default=0))
    largest = max(chain(line.prompt_ids, line.ids, *line.top_ids))
    if largest >= vocab:
        raise UserError(
            f"{where}: id {largest} is outside the tokenizer's {vocab:,} ids; name the server's model by --target"
        )
    return line


# sequences per shard; a kill loses at most one shard
DISTILL_SHARD = 256
REPLAY_SHARD = 32
# prompts decoded together
DISTILL_BATCH = 64
REPLAY_BATCH = 32
DISTILL_TOP_LOGPROBS = 64
HELDOUT_SEQUENCES = 64
# at most one prompt in ten is held out, so of fewer prompts no prompt could be held out
LEAST_PROMPTS = 10
Use = Literal["distill", "replay"]


def batch_size(use: Use, device: torch.device) -> int:
    """Return the number of prompts that a target in memory decodes together.

    A GPU decodes a whole shard to distil from. A step of 128 texts of SmolLM2-135M kept an H200 busy for 5 of 18 ms.
    """
    if use == "replay":
        return REPLAY_BATCH
    return DISTILL_SHARD if device.type == "cuda" else DISTILL_BATCH


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of text from a data source, on which the target's outputs are stored for distillation.

    If sampling is None, the target scores the rows. Otherwise it continues the first prompt_tokens tokens of each row.
    """

    data: str
    count: int
    seq_len: int
    seed: int
    prompt_tokens: int | None = None
    sampling: SamplingParams | None = None

    @property
    def tokens(self) -> int:
        return self.count * self.seq_len

    def write(self, out: Path, target: Target, k: int, inputs: Mapping[str, str], bad: BadRows) -> Manifest:
        """Write a store of the target's outputs for the rows, and for up to HELDOUT_SEQUENCES rows of held-out text.

        Args:
            k: Number of most probable tokens to store at each position.
            inputs: Fingerprints of the text, by path or name.
            bad: Account of the rows that a server refuses.
        """
        tokenizer = checkpoint.load_tokenizer(target.directory)
        ends = checkpoint.eos_token_ids(target.directory)
        loss_on = loss_on_of(self.data, None)
        batches = open_batches(
            self.data,
            tokenizer,
            rows=DISTILL_SHARD,
            seq_len=self.seq_len,
            steps=-(-self.count // DISTILL_SHARD),
            seed=self.seed,
            loss_on=loss_on,
            stop_token_ids=ends,
        )

        def outputs(batch: Batch, first: int) -> Sequence[TargetOutput | None]:
            if self.sampling is None:
                return split(batch, target.score(batch, k), first)
            prompts = [Prompt(ids) for ids in batch.ids[:, : self.prompt_tokens].tolist()]
            numbers = range(first, first + len(prompts))
            return _answered(target.generate(prompts, numbers, self.sampling, k), numbers, bad)

        def shard(number: int) -> Sequence[TargetOutput | None]:
            first = number * DISTILL_SHARD
            return outputs(batches.batch(number).rows(slice(0, self.count - first)), first)

        def heldout() -> Sequence[TargetOutput | None]:
            windows = open_heldout(
                self.data,
                tokenizer,
                rows=HELDOUT_SEQUENCES,
                seq_len=self.seq_len,
                most_rows=HELDOUT_SEQUENCES,
                loss_on=loss_on,
                stop_token_ids=ends,
            )
            # held-out rows are numbered from self.count on, so their seeds differ from those of all training rows
            return outputs(windows.batches[0], self.count)

        manifest = _manifest(
            target,
            text="data" if self.sampling is None else "target",
            data=self.data,
            loss_on=loss_on,
            prompt_tokens=self.prompt_tokens,
            sampling=self.sampling,
            top_logprobs=k,
            seq_len=self.seq_len,
            seed=self.seed,
            planned=self.count,
            inputs=dict(inputs),
        )
        return write_store(out, manifest, shard, tokenizer=target.directory, heldout=heldout)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetAnswers:
    """Prompts for the target to answer. An answer ends when the target stops, or after sampling.max_tokens tokens.

    In a store to replay, the longest prompts come first, so that a lack of memory shows at once. In a store to distil
    from, the order of the prompts is random, and some prompts are held out, with all prompts of their conversations.
    """

    prompts: Prompts
    use: Use
    sampling: SamplingParams
    seed: int

    @property
    def tokens(self) -> int:
        """Return the largest number of tokens that the target may write."""
        return self.prompts.requests * self.sampling.max_tokens

    def check(self, k: int) -> None:
        """Check that a store to distil from gets enough prompts and at least one token per list.

        Raises:
            UserError: There are fewer than LEAST_PROMPTS prompts, or k is 0.
        """
        if self.use == "replay":
            return
        if not k:
            raise UserError("--top-logprobs 0 stores no probabilities to distil from; use 1 or more, or --use replay")
        if self.prompts.requests < LEAST_PROMPTS:
            few = f"{self.prompts.source}: {self.prompts.requests} prompts are too few"
            raise UserError(
                f"{few} to distil on, because some prompts are held out; give {LEAST_PROMPTS} prompts or more"
            )

    def write(self, out: Path, target: Target, k: int, inputs: Mapping[str, str], bad: BadRows) -> Manifest:
        """Write a store of the prompts and the target's answers.

        Args:
            k: Number of most probable tokens to store at each position.
            inputs: Fingerprints of the prompts, by path or name.
            bad: Account of the prompts that a server refuses.

        Raises:
            UserError: A prompt and its answer do not fit the context, or self.check raises it.
        """
        self.check(k)
        if self.use == "distill":
            first = {prompt.conversation: prompt.key for prompt in self.prompts.rows}
            note_repeated(self.prompts.source, list(first.values()))
        prompts = self._with_all_turns(target)
        target.check_length(prompts.longest, self.sampling.max_tokens)
        talks = prompts.conversations
        written = sorted(range(len(prompts.rows)), key=lambda i: -len(prompts.rows[i].ids))
        size = REPLAY_SHARD
        heldout = list[int]()
        if self.use == "distill":
            size = DISTILL_SHARD
            apart = min(HELDOUT_SEQUENCES, len(written) // LEAST_PROMPTS)
            random.Random(self.seed).shuffle(written)
            heldout = grouped_holdout(list(map(str, talks)), written, apart)
            if not heldout:
                raise UserError(
                    f"{prompts.source}: all prompts begin with the same message of the user, so none can be held out; "
                    "add other prompts"
                )
            chosen = set(heldout)
            written = [number for number in written if number not in chosen]

        def answers(numbers: Sequence[int]) -> Sequence[TargetOutput | None]:
            asked = [prompts.rows[i] for i in numbers]
            found = _answered(target.generate(asked, numbers, self.sampling, k), numbers, bad)
            return [output and replace(output, conversation=talks[output.number]) for output in found]

        def shard(number: int) -> Sequence[TargetOutput | None]:
            return answers(written[number * size : (number + 1) * size])

        manifest = _manifest(
            target,
            text="target",
            data=prompts.source,
            chat=prompts.chat,
            selection=selection(prompts.rows[number] for number in sorted(written)),
            prompt_tokens=prompts.tokens,
            categories=prompts.categories,
            sampling=self.sampling,
            top_logprobs=k,
            seed=self.seed,
            planned=len(written),
            inputs=dict(inputs),
        )
        held_out = functools.partial(answers, heldout) if heldout else None
        return write_store(out, manifest, shard, tokenizer=target.directory, heldout=held_out)

    def _with_all_turns(self, target: Target) -> Prompts:
        """Return a prompt for every turn of every conversation. The target first answers the earlier turns."""

        def answer(asked: list[Prompt], numbers: list[int]) -> list[list[int] | UserError]:
            written: list[list[int] | UserError] = []
            # a server has as many seeds for the prompts of a call
            for start in range(0, len(asked), SEEDS):
                part = slice(start, start + SEEDS)
                for output in target.generate(asked[part], numbers[part], self.sampling, None):
                    written.append(output if isinstance(output, RowError) else output.ids.tolist())
            return written

        tokenizer = checkpoint.load_tokenizer(target.directory)
        info = target.info()
        name = info.target_sha256 or f"{info.source} {info.target}"
        return turns.answered(self.prompts, tokenizer, target=name, sampling=self.sampling, answer=answer)


def build(target: Target, text: Rows | TargetAnswers, k: int, output: Output) -> Manifest:
    """Write a store of a target's outputs, with lists of the k most probable tokens. A killed build resumes.

    Raises:
        UserError: The text does not fit the target or the server, the output directory has another store, or the disk
            is full.
    """
    served = isinstance(target, ServedTarget)
    # the space for answers is not checked, because most answers end before the limit
    if isinstance(text, Rows):
        output.check_space(text.tokens * bytes_per_token(text, k, served), "the outputs")
    inputs = output.inputs()
    facts = dict[str, object]()
    output.inputs([target.directory])
    if isinstance(target, ServedTarget):
        # the server has the weights, and draftlab the tokenizer with its chat template
        name = f"tokenizer of {hub.checkpoint_name(target.directory)}"
        inputs[name] = provenance.fingerprint(target.directory)
        facts["server"] = target.describe()
    rows = text.count if isinstance(text, Rows) else text.prompts.requests
    bad = BadRows(str(output.out), rows)
    manifest = text.write(output.out, target, k, inputs, bad)
    bad.settle()
    output.record(output.out, tokens=manifest.tokens, **facts)
    return manifest


def _answered(
    outputs: Sequence[TargetOutput | RowError], numbers: Sequence[int], bad: BadRows
) -> list[TargetOutput | None]:
    """Return the outputs of rows with these numbers, with None for rows that a server cannot answer.

    Raises:
        UserError: Too many rows are bad.
    """
    answered: list[TargetOutput | None] = []
    for output, number in zip(outputs, numbers, strict=True):
        if isinstance(output, RowError):
            bad.leave_out(f"row {number + 1}", output.reason, limited=output.limited)
        answered.append(None if isinstance(output, RowError) else output)
    bad.check()
    return answered


def bytes_per_token(text: Rows | TargetAnswers, k: int, served: bool) -> int:
    """Return the bytes stored for a token: its id, the log-probability of a sampled token, and the list of k tokens."""
    size = 4 if text.sampling is None else 8
    temperatures = 1 if served else len(TEMPERATURES)
    return size + 6 * k + 6 + 4 * temperatures if k else size


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStorage:
    """The storage of a server's log. directory: Checkpoint or tokenizer of the server's model."""

    log: ServerLog
    directory: Path

    @property
    def name(self) -> str:
        return f"outputs-{self.log.path.stem}"

    def facts(self) -> Mapping[str, object]:
        """Return the facts that a dry run shows."""
        return {"requests": len(self.log.starts), "listed tokens": self.log.top_logprobs}

    def run(self, output: Output) -> Manifest:
        """Write a store of the sequences in the log."""
        log = self.log
        trained, heldout = log.split()
        manifest = Manifest(
            source="log",
            target=hub.checkpoint_name(self.directory),
            target_sha256=None,
            vocab=log.vocab,
            tokenizer_sha256=vocabulary_sha256(self.directory),
            dtype="as served",
            batch_size=1,
            text="target",
            data=log.path.name,
            data_sha256=provenance.file_sha256(log.path),
            logprobs="raw",
            top_logprobs=log.top_logprobs,
            temperatures=(1.0,),
            seq_len=log.seq_len,
            seed=0,
            split="content",
            planned=len(trained),
            inputs=output.inputs(),
            versions=provenance.versions(),
        )

        def shard(number: int) -> list[TargetOutput]:
            return log.outputs(trained[number * DISTILL_SHARD : (number + 1) * DISTILL_SHARD])

        manifest = write_store(
            output.out, manifest, shard, tokenizer=self.directory, heldout=lambda: log.outputs(heldout)
        )
        output.record(output.out)
        return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputsStorage:
    """The storage of a target's outputs for text.

    Attributes:
        name: Default name of the output directory.
        directory: Directory of the target, or of its tokenizer.
        target: The target. None in a dry run without the server that runs the target.
        k: Number of log-probabilities to store for each token.
        served: Whether a server runs the target.
    """

    name: str
    directory: Path
    target: Target | None
    text: Rows | TargetAnswers
    k: int
    served: bool

    def facts(self) -> Mapping[str, object]:
        """Return the facts that a dry run shows."""
        text = self.text
        facts: dict[str, object] = {}
        most = ""
        if isinstance(text, TargetAnswers):
            facts["prompts"] = text.prompts.requests
            most = "at most "
        facts["tokens"] = f"{most}{text.tokens:,}"
        if text.sampling is not None:
            facts["sampling"] = text.sampling.describe()
        facts["disk"] = f"{most}{format_bytes(text.tokens * bytes_per_token(text, self.k, self.served))}"
        if isinstance(text, Rows) and not self.served:
            facts["flops"] = text.tokens * read_size(self.directory).flops_per_token(text.seq_len // 2)
        return facts

    def run(self, output: Output) -> Manifest:
        assert self.target is not None  # only a dry run has no target
        return build(self.target, self.text, self.k, output)


def _manifest(target: Target, *, sampling: SamplingParams | None, **facts: Any) -> Manifest:
    info = target.info().model_dump() | facts
    if sampling is None:
        info["logprobs"] = "none"
    template = checkpoint.load_tokenizer(target.directory).chat_template
    return Manifest(
        **info,
        sampling=sampling,
        split="content",
        tokenizer_sha256=vocabulary_sha256(target.directory),
        date=run_date() if asks_for_date(template) else "",
        versions=provenance.versions(),
    )
