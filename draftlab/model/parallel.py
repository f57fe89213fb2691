"""Parallel drafts (PARD, An et al. 2025, 2504.18583): one pass predicts K tokens, all but the first from mask tokens.

B rows (texts of a batch), T tokens of text, L tokens of a packed pass, N predictions, K drafted tokens. From the text
up to position t, a draft predicts the tokens at t + 1, ..., t + K. The prediction at offset j is the prediction of the
token at t + j. It reads the text up to t, and j - 1 mask tokens at positions t + 1, ..., t + j - 1.

A packed pass computes these predictions for all positions t at once. Its tokens are the text, then the mask tokens of
every position. A 2-D attention mask lets each token read only the tokens that its prediction depends on.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.model import checkpoint
from draftlab.model.decoder import Decoder, Tree
from draftlab.model.llama import Llama

# keys of config.json; only draftlab writes pard_offsets
PARD_TOKEN = "pard_token"
SPD_TYPE = "spd_type"
OFFSETS = "pard_offsets"
RESERVED = ("reserved", "unused", "<|extra")  # names of reserved tokens contain one of these words


@dataclass(frozen=True, slots=True)
class Packed:
    """The tokens of a packed pass, and its predictions in the order of the predicted tokens."""

    ids: Tensor  # [B, L]
    positions: Tensor  # [B, L]
    mask: Tensor  # [B, L, L] bool, whether token i attends to token j
    predicting: Tensor  # [N] indices of the predictions' logits, in [B, L] flattened
    predicted: Tensor  # [N] indices of the tokens before the predicted tokens, in [B, T] flattened
    offset: Tensor  # [N] offset of each prediction, from 1 to K

    def tree(self) -> Tree:
        """Return the first row as a token tree for Llama.forward. `positions` has the depth of each token."""
        return Tree(self.positions[0], self.mask[0])


def pack(ids: Tensor, depths: Tensor, token: int, positions: Tensor | None = None) -> Packed:
    """Return a packed pass over the texts `ids`, [B, T].

    Rows with few mask tokens are padded with mask tokens that predict nothing.

    Args:
        depths: Number of tokens to predict after each position, [B, T], 0 or more.
        token: The mask token.
        positions: Position of each token in its sequence, [B, T], if a row consists of several sequences. Attention
            does not cross sequences. Default: each row is one sequence.
    """
    rows, length = ids.shape
    device = ids.device
    masks = (depths - 1).clamp_min(0)  # [B, T] mask tokens of each position
    width = length + int(masks.sum(1).max())
    # flat index of the text token after which each mask token's chain starts
    place = torch.arange(rows * length, device=device).repeat_interleave(masks.flatten())
    row = place // length
    count = masks.flatten().cumsum(0)
    nth = torch.arange(len(place), device=device)
    own = nth - (count - masks.flatten())[place] + 1  # 1, 2, ... within the chain
    # number of mask tokens in earlier rows
    before = torch.cat([count.new_zeros(1), count.view(rows, length)[:, -1]])[:-1]
    column = length + nth - before[row]
    # [B, L]; unused columns start after the text
    start = torch.arange(width, device=device).repeat(rows, 1)
    nested = (start >= length).long()  # 0: text; i: mask token i of its chain
    start[row, column] = place % length
    nested[row, column] = own
    packed = torch.full((rows, width), token, device=device)
    packed[:, :length] = ids
    # [B, query, key]
    attends_text = (nested == 0).unsqueeze(1) & (start.unsqueeze(1) <= start.unsqueeze(2))
    same_start = start.unsqueeze(1) == start.unsqueeze(2)
    attends_masks = same_start & (nested > 0).unsqueeze(1) & (nested.unsqueeze(1) <= nested.unsqueeze(2))
    at = start.clamp_max(length - 1)
    if positions is None:
        places = at + nested
    else:
        sequence = (positions == 0).cumsum(1).gather(1, at)
        attends_text &= sequence.unsqueeze(1) == sequence.unsqueeze(2)
        places = positions.gather(1, at) + nested
    text = depths.flatten().nonzero().squeeze(1)  # text tokens that predict the next token
    predicting = torch.cat([text // length * width + text % length, row * width + column])
    predicted = torch.cat([text, place + own])
    offset = torch.cat([torch.ones_like(text), own + 1])
    order = predicted.argsort(stable=True)
    return Packed(
        packed,
        places,
        attends_text | attends_masks,
        predicting[order],
        predicted[order],
        offset[order],
    )


def pard_token(directory: Path) -> int | None:
    """Return the mask token's id from config.json of a parallel draft, or None if it has no such id.

    Raises:
        UserError: the id is not in the vocabulary.
    """
    token = checkpoint.read_config(directory).get(PARD_TOKEN)
    if token is None:
        return None
    vocab = checkpoint.vocab_size(directory)
    if not isinstance(token, int) or not 0 <= token < vocab:
        raise UserError(
            f"{directory / 'config.json'}: {PARD_TOKEN} is {token!r}, but must be an id of the vocabulary, from 0 to "
            f"{vocab - 1}"
        )
    return token


def trained_offsets(directory: Path) -> int | None:
    """Return K, the number of drafted tokens for which a parallel draft was trained, or None if it is unknown."""
    offsets = checkpoint.read_config(directory).get(OFFSETS)
    return offsets if isinstance(offsets, int) else None


def unused_id(directory: Path, vocab: int) -> int:
    """Return an id below `vocab` that texts do not contain, for use as the mask token.

    The first choice is an id without a token. The second is a special token that has no role, such as bos, and is
    not in the chat template. The last is the pad token, unless it is also bos, eos or unk.

    Raises:
        UserError: there is no such id. A new id would not help, because servers refuse drafts with ids that the target
            lacks.
    """
    tokenizer = checkpoint.load_tokenizer(directory)
    known = set(tokenizer.get_vocab().values())
    free = next((i for i in range(vocab) if i not in known), None)
    if free is not None:
        return free
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    roles = {str(name) for name in tokenizer.special_tokens_map.values()}
    idle = [
        i
        for i, token in tokenizer.added_tokens_decoder.items()
        if token.special and i < vocab and token.content not in roles and token.content not in template
    ]
    if idle:
        names = {i: str(tokenizer.added_tokens_decoder[i]) for i in idle}
        return max(idle, key=lambda i: (any(word in names[i] for word in RESERVED), i))
    special = checkpoint.special_ids(tokenizer)
    pad = special["pad"]
    if pad is not None and pad < vocab and pad not in (special["bos"], special["eos"], tokenizer.unk_token_id):
        return pad
    raise UserError(
        f"{directory}: the tokenizer has no unused id for the mask token; choose an id with --student "
        "parallel:token=ID or --student dflash:mask_token_id=ID"
    )


def mask_token(model: Decoder) -> int:
    """Return the mask token of a parallel draft. Raises UserError: the model is not a parallel draft."""
    token = model.pard_token if isinstance(model, Llama) else None
    if token is None:
        raise UserError(
            "the draft is not a parallel draft, because config.json has no pard_token; train a parallel draft with "
            "draftlab distill --student parallel"
        )
    return token
