"""AdaSPEC's token filter (Hu et al. 2025, 2510.19779): learn where there is something to gain.

A reference is a draft of the same shape that was distilled already. Of each batch the tokens count on which the draft
is furthest behind it: those that are hard for both are left to the target.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from draftlab.data import Batch


@dataclass(frozen=True, slots=True)
class Selection:
    """keep: share of the tokens that go on to count; the paper keeps 0.4."""

    reference: PreTrainedModel
    keep: float


def furthest_behind(batch: Batch, draft: Tensor, reference: Tensor, keep: float) -> Batch:
    """batch, of whose n tokens a share counts on: those with the largest loss [n] over the reference's."""
    gap = (draft - reference).double().cpu().numpy()
    counted = np.flatnonzero(batch.mask)
    dropped = counted[np.argsort(-gap, kind="stable")[round(keep * len(counted)) :]]
    mask = batch.mask.copy()
    mask.flat[dropped] = 0
    return Batch(batch.ids, mask, batch.top_logprobs)
