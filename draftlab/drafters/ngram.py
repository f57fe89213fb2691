"""The drafters ngram-gpu and ngram-simple: prompt lookup as vLLM does it on GPUs, and as llama.cpp does it.

K drafted tokens.
"""

import numpy as np
from pydantic import Field
from torch import Tensor

from draftlab.acceptance.token_logprobs import TokenLogprobs
from draftlab.drafters.base import DrafterSpec, drafter
from draftlab.drafters.context import DrafterContext, DrafterRun, ReplayContext
from draftlab.drafters.lookup import TextDrafter, VLLMLookupSpec, copies_by_k, latest_match
from draftlab.engine.generate import Draft, TokenIds
from draftlab.sampling import SamplingParams
from draftlab.servers.kinds import PROMPT_LOOKUP_MAX


class NgramGpuDrafter(TextDrafter):
    """The n-gram speculator of vLLM on GPUs (v1/worker/gpu/spec_decode/ngram/speculator.py in vLLM 0.32).

    It copies the tokens after the latest match, see Match. Where the text ends, and if there is no match, it drafts the
    text's last token.

    longest: Largest length of a match, in tokens.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest

    def draft(self, text: list[int], count: int) -> list[int]:
        match = latest_match(np.array(text), self.longest)
        copied = [] if match is None else text[match.start :][:count]
        return copied + text[-1:] * (count - len(copied))


@drafter("ngram-gpu", served_by=("vllm",))
class NgramGpuSpec(VLLMLookupSpec):
    def lookup(self) -> TextDrafter:
        return NgramGpuDrafter(self.prompt_lookup_max)


class NgramSimpleDrafter(TextDrafter):
    """llama.cpp's ngram-simple: copies the tokens after the latest occurrence of the last n tokens, if there is one.

    The occurrence must not begin at the first token of the text. The text's last token is neither part of the
    occurrence nor copied. There is no draft if fewer than n tokens can be copied, or if the text has at most n + K + 2
    tokens (common/ngram-map.cpp in llama-cpp-python 0.3.36).

    size: Number of tokens to look for, n. A smaller K is used in its place, because no draft would be long enough.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.most = 0

    def reset(self, rows: int, capacity: int) -> None:
        self.most = 0

    def propose(self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        self.most = max(self.most, count)  # K: only near the end of a text, `count` is smaller
        return super().propose(texts, count, sampling, uniform)

    def draft(self, text: list[int], count: int) -> list[int]:
        most = max(self.most, count)
        n = min(self.size, most)
        known = np.array(text[:-1])
        if len(known) <= n + most + 1:
            return []
        # the occurrences begin at 1 or later, and end before the last token but one
        windows = np.lib.stride_tricks.sliding_window_view(known[1:-1], n)
        found = np.flatnonzero((windows == text[-n:]).all(1))
        if not len(found):
            return []
        start = int(found[-1]) + 1 + n
        copied = text[start:-1][:most]
        return copied[:count] if len(copied) >= n else []


@drafter("ngram-simple", served_by=("llama.cpp",))
class NgramSimpleSpec(DrafterSpec):
    """Drafts as llama-server does with --spec-type ngram-simple.

    size_n: Number of tokens to look for, --spec-ngram-simple-size-n. K is used if it is smaller.
    """

    by_age = True
    size_n: int = Field(PROMPT_LOOKUP_MAX, ge=1)

    def build(self, context: DrafterContext) -> DrafterRun:
        return context.run(NgramSimpleDrafter(self.size_n))

    def acceptance(self, replay: ReplayContext) -> list[TokenLogprobs]:
        return copies_by_k(NgramSimpleDrafter(self.size_n), replay)
