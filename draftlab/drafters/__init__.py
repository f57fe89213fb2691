"""The kinds of drafters: a module each, under the name of the kind, without torch; and what plug-ins need of them."""

from draftlab.config.kinds import DrafterSpec, Input, RunFacts, drafter, split_at

__all__ = ["DrafterSpec", "Input", "RunFacts", "drafter", "split_at"]
