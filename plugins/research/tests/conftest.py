"""Make the fixtures of draftlab's own tests available to the plug-in's tests."""

from tests.conftest import brief_warm_ups, family_dirs, tokenizer_dir
from tests.drafters.conftest import context, corpus, eagle_head, parallel_draft, stored

__all__ = [
    "brief_warm_ups",
    "context",
    "corpus",
    "eagle_head",
    "family_dirs",
    "parallel_draft",
    "stored",
    "tokenizer_dir",
]
