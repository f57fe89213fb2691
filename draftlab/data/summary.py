"""The size of a text source: rows, turns and tokens of its training and held-out text."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from draftlab.console import heartbeat
from draftlab.data.batches import tokenize
from draftlab.data.sources import Document, documents, is_heldout
from draftlab.data.text import prompts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSize:
    """The size of the training or the held-out text of a source.

    Attributes:
        rows: Number of documents.
        conversations: Documents that are conversations.
        answers: Turns of the assistant.
        questions: Turns of the user that have an answer, or end a conversation: prompts.
    """

    rows: int = 0
    conversations: int = 0
    answers: int = 0
    questions: int = 0
    tokens: int = 0

    def __add__(self, other: "SplitSize") -> "SplitSize":
        return SplitSize(
            **{name: getattr(self, name) + getattr(other, name) for name in SplitSize.__slots__}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSize:
    """The size of a text source. Documents are held out by a hash of their names, so training never sees them."""

    train: SplitSize
    heldout: SplitSize

    @property
    def whole(self) -> SplitSize:
        return self.train + self.heldout


def measure_source(source: str, tokenizer: PreTrainedTokenizerBase) -> SourceSize:
    """Return the size of a source, with the tokens of conversations in the form of the chat template.

    Raises:
        UserError: The source cannot be read, or a conversation does not suit the chat template.
    """
    sizes = {True: SplitSize(), False: SplitSize()}
    docs = documents(source)
    with heartbeat(f"counting tokens of {source}") as beat:
        for number, document in enumerate(docs):
            beat(f"{number:,} of {len(docs):,} rows")
            sizes[is_heldout(document.name)] += _size(document, tokenizer)
    return SourceSize(train=sizes[False], heldout=sizes[True])


def _size(document: Document, tokenizer: PreTrainedTokenizerBase) -> SplitSize:
    roles = [message["role"] for message in document.messages]
    return SplitSize(
        rows=1,
        conversations=bool(roles),
        answers=roles.count("assistant"),
        questions=len(prompts_of(document.messages)),
        tokens=len(tokenize([document], tokenizer)),
    )
