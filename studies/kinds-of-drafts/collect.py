"""Compare kinds of drafts of SmolLM2 after equal training, and adaptive K with fixed K: python -m benchmarks.rivals

FOLDER is the folder in which recipes/smollm2-published.yaml and then recipes/smollm2-rivals.yaml ran, or with --seeds
recipes/smollm2-rival-seeds.yaml, which trains each kind for a shorter time with three seeds. The last line is one JSON
object. Each row has the figures of a drafter's score on greedy requests, over plain decoding with the same weights of
the target.

over_draft, over_fallback: Speed-up of whole requests divided by that of the draft after ten stores of answers at the
best fixed K, alone and after prompt lookup, each at its own best K, as [value, low, high], paired by
requests.
training: What the draft or head learnt from: tokens of answers, CPU seconds of all its distillations on one core, and
held-out acceptance after the last of them. A draft's distillations include those of the drafts that it began as.

With --seeds, the rows are those of a kind by seed. tokens_per_pass: Of replays on the target's greedy answers, by K, as
[value, low, high] over the texts. over_draft: These divided by those of the draft of the same seed, paired by texts.
"""

import itertools
import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import bounds, drafting_row, environment
from benchmarks.published_draft import over_same_weights
from benchmarks.sheared import recorded
from benchmarks.smollm2 import scores, settings
from draftlab import intervals
from draftlab.acceptance.expected import Counts
from draftlab.intervals import Interval, ratio
from draftlab.provenance import read_record
from draftlab.results.ranking import speedup_ratio
from draftlab.target_outputs.replay import read_replay

DRAFT, FALLBACK = "10@int8", "fallback:draft=runs_distilled_10,draft_tokens=3@int8"
# the directory in the folder's runs of each draft or head that was trained
TRAINED = {
    DRAFT: "distilled/10",
    "parallel-2@int8": "rivals/parallel-2",
    "eagle:heads=runs_rivals_eagle-2": "rivals/eagle-2",
}
# with --seeds: kinds and seeds, whose directories are KIND-SEED, and K
KINDS, SEEDS, KS = ("draft", "parallel", "eagle"), ("0", "1", "2"), (2, 3, 4)


def main(
    folder: Annotated[Path, typer.Argument(help="Folder in which the recipes ran.")],
    seeds: Annotated[
        bool, typer.Option("--seeds", help="Compare the kinds on three seeds.")
    ] = False,
) -> None:
    found = by_seed(folder) if seeds else by_drafter(folder)
    print(json.dumps(found | environment(1)))


def by_drafter(folder: Path) -> dict[str, Any]:
    scored = scores(folder / "runs/rivals/score")
    rows = {score.name: drafting_row(over_same_weights(score)) for score in scored}
    by_name = {score.name: score for score in scored}
    for score in scored:
        rows[score.name] |= {
            "tokens_per_pass_by_k": {
                k: score.tokens_per_pass(k) for k in sorted(score.speculative)
            },
            "over_draft": bounds(speedup_ratio(score, by_name[DRAFT])),
            "over_fallback": bounds(speedup_ratio(score, by_name[FALLBACK])),
        }
    for name, place in TRAINED.items():
        rows[name]["training"] = training(folder, folder / "runs" / place)
    return {"benchmark": "rivals", "drafters": rows, "settings": settings(scored)}


def by_seed(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {kind: {} for kind in KINDS}
    runs = folder / "runs"
    names = [f"{kind}-{seed}" for kind, seed in itertools.product(KINDS, SEEDS)]
    replays = {name: read_replay(runs / "replay" / name) for name in names}
    for kind, seed in itertools.product(KINDS, SEEDS):
        lengths, over = {}, {}
        for k in KS:
            counts, others = (replays[f"{each}-{seed}"].counts(k) for each in (kind, "draft"))
            lengths[k] = bounds(ratio(np.stack([counts.tokens, counts.passes], 1)))
            over[k] = bounds(ratio_of_lengths(counts, others))
        learnt = training(folder, runs / f"{kind}-{seed}")
        found[kind][seed] = {"tokens_per_pass": lengths, "over_draft": over, "training": learnt}
    texts = len(replays[names[0]].texts)
    return {"benchmark": "rival_seeds", "texts": texts, "drafters": found}


def ratio_of_lengths(first: Counts, second: Counts) -> Interval:
    """Return the tokens per pass of the first draft divided by those of the second on the same texts."""
    # a ratio of rates of the same rows is that of two speed-ups over plain decoding of one token a second
    rates = [
        intervals.Timings(
            np.stack([each.tokens, each.passes], 1)[None], np.ones((len(each.tokens), 2))
        )
        for each in (first, second)
    ]
    return intervals.speedup_ratio(*rates, paired=True)


def training(folder: Path, place: Path) -> dict[str, Any]:
    """Return the tokens and CPU seconds of a draft's distillations, and its held-out acceptance after the last."""
    _, last, _ = recorded(place)
    tokens, seconds = 0, 0.0
    draft: Path | None = place
    while draft and (record := read_record(draft)) and record.command == "distill":
        config, notes, _ = recorded(draft)
        tokens, seconds = tokens + notes["tokens"], seconds + notes["cpu_seconds"]
        draft = folder / config["draft"] if config["draft"] else None
    return {"tokens": tokens, "cpu_seconds": seconds, "acceptance": last["after"]["acceptance"]}


if __name__ == "__main__":
    typer.run(main)
