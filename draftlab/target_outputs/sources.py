"""Where traces come from: prompts, and a target in memory, on a server, or in a file of the paper's scripts."""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from draftlab import provenance
from draftlab.console import progress
from draftlab.engine.batch_generate import BatchSettings, Completion, generate_batch
from draftlab.errors import UserError
from draftlab.model.decoder import Decoder
from draftlab.prompts import Prompt, Prompts
from draftlab.sampling import SamplingParams
from draftlab.servers import adapters
from draftlab.servers.client import Server
from draftlab.target_outputs.cache import tokenizer_sha
from draftlab.target_outputs.logprob_sources import same_ids, vocab_of
from draftlab.target_outputs.traces import SHARD_TEXTS, Decoding, Manifest, Writer, claim, record

Logprobs = Literal["sampled", "raw", "none"]
LOGPROBS: dict[str, Logprobs] = {"raw_logprobs": "raw", "processed_logprobs": "sampled"}
TENSOR = re.compile(r"tensor\(\s*\[\[(.*?)\]\]", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What wrote a trace; see Manifest."""

    target: str
    target_sha256: str | None
    written_by: str
    dtype: str
    rows: int
    logprobs: Logprobs


def run(
    out: Path,
    about: About,
    start: Callable[[], Writer],
    prompts: Prompts,
    decoding: Decoding,
    *,
    top: int,
    tokenizer_from: Path,
) -> Manifest:
    """Record what is missing of the trace in out; the writer is started only if something is.

    Raises:
        UserError: out holds something else, or cannot be written.
    """
    manifest = Manifest(
        **asdict(about), tokenizer_sha256=tokenizer_sha(tokenizer_from), vocab=vocab_of(tokenizer_from),
        decoding=decoding, top=top, prompts=prompts.source, prompts_sha256=prompts.sha256, prompt_tokens=prompts.tokens,
        categories=prompts.categories, planned=len(prompts.rows), versions=provenance.versions(),
    )  # fmt: skip
    held = claim(out, manifest)
    if held.texts == held.planned:
        return held
    writer = start()
    with progress("trace", len(prompts.rows)) as advance:
        return record(out, manifest, prompts.rows, writer, tokenizer_from, advance)


@dataclass(frozen=True, slots=True)
class LocalWriter:
    """A target in memory."""

    decoder: Decoder
    sampling: SamplingParams
    settings: BatchSettings

    def write(self, prompts: list[list[int]], numbers: list[int]) -> list[Completion]:
        """As Writer says. Raises UserError: a prompt and its text do not fit the target's context."""
        return generate_batch(self.decoder, prompts, self.sampling, self.settings, numbers=numbers)


class ServedWriter:
    """A target on a server.

    Raises:
        UserError: its tokenizer is another one, or it samples where it should be greedy.
    """

    def __init__(self, server: Server, decoding: Decoding, top: int, tokenizer: Path) -> None:
        self.server, self.decoding, self.top = server, decoding, top
        probe = server.probe(same_ids(server, tokenizer))
        if decoding.temperature == 0 and not probe.greedy:
            raise UserError(f"{server.model} on the server does not decode greedily at temperature 0")
        self.logprobs: Logprobs = LOGPROBS.get(probe.logprobs_mode, "none")

    def about(self) -> About:
        return About(
            target=Path(self.server.model).name, target_sha256=None, dtype="as served", rows=self.server.workers,
            written_by=f"{self.server.kind} {self.server.version}".strip(), logprobs=self.logprobs,
        )  # fmt: skip

    def write(self, prompts: list[list[int]], numbers: list[int]) -> list[Completion]:
        how = self.decoding
        sampling = SamplingParams(
            max_tokens=how.max_new_tokens, temperature=how.temperature, top_p=how.top_p, top_k=how.top_k,
            seed=how.seed * 1_000_003 + numbers[0] * SHARD_TEXTS,  # the server adds the place in this list
        )  # fmt: skip
        return [self._of(written) for written in self.server.generate(prompts, sampling, k=self.top)]

    def _of(self, written: adapters.Completion) -> Completion:
        n, greedy = len(written.ids), self.decoding.temperature == 0
        return Completion(
            ids=np.array(written.ids),
            logprobs=np.zeros(n) if greedy else np.array(written.logprobs),
            finish_reason="stop" if written.finish_reason == "stop" else "length",
            top_ids=np.array(written.top_ids).reshape(n, -1)[:, : self.top],
            top_logprobs=np.array(written.top_logprobs).reshape(n, -1)[:, : self.top],
        )


class PaperTrace:
    """The trace file of the paper's scripts: ``tensor([[...]])`` of token ids, one for each prompt, greedy.

    Texts that begin with their prompt lose it.

    Raises:
        UserError: not such a file, cut or abbreviated, not one text for each prompt, or ids that vocab does not have.
    """

    def __init__(self, file: Path, prompts: list[Prompt], most: int | None, vocab: int, eos: tuple[int, ...]) -> None:
        texts = paper_texts(file)[:most]
        if len(texts) != len(prompts):
            raise UserError(
                f"{file} holds {len(texts)} texts and there are {len(prompts)} prompts; "
                "give the prompts that it was made with, or take the first ones of both with --prompts"
            )
        self.whole = all(text[: len(p.ids)].tolist() == p.ids for text, p in zip(texts, prompts, strict=True))
        self.texts, self.eos = texts, eos
        for number, text in enumerate(texts, 1):
            if text.max() >= vocab:
                raise UserError(
                    f"{file}: text {number} has the id {text.max()}, the tokenizer only {vocab}: another one"
                )

    @property
    def longest(self) -> int:
        return max(map(len, self.texts))

    def write(self, prompts: list[list[int]], numbers: list[int]) -> list[Completion]:
        found = []
        for prompt, number in zip(prompts, numbers, strict=True):
            ids = self.texts[number][len(prompt) if self.whole else 0 :]
            nothing = np.zeros((len(ids), 0))
            found.append(Completion.truncated(ids, np.zeros(len(ids)), nothing, nothing, self.eos))
        return found


def paper_texts(file: Path) -> list[np.ndarray]:
    """Token ids of each text. Raises UserError: see PaperTrace."""
    try:
        content = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    found = TENSOR.findall(content)
    if not found or len(found) != content.count("tensor("):
        end = f"its text {len(found) + 1} does not end" if found else "it has no tensor([[...]])"
        raise UserError(f"{file} is not a trace of the paper's scripts, or is cut: {end}")
    rows = [row for tensor in found for row in re.split(r"\]\s*,\s*\[", tensor)]
    return [_ids(row, f"{file}: text {number}") for number, row in enumerate(rows, 1)]


def _ids(row: str, where: str) -> np.ndarray:
    if "..." in row:
        raise UserError(f"{where} is abbreviated (...): print it whole, with torch.set_printoptions(threshold=10**9)")
    try:
        ids = np.array([int(word) for word in row.split(",")], dtype=np.int64)
    except ValueError as error:
        raise UserError(f"{where}: {error}; want token ids") from None
    if ids.min() < 0:
        raise UserError(f"{where}: {ids.min()} is not a token id")
    return ids
