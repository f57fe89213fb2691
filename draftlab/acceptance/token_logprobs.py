"""Log-probabilities of a text's tokens, from one teacher-forced pass over the text, or several if memory is short.

For a parallel draft, packed passes give log-probabilities at every offset, see model/parallel.py. B texts in a pass, W
fed tokens of a text, n scored tokens of a text, K offsets, V vocab.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from draftlab.acceptance import expected
from draftlab.engine.verify import distribution
from draftlab.errors import UserError
from draftlab.model.decoder import Decoder
from draftlab.model.parallel import pack
from draftlab.sampling import SamplingParams

MAX_LOGITS = 1 << 25  # most logits of a pass over several texts; larger passes are not faster
BYTES_PER_LOGIT = 16  # peak memory of the model's own logits, a copy in fp32, and probabilities

Index = tuple[np.ndarray | slice | int, ...]  # of an array
Text = tuple[np.ndarray, np.ndarray]  # prompt and completion ids


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A drafter's log-probability and rank of each of the n tokens of a completion.

    The arrays are [n], or [n, K] if they depend on the position in a draft of K tokens. Entry [i, a] is then for token
    i as drafted token a + 1. If a draft of fewer tokens need not be the beginning of a longer draft, the arrays are
    [n, K, K], and entry [i, a, k - 1] is for steps that draft at most k tokens, see by_k.
    """

    logprobs: np.ndarray  # log-probability in the distribution that the drafter would sample from
    ranks: np.ndarray  # number of more probable tokens; ties go to the lowest id
    # length of the draft of a step that begins at each token, [n], or [n, K] in by_k; None: always K
    drafted: np.ndarray | None = None
    # whether the draft model drafts in a step that begins at each token, [n]; None: it does so in every step, or the
    # drafter has no draft model
    modelled: np.ndarray | None = None

    @classmethod
    def unlikely(cls, n: int, k: int, vocab: int) -> "TokenLogprobs":
        """Return arrays [n, k] in which all tokens have probability 0 and the rank `vocab`."""
        return cls(np.full((n, k), -np.inf), np.full((n, k), vocab))

    @classmethod
    def by_k(cls, results: Sequence["TokenLogprobs"], vocab: int) -> "TokenLogprobs":
        """Join the results of a drafter that drafts at most 1, 2, ..., K tokens, with arrays [n, k] for each k."""
        n, most = results[-1].logprobs.shape
        joined = cls(np.full((n, most, most), -np.inf), np.full((n, most, most), vocab))
        for k, result in enumerate(results, 1):
            joined.put((slice(None), slice(k), k - 1), result)
        drafted = [result.drafted for result in results if result.drafted is not None]
        return replace(joined, drafted=np.stack(drafted, 1)) if drafted else joined

    def at(self, k: int) -> "TokenLogprobs":
        """Return the result for steps that draft at most k tokens. The arrays are [n] or [n, k] then."""
        if self.logprobs.ndim < 3:
            return self
        drafted = None if self.drafted is None else self.drafted[:, k - 1]
        logprobs, ranks = self.logprobs[:, :k, k - 1], self.ranks[:, :k, k - 1]
        return replace(self, logprobs=logprobs, ranks=ranks, drafted=drafted)

    def put(self, index: Index, own: "TokenLogprobs") -> None:
        self.logprobs[index], self.ranks[index] = own.logprobs, own.ranks

    def chances(self, log_p: np.ndarray) -> np.ndarray:
        """Return the probability that each token is accepted, see expected.chances. log_p: The target's, [n]."""
        return expected.chances(self.logprobs.T, log_p).T


def score_tokens(
    model: Decoder,
    texts: Sequence[Text],
    vocab: int,
    sampling: SamplingParams,
    advance: Callable[[int], None] = lambda done: None,
    memory: float = 2.0,
) -> list[TokenLogprobs]:
    """Return log-probability and rank of each token of a completion, after its prompt, as arrays [n] for each text.

    The longest texts are scored first.

    Args:
        vocab: Number of ids; further logits are padding.
        advance: Function that is called with the number of scored texts.
        memory: Gigabytes for the logits of a pass.

    Raises:
        UserError: A text is longer than the model's context.
    """
    check_fits(model, texts)
    scored: list[TokenLogprobs] = [TokenLogprobs(*np.zeros((2, 0)))] * len(texts)
    order = sorted(
        (i for i, (_, completion) in enumerate(texts) if len(completion)),
        key=lambda i: -_length(texts[i]),
    )
    done, limit = 0, max_positions(vocab, memory)
    while done < len(order):
        rows = max(1, min(MAX_LOGITS // vocab, limit) // _length(texts[order[done]]))
        batch = order[done : done + rows]
        for i, result in zip(batch, _score([texts[i] for i in batch], model, vocab, sampling, limit), strict=True):
            scored[i] = result
        done += len(batch)
        advance(done)
    return scored


def check_fits(model: Decoder, texts: Sequence[Text]) -> None:
    """Check that all texts fit into the model's context. Raises UserError: a text is longer."""
    longest = max((_length(text) for text in texts), default=0)
    if longest > model.context + 1:  # the last token is not fed
        raise UserError(
            f"a text has {longest} tokens with its prompt, but the model's context has only {model.context}; use "
            "shorter texts"
        )


def counted(texts: Sequence[Text], advance: Callable[[int], None]) -> Iterator[Text]:
    """Yield each text. Then call `advance` with the number of texts that the caller has scored."""
    for done, text in enumerate(texts, 1):
        yield text
        advance(done)


def whole_text(text: Text) -> Tensor:
    """Return the token ids of a prompt and its completion as one tensor."""
    return torch.from_numpy(np.concatenate(text).astype(np.int64))


def max_positions(vocab: int, memory: float) -> int:
    """Return the number of positions whose logits fit into `memory` gigabytes."""
    return max(1, int(memory * 1e9 / (BYTES_PER_LOGIT * vocab)))


@torch.inference_mode()
def logits_in_parts(model: Decoder, ids: Tensor, first: int, limit: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the logits of ids [B, W] from position `first` on, in parts of t positions.

    Each item is the first position of a part, and the part's logits, [B, t, V]. B times t is at most `limit`, unless t
    is 1. If there are several parts, a KV cache connects them.
    """
    rows, width = ids.shape
    step = max(1, limit // rows)
    if width - first <= step:
        yield first, model.forward_uncached(ids, width - first)
        return
    cache = model.new_cache(rows, width)
    if first:
        model.forward(ids[:, :first], cache, last=1)
    for at in range(first, width, step):
        part = ids[:, at : at + step]
        yield at, model.forward(part, cache, last=part.shape[1])


def _score(texts: list[Text], model: Decoder, vocab: int, sampling: SamplingParams, limit: int) -> list[TokenLogprobs]:
    width = max(map(_length, texts)) - 1  # nothing follows the last token
    # padding comes after a row's text, so causal attention never reads it
    ids = torch.zeros(len(texts), width, dtype=torch.long)
    for row, text in zip(ids, texts, strict=True):
        row[: _length(text) - 1] = whole_text(text)[:-1]
    first = min(len(prompt) for prompt, _ in texts) - 1
    parts: list[list[TokenLogprobs]] = [[] for _ in texts]
    for at, logits in logits_in_parts(model, ids.to(model.device), first, limit):
        for row, text, scored in zip(logits[..., :vocab], texts, parts, strict=True):
            # the logits at the prompt's last token predict the completion's first token
            low, high = max(len(text[0]) - 1, at), min(_length(text) - 1, at + len(row))
            if low < high:
                tokens = whole_text(text)[low + 1 : high + 1].to(row.device)
                scored.append(token_logprobs(row[low - at : high - at].float(), tokens, sampling))
    return [_concatenated(scored) for scored in parts]


def _concatenated(parts: list[TokenLogprobs]) -> TokenLogprobs:
    logprobs = np.concatenate([part.logprobs for part in parts])
    return TokenLogprobs(logprobs, np.concatenate([part.ranks for part in parts]))


def token_logprobs(logits: Tensor, tokens: Tensor, sampling: SamplingParams) -> TokenLogprobs:
    """Return log-probability and rank of tokens [n] under logits [n, V]. Logits that are not finite give NaN."""
    own = logits.gather(1, tokens[:, None])  # [n, 1]
    lower_ids = torch.arange(logits.shape[1], device=logits.device) < tokens[:, None]
    ranks = ((logits > own) | ((logits == own) & lower_ids)).sum(1)
    if sampling.temperature == 0:
        logprobs = torch.where(ranks == 0, 0.0, -torch.inf)
    else:
        logprobs = distribution(logits, sampling).gather(1, tokens[:, None]).squeeze(1).log()
    logprobs = logprobs.masked_fill(~logits.amax(-1).isfinite(), torch.nan)
    return TokenLogprobs(logprobs.cpu().numpy(), ranks.cpu().numpy())


def _length(text: Text) -> int:
    return len(text[0]) + len(text[1])


@torch.inference_mode()
def score_offsets(
    model: Decoder,
    texts: Sequence[Text],
    vocab: int,
    sampling: SamplingParams,
    offsets: int,
    token: int,
    advance: Callable[[int], None] = lambda done: None,
    memory: float = 2.0,
) -> list[TokenLogprobs]:
    """Return log-probability and rank of each token at each offset of a parallel draft, as arrays [n, K] for each text.

    Entry [i, a] is for token i of the n tokens of the completion, predicted from the text up to token i - a - 1, which
    is a + 1 tokens earlier. If that token is before the prompt's last token, the probability is 0.

    Args:
        offsets: Number of offsets, K.
        token: Id of the mask token. All other arguments are those of score_tokens.

    Raises:
        UserError: A text is longer than the model's context.
    """
    check_fits(model, texts)
    step = max(1, max_positions(vocab, memory) // offsets)
    scored = []
    for text in counted(texts, advance):
        whole, first = whole_text(text).to(model.device), len(text[0]) - 1
        last = len(whole) - 1
        result = TokenLogprobs.unlikely(last - first, offsets, vocab)
        for at in range(first, last, step):  # a pass predicts after `step` positions
            end = min(at + step, last)
            depths = torch.zeros(1, last, dtype=torch.long, device=model.device)
            depths[0, at:end] = (last - torch.arange(at, end)).clamp_max(offsets)
            packed = pack(whole[None, :-1], depths, token)
            logits = model.forward_uncached(packed.ids, packed.ids.shape[1] - at, packed.tree())
            own = token_logprobs(
                logits[0, packed.predicting - at, :vocab].float(),
                whole[packed.predicted + 1],
                sampling,
            )
            positions, ages = (packed.predicted - first).cpu(), (packed.offset - 1).cpu()
            result.put((positions.numpy(), ages.numpy()), own)
        scored.append(result)
    return scored
