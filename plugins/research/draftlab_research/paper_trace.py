"""Read trace files of the scripts of "Decoding Speculative Decoding" (2402.01528): a greedy text for each prompt."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from draftlab.engine.batch_generate import Completion
from draftlab.errors import UserError
from draftlab.prompts import Prompt
from draftlab.target_outputs.outputs import TargetOutput

TENSOR = re.compile(r"tensor\(\s*\[\[(.*?)\]\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class PaperTrace:
    """The greedy texts of a trace file, one for each prompt.

    texts: Token ids of each text, [n]. with_prompts: Whether every text begins with its prompt. eos_ids: Ids that end a
    text.
    """

    prompts: list[Prompt]
    texts: list[np.ndarray]
    with_prompts: bool
    eos_ids: tuple[int, ...]

    @classmethod
    def read(
        cls,
        file: Path,
        prompts: list[Prompt],
        *,
        count: int | None,
        vocab: int,
        eos_ids: tuple[int, ...],
    ) -> "PaperTrace":
        """Read the first `count` texts of a trace file. None reads all texts.

        vocab: Number of ids of the tokenizer.

        Raises:
            UserError: The file is not a trace or is incomplete, the numbers of texts and prompts differ, or an id is
                vocab or more.
        """
        texts = paper_texts(file)[:count]
        if len(texts) != len(prompts):
            raise UserError(
                f"{file} has {len(texts)} texts, but there are {len(prompts)} prompts; give the prompts of this trace, "
                "or set --num-prompts to import only the first texts and prompts"
            )
        for number, text in enumerate(texts, 1):
            if text.max() >= vocab:
                raise UserError(
                    f"{file}: text {number} has the id {text.max()}, but the tokenizer has only {vocab} ids; give the "
                    "target's tokenizer with --tokenizer"
                )
        whole = all(
            text[: len(p.ids)].tolist() == p.ids for text, p in zip(texts, prompts, strict=True)
        )
        return cls(prompts, texts, whole, eos_ids)

    @property
    def longest(self) -> int:
        return max(map(len, self.texts))

    def output(self, number: int) -> TargetOutput:
        """Return a prompt with its text, up to and including the first id of eos_ids.

        number: Index of the prompt, from 0 on.
        """
        prompt = self.prompts[number]
        ids = self.texts[number][len(prompt.ids) if self.with_prompts else 0 :]
        text = Completion.truncated(ids, np.zeros(len(ids)), self.eos_ids)
        return TargetOutput(
            number=number,
            category=prompt.category,
            prompt=np.array(prompt.ids),
            ids=text.ids,
            # a trace has no finish reasons, so texts shorter than `longest` count as stopped
            finish_reason="stop" if len(text.ids) < self.longest else text.finish_reason,
        )


def paper_texts(file: Path) -> list[np.ndarray]:
    """Return the token ids of each text of a trace file, [n] each.

    Raises:
        UserError: The file cannot be read, is not a trace, or is incomplete.
    """
    try:
        content = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    tensors = TENSOR.findall(content)
    if not tensors or len(tensors) != content.count("tensor("):
        end = f"text {len(tensors) + 1} has no end" if tensors else "it has no tensor([[...]])"
        raise UserError(f"{file} is not a trace of the paper's scripts, or is incomplete: {end}")
    rows = [row for tensor in tensors for row in re.split(r"\]\s*,\s*\[", tensor)]
    return [_ids(row, f"{file}: text {number}") for number, row in enumerate(rows, 1)]


def _ids(row: str, where: str) -> np.ndarray:
    if "..." in row:
        raise UserError(
            f"{where} is abbreviated (...); print complete tensors, with torch.set_printoptions(threshold=10**9)"
        )
    try:
        ids = np.array([int(word) for word in row.split(",")], dtype=np.int64)
    except (ValueError, OverflowError) as error:
        raise UserError(f"{where}: {error}; token ids must be integers") from None
    if ids.min() < 0:
        raise UserError(f"{where}: {ids.min()} is not a token id")
    return ids
