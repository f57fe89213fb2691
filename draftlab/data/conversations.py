"""Conversations as text to train on: in the form of a chat template, with the assistant's tokens marked. n tokens."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from draftlab.config.shared import LossOn
from draftlab.data.text import Message
from draftlab.errors import UserError
from draftlab.reading import reading

# a template's own mark of the assistant's text
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Token ids [n], and the tokens that count [n]: all, or the assistant's with the token that ends each turn."""

    ids: np.ndarray
    counted: np.ndarray

    def row(self, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids [seq_len + 1] and the mask of predicted tokens [seq_len], cut or padded."""
        ids, mask = np.zeros(seq_len + 1, np.int64), np.zeros(seq_len, np.float32)
        length = min(len(self.ids), seq_len + 1)
        ids[:length] = self.ids[:length]
        mask[: length - 1] = self.counted[1:length]
        return ids, mask


def chat_ids(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    *,
    reply: bool = True,
) -> list[int]:
    """Return the ids of a conversation; with reply, they are ready for the assistant's answer.

    Raises:
        UserError: The chat template does not take the conversation, or renders nothing.
    """
    with reading(f"{where}: the chat template does not take it"):
        ids: Any = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=reply, tokenize=True, return_dict=False
        )
    if not ids:
        raise UserError(f"{where}: the prompt is empty")
    return list(ids)


def render(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, where: str, loss_on: LossOn
) -> Conversation:
    """Return a whole conversation, in which the template's own mask or its rendered prefixes say who speaks.

    Raises:
        UserError: There is no template, it does not take the conversation, or it renders a message in another way once
            more messages follow.
    """
    if not tokenizer.chat_template:
        raise UserError(f"{where}: messages are for a chat, and the tokenizer has no chat template")
    whole = chat_ids(messages, tokenizer, where, reply=False)
    if loss_on == "all":
        return Conversation(np.array(whole), np.ones(len(whole), dtype=bool))
    if GENERATION.search(str(tokenizer.chat_template)):
        rendered: Any = tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return Conversation(np.array(whole), np.array(rendered["assistant_masks"], dtype=bool))
    counted = np.zeros(len(whole), dtype=bool)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = chat_ids(messages[:number], tokenizer, where)
        after = chat_ids(messages[: number + 1], tokenizer, where, reply=False)
        if whole[: len(before)] != before or whole[: len(after)] != after:
            raise UserError(
                f"{where}: the chat template renders message {number + 1} in another way when others follow, so what "
                "the assistant says cannot be told from the rest; take --loss-on all"
            )
        counted[len(before) : _end_of_turn(after, len(before), tokenizer)] = True
    return Conversation(np.array(whole), counted)


def _end_of_turn(ids: list[int], start: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the position after the token that ends a turn: the last special token, or the last token."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    places = [place for place in range(start, len(ids)) if ids[place] in special]
    return places[-1] + 1 if places else len(ids)
