"""Options of token trees of a draft model, parallel draft or EAGLE-3 head. Shapes are fixed, searched or dynamic."""

import math
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from draftlab.config.kinds import split_at
from draftlab.drafters.base import DrafterSpec, RunFacts, drafter
from draftlab.drafters.model import DraftModelSpec
from draftlab.drafters.parallel import ParallelSpec
from draftlab.drafters.suffix import OutputsSpec
from draftlab.errors import UserError
from draftlab.heads.eagle3.drafter import EagleHeadSpec
from draftlab.registry import REJECTION

if TYPE_CHECKING:
    from draftlab.drafters.context import DrafterContext, DrafterRun

MAX_TREE_TOKENS = 256
Siblings = Literal["top", "sampled", "distinct"]


class WidthsSpec(DrafterSpec):
    """Options of a fixed tree.

    widths: Number of children of each node, by depth. siblings: How the children of a node are chosen when sampling:
    drawn independently (sampled), drawn without replacement (distinct), or the most probable tokens (top).
    """

    own_engine = True
    rejection_rule = "recursive"
    widths: Annotated[list[PositiveInt], split_at("x")] = Field([])
    siblings: Siblings = "sampled"

    @model_validator(mode="after")
    def _is_a_tree(self) -> Self:
        tokens = sum(math.prod(self.widths[: i + 1]) for i in range(len(self.widths)))
        if tokens > MAX_TREE_TOKENS:
            raise ValueError(f"widths must give a tree of at most {MAX_TREE_TOKENS} tokens, but are {self.widths}")
        return self

    @property
    def drawn(self) -> Siblings:
        """Return how the children of a node are chosen at temperatures above 0, see siblings."""
        return self.siblings

    def check(self, run: RunFacts) -> None:
        super().check(run)
        if run.rule == "block" and self.rejection_rule != REJECTION:
            raise UserError(
                f"--rule block verifies chains, but --drafter {self.text} drafts a tree; use --rule recursive or match"
            )
        if run.rule == "k-sequential" and self.drawn != "sampled":
            raise UserError(
                f"--rule k-sequential needs independently sampled siblings, but --drafter {self.text} takes "
                f"{self.drawn} siblings; use --rule recursive"
            )


class SearchedTreeSpec(WidthsSpec, OutputsSpec):
    """Options of a fixed tree or, without widths, of the tree that tree_search finds.

    nodes: Largest number of tokens of a searched tree. outputs: Directory of stored target outputs for the search. If
    empty, the target completes prompts from the run's data.
    """

    nodes: int | None = Field(None, ge=1, le=MAX_TREE_TOKENS)

    @model_validator(mode="after")
    def _has_one_size(self) -> Self:
        if self.widths and self.model_fields_set & {"nodes", "outputs"}:
            raise ValueError("nodes, outputs: leave them out, because widths already give the tree")
        return self

    @property
    def reads_data(self) -> bool:
        return not self.widths and not self.outputs


class DynamicTreeSpec(WidthsSpec):
    """Options of a fixed tree or of EAGLE-2's dynamic tree.

    topk: Number of tokens that the draft reads on each level, and number of children of each of these tokens. None: the
    tree is not dynamic. depth: Number of levels of a dynamic tree. nodes: Number of tokens of a dynamic tree, which are
    the candidates whose paths are most probable.
    """

    topk: int | None = Field(None, ge=1, le=64)
    depth: int = Field(5, ge=1, le=16)
    nodes: int | None = Field(8, ge=1, le=MAX_TREE_TOKENS)

    @model_validator(mode="after")
    def _is_one_tree(self) -> Self:
        unused = {"depth"} if self.topk is None else {"widths", "siblings", "outputs"}
        if idle := self.model_fields_set & unused:
            raise ValueError(
                f"{', '.join(sorted(idle))}: depth works only with topk, which builds a new tree in each step; widths, "
                "siblings and outputs work only without topk"
            )
        if self.topk is None:
            return self
        most = self.topk + (self.depth - 1) * self.topk**2
        if (self.nodes or 0) > most:
            raise ValueError(
                f"nodes: give a number up to {most}, the largest number of tokens with topk {self.topk} and depth "
                f"{self.depth}"
            )
        return self

    @property
    def drawn(self) -> Siblings:
        return self.siblings if self.topk is None else "top"


@drafter("tree")
class TreeSpec(DynamicTreeSpec, SearchedTreeSpec, DraftModelSpec):
    @property
    def reads_data(self) -> bool:
        return self.topk is None and super().reads_data

    def build(self, context: "DrafterContext") -> "DrafterRun":
        from draftlab_research.drafting.dynamic_tree import DynamicTreeDrafter
        from draftlab_research.drafting.tree import TreeDrafter
        from draftlab_research.tree_search import parents_of

        model = context.own_engine(self, context.load_draft(self.text, self.draft))
        if self.topk is not None:
            reader = TreeDrafter(model, context.vocab, (0,), "top")
            return context.run(DynamicTreeDrafter(reader, self.topk, self.depth), model=model, ks=[self.nodes or 0])
        parents = parents_of(self, context, model)
        return context.run(
            TreeDrafter(model, context.vocab, parents, self.siblings),
            model=model,
            ks=[len(parents)],
        )


@drafter("parallel-tree")
class ParallelTreeSpec(SearchedTreeSpec, ParallelSpec):
    @model_validator(mode="after")
    def _has_a_size(self) -> Self:
        if not self.widths and not self.nodes:
            raise ValueError("give widths, or nodes (the largest number of tokens in the tree)")
        return self

    def build(self, context: "DrafterContext") -> "DrafterRun":
        from draftlab.model.parallel import trained_offsets
        from draftlab_research.drafting.parallel_tree import ParallelTreeDrafter
        from draftlab_research.tree_search import MAX_DEPTH, parents_of

        model = context.own_engine(self, context.load_draft(self.text, self.draft))
        trained = trained_offsets(context.draft_path(self.text, self.draft)) or MAX_DEPTH
        parents = parents_of(self, context, model, offsets=min(self.nodes or 0, MAX_DEPTH, trained))
        drafter = ParallelTreeDrafter(model, context.vocab, parents, self.siblings)
        return context.run(drafter, model=model, ks=[len(parents)], facts={"parallel": True})


@drafter("eagle-tree")
class EagleTreeSpec(DynamicTreeSpec, EagleHeadSpec):
    @model_validator(mode="after")
    def _has_a_shape(self) -> Self:
        if not self.widths and self.topk is None:
            raise ValueError("give widths or topk for a tree; for chains use --drafter eagle")
        if self.widths and "nodes" in self.model_fields_set:
            raise ValueError("nodes: works only with topk")
        return self

    def build(self, context: "DrafterContext") -> "DrafterRun":
        from draftlab_research.drafting.dynamic_tree import DynamicTreeDrafter
        from draftlab_research.drafting.eagle_tree import EagleTreeDrafter
        from draftlab_research.drafting.tree import full_tree

        head = self.head_drafter(context)
        if self.topk is not None:
            drafter = DynamicTreeDrafter(EagleTreeDrafter(head, (0,), "top"), self.topk, self.depth)
            return context.run(drafter, ks=[self.nodes or 0], facts=self.facts())
        parents = full_tree(self.widths)
        drafter = EagleTreeDrafter(head, parents, self.siblings)
        return context.run(drafter, ks=[len(parents)], facts=self.facts() | {"eagle": True})
