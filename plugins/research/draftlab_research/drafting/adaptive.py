"""Drafting as long as it pays, and the recorded steps from which that is learnt. B rows, V vocab."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from draftlab.engine.drafters.context import DrafterContext
from draftlab.engine.drafters.eagle import EagleDrafter
from draftlab.engine.drafters.ngram import MATCH_KINDS, TextDrafter, copy_from, latest_match
from draftlab.engine.generate import Draft, Drafter, ModelDrafter, Sampler, speculative_decode
from draftlab.errors import UserError
from draftlab.sampling import SamplingParams
from draftlab_research.policy import Policy, Steps

LENGTH = 64  # tokens that the target adds to each prompt of the calibration

Stoppable: TypeAlias = ModelDrafter | EagleDrafter  # their sampler may end a draft


class Recorder(Sampler):
    """Samples, and records the draft's largest probability at temperature 1 for each token."""

    def __init__(self, sampling: SamplingParams, vocab: int | None) -> None:
        super().__init__(sampling, vocab)
        self.confidence: list[np.ndarray] = []  # [B] for each token

    def __call__(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor | None]:
        token = super().__call__(logits, uniform)
        self.confidence.append(torch.softmax(logits.float(), -1).amax(-1).cpu().numpy())
        return token


class Stopper(Recorder):
    """Ends the draft when one more token pays in no row. counts: Number of tokens of each row, [B]."""

    def __init__(self, sampling: SamplingParams, vocab: int | None, policy: Policy) -> None:
        super().__init__(sampling, vocab)
        self.policy, self.alive, self.counts = policy, np.ones(1), np.zeros(1, dtype=int)
        self.going = np.ones(1, dtype=bool)

    def __call__(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor | None]:
        token = super().__call__(logits, uniform)
        drafted, last = len(self.confidence), self.confidence[-1]
        self.counts = self.counts + self.going * np.ones(len(last), dtype=int)
        if drafted + 1 < len(self.policy.verify_ms):
            self.alive = self.alive * self.policy.chance_of(last)
            self.going = self.going & self.policy.goes_on(self.alive, last, drafted)
            self.ended = not self.going.any()
        return token


class PolicyLookup(TextDrafter):
    """Prompt lookup that copies as many tokens as pay. longest: Longest n-gram to match, in tokens."""

    def __init__(self, policy: Policy, longest: int) -> None:
        self.policy, self.longest = policy, longest

    def draft(self, text: list[int], count: int) -> list[int]:
        match = latest_match(np.array(text), self.longest)
        if match is None:
            return []
        tokens = self.policy.copied_tokens(MATCH_KINDS.index(match.kind), match.length, count)
        return copy_from(text, match.start, tokens)


class PolicyDraft(Drafter):
    """A drafter whose drafts end where one more token no longer pays; none at all where no draft pays."""

    def __init__(self, inner: Stoppable, policy: Policy) -> None:
        self.inner, self.policy = inner, policy

    def reset(self, rows: int, capacity: int) -> None:
        self.inner.reset(rows, capacity)

    def attach(self, cache: Any) -> None:
        self.inner.attach(cache)

    def prefill(self, texts: Sequence[list[int]]) -> None:
        if self.policy.draft_gain > 0:
            self.inner.prefill(texts)

    def propose(
        self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor
    ) -> Draft:
        if self.policy.draft_gain <= 0:
            nothing = torch.zeros(len(texts), 0, dtype=torch.long, device=uniform.device)
            return Draft(ids=nothing, q=None, counts=[0] * len(texts))
        stoppers: list[Stopper] = []

        def sampler(sampling: SamplingParams, vocab: int | None) -> Stopper:
            stoppers.append(Stopper(sampling, vocab, self.policy))
            return stoppers[-1]

        self.inner.sampler = sampler
        draft = self.inner.propose(texts, count, sampling, uniform)
        return replace(draft, counts=stoppers[-1].counts.tolist())


def recorded(
    context: DrafterContext, drafter: Stoppable, prompts: Sequence[list[int]], k: int, longest: int
) -> tuple[Steps, float]:
    """Decode each prompt with K drafted tokens in every step. Return the steps, and the milliseconds of a token.

    longest: Longest n-gram that prompt lookup matches.
    """
    samplers: list[Recorder] = []

    def sampler(sampling: SamplingParams, vocab: int | None) -> Recorder:
        samplers.append(Recorder(sampling, vocab))
        return samplers[-1]

    sampling = replace(context.sampling, max_tokens=max(LENGTH, 4 * k), seed=1)
    drafter.sampler = sampler
    rows: list[tuple[int, int, int, np.ndarray, int]] = []
    seconds: list[float] = []  # of a drafted token, by step
    for prompt in prompts:
        samplers.clear()
        steps = list(
            speculative_decode(context.target, drafter, [prompt], k, sampling, context.clock)
        )
        text, at = np.array([*prompt, *(id for step in steps for id in step.tokens)]), len(prompt)
        drafts = iter(samplers)
        for step in steps:
            before, at = text[:at], at + len(step.tokens)
            if not step.drafted:
                continue
            seconds.append(step.draft_seconds / step.drafted)
            confidence = np.concatenate(next(drafts).confidence)
            # near its end, a text has less room, or fewer tokens to judge by
            if step.drafted == k and len(before) + k <= len(text):
                rows.append((*_match(before, text, k, longest), confidence, step.accepted))
    if not rows:
        raise UserError(
            f"--drafter adaptive: no text of the calibration has room for {k} drafted tokens; lower --k"
        )
    kind, length, copied, confidence, accepted = (
        np.array(column) for column in zip(*rows, strict=True)
    )
    found = Steps(kind=kind, length=length, copied=copied, confidence=confidence, accepted=accepted)
    return found, 1e3 * float(np.median(seconds))


def _match(before: np.ndarray, text: np.ndarray, k: int, longest: int) -> tuple[int, int, int]:
    """Return the kind and length of the match at the end of `before`, and how many tokens of its copy are right."""
    match = latest_match(before, longest)
    if match is None:
        return 0, 0, 0
    copy = np.array(copy_from(before.tolist(), match.start, k))
    following = text[len(before) : len(before) + k]
    wrong = np.flatnonzero(copy[: len(following)] != following)
    right = int(wrong[0]) if len(wrong) else len(following)
    return MATCH_KINDS.index(match.kind), match.length, right
