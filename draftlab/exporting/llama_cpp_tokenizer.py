"""Tokenization of text as llama.cpp does it (llama-vocab.cpp, October 2026), to compare with the model's tokenizer.

llama.cpp looks for special tokens before it normalizes text, the longest token first. It knows no `lstrip`, `rstrip` or
`single_word` of an added token, and no normalizer of a byte-level tokenizer. Text after a special token counts as the
start of a text.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence

SPACE = "▁"


def split_special(text: str, special: Mapping[str, int]) -> list[str | int]:
    """Split a text into the ids of special tokens and the texts between them (tokenizer_st_partition).

    special: Ids of the special tokens, by content.
    """
    parts: list[str | int] = [text] if text else []
    for content in sorted(special, key=lambda content: -len(content.encode())):
        after: list[str | int] = []
        for part in parts:
            if isinstance(part, int) or content not in part:
                after.append(part)
                continue
            first, *others = part.split(content)
            after += [first] if first else []
            for other in others:
                after += [special[content], other] if other else [special[content]]
        parts = after
    return parts


def encode(text: str, special: Mapping[str, int], encode_start: Callable[[str, bool], Sequence[int]]) -> list[int]:
    """Return the ids of a text. encode_start: Returns the ids of a part; its flag says that no text precedes it."""
    ids: list[int] = []
    at_start = True
    for part in split_special(text, special):
        if isinstance(part, int):
            ids.append(part)
            at_start = True
        else:
            ids += encode_start(part, at_start)
            at_start = False
    return ids


class SentencePiece:
    """llama.cpp's tokenizer of SentencePiece vocabularies (llm_tokenizer_spm): the best score merges first."""

    def __init__(self, tokens: Sequence[str], scores: Sequence[float], space_prefix: bool) -> None:
        """space_prefix: Whether a space is put before each start of a text (tokenizer.ggml.add_space_prefix)."""
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.scores = scores
        self.space_prefix = space_prefix

    def encode(self, text: str, at_start: bool) -> list[int]:
        prefix = " " if self.space_prefix and at_start else ""
        pieces: list[str] = list((prefix + text).replace(" ", SPACE))
        following = [*range(1, len(pieces)), -1]
        previous = list(range(-1, len(pieces) - 1))
        merges: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right >= 0 and (merged := pieces[left] + pieces[right]) in self.ids:
                heapq.heappush(merges, (-self.scores[self.ids[merged]], left, right, merged))

        for left, right in enumerate(following):
            offer(left, right)
        while merges:
            _, left, right, merged = heapq.heappop(merges)
            if not pieces[left] or not pieces[right] or pieces[left] + pieces[right] != merged:
                continue  # one of them has been merged since
            pieces[left] = merged
            pieces[right] = ""
            following[left] = following[right]
            if following[right] >= 0:
                previous[following[right]] = left
            offer(previous[left], left)
            offer(left, following[left])
        ids: list[int] = []
        for piece in pieces:
            if piece in self.ids:
                ids.append(self.ids[piece])
            else:  # "" has no bytes; -1 is a byte without a token
                ids += [self.ids.get(f"<0x{byte:02X}>", -1) for byte in piece.encode()]
        return ids
