"""The drafter latest-lookup: prompt lookup that copies from the latest match, and repeats a loop to any length."""

from typing import TYPE_CHECKING

from draftlab.drafters import drafter
from draftlab.drafters.prompt_lookup import LookupSpec

if TYPE_CHECKING:
    from draftlab.engine.drafters.ngram import TextDrafter


@drafter("latest-lookup")
class LatestLookupSpec(LookupSpec):
    def lookup(self) -> "TextDrafter":
        from draftlab.engine.drafters.ngram import LatestLookupDrafter

        return LatestLookupDrafter(self.prompt_lookup_max)

    acceptance = LookupSpec.copies
