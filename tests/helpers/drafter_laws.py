"""What every drafter must do: it is lossless, keeps to the draws of each row, and says what it sampled from."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftlab.acceptance import expected
from draftlab.acceptance.token_logprobs import score_tokens
from draftlab.engine.generate import Drafter, decode, output_tokens, speculative_decode
from draftlab.engine.verify import draw
from draftlab.heads.dflash.decoder import DFlash
from draftlab.heads.dflash.drafter import DFlashDrafter
from draftlab.heads.dflash.layout import DFlashShape
from draftlab.heads.eagle3.decoder import EagleLlama
from draftlab.heads.eagle3.drafter import EagleDrafter
from draftlab.heads.eagle3.layout import Head, HeadShape
from draftlab.model import llama
from draftlab.model.decoder import Decoder
from draftlab.model.hf_files import write_head_ids
from draftlab.sampling import SamplingParams
from helpers.builders import build
from helpers.head_texts import random_weights

VOCAB = 307
PROMPTS = [[0, 17, 44, 101, 9, 17, 44], [0, 5, 250, 31, 66, 3, 8, 12, 99], [0, 90, 91]]
EAGLE: dict[str, Any] = {
    "hidden": 64,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 12,
    "ffn": 88,
    "eps": 1e-6,
    "context": 256,
    "rope": {"rope_type": "default", "rope_theta": 10000.0},
    "vocab": VOCAB,
    "draft_vocab": 102,
    "target_hidden": 64,
    "layer_ids": (1, 2, 3),
    "norm_before_residual": False,
}
Score = Callable[[list[tuple[np.ndarray, np.ndarray]], SamplingParams], Sequence[Any]]


def save_models(root: Path, noise: float = 0.02, head_ids: Sequence[int] = ()) -> dict[str, llama.Llama]:
    """Return the target, the target with noise, which agrees now and then, and the same as a parallel draft.

    head_ids: Ids of a trimmed head of the drafts.
    """
    target, noisy = build("llama", 1, num_hidden_layers=3), build("llama", 1, num_hidden_layers=3)
    torch.manual_seed(5)
    with torch.no_grad():
        for p in noisy.parameters():
            p.add_(torch.randn_like(p) * noise)
    for name, model in (("target", target), ("noisy", noisy)):
        model.save_pretrained(root / name)
    if head_ids:
        write_head_ids(root / "noisy", head_ids)
    loaded = {name: llama.load(Path(root / name), torch.float32) for name in ("target", "noisy")}
    loaded["parallel"] = llama.load(Path(root / "noisy"), torch.float32)
    loaded["parallel"].pard_token = 2
    return loaded


def eagle_drafter(target: llama.Llama) -> EagleDrafter:
    return EagleDrafter(target, random_head(target, HeadShape(**EAGLE)))


def random_head(target: llama.Llama, config: HeadShape, kind: Any = EagleLlama) -> Any:
    """Return a head of random weights, whose output layer is the target's, over a third of the ids."""
    weights = random_weights(config.sizes(), 4, 0.1)
    ids = torch.arange(0, 3 * 102, 3)
    weights["lm_head.weight"], weights["norm.weight"] = target.head[ids], torch.ones(64)
    head = Head(config=config, weights=weights, ids=ids, embedding=None)
    return kind(head, target.embed, Path("head"))


def dflash_drafter(target: llama.Llama) -> DFlashDrafter:
    """Return a drafter with a head of random weights, a full and a sliding layer, and a third of the target's ids."""
    config = DFlashShape(
        layers=2,
        hidden=64,
        heads=8,
        kv_heads=4,
        head_dim=12,
        ffn=88,
        eps=1e-6,
        context=256,
        vocab=VOCAB,
        draft_vocab=102,
        layer_ids=(1, 3),
        block_size=7,
        mask_token_id=2,
        windows=(None, 6),
        causal=(False, True),
    )
    weights = random_weights(config.sizes(), 4, 0.1)
    ids = torch.arange(0, 3 * 102, 3)
    weights["norm.weight"] = torch.ones(64)
    rope = 1 / 10000 ** (torch.arange(0, 12, 2) / 12), 1.0
    return DFlashDrafter(target, DFlash(config, weights, target.embed, target.head[ids], ids, rope))


def check_greedy(target: llama.Llama, drafter: Drafter, k: int) -> None:
    """Greedy decoding with any drafter is plain decoding, in a batch of four whose rows end at different steps."""
    sampling = SamplingParams(max_tokens=32)
    prompts = [*PROMPTS, [0, 7]]
    whole = output_tokens(decode(target, prompts, sampling))
    lengths = set()
    for stops in ((), (whole[0][5],), (whole[1][9],), (whole[0][5], whole[3][2])):
        sampling = replace(sampling, stop_token_ids=stops)
        expected = output_tokens(decode(target, prompts, sampling))
        assert output_tokens(speculative_decode(target, drafter, prompts, k, sampling)) == expected
        lengths.update(map(len, expected))
    assert len(lengths) > 2


def check_rows(target: llama.Llama, drafter: Drafter) -> None:
    """Check that the samples of a row do not depend on the other rows."""
    sampling = SamplingParams(max_tokens=24, temperature=0.8, seed=3)
    together = output_tokens(speculative_decode(target, drafter, PROMPTS, 3, sampling))
    alone = [
        output_tokens(speculative_decode(target, drafter, [prompt], 3, sampling, numbers=[i]))[0]
        for i, prompt in enumerate(PROMPTS)
    ]
    assert together == alone


def check_q(target: llama.Llama, drafter: Drafter) -> None:
    """Check that inverse CDF gives the tokens back from q and the drafter's draws."""
    uniform = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    drafter.reset(3, 40)
    drafter.attach(target.new_cache(3, 40))
    draft = drafter.propose(PROMPTS, 4, SamplingParams(temperature=0.9, top_k=50), uniform)
    assert draft.q is not None
    assert torch.equal(draw(draft.q, uniform[:, : draft.ids.shape[1]]), draft.ids)


def check_greedy_replay(target: llama.Llama, drafter: Drafter, score: Score, k: int) -> None:
    """Replay of greedy texts expects the passes and accepted tokens of every live row."""
    sampling = SamplingParams(max_tokens=40)
    texts = output_tokens(decode(target, PROMPTS, sampling))
    pairs = [(np.array(p), np.array(text)) for p, text in zip(PROMPTS, texts, strict=True)]
    chances = [np.exp(each.logprobs)[1:] for each in score(pairs, sampling)]
    counts = expected.chain(expected.texts_of(chances), k)
    live = list(speculative_decode(target, drafter, PROMPTS, k, sampling))
    for row in range(len(PROMPTS)):
        own = [step for step in live if step.row == row][1:]
        assert len(own) == counts.passes[row]
        assert sum(step.accepted for step in own) == counts.accepted[row]
    assert counts.reached[:, min(2, k)].sum() > 0  # later tokens are accepted, too


def replay_errors(
    target: llama.Llama, drafter: Drafter, score: Score, sampling: SamplingParams, k: int, rows: int
) -> tuple[float, float]:
    """Return how many standard errors replay is off the passes that sampling counts.

    The second is that of a control, in which tokens of all ages have the chances of the first.
    """
    steps = list(speculative_decode(target, drafter, [PROMPTS[0]] * rows, k, sampling))
    assert sum(step.accepted for step in steps) > rows
    pairs = [(np.array(PROMPTS[0]), np.array(text)) for text in output_tokens(steps)]
    log_p = [each.logprobs for each in score_tokens(target, pairs, VOCAB, sampling)]
    log_q = [each.logprobs for each in score(pairs, sampling)]
    chances = [expected.chances(q, p[:, None])[1:] for q, p in zip(log_q, log_p, strict=True)]
    live = np.array([sum(step.row == row for step in steps) - 1 for row in range(rows)])

    def error(chances: list[np.ndarray]) -> float:
        differences = live - expected.chain(expected.texts_of(chances), k).passes
        return abs(differences.mean()) / (differences.std(ddof=1) / rows**0.5)

    return error(chances), error([np.repeat(row[:, :1], k, 1) for row in chances])


class Bigrams(Decoder):
    """A context-free model of few ids; any cache will do."""

    device = torch.device("cpu")
    context = 100

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def new_cache(self, rows: int, capacity: int) -> llama.Cache:
        return llama.Cache(torch.zeros(1, rows, 1, capacity, 1), torch.zeros(1, rows, 1, capacity, 1))

    def forward(self, ids: Tensor, cache: llama.Cache, last: int = 0, tree: object = None) -> Tensor:
        cache.used = [used + ids.shape[1] for used in cache.used]
        return self.logits[ids][:, -last:]
