"""Read trace files of the scripts of "Decoding Speculative Decoding" (2402.01528): a greedy text for each prompt."""

import re
from pathlib import Path

import numpy as np

from draftlab.data.prompts import Prompt
from draftlab.engine.batch_generate import Completion
from draftlab.errors import UserError
from draftlab.reading import reading
from draftlab.target_outputs.outputs import TargetOutput

TENSOR = re.compile(r"tensor\(\s*\[\[(.*?)\]\]", re.DOTALL)


def trace_outputs(
    file: Path, prompts: list[Prompt], *, vocab: int, eos_ids: tuple[int, ...]
) -> tuple[list[TargetOutput], int]:
    """Read the texts of a trace file.

    Args:
        vocab: Number of ids of the tokenizer.
        eos_ids: Ids that end a text.

    Returns: Each prompt with its text, up to and including the first id of eos_ids; and the length of the longest text.

    Raises:
        UserError: The file is not a trace or is incomplete, the numbers of texts and prompts differ, or an id is not
            in the vocabulary.
    """
    texts = paper_texts(file)
    if len(texts) != len(prompts):
        raise UserError(
            f"{file} has {len(texts)} texts, but there are {len(prompts)} prompts; give the prompts of this trace"
        )
    longest = max(map(len, texts))
    pairs = list(zip(prompts, texts, strict=True))
    with_prompts = all(text[: len(p.ids)].tolist() == p.ids for p, text in pairs)
    outputs = []
    for number, (prompt, text) in enumerate(pairs):
        if text.min() < 0 or text.max() >= vocab:
            raise UserError(
                f"{file}: text {number + 1} has the ids {text.min()} to {text.max()}, but the tokenizer has only the "
                f"ids 0 to {vocab - 1}; give the target that wrote the texts with --target"
            )
        ids = text[len(prompt.ids) if with_prompts else 0 :]
        answer = Completion.truncated(ids, np.zeros(len(ids)), eos_ids)
        output = TargetOutput(
            number=number,
            category=prompt.category,
            prompt=np.array(prompt.ids),
            ids=answer.ids,
            # a trace has no finish reasons, so texts shorter than `longest` count as stopped
            finish_reason="stop" if len(answer.ids) < longest else answer.finish_reason,
        )
        outputs.append(output)
    return outputs, longest


def paper_texts(file: Path) -> list[np.ndarray]:
    """Return the token ids of each text of a trace file, [n] each.

    Raises:
        UserError: The file cannot be read, is not a trace, is incomplete, or has abbreviated tensors.
    """
    with reading(f"{file} is not a complete trace of the paper's scripts"):
        content = file.read_text()
        tensors = TENSOR.findall(content)
        if not tensors or len(tensors) != content.count("tensor("):
            raise ValueError(f"text {len(tensors) + 1} has no beginning or no end")
        rows = re.split(r"\]\s*,\s*\[", "], [".join(tensors))
        return [np.array(row.split(","), dtype=np.int64) for row in rows]
