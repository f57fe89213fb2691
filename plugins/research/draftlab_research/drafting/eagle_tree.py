"""An EAGLE-3 head that drafts trees.

B rows (texts of a batch), V vocab, D hidden.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftlab.engine.generate import TokenIds
from draftlab.heads.eagle3.drafter import EagleDrafter
from draftlab.model.decoder import Parents, Tree
from draftlab.model.llama import Cache
from draftlab_research.drafting.tree import Siblings, TreeDrafter


class EagleTreeDrafter(TreeDrafter):
    """An EAGLE-3 head that drafts a tree of fixed shape, with one pass per level."""

    def __init__(self, drafter: EagleDrafter, parents: Sequence[int], siblings: Siblings) -> None:
        """Create the drafter.

        drafter: Drafter of chains that feeds the target's states to the head. parents, siblings: See TreeDrafter.
        """
        super().__init__(drafter.head, drafter.vocab, parents, siblings)
        self.drafter, self.head = drafter, drafter.head

    def reset(self, rows: int, capacity: int) -> None:
        self.drafter.reset(rows, capacity)
        self.cache = self.drafter.cache

    def attach(self, cache: Cache) -> None:
        self.drafter.attach(cache)

    def prefill(self, texts: TokenIds) -> None:
        self.drafter.prefill(texts)

    def last_logits(self, texts: TokenIds, last: int = 1) -> Tensor:
        logits, self.state = self.drafter.last_logits(texts)
        self.first = logits.unsqueeze(1)  # [B, 1, V]
        # the head's states after the text and each drafted token, [B, nodes, D]
        self.states = self.state
        return self.first

    def read(self, texts: TokenIds, ids: list[Tensor], parents: Parents) -> Tensor:
        """Run a pass of the head over the drafted tokens. Arguments and result: See TreeDrafter.read."""
        self.cache.used = [len(text) - 1 for text in texts]
        rooted = Tree.from_parents(parents, self.head.device)
        # the root of the tree is already in the cache
        tree = Tree(rooted.depth[..., 1:] - 1, rooted.mask[..., 1:, 1:].contiguous())
        rows = torch.arange(len(texts), device=self.head.device).unsqueeze(1)
        # the head's state at the parent of each drafted token, [B, drafted tokens, D]
        beside = self.states[rows, torch.tensor(parents, device=self.head.device)]
        logits, states = self.head.step(torch.stack(ids, 1), beside, self.cache, last=len(ids), tree=tree)
        self.states = torch.cat([self.state, states], 1)
        return torch.cat([self.first, logits], 1)
