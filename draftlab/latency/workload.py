"""Texts whose decoding time is to be predicted, with acceptance probabilities from a replay, a score or an assumption.

R texts of at most n tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from draftlab.acceptance.expected import Texts, texts_of
from draftlab.errors import UserError
from draftlab.results.decoding import Generation
from draftlab.results.score import Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Texts with the acceptance probabilities of their tokens.

    Args:
        prompt_tokens: Length of each prompt, [R].
        kind: Kind of drafter, as --drafter names it.
        model: Name and hash of the draft; None if acceptance is assumed.
        conversations: Number of each text's conversation, [R]. None: every text is a conversation of its own.
        selection: Hash of the prompts (see Prompts.selection). None if it is unknown, or acceptance is assumed.
    """

    texts: Texts
    prompt_tokens: np.ndarray
    kind: str = "model"
    model: tuple[str, str | None] | None = None
    conversations: Sequence[int | None] | None = None
    selection: str | None = None

    @property
    def tokens(self) -> float:
        """Return the number of tokens in all texts, without each text's first token, which the prefill emits."""
        return float(self.texts.lengths.sum())

    @property
    def middle(self) -> int:
        """Return the number of cached tokens in the middle of a text, averaged over the texts."""
        return int((self.prompt_tokens + self.texts.lengths / 2).mean())

    @property
    def longest(self) -> int:
        """Return the length of the longest text together with its prompt."""
        return int((self.prompt_tokens + self.texts.lengths).max())

    @property
    def most(self) -> int | None:
        """Return the largest K of which the acceptance is known, or None if it is known of every K."""
        chances = self.texts.chances
        return None if chances.ndim == 2 else chances.shape[2]

    def with_chances(self, chances: np.ndarray) -> "Workload":
        """Return the same texts with other acceptance probabilities."""
        return replace(self, texts=replace(self.texts, chances=chances))

    def with_prompt_tokens(self, prompt_tokens: int) -> "Workload":
        """Return the same texts after prompts of another length."""
        return replace(self, prompt_tokens=np.full_like(self.prompt_tokens, prompt_tokens))


def note_on_prompts(works: Sequence[Workload]) -> list[str]:
    """Return a note if the acceptance of drafts was measured on different prompts, or on prompts that are unknown."""
    measured = {id(work): work for work in works if work.model is not None}.values()
    unknown = [work.model[0] for work in measured if work.model and work.selection is None]
    if len(measured) < 2:
        return []
    if unknown:
        return [
            f"no selection of prompts is recorded for the acceptance of {', '.join(unknown)}, so the predictions "
            "cannot be compared with each other"
        ]
    if len({work.selection for work in measured}) > 1:
        return [
            "the drafts' acceptance was measured on different prompts, so the predictions cannot be compared with each "
            "other"
        ]
    return []


def constant_workload(alpha: float, *, tokens: int, prompt_tokens: int) -> Workload:
    """Return a workload of one text, whose drafted tokens are accepted with probability alpha.

    The prefill emits the first of the text's tokens.
    """
    return Workload(texts=texts_of([np.full(tokens - 1, alpha)]), prompt_tokens=np.array([prompt_tokens]))


def workload_of_score(score: Score) -> Workload:
    """Return the texts of a score. Accepted tokens have probability 1, and rejected tokens 0.

    Some tokens were never drafted: if a step accepted all K drafted tokens, the target added one more token. In greedy
    decoding every K gives the same text, so another K may tell whether this token would be accepted. Otherwise its
    probability is the conditional acceptance rate at the last position of the largest K.

    Raises:
        UserError: The score was measured on servers, which do not report single tokens; or the draft is parallel or an
            EAGLE-3 head, whose acceptance depends on the position in the draft.
    """
    if score.draft.eagle or score.draft.parallel or score.served:
        raise UserError(
            f"{score.name}: the scores of EAGLE-3 heads, of parallel drafts and of servers lack the acceptance of each "
            "token by its position in the draft; use the output of draftlab replay"
        )
    deepest = max(score.speculative)
    ks = sorted(score.speculative, reverse=True) if score.identical else [deepest]
    unknown = score.acceptance(deepest).conditional_acceptance[-1]
    outcomes: dict[int, np.ndarray] = {}
    for k in ks:
        for generation in score.generations(k):
            row = _outcomes(generation)
            known = outcomes.setdefault(generation.prompt, row)
            known[np.isnan(known)] = row[np.isnan(known)]
    order = sorted(outcomes)
    conditions = score.conditions
    chances = [np.nan_to_num(outcomes[i], nan=unknown) for i in order]
    lengths = [score.prompts[i].tokens if score.prompts else conditions.prompt_tokens or 0 for i in order]
    return Workload(
        texts=texts_of(chances, np.full(len(order), conditions.max_tokens - 1)),
        prompt_tokens=np.array(lengths),
        model=(score.draft.name, score.draft.sha256),
        conversations=[score.prompts[i].conversation for i in order] if score.prompts else None,
        selection=conditions.selection,
    )


def _outcomes(generation: Generation) -> np.ndarray:
    """Return the outcome of drafting each token after the first: 1 if accepted, 0 if rejected, nan if not drafted."""
    row = np.full(generation.tokens - 1, np.nan)
    start = 0
    for drafted, accepted, emitted in zip(generation.drafted, generation.accepted, generation.emitted, strict=True):
        row[start : start + min(accepted, emitted)] = 1
        if accepted < drafted and emitted > accepted:
            row[start + accepted] = 0
        start += emitted
    return row
