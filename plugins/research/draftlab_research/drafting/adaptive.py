"""Drafters that follow a Policy, and the recording of the steps from which the policy is learnt.

B rows (texts of a batch), K drafted tokens, V vocab.
"""

import itertools
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from draftlab.drafters.context import DrafterContext
from draftlab.drafters.lookup import MATCH_KINDS, TextDrafter, copy_from, latest_match
from draftlab.engine.generate import (
    Draft,
    Drafter,
    ModelDrafter,
    Sampler,
    TokenIds,
    speculative_decode,
)
from draftlab.errors import UserError
from draftlab.heads.eagle3.drafter import EagleDrafter
from draftlab.sampling import SamplingParams
from draftlab_research.drafting.stops import StoppingSampler
from draftlab_research.policy import Policy, Steps

LENGTH = 64  # most tokens that the target adds to each recorded prompt; 4 K if that is more

Stoppable: TypeAlias = ModelDrafter | EagleDrafter  # drafters whose sampler may end a draft


class Recorder(Sampler):
    """A Sampler that records the draft's largest probability, at temperature 1, for each drafted token. B is 1."""

    def __init__(self, sampling: SamplingParams, vocab: int | None) -> None:
        super().__init__(sampling, vocab)
        self.confidence: list[float] = []  # one number for each drafted token

    def __call__(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor | None]:
        self.confidence.append(float(torch.softmax(logits.float(), -1).amax()))
        return super().__call__(logits, uniform)


class PolicyStop:
    """A StopRule by which a row stops when one more drafted token does not pay, see Policy.goes_on."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.alive, self.drafted = policy, np.ones(1), 0

    def __call__(self, p: Tensor) -> Tensor:
        confidence, self.drafted = p.amax(-1).cpu().numpy(), self.drafted + 1
        self.alive = self.alive * self.policy.chance_of(confidence)
        return torch.from_numpy(~self.policy.goes_on(self.alive, confidence, self.drafted))


class PolicyLookup(TextDrafter):
    """Prompt lookup that copies as many tokens as the policy says. longest: Longest n-gram to match, in tokens."""

    def __init__(self, policy: Policy, longest: int) -> None:
        self.policy, self.longest = policy, longest

    def draft(self, text: list[int], count: int) -> list[int]:
        match = latest_match(np.array(text), self.longest)
        if match is None:
            return []
        tokens = self.policy.copied_tokens(MATCH_KINDS.index(match.kind), match.length, count)
        return copy_from(text, match.start, tokens)


class PolicyDraft(Drafter):
    """A drafter that drafts until one more token does not pay. If policy.draft_gain is not positive, it never drafts.

    inner: Drafter that computes the draft.
    """

    def __init__(self, inner: Stoppable, policy: Policy) -> None:
        self.inner, self.policy = inner, policy

    def reset(self, rows: int, capacity: int) -> None:
        self.inner.reset(rows, capacity)

    def attach(self, cache: Any) -> None:
        self.inner.attach(cache)

    def prefill(self, texts: TokenIds) -> None:
        if self.policy.draft_gain > 0:
            self.inner.prefill(texts)

    def propose(self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        if self.policy.draft_gain <= 0:
            return Draft.empty(len(texts), uniform.device)
        stopping = StoppingSampler(sampling.unlimited(), self.inner.vocab, PolicyStop(self.policy))
        self.inner.sampler = lambda *_: stopping
        draft = self.inner.propose(texts, count, sampling, uniform)
        return replace(draft, counts=stopping.counts)


def recorded(
    context: DrafterContext, drafter: Stoppable, prompts: TokenIds, k: int, longest: int
) -> tuple[Steps, float]:
    """Decode each prompt with K drafted tokens per step. Return the steps, and the milliseconds per drafted token.

    The milliseconds are the median over all steps. Steps near the end of a text, with fewer than K drafted or following
    tokens, are not returned.

    longest: Longest n-gram that prompt lookup matches, in tokens.

    Raises:
        UserError: No step has room for K drafted tokens.
    """
    sampling = replace(context.sampling, max_tokens=max(LENGTH, 4 * k), seed=1)
    recorder = Recorder(sampling.unlimited(), drafter.vocab)
    drafter.sampler = lambda *_: recorder
    rows: list[tuple[int, int, int, list[float], int]] = []
    seconds: list[float] = []  # seconds per drafted token, for each step
    for prompt in prompts:
        recorder.confidence.clear()
        steps = list(speculative_decode(context.target, drafter, [prompt], k, sampling, context.clock))
        text, at = np.array([*prompt, *(id for step in steps for id in step.tokens)]), len(prompt)
        confidence = iter(recorder.confidence)
        for step in steps:
            before, following, at = text[:at], text[at : at + k], at + len(step.tokens)
            if not step.drafted:
                continue
            seconds.append(step.draft_seconds / step.drafted)
            drafted = list(itertools.islice(confidence, step.drafted))
            # near the end of a text, the draft is shorter, or fewer than k tokens follow to compare a copy with
            if step.drafted == len(following) == k:
                rows.append((*_match(before, following, longest), drafted, step.accepted))
    if not rows:
        raise UserError(f"--drafter adaptive: no calibration text has room for {k} drafted tokens; lower --k")
    kind, length, copied, confidence, accepted = (np.array(column) for column in zip(*rows, strict=True))
    found = Steps(kind=kind, length=length, copied=copied, confidence=confidence, accepted=accepted)
    return found, 1e3 * float(np.median(seconds))


def _match(before: np.ndarray, following: np.ndarray, longest: int) -> tuple[int, int, int]:
    """Return the kind and length of the match at the end of `before`, and the number of right tokens in its copy.

    Only tokens before the first wrong token count. Without a match, all three numbers are 0.

    following: The tokens that the text has after `before`, [K].
    """
    match = latest_match(before, longest)
    if match is None:
        return 0, 0, 0
    copy = copy_from(before.tolist(), match.start, len(following))
    right = int(np.cumprod(copy == following).sum())
    return MATCH_KINDS.index(match.kind), match.length, right
