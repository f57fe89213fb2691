"""Trimmed LM heads: a draft proposes only frequent ids, so its LM head takes less time.

The method is that of FR-Spec (Zhao et al. 2025, arXiv 2502.14856) and VocabTrim (Goel et al. 2025, arXiv 2506.22694).
The checkpoint keeps the complete LM head and embedding. head_ids.json lists the ids whose logits are computed. The
target still emits all ids, so trimming changes the acceptance rate but not the output.

V vocab, S ids of the trimmed head.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from draftlab.errors import UserError
from draftlab.model.hf_files import check_head_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BUFFERS = ("head_ids", "head_rows")


@dataclass(frozen=True, slots=True)
class TrimmedHead:
    """The ids of a trimmed LM head.

    Args:
        ids: Ids that have logits, [S].
        rows: For each id of the vocabulary, its index in `ids`, or S if it has no logit, [V].
    """

    ids: Tensor
    rows: Tensor

    @classmethod
    def of(cls, ids: Tensor, vocab: int) -> "TrimmedHead":
        rows = torch.full((vocab,), len(ids), device=ids.device)
        rows[ids] = torch.arange(len(ids), device=ids.device)
        return cls(ids, rows)


def frequent_ids(texts: Sequence[np.ndarray], size: int, vocab: int, special: Iterable[int]) -> tuple[list[int], float]:
    """Return the most frequent ids of the texts in ascending order, and an estimate of their coverage of new text.

    The estimate takes the `size` most frequent ids of the first half of the texts, and is the fraction of the tokens in
    the second half that have one of these ids. Of equally frequent ids, the lowest are taken, because BPE training adds
    frequent tokens first.

    Args:
        size: Number of ids to return.
        special: Ids that are always among the returned ids.

    Raises:
        UserError: size is not between the number of special ids and vocab, or there are fewer than two texts.
    """
    stays = sorted({i for i in special if i < vocab})
    check_head_size(size, vocab, len(stays))
    if len(texts) < 2:
        raise UserError(
            f"--vocab {size}: the number of texts in which frequent ids are counted is {len(texts)}, but must be at "
            "least 2; use more text"
        )

    def top(some: Sequence[np.ndarray]) -> np.ndarray:
        counts = np.bincount(np.concatenate(some).astype(np.int64), minlength=vocab)[:vocab].astype(np.float64)
        counts[stays] = np.inf
        return np.sort(np.argsort(-counts, kind="stable")[:size])

    half = len(texts) // 2
    coverage = float(np.isin(np.concatenate(texts[half:]), top(texts[:half])).mean())
    return top(texts).tolist(), coverage


def template_ids(tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """Return the ids of a tokenizer's special tokens, and of the added tokens that its chat template contains."""
    template = str(tokenizer.chat_template or "")
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.content in template}
    return added | set(tokenizer.all_special_ids)


def trim_model(model: "PreTrainedModel", ids: Sequence[int]) -> None:
    """Change a transformers model so that the logits of all ids that are not in `ids` are -inf."""
    head = output_head(model)
    weight = head.get_parameter("weight")
    trimmed = TrimmedHead.of(torch.tensor(ids, device=weight.device), len(weight))
    for name, buffer in zip(BUFFERS, (trimmed.ids, trimmed.rows), strict=True):
        head.register_buffer(name, buffer, persistent=False)

    def trim(head: nn.Module, _: object, logits: Tensor) -> Tensor:
        return only(logits, head.get_buffer(BUFFERS[0]))

    head.register_forward_hook(trim)


def only(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the logits [..., V] with -inf in place of the logits of all ids that are not in `ids`, [S]."""
    return torch.full_like(logits, -torch.inf).index_copy(-1, ids, logits.index_select(-1, ids))


def trimmed_head_of(model: "PreTrainedModel") -> TrimmedHead | None:
    """Return the TrimmedHead of a model that trim_model has changed, or None for another model."""
    buffers = dict(output_head(model).named_buffers())
    return TrimmedHead(*(buffers[name] for name in BUFFERS)) if BUFFERS[0] in buffers else None


def as_whole(
    config: dict[str, object], weights: Mapping[str, Tensor], ids: Sequence[int]
) -> tuple[dict[str, object], Iterator[tuple[str, Tensor]]]:
    """Return config and weights of the same draft with a complete LM head, for servers without trimmed heads.

    The new head is not tied to the embedding. Every id that is not in `ids` gets the same row: the mean of the rows of
    `ids`. Its logit is the mean of the logits of `ids`, so it is never the largest. In practice, all added ids together
    have less than a thousandth of the probability.

    weights: Mapping from names to tensors, such as checkpoint.Weights. ids: Ids of the trimmed head.

    Returns: The config, and an iterator over names and tensors.
    """

    def whole() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights.items():
            if name != "lm_head.weight":
                yield name, tensor
        name = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
        rows = weights[name]
        head = rows[list(ids)].float().mean(0).to(rows.dtype).expand_as(rows).clone()
        head[list(ids)] = rows[list(ids)]
        yield "lm_head.weight", head

    return config | {"tie_word_embeddings": False}, whole()


def output_head(model: "PreTrainedModel") -> nn.Module:
    """Return the LM head of a model: the module that computes its logits."""
    head = model.get_output_embeddings()
    assert head is not None  # every causal language model has one
    return head
