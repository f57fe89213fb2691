"""Kinds of drafters and their options, one module per kind; and the names that plug-ins import. Torch is not loaded."""

from draftlab.config.kinds import DrafterSpec, Input, RunFacts, drafter, split_at

__all__ = ["DrafterSpec", "Input", "RunFacts", "drafter", "split_at"]
