"""Measure how much acceptance a trimmed LM head loses: python -m benchmarks.trimmed_head STORE DRAFT...

[--sizes 4k,8k,16k,32k] [--texts 96]

Each head has the most frequent ids in the first half of a store of target outputs, as prune --vocab --outputs counts
them. Drafts are replayed on texts of the second half, with the target's sampling. The logits of a trimmed head are
those of the complete head without the other ids, so one pass serves all heads. The last line is one JSON object:

acceptance: mean probability that a token of the target is accepted.
share_of_whole: acceptance divided by that of the complete head, with its 95 % interval over texts.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks import environment
from draftlab.acceptance.expected import chances
from draftlab.console import progress
from draftlab.engine.verify import distribution
from draftlab.intervals import ratio
from draftlab.model import checkpoint, llama
from draftlab.model.shape import parse_vocab
from draftlab.model.trimmed_head import frequent_ids, only, template_ids
from draftlab.target_outputs.outputs import TargetOutput
from draftlab.target_outputs.store import read_store


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store", type=Path)
    parser.add_argument("drafts", type=Path, nargs="+")
    parser.add_argument("--sizes", default="4k,8k,16k,32k")
    parser.add_argument("--texts", type=int, default=96)
    options = parser.parse_args()
    store = read_store(options.store)
    half = len(store.outputs) // 2
    counted, replayed = (
        [o.ids for o in store.outputs[:half]],
        [o for o in store.outputs[half:] if len(o.ids) > 1],
    )
    replayed = replayed[:: max(1, len(replayed) // options.texts)][: options.texts]
    special = template_ids(checkpoint.load_tokenizer(store.vocabulary)) | set(
        checkpoint.eos_token_ids(store.vocabulary)
    )
    heads: dict[str, Tensor | None] = {"all": None}
    for size in options.sizes.split(","):
        ids = frequent_ids(counted, parse_vocab(size), store.manifest.vocab, special)[0]
        heads[size] = torch.tensor(ids)
    written = np.concatenate([o.ids for o in replayed])
    rows = {
        size: {
            "coverage": 1.0 if ids is None else float(np.isin(written, ids.numpy()).mean()),
            "drafts": {},
        }
        for size, ids in heads.items()
    }
    for draft in options.drafts:
        found = accepted(draft, replayed, heads, store.manifest.sampling)
        for size, by_text in found.items():
            change = ratio(np.stack([by_text, found["all"]], 1))
            rows[size]["drafts"][draft.name] = {
                "acceptance": float(by_text.sum() / sum(len(o.ids) for o in replayed)),
                "share_of_whole": [change.value, change.low, change.high],
            }
    facts = {
        "counted_tokens": sum(map(len, counted)),
        "texts": len(replayed),
        "tokens": len(written),
        "heads": rows,
    }
    print(json.dumps(facts | {"benchmark": "trimmed_head"} | environment(torch.get_num_threads())))


@torch.inference_mode()
def accepted(
    draft: Path, texts: list[TargetOutput], heads: dict[str, Tensor | None], sampling
) -> dict[str, np.ndarray]:
    """Return the expected number of accepted tokens of each text, by head. heads: Ids of each head; None for all."""
    model = llama.load(draft, torch.bfloat16)
    sums = {size: np.zeros(len(texts)) for size in heads}
    with progress(draft.name, len(texts)) as advance:
        for number, text in enumerate(texts):
            ids = torch.from_numpy(np.concatenate([text.prompt, text.ids])[:-1].astype(np.int64))
            logits = model.forward_uncached(ids.unsqueeze(0), len(text.ids))[0].float()
            tokens = torch.from_numpy(text.ids.astype(np.int64)).unsqueeze(1)
            assert text.logprobs is not None
            for size, head in heads.items():
                q = distribution(logits if head is None else only(logits, head), sampling)
                log_q = q.gather(1, tokens).squeeze(1).log().numpy()
                sums[size][number] = chances(log_q, text.logprobs).sum()
            advance(number + 1, "texts")
    return sums


if __name__ == "__main__":
    main()
