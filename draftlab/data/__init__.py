"""Text: documents of sources, token batches to train on, held-out windows and prompts."""

from draftlab.data.batches import (
    Batch,
    DynamicBatches,
    HeldOut,
    TokenBatches,
    TopLogprobs,
    heldout_prompts,
    open_batches,
    open_heldout,
    text_batch,
    tokenize,
)
from draftlab.data.sources import (
    TEXT_COLUMNS,
    Document,
    documents,
    first_source,
    parse_mixture,
    sample_texts,
    take_bytes,
    without_heldout_lines,
)

__all__ = [
    "TEXT_COLUMNS",
    "Batch",
    "Document",
    "DynamicBatches",
    "HeldOut",
    "TokenBatches",
    "TopLogprobs",
    "documents",
    "first_source",
    "heldout_prompts",
    "open_batches",
    "open_heldout",
    "parse_mixture",
    "sample_texts",
    "take_bytes",
    "text_batch",
    "tokenize",
    "without_heldout_lines",
]
