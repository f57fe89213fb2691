"""A drafter of one file: it drafts what most often followed the last token in the text so far.

A package of any name offers it by an entry point, and draftlab score --drafter follower:least=2 takes it:

    [project.entry-points."draftlab.drafters"]
    follower = "custom_drafter"
"""

from collections import Counter
from itertools import pairwise

from pydantic import Field

from draftlab.drafters import DrafterSpec, drafter


class FollowerDrafter:
    """Draft the most frequent follower of each token, as long as it followed at least so often."""

    def __init__(self, least: int) -> None:
        self.least = least

    def reset(self, rows, capacity):
        """Forget everything; a drafter with a cache makes it here."""

    def propose(self, texts, count, sampling, uniform):
        """Draft up to count tokens after each text, a list of token ids."""
        import torch

        from draftlab.engine.generate import Draft

        drafts = [self._draft(text, count) for text in texts]
        counts = [len(draft) for draft in drafts]
        rows = [draft + [0] * (max(counts) - len(draft)) for draft in drafts]
        ids = torch.tensor(rows, dtype=torch.long, device=uniform.device)  # [B, K]
        return Draft(ids=ids, q=None, counts=counts)  # no q: the tokens depend on the text alone

    def _draft(self, text, count):
        followers, drafted = Counter(pairwise(text)), text[-1:]
        while len(drafted) <= count:
            counted = {after: n for (before, after), n in followers.items() if before == drafted[-1]}
            if max(counted.values(), default=0) < self.least:
                break
            drafted.append(max(counted, key=counted.__getitem__))
        return drafted[1:]


@drafter("follower")
class FollowerSpec(DrafterSpec):
    """least: how often a token must have followed."""

    least: int = Field(1, ge=1)

    def build(self, context):
        return context.run(FollowerDrafter(self.least))
