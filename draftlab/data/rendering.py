"""Render conversations to train on: their tokens, and the tokens that the assistant must write.

What counts is what a server asks the target for: the tokens after the prompt that the chat template renders for a
request, up to the token at which generation stops. In shapes, n is the number of tokens.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from draftlab.config.shared import LossOn
from draftlab.data.text import Message, Tool, chat_ids, chat_text, supported, text_ids
from draftlab.dates import with_date
from draftlab.errors import UserError
from draftlab.reading import reading

# the tag by which a chat template marks the assistant's text
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# contents of a message and an answer that no chat template changes or contains: characters for private use
ASKED = "\ue001"
PROBE = "\ue000"


@dataclass(frozen=True, slots=True)
class Conversation:
    """The n tokens of a conversation.

    ids: Token ids, [n]. counted: Whether each token counts in the loss, [n]. Either all tokens count, or only the
    tokens that the assistant must write.
    """

    ids: np.ndarray
    counted: np.ndarray

    def row(self, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids, cut or padded to [seq_len + 1], and a mask, [seq_len]. It is 1 where the next id counts."""
        ids = np.zeros(seq_len + 1, np.int64)
        mask = np.zeros(seq_len, np.float32)
        length = min(len(self.ids), seq_len + 1)
        ids[:length] = self.ids[:length]
        mask[: length - 1] = self.counted[1:length]
        return ids, mask


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the assistant in the tokens of the conversation up to this answer.

    Args:
        ids: The tokens of the conversation up to this answer.
        parts: First token of each part that counts, and the token after the part.
        stopped: Whether the last part ends with the token at which generation stops.
    """

    ids: list[int]
    parts: list[tuple[int, int]]
    stopped: bool

    @property
    def end(self) -> int:
        return self.parts[-1][1] if self.parts else 0


def render(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    loss_on: LossOn,
    *,
    tools: Sequence[Tool] = (),
    stop_token_ids: Collection[int] = (),
) -> list[Conversation]:
    """Return a conversation's tokens, and which of these tokens count in the loss.

    A template that drops the reasoning of earlier turns renders an answer differently if more messages follow. Each
    answer is then a conversation of its own, with its prompt. Otherwise there is a single conversation.

    Args:
        stop_token_ids: Ids at which generation stops, in addition to the tokenizer's eos.

    Raises:
        UserError: There is no chat template, the template refuses the conversation, or an answer cannot be found.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"{where}: the row has messages, but the tokenizer has no chat template; use a chat "
            "model, or rows of plain text"
        )
    if loss_on == "all":
        whole = chat_ids(messages, tokenizer, where, reply=False, tools=tools)
        return [Conversation(np.array(whole), np.ones(len(whole), dtype=bool))]
    eos: Any = tokenizer.eos_token_id
    stops = {*stop_token_ids, eos}
    return _Turns(supported(messages, tokenizer)[0], tokenizer, where, tools, stops).conversations()


@dataclass(frozen=True, slots=True)
class _Turns:
    """The turns of a conversation, to find the assistant's tokens. stops: Ids at which generation stops."""

    messages: list[Message]
    tokenizer: PreTrainedTokenizerBase
    where: str
    tools: Sequence[Tool]
    stops: set[int]

    def conversations(self) -> list[Conversation]:
        whole = chat_ids(self.messages, self.tokenizer, self.where, reply=False, tools=self.tools)
        # an answer without a message before it has no prompt
        numbers = [i for i, m in enumerate(self.messages) if i and m["role"] == "assistant"]
        answers = {number: self._answer(number) for number in numbers}
        if all(whole[: answer.end] == answer.ids[: answer.end] for answer in answers.values()):
            return [self._counted(whole, answers)]
        return [self._counted(answer.ids, {n: answer}) for n, answer in answers.items()]

    def _counted(self, ids: list[int], answers: dict[int, Answer]) -> Conversation:
        """Return a conversation in which the answers count, each with the token at which it stops.

        In some templates, the next role's marker is this token. After the last message it is missing, and is added.
        """
        ids, counted = list(ids), np.zeros(len(ids) + 1, dtype=bool)
        for number, answer in answers.items():
            for start, end in answer.parts:
                counted[start:end] = True
            if answer.stopped or not answer.parts:
                continue
            if answer.end == len(ids):
                ids += [token for token in self._next(number) if token in self.stops]
            if answer.end < len(ids) and ids[answer.end] in self.stops:
                counted[answer.end] = True
        return Conversation(np.array(ids), counted[: len(ids)])

    def _answer(self, number: int) -> Answer:
        """Return where the answer in message `number` is. Raises UserError: it cannot be found."""
        text = self._text(number + 1)
        ids = self._ids(text)
        prompt = self._text(number, reply=True)
        if GENERATION.search(str(self.tokenizer.chat_template)):
            before = len(self._marked(number))
            spans = self._marked(number + 1)[before:]
            if text.startswith(prompt):  # some templates mark the header of the answer, too
                spans = [(max(start, len(prompt)), end) for start, end in spans]
            parts = [
                (self._before(text, start, ids), self._before(text, end, ids, inside=1))
                for start, end in spans
                if end > start
            ]
            if not parts:
                return Answer(ids, [], stopped=True)
        else:
            found = self._start(number, text, prompt)
            if found is None:
                text = prompt + self._said(number, text)
                ids = self._ids(text)
                found = len(prompt)
            parts = [(self._before(text, found, ids), len(ids))]
        start = parts[-1][0]
        end, stopped = self._end(number, text, ids, start)
        return Answer(ids, [*parts[:-1], (start, end)], stopped)

    def _start(self, number: int, text: str, prompt: str) -> int | None:
        """Return the first character of an answer in the text of the conversation up to this answer.

        The text begins with the prompt. Some prompts end with characters that no rendered answer has, such as <think>;
        the answer then begins where prompt and text part. Return None if they part before the end of the messages.
        """
        if text.startswith(prompt):
            return len(prompt)
        start = _shared(prompt, self._text(number, {"role": "assistant", "content": PROBE}))
        asked = _shared(prompt, self._text(number))
        return start if text.startswith(prompt[:start]) and start >= asked else None

    def _said(self, number: int, text: str) -> str:
        """Return what a template writes after the prompt, if it renders the messages of the prompt differently.

        Mistral's, for example, writes the system message only if the last message is the user's.

        Raises:
            UserError: The message before the answer ends differently in the prompt and in the text.
        """
        answer = {"role": "assistant", "content": PROBE}
        asked = self.messages[number - 1] | {"content": ASKED}
        closing = self._text(number - 1, asked, reply=True).rpartition(ASKED)[2]
        between = self._text(number - 1, asked, answer).rpartition(ASKED)[2].partition(PROBE)[0]
        head = self._text(number, answer).rpartition(PROBE)[0]
        if not (between.startswith(closing) and head.endswith(between) and text.startswith(head)):
            raise UserError(
                f"{self.where}: the chat template renders the messages before message {number + 1} differently once "
                "this answer follows, so the assistant's tokens cannot be found; use draftlab distill --loss-on all, "
                "or a template with generation tags"
            )
        return text[len(head) - len(between) + len(closing) :]

    def _end(self, number: int, text: str, ids: list[int], start: int) -> tuple[int, bool]:
        """Return the token after an answer and its stop token, and whether there is a stop token.

        After the answer's content comes what the template writes after any content. The answer ends with the first stop
        token there, or, if none of its tokens is known as a stop token, with the first special token.
        """
        probe = self._text(number, {"role": "assistant", "content": PROBE})
        tail = probe.rpartition(PROBE)[2]
        closing = self._ids(tail) if text.endswith(tail) else None  # a tool call may end otherwise
        places = self._places(ids, start, closing, self.stops)
        if not places:
            added = self.tokenizer.added_tokens_decoder.items()
            special = {i for i, token in added if token.special}
            places = self._places(ids, start, closing, special)
        return (places[0] + 1, True) if places else (len(ids), False)

    @staticmethod
    def _places(ids: list[int], start: int, closing: list[int] | None, tokens: Collection[int]) -> list[int]:
        """Return the places of `tokens` in the end of a turn: after the content, or the last place from `start` on.

        closing: What the template writes after the content. None if it is not known.
        """
        places = [place for place in range(start, len(ids)) if ids[place] in tokens]
        after = 1 if closing is None else sum(token in tokens for token in closing)
        return places[-after:] if after else []

    def _next(self, number: int) -> list[int]:
        """Return the first token that the template writes after an answer if another message follows, or no token."""
        answer: Message = {"role": "assistant", "content": PROBE}
        follows: Message = {"role": "user", "content": PROBE}
        if self.messages[number].get("tool_calls"):
            follows = {"role": "tool", "content": PROBE}
        try:
            alone = self._text(number, answer)
            longer = self._text(number, answer, follows)
        except UserError:  # the template takes no such message here
            return []
        return self._ids(longer.removeprefix(alone))[:1] if longer.startswith(alone) else []

    def _marked(self, count: int) -> list[tuple[int, int]]:
        """Return the spans of characters that generation tags mark in the first `count` messages."""
        template = with_date(self.tokenizer.get_chat_template(tools=list(self.tools) or None))
        messages = [
            {name: field for name, field in message.items() if field is not None} for message in self.messages[:count]
        ]
        with reading(f"{self.where}: the chat template refuses the conversation"):
            rendered: Any = render_jinja_template(
                [messages],
                tools=list(self.tools) or None,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **cast(Any, self.tokenizer.special_tokens_map),
            )
        return rendered[1][0]

    def _text(self, count: int, *more: Message, reply: bool = False) -> str:
        """Return the first `count` messages, and `more` messages, as the template renders them."""
        messages = [*self.messages[:count], *more]
        return chat_text(messages, self.tokenizer, self.where, reply=reply, tools=self.tools)

    def _ids(self, text: str) -> list[int]:
        return text_ids(text, self.tokenizer, self.where, add_special_tokens=False)

    def _before(self, text: str, end: int, ids: list[int], inside: int = 0) -> int:
        """Return how many of the ids of a text come before its character `end`.

        A token across this border counts as `inside`: 0 if it is part of what follows, 1 if it is part of the prefix.
        """
        prefix = self._ids(text[:end])
        shared = _shared(prefix, ids)
        if shared == len(prefix):
            return shared
        # the prefix alone has other tokens at its end
        if not self.tokenizer.is_fast:
            return min(len(ids), shared + inside)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        spans: Any = encoded["offset_mapping"]
        ends = (i for i, (first, last) in enumerate(spans) if (first if inside else last - 1) >= end)
        return max(shared, next(ends, len(ids)))


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many first elements of two sequences are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
