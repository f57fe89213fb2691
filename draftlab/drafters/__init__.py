"""The kinds of drafters, one module per kind without torch at import, and the names that plug-ins import."""

from draftlab.config.kinds import DrafterSpec, Input, RunFacts, drafter, split_at

__all__ = ["DrafterSpec", "Input", "RunFacts", "drafter", "split_at"]
