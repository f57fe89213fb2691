"""Search for the token tree with the highest predicted speed, from texts of the target and durations of passes."""

import numpy as np

from draftlab.acceptance.token_logprobs import score_offsets, score_tokens
from draftlab.console import note
from draftlab.drafters.context import DrafterContext
from draftlab.model.llama import Llama
from draftlab.model.parallel import mask_token
from draftlab_research.calibration import calibration_texts, pass_ms
from draftlab_research.drafting.tree import (
    PathShare,
    fastest_tree,
    full_tree,
    independent,
    observed,
)
from draftlab_research.trees import SearchedTreeSpec

RANKS = 8  # largest number of children of a node in a searched tree
MAX_DEPTH = 8


def parents_of(
    spec: SearchedTreeSpec, context: DrafterContext, model: Llama, offsets: int | None = None
) -> tuple[int, ...]:
    """Return the parent of each node of the tree to draft, see generate.Draft.

    The tree has the widths of `spec`. Without widths, it is the tree with the highest predicted speed.

    offsets: Largest depth of the tree of a parallel draft. None: the draft is not parallel.
    """
    target = context.own_engine(spec, context.target)
    if spec.widths:
        return full_tree(spec.widths)
    nodes, depth = spec.nodes or 0, offsets or MAX_DEPTH
    share = _path_shares(spec, context, model, offsets)
    widths = sorted({1, 2, 4, 8, nodes + 1, 1 if offsets is None else 2 * depth})
    ms = pass_ms(context, {"draft": model, "target": target}, widths)

    def step_ms(levels: int, tokens: int, accepted: float) -> float:
        """Return the milliseconds of drafting and verifying a tree of `tokens` tokens on `levels` levels.

        A parallel draft runs one pass over the tokens that the last step emitted and levels - 1 mask tokens. Any other
        draft runs one pass per level, which is timed as a pass over one token.

        accepted: Expected number of tokens that a step emits.
        """
        drafts, read = (levels, 1) if offsets is None else (1, accepted + levels - 1)
        return drafts * np.interp(read, widths, ms["draft"]) + np.interp(tokens + 1, widths, ms["target"])

    parents, speed = fastest_tree(share, step_ms, RANKS, nodes, depth)
    gain, shares = speed * ms["target"][0], ", ".join(f"{share((rank,)):.2f}" for rank in range(3))
    note(
        f"{spec.text}: {len(parents)} tokens with parents {', '.join(map(str, parents))} (0: the end of the text); "
        f"predicted speed-up {gain:.2f}; share of target tokens that the draft ranks 1, 2 and 3: {shares}"
    )
    return parents


def _path_shares(spec: SearchedTreeSpec, context: DrafterContext, model: Llama, offsets: int | None) -> PathShare:
    """Return a PathShare from calibration texts. For a parallel draft, whole paths are counted."""
    texts = calibration_texts(context, spec.outputs)
    if offsets is not None:
        scored = score_offsets(model, texts, context.vocab, context.sampling, offsets, mask_token(model))
        return observed([text.ranks for text in scored], offsets)
    ranks = np.concatenate([text.ranks for text in score_tokens(model, texts, context.vocab, context.sampling)])
    return independent([float(((ranks == rank).sum() + 1) / (len(ranks) + RANKS)) for rank in range(RANKS)])
